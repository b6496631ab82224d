"""Pairs and documents as token ids: tokenised once, cut to a stage's lengths, mapped into memory."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from unmask.data import prepare, tokens
from unmask.data.batches import permuted
from unmask.data.prepare import Column, Prepared, Ragged, ends_of
from unmask.data.tokens import StoredTokenizer, cut, encode
from unmask.store import artifacts_root, fingerprint

if TYPE_CHECKING:
    from datasets import Dataset

Around = tuple[str, str]  # text before and after another
UNIT_BYTES = 1 << 20  # of a table: half a second of work
_CODE = (__file__, tokens.__file__)  # what the tokens depend on


@dataclass(frozen=True)
class TokenPairs:
    """A tokenised data set of pairs; `negatives` hold hard negatives per query where there are any.

    Rows with the same key are the same thing. `counters` say what was cut or left out; `identity` is a
    hash of all of it.
    """

    queries: Sequence[np.ndarray]
    documents: Sequence[np.ndarray]
    keys: Sequence | np.ndarray
    negatives: Sequence[Sequence[np.ndarray]] | None = None
    counters: Mapping[str, int] = field(default_factory=dict)
    identity: str = ""


@dataclass(frozen=True)
class TokenDocument:
    """A tokenised document with its queries."""

    chunks: list[np.ndarray]
    queries: list[np.ndarray]
    golds: list[int]


@dataclass(frozen=True)
class TokenDocuments(Sequence):
    """Tokenised documents, each made when it is asked for; `counters` and `identity` as in `TokenPairs`."""

    chunks: Ragged
    queries: Ragged
    golds: Ragged
    counters: Mapping[str, int] = field(default_factory=dict)
    identity: str = ""

    def __len__(self) -> int:
        return len(self.golds)

    def __getitem__(self, row: int) -> TokenDocument:
        return TokenDocument(self.chunks[row], self.queries[row], self.golds[row].tolist())


def token_pairs(
    rows: Dataset,
    stored: StoredTokenizer,
    *,
    name: str,
    identity: str,
    query_length: int,
    document_length: int,
    negatives: int = 0,
    around_query: Around = ("", ""),
    around_document: Around = ("", ""),
    workers: int | None = None,
) -> TokenPairs:
    """A data set of pairs, tokenised on first use.

    Args:
        rows: columns query, document, key, and negatives (lists) if any are wanted.
        name: of the data set, for messages.
        identity: of the rows; the same identity must mean the same rows.
        query_length, document_length: tokens, at most; what is longer is cut.
        negatives: hard negatives per query; rows with fewer are left out, of more the first are taken.
        around_query, around_document: text put before and after each query, and each document and negative:
            an instruction, or a token of the end. It counts for the length, and is not cut.
        workers: processes that tokenise; default: one per core.
    Raises: ValueError naming data set and row of a text without tokens, if no row has enough negatives, or if
        a length leaves no room beside what is put around.
    """
    work = PairWork(name, stored, query_length, document_length, negatives, around_query, around_document)
    for what, length, around in (
        ("query_length", query_length, around_query),
        ("document_length", document_length, around_document),
    ):
        taken = sum(map(len, encode(stored.load(), around, stored.dtype)))
        if length <= taken:
            raise ValueError(
                f"{what} is {length} tokens, of which what is put around a text takes {taken}: raise it "
                f"(data set {name!r}, around {around})"
            )
    columns = ["query", "document", "key", *(["negatives"] if negatives else [])]
    done = _build(rows.select_columns(columns), work, identity, workers)
    if negatives and done.counters.get("rows", 0) == 0:
        raise ValueError(
            f"no row of data set {name!r} has {negatives} negatives: ask for fewer or leave it out"
        )
    hard = done.column("negatives") if negatives else None
    columns = (done.column(name) for name in ("queries", "documents", "keys"))
    return TokenPairs(*columns, hard, done.counters, done.hash)


def token_documents(
    rows: Dataset,
    stored: StoredTokenizer,
    *,
    name: str,
    identity: str,
    query_length: int,
    chunk_length: int,
    chunks: int,
    workers: int | None = None,
) -> TokenDocuments:
    """Documents with their queries, tokenised on first use; see `token_pairs`.

    A document of more than `chunks` chunks becomes several, each with the queries that its chunks answer; one
    without any query is left out.
    """
    work = DocumentWork(name, stored, query_length, chunk_length, chunks)
    done = _build(rows.select_columns(["chunks", "queries", "golds"]), work, identity, workers)
    columns = (done.column(name) for name in ("chunks", "queries", "golds"))
    return TokenDocuments(*columns, done.counters, done.hash)


def single_chunks(
    rows: Dataset, stored: StoredTokenizer, *, count: int, seed: int, identity: str, **options: Any
) -> TokenDocuments:
    """Up to `count` random pairs of a data set, no two of one key, as documents of one chunk.

    Args:
        count: documents; fewer if the data set has fewer keys.
        seed: of the draw.
        identity: of the rows.
        options: `name`, `query_length`, `document_length` and `workers` of `token_pairs`.
    """
    drawn = rows.select(distinct_rows(rows, count, seed))
    pairs = token_pairs(drawn, stored, identity=fingerprint(identity, count, seed), **options)
    one_each = np.arange(1, len(pairs.keys) + 1)
    golds = np.zeros(len(pairs.keys), np.int32)
    parts = (Ragged(part, one_each) for part in (pairs.documents, pairs.queries, golds))
    return TokenDocuments(*parts, pairs.counters, pairs.identity)


def distinct_rows(rows: Dataset, count: int, seed: int) -> list[int]:
    """Up to `count` random row numbers in ascending order, no two with the same key."""
    keys, found = rows.select_columns(["key"]), {}
    for start in range(0, len(rows), count):
        drawn = permuted(np.arange(start, min(start + count, len(rows))), len(rows), seed)
        for row, key in zip(drawn.tolist(), keys.select(drawn)["key"], strict=True):
            if len(found) < count:
                found.setdefault(key, row)
        if len(found) == count:
            break
    return sorted(found.values())


@dataclass(frozen=True)
class Rows:
    """Some rows of a table, on their way to another process."""

    start: int  # number of the first one in its data set
    stream: bytes  # Arrow IPC

    def columns(self) -> dict[str, list]:
        return pa.ipc.open_stream(self.stream).read_all().to_pydict()


class _Table(Sequence):
    """A table in pieces of about UNIT_BYTES, each read when it is asked for."""

    def __init__(self, rows: Dataset):
        self._rows = rows.with_format("arrow")
        bytes_per_row = rows.data.nbytes / max(rows.data.num_rows, 1)
        self._step = max(1, int(UNIT_BYTES / max(bytes_per_row, 1)))

    def __len__(self) -> int:
        return -(-len(self._rows) // self._step)

    def __getitem__(self, index: int) -> Rows:
        start = index * self._step
        piece = self._rows[start : start + self._step]
        stream = io.BytesIO()
        with pa.ipc.new_stream(stream, piece.schema) as writer:
            writer.write_table(piece)
        return Rows(start, stream.getvalue())


def _build(rows: Dataset, work: _TokenWork, identity: str, workers: int | None) -> Prepared:
    code = [Path(file).read_text(encoding="utf8") for file in _CODE]
    folder = artifacts_root() / "data" / "prepared" / f"{work.kind}-{fingerprint(identity, work.key, code)}"
    return prepare.build(folder, _Table(rows), work, workers=workers, title=f"tokenising {work.name}")


@dataclass(frozen=True)
class _TokenWork:
    name: str  # of the data set
    stored: StoredTokenizer
    query_length: int
    document_length: int

    kind = "rows"

    @property
    def key(self) -> list:
        """What the tokens depend on, beside the rows."""
        own = [value for key, value in vars(self).items() if key != "stored"]
        return [self.kind, self.stored.hash, *own]

    def cut(
        self, texts: Sequence[str], length: int, places: Sequence[str], counters: Counter[str],
        around: Around = ("", ""),
    ) -> list[np.ndarray]:  # fmt: skip
        """Token ids of each text and what is around it, at most `length`; `places` says in a message where it
        stands."""
        tokenizer, dtype, arrays = self.stored.load(), self.stored.dtype, []
        (end,) = encode(tokenizer, around[1:], dtype)
        for text, place, ids in zip(
            texts, places, encode(tokenizer, texts, dtype, around=around), strict=True
        ):
            if not (text and len(ids)):
                raise ValueError(
                    f"data set {self.name!r}, {place} has no tokens: {text!r}. Remove or fill it."
                )
            if len(ids) > length:
                counters["texts cut"] += 1
                counters["tokens cut"] += len(ids) - length
            arrays.append(cut(ids, length, end))
        counters["tokens"] += sum(map(len, arrays))
        return arrays

    def ragged(self, arrays: Sequence[np.ndarray]) -> Ragged:
        return Ragged.of(arrays, self.stored.dtype)

    def nested(self, lists: Sequence[Sequence[np.ndarray]]) -> Ragged:
        return Ragged(self.ragged([ids for part in lists for ids in part]), ends_of([*map(len, lists)]))


@dataclass(frozen=True)
class PairWork(_TokenWork):
    """Tokenises rows of a table of pairs or triplets."""

    negatives: int = 0
    around_query: Around = ("", "")
    around_document: Around = ("", "")

    kind = "pairs"

    def __call__(self, unit: Rows) -> tuple[dict[str, Column], Counter[str]]:
        counters, table = Counter(), unit.columns()
        rows = range(len(table["key"]))
        if self.negatives:
            rows = [row for row in rows if len(table["negatives"][row]) >= self.negatives]
            counters["rows with too few negatives"] = len(table["key"]) - len(rows)

        def columns(name: str, length: int, around: Around) -> Ragged:
            places = [f"row {unit.start + row}: its {name}" for row in rows]
            texts = [table[name][row] for row in rows]
            return self.ragged(self.cut(texts, length, places, counters, around))

        found: dict[str, Column] = {
            "queries": columns("query", self.query_length, self.around_query),
            "documents": columns("document", self.document_length, self.around_document),
            "keys": np.array([_hash(table["key"][row]) for row in rows], np.uint64),
        }
        if self.negatives:
            flat = [text for row in rows for text in table["negatives"][row][: self.negatives]]
            places = [f"row {unit.start + row}: a negative" for row in rows for _ in range(self.negatives)]
            own = iter(self.cut(flat, self.document_length, places, counters, self.around_document))
            found["negatives"] = self.nested([[next(own) for _ in range(self.negatives)] for _ in rows])
        counters["rows"] = len(rows)
        return found, counters


@dataclass(frozen=True)
class DocumentWork(_TokenWork):
    """Tokenises rows of a table of documents; `document_length` is that of a chunk."""

    chunks: int = 0  # per document, at most

    kind = "documents"

    def __call__(self, unit: Rows) -> tuple[dict[str, Column], Counter[str]]:
        counters, table = Counter(), unit.columns()

        def flat(name: str, length: int) -> Iterator[np.ndarray]:
            own = [(row, text) for row, texts in enumerate(table[name]) for text in texts]
            places = [f"row {unit.start + row}: one of its {name}" for row, _ in own]
            return iter(self.cut([text for _, text in own], length, places, counters))

        chunks, queries = flat("chunks", self.document_length), flat("queries", self.query_length)
        windows: list[TokenDocument] = []
        for texts, golds in zip(table["chunks"], table["golds"], strict=True):
            own = [next(chunks) for _ in texts]
            asked = [(next(queries), gold) for gold in golds]
            counters["documents divided"] += len(own) > self.chunks
            for start in range(0, len(own), self.chunks):
                part = own[start : start + self.chunks]
                if near := [(ids, gold - start) for ids, gold in asked if 0 <= gold - start < self.chunks]:
                    windows.append(TokenDocument(part, *map(list, zip(*near, strict=True))))
                else:
                    counters["chunks without a query near them"] += len(part)
        counters["rows"] = len(windows)
        golds = Ragged.of([np.array(window.golds, np.int32) for window in windows], np.int32)
        parts = {name: self.nested([getattr(w, name) for w in windows]) for name in ("chunks", "queries")}
        return parts | {"golds": golds}, counters


def _hash(key: str) -> int:
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest())
