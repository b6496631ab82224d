"""Cosine similarity of embeddings in every precision that they come in.

Shape suffixes: N queries · M documents · D dimensions · X, Y rows.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

TILE = 2**25  # similarities computed at once: 256 MiB in float64
ROWS = 1024  # rows whose norms are computed at once: their copies as floats stay in the cache
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
    q_ND, d_MD = torch.as_tensor(queries), torch.as_tensor(documents)
    if q_ND.dtype != d_MD.dtype:
        q_ND, d_MD = _values(q_ND), _values(d_MD)
    if q_ND.ndim != 2 or d_MD.ndim != 2 or q_ND.shape[1] != d_MD.shape[1]:
        raise ValueError(
            f"similarity needs (N, D) and (M, D) embeddings; got {tuple(_values(q_ND).shape)} and "
            f"{tuple(_values(d_MD).shape)} after unpacking."
        )
    if q_ND.is_floating_point() or d_MD.is_floating_point():
        dtype = torch.promote_types(torch.promote_types(q_ND.dtype, d_MD.dtype), torch.float32)
        q_ND, d_MD = q_ND.to(dtype), d_MD.to(dtype)
        return (q_ND / _norms(q_ND)) @ (d_MD / _norms(d_MD)).T
    scores_NM = torch.empty(len(q_ND), len(d_MD), device=q_ND.device)
    inverses = None if q_ND.dtype == torch.uint8 else (inverse_norms(q_ND)[:, None], inverse_norms(d_MD))
    rows = max(1, TILE // max(1, len(d_MD)))
    for first in range(0, len(q_ND), rows):
        tile = slice(first, first + rows)
        if inverses is None:
            scores_NM[tile] = bit_cosines(q_ND[tile], d_MD)
        else:
            scores_NM[tile] = scaled(dots(q_ND[tile], d_MD), inverses[0][tile], inverses[1])
    return scores_NM


def dots(a_XD: Tensor, b_YD: Tensor) -> Tensor:
    """Exact dot products (X, Y), int32, of two matrices of int8 codes."""
    a_XD, b_YD = a_XD.contiguous(), b_YD.contiguous()
    if not int_mm_is_exact(a_XD.device):
        parts = zip(a_XD.float().split(EXACT_WIDTH, 1), b_YD.float().split(EXACT_WIDTH, 1), strict=True)
        return sum((a_XW @ b_YW.T).int() for a_XW, b_YW in parts)
    if a_XD.is_cuda:
        return torch._int_mm(_padded(a_XD), _padded(b_YD).T)[: len(a_XD), : len(b_YD)]
    return torch._int_mm(a_XD, b_YD.T)


def scaled(dots_XY: Tensor, q_inverse: Tensor, d_inverse: Tensor) -> Tensor:
    """Dot products times both inverse norms: cosines, computed in float64 and rounded once to float32, always
    in the same order, so that the same pair scores the same wherever it is compared."""
    return dots_XY.double().mul_(d_inverse).mul_(q_inverse).float()


def inverse_norms(codes_XD: Tensor) -> Tensor:
    """1 / Euclidean norm (X,), float64, of int8 codes; zero for zero vectors."""
    squares_X = torch.cat(
        [
            sum(part_RW.square().sum(dim=1).double() for part_RW in rows_RD.float().split(EXACT_WIDTH, 1))
            for rows_RD in codes_XD.split(ROWS)
        ]
    )
    return squares_X.rsqrt().masked_fill(squares_X == 0, 0)


def bit_cosines(a_XB: Tensor, b_YB: Tensor) -> Tensor:
    """Cosines (X, Y), float32, of two matrices of packed bits: 1 − 2 · Hamming / D."""
    size = 8 * a_XB.shape[1]
    if a_XB.device.type == "cpu" and size % 64 == 0:
        return from_hamming(_hamming(a_XB, b_YB), size)
    return from_hamming((size - dots(_values(a_XB), _values(b_YB))) / 2, size)


def from_hamming(distance_XY: Tensor, size: int) -> Tensor:
    """Cosines of binary embeddings, float32, from their Hamming distances."""
    return distance_XY.float().mul_(-2 / size).add_(1)


def _hamming(a_XB: Tensor, b_YB: Tensor) -> Tensor:
    import faiss  # slow to import, and only packed bits need it

    a_XB, b_YB = a_XB.contiguous().numpy(), b_YB.contiguous().numpy()
    (count, size), others = a_XB.shape, len(b_YB)
    distance_XY = torch.empty(count, others, dtype=torch.int32)
    pointers = [faiss.swig_ptr(array) for array in (a_XB, b_YB, distance_XY.numpy())]
    faiss.hammings(*pointers[:2], count, others, size, pointers[2])
    return distance_XY


@cache
def int_mm_is_exact(device: torch.device) -> bool:
    """Whether torch multiplies INT8 matrices exactly here. On processors without VNNI instructions, sums
    overflow; GPUs may not know the operation."""
    largest = torch.full((32, 64), 127, dtype=torch.int8, device=device)
    try:
        return bool((torch._int_mm(largest, largest.T) == 64 * 127**2).all())
    except RuntimeError:
        return False


def _padded(x_XD: Tensor) -> Tensor:
    """Zeros around a matrix: CUDA multiplies integers from 17 rows on, in multiples of 8 both ways."""
    rows, size = x_XD.shape
    return pad(x_XD, (0, -size % 8, 0, max(24 - rows, -rows % 8)))


def _values(embeddings: Tensor) -> Tensor:
    """Embeddings as values: packed bits (uint8) become ±1, everything else stays."""
    if embeddings.dtype != torch.uint8:
        return embeddings
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=embeddings.device)
    bits = (embeddings[..., None] >> shifts) & 1
    return (2 * bits.to(torch.int8) - 1).flatten(-2)


def _norms(x_XD: Tensor) -> Tensor:
    """Euclidean norms (X, 1); infinite for zero vectors, so that dividing by them gives zero."""
    norm_X1 = torch.linalg.vector_norm(x_XD, dim=-1, keepdim=True)
    return norm_X1.masked_fill(norm_X1 == 0, torch.inf)
