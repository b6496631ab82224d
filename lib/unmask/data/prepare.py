"""Work done once, in parallel, into files that every training process maps into memory.

A folder of prepared data holds one file of numbers per column and `progress.json`, the journal: units done,
bytes of each file, counters, and a hash of everything so far. Units are appended in their order, whoever
computed them, so the bytes depend neither on the number of workers nor on when the work was interrupted.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from joblib import Parallel, cpu_count, delayed
from tqdm.auto import tqdm

from unmask.store import read_json, write_atomic

JOURNAL = "progress.json"
UNITS_PER_WORKER = 4  # for fewer, a process takes longer to start than it saves


@dataclass(frozen=True)
class Ragged(Sequence):
    """Rows of different lengths in two arrays: row i is `values[ends[i - 1]:ends[i]]`.

    Where `values` is Ragged itself, a row is a list of rows (the chunks of a document).
    """

    values: np.ndarray | Ragged
    ends: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[np.ndarray], dtype: type[np.integer]) -> Ragged:
        """The rows one after the other."""
        values = np.concatenate(rows).astype(dtype, copy=False) if rows else np.empty(0, dtype)
        return cls(values, ends_of([len(row) for row in rows]))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, rows: int | slice) -> Any:
        if isinstance(rows, slice):
            return [self[row] for row in range(*rows.indices(len(self)))]
        start, stop = (self.ends[rows - 1] if rows else 0), self.ends[rows]
        return self.values[int(start) : int(stop)]


Column = np.ndarray | Ragged
Work = Callable[[Any], tuple[Mapping[str, Column], Mapping[str, int]]]


def ends_of(lengths: Sequence[int]) -> np.ndarray:
    """Where rows of these lengths end, laid one after the other."""
    return np.cumsum(np.asarray(lengths, np.int64))


@dataclass(frozen=True)
class Prepared:
    """A folder of prepared data as its journal describes it."""

    folder: Path
    units: int = 0  # done
    total: int | None = None  # units there are, once it is known
    files: Mapping[str, tuple[int, str]] = field(default_factory=dict)  # bytes and type
    counters: Mapping[str, int] = field(default_factory=dict)
    hash: str = ""  # SHA-256 chained over all columns of all units

    @classmethod
    def read(cls, folder: Path) -> Prepared:
        """What is there so far, perhaps nothing."""
        return cls(folder, **read_json(folder / JOURNAL))

    def suffices(self, wanted: int | None) -> bool:
        """Whether all units are done, or as many as give the tokens that are wanted."""
        enough = wanted is not None and self.counters.get("tokens", 0) >= wanted
        return enough or self.units == self.total

    def column(self, name: str) -> Column:
        """A column, mapped into memory. Raises: KeyError if there is none of this name."""
        column, ends = self._array(name), f"{name}.ends"
        while ends in self.files:
            column, ends = Ragged(column, self._array(ends)), f"{ends}.ends"
        return column

    def _array(self, name: str) -> np.ndarray:
        size, kind = self.files[name]
        if not size:  # nothing can be mapped
            return np.empty(0, kind)
        mapped = np.memmap(self.folder / f"{name}.bin", kind, "r", shape=size // np.dtype(kind).itemsize)
        return np.asarray(mapped)  # of which slices are made ten times faster


def build(
    folder: Path,
    units: Sequence[Any],
    work: Work,
    *,
    wanted: int | None = None,
    workers: int | None = None,
    title: str = "preparing",
) -> Prepared:
    """Appends what `work` makes of the units, in their order, to the files of a folder.

    Killed at any moment and called again, it goes on after the last unit in the journal. Several processes
    may want the same folder: one works, the others wait for it and find it done.

    Args:
        folder: its name must identify units and work; `wanted` and `workers` change nothing in it.
        units: pieces of work; anything that can be pickled, made when it is asked for.
        work: unit → columns and counters; with several workers it can be pickled.
        wanted: stop once the counter "tokens" has reached this; a later call that wants more goes on from
            there. Default: all units.
        workers: processes; default: one per core.
    Raises: what `work` raises; RuntimeError if a worker is killed. What was appended before is kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        done = Prepared.read(folder)
        if done.suffices(wanted):
            return done
        for name, (size, _) in done.files.items():  # what was appended without reaching the journal goes
            os.truncate(folder / f"{name}.bin", size)

        def left() -> Iterator[Any]:
            for index in range(done.units, len(units)):
                if done.suffices(wanted):
                    break
                yield units[index]

        results = in_order(work, left(), len(units) - done.units, workers)
        with tqdm(desc=title, total=len(units), initial=done.units, unit="part", delay=2, leave=False) as bar:
            for columns, counters in results:
                if not done.suffices(wanted):  # else it was under way when there was enough
                    done = _append(done, columns, counters, len(units))
                    bar.update()
    return done


def in_order(
    work: Callable[[Any], Any], units: Iterable[Any], count: int, workers: int | None = None
) -> Iterator[Any]:
    """What `work` makes of each of `count` units, in their order; few of them at a time are in memory.

    Units are asked for when their turn comes. Few of them, or one worker, need no other process.
    """
    workers = min(workers or cpu_count(), count // UNITS_PER_WORKER)
    if workers < 2:
        return map(work, units)
    return Parallel(workers, return_as="generator")(delayed(_in_worker)(work, unit) for unit in units)


def _in_worker(work: Callable[[Any], Any], unit: Any) -> Any:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: dies with its parent
    return work(unit)


def _append(
    done: Prepared, columns: Mapping[str, Column], counters: Mapping[str, int], total: int
) -> Prepared:
    files, digest = dict(done.files), hashlib.sha256(done.hash.encode())
    for column_name, column in columns.items():
        before = 0  # rows of the level below, in the units before
        for name, array in _flat(column_name, column):
            size, kind = files.get(name, (0, str(array.dtype)))
            data = (array + before if name.endswith(".ends") else array).tobytes()
            with (done.folder / f"{name}.bin").open("ab" if size else "wb") as file:
                file.write(data)
            digest.update(name.encode() + hashlib.sha256(data).digest())
            files[name], before = (size + len(data), kind), size // array.itemsize
    totals = dict(Counter(done.counters) + Counter(counters))
    now = Prepared(done.folder, done.units + 1, total, files, totals, digest.hexdigest())
    written = {key: value for key, value in vars(now).items() if key != "folder"}
    write_atomic(now.folder / JOURNAL, json.dumps(written, indent=1))
    return now


def _flat(name: str, column: Column) -> list[tuple[str, np.ndarray]]:
    """The arrays of a column and the names of their files, the innermost first."""
    if not isinstance(column, Ragged):
        return [(name, column)]
    inner = _flat(name, column.values)
    return [*inner, (f"{inner[-1][0]}.ends", column.ends)]
