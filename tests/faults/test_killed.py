"""Trainings that are hit at random moments end as if nothing had happened: make test-faults.

UNMASK_FAULTS_SEED picks other moments; the default is 0.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import tiny
import tiny_corpus
from unmask.config import load_preset
from unmask.data import sources
from unmask.models import backbone
from unmask.store import repository
from unmask.training import history
from waiting import live_in, wait_for

linux = {"condition": sys.platform != "linux", "reason": "only Linux tells a child that its parent died"}
pytestmark = [pytest.mark.faults, pytest.mark.skipif(**linux)]

SEED = os.environ.get("UNMASK_FAULTS_SEED", "0")
GRACE = 30  # seconds that a training gets to save itself
# Each step leaves a checkpoint.
OVERRIDES = {"pair.steps": 120, "pair.batch": 8, "pair.checkpoint_seconds": 0, "pair.precision": "fp32"}
STRATEGIES = {
    "one process": {},
    "ddp": {"parallel.num_processes": 2},
    "fsdp2": {"parallel.num_processes": 2, "parallel.strategy": "fsdp2"},
}
# What a notebook's kernel does.
NOTEBOOK = """
import json, sys
from unmask.data.sources import open_corpus
from unmask.models.backbone import load_tokenizer
from unmask.run import Run
from unmask.training import Pair, train
overrides, name, start = json.loads(sys.argv[1]), *sys.argv[2:]
study = Run.open("02_pair", "smoke", overrides, run=name)
stage = Pair(study.config, open_corpus(study.config.data), load_tokenizer(start))
train(stage, stage.model(start), study.folder("pair"))
"""


def dice(name: str) -> random.Random:
    """Random numbers of one test; says how to get the same ones again."""
    print(f"\n{name}: UNMASK_FAULTS_SEED={SEED}", flush=True)
    return random.Random(f"{SEED} {name}")


def start(artifacts: Path, *command: str) -> subprocess.Popen:
    """Starts Python, with one thread, which is the same everywhere."""
    lib = repository() / "lib"
    own = {"UNMASK_ARTIFACTS": str(artifacts), "UNMASK_GRACE_SECONDS": str(GRACE)}
    with (artifacts / "processes.log").open("a", encoding="utf8") as log:
        alone = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # NCCL wants a GPU for each process
        environment = os.environ | own | alone | {"PYTHONPATH": str(lib)}
        return subprocess.Popen([sys.executable, *command], env=environment, stdout=log, stderr=log)


def said(artifacts: Path) -> str:
    return (artifacts / "processes.log").read_text(encoding="utf8")


def hit(rng: random.Random, process: subprocess.Popen, artifacts: Path) -> None:
    """Kills or stops the process, or one of those that it started, and sees that none is left."""
    with suppress(psutil.NoSuchProcess):
        victim = rng.choice([psutil.Process(process.pid), *psutil.Process(process.pid).children(True)])
        number = rng.choice([signal.SIGKILL, signal.SIGTERM])
        print(f"  {number.name} to {' '.join(victim.cmdline())[:110]}", flush=True)
        victim.send_signal(number)
    with suppress(subprocess.TimeoutExpired):  # what was hit was about to end anyway
        process.wait(2 * GRACE)
    process.kill()
    process.wait()
    wait_for(lambda: not live_in(artifacts), seconds=120)


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_training_hit_six_times_ends_as_if_uninterrupted(tmp_path, monkeypatch, strategy):
    rng = dice(strategy)
    with monkeypatch.context() as patch:  # a corpus of a few sentences, where the real one is expected
        patch.setenv("UNMASK_ARTIFACTS", str(tmp_path))
        tiny_corpus.install(patch)
        sources.open_corpus(load_preset("smoke").data)
    backbone.save(tiny.model(), tiny.tokenizer(), tmp_path / "start", stage="tiny", fingerprint="tiny")
    overrides = json.dumps(OVERRIDES | STRATEGIES[strategy])

    def begin(name: str) -> subprocess.Popen:
        arguments = (overrides, name, str(tmp_path / "start"))
        return start(tmp_path, "-c", NOTEBOOK, *arguments)

    assert begin("whole").wait(900) == 0, said(tmp_path)
    folder, expected = (tmp_path / name / "02_pair" / "pair" for name in ("hit", "whole"))

    def newest() -> str:
        return max((path.name for path in folder.glob("*/checkpoints/step-*")), default="")

    def inject(at_the_start: bool) -> None:
        process, before = begin("hit"), newest()
        if not at_the_start:
            wait_for(lambda: newest() > before or process.poll() is not None, seconds=600)
        time.sleep(rng.uniform(0, 1))
        hit(rng, process, tmp_path)

    for fault in range(6):
        inject(fault == 0)
    assert begin("hit").wait(900) == 0, said(tmp_path)
    assert timeless(history(folder / "model")) == timeless(history(expected / "model"))
    weights = [(path / "model" / "model.safetensors").read_bytes() for path in (folder, expected)]
    assert weights[0] == weights[1]
    assert not [*folder.rglob("checkpoints")] and not [*folder.rglob(".*.tmp"), *folder.rglob(".*.old")]
