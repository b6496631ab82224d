"""The examples in docstrings are true."""

import doctest
from importlib import import_module

import pytest

LOSSES = ("contextual", "contrastive", "matryoshka", "pretraining")
OTHERS = ("models.quantize", "models.encoding", "models.embedder", "evaluation.metrics", "evaluation.search")
OTHERS += ("study.evidence", "study.page", "study.report")


@pytest.mark.parametrize("name", [*(f"losses.{name}" for name in LOSSES), *OTHERS])
def test_docstring_examples(name):
    result = doctest.testmod(import_module(f"unmask.{name}"))
    assert result.attempted > 0 and result.failed == 0
