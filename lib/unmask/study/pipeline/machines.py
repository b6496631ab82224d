"""GPUs and machines of a run: what there is, what each notebook gets, and what the other machines are told.

Several machines share the artifacts folder. The first one executes the notebooks; the others read in
artifacts/<run>/.trainings.json which training they have a part in, and whether the run has ended. That file's
modification time is the first machine's heartbeat.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from joblib import cpu_count

from unmask.config import ParallelConfig
from unmask.run import ANNOUNCEMENT
from unmask.store import write_atomic
from unmask.study.pipeline.graph import Folders, PipelineError
from unmask.study.pipeline.signals import Interrupted, on_signal

HEARTBEAT = 5.0  # seconds
PATIENCE = 600.0  # seconds that a machine waits for the first one to start
LOST = 180.0  # seconds without a heartbeat; network file systems may show one a minute late


@dataclass(frozen=True)
class Slot:
    """Room for one notebook at a time: what its kernel is told about its share of the machine."""

    environment: dict[str, str] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)


def slots(
    parallel: ParallelConfig, *, gpus: int | None, jobs: int, machine_rank: int, main_host: str
) -> list[Slot]:
    """Shares this machine among `jobs` notebooks, once it is sure that the run can work here.

    Args:
        parallel: processes and machines of one training, as if it had this machine for itself.
        gpus: what --gpus said: GPUs over all machines; None: not given.
        jobs: notebooks that may run at once; no more than there are GPUs, where there are any.
        machine_rank: which of the machines this is.
        main_host: host name of machine 0.
    Raises:
        PipelineError: the machine has too few GPUs, or the options do not fit together.
    """
    machines, processes = parallel.num_machines, parallel.num_processes
    if not 0 <= machine_rank < machines:
        raise PipelineError(
            f"--machine-rank {machine_rank}: "
            + (f"ranks are 0 to {machines - 1}" if machines > 1 else "there is one machine; see --machines")
        )
    if machines > 1 and not main_host:
        raise PipelineError(
            f"{machines} machines: name the one with rank 0 by --main-host, or use one with --machines 1"
        )
    if jobs < 1 or (jobs > 1 and machines > 1):
        raise PipelineError(
            f"--jobs {jobs}: must be at least 1"
            if jobs < 1
            else f"--jobs {jobs}: notebooks run side by side on one machine only, these are {machines}"
        )
    if processes == jobs == 1:
        return [Slot()]
    devices, here = visible_gpus(), processes // machines
    if not devices and (gpus or 1) > 1:
        raise PipelineError(
            f"--gpus {gpus}: this machine has no GPU; --set parallel.num_processes=2 trains with two "
            "CPU processes"
        )
    if devices and here > len(devices):
        raise PipelineError(
            f"{here} GPUs are needed on this machine, and it has {len(devices)}: "
            f"--gpus {len(devices) * machines} uses all of them"
        )
    devices = devices[:gpus]
    jobs = min(jobs, len(devices) or jobs)  # every notebook needs a GPU
    if jobs == 1:
        return [Slot()]
    if not devices:
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(cpu_count() // jobs, 1))
        return [Slot({"OMP_NUM_THREADS": threads})] * jobs
    share = len(devices) // jobs
    overrides = {"parallel.num_processes": max(processes // jobs, 1)}
    return [
        Slot({"CUDA_VISIBLE_DEVICES": ",".join(devices[start : start + share])}, overrides)
        for start in range(0, share * jobs, share)
    ]


def visible_gpus() -> list[str]:
    """GPUs that a process started here may use, named as in CUDA_VISIBLE_DEVICES."""
    if not shutil.which("nvidia-smi"):
        return []
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    if listing.returncode:
        return []
    count = sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return [str(index) for index in range(count)]
    gpus: list[str] = []
    for name in (part.strip() for part in chosen.split(",")):
        named = name.startswith(("GPU-", "MIG-")) and name in listing.stdout
        if not named and not (name.isdigit() and int(name) < count):
            break  # CUDA does not read on either
        gpus.append(name)
    return gpus


@contextlib.contextmanager
def leading(folders: Folders) -> Iterator[None]:
    """On the first of several machines: shows the others that the run is alive, and at last how it ended."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(HEARTBEAT):
            with contextlib.suppress(OSError):  # a shared file system may be away for a moment
                os.utime(_file(folders))

    tell(folders, {})
    heart = threading.Thread(target=beat, daemon=True, name="heartbeat")
    heart.start()
    exit_status = 1
    try:
        yield
        exit_status = 0
    except Interrupted as stop:
        exit_status = stop.exit_status
        raise
    finally:
        with on_signal(lambda number: None):  # the others wait for this
            ended.set()
            heart.join()
            tell(folders, {"finished": True, "exit_status": exit_status})


@contextlib.contextmanager
def following(folders: Folders) -> Iterator[None]:
    """On the other machines, in their main thread: ends their part when the first one is gone for good.

    Raises: RuntimeError if its heart has stopped.
    """
    ended, lost = threading.Event(), threading.Event()

    def listen() -> None:
        seen, since = _modified(folders), time.monotonic()
        while not ended.wait(HEARTBEAT):
            if (now := _modified(folders)) != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > LOST:
                lost.set()
                os.kill(os.getpid(), signal.SIGTERM)  # the main thread may be waiting for a training

    listener = threading.Thread(target=listen, daemon=True, name="listener")
    listener.start()
    try:
        yield
    except Interrupted:
        if lost.is_set():
            raise RuntimeError(f"the machine with rank 0 has given no sign for {LOST:.0f} s") from None
        raise
    finally:
        ended.set()
        listener.join()


def wait_for_leader(folders: Folders, *, seconds: float = PATIENCE) -> None:
    """On the other machines: returns once the first one shows that it is there.

    What an earlier run left in the file does not count, whatever it says: only a change does. The clocks of
    the machines are not compared.

    Raises: PipelineError if nothing happens for `seconds`.
    """
    first, end = _modified(folders), time.monotonic() + seconds
    while _modified(folders) == first:
        if time.monotonic() > end:
            raise PipelineError(
                f"no sign of the machine with rank 0 in {seconds:.0f} s: start the same command there, with "
                f"--machine-rank 0 and the same artifacts folder ({folders.artifacts.parent})"
            )
        time.sleep(min(1.0, seconds / 10))


def tell(folders: Folders, message: dict[str, Any]) -> None:
    """Leaves a message for the other machines, in place of the one before."""
    write_atomic(_file(folders), json.dumps(message) + "\n")


def told(folders: Folders) -> dict[str, Any]:
    """The last message; empty where there is none."""
    try:
        return json.loads(_file(folders).read_text(encoding="utf8"))
    except FileNotFoundError:
        return {}


def _file(folders: Folders) -> Path:
    return folders.artifacts / ANNOUNCEMENT


def _modified(folders: Folders) -> int | None:
    try:
        return _file(folders).stat().st_mtime_ns
    except OSError:
        return None
