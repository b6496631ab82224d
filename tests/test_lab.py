"""Notebooks by hand, cell by cell, in the run "lab"."""

import os
import signal
import subprocess
import threading

import pytest

import tiny
import tiny_corpus
from by_hand import cells, kernel
from unmask.models import backbone
from unmask.store import repository
from unmask.training import TrainingStopped
from waiting import wait_for

HAND = """
from unmask.training import Pair, train
class Mine(Pair):
    def loss(self, rows_RD, batch, **shared):
        return 2 * super().loss(rows_RD, batch, **shared)
mine = Mine(config, corpus, stage.tokenizer)
print("other:", train(mine, mine.model(start), study.folder("pair")) != checkpoint)
"""
LONG = """
long = Pair(config, corpus, stage.tokenizer, steps=20)
def again(name):
    return train(long, long.model(start), study.folder(name))
"""
SAME = """
files = [(again(name) / "model.safetensors").read_bytes() for name in ("parts", "whole")]
print("same:", files[0] == files[1])
"""
EDITED = """
from unmask.training import identity
path = next(path for path in identity.IMPORTED if path.name == "contrastive.py")
monkeypatch.setitem(identity.IMPORTED, path, b"as_it_was = 1")
again("edited")
"""


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """Of a small corpus, and without the reference."""
    tiny_corpus.install(monkeypatch)
    monkeypatch.setattr("unmask.evaluation.tasks.PACKAGE", "no_such_package")
    with kernel() as shell:
        yield shell


def status():
    command = ["git", "-C", str(repository()), "status", "--porcelain"]
    return subprocess.run(command, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_a_notebook_by_hand(shell, tmp_path, monkeypatch):
    made = tmp_path / "smoke" / "01_diffusion_cpt" / "diffusion" / "model"
    backbone.save(tiny.model(head=True), tiny.tokenizer(), made)
    before = status()
    told, pictures = shell.run(*cells("02_pair", {"pair.batch": 8}))
    assert "01_diffusion_cpt: taken from run 'smoke'" in told and "query     " in told and pictures > 2
    assert "other: True" in shell.run(HAND)[0]
    shell.run(LONG)

    def logged():
        logs = tmp_path.glob("lab/**/parts/*/metrics.jsonl")
        return any(log.read_text().count("\n") > 2 for log in logs)

    def interrupt():
        wait_for(logged)
        os.kill(os.getpid(), signal.SIGINT)

    user = threading.Thread(target=interrupt)
    user.start()
    with pytest.raises(TrainingStopped, match="told to stop"):
        shell.run("again('parts')")
    user.join()
    assert "same: True" in shell.run(SAME)[0]
    shell.shell.user_ns["monkeypatch"] = monkeypatch
    with pytest.raises(RuntimeError, match=r"contrastive\.py has changed"):
        shell.run(EDITED)
    assert status() == before


@pytest.mark.slow
def test_a_ready_checkpoint_takes_the_place_of_notebook_00s(shell, tmp_path):
    backbone.save(tiny.model(bidirectional=False, head=True), tiny.tokenizer(), tmp_path / "ready")
    few = {"diffusion.steps": 4, "diffusion.warmup": 1, "diffusion.decay": 1, "diffusion.batch": 2}
    few |= {"diffusion.length": 64, "ablation.steps": 2, "ablation.batch": 8}
    for name in ("00_backbone", "01_diffusion_cpt", "07_diffusion_vs_ar"):
        shell.run(*cells(name, few | {"backbone.checkpoint": str(tmp_path / "ready")}))
