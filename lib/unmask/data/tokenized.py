"""What a training reads: text as blocks of equal length, pairs and documents cut to a stage's lengths, all of
it tokenised once and mapped into memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from unmask.data import prepare, reading, tokens
from unmask.data.batches import permuted
from unmask.data.files import identity
from unmask.data.prepare import Column, Prepared, Ragged, ends_of
from unmask.data.reading import Unit, units
from unmask.data.registry import Source
from unmask.data.tokens import StoredTokenizer, cut, encode
from unmask.store import artifacts_root, code_fingerprint, fingerprint

Around = tuple[str, str]  # text before and after another
UNIT_BYTES = 1 << 20  # of a table: half a second of work, so that workers end together
_CODE = (__file__, reading.__file__, tokens.__file__)  # what the tokens depend on


# --- blocks of text


@dataclass(frozen=True)
class Part:
    """The blocks of one source: `count` of them, out of the first `distinct` blocks of its tokens."""

    source: Source
    prepared: Prepared
    tokens: np.ndarray
    count: int
    distinct: int


class Blocks:
    """Blocks of text in the sources' shares, like an integer array (N, L) that no memory holds.

    The texts of a source lie in one file of tokens, one after the other, with `<|endoftext|>` after each.
    Block i of length L is the slice [iL, (i + 1)L), so one file serves every length. Blocks are not isolated
    from one another where two texts meet, as in the paper's packing to 4,096 tokens. Blocks of a source stand
    together, in a random order; a source with too few of them repeats, in a new order each time.

    Args:
        parts: the sources' blocks.
        length: tokens per block.
        seed: of the order.
    """

    def __init__(self, parts: Sequence[Part], length: int, seed: int):
        self.parts, self._seed = tuple(parts), seed
        self._ends = np.cumsum([part.count for part in parts])
        self.shape = (int(self._ends[-1]), length)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        """The blocks of these numbers: (B, L), in the type of the tokens."""
        rows = np.asarray(rows, np.int64)
        length = self.shape[1]
        blocks_BL = np.empty((len(rows), length), self.parts[0].tokens.dtype)
        owner = np.searchsorted(self._ends, rows, side="right")
        for number in np.unique(owner):
            part, own = self.parts[number], np.flatnonzero(owner == number)
            epochs, places = np.divmod(rows[own] - (self._ends[number] - part.count), part.distinct)
            for epoch in np.unique(epochs):
                now = epochs == epoch
                order = permuted(places[now], part.distinct, [self._seed, int(number), int(epoch)])
                for row, block in zip(own[now], order.tolist(), strict=True):
                    blocks_BL[row] = part.tokens[block * length : (block + 1) * length]
        return blocks_BL

    def report(self) -> list[dict[str, Any]]:
        """For each source: its share of the blocks in percent, how often it is repeated, what is in its
        texts and what was left out of them."""
        return [
            {
                "source": part.source.name,
                "language": part.source.language,
                "share": 100 * part.count / len(self),
                "blocks": part.count,
                "epochs": part.count / part.distinct if part.distinct else 0.0,
                "unused tokens": len(part.tokens) - part.distinct * self.shape[1],
                **part.prepared.counters,
            }
            for part in self.parts
        ]


def open_blocks(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int,
    wanted: int,
    seed: int,
    workers: int | None = None,
) -> Blocks:
    """Blocks of the sources' training texts, tokenised on first use and no further than is wanted.

    Where the sources have shares, there are exactly `wanted` blocks, divided by largest remainder. Where they
    have none, every source is tokenised to its end and gives blocks in proportion to what it has, `wanted` or
    all there are.

    Args:
        length: tokens per block.
        wanted: blocks of the whole training.
        seed: of their order.
        workers: processes that tokenise; default: one per core.
    Raises: ValueError if there is no text, or less of a source than a block.
    """
    if not sources:
        raise ValueError("the corpus has no text for pretraining: add a source of role text")
    stored = StoredTokenizer.of(tokenizer)
    shares = [source.share for source in sources if source.share is not None]
    if shares:
        counts = limits = largest_remainder(shares, wanted)
    else:
        limits = [wanted] if len(sources) == 1 else [None] * len(sources)
    prepared = [
        prepare_text(source, stored, wanted=None if limit is None else limit * length, workers=workers)
        for source, limit in zip(sources, limits, strict=True)
    ]
    have = [one.counters.get("tokens", 0) // length for one in prepared]
    if not shares:
        counts = largest_remainder(have, min(wanted, sum(have)))
    parts = []
    for source, one, count, there in zip(sources, prepared, counts, have, strict=True):
        if not there and (count or not shares):
            raise ValueError(
                f"source {source.name!r} has {one.counters.get('tokens', 0)} tokens of training text, not "
                f"one block of {length}: give it more text, or leave it out"
            )
        column = one.column("tokens") if "tokens" in one.files else np.empty(0, stored.dtype)
        parts.append(Part(source, one, column, count, min(count, there)))
    return Blocks(parts, length, seed)


def largest_remainder(weights: Sequence[float], total: int) -> list[int]:
    """`total` divided in proportion to the weights, each part within one of its exact share."""
    exact = np.asarray(weights, np.float64) / max(np.sum(weights), 1e-9) * total
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: total - counts.sum()]] += 1
    return counts.tolist()


def prepare_text(
    source: Source, stored: StoredTokenizer, *, wanted: int | None = None, workers: int | None = None
) -> Prepared:
    """The training texts of a source as one column "tokens"; `wanted` tokens of them or all.

    Pieces of the source are taken in a random order, so that a part of a source is like the whole. Where they
    are prepared already, the source is not listed again.
    """
    folder = _folder("text", identity(source), stored.hash)
    done = Prepared.read(folder)
    if done.suffices(wanted):
        return done
    pieces = units(source)
    order = permuted(np.arange(len(pieces)), len(pieces), 0) if pieces else []
    return prepare.build(
        folder, [pieces[i] for i in order], TextWork(source, stored),
        wanted=wanted, workers=workers, title=f"tokenising {source.name}",
    )  # fmt: skip


@dataclass(frozen=True)
class TextWork:
    """Tokenises a piece of a text source."""

    source: Source
    stored: StoredTokenizer

    def __call__(self, unit: Unit) -> tuple[dict[str, Column], Counter[str]]:
        counters, dropped = Counter(), Counter()

        def texts() -> Iterator[str]:
            for row in reading.read(self.source, unit, dropped):
                counters["texts" if row["split"] == "train" else "held out"] += 1
                if row["split"] == "train":
                    yield row["text"]

        end = np.array([self.stored.end], self.stored.dtype)
        encoded = encode(self.stored.load(), texts(), self.stored.dtype)
        values = np.concatenate([end[:0], *(part for ids in encoded for part in (ids, end))])
        counters["tokens"] = len(values)
        counters.update({f"dropped: {reason}": count for reason, count in dropped.items()})
        return {"tokens": values}, counters


def _folder(kind: str, *key: Any) -> Path:
    name = f"{kind}-{fingerprint(*key, code_fingerprint(*_CODE))}"
    return artifacts_root() / "data" / "prepared" / name


# --- pairs and documents


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
    query = _Cut(name, stored, query_length, around_query)
    document = _Cut(name, stored, document_length, around_document)
    for what, kind in (("query_length", query), ("document_length", document)):
        taken = sum(map(len, encode(stored.load(), kind.around, stored.dtype)))
        if kind.length <= taken:
            raise ValueError(
                f"{what} is {kind.length} tokens, of which what is put around a text takes {taken}: raise it "
                f"(data set {name!r}, around {kind.around})"
            )
    columns = ["query", "document", "key", *(["negatives"] if negatives else [])]
    done = _tokenised(rows.select_columns(columns), PairWork(query, document, negatives), identity, workers)
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
    work = DocumentWork(_Cut(name, stored, query_length), _Cut(name, stored, chunk_length), chunks)
    done = _tokenised(rows.select_columns(["chunks", "queries", "golds"]), work, identity, workers)
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


class _Table(Sequence):
    """A table in pieces of about UNIT_BYTES: the number of its first row, and its columns."""

    def __init__(self, rows: Dataset):
        bytes_per_row = rows.data.nbytes / max(rows.data.num_rows, 1)
        self._rows, self._step = rows, max(1, int(UNIT_BYTES / max(bytes_per_row, 1)))

    def __len__(self) -> int:
        return -(-len(self._rows) // self._step)

    def __getitem__(self, index: int) -> tuple[int, dict[str, list]]:
        start = index * self._step
        return start, self._rows[start : start + self._step]


def _tokenised(rows: Dataset, work: PairWork | DocumentWork, identity: str, workers: int | None) -> Prepared:
    title, folder = f"tokenising {work.query.name}", _folder(*work.key, identity)
    return prepare.build(folder, _Table(rows), work, workers=workers, title=title)


@dataclass(frozen=True)
class _Cut:
    """Tokenises texts of one kind and cuts them."""

    name: str  # of the data set
    stored: StoredTokenizer
    length: int
    around: Around = ("", "")

    def __call__(self, texts: Sequence[str], places: Sequence[str], counters: Counter[str]) -> Ragged:
        """Token ids of each text and what is around it; `places` says in a message where it stands."""
        tokenizer, dtype, arrays = self.stored.load(), self.stored.dtype, []
        (end,) = encode(tokenizer, self.around[1:], dtype)
        encoded = encode(tokenizer, texts, dtype, around=self.around)
        for text, place, ids in zip(texts, places, encoded, strict=True):
            if not (text and len(ids)):
                raise ValueError(
                    f"data set {self.name!r}, {place} has no tokens: {text!r}. Remove or fill it."
                )
            if len(ids) > self.length:
                counters["texts cut"] += 1
                counters["tokens cut"] += len(ids) - self.length
            arrays.append(cut(ids, self.length, end))
        counters["tokens"] += sum(map(len, arrays))
        return Ragged.of(arrays, dtype)

    def lists(self, lists: Sequence[Sequence[str]], places: Sequence[str], counters: Counter[str]) -> Ragged:
        """The same for lists of texts, with a place for each list."""
        texts = [text for part in lists for text in part]
        where = [place for place, part in zip(places, lists, strict=True) for _ in part]
        return Ragged(self(texts, where, counters), ends_of([*map(len, lists)]))

    @property
    def key(self) -> list:
        """What the tokens depend on, beside the texts."""
        return [self.name, self.stored.hash, self.length, self.around]


@dataclass(frozen=True)
class PairWork:
    """Tokenises rows of a table of pairs or triplets."""

    query: _Cut
    document: _Cut
    negatives: int

    @property
    def key(self) -> list:
        return ["pairs", self.query.key, self.document.key, self.negatives]

    def __call__(self, unit: tuple[int, dict[str, list]]) -> tuple[dict[str, Column], Counter[str]]:
        start, table = unit
        counters, rows = Counter(), range(len(table["key"]))
        if self.negatives:
            rows = [row for row in rows if len(table["negatives"][row]) >= self.negatives]
            counters["rows with too few negatives"] = len(table["key"]) - len(rows)
        own = {name: [column[row] for row in rows] for name, column in table.items()}

        def places(what: str) -> list[str]:
            return [f"row {start + row}: {what}" for row in rows]

        found: dict[str, Column] = {
            "queries": self.query(own["query"], places("its query"), counters),
            "documents": self.document(own["document"], places("its document"), counters),
            "keys": np.array([_hash(key) for key in own["key"]], np.uint64),
        }
        if self.negatives:
            first = [texts[: self.negatives] for texts in own["negatives"]]
            found["negatives"] = self.document.lists(first, places("a negative"), counters)
        counters["rows"] = len(rows)
        return found, counters


@dataclass(frozen=True)
class DocumentWork:
    """Tokenises rows of a table of documents, at most so many chunks in each."""

    query: _Cut
    chunk: _Cut
    chunks: int

    @property
    def key(self) -> list:
        return ["documents", self.query.key, self.chunk.key, self.chunks]

    def __call__(self, unit: tuple[int, dict[str, list]]) -> tuple[dict[str, Column], Counter[str]]:
        start, table = unit
        counters = Counter()

        def lists(name: str, kind: _Cut) -> Ragged:
            places = [f"row {start + row}: one of its {name}" for row in range(len(table[name]))]
            return kind.lists(table[name], places, counters)

        windows: list[TokenDocument] = []
        columns = lists("chunks", self.chunk), lists("queries", self.query), table["golds"]
        for chunks, queries, golds in zip(*columns, strict=True):
            counters["documents divided"] += len(chunks) > self.chunks
            for first in range(0, len(chunks), self.chunks):
                part, asked = chunks[first : first + self.chunks], np.array(golds) - first
                near = np.flatnonzero((asked >= 0) & (asked < self.chunks))
                if len(near):
                    windows.append(TokenDocument(part, [queries[i] for i in near], asked[near]))
                else:
                    counters["chunks without a query near them"] += len(part)
        counters["rows"] = len(windows)
        golds = Ragged.of([window.golds for window in windows], np.int32)
        parts = {name: self._nested([getattr(w, name) for w in windows]) for name in ("chunks", "queries")}
        return parts | {"golds": golds}, counters

    def _nested(self, lists: Sequence[Sequence[np.ndarray]]) -> Ragged:
        rows = Ragged.of([ids for part in lists for ids in part], self.chunk.stored.dtype)
        return Ragged(rows, ends_of([*map(len, lists)]))


def _hash(key: str) -> int:
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest())
