"""Files of a source (one's own, a mirror's or the Hub's) and their rows, checked: `units` lists the pieces of
its files, `read` reads one piece, row by row.

A bad row is an error that names file, row and remedy, or is
counted, as the source says (`bad_rows`). No text is altered.
"""

import csv
import io
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import fsspec
import huggingface_hub
import numpy as np
import pyarrow as pa
from datasets.data_files import get_data_patterns, sanitize_patterns
from datasets.utils.metadata import MetadataConfigs
from huggingface_hub.errors import HTTPError
from huggingface_hub.hf_api import RepoFile
from pyarrow import parquet

from unmask.data.hub import HOW_TO_MIRROR, root
from unmask.data.registry import SPLITS, Source, halves, own_files, split_of
from unmask.data.spelling import canonical, is_blank
from unmask.store import fingerprint, nearest

TABLES = (".parquet", ".arrow", ".csv", ".tsv", ".jsonl", ".ndjson", ".json")
FORMATS = (*TABLES, ".txt")  # on the Hub: licences and the like
_COMPRESSED = re.compile(r"(?<!\.arrow)\.(gz|bz2|xz|zst)$")  # Arrow files are mapped into memory
_ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"  # of a stream; pyarrow takes one that was cut short for a whole one
# Of a definition: what decides no row.
_NO_CONTENT = ["files", "share", "licence", "rows", "documented", "optional", "script", "known_as"]
BATCH = 1000  # rows of a table in memory at once
UNIT_BYTES = 16 << 20  # of a Parquet file, about, which is cut between row groups, or of an Arrow file
_LABELS = ("id", "key", "held_by", "chunk_id", "query_chunk_id")  # whose values become text
_LISTS = ("negatives", "chunks", "queries")
_HELD_BY = ("key", "title", "id", "text")  # the first that a row has decides its split, unless held_by does


class BadRow(ValueError):
    """A row that cannot be used: what it is counted under, and what is in it."""


class DataFile(NamedTuple):
    """A file of a source."""

    path: str  # local, or an hf:// URL
    size: int  # bytes
    version: str  # another one for other content: its checksum, or its time


def suffix_of(file: str) -> str:
    """The suffix that tells a file's format, the compression's left out."""
    return PurePosixPath(_COMPRESSED.sub("", file.lower())).suffix


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
        local = fsspec.filesystem("file")
        return [_described(str(path), local.info(path)) for path in own_files(source)]
    mirror = root()
    if source.kind == "mirror" and not mirror:
        raise ValueError(f"Source {source.name} is read from a mirror: set UNMASK_MIRROR; {HOW_TO_MIRROR}")
    base = f"{mirror}/{source.repo}" if mirror else f"hf://datasets/{source.repo}"
    try:
        base += "" if mirror else f"@{_commit(source.repo, source.revision)}"
        system, start = fsspec.url_to_fs(base)
        globs = (system.glob(f"{start}/{pattern}", detail=True) for pattern in patterns(source, base))
        there = {path.removeprefix(f"{start}/"): info for found in globs for path, info in found.items()}
        if not (names := tables(name for name, info in there.items() if info["type"] != "directory")):
            raise FileNotFoundError(f"no table of {source.config or 'default'}, split {source.split}")
        known = pulled(Path(base), source.revision)[1] if mirror else {}
        there |= {name: vars(known[name]) for name in known.keys() & names}
        return [_described(f"{base}/{name}", there[name]) for name in names]
    except (OSError, HTTPError) as error:  # not there, not open to this account, no answer
        reason = " ".join(str(error).split()) or type(error).__name__
        what = f"Source {source.name}: {base} cannot be read ({reason})"
        raise ValueError(f"{what}; {HOW_TO_MIRROR}") from error


def tables(names: Iterable[str]) -> list[str]:
    """The names of tables among those of files, in the order in which they are read."""
    return sorted(name for name in names if suffix_of(name) in TABLES)


def pulled(folder: Path, revision: str) -> tuple[str, dict[str, RepoFile]]:
    """The commit of a repository that `unmask mirror pull` fetched, and all its files, fetched or not, by
    name; nothing of one that was put into the mirror by hand.

    Raises: ValueError if another commit is asked for.
    """
    for cached in folder.glob(".cache/huggingface/trees/*.json"):
        repo, commit = f"{folder.parent.name}/{folder.name}", cached.stem
        if re.fullmatch("[0-9a-f]{40}", revision) and revision != commit:
            held = f"the mirror holds revision {commit} of {repo}, not {revision}"
            raise ValueError(f"{held}: `unmask mirror pull` into another")
        files = huggingface_hub.get_cached_repo_tree(repo, revision=commit, local_dir=folder)
        return commit, {file.path: file for file in files}
    return "", {}


def patterns(source: Source, base: str) -> list[str]:
    """Which files of a repository hold a source's split, by its README or else by their names.

    Args:
        base: the repository, a folder or an hf:// URL; a mirror may hold only the files that are needed.
    Raises: ValueError for an unknown configuration or split, with the known ones.
    """
    where, configs = f"Source {source.name}: {source.repo}", _configurations(base)
    name = source.config or configs.get_default_config_name() or "default"
    if configs and name not in configs:
        raise ValueError(f"{where} has no configuration {name!r}{nearest(name, configs)}")
    described = configs.get(name) or {"data_dir": source.config}  # on refs/convert/parquet there is no README
    folder, given = described.get("data_dir") or "", described.get("data_files")
    splits = sanitize_patterns(given) if given else get_data_patterns(f"{base}/{folder}".rstrip("/"))
    if source.split not in splits:
        raise ValueError(f"{where}, {name} has no split {source.split!r}{nearest(source.split, splits)}")
    return [str(PurePosixPath(folder, pattern)) for pattern in splits[source.split]]


def identity(source: Source) -> str:
    """Hash of what decides the rows of a source: its definition, and its files' names, sizes and versions.

    Raises: ValueError if the files cannot be found, see `data_files`.
    """
    definition = {key: value for key, value in asdict(source).items() if key not in _NO_CONTENT}
    if source.known_as:
        return fingerprint(definition, source.known_as)
    listed = [(os.path.basename(file.path), file.size, file.version) for file in data_files(source)]
    return fingerprint(definition, listed)


class Unit(NamedTuple):
    """A piece of a data file that one worker reads at a time: part `part` of `parts`."""

    file: str  # local path or hf:// URL
    part: int = 0
    parts: int = 1


def units(source: Source) -> list[Unit]:
    """The pieces of a source, always in the same order. Lists files and reads no rows.

    Args:
        source: of kind hub, mirror or files, see `halves`.
    Raises: ValueError for files that are not there (`data_files`) or of unknown format.
    """
    found = ((file.path, _parts(file)) for file in data_files(source))
    return [Unit(path, part, parts) for path, parts in found for part in range(parts)]


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
                remedy = "correct it (in a registry `bad_rows: drop` leaves such rows out)"
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


# --- files: where they are, their pieces, and the rows of a piece


def _described(path: str, info: Mapping[str, Any]) -> DataFile:
    return DataFile(path, info["size"], info.get("blob_id") or str(info["mtime"]))


@cache
def _commit(repo: str, revision: str) -> str:
    """The commit of a revision: asked for once, so that a process reads one state of a repository."""
    return huggingface_hub.HfApi().dataset_info(repo, revision=revision).sha


@cache  # some have a thousand, and a source for each language asks
def _configurations(base: str) -> Mapping[str, Any]:
    """The `configs:` of a repository's README."""
    with suppress(FileNotFoundError), fsspec.open(f"{base}/README.md", encoding="utf8", mode="rt") as file:
        card = huggingface_hub.DatasetCard(file.read(), ignore_metadata_errors=True)
        return MetadataConfigs.from_dataset_card_data(card.data)
    return MetadataConfigs()


def _parts(file: DataFile) -> int:
    if (suffix := suffix_of(file.path)) not in FORMATS or not file.size:
        raise ValueError(f"{file.path} is empty, or in no known format; there are {', '.join(FORMATS)}")
    return -(-file.size // UNIT_BYTES) if suffix in (".parquet", ".arrow") else 1


def _raw_rows(unit: Unit, columns: Collection[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows as they are in the file, each with its number there, from 1: in JSON lines that of the line.
    Whatever the libraries that read it raise becomes one error."""
    try:
        yield from _rows(unit, columns)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{unit.file} cannot be read ({reason}); correct it, or get it again") from error


def _rows(unit: Unit, columns: Collection[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    text = {"mode": "rt", "encoding": "utf-8-sig", "newline": ""}  # Windows marks it
    match suffix_of(unit.file):
        case ".parquet":
            with _open(unit.file) as stream:
                file = parquet.ParquetFile(stream)
                there = file.schema_arrow.names
                wanted = {path if path in there else path.partition(".")[0] for path in columns}
                if lost := wanted - {*there}:
                    raise ValueError(f"there is no {min(lost)!r}{nearest(min(lost), there)}")
                groups = np.array_split(range(file.num_row_groups), unit.parts)[unit.part].tolist()
                first = 1 + sum(file.metadata.row_group(i).num_rows for i in range(min(groups, default=0)))
                batches = file.iter_batches(BATCH, groups, [*wanted])
                yield from enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), first)
        case ".arrow":
            table = _arrow_table(pa.memory_map(unit.file))
            start, stop = (len(table) * part // unit.parts for part in (unit.part, unit.part + 1))
            batches = table.slice(start, stop - start).to_batches(BATCH)
            yield from enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), start + 1)
        case ".txt":
            with _open(unit.file, **text | {"newline": "\n"}) as lines:
                yield from enumerate(({"text": line.rstrip("\r\n")} for line in lines), 1)
        case ".csv" | ".tsv" as suffix:
            csv.field_size_limit(2**31 - 1)  # of a text; 128 kB unless it is set
            with _open(unit.file, **text) as lines:
                rows = csv.DictReader(lines, delimiter="\t" if suffix == ".tsv" else ",", strict=True)
                names = rows.fieldnames or []
                if twice := [name for name in columns if names.count(name) > 1]:
                    raise ValueError(f"{len(names)} columns, of which more than one is called {twice[0]!r}")
                for number, row in enumerate(rows, 1):
                    if None in row or None in row.values():
                        raise ValueError(f"line {rows.line_num}: other than {len(rows.fieldnames)} fields")
                    # Not all who write TSV quote: a quote that is a sign like others would join what follows.
                    between = "\t" if len(row) > 1 else "\n"
                    if suffix == ".tsv" and any(between in value for value in row.values()):
                        joined = f"to line {rows.line_num}, a quote that opens a field takes in others"
                        raise ValueError(f"{joined}; if they are one text, write it as .csv or .jsonl")
                    yield number, row
        case _:
            yield from _objects(unit.file)


def _open(file: str, mode: str = "rb", **options: Any) -> Any:
    """Opens a file, compressed or not. `fsspec.open` would take "::" in a path for a chain of systems."""
    system = fsspec.filesystem("hf" if file.startswith("hf://") else "file")
    if not file.endswith(".zst"):
        return system.open(file, mode, compression="infer", **options)
    # fsspec reads it only where another package is installed, and takes its bytes for text elsewhere.
    stream = io.BufferedReader(pa.CompressedInputStream(system.open(file), "zstd"))
    return stream if mode == "rb" else io.TextIOWrapper(stream, **options)


def _arrow_table(source: pa.NativeFile) -> pa.Table:
    """The rows of an Arrow file, in either of its formats: random access, or a stream."""
    if source.read(6) == b"ARROW1":
        return pa.ipc.open_file(source).read_all()
    source.seek(0)
    table = pa.ipc.open_stream(source).read_all()
    if source.size() != source.tell() or source.read_at(8, source.tell() - 8) != _ARROW_END:
        raise ValueError("its end is missing, or something follows it")
    return table


def _objects(file: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a JSON file, as they are: one in each line, or all in one list. Arrow would give the texts
    of a column one type, in blocks, and so alter or refuse some."""
    with _open(file) as lines:
        for number, line in enumerate(lines, 1):
            line = line.removeprefix(b"\xef\xbb\xbf")  # the mark that Windows puts first
            try:
                found = json.loads(line + lines.read() if line.lstrip()[:1] == b"[" else b"[%s]" % line)
                json.dumps(found, ensure_ascii=False).encode()  # half of a character cannot be
                if not all(isinstance(row, dict) for row in found):
                    raise ValueError("no names and values in braces")
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
            yield from enumerate(found, number)


# --- columns: which are read, what is in them


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
    row = {}
    for name, path in paths.items():
        value = _value(raw, path)
        if name in _LABELS and value is not None and value == value:  # NaN is none
            value = canonical(value)
        elif name == "negatives" and isinstance(value, str):
            value = [value]
        if name != "golds" and not _are_texts(value if name in _LISTS else [value]):
            raise BadRow(f"{name} is no text, or empty", f": {value!r:.80}")
        row[name] = value
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
    return some and all(isinstance(v, str) and not is_blank(v) for v in values)


def _held_by(row: Mapping[str, Any]) -> str:
    if chunk_id := row.get("chunk_id") or row.get("query_chunk_id"):
        return document_of(chunk_id)[0]
    return next((row[name] for name in _HELD_BY if name in row), None) or "\n".join(row["chunks"])
