"""What is hit at random moments ends as if nothing had happened: make test-faults.

UNMASK_FAULTS says how many hits there are over all tests (make test-faults FAULTS=100), UNMASK_FAULTS_SEED
picks other moments; the default is 0.
"""

import json
import os
import random
import re
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
from unmask import Embedder
from unmask.config import load_preset
from unmask.data import sources
from unmask.models import backbone
from unmask.store import repository
from unmask.training import history
from waiting import live_in, wait_for

linux = {"condition": sys.platform != "linux", "reason": "only Linux tells a child that its parent died"}
pytestmark = [pytest.mark.faults, pytest.mark.skipif(**linux)]

SEED, FAULTS = os.environ.get("UNMASK_FAULTS_SEED", "0"), int(os.environ.get("UNMASK_FAULTS", "0"))
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


# What else is long enough to be hit, each into a folder that it is given, from a model and a corpus.
WORKS = {
    "save": "for _ in range(30): Embedder.from_pretrained(start).save_pretrained(folder / 'model')",
    "merge": "for _ in range(5): slerp(start, other, 0.5, folder / 'model')",
    "encode": "encode_file(start, texts, folder / 'rows.npy', 'text', 'float32', None)",
    "prepare": "Pair(preset, corpus(), load_tokenizer(start)).prepare()",
    "evaluate": "write_json(folder / 'means.json', "
    "task_means({'a': assess(start, build_tasks(corpus(), 'test', preset.evaluation), preset.evaluation)}))",
}
WORK = """
import sys
from pathlib import Path
from unmask import Embedder
from unmask.config import load_preset
from unmask.data.sources import open_corpus
from unmask.evaluation.tasks import assess, build_tasks, task_means
from unmask.models import jobs
from unmask.models.backbone import load_tokenizer
from unmask.models.jobs import encode_file
from unmask.models.merge import slerp
from unmask.store import write_json
from unmask.training import Pair
jobs.BATCH, preset = 64, load_preset("smoke")
folder, start, other, texts = map(Path, sys.argv[1:])
corpus = lambda: open_corpus(preset.data)
(folder / "begun").touch()
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


def share() -> int:
    """Hits of one test."""
    return -(-FAULTS // (len(STRATEGIES) + len(WORKS)))


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_training_that_is_hit_ends_as_if_uninterrupted(tmp_path, monkeypatch, strategy):
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

    for fault in range(share()):
        inject(fault == 0)
    assert begin("hit").wait(900) == 0, said(tmp_path)
    assert timeless(history(folder / "model")) == timeless(history(expected / "model"))
    weights = [(path / "model" / "model.safetensors").read_bytes() for path in (folder, expected)]
    assert weights[0] == weights[1]
    assert not [*folder.rglob("checkpoints")] and not [*folder.rglob(".*.tmp"), *folder.rglob(".*.old")]


def whole(folder: Path) -> dict[str, bytes]:
    """All files but locks and hidden ones."""
    files = {str(one.relative_to(folder)): one for one in folder.rglob("*") if one.is_file()}
    return {name: one.read_bytes() for name, one in files.items() if not re.search(r"(^|/)\.|\.lock$", name)}


@pytest.mark.parametrize("work", WORKS)
def test_work_that_is_hit_ends_as_if_uninterrupted(tmp_path, monkeypatch, work):
    rng, texts = dice(work), tmp_path / "texts.txt"
    texts.write_text("".join(f"the text of number {i}\n" for i in range(2000)))
    models = [
        Embedder(tiny.model(seed=seed), tiny.tokenizer()).save_pretrained(tmp_path / f"model{seed}")
        for seed in (0, 1)
    ]

    def begin(name: str) -> tuple[subprocess.Popen, Path]:
        folder = tmp_path / name
        if not folder.exists():
            folder.mkdir()
            with monkeypatch.context() as patch:
                patch.setenv("UNMASK_ARTIFACTS", str(folder))
                tiny_corpus.install(patch)
                sources.open_corpus(load_preset("smoke").data)
        (folder / "begun").unlink(missing_ok=True)
        process = start(folder, "-c", WORK + WORKS[work], *map(str, (folder, *models, texts)))
        wait_for(lambda: (folder / "begun").exists() or process.poll() is not None)
        return process, folder

    process, folder = begin("whole")
    began = time.monotonic()
    assert process.wait(900) == 0, said(folder)
    seconds, expected = time.monotonic() - began, whole(folder)
    for _ in range(share()):
        process, folder = begin("hit")
        time.sleep(rng.uniform(0, seconds))
        hit(rng, process, folder)
    process, folder = begin("hit")
    assert process.wait(900) == 0, said(folder)
    found = whole(folder)
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name] and name != "processes.log"] == []
    assert not [*folder.rglob(".*.tmp/"), *folder.rglob(".*.old"), *folder.rglob(".*.partial")]
