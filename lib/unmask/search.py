"""Nearest-neighbour search: every query's best documents, exactly or approximately, without the matrix of
all scores.

Shape suffixes: N queries · M documents · D dimensions · K ranks · T documents of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import numpy as np
import torch
from torch import Tensor

from unmask.similarity import similarity

METHODS = ("exact", "faiss")
Search = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]

TILES = {"cpu": (128, 4096), "cuda": (1024, 65_536)}  # queries × documents; on a CPU they fit into a cache
LAST = 2**32 - 1  # largest number of a document
LISTS = 4.0  # faiss: so many times √M lists
PROBES = 64  # faiss: lists that a query looks into
TRAINING = 64  # faiss: documents that the centre of a list is computed from
ADDED = 65_536  # faiss: documents added at once


def top_k(
    q_ND: np.ndarray, d_MD: np.ndarray, k: int, *, method: str = "exact"
) -> tuple[np.ndarray, np.ndarray]:
    """The k documents most similar (cosine) to each query, best first.

    Args:
        q_ND, d_MD: embeddings of any precision, as for `unmask.evaluation.similarity`; `d_MD` may be mapped
            into memory. Finite values.
        method: "exact" or "faiss"; see `index`.
    Returns: scores (N, K), float32, and document numbers (N, K), int64, with K = min(k, M). Equal scores are
        in order of document number.
    Raises: ValueError for an unknown method, one that cannot take such embeddings, or nothing to search.

    Example:
        >>> documents = np.array([[0, 1], [2, 2], [9, 1], [1, 1]], np.int8)
        >>> scores, ids = top_k(np.array([[1, 1]], np.int8), documents, 3)
        >>> ids.tolist()
        [[1, 3, 2]]
    """
    if not len(q_ND) or not len(d_MD):
        raise ValueError(f"a search needs queries and documents, got {len(q_ND)} and {len(d_MD)}")
    return index(d_MD, method)(q_ND, k)


def index(d_MD: np.ndarray, method: str = "exact") -> Search:
    """A search over documents, to be asked often: `search(q_ND, k)`, as `top_k`.

    "exact" compares everything, N · M · D multiplications, on the GPU if there is one, and needs no memory
    beyond a tile. "faiss" groups the documents into 4 √M lists by k-means and looks into the 64 lists
    nearest to the query, on the CPU: 16 / √M of the documents, two bytes per dimension in memory, scores
    rounded to half precision. What is near but in a list further away is missed; up to 2,500 documents,
    nothing is.

    Raises: ValueError as `top_k`.
    """
    if method not in METHODS:
        raise ValueError(f"unknown search {method!r}: choose one of {', '.join(METHODS)}")
    if method == "faiss":
        return _faiss(d_MD)
    return lambda q_ND, k: exact(q_ND, d_MD, k)


def exact(
    q_ND: np.ndarray,
    d_MD: np.ndarray,
    k: int,
    *,
    ceiling_N: np.ndarray | None = None,
    lowest: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """As `top_k`; optionally only among documents that score at most `ceiling_N`, or lowest scores first.

    Where fewer than K documents are under the ceiling, the rest of the scores is −inf.

    Memory: N × K and one tile.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    queries, documents = TILES[device]
    q_ND = torch.as_tensor(np.asarray(q_ND), device=device)
    best: list[Tensor | None] = [None] * -(-len(q_ND) // queries)
    ceilings = None if ceiling_N is None else torch.as_tensor(ceiling_N, device=device).split(queries)
    for start in range(0, len(d_MD), documents):
        d_TD = torch.as_tensor(np.array(d_MD[start : start + documents]), device=device)
        falling_T = LAST - torch.arange(start, start + len(d_TD), device=device)
        for number, q_QD in enumerate(q_ND.split(queries)):
            scores_QT = similarity(q_QD, d_TD).float()
            if ceilings is not None:
                scores_QT.masked_fill_(scores_QT > ceilings[number][:, None], -torch.inf)
            keys_QT = _keys(-scores_QT if lowest else scores_QT, falling_T)
            if best[number] is not None:
                keys_QT = torch.cat([best[number], keys_QT], dim=1)
            best[number] = keys_QT.topk(min(k, keys_QT.shape[1])).values
    keys_NK = torch.cat(best).cpu().numpy()
    scores_NK = _scores(keys_NK)
    return -scores_NK if lowest else scores_NK, LAST - (keys_NK & LAST)


def _keys(scores_QT: Tensor, falling_T: Tensor) -> Tensor:
    """Whole numbers that sort like (score, −document number): without ties, any top-k is deterministic.

    The bits of a float, read as a whole number, sort like the float once those of negative ones are turned
    round.
    """
    bits_QT = (scores_QT + 0.0).view(torch.int32)  # adding zero turns −0.0, which equals 0.0, into it
    bits_QT ^= (bits_QT >> 31) & 0x7FFFFFFF
    return torch.add(falling_T, bits_QT, alpha=2**32)


def _scores(keys_NK: np.ndarray) -> np.ndarray:
    bits_NK = (keys_NK >> 32).astype(np.int32)
    bits_NK ^= (bits_NK >> 31) & 0x7FFFFFFF
    return bits_NK.view(np.float32)


def _faiss(d_MD: np.ndarray) -> Search:
    import faiss  # slow to import, and only this search needs it

    if d_MD.dtype == np.uint8:
        raise ValueError('the search "faiss" compares codes or floats, not packed bits: use "exact"')
    documents, size = d_MD.shape
    lists = max(1, min(round(LISTS * sqrt(documents)), documents // 39))  # k-means wants 39 documents each
    found = faiss.IndexIVFScalarQuantizer(
        faiss.IndexFlatIP(size), size, lists, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT, False
    )
    rng = np.random.default_rng(0)
    found.train(unit(d_MD[np.sort(rng.permutation(documents)[: TRAINING * lists])]))
    for start in range(0, documents, ADDED):
        found.add(unit(d_MD[start : start + ADDED]))
    probes = faiss.SearchParametersIVF(nprobe=min(PROBES, lists))

    def search(q_ND: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        scores_NK, ids_NK = found.search(unit(q_ND), min(k, documents), params=probes)
        short = np.flatnonzero((ids_NK < 0).any(axis=1))  # the lists held fewer
        if len(short):
            scores_NK[short], ids_NK[short] = exact(q_ND[short], d_MD, k)
        order_NK = np.lexsort((ids_NK, -scores_NK))
        return np.take_along_axis(scores_NK, order_NK, 1), np.take_along_axis(ids_NK, order_NK, 1)

    return search


def unit(x_XD: np.ndarray) -> np.ndarray:
    """Codes or floats as float32 vectors of length one; zero vectors stay."""
    x_XD = np.asarray(x_XD, np.float32)
    norm_X1 = np.linalg.norm(x_XD, axis=1, keepdims=True)
    return x_XD / np.where(norm_X1 == 0, 1, norm_X1)
