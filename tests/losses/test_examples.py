"""The examples in docstrings are true."""

import doctest
from importlib import import_module

import pytest

LIBRARY = [f"losses.{name}" for name in ("contextual", "contrastive", "matryoshka", "pretraining")]
LIBRARY += [
    "models.quantize",
    "models.encoding",
    "models.embedder",
    "evaluation.metrics",
    "evaluation.search",
]
STUDY = ("evidence", "report")


@pytest.mark.parametrize(
    "name", [*(f"unmask.{name}" for name in LIBRARY), *(f"unmask_study.{name}" for name in STUDY)]
)
def test_docstring_examples(name):
    result = doctest.testmod(import_module(name))
    assert result.attempted > 0 and result.failed == 0
