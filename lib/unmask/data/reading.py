"""Rows of a source, checked: `units` cuts its files into pieces, `read` reads one piece.

A bad row is an error that names file, row and remedy, or is counted, as the source says (`bad_rows`). No text
is altered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from unmask.data.files import DataFile, data_files, did_you_mean, verify
from unmask.data.formats import format_of, naming, place, shortened
from unmask.data.lines import AT_MOST, MAX_TEXT_BYTES, BadRow
from unmask.data.registry import Source, split_of

UNIT_BYTES = 16 << 20
_QUERIES = ("query", "query_chunk_id")  # columns of the configuration of queries in the joined layout


@dataclass(frozen=True)
class Unit:
    """A piece of a data file that one worker reads at a time."""

    file: str  # local path or hf:// URL
    start: int  # row groups (Parquet), bytes (JSON lines), record batches (Arrow), 0 to 1 (whole file)
    stop: int
    sha256: str = ""  # of the file, where a mirror's manifest has it
    queries: bool = False  # joined layout: the file holds queries rather than chunks


def layout_of(source: Source) -> str:
    """How the rows are laid out: the role, or "nested", "flat" or "joined" for documents."""
    if source.role != "documents":
        return source.role
    return "nested" if "chunks" in source.columns else "joined" if "chunk_id" in source.columns else "flat"


def files_of(source: Source) -> list[tuple[DataFile, bool]]:
    """All files of a source, each with whether it holds the queries of the joined layout.

    Raises: ValueError, see `files.data_files`.
    """
    parts = (False, True) if layout_of(source) == "joined" else (False,)
    return [(file, queries) for queries in parts for file in data_files(source, queries=queries)]


def units(source: Source, *, unit_bytes: int = UNIT_BYTES) -> list[Unit]:
    """The pieces of a source, always in the same order. Lists files and reads their columns' names, no rows.

    Args:
        source: of kind hub, mirror or files.
        unit_bytes: size of a piece, about; a row group of Parquet is never cut.
    Raises: ValueError for files that are not there (`files.data_files`), truncated or of unknown format, and
        for a missing column.
    """
    files = files_of(source)
    if any("://" in file.path for file, _ in files):
        with ThreadPoolExecutor(16) as pool:  # every file is a request or two
            cut = list(pool.map(lambda each: _cut(source, *each, unit_bytes), files))
    else:
        cut = [_cut(source, *each, unit_bytes) for each in files]
    return [unit for pieces in cut for unit in pieces]


def read(source: Source, unit: Unit, dropped: Counter[str]) -> Iterator[dict[str, Any]]:
    """The good rows of a piece, in the order of the file, with our names for the columns.

    Rows by layout, each with "split", and with "id" where the source maps it:
        text: text.
        pairs: query, document, key (the document unless the source maps it).
        triplets: as pairs, and negatives (list of text).
        nested documents: chunks, queries (lists of text), golds (list of int: its chunk, for each query).
        flat documents: title, chunk, query.
        joined documents: chunk_id, chunk; from units of queries: query, query_chunk_id.

    Args:
        source: of kind hub, mirror or files.
        unit: one of `units(source)`.
        dropped: counts the rows left out, by reason, where `source.bad_rows` is "drop".
    Raises: ValueError that names file, row and remedy for a bad row where `source.bad_rows` is "stop"; always
        for a missing column, a truncated file, and a file that differs from its checksum.
    """
    return (row for _, row in numbered(source, unit, dropped))


def numbered(source: Source, unit: Unit, dropped: Counter[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """As `read`, each row with the number by which `formats.place` finds it."""
    if unit.sha256:
        verify(unit.file, unit.sha256)
    paths, layout = _paths(source, unit.queries), layout_of(source)
    choose = partial(_roots, source, unit.file, paths)
    with naming(unit.file):
        for number, raw in format_of(unit.file).rows(unit.file, unit.start, unit.stop, choose):
            try:
                if isinstance(raw, BadRow):
                    raise raw
                row = _checked({name: _value(raw, path) for name, path in paths.items()}, layout)
            except BadRow as bad:
                refuse(source, unit.file, number, bad, dropped)
            else:
                row["split"] = split_of(source, row.pop("held_by"))
                yield number, row


def refuse(source: Source, file: str, number: int, bad: BadRow, dropped: Counter[str]) -> None:
    """Counts a bad row where the source leaves such rows out.

    Raises: ValueError that names the row and the remedy where it does not.
    """
    if source.bad_rows == "drop":
        dropped[bad.reason] += 1
        return
    where, line = place(file, number)
    remedy = f"correct it, or have source {source.name} leave such rows out and count them (bad_rows: drop)"
    shown = f"\n    {line}" if line else ""
    raise ValueError(f"{file}, {where}: {bad.detail}; {remedy}{shown}")


def document_of(chunk_id: str) -> tuple[str, int]:
    """Document and position that a chunk's id names: "doc_3" is ("doc", 3).

    Raises: BadRow for an id of another form.
    """
    document, _, position = chunk_id.rpartition("_")
    if not document or not position.isdecimal():
        raise BadRow("chunk_id of another form", f"chunk_id {chunk_id!r} is not DOCUMENT_POSITION")
    return document, int(position)


def _cut(source: Source, file: DataFile, queries: bool, unit_bytes: int) -> list[Unit]:
    if not file.size:
        raise ValueError(f"{file.path} is empty: remove it from source {source.name}, or fill it")
    choose = partial(_roots, source, file.path, _paths(source, queries))
    with naming(file.path):
        pieces = format_of(file.path).cut(file.path, unit_bytes, choose)
    return [Unit(file.path, start, stop, file.sha256, queries) for start, stop in pieces]


def _paths(source: Source, queries: bool) -> dict[str, str]:
    """Our names → theirs, of the columns that a unit's file has."""
    if layout_of(source) != "joined":
        return dict(source.columns)
    return {name: path for name, path in source.columns.items() if (name in _QUERIES) == queries}


def _roots(source: Source, file: str, paths: Mapping[str, str], columns: list[str]) -> list[str]:
    """The columns to read of those there are."""
    roots: dict[str, None] = {}
    for name, all_paths in paths.items():
        for path in _several(all_paths):
            root = path if path in columns else path.partition(".")[0]
            if root not in columns:
                raise ValueError(
                    f"{file} has no column {root!r}{did_you_mean(root, columns)}; there are: "
                    f"{', '.join(columns)}. Say under `columns` of source {source.name} which one is {name!r}"
                )
            roots[root] = None
    return list(roots)


def _several(paths: str) -> list[str]:
    return [path.strip() for path in paths.split(",")]


def _value(row: Mapping[str, Any], path: str) -> Any:
    """What a path reaches: "answers.text.0" goes into structs and lists, a name goes into every element of a
    list, and several paths with commas between them make a list."""
    if "," in path:
        return [_value(row, part) for part in _several(path)]
    if path in row:
        return row[path]
    value: Any = row
    for step in path.split("."):
        if isinstance(value, list) and step.isdecimal():
            value = value[int(step)] if int(step) < len(value) else None
        elif isinstance(value, list):
            value = [one.get(step) if isinstance(one, dict) else None for one in value]
        elif isinstance(value, dict) and step in value:
            value = value[step]
        elif value is not None:
            there = f"; there is {', '.join(value)}" if isinstance(value, dict) else ""
            raise BadRow("missing column", f"there is no {step!r} to read {path!r} from{there}")
    return value


def _checked(values: Mapping[str, Any], layout: str) -> dict[str, Any]:
    """A row of which all is as it must be, with "held_by": what decides its split."""
    row = {name: _CHECKS.get(name, _text)(value, name) for name, value in values.items()}
    match layout:
        case "text":
            held_by = row.get("id", row["text"])
        case "pairs" | "triplets":
            held_by = row.setdefault("key", row["document"])
        case "nested":
            _check_golds(row)
            held_by = row.get("id") or "\n".join(row["chunks"])
        case "flat":
            held_by = row["title"]
        case "joined":
            held_by = document_of(row["chunk_id"] if "chunk_id" in row else row["query_chunk_id"])[0]
    row.setdefault("held_by", held_by)
    return row


def _text(value: Any, name: str) -> str:
    if value is None:
        raise BadRow(f"no {name}", f"{name} is null")
    if not isinstance(value, str):
        raise BadRow("wrong type", f"{name} is {_kind(value)}, not text: {shortened(repr(value), 60)}")
    if not value or value.isspace():
        raise BadRow(f"empty {name}", f"{name} is empty or only white space")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        what = f"U+{ord(value[error.start]):04X} at its character {error.start + 1}"
        detail = f"{name} has a lone surrogate ({what}): half a character, or a byte that is no UTF-8"
        raise BadRow("lone surrogate", detail) from None
    if size > MAX_TEXT_BYTES:
        raise BadRow("too long", f"{name} has {size / 1e6:.1f} MB, {AT_MOST}")
    return value


def _label(value: Any, name: str) -> str:
    return str(value) if type(value) is int else _text(value, name)


def _texts(value: Any, name: str) -> list[str]:
    if not isinstance(value, list):
        raise BadRow(
            "wrong type", f"{name} is {_kind(value)}, not a list of text: {shortened(repr(value), 60)}"
        )
    if not value:
        raise BadRow(f"no {name}", f"{name} is an empty list")
    return [_text(one, name) for one in value]


def _negatives(value: Any, name: str) -> list[str]:
    return _texts([value] if isinstance(value, str) else value, name)


def _golds(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or not all(type(one) is int for one in value):
        raise BadRow("wrong type", f"{name} is not a list of integers: {shortened(repr(value), 60)}")
    return value


def _check_golds(row: Mapping[str, Any]) -> None:
    queries, golds, chunks = len(row["queries"]), row["golds"], len(row["chunks"])
    if queries != len(golds):
        raise BadRow("queries and golds differ", f"there are {queries} queries and {len(golds)} golds")
    if wrong := [gold for gold in golds if not 0 <= gold < chunks]:
        raise BadRow("gold out of range", f"gold {wrong[0]} names none of the chunks 0 to {chunks - 1}")


def _kind(value: Any) -> str:
    names = {bool: "a truth value", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")


_CHECKS = dict.fromkeys(("id", "key", "held_by", "chunk_id", "query_chunk_id"), _label) | {
    "negatives": _negatives,
    "chunks": _texts,
    "queries": _texts,
    "golds": _golds,
}
