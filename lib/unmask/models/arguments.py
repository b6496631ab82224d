"""What can be asked of a model: texts and counts, each refused by name."""

import re
from collections.abc import Callable, Iterable, Mapping, Set
from numbers import Integral
from typing import Any

import numpy as np

Name = Callable[[int], str]  # what an error calls the text or chunk of a number
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def as_list(texts: Iterable[Any], right: str) -> list[Any]:
    """A list of what is given, unless it would be one of letters, of names or in no order."""
    unordered = texts is None or isinstance(texts, str | Mapping | Set) or hasattr(texts, "columns")
    if unordered or not np.iterable(texts):
        kind = "string" if isinstance(texts, str) else type(texts).__name__
        raise ValueError(f"expected a list, got one {kind}, {str(texts)[:80]!r}: write {right}")
    return list(texts)


def check_counts(**counts: int | None) -> None:
    """Refuses what is no whole number from 1 on; None is not given."""
    for name, count in counts.items():
        if count is not None and not (isinstance(count, Integral) and count is not True and count >= 1):
            raise ValueError(f"{name} must be at least 1, and whole, got {count!r}")


def check_texts(texts: Iterable[str], name: Name, *, empty: bool = False) -> None:
    """Refuses what cannot be read, naming it with `name`; empty texts too, unless `empty` is true."""
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"{name(number)} is no string but of type {type(text).__name__}: {text!r}")
        if not (text or empty):
            raise ValueError(f"{name(number)} has no tokens: remove or fill it")
        if not text.isascii() and LONE_SURROGATE.search(text):
            raise ValueError(f"{name(number)} has a lone surrogate, half a character: repair or remove it")
