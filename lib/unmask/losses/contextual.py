"""The objectives of contextual training: a chunk among chunks (local), a document among documents (global);
and InSeNT, which has no document-level term.

Several queries of a batch may ask about the same document. Every distinct document is therefore passed once
and `document_N` says which one a query belongs to: sums run over distinct documents. That masks duplicates by
construction (the paper's M^dup), and it keeps a copy of the gold chunk from being its own negative.

Shape suffixes: N queries · M distinct documents · C chunks per document · D dimensions · T queries of a tile.
"""

import torch
from torch import Tensor

from unmask.losses.contrastive import (
    check_margin,
    check_negatives,
    check_temperature,
    cosine,
    diagonal_mask,
    info_nce,
    mean_over_queries,
    no_negatives,
)


def sequence_loss(
    q_ND: Tensor,
    chunks_MCD: Tensor,
    document_N: Tensor,
    gold_N: Tensor,
    *,
    temperature: float = 0.02,
    chunk_mask_MC: Tensor | None = None,
) -> Tensor:
    """InfoNCE of each query's gold chunk against the chunks of its own document.

        L_seq = −(1/N) Σ_i log e^{s(q_i,c_i*)/τ} / Σ_k e^{s(q_i,c_ik)/τ}

    Args:
        q_ND: query embeddings, of any scale.
        chunks_MCD: chunk embeddings of the M distinct documents of the batch.
        document_N: index of each query's document, in 0..M−1.
        gold_N: index of each query's gold chunk within its document, in 0..C−1.
        temperature: τ, above 0.
        chunk_mask_MC: True where a chunk is real, False where it is padding; None if all are real.

    Returns:
        Scalar, mean over queries, in nats; float32, or float64 for float64 embeddings.

    Raises:
        ValueError: shapes do not fit together, an index is out of range, a gold chunk is padding, or the
            temperature is out of range.

    Source: pplx-embed, section 2.4; InSeNT (ConTEB, 2505.24782) calls it the in-sequence term.

    Example:
        >>> chunks = torch.eye(4).reshape(2, 2, 4)  # two documents of two chunks
        >>> queries = torch.eye(4)[[0, 3]]
        >>> loss = sequence_loss(queries, chunks, torch.tensor([0, 1]), torch.tensor([0, 1]), temperature=1.0)
        >>> f"{loss:.4f}"  # log(1 + 1/e): the other chunk of the document
        '0.3133'
    """
    sequence, _ = _chunk_losses(q_ND, chunks_MCD, document_N, gold_N, temperature, chunk_mask_MC)
    return sequence


def batch_loss(
    q_ND: Tensor,
    chunks_MCD: Tensor,
    document_N: Tensor,
    gold_N: Tensor,
    *,
    temperature: float = 0.02,
    chunk_mask_MC: Tensor | None = None,
    negatives_NM: Tensor | None = None,
) -> Tensor:
    """InfoNCE of each query's gold chunk against all chunks of all distinct documents of the batch.

        L_batch = −(1/N) Σ_i log e^{s(q_i,c_i*)/τ} / Σ_j Σ_k e^{s(q_i,c_jk)/τ},   j over distinct documents

    Arguments, result and errors are those of `sequence_loss`. The paper's j runs over queries, which would
    count the chunks of a document once per query that asks about it; here every chunk counts once. Where
    `negatives_NM` (booleans) is False, no chunk of document m is a negative of query n (CDE, section 4.1);
    what it says of a query's own document does not matter.

    Source: pplx-embed, section 2.4. Unlike InSeNT's in-batch term, it includes the own document.

    Example:
        >>> chunks = torch.eye(4).reshape(2, 2, 4)
        >>> queries = torch.eye(4)[[0, 3]]
        >>> loss = batch_loss(queries, chunks, torch.tensor([0, 1]), torch.tensor([0, 1]), temperature=1.0)
        >>> f"{loss:.4f}"  # log(1 + 3/e): the three other chunks of the batch
        '0.7437'
    """
    _, batch = _chunk_losses(q_ND, chunks_MCD, document_N, gold_N, temperature, chunk_mask_MC, negatives_NM)
    return batch


def local_loss(
    q_ND: Tensor,
    chunks_MCD: Tensor,
    document_N: Tensor,
    gold_N: Tensor,
    *,
    alpha: float = 0.2,
    temperature: float = 0.02,
    chunk_mask_MC: Tensor | None = None,
    negatives_NM: Tensor | None = None,
    queries: slice | None = None,
) -> Tensor:
    """The chunk-level half of the contextual objective: L_local = α L_seq + (1−α) L_batch.

    Arguments, result and errors are those of `batch_loss`; `alpha` lies in [0, 1], and `queries` selects
    whose terms are summed, still divided by N, as in `pair_loss`. The similarities are computed once for both
    terms.

    Source: pplx-embed, section 2.4 (α = 0.2).

    Example:
        >>> chunks = torch.eye(4).reshape(2, 2, 4)
        >>> queries = torch.eye(4)[[0, 3]]
        >>> loss = local_loss(queries, chunks, torch.tensor([0, 1]), torch.tensor([0, 1]), temperature=1.0)
        >>> f"{loss:.4f}"  # 0.2 × 0.3133 + 0.8 × 0.7437
        '0.6576'
    """
    _check_weight("alpha", alpha)
    sequence, batch = _chunk_losses(
        q_ND, chunks_MCD, document_N, gold_N, temperature, chunk_mask_MC, negatives_NM, queries
    )
    return alpha * sequence + (1 - alpha) * batch


def global_loss(
    q_ND: Tensor,
    documents_MD: Tensor,
    document_N: Tensor,
    *,
    temperature: float = 0.02,
    margin: float = 0.1,
    negatives_NM: Tensor | None = None,
    queries: slice | None = None,
) -> Tensor:
    """InfoNCE of each query against its document, the other distinct documents and the other queries.

    With d_i the document of query i and m_i as in `pair_loss` (no gradient through it):

        L_global = −(1/N) Σ_i log e^{s(q_i,d_i)/τ} / [ e^{s(q_i,d_i)/τ}
                + Σ_{d≠d_i} m_i(d) e^{s(q_i,d)/τ} + Σ_{j≠i} m_i(q_j) e^{s(q_i,q_j)/τ} ],   d over distinct
                documents

    Two queries about the same document stay each other's negatives unless m_i masks them, as in the paper:
    they ask for different chunks.

    Args:
        q_ND: query embeddings, of any scale.
        documents_MD: embeddings of the M distinct documents of the batch.
        document_N: index of each query's document, in 0..M−1.
        temperature: τ, above 0.
        margin: how much better than the positive a negative may be; math.inf masks nothing.
        negatives_NM: False where document m is known to be no negative of query n (CDE, section 4.1); the
            queries about it then are none either. What it says of a query's own document does not matter.
        queries: the terms of these queries only, still divided by N, as in `pair_loss`. Default: all.

    Returns:
        Scalar, mean over queries, in nats; float32, or float64 for float64 embeddings.

    Raises:
        ValueError: shapes do not fit together, an index is out of range, or a parameter is.

    Source: pplx-embed, section 2.4. With one query per document it equals `pair_loss`.

    Example:
        >>> documents = torch.eye(3)[:2]
        >>> queries = torch.eye(3)[[0, 0, 1]]  # the first two ask about the same document
        >>> f"{global_loss(queries, documents, torch.tensor([0, 0, 1]), temperature=1.0):.4f}"
        '0.9188'
    """
    _check_documents(q_ND, documents_MD, document_N, "documents_MD", dimensions=2)
    check_temperature(temperature)
    check_margin(margin)
    check_negatives(negatives_NM, (len(q_ND), len(documents_MD)))
    index_M = torch.arange(len(documents_MD), device=document_N.device)

    def nats_of(rows: slice, q_TD: Tensor) -> Tensor:
        qd_TM, qq_TN = cosine(q_TD, documents_MD), cosine(q_TD, q_ND)
        own_TM = document_N[rows, None] == index_M
        self_TN = diagonal_mask(rows, len(q_ND), q_ND.device)
        positive_T = qd_TM.gather(1, document_N[rows, None]).squeeze(1)
        limit_T1 = positive_T.detach()[:, None] + margin
        dropped_TM = no_negatives(negatives_NM, rows, own_TM)
        return info_nce(
            positive_T,
            qd_TM.masked_fill(((qd_TM > limit_T1) | dropped_TM) & ~own_TM, -torch.inf),
            qq_TN.masked_fill((qq_TN > limit_T1) | dropped_TM[:, document_N] | self_TN, -torch.inf),
            temperature=temperature,
        ).sum()

    return mean_over_queries(nats_of, q_ND, queries, candidates=len(documents_MD) + len(q_ND))


def contextual_loss(
    q_ND: Tensor,
    chunks_MCD: Tensor,
    documents_MD: Tensor,
    document_N: Tensor,
    gold_N: Tensor,
    *,
    beta: float,
    alpha: float = 0.2,
    temperature: float = 0.02,
    margin: float = 0.1,
    chunk_mask_MC: Tensor | None = None,
    negatives_NM: Tensor | None = None,
    queries: slice | None = None,
) -> Tensor:
    """The objective of contextual training: L_context = β L_global + (1−β) L_local.

    Args:
        q_ND: query embeddings, of any scale.
        chunks_MCD, documents_MD: embeddings of the M distinct documents' chunks, and of the documents.
        document_N, gold_N: index of each query's document, and of its gold chunk within that document.
        beta: weight of the document-level term, in [0, 1]; the paper raises it from 0.2 to 0.5.
        alpha, temperature, margin, chunk_mask_MC, negatives_NM: as in `local_loss` and `global_loss`.
        queries: the terms of these queries only, still divided by N, as in `pair_loss`. Default: all.

    Returns:
        Scalar, mean over queries, in nats; float32, or float64 for float64 embeddings.

    Raises:
        ValueError: as `local_loss` and `global_loss`, or beta is out of range.

    Source: pplx-embed, section 2.4 and appendix B. Wrap it in `matryoshka` for the paper's six dimensions.

    Example:
        >>> chunks = torch.eye(4).reshape(2, 2, 4)
        >>> queries = torch.eye(4)[[0, 3]]
        >>> document, gold = torch.tensor([0, 1]), torch.tensor([0, 1])
        >>> loss = contextual_loss(queries, chunks, chunks.sum(1), document, gold, beta=0.2, temperature=1.0)
        >>> f"{loss:.4f}"
        '0.6633'
    """
    _check_weight("beta", beta)
    local = local_loss(
        q_ND,
        chunks_MCD,
        document_N,
        gold_N,
        alpha=alpha,
        temperature=temperature,
        chunk_mask_MC=chunk_mask_MC,
        negatives_NM=negatives_NM,
        queries=queries,
    )
    if len(documents_MD) != len(chunks_MCD):
        raise ValueError(
            f"contextual_loss needs one document embedding per document; got {len(documents_MD)} for "
            f"{len(chunks_MCD)} documents of chunks."
        )
    document = global_loss(
        q_ND,
        documents_MD,
        document_N,
        temperature=temperature,
        margin=margin,
        negatives_NM=negatives_NM,
        queries=queries,
    )
    return beta * document + (1 - beta) * local


def insent_loss(
    q_ND: Tensor,
    chunks_MCD: Tensor,
    document_N: Tensor,
    gold_N: Tensor,
    *,
    lam: float = 0.5,
    temperature: float = 0.05,
    chunk_mask_MC: Tensor | None = None,
    negatives_NM: Tensor | None = None,
    queries: slice | None = None,
) -> Tensor:
    """InSeNT: the gold chunk against its own document, and against the chunks of the other documents.

        L = (1/M') Σ_d (1/N_d) Σ_{i asks about d} [ λ ℓ_seq(i) + (1−λ) ℓ_batch(i) ],
        ℓ_seq(i) as in `sequence_loss`,
        ℓ_batch(i) = −log e^{s(q_i,c_i*)/τ} / [ e^{s(q_i,c_i*)/τ} + Σ_{j≠d} Σ_k e^{s(q_i,c_jk)/τ} ]

    with N_d queries about document d and M' documents that are asked about: the mean over the queries of each
    document, then over documents. Unlike in `batch_loss`, the other chunks of the own document are no
    negatives of the in-batch term.

    Arguments, result and errors are those of `batch_loss`; `lam` is λ, the weight of the in-sequence term,
    in [0, 1], and `queries` selects whose terms are summed, with the weights they have in the whole batch.

    Source: ConTEB (2505.24782), section 4.2 (τ = 0.05; λ is tuned, 0.5 is the default of the authors' code).

    Example:
        >>> chunks = torch.eye(4).reshape(2, 2, 4)
        >>> queries = torch.eye(4)[[0, 3]]
        >>> loss = insent_loss(queries, chunks, torch.tensor([0, 1]), torch.tensor([0, 1]), temperature=1.0)
        >>> f"{loss:.4f}"  # half log(1 + 1/e), half log(1 + 2/e)
        '0.4324'
    """
    _check_weight("lam", lam)
    _check_chunks(q_ND, chunks_MCD, document_N, gold_N, chunk_mask_MC)
    check_temperature(temperature)
    check_negatives(negatives_NM, (len(q_ND), len(chunks_MCD)))
    count_M = document_N.bincount(minlength=len(chunks_MCD))
    share_N = len(q_ND) / (count_M.count_nonzero() * count_M[document_N].double())  # 1 if all have as many

    def nats_of(rows: slice, q_TD: Tensor) -> Tensor:
        scores_TMC = _chunk_scores(q_TD, chunks_MCD, chunk_mask_MC)
        index_T = torch.arange(len(scores_TMC), device=scores_TMC.device)
        own_TC = scores_TMC[index_T, document_N[rows]]
        gold_T1 = own_TC.gather(1, gold_N[rows, None])
        own_TM = document_N[rows, None] == torch.arange(len(chunks_MCD), device=document_N.device)
        no_TM = own_TM | no_negatives(negatives_NM, rows, own_TM)
        others_TR = scores_TMC.masked_fill(no_TM[..., None], -torch.inf).flatten(1)
        sequence_T = info_nce(gold_T1.squeeze(1), own_TC, temperature=temperature)
        batch_T = info_nce(gold_T1.squeeze(1), gold_T1, others_TR, temperature=temperature)
        return (share_N[rows].to(batch_T) * (lam * sequence_T + (1 - lam) * batch_T)).sum()

    candidates = chunks_MCD.shape[0] * chunks_MCD.shape[1]
    return mean_over_queries(nats_of, q_ND, queries, candidates=candidates)


def _chunk_losses(
    q_ND: Tensor,
    chunks_MCD: Tensor,
    document_N: Tensor,
    gold_N: Tensor,
    temperature: float,
    chunk_mask_MC: Tensor | None,
    negatives_NM: Tensor | None = None,
    queries: slice | None = None,
) -> tuple[Tensor, Tensor]:
    """L_seq and L_batch, from the same similarities."""
    _check_chunks(q_ND, chunks_MCD, document_N, gold_N, chunk_mask_MC)
    check_temperature(temperature)
    check_negatives(negatives_NM, (len(q_ND), len(chunks_MCD)))

    def nats_of(rows: slice, q_TD: Tensor) -> Tensor:
        scores_TMC = _chunk_scores(q_TD, chunks_MCD, chunk_mask_MC)
        own_TC = scores_TMC[torch.arange(len(scores_TMC), device=scores_TMC.device), document_N[rows]]
        gold_T = own_TC.gather(1, gold_N[rows, None]).squeeze(1)
        if negatives_NM is not None:
            own_TM = document_N[rows, None] == torch.arange(len(chunks_MCD), device=document_N.device)
            no_TM = no_negatives(negatives_NM, rows, own_TM)
            scores_TMC = scores_TMC.masked_fill(no_TM[..., None], -torch.inf)
        sequence_T = info_nce(gold_T, own_TC, temperature=temperature)
        batch_T = info_nce(gold_T, scores_TMC.flatten(1), temperature=temperature)
        return torch.stack([sequence_T.sum(), batch_T.sum()])

    candidates = chunks_MCD.shape[0] * chunks_MCD.shape[1]
    sequence, batch = mean_over_queries(nats_of, q_ND, queries, candidates=candidates)
    return sequence, batch


def _chunk_scores(q_TD: Tensor, chunks_MCD: Tensor, chunk_mask_MC: Tensor | None) -> Tensor:
    """Similarity of every query with every chunk; −inf where a chunk is padding."""
    scores_TMC = cosine(q_TD, chunks_MCD.flatten(0, 1)).unflatten(1, chunks_MCD.shape[:2])
    if chunk_mask_MC is None:
        return scores_TMC
    return scores_TMC.masked_fill(~chunk_mask_MC.bool(), -torch.inf)


def _check_chunks(
    q_ND: Tensor, chunks_MCD: Tensor, document_N: Tensor, gold_N: Tensor, chunk_mask_MC: Tensor | None
) -> None:
    _check_documents(q_ND, chunks_MCD, document_N, "chunks_MCD", dimensions=3)
    shape_MC = chunks_MCD.shape[:2]
    _check_index("gold_N", gold_N, len(q_ND), shape_MC[1], "chunks")
    if chunk_mask_MC is None:
        return
    if chunk_mask_MC.shape != shape_MC:
        raise ValueError(
            f"chunk_mask_MC must be {tuple(shape_MC)}, like the chunks; got {tuple(chunk_mask_MC.shape)}."
        )
    real_N = chunk_mask_MC.bool()[document_N, gold_N]
    if not real_N.all():
        raise ValueError(
            f"The gold chunk of query {int((~real_N).nonzero()[0])} is masked out as padding; "
            "check gold_N and chunk_mask_MC."
        )


def _check_documents(q_ND: Tensor, x: Tensor, document_N: Tensor, name: str, *, dimensions: int) -> None:
    if q_ND.ndim != 2 or len(q_ND) == 0 or x.ndim != dimensions or x.shape[-1] != q_ND.shape[-1]:
        raise ValueError(
            f"Queries must be (N, D) with N ≥ 1 and {name} have {dimensions} axes, the last one D; got "
            f"{tuple(q_ND.shape)} and {tuple(x.shape)}."
        )
    _check_index("document_N", document_N, len(q_ND), len(x), "documents")


def _check_index(name: str, index_N: Tensor, queries: int, size: int, what: str) -> None:
    if index_N.shape != (queries,) or index_N.dtype != torch.int64:
        raise ValueError(
            f"{name} must hold one int64 index per query, shape ({queries},); got "
            f"{tuple(index_N.shape)} of {index_N.dtype}."
        )
    if ((index_N < 0) | (index_N >= size)).any():
        raise ValueError(
            f"{name} must lie in 0..{size - 1} ({size} {what}); got "
            f"{int(index_N.min())}..{int(index_N.max())}."
        )


def _check_weight(name: str, weight: float) -> None:
    if not 0 <= weight <= 1:
        raise ValueError(f"{name} must lie in [0, 1]; got {weight}.")
