"""Rows of a source (one's own files, a mirror's or the Hub's), checked: `units` lists the pieces of its
files, `read` reads one piece, row by row.

`datasets` resolves which files a configuration and split have; pyarrow, csv and json read them. Its
`load_dataset` turns texts like dates into times, cuts lines at carriage returns, joins the rows of a CSV file
after an open quote, takes a cut Arrow stream for a whole one, reads no .zst and no path with "::", and needs
25 times as long for a row of Parquet. A bad row is an error that names file, row and remedy, or is counted,
as the source says (`bad_rows`). Texts stay as they are.
"""

import csv
import io
import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache, partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
from datasets.data_files import DataFilesList, get_data_patterns, sanitize_patterns
from datasets.utils.metadata import MetadataConfigs
from huggingface_hub import DatasetCard, HfApi, HfFileSystem
from huggingface_hub.errors import HTTPError
from pyarrow import parquet

from unmask.data import hub
from unmask.data.registry import SPLITS, Source, existing_files, halves, split_of
from unmask.data.spelling import canonical, is_blank
from unmask.store import fingerprint, nearest

TABLES = (".parquet", ".arrow", ".csv", ".jsonl", ".ndjson", ".json")
FORMATS = (*TABLES, ".txt")  # on the Hub: licences and the like
_CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
_ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"  # of a stream; pyarrow takes one that was cut short for a whole one
# Of a definition: what decides no row.
_NO_CONTENT = {"files", "share", "licence", "rows", "documented", "optional", "script", "known_as"}
BATCH = 1000  # rows of a table in memory at once
UNIT_BYTES = 16 << 20  # of a Parquet file, about, which is cut between row groups, or of an Arrow file
_LABELS = {"id", "key", "held_by", "chunk_id", "query_chunk_id"}  # whose values become text
_LISTS = {"negatives", "chunks", "queries"}
_HELD_BY = ("key", "title", "id", "text")  # the first that a row has decides its split, unless held_by does


class BadRow(ValueError):
    """A row that cannot be used: what it is counted under, and what is in it."""


class DataFile(NamedTuple):
    """A file of a source."""

    path: str  # local, or an hf:// URL
    size: int  # bytes
    version: str  # another one for other content: the repository's commit, or the file's time


class Unit(NamedTuple):
    """A piece of a data file that one worker reads at a time: part `part` of `parts`."""

    file: str  # local path or hf:// URL
    part: int = 0
    parts: int = 1


def suffix_of(file: str) -> str:
    """The suffix that tells a file's format, the compression's left out."""
    path = PurePosixPath(file.lower())
    return PurePosixPath(path.stem).suffix if path.suffix in _CODECS else path.suffix


def tables(names: Iterable[str]) -> list[str]:
    """The names of tables among those of files, in the order in which they are read."""
    return sorted({name for name in names if suffix_of(name) in TABLES})


def data_files(source: Source) -> list[DataFile]:
    """The files of a source in the order in which they are read; of kind files, only those that exist.

    Args:
        source: of kind files, hub or mirror. Kind hub is read from UNMASK_MIRROR, if it is set.
    Raises: ValueError if a mirror or the Hub has none, with the remedy: an unknown configuration or split,
        with the known ones; a repository that is not in the mirror; a Hub that refuses or does not
        answer.
    """
    if source.queries_config:
        return [file for half in halves(source) for file in data_files(half)]
    if source.kind == "files":
        return [_described(str(path)) for path in existing_files(source)]
    mirror, base = hub.root(), source.repo
    if source.kind == "mirror" and not mirror:
        raise ValueError(f"Source {source.name} is read from a mirror; {hub.HOW_TO_MIRROR}")
    try:
        if mirror:
            base = str(mirror / source.repo)
            commit = hub.commit(mirror / source.repo, source.revision)
        else:
            commit = _commit(source.repo, source.revision)
            base = f"hf://datasets/{source.repo}@{commit}"
        paths = tables(DataFilesList.from_patterns(patterns(source, base), base))
        if not paths:
            raise FileNotFoundError(f"no table of {source.config or 'default'}, split {source.split}")
        return [_described(path, commit) for path in paths]
    except (OSError, HTTPError) as error:  # not there, not open to this account, no answer
        reason = " ".join(str(error).split()) or type(error).__name__
        what = f"Source {source.name}: {base} cannot be read ({reason})"
        raise ValueError(f"{what}; {hub.HOW_TO_MIRROR}") from error


def patterns(source: Source, base: str) -> list[str]:
    """Which files of a repository hold a source's split, by its README or else by their names. `load_dataset`
    would want files of the README's first configuration, too, which a mirror need not have.

    Args:
        base: the repository, a folder or an hf:// URL.
    Raises: ValueError for an unknown configuration or split, with the known ones.
    """
    where, configs = f"Source {source.name}: {source.repo}", _configurations(base)
    name = source.config or configs.get_default_config_name() or "default"
    if configs and name not in configs:
        raise ValueError(f"{where} has no configuration {name!r}{nearest(name, configs)}")
    config = configs.get(name) or {"data_dir": source.config}  # on refs/convert/parquet there is no README
    folder, files = config.get("data_dir") or "", config.get("data_files")
    splits = sanitize_patterns(files) if files else get_data_patterns(f"{base}/{folder}".rstrip("/"))
    if source.split not in splits:
        raise ValueError(f"{where}, {name} has no split {source.split!r}{nearest(source.split, splits)}")
    return [str(PurePosixPath(folder, pattern)) for pattern in splits[source.split]]


def content_hash(source: Source) -> str:
    """Hash of what decides the rows of a source: its definition, and its files' names, sizes and versions.

    Raises: ValueError if the files cannot be listed, see `data_files`.
    """
    definition = {key: value for key, value in asdict(source).items() if key not in _NO_CONTENT}
    if source.known_as:
        return fingerprint(definition, source.known_as)
    return fingerprint(definition, [(Path(path).name, *rest) for path, *rest in data_files(source)])


def units(source: Source) -> list[Unit]:
    """The pieces of a source, always in the same order. Lists files and reads no rows.

    Args:
        source: of kind hub, mirror or files, see `halves`.
    Raises: ValueError for files that are not there (`data_files`) or of unknown format.
    """
    pieces = ((file.path, _parts(file)) for file in data_files(source))
    return [Unit(path, part, parts) for path, parts in pieces for part in range(parts)]


def read(source: Source, unit: Unit, dropped: Counter[str]) -> Iterator[dict[str, Any]]:
    """The good rows of a piece, in the order of the file, with our names for the columns.

    Rows by layout, each with "split", and with "id" where the source maps it:
        text: text.
        pairs: query, document, key (the document unless the source maps it).
        triplets: as pairs, and negatives (list of text).
        nested documents: chunks, queries (lists of text), golds (list of int: its chunk, for each query).
        flat documents: title, chunk, query.
        joined documents: chunk_id, chunk; of the half of queries: query, query_chunk_id.

    Args:
        source: of kind hub, mirror or files, see `halves`.
        unit: one of `units(source)`.
        dropped: counts the rows left out, by reason, where `source.bad_rows` is "drop".
    Raises: ValueError that names file, row and remedy for a bad row, one without a column among them,
        where `source.bad_rows` is "stop"; always for a file that cannot be parsed.
    """
    columns = {path.strip() for several in source.columns.values() for path in several.split(",")}
    for number, raw in _raw_rows(unit, columns):
        try:
            row = _checked(raw, source.columns)
        except BadRow as bad:
            if source.bad_rows == "stop":
                what = f"{unit.file}, row {number}: {''.join(bad.args)}"
                other = "in a registry `bad_rows: drop` leaves such rows out"
                remedy = f"correct it ({other if source.name else '--column names another'})"
                raise ValueError(f"{what}; {remedy}") from None
            dropped[bad.args[0]] += 1
        else:
            yield {"split": split_of(source, row.pop("held_by"))} | row


def document_of(chunk_id: str) -> tuple[str, int]:
    """Document and position that a chunk's id names: "doc_3" is ("doc", 3).

    Raises: BadRow for an id of another form.
    """
    document, _, position = chunk_id.rpartition("_")
    if not document or not position.isdecimal():
        raise BadRow("chunk_id", f" {chunk_id!r} is not DOCUMENT_POSITION")
    return document, int(position)


# --- which files, and their pieces


def _described(path: str, commit: str = "") -> DataFile:
    if path.startswith("hf://"):
        return DataFile(path, HfFileSystem().size(path), commit)
    info = os.stat(path)
    return DataFile(path, info.st_size, commit or str(info.st_mtime))


@cache
def _commit(repo: str, revision: str) -> str:
    """The commit of a revision: asked for once, so that a process reads one state of a repository."""
    return HfApi().dataset_info(repo, revision=revision).sha


@cache  # some have a thousand, and a source for each language asks
def _configurations(base: str) -> Mapping[str, Any]:
    """The `configs:` of a repository's README."""
    with suppress(FileNotFoundError), _open(f"{base}/README.md") as file:
        card = DatasetCard(file.read().decode(), ignore_metadata_errors=True)
        return MetadataConfigs.from_dataset_card_data(card.data)
    return MetadataConfigs()


def _parts(file: DataFile) -> int:
    if (suffix := suffix_of(file.path)) not in FORMATS or not file.size:
        raise ValueError(f"{file.path} is empty, or in no known format; there are {', '.join(FORMATS)}")
    return -(-file.size // UNIT_BYTES) if suffix in (".parquet", ".arrow") else 1


# --- the rows of a piece, as they are in the file, each with its number there, from 1


def _raw_rows(unit: Unit, columns: Collection[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Reads a piece; whatever the libraries raise becomes one error."""
    read_format = {".parquet": _parquet, ".arrow": _arrow, ".csv": _csv, ".txt": _lines}
    try:
        yield from read_format.get(suffix_of(unit.file), _json)(unit, columns)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{unit.file} cannot be read ({reason}); correct it, or get it again") from error


def _open(file: str) -> BinaryIO:
    """Opens a file, compressed or not. What `datasets` and fsspec open takes "::" in a path for a chain."""
    remote = file.startswith("hf://")
    stream = HfFileSystem().open(file) if remote else Path(file).open("rb")  # noqa: SIM115 (callers close it)
    codec = _CODECS.get(PurePosixPath(file.lower()).suffix)
    return io.BufferedReader(pa.CompressedInputStream(stream, codec)) if codec else stream


def _parquet(unit: Unit, columns: Collection[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    with _open(unit.file) as stream:
        file = parquet.ParquetFile(stream)
        names = file.schema_arrow.names
        wanted = {path if path in names else path.partition(".")[0] for path in columns}
        if lost := wanted - {*names}:
            raise ValueError(f"there is no {min(lost)!r}{nearest(min(lost), names)}")
        groups = np.array_split(range(file.num_row_groups), unit.parts)[unit.part].tolist()
        first = 1 + sum(file.metadata.row_group(i).num_rows for i in range(min(groups, default=0)))
        batches = file.iter_batches(BATCH, groups, [*wanted])
        yield from enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), first)


def _arrow(unit: Unit, _: Collection[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Reads what `datasets` saves: Arrow's stream."""
    with pa.memory_map(unit.file) as stream:
        table = pa.ipc.open_stream(stream).read_all()
        if stream.tell() != stream.size() or stream.read_at(8, stream.tell() - 8) != _ARROW_END:
            raise ValueError("its end is missing, or something follows it")
    start, stop = (len(table) * part // unit.parts for part in (unit.part, unit.part + 1))
    batches = table.slice(start, stop - start).to_batches(BATCH)
    yield from enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), start + 1)


def _csv(unit: Unit, _: Collection[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    with _open(unit.file) as stream:
        lines = io.TextIOWrapper(stream, "utf-8-sig", newline="")
        rows = csv.DictReader(lines, strict=True)
        for number, row in enumerate(iter(partial(_next_row, rows), None), 1):
            if None in row or None in row.values():
                raise ValueError(f"line {rows.line_num}: other than {len(rows.fieldnames)} fields")
            yield number, row


def _next_row(rows: csv.DictReader) -> dict[str, str] | None:
    """Reads a row with fields over 128 kB, too; the limit is the whole process's, so it is put back."""
    limit = csv.field_size_limit(2**31 - 1)
    try:
        return next(rows, None)
    finally:
        csv.field_size_limit(limit)


def _lines(unit: Unit, _: Collection[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    with _open(unit.file) as stream:
        lines = io.TextIOWrapper(stream, "utf-8-sig", newline="\n")
        yield from enumerate(({"text": line.rstrip("\r\n")} for line in lines), 1)


def _json(unit: Unit, _: Collection[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Reads one object in each line, or all in one list."""
    with _open(unit.file) as lines:
        for number, line in enumerate(lines, 1):
            line = line.removeprefix(b"\xef\xbb\xbf")  # the mark that Windows puts first
            try:
                rows = json.loads(line + lines.read() if line.lstrip()[:1] == b"[" else b"[%s]" % line)
                json.dumps(rows, ensure_ascii=False).encode()  # half of a character cannot be
                if not all(isinstance(row, dict) for row in rows):
                    raise ValueError("no names and values in braces")
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
            yield from enumerate(rows, number)


# --- what is in a row


def _value(row: Mapping[str, Any], path: str) -> Any:
    """What a path reaches: a column of this name; else "answers.text.0" goes into structs and lists, a name
    goes into every element of a list, and several paths with commas between them make a list."""
    if path in row:
        return row[path]
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
    row = {name: _value(raw, path) for name, path in paths.items()}
    for name, value in row.items():
        if name in _LABELS and value is not None and value == value:  # NaN is none
            row[name] = canonical(value)
        elif name == "negatives" and isinstance(value, str):
            row[name] = [value]
        if name != "golds" and not _are_texts(row[name] if name in _LISTS else [row[name]]):
            raise BadRow(f"{name} is no text, or empty", f": {value!r:.80}")
    if "golds" in row:
        golds, chunks = row["golds"], range(len(row["chunks"]))
        one_each = isinstance(golds, list) and len(golds) == len(row["queries"])
        if not (one_each and all(type(gold) is int and gold in chunks for gold in golds)):
            raise BadRow("golds are not the number of a chunk, from 0, for each query", f": {golds!r:.80}")
    if row.get("split", "train") not in SPLITS:
        raise BadRow(f"split is none of {', '.join(SPLITS)}", f": {row['split']!r:.80}")
    if "document" in row:
        row.setdefault("key", canonical(row["document"]))
    row.setdefault("held_by", _held_by(row))
    return row


def _are_texts(values: Any) -> bool:
    some = isinstance(values, list) and values != []
    return some and all(isinstance(value, str) and not is_blank(value) for value in values)


def _held_by(row: Mapping[str, Any]) -> str:
    if chunk_id := row.get("chunk_id") or row.get("query_chunk_id"):
        return document_of(chunk_id)[0]
    return next((row[name] for name in _HELD_BY if name in row), None) or "\n".join(row["chunks"])
