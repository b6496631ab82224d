"""Hard negatives: documents that an embedder takes for an answer and that are none.

Shape suffixes: N pairs · M distinct documents · U distinct texts · D dimensions · R rows of a block · K
negatives per query.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset
from tqdm.auto import tqdm

from unmask.config import TripletConfig
from unmask.data.corpus import Corpus
from unmask.data.negatives import Mining, Own, choose, parts
from unmask.evaluation.search import unit

TEXTS = 4096  # texts embedded, read or written at once
FEWEST = 64  # pairs drawn from a data set however small its share


class Encoder(Protocol):
    """Any embedder: ours, one of sentence-transformers, or an object of one's own with this method.

    If `encode` has a parameter `max_length`, it is given the preset's lengths.
    """

    def encode(self, texts: Sequence[str]) -> Any:
        """An array (texts, dimensions) of floats or int8 codes, compared by cosine."""


def mine(
    embedder: Encoder, pairs: Dataset, config: TripletConfig, *, scratch: Path | None = None
) -> tuple[Dataset, Mining]:
    """Adds to each pair of one data set `config.negatives` hard negatives from the same data set.

    Of the distinct documents, a pair's own ones are left out: its document and those of pairs with its key or
    its query. The `rank_window` best of the others are its window. What is more than `margin` better than the
    positive is probably an unlabelled answer, and unsafe (the rule of the pair loss). The negatives are

    1. drawn at random from the safe documents of the window; if there are not enough of them,
    2. the most similar of all safe documents; if there are not enough of them,
    3. the least similar documents.

    Args:
        embedder: turns texts into vectors.
        pairs: with columns query, document and key; they fit into memory (for others: `mine_to`).
        config: negatives, margin, rank_window, query_length, document_length, seed, and search: "exact", or
            "faiss", by which the window may miss documents (`unmask.evaluation.search`).
        scratch: where embeddings are kept while this runs; default: the system's temporary directory.
    Returns: the pairs with a column `negatives` (a list of texts), and what was found.
    Raises: ValueError if the data set is too small to hold that many negatives, or the embedder's answer is
        not one vector of finite numbers per text.
    Source: pplx-embed, section 2.5; window and margin are choices of ours, the paper gives none.
    """
    rows_NK, found = _mine(embedder, pairs, _numbered(pairs, config.negatives), config, scratch)
    return pairs.add_column("negatives", _texts(pairs, rows_NK)), found


def mine_to(
    path: Path, embedder: Encoder, slices: Mapping[str, Dataset], config: TripletConfig
) -> dict[str, Mining]:
    """Mines each data set as `mine` does and writes all of them into one Parquet file, piece by piece.

    Embeddings lie on disk beside the file while this runs. Memory holds some numbers for each pair and
    distinct document, but neither texts nor vectors.

    Raises: ValueError as `mine`; a data set that is too small is named before anything is embedded.
    """
    numbered = {}
    for name, pairs in slices.items():
        try:
            numbered[name] = _numbered(pairs, config.negatives)
        except ValueError as error:
            raise ValueError(f"data set {name!r}: {error}") from error
    fields = next(iter(slices.values())).features.arrow_schema
    schema = pa.schema([*fields, pa.field("negatives", pa.list_(pa.string()))])
    unfinished, statistics = path.with_name(path.name + ".part"), {}
    try:
        with pq.ParquetWriter(unfinished, schema) as writer:
            for name, pairs in slices.items():
                rows_NK, statistics[name] = _mine(embedder, pairs, numbered[name], config, path.parent)
                for part in parts(len(pairs), TEXTS):
                    columns = pairs[part] | {"negatives": _texts(pairs, rows_NK[part])}
                    writer.write_table(pa.table(columns, schema=schema))
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
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


class _Numbered(NamedTuple):
    """Distinct queries and documents of N pairs: rows where each is seen first, and the pairs' numbers."""

    query_rows: np.ndarray
    query_N: np.ndarray
    document_rows: np.ndarray
    document_N: np.ndarray
    own: Own


def _numbered(pairs: Dataset, negatives: int) -> _Numbered:
    """Raises: ValueError if a pair has fewer than so many documents that are not its own."""
    queries, documents = _distinct(pairs, "query"), _distinct(pairs, "document")
    own = Own((_distinct(pairs, "key")[1], queries[1]), documents[1])
    own.check(negatives)
    return _Numbered(*queries, *documents, own)


def _mine(
    embedder: Encoder, pairs: Dataset, of: _Numbered, config: TripletConfig, scratch: Path | None
) -> tuple[np.ndarray, Mining]:
    """For each pair the rows (N, K) of the pairs whose documents are its negatives, and what was found."""
    with TemporaryDirectory(dir=scratch, prefix="mining-") as folder:
        q_UD = _embed(embedder, pairs, "query", of.query_rows, config.query_length, Path(folder))
        d_MD = _embed(embedder, pairs, "document", of.document_rows, config.document_length, Path(folder))
        ids_NK, found = choose(q_UD, d_MD, of.query_N, of.document_N, of.own, config)
    return of.document_rows[ids_NK], found


def _distinct(pairs: Dataset, column: str) -> tuple[np.ndarray, np.ndarray]:
    """The rows where each distinct text of a column is seen first, and each row's number among those."""
    table = pairs.select_columns(column)
    texts = (text for part in parts(len(table), TEXTS) for text in table[part][column])
    digests = (blake2b(text.encode(), digest_size=8).digest() for text in texts)
    hash_N = np.fromiter((int.from_bytes(digest) for digest in digests), np.uint64, len(table))
    _, first_U, number_N = np.unique(hash_N, return_index=True, return_inverse=True)
    order_U = np.argsort(first_U)
    return first_U[order_U], np.argsort(order_U)[number_N]


def _embed(
    embedder: Encoder, pairs: Dataset, column: str, rows: np.ndarray, length: int, folder: Path
) -> np.ndarray:
    """Embeddings of the rows' texts in a memory-mapped file: codes as they are, floats as unit vectors in
    half precision."""
    table, stored = pairs.select_columns(column), None
    bar = tqdm(total=len(rows), desc=f"embedding {column} texts", unit="text", leave=False)
    for part in parts(len(rows), TEXTS):
        texts = table[rows[part].tolist()][column]
        places = [f"the {column} of row {row}" for row in rows[part]]
        x_UD = embed(embedder, texts, places, max_length=length)
        if x_UD.dtype.kind == "f":
            x_UD = unit(x_UD).astype(np.float16)
        if stored is None:
            shape = (len(rows), x_UD.shape[1])
            stored = np.lib.format.open_memmap(folder / f"{column}.npy", "w+", x_UD.dtype, shape)
        stored[part] = x_UD
        bar.update(len(texts))
    bar.close()
    return stored


def _texts(pairs: Dataset, rows_RK: np.ndarray) -> list[list[str]]:
    flat, count = pairs.select_columns("document")[rows_RK.ravel().tolist()]["document"], rows_RK.shape[1]
    return [flat[start : start + count] for start in range(0, len(flat), count)]
