"""The objectives of contextual training: a chunk among chunks (local), a document among documents (global);
and InSeNT, which has no document-level term.

Several queries of a batch may ask about the same document. Every distinct document is therefore passed once
and `document_N` says which one a query belongs to: sums run over distinct documents. That masks duplicates by
construction (the paper's M^dup), and it keeps a copy of the gold chunk from being its own negative.

Indices and masks may be on the CPU while embeddings are on a GPU: checks of them then do not wait for it.

Shape suffixes: N queries · M distinct documents · C chunks per document · D dimensions · T queries of a
tile · L tokens of a query · K tokens of a chunk · X chunks.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from unmask.losses.contrastive import cosine, info_nce, mean_over_queries, true_negatives
from unmask.losses.tensors import check_index, check_settings, check_shapes, to_device

Similarity = Callable[[Tensor, Tensor], Tensor]  # of all queries of a tile with all chunks: (T, X)


def sequence_loss(q_ND: Tensor, chunks_MCD: Tensor, document_N: Tensor, gold_N: Tensor, **options) -> Tensor:
    """InfoNCE of each query's gold chunk against the chunks of its own document.

        L_seq = −(1/N) Σ_i log e^{s(q_i,c_i*)/τ} / Σ_k e^{s(q_i,c_ik)/τ}

    Args:
        q_ND, chunks_MCD, document_N, gold_N: as for `local_loss`.
        options: its `temperature`, `chunk_mask_MC`, `query_ids_N` and `queries`.

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
    return local_loss(q_ND, chunks_MCD, document_N, gold_N, alpha=1, **options)


def batch_loss(q_ND: Tensor, chunks_MCD: Tensor, document_N: Tensor, gold_N: Tensor, **options) -> Tensor:
    """InfoNCE of each query's gold chunk against all chunks of all distinct documents of the batch.

        L_batch = −(1/N) Σ_i log e^{s(q_i,c_i*)/τ} / Σ_j Σ_k e^{s(q_i,c_jk)/τ},   j over distinct documents

    The paper's j runs over queries, which would count the chunks of a document once per query that asks about
    it; here every chunk counts once.

    Args:
        q_ND, chunks_MCD, document_N, gold_N: as for `local_loss`.
        options: its `temperature`, `chunk_mask_MC`, `query_ids_N` and `queries`.

    Returns:
        Scalar, mean over queries, in nats; float32, or float64 for float64 embeddings.

    Raises:
        ValueError: shapes do not fit together, an index is out of range, a gold chunk is padding, or
            the temperature is out of range.

    Source: pplx-embed, section 2.4. Unlike InSeNT's in-batch term, it includes the own document.

    Example:
        >>> chunks = torch.eye(4).reshape(2, 2, 4)
        >>> queries = torch.eye(4)[[0, 3]]
        >>> loss = batch_loss(queries, chunks, torch.tensor([0, 1]), torch.tensor([0, 1]), temperature=1.0)
        >>> f"{loss:.4f}"  # log(1 + 3/e): the three other chunks of the batch
        '0.7437'
    """
    return local_loss(q_ND, chunks_MCD, document_N, gold_N, alpha=0, **options)


def local_loss(
    q_ND: Tensor,
    chunks_MCD: Tensor,
    document_N: Tensor,
    gold_N: Tensor,
    *,
    alpha: float = 0.2,
    temperature: float = 0.02,
    chunk_mask_MC: Tensor | None = None,
    query_ids_N: Tensor | None = None,
    queries: slice | None = None,
) -> Tensor:
    """The chunk-level half of the contextual objective: L_local = α L_seq + (1−α) L_batch.

    L_seq and L_batch as in `sequence_loss` and `batch_loss`; the similarities are computed once for both.

    Args:
        q_ND: query embeddings, of any scale.
        chunks_MCD: chunk embeddings of the M distinct documents of the batch.
        document_N: index of each query's document, in 0..M−1.
        gold_N: index of each query's gold chunk within its document, in 0..C−1.
        alpha: α, the weight of L_seq, in [0, 1].
        temperature: τ, above 0.
        chunk_mask_MC: True where a chunk is real, False where it is padding; None if all are real.
        query_ids_N: a number for each query, equal for those that ask the same: what answers one of them is
            no negative of the others. Default: all differ.
        queries: the terms of these queries only, still divided by N: the parts of a partition add up.
            Default: all.

    Returns:
        Scalar, mean over queries, in nats; float32, or float64 for float64 embeddings.

    Raises:
        ValueError: shapes do not fit together, an index is out of range, a gold chunk is padding, or
            a parameter is out of range.

    Source: pplx-embed, section 2.4 (α = 0.2).

    Example:
        >>> chunks = torch.eye(4).reshape(2, 2, 4)
        >>> queries = torch.eye(4)[[0, 3]]
        >>> loss = local_loss(queries, chunks, torch.tensor([0, 1]), torch.tensor([0, 1]), temperature=1.0)
        >>> f"{loss:.4f}"  # 0.2 × 0.3133 + 0.8 × 0.7437
        '0.6576'
    """
    check_settings(temperature=temperature, alpha=alpha)
    where = _checked(q_ND, chunks_MCD, document_N, gold_N, chunk_mask_MC, query_ids_N)

    def per_query_loss(rows: slice, q_TD: Tensor) -> Tensor:
        all_TX = cosine(q_TD, chunks_MCD.flatten(0, 1))
        gold_T, document_TC, all_TMC = _among_chunks(all_TX, rows, *where)
        sequence_T = info_nce(gold_T, document_TC, temperature=temperature)
        batch_T = info_nce(gold_T, all_TMC.flatten(1), temperature=temperature)
        return alpha * sequence_T + (1 - alpha) * batch_T

    return mean_over_queries(per_query_loss, q_ND, queries, candidates=chunks_MCD.shape[:2].numel())


def global_loss(
    q_ND: Tensor,
    documents_MD: Tensor,
    document_N: Tensor,
    *,
    temperature: float = 0.02,
    margin: float = 0.1,
    query_ids_N: Tensor | None = None,
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
        query_ids_N, queries: as for `local_loss`.

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
    check_shapes(q_ND=q_ND, documents_MD=documents_MD, document_N=document_N, query_ids_N=query_ids_N)
    check_settings(temperature=temperature, margin=margin)
    check_index("document_N", document_N, len(documents_MD))
    query_ids_N = torch.arange(len(q_ND)) if query_ids_N is None else query_ids_N
    query_ids_N, document_N = (to_device(x, q_ND.device) for x in (query_ids_N, document_N))

    def per_query_loss(rows: slice, q_TD: Tensor) -> Tensor:
        same_TN = query_ids_N[rows, None] == query_ids_N
        qd_TM, qq_TN = cosine(q_TD, documents_MD), cosine(q_TD, q_ND)
        positive_T = qd_TM.gather(1, document_N[rows, None]).squeeze(1)
        documents_TM = true_negatives(qd_TM, _answers(same_TN, document_N, qd_TM), positive_T, margin)
        queries_TN = true_negatives(qq_TN, same_TN, positive_T, margin)
        return info_nce(positive_T, positive_T[:, None], documents_TM, queries_TN, temperature=temperature)

    return mean_over_queries(per_query_loss, q_ND, queries, candidates=len(documents_MD) + len(q_ND))


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
    query_ids_N: Tensor | None = None,
    queries: slice | None = None,
) -> Tensor:
    """The objective of contextual training: L_context = β L_global + (1−β) L_local.

    Args:
        q_ND: query embeddings, of any scale.
        chunks_MCD, documents_MD: embeddings of the M distinct documents' chunks, and of the documents.
        document_N, gold_N: index of each query's document, and of its gold chunk within that document.
        beta: weight of the document-level term, in [0, 1]; the paper raises it from 0.2 to 0.5.
        alpha: weight of the in-sequence term of L_local, in [0, 1].
        temperature: τ, above 0.
        margin: how much better than its document a negative of L_global may be; math.inf masks nothing.
        chunk_mask_MC: True where a chunk is real, False where it is padding; None if all are real.
        query_ids_N, queries: as for `local_loss`.

    Returns:
        Scalar, mean over queries, in nats; float32, or float64 for float64 embeddings.

    Raises:
        ValueError: shapes do not fit together, an index is out of range, a gold chunk is padding, or
            a parameter is out of range.

    Source: pplx-embed, section 2.4 and appendix B. Wrap it in `matryoshka` for the paper's six dimensions.

    Example:
        >>> chunks = torch.eye(4).reshape(2, 2, 4)
        >>> queries = torch.eye(4)[[0, 3]]
        >>> document, gold = torch.tensor([0, 1]), torch.tensor([0, 1])
        >>> loss = contextual_loss(queries, chunks, chunks.sum(1), document, gold, beta=0.2, temperature=1.0)
        >>> f"{loss:.4f}"
        '0.6633'
    """
    check_shapes(chunks_MCD=chunks_MCD, documents_MD=documents_MD)
    check_settings(temperature=temperature, beta=beta)
    shared = {"temperature": temperature, "query_ids_N": query_ids_N, "queries": queries}
    chunks = (chunks_MCD, document_N, gold_N)
    local = local_loss(q_ND, *chunks, alpha=alpha, chunk_mask_MC=chunk_mask_MC, **shared)
    document = global_loss(q_ND, documents_MD, document_N, margin=margin, **shared)
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
    query_ids_N: Tensor | None = None,
    queries: slice | None = None,
    similarity: Similarity = cosine,
) -> Tensor:
    """InSeNT: the gold chunk against its own document, and against the chunks of the other documents.

        L = (1/M') Σ_d (1/N_d) Σ_{i asks about d} [ λ ℓ_seq(i) + (1−λ) ℓ_batch(i) ],
        ℓ_seq(i) as in `sequence_loss`,
        ℓ_batch(i) = −log e^{s(q_i,c_i*)/τ} / [ e^{s(q_i,c_i*)/τ} + Σ_{j≠d} Σ_k e^{s(q_i,c_jk)/τ} ]

    with N_d queries about document d and M' documents that are asked about: the mean over the queries of each
    document, then over documents. Unlike in `batch_loss`, the other chunks of the own document are no
    negatives of the in-batch term.

    Args:
        q_ND: query embeddings, of any scale.
        chunks_MCD: chunk embeddings of the M distinct documents of the batch.
        document_N, gold_N: as for `local_loss`.
        lam: λ, the weight of the in-sequence term, in [0, 1].
        temperature: τ, above 0.
        chunk_mask_MC: True where a chunk is real, False where it is padding; None if all are real.
        query_ids_N: as for `local_loss`.
        queries: the terms of these queries only, with the weights they have in the whole batch. Default: all.
        similarity: s; with `mean_maxsim` (late interaction) the embeddings are q_NLD and chunks_MCKD, the
            vectors of each query's and each chunk's tokens, zeros where there is no token.

    Returns:
        Scalar, mean over documents, in nats; float32, or float64 for float64 embeddings.

    Raises:
        ValueError: shapes do not fit together, an index is out of range, a gold chunk is padding, or
            a parameter is out of range.

    Source: ConTEB (2505.24782), section 4.2 (τ = 0.05; λ is tuned, 0.5 is the default of the authors' code).

    Example:
        >>> chunks = torch.eye(4).reshape(2, 2, 4)
        >>> queries = torch.eye(4)[[0, 3]]
        >>> loss = insent_loss(queries, chunks, torch.tensor([0, 1]), torch.tensor([0, 1]), temperature=1.0)
        >>> f"{loss:.4f}"  # half log(1 + 1/e), half log(1 + 2/e)
        '0.4324'
    """
    check_settings(temperature=temperature, lam=lam)
    given = document_N, gold_N, chunk_mask_MC, query_ids_N
    where = _checked(q_ND, chunks_MCD, *given, late=similarity is mean_maxsim)
    count_M = document_N.bincount(minlength=len(chunks_MCD))
    share_N = len(document_N) / (count_M.count_nonzero() * count_M[document_N].double())
    share_N = to_device(share_N, q_ND.device)
    document_NM = to_device(F.one_hot(document_N, len(chunks_MCD)).bool(), q_ND.device)

    def per_query_loss(rows: slice, q_TD: Tensor) -> Tensor:
        all_TX = similarity(q_TD, chunks_MCD.flatten(0, 1))
        gold_T, document_TC, all_TMC = _among_chunks(all_TX, rows, *where)
        others_TX = all_TMC.masked_fill(document_NM[rows, :, None], -torch.inf).flatten(1)
        sequence_T = info_nce(gold_T, document_TC, temperature=temperature)
        batch_T = info_nce(gold_T, gold_T[:, None], others_TX, temperature=temperature)
        return share_N[rows].to(batch_T.dtype) * (lam * sequence_T + (1 - lam) * batch_T)

    similarities_of_one = q_ND.shape[1:-1].numel() * chunks_MCD.shape[:-1].numel()
    return mean_over_queries(per_query_loss, q_ND, queries, candidates=similarities_of_one)


def mean_maxsim(q_TLD: Tensor, chunks_XKD: Tensor) -> Tensor:
    """Late interaction: each token of a query looks for its best match in a chunk.

        s(q, c) = 1/L Σ_i max_j cos(q_i, c_j),   over the L tokens of the query, the K of the chunk

    The mean, not ColBERT's sum: queries of all lengths then suit one temperature, and rank as before.

    Args:
        q_TLD, chunks_XKD: vectors of the tokens, of any scale; zeros where there is no token.
    Returns: (T, X), −inf for a chunk without tokens.
    Source: ColBERT (2004.12832), section 3.3; ConTEB (2505.24782), section 4.
    """
    cos_YZ = cosine(q_TLD.flatten(0, 1), chunks_XKD.flatten(0, 1))
    cos_YXK = cos_YZ.unflatten(1, chunks_XKD.shape[:2]).masked_fill(~chunks_XKD.any(2), -torch.inf)
    best_TLX = cos_YXK.amax(2).unflatten(0, q_TLD.shape[:2])  # 0 for no token of the query
    return best_TLX.sum(1) / q_TLD.any(2).sum(1, keepdim=True)


def _checked(q, chunks, document_N, gold_N, chunk_mask_MC, query_ids_N, *, late=False) -> list[Tensor]:
    """Checks the chunk-level losses' arguments, in the shapes of late interaction if `late` is true; returns
    padding_MC, document_N, gold_N and query_ids_N on the embeddings' device."""
    ids_N = torch.arange(len(q)) if query_ids_N is None else query_ids_N
    vectors = {"q_NLD": q, "chunks_MCKD": chunks} if late else {"q_ND": q, "chunks_MCD": chunks}
    index = {"document_N": document_N, "gold_N": gold_N, "query_ids_N": ids_N}
    check_shapes(**vectors, **index, chunk_mask_MC=chunk_mask_MC)
    check_index("document_N", document_N, len(chunks))
    check_index("gold_N", gold_N, chunks.shape[1])
    mask_MC = document_N.new_ones(chunks.shape[:2]) if chunk_mask_MC is None else chunk_mask_MC
    padding_MC = ~mask_MC.bool()
    if (bad_N := padding_MC[document_N, gold_N]).any():
        query = int(bad_N.nonzero()[0])
        raise ValueError(f"The gold chunk of query {query} is masked out as padding: see chunk_mask_MC.")
    return [to_device(x, q.device) for x in (padding_MC, *index.values())]


def _among_chunks(all_TX, rows, padding_MC, document_N, gold_N, query_ids_N) -> tuple[Tensor, Tensor, Tensor]:
    """The similarities of a tile's queries with the gold chunk (T,), with the chunks of its document, the
    gold one among them (T, C), and with all chunks (T, M, C); −inf for padding, and for other chunks that
    answer the same query.

    Args:
        all_TX: with all chunks, whatever they are.
        rows: which of the N queries the tile holds.
    """
    answer_N = document_N * padding_MC.shape[1] + gold_N  # among all chunks
    others_TX = _answers(query_ids_N[rows, None] == query_ids_N, answer_N, all_TX)
    others_TX = others_TX.scatter(1, answer_N[rows, None], value=False)
    all_TX = all_TX.masked_fill(others_TX | padding_MC.flatten(), -torch.inf)
    all_TMC = all_TX.unflatten(1, padding_MC.shape)
    document_TC = all_TMC[torch.arange(len(all_TMC), device=all_TMC.device), document_N[rows]]
    return document_TC.gather(1, gold_N[rows, None]).squeeze(1), document_TC, all_TMC


def _answers(same_TN: Tensor, answer_N: Tensor, s_TX: Tensor) -> Tensor:
    """Booleans (T, X): which of X candidates answer a tile's queries, in any row that asks the same.

    Args:
        same_TN: which queries ask the same as those of the tile.
        answer_N: the candidate that answers each query.
        s_TX: similarities with all candidates.
    """
    return torch.zeros_like(s_TX).index_add(1, answer_N, same_TN.to(s_TX.dtype)) > 0
