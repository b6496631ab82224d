"""The metrics of trec_eval, and the lexical baseline.

Shape suffixes: N queries · M documents · D dimensions · K ranks, up to the largest cut-off.
"""

import unicodedata
from collections.abc import Sequence, Set
from numbers import Integral

import bm25s
import numpy as np
import regex
import torch
from torch import Tensor

from unmask.evaluation.search import best_of
from unmask.models.arguments import as_list, check_texts

# A word is a run of letters, digits and the combining marks that Indic scripts write vowels with, so that an
# identifier is the words that underscores join, as other systems here read it; scripts that put no spaces
# between words count sign by sign, beside digits and Latin letters too.
_SIGN = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
WORD = regex.compile(rf"[{_SIGN}]|[[\p{{L}}\p{{M}}\p{{N}}]--[{_SIGN}]]+", regex.V1)


def retrieval_metrics(
    scores_NM: Tensor | np.ndarray,
    relevant: Sequence[Set[int]],
    ks: Sequence[int] = (10,),
    document_ids: Sequence[str] | None = None,
    *,
    per_query: bool = False,
) -> dict:
    """nDCG, recall, MAP, MRR and precision at each k, equal to trec_eval's, ties included.

    trec_eval compares scores in float32 and orders equal ones by descending document id, as strings. INT8 and
    binary embeddings tie often, so this order is part of the metric.

    Args:
        scores_NM: score of every query (row) with every document (column).
        relevant: for each query the set of columns of its relevant documents (binary relevance).
        ks: cut-offs.
        document_ids: id of each column, for ties only; None: the column number as a string ("9" before "10").
        per_query: return one value per query (float64 array) instead of the mean, for instance to compare
            two systems query by query.

    Returns:
        {"ndcg@10": …, "recall@10": …, "map@10": …, "mrr@10": …, "precision@10": …} for each k. trec_eval's
        names: ndcg_cut, recall, map_cut, recip_rank (zero beyond k) and P.

    Raises:
        ValueError: a query without relevant documents, a column that does not exist or is no number, NaN
            scores, ids that do not match the columns or repeat, or a k below 1.

    Example:
        >>> scores = torch.tensor([[0.9, 0.5, 0.1], [0.3, 0.2, 0.2]])
        >>> metrics = retrieval_metrics(scores, [{1}, {1}], ks=(2,))  # ranks 2 and 3: a tie has "2" first
        >>> f"{metrics['ndcg@2']:.4f} {metrics['recall@2']:.1f}"
        '0.3155 0.5'
    """
    scores_NM = torch.as_tensor(scores_NM).detach().float()
    _check(scores_NM, relevant, ks)
    if (beyond := max(map(max, relevant))) >= (documents := scores_NM.shape[1]):
        raise ValueError(f"There is no document {beyond}, which is said to be relevant: {documents} columns.")
    if document_ids is not None and not len(set(document_ids)) == len(document_ids) == documents:
        raise ValueError(f"document_ids must name the {documents} columns, each differently.")
    if (bad_N := scores_NM.isnan().any(dim=1)).any():
        raise ValueError(f"The scores of query {int(bad_N.nonzero()[0])} contain NaN.")
    return ranking_metrics(best_columns(scores_NM, max(ks), document_ids), relevant, ks, per_query=per_query)


def best_columns(scores_NM: Tensor, k: int, document_ids: Sequence[str] | None = None) -> np.ndarray:
    """Columns (N, K) of each query's best documents in the order of `retrieval_metrics`; K = min(k, M).

    Args:
        scores_NM: float32.
        document_ids: as for `retrieval_metrics`.
    """
    documents = scores_NM.shape[1]
    ids = [str(column) for column in range(documents)] if document_ids is None else document_ids
    # Python compares strings by code point, which is the byte order of UTF-8 that trec_eval's strcmp sees.
    descending = sorted(range(documents), key=ids.__getitem__, reverse=True)
    column_M = torch.tensor(descending, device=scores_NM.device)
    return column_M[best_of(scores_NM[:, column_M], k)[1]].cpu().numpy()


def ranking_metrics(
    ids_NK: np.ndarray, relevant: Sequence[Set[int]], ks: Sequence[int] = (10,), *, per_query: bool = False
) -> dict:
    """The metrics of `retrieval_metrics` from rankings, for corpora too large for a matrix of scores.

    The order is taken as it is. That of `search` has equal scores by ascending document number, while
    trec_eval and `retrieval_metrics` have them by descending document id: with many ties, as binary
    embeddings have them, the two metrics differ a little.

    Args:
        ids_NK: numbers of each query's best documents, best first; −1 where there are no more. Beyond K, a
            ranking is taken to hold nothing relevant, so K should be the largest cut-off, or the corpus.
        relevant: for each query the set of numbers of its relevant documents (binary relevance).
        ks, per_query: as for `retrieval_metrics`.

    Returns:
        As `retrieval_metrics`.

    Raises:
        ValueError: a query without relevant documents, a k below 1, numbers that are no integers, or a query
            whose ranking holds a document twice.

    Example:
        >>> ranking_metrics(np.array([[7, 3, 5], [2, 0, 1]]), [{3}, {2, 9}], ks=(3,))["mrr@3"]
        0.75
    """
    ids_NK = np.asarray(ids_NK)
    _check(ids_NK, relevant, ks)
    if ids_NK.dtype.kind not in "iu":
        raise ValueError(f"A ranking must hold the numbers of documents, as integers; got {ids_NK.dtype}.")
    sorted_NK = np.sort(ids_NK, axis=1)
    twice_N = ((sorted_NK[:, 1:] == sorted_NK[:, :-1]) & (sorted_NK[:, 1:] >= 0)).any(axis=1)
    if twice_N.any():
        raise ValueError(f"The ranking of query {twice_N.argmax()} holds a document twice.")
    count_N = np.array([len(columns) for columns in relevant])
    hits = [[number in columns for number in row] for row, columns in zip(ids_NK.tolist(), relevant)]
    hit_NK = np.array(hits, bool)
    rank_K = np.arange(1, hit_NK.shape[1] + 1)
    discount_K = 1 / np.log2(rank_K + 1)
    ideal = np.cumsum(1 / np.log2(np.arange(max(ks)) + 2))  # DCG of relevant documents at all ranks so far
    precision_NK = np.cumsum(hit_NK, axis=1) / rank_K
    metrics = {}
    for k in ks:
        hit_Nk = hit_NK[:, :k]
        metrics |= {
            f"ndcg@{k}": hit_Nk @ discount_K[:k] / ideal[np.minimum(count_N, k) - 1],
            f"recall@{k}": hit_Nk.sum(axis=1) / count_N,
            f"map@{k}": (hit_Nk * precision_NK[:, :k]).sum(axis=1) / count_N,
            f"mrr@{k}": (hit_Nk / rank_K[:k]).max(axis=1, initial=0),
            f"precision@{k}": hit_Nk.sum(axis=1) / k,
        }
    return metrics if per_query else {name: float(values.mean()) for name, values in metrics.items()}


class Bm25:
    """A BM25 index (Lucene's variant, k1 = 1.5, b = 0.75): the lexical baseline.

    Texts are lower-cased and cut into words of any script, without stemming or stop words; Chinese, Japanese,
    Thai, Lao, Khmer and Burmese characters are words.

    Args:
        documents: texts.

    Raises:
        ValueError: one string instead of a list, or no document holds a word. TypeError: a document that is
            no string.

    Example:
        >>> Bm25(["A red apple.", "A green pear."]).scores(["red apple"]).argmax(axis=1)
        array([0])
    """

    def __init__(self, documents: Sequence[str]):
        words = _words(documents)
        if not any(words):
            raise ValueError("Bm25 needs at least one document with a word.")
        self._engine = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
        self._engine.index(words, show_progress=False)

    @property
    def nbytes(self) -> int:
        """Size of the index: a weight and a document number for each different word of each document, and
        where each word's begin."""
        return sum(part.nbytes for part in self._engine.scores.values() if isinstance(part, np.ndarray))

    def scores(self, queries: Sequence[str]) -> np.ndarray:
        """(N, M), float32: every query with every document; zero where they share no word."""
        queries = _words(queries)
        scores_NM = np.empty((len(queries), self._engine.scores["num_docs"]), np.float32)
        for scores_M, words in zip(scores_NM, queries, strict=True):
            scores_M[:] = self._engine.get_scores_from_ids(self._engine.get_tokens_ids(words))
        return scores_NM


def _words(texts: Sequence[str]) -> list[list[str]]:
    texts = as_list(texts, "[text]")
    check_texts(texts, f"Text {{}} of {len(texts)}".format, empty=True)
    return [WORD.findall(unicodedata.normalize("NFC", text).lower()) for text in texts]


def _check(rows: Tensor | np.ndarray, relevant: Sequence[Set[int]], ks: Sequence[int]) -> None:
    if rows.ndim != 2 or len(rows) != len(relevant) or not len(relevant):
        raise ValueError(f"There must be one row per query; got {tuple(rows.shape)} for {len(relevant)}.")
    for query, columns in enumerate(relevant):
        whole = all(isinstance(column, Integral) and not isinstance(column, bool) for column in columns)
        if not columns or not whole or min(columns) < 0 or len(set(columns)) < len(columns):
            what = f"Query {query} has no relevant document, or one that is no number from 0 on, or one twice"
            raise ValueError(f"{what}: {[*columns]}.")
    if not ks or min(ks) < 1:
        raise ValueError(f"Cut-offs must be 1 or more; got {list(ks)}.")
