"""InfoNCE over pairs, and over triplets with hard negatives; and the two functions both are made of.

Shape suffixes: N queries · D dimensions · K hard negatives per query.
"""

import torch
from torch import Tensor


def pair_loss(q_ND: Tensor, d_ND: Tensor, *, temperature: float = 0.02, margin: float = 0.1) -> Tensor:
    """InfoNCE of each query against its document, the other documents and the other queries.

    With cosine similarity s, temperature τ and m_i(x) = 1 where s(q_i,x) ≤ s(q_i,d_i) + margin, otherwise 0:

        L = −(1/N) Σ_i log e^{s(q_i,d_i)/τ} / [ e^{s(q_i,d_i)/τ}
                + Σ_{j≠i} m_i(d_j) e^{s(q_i,d_j)/τ} + Σ_{j≠i} m_i(q_j) e^{s(q_i,q_j)/τ} ]

    A negative more than `margin` closer than the positive is probably an unlabelled positive, so m leaves it
    out; no gradient flows through m. `margin=math.inf` leaves nothing out.

    Args:
        q_ND, d_ND: embeddings of N aligned pairs, of any scale (INT8 codes from `unmask.quantize.int8`, or
            floats).
        temperature: τ, above 0.
        margin: how much better than the positive a negative may be; 0 or more.

    Returns:
        Scalar, mean over queries, in nats; float32, or float64 for float64 embeddings.

    Raises:
        ValueError: the shapes differ, N < 2, or temperature or margin is out of range.

    Source: pplx-embed, section 2.3. Without the margin it equals sentence-transformers' (Cached)
    MultipleNegativesRankingLoss with `directions=("query_to_doc", "query_to_query")` and `scale=1/τ`.

    Example:
        >>> axes = torch.eye(3)
        >>> f"{pair_loss(axes, axes, temperature=1.0):.4f}"  # log(1 + 4/e): four orthogonal negatives
        '0.9048'
    """
    _check_pairs(q_ND, d_ND)
    if len(q_ND) < 2:
        raise ValueError("pair_loss needs at least two pairs: a single query has no in-batch negative.")
    check_temperature(temperature)
    check_margin(margin)
    qd_NN, qq_NN = cosine(q_ND, d_ND), cosine(q_ND, q_ND)
    self_NN = torch.eye(len(q_ND), dtype=torch.bool, device=q_ND.device)
    positive_N = qd_NN.diagonal()
    limit_N1 = positive_N.detach()[:, None] + margin
    return info_nce(
        positive_N,
        qd_NN.masked_fill((qd_NN > limit_N1) & ~self_NN, -torch.inf),
        qq_NN.masked_fill((qq_NN > limit_N1) | self_NN, -torch.inf),
        temperature=temperature,
    )


def triplet_loss(q_ND: Tensor, d_ND: Tensor, hard_NKD: Tensor, *, temperature: float = 0.03) -> Tensor:
    """InfoNCE of each query against every document of the batch and the mined hard negatives of every query.

        L = −(1/N) Σ_i log e^{s(q_i,d_i)/τ} / [ Σ_j e^{s(q_i,d_j)/τ} + Σ_j Σ_k e^{s(q_i,h_jk)/τ} ]

    Nothing is masked and queries are not compared with each other.

    Args:
        q_ND, d_ND: embeddings of N aligned pairs, of any scale.
        hard_NKD: embeddings of the K hard negatives of each query.
        temperature: τ, above 0.

    Returns:
        Scalar, mean over queries, in nats; float32, or float64 for float64 embeddings.

    Raises:
        ValueError: the shapes do not fit together, or temperature is out of range.

    Source: pplx-embed, section 2.5. Equals sentence-transformers' MultipleNegativesRankingLoss on the columns
    (query, document, negative_1, …, negative_K) with `scale=1/τ`.

    Example:
        >>> axes = torch.eye(3)
        >>> hard = axes.roll(1, 0)[:, None]  # each query's hard negative is another query's document
        >>> f"{triplet_loss(axes, axes, hard, temperature=1.0):.4f}"  # log(2 + 4/e)
        '1.2446'
    """
    _check_pairs(q_ND, d_ND)
    if hard_NKD.ndim != 3 or (len(hard_NKD), hard_NKD.shape[-1]) != q_ND.shape:
        raise ValueError(
            f"Hard negatives of queries {tuple(q_ND.shape)} must be (N, K, D); got {tuple(hard_NKD.shape)}."
        )
    check_temperature(temperature)
    qd_NN = cosine(q_ND, d_ND)
    return info_nce(qd_NN.diagonal(), qd_NN, cosine(q_ND, hard_NKD.flatten(0, 1)), temperature=temperature)


def cosine(a_XD: Tensor, b_YD: Tensor) -> Tensor:
    """Cosine similarity of every row of `a` with every row of `b`, in float32 or better even under autocast.

    A zero vector has similarity 0 to everything and receives no gradient; dividing by a small epsilon instead
    would send it one of size 1/epsilon.
    """
    with torch.autocast(a_XD.device.type, enabled=False):
        return _unit(a_XD) @ _unit(b_YD).mT


def info_nce(positive_N: Tensor, *candidates: Tensor, temperature: float) -> Tensor:
    """Mean over queries of −log(e^{positive/τ} / Σ e^{candidate/τ}).

    Args:
        positive_N: similarity of each query to its positive.
        candidates: similarities (N, any number) to everything in the denominator, the positive included;
            −inf where a candidate is left out.
    """
    log_sums = [torch.logsumexp(similarity / temperature, dim=-1) for similarity in candidates]
    log_denominator_N = log_sums[0]
    for log_sum_N in log_sums[1:]:
        log_denominator_N = torch.logaddexp(log_denominator_N, log_sum_N)
    return (log_denominator_N - positive_N / temperature).mean()


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


def _check_pairs(q_ND: Tensor, d_ND: Tensor) -> None:
    if q_ND.ndim != 2 or q_ND.shape != d_ND.shape or len(q_ND) == 0:
        raise ValueError(
            "The loss needs one document embedding per query, both (N, D); got "
            f"{tuple(q_ND.shape)} and {tuple(d_ND.shape)}."
        )


def _unit(x_XD: Tensor) -> Tensor:
    x_XD = x_XD.to(torch.promote_types(x_XD.dtype, torch.float32))
    norm_X1 = torch.linalg.vector_norm(x_XD, dim=-1, keepdim=True)
    return x_XD / norm_X1.masked_fill(norm_X1 == 0, torch.inf)
