"""What makes two rows the same query, document or group, wherever it is asked: in splits, batches, mining and
evaluation."""

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np


def canonical(value: Any) -> str:
    """A text or a label in the one form that all of its spellings share; letters' case counts.

    Unicode composes characters (NFC), any white space is one space, and a whole number has no decimals: a
    column of whole numbers becomes one of floats where one of them is missing.

    Example:
        >>> [canonical(value) for value in (1, 1.0, " 1", "1.0")]
        ['1', '1', '1', '1']
    """
    text = " ".join(unicodedata.normalize("NFC", str(value)).split())
    return re.sub(r"^(-?\d+)\.0+$", r"\1", text)


def distinct(texts: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """The different texts, as each is spelt first, and the number among them of every text."""
    texts, number = texts[:], {}
    number_N = np.array([number.setdefault(canonical(text), len(number)) for text in texts], np.int64)
    return [texts[i] for i in np.unique(number_N, return_index=True)[1]], number_N
