"""What a training reads, as token ids: text in blocks of equal length, pairs and documents cut to a stage's
lengths.

    rows of a source or a table → shards, Arrow files → memory-mapped columns → the rows of a step (`batches`)

Everything is tokenised once, by the tokenizer's own threads. A shard holds a piece of a source or some
thousand rows of a table. It is whole or absent, so a killed process goes on with the first that is missing.
Its counters, of what was cut and left out, are metadata of its schema.

Shape suffixes: N blocks or rows · B blocks of a batch · L tokens of a block · K keys of a row.
"""

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from datasets import Dataset
from pyarrow import feather
from tqdm.auto import tqdm

from unmask.config import ContextualConfig, PretrainConfig
from unmask.data import rows as source_rows
from unmask.data import spelling, tokens
from unmask.data.batches import parts, permuted, shuffled
from unmask.data.registry import Source
from unmask.data.spelling import text_id, without_held
from unmask.data.tokens import PlainTokenizer, Truncation, encode, joined
from unmask.store import artifacts_root, code_fingerprint, fingerprint, hash64, locked, preparing, replacing

ROWS = 16_384  # of a table in a shard


class Shards(NamedTuple):
    """The shards of a folder from the first on, mapped into memory."""

    folder: Path
    tables: Sequence[pa.Table]

    @classmethod
    def open(cls, folder: Path) -> "Shards":
        """Opens them up to the first that is missing, or cut short, as after a power failure."""
        tables = []
        try:
            while True:
                tables.append(feather.read_table(folder / f"{len(tables):05}.arrow", memory_map=True))
        except (FileNotFoundError, pa.ArrowInvalid):
            return cls(folder, tables)

    @property
    def counters(self) -> Counter[str]:
        counters = (json.loads(table.schema.metadata[b"counters"]) for table in self.tables)
        return sum(map(Counter, counters), Counter())

    def column(self, name: str) -> pa.ChunkedArray:
        return pa.concat_tables(self.tables)[name] if self.tables else pa.chunked_array([[]])


def build(folder: Path, pieces: Callable, tokenise: Callable, name: str, wanted: float = math.inf) -> Shards:
    """Writes a shard for each piece that has none, in their order.

    Of several processes that need the same folder one works, and the others wait for it.

    Args:
        folder: its name must identify pieces and tokenizer.
        pieces: lists them, where there are not enough tokens yet.
        tokenise: makes a table of a piece, with "counters" in its metadata.
        name: of the data, for messages.
        wanted: tokens to stop at; a later call goes on from there. Default: all pieces.
    Raises: what `tokenise` raises; the shards before it stay.
    """
    done = Shards.open(folder)
    if done.counters["tokens"] >= wanted or len(done.tables) == (total := len(pieces := pieces())):
        return done
    preparing(f"tokens of {name}")
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f"{folder.name}.lock")):
        first, count = len((done := Shards.open(folder)).tables), done.counters["tokens"]
        bar = tqdm(
            pieces[first:], f"tokenising {name}", total, initial=first, delay=2, leave=False, file=sys.stdout
        )
        for number, piece in enumerate(bar, first):
            if count >= wanted:
                break
            table = tokenise(piece)
            with replacing(folder / f"{number:05}.arrow") as path:
                feather.write_feather(table, path, compression="uncompressed", chunksize=max(1, len(table)))
            count += json.loads(table.schema.metadata[b"counters"])["tokens"]
    return Shards.open(folder)


def _folder(kind: str, *key: Any) -> Path:
    code = code_fingerprint(__file__, source_rows.__file__, spelling.__file__, tokens.__file__)
    return artifacts_root() / "data" / "prepared" / f"{kind}-{fingerprint(*key, code)}"


# --- blocks of text


@dataclass(frozen=True)
class Blocks:
    """Blocks of text in the sources' shares: N rows of L tokens that no memory holds.

    The texts of a source are one stream of tokens, with `<|endoftext|>` after each text. Block i of length L
    is the slice [iL, (i + 1)L), so one stream serves every length. Blocks are not isolated from one another
    where two texts meet. Blocks of a source stand together, in a random order; a source with too few of them
    repeats, in a new order each time.
    """

    streams: Sequence[pa.ChunkedArray]  # the tokens of each source
    length: int  # L
    source_N: np.ndarray  # of each block
    place_N: np.ndarray  # i of each block
    # For each source: its share of the blocks in percent, how often it is repeated, and its counters.
    report: list[dict[str, Any]]

    def __len__(self) -> int:
        return len(self.source_N)

    def __getitem__(self, rows_B: np.ndarray) -> np.ndarray:
        """The blocks of these numbers: (B, L), in the type of the tokens."""
        starts_B = self.place_N[rows_B] * self.length
        blocks = zip(self.source_N[rows_B], starts_B.tolist(), strict=True)
        return np.stack([self.streams[at].slice(start, self.length).to_numpy() for at, start in blocks])


def open_blocks(sources: Sequence[Source], tokenizer: PlainTokenizer, config: PretrainConfig) -> Blocks:
    """Blocks of the sources' training texts, tokenised on first use and no further than is wanted.

    Where the sources have shares, there are exactly as many blocks as the training reads, divided by largest
    remainder. Several sources without shares are each tokenised to their end and give blocks in proportion to
    what they have, as many as the training reads or all there are.

    Args:
        config: its `length` is that of a block, its steps and batch are the training's, and its seed is that
            of the blocks' order.
    Raises: ValueError if there is less of a source than a block.
    """
    length, wanted, shared = config.length, config.steps * config.batch, sources[0].share is not None
    counts = largest_remainder([source.share or 1.0 for source in sources], wanted)
    limits = [count * length if shared or len(sources) == 1 else math.inf for count in counts]
    shards = [tokenise_text(source, tokenizer, limit) for source, limit in zip(sources, limits, strict=True)]
    sizes = [done.counters["tokens"] // length for done in shards]  # in blocks
    if not shared:
        counts = largest_remainder(sizes, min(wanted, sum(sizes)))
    places, report = [], []
    for number, (source, done, size, count) in enumerate(zip(sources, shards, sizes, counts, strict=True)):
        if not size and (count or not shared):
            has = f"source {source.name!r} has {done.counters['tokens']} tokens of training text"
            remedy = "give more text or a smaller length, or leave it out"
            raise ValueError(f"{has}, not one block of {length}: {remedy}")
        size = max(1, min(size, count))
        seeds = ([config.seed, number, epoch] for epoch in range(max(1, -(-count // size))))
        places += [np.concatenate([permuted(np.arange(size), size, seed) for seed in seeds])[:count]]
        row = {"source": source.name, "language": source.language, "share": 100 * count / sum(counts)}
        report.append(row | {"blocks": count, "epochs": count / size, **done.counters})
    streams = [done.column("tokens") for done in shards]
    return Blocks(streams, length, np.repeat(np.arange(len(sources)), counts), np.concatenate(places), report)


def largest_remainder(weights: Sequence[float], total: int) -> list[int]:
    """`total` divided in proportion to the weights, each part within one of its exact share."""
    exact = np.asarray(weights, np.float64) / max(np.sum(weights), 1e-9) * total
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: total - counts.sum()]] += 1
    return counts.tolist()


def tokenise_text(source: Source, tokenizer: PlainTokenizer, wanted: float) -> Shards:
    """The training texts of a source as one stream of tokens; `wanted` tokens of them, or all.

    Pieces of the source are taken in a random order, so that a part of a source is like the whole; a file
    that is neither Parquet nor Arrow is one piece.
    """
    folder = _folder("text", source_rows.content_hash(source), tokenizer.hash)
    work = partial(_tokenise_piece, source, tokenizer)
    return build(folder, lambda: shuffled(source_rows.units(source)), work, source.name, wanted)


def _tokenise_piece(source: Source, tokenizer: PlainTokenizer, piece: source_rows.Unit) -> pa.Table:
    counters, dropped = Counter(), Counter()

    def texts() -> Iterator[str]:
        for row in source_rows.read(source, piece, dropped):
            training = row["split"] == "train"
            counters["texts" if training else "held out"] += 1
            if training:
                yield row["text"]

    ids = joined(tokenizer, texts())
    counters.update(tokens=len(ids), **{f"dropped: {reason}": count for reason, count in dropped.items()})
    return pa.table({"tokens": ids}, metadata={"counters": json.dumps(counters)})


# --- pairs and documents


class Table(NamedTuple):
    """A data set before it is tokenised, and what it is to be tokenised with."""

    rows: Dataset
    name: str
    rows_hash: str  # the same hash must mean the same rows
    tokenizer: PlainTokenizer
    held_out: np.ndarray = np.empty(0, np.uint64)  # texts, see `Corpus.held_out`


@dataclass(frozen=True)
class Lists(Sequence):
    """A column of lists, mapped into memory: a row is an array, or a list of arrays."""

    column: pa.ChunkedArray

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, row: int) -> Any:
        values = self.column[int(row)].values
        nested = pa.types.is_list(values.type)
        return [ids.values.to_numpy() for ids in values] if nested else values.to_numpy()

    @property
    def values(self) -> pa.ChunkedArray:
        """What the lists of all rows hold, one after the other."""
        chunks = [chunk.flatten() for chunk in self.column.chunks]
        return pa.chunked_array(chunks, self.column.type.value_type)


@dataclass(frozen=True)
class TokenPairs:
    """A tokenised data set of pairs; `negatives` are hard negatives per query where there are any.

    `keys` are as `BatchPlan` takes them: key, query and document of each row by `text_id`, as are
    `negative_keys` of its negatives. `counters` say what was cut or left out; `hash` is that of all of it.
    """

    queries: Sequence[np.ndarray]
    documents: Sequence[np.ndarray]
    keys: Sequence | np.ndarray
    negatives: Sequence[Sequence[np.ndarray]] | None = None
    negative_keys: Sequence[np.ndarray] | None = None
    counters: Mapping[str, int] = field(default_factory=dict)
    hash: str = ""


class TokenDocument(NamedTuple):
    """A tokenised document with its queries."""

    chunks: list[np.ndarray]
    queries: list[np.ndarray]
    golds: list[int]


@dataclass(frozen=True)
class TokenDocuments(Sequence):
    """Tokenised documents, each made on access; `keys` and `counters` as in `TokenPairs`."""

    chunks: Lists
    queries: Lists
    golds: Lists
    keys: np.ndarray
    counters: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.golds)

    @property
    def query_count(self) -> int:
        return len(self.golds.values)

    def __getitem__(self, row: int) -> TokenDocument:
        return TokenDocument(self.chunks[row], self.queries[row], self.golds[row].tolist())


def token_pairs(table: Table, query: Truncation, document: Truncation, negatives: int = 0) -> TokenPairs:
    """A data set of pairs, tokenised on first use.

    Args:
        table: columns query, document, key, and negatives (lists) if any are wanted.
        document: of each document and each negative.
        negatives: hard negatives per query at most; of more the first are taken, rows with none left out.
    Raises: ValueError naming data set and row of a text without tokens; if a length leaves no room beside
        prefix and suffix.
    """
    lengths = {"queries": query, "chunks": document} | ({"negatives": document} if negatives else {})
    done = _tokenised(table, lengths, 1, negatives)
    queries, documents = (Lists(Lists(done.column(name)).values) for name in ("queries", "chunks"))
    hard = [Lists(done.column(name)) if negatives else None for name in ("negatives", "negative_keys")]
    return TokenPairs(queries, documents, _keys(done), *hard, done.counters, done.folder.name)


def token_documents(table: Table, config: ContextualConfig) -> TokenDocuments:
    """Documents with their queries, tokenised on first use; see `token_pairs`.

    A document of more than `config.chunks` chunks becomes several, each with the queries that its chunks
    answer; one without any query is left out. A pair is a document of one chunk.
    """
    lengths = {"queries": Truncation(config.query_length), "chunks": Truncation(config.chunk_length)}
    done = _tokenised(table, lengths, config.chunks)
    columns = (Lists(done.column(name)) for name in TokenDocument._fields)
    return TokenDocuments(*columns, _keys(done), done.counters)


def pairs_as_documents(table: Table, config: ContextualConfig) -> TokenDocuments:
    """Up to `config.single` random pairs of a data set, no two of one key, as documents of one chunk."""
    rows = table.rows
    order = permuted(np.arange(len(rows)), len(rows), config.seed)
    first = np.unique(np.asarray(rows["key"][:])[order], return_index=True)[1]
    chosen = np.sort(order[np.sort(first)[: config.single]])
    rows_hash = fingerprint(table.rows_hash, config.single, config.seed)
    return token_documents(table._replace(rows=rows.select(chosen), rows_hash=rows_hash), config)


def _keys(shards: Shards) -> np.ndarray:
    """The keys of all rows (N, K); a copy if there are several shards."""
    keys = Lists(shards.column("keys"))
    return keys.values.to_numpy().reshape(len(keys), len(keys.values) // max(1, len(keys)))


def _tokenised(table: Table, lengths: Mapping[str, Truncation], chunks: int, negatives: int = 0) -> Shards:
    """A table, tokenised: documents of so many chunks, with so many negatives of each query, at most."""
    held_out, most = hash64(table.held_out.tobytes()), (chunks, negatives)
    folder = _folder("rows", table.name, table.rows_hash, held_out, table.tokenizer.hash, lengths, most)
    work = partial(_tokenise_rows, table, lengths, *most)
    return build(folder, lambda: parts(len(table.rows), ROWS), work, table.name)


def _tokenise_rows(
    table: Table, lengths: Mapping[str, Truncation], chunks: int, negatives: int, part: slice
) -> pa.Table:
    held_out, counters, rows = {*table.held_out.tolist()}, Counter(), []
    for number, row in enumerate(table.rows.select(range(part.start, part.stop)).to_list(), part.start):
        if row := without_held(row, held_out, counters):
            rows += [one | {"number": number} for one in _examples(row, chunks, negatives, counters)]
    for column, truncation in lengths.items():
        texts = [text for row in rows for text in row[column]]
        ids = encode(table.tokenizer.backend, texts, table.tokenizer.dtype, truncation, counters)
        for row in rows:
            texts, row[column] = row[column], [*islice(ids, len(row[column]))]
            if empty := [text for text, one in zip(texts, row[column]) if not (text and len(one))]:
                place = f"data set {table.name!r}, {column}, row {row['number']}"
                raise ValueError(f"{place}: {empty[0]!r} has no tokens. Remove or fill it.")
            counters["tokens"] += sum(map(len, row[column]))
    counters["rows"] = len(rows)
    ids = pa.list_(pa.list_(pa.from_numpy_dtype(table.tokenizer.dtype)))
    keys = dict.fromkeys(("keys", "negative_keys"), pa.list_(pa.uint64()))
    schema = pa.schema(dict.fromkeys(lengths, ids) | keys | {"golds": pa.list_(pa.int64())})
    return pa.Table.from_pylist(rows, schema.with_metadata({"counters": json.dumps(counters)}))


def _examples(
    row: Mapping[str, Any], most: int, negatives: int, counters: Counter[str]
) -> Iterator[dict[str, Any]]:
    """A document in parts of `most` chunks, each with the queries that its chunks answer. A pair is a
    document of one chunk, a triplet one with hard negatives."""
    hard = row["negatives"][:negatives] if negatives else []
    if negatives and not hard:
        counters["rows without negatives"] += 1
        return
    labels = [row[name] for name in ("key", "query") if name in row]
    if "chunks" not in row:
        row = {"chunks": [row["document"]], "queries": [row["query"]], "golds": [0]}
    counters["documents divided"] += len(row["chunks"]) > most
    for part in parts(len(row["chunks"]), most):
        chunks = row["chunks"][part]
        answered = [i for i, gold in enumerate(row["golds"]) if part.start <= gold < part.stop]
        if answered:
            queries = [row["queries"][i] for i in answered]
            golds = [row["golds"][i] - part.start for i in answered]
            keys = [*map(text_id, [*labels, " ".join(chunks)])]
            example = {"queries": queries, "chunks": chunks, "golds": golds, "keys": keys}
            yield example | {"negatives": hard, "negative_keys": [*map(text_id, hard)]}
        else:
            counters["chunks without a query near them"] += len(chunks)
