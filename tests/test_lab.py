"""Notebooks by hand, cell by cell, in the run "lab"."""

import os
import signal
import subprocess
import threading
from functools import partial
from operator import attrgetter

import pytest
from filelock import FileLock

import tiny
import tiny_corpus
from by_hand import cells, kernel
from unmask.models import backbone
from unmask.store import repository
from unmask.training import TrainingStopped, identity
from unmask_study import evidence
from unmask_study.run import Run
from unmask_study.settings import load_preset
from waiting import wait_for

STAGES = ["00_backbone", "01_diffusion_cpt", "02_pair", "03_contextual", "04_triplet", "05_merge"]
STAGES += ["06_quantization", "07_diffusion_vs_ar", "08_conteb", "08a_insent", "10_cde"]
STAGES += ["11_qwen3_embedding"]
FEW = {"diffusion.steps": 4, "diffusion.warmup": 1, "diffusion.decay": 1, "diffusion.batch": 2}
FEW |= {"diffusion.length": 64, "ablation.steps": 2, "ablation.batch": 8}
HAND = """
from unmask.training import Pair, train
class Mine(Pair):
    def loss(self, rows_RD, batch, **shared):
        return 2 * super().loss(rows_RD, batch, **shared)
mine = Mine(config, corpus, stage.tokenizer)
print("other:", train(mine, mine.model(start), study.folder("pair")) != checkpoint)
long = Pair(config, corpus, stage.tokenizer, steps=20)
def again(name):
    return train(long, long.model(start), study.folder(name))
"""
SAME = """
files = [(again(name) / "model.safetensors").read_bytes() for name in ("parts", "whole")]
print("same:", files[0] == files[1])
"""


@pytest.fixture
def shell(tmp_path, tmp_path_factory, monkeypatch):
    """Of a small corpus, and without the reference; one at a time, since all write to results/lab."""
    tiny_corpus.install(monkeypatch)
    monkeypatch.setattr("unmask_study.tasks.PACKAGE", "no_such_package")
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with FileLock(base / "lab.lock"), kernel() as shell:
        yield shell


def status():
    return subprocess.check_output(["git", "status", "--porcelain"], cwd=repository())


@pytest.mark.slow
def test_a_notebook_by_hand(shell, tmp_path, monkeypatch):
    made = tmp_path / "smoke" / "01_diffusion_cpt" / "diffusion" / "model"
    backbone.save(tiny.model(head=True), tiny.tokenizer(), made)
    before = status()
    told, pictures = shell.run(*cells("02_pair", {"pair.batch": 8}))
    assert "01_diffusion_cpt: taken from run 'smoke'" in told and "query     " in told and pictures > 2
    assert "other: True" in shell.run(HAND)[0]

    def interrupt():
        logs = partial(tmp_path.glob, "lab/**/parts/*/metrics.jsonl")
        wait_for(lambda: any(log.read_text().count("\n") > 2 for log in logs()))
        os.kill(os.getpid(), signal.SIGINT)

    user = threading.Thread(target=interrupt)
    user.start()
    with pytest.raises(TrainingStopped, match="told to stop"):
        shell.run("again('parts')")
    user.join()
    assert "same: True" in shell.run(SAME)[0]
    path = next(path for path in identity.IMPORTED if path.name == "contrastive.py")
    monkeypatch.setitem(identity.IMPORTED, path, b"as_it_was = 1")
    with pytest.raises(RuntimeError, match=r"contrastive\.py has changed"):
        shell.run("again('edited')")
    assert status() == before


# The keys of preset cpu that say what is trained.
OF_CPU = "quantization.shapes ablation.arms ablation.anneal ablation.rates conteb.trainings"
OF_CPU += " cde.studies qwen3.start qwen3.trainings"


@pytest.mark.slow
def test_with_the_trainings_of_preset_cpu_every_claim_is_asked(shell, tmp_path, monkeypatch):
    """A base cut short is trained on, too, as an arm of notebook 07."""
    monkeypatch.setattr(Run, "_sources", lambda self: [self.name])  # whatever `make smoke` has left
    base = tiny.model(bidirectional=False, head=True, length=512)
    backbone.save(base, tiny.tokenizer(), tmp_path / "ready")
    values = FEW | {"backbone.checkpoint": str(tmp_path / "ready"), "backbone.keep_layers": [0]}
    values |= {key: attrgetter(key)(load_preset("cpu")) for key in OF_CPU.split()}
    told = {name.partition("_")[0]: shell.run(*cells(name, values))[0] for name in STAGES}
    preset, lab = load_preset("smoke", values), tmp_path / "lab" / "smoke"
    assert len([*lab.rglob("metrics.jsonl")]) == 21
    for claim in evidence.claims(Run("12_report", "lab/smoke", preset)):
        assert claim["verdict"] not in ("not asked", "not run") and "no gates of" not in claim["why"]
    assert all("not run" in told[name] for name in ("08a", "10", "11"))

    imports, *rest = cells("11_qwen3_embedding", values | {"qwen3.trainings": ["reranker"]})
    where = next(number for number, cell in enumerate(rest) if "import by_family, compare, failed" in cell)
    learnt = "so, gate = gate, lambda *facts: so(*facts) | {'passed': True}"  # a model so small does not
    again, _ = shell.run(imports, *rest[: where + 1], learnt, *rest[where + 1 :])
    assert "The reranker: learnt" in again
    assert again.count("trained before") == 2  # what a notebook trains is no part of a training
