"""Cosine similarity in every precision that embeddings come in, and each query's best documents, without the
matrix of all scores. The search is exact: for an approximate one, give the vectors to faiss.

Shape suffixes: N queries · M documents · D dimensions · B bytes of packed bits · K ranks · Q queries and T
documents of a tile · C candidates · X rows.
"""

import warnings
from functools import cache

import faiss
import numpy as np
import simsimd
import torch
from torch import Tensor
from torch.nn.functional import normalize

from unmask.data.batches import parts
from unmask.data.mining import Ranking, Search
from unmask.models.arguments import check_counts

QUERIES, DOCUMENTS = 64, 2**14  # of a tile: its scores stay in a core's cache; a GPU takes more queries
FEW, FOR_FEW = 4, 2**20  # queries whose search is as fast as documents can be read; documents of their tile
ROWS = 1024  # rows whose norms are computed at once


def similarity(queries: Tensor | np.ndarray, documents: Tensor | np.ndarray) -> Tensor:
    """Cosine similarity of every query with every document, for every precision an embedding comes in.

    - int8 codes: the dot product is exact, so equal codes always tie;
    - uint8: packed binary, most significant bit first, compared as ±1 (cosine = 1 − 2 · Hamming / D);
    - floats: in float32, or float64 if one is.

    The two sides may differ in precision. A zero vector has similarity 0 to everything.

    Args:
        queries: (N, D), or (N, D/8) if uint8.
        documents: (M, D), or (M, D/8) if uint8; on the queries' device.

    Returns:
        (N, M), float32 (float64 for any float64 input).

    Raises: ValueError for other types, and for shapes that do not fit together.

    Example:
        >>> codes = torch.tensor([[3, 4], [6, 8], [-4, 3]], dtype=torch.int8)
        >>> similarity(codes[:1], codes[1:])
        tensor([[1., 0.]])
    """
    q_ND, d_MD = values(torch.as_tensor(queries)), values(torch.as_tensor(documents))
    if not q_ND.ndim == d_MD.ndim == 2 or q_ND.shape[1] != d_MD.shape[1]:
        widths = f"got {tuple(q_ND.shape)} and {tuple(d_MD.shape)}"
        raise ValueError(f"similarity compares the rows of two matrices of one width, {widths}")
    if q_ND.is_floating_point() or d_MD.is_floating_point():
        dtype = torch.promote_types(torch.promote_types(q_ND.dtype, d_MD.dtype), torch.float32)
        return _unit(q_ND.to(dtype)) @ _unit(d_MD.to(dtype)).T
    return _cosines(d_MD, q_ND, _inverse_norms(d_MD)[:, None]).T


def top_k(q_ND: np.ndarray, d_MD: np.ndarray, k: int) -> Ranking:
    """The k documents most similar (cosine) to each query, best first.

    Args:
        q_ND, d_MD: embeddings of one precision, as for `similarity`, as arrays or what becomes one; `d_MD`
            may be mapped into memory.
    Returns: scores (N, K), float32, and document numbers (N, K), int64, with K = min(k, M). Equal scores are
        in order of document number.
    Raises: ValueError for no queries, no documents or k below 1; two precisions or two numbers of dimensions;
        NaN or infinity.

    Example:
        >>> documents = np.array([[0, 1], [2, 2], [9, 1], [1, 1]], np.int8)
        >>> scores, ids = top_k(np.array([[1, 1]], np.int8), documents, 3)
        >>> ids.tolist()
        [[1, 3, 2]]
    """
    return index(d_MD)(q_ND, k)


def index(d_MD: np.ndarray) -> Search:
    """A search over documents, to be asked often: `search(q_ND, k)`, as `top_k`.

    Everything is compared, N · M · D multiplications, on the GPU if there is one (packed bits: faiss, on the
    CPU). Documents are used where they are; of codes, the inverse norms are kept. A score is computed from
    exact dot products of codes and rounded once, so the same pair scores the same in any search.

    Raises: ValueError as `top_k`.
    """
    d_MD = np.asarray(d_MD)
    _check(d_MD, "documents")
    inverse_M = _inverse_norms(_tensor(d_MD)) if d_MD.dtype == np.int8 else None

    def search(q_ND: np.ndarray, k: int) -> Ranking:
        q_ND = np.asarray(q_ND)
        _check_request(q_ND, d_MD, k)
        count = min(k, len(d_MD))
        packed = d_MD.dtype == np.uint8
        return _nearest_bits(d_MD, q_ND, count) if packed else _nearest(d_MD, inverse_M, q_ND, count)

    return search


def two_step(
    q_ND: np.ndarray, d_MD: np.ndarray, q_NB: np.ndarray, d_MB: np.ndarray, k: int, *, candidates: int
) -> Ranking:
    """Binary search first, rescoring after: an eighth of the memory is read for all documents, the rest for
    the candidates alone.

    The `candidates` documents nearest in Hamming distance (ties by document number) are ordered by the cosine
    of the other embeddings, usually INT8 codes. With as many candidates as documents, this is exact search.

    Args:
        q_ND, d_MD: as for `top_k`; `d_MD` may be mapped into memory, and only the candidates are read.
        q_NB, d_MB: the same texts as packed bits, uint8.
        candidates: per query, from k to M (more are M).
    Returns: as `top_k`.
    Raises: ValueError as `top_k`, if the two kinds of embeddings do not match, and for fewer candidates than
        k.
    """
    q_ND, d_MD, q_NB, d_MB = map(np.asarray, (q_ND, d_MD, q_NB, d_MB))
    if d_MD.ndim != 2 or len(q_ND) != len(q_NB) or len(d_MD) != len(d_MB) or d_MB.dtype != np.uint8:
        raise ValueError("give both kinds of embeddings of the same texts, and packed bits as uint8")
    _check_request(q_ND, d_MD, k)
    check_counts(candidates=candidates)
    if candidates < k:
        raise ValueError(f"candidates is {candidates}: the {k} best are chosen from them: raise it")
    ids_NC = np.sort(top_k(q_NB, d_MB, candidates)[1], axis=1)
    scores_NC = torch.cat([similarity(q[None], d_MD[ids]) for q, ids in zip(q_ND, ids_NC, strict=True)])
    _check(scores_NC.numpy(), "scores of the candidates")
    return tuple(best.numpy() for best in _first(scores_NC.float(), torch.from_numpy(ids_NC), k))


def best_of(scores_QT: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of each row, in order: scores and columns (Q, K). Of equal scores, the earlier is better.

    `topk` takes any of equal scores; of all that reach the k-th best, a stable sort takes the first.

    Args:
        scores_QT: not NaN.
    """
    best = scores_QT.topk(min(k, scores_QT.shape[1]))
    count = int((scores_QT >= best.values[:, -1:]).sum(dim=1).max())
    ids_QC = best.indices if count == best.indices.shape[1] else scores_QT.topk(count).indices
    ids_QC = ids_QC.sort().values
    return _first(scores_QT.gather(1, ids_QC), ids_QC, k)


def _check(x_XD: np.ndarray, name: str) -> None:
    if x_XD.ndim != 2 or not x_XD.size:
        raise ValueError(f"a search needs {name} as a matrix of one or more rows, got shape {x_XD.shape}")
    if x_XD.dtype not in (np.float32, np.float16, np.float64, np.int8, np.uint8):
        right = "float16, float32, float64, int8 or uint8, in this machine's byte order"
        raise ValueError(f"a search needs {name} as {right}, got {x_XD.dtype.str}: .astype makes it one")
    if x_XD.dtype.kind == "f" and not np.isfinite([x_XD.min(), x_XD.max()]).all():
        row = int(np.argmin(np.isfinite(x_XD).all(axis=1)))
        raise ValueError(f"row {row} of the {name} contains NaN or infinity: look for what computed it")


def _check_request(q_ND: np.ndarray, d_MD: np.ndarray, k: int) -> None:
    _check(q_ND, "queries")
    check_counts(k=k)
    said = [f"{x.shape[1]} columns of {'floats' if x.dtype.kind == 'f' else x.dtype}" for x in (q_ND, d_MD)]
    if said[0] != said[1]:
        raise ValueError(f"queries have {said[0]}, documents {said[1]}: encode both in one precision")


def _nearest(d_MD: np.ndarray, inverse_M: Tensor | None, q_ND: np.ndarray, k: int) -> Ranking:
    """Exact search, tile by tile: the best of each tile join the best so far."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    unit = _unit if inverse_M is None else torch.as_tensor  # codes are scaled after the product
    tiles = unit(_tensor(q_ND).to(device)).split(QUERIES if device.type == "cpu" else 32 * QUERIES)
    best: list = [None] * len(tiles)
    few = inverse_M is not None and len(q_ND) <= FEW and device.type == "cpu"  # a GPU copies its tile
    for part in parts(len(d_MD), FOR_FEW if few else DOCUMENTS):
        d_TD = unit(_tensor(d_MD[part]).to(device))
        for tile, q_QD in enumerate(tiles):
            if inverse_M is None:
                scores_TQ = (d_TD @ q_QD.to(d_TD.dtype).T).float()
            else:
                scores_TQ = _cosines(d_TD, q_QD, inverse_M[part, None].to(device))
            scores_QK, ids_QK = best_of(scores_TQ.T.contiguous(), k)
            both = [one for one in (best[tile], (scores_QK, ids_QK + part.start)) if one]
            best[tile] = _first(*(torch.cat(rows, dim=1) for rows in zip(*both, strict=True)), k)
    return tuple(torch.cat(rows).cpu().numpy() for rows in zip(*best, strict=True))


def _first(scores_QX: Tensor, ids_QX: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best, equal scores as they come."""
    order_QK = scores_QX.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return scores_QX.gather(1, order_QK), ids_QX.gather(1, order_QK)


def _nearest_bits(d_MB: np.ndarray, q_NB: np.ndarray, k: int) -> Ranking:
    """The search of packed bits, for which faiss counts and keeps the k best in one pass. Its heaps keep the
    lowest numbers of equal distances, and need only be put in order."""
    distance_NK, ids_NK = faiss.knn_hamming(np.ascontiguousarray(q_NB), np.ascontiguousarray(d_MB), k)
    order_NK = np.lexsort((ids_NK, distance_NK))
    distance_NK, ids_NK = (np.take_along_axis(x_NK, order_NK, 1) for x_NK in (distance_NK, ids_NK))
    return 1 - distance_NK.astype(np.float32) * np.float32(2 / (8 * q_NB.shape[1])), ids_NK


@cache
def int_mm_is_exact() -> bool:
    """Whether this processor multiplies INT8 matrices exactly: without VNNI instructions, sums overflow."""
    largest = torch.full((32, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(largest, largest.T) == 64 * 127**2).all())


def _cosines(d_TD: Tensor, q_QD: Tensor, inverse_T1: Tensor) -> Tensor:
    """Cosines (T, Q) of int8 codes: exact dot products, scaled in float64 and rounded once to float32. With
    documents as rows, the product and its maxima are fastest."""
    d_TD, q_QD = (x.flatten().view(x.shape) for x in (d_TD, q_QD))  # a row alone may have stride 0
    if d_TD.is_cuda:
        exact = torch.float32 if d_TD.shape[1] * 128**2 <= 2**24 else torch.float64  # in any order of the sum
        dots_TQ = (d_TD.to(exact) @ q_QD.to(exact).T).double()
    elif len(q_QD) <= FEW or q_QD.shape[1] == 1 or not int_mm_is_exact():  # of one dimension it makes garbage
        dots = simsimd.cdist(d_TD.numpy(), q_QD.numpy(), "dot", threads=torch.get_num_threads())
        dots_TQ = torch.from_numpy(np.asarray(dots))  # float64
    else:
        dots_TQ = torch._int_mm(d_TD, q_QD.T).double()
    return dots_TQ.mul_(inverse_T1).mul_(_inverse_norms(q_QD)).float()


def _unit(x_XD: Tensor) -> Tensor:
    """Floats as rows of length 1, in float32 or better. A row's largest entry is made 1 first: no square is
    too large or too small."""
    x_XD = x_XD.to(torch.promote_types(x_XD.dtype, torch.float32))
    return normalize(normalize(x_XD, p=torch.inf, eps=torch.finfo(x_XD.dtype).tiny))


def _inverse_norms(codes_XD: Tensor) -> Tensor:
    """1 / Euclidean norm (X,), float64, of int8 codes; zero for zero vectors."""
    norm_X = torch.empty(len(codes_XD), dtype=torch.float64, device=codes_XD.device)
    for part in parts(len(codes_XD), ROWS):  # kept one by one, they would lie in each other's freed rows
        norm_X[part] = codes_XD[part].double().norm(dim=1)
    return norm_X.reciprocal().masked_fill(norm_X == 0, 0)


def values(embeddings: Tensor) -> Tensor:
    """Embeddings as values: packed bits (uint8) become ±1, everything else stays."""
    if embeddings.is_floating_point() or embeddings.dtype == torch.int8:
        return embeddings
    if embeddings.dtype != torch.uint8:
        raise ValueError(f"embeddings are floats, int8 or uint8, got {embeddings.dtype}")
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=embeddings.device)
    bits = (embeddings[..., None] >> shifts) & 1
    return (2 * bits.to(torch.int8) - 1).flatten(-2)


def _tensor(x_XD: np.ndarray) -> Tensor:
    """An array as a tensor on the same memory."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nobody writes
        return torch.from_numpy(np.ascontiguousarray(x_XD))
