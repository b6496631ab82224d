"""A training in several processes: torchrun starts them, or on several machines what `parallel.launcher`
says; this process shows their progress, hands on a request to stop, and takes them along when it dies.

    launch(job, watch)  →  torchrun  →  python -m unmask.training.worker job.json  →  loop.run
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from joblib import cpu_count

from unmask.children import ENVIRONMENT, bound, ended_together
from unmask.config import ParallelConfig
from unmask.run import grace_seconds
from unmask.training.job import JOB, Job
from unmask.training.watch import Watch

LOG = "train.log"  # of all processes, in the training's folder
ERROR = "error.txt"  # what a process wrote that failed
AGAIN = "out of memory: it begins again with half the tokens at a time"
STOP = "UNMASK_STOP"  # names a file that stands for SIGTERM where a launcher does not hand that on
# What torchrun sets, and accelerate and torch believe.
RANKS = "RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"


class TrainingStopped(RuntimeError):
    """The training was told to stop, and saved itself before it did."""


class OutOfMemory(RuntimeError):
    """The memory of a GPU does not hold what is to be computed at a time."""


def several(parallel: ParallelConfig) -> bool:
    """Whether a training needs more than this process."""
    return bool(parallel.launcher) or parallel.num_processes > 1 or parallel.strategy == "fsdp2"


def launch(job: Job, watch: Watch) -> None:
    """Runs a job, whose file lies in its folder, and ends with its processes.

    Raises:
        RuntimeError: it failed; the message carries the error and the path of its log.
        TrainingStopped: it was told to stop, by SIGTERM or an interrupted cell; it is saved.
    """
    folder, parallel = Path(job.folder), job.parallel
    for left in (folder / LOG, folder / ERROR):  # of an earlier try
        left.unlink(missing_ok=True)
    # torchrun gives its workers so long to save themselves; before torch 2.13 always 30 s.
    patience = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{grace_seconds():.0f}"}
    environment = ENVIRONMENT | patience | os.environ
    for name in () if parallel.launcher else RANKS:  # of another job's: one process would wait for others
        environment.pop(name, None)
    if parallel.per_machine > 1:  # this machine's processes share its cores
        cores = int(os.environ.get("OMP_NUM_THREADS", cpu_count()))
        environment["OMP_NUM_THREADS"] = str(max(1, cores // parallel.per_machine))
    stop = folder / f"stop-{os.getpid()}"  # srun and torchrun answer SIGTERM by killing: a file stands for it
    stop.unlink(missing_ok=True)
    with (folder / LOG).open("a", encoding="utf8") as log:
        options = {"env": environment | {STOP: str(stop)}, "stdout": log, "stderr": log}
        child = subprocess.Popen(_command(job), **options)
        with ended_together(child, grace_seconds(), stop.touch) as told_to_stop:
            watch({"total": job.config.steps, "done": 0})
            while child.poll() is None:
                watch.read()
                time.sleep(0.2)
            watch.read()
    stop.unlink(missing_ok=True)
    if told_to_stop or (child.returncode and "TrainingStopped" in _error(folder)):
        raise TrainingStopped("told to stop; what the training did is kept: run it again")
    if child.returncode and AGAIN in _error(folder):
        return launch(job, watch)
    if child.returncode:
        reason = _error(folder) or _last_line(folder / LOG)
        if child.returncode == -signal.SIGKILL:
            reason = "killed: memory is full? A lower token_budget or keep_tokens, or --jobs 1, needs less"
        raise RuntimeError(f"{reason}\n(log: {folder / LOG})")


def _command(job: Job) -> list[str]:
    parallel, command = job.parallel, [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    if parallel.launcher:
        command = shlex.split(os.path.expandvars(parallel.launcher))
        if not shutil.which(command[0]) or "$" in "".join(command):
            raise RuntimeError(f"parallel.launcher: no such command, or a variable is not set: {command}")
    else:
        command += [f"--nproc-per-node={parallel.num_processes}", f"--log-dir={job.folder}/torchrun"]
    return bound([*command, "-m", "unmask.training.worker", f"{job.folder}/{JOB}"])


def _error(folder: Path) -> str:
    path = folder / ERROR
    return path.read_text(encoding="utf8") if path.is_file() else ""


def _last_line(path: Path) -> str:
    said = path.read_text(encoding="utf8", errors="replace").splitlines()
    return next(filter(str.strip, reversed(said)), "it left no message")
