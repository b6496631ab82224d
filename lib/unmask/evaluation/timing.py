"""How long calls take on this machine, side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


def best_seconds(calls: Mapping[str, Callable[[], object]], rounds: int = 3) -> dict[str, float]:
    """The shortest of `rounds` times of each call, in seconds.

    The calls take turns, so that a slow minute of the machine meets all of them, and the shortest time is the
    one that the machine's other work disturbed least.
    """
    seconds = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            seconds[name] = min(seconds[name], time.perf_counter() - started)
    return seconds
