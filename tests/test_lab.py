"""A notebook by hand, cell by cell in a kernel, in the run "lab"."""

import json
import os
import subprocess
from contextlib import contextmanager

import pytest
from jupyter_client.manager import start_new_kernel

from unmask.config import load_preset
from unmask.data.sources import open_corpus
from unmask.data.tokens import train_tokenizer
from unmask.models import backbone
from unmask.store import repository
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
long = Pair(config, corpus, stage.tokenizer, steps=40)
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
identity.IMPORTED[path] = b"as_it_was = 1"
again("edited")
"""


class Kernel:
    """Runs cells one by one."""

    def __init__(self, manager, client):
        self.manager, self.client = manager, client

    def run(self, code: str, wait: bool = True):
        number = self.client.execute(code)
        return self.result(number) if wait else number

    def result(self, number):
        """What a cell printed and showed, or its error."""
        told, pictures, error = "", 0, ""
        while True:
            message = self.client.get_iopub_msg(timeout=600)
            if message["parent_header"].get("msg_id") != number:
                continue
            kind, content = message["msg_type"], message["content"]
            told += content.get("text", "") if kind == "stream" else ""
            pictures += "image/png" in content.get("data", {})
            error = f"{content['ename']}: {content['evalue']}" if kind == "error" else error
            if kind == "status" and content["execution_state"] == "idle":
                return told, pictures, error


@contextmanager
def kernel(artifacts):
    environment = os.environ | {"UNMASK_ARTIFACTS": str(artifacts), "PYTHONPATH": str(repository() / "lib")}
    environment.pop("UNMASK_CODE", None)
    manager, client = start_new_kernel(env=environment, cwd=str(repository() / "notebooks"))
    try:
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def status():
    command = ["git", "-C", str(repository()), "status", "--porcelain"]
    return subprocess.run(command, capture_output=True, text=True).stdout


def steps_in(folder):
    return sum(log.read_text().count("\n") for log in folder.glob("*/metrics.jsonl"))


@pytest.mark.slow
def test_a_notebook_by_hand(tmp_path, monkeypatch):
    monkeypatch.setenv("UNMASK_ARTIFACTS", str(tmp_path))
    preset = load_preset("smoke")
    texts = open_corpus(preset.data).texts("train")["text"]
    tokenizer = train_tokenizer(texts, preset.data.vocab_size, tmp_path / "tokenizer")
    model = backbone.build(preset.backbone, tokenizer, seed=0)
    backbone.make_bidirectional(model, tokenizer, preset.backbone.mask_token)
    backbone.save(model, tokenizer, tmp_path / "smoke" / "01_diffusion_cpt" / "diffusion" / "model")
    before = status()
    notebook = json.loads((repository() / "notebooks" / "02_pair.ipynb").read_text(encoding="utf8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    with kernel(tmp_path) as lab:
        told, pictures = "", 0
        for cell in cells:
            cell = cell.replace('preset: str = "cpu"', 'preset: str = "smoke"')
            text, shown, error = lab.run(cell)
            assert not error, error
            told, pictures = told + text, pictures + shown
        assert "01_diffusion_cpt: taken from run 'smoke'" in told and "query     " in told and pictures > 2
        assert "other: True" in lab.run(HAND)[0]
        lab.run(LONG)
        cell = lab.run('again("parts")', wait=False)
        wait_for(
            lambda: any(
                log.read_text().count("\n") > 2 for log in tmp_path.glob("lab/**/parts/*/metrics.jsonl")
            )
        )
        lab.manager.interrupt_kernel()
        assert "TrainingStopped: told to stop" in lab.result(cell)[2]
        assert "same: True" in lab.run(SAME)[0]
        assert "contrastive.py has changed" in lab.run(EDITED)[2]
    assert status() == before
