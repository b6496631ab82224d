"""The rule by which hard negatives are chosen, on vectors; `unmask.data.mining` brings texts to it.

Shape suffixes: N pairs · M distinct documents · U distinct texts · D dimensions · R rows of a block · S some
rows of it · W ranks of the window · K negatives per query · X as many as wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from tqdm.auto import tqdm

from unmask.config import TripletConfig
from unmask.evaluation.search import Exact, index, similarity

Found = tuple[np.ndarray, np.ndarray]  # scores and numbers of documents

ROWS = 4096  # queries searched at once
SPARE = 16  # documents searched beyond those wanted, since some are the query's own
SCORES = 2**23  # scores kept at once while a search goes deeper


@dataclass(frozen=True)
class Mining:
    """What was mined for one data set. A rank counts the documents that could be negatives; what is below the
    window has rank W + 1.

    `looked_at` are the documents down to the end of each query's window: `own` of them belong to the pair or
    its like, `unsafe` of them are more than the margin better than the positive.
    """

    pairs: int
    documents: int  # distinct ones
    window: int
    positive_similarity: np.ndarray  # (N,)
    negative_similarity: np.ndarray  # (N, K)
    positive_rank: np.ndarray  # (N,)
    negative_rank: np.ndarray  # (N, K)
    looked_at: int
    own: int
    unsafe: int
    last_resort: int  # negatives above the margin, for want of others

    def shares(self) -> dict[str, float]:
        """Shares of the documents looked at that were skipped, and of the negatives that are not from the
        window."""
        below = int((self.negative_rank > self.window).sum())
        return {
            "skipped: own": self.own / self.looked_at,
            "skipped: margin": self.unsafe / self.looked_at,
            "from below the window": below / self.negative_rank.size,
            "last resort": self.last_resort / self.negative_rank.size,
        }


class Own:
    """Tells which documents are a row's own: those of rows that share its number in one of the groupings."""

    def __init__(self, groupings: Sequence[np.ndarray], document_N: np.ndarray):
        self.documents = int(document_N.max()) + 1
        self._document_N = document_N
        self._groupings = groupings
        self._links = [np.unique(group_N * self.documents + document_N) for group_N in groupings]

    def __call__(self, rows: np.ndarray, ids_RX: np.ndarray) -> np.ndarray:
        hit_RX = np.zeros(ids_RX.shape, bool)
        for group_N, links in zip(self._groupings, self._links, strict=True):
            link_RX = group_N[rows, None] * self.documents + ids_RX
            place_RX = np.minimum(np.searchsorted(links, link_RX), len(links) - 1)
            hit_RX |= links[place_RX] == link_RX
        return hit_RX

    def check(self, wanted: int) -> None:
        """Raises: ValueError if a row has fewer than `wanted` documents that are not its own."""
        sizes = [np.bincount(links // self.documents) for links in self._links]
        at_most_N = sum(size[group_N] for size, group_N in zip(sizes, self._groupings, strict=True))
        for row in np.flatnonzero(at_most_N > self.documents - wanted):
            like_N = np.any([group_N == group_N[row] for group_N in self._groupings], axis=0)
            others = self.documents - len(np.unique(self._document_N[like_N]))
            if others < wanted:
                raise ValueError(
                    f"too few distinct documents for {wanted} negatives per query: of {self.documents}, row "
                    f"{row} leaves {others} that do not share its key, query or document; leave the data "
                    "set out, or set triplet.negatives lower"
                )


def choose(
    q_UD: np.ndarray,
    d_MD: np.ndarray,
    query_N: np.ndarray,
    document_N: np.ndarray,
    own: Own,
    config: TripletConfig,
) -> tuple[np.ndarray, Mining]:
    """The documents (N, K) that `mine` chooses, and what was found."""
    pairs, documents, count = len(query_N), len(d_MD), config.negatives
    # A narrower window would be filled up to so many in the same order anyway.
    window = min(max(config.rank_window, count), documents)
    search, rng = index(d_MD, config.search), np.random.default_rng(config.seed)
    whole = search if isinstance(search, Exact) else Exact(d_MD)
    positive_N = _paired(q_UD, query_N, d_MD, document_N)
    ceiling_N = positive_N + np.float32(config.margin)

    def best(rows: np.ndarray, depth: int) -> Found:
        return search(q_UD[query_N[rows]], depth)

    def best_safe(rows: np.ndarray, depth: int) -> Found:
        return whole(q_UD[query_N[rows]], depth, ceiling_N=ceiling_N[rows])

    def worst(rows: np.ndarray, depth: int) -> Found:
        return whole(q_UD[query_N[rows]], depth, lowest=True)

    ids_NK, rank_NK = np.empty((2, pairs, count), np.int64)
    score_NK, rank_N = np.empty((pairs, count), np.float32), np.empty(pairs, np.int64)
    looked_at = own_seen = unsafe_seen = 0
    for part in tqdm(parts(pairs, ROWS), desc="searching", unit="block", leave=False):
        rows = np.arange(pairs)[part]
        score_RW, ids_RW, own_R = _others(best, rows, window, own)
        known_RW = ids_RW >= 0
        safe_RW = known_RW & (score_RW <= ceiling_N[part, None])
        lottery_RW = np.where(safe_RW, rng.random(safe_RW.shape), np.inf)
        drawn_RK = np.argsort(lottery_RW, axis=1)[:, :count]
        ids_NK[part] = np.take_along_axis(ids_RW, drawn_RK, 1)
        score_NK[part] = np.take_along_axis(score_RW, drawn_RK, 1)
        short = rows[safe_RW.sum(axis=1) < count]
        for find in (best_safe, worst):
            if len(short):
                score_NK[short], ids_NK[short], _ = _others(find, short, count, own)
                short = short[(ids_NK[short] < 0).any(axis=1)]
        hit_RKW = ids_NK[part, :, None] == ids_RW[:, None]
        rank_NK[part] = 1 + np.where(hit_RKW.any(axis=2), hit_RKW.argmax(axis=2), window)
        rank_N[part] = 1 + (score_RW > positive_N[part, None]).sum(axis=1)
        looked_at += int(own_R.sum() + known_RW.sum())
        own_seen += int(own_R.sum())
        unsafe_seen += int((known_RW & ~safe_RW).sum())
    assert (ids_NK >= 0).all()
    return ids_NK, Mining(
        pairs, documents, window, positive_N, score_NK, rank_N, rank_NK, looked_at, own_seen, unsafe_seen,
        last_resort=int((score_NK > ceiling_N[:, None]).sum()),
    )  # fmt: skip


def _others(
    find: Callable[[np.ndarray, int], Found], rows: np.ndarray, wanted: int, own: Own
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The first `wanted` documents that `find` gives for each row and that are not the row's own.

    Returns: their scores (R, wanted) and numbers, −inf and −1 where there are no more, and how many own ones
        came before the last.
    """
    score_RX = np.full((len(rows), wanted), -np.inf, np.float32)
    ids_RX, own_R = np.full((len(rows), wanted), -1), np.zeros(len(rows), np.int64)
    left, depth = np.arange(len(rows)), wanted + SPARE
    while len(left):
        depth, lacking = min(depth, own.documents), []
        for some in np.array_split(left, min(len(left), -(-len(left) * depth // SCORES))):
            found_SX, number_SX = find(rows[some], depth)
            usable_SX = np.isfinite(found_SX) & ~own(rows[some], number_SX)
            order_SX = np.argsort(~usable_SX, axis=1, kind="stable")[:, :wanted]
            taken_SX = np.take_along_axis(usable_SX, order_SX, 1)
            score_RX[some] = np.where(taken_SX, np.take_along_axis(found_SX, order_SX, 1), -np.inf)
            ids_RX[some] = np.where(taken_SX, np.take_along_axis(number_SX, order_SX, 1), -1)
            own_R[some] = np.where(taken_SX, order_SX + 1, 0).max(axis=1) - taken_SX.sum(axis=1)
            lacking.append(some[~taken_SX.all(axis=1) & np.isfinite(found_SX[:, -1])])
        left = np.concatenate(lacking) if depth < own.documents else left[:0]
        depth *= 4
    return score_RX, ids_RX, own_R


def _paired(q_UD: np.ndarray, query_N: np.ndarray, d_MD: np.ndarray, document_N: np.ndarray) -> np.ndarray:
    """Similarity (N,) of each pair's query and document, rounded as the search rounds."""
    squares = parts(len(query_N), 64)  # of each square of similarities, the diagonal
    return np.concatenate([similarity(q_UD[query_N[p]], d_MD[document_N[p]]).diagonal() for p in squares])


def parts(count: int, size: int) -> list[slice]:
    """Slices of `size` that together are range(count)."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
