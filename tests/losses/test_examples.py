"""The examples in the docstrings of the pure functions are true."""

import doctest
from importlib import import_module

import pytest


@pytest.mark.parametrize(
    "name", ["losses.contextual", "losses.contrastive", "losses.matryoshka", "losses.pretraining"]
)
def test_docstring_examples(name):
    result = doctest.testmod(import_module(f"unmask.{name}"))
    assert result.attempted > 0 and result.failed == 0
