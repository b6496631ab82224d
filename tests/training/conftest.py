"""Checkpoints to start from, in a workspace whose corpus, a few sentences, is already there."""

from itertools import count

import pytest

import tiny
import tiny_corpus
from unmask.models import backbone
from unmask.store import repository
from unmask.training import loop


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """A step takes a second, so that every other one leaves a checkpoint where `checkpoint_seconds` is 2."""
    monkeypatch.setattr(loop, "monotonic", count().__next__)
    monkeypatch.setattr(loop, "RARE", 0)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Reads both sides."""
    monkeypatch.setenv("PYTHONPATH", str(repository() / "lib"))  # what child processes import
    tiny_corpus.install(monkeypatch)
    return backbone.save(tiny.model(head=True), tiny.tokenizer(), tmp_path / "start", fingerprint="tiny")


@pytest.fixture
def causal(start):
    """Reads what comes before, and whole prompts of a reranker."""
    model = tiny.model(bidirectional=False, head=True, length=1024)
    return backbone.save(model, tiny.tokenizer(), start.with_name("causal"), fingerprint="causal")
