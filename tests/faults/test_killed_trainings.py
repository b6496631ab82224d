"""Trainings that are killed or told to stop again and again end as if nothing had happened."""

from __future__ import annotations

import itertools
import random
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

import tiny
import tiny_corpus
from faults import (
    GRACE,
    assert_no_process_left,
    command,
    dice,
    family,
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
from unmask.training.launch import TrainingStopped, history, launch

pytestmark = [pytest.mark.faults, pytest.mark.skipif(**linux)]

STEPS, EVERY = 120, 4  # in all, and between two checkpoints
OVERRIDES = {
    "pair.steps": STEPS,
    "pair.batch": 8,
    "pair.checkpoint_every": EVERY,
    "pair.precision": "fp32",
}
STRATEGIES = {
    "one process": {},
    "ddp": {"parallel.num_processes": 2},
    "fsdp2": {"parallel.num_processes": 2, "parallel.strategy": "fsdp2"},
}


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


def faults(rng: random.Random, strategy: str) -> list[tuple[signal.Signals, str, int]]:
    """Both signals to every kind of process, and the number of steps before each; 0 hits the start."""
    targets = ["notebook", "training"] if strategy == "one process" else ["notebook", "torchrun", "worker"]
    pairs = list(itertools.product((signal.SIGKILL, signal.SIGTERM), targets))
    pairs += rng.choices(pairs, k=6 - len(pairs))
    rng.shuffle(pairs)
    return [(*pair, steps) for pair, steps in zip(pairs, [0, *rng.choices(range(1, 13), k=5)], strict=True)]


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
    return max((int(path.name.split("-")[1]) for path in folder.glob("checkpoints/step-*")), default=0)


def inject(
    rng: random.Random, pid: int, folder: Path, number: signal.Signals, target: str, steps: int
) -> list[psutil.Process]:
    """Sends the signal some time after as many steps; many a moment falls into the writing of a checkpoint.

    Returns: all processes that were there.
    """
    victim = rng.choice(until(lambda: processes(pid)[target], f"the {target}"))
    goal = newest_step(folder) + steps
    until(lambda: newest_step(folder) >= goal, f"step {goal}")
    time.sleep(rng.uniform(0, 0.2) if steps else rng.uniform(0, 3))
    there = family(pid)
    say(number, target, f"newest checkpoint at step {newest_step(folder)}")
    victim.send_signal(number)
    return there


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_training_hit_six_times_ends_as_if_uninterrupted(workspace, strategy):
    rng = dice(strategy)
    overrides = OVERRIDES | STRATEGIES[strategy]

    def begin(name):
        return start(notebook, workspace, workspace, name, overrides)

    whole = begin("whole")
    whole.join(300)
    assert whole.exitcode == 0, (workspace / "processes.log").read_text()
    expected = workspace / "whole" / "02_pair" / "pair" / "model"

    folder = workspace / "hit" / "02_pair" / "pair"
    for number, target, steps in faults(rng, strategy):
        process = begin("hit")
        there = inject(rng, process.pid, folder, number, target, steps)
        process.join(GRACE + 10)
        assert_no_process_left(workspace, there)
        said = (workspace / "processes.log").read_text()
        assert process.exitcode in statuses(number, target, steps), said
        if number == signal.SIGTERM and steps:  # it has lost no step
            assert history(folder / "model")[-1]["step"] < newest_step(folder)

    last = begin("hit")
    last.join(300)
    assert last.exitcode == 0, (workspace / "processes.log").read_text()
    assert_no_process_left(workspace, [])
    model = folder / "model"
    assert timeless(history(model)) == timeless(history(expected))
    assert (model / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()
    assert backbone.facts(model) == backbone.facts(expected)
    assert not (folder / "checkpoints").exists()
    assert not hidden(folder)


def statuses(number: signal.Signals, target: str, steps: int) -> set[int]:
    """Exit statuses of a notebook: killed, failed because its training was killed, or told to stop."""
    if number == signal.SIGKILL:
        return {-signal.SIGKILL} if target == "notebook" else {1}
    # Before the first step nothing is saved.
    return {PREEMPTED} if steps else {PREEMPTED, 1, -signal.SIGTERM}


def timeless(rows: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]
