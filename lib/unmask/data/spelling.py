"""What makes two rows the same query, document or group, wherever it is asked: in splits, batches, mining and
evaluation."""

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np

from unmask.store import hash64


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


def text_id(text: str) -> int:
    """The identity of a text, whatever its column: below 2⁶⁴, the same for all spellings."""
    return hash64(canonical(text).encode())


def is_blank(text: str) -> bool:
    """Whether a text shows nothing: it is of white space, control and zero-width characters."""
    return all(unicodedata.category(character) in ("Zs", "Zl", "Zp", "Cc", "Cf") for character in text)


def row_texts(row: Mapping[str, Any]) -> list[str]:
    """The texts by which a row is known: its query and its document; of a document with chunks the whole and
    its queries."""
    if "chunks" in row:
        return [" ".join(row["chunks"]), *row["queries"]]
    return [row[column] for column in ("query", "document", "text") if column in row]


def held_texts(row: Mapping[str, Any]) -> list[str]:
    """The texts of a held-out row that no training sees: those above, and the chunks that answer."""
    return row_texts(row) + [row["chunks"][gold] for gold in row.get("golds", ())]


def without_held(row: Mapping[str, Any], held: Set[int], dropped: Counter[str]) -> Mapping[str, Any] | None:
    """A training row without what is held out, which is counted; None if nothing is left to train on.

    A negative that is held out leaves its row, and a query its document with chunks. A chunk with the text of
    one that is held out may stay: in another document it is another chunk.

    Args:
        held: `text_id` of the held-out texts.
    """
    if not held:
        return row
    lists = [name for name in ("negatives", "queries") if name in row]
    left = {name: [i for i, text in enumerate(row[name]) if text_id(text) not in held] for name in lists}
    whole = row_texts(row)[: 1 if "chunks" in row else 2]
    if not held.isdisjoint(map(text_id, whole)) or not all(left.values()):
        dropped["rows that share a text with a held-out row"] += 1
        return None
    for name, places in left.items():
        dropped[f"{name} that are held out"] += len(row[name]) - len(places)
    left |= {"golds": left["queries"]} if "golds" in row else {}
    return {**row, **{name: [row[name][i] for i in places] for name, places in left.items()}}
