"""A training in several processes: torchrun starts them, or on several machines what `parallel.launcher`
says; this process shows their progress, hands on a request to stop, and takes them along when it dies.

    launch(job, watch)  →  torchrun  →  python -m unmask.training.worker job.json  →  loop.run
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from joblib import cpu_count

from unmask.children import ENVIRONMENT, bound, ended_together, grace_seconds
from unmask.config import ParallelConfig
from unmask.store import write_atomic
from unmask.training.job import JOB, Job
from unmask.training.watch import Watch

LOG = "train.log"  # of all processes, in the training's folder
ERROR = "error.txt"  # what a process wrote that failed
STOP = "UNMASK_STOP"  # names a file that stands for SIGTERM where a launcher does not hand that on
# What launchers set, and torchrun, torch and accelerate believe.
LAUNCHERS = re.compile(
    "(ACCELERATE|MPI|MV2|OMPI|PET|PMI|TORCHELASTIC)_.*|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)"
)


class TrainingStopped(RuntimeError):
    """The training was told to stop, and saved itself before it did."""


def several(parallel: ParallelConfig) -> bool:
    """Whether a training needs more than this process."""
    return bool(parallel.launcher) or parallel.num_processes > 1 or parallel.strategy == "fsdp2"


def launch(job: Job, watch: Watch) -> None:
    """Runs a job, whose file lies in its folder, and ends with its processes.

    Raises:
        RuntimeError: it failed; the message carries the error and the path of its log.
        OSError: it failed, and nothing can be written into its folder, which is likely to be why.
        TrainingStopped: it was told to stop, by SIGTERM or an interrupted cell; it is saved.
    """
    folder, parallel = Path(job.folder), job.parallel
    (folder / ERROR).unlink(missing_ok=True)  # of an earlier try
    stop = folder / f"stop-{os.getpid()}"  # srun and torchrun answer SIGTERM by killing: a file stands for it
    stop.unlink(missing_ok=True)
    with (folder / LOG).open("w", encoding="utf8") as log:
        options = {"env": _environment(parallel) | {STOP: str(stop)}, "stdout": log, "stderr": log}
        child, signals = subprocess.Popen(_command(job), **options), []
        try:
            with ended_together(child, grace_seconds(), stop.touch) as signals:
                watch({"total": job.config.steps, "done": 0})
                while child.poll() is None:
                    watch.read()
                    time.sleep(0.2)
                watch.read()
        except KeyboardInterrupt:
            signals.append(signal.SIGINT)
    stop.unlink(missing_ok=True)
    status = child.returncode
    reason = _reason(folder, status) if status and not signals else ""
    if signals or reason.startswith(TrainingStopped.__name__):
        raise TrainingStopped("told to stop; what the training did is saved: run it again")
    if status:
        raise RuntimeError(f"{reason}\n(log: {folder / LOG})")


def _environment(parallel: ParallelConfig) -> dict[str, str]:
    # torchrun gives its workers so long to save themselves; before torch 2.13 always 30 s.
    patience = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{grace_seconds():.0f}"}
    environment = ENVIRONMENT | patience | os.environ
    if not parallel.launcher:  # another job's variables: one process would wait for others
        environment = {name: one for name, one in environment.items() if not LAUNCHERS.fullmatch(name)}
    if parallel.per_machine > 1:  # this machine's processes share its cores
        cores = int(os.environ.get("OMP_NUM_THREADS", cpu_count()))
        environment["OMP_NUM_THREADS"] = str(max(1, cores // parallel.per_machine))
    return environment


def _command(job: Job) -> list[str]:
    parallel, command = job.parallel, [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    if parallel.launcher:
        command = shlex.split(os.path.expandvars(parallel.launcher))
        if not shutil.which(command[0]) or "$" in "".join(command):
            raise RuntimeError(f"parallel.launcher: no such command, or a variable is not set: {command}")
    else:
        command += [f"--nproc-per-node={parallel.num_processes}", f"--log-dir={job.folder}/torchrun"]
    return bound([*command, "-m", "unmask.training.worker", f"{job.folder}/{JOB}"])


def _reason(folder: Path, status: int) -> str:
    """Why a training failed: a process of it was killed, or wrote why, or left the last line of the log."""
    text, error = (folder / LOG).read_text(encoding="utf8", errors="replace"), folder / ERROR
    if status == -signal.SIGKILL or "(SIGKILL)" in text:  # torchrun's word; the others' is that one is gone
        return "killed: memory is full? A lower token_budget or keep_tokens, or --jobs 1, needs less"
    if not error.is_file():  # as the process that failed could not write it, if this fails
        write_atomic(error, next(filter(str.strip, reversed(text.splitlines())), "it left no message"))
    return error.read_text(encoding="utf8")
