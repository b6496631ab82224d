"""What the fault injection tests share: random moments that a seed repeats, and the search for processes that
were left behind.

UNMASK_FAULTS_SEED picks other moments; the default is 0.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import psutil

from unmask.store import repository

T = TypeVar("T")
SEED = int(os.environ.get("UNMASK_FAULTS_SEED", "0"))
GRACE = 30  # seconds that a training gets to save itself
LEFT = 20  # seconds after which no process may be left

# A server that has the slow imports behind it and has never computed anything is safe and quick to fork.
forkserver = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(["unmask.training.launch"])


def dice(name: str) -> random.Random:
    """Random numbers of one test; says how to get the same ones again."""
    print(f"\n{name}: UNMASK_FAULTS_SEED={SEED}", flush=True)
    return random.Random(f"{SEED} {name}")


def start(target: Callable[..., None], artifacts: Path, *arguments: Any) -> BaseProcess:
    """Runs a function in a process of its own, which logs to `artifacts`/processes.log."""
    process = forkserver.Process(target=_run, args=(target, artifacts, arguments))
    process.start()
    return process


def _run(target: Callable[..., None], artifacts: Path, arguments: Iterable[Any]) -> None:
    os.environ |= environment(artifacts)
    log = os.open(artifacts / "processes.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(log, stream)
    target(*arguments)


def environment(artifacts: Path) -> Mapping[str, str]:
    """What the processes of a test get: by its folder they are found, and one thread each is the same
    everywhere."""
    return {
        "UNMASK_ARTIFACTS": str(artifacts),
        "UNMASK_GRACE_SECONDS": str(GRACE),
        "PYTHONPATH": str(repository() / "lib"),
        "OMP_NUM_THREADS": "1",
    }


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that still run. A zombie does not, and may never be collected where init does not do its work."""
    running = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
    return running


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Sends a signal to those that are still there."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def until(condition: Callable[[], T], what: str, seconds: float = 120, pause: float = 0.001) -> T:
    """Waits for a condition and returns its value."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {seconds} s in vain for {what}"
        time.sleep(pause)
    return value


def say(number: signal.Signals, target: str, moment: str) -> None:
    print(f"  {number.name} to the {target}, {moment}", flush=True)


def family(pid: int) -> list[psutil.Process]:
    """A process and all that it started; empty if it is gone."""
    with suppress(psutil.NoSuchProcess):
        return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return []


def command(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def mentioning(folder: Path) -> list[psutil.Process]:
    """Live processes whose command line or environment names a folder, this one apart."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = [*process.cmdline(), *process.environ().values()]
            if process.pid != os.getpid() and any(str(folder) in word for word in words):
                found.append(process)
    return alive(found)


def assert_no_process_left(folder: Path, known: Iterable[psutil.Process]) -> None:
    """Neither one that was seen, nor any other that works in the folder."""
    known, end = list(known), time.monotonic() + LEFT
    while left := {*alive(known), *mentioning(folder)}:
        assert time.monotonic() < end, "left behind: " + "; ".join(f"{p.pid} {command(p)}" for p in left)
        time.sleep(0.1)


def hidden(folder: Path) -> list[Path]:
    """Temporary files and folders, which must be gone at the end."""
    return [path for path in folder.rglob(".*") if path.suffix in (".tmp", ".old")]


linux = {"condition": sys.platform != "linux", "reason": "only Linux tells a child that its parent died"}
