"""Waiting for processes, for the tests that end some."""

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import psutil


def wait_for(condition: Callable[[], Any], seconds: float = 600) -> None:
    """Returns once the condition holds; beside other work, even a kernel may take minutes to start."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s in vain"
        time.sleep(0.01)


def live(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that run: not those that ended, though nobody may have collected them."""
    running = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
    return running


def live_in(folder: object) -> list[psutil.Process]:
    """Those whose command line or environment names a folder, this process apart."""

    def names_it(info: dict[str, Any]) -> bool:
        words = [*(info["cmdline"] or ()), *(info["environ"] or {}).values()]
        return info["pid"] != os.getpid() and any(str(folder) in word for word in words)

    return live(one for one in psutil.process_iter(["pid", "cmdline", "environ"]) if names_it(one.info))
