"""Trainings run in child processes: a notebook starts one, watches it, and takes it along when it dies.

    launch(run, "pair", job) in the notebook  →  python -m unmask.training.launch job.json …  →  loop.train

One child works through all trainings of a `launch_all`, since starting one takes seconds. With several
processes torchrun stands in between. The main process prints one JSON line per step, from which the notebook
draws its progress bars; everything else goes to the log files of each training.

With several machines, which share one file system, `launch` announces what it starts in a file, and `follow`
starts the other machines' part of it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from tqdm import tqdm

from unmask.config import ParallelConfig, preset_from, resolved
from unmask.models.backbone import facts
from unmask.models.pretrained import require_checkpoint
from unmask.run import ANNOUNCEMENT, Run, grace_seconds
from unmask.store import artifacts_root, write_atomic
from unmask.training.loop import (
    MILESTONES,
    Preempted,
    finish,
    job_fingerprint,
    prepare_data,
    run_job,
)

LOG = "train.log"  # of a training's main process, in its folder; rank-<n>.log: of its others

# For trainings on the CPU, unless the environment says otherwise.
MEMORY = {
    # glibc returns blocks to the system at each free and faults them in again at the next step: keep all but
    # the largest, whose changing sizes would leave holes.
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "MALLOC_TOP_PAD_": str(2**28),
    # oneDNN keeps what it made for the last 1,024 shapes; with another number of masked tokens in every
    # micro-batch that grows by 30 MB a step, to gigabytes.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}


class TrainingStopped(RuntimeError):
    """The training was told to stop, and saved itself before it did."""


def launch(run: Run, stage: str, job: Mapping[str, Any] | None = None, *, name: str = "") -> Path:
    """Trains in child processes and returns the directory of the finished checkpoint.

    Args:
        stage: section of the preset to train, one of `config.TRAINED`.
        job: what else the stage needs, see `unmask.training.stages.Job`: `start` (checkpoint directory),
            changed values, files.
        name: folder of the training under the notebook's artifacts; default: the stage.
    Raises: as `launch_all`.
    """
    name = name or stage
    return launch_all(run, {name: (stage, job or {})})[name]


def launch_all(run: Run, trainings: Mapping[str, tuple[str, Mapping[str, Any]]]) -> dict[str, Path]:
    """Trains one after the other, all in the same child processes.

    A training that already finished with the same configuration, data, code and starting point is not run
    again. SIGTERM and an interrupted cell are passed on to the training under way, which saves itself. None
    may start from another one of the same call.

    Args:
        trainings: name → stage and job, each as for `launch`.
    Returns: name → directory of the finished checkpoint.
    Raises:
        RuntimeError: a training failed; the message carries its name, its error and the path of its log. What
            finished before it stays, what comes after it was not started.
        TrainingStopped: one was told to stop; the next call goes on.
    """
    due, models = {}, {}
    for name, (stage, job) in trainings.items():
        folder = run.artifacts() / name
        specification = {
            "preset": run.config.name,
            "values": resolved(run.config),
            "stage": stage,
            "name": name,
            "folder": str(folder),
            **{key: str(value) if isinstance(value, Path) else value for key, value in job.items()},
        }
        if "start" in specification:
            specification["start"] = require_checkpoint(specification["start"])
        specification["fingerprint"] = job_fingerprint(specification)
        models[name] = folder / "model"
        if facts(models[name]).get("fingerprint") == specification["fingerprint"]:
            finish(folder)  # a kill may have come in between
            print(f"{run.stage}/{name}: already trained")
            continue
        prepare_data(specification)  # here, where its progress shows and no GPU waits for it
        due[name] = write_atomic(folder / "job.json", json.dumps(specification, indent=1))
        for log in folder.glob("*.log"):  # of an earlier try
            log.unlink()
    if due:
        _train(run, due)
    return models


def _train(run: Run, jobs: Mapping[str, Path]) -> None:
    """Starts the child processes, and ends with them."""
    paths = list(jobs.values())
    with paths[0].with_name(LOG).open("a", encoding="utf8") as log, _announced(run, paths) as meeting_point:
        child = _start(paths, run.config.parallel, 0, meeting_point, stdout=subprocess.PIPE, stderr=log)
        with _ended_together(child) as told_to_stop:
            last = _watch(child, run.stage)
            child.wait()
    name = last.get("training", next(iter(jobs)))
    if "stopped" in last or told_to_stop:  # even if it had just finished: the notebook is to end
        when = f" after {last['stopped']} steps" if "stopped" in last else ""
        raise TrainingStopped(f"training {name} was told to stop{when}; what it did is kept, run it again")
    if child.returncode:
        log_path = jobs[name].with_name(LOG)
        raise RuntimeError(
            f"training {name} failed: {last.get('error') or _last_line(log_path)}\n(log: {log_path})"
        )


def follow(artifacts: Path, *, machine_rank: int) -> None:
    """What a machine that does not run the notebooks does: its part of every training that is announced.

    Args:
        artifacts: folder of the run, shared by all machines.
    Returns: when the run has finished.
    Raises: RuntimeError if the run failed.
    """
    path, seen = artifacts / ANNOUNCEMENT, None
    while True:
        announced = _read(path)
        if announced.get("finished"):
            if announced["exit_status"]:
                raise RuntimeError(f"the main machine's run ended with status {announced['exit_status']}")
            return
        training = announced.get("training")
        if training and training != seen:
            seen = training
            jobs = [Path(job) for job in training["jobs"]]
            parallel = preset_from(json.loads(jobs[0].read_text(encoding="utf8"))["values"]).parallel
            with jobs[0].with_name(f"train.{machine_rank}.log").open("w", encoding="utf8") as log:
                child = _start(jobs, parallel, machine_rank, training, stdout=log, stderr=log)
                with _ended_together(child):
                    # Until it has ended, or the main machine has given it up.
                    while child.poll() is None and _read(path).get("training") == training:
                        time.sleep(0.5)
        time.sleep(0.5)


def _read(announcement: Path) -> dict[str, Any]:
    return json.loads(announcement.read_text(encoding="utf8")) if announcement.is_file() else {}


def history(checkpoint: Path) -> list[dict[str, Any]]:
    """The logged metrics of the training that made a checkpoint."""
    lines = (checkpoint.parent / "metrics.jsonl").read_text(encoding="utf8").splitlines()
    return [json.loads(line) for line in lines]


def milestones(checkpoint: Path) -> list[Path]:
    """What the training that made a checkpoint kept on its way (job key "milestones"), in order."""
    return sorted((checkpoint.parent / MILESTONES / facts(checkpoint)["fingerprint"]).glob("step-*"))


def _start(
    jobs: Sequence[Path],
    parallel: ParallelConfig,
    machine_rank: int,
    meeting_point: Mapping[str, Any] | None,
    **streams,
) -> subprocess.Popen:
    """Starts the processes of some trainings on this machine."""
    per_machine = parallel.num_processes // parallel.num_machines
    command = [sys.executable, "-m"]
    threads = {}
    if parallel.num_processes > 1 or parallel.strategy == "fsdp2":
        # torchrun leaves its workers this long to save themselves.
        command += ["torch.distributed.run", f"--shutdown-timeout={grace_seconds():.0f}"]
        command += [f"--nproc-per-node={per_machine}", f"--log-dir={jobs[0].parent / 'torchrun'}"]
        if meeting_point:
            command += [f"--nnodes={parallel.num_machines}", f"--node-rank={machine_rank}"]
            command += [f"--master-addr={meeting_point['host']}", f"--master-port={meeting_point['port']}"]
        else:
            command += ["--standalone"]
        command += ["-m"]
        cores = int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0))))
        threads = {"OMP_NUM_THREADS": str(max(1, cores // per_machine))}
    return subprocess.Popen(
        [*command, "unmask.training.launch", *map(str, jobs)],
        text=True, env=MEMORY | os.environ | threads | {"UNMASK_LAUNCHER": str(os.getpid())},
        preexec_fn=partial(_die_with, os.getpid()),
        **streams,
    )  # fmt: skip


@contextmanager
def _announced(run: Run, jobs: Sequence[Path]) -> Iterator[dict[str, Any] | None]:
    """Tells the other machines where to meet for some trainings; None if there are none."""
    if run.config.parallel.num_machines == 1:
        yield None
        return
    host = os.environ.get("UNMASK_MAIN_HOST") or socket.gethostname()
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    training = {"jobs": [str(job) for job in jobs], "host": host, "port": port, "started": time.time()}
    path = artifacts_root() / run.name / ANNOUNCEMENT
    write_atomic(path, json.dumps({"training": training}))
    try:
        yield training
    finally:
        write_atomic(path, "{}")


@contextmanager
def _ended_together(child: subprocess.Popen) -> Iterator[list[int]]:
    """Passes SIGTERM on to the child, and leaves none behind.

    Yields: the signals that came.
    """
    received: list[int] = []

    def handler(number: int, frame: object) -> None:
        received.append(number)
        if len(received) == 1:  # a second one would cut short torchrun's own orderly end
            child.terminate()

    in_main = threading.current_thread() is threading.main_thread()  # which alone may handle signals
    before = signal.signal(signal.SIGTERM, handler) if in_main else None
    try:
        yield received
    finally:
        try:
            if child.poll() is None:
                if not received:
                    child.terminate()
                with suppress(subprocess.TimeoutExpired):
                    child.wait(grace_seconds())
        finally:
            if child.poll() is None:
                child.kill()
            child.wait()
            if in_main:
                signal.signal(signal.SIGTERM, before)


def _watch(child: subprocess.Popen, notebook: str) -> dict[str, Any]:
    """Draws a progress bar for each training.

    Returns: the last words, among them "training" (the one under way), and "error" or "stopped", if any.
    """
    bar, last = None, {}
    for line in child.stdout:
        row = json.loads(line)
        if not last.keys() & {"error", "stopped"}:
            last = row
        if "error" in row:
            child.kill()  # the other processes would wait for the one that failed
        elif "total" in row:
            if bar is not None:
                bar.close()
            seen, spent = 0, 0.0
            bar = tqdm(
                total=row["total"],
                initial=row["done"],
                desc=f"{notebook}/{row['training']}",
                unit="step",
                mininterval=1,
                file=sys.stdout,
            )
        elif "loss" in row:
            seen, spent = seen + row["tokens"], spent + row["seconds"]
            bar.set_postfix_str(f"loss {row['loss']:.3f}, {seen / spent:,.0f} tok/s", refresh=False)
            bar.update()
    if bar is not None:
        bar.close()
    return last


def _last_line(log: Path) -> str:
    text = log.read_text(encoding="utf8") if log.is_file() else ""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it left no message"


def _die_with(parent: int) -> None:
    """Runs in a child: Linux kills it when its parent dies, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def _die_with_torchrun() -> None:
    """The same in a worker, whose parent is torchrun, whose parent is the launching process."""
    parent = psutil.Process().parent()
    if parent is None or str(parent.ppid()) != os.environ["UNMASK_LAUNCHER"]:
        os._exit(1)
    _die_with(parent.pid)


def main(paths: Sequence[str]) -> None:
    """A training process: reads each job, trains, saves; standard output carries the metrics and nothing
    else."""
    # Buffered, even under torchrun's `python -u`: a row is one write, so two processes' rows do not mingle.
    metrics = os.fdopen(os.dup(1), "w", encoding="utf8")
    if "RANK" in os.environ:  # torchrun starts its workers as sessions of their own
        _die_with_torchrun()
    rank = os.environ.get("RANK", "0")
    log = LOG if rank == "0" else f"rank-{rank}.log"
    for path in map(Path, paths):
        job = json.loads(path.read_text(encoding="utf8"))
        _log_to(path.with_name(log))

        def say(row: dict[str, Any], name: str = job["name"]) -> None:
            print(json.dumps({"training": name} | row), file=metrics, flush=True)

        say({})
        try:
            run_job(job, say)
        except Preempted as stop:
            say({"stopped": stop.step})
            raise
        except Exception as error:
            traceback.print_exc()  # now: the notebook ends this process as soon as it reads the row
            say({"error": f"{type(error).__name__}: {error}"})
            sys.exit(1)
        # The next one finds the process as the first one found it.
        gc.collect()
        torch.cuda.empty_cache()
        torch.compiler.reset()


def _log_to(path: Path) -> None:
    """From here on, whatever this process writes goes into a log, what native code writes too."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with path.open("a", encoding="utf8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


if __name__ == "__main__":
    main(sys.argv[1:])
