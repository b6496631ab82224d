"""Cosine similarity in every precision that embeddings come in, and each query's best documents, exactly or
approximately, without the matrix of all scores.

Shape suffixes: N queries · M documents · D dimensions · B bytes of packed bits · K ranks · Q queries and T
documents of a tile · G groups of documents · X, Y rows.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cache
from math import sqrt
from pathlib import Path

import faiss
import numpy as np
import torch
from faiss.contrib.ondisk import merge_ondisk
from torch import Tensor
from torch.nn.functional import normalize, pad

from unmask.data.mining import unit
from unmask.store import new_directory

METHODS = ("exact", "faiss")
Search = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]

# Queries and scores of a tile; on a CPU, its scores stay in the last cache.
TILES = {"cpu": (64, 2**20), "cuda": (1024, 2**26)}
CODES, FLOATS = 2**18, 2**14  # documents of a tile at most: codes are read where they are, floats copied
GROUP = 32  # documents that one comparison with the k-th best score rules out together
ROWS = 1024  # rows whose norms are computed at once: their copies as floats stay in the cache
EXACT_WIDTH = 1024  # 1024 · 127² < 2²⁴: float32 sums of so many INT8 products are exact in any order
SIMILARITIES = 2**25  # computed at once: 256 MiB in float64
RESCORED = (64, 1024)  # queries × candidates rescored at once
LISTS = 4.0  # faiss: so many times √M lists
PROBES = 64  # faiss: lists that a query looks into
TRAINING = 64  # faiss: documents that the centre of a list is computed from
ADDED = 65_536  # faiss: documents added at once


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
    q_ND, d_MD = _values(torch.as_tensor(queries)), _values(torch.as_tensor(documents))
    if q_ND.ndim != 2 or d_MD.ndim != 2 or q_ND.shape[1] != d_MD.shape[1]:
        raise ValueError(
            f"similarity needs (N, D) and (M, D) embeddings; got {tuple(q_ND.shape)} and "
            f"{tuple(d_MD.shape)} after unpacking."
        )
    if q_ND.is_floating_point() or d_MD.is_floating_point():
        dtype = torch.promote_types(torch.promote_types(q_ND.dtype, d_MD.dtype), torch.float32)
        return normalize(q_ND.to(dtype)) @ normalize(d_MD.to(dtype)).T
    inverse_M, scores_NM = _inverse_norms(d_MD), torch.empty(len(q_ND), len(d_MD), device=q_ND.device)
    rows = max(1, SIMILARITIES // max(1, len(d_MD)))
    for q_QD, scores_QM in zip(q_ND.split(rows), scores_NM.split(rows), strict=True):
        scores_QM.copy_(_scaled(_dots(q_QD, d_MD), _inverse_norms(q_QD)[:, None], inverse_M))
    return scores_NM


def top_k(
    q_ND: np.ndarray, d_MD: np.ndarray, k: int, *, method: str = "exact"
) -> tuple[np.ndarray, np.ndarray]:
    """The k documents most similar (cosine) to each query, best first.

    Args:
        q_ND, d_MD: embeddings of one precision, as for `similarity`; `d_MD` may be mapped into memory.
        method: "exact" or "faiss"; see `index`.
    Returns: scores (N, K), float32, and document numbers (N, K), int64, with K = min(k, M). Equal scores are
        in order of document number.
    Raises: ValueError for an unknown method or one that cannot take such embeddings; no queries, no
        documents or k below 1; two precisions or two numbers of dimensions; NaN.

    Example:
        >>> documents = np.array([[0, 1], [2, 2], [9, 1], [1, 1]], np.int8)
        >>> scores, ids = top_k(np.array([[1, 1]], np.int8), documents, 3)
        >>> ids.tolist()
        [[1, 3, 2]]
    """
    return index(d_MD, method)(q_ND, k)


def index(d_MD: np.ndarray, method: str = "exact") -> Search:
    """A search over documents, to be asked often: `search(q_ND, k)`, as `top_k`.

    "exact" compares everything, N · M · D multiplications, on the GPU if there is one: `Exact`. "faiss"
    groups the documents into 4 √M lists by k-means and looks into the 64 lists nearest to the query, on the
    CPU: 16 / √M of the documents, two bytes per dimension in memory, scores rounded to half precision. What
    is near but in a list further away is missed; up to 2,500 documents, nothing is. `save_index` keeps such
    lists in a file instead.

    Raises: ValueError as `top_k`.
    """
    if method not in METHODS:
        raise ValueError(f"unknown search {method!r}: choose one of {', '.join(METHODS)}")
    if method == "exact":
        return Exact(d_MD)
    found = _trained(d_MD)
    for start in range(0, len(d_MD), ADDED):
        found.add(unit(d_MD[start : start + ADDED]))
    return _searched(found)


class Exact:
    """Exact search. A score is the cosine, computed from exact dot products of codes and rounded once to
    float32, so that the same pair scores the same in any search.

    Tile by tile, documents are compared with all queries, and the best of each tile join the best so far.

    Args:
        d_MD: as for `top_k`; used where they are, and only their inverse norms are kept (8 bytes each).
    Raises: ValueError if there are no documents, or one contains NaN.
    """

    def __init__(self, d_MD: np.ndarray):
        _check(d_MD, "documents")
        self.d_MD = d_MD
        if d_MD.dtype == np.int8:
            parts = (_tensor(d_MD[start : start + CODES]) for start in range(0, len(d_MD), CODES))
            self.inverse_M = torch.cat([_inverse_norms(d_TD) for d_TD in parts])

    def __call__(self, q_ND: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """As `top_k`. Memory: N × K and one tile; documents that are mapped into memory are read where they
        are."""
        _check_queries(q_ND, k, self.d_MD.shape[1], self.d_MD.dtype)
        device, k = torch.device("cuda" if torch.cuda.is_available() else "cpu"), min(k, len(self.d_MD))
        if q_ND.dtype == np.uint8 and device.type == "cpu":
            return _nearest_bits(q_ND, self.d_MD, k)
        queries, step = self._tile(len(q_ND), device)
        q_tiles = _tensor(q_ND).to(device).split(queries)
        best: list = [None] * len(q_tiles)
        for start in range(0, len(self.d_MD), step):
            d_TD = _tensor(self.d_MD[start : start + step]).to(device)
            for tile, q_QD in enumerate(q_tiles):
                best[tile] = best_of(self._scores(q_QD, d_TD, start), k, start, best[tile])
        scores_NK, ids_NK = (torch.cat(parts).cpu().numpy() for parts in zip(*best, strict=True))
        return scores_NK, ids_NK

    def _tile(self, count: int, device: torch.device) -> tuple[int, int]:
        """Queries and documents of a tile."""
        queries, scores = TILES[device.type]
        longest = CODES
        if self.d_MD.dtype != np.int8 or not int_mm_is_exact(device):
            queries, longest = 4 * queries, FLOATS  # documents are copied for each tile of queries
        step = min(longest, scores // min(queries, count))
        return queries, max(step // GROUP, 1) * GROUP

    def _scores(self, q_QD: Tensor, d_TD: Tensor, start: int) -> Tensor:
        """Cosines (T, Q): with documents as rows, the product and its maxima are fastest."""
        if d_TD.dtype != torch.int8:
            return similarity(d_TD, q_QD).float()
        inverse_T1 = self.inverse_M[start : start + len(d_TD), None].to(d_TD.device)
        return _scaled(_dots(d_TD, q_QD), _inverse_norms(q_QD), inverse_T1)


def best_of(
    scores_TQ: Tensor, k: int, start: int = 0, before: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """The k best of each column, in order: scores and rows (Q, K). Of equal scores, the earlier is better.

    Rows come in groups. A group whose maximum is below the k-th highest maximum, or not above the k-th best
    score so far, holds nothing that is needed; all others are sorted.

    Args:
        scores_TQ: not NaN.
        start: number of the first row.
        before: what was found in rows before `start`, to be joined.
    """
    if missing := -len(scores_TQ) % GROUP:
        scores_TQ = pad(scores_TQ, (0, 0, 0, missing), value=-torch.inf)
    scores_GTQ = scores_TQ.unflatten(0, (-1, GROUP))
    highest_QG = scores_GTQ.amax(dim=1).T.contiguous()
    if before is None or before[0].shape[1] < k:
        least_Q1 = highest_QG.topk(min(k, highest_QG.shape[1])).values[:, -1:]
    else:  # above the worst so far
        least_Q1 = before[0][:, -1:].nextafter(torch.full_like(highest_QG[:, :1], torch.inf))
    count = int((highest_QG >= least_Q1).sum(dim=1).max())
    group_QC1 = highest_QG.topk(count).indices.sort().values[..., None]
    scores_QX = scores_GTQ.permute(2, 0, 1).gather(1, group_QC1.expand(-1, -1, GROUP)).flatten(1)
    ids_QX = (start + GROUP * group_QC1 + torch.arange(GROUP, device=group_QC1.device)).flatten(1)
    if before is not None:
        scores_QX, ids_QX = (torch.cat(parts, dim=1) for parts in zip(before, (scores_QX, ids_QX)))
    order_QK = scores_QX.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return scores_QX.gather(1, order_QK), ids_QX.gather(1, order_QK)


def two_step(
    q_ND: np.ndarray,
    d_MD: np.ndarray,
    q_bits_NB: np.ndarray,
    d_bits_MB: np.ndarray,
    k: int,
    *,
    candidates: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Binary search first, rescoring after: an eighth of the memory is read for all documents, the rest for
    the candidates alone.

    The `candidates` documents nearest in Hamming distance (ties by document number) are ordered by the cosine
    of the other embeddings, usually INT8 codes. With as many candidates as documents, this is exact search.

    Args:
        q_ND, d_MD: as for `top_k`; `d_MD` may be mapped into memory, and only the candidates are read.
        q_bits_NB, d_bits_MB: the same texts as packed bits, uint8.
        candidates: per query, from k to M (more are M).
    Returns: as `top_k`.
    Raises: ValueError if the two kinds of embeddings do not match, or there are fewer candidates than k.

    Memory: N × candidates, and the embeddings of 64 × 1,024 candidates.
    """
    if len(q_ND) != len(q_bits_NB) or len(d_MD) != len(d_bits_MB) or d_bits_MB.dtype != np.uint8:
        raise ValueError(
            "two_step needs both kinds of embeddings of the same texts, and packed bits as uint8"
        )
    if candidates < k:
        raise ValueError(f"candidates is {candidates}: the {k} best are chosen from them, so it must be more")
    ids_NC = np.sort(top_k(q_bits_NB, d_bits_MB, candidates)[1], axis=1)
    scores_NC = np.empty(ids_NC.shape, np.float32)
    queries, some = RESCORED
    for row in range(0, len(ids_NC), queries):
        for column in range(0, ids_NC.shape[1], some):
            tile = slice(row, row + queries), slice(column, column + some)
            ids_X, place_QC = np.unique(ids_NC[tile], return_inverse=True)
            scores_QX = similarity(q_ND[tile[0]], d_MD[ids_X]).numpy()
            scores_NC[tile] = np.take_along_axis(scores_QX, place_QC, 1)
    return _ordered(scores_NC, ids_NC, k)


def save_index(d_MD: np.ndarray, path: str | Path) -> Path:
    """Writes the index of method "faiss" into a new folder, for corpora larger than memory.

    Two bytes per dimension, and twice that on the disk while it is written. In memory: 65,536 documents, and
    64 documents per list (256 √M) for the k-means. The folder appears when it is complete.

    Returns: the folder.
    Raises: FileExistsError if it exists; ValueError as `index`.
    """
    path = Path(path).absolute()
    if path.exists():
        raise FileExistsError(f"{path} exists: remove it, or save the index elsewhere")
    found, shards = _trained(d_MD), []
    with new_directory(path) as folder:
        folder.mkdir(parents=True)
        for start in range(0, len(d_MD), ADDED):
            d_TD = d_MD[start : start + ADDED]
            found.add_with_ids(unit(d_TD), np.arange(start, start + len(d_TD)))
            shards.append(str(folder / f"shard-{start}"))
            faiss.write_index(found, shards[-1])
            found.reset()
        merge_ondisk(found, shards, str(folder / "lists"))
        faiss.write_index(found, str(folder / "index"))
        for shard in shards:
            os.remove(shard)
    return path


def open_index(path: str | Path) -> Search:
    """The search over documents of `save_index`, as that of `index`. The lists stay in their file, mapped
    into memory: what a query looks into is read.

    Raises: FileNotFoundError if there is no index.
    """
    path = Path(path).absolute()
    if not (path / "index").is_file():
        raise FileNotFoundError(f"{path} holds no index: write one with save_index")
    return _searched(
        faiss.read_index(str(path / "index"), faiss.IO_FLAG_READ_ONLY | faiss.IO_FLAG_ONDISK_SAME_DIR)
    )


@cache
def int_mm_is_exact(device: torch.device) -> bool:
    """Whether torch multiplies INT8 matrices exactly here. On processors without VNNI instructions, sums
    overflow; GPUs may not know the operation."""
    largest = torch.full((32, 64), 127, dtype=torch.int8, device=device)
    try:
        return bool((torch._int_mm(largest, largest.T) == 64 * 127**2).all())
    except RuntimeError:
        return False


def _dots(a_XD: Tensor, b_YD: Tensor) -> Tensor:
    """Exact dot products (X, Y), int32, of two matrices of int8 codes."""
    a_XD, b_YD = a_XD.contiguous(), b_YD.contiguous()
    if not int_mm_is_exact(a_XD.device):
        parts = zip(a_XD.float().split(EXACT_WIDTH, 1), b_YD.float().split(EXACT_WIDTH, 1), strict=True)
        return sum((a_XW @ b_YW.T).int() for a_XW, b_YW in parts)
    if a_XD.is_cuda:
        return torch._int_mm(_padded(a_XD), _padded(b_YD).T)[: len(a_XD), : len(b_YD)]
    return torch._int_mm(a_XD, b_YD.T)


def _padded(x_XD: Tensor) -> Tensor:
    """Zeros around a matrix: CUDA multiplies integers from 17 rows on, in multiples of 8 both ways."""
    rows, size = x_XD.shape
    return pad(x_XD, (0, -size % 8, 0, max(24 - rows, -rows % 8)))


def _scaled(dots_XY: Tensor, q_inverse: Tensor, d_inverse: Tensor) -> Tensor:
    """Dot products times both inverse norms: cosines, computed in float64 and rounded once to float32, always
    in the same order, so that the same pair scores the same wherever it is compared."""
    return dots_XY.double().mul_(d_inverse).mul_(q_inverse).float()


def _inverse_norms(codes_XD: Tensor) -> Tensor:
    """1 / Euclidean norm (X,), float64, of int8 codes; zero for zero vectors."""
    norm_X = torch.cat([rows_RD.double().norm(dim=1) for rows_RD in codes_XD.split(ROWS)])
    return norm_X.reciprocal().masked_fill(norm_X == 0, 0)


def _values(embeddings: Tensor) -> Tensor:
    """Embeddings as values: packed bits (uint8) become ±1, everything else stays."""
    if embeddings.dtype != torch.uint8:
        return embeddings
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=embeddings.device)
    bits = (embeddings[..., None] >> shifts) & 1
    return (2 * bits.to(torch.int8) - 1).flatten(-2)


def _nearest_bits(q_NB: np.ndarray, d_MB: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The search of packed bits, for which faiss counts and keeps the k best in one pass. Its heaps keep the
    lowest numbers of equal distances, and need only be put in order."""
    distance_NK, ids_NK = faiss.knn_hamming(np.ascontiguousarray(q_NB), np.ascontiguousarray(d_MB), k)
    return _ordered(1 - distance_NK.astype(np.float32) * np.float32(2 / (8 * q_NB.shape[1])), ids_NK, k)


def _ordered(scores_NX: np.ndarray, ids_NX: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k best, equal scores by ascending number."""
    order_NK = np.lexsort((ids_NX, -scores_NX))[:, :k]
    return np.take_along_axis(scores_NX, order_NK, 1), np.take_along_axis(ids_NX, order_NK, 1)


def _trained(d_MD: np.ndarray) -> faiss.IndexIVFScalarQuantizer:
    """A faiss index with its lists, still empty."""
    _check(d_MD, "documents")
    if d_MD.dtype == np.uint8:
        raise ValueError('the search "faiss" compares codes or floats, not packed bits: use "exact"')
    documents, size = d_MD.shape
    lists = max(1, min(round(LISTS * sqrt(documents)), documents // 39))  # k-means wants 39 documents each
    found = faiss.IndexIVFScalarQuantizer(
        faiss.IndexFlatIP(size), size, lists, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT, False
    )
    rng = np.random.default_rng(0)
    found.train(unit(d_MD[np.sort(rng.permutation(documents)[: TRAINING * lists])]))
    return found


def _searched(found: faiss.IndexIVF) -> Search:
    some, every = (faiss.SearchParametersIVF(nprobe=n) for n in (min(PROBES, found.nlist), found.nlist))

    def search(q_ND: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        _check_queries(q_ND, k, found.d)
        q_ND, k = unit(q_ND), min(k, found.ntotal)
        scores_NK, ids_NK = found.search(q_ND, k, params=some)
        short = np.flatnonzero((ids_NK < 0).any(axis=1))  # the lists held fewer
        if len(short):
            scores_NK[short], ids_NK[short] = found.search(q_ND[short], k, params=every)
        return _ordered(scores_NK, ids_NK, k)

    return search


def _tensor(x_XD: np.ndarray) -> Tensor:
    """An array as a tensor on the same memory."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nobody writes
        return torch.from_numpy(np.ascontiguousarray(x_XD))


def _check(x_XD: np.ndarray, name: str) -> None:
    if x_XD.ndim != 2 or not len(x_XD):
        raise ValueError(f"a search needs {name} as a matrix of one or more rows, got shape {x_XD.shape}")
    if x_XD.dtype.kind == "f" and np.isnan(x_XD.min()):
        row = int(np.isnan(x_XD).any(axis=1).argmax())
        raise ValueError(f"row {row} of the {name} contains NaN: look for what computed it")


def _check_queries(q_ND: np.ndarray, k: int, size: int, dtype: np.dtype | None = None) -> None:
    _check(q_ND, "queries")
    if k < 1:
        raise ValueError(f"k is {k}: ask for one document or more")
    if q_ND.shape[1] != size:
        raise ValueError(f"the queries have {q_ND.shape[1]} columns and the documents {size}")
    if dtype is not None and dtype != q_ND.dtype and not dtype.kind == q_ND.dtype.kind == "f":
        raise ValueError(f"queries are {q_ND.dtype} and documents {dtype}: encode both in one precision")
