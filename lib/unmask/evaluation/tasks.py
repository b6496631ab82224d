"""Retrieval tasks, and how a model scores on them.

Shape suffixes: N queries · M chunks · D dimensions.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from unmask.config import EvaluationConfig
from unmask.data.spelling import canonical, distinct
from unmask.evaluation.metrics import Bm25, retrieval_metrics
from unmask.evaluation.search import similarity
from unmask.models.backbone import computes_in_bf16
from unmask.models.embedder import Embedder, quantized
from unmask.store import fingerprint


@dataclass(frozen=True)
class Task:
    """Queries against a corpus of chunks. A plain task has documents of one chunk each.

    `relevant[i]` holds the numbers of the chunks that answer query i, counted over all documents in order.
    `chunk_ids` names the chunks, which orders equal scores; None: by their numbers. With `ignore_identical` a
    chunk with the query's own text is no candidate, unless it answers; public benchmarks say themselves.
    """

    name: str
    family: str
    queries: list[str]
    documents: list[list[str]]
    relevant: list[set[int]]
    chunk_ids: list[str] | None = None
    ignore_identical: bool = False

    @property
    def contextual(self) -> bool:
        return self.family == "contextual"

    @cached_property
    def chunks(self) -> list[str]:
        return [chunk for document in self.documents for chunk in document]

    @cached_property
    def document_M(self) -> np.ndarray:
        """The number of each chunk's document."""
        return np.repeat(np.arange(len(self.documents)), [len(chunks) for chunks in self.documents])

    @property
    def document_N(self) -> np.ndarray:
        """For each query the number of the document that answers it (of several the first)."""
        return self.document_M[[min(chunks) for chunks in self.relevant]]

    @property
    def content_hash(self) -> str:
        """Hash of queries, documents and answers."""
        relevant = [sorted(chunks) for chunks in self.relevant]
        ranked = self.chunk_ids, self.ignore_identical
        return fingerprint(self.family, self.queries, self.documents, relevant, *ranked)

    @cached_property
    def identical(self) -> tuple[list[int], list[int]]:
        """Queries and chunks of one text, where the chunk is no candidate."""
        places: dict[str, list[int]] = {}
        for number, chunk in enumerate(self.chunks if self.ignore_identical else ()):
            places.setdefault(canonical(chunk), []).append(number)
        rows = enumerate(zip(self.queries, self.relevant))
        copies = ((n, {*places.get(canonical(query), ())} - answers) for n, (query, answers) in rows)
        pairs = [(number, chunk) for number, chunks in copies for chunk in sorted(chunks)]
        return [number for number, _ in pairs], [chunk for _, chunk in pairs]


@dataclass(frozen=True)
class Vectors:
    """Unquantised vectors of a task's queries and chunks: encode once, score in every precision."""

    queries_ND: np.ndarray
    chunks_MD: np.ndarray

    def similarity(self, precision: str = "int8", dimensions: int | None = None) -> Tensor:
        """Cosines (N, M) of queries and chunks in a precision, at the first `dimensions`."""
        both = (quantized(x, precision, dimensions) for x in (self.queries_ND, self.chunks_MD))
        return similarity(*both)


def copies(chunks: Sequence[str], gold: int, first: int = 0) -> set[int]:
    """The chunks of a document with the text of one of them, numbered from `first` on."""
    text = canonical(chunks[gold])
    return {first + number for number, chunk in enumerate(chunks) if canonical(chunk) == text}


def documents_of(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of documents, those of the same chunks as one, the first, with the queries of all."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        chunks = tuple(map(canonical, row["chunks"]))
        same = found.setdefault(chunks, {**row, "queries": [], "golds": []})
        same["queries"] += row["queries"]
        same["golds"] += row["golds"]
    return [*found.values()]


def answers(rows: Sequence[tuple[str, set[int]]]) -> dict[str, set[int]]:
    """Each query once, with all that answers it in any row."""
    queries, number_N = distinct([query for query, _ in rows])
    relevant: dict[str, set[int]] = {query: set() for query in queries}
    for number, (_, golds) in zip(number_N, rows):
        relevant[queries[number]] |= golds
    return relevant


def embed_task(embedder: Embedder, task: Task, config: EvaluationConfig, *, late_chunking: bool) -> Vectors:
    """Vectors of a task: chunks in the light of their document (late chunking), or each alone."""
    queries_ND = embedder.encode(task.queries, "float32", max_length=config.query_length)
    if late_chunking and task.contextual:
        parts = embedder.encode_documents(task.documents, "float32", chunk_length=config.chunk_length)
        return Vectors(queries_ND, np.concatenate(parts))
    length = config.chunk_length if task.contextual else config.document_length
    return Vectors(queries_ND, embedder.encode(task.chunks, "float32", max_length=length))


def score_task(
    task: Task, vectors: Vectors, precision: str = "int8", dimensions: int | None = None
) -> np.ndarray:
    """nDCG@10 of each query, cosine similarity, in a precision and at the first `dimensions`."""
    return ndcg(task, vectors.similarity(precision, dimensions))


def among_candidates(task: Task, scores_NM: Tensor | np.ndarray) -> Tensor:
    """The scores, −∞ where a chunk is no candidate (`Task.ignore_identical`)."""
    scores_NM = torch.as_tensor(scores_NM).clone()
    scores_NM[task.identical] = -torch.inf
    return scores_NM


def ndcg(task: Task, scores_NM: Tensor | np.ndarray) -> np.ndarray:
    """nDCG@10 of each query of a task, given the score of each chunk for it."""
    scores_NM = among_candidates(task, scores_NM)
    return retrieval_metrics(scores_NM, task.relevant, document_ids=task.chunk_ids, per_query=True)["ndcg@10"]


def evaluate(
    embedder: Embedder, tasks: list[Task], config: EvaluationConfig, *, late_chunking: bool = False
) -> dict[str, np.ndarray]:
    """nDCG@10 of each query of each task, in INT8."""
    embedded = ((task, embed_task(embedder, task, config, late_chunking=late_chunking)) for task in tasks)
    return {task.name: score_task(task, vectors) for task, vectors in embedded}


def probe(
    tasks: list[Task],
    tokenizer: PreTrainedTokenizerBase,
    config: EvaluationConfig,
    *,
    late_chunking: bool = False,
    **settings: Any,
) -> Callable[[PreTrainedModel], dict[str, float]]:
    """What measures a model while it trains (`Watch`): nDCG@10 of each of these tasks. Settings are those of
    an `Embedder`; by default it takes the mean."""

    def measure(model: PreTrainedModel) -> dict[str, float]:
        model.set_attn_implementation("sdpa")  # which reads texts of different lengths without padding
        settings["mixed_precision"] = computes_in_bf16(config.precision)
        embedder = Embedder(model, tokenizer, **settings)
        scores = evaluate(embedder, tasks, config, late_chunking=late_chunking)
        return {name: float(score_N.mean()) for name, score_N in scores.items()}

    return measure


def evaluate_bm25(tasks: list[Task]) -> dict[str, np.ndarray]:
    """The lexical baseline: nDCG@10 of each query of each task; chunks are seen alone."""
    return {task.name: ndcg(task, Bm25(task.chunks).scores(task.queries)) for task in tasks}
