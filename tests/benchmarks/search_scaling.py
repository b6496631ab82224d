"""Speeds of exact search over the first documents of a file, and the peak memory of this process, as a line
of JSON.

search_scaling.py FILE QUERIES K SIZE…

Not a part of search.py, so that the process has no more in memory than the search itself.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from unmask.evaluation.search import index


def peak() -> float:
    """MiB that this process had in memory at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def rate(work: int, step: Callable[[], object], times: int) -> float:
    """Work per second, median of several times."""
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        step()
        taken.append(time.perf_counter() - started)
    return work / statistics.median(taken)


def main(file: str, queries: int, k: int, sizes: list[int]) -> dict:
    stored = np.load(file, mmap_mode="c")  # copied on writing, which nobody does
    q_ND = np.array(stored[:queries])
    rates = []
    for documents in sizes:
        d_MD = stored[:documents]
        search, words = index(d_MD), torch.from_numpy(d_MD.ravel()).view(torch.int64)
        search(q_ND, k)
        rates.append(
            {
                "documents": documents,
                "one": rate(1, lambda search=search: search(q_ND[:1], k), 9),
                "batch": rate(queries, lambda search=search: search(q_ND, k), 3),
                "reading": rate(1, lambda words=words: words.sum(), 9),
            }
        )
    return {"rates": rates, "threads": torch.get_num_threads(), "peak": peak()}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], *map(int, sys.argv[2:4]), [int(size) for size in sys.argv[4:]])))
