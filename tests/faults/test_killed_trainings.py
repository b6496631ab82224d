"""Trainings that are killed or told to stop again and again end as if nothing had happened."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors import safe_open

import tiny
import tiny_corpus
from faults import (
    GRACE,
    alive,
    assert_no_process_left,
    command,
    dice,
    family,
    frozen,
    hidden,
    linux,
    say,
    start,
    until,
)
from unmask.config import load_preset
from unmask.data import sources
from unmask.models import backbone
from unmask.run import PREEMPTED, Run
from unmask.training.checkpoint import MOMENTS, latest_checkpoint
from unmask.training.launch import TrainingStopped, history, launch

pytestmark = [pytest.mark.faults, pytest.mark.skipif(**linux)]

STEPS, EVERY = 200, 4  # in all, and between two checkpoints
OVERRIDES = {
    "pair.steps": STEPS,
    "pair.batch": 8,
    "pair.checkpoint_every": EVERY,
    "pair.log_every": 3,  # a stop in between must not show
    "pair.precision": "fp32",
}
STRATEGIES = {
    "one process": {},
    "ddp": {"parallel.num_processes": 2},
    "fsdp2": {"parallel.num_processes": 2, "parallel.strategy": "fsdp2"},
}
# When a training that is told to stop saves itself.
LOSSLESS = ("training", "writing a checkpoint")
SAVING = "saving the model"


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """Artifacts with a corpus of a few sentences, where the trainings expect the real one, and a checkpoint
    to start from."""
    with monkeypatch.context() as patch:
        patch.setenv("UNMASK_ARTIFACTS", str(tmp_path))
        tiny_corpus.install(patch)
        sources.open_corpus(load_preset("smoke").data)
    backbone.save(tiny.model(), tiny.tokenizer(), tmp_path / "start", stage="tiny", fingerprint="tiny")
    return tmp_path


def notebook(artifacts: Path, name: str, overrides: dict) -> None:
    """What a notebook's kernel does: launches, and waits."""
    try:
        launch(Run.open("02_pair", "smoke", overrides, run=name), "pair", {"start": artifacts / "start"})
    except TrainingStopped:
        sys.exit(PREEMPTED)


def faults(rng: random.Random, strategy: str) -> list[tuple[signal.Signals, str, str]]:
    """Both signals to every kind of process, at random moments; the last one while the result is saved."""
    targets = ["notebook", "training"] if strategy == "one process" else ["notebook", "torchrun", "worker"]
    pairs = list(itertools.product((signal.SIGKILL, signal.SIGTERM), targets))
    pairs += rng.choices(pairs, k=6 - len(pairs))
    moments = ["starting", "training", "training", "writing a checkpoint", "writing a checkpoint"]
    rng.shuffle(pairs)
    rng.shuffle(moments)
    return [(*pair, moment) for pair, moment in zip(pairs, [*moments, SAVING], strict=True)]


def processes(pid: int) -> dict[str, list[psutil.Process]]:
    """The processes of a training by their part in it."""
    found = {"notebook": [], "torchrun": [], "training": [], "worker": []}
    for process in family(pid):
        said = command(process)
        if process.pid == pid:
            found["notebook"].append(process)
        elif "torch.distributed.run" in said:
            found["torchrun"].append(process)
        elif "unmask.training.launch" in said:
            found["training" if process.ppid() == pid else "worker"].append(process)
    return found


def newest_step(folder: Path) -> int:
    return max((int(path.name[5:]) for path in folder.glob("checkpoints/step-*")), default=0)


def inject(
    rng: random.Random, pid: int, folder: Path, number: signal.Signals, target: str, moment: str
) -> list[psutil.Process]:
    """Waits for the moment and sends the signal.

    Returns: all processes that were there; none if the training ended before it could be hit.
    """

    def of(part: str) -> list[psutil.Process]:
        return until(lambda: processes(pid)[part], f"the {part}")

    def hit() -> list[psutil.Process]:
        there, victim = family(pid), rng.choice(of(target))
        say(number, target, f"{moment}, newest checkpoint at step {newest_step(folder)}")
        victim.send_signal(number)
        if number == signal.SIGKILL:
            until(lambda: not alive([victim]), "its end")  # before it is let go on, if it was frozen
        return there

    if moment == "starting":
        of(target)
        time.sleep(rng.uniform(0, 3))
        return hit()
    done = newest_step(folder)
    if moment == "training":
        steps = EVERY * rng.randint(1, 3)
        until(lambda: newest_step(folder) >= done + steps, f"step {done + steps}")
        time.sleep(rng.uniform(0, 0.1))
        return hit()
    saving = moment == SAVING
    first = STEPS - 3 * EVERY if saving else done + EVERY
    until(lambda: newest_step(folder) >= first, f"step {first}")
    writers = processes(pid)["training"] or processes(pid)["worker"]
    pattern = ".model.*tmp" if saving else "checkpoints/.step-*.tmp"
    while alive(writers):  # in leaps of milliseconds, or the moment would often be missed
        with frozen(writers):
            if list(folder.glob(pattern)):
                return hit()
        time.sleep(rng.uniform(0, 0.004))
    return []


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_training_hit_six_times_ends_as_if_uninterrupted(workspace, strategy):
    rng = dice(strategy)
    overrides = OVERRIDES | STRATEGIES[strategy]

    def begin(name):
        return start(notebook, workspace, workspace, name, overrides)

    whole = begin("whole")
    whole.join(120)
    assert whole.exitcode == 0, (workspace / "processes.log").read_text()
    expected = workspace / "whole" / "02_pair" / "pair" / "model"

    folder, before = workspace / "hit" / "02_pair" / "pair", workspace / "before"
    folder.mkdir(parents=True)
    for number, target, moment in faults(rng, strategy):
        shutil.rmtree(before, ignore_errors=True)
        shutil.copytree(folder, before)
        process = begin("hit")
        while not (there := inject(rng, process.pid, folder, number, target, moment)):
            process.join(GRACE)
            shutil.rmtree(folder)  # missed: once more from the same state
            shutil.copytree(before, folder)
            process = begin("hit")
        process.join(GRACE + 10)
        status = process.exitcode
        assert_no_process_left(workspace, there)
        assert status in statuses(number, target, moment), (workspace / "processes.log").read_text()
        if moment == SAVING and number == signal.SIGTERM:
            assert (folder / "model").exists()
        if not (folder / "model").exists():  # written between the signal and the end
            check_newest_checkpoint(folder, saved=number == signal.SIGTERM and moment in LOSSLESS)

    last = begin("hit")
    last.join(120)
    assert last.exitcode == 0, (workspace / "processes.log").read_text()
    assert_no_process_left(workspace, [])
    model = folder / "model"
    assert timeless(history(model)) == timeless(history(expected))
    assert (model / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()
    assert backbone.facts(model) == backbone.facts(expected)
    assert not (folder / "checkpoints").exists()
    assert not hidden(folder)

    # Killed when the model was saved and its checkpoints were not yet removed.
    (folder / "checkpoints" / "step-0000196").mkdir(parents=True)
    again = begin("hit")
    again.join(60)
    assert again.exitcode == 0 and not (folder / "checkpoints").exists()


def statuses(number: signal.Signals, target: str, moment: str) -> set[int]:
    """Exit statuses of a notebook: killed, failed because its training was killed, or told to stop."""
    if number == signal.SIGKILL:
        return {-signal.SIGKILL} if target == "notebook" else {1}
    if moment in LOSSLESS:
        return {PREEMPTED}
    if moment == SAVING:
        return {PREEMPTED} if target == "notebook" else {0, PREEMPTED, 1}  # it is too late to stop
    return {PREEMPTED, 1, -signal.SIGTERM}  # before the first step nothing is saved


def check_newest_checkpoint(folder: Path, *, saved: bool) -> None:
    """What the next start takes for a whole checkpoint is one; a training that was told to stop loses no
    step."""
    fingerprint = json.loads((folder / "job.json").read_text())["fingerprint"]
    checkpoints = folder / "checkpoints"
    newest = latest_checkpoint(checkpoints, fingerprint) if checkpoints.exists() else None
    assert newest or not saved
    if newest is None:
        return
    names = set()
    for file in newest.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            names |= {name for name in tensors.keys() if tensors.get_tensor(name).numel()}  # noqa: SIM118
    weights = [f"model.{name}" for name, _ in tiny.model().named_parameters()]
    assert len(names) == (1 + len(MOMENTS)) * len(weights)
    if saved:
        assert history(folder / "model")[-1]["step"] < newest_step(folder)


def timeless(rows: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]
