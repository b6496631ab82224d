"""How a run is stopped: which signals ask for it, what they mean, and how processes are ended."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

import psutil

from unmask.run import PREEMPTED

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop.

    Args:
        number: the signal.
        killed: names of the stages that did not end in time.
    """

    def __init__(self, number: int, killed: Iterable[str] = ()) -> None:
        number = signal.Signals(number)
        self.exit_status = PREEMPTED if number == signal.SIGTERM else 128 + number
        if killed := ", ".join(killed):
            text = f"stopped by {number.name}; {killed} did not end in time and lost what came after "
            text += "the last checkpoint"
        elif number == signal.SIGTERM:
            text = "pre-empted (SIGTERM): everything is saved"
        else:
            text = f"stopped by {number.name}"
        super().__init__(text)


@contextlib.contextmanager
def on_signal(handle: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Calls `handle` with every signal that asks to stop. `nohup` is respected."""

    def handler(number: int, frame: FrameType | None) -> None:
        handle(signal.Signals(number))

    chosen = [
        number
        for number in SIGNALS
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, handler) for number in chosen}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def interrupt(number: signal.Signals) -> None:
    """For `on_signal`: raises Interrupted, once: the clean-up is not interrupted."""
    for one in SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    raise Interrupted(number)


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that still run. A zombie does not, and may never be collected where init does not do its work."""
    running = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
    return running


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Sends a signal to those that are still there."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def end(processes: Iterable[psutil.Process], deadline: Callable[[], float]) -> None:
    """Asks processes to end and kills those that are there at the deadline.

    Args:
        deadline: on the monotonic clock; asked again and again, because it may change.
    """
    remaining = alive(processes)
    send(remaining, signal.SIGTERM)
    _wait(remaining, deadline)
    remaining = alive(remaining)
    send(remaining, signal.SIGKILL)
    killed = time.monotonic()
    _wait(remaining, lambda: killed + 3)


def end_children(seconds: float) -> None:
    """Ends the processes that this one started and what these leave behind.

    The children are asked first: torchrun hands SIGTERM on to its workers, and a second one makes it give up.
    """
    deadline = time.monotonic() + seconds
    own = psutil.Process()
    children, descendants = own.children(), own.children(recursive=True)
    end(children, lambda: deadline)
    end(descendants, lambda: deadline)


def _wait(processes: Iterable[psutil.Process], deadline: Callable[[], float]) -> None:
    while (processes := alive(processes)) and time.monotonic() < deadline():
        time.sleep(0.05)
