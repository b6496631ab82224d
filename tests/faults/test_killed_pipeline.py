"""The whole pipeline at toy size, hit again and again: the run, its kernels, its trainings."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from faults import (
    GRACE,
    assert_no_process_left,
    command,
    dice,
    environment,
    family,
    hidden,
    linux,
    say,
    send,
    until,
)
from unmask.run import PREEMPTED
from unmask.store import repository

pytestmark = [pytest.mark.faults, pytest.mark.skipif(**linux)]

PARTS = {"run": "-m unmask run", "kernel": "ipykernel_launcher", "training": "unmask.training.launch"}
ALIKE = ("seconds", "per_second")  # metrics that are times


class Checkout:
    """A copy of the notebooks and the library, which writes into its own folders."""

    def __init__(self, root: Path) -> None:
        self.root, self.artifacts = root, root / "artifacts"
        for folder in ("lib", "notebooks", "papermill_runs/presets"):
            shutil.copytree(
                repository() / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__")
            )

    def start(self) -> subprocess.Popen:
        with (self.root / "run.log").open("a", encoding="utf8") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "unmask", "run", "--preset", "smoke"],
                cwd=self.root,
                env=os.environ | environment(self.artifacts) | {"PYTHONPATH": str(self.root / "lib")},
                stdout=log,
                stderr=log,
            )

    @property
    def said(self) -> str:
        return (self.root / "run.log").read_text(encoding="utf8")

    @property
    def done(self) -> list[str]:
        return sorted(path.parent.name for path in self.artifacts.glob("smoke/*/done.json"))

    def results(self) -> dict[str, Any]:
        """All that the run has found out, without the times, and the weights that it has trained."""
        found: dict[str, Any] = {}
        for path in (self.root / "results" / "smoke").glob("*.json"):
            if path.name != "provenance.json":
                found[path.name] = timeless(json.loads(path.read_text(encoding="utf8")))
        folder = self.artifacts / "smoke"
        return found | {
            str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")
        }


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: timeless(one) for key, one in value.items() if not key.endswith(ALIKE)}
    return [timeless(one) for one in value] if isinstance(value, list) else value


def part(run: subprocess.Popen, name: str) -> list[psutil.Process]:
    """The kernel, or the training, or the run itself."""
    return [process for process in family(run.pid) if PARTS[name] in command(process)]


def inject(
    rng: random.Random,
    checkout: Checkout,
    run: subprocess.Popen,
    number: signal.Signals,
    target: str,
    done: int,
) -> tuple[list[psutil.Process], int]:
    """Sends a signal some time after `done` notebooks are done.

    Returns: all processes that were there, and how many notebooks were done.
    """

    def reached(condition: Callable[[], Any]) -> Any:
        assert run.poll() is None, f"the run ended before it could be hit\n{checkout.said}"
        return condition()

    until(lambda: reached(lambda: len(checkout.done) >= done), f"{done} notebooks to be done", 300, 0.1)
    time.sleep(rng.uniform(1, 15))
    victims = until(lambda: reached(lambda: part(run, target)), f"the {target}", 120, 0.02)
    there, before = family(run.pid), len(checkout.done)
    say(number, target, f"{before} notebooks done")
    send([rng.choice(victims)], number)
    return there, before


def test_a_run_hit_eight_times_ends_as_if_uninterrupted(tmp_path):
    rng = dice("pipeline")
    whole, hit = Checkout(tmp_path / "whole"), Checkout(tmp_path / "hit")
    assert whole.start().wait(600) == 0, whole.said

    faults = list(itertools.product((signal.SIGKILL, signal.SIGTERM), PARTS))
    faults += rng.choices(faults, k=2)
    rng.shuffle(faults)
    faults.sort(key=lambda fault: fault[1] != "training")  # the first notebooks train, not all of the last do
    for done, (number, target) in enumerate(faults):
        run, finished = hit.start(), hit.done
        while True:
            there, before = inject(rng, hit, run, number, target, done)
            try:
                status = run.wait(GRACE + 10)
                break
            except subprocess.TimeoutExpired:  # the kernel had finished its notebook and was about to end
                assert len(hit.done) > before, f"the run hangs\n{hit.said}"
        assert_no_process_left(hit.root, there)
        assert status in statuses(number, target), hit.said
        assert set(finished) <= set(hit.done)

    assert hit.start().wait(600) == 0, hit.said
    assert_no_process_left(hit.root, [])
    assert hit.done == whole.done
    assert hit.results() == whole.results()
    assert not hidden(hit.root)


def statuses(number: signal.Signals, target: str) -> set[int]:
    """How a run ends that was hit itself, or whose kernel or training was."""
    if number == signal.SIGKILL:
        return {-signal.SIGKILL} if target == "run" else {1}
    # A training that has not begun, or a kernel that does not train, dies of SIGTERM as of any other fault;
    # so does a run that is not ready.
    return {PREEMPTED, -signal.SIGTERM} if target == "run" else {PREEMPTED, 1}
