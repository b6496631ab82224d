"""Hard negatives: documents that an embedder takes for an answer and that are none.

Shape suffixes: N pairs · M distinct documents · U distinct texts · D dimensions · R rows of a block · X as
many as wanted · W ranks of the window · K negatives per query.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset
from scipy.sparse import csr_matrix
from tqdm.auto import tqdm

from unmask.config import TripletConfig
from unmask.data.corpus import Corpus
from unmask.store import replacing

Search = Callable[
    [np.ndarray, int], tuple[np.ndarray, np.ndarray]
]  # (queries, k) → scores, numbers, best first
Index = Callable[[np.ndarray, str], Search]  # (documents, method) → a search over them

TEXTS = 4096  # texts embedded, read or written at once
FEWEST = 64  # pairs drawn from a data set however small its share
ROWS = 1024  # queries searched at once
SCORES = 2**23  # scores kept at once while a search goes deeper


class Encoder(Protocol):
    """Any embedder: ours, one of sentence-transformers, or an object of one's own with this method.

    If `encode` has a parameter `max_length`, it is given the preset's lengths.
    """

    def encode(self, texts: Sequence[str]) -> Any:
        """An array (texts, dimensions) of floats or int8 codes, compared by cosine."""


@dataclass(frozen=True)
class Mining:
    """What was mined for one data set. A rank counts the documents that could be negatives; what is below the
    window has rank W + 1.

    `looked_at` are the documents down to the end of each query's window: `own` of them belong to the pair or
    its like, `unsafe` of them are more than the margin better than the positive.
    """

    pairs: int
    documents: int  # distinct ones
    window: int
    positive_similarity: np.ndarray  # (N,)
    negative_similarity: np.ndarray  # (N, K)
    positive_rank: np.ndarray  # (N,)
    negative_rank: np.ndarray  # (N, K)
    looked_at: int
    own: int
    unsafe: int
    last_resort: int  # negatives above the margin, for want of others

    def shares(self) -> dict[str, float]:
        """Shares of the documents looked at that were skipped, and of the negatives that are not from the
        window."""
        below = int((self.negative_rank > self.window).sum())
        return {
            "skipped: own": self.own / self.looked_at,
            "skipped: margin": self.unsafe / self.looked_at,
            "from below the window": below / self.negative_rank.size,
            "last resort": self.last_resort / self.negative_rank.size,
        }


def mine(embedder: Encoder, index: Index, pairs: Dataset, config: TripletConfig) -> tuple[Dataset, Mining]:
    """Adds to each pair of one data set `config.negatives` hard negatives from the same data set.

    Of the distinct documents, a pair's own ones are left out: its document and those of pairs with its key or
    its query. The `rank_window` best of the others are its window. What is more than `margin` better than the
    positive is probably an unlabelled answer, and unsafe (the rule of the pair loss). The negatives are

    1. drawn at random from the safe documents of the window; if there are not enough of them,
    2. the most similar of all safe documents; if there are not enough of them,
    3. the least similar documents.

    Args:
        embedder: turns texts into vectors.
        index: `unmask.evaluation.search.index`, or another one. Of equal scores, the document that comes
            first in the data is to be the better.
        pairs: with columns query, document and key; they fit into memory (for others: `mine_to`).
        config: negatives, margin, rank_window, query_length, document_length, seed, and search, the method of
            the index: "exact", or "faiss", by which the window may miss documents.
    Returns: the pairs with a column `negatives` (a list of texts), and what was found.
    Raises: ValueError if the data set is too small to hold that many negatives, or the embedder's answer is
        not one vector of finite numbers per text.
    Source: pplx-embed, section 2.5; window and margin are choices of ours, the paper gives none.
    """
    rows_NK, found = _mine(embedder, index, pairs, _Numbered(pairs, config.negatives), config)
    return pairs.add_column("negatives", _texts(pairs, rows_NK)), found


def mine_to(
    path: Path, embedder: Encoder, index: Index, slices: Mapping[str, Dataset], config: TripletConfig
) -> dict[str, Mining]:
    """Mines each data set as `mine` does and writes all of them into one Parquet file, piece by piece.

    Embeddings lie on disk beside the file while this runs. Memory holds some numbers for each pair and
    distinct document, but neither texts nor vectors.

    Raises: ValueError as `mine`; a data set that is too small is named before anything is embedded.
    """
    numbered = {}
    for name, pairs in slices.items():
        try:
            numbered[name] = _Numbered(pairs, config.negatives)
        except ValueError as error:
            raise ValueError(f"data set {name!r}: {error}") from error
    fields = next(iter(slices.values())).features.arrow_schema
    schema = pa.schema([*fields, pa.field("negatives", pa.list_(pa.string()))])
    statistics = {}
    with replacing(path) as unfinished, pq.ParquetWriter(unfinished, schema) as writer:
        for name, pairs in slices.items():
            rows_NK, statistics[name] = _mine(embedder, index, pairs, numbered[name], config, path.parent)
            for part in parts(len(pairs), TEXTS):
                columns = pairs[part] | {"negatives": _texts(pairs, rows_NK[part])}
                writer.write_table(pa.table(columns, schema=schema))
    return statistics


def embed(
    embedder: Encoder, texts: Sequence[str], places: Sequence[str], *, max_length: int | None = None
) -> np.ndarray:
    """The embedder's vectors of some texts, checked.

    Args:
        places: where each text stands, for a message.
        max_length: tokens of a text at most, for an embedder that takes this; default: the embedder's own.
    Raises: ValueError unless the answer is one vector of finite numbers per text.
    """
    limited = max_length is not None and "max_length" in inspect.signature(embedder.encode).parameters
    x_UD = np.asarray(embedder.encode(texts, **({"max_length": max_length} if limited else {})))
    if x_UD.ndim != 2 or len(x_UD) != len(texts) or x_UD.dtype.kind not in "fi":
        raise ValueError(
            f"the embedder returned {x_UD.dtype} values of shape {x_UD.shape} for {len(texts)} texts, the "
            f"first of them {places[0]}: its `encode` must return one row of floats or int8 codes per text"
        )
    bad = np.flatnonzero(~np.isfinite(x_UD).all(axis=1))
    if len(bad):
        raise ValueError(
            f"the embedder returned values that are not finite for {places[bad[0]]}, "
            f"{texts[bad[0]][:80]!r}: check the model, or its precision"
        )
    return x_UD


def draw(corpus: Corpus, groups: Sequence[str], count: int, seed: int) -> dict[str, Dataset]:
    """At most about `count` training pairs of some groups, from each data set in proportion to its size.

    Args:
        groups: of pairs, for instance ("english", "code").
    Returns: data set -> pairs in the corpus's order, at least 64 of each where it has them.
    Raises: ValueError if no data set is of these groups.
    """
    tables = {name: corpus.pairs("train", name) for name in corpus.datasets("pairs", "train")}
    group = {name: table[0]["group"] for name, table in tables.items()}
    wanted = {name: table for name, table in tables.items() if group[name] in groups}
    if not wanted:
        raise ValueError(
            f"no training pairs of the groups {', '.join(groups)}: the corpus has "
            f"{', '.join(sorted(set(group.values()))) or 'none'}; set triplet.groups to some of these"
        )
    share = min(1.0, count / sum(map(len, wanted.values())))
    rng = np.random.default_rng(seed)
    drawn = {}
    for name, table in wanted.items():
        size = min(len(table), max(round(share * len(table)), FEWEST))
        drawn[name] = table.select(np.sort(rng.choice(len(table), size, replace=False)))
    return drawn


class _Numbered:
    """Distinct queries and documents of N pairs: rows where each is seen first, and the pairs' numbers.

    Raises: ValueError if a pair has fewer than so many documents that are not its own.
    """

    def __init__(self, pairs: Dataset, negatives: int):
        self.query_rows, self.query_N = _distinct(pairs, "query")
        self.document_rows, self.document_N = _distinct(pairs, "document")
        self._groupings = []
        for group_N in (_distinct(pairs, "key")[1], self.query_N):
            links = np.ones(len(pairs), bool), (group_N, self.document_N)
            self._groupings.append((group_N, csr_matrix(links, (group_N.max() + 1, len(self.document_rows)))))
        for part in parts(len(pairs), ROWS):
            others_R = len(self.document_rows) - self.own(part).getnnz(axis=1)
            if others_R.min() < negatives:
                row = int((others_R < negatives).argmax())
                raise ValueError(
                    f"too few distinct documents for {negatives} negatives per query: of "
                    f"{len(self.document_rows)}, row {part.start + row} leaves {others_R[row]} that do not "
                    "share its key, query or document; leave the data set out, or set triplet.negatives lower"
                )

    def own(self, part: slice) -> csr_matrix:
        """Which documents (R, M) are a row's own: those of rows with its key or its query."""
        by_key, by_query = (links[group_N[part]] for group_N, links in self._groupings)
        return by_key + by_query


def _distinct(pairs: Dataset, column: str) -> tuple[np.ndarray, np.ndarray]:
    """The rows where each distinct text of a column is seen first, and each row's number among those."""
    table = pairs.select_columns(column)
    texts = (text.encode() for part in parts(len(table), TEXTS) for text in table[part][column])
    first_U, number_N = distinct(texts, len(table))
    order_U = np.argsort(first_U)
    return first_U[order_U], np.argsort(order_U)[number_N]


def distinct(contents: Iterable[bytes], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Where each distinct content comes first, in any order, and each one's number among those."""
    digests = (int.from_bytes(blake2b(content, digest_size=8).digest()) for content in contents)
    hash_N = np.fromiter(digests, np.uint64, count)
    _, first_U, number_N = np.unique(hash_N, return_index=True, return_inverse=True)
    return first_U, number_N


def _mine(
    embedder: Encoder, index: Index, pairs: Dataset, of: _Numbered, config: TripletConfig,
    scratch: Path | None = None,
) -> tuple[np.ndarray, Mining]:  # fmt: skip
    """For each pair the rows (N, K) of the pairs whose documents are its negatives, and what was found."""
    with TemporaryDirectory(dir=scratch, prefix="mining-") as folder:
        q_UD = _embed(embedder, pairs, "query", of.query_rows, config.query_length, Path(folder))
        d_MD = _embed(embedder, pairs, "document", of.document_rows, config.document_length, Path(folder))
        ids_NK, found = _choose(q_UD, d_MD, of, config, index)
    return of.document_rows[ids_NK], found


def _embed(
    embedder: Encoder, pairs: Dataset, column: str, rows: np.ndarray, length: int, folder: Path
) -> np.ndarray:
    """Embeddings of the rows' texts in a memory-mapped file: codes as they are, floats as unit vectors in
    half precision."""
    table, stored = pairs.select_columns(column), None
    for part in tqdm(parts(len(rows), TEXTS), desc=f"embedding {column} texts", unit="block", leave=False):
        texts = table[rows[part].tolist()][column]
        places = [f"the {column} of row {row}" for row in rows[part]]
        x_UD = embed(embedder, texts, places, max_length=length)
        if x_UD.dtype.kind == "f":
            x_UD = unit(x_UD).astype(np.float16)
        if stored is None:
            shape = (len(rows), x_UD.shape[1])
            stored = np.lib.format.open_memmap(folder / f"{column}.npy", "w+", x_UD.dtype, shape)
        stored[part] = x_UD
    return stored


def _texts(pairs: Dataset, rows_RK: np.ndarray) -> list[list[str]]:
    flat, count = pairs.select_columns("document")[rows_RK.ravel().tolist()]["document"], rows_RK.shape[1]
    return [flat[start : start + count] for start in range(0, len(flat), count)]


def _choose(
    q_UD: np.ndarray, d_MD: np.ndarray, of: _Numbered, config: TripletConfig, index: Index
) -> tuple[np.ndarray, Mining]:
    """The documents (N, K) that `mine` chooses, and what was found."""
    pairs, documents, count = len(of.query_N), len(d_MD), config.negatives
    # A narrower window would be filled up to so many in the same order anyway.
    window = min(max(config.rank_window, count), documents)
    search, exact = index(d_MD, config.search), index(d_MD, "exact")
    rng = np.random.default_rng(config.seed)
    ids_NK, rank_NK = np.empty((2, pairs, count), np.int64)
    score_NK, rank_N = np.empty((pairs, count), np.float32), np.empty(pairs, np.int64)
    positive_N, looked_at, own_seen, unsafe_seen = np.empty(pairs, np.float32), 0, 0, 0
    for part in tqdm(parts(pairs, ROWS), desc="searching", unit="block", leave=False):
        q_RD, own = q_UD[of.query_N[part]], of.own(part)
        positive_R = _cosines(q_RD, d_MD[of.document_N[part]])
        ceiling_R = positive_R + np.float32(config.margin)
        score_RW, ids_RW, own_R = _first(search, q_RD, window, own)
        known_RW = ids_RW >= 0
        safe_RW = known_RW & (score_RW <= ceiling_R[:, None])
        lottery_RW = np.where(safe_RW, rng.random(safe_RW.shape), np.inf)
        drawn_RK = np.argsort(lottery_RW, axis=1)[:, :count]
        ids_RK, score_RK = (np.take_along_axis(rows, drawn_RK, 1) for rows in (ids_RW, score_RW))
        short = np.flatnonzero(safe_RW.sum(axis=1) < count)
        if len(short):
            below = _first(exact, q_RD[short], count, own[short], ceiling_R[short])
            score_RK[short], ids_RK[short], _ = below
            short = short[(ids_RK[short] < 0).any(axis=1)]
        if len(short):  # the nearest ones of the opposite are the least similar
            score_SK, ids_RK[short], _ = _first(exact, -q_RD[short], count, own[short])
            score_RK[short] = -score_SK
        hit_RKW = ids_RK[..., None] == ids_RW[:, None]
        rank_NK[part] = 1 + np.where(hit_RKW.any(axis=2), hit_RKW.argmax(axis=2), window)
        rank_N[part] = 1 + (score_RW > positive_R[:, None]).sum(axis=1)
        ids_NK[part], score_NK[part], positive_N[part] = ids_RK, score_RK, positive_R
        looked_at += int(own_R.sum() + known_RW.sum())
        own_seen += int(own_R.sum())
        unsafe_seen += int((known_RW & ~safe_RW).sum())
    last_resort = int((score_NK > positive_N[:, None] + np.float32(config.margin)).sum())
    return ids_NK, Mining(
        pairs, documents, window, positive_N, score_NK, rank_N, rank_NK, looked_at, own_seen, unsafe_seen,
        last_resort,
    )  # fmt: skip


def _first(
    search: Search,
    q_RD: np.ndarray,
    wanted: int,
    own: csr_matrix,
    ceiling_R: np.ndarray | None = None,
    depth: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The first `wanted` documents for each query that are not its own and score at most its ceiling.

    Returns: their scores (R, wanted) and numbers, −inf and −1 where there are no more, and how many own ones
        came before the last.
    """
    documents = own.shape[1]
    ceiling_R = np.full(len(q_RD), np.inf, np.float32) if ceiling_R is None else ceiling_R
    depth = min(depth or wanted + int(own.getnnz(axis=1).max()), documents)
    score_RX, ids_RX = map(np.array, search(q_RD, depth))
    own_RX = own[np.arange(len(q_RD))[:, None], ids_RX].toarray()
    usable_RX = ~own_RX & (ids_RX >= 0) & (score_RX <= ceiling_R[:, None])
    order_RX = np.argsort(~usable_RX, axis=1, kind="stable")[:, :wanted]
    taken_RX = np.take_along_axis(usable_RX, order_RX, 1)
    scores = np.where(taken_RX, np.take_along_axis(score_RX, order_RX, 1), -np.inf)
    ids = np.where(taken_RX, np.take_along_axis(ids_RX, order_RX, 1), -1)
    before_R = np.where(taken_RX, order_RX + 1, 0).max(axis=1) - taken_RX.sum(axis=1)
    lacking = np.flatnonzero(~taken_RX.all(axis=1)) if depth < documents else []
    for part in parts(len(lacking), max(1, SCORES // (4 * depth))):
        some = lacking[part]
        deeper = _first(search, q_RD[some], wanted, own[some], ceiling_R[some], 4 * depth)
        scores[some], ids[some], before_R[some] = deeper
    return scores, ids, before_R


def _cosines(q_ND: np.ndarray, d_ND: np.ndarray) -> np.ndarray:
    """Cosine (N,) of each query and the document beside it, rounded once to float32."""
    q_ND, d_ND = q_ND.astype(np.float64), d_ND.astype(np.float64)
    squares_N = (q_ND**2).sum(axis=1) * (d_ND**2).sum(axis=1)
    return ((q_ND * d_ND).sum(axis=1) / np.sqrt(np.where(squares_N == 0, 1, squares_N))).astype(np.float32)


def unit(x_XD: np.ndarray) -> np.ndarray:
    """Codes or floats as float32 vectors of length one; zero vectors stay."""
    x_XD = np.asarray(x_XD, np.float32)
    norm_X1 = np.linalg.norm(x_XD, axis=1, keepdims=True)
    return x_XD / np.where(norm_X1 == 0, 1, norm_X1)


def parts(count: int, size: int) -> list[slice]:
    """Slices of `size` that together are range(count)."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
