"""Look-alikes: rows that a surrogate embedder finds similar meet in a batch, and what it takes for an
unlabelled answer is no negative (CDE, section 4.1).

Shape suffixes: N rows or queries · M documents · U distinct texts · D dimensions · P points · K clusters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np
from torch.utils.data import ConcatDataset
from tqdm.auto import tqdm

from unmask.config import ClustersConfig
from unmask.data import batches
from unmask.data.batches import Packing, permuted
from unmask.data.mining import Encoder, kept, parts, unit
from unmask.data.tokenized import Ragged, TokenDocuments, TokenPairs
from unmask.data.tokens import StoredTokenizer
from unmask.store import code_fingerprint

LSA = "lsa"  # the surrogate that is no embedder
COMPONENTS = 256  # LSA: dimensions
FITTED = 50_000  # LSA: texts that it is computed from, at most
TEXTS = 4096  # embedded at once
ROWS = 16_384  # assigned to clusters at once
SAMPLE = 2**30  # bytes of the points that centroids are computed from, unless that were fewer than
LEAST = 8  # points per centroid


@dataclass(frozen=True)
class Neighbours:
    """One data set as a surrogate embedder sees it.

    The vector of a row's document is the mean of its chunks' vectors (a pair has one), made unit length.
    Vectors have half precision and are compared in float64, where sums of products of such numbers are exact:
    the same text has the same similarity on every machine.
    """

    vectors_UD: np.ndarray  # of the distinct texts: float16, unit length, mapped into memory
    queries: Ragged  # for each row the numbers of its queries' texts; a pair has one query
    documents: Ragged  # for each row the numbers of its chunks' texts
    packing: Packing | None = None  # clusters of rows; None: random batches

    def negatives(
        self, rows: Sequence[int], margin: float,
        document_N: np.ndarray | None = None, query_N: np.ndarray | None = None,
    ) -> np.ndarray:  # fmt: skip
        """Which documents of a batch may be negatives of its queries: those outside of CDE's
        S(q,d) = {d′ : f(q,d′) ≥ f(q,d) + ε}, with the cosine f of the surrogate's vectors.

        Args:
            rows: the M rows of the batch.
            margin: ε, 0 or more.
            document_N: for each query its document, a place in `rows`. Default: one query per row.
            query_N: for each query which one of its row's queries it is. Default: the first.
        Returns: booleans (N, M); a query's own document counts as True.
        """
        document_N = np.arange(len(rows)) if document_N is None else document_N
        query_N = np.zeros(len(document_N), np.int64) if query_N is None else query_N
        texts_N = [self.queries[rows[m]][n] for m, n in zip(document_N, query_N, strict=True)]
        scores_NM = _dots(self.vectors_UD[texts_N], self._means(self.documents, rows))
        own_N1 = np.take_along_axis(scores_NM, document_N[:, None], 1)
        negatives_NM = scores_NM < own_N1 + margin
        np.put_along_axis(negatives_NM, document_N[:, None], True, 1)
        return negatives_NM

    def points(self, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Vectors of the rows' queries (the mean of each row's) and documents: float16, unit length."""
        return self._means(self.queries, rows), self._means(self.documents, rows)

    def _means(self, texts: Ragged, rows: Sequence[int]) -> np.ndarray:
        numbers = [texts[int(row)] for row in rows]
        starts = np.cumsum([0, *map(len, numbers[:-1])])
        sums_ND = np.add.reduceat(self.vectors_UD[np.concatenate(numbers)].astype(np.float32), starts)
        return unit(sums_ND).astype(np.float16)


def negative_similarity(own: Neighbours, rows: Sequence[int]) -> float:
    """How hard a batch is: the surrogate's mean cosine of a query to the other documents (CDE, figure 6)."""
    scores_NN = _dots(*own.points(rows))
    return float((scores_NN.sum() - scores_NN.trace()) / (len(rows) * (len(rows) - 1)))


def _dots(q_ND: np.ndarray, d_MD: np.ndarray) -> np.ndarray:
    return q_ND.astype(np.float64) @ d_MD.astype(np.float64).T


@dataclass(frozen=True)
class Surrogate:
    """What says which texts are alike: an embedder, or LSA (`load` is None)."""

    identity: str
    load: Callable[[], Encoder] | None = None


def neighbours(
    data: TokenPairs | TokenDocuments, *, name: str, stored: StoredTokenizer, surrogate: Surrogate,
    config: ClustersConfig, cluster_size: int, seed: int,
) -> Neighbours:  # fmt: skip
    """A data set's neighbours; vectors and clusters are computed on first use and kept in files.

    Every distinct text is embedded once, as the training reads it: cut, its tokens decoded.

    Args:
        name: of the data set, for messages.
        stored: the tokenizer of the data.
        cluster_size: rows of a cluster on average; 0: no clusters.
        seed: of k-means and of the order of the clusters.
    Raises: ValueError if the embedder's answer is not finite.
    """
    queries, documents = _texts(data)
    texts = ConcatDataset([queries.values, documents.values])
    first_U, number = _distinct(texts)
    key = [data.identity, stored, surrogate.identity, code_fingerprint(__file__, batches.__file__)]
    vectors_UD = kept("vectors", key, lambda: _embedded(texts, first_U, name, stored, surrogate))
    query_texts = Ragged(number[: len(queries.values)], queries.ends)
    own = Neighbours(vectors_UD, query_texts, Ragged(number[len(queries.values) :], documents.ends))
    if not cluster_size:
        return own
    key += [cluster_size, config.packing, config.iterations, config.attempts, seed]
    place_N = kept("clusters", key, lambda: _places(own, cluster_size, config, seed))
    return replace(own, packing=_packing(place_N))


def pack(own: Neighbours, cluster_size: int, config: ClustersConfig, seed: int) -> Packing:
    """Clusters of rows, in the order in which they fill batches.

    Spherical k-means with k = ⌈N / cluster_size⌉ on two points per row, [q⊕d] and [d⊕q]; a row is in the
    cluster of its [q⊕d]. Order "tour" goes on to the cluster whose centroid is nearest of those left, from a
    random one: K² D multiplications.

    Memory: the points that centroids are computed from (1 GiB at most), those that faiss draws of them (256
    per centroid), and some numbers per row. Larger data are represented by a random sample of rows.
    """
    return _packing(_places(own, cluster_size, config, seed))


def _packing(place_N: np.ndarray) -> Packing:
    return Packing(np.argsort(place_N, kind="stable"), np.cumsum(np.bincount(place_N)))


def _places(own: Neighbours, cluster_size: int, config: ClustersConfig, seed: int) -> np.ndarray:
    """Each row's cluster (N,), numbered in the order of `pack`."""
    count = len(own.queries)
    k = -(-count // cluster_size)
    cluster_N, centroids_KD = _clustered(own, k, config, seed)
    found_K, cluster_N = np.unique(cluster_N, return_inverse=True)
    if config.packing == "tour":
        order_K = tour(centroids_KD[found_K], start=int(permuted(np.array(0), len(found_K), seed)))
    else:
        order_K = permuted(np.arange(len(found_K)), len(found_K), seed)
    return np.argsort(order_K)[cluster_N]


def _clustered(own: Neighbours, k: int, config: ClustersConfig, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Each row's cluster among k, and the clusters' centroids."""
    import faiss

    count, width = len(own.queries), 2 * own.vectors_UD.shape[1]
    fits = max(SAMPLE // (4 * width), LEAST * k) // 2
    rows = np.arange(count) if count <= fits else np.sort(permuted(np.arange(fits), count, seed))
    q_ND, d_ND = own.points(rows)
    kmeans = faiss.Kmeans(
        width, k, niter=config.iterations, nredo=config.attempts, spherical=True, seed=seed,
        min_points_per_centroid=1,  # else it prints a warning
    )  # fmt: skip
    kmeans.train(np.block([[q_ND, d_ND], [d_ND, q_ND]]).astype(np.float32))
    blocks = (np.hstack(own.points(np.arange(part.start, part.stop))) for part in parts(count, ROWS))
    return np.concatenate([kmeans.assign(x.astype(np.float32))[1] for x in blocks]), kmeans.centroids


def tour(centroids_KD: np.ndarray, start: int) -> np.ndarray:
    """All centroids, each followed by the most similar (dot product) of those not yet visited."""
    left_K = np.ones(len(centroids_KD), bool)
    order_K = np.full(len(centroids_KD), start)
    for place in range(1, len(order_K)):
        left_K[order_K[place - 1]] = False
        scores_K = centroids_KD @ centroids_KD[order_K[place - 1]]
        order_K[place] = np.where(left_K, scores_K, -np.inf).argmax()
    return order_K


def latent_semantics(texts: Sequence[np.ndarray], vocabulary: int) -> Callable[[Sequence], np.ndarray]:
    """LSA of texts (token ids) as bags of tokens: X ≈ U Σ Vᵀ, of which a text's vector is its row of U Σ^½.

    X holds TF-IDF with 1 + log tf. Half of Σ is left out, else the few topics that every text is about
    would outweigh the rest. Returns the function from texts to vectors.
    """
    from sklearn.decomposition import TruncatedSVD  # a second to import
    from sklearn.feature_extraction.text import TfidfVectorizer

    weights = TfidfVectorizer(
        analyzer=np.ndarray.tolist, lowercase=False, vocabulary=range(vocabulary), sublinear_tf=True,
        dtype=np.float32,
    )  # fmt: skip
    x_UV = weights.fit_transform(texts)
    svd = TruncatedSVD(min(COMPONENTS, *x_UV.shape), random_state=0).fit(x_UV)
    sigma_D = svd.singular_values_
    scale_D = np.sqrt(np.maximum(sigma_D, np.finfo(np.float32).eps * sigma_D[0]))
    return lambda texts: svd.transform(weights.transform(texts)) / scale_D


def _texts(data: TokenPairs | TokenDocuments) -> tuple[Ragged, Ragged]:
    """The texts of each row's queries and of its documents."""
    if isinstance(data, TokenDocuments):
        return data.queries, data.chunks
    one_each = np.arange(1, len(data.keys) + 1)
    return Ragged(data.queries, one_each), Ragged(data.documents, one_each)


def _distinct(texts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Where each distinct text comes first, in any order, and each text's number among those."""
    digests = (int.from_bytes(blake2b(ids.tobytes(), digest_size=8).digest()) for ids in texts)
    return np.unique(np.fromiter(digests, np.uint64), return_index=True, return_inverse=True)[1:]


def _embedded(
    texts: Sequence[np.ndarray], first_U: np.ndarray, name: str, stored: StoredTokenizer, surrogate: Surrogate
) -> np.ndarray:
    """Vectors of the distinct texts, float16, unit length."""
    tokenizer = stored.load()
    if surrogate.load is None:
        some = first_U[permuted(np.arange(min(FITTED, len(first_U))), len(first_U), 0)]
        size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
        encode = latent_semantics([texts[int(i)] for i in some], size)
    else:
        encoder = surrogate.load()

        def encode(own: Sequence[np.ndarray]) -> np.ndarray:
            return encoder.encode(tokenizer.decode_batch([ids.tolist() for ids in own]))

    blocks = []
    for part in tqdm(parts(len(first_U), TEXTS), desc=f"embedding the texts of {name}", leave=False):
        x_UD = unit(encode([texts[int(i)] for i in first_U[part]]))
        if not np.isfinite(x_UD).all():
            raise ValueError(f"the surrogate's vectors of data set {name!r} are not finite: check the model")
        blocks.append(x_UD.astype(np.float16))
    return np.concatenate(blocks)
