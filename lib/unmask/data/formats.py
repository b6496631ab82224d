"""File formats of data: how a file is cut into pieces, and the rows of a piece, with bounded memory."""

from __future__ import annotations

import csv
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from unmask.data.lines import (
    BUFFER,
    COMPRESSIONS,
    BadRow,
    Choose,
    Pieces,
    Rows,
    csv_cut,
    csv_rows,
    jsonl_cut,
    jsonl_rows,
    open_raw,
    open_stream,
    suffix_of,
)

BATCH_ROWS = 128  # rows that are Python objects at one time


@dataclass(frozen=True)
class Format:
    """One format: the pieces of a file, about so many bytes each, and the rows of a piece.

    A row comes with a number that finds it again in its file: `place` has it in words.
    """

    cut: Callable[[str, int, Choose], Pieces]  # file, bytes of a piece, columns
    rows: Callable[[str, int, int, Choose], Rows]  # file, start and stop of a piece, columns


def format_of(file: str) -> Format:
    """The format that a file's name tells.

    Raises: ValueError for a name that tells none.
    """
    if found := FORMATS.get(suffix_of(file)):
        return found
    known = f"{', '.join(FORMATS)}; JSON and CSV also with {' or '.join(COMPRESSIONS)}"
    raise ValueError(f"{file}: {suffix_of(file) or 'no suffix'} is no known format; there are {known}")


def is_data(file: str) -> bool:
    """Whether a file's name tells one of the formats."""
    return suffix_of(file) in FORMATS


@contextmanager
def naming(file: str) -> Iterator[None]:
    """Errors of the libraries that read a file become a ValueError that names it and says what to do."""
    errors: tuple[type[Exception], ...] = (pa.ArrowException, csv.Error, OSError, EOFError, zlib.error)
    if remote := "://" in file:
        from huggingface_hub.utils import httpx

        errors += (httpx.HTTPError,)
    try:
        yield
    except (FileNotFoundError, PermissionError) as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from error
    except errors as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if remote:
            raise ValueError(f"{file} cannot be read ({reason}); try again, or read from a mirror") from error
        raise ValueError(
            f"{file} is truncated or damaged ({reason}); write, pull or download it again"
        ) from error


def place(file: str, number: int) -> tuple[str, str]:
    """Where in its file a row is ("line 12", or "row 7" from 0), and its line, shortened, if it has one."""
    if FORMATS[suffix_of(file)] is _CSV:
        return f"line {number}", ""
    if FORMATS[suffix_of(file)] is not _JSONL:
        return f"row {number}", ""
    with naming(file), open_stream(file) as stream:
        lines, left = 1, number
        while left and (block := stream.read(min(left, BUFFER))):
            lines, left = lines + block.count(b"\n"), left - len(block)
        return f"line {lines}", shortened(stream.readline(400).decode("utf8", "replace").strip())


def shortened(text: str, limit: int = 80) -> str:
    """At most `limit` characters of a text."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


# --- Parquet: pieces are ranges of row groups


def _parquet_cut(file: str, unit_bytes: int, choose: Choose) -> Pieces:
    with _parquet(file) as parquet:
        choose(parquet.schema_arrow.names)
        groups = (parquet.metadata.row_group(i) for i in range(parquet.num_row_groups))
        return _grouped([group.total_byte_size for group in groups], unit_bytes)


def _parquet_rows(file: str, start: int, stop: int, choose: Choose) -> Rows:
    with _parquet(file) as parquet:
        columns = choose(parquet.schema_arrow.names)
        number = sum(parquet.metadata.row_group(i).num_rows for i in range(start))
        groups = list(range(start, stop))
        for batch in parquet.iter_batches(BATCH_ROWS, row_groups=groups, columns=columns, use_threads=False):
            yield from _batch_rows(batch, number)
            number += batch.num_rows


@contextmanager
def _parquet(file: str) -> Iterator[pq.ParquetFile]:
    if "://" in file:  # over a network: few large requests
        with open_raw(file) as raw, pq.ParquetFile(raw, pre_buffer=True) as parquet:
            yield parquet
    else:  # buffered, or a large row group would be in memory at once
        with pq.ParquetFile(file, buffer_size=BUFFER, pre_buffer=False) as parquet:
            yield parquet


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
        rows = batch.to_pylist()
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            yield number, BadRow("invalid UTF-8", f"a text is no UTF-8 at its byte {error.start + 1}")
        else:
            for i in range(batch.num_rows):
                yield from _batch_rows(batch.slice(i, 1), number + i)
    else:
        yield from enumerate(rows, number)


# --- Arrow streams, which `datasets` writes: pieces are ranges of record batches, mapped into memory


def _arrow_cut(file: str, unit_bytes: int, choose: Choose) -> Pieces:
    with _arrow(file) as reader:
        choose(reader.schema.names)
        return _grouped([batch.nbytes for batch in reader], unit_bytes)


def _arrow_rows(file: str, start: int, stop: int, choose: Choose) -> Rows:
    with _arrow(file) as reader:
        columns = choose(reader.schema.names)
        number = sum(reader.read_next_batch().num_rows for _ in range(start))
        for _ in range(start, stop):
            batch = reader.read_next_batch().select(columns)
            for i in range(0, batch.num_rows, BATCH_ROWS):
                yield from _batch_rows(batch.slice(i, BATCH_ROWS), number + i)
            number += batch.num_rows


@contextmanager
def _arrow(file: str) -> Iterator[pa.RecordBatchStreamReader]:
    with pa.memory_map(file) as mapped, pa.ipc.open_stream(mapped) as reader:
        yield reader


_JSONL = Format(jsonl_cut, jsonl_rows)
_CSV = Format(csv_cut, csv_rows)
FORMATS = {
    ".parquet": Format(_parquet_cut, _parquet_rows),
    ".jsonl": _JSONL,
    ".ndjson": _JSONL,
    ".json": _JSONL,
    ".csv": _CSV,
    ".tsv": _CSV,
    ".arrow": Format(_arrow_cut, _arrow_rows),
}
