"""Rows of a source, checked: `units` lists the pieces of its files, `read` reads one piece, row by row.

`datasets` reads the files. A bad row is an error that names file, row and remedy, or is counted, as the
source says (`bad_rows`). No text is altered.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import fsspec

from unmask.data.files import FORMATS, DataFile, files_of, suffix_of
from unmask.data.registry import Source, split_of
from unmask.store import nearest

UNIT_BYTES = 16 << 20  # of a Parquet file, about, which is cut between row groups
UNIT_ROWS = 10_000  # of an Arrow file
_QUERIES = ("query", "query_chunk_id")  # columns of the configuration of queries in the joined layout
_LABELS = ("id", "key", "held_by", "chunk_id", "query_chunk_id")  # of which a number becomes text
_LISTS = ("negatives", "chunks", "queries")
_HELD_BY = ("key", "title", "id", "text")  # the first that a row has decides its split, unless held_by does


class BadRow(ValueError):
    """A row that cannot be used: `reason` is what it is counted under, `value` what is in it."""

    def __init__(self, reason: str, value: str = "") -> None:
        super().__init__(reason + value)
        self.reason = reason


@dataclass(frozen=True)
class Unit:
    """A piece of a data file that one worker reads at a time: part `part` of `parts`."""

    file: str  # local path or hf:// URL
    part: int = 0
    parts: int = 1
    queries: bool | None = None  # joined layout of documents: whether the file holds queries, or chunks


def units(source: Source) -> list[Unit]:
    """The pieces of a source, always in the same order. Lists files and reads no rows.

    Args:
        source: of kind hub, mirror or files.
    Raises: ValueError for files that are not there (`files.data_files`) or of unknown format.
    """
    return [
        Unit(file.path, part, parts, queries)
        for file, queries in files_of(source)
        for parts in [_parts(file)]
        for part in range(parts)
    ]


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
        for a missing column, and for a file that cannot be parsed.
    """
    paths = {name: path for name, path in source.columns.items() if unit.queries in (None, name in _QUERIES)}
    columns = {path.strip().partition(".")[0] for several in paths.values() for path in several.split(",")}
    for number, raw in enumerate(_raw_rows(unit, columns), 1):
        try:
            row = _checked(raw, paths)
        except BadRow as bad:
            if source.bad_rows == "stop":
                part = f" of part {unit.part + 1} of {unit.parts}" if unit.parts > 1 else ""
                remedy = f"correct it, or have source {source.name} count such rows (bad_rows: drop)"
                raise ValueError(f"{unit.file}, row {number}{part}: {bad}; {remedy}") from None
            dropped[bad.reason] += 1
        else:
            yield row | {"split": split_of(source, row.pop("held_by"))}


def document_of(chunk_id: str) -> tuple[str, int]:
    """Document and position that a chunk's id names: "doc_3" is ("doc", 3).

    Raises: BadRow for an id of another form.
    """
    document, _, position = chunk_id.rpartition("_")
    if not document or not position.isdecimal():
        raise BadRow("chunk_id", f" {chunk_id!r} is not DOCUMENT_POSITION")
    return document, int(position)


# --- files: their pieces, and the rows of a piece


def _parts(file: DataFile) -> int:
    from datasets import Dataset  # seconds to import, which a question at the command line does not need

    if (suffix := suffix_of(file.path)) not in FORMATS or not file.size:
        raise ValueError(f"{file.path} is empty, or in no known format; there are {', '.join(FORMATS)}")
    if suffix == ".arrow":
        return -(-len(Dataset.from_file(file.path)) // UNIT_ROWS)
    return -(-file.size // UNIT_BYTES) if suffix == ".parquet" else 1


def _raw_rows(unit: Unit, columns: Collection[str]) -> Iterator[dict[str, Any]]:
    """Rows as they are in the file. Whatever the libraries that read it raise becomes one error."""
    try:
        yield from _dataset(unit, columns)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, ValueError) and FORMATS[suffix_of(unit.file)] == "json":
            reason = _first_bad_line(unit.file) or reason
        raise ValueError(f"{unit.file} cannot be read ({reason}); correct it, or get it again") from error


def _dataset(unit: Unit, columns: Collection[str]) -> Iterable[dict[str, Any]]:
    from datasets import Dataset, load_dataset

    suffix, options = suffix_of(unit.file), {}
    if suffix == ".arrow":
        rows, start = Dataset.from_file(unit.file), unit.part * UNIT_ROWS
        return rows.select(range(start, min(start + UNIT_ROWS, len(rows))))
    if suffix == ".parquet":
        options = {"columns": list(columns)}
    elif FORMATS[suffix] == "csv":  # text is text, "NA" and "007" too
        options = {"converters": dict.fromkeys(columns, str), "sep": "\t" if suffix == ".tsv" else ","}
        options["keep_default_na"] = False
    rows = load_dataset(FORMATS[suffix], data_files=[unit.file], split="train", streaming=True, **options)
    if unit.parts > 1:  # of Parquet, by its row groups, of which there may be fewer
        rows = rows.reshard()
        parts = min(unit.parts, rows.num_shards)
        return rows.shard(parts, unit.part) if unit.part < parts else ()
    return rows


def _first_bad_line(file: str) -> str:
    with fsspec.open(file, "rb", compression="infer") as lines:
        for number, line in enumerate(lines, 1):
            try:
                json.dumps(json.loads(line), ensure_ascii=False).encode()
            except ValueError as error:
                return f"line {number}: {error}"
    return ""


# --- columns: which are read, what is in them


def _value(row: Mapping[str, Any], path: str) -> Any:
    """What a path reaches: "answers.text.0" goes into structs and lists, a name goes into every element of a
    list, and several paths with commas between them make a list."""
    if "," in path:
        return [_value(row, part.strip()) for part in path.split(",")]
    value: Any = row
    try:
        for step in path.split("."):
            if isinstance(value, list) and not step.isdecimal():
                value = [one[step] for one in value]
            else:
                value = value[int(step) if isinstance(value, list) else step]
    except (KeyError, IndexError, TypeError):
        raise BadRow(f"there is no {path!r}", nearest(path, row)) from None
    return value


def _checked(raw: Mapping[str, Any], paths: Mapping[str, str]) -> dict[str, Any]:
    """A row of which all is as it must be, with "held_by": what decides its split."""
    row = {}
    for name, path in paths.items():
        value = _value(raw, path)
        if name in _LABELS and value is not None:
            value = str(value)
        elif name == "negatives" and isinstance(value, str):
            value = [value]
        if name != "golds" and not _are_texts(value if name in _LISTS else [value]):
            raise BadRow(f"{name} is no text, or empty", f": {value!r:.80}")
        row[name] = value
    if "golds" in row and not _are_golds(row["golds"], len(row["queries"]), len(row["chunks"])):
        raise BadRow("golds are not the number of a chunk, from 0, for each query", f": {row['golds']!r:.80}")
    if "document" in row:
        row.setdefault("key", row["document"])
    row.setdefault("held_by", _held_by(row))
    return row


def _are_texts(values: Any) -> bool:
    some = isinstance(values, list) and len(values) > 0
    return some and all(isinstance(value, str) and value.strip() for value in values)


def _are_golds(values: Any, queries: int, chunks: int) -> bool:
    one_each = isinstance(values, list) and len(values) == queries
    return one_each and all(isinstance(value, int) and 0 <= value < chunks for value in values)


def _held_by(row: Mapping[str, Any]) -> str:
    if chunk_id := row.get("chunk_id") or row.get("query_chunk_id"):
        return document_of(chunk_id)[0]
    return next((row[name] for name in _HELD_BY if name in row), None) or "\n".join(row["chunks"])
