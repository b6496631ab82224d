"""The numbers that the paper reports, tables 1 to 12: `paper.yaml`, and nothing of ours."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml


def table(number: int) -> list[dict[str, Any]]:
    """The rows of a table: column → value, in the order and the units of the paper.

    The first column names the row: "model", in table 9 "backbone and pooling", in table 10 "language".

    Example:
        >>> [row["model"] for row in table(1) if row["Docs/MB"] > 1000]
        ['pplx-embed-v1-4B (BIN)', 'pplx-embed-v1-0.6B (BIN)']
    """
    columns = _tables()[number]["columns"]
    rows = _tables()[number]["rows"].items()
    return [dict(zip(columns, (name, *values), strict=True)) for name, values in rows]


def scores(number: int) -> dict[str, dict[str, Any]]:
    """The same rows by name: row → column → value.

    Example:
        >>> scores(3)["pplx-embed-context-v1-0.6B (INT8)"]["Ins"]
        99.28
    """
    name = _tables()[number]["columns"][0]
    return {row.pop(name): row for row in table(number)}


def caption(number: int) -> str:
    """The number and the subject of a table.

    Example:
        >>> caption(3)
        'Table 3: ConTEB'
    """
    return f"Table {number}: {_tables()[number]['title']}"


def unit(number: int) -> str:
    """What the scores of a table are, with their unit.

    Example:
        >>> unit(6)
        'recall in %'
    """
    return _tables()[number]["unit"]


@cache
def _tables() -> dict[int, dict[str, Any]]:
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf8"))
