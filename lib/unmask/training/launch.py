"""Trainings run in child processes: a notebook starts one, watches it, and takes it along when it dies.

    launch(run, "pair", job) in the notebook  →  python -m unmask.training.launch job.json …  →  loop.run_job

One child works through all trainings of a `launch_all`, since starting one takes seconds. With several
processes torchrun stands in between; on several machines, what the preset's `parallel.launcher` says. The
main process prints a JSON line per step, and every process one when a training starts, stops or fails; from
these the notebook draws its progress bars. Everything else goes to the log files of each training.
"""

import gc
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from filelock import FileLock
from joblib import cpu_count
from tqdm import tqdm

from unmask.children import ENVIRONMENT, bound, die_with, ended_together
from unmask.config import ParallelConfig, resolved
from unmask.models.backbone import facts, require_checkpoint
from unmask.run import Run, grace_seconds
from unmask.store import fingerprint, read_json, replace_directory, write_json
from unmask.training.loop import MILESTONES, STOP, Preempted, finish, job_identity, run_job, stage_of

# What torchrun sets, and accelerate and torch believe.
RANKS = "RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"
LOG = "train.log"  # of a training's main process, in its folder; rank-<n>.log: of its others


class TrainingStopped(RuntimeError):
    """The training was told to stop, and saved itself before it did."""


def launch(run: Run, stage: str, job: Mapping[str, Any] | None = None, *, name: str = "") -> Path:
    """Trains in child processes and returns the directory of the finished checkpoint.

    Args:
        stage: section of the preset to train, one of `config.TRAINED`.
        job: what else the stage needs, see `stages.Stage`: `start` (checkpoint directory), changed
            values, files.
        name: folder of the training under the notebook's artifacts; default: the stage.
    Raises: as `launch_all`.
    """
    name = name or stage
    return launch_all(run, {name: (stage, job or {})})[name]


def launch_all(run: Run, trainings: Mapping[str, tuple[str, Mapping[str, Any]]]) -> dict[str, Path]:
    """Trains one after the other, all in the same child processes.

    A training that already finished with the same configuration, data, code and starting point is not run
    again; one that finished with others is put aside, in NAME-FINGERPRINT, until asked for; if only the code
    differs, an error asks what to do. SIGTERM and an interrupted cell are passed on to the training under
    way, which saves itself. None may start from another one of the same call.

    Args:
        trainings: name → stage and job, each as for `launch`.
    Returns: name → directory of the finished checkpoint.
    Raises:
        filelock.Timeout: another kernel trains in the notebook's folder.
        RuntimeError: a training failed; the message carries its name, its error and the path of its log. What
            finished before it stays, what comes after it was not started. Or checkpoints of an interrupted
            training lie where another one is to be, or a finished one of other code; the message says in what
            they differ.
        TrainingStopped: one was told to stop; the next call goes on.
    """
    with FileLock(run.artifacts() / "another-kernel-trains-here.lock", timeout=0):  # so says the error
        due = {name: _due(run, name, *training) for name, training in trainings.items()}
        if due := {name: path for name, path in due.items() if path}:
            _train(run, due)
    return {name: run.artifacts() / name / "model" for name in trainings}


def _due(run: Run, name: str, section: str, job: Mapping[str, Any]) -> Path | None:
    """Prepares a training and returns its job file; None where it has finished already."""
    folder = run.artifacts() / name
    asked = {"values": resolved(run.config), "stage": section, "name": name, "folder": str(folder)}
    asked |= {key: str(value) if isinstance(value, Path) else value for key, value in job.items()}
    if "start" in asked:
        asked["start"] = require_checkpoint(asked["start"])
    stage = stage_of(asked)
    asked["corpus"] = str(stage.corpus.path)  # known from here on: the Hub is asked for it once
    made_of = json.loads(json.dumps(job_identity(stage)))  # as it will be read again
    _bring_back(folder, made_of)
    asked |= _identity(made_of, folder)
    mark, made = asked["fingerprint"], facts(folder / "model").get("fingerprint")
    if made not in (None, mark):  # another training, which somebody paid for
        replace_directory(folder, _aside(folder, made))
    if facts(folder / "model").get("fingerprint") == mark:
        finish(folder)  # a kill may have come in between
        write_json(folder / "job.json", read_json(folder / "job.json") | {"accepted": asked["accepted"]})
        print(f"{run.stage}/{name}: already trained")
        return None
    stage.prepare()  # here, where its progress shows and no GPU waits for it
    for log in folder.glob("*.log"):  # of an earlier try
        log.unlink()
    return write_json(folder / "job.json", asked)


def history(checkpoint: Path) -> list[dict[str, Any]]:
    """The logged metrics of the training that made a checkpoint."""
    lines = (checkpoint.parent / "metrics.jsonl").read_text(encoding="utf8").splitlines()
    return [json.loads(line) for line in lines]


def milestones(checkpoint: Path) -> list[Path]:
    """What the training that made a checkpoint kept on its way (job key "milestones"), in order."""
    return sorted((checkpoint.parent / MILESTONES / facts(checkpoint)["fingerprint"]).glob("step-*"))


def _aside(folder: Path, made: str) -> Path:
    """Where a finished training waits while its folder holds one with other values."""
    return folder.with_name(f"{folder.name}-{made}")


def _changed(folder: Path, made: Mapping[str, Any]) -> list[str]:
    """In what a training differs from the one that a folder holds."""
    earlier = read_json(folder / "job.json").get("made_of", {})
    return [key for key in sorted(earlier | made) if earlier.get(key) != made.get(key)]


def _bring_back(folder: Path, made: Mapping[str, Any]) -> None:
    """Moves a training that was put aside back into its folder if it matches, or differs in code alone; one
    finished there is put aside instead. Over unfinished work, `_identity` refuses."""
    places = [folder, *folder.parent.glob(f"{folder.name}-{'[0-9a-f]' * 16}")]
    like = {place: keys for place in places if (keys := _changed(place, made)) in ([], ["code"])}
    nearest = min(like, key=lambda place: len(like[place]), default=folder)
    if nearest != folder and not any(folder.glob("checkpoints/step-*")):
        if here := facts(folder / "model").get("fingerprint"):
            replace_directory(folder, _aside(folder, here))
        replace_directory(nearest, folder)


def _identity(made: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Fingerprint of a training, and what it is made of.

    Where nothing but the code has changed since the training in the folder began, and that was accepted
    (`unmask run --accept-code`), it stays the same training, also for those that start from it.

    Raises: RuntimeError if checkpoints of another training lie there, or a finished one of other code that
        was neither accepted nor to be replaced (`unmask run --force`): somebody paid for them.
    """
    before = read_json(folder / "job.json")
    earlier, accepted, changed = before.get("made_of", {}), before.get("accepted", []), _changed(folder, made)
    if os.environ.get("UNMASK_ACCEPT_CODE") and made["code"] not in accepted:
        accepted = [*accepted, made["code"]]
    if changed == ["code"] and made["code"] in accepted:
        return {"fingerprint": before["fingerprint"], "made_of": earlier, "accepted": accepted}
    paid = changed == ["code"] and (folder / "model").is_dir() and not os.environ.get("UNMASK_TRAIN_ANEW")
    if changed and (paid or any(folder.glob("checkpoints/step-*"))):
        told = ", ".join(f"{key} ({earlier.get(key)} → {made.get(key)})" for key in changed[:8])
        raise RuntimeError(
            f"{folder} holds {'a' if paid else 'checkpoints of a'} training that differs in {told}. "
            + ("Go on from it: `unmask run --accept-code`. " if changed == ["code"] else "")
            + ("Train anew, beside it: `--force`." if paid else "Train anew: move that folder away.")
        )
    return {"fingerprint": fingerprint(made), "made_of": made, "accepted": accepted}


def _train(run: Run, jobs: Mapping[str, Path]) -> None:
    """Starts the child processes, and ends with them."""
    parallel, first = run.config.parallel, next(iter(jobs))
    with jobs[first].with_name(LOG).open("a", encoding="utf8") as log:
        # torchrun gives its workers so long to save themselves; before torch 2.13 always 30 s.
        patience = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{grace_seconds():.0f}"}
        environment = ENVIRONMENT | patience | os.environ
        for name in () if parallel.launcher else RANKS:  # of another job's: one process would wait for others
            environment.pop(name, None)
        if parallel.per_machine > 1:  # this machine's processes share its cores
            cores = int(os.environ.get("OMP_NUM_THREADS", cpu_count()))
            environment["OMP_NUM_THREADS"] = str(max(1, cores // parallel.per_machine))
        options, stop = {"stdout": subprocess.PIPE, "stderr": log, "text": True}, None
        command = _command(list(jobs.values()), parallel)
        # srun and torchrun answer SIGTERM by killing, so a file stands for it.
        if parallel.launcher or "torch.distributed.run" in command:
            stop = jobs[first].with_name(f"stop-{os.getpid()}")
            stop.unlink(missing_ok=True)  # of an interrupted cell
            environment |= {STOP: str(stop)}
        gc.collect()
        torch.cuda.empty_cache()  # what the notebook's own models held
        child = subprocess.Popen(command, env=environment, **options)
        with ended_together(child, grace_seconds(), stop and stop.touch) as told_to_stop:
            last = _watch(child, run.stage)
            child.wait()
        if stop:
            stop.unlink(missing_ok=True)
    name = last.get("training", first)
    if "stopped" in last or told_to_stop:  # even if it had just finished: the notebook is to end
        raise TrainingStopped(f"training {name} was told to stop; what it did is kept, run it again")
    if child.returncode:
        path = jobs[name].with_name(LOG)
        said = path.read_text(encoding="utf8").split("\n") if path.is_file() else []
        reason = last.get("error") or next(filter(str.strip, reversed(said)), "it left no message")
        if "error" not in last and child.returncode == -signal.SIGKILL:
            reason = "killed: memory is full? A lower token_budget or keep_tokens, or --jobs 1, needs less"
        raise RuntimeError(f"training {name} failed: {reason}\n(log: {path})")


def _command(jobs: Sequence[Path], parallel: ParallelConfig) -> list[str]:
    """What starts the processes of some trainings."""
    command = [sys.executable]
    if parallel.launcher:
        command = shlex.split(os.path.expandvars(parallel.launcher))
        if not shutil.which(command[0]) or "$" in "".join(command):
            raise RuntimeError(f"parallel.launcher: no such command, or a variable is not set: {command}")
    elif parallel.num_processes > 1 or parallel.strategy == "fsdp2":
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={parallel.num_processes}", f"--log-dir={jobs[0].parent / 'torchrun'}"]
    return bound([*command, "-m", "unmask.training.launch", *map(str, jobs)])


def _watch(child: subprocess.Popen, notebook: str) -> dict[str, Any]:
    """Draws a progress bar for each training.

    Returns: the last words, among them "training" (the one under way), and "error" or "stopped", if any.
    """
    bar, last = tqdm(disable=True), {}
    try:
        for line in filter(lambda line: line.startswith("{"), child.stdout):  # others are a launcher's own
            row = json.loads(line)
            if not last.keys() & {"error", "stopped"}:
                last = row
            if "error" in row:
                child.kill()  # the other processes would wait for the one that failed
            elif "total" in row:
                bar.close()
                steps = {"total": row["total"], "initial": row["done"], "unit": "step"}
                bar = tqdm(desc=f"{notebook}/{row['training']}", mininterval=1, file=sys.stdout, **steps)
            elif "loss" in row:
                bar.set_postfix_str(f"loss {row['loss']:.3f}", refresh=False)
                bar.update()
    finally:  # of an interrupted cell, too
        bar.close()
    return last


def main(paths: Sequence[str]) -> None:
    """A training process: reads each job, trains, saves; standard output carries the metrics and nothing
    else."""
    # Buffered, even under torchrun's `python -u`: a row is one write, so two processes' rows do not mingle.
    metrics = os.fdopen(os.dup(1), "w", encoding="utf8")
    rank = os.environ.get("RANK", "0")
    if torch.distributed.is_torchelastic_launched():
        _die_with_torchrun()
    for path in map(Path, paths):
        job = read_json(path)
        _log_to(path.with_name(LOG if rank == "0" else f"rank-{rank}.log"))

        def say(row: dict[str, Any], name: str = job["name"]) -> None:
            print(json.dumps({"training": name} | row), file=metrics, flush=True)

        say({})
        try:
            run_job(job, say)
        except Preempted:
            say({"stopped": True})
            raise
        except Exception as error:
            traceback.print_exc()  # now: the notebook ends this process as soon as it reads the row
            say({"error": f"{type(error).__name__}: {error}"[:1500]})  # a longer row would mingle with others
            sys.exit(1)
        # The next one finds the process as the first one found it.
        gc.collect()
        torch.cuda.empty_cache()
        torch.compiler.reset()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _die_with_torchrun() -> None:
    """Makes a worker die with torchrun, which started it as a session of its own and may be dead by now."""
    parent = psutil.Process().parent()
    if parent is None or "torch" not in " ".join(parent.cmdline()):
        os._exit(1)
    die_with(parent.pid)


def _log_to(path: Path) -> None:
    """From here on, whatever this process writes goes into a log, what native code writes too."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with path.open("a", encoding="utf8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


if __name__ == "__main__":
    main(sys.argv[1:])
