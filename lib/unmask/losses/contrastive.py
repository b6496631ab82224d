"""InfoNCE over pairs, over triplets with hard negatives, and Qwen3-Embedding's; and what they are made of.

Each loss is written for a tile: some of the N queries, against everything in the batch. `mean_over_queries`
makes the tiles.

Shape suffixes: N queries · D dimensions · K hard negatives per query, H = N·K of all queries · R = N + H, the
documents and then the hard negatives, query by query · T queries of a tile.
"""

from collections.abc import Callable
from functools import partial, reduce

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from unmask.losses.tensors import check_settings, check_shapes, to_device

# At most this many similarities at a time: their memory must not grow with the square of the batch. 2^23
# are 32 MiB in float32, enough for 2,048 pairs (with their query–query similarities) in one piece. With twice
# as many in a tile, beyond a CPU's cache, 4,096 pairs took 1.3 times as long and 8,192 pairs 1.6 times.
TILE_SCORES = 2**23


def pair_loss(
    q_ND: Tensor,
    d_ND: Tensor,
    *,
    temperature: float = 0.02,
    margin: float = 0.1,
    query_query: bool = True,
    negative_mask_NN: Tensor | None = None,
    queries: slice | None = None,
) -> Tensor:
    """InfoNCE of each query against its document, the other documents and the other queries.

    With cosine similarity s, temperature τ and m_i(x) = 1 where s(q_i,x) ≤ s(q_i,d_i) + margin, otherwise 0:

        L = −(1/N) Σ_i log e^{s(q_i,d_i)/τ} / [ e^{s(q_i,d_i)/τ}
                + Σ_{j≠i} m_i(d_j) e^{s(q_i,d_j)/τ} + Σ_{j≠i} m_i(q_j) e^{s(q_i,q_j)/τ} ]

    A negative more than `margin` closer than the positive is probably an unlabelled positive, so m leaves it
    out; no gradient flows through m. `margin=math.inf` leaves nothing out.

    Args:
        q_ND, d_ND: embeddings of N aligned pairs, of any scale (INT8 codes from `models.quantize.int8`, or
            floats).
        temperature: τ, above 0.
        margin: how much better than the positive a negative may be; 0 or more.
        query_query: whether the last sum is there; the paper's loss has it.
        negative_mask_NN: False where the document of pair j is known to be no negative of query i (CDE,
            section 4.1); then query j is none either: our choice, as CDE has no query–query term. The
            diagonal does not matter. Default: whatever the margin leaves.
        queries: the terms of these queries only, still divided by N: the parts of a partition add up to the
            whole loss, which is how several processes share it. Default: all.

    Returns:
        Scalar, mean over queries, in nats; float32, or float64 for float64 embeddings. Large batches are
        computed in tiles of queries, which the backward pass computes again: memory grows with N, not N².

    Raises:
        ValueError: the shapes differ, N < 2, or temperature or margin is out of range.

    Source: pplx-embed, section 2.3. Without the margin it equals sentence-transformers' (Cached)
    MultipleNegativesRankingLoss with `directions=("query_to_doc", "query_to_query")` and `scale=1/τ`.

    Example:
        >>> axes = torch.eye(3)
        >>> f"{pair_loss(axes, axes, temperature=1.0):.4f}"  # log(1 + 4/e): four orthogonal negatives
        '0.9048'
    """
    check_shapes(q_ND=q_ND, d_ND=d_ND, negative_mask_NN=negative_mask_NN)
    check_settings(temperature=temperature, margin=margin)
    if len(q_ND) < 2:
        raise ValueError("pair_loss needs at least two pairs: a single query has no in-batch negative.")

    def per_query_loss(rows: slice, q_TD: Tensor) -> Tensor:
        s_TN = [cosine(q_TD, x_ND) for x_ND in sides]
        positive_T = s_TN[0].diagonal(rows.start)
        positives_TN = known_positives(index_N[rows, None] == index_N, negative_mask_NN, rows)
        negatives = [true_negatives(x_TN, positives_TN, positive_T, margin) for x_TN in s_TN]
        return info_nce(positive_T, positive_T[:, None], *negatives, temperature=temperature)

    sides, index_N = (d_ND, q_ND) if query_query else (d_ND,), torch.arange(len(q_ND), device=q_ND.device)
    return mean_over_queries(per_query_loss, q_ND, queries, candidates=len(sides) * len(q_ND))


def triplet_loss(
    q_ND: Tensor,
    d_ND: Tensor,
    hard_NKD: Tensor,
    *,
    temperature: float = 0.03,
    text_ids_R: Tensor | None = None,
    queries: slice | None = None,
) -> Tensor:
    """InfoNCE of each query against every document of the batch and the mined hard negatives of every query.

        L = −(1/N) Σ_i log e^{s(q_i,d_i)/τ} / [ Σ_j e^{s(q_i,d_j)/τ} + Σ_j Σ_k e^{s(q_i,h_jk)/τ} ]

    Queries are not compared with each other, and nothing is masked but a h_jk that is d_i or q_i once more:
    what was mined for one query may be the answer to another.

    Args:
        q_ND, d_ND: embeddings of N aligned pairs, of any scale.
        hard_NKD: embeddings of the K hard negatives of each query.
        temperature: τ, above 0.
        text_ids_R: a number for each of the N queries, the N documents and the hard negatives, query by
            query; equal for equal texts, −1 where a query has fewer than K hard negatives. Default: all
            differ.
        queries: the terms of these queries only, still divided by N: the parts of a partition add up.
            Default: all.

    Returns:
        Scalar, mean over queries, in nats; float32, or float64 for float64 embeddings. Large batches are
        computed in tiles of queries, which the backward pass computes again: memory grows with N, not N².

    Raises:
        ValueError: the shapes do not fit together, or the temperature is out of range.

    Source: pplx-embed, section 2.5. Equals sentence-transformers' MultipleNegativesRankingLoss on the columns
    (query, document, negative_1, …, negative_K) with `scale=1/τ`.

    Example:
        >>> axes = torch.eye(3)
        >>> hard = axes.roll(1, 0)[:, None]  # each query's hard negative is another query's document
        >>> f"{triplet_loss(axes, axes, hard, temperature=1.0):.4f}"  # log(2 + 4/e)
        '1.2446'
    """
    check_settings(temperature=temperature)
    ids_N2, hard_ids_NK = _text_ids(q_ND, d_ND, hard_NKD, text_ids_R)
    hard_HD, hard_ids_H = hard_NKD.flatten(0, 1), hard_ids_NK.flatten()

    def per_query_loss(rows: slice, q_TD: Tensor) -> Tensor:
        qd_TN = cosine(q_TD, d_ND)
        positive_T = qd_TN.diagonal(rows.start)
        qh_TH = cosine(q_TD, hard_HD).masked_fill(_no_negatives(ids_N2[rows], hard_ids_H), -torch.inf)
        return info_nce(positive_T, qd_TN, qh_TH, temperature=temperature)

    return mean_over_queries(per_query_loss, q_ND, queries, candidates=len(d_ND) + len(hard_HD))


def qwen3_loss(
    q_ND: Tensor,
    d_ND: Tensor,
    hard_NKD: Tensor,
    *,
    temperature: float = 0.02,
    margin: float = 0.1,
    text_ids_R: Tensor | None = None,
    negative_mask_NN: Tensor | None = None,
    queries: slice | None = None,
) -> Tensor:
    """InfoNCE of each query against its document, its hard negatives, and the other queries and documents;
    documents are compared with each other, too.

    With cosine similarity s, temperature τ and hard negatives h_ik of query i:

        L = −(1/N) Σ_i log e^{s(q_i,d_i)/τ} / Z_i
        Z_i = e^{s(q_i,d_i)/τ} + Σ_k m e^{s(q_i,h_ik)/τ}
                + Σ_{j≠i} m e^{s(q_i,q_j)/τ} + Σ_{j≠i} m e^{s(d_i,d_j)/τ} + Σ_{j≠i} m e^{s(q_i,d_j)/τ}

    Each m is 0 where its own similarity exceeds s(q_i,d_i) + margin, and where the negative is the positive
    once more: h_ik or d_j equal to d_i, or the query j of such a d_j; and where h_ik is q_i. Otherwise it is
    1. No gradient flows
    through m. The paper writes one m_ij for the last three sums and names s(q_i,d_j) and s(q_i,q_j) as its
    scores; that s(d_i,d_j) counts in its own sum is assumed.

    Args:
        q_ND, d_ND: embeddings of N aligned pairs, of any scale.
        hard_NKD: embeddings of the K hard negatives of each query, compared with no other query; K may be 0.
        temperature: τ, above 0.
        margin: how much better than the positive a negative may be; 0 or more, `math.inf` masks nothing.
        text_ids_R: as for `triplet_loss`.
        negative_mask_NN: False where neither document nor query j is a negative of pair i (CDE, section 4.1);
            the diagonal does not matter, and hard negatives always count.
        queries: the terms of these queries only, still divided by N: the parts of a partition add up.
            Default: all.

    Returns:
        Scalar, mean over queries, in nats; float32, or float64 for float64 embeddings. Large batches are
        computed in tiles of queries, which the backward pass computes again: memory grows with N, not N².

    Raises:
        ValueError: the shapes do not fit together, or temperature or margin is out of range.

    Source: Qwen3-Embedding (2506.05176), section 3.1. Without hard negatives and margin it equals
    sentence-transformers' MultipleNegativesRankingLoss with `directions=("query_to_doc", "query_to_query",
    "doc_to_doc")`, `partition_mode="joint"` and `scale=1/τ`.

    Example:
        >>> axes = torch.eye(3)
        >>> hard = axes.roll(1, 0)[:, None]
        >>> f"{qwen3_loss(axes, axes, hard, temperature=1.0):.4f}"  # log(1 + 7/e): seven orthogonal negatives
        '1.2740'
    """
    check_settings(temperature=temperature, margin=margin)
    check_shapes(q_ND=q_ND, negative_mask_NN=negative_mask_NN)
    ids_N2, hard_ids_NK = _text_ids(q_ND, d_ND, hard_NKD, text_ids_R)
    document_N = ids_N2[:, 1]

    def per_query_loss(rows: slice, q_TD: Tensor) -> Tensor:
        qd_TN = cosine(q_TD, d_ND)
        positive_T = qd_TN.diagonal(rows.start)
        # The own document among them.
        same_TN = known_positives(document_N[rows, None] == document_N, negative_mask_NN, rows)
        qh_TK = cosine(q_TD[:, None], hard_NKD[rows]).squeeze(1)
        hard_TK = true_negatives(qh_TK, _no_negatives(ids_N2[rows], hard_ids_NK[rows]), positive_T, margin)
        in_batch = (cosine(q_TD, q_ND), cosine(d_ND[rows], d_ND), qd_TN)
        negatives = [true_negatives(side_TN, same_TN, positive_T, margin) for side_TN in in_batch]
        return info_nce(positive_T, positive_T[:, None], hard_TK, *negatives, temperature=temperature)

    return mean_over_queries(per_query_loss, q_ND, queries, candidates=3 * len(q_ND) + hard_NKD.shape[1])


def _text_ids(q_ND: Tensor, d_ND: Tensor, hard_NKD: Tensor, ids_R: Tensor | None) -> tuple[Tensor, Tensor]:
    """The ids of queries and documents (N, 2) and of hard negatives (N, K), by default all different, once
    shapes are checked."""
    check_shapes(q_ND=q_ND, d_ND=d_ND, hard_NKD=hard_NKD)
    n, k = hard_NKD.shape[:2]
    ids_R = torch.arange(2 * n + n * k) if ids_R is None else ids_R
    if ids_R.shape != (2 * n + n * k,):
        raise ValueError(f"text_ids_R must have the shape ({2 * n + n * k}); got {tuple(ids_R.shape)}.")
    ids_R = to_device(ids_R, q_ND.device)
    return ids_R[: 2 * n].view(2, n).mT, ids_R[2 * n :].view(n, k)


def _no_negatives(ids_T2: Tensor, hard_ids_TX: Tensor) -> Tensor:
    """Which hard negatives, a row for all queries of a tile or one for each, are none of a query's: its text,
    its document's, or nothing."""
    query_id_T1, document_id_T1 = ids_T2.split(1, dim=1)
    return (hard_ids_TX == document_id_T1) | (hard_ids_TX == query_id_T1) | (hard_ids_TX < 0)


def mean_over_queries(
    per_query_loss: Callable[[slice, Tensor], Tensor], q_ND: Tensor, queries: slice | None, *, candidates: int
) -> Tensor:
    """(1/N) Σ over `queries` of their loss terms, tile by tile.

    Args:
        per_query_loss: the loss terms (T,) of a tile, given as a slice of the N queries and their embeddings.
        q_ND: all query embeddings.
        queries: which of them to sum over, a slice without a step; None: all.
        candidates: how many similarities a query has. When the queries together have more than TILE_SCORES,
            they are taken in tiles, and the backward pass recomputes each tile instead of keeping it.
    """
    n = len(q_ND)
    start, stop, step = (queries or slice(None)).indices(n)
    if step != 1:
        raise ValueError(f"queries must be a slice without a step, got {queries}")
    size = max(1, TILE_SCORES // max(1, candidates))
    if stop - start <= size:
        # All queries in one tile are taken as they are: a view would add up their gradients in another order.
        tile = slice(start, max(start, stop))
        return per_query_loss(tile, q_ND if stop - start == n else q_ND[tile]).sum() / n
    tiles = [slice(first, min(first + size, stop)) for first in range(start, stop, size)]
    recomputed = partial(checkpoint, per_query_loss, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([recomputed(tile, q_ND[tile]) for tile in tiles]).sum() / n


def cosine(a_XD: Tensor, b_YD: Tensor) -> Tensor:
    """Cosine similarity of every row of `a` with every row of `b`, in float32 or better even under autocast.

    A zero vector has similarity 0 to everything and receives no gradient; dividing by a small epsilon instead
    would send it one of size 1/epsilon.
    """
    with torch.autocast(a_XD.device.type, enabled=False):
        return _unit(a_XD) @ _unit(b_YD).mT


def _unit(x_XD: Tensor) -> Tensor:
    x_XD = x_XD.to(torch.promote_types(x_XD.dtype, torch.float32))
    norm_X1 = torch.linalg.vector_norm(x_XD, dim=-1, keepdim=True)
    return x_XD / norm_X1.masked_fill(norm_X1 == 0, torch.inf)


def info_nce(positive_T: Tensor, *candidates: Tensor, temperature: float) -> Tensor:
    """−log(e^{positive/τ} / Σ e^{candidate/τ}) of each query.

    Args:
        positive_T: similarity of each query to its positive.
        candidates: similarities (T, any number) to everything in the denominator, the positive included;
            −inf where a candidate is left out.
    """
    log_sums = [torch.logsumexp(similarity / temperature, dim=-1) for similarity in candidates]
    return reduce(torch.logaddexp, log_sums) - positive_T / temperature


def true_negatives(similarity_TX: Tensor, positives_TX: Tensor, positive_T: Tensor, margin: float) -> Tensor:
    """The similarities of the negatives, −inf instead of known positives and of those that look more than
    `margin` better than the positive: the m of the formulas."""
    limit_T1 = positive_T.detach()[:, None] + margin
    return similarity_TX.masked_fill(positives_TX | (similarity_TX > limit_T1), -torch.inf)


def known_positives(same_TN: Tensor, mask_NN: Tensor | None, rows: slice) -> Tensor:
    """Which candidates are no negatives of a tile's queries: the same text, and what the mask excludes."""
    return same_TN if mask_NN is None else same_TN | ~to_device(mask_NN[rows].bool(), same_TN.device)
