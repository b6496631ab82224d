"""Which rows make up a training step: a pure function of (seed, step), so that a restart at any step is
exact and free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np


class BatchPlan:
    """Single-dataset batches: each step draws one data set with probability proportional to its size, then
    the next slice of that data set's current epoch (pplx-embed, appendix B).

    Args:
        keys: for each data set, one key per row. Rows with the same key are the same thing (one document,
            one entity under two names); a batch keeps the first and drops the others, since they must not be
            each other's negatives.
        batch: rows per step; a smaller data set gives smaller batches.
        allowed: names of the data sets that may be drawn at a step (a curriculum); default: all, always.
    Raises: ValueError if no data set is left, or one cannot give two distinct rows.
    """

    def __init__(
        self,
        keys: Mapping[str, Sequence],
        *,
        batch: int,
        steps: int,
        seed: int,
        allowed: Callable[[int], set[str]] | None = None,
        at_least: int = 2,
    ):
        self.names = sorted(keys)
        if not self.names:
            raise ValueError("no training data: the corpus holds no data set for this stage")
        self._keys = {name: np.unique(np.asarray(keys[name]), return_inverse=True)[1] for name in self.names}
        for name, inverse in self._keys.items():
            if len(set(inverse.tolist())) < at_least:
                raise ValueError(
                    f"data set {name!r} has {len(inverse)} usable row(s): a contrastive batch needs at least "
                    f"{at_least} distinct ones; add data or leave the set out"
                )
        self._batch, self._seed, self._at_least = batch, seed, at_least
        sizes = np.array([len(self._keys[name]) for name in self.names], dtype=np.float64)
        rng = np.random.default_rng([seed, 0])
        self._draws, self._slots, seen = [], [], dict.fromkeys(self.names, 0)
        for step in range(steps):
            names = allowed(step) if allowed else set(self.names)
            weights = sizes * np.array([name in names for name in self.names])
            if not weights.sum():
                raise ValueError(f"step {step} of the curriculum allows none of {self.names}")
            name = self.names[int(rng.choice(len(self.names), p=weights / weights.sum()))]
            self._draws.append(name)
            self._slots.append(seen[name])
            seen[name] += 1

    def __call__(self, step: int) -> tuple[str, np.ndarray]:
        """The data set of a step and its row numbers."""
        name = self._draws[step]
        inverse = self._keys[name]
        size = min(self._batch, len(inverse))
        epoch, slot = divmod(self._slots[step], len(inverse) // size)
        order = np.random.default_rng([self._seed, 1, self.names.index(name), epoch]).permutation(
            len(inverse)
        )
        rows = order[slot * size : (slot + 1) * size]
        first = np.unique(inverse[rows], return_index=True)[1]
        if len(first) < self._at_least:  # all the same thing: go on in the epoch's order to other ones
            rows = np.roll(order, -slot * size)
            first = np.sort(np.unique(inverse[rows], return_index=True)[1])[:size]
        return name, rows[np.sort(first)]


def curriculum(groups: Mapping[str, str], shares: Sequence[float], steps: int) -> Callable[[int], set[str]]:
    """The three steps of pair training: English; English and cross-lingual; everything (pplx-embed, section
    2.3).

    Args:
        groups: data set -> "english", "cross-lingual", "multilingual" or "code".
        shares: of the training steps, for each of the three.
    """
    bounds = np.cumsum(shares) / np.sum(shares) * steps
    stages = ({"english"}, {"english", "cross-lingual"}, {"english", "cross-lingual", "multilingual", "code"})

    def allowed(step: int) -> set[str]:
        stage = int(np.searchsorted(bounds[:2], step, side="right"))
        return {name for name, group in groups.items() if group in stages[stage]}

    return allowed
