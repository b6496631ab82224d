"""The tables of a source: its good rows by split, in Arrow files that `datasets` maps, and a card."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from tqdm.auto import tqdm

from unmask.data.corpus import SCHEMAS, SPLITS, measured
from unmask.data.formats import shortened
from unmask.data.gathering import gather_flat, gather_joined, refuse_duplicate
from unmask.data.reading import Unit, files_of, layout_of, numbered, units
from unmask.data.registry import Source
from unmask.data.workers import in_order

SAMPLE_BYTES = 16_000_000  # of a text source, whose rest only the preparation of tokens reads
EXAMPLES = 3
BATCH_ROWS, BATCH_BYTES = 10_000, 64 << 20
KIND = {"text": "texts", "pairs": "pairs", "triplets": "triplets", "documents": "documents"}
_EXTRA = {"split": pa.string(), "number": pa.int64(), "id": pa.string(), "digest": pa.binary()}
_NO_CONTENT = ("files", "share", "licence", "rows", "bytes", "documented", "optional")  # of a definition


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


def collect(source: Source, folder: Path, *, workers: int = 1) -> dict[str, Any]:
    """Reads a source into `folder`/{train,dev,test}.arrow and card.json; the folder appears when it is whole.

    Pairs, triplets and nested documents are streamed, other documents gathered in memory. Of a text source
    only a sample is kept: SAMPLE_BYTES of training text, and the held-out text met on the way.

    Args:
        source: of kind hub, mirror or files.
        folder: to create, by one caller at a time.
        workers: processes that read; the result does not depend on it.
    Returns: the card: sizes (split → rows, characters, and chunks, queries, negatives where there are some),
        dropped (reason → rows), examples, hash of the rows, and complete (False for a sample).
    Raises: ValueError for bad rows (`reading.read`), an id that two rows have, or if no row is left.
    """
    unfinished = folder.with_name(f".partial-{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)  # left by a killed process
    unfinished.mkdir(parents=True)
    try:
        dropped: Counter[str] = Counter()
        with _Tables(unfinished, source) as tables:
            complete = _fill(tables, source, dropped, workers)
        card = tables.card() | {"dropped": dict(dropped.most_common()), "complete": complete}
        if not any(size["rows"] for size in card["sizes"].values()):
            reasons = ", ".join(f"{reason}: {rows:,}" for reason, rows in dropped.most_common())
            raise ValueError(f"Source {source.name} has no usable row ({reasons or 'its files hold none'})")
        (unfinished / "card.json").write_text(json.dumps(card, indent=1, ensure_ascii=False), encoding="utf8")
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
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
            if not part.num_rows:
                continue
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


def _example(row: Mapping[str, Any]) -> dict[str, Any]:
    def short(value: Any) -> Any:
        if isinstance(value, list):
            return [short(one) for one in value[:EXAMPLES]]
        return shortened(value, 200) if isinstance(value, str) else value

    return {name: short(value) for name, value in row.items()}


# --- rows on their way: the stored columns, and split, number, id and digest of each


def _table(source: Source, package: str, rows: Iterable[tuple[int, Mapping[str, Any]]]) -> pa.Table:
    schema = SCHEMAS[KIND[source.role]]
    for name, kind in _EXTRA.items():
        schema = schema.append(pa.field(name, kind))
    batches, held, size = [], [], 0
    for number, row in rows:
        stored = _stored(source, row, package)
        encoded = json.dumps(stored, sort_keys=True).encode()
        digest = hashlib.blake2b(encoded, digest_size=16).digest()
        held.append(stored | {"split": row["split"], "number": number, "id": row.get("id"), "digest": digest})
        size += len(encoded)
        if len(held) == BATCH_ROWS or size > BATCH_BYTES:
            batches.append(pa.RecordBatch.from_pylist(held, schema))
            held, size = [], 0
    return pa.Table.from_batches([*batches, pa.RecordBatch.from_pylist(held, schema)])


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


def _package(source: Source, unit: Unit) -> str:
    return source.repo or Path(unit.file).name


# --- from units to tables


def _fill(tables: _Tables, source: Source, dropped: Counter[str], workers: int) -> bool:
    """Writes all rows of a source, and returns whether that is all."""
    pieces, layout = units(source), layout_of(source)
    if not pieces:  # files without rows
        return True
    if layout == "text":
        return _fill_sample(tables, source, pieces, dropped)
    if layout in ("flat", "joined"):
        gather = gather_flat if layout == "flat" else gather_joined
        documents = enumerate(gather(source, pieces, dropped))
        tables.write(_table(source, _package(source, pieces[0]), documents))
        return True
    seen: dict[bytes, tuple[int, int]] = {}  # id → unit and row; digests, because there may be many
    with closing(in_order(partial(_read_unit, source), pieces, range(len(pieces)), workers)) as read:
        bar = tqdm(read, f"reading {source.name}", len(pieces), unit="part", delay=2, leave=False)
        for i, (rows, counted) in enumerate(bar):
            dropped.update(counted)
            has_id = "id" in source.columns
            tables.write(_distinct(source, rows, i, pieces, seen, dropped) if has_id else rows)
            if tables.full:  # the rest is neither trained on nor held out
                return False
    return True


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


def _distinct(
    source: Source,
    rows: pa.Table,
    unit: int,
    pieces: Sequence[Unit],
    seen: dict[bytes, tuple[int, int]],
    dropped: Counter[str],
) -> pa.Table:
    """The rows whose id no earlier row has."""
    keep = []
    for name, number in zip(rows["id"].to_pylist(), rows["number"].to_pylist(), strict=True):
        digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
        first = seen.setdefault(digest, (unit, number))
        keep.append(first == (unit, number))
        if not keep[-1]:
            refuse_duplicate(source, name, pieces[unit], number, (pieces[first[0]], first[1]), dropped)
    return rows.filter(pa.array(keep, pa.bool_()))


def _read_unit(source: Source, unit: Unit) -> tuple[pa.Table, Counter[str]]:
    dropped: Counter[str] = Counter()
    return _table(source, _package(source, unit), numbered(source, unit, dropped)), dropped
