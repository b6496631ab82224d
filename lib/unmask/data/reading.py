"""Rows of a source, checked: `units` cuts its files into pieces, `read` reads one piece in bounded memory.

A bad row is an error that names file, row and remedy, or is counted, as the source says (`bad_rows`). No text
is altered.
"""

from __future__ import annotations

import csv
import io
import json
import sys
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, BinaryIO

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub.errors import HTTPError

from unmask.data.files import (
    COMPRESSIONS,
    CSV,
    JSONL,
    SUFFIXES,
    DataFile,
    data_files,
    is_data,
    suffix_of,
    verify,
)
from unmask.data.registry import Source, split_of
from unmask.store import nearest

UNIT_BYTES = 16 << 20
BATCH_ROWS = 128  # of a table that are Python objects at one time
BUFFER = 1 << 20
MAX_TEXT_BYTES = 8_000_000  # longer is a broken file rather than a text
_KINDS = {int: "a number", float: "a number", dict: "an object"}
_QUERIES = ("query", "query_chunk_id")  # columns of the configuration of queries in the joined layout


class BadRow(Exception):
    """A row that cannot be used: `reason` is what it is counted under, `detail` what is wrong with it."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Unit:
    """A piece of a data file that one worker reads at a time."""

    file: str  # local path or hf:// URL
    start: int  # row groups (Parquet), bytes (JSON lines), record batches (Arrow); other files are one piece
    stop: int
    sha256: str = ""  # of the file, where a mirror's manifest has it
    queries: bool = False  # joined layout: the file holds queries rather than chunks


Pieces = list[tuple[int, int]]
Rows = Iterator[tuple[int, dict[str, Any] | BadRow]]  # each with the number by which `place` finds it


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
    with ThreadPoolExecutor(16) as pool:  # a file of the Hub is a request or two
        cut = list(pool.map(lambda each: _cut(source, *each, unit_bytes), files_of(source)))
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
    """As `read`, each row with the number by which `place` finds it."""
    if unit.sha256:
        verify(unit.file, unit.sha256)
    paths, layout = _paths(source, unit.queries), layout_of(source)
    asked = [path for several in paths.values() for path in _several(several)]
    wanted = {*asked, *(path.partition(".")[0] for path in asked)}
    for number, raw in raw_rows(unit.file, unit.start, unit.stop, wanted):
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


def shortened(text: str, limit: int = 80) -> str:
    """At most `limit` characters of a text."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


# --- files: their columns and pieces, and the rows of a piece


def cut(file: str, unit_bytes: int) -> tuple[list[str], Pieces]:
    """The columns of a file, none where its first row is bad, and its pieces.

    Raises: ValueError for an empty or damaged file, and for one of unknown format.
    """
    if not is_data(file):
        known = f"{', '.join(SUFFIXES)}; JSON and CSV also with {' or '.join(COMPRESSIONS)}"
        raise ValueError(f"{file}: {suffix_of(file) or 'no suffix'} is no known format; there are {known}")
    with _naming(file):
        return _FORMATS[suffix_of(file)][0](file, unit_bytes)


def raw_rows(file: str, start: int, stop: int, wanted: Collection[str]) -> Rows:
    """The rows of a piece as they are in the file; of a table at least the columns that are wanted."""
    with _naming(file):
        yield from _FORMATS[suffix_of(file)][1](file, start, stop, wanted)


def place(file: str, number: int) -> tuple[str, str]:
    """Where in its file a row is ("line 12", or "row 7" from 0), and its line, shortened, if it has one."""
    if suffix_of(file) not in JSONL:
        return f"{'line' if suffix_of(file) in CSV else 'row'} {number}", ""
    with _opened(file) as stream:
        line, position = 1, 0
        while position < number:
            line, position = line + 1, position + len(stream.readline())
        return f"line {line}", shortened(stream.readline().decode("utf8", "replace").strip())


def _codec(file: str) -> str | None:
    return COMPRESSIONS.get(PurePosixPath(file.lower()).suffix)


def _stored(file: str) -> BinaryIO:
    return fsspec.open(file, "rb").open() if "://" in file else open(file, "rb")


@contextmanager
def _opened(file: str) -> Iterator[BinaryIO]:
    """A stream of a file's bytes, decompressed."""
    with _stored(file) as raw:
        plain = pa.CompressedInputStream(pa.PythonFile(raw, "r"), _codec(file)) if _codec(file) else raw
        yield io.BufferedReader(plain, BUFFER)


@contextmanager
def _naming(file: str) -> Iterator[None]:
    """Errors of the libraries that read a file become a ValueError that names it and says what to do."""
    try:
        yield
    except (FileNotFoundError, PermissionError) as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from error
    except (pa.ArrowException, csv.Error, OSError, EOFError, zlib.error, HTTPError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "://" in file:
            raise ValueError(f"{file} cannot be read ({reason}); try again, or read from a mirror") from error
        raise ValueError(
            f"{file} is truncated or damaged ({reason}); write, pull or download it again"
        ) from error


def _jsonl_cut(file: str, unit_bytes: int) -> tuple[list[str], Pieces]:
    with _opened(file) as stream:
        line = stream.readline()
        size = sys.maxsize if _codec(file) else stream.seek(0, io.SEEK_END)
    if line.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        raise ValueError(f"{file} starts with a JSON array; write one object per line (JSON lines)")
    first, step = _parsed(line), size if _codec(file) else unit_bytes
    pieces = [(start, min(start + step, size)) for start in range(0, size, step)]
    return [] if isinstance(first, BadRow) else list(first), pieces


def _jsonl_rows(file: str, start: int, stop: int, wanted: Collection[str]) -> Rows:
    """A line belongs to the piece in which it starts."""
    with _opened(file) as stream:
        position = stream.seek(start - 1) + len(stream.readline()) if start else 0
        while position < stop and (line := stream.readline()):
            if line.strip():
                yield position, _parsed(line)
            position += len(line)


def _parsed(line: bytes) -> dict[str, Any] | BadRow:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return BadRow("invalid UTF-8", f"the line is no UTF-8 at its byte {error.start + 1}")
    except (json.JSONDecodeError, RecursionError) as error:
        return BadRow("invalid JSON", f"the line is no JSON ({error})")
    if not isinstance(row, dict):
        return BadRow("invalid JSON", f"the line holds a JSON {type(row).__name__}, not an object {{…}}")
    return row


@contextmanager
def _csv(file: str) -> Iterator[Any]:
    csv.field_size_limit(MAX_TEXT_BYTES)
    with _opened(file) as stream:
        # Invalid bytes become lone surrogates, which are found with all others.
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
        yield csv.reader(text, delimiter="\t" if suffix_of(file) == ".tsv" else ",", strict=True)


def _csv_cut(file: str, unit_bytes: int) -> tuple[list[str], Pieces]:
    """A quoted value may hold newlines, so a file is one piece."""
    with _csv(file) as reader:
        return next(reader, []), [(0, 1)]


def _csv_rows(file: str, start: int, stop: int, wanted: Collection[str]) -> Rows:
    with _csv(file) as reader:
        names = next(reader, [])
        line = reader.line_num + 1
        for values in reader:
            if len(values) == len(names):
                yield line, dict(zip(names, values, strict=True))
            elif values:  # an empty line is no row
                detail = f"the row has {len(values)} values for {len(names)} columns; quote what has commas"
                yield line, BadRow("wrong number of values", detail)
            line = reader.line_num + 1


@contextmanager
def _parquet(file: str) -> Iterator[pq.ParquetFile]:
    remote = (
        "://" in file
    )  # few large requests; else buffered, or a large row group would be in memory at once
    with (
        _stored(file) as stored,
        pq.ParquetFile(stored, pre_buffer=remote, buffer_size=0 if remote else BUFFER) as parquet,
    ):
        yield parquet


def _parquet_cut(file: str, unit_bytes: int) -> tuple[list[str], Pieces]:
    with _parquet(file) as parquet:
        groups = map(parquet.metadata.row_group, range(parquet.num_row_groups))
        return parquet.schema_arrow.names, _grouped([each.total_byte_size for each in groups], unit_bytes)


def _parquet_rows(file: str, start: int, stop: int, wanted: Collection[str]) -> Rows:
    with _parquet(file) as parquet:
        columns = [name for name in parquet.schema_arrow.names if name in wanted]
        number = sum(parquet.metadata.row_group(i).num_rows for i in range(start))
        groups = list(range(start, stop))
        for batch in parquet.iter_batches(BATCH_ROWS, row_groups=groups, columns=columns, use_threads=False):
            yield from _batch_rows(batch, number)
            number += batch.num_rows


@contextmanager
def _arrow(file: str) -> Iterator[pa.RecordBatchStreamReader]:
    with pa.memory_map(file) as mapped, pa.ipc.open_stream(mapped) as reader:
        yield reader


def _arrow_cut(file: str, unit_bytes: int) -> tuple[list[str], Pieces]:
    with _arrow(file) as reader:
        return reader.schema.names, _grouped([batch.nbytes for batch in reader], unit_bytes)


def _arrow_rows(file: str, start: int, stop: int, wanted: Collection[str]) -> Rows:
    with _arrow(file) as reader:
        columns = [name for name in reader.schema.names if name in wanted]
        number = sum(reader.read_next_batch().num_rows for _ in range(start))
        for _ in range(start, stop):
            batch = reader.read_next_batch().select(columns)
            for first in range(0, batch.num_rows, BATCH_ROWS):
                yield from _batch_rows(batch.slice(first, BATCH_ROWS), number + first)
            number += batch.num_rows


def _grouped(sizes: Sequence[int], unit_bytes: int) -> Pieces:
    """Neighbours together until they have `unit_bytes`."""
    pieces, start, held = [], 0, 0
    for i, size in enumerate(sizes):
        held += size
        if held >= unit_bytes or i == len(sizes) - 1:
            pieces.append((start, i + 1))
            start, held = i + 1, 0
    return pieces


def _batch_rows(batch: pa.RecordBatch, number: int) -> Rows:
    try:
        yield from enumerate(batch.to_pylist(), number)
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            yield number, BadRow("invalid UTF-8", f"a text is no UTF-8 at its byte {error.start + 1}")
        else:
            for i in range(batch.num_rows):
                yield from _batch_rows(batch.slice(i, 1), number + i)


_FORMATS = {
    ".parquet": (_parquet_cut, _parquet_rows),
    ".arrow": (_arrow_cut, _arrow_rows),
    **dict.fromkeys(JSONL, (_jsonl_cut, _jsonl_rows)),
    **dict.fromkeys(CSV, (_csv_cut, _csv_rows)),
}


# --- columns: which are read, what is in them


def _cut(source: Source, file: DataFile, queries: bool, unit_bytes: int) -> list[Unit]:
    if not file.size:
        raise ValueError(f"{file.path} is empty: remove it from source {source.name}, or fill it")
    columns, pieces = cut(file.path, unit_bytes)
    for name, paths in _paths(source, queries).items() if columns else ():
        for path in _several(paths):
            root = path.partition(".")[0]
            if path not in columns and root not in columns:
                raise ValueError(
                    f"{file.path} has no column {root!r}; say under `columns` of source "
                    f"{source.name} which one is {name!r}{nearest(root, columns)}"
                )
    return [Unit(file.path, start, stop, file.sha256, queries) for start, stop in pieces]


def _paths(source: Source, queries: bool) -> dict[str, str]:
    """Our names → theirs, of the columns that a unit's file has."""
    if layout_of(source) != "joined":
        return dict(source.columns)
    return {name: path for name, path in source.columns.items() if (name in _QUERIES) == queries}


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
    _require(value, str, "text", name)
    if not value or value.isspace():
        raise BadRow(f"empty {name}", f"{name} is empty or only white space")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        what = f"U+{ord(value[error.start]):04X} at its character {error.start + 1}"
        detail = f"{name} has a lone surrogate ({what}): half a character, or a byte that is no UTF-8"
        raise BadRow("lone surrogate", detail) from None
    if size > MAX_TEXT_BYTES:
        at_most = f"at most {MAX_TEXT_BYTES / 1e6:.0f} MB are read"
        raise BadRow("too long", f"{name} has {size / 1e6:.1f} MB, {at_most}")
    return value


def _label(value: Any, name: str) -> str:
    return str(value) if type(value) is int else _text(value, name)


def _texts(value: Any, name: str) -> list[str]:
    _require(value, list, "a list of text", name)
    if not value:
        raise BadRow(f"no {name}", f"{name} is an empty list")
    return [_text(one, name) for one in value]


def _negatives(value: Any, name: str) -> list[str]:
    return _texts([value] if isinstance(value, str) else value, name)


def _golds(value: Any, name: str) -> list[int]:
    _require(value, list, "a list of integers", name)
    for one in value:
        _require(one, int, "a list of integers", name)
    return value


def _require(value: Any, kind: type, words: str, name: str) -> None:
    if type(value) is not kind:
        found = _KINDS.get(type(value), f"a {type(value).__name__}")
        raise BadRow("wrong type", f"{name} is {found}, not {words}: {shortened(repr(value), 60)}")


def _check_golds(row: Mapping[str, Any]) -> None:
    queries, golds, chunks = len(row["queries"]), row["golds"], len(row["chunks"])
    if queries != len(golds):
        raise BadRow("queries and golds differ", f"there are {queries} queries and {len(golds)} golds")
    if wrong := [gold for gold in golds if not 0 <= gold < chunks]:
        raise BadRow("gold out of range", f"gold {wrong[0]} names none of the chunks 0 to {chunks - 1}")


_CHECKS = dict.fromkeys(("id", "key", "held_by", "chunk_id", "query_chunk_id"), _label) | {
    "negatives": _negatives,
    "chunks": _texts,
    "queries": _texts,
    "golds": _golds,
}
