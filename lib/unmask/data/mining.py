"""What an embedder says of training data: hard negatives, documents that look like answers but are not; and
clusters of similar rows, which share a batch, where likely unlabelled answers do not count as negatives (CDE,
section 4.1).

Shape suffixes: N pairs, rows or queries · M documents · U distinct texts · X texts, or documents looked at ·
D dimensions · K negatives per query, or clusters · R rows of a block · S rows whose window holds too few ·
W ranks of the window.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import faiss
import numpy as np
from datasets import Dataset
from numpy.random import Generator
from scipy.sparse import csr_matrix
from torch.utils.data import ConcatDataset
from tqdm.auto import tqdm

from unmask.config import ClustersConfig, PairConfig, TripletConfig
from unmask.data import batches
from unmask.data.batches import ClusterOrder, parts, permuted
from unmask.data.corpus import Corpus
from unmask.data.spelling import distinct
from unmask.data.tokenize import TokenPairs
from unmask.data.tokens import PlainTokenizer
from unmask.store import artifacts_root, code_fingerprint, fingerprint, hash64, locked, replacing

Ranking = tuple[np.ndarray, np.ndarray]  # scores, and numbers of documents
Search = Callable[[np.ndarray, int], Ranking]  # of queries, their k best
Index = Callable[[np.ndarray], Search]  # documents → a search over them

FEWEST = 64  # pairs drawn from a data set however small its share
ROWS = 1024  # queries searched at once
SCORES = 2**23  # scores beyond the window in memory at once
TEXTS = 4096  # embedded at once


class Encoder(Protocol):
    """Any embedder: ours, one of sentence-transformers, or an object of one's own with this method."""

    def encode(self, texts: Sequence[str], **options: Any) -> Any:
        """An array (texts, dimensions) of floats or int8 codes, compared by cosine."""


class Mining(NamedTuple):
    """What was mined for one data set. A rank counts the documents that could be negatives; what is below the
    window has rank W + 1."""

    documents: int  # distinct ones
    window: int
    positive_similarity: np.ndarray  # (N,)
    negative_similarity: np.ndarray  # (N, K)
    positive_rank: np.ndarray  # (N,)
    negative_rank: np.ndarray  # (N, K)


def mine(embedder: Encoder, index: Index, pairs: Dataset, config: TripletConfig) -> tuple[Dataset, Mining]:
    """Adds to each pair of one data set `config.negatives` hard negatives from the same data set.

    Of the distinct documents, a pair's own ones are left out: its document, those of pairs with its key or
    its query, and one with its query's text. The `rank_window` best of the others are its window. What is
    more than `margin` better than the positive is probably an unlabelled answer, and unsafe. The negatives
    are

    1. drawn at random from the safe documents of the window; if there are not enough of them,
    2. the most similar of all safe documents; if there are not enough of them,
    3. the least similar documents.

    Args:
        embedder: one whose `encode` takes a `max_length`.
        index: `unmask.evaluation.search.index`, or another one. Of equal scores, the document that comes
            first in the data is to be the better.
        pairs: of one data set, with columns query, document, key and dataset.
        config: negatives, margin, rank_window, query_length, document_length and seed.
    Returns: the pairs with a column `negatives` (a list of texts), and statistics.
    Raises: ValueError if the data set is too small to hold that many negatives.
    Source: pplx-embed, section 2.5; window and margin are choices of ours, the paper gives none.
    """
    (queries, query_N), (documents, document_N) = (distinct(pairs[name]) for name in ("query", "document"))
    known_NM = _known_positives(pairs["key"], (queries, documents), query_N, document_N)
    left = int((len(documents) - known_NM.getnnz(axis=1)).min())
    if left < config.negatives:
        few = f"data set {pairs[0]['dataset']!r} has a query with {left} documents that are not its own"
        raise ValueError(f"{few}: leave it out, or lower triplet.negatives")
    q_UD = embedder.encode(queries, max_length=config.query_length)
    d_MD = embedder.encode(documents, max_length=config.document_length)
    window = min(max(config.rank_window, config.negatives), len(documents))
    config = replace(config, rank_window=window)  # never wider than all documents
    search, rng, blocks = index(d_MD), np.random.default_rng(config.seed), []
    for part in tqdm(parts(len(pairs), ROWS), desc="searching", unit="block", leave=False, file=sys.stdout):
        q_RD, d_RD = q_UD[query_N[part]], d_MD[document_N[part]]
        blocks.append(_choose(search, q_RD, d_RD, known_NM[part], rng, config))
    ids_NK, *facts = (np.concatenate(rows) for rows in zip(*blocks, strict=True))
    mined = pairs.add_column("negatives", [[documents[i] for i in row] for row in ids_NK])
    return mined, Mining(len(documents), window, *facts)


def draw(corpus: Corpus, groups: Sequence[str], count: int, seed: int) -> dict[str, Dataset]:
    """At most about `count` training pairs of some groups, from each data set in proportion to its size.

    Args:
        groups: of pairs, for instance ("english", "code").
    Returns: data set -> pairs in the corpus's order, at least 64 of each where it has them.
    Raises: ValueError if no data set is of these groups.
    """
    tables = {name: corpus.pairs("train", name) for name in corpus.datasets("pairs", "train")}
    wanted = {name: table for name, table in tables.items() if table[0]["group"] in groups}
    if not wanted:
        raise ValueError(f"no training pairs of the groups {', '.join(groups)}: set triplet.groups to others")
    return sample(wanted, count, seed)


def sample(tables: Mapping[str, Dataset], count: int, seed: int) -> dict[str, Dataset]:
    """At most about `count` rows, from each table in proportion to its size, as `draw`."""
    share = min(1.0, count / max(1, sum(map(len, tables.values()))))
    rng = np.random.default_rng(seed)
    drawn = {}
    for name, table in tables.items():
        size = min(len(table), max(round(share * len(table)), FEWEST))
        drawn[name] = table.select(np.sort(rng.choice(len(table), size, replace=False)))
    return drawn


def _known_positives(
    keys: Sequence[str], texts: Sequence, query_N: np.ndarray, document_N: np.ndarray
) -> csr_matrix:
    """Documents that are no negatives of a pair: those of all pairs with its key or its query, and one with
    its query's text. `texts` are the distinct queries and documents."""
    queries, documents = texts
    here_N, groups = np.ones(len(document_N), bool), (distinct(keys)[1], query_N)
    known_NM = sum(csr_matrix((here_N, (group_N, document_N)))[group_N] for group_N in groups)
    copy_N = distinct([*documents, *queries])[1][len(documents) :][query_N]
    rows = np.flatnonzero(copy_N < len(documents))
    return known_NM + csr_matrix((here_N[rows], (rows, copy_N[rows])), known_NM.shape)


def _candidates(search: Search, q_RD: np.ndarray, known_RM: csr_matrix, depth: int) -> Ranking:
    """The best documents (R, X) of each query but its known positives; last come −inf and −1 for these."""
    score_RX, ids_RX = search(q_RD, min(depth, known_RM.shape[1]))
    known_RX = known_RM[np.arange(len(ids_RX))[:, None], np.array(ids_RX)].toarray()
    order_RX = np.argsort(known_RX, axis=1, kind="stable")
    columns = np.where(known_RX, -np.inf, score_RX), np.where(known_RX, -1, ids_RX)
    return tuple(np.take_along_axis(x_RX, order_RX, 1) for x_RX in columns)


def _choose(
    search: Search, q_RD: np.ndarray, d_RD: np.ndarray, known_RM: csr_matrix, rng: Generator, config: Any
) -> tuple[np.ndarray, ...]:
    """The documents (R, K) that `mine` chooses for some rows; similarities and ranks of positives and
    negatives."""
    count, window, positive_R = config.negatives, config.rank_window, _cosines(q_RD, d_RD)
    ceiling_R1 = (positive_R + np.float32(config.margin))[:, None]
    score_RX, ids_RX = _candidates(search, q_RD, known_RM, window + int(known_RM.getnnz(axis=1).max()))
    score_RW, ids_RW = score_RX[:, :window], ids_RX[:, :window]
    safe_RW = (ids_RW >= 0) & (score_RW <= ceiling_R1)
    order_RK = np.argsort(np.where(safe_RW, rng.random(safe_RW.shape), np.inf), axis=1)[:, :count]
    score_RK, ids_RK = (np.take_along_axis(x_RW, order_RK, 1) for x_RW in (score_RW, ids_RW))
    short, depth, last = np.flatnonzero(safe_RW.sum(axis=1) < count), window, known_RM.shape[1]
    while len(short):
        depth, enough = min(16 * depth, last), []  # what is safe mostly lies just below the window
        for rows in np.array_split(short, -(-len(short) * depth // SCORES)):
            ranking = _candidates(search, q_RD[rows], known_RM[rows], depth)
            score_RK[rows], ids_RK[rows], enough_S = _below(*ranking, ceiling_R1[rows], count)
            enough.append(enough_S)
        short = short[~np.concatenate(enough)] if depth < last else ()
    hit_RKW = ids_RK[..., None] == ids_RW[:, None]
    rank_RK = 1 + np.where(hit_RKW.any(axis=2), hit_RKW.argmax(axis=2), window)
    rank_R = 1 + (score_RW > positive_R[:, None]).sum(axis=1)
    return ids_RK, positive_R, score_RK, rank_R, rank_RK


def _below(
    score_SX: np.ndarray, ids_SX: np.ndarray, ceiling_S1: np.ndarray, count: int
) -> tuple[np.ndarray, ...]:
    """Rules 2 and 3 of `mine` from the beginning of a ranking, or all of it: scores and numbers (S, K), and
    where rule 2 has enough (S,), so that no more of the ranking is needed."""
    safe_SX = (ids_SX >= 0) & (score_SX <= ceiling_S1)
    enough_S = safe_SX.sum(axis=1) >= count
    best_first_SX = np.where(safe_SX & enough_S[:, None], -score_SX, score_SX)
    order_SK = np.lexsort((ids_SX, best_first_SX, ~safe_SX, ids_SX < 0))[:, :count]
    return *(np.take_along_axis(x_SX, order_SK, 1) for x_SX in (score_SX, ids_SX)), enough_S


def _cosines(q_ND: np.ndarray, d_ND: np.ndarray) -> np.ndarray:
    """Cosine (N,) of each query and the document beside it, rounded once to float32."""
    q_ND, d_ND = q_ND.astype(np.float64), d_ND.astype(np.float64)
    squares_N = (q_ND**2).sum(axis=1) * (d_ND**2).sum(axis=1)
    return ((q_ND * d_ND).sum(axis=1) / np.sqrt(np.where(squares_N == 0, 1, squares_N))).astype(np.float32)


# --- clusters of similar rows


@dataclass(frozen=True)
class Neighbours:
    """One data set as a surrogate embedder sees it.

    Vectors have half precision and are compared in float64, where sums of products of such numbers are exact:
    the same text has the same similarity on every machine.
    """

    q_ND: np.ndarray  # of each row's query: float16, unit length, mapped into memory
    d_ND: np.ndarray  # of its document
    order: ClusterOrder | None = None  # None: random batches

    def similarity(self, rows: np.ndarray) -> np.ndarray:
        """The cosines (N, N) of the rows' queries and documents."""
        return self.q_ND[rows].astype(np.float64) @ self.d_ND[rows].astype(np.float64).T

    def negative_mask(self, rows: np.ndarray, margin: float) -> np.ndarray:
        """Which documents of a batch may be negatives of its queries: those outside of CDE's
        S(q,d) = {d′ : f(q,d′) ≥ f(q,d) + ε}, with the cosine f of the surrogate's vectors.

        Args:
            rows: the rows of the batch.
            margin: ε, 0 or more.
        Returns: booleans (N, N); a query's own document counts as True.
        """
        scores_NN = self.similarity(rows)
        return (scores_NN < scores_NN.diagonal()[:, None] + margin) | np.eye(len(rows), dtype=bool)


def negative_similarity(near: Neighbours, rows: Sequence[int]) -> float:
    """How hard a batch is: the surrogate's mean cosine of a query to the other documents (CDE, figure 6)."""
    scores_NN = near.similarity(rows)
    return float((scores_NN.sum() - scores_NN.trace()) / (len(rows) * (len(rows) - 1)))


class Surrogate(NamedTuple):
    """The embedder that says which texts are similar, and how they are put into clusters."""

    hash: str
    open: Callable[[], Encoder]
    config: ClustersConfig


def neighbours(
    name: str, data: TokenPairs, tokenizer: PlainTokenizer, surrogate: Surrogate, training: PairConfig
) -> Neighbours:
    """A data set's neighbours; vectors and clusters are computed on first use and kept in files.

    Every distinct text is embedded once, as the training reads it: cut, its tokens decoded but special ones.

    Args:
        name: of the data set, for messages.
        tokenizer: that of the data.
        training: `cluster_size`, rows of a cluster on average (0: no clusters), and `seed`, of k-means and of
            the order of the clusters.
    Raises: ValueError if the embedder's answer is not finite.
    """
    code = code_fingerprint(__file__, batches.__file__, Path(__file__).parents[1] / "models")
    key = [data.hash, tokenizer.hash, surrogate.hash, code]
    vectors_XD = cached_array("vectors", key, lambda: _embedded(name, data, tokenizer, surrogate.open()))
    near = Neighbours(*np.split(vectors_XD, [len(data.queries)]))
    size, seed, config = training.cluster_size, training.seed, surrogate.config
    if not size:
        return near
    key += [size, config.iterations, config.attempts, seed]
    cluster_N = cached_array("clusters", key, lambda: clusters(near, size, config, seed))
    return replace(near, order=ClusterOrder.of(cluster_N))


def _embedded(name: str, data: TokenPairs, tokenizer: PlainTokenizer, encoder: Encoder) -> np.ndarray:
    """Vectors (X, D) of all queries, then of all documents: float16, unit length."""
    texts, blocks = ConcatDataset([data.queries, data.documents]), []
    hash_X = np.fromiter((hash64(ids.tobytes()) for ids in texts), np.uint64)
    _, first_U, number_X = np.unique(hash_X, return_index=True, return_inverse=True)
    for part in tqdm(
        parts(len(first_U), TEXTS), desc=f"embedding the texts of {name}", leave=False, file=sys.stdout
    ):
        ids = [texts[int(i)].tolist() for i in first_U[part]]
        x_UD = unit(encoder.encode(tokenizer.backend.decode_batch(ids, skip_special_tokens=False)))
        if not np.isfinite(x_UD).all():
            raise ValueError(f"the surrogate's vectors of data set {name!r} are not finite: check the model")
        blocks.append(x_UD.astype(np.float16))
    return np.concatenate(blocks)[number_X]


def clusters(near: Neighbours, cluster_size: int, config: ClustersConfig, seed: int) -> np.ndarray:
    """Each row's cluster (N,), numbered in the order in which clusters fill batches.

    Spherical k-means with k = ⌈N / cluster_size⌉ on two points per row, [q⊕d] and [d⊕q]; a row is in the
    cluster of its [q⊕d]. Starting at random, each cluster is followed by the nearest one left (by
    centroid): K² D multiplications.

    Memory: all points in float32, 16 D bytes per row, and those that faiss samples, 256 per centroid.
    """
    points = np.block([[near.q_ND, near.d_ND], [near.d_ND, near.q_ND]]).astype(np.float32)
    count = len(near.q_ND)
    options = {"niter": config.iterations, "nredo": config.attempts, "seed": seed, "spherical": True}
    options["min_points_per_centroid"] = 1  # else it prints a warning
    kmeans = faiss.Kmeans(points.shape[1], -(-count // cluster_size), **options)
    kmeans.train(points)
    filled_K, cluster_N = np.unique(kmeans.assign(points[:count])[1], return_inverse=True)
    start = int(permuted(np.array(0), len(filled_K), seed))
    return np.argsort(greedy_order(kmeans.centroids[filled_K], start))[cluster_N]


def greedy_order(centroids_KD: np.ndarray, start: int) -> np.ndarray:
    """All centroids, each followed by the most similar (dot product) of those not yet visited."""
    left_K = np.ones(len(centroids_KD), bool)
    order_K = np.full(len(centroids_KD), start)
    for place in range(1, len(order_K)):
        left_K[order_K[place - 1]] = False
        scores_K = centroids_KD @ centroids_KD[order_K[place - 1]]
        order_K[place] = np.where(left_K, scores_K, -np.inf).argmax()
    return order_K


# --- for both, and for evaluation


def unit(x_XD: np.ndarray) -> np.ndarray:
    """Codes or floats as float32 vectors of length one; zero vectors stay."""
    x_XD = np.asarray(x_XD, np.float32)
    norm_X1 = np.linalg.norm(x_XD, axis=1, keepdims=True)
    return x_XD / np.where(norm_X1 == 0, 1, norm_X1)


def cached_array(kind: str, key: Sequence[Any], compute: Callable[[], np.ndarray]) -> np.ndarray:
    """An array that is computed once, stored under artifacts/data by what decides it and mapped into
    memory."""
    path = artifacts_root() / "data" / kind / f"{fingerprint(*key)}.npy"
    path.parent.mkdir(parents=True, exist_ok=True)
    with nullcontext() if path.is_file() else locked(path.with_suffix(".lock")):
        if not path.is_file():  # nor has another process made it meanwhile
            with replacing(path) as unfinished, unfinished.open("wb") as stream:
                # Through Python, which says what is wrong with a disk: NumPy counts what it has written.
                np.save(SimpleNamespace(write=stream.write), compute())
    return np.load(path, mmap_mode="r")
