"""Child processes and the signals that stop them: one rule for a run, its kernels and their trainings.

    unmask run  →  a kernel for each notebook, which trains  →  torchrun and its workers, if there are any

torchrun is started by `bound`, so that it dies with its kernel, however that happens (a kernel looks for its
parent itself). A request to stop goes down the same chain, as one SIGTERM to the next process, and whoever
passed it on waits.

Run as `python -m unmask.children PID COMMAND …` this is the start of such a process.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

PREEMPTED = 75  # exit status of what SIGTERM ended in good order; EX_TEMPFAIL: try again
# For notebooks and trainings, unless the environment says otherwise.
ENVIRONMENT = {
    # glibc returns blocks to the system at each free and faults them in again at the next step: keep all but
    # the largest, whose changing sizes would leave holes.
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "MALLOC_TOP_PAD_": str(2**28),
    # oneDNN keeps what it made for the last 1,024 shapes; with another number of masked tokens in every
    # micro-batch that grows by 30 MB a step, to gigabytes.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    # OpenMP's threads spin while they wait for one another: beside other work on the same cores up to a
    # hundred times as long as they compute. Spin shorter, then sleep; on quiet cores it costs nothing.
    "GOMP_SPINCOUNT": "2000",
    # Bars of `datasets` would stay in executed notebooks; the library has its own.
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    # Said aloud, or the tokenizer's threads end, with a warning, where a process forks.
    "TOKENIZERS_PARALLELISM": "true",
    # On a GPU: batches of changing sizes leave no holes that are too small for the next one.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}


def grace_seconds() -> float:
    """Seconds that a training which is told to stop gets to finish its step and to write a checkpoint."""
    said = os.environ.get("UNMASK_GRACE_SECONDS") or "120"
    if not said.replace(".", "", 1).isdecimal():
        raise ValueError(f"UNMASK_GRACE_SECONDS={said}: give a number of seconds")
    return float(said)


def settle() -> None:
    """What `ENVIRONMENT` asks of memory, as far as a process can that has started without it."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # some are read when they are first needed
    if sys.platform == "linux":
        options = {-1: "MALLOC_TRIM_THRESHOLD_", -2: "MALLOC_TOP_PAD_", -3: "MALLOC_MMAP_THRESHOLD_"}
        for number, name in options.items():  # glibc's M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_THRESHOLD
            with contextlib.suppress(AttributeError, ValueError):  # another C library; glibc takes no words
                ctypes.CDLL(None).mallopt(number, min(int(os.environ[name]), 2**31 - 1))


def bound(command: Sequence[str]) -> list[str]:
    """A command whose process Linux kills when this one dies."""
    return [sys.executable, "-m", "unmask.children", str(os.getpid()), *command]


def die_with(parent: int) -> None:
    """Has Linux kill this process when its parent dies; ends it if that has happened already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, which survives exec
        if os.getppid() != parent:
            os._exit(1)


@contextlib.contextmanager
def on_signal(handle: Callable[[signal.Signals], None], *numbers: signal.Signals) -> Iterator[None]:
    """Calls `handle` with every signal that asks to stop: these, by default SIGINT and SIGTERM. They come to
    a process's main thread; in others this does nothing."""

    def caught(number: int, frame: Any) -> None:
        handle(signal.Signals(number))

    numbers = numbers or (signal.SIGINT, signal.SIGTERM)
    here = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, caught) for number in numbers if here}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextlib.contextmanager
def ended_together(
    child: subprocess.Popen, grace: float, ask: Callable[[], None]
) -> Iterator[list[signal.Signals]]:
    """Passes SIGTERM on to a child, and ends the child with the block.

    Args:
        grace: seconds that the child gets for its own end.
        ask: asks the child to end; may be called more than once.
    Yields: the signals that came.
    """
    received = []

    def stop(number: signal.Signals) -> None:
        received.append(number)
        ask()

    with on_signal(stop, signal.SIGTERM):
        try:
            yield received
        finally:
            try:
                if child.poll() is None:
                    ask()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(grace)
            finally:
                child.kill()
                child.wait()


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
