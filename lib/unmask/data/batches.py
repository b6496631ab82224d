"""Which rows a training step reads: a pure function of (seed, step), so that a restart at any step is exact
and free.

Shape suffixes: N rows · K clusters · P places.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from unmask.config import GROUPS, TrainConfig

ROUNDS = 6
FILL = 8  # times a batch's rows that are looked through to fill one of similar rows with different ones
_ODD = np.uint64(0x9E3779B97F4A7C15)  # 2⁶⁴ over the golden ratio


def permuted(indices: np.ndarray, size: int, seed: int | Sequence[int]) -> np.ndarray:
    """π(indices), where π is a pseudo-random permutation of 0 … size − 1 that `seed` names: random order
    without a list of it.

    A balanced Feistel network permutes the numbers of 2k bits, the fewest that hold `size`: each round is
    (left, right) → (right, left ⊕ f(right)) with a hash f of the round's own key. What lands at or above
    `size` is sent through it again until it lands below (cycle walking), fewer than four times on average.

    Args:
        indices: integers in [0, size), any shape.
        size: rows to permute, at least 1 and at most 2⁶².
    Returns: int64, of the shape of `indices`; two different indices never share a value.
    Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    keys = np.random.SeedSequence(seed).generate_state(ROUNDS, np.uint64)
    values = np.array(indices, dtype=np.uint64).reshape(-1)
    walking = np.arange(len(values))
    while len(walking):
        values[walking] = _feistel(values[walking], half, keys)
        walking = walking[values[walking] >= size]
    return values.astype(np.int64).reshape(np.shape(indices))


def parts(count: int, size: int) -> list[slice]:
    """Slices of `size` that together are range(count)."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def shuffled(items: Sequence[Any]) -> list[Any]:
    """The items in a random order, always the same one for as many."""
    return [items[i] for i in permuted(np.arange(len(items)), len(items), 0)]


def _feistel(values: np.ndarray, half: np.uint64, keys: np.ndarray) -> np.ndarray:
    low = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & low
    for key in keys:
        mixed = (right + key) * _ODD  # wraps around, as unsigned integers do
        mixed ^= mixed >> np.uint64(32)
        mixed *= _ODD
        mixed ^= mixed >> np.uint64(29)
        left, right = right, left ^ (mixed >> np.uint64(7) & low)
    return left << half | right


class ClusterOrder(NamedTuple):
    """Rows in clusters of similar ones, in the order in which the clusters fill batches."""

    rows_N: np.ndarray  # row numbers, cluster after cluster
    ends_K: np.ndarray  # places in `rows_N` where each of the K clusters ends

    @classmethod
    def of(cls, cluster_N: np.ndarray) -> "ClusterOrder":
        """The order that each row's cluster gives; clusters are numbered as they follow one another."""
        return cls(np.argsort(cluster_N, kind="stable"), np.cumsum(np.bincount(cluster_N)))

    def __call__(self, places: np.ndarray, seed: Sequence[int]) -> np.ndarray:
        """The rows at some places of the epoch that `seed` names: it begins with a random cluster, and the
        rows of a cluster are in random order."""
        starts_K = np.concatenate([[0], self.ends_K[:-1]])
        first = permuted(np.array(0), len(self.ends_K), seed)
        places = (places + starts_K[first]) % len(self.rows_N)
        cluster_P = np.searchsorted(self.ends_K, places, side="right")
        for cluster in np.unique(cluster_P):
            start, size = starts_K[cluster], self.ends_K[cluster] - starts_K[cluster]
            here_P = cluster_P == cluster
            places[here_P] = start + permuted(places[here_P] - start, int(size), [*seed, int(cluster)])
        return self.rows_N[places]


@dataclass
class BatchPlan:
    """Single-dataset batches: each step draws one data set with probability proportional to its size, or to
    what is left of its share of the steps, then the next slice of that data set's current epoch (pplx-embed,
    appendix B).

    No list of rows is permuted. In cluster order slices are cut from clusters of similar rows, and an epoch's
    slices come in random order (CDE, section 4.1).

    Args:
        keys: for each data set, one key per row or several (N, K), memory-mapped ones too: what it is, its
            query, its document. Rows that share one, in whatever places, must not be each other's negatives:
            a batch keeps the first and drops the others. Similar rows often are the same thing: a batch in
            cluster order is filled up with the next rows, which come again in the next slice.
        config: `steps`, `seed`, and `batch`, the rows per step; a smaller data set gives smaller batches.
        allowed: names of the data sets that may be drawn at a step (a curriculum); default: all, always.
        orders: data set -> cluster order; one without has its rows in random order.
        sizes: data set -> its size, where that is not its number of rows.
        shares: data set -> share of the steps, whatever its size; default: by size. A set whose share is used
            up is drawn only where no other is allowed.
    Raises: ValueError if no data set is left, or one cannot give two distinct rows.
    """

    keys: Mapping[str, Sequence | np.ndarray]
    config: TrainConfig
    allowed: Callable[[int], set[str]] | None = None
    orders: Mapping[str, ClusterOrder] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self):
        if not self.keys:
            raise ValueError("no training data: the corpus holds no data set for this stage")
        self.keys = {name: np.atleast_2d(np.transpose(keys)).T for name, keys in self.keys.items()}
        for name, keys_NX in self.keys.items():
            if not len(keys_NX) or any((keys_NX == key).any(axis=1).all() for key in keys_NX[0]):
                raise ValueError(
                    f"data set {name!r} has {len(keys_NX)} usable row(s): a batch needs at least 2 "
                    "distinct ones; add data, ask for fewer negatives or leave the set out"
                )
        self.names = sorted(self.keys)
        weights = self.shares or {name: len(keys) for name, keys in self.keys.items()} | {**self.sizes}
        weights_K = np.maximum([weights[name] for name in self.names], 1e-6)
        if self.shares:  # the steps that are due to each; 1e-6: none
            weights_K *= self.config.steps / weights_K.sum()
        rng, seen = np.random.default_rng([self.config.seed, 0]), Counter()
        self._draws: list[tuple[str, int]] = []  # for each step the data set, and how often it came before
        for step in range(self.config.steps):
            names = self.allowed(step) if self.allowed else self.names
            allowed_K = weights_K * [name in names for name in self.names]
            number = rng.choice(len(self.names), p=allowed_K / allowed_K.sum())
            if self.shares:
                weights_K[number] = max(weights_K[number] - 1, 1e-6)
            self._draws.append((name := self.names[number], seen[name]))
            seen[name] += 1

    def __call__(self, step: int) -> tuple[str, np.ndarray]:
        """The data set of a step and its row numbers."""
        name, drawn = self._draws[step]
        keys, order = self.keys[name], self.orders.get(name)
        count, size = len(keys), min(self.config.batch, len(keys))
        epoch, slot = divmod(drawn, count // size)
        seed = [self.config.seed, 1, self.names.index(name), epoch]
        if order:
            slot = int(permuted(np.array(slot), count // size, seed))
        # Where all are the same thing, go on in the epoch's order to other ones.
        widths = chain([(0, FILL * size if order else size)], ((start, count) for start in range(count)))
        for start, width in widths:
            places = (slot * size + start + np.arange(min(width, count))) % count
            rows = order(places, seed) if order else permuted(places, count, seed)
            chosen = rows[apart(keys[rows].tolist(), size)]
            if len(chosen) > 1 or size == 1:
                break
        return name, chosen


def apart(keys_N: Iterable[Sequence[Any]], most: int) -> list[int]:
    """The first `most` rows, each of which shares no key with one before it."""
    taken, chosen = set(), []
    for row, keys in enumerate(keys_N):
        if len(chosen) == most:
            break
        if taken.isdisjoint(keys):
            taken.update(keys)
            chosen.append(row)
    return chosen


def curriculum(groups: Mapping[str, str], shares: Sequence[float], steps: int) -> Callable[[int], set[str]]:
    """The three steps of pair training: English; English and cross-lingual; everything (pplx-embed, section
    2.3). Data without pairs of a step's groups begin with the next step.

    Args:
        groups: data set -> "english", "cross-lingual", "multilingual" or "code".
        shares: of the training steps, for each of the three.
    """
    bounds = np.cumsum(shares) / np.sum(shares) * steps
    stages = GROUPS[:1], GROUPS[:2], GROUPS

    def allowed(step: int) -> set[str]:
        stage = int(np.searchsorted(bounds[:2], step, side="right"))
        names = ({name for name, group in groups.items() if group in wanted} for wanted in stages[stage:])
        return next(filter(None, names), set())

    return allowed
