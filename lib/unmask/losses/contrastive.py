"""InfoNCE over pairs, and over triplets with hard negatives; and the functions both are made of.

Shape suffixes: N queries · D dimensions · K hard negatives per query · T queries of a tile.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# So many similarities exist at a time, so that their memory does not grow with the square of the batch: 2^24
# are 64 MiB in float32, enough for 2,896 pairs (with their query–query similarities) in one piece.
TILE_SCORES = 2**24


def pair_loss(
    q_ND: Tensor,
    d_ND: Tensor,
    *,
    temperature: float = 0.02,
    margin: float = 0.1,
    negatives_NN: Tensor | None = None,
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
        negatives_NN: False where the document of pair j is known to be no negative of query i (CDE, section
            4.1); query j then is none either, which is our choice, CDE has no query–query term. The diagonal
            does not matter. Default: whatever the margin leaves.
        queries: the terms of these queries only, still divided by N: the parts of a partition add up to the
            whole loss, which is how several processes share it. Default: all.

    Returns:
        Scalar, mean over queries, in nats; float32, or float64 for float64 embeddings. Large batches are
        computed in tiles of queries, which the backward pass computes again: memory grows with N, not N².

    Raises:
        ValueError: the shapes differ, N < 2, or temperature, margin or queries is out of range.

    Source: pplx-embed, section 2.3. Without the margin it equals sentence-transformers' (Cached)
    MultipleNegativesRankingLoss with `directions=("query_to_doc", "query_to_query")` and `scale=1/τ`.

    Example:
        >>> axes = torch.eye(3)
        >>> f"{pair_loss(axes, axes, temperature=1.0):.4f}"  # log(1 + 4/e): four orthogonal negatives
        '0.9048'
    """
    check_pairs(q_ND, d_ND)
    if len(q_ND) < 2:
        raise ValueError("pair_loss needs at least two pairs: a single query has no in-batch negative.")
    check_temperature(temperature)
    check_margin(margin)
    check_negatives(negatives_NN, (len(q_ND), len(d_ND)))

    def nats_of(rows: slice, q_TD: Tensor) -> Tensor:
        self_TN = diagonal_mask(rows, len(q_ND), q_ND.device)
        qd_TN = cosine(q_TD, d_ND)
        positive_T = qd_TN.diagonal(rows.start)
        limit_T1 = positive_T.detach()[:, None] + margin
        dropped_TN = no_negatives(negatives_NN, rows, self_TN)
        qd_TN = qd_TN.masked_fill(((qd_TN > limit_T1) | dropped_TN) & ~self_TN, -torch.inf)
        qq_TN = cosine(q_TD, q_ND)
        qq_TN = qq_TN.masked_fill((qq_TN > limit_T1) | dropped_TN | self_TN, -torch.inf)
        return info_nce(positive_T, qd_TN, qq_TN, temperature=temperature).sum()

    return mean_over_queries(nats_of, q_ND, queries, candidates=2 * len(q_ND))


def triplet_loss(
    q_ND: Tensor,
    d_ND: Tensor,
    hard_NKD: Tensor,
    *,
    temperature: float = 0.03,
    negatives_NN: Tensor | None = None,
    queries: slice | None = None,
) -> Tensor:
    """InfoNCE of each query against every document of the batch and the mined hard negatives of every query.

        L = −(1/N) Σ_i log e^{s(q_i,d_i)/τ} / [ Σ_j e^{s(q_i,d_j)/τ} + Σ_j Σ_k e^{s(q_i,h_jk)/τ} ]

    Nothing but `negatives_NN` is masked, and queries are not compared with each other.

    Args:
        q_ND, d_ND: embeddings of N aligned pairs, of any scale.
        hard_NKD: embeddings of the K hard negatives of each query.
        temperature: τ, above 0.
        negatives_NN: as in `pair_loss`, for the documents d_j; hard negatives always count.
        queries: the terms of these queries only, still divided by N, as in `pair_loss`. Default: all.

    Returns:
        Scalar, mean over queries, in nats; float32, or float64 for float64 embeddings. Large batches are
        computed in tiles of queries, as in `pair_loss`.

    Raises:
        ValueError: the shapes do not fit together, or temperature or queries is out of range.

    Source: pplx-embed, section 2.5. Equals sentence-transformers' MultipleNegativesRankingLoss on the columns
    (query, document, negative_1, …, negative_K) with `scale=1/τ`.

    Example:
        >>> axes = torch.eye(3)
        >>> hard = axes.roll(1, 0)[:, None]  # each query's hard negative is another query's document
        >>> f"{triplet_loss(axes, axes, hard, temperature=1.0):.4f}"  # log(2 + 4/e)
        '1.2446'
    """
    check_pairs(q_ND, d_ND)
    check_hard_negatives(q_ND, hard_NKD)
    check_temperature(temperature)
    check_negatives(negatives_NN, (len(q_ND), len(d_ND)))
    hard_RD = hard_NKD.flatten(0, 1)

    def nats_of(rows: slice, q_TD: Tensor) -> Tensor:
        qd_TN = cosine(q_TD, d_ND)
        positive_T = qd_TN.diagonal(rows.start)
        if negatives_NN is not None:
            self_TN = diagonal_mask(rows, len(d_ND), d_ND.device)
            qd_TN = qd_TN.masked_fill(no_negatives(negatives_NN, rows, self_TN), -torch.inf)
        return info_nce(positive_T, qd_TN, cosine(q_TD, hard_RD), temperature=temperature).sum()

    return mean_over_queries(nats_of, q_ND, queries, candidates=len(d_ND) + len(hard_RD))


def mean_over_queries(
    sum_of: Callable[[slice, Tensor], Tensor], q_ND: Tensor, queries: slice | None, *, candidates: int
) -> Tensor:
    """(1/N) Σ over `queries` of their loss terms, tile by tile.

    Args:
        sum_of: the sum of the terms of a tile (of any shape), given as a slice of the N queries and their
            embeddings.
        q_ND: all query embeddings.
        queries: which of them to sum over; None: all.
        candidates: how many similarities a query has. When the queries together have more than TILE_SCORES,
            they are taken in tiles, and the backward pass recomputes each tile instead of keeping it.

    Raises:
        ValueError: the slice has a step.
    """
    n = len(q_ND)
    start, stop, step = (queries or slice(None)).indices(n)
    if step != 1:
        raise ValueError(f"queries must be a slice without a step; got {queries}.")
    size = max(1, TILE_SCORES // max(1, candidates))
    if stop - start <= size:
        # All queries in one tile are taken as they are: a view would add up their gradients in another order.
        tile = slice(start, max(start, stop))
        return sum_of(tile, q_ND if stop - start == n else q_ND[tile]) / n
    tiles = [slice(first, min(first + size, stop)) for first in range(start, stop, size)]
    sums = [
        checkpoint(sum_of, tile, q_ND[tile], use_reentrant=False, preserve_rng_state=False) for tile in tiles
    ]
    return torch.stack(sums).sum(dim=0) / n


def diagonal_mask(rows: slice, n: int, device: torch.device) -> Tensor:
    """Rows of the identity matrix as booleans (T, N): where a query meets itself or its own document."""
    index_N = torch.arange(n, device=device)
    return index_N[rows, None] == index_N


def no_negatives(negatives_NM: Tensor | None, rows: slice, own_TM: Tensor) -> Tensor:
    """Where a tile's queries have candidates that are known to be none; never their own ones."""
    if negatives_NM is None:
        return torch.zeros_like(own_TM)
    return ~(negatives_NM[rows].to(own_TM.device) | own_TM)


def cosine(a_XD: Tensor, b_YD: Tensor) -> Tensor:
    """Cosine similarity of every row of `a` with every row of `b`, in float32 or better even under autocast.

    A zero vector has similarity 0 to everything and receives no gradient; dividing by a small epsilon instead
    would send it one of size 1/epsilon.
    """
    with torch.autocast(a_XD.device.type, enabled=False):
        return _unit(a_XD) @ _unit(b_YD).mT


def info_nce(positive_N: Tensor, *candidates: Tensor, temperature: float) -> Tensor:
    """−log(e^{positive/τ} / Σ e^{candidate/τ}) of each query.

    Args:
        positive_N: similarity of each query to its positive.
        candidates: similarities (N, any number) to everything in the denominator, the positive included;
            −inf where a candidate is left out.
    """
    log_sums = [torch.logsumexp(similarity / temperature, dim=-1) for similarity in candidates]
    log_denominator_N = log_sums[0]
    for log_sum_N in log_sums[1:]:
        log_denominator_N = torch.logaddexp(log_denominator_N, log_sum_N)
    return log_denominator_N - positive_N / temperature


def check_temperature(temperature: float) -> None:
    """Refuse a temperature that is not above zero."""
    if not temperature > 0:
        raise ValueError(f"The temperature must be above 0; got {temperature}.")


def check_margin(margin: float) -> None:
    """Refuse a false-negative margin below zero, which would count the positive among the false negatives."""
    if not margin >= 0:
        raise ValueError(
            f"The false-negative margin must be 0 or more (math.inf masks nothing); got {margin}."
        )


def check_negatives(negatives_NM: Tensor | None, shape: tuple[int, int]) -> None:
    """Refuse a mask of negatives that is not one boolean per query and candidate."""
    if negatives_NM is not None and (negatives_NM.shape != shape or negatives_NM.dtype != torch.bool):
        raise ValueError(
            f"The mask of negatives must be booleans of shape {shape}; got {negatives_NM.dtype} of "
            f"{tuple(negatives_NM.shape)}."
        )


def check_pairs(q_ND: Tensor, d_ND: Tensor) -> None:
    """Refuse embeddings that are not aligned pairs."""
    if q_ND.ndim != 2 or q_ND.shape != d_ND.shape or len(q_ND) == 0:
        raise ValueError(
            "The loss needs one document embedding per query, both (N, D); got "
            f"{tuple(q_ND.shape)} and {tuple(d_ND.shape)}."
        )


def check_hard_negatives(q_ND: Tensor, hard_NKD: Tensor) -> None:
    """Refuse hard negatives that are not K for each query."""
    if hard_NKD.ndim != 3 or (len(hard_NKD), hard_NKD.shape[-1]) != q_ND.shape:
        raise ValueError(
            f"Hard negatives of queries {tuple(q_ND.shape)} must be (N, K, D); got {tuple(hard_NKD.shape)}."
        )


def _unit(x_XD: Tensor) -> Tensor:
    x_XD = x_XD.to(torch.promote_types(x_XD.dtype, torch.float32))
    norm_X1 = torch.linalg.vector_norm(x_XD, dim=-1, keepdim=True)
    return x_XD / norm_X1.masked_fill(norm_X1 == 0, torch.inf)
