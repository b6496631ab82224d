"""Processes that work on pieces of data, and their results in order."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

AHEAD = 2  # units under way or waiting for their turn, per worker


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(
    work: Callable[[Any], Any], units: Sequence[Any], which: Iterable[int], workers: int
) -> Iterator[Any]:
    """What `work` makes of the units of these numbers, in this order; few of them at a time are in memory.

    Args:
        work: can be pickled; runs in processes of its own, which import its module and nothing of the main
            one, leave Ctrl-C to their parent and die with it. With one worker, or one unit, it runs here.
        units: can be pickled; each is asked for when its turn comes.
    Raises: what `work` raises; RuntimeError if a process is killed.
    """
    which = list(which)
    if min(workers, len(which)) == 1:
        yield from (work(units[index]) for index in which)
        return
    workers = min(workers, len(which))
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (os.getpid(),))
    waiting = deque()
    try:
        for index in which:
            with _without_main():
                waiting.append(pool.submit(work, units[index]))
            if len(waiting) == AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise RuntimeError(
            "a process that prepares data was killed, perhaps for want of memory: give the machine more, or "
            "the training fewer cores (taskset); what was prepared before is kept"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: dies with its parent
        if os.getppid() != parent:
            os._exit(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there are as many workers as cores


@contextmanager
def _without_main() -> Iterator[None]:
    """A spawned process imports the main module of its parent, and with a training's torch and all: not
    ours."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
