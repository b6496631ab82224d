"""Work done once, in parallel, into files that every training process maps into memory.

A folder of prepared data holds one file of numbers per column and `progress.json`, the journal: units done,
bytes of each file, counters, and a hash of everything so far. Units are appended in their order, whoever
computed them, so the bytes depend neither on the number of workers nor on when the work was interrupted.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from unmask.data.workers import cores, in_order
from unmask.store import write_atomic

JOURNAL = "progress.json"


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
    units: int  # done
    files: Mapping[str, tuple[int, str]]  # bytes and type
    counters: Mapping[str, int]
    hash: str  # SHA-256 chained over all columns of all units

    @classmethod
    def read(cls, folder: Path) -> Prepared:
        """What is there so far, perhaps nothing."""
        path = folder / JOURNAL
        if not path.is_file():
            return cls(folder, 0, {}, {}, "")
        known = json.loads(path.read_text(encoding="utf8"))
        files = {name: (size, kind) for name, (size, kind) in known.pop("files").items()}
        return cls(folder, files=files, **known)

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
        work: unit → columns and counters. It runs in processes of its own, which import its module and
            nothing of the main one.
        wanted: stop once the counter "tokens" has reached this; a later call that wants more goes on from
            there. Default: all units.
        workers: processes; default: one per core. One unit, or one worker, needs no other process.
    Raises: what `work` raises; ValueError if a file is shorter than the journal says; RuntimeError if a
        worker is killed. What was appended before is kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        done = Prepared.read(folder)
        _cut_back(done)
        left = 0 if wanted is not None and _tokens(done) >= wanted else len(units) - done.units
        if left <= 0:
            return done
        started = _tokens(done) if wanted is not None else done.units
        measured = {"unit": "tok", "unit_scale": True} if wanted is not None else {"unit": "part"}
        bar = tqdm(
            desc=title, total=len(units) if wanted is None else wanted, initial=started,
            delay=2, mininterval=2, leave=False, **measured,
        )  # fmt: skip
        results = in_order(work, units, range(done.units, len(units)), workers or cores())
        with bar, closing(results):
            for columns, counters in results:
                done = _append(done, columns, counters)
                bar.update((_tokens(done) if wanted is not None else done.units) - bar.n)
                if wanted is not None and _tokens(done) >= wanted:
                    break
    return done


def _tokens(done: Prepared) -> int:
    return done.counters.get("tokens", 0)


def _cut_back(done: Prepared) -> None:
    """Removes what was appended without reaching the journal."""
    for name, (size, _) in done.files.items():
        path = done.folder / f"{name}.bin"
        there = path.stat().st_size if path.is_file() else -1
        if there < size:
            raise ValueError(
                f"{path} is shorter than {JOURNAL} beside it says: remove {done.folder} and start again"
            )
        if there > size:
            os.truncate(path, size)


def _append(done: Prepared, columns: Mapping[str, Column], counters: Mapping[str, int]) -> Prepared:
    files, digest = dict(done.files), hashlib.sha256(done.hash.encode())
    for column_name, column in columns.items():
        before = 0  # rows of the level below, in the units before
        for name, array in _flat(column_name, column):
            size, kind = files.get(name, (0, str(array.dtype)))
            assert kind == str(array.dtype), f"{name}: {array.dtype} after {kind}"
            data = (array + before if name.endswith(".ends") else array).tobytes()
            with (done.folder / f"{name}.bin").open("ab" if size else "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # before the journal says that it is there
            digest.update(name.encode() + hashlib.sha256(data).digest())
            files[name], before = (size + len(data), kind), size // array.itemsize
    totals = dict(Counter(done.counters) + Counter(counters))
    now = Prepared(done.folder, done.units + 1, files, totals, digest.hexdigest())
    written = {key: value for key, value in vars(now).items() if key != "folder"}
    write_atomic(now.folder / JOURNAL, json.dumps(written, indent=1))
    return now


def _flat(name: str, column: Column) -> list[tuple[str, np.ndarray]]:
    """The arrays of a column and the names of their files, the innermost first."""
    if not isinstance(column, Ragged):
        return [(name, column)]
    inner = _flat(name, column.values)
    return [*inner, (f"{inner[-1][0]}.ends", column.ends)]
