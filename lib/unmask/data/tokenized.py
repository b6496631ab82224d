"""What a training reads: text as blocks of equal length, pairs and documents cut to a stage's lengths, all of
it tokenised once, in parallel, into files that every process maps into memory.

A folder of prepared data holds one file of numbers per column and `progress.json`, the journal: units done,
bytes of each file, and counters. Units are appended in their order, whoever computed them, so the bytes
depend neither on the number of workers nor on when the work was interrupted.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset
from joblib import Parallel, cpu_count, delayed
from tqdm.auto import tqdm

from unmask.children import dying_together
from unmask.config import ContextualConfig, PretrainConfig
from unmask.data import rows as source_rows
from unmask.data import spelling, tokens
from unmask.data.batches import parts, permuted, shuffled
from unmask.data.registry import Source
from unmask.data.spelling import text_id, without_held
from unmask.data.tokens import Limit, StoredTokenizer, cut, encode, joined
from unmask.store import (
    artifacts_root,
    code_fingerprint,
    fingerprint,
    hash64,
    locked,
    naming,
    preparing,
    read_json,
    write_json,
)

Limits = Mapping[str, Limit]  # of the texts of each column; all have a length
Tokenised = tuple[Mapping[str, np.ndarray], Mapping[str, int]]  # columns and counters
# Texts of each column, golds, and what no two rows of a batch may share, beside their key.
Arranged = Iterator[tuple[Mapping[str, Sequence[str]], Sequence[int], Sequence[str]]]
Arrange = Callable[..., Arranged]  # of a row of a table: what is made of it
UNITS_PER_WORKER = 4  # for fewer, a process takes longer to start than it saves
ROWS = 4096  # of a table, tokenised at a time
JOURNAL = "progress.json"


@dataclass(frozen=True)
class Ragged(Sequence):
    """Rows of different lengths in two arrays: row i is `values[ends[i - 1]:ends[i]]`.

    Where `values` is Ragged itself, a row is a list of rows (the chunks of a document).
    """

    values: np.ndarray | Sequence
    ends: np.ndarray

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, rows: int | slice) -> Any:
        if isinstance(rows, slice):
            return [self[row] for row in range(*rows.indices(len(self)))]
        start, stop = (self.ends[rows - 1] if rows else 0), self.ends[rows]
        return self.values[int(start) : int(stop)]


@dataclass(frozen=True)
class Prepared:
    """A folder of prepared data as its journal describes it."""

    folder: Path
    units: int = 0  # done
    sizes: Mapping[str, int] = field(default_factory=dict)  # bytes of each file
    counters: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "Prepared":
        """Reads the journal. Nothing counts if a file is short or missing: after a power cut the journal may
        be ahead."""
        found = cls(folder, **read_json(folder / JOURNAL))
        there = {file.stem: file.stat().st_size for file in folder.glob("*.bin")}
        whole = all(there.get(name, -1) >= size for name, size in found.sizes.items())
        return found if whole else cls(folder)

    def suffices(self, wanted: float) -> bool:
        """Whether these are as many tokens as are wanted."""
        return self.counters.get("tokens", 0) >= wanted

    def extended(self, result: Tokenised) -> "Prepared":
        """Appends the result of a unit."""
        sizes = {}
        for name, array in result[0].items():
            path = self.folder / f"{name}.bin"
            with naming(path), path.open("ab") as file:
                file.write(array.tobytes())
                sizes[name] = file.tell()
        counters = dict(Counter(self.counters) + Counter(result[1]))
        journal = {"units": self.units + 1, "sizes": sizes, "counters": counters}
        write_json(self.folder / JOURNAL, journal)
        return Prepared(self.folder, **journal)

    def array(self, name: str, dtype: str | type) -> np.ndarray:
        """A column, mapped into memory."""
        if not self.sizes.get(name):  # nothing can be mapped
            return np.empty(0, dtype)
        count = self.sizes[name] // np.dtype(dtype).itemsize
        # A plain array, because slices of a memmap take ten times longer.
        return np.asarray(np.memmap(self.folder / f"{name}.bin", dtype, "r", shape=count))

    def texts(self, name: str, dtype: str) -> Ragged:
        """The token ids of each text of a column."""
        return Ragged(self.array(name, dtype), np.cumsum(self.array(f"{name}.lengths", np.int32)))

    def lists(self, name: str, dtype: str) -> Ragged:
        """The same, in lists of a row's texts."""
        return Ragged(self.texts(name, dtype), np.cumsum(self.array(f"{name}.counts", np.int32)))


def build(
    folder: Path, units: Sequence[Any], work: Callable[[Any], Tokenised], name: str, wanted: float = math.inf
) -> Prepared:
    """Appends what `work` makes of the units, in their order, to the files of a folder.

    Killed at any moment and called again, it goes on after the last unit in the journal. Several processes
    may want the same folder: one works, the others wait for it and find it done.

    Args:
        folder: its name must identify units and work; `wanted` changes nothing in what is there.
        name: of the data, for the progress bar.
        wanted: stop once the counter "tokens" has reached this; a later call that wants more goes on from
            there. Default: all units.
    Raises: what `work` raises; what was appended before is kept.
    """
    done = Prepared.read(folder)
    if done.units == len(units) or done.suffices(wanted):
        return done  # nothing is locked or touched
    preparing(f"tokens of {name}")
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f"{folder.name}.lock")):
        done = Prepared.read(folder)
        for file in folder.glob("*.bin"):  # what did not reach the journal goes
            os.truncate(file, done.sizes.get(file.stem, 0))
        left = (units[i] for i in range(done.units, len(units)) if not done.suffices(wanted))
        workers = max(1, min(cpu_count(), (len(units) - done.units) // UNITS_PER_WORKER))
        results = Parallel(workers, return_as="generator", **dying_together())(map(delayed(work), left))
        title = f"tokenising {name}"
        for result in tqdm(results, title, len(units), initial=done.units, delay=2, leave=False):
            if not done.suffices(wanted):  # else it was under way when there was enough
                done = done.extended(result)
    return done


def _folder(kind: str, *key: Any) -> Path:
    modules = source_rows, spelling, tokens  # what the tokens depend on
    code = code_fingerprint(__file__, *(module.__file__ for module in modules))
    return artifacts_root() / "data" / "prepared" / f"{kind}-{fingerprint(*key, code)}"


# --- blocks of text


@dataclass(frozen=True)
class Blocks:
    """Blocks of text in the sources' shares: N rows of L tokens that no memory holds.

    The texts of a source lie in one file of tokens, one after the other, with `<|endoftext|>` after each.
    Block i of length L is the slice [iL, (i + 1)L), so one file serves every length. Blocks are not isolated
    from one another where two texts meet. Blocks of a source stand together, in a random order; a source with
    too few of them repeats, in a new order each time.
    """

    sources: Sequence[np.ndarray]  # the distinct blocks of each source
    owner_N: np.ndarray  # for each block its source
    place_N: np.ndarray  # and which of the source's blocks it is
    # For each source: its share of the blocks in percent, how often it is repeated, what is in its texts and
    # what was left out of them.
    report: list[dict[str, Any]]

    def __len__(self) -> int:
        return len(self.owner_N)

    def __getitem__(self, rows_B: np.ndarray) -> np.ndarray:
        """The blocks of these numbers: (B, L), in the type of the tokens."""
        found = zip(self.owner_N[rows_B], self.place_N[rows_B], strict=True)
        return np.stack([self.sources[owner][place] for owner, place in found])


def open_blocks(sources: Sequence[Source], stored: StoredTokenizer, config: PretrainConfig) -> Blocks:
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
    prepared = [prepare_text(one, stored, limit) for one, limit in zip(sources, limits, strict=True)]
    have = [one.counters.get("tokens", 0) // length for one in prepared]
    if not shared:
        counts = largest_remainder(have, min(wanted, sum(have)))
    blocks, places, report, total = [], [], [], sum(counts)
    for source, one, count, there in zip(sources, prepared, counts, have, strict=True):
        if not there and (count or not shared):
            has = f"source {source.name!r} has {one.counters.get('tokens', 0)} tokens of training text"
            raise ValueError(
                f"{has}, not one block of {length}: give more text or a smaller length, or leave it out"
            )
        size = min(count, there)
        seeds = ([config.seed, len(blocks), epoch] for epoch in range(-(-count // max(size, 1))))
        orders = [permuted(np.arange(size), size, own) for own in seeds]
        places.append(np.concatenate([np.empty(0, np.int64), *orders])[:count])
        blocks.append(one.array("tokens", stored.dtype)[: size * length].reshape(size, length))
        row = {"source": source.name, "language": source.language, "share": 100 * count / total}
        report.append(row | {"blocks": count, "epochs": count / max(size, 1), **one.counters})
    owner_N = np.repeat(np.arange(len(sources)), counts)
    return Blocks(blocks, owner_N, np.concatenate(places), report)


def largest_remainder(weights: Sequence[float], total: int) -> list[int]:
    """`total` divided in proportion to the weights, each part within one of its exact share."""
    exact = np.asarray(weights, np.float64) / max(np.sum(weights), 1e-9) * total
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: total - counts.sum()]] += 1
    return counts.tolist()


def prepare_text(source: Source, stored: StoredTokenizer, wanted: float = math.inf) -> Prepared:
    """The training texts of a source as one column "tokens"; `wanted` tokens of them, or all.

    Pieces of the source are taken in a random order, so that a part of a source is like the whole; a file
    that is neither Parquet nor Arrow is one piece. Where enough is prepared, they are not listed again.
    """
    folder, work = (
        _folder("text", source_rows.content_hash(source), stored.identity),
        partial(_text, source, stored),
    )
    if (done := Prepared.read(folder)).suffices(wanted):
        return done
    return build(folder, shuffled(source_rows.units(source)), work, source.name, wanted)


def _text(source: Source, stored: StoredTokenizer, unit: source_rows.Unit) -> Tokenised:
    """Tokenises a piece of a text source."""
    counters, dropped = Counter(), Counter()

    def texts() -> Iterator[str]:
        for row in source_rows.read(source, unit, dropped):
            counters["texts" if row["split"] == "train" else "held out"] += 1
            if row["split"] == "train":
                yield row["text"]

    ids = joined(stored, texts())
    counters.update(tokens=len(ids), **{f"dropped: {reason}": count for reason, count in dropped.items()})
    return {"tokens": ids}, counters


# --- pairs and documents


class Table(NamedTuple):
    """A data set before it is tokenised, and what it is to be tokenised with."""

    rows: Dataset
    name: str
    identity: str  # of the rows; the same identity must mean the same rows
    stored: StoredTokenizer
    held: np.ndarray = np.empty(0, np.uint64)  # texts that are held out, see `Corpus.held_out`


@dataclass(frozen=True)
class TokenPairs:
    """A tokenised data set of pairs; `negatives` hold hard negatives per query where there are any.

    `keys` are as `BatchPlan` takes them: key, query and document of each row by `text_id`, as are
    `negative_keys` of its negatives. `counters` say what was cut or left out; `identity` is a hash of all of
    it.
    """

    queries: Sequence[np.ndarray]
    documents: Sequence[np.ndarray]
    keys: Sequence | np.ndarray
    negatives: Sequence[Sequence[np.ndarray]] | None = None
    negative_keys: Sequence[np.ndarray] | None = None
    counters: Mapping[str, int] = field(default_factory=dict)
    identity: str = ""


class TokenDocument(NamedTuple):
    """A tokenised document with its queries."""

    chunks: list[np.ndarray]
    queries: list[np.ndarray]
    golds: list[int]


@dataclass(frozen=True)
class TokenDocuments(Sequence):
    """Tokenised documents, each made when it is asked for; `keys` and `counters` as in `TokenPairs`."""

    chunks: Ragged
    queries: Ragged
    golds: Ragged
    keys: np.ndarray
    counters: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.golds)

    @property
    def query_count(self) -> int:
        return len(self.queries.values)

    def __getitem__(self, row: int) -> TokenDocument:
        return TokenDocument(self.chunks[row], self.queries[row], self.golds[row].tolist())


def token_pairs(table: Table, query: Limit, document: Limit, negatives: int = 0) -> TokenPairs:
    """A data set of pairs, tokenised on first use.

    Args:
        table: columns query, document, key, and negatives (lists) if any are wanted.
        document: of each document and each negative.
        negatives: hard negatives per query at most; of more the first are taken, rows with none left out.
    Raises: ValueError naming data set and row of a text without tokens, or if a length leaves no room beside
        what is put around.
    """
    limits = {"queries": query, "documents": document} | ({"negatives": document} if negatives else {})
    done, dtype = _prepared("pairs", table, limits, _pairs, negatives), table.stored.dtype
    queries, documents = (done.texts(column, dtype) for column in ("queries", "documents"))
    keys = done.array("keys", np.uint64).reshape(-1, 3)  # key, query, document
    hard = done.lists("negatives", dtype) if negatives else None
    hard_keys = Ragged(done.array("negatives.keys", np.uint64), hard.ends) if hard else None
    return TokenPairs(queries, documents, keys, hard, hard_keys, done.counters, done.folder.name)


def token_documents(table: Table, config: ContextualConfig) -> TokenDocuments:
    """Documents with their queries, tokenised on first use; see `token_pairs`.

    A document of more than `config.chunks` chunks becomes several, each with the queries that its chunks
    answer; one without any query is left out.
    """
    limits = {"chunks": Limit(config.chunk_length), "queries": Limit(config.query_length)}
    done = _prepared("documents", table, limits, _windows, config.chunks)
    chunks, queries = (done.lists(column, table.stored.dtype) for column in limits)
    golds = Ragged(done.array("golds", np.int64), queries.ends)
    keys = done.array("keys", np.uint64).reshape(len(golds), -1)  # key, chunks, and of a pair the query
    return TokenDocuments(chunks, queries, golds, keys, done.counters)


def single_chunks(table: Table, config: ContextualConfig) -> TokenDocuments:
    """Up to `config.single` random pairs of a data set, no two of one key, as documents of one chunk."""
    rows = table.rows
    order = permuted(np.arange(len(rows)), len(rows), config.seed)
    first = np.unique(np.asarray(rows["key"][:])[order], return_index=True)[1]
    chosen = np.sort(order[np.sort(first)[: config.single]])
    identity = fingerprint(table.identity, config.single, config.seed)
    return token_documents(table._replace(rows=rows.select(chosen), identity=identity), config)


def _prepared(kind: str, table: Table, limits: Limits, arrange: Arrange, count: int) -> Prepared:
    """A table, arranged with `count` and tokenised."""
    known = table.name, table.identity, hash64(table.held.tobytes()), table.stored.identity
    folder = _folder(kind, *known, limits, count)
    work = partial(_tokenised, table, limits, partial(arrange, count))
    return build(folder, parts(len(table.rows), ROWS), work, table.name)


def _tokenised(table: Table, limits: Limits, arrange: Arrange, part: slice) -> Tokenised:
    """Tokenises a part of a table."""
    held, counters, rows = {*table.held.tolist()}, Counter(), []
    for number, row in enumerate(table.rows.select(range(part.start, part.stop)).to_list(), part.start):
        if row := without_held(row, held, counters):
            rows += [(number, row["key"], *one) for one in arrange(row, counters)]
    keys = [[*map(text_id, (key, *own))] for _, key, _, _, own in rows]
    columns = {"keys": np.array(keys, np.uint64)}
    hard = [text_id(text) for _, _, own, *_ in rows for text in own.get("negatives", [])]
    columns["negatives.keys"] = np.array(hard, np.uint64)
    columns["golds"] = np.array([gold for _, _, _, golds, _ in rows for gold in golds], np.int64)
    for column, limit in limits.items():
        texts = [(number, text) for number, _, own, *_ in rows for text in own[column]]
        ids = list(_cut(table.stored, f"data set {table.name!r}, {column}", texts, limit, counters))
        columns[column] = np.concatenate([np.empty(0, table.stored.dtype), *ids])
        columns[f"{column}.lengths"] = np.array([*map(len, ids)], np.int32)
        columns[f"{column}.counts"] = np.array([len(own[column]) for _, _, own, *_ in rows], np.int32)
        counters["tokens"] += len(columns[column])
    counters["rows"] = len(rows)
    return columns, counters


def _cut(
    stored: StoredTokenizer, what: str, texts: list[tuple[int, str]], limit: Limit, counters: Counter[str]
) -> Iterator[np.ndarray]:
    """Token ids of texts, cut. For messages: `what` they are, and the row where each stands."""
    tokenizer, length, (before, after) = stored.load(), limit.length, limit.around
    taken, end = encode(tokenizer, [before + after, after], stored.dtype)
    if len(taken) >= length:
        room = f"{length} tokens at most, of which what is put around a text takes {len(taken)}"
        raise ValueError(f"{what}: {room}: raise the length")
    encoded = encode(tokenizer, [text for _, text in texts], stored.dtype, limit._replace(length=None))
    for (row, text), ids in zip(texts, encoded, strict=True):
        if not (text and len(ids)):
            raise ValueError(f"{what}, row {row}: {text!r} has no tokens. Remove or fill it.")
        if len(ids) > length:
            counters["texts cut"] += 1
            counters["tokens cut"] += len(ids) - length
        yield cut(ids, length, end)


def _pairs(negatives: int, row: Mapping[str, Any], counters: Counter[str]) -> Arranged:
    """A pair, or a triplet with what negatives it has."""
    hard = row["negatives"][:negatives] if negatives else []
    if negatives and not hard:
        counters["rows without negatives"] += 1
    else:
        query, document = row["query"], row["document"]
        yield {"queries": [query], "documents": [document], "negatives": hard}, [], [query, document]


def _windows(most: int, row: Mapping[str, Any], counters: Counter[str]) -> Arranged:
    """A document, or a pair as one of a single chunk, in parts of `most` chunks at most."""
    own = []
    if "chunks" not in row:
        own = [row["query"]]
        row = {"chunks": [row["document"]], "queries": own, "golds": [0]}
    counters["documents divided"] += len(row["chunks"]) > most
    for first in range(0, len(row["chunks"]), most):
        chunks = row["chunks"][first : first + most]
        near = [i for i, gold in enumerate(row["golds"]) if first <= gold < first + most]
        if near:
            texts = {"chunks": chunks, "queries": [row["queries"][i] for i in near]}
            yield texts, [row["golds"][i] - first for i in near], [" ".join(chunks), *own]
        else:
            counters["chunks without a query near them"] += len(chunks)
