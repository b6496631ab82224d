"""The tables of a source: its good rows by split, in Arrow files that `datasets` maps, and a card."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from tqdm.auto import tqdm

from unmask.data.corpus import SCHEMAS, SPLITS, measured
from unmask.data.reading import (
    BadRow,
    Unit,
    document_of,
    files_of,
    layout_of,
    numbered,
    place,
    refuse,
    shortened,
    units,
)
from unmask.data.registry import Source
from unmask.data.tokens import batches, in_order
from unmask.store import new_directory

SAMPLE_BYTES = 16_000_000  # of a text source, whose rest only the preparation of tokens reads
EXAMPLES = 3
BATCH_BYTES = 16 << 20  # of rows that are Python objects at one time
KIND = {"text": "texts", "pairs": "pairs", "triplets": "triplets", "documents": "documents"}
_EXTRA = {"split": pa.string(), "number": pa.int64(), "id": pa.string(), "digest": pa.binary()}
_NO_CONTENT = ("files", "share", "licence", "rows", "bytes", "documented", "optional")  # of a definition

Numbered = Iterable[tuple[int, Mapping[str, Any]]]


def identity(source: Source) -> str:
    """Hash of what decides the rows of a source: its definition, and its files' names, sizes and checksums
    (on the Hub the commit; where nothing better is known, the time of the last change).

    Raises: ValueError if the files cannot be found, see `files.data_files`.
    """
    definition = {key: value for key, value in asdict(source).items() if key not in _NO_CONTENT}
    listed = []
    for file, _ in files_of(source):
        name = file.path.rpartition(source.repo)[2] if source.repo else Path(file.path).name
        known = file.sha256 or ("" if "://" in file.path else os.stat(file.path).st_mtime_ns)
        listed.append([name, file.size, known])
    return hashlib.sha256(json.dumps([definition, listed], sort_keys=True).encode()).hexdigest()[:32]


def collect(source: Source, folder: Path, *, workers: int | None = None) -> dict[str, Any]:
    """Reads a source into `folder`/{train,dev,test}.arrow and card.json; the folder appears when it is whole.

    Pairs, triplets and nested documents are streamed, other documents gathered in memory. Of a text source
    only a sample is kept: SAMPLE_BYTES of training text, and the held-out text met on the way.

    Args:
        source: of kind hub, mirror or files.
        folder: to create, by one caller at a time.
        workers: processes that read, default: one per core; the result does not depend on it.
    Returns: the card: sizes (split → rows, characters, and chunks, queries, negatives where there are some),
        dropped (reason → rows), examples, hash of the rows, and complete (False for a sample).
    Raises: ValueError for bad rows (`reading.read`), an id that two rows have, or if no row is left.
    """
    dropped: Counter[str] = Counter()
    with new_directory(folder) as unfinished:
        with _Tables(unfinished, source) as tables:
            complete = _fill(tables, source, dropped, workers)
        card = tables.card() | {"dropped": dict(dropped.most_common()), "complete": complete}
        if not any(size["rows"] for size in card["sizes"].values()):
            reasons = ", ".join(f"{reason}: {rows:,}" for reason, rows in dropped.most_common())
            raise ValueError(f"Source {source.name} has no usable row ({reasons or 'its files hold none'})")
        (unfinished / "card.json").write_text(json.dumps(card, indent=1, ensure_ascii=False), encoding="utf8")
    return card


class _Tables:
    """An open Arrow stream for each split, and what a card says about them."""

    def __init__(self, folder: Path, source: Source) -> None:
        self.source, self.schema = source, SCHEMAS[KIND[source.role]]
        self.sizes = {split: Counter(measured(self.schema.empty_table())) for split in SPLITS}
        self.examples: list[dict[str, Any]] = []
        self._hashes = {split: hashlib.sha256() for split in SPLITS}
        self._folder, self._stack = folder, ExitStack()

    def __enter__(self) -> _Tables:
        self._folder.mkdir(parents=True)
        self._writers = {}
        for split in SPLITS:
            sink = self._stack.enter_context(pa.OSFile(str(self._folder / f"{split}.arrow"), "wb"))
            self._writers[split] = self._stack.enter_context(pa.ipc.new_stream(sink, self.schema))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def write(self, rows: pa.Table) -> None:
        """Appends rows that `_table` made."""
        for split in SPLITS:
            part = rows.filter(pc.equal(rows["split"], split))
            if split == "train" and self.source.max_rows is not None:
                part = part.slice(0, self.source.max_rows - self.sizes[split]["rows"])
            self._hashes[split].update(b"".join(part["digest"].to_pylist()))
            part = part.select(self.schema.names)
            self._writers[split].write_table(part)
            self.sizes[split].update(measured(part))
            if split == "train":
                wanted = EXAMPLES - len(self.examples)
                self.examples += [_example(row) for row in part.slice(0, wanted).to_pylist()]

    @property
    def full(self) -> bool:
        """Whether there are as many training rows as the source may have."""
        return self.source.max_rows is not None and self.sizes["train"]["rows"] >= self.source.max_rows

    def update_hash(self, what: str) -> None:
        """Has the hash depend on more than the rows, where these are a sample."""
        self._hashes["train"].update(what.encode())

    def card(self) -> dict[str, Any]:
        described = {key: getattr(self.source, key) for key in ("name", "role", "language", "licence")}
        sizes = {split: dict(size) for split, size in self.sizes.items()}
        digest = hashlib.sha256(b"".join(self._hashes[split].digest() for split in SPLITS)).hexdigest()
        return described | {"sizes": sizes, "examples": self.examples, "hash": digest}


def _example(value: Any) -> Any:
    """A row as a card shows it: the first of many values, and the beginning of a long text."""
    if isinstance(value, dict):
        return {name: _example(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_example(one) for one in value[:EXAMPLES]]
    return shortened(value, 200) if isinstance(value, str) else value


# --- rows on their way: the stored columns, and split, number, id and digest of each


def _table(source: Source, package: str, rows: Numbered) -> pa.Table:
    schema = pa.schema([*SCHEMAS[KIND[source.role]], *map(pa.field, _EXTRA, _EXTRA.values())])

    def extended(number: int, row: Mapping[str, Any]) -> dict[str, Any]:
        stored = _stored(source, row, package)
        digest = hashlib.blake2b(json.dumps(stored, sort_keys=True).encode(), digest_size=16).digest()
        return stored | {"split": row["split"], "number": number, "id": row.get("id"), "digest": digest}

    held = batches((extended(*each) for each in rows), lambda row: len(repr(row)), BATCH_BYTES)
    return pa.Table.from_batches([pa.RecordBatch.from_pylist(batch, schema) for batch in held], schema)


def _stored(source: Source, row: Mapping[str, Any], package: str) -> dict[str, Any]:
    """A row with the columns of its table."""
    if source.role == "text":
        return {"text": row["text"], "package": source.name, "kind": "text", "language": source.language}
    origin = {
        "dataset": source.name,
        "task": source.task or source.name,
        "language": source.language,
        "package": package,
    }
    if source.role == "documents":
        content = {name: row[name] for name in ("chunks", "queries", "golds")}
        document = row.get("id") or _digest("\n".join(row["chunks"]))
        return origin | {"document_id": f"{source.name}/{document}"} | content
    content = {name: row[name] for name in ("query", "document", "negatives") if name in row}
    return origin | {"group": source.group, "key": _digest(row["key"])} | content


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


# --- from units to tables


def _fill(tables: _Tables, source: Source, dropped: Counter[str], workers: int | None) -> bool:
    """Writes all rows of a source, and returns whether that is all."""
    pieces, gather = units(source), _GATHER.get(layout_of(source))
    if source.role == "text":
        return _fill_sample(tables, source, pieces, dropped)
    if gather and pieces:
        tables.write(_table(source, _package(source, pieces[0]), enumerate(gather(source, pieces, dropped))))
        return True
    ids = _Ids(source, dropped)
    wanted = (piece for piece in pieces if not tables.full)  # the rest is neither trained on nor held out
    read = in_order(partial(_read_unit, source), wanted, len(pieces), workers)
    for rows, counted, unit in tqdm(read, f"reading {source.name}", len(pieces), delay=2, leave=False):
        if not tables.full:
            dropped.update(counted)
            tables.write(ids.distinct(rows, unit))
    return not tables.full


def _read_unit(source: Source, unit: Unit) -> tuple[pa.Table, Counter[str], Unit]:
    dropped: Counter[str] = Counter()
    return _table(source, _package(source, unit), numbered(source, unit, dropped)), dropped, unit


def _package(source: Source, unit: Unit) -> str:
    return source.repo or Path(unit.file).name


def _fill_sample(tables: _Tables, source: Source, pieces: Sequence[Unit], dropped: Counter[str]) -> bool:
    room = SAMPLE_BYTES

    def rows(unit: Unit) -> Iterator[tuple[int, dict[str, Any]]]:
        nonlocal room
        for number, row in numbered(source, unit, dropped):
            yield number, row
            room -= len(row["text"].encode()) if row["split"] == "train" else 0
            if room <= 0:
                return

    for unit in pieces:
        tables.write(_table(source, "", rows(unit)))
        if room <= 0:
            tables.update_hash(str([(Path(file.path).name, file.size) for file, _ in files_of(source)]))
            return False
    return True


class _Ids:
    """The ids of a source's rows, each of which may have one row."""

    def __init__(self, source: Source, dropped: Counter[str]) -> None:
        self.source, self.dropped = source, dropped
        self.places: dict[bytes, tuple[Unit, int]] = {}  # by digest, because there may be many

    def new(self, name: str, unit: Unit, number: int) -> bool:
        """Whether no earlier row has this id; else the row is refused or counted.

        Raises: ValueError that names both rows.
        """
        digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
        first, row = self.places.setdefault(digest, (unit, number))
        if (first, row) == (unit, number):
            return True
        # To find a line is to read what is before it: too much for every row that is only counted.
        where = f"{first.file}, {place(first.file, row)[0]}" if self.source.bad_rows == "stop" else ""
        bad = BadRow("duplicate id", f"the row at {where} has the id {name!r} too; an id names one row")
        refuse(self.source, unit.file, number, bad, self.dropped)
        return False

    def distinct(self, rows: pa.Table, unit: Unit) -> pa.Table:
        """The rows whose id is new; all of them where the source has no ids."""
        if "id" not in self.source.columns:
            return rows
        named = zip(rows["id"].to_pylist(), rows["number"].to_pylist(), strict=True)
        return rows.filter(pa.array([self.new(name, unit, number) for name, number in named], pa.bool_()))


# --- documents whose rows are not documents; all rows of the source are held in memory


def _gather_flat(
    source: Source, pieces: Sequence[Unit], dropped: Counter[str]
) -> Iterator[Mapping[str, Any]]:
    """Rows of one title are a document: chunks in order of appearance, equal ones once. The split is that of
    its first row."""
    documents: dict[str, dict[str, Any]] = {}
    ids = _Ids(source, dropped)
    for unit in pieces:
        for number, row in numbered(source, unit, dropped):
            if "id" in row and not ids.new(row["id"], unit, number):
                continue
            new = {"id": row["title"], "split": row["split"], "chunks": {}, "queries": [], "golds": []}
            document = documents.setdefault(row["title"], new)
            document["golds"].append(document["chunks"].setdefault(row["chunk"], len(document["chunks"])))
            document["queries"].append(row["query"])
    for document in documents.values():
        yield document | {"chunks": list(document["chunks"])}


def _gather_joined(
    source: Source, pieces: Sequence[Unit], dropped: Counter[str]
) -> Iterator[Mapping[str, Any]]:
    """Chunks by the document and position that their ids name, equal ones once; queries by the chunk that
    they name. Documents that no query asks for are left out and counted."""
    chunks: dict[str, dict[int, str]] = {}
    splits: dict[str, str] = {}
    asked: dict[str, list[tuple[str, int]]] = {}
    for unit in pieces:
        for number, row in numbered(source, unit, dropped):
            chunk_id = row["query_chunk_id" if unit.queries else "chunk_id"]
            name, position = document_of(chunk_id)
            there = position in chunks.get(name, ())
            if unit.queries != there:
                bad = (
                    ("duplicate id", "there are two")
                    if there
                    else ("query of a missing chunk", "there is no")
                )
                refuse(source, unit.file, number, BadRow(bad[0], f"{bad[1]} {chunk_id!r}"), dropped)
            elif unit.queries:
                asked.setdefault(name, []).append((row["query"], position))
            else:
                chunks.setdefault(name, {})[position] = row["chunk"]
                splits.setdefault(name, row["split"])
    for name in chunks:
        if not (queries := asked.get(name)):
            dropped["document without a query"] += 1
            continue
        distinct: dict[str, int] = {}
        index = {at: distinct.setdefault(text, len(distinct)) for at, text in sorted(chunks[name].items())}
        golds = [index[position] for _, position in queries]
        found = {"chunks": list(distinct), "queries": [query for query, _ in queries], "golds": golds}
        yield {"id": name, "split": splits[name]} | found


_GATHER = {"flat": _gather_flat, "joined": _gather_joined}
