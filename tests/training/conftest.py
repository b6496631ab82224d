"""Checkpoints to start from, in a workspace whose corpus, a few sentences, is already there."""

import pytest

import tiny
import tiny_corpus
from unmask.models import backbone
from unmask.store import repository


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
