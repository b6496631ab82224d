"""Cosine similarity of embeddings in every precision that they come in."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

TILE = 2**25  # similarities computed at once: 256 MiB in float64
EXACT_WIDTH = 1024  # 1024 · 127² < 2²⁴: float32 sums of so many INT8 products are exact in any order


def similarity(queries: Tensor | np.ndarray, documents: Tensor | np.ndarray) -> Tensor:
    """Cosine similarity of every query with every document, for every precision an embedding comes in.

    - int8 codes: the dot product is exact, so equal codes always tie;
    - uint8: packed binary, most significant bit first, compared as ±1 (cosine = 1 − 2 · Hamming / D);
    - floats: in float32, or float64 if both are.

    The two sides may differ in precision. A zero vector has similarity 0 to everything.

    Args:
        queries: (N, D), or (N, D/8) if uint8.
        documents: (M, D), or (M, D/8) if uint8; on the queries' device.

    Returns:
        (N, M), float32 (float64 for two float64 inputs).

    Raises:
        ValueError: they are not matrices, or D differs.

    Example:
        >>> codes = torch.tensor([[3, 4], [6, 8], [-4, 3]], dtype=torch.int8)
        >>> similarity(codes[:1], codes[1:])
        tensor([[1., 0.]])
    """
    q_ND, d_MD = _values(queries), _values(documents)
    if q_ND.ndim != 2 or d_MD.ndim != 2 or q_ND.shape[1] != d_MD.shape[1]:
        raise ValueError(
            f"similarity needs (N, D) and (M, D) embeddings; got {tuple(q_ND.shape)} and "
            f"{tuple(d_MD.shape)} after unpacking."
        )
    if q_ND.is_floating_point() or d_MD.is_floating_point():
        dtype = torch.promote_types(torch.promote_types(q_ND.dtype, d_MD.dtype), torch.float32)
        q_ND, d_MD = q_ND.to(dtype), d_MD.to(dtype)
        return (q_ND / _norms(q_ND)) @ (d_MD / _norms(d_MD)).T
    q_norm_N1, d_norm_M1 = _norms(q_ND.float()), _norms(d_MD.float())
    scores_NM = torch.empty(len(q_ND), len(d_MD), device=q_ND.device)
    rows = max(1, TILE // max(1, len(d_MD)))
    for first in range(0, len(q_ND), rows):
        tile = slice(first, first + rows)
        scores_NM[tile] = _integer_dot(q_ND[tile], d_MD).double() / q_norm_N1[tile] / d_norm_M1.T
    return scores_NM


def _integer_dot(q_ND: Tensor, d_MD: Tensor) -> Tensor:
    """Exact dot products of int8 matrices."""
    if q_ND.dtype == d_MD.dtype == torch.int8 and q_ND.device.type == "cpu":
        return torch._int_mm(q_ND.contiguous(), d_MD.contiguous().T)  # VNNI: the fastest exact search here
    parts = zip(q_ND.float().split(EXACT_WIDTH, dim=1), d_MD.float().split(EXACT_WIDTH, dim=1), strict=True)
    return sum((q_NX @ d_MX.T).double() for q_NX, d_MX in parts)


def _values(embeddings: Tensor | np.ndarray) -> Tensor:
    """Embeddings as a tensor of values: packed bits (uint8) become ±1, everything else stays."""
    embeddings = torch.as_tensor(embeddings)
    if embeddings.dtype != torch.uint8:
        return embeddings
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=embeddings.device)
    bits = (embeddings[..., None] >> shifts) & 1
    return (2 * bits.to(torch.int8) - 1).flatten(-2)


def _norms(x_XD: Tensor) -> Tensor:
    """Euclidean norms (X, 1); infinite for zero vectors, so that dividing by them gives zero."""
    norm_X1 = torch.linalg.vector_norm(x_XD, dim=-1, keepdim=True)
    return norm_X1.masked_fill(norm_X1 == 0, torch.inf)
