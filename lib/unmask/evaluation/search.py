"""Nearest-neighbour search: every query's best documents, exactly or approximately, without the matrix of
all scores.

Shape suffixes: N queries · M documents · D dimensions · B bytes of packed bits · K ranks · Q queries and T
documents of a tile · G groups of documents · C candidates.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from unmask.models.similarity import (
    bit_cosines,
    dots,
    from_hamming,
    int_mm_is_exact,
    inverse_norms,
    scaled,
    similarity,
)

METHODS = ("exact", "faiss")
Search = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]

# Queries and scores of a tile; on a CPU, its scores stay in the last cache.
TILES = {"cpu": (64, 2**20), "cuda": (1024, 2**26)}
CODES, FLOATS = 2**18, 2**14  # documents of a tile at most: codes are read where they are, floats copied
GROUP = 32  # documents that one comparison with the k-th best score rules out together
LAST = 2**32 - 1  # largest number of a document
HEAPED = 256  # ranks up to which a heap per query is fastest
RESCORED = (64, 1024)  # queries × candidates rescored at once
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
    """Exact search. A score is the cosine, computed from exact dot products where both sides are codes of
    the same kind and rounded once to float32, so that the same pair scores the same in any search.

    Tile by tile, documents are compared with all queries, and `best_keys` merges the k best of each tile
    with those before.

    Args:
        d_MD: as for `top_k`; used where they are, and only their inverse norms are kept (8 bytes each).
    Raises: ValueError if there are no documents.
    """

    def __init__(self, d_MD: np.ndarray):
        if not len(d_MD):
            raise ValueError("a search needs documents, got 0")
        self.d_MD = d_MD
        if d_MD.dtype == np.int8:
            parts = (_tensor(d_MD[start : start + CODES]) for start in range(0, len(d_MD), CODES))
            self.inverse_M = torch.cat([inverse_norms(d_TD) for d_TD in parts])

    def __call__(
        self, q_ND: np.ndarray, k: int, *, ceiling_N: np.ndarray | None = None, lowest: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `top_k`; optionally only among documents that score at most `ceiling_N`, or lowest scores first.

        Where fewer than K documents are under the ceiling, the rest of the scores is −inf.

        Memory: N × K and one tile; documents that are mapped into memory are read where they are.
        """
        device = "cuda" if torch.cuda.is_available() else "cpu"
        k = min(k, len(self.d_MD))
        packed = q_ND.dtype == self.d_MD.dtype == np.uint8
        if packed and device == "cpu" and k <= HEAPED and ceiling_N is None and not lowest:
            return _nearest_bits(q_ND, self.d_MD, k)
        queries, scores = TILES[device]
        q_ND = _tensor(q_ND).to(device)
        longest = CODES
        stay = q_ND.dtype == torch.uint8 or (q_ND.dtype == torch.int8 and int_mm_is_exact(q_ND.device))
        if not stay or q_ND.dtype != _tensor(self.d_MD[:1]).dtype:
            # Documents are copied as floats for each tile of queries.
            queries, longest = 4 * queries, FLOATS
        step = min(longest, scores // min(queries, len(q_ND)))
        step = max(step // GROUP, 1) * GROUP
        q_tiles = q_ND.split(queries)
        best = [torch.empty(len(q_QD), 0, dtype=torch.int64, device=device) for q_QD in q_tiles]
        ceilings = None if ceiling_N is None else torch.as_tensor(ceiling_N, device=device).split(queries)
        for start in range(0, len(self.d_MD), step):
            d_TD = _tensor(self.d_MD[start : start + step]).to(device)
            places = _places(start, device)
            for number, q_QD in enumerate(q_tiles):
                scores_TQ = self._scores(q_QD, d_TD, start)
                if ceilings is not None:
                    scores_TQ.masked_fill_(scores_TQ > ceilings[number], -torch.inf)
                if lowest:
                    scores_TQ.neg_()
                scores_GTQ = filled(scores_TQ.T, -torch.inf).T.reshape(-1, GROUP, len(q_QD))
                highest_QG = scores_GTQ.amax(dim=1).T.contiguous()
                scores_QTG = scores_GTQ.permute(2, 1, 0)
                best[number] = best_keys(scores_QTG, highest_QG, places, k, best[number])
        keys_NK = torch.cat(best).cpu()
        scores_NK, ids_NK = _scores(keys_NK).numpy(), (LAST - (keys_NK & LAST)).numpy()
        return -scores_NK if lowest else scores_NK, ids_NK

    def _scores(self, q_QD: Tensor, d_TD: Tensor, start: int) -> Tensor:
        if q_QD.dtype == d_TD.dtype == torch.uint8:
            return bit_cosines(d_TD, q_QD)
        if q_QD.dtype == d_TD.dtype == torch.int8:
            inverse_T1 = self.inverse_M[start : start + len(d_TD), None].to(d_TD.device)
            return scaled(dots(d_TD, q_QD), inverse_norms(q_QD), inverse_T1)
        return similarity(d_TD, q_QD).float()


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
            f"two_step needs both kinds of embeddings of the same texts, and packed bits as uint8; got "
            f"{len(q_ND)} and {len(q_bits_NB)} queries, {len(d_MD)} and {len(d_bits_MB)} documents, "
            f"{d_bits_MB.dtype}"
        )
    if candidates < k:
        raise ValueError(f"candidates is {candidates}: the {k} best are chosen from them, so it must be more")
    ids_NC = np.sort(top_k(q_bits_NB, d_bits_MB, candidates)[1], axis=1)
    scores_NC = np.empty(ids_NC.shape, np.float32)
    queries, some = RESCORED
    for row in range(0, len(ids_NC), queries):
        for column in range(0, ids_NC.shape[1], some):
            tile = slice(row, row + queries), slice(column, column + some)
            ids_U, place_QC = np.unique(ids_NC[tile], return_inverse=True)
            scores_QU = similarity(q_ND[tile[0]], d_MD[ids_U]).numpy()
            scores_NC[tile] = np.take_along_axis(scores_QU, place_QC, 1)
    order_NK = np.argsort(-scores_NC, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores_NC, order_NK, 1), np.take_along_axis(ids_NC, order_NK, 1)


def save_index(d_MD: np.ndarray, path: str | Path) -> Path:
    """Writes the index of method "faiss" into a new folder, for corpora larger than memory.

    Two bytes per dimension, and twice that on the disk while it is written. In memory: 65,536 documents, and
    64 documents per list (256 √M) for the k-means. The folder appears when it is complete.

    Returns: the folder.
    Raises: FileExistsError if it exists; ValueError as `index`.
    """
    import faiss
    from faiss.contrib.ondisk import merge_ondisk

    path = Path(path).absolute()
    if path.exists():
        raise FileExistsError(f"{path} exists: remove it, or save the index elsewhere")
    found = _trained(d_MD)
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
        shards = []
        for start in range(0, len(d_MD), ADDED):
            d_TD = d_MD[start : start + ADDED]
            found.add_with_ids(unit(d_TD), np.arange(start, start + len(d_TD)))
            shards.append(f"{scratch}/{len(shards)}")
            faiss.write_index(found, shards[-1])
            found.reset()
        complete = Path(scratch, "complete")
        complete.mkdir()
        merge_ondisk(found, shards, str(complete / "lists"))
        faiss.write_index(found, str(complete / "index"))
        os.rename(complete, path)
    return path


def open_index(path: str | Path) -> Search:
    """The search over documents of `save_index`, as that of `index`. The lists stay in their file, mapped
    into memory: what a query looks into is read.

    Raises: FileNotFoundError if there is no index.
    """
    import faiss

    path = Path(path).absolute()
    if not (path / "index").is_file():
        raise FileNotFoundError(f"{path} holds no index: write one with save_index")
    return _searched(
        faiss.read_index(str(path / "index"), faiss.IO_FLAG_READ_ONLY | faiss.IO_FLAG_ONDISK_SAME_DIR)
    )


def best_keys(
    scores_QTG: Tensor,
    highest_QG: Tensor,
    places: Callable[[Tensor], Tensor],
    k: int,
    best_QK: Tensor | None = None,
) -> Tensor:
    """The k best of each query's scores, in order, as keys: whole numbers that sort like (score, place).

    Documents come in groups. If the maximum of a group is below the k-th highest maximum, or not above the
    k-th best score of `best_QK`, none of its documents is needed; for those of the other groups, keys are
    made.

    Args:
        scores_QTG: of documents in G groups of T, not NaN.
        highest_QG: the maxima of the groups.
        places: from groups (Q, C) the places (Q, T, C) of their documents, from −1 to LAST, all different;
            of equal scores, the higher place is better.
        best_QK: keys found before, of documents with higher places than these.
    """
    group_QC = None
    if best_QK is not None and best_QK.shape[1] == k:
        worst_Q = _scores(best_QK[:, -1])
        floor_Q = torch.nextafter(worst_Q, torch.full_like(worst_Q, torch.inf))
    else:
        high_QC, group_QC = highest_QG.topk(min(k, highest_QG.shape[1]))
        floor_Q = high_QC[:, -1]
    count = int((highest_QG >= floor_Q[:, None]).sum(dim=1).max())
    if group_QC is None or count != group_QC.shape[1]:  # more, if some are equal
        group_QC = highest_QG.topk(count, sorted=False).indices
    chosen_QTC = scores_QTG.gather(2, group_QC[:, None].expand(-1, scores_QTG.shape[1], -1))
    keys_QX = _keys(chosen_QTC, places(group_QC)).flatten(1)
    if best_QK is not None:
        keys_QX = torch.cat([best_QK, keys_QX], dim=1)
    return keys_QX.topk(min(k, keys_QX.shape[1])).values


def _nearest_bits(q_NB: np.ndarray, d_MB: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The search of packed bits, for which faiss counts and keeps the k best in one pass. Its heaps keep the
    lowest numbers of equal distances, and need only be put in order."""
    import faiss

    distance_NK, ids_NK = faiss.knn_hamming(np.ascontiguousarray(q_NB), np.ascontiguousarray(d_MB), k)
    order_NK = np.lexsort((ids_NK, distance_NK))
    distance_NK, ids_NK = (np.take_along_axis(rows, order_NK, 1) for rows in (distance_NK, ids_NK))
    return from_hamming(torch.from_numpy(distance_NK), 8 * q_NB.shape[1]).numpy(), ids_NK


def _places(start: int, device: str) -> Callable[[Tensor], Tensor]:
    """For `best_keys`: the lower the number of a document, the higher its place."""
    first_T1 = LAST - start - torch.arange(GROUP, device=device)[:, None]
    return lambda group_QC: first_T1 - GROUP * group_QC[:, None]


def filled(x_XT: Tensor, value: float) -> Tensor:
    """Columns added, so that their number divides into groups."""
    missing = -x_XT.shape[-1] % GROUP
    return torch.cat([x_XT, x_XT.new_full((*x_XT.shape[:-1], missing), value)], dim=-1) if missing else x_XT


def _keys(scores: Tensor, place: Tensor) -> Tensor:
    """Whole numbers that sort like (score, place): without ties, any top-k is deterministic.

    The bits of a float, read as a whole number, sort like the float once those of negative ones are turned
    round.
    """
    bits = (scores + 0.0).view(torch.int32)  # adding zero turns −0.0, which equals 0.0, into it
    bits ^= (bits >> 31) & 0x7FFFFFFF
    return torch.add(place, bits, alpha=2**32)


def _scores(keys: Tensor) -> Tensor:
    bits = (keys >> 32).int()
    bits ^= (bits >> 31) & 0x7FFFFFFF
    return bits.view(torch.float32)


def _tensor(x_XD: np.ndarray) -> Tensor:
    """An array as a tensor on the same memory."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nobody writes
        return torch.from_numpy(np.ascontiguousarray(x_XD))


def _trained(d_MD: np.ndarray):
    """A faiss index with its lists, still empty."""
    import faiss  # slow to import, and only this search needs it

    if not len(d_MD):
        raise ValueError("a search needs documents, got 0")
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


def _searched(found) -> Search:
    import faiss

    def search(q_ND: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        q_ND, k = unit(q_ND), min(k, found.ntotal)
        some, every = (faiss.SearchParametersIVF(nprobe=n) for n in (min(PROBES, found.nlist), found.nlist))
        scores_NK, ids_NK = found.search(q_ND, k, params=some)
        short = np.flatnonzero((ids_NK < 0).any(axis=1))  # the lists held fewer
        if len(short):
            scores_NK[short], ids_NK[short] = found.search(q_ND[short], k, params=every)
        order_NK = np.lexsort((ids_NK, -scores_NK))
        return np.take_along_axis(scores_NK, order_NK, 1), np.take_along_axis(ids_NK, order_NK, 1)

    return search


def unit(x_XD: np.ndarray) -> np.ndarray:
    """Codes or floats as float32 vectors of length one; zero vectors stay."""
    x_XD = np.asarray(x_XD, np.float32)
    norm_X1 = np.linalg.norm(x_XD, axis=1, keepdims=True)
    return x_XD / np.where(norm_X1 == 0, 1, norm_X1)
