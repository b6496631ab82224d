"""What is hit at random moments ends as if nothing had happened: make test-faults.

UNMASK_FAULTS says how many hits there are over all tests, or a few more (make test-faults FAULTS=100), and
UNMASK_FAULTS_SEED picks other moments; the default is 0.
"""

import os
import random
import re
import shutil
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from itertools import chain
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

import tiny
import tiny_corpus
from unmask import Embedder
from unmask.data.sources import open_corpus
from unmask.models import jobs
from unmask.models.backbone import load_tokenizer
from unmask.models.merge import slerp
from unmask.store import write_json
from unmask.training import Pair, train
from unmask_study.run import Run
from unmask_study.settings import load_preset
from unmask_study.tasks import assess, build_tasks, task_means
from waiting import live_in, wait_for

linux = {"condition": sys.platform != "linux", "reason": "only Linux tells a child that its parent died"}
pytestmark = [pytest.mark.faults, pytest.mark.skipif(**linux)]

SEED, FAULTS = os.environ.get("UNMASK_FAULTS_SEED", "0"), int(os.environ.get("UNMASK_FAULTS", "0"))
GRACE = 30  # seconds that a training gets to save itself
FORK, SMOKE = get_context("forkserver"), load_preset("smoke")
# One thread computes the same everywhere; NCCL wants a GPU for each process.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "UNMASK_GRACE_SECONDS": str(GRACE)}
# Each step leaves a checkpoint.
SHORT = {"pair.steps": 60, "pair.batch": 8, "pair.checkpoint_seconds": 0, "pair.precision": "fp32"}


def notebook(given: Path, folder: Path, **parallel: object) -> None:
    """What a notebook's kernel does."""
    overrides = SHORT | {f"parallel.{key}": value for key, value in parallel.items()}
    study = Run.open("02_pair", "smoke", overrides, run="faults")
    stage = Pair(study.config, open_corpus(study.config.data), load_tokenizer(given / "model0"))
    train(stage, stage.model(given / "model0"), study.folder("pair"))


def save(given: Path, folder: Path) -> None:
    for _ in range(30):
        Embedder.from_pretrained(given / "model0").save_pretrained(folder / "model")


def merge(given: Path, folder: Path) -> None:
    for _ in range(5):
        slerp(given / "model0", given / "model1", 0.5, folder / "model")


def encode(given: Path, folder: Path) -> None:
    jobs.BATCH = 64
    jobs.encode_file(given / "model0", given / "texts.txt", folder / "rows.npy", "text", "float32", None)


def prepare(given: Path, folder: Path) -> None:
    Pair(SMOKE, open_corpus(SMOKE.data), load_tokenizer(given / "model0")).prepare()


def evaluate(given: Path, folder: Path) -> None:
    tasks = build_tasks(open_corpus(SMOKE.data), "test", SMOKE.evaluation)
    write_json(folder / "means.json", task_means({"a": assess(given / "model0", tasks, SMOKE.evaluation)}))


# What is long enough to be hit, made of what is given, in a folder.
WORKS = {work.__name__: work for work in (save, merge, encode, prepare, evaluate)}
WORKS |= {"one process": notebook, "ddp": partial(notebook, num_processes=2)}
WORKS |= {"fsdp2": partial(notebook, num_processes=2, strategy="fsdp2")}
PERCENT = {"ddp": 3, "fsdp2": 3}  # of all hits: torchrun takes long to start; the others get 16 each


@pytest.fixture(scope="module", autouse=True)
def fork_server():
    """Has imported what victims need when they start, so that what is hit is the work."""
    with patch.dict(os.environ, ENVIRONMENT, PYTHONPATH=os.pathsep.join(sys.path)):
        FORK.set_forkserver_preload([__name__])
        first = FORK.Process()
        first.start()
        first.join()


def victim(work: str, given: Path, folder: Path) -> None:
    """A work, in a process of its own; those that it starts are known by their environment."""
    with (given / "processes.log").open("a", encoding="utf8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ["UNMASK_ARTIFACTS"] = str(folder)
    tiny_corpus.install(pytest.MonkeyPatch())
    WORKS[work](given, folder)


def hit(rng: random.Random, process: ForkServerProcess, folder: Path) -> None:
    """Kills or stops the process, or one of those that it started, and sees that none is left."""
    with suppress(psutil.NoSuchProcess):
        target = rng.choice([psutil.Process(process.pid), *psutil.Process(process.pid).children(True)])
        number = rng.choice([signal.SIGKILL, signal.SIGTERM])
        name = "the process" if target.pid == process.pid else " ".join(target.cmdline())[:110]
        print(f"  {number.name} to {name}", flush=True)
        target.send_signal(number)
    process.join(2 * GRACE)
    process.kill()
    process.join()
    wait_for(lambda: not live_in(folder), seconds=120)


def whole(folder: Path) -> dict[str, bytes]:
    """All files but locks, logs and hidden ones; of a training's metrics all but its seconds."""
    files = {str(one.relative_to(folder)): one for one in folder.rglob("*") if one.is_file()}
    kept = {name: one for name, one in files.items() if not re.search(r"(^|/)\.|\.(lock|log)$", name)}
    return {name: re.sub(rb'"seconds": [^,}]*', b"", one.read_bytes()) for name, one in kept.items()}


@pytest.mark.parametrize("work", WORKS)
def test_what_is_hit_ends_as_if_uninterrupted(tmp_path, monkeypatch, work):
    print(f"\n{work}: UNMASK_FAULTS_SEED={SEED}", flush=True)
    rng, folder, blank = random.Random(f"{SEED} {work}"), tmp_path / "folder", tmp_path / "blank"
    (tmp_path / "texts.txt").write_text("".join(f"the text of number {i}\n" for i in range(2000)))
    for seed in (0, 1):
        Embedder(tiny.model(seed=seed), tiny.tokenizer()).save_pretrained(tmp_path / f"model{seed}")
    with monkeypatch.context() as there:  # a corpus of a few sentences, where the real one is expected
        there.setenv("UNMASK_ARTIFACTS", str(blank))
        tiny_corpus.install(there)
        open_corpus(SMOKE.data)

    def begin() -> ForkServerProcess:
        if not folder.exists():
            shutil.copytree(blank, folder)
        process = FORK.Process(target=victim, args=(work, tmp_path, folder))
        process.start()
        return process

    def finished(process: ForkServerProcess) -> dict[str, bytes]:
        """What the work has left, which then goes."""
        process.join(900)
        assert process.exitcode == 0, (tmp_path / "processes.log").read_text(encoding="utf8")
        assert not [*chain.from_iterable(map(folder.rglob, ("checkpoints", ".*.tmp/", ".*.partial")))]
        left = whole(folder)
        shutil.rmtree(folder)
        return left

    began, expected = time.monotonic(), finished(begin())
    seconds, hits = time.monotonic() - began, 0
    while hits < FAULTS * PERCENT.get(work, 16) / 100:
        process = begin()
        process.join(rng.uniform(0, seconds))
        if process.is_alive():
            hit(rng, process, folder)
            hits += 1
        else:
            assert finished(process) == expected
    assert finished(begin()) == expected
