"""Files of a source (one's own, a mirror's or the Hub's) and their rows, checked: `units` lists the pieces of
its files, `read` reads one piece, row by row.

`datasets` reads the files but those of JSON. A bad row is an error that names file, row and remedy, or is
counted, as the source says (`bad_rows`). No text is altered.
"""

import glob
import hashlib
import json
import os
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import fsspec
import huggingface_hub
import pyarrow.parquet as parquet
from datasets import Dataset, load_dataset
from datasets.data_files import get_data_patterns, resolve_pattern, sanitize_patterns
from datasets.utils.metadata import MetadataConfigs
from huggingface_hub.errors import HTTPError

from unmask.data.registry import Source, own_files, split_of
from unmask.store import fingerprint, nearest, read_json

MANIFEST = ".unmask-mirror.json"
HOW_TO_MIRROR = "with internet, `unmask mirror pull --preset NAME --to DIR`; UNMASK_MIRROR=DIR serves it here"
# Suffix → the builder of `datasets` that reads such files. Text, JSON and CSV may be compressed (.gz).
FORMATS = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".tsv": "csv", ".txt": "text"}
FORMATS |= dict.fromkeys((".jsonl", ".ndjson", ".json"), "json")
# Of a definition: what decides no row.
_NO_CONTENT = ["files", "share", "licence", "rows", "documented", "optional", "known_as"]
UNIT_BYTES = 16 << 20  # of a Parquet file, about, which is cut between row groups, or of an Arrow file
_QUERIES = ("query", "query_chunk_id")  # columns of the configuration of queries in the joined layout
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
    return PurePosixPath(file.lower().removesuffix(".gz")).suffix


def root() -> Path | None:
    """The mirror that UNMASK_MIRROR names."""
    name = os.environ.get("UNMASK_MIRROR")
    return Path(name).resolve() if name else None


def data_files(source: Source, *, queries: bool = False) -> list[DataFile]:
    """The files of a source in the order in which they are read; of kind files, only those that exist.

    Args:
        source: of kind files, hub or mirror. Kind hub is read from UNMASK_MIRROR, if it is set.
        queries: those of `queries_config` instead of `config`.
    Raises: ValueError if a mirror or the Hub has none, with the remedy: an unknown configuration or split,
        with the known ones; a repository that is not in the mirror; a Hub that refuses or does not
        answer.
    """
    if source.kind == "files":
        return [_described(str(path), {}) for path in own_files(source)]
    mirror = root()
    if source.kind == "mirror" and not mirror:
        raise ValueError(f"Source {source.name} is read from a mirror: set UNMASK_MIRROR; {HOW_TO_MIRROR}")
    base = f"{mirror}/{source.repo}" if mirror else f"hf://datasets/{source.repo}"
    try:
        base += "" if mirror else f"@{_commit(source.repo, source.revision)}"
        recorded = _pulled(source, base) if mirror else {}
        found = _resolved(source, source.queries_config if queries else source.config, base)
        return [_described(path, recorded.get(os.path.relpath(path, base), {})) for path in found]
    except (OSError, HTTPError) as error:  # not there, not open to this account, no answer
        reason = " ".join(str(error).split()) or type(error).__name__
        what = f"Source {source.name}: {base} cannot be read ({reason})"
        raise ValueError(f"{what}; {HOW_TO_MIRROR}") from error


def files_of(source: Source) -> list[tuple[DataFile, bool | None]]:
    """All files of a source; in the joined layout of documents each with whether it holds the queries.

    Raises: ValueError, see `data_files`.
    """
    both = (False, True) if source.queries_config else (None,)
    return [(file, queries) for queries in both for file in data_files(source, queries=bool(queries))]


def sha256(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def identity(source: Source) -> str:
    """Hash of what decides the rows of a source: its definition, and its files' names, sizes and versions.

    Raises: ValueError if the files cannot be found, see `data_files`.
    """
    if source.known_as:
        return source.known_as
    definition = {key: value for key, value in asdict(source).items() if key not in _NO_CONTENT}
    listed = [(os.path.basename(file.path), file.size, file.version) for file, _ in files_of(source)]
    return fingerprint(definition, listed)


def manifest(folder: str | Path) -> dict[str, Any]:
    """What `unmask mirror pull` recorded of a repository: its revision, and files with size and sha256. Empty
    for one that was put into the mirror by hand.
    """
    return read_json(Path(folder) / MANIFEST)


class Unit(NamedTuple):
    """A piece of a data file that one worker reads at a time: part `part` of `parts`."""

    file: str  # local path or hf:// URL
    part: int = 0
    parts: int = 1
    queries: bool | None = None  # joined layout of documents: whether the file holds queries, or chunks


def units(source: Source) -> list[Unit]:
    """The pieces of a source, always in the same order. Lists files and reads no rows.

    Args:
        source: of kind hub, mirror or files.
    Raises: ValueError for files that are not there (`data_files`) or of unknown format.
    """
    found = [(file.path, _parts(file), queries) for file, queries in files_of(source)]
    return [Unit(path, part, parts, queries) for path, parts, queries in found for part in range(parts)]


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
    Raises: ValueError that names file, row and remedy for a bad row, one without a column among them,
        where `source.bad_rows` is "stop"; always for a file that cannot be parsed.
    """
    paths = {name: path for name, path in source.columns.items() if unit.queries in (None, name in _QUERIES)}
    columns = {path.strip() for several in paths.values() for path in several.split(",")}
    for number, raw in enumerate(_raw_rows(unit, columns), 1):
        try:
            row = _checked(raw, paths)
        except BadRow as bad:
            if source.bad_rows == "stop":
                part = f" of part {unit.part + 1} of {unit.parts}" if unit.parts > 1 else ""
                what = f"{unit.file}, row {number}{part}: {''.join(bad.args)}; correct it"
                or_else = f", or have source {source.name} count such rows (bad_rows: drop)"
                raise ValueError(what + or_else * bool(source.name)) from None
            dropped[bad.args[0]] += 1
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


# --- files: where they are, their pieces, and the rows of a piece


def _pulled(source: Source, folder: str) -> Mapping[str, Any]:
    """The files that `unmask mirror pull` recorded, which `hub.check` compares with those there."""
    pulled = {"requested": source.revision, "files": {}} | manifest(folder)
    if source.revision not in (pulled["requested"], pulled.get("revision")):
        held = f"the mirror holds revision {pulled['revision']} of {source.repo}"
        raise ValueError(f"{held}, not {source.revision}: `unmask mirror pull` into another")
    return pulled["files"]


def _described(path: str, recorded: Mapping[str, Any]) -> DataFile:
    info = fsspec.url_to_fs(path)[0].info(path)
    version = recorded.get("sha256") or info.get("blob_id") or str(info["mtime"])
    return DataFile(path, info["size"], version)


@cache
def _commit(repo: str, revision: str) -> str:
    """The commit of a revision: asked for once, so that a process reads one state of a repository."""
    return huggingface_hub.HfApi().dataset_info(repo, revision=revision).sha


def _resolved(source: Source, config: str, base: str) -> list[str]:
    """The files of a configuration's split, by the README of the repository in `base` (a folder, or an hf://
    URL), or else by their names. A mirror may hold only those that are needed."""
    where, configs = f"Source {source.name}: {source.repo}", _configurations(base)
    name = config or configs.get_default_config_name() or "default"
    if configs and name not in configs:
        raise ValueError(f"{where} has no configuration {name!r}{nearest(name, configs)}")
    described = configs.get(name) or {"data_dir": config}  # on refs/convert/parquet there is no README
    folder = f"{base}/{described.get('data_dir') or ''}".rstrip("/")
    given = described.get("data_files")
    patterns = sanitize_patterns(given) if given else get_data_patterns(folder)
    if source.split not in patterns:
        raise ValueError(f"{where}, {name} has no split {source.split!r}{nearest(source.split, patterns)}")
    files: set[str] = set()
    for pattern in patterns[source.split]:
        with suppress(FileNotFoundError):
            files.update(resolve_pattern(pattern, folder))
    # Text files are licences and the like there.
    tables = sorted(file for file in files if FORMATS.get(suffix_of(file), "text") != "text")
    if not tables:
        raise FileNotFoundError(f"no table of {name}, split {source.split}")
    return tables


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


def _raw_rows(unit: Unit, columns: Collection[str]) -> Iterator[dict[str, Any]]:
    """Rows as they are in the file. Whatever the libraries that read it raise becomes one error."""
    try:
        yield from _dataset(unit, columns)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{unit.file} cannot be read ({reason}); correct it, or get it again") from error


def _dataset(unit: Unit, columns: Collection[str]) -> Iterable[dict[str, Any]]:
    suffix, options = suffix_of(unit.file), {"encoding": "utf-8-sig"}  # of text, which Windows marks
    if suffix == ".arrow":
        rows = Dataset.from_file(unit.file)
        start, stop = (len(rows) * part // unit.parts for part in (unit.part, unit.part + 1))
        return rows.select(range(start, stop))
    if suffix == ".parquet":
        with fsspec.open(unit.file, "rb") as file:
            there = parquet.read_schema(file).names
        wanted = {path if path in there else path.partition(".")[0] for path in columns}
        if lost := wanted - {*there}:
            raise ValueError(f"there is no {min(lost)!r}{nearest(min(lost), there)}")
        options = {"columns": [*wanted], "batch_size": 1000}  # a file without rows has no size of its own
    elif FORMATS[suffix] == "json":
        return _objects(unit.file)
    elif FORMATS[suffix] == "csv":  # text is text, "NA" and "007" too
        options = {"converters": dict.fromkeys(columns, str), "sep": "\t" if suffix == ".tsv" else ","}
        # Of rows with a field more than the header, pandas would take the first for a name or drop the last.
        options |= {"keep_default_na": False, "index_col": False}
        warnings.filterwarnings("error", "Length of header or names does not match")
    rows = load_dataset(
        FORMATS[suffix], data_files=[glob.escape(unit.file)], split="train", streaming=True, **options
    )
    if unit.parts > 1:  # of Parquet, by its row groups, of which there may be fewer
        rows = rows.reshard()
        parts = min(unit.parts, rows.num_shards)
        return rows.shard(parts, unit.part) if unit.part < parts else ()
    return rows


def _objects(file: str) -> Iterator[dict[str, Any]]:
    """The rows of a JSON file, as they are: one in each line, or all in one list. `datasets` would give the
    texts of a column one type, in blocks, and so alter or refuse some."""
    with fsspec.open(file, "rb", compression="infer") as lines:
        for number, line in enumerate(lines, 1):
            line = line.removeprefix(b"\xef\xbb\xbf")  # the mark that Windows puts first
            try:
                found = json.loads(line + lines.read() if line.lstrip()[:1] == b"[" else b"[%s]" % line)
                json.dumps(found, ensure_ascii=False).encode()  # half of a character cannot be
                if not all(isinstance(row, dict) for row in found):
                    raise ValueError("no names and values in braces")
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
            yield from found


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
    return isinstance(values, list) and values != [] and all(isinstance(v, str) and v.strip() for v in values)


def _are_golds(values: Any, queries: int, chunks: int) -> bool:
    one_each = isinstance(values, list) and len(values) == queries
    return one_each and all(type(value) is int and 0 <= value < chunks for value in values)


def _held_by(row: Mapping[str, Any]) -> str:
    if chunk_id := row.get("chunk_id") or row.get("query_chunk_id"):
        return document_of(chunk_id)[0]
    return next((row[name] for name in _HELD_BY if name in row), None) or "\n".join(row["chunks"])
