"""The objective of Qwen3-Embedding: InfoNCE with five kinds of terms in its denominator.

Shape suffixes: N queries · D dimensions · K hard negatives per query · T queries of a tile.
"""

import torch
from torch import Tensor

from unmask.losses.contrastive import (
    check_hard_negatives,
    check_margin,
    check_negatives,
    check_pairs,
    check_temperature,
    cosine,
    diagonal_mask,
    info_nce,
    mean_over_queries,
    no_negatives,
)


def qwen3_loss(
    q_ND: Tensor,
    d_ND: Tensor,
    hard_NKD: Tensor | None = None,
    *,
    temperature: float = 0.02,
    margin: float = 0.1,
    document_N: Tensor | None = None,
    hard_document_NK: Tensor | None = None,
    negatives_NN: Tensor | None = None,
    queries: slice | None = None,
) -> Tensor:
    """InfoNCE of each query against its document, its hard negatives, and the batch's queries and documents,
    which its document is compared with as well.

    With cosine similarity s, temperature τ and hard negatives h_ik of query i:

        L = −(1/N) Σ_i log e^{s(q_i,d_i)/τ} / Z_i
        Z_i = e^{s(q_i,d_i)/τ} + Σ_k m e^{s(q_i,h_ik)/τ}
                + Σ_{j≠i} m e^{s(q_i,q_j)/τ} + Σ_{j≠i} m e^{s(d_i,d_j)/τ} + Σ_{j≠i} m e^{s(q_i,d_j)/τ}

    Each m is 0 where its own similarity exceeds s(q_i,d_i) + margin, and where the negative is the positive
    once more: h_ik or d_j equal to d_i, or the query j of such a d_j. Otherwise it is 1. No gradient flows
    through m. The paper writes one m_ij for the last three sums and names s(q_i,d_j) and s(q_i,q_j) as its
    scores; that s(d_i,d_j) counts in its own sum is assumed.

    Args:
        q_ND, d_ND: embeddings of N aligned pairs, of any scale.
        hard_NKD: embeddings of the K hard negatives of each query, compared with no other query. Default:
            none.
        temperature: τ, above 0.
        margin: how much better than the positive a negative may be; 0 or more, `math.inf` masks nothing.
        document_N: a number (0 or more) for each document, equal for equal ones. Default: all differ.
        hard_document_NK: numbers of the hard negatives, in the numbering of `document_N`. Default: none of
            them is a positive.
        negatives_NN: False where neither document nor query j is a negative of pair i, as in `pair_loss`;
            hard negatives always count.
        queries: the terms of these queries only, still divided by N, as in `pair_loss`. Default: all.

    Returns:
        Scalar, mean over queries, in nats; float32, or float64 for float64 embeddings. Large batches are
        computed in tiles of queries, as in `pair_loss`.

    Raises:
        ValueError: the shapes do not fit together, hard negatives are numbered and documents are not, or
            temperature, margin or queries is out of range.

    Source: Qwen3-Embedding (2506.05176), section 3.1. Without hard negatives and margin it equals
    sentence-transformers' MultipleNegativesRankingLoss with `directions=("query_to_doc", "query_to_query",
    "doc_to_doc")`, `partition_mode="joint"` and `scale=1/τ`.

    Example:
        >>> axes = torch.eye(3)
        >>> f"{qwen3_loss(axes, axes, temperature=1.0):.4f}"  # log(1 + 6/e): six orthogonal negatives
        '1.1654'
    """
    check_pairs(q_ND, d_ND)
    n = len(q_ND)
    if hard_NKD is None:
        hard_NKD = q_ND.new_empty(n, 0, q_ND.shape[1])
    check_hard_negatives(q_ND, hard_NKD)
    check_temperature(temperature)
    check_margin(margin)
    check_negatives(negatives_NN, (n, n))
    if hard_document_NK is not None and document_N is None:
        raise ValueError("Numbers of hard negatives (hard_document_NK) need those of documents (document_N).")
    device = q_ND.device
    document_N = torch.arange(n, device=device) if document_N is None else document_N.to(device)
    if hard_document_NK is None:
        hard_document_NK = torch.full(hard_NKD.shape[:2], -1, device=device)

    def nats_of(rows: slice, q_TD: Tensor) -> Tensor:
        own_T1 = document_N[rows, None]
        same_TN = own_T1 == document_N
        same_TN |= no_negatives(negatives_NN, rows, diagonal_mask(rows, n, device))
        same_TK = own_T1 == hard_document_NK[rows].to(device)
        qd_TN = cosine(q_TD, d_ND)
        positive_T = qd_TN.diagonal(rows.start)
        limit_T1 = positive_T.detach()[:, None] + margin
        candidates = (
            (cosine(q_TD[:, None], hard_NKD[rows]).squeeze(1), same_TK),
            (cosine(q_TD, q_ND), same_TN),
            (cosine(d_ND[rows], d_ND), same_TN),
            (qd_TN, same_TN),
        )
        negatives = [s.masked_fill(same | (s > limit_T1), -torch.inf) for s, same in candidates]
        return info_nce(positive_T, positive_T[:, None], *negatives, temperature=temperature).sum()

    return mean_over_queries(nats_of, q_ND, queries, candidates=3 * n + hard_NKD.shape[1])
