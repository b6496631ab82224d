"""Data files that are read line by line: JSON lines and CSV, also compressed, with bounded memory.

A row comes with a number that finds it again in its file: the byte where its line starts (JSON lines) or its
line (CSV).
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any, BinaryIO

import pyarrow as pa

MAX_TEXT_BYTES = 8_000_000  # of one text, and of one line: longer is a broken file rather than a text
AT_MOST = f"at most {MAX_TEXT_BYTES / 1e6:.0f} MB are read"
BUFFER = 1 << 20
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


class BadRow(Exception):
    """A row that cannot be used: `reason` is what it is counted under, `detail` what is wrong with it."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


Choose = Callable[[list[str]], list[str]]  # names of a file's columns → those to read, which must be there
Pieces = list[tuple[int, int]]
Rows = Iterator[tuple[int, dict[str, Any] | BadRow]]


def suffix_of(file: str) -> str:
    """The suffix that tells a file's format, the compression's left out."""
    path = PurePosixPath(file.lower())
    return PurePosixPath(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix


def _compression(file: str) -> str | None:
    return COMPRESSIONS.get(PurePosixPath(file.lower()).suffix)


def open_raw(file: str) -> BinaryIO:
    """A stream of the bytes of a local file or an hf:// URL."""
    if "://" not in file:
        return open(file, "rb")
    import fsspec  # slow to import, and only files of the Hub need it

    return fsspec.open(file, "rb").open()


@contextmanager
def open_stream(file: str) -> Iterator[BinaryIO]:
    """A stream of a file's bytes, decompressed."""
    with open_raw(file) as raw:
        if _compression(file) == "gzip":
            with gzip.GzipFile(fileobj=raw) as stream:
                yield io.BufferedReader(stream, BUFFER)
        elif _compression(file) == "zstd":
            with pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd") as stream:
                yield io.BufferedReader(stream, BUFFER)
        elif "://" in file:  # whose own readline knows no limit
            yield io.BufferedReader(raw, BUFFER)
        else:
            yield raw


# --- JSON lines: pieces are ranges of bytes; a line belongs to the piece in which it starts


def jsonl_cut(file: str, unit_bytes: int, choose: Choose) -> Pieces:
    with open_stream(file) as stream:
        line = stream.readline(MAX_TEXT_BYTES + 1)
        if line.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            raise ValueError(f"{file} starts with a JSON array; write one object per line (JSON lines)")
        parsed = _parsed(line, 0)
        if not isinstance(parsed, BadRow):  # else its row is refused or counted when it is read
            choose(list(parsed))
        if _compression(file):
            return [(0, 1)]
        size = stream.seek(0, io.SEEK_END)
    return [(start, min(start + unit_bytes, size)) for start in range(0, size, unit_bytes)]


def jsonl_rows(file: str, start: int, stop: int, choose: Choose) -> Rows:
    with open_stream(file) as stream:
        position, end = 0, math.inf
        if not _compression(file):
            position, end = stream.seek(max(start - 1, 0)), stop
            position += _rest_of_line(stream) if start else 0
        while position < end and (line := stream.readline(MAX_TEXT_BYTES + 1)):
            number, position = position, position + len(line)
            if len(line) > MAX_TEXT_BYTES and not line.endswith(b"\n"):
                position += _rest_of_line(stream)
                megabytes = (position - number) / 1e6
                yield number, BadRow("too long", f"the line has {megabytes:.1f} MB, {AT_MOST}")
            elif line.strip():
                yield number, _parsed(line, number)


def _rest_of_line(stream: BinaryIO) -> int:
    skipped = 0
    while block := stream.readline(BUFFER):
        skipped += len(block)
        if block.endswith(b"\n"):
            break
    return skipped


def _parsed(line: bytes, number: int) -> dict[str, Any] | BadRow:
    try:
        row = json.loads(line.decode("utf8" if number else "utf-8-sig"))
    except UnicodeDecodeError as error:
        return BadRow("invalid UTF-8", f"the line is no UTF-8 at its byte {error.start + 1}")
    except (json.JSONDecodeError, RecursionError) as error:
        return BadRow("invalid JSON", f"the line is no JSON ({error})")
    if not isinstance(row, dict):
        return BadRow("invalid JSON", f"the line holds a JSON {type(row).__name__}, not an object {{…}}")
    return row


# --- CSV and TSV: a header, then rows; a quoted value may hold newlines, so a file is one piece


def csv_cut(file: str, unit_bytes: int, choose: Choose) -> Pieces:
    with _csv_reader(file) as reader:
        choose(next(reader, []))
    return [(0, 1)]


def csv_rows(file: str, start: int, stop: int, choose: Choose) -> Rows:
    with _csv_reader(file) as reader:
        names = next(reader, [])
        choose(names)
        while True:
            number = reader.line_num + 1
            try:
                values = next(reader, None)
            except csv.Error as error:
                remedy = 'close every quote, and write a quote within a quoted value twice ("")'
                raise ValueError(f"{file}, line {number}: {error}; {remedy}") from error
            if values is None:
                return
            if len(values) == len(names):
                yield number, dict(zip(names, values, strict=True))
            elif values:  # an empty line is no row
                detail = f"the row has {len(values)} values for {len(names)} columns; quote what has commas"
                yield number, BadRow("wrong number of values", detail)


@contextmanager
def _csv_reader(file: str) -> Iterator[Any]:
    csv.field_size_limit(MAX_TEXT_BYTES)
    with open_stream(file) as stream:
        # Invalid bytes become lone surrogates, which are found with all others.
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
        yield csv.reader(_csv_lines(text), delimiter="\t" if suffix_of(file) == ".tsv" else ",", strict=True)


def _csv_lines(text: io.TextIOBase) -> Iterator[str]:
    while line := text.readline(MAX_TEXT_BYTES + 1):
        if len(line) > MAX_TEXT_BYTES:
            raise csv.Error(f"the line is too long, {AT_MOST}")
        yield line
