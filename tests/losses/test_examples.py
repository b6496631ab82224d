"""The examples in the docstrings of the pure functions are true."""

import doctest
from importlib import import_module

import pytest


@pytest.mark.parametrize("name", ["contextual", "contrastive", "matryoshka", "pretraining"])
def test_docstring_examples(name):
    result = doctest.testmod(import_module(f"unmask.losses.{name}"))
    assert result.attempted > 0 and result.failed == 0
