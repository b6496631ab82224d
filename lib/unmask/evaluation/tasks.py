"""Retrieval tasks built from the held-out part of the corpus, and how a model scores on them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from torch import Tensor

from unmask.config import FAMILIES, EvaluationConfig
from unmask.data import hub
from unmask.data.corpus import Corpus
from unmask.evaluation.metrics import Bm25, retrieval_metrics
from unmask.evaluation.search import similarity
from unmask.models.backbone import computes_in_bf16
from unmask.models.embedder import Embedder, quantized
from unmask.store import artifacts_root, code_fingerprint, fingerprint, replacing
from unmask.training.stages import identity

_unreachable = cache(hub.unreachable)  # the Hub is asked once
# Of the library: what scores depend on, beside the checkpoint and the task.
_CODE = ("models", "evaluation/metrics.py", "evaluation/search.py")


@dataclass(frozen=True)
class Task:
    """Queries against a corpus of chunks. A plain task has documents of one chunk each.

    `relevant[i]` holds the numbers of the chunks that answer query i, counted over all documents in order.
    `chunk_ids` names the chunks, which orders equal scores; None: by their numbers.
    """

    name: str
    family: str
    queries: list[str]
    documents: list[list[str]]
    relevant: list[set[int]]
    chunk_ids: list[str] | None = None

    @property
    def contextual(self) -> bool:
        return self.family == "contextual"

    @property
    def chunks(self) -> list[str]:
        return [chunk for document in self.documents for chunk in document]

    @property
    def identity(self) -> str:
        """Hash of what is asked, searched and right."""
        relevant = [sorted(chunks) for chunks in self.relevant]
        return fingerprint(self.family, self.queries, self.documents, relevant, self.chunk_ids)


@dataclass(frozen=True)
class Vectors:
    """Unquantised vectors of a task's queries and chunks: encode once, score in every precision."""

    queries_ND: np.ndarray
    chunks_MD: np.ndarray


def build_tasks(corpus: Corpus, split: str, config: EvaluationConfig) -> list[Task]:
    """All tasks of a held-out split ("dev" for choices, "test" for reports), by family, then by name.

    A task joins the data sets that name it. Rows are drawn by the hash of their text, so a corpus that grows
    a little changes a task a little.

    Raises: ValueError if the split holds no task at all, or one whose first document is too large.
    """
    if split == "dev":
        fewer = {"max_queries": config.dev_queries, "max_documents": config.dev_documents}
        config = replace(config, **{key: value for key, value in fewer.items() if value})
    rows: dict[tuple[str, str], list[dict]] = {}
    for name in corpus.datasets("pairs", split):
        for row in corpus.pairs(split, name):
            rows.setdefault((row["group"], row["task"]), []).append(row)
    for name in corpus.datasets("documents", split):
        for row in corpus.documents(split, name):
            rows.setdefault(("contextual", row["task"]), []).append(row)
    tasks = []
    for family, name in sorted(rows, key=lambda key: (FAMILIES.index(key[0]), key[1])):
        make = _document_task if family == "contextual" else _pair_task
        tasks.append(make(name, family, rows[family, name], config))
        if not tasks[-1].queries:
            raise ValueError(
                f"the {split} split gives no task {name!r} of at most {config.max_documents} chunks: "
                "raise evaluation.max_documents"
            )
    if not tasks:
        raise ValueError(
            f"the corpus holds nothing out for {split!r}: set hold_out in the registry of its sources, or "
            f"name data.{split}_packages"
        )
    return tasks


def _hash(*texts: str) -> bytes:
    return hashlib.sha256("\0".join(texts).encode()).digest()


def _pair_task(name: str, family: str, rows: list[dict], config: EvaluationConfig) -> Task:
    rows = sorted(rows, key=lambda row: _hash(row["query"], row["document"]))[: config.max_documents]
    texts = sorted({row["document"] for row in rows})
    number = {text: i for i, text in enumerate(texts)}
    of_key: dict[str, set[int]] = {}
    for row in rows:
        of_key.setdefault(row["key"], set()).add(number[row["document"]])
    asked = rows[: config.max_queries]
    relevant = [of_key[row["key"]] for row in asked]
    return Task(name, family, [row["query"] for row in asked], [[text] for text in texts], relevant)


def _document_task(name: str, family: str, rows: list[dict], config: EvaluationConfig) -> Task:
    documents, asked, first = [], [], 0
    for row in sorted(rows, key=lambda row: _hash(row["document_id"])):
        if first + len(row["chunks"]) > config.max_documents:
            break
        documents.append(list(row["chunks"]))
        asked += [(query, {first + gold}) for query, gold in zip(row["queries"], row["golds"], strict=True)]
        first += len(row["chunks"])
    asked = sorted(asked, key=lambda one: _hash(one[0]))[: config.max_queries]
    return Task(name, family, [query for query, _ in asked], documents, [gold for _, gold in asked])


def located(repo: str) -> str:
    """Where `datasets` finds a repository: its folder in the mirror, or else its name on the Hub.

    Raises: OSError if it can be had from neither.
    """
    folder = hub.local(repo)
    if folder is None and (why := _unreachable()):
        raise OSError(f"{repo} is in no mirror (UNMASK_MIRROR), and the Hub: {why}")
    return str(folder or repo)


def embed_task(embedder: Embedder, task: Task, config: EvaluationConfig, *, late_chunking: bool) -> Vectors:
    """Vectors of a task: chunks in the light of their document (late chunking), or each alone."""
    queries_ND = embedder.encode(task.queries, "float32", max_length=config.query_length)
    return Vectors(queries_ND, embed_chunks(embedder, task, config, late_chunking=late_chunking))


def embed_chunks(
    embedder: Embedder, task: Task, config: EvaluationConfig, *, late_chunking: bool
) -> np.ndarray:
    """The unquantised vectors of a task's chunks alone, see `embed_task`."""
    if late_chunking and task.contextual:
        parts = embedder.encode_documents(task.documents, "float32", chunk_length=config.chunk_length)
        return np.concatenate(parts)
    length = config.chunk_length if task.contextual else config.document_length
    return embedder.encode(task.chunks, "float32", max_length=length)


def score_task(
    task: Task, vectors: Vectors, precision: str = "int8", dimensions: int | None = None
) -> np.ndarray:
    """nDCG@10 of each query, cosine similarity, in a precision and at the first `dimensions`."""
    q_ND = quantized(vectors.queries_ND, precision, dimensions)
    d_MD = quantized(vectors.chunks_MD, precision, dimensions)
    return ndcg(task, similarity(q_ND, d_MD))


def ndcg(task: Task, scores_NM: Tensor | np.ndarray) -> np.ndarray:
    """nDCG@10 of each query of a task, given the score of each chunk for it."""
    return retrieval_metrics(scores_NM, task.relevant, document_ids=task.chunk_ids, per_query=True)["ndcg@10"]


def evaluate(
    embedder: Embedder,
    tasks: list[Task],
    config: EvaluationConfig,
    *,
    late_chunking: bool = False,
    precision: str = "int8",
) -> dict[str, np.ndarray]:
    """nDCG@10 of each query of each task."""
    return {
        task.name: score_task(
            task, embed_task(embedder, task, config, late_chunking=late_chunking), precision
        )
        for task in tasks
    }


def assess(
    path: str | Path, tasks: list[Task], config: EvaluationConfig, *, late_chunking: bool = False
) -> dict[str, np.ndarray]:
    """`evaluate` for a checkpoint, in INT8 and in the preset's precision of computing.

    Scores are kept under artifacts/data/scores: notebooks compare with the models of earlier ones, and a task
    without documents of chunks has the same scores with late chunking and without.
    """
    model, lengths = identity(Path(path)), (config.query_length, config.document_length, config.chunk_length)
    root = Path(__file__).parents[1]
    code = code_fingerprint(*(root / name for name in _CODE))
    scores, embedder = {}, None
    for task in tasks:
        late = late_chunking and task.contextual
        key = fingerprint(model, task.identity, lengths, config.precision, late, code)
        kept = artifacts_root() / "data" / "scores" / f"{key}.npy"
        if not kept.is_file():
            if embedder is None:
                embedder = Embedder.from_pretrained(path, mixed_precision=computes_in_bf16(config.precision))
            found = evaluate(embedder, [task], config, late_chunking=late)
            with replacing(kept) as temporary, temporary.open("wb") as stream:
                np.save(stream, found[task.name])
        scores[task.name] = np.load(kept)
    return scores


def task_means(scores: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, dict[str, float]]:
    """Per-query scores of several models as means: model → task → nDCG@10."""
    return {
        model: {task: float(values.mean()) for task, values in row.items()} for model, row in scores.items()
    }


def evaluate_bm25(tasks: list[Task]) -> dict[str, np.ndarray]:
    """The lexical baseline: nDCG@10 of each query of each task; chunks are seen alone."""
    return {task.name: ndcg(task, Bm25(task.chunks).scores(task.queries)) for task in tasks}


def family_means(scores: dict[str, np.ndarray], tasks: list[Task]) -> dict[str, float]:
    """Unweighted mean over the tasks of each family, and over all tasks as "average"."""
    means = {task.name: float(np.mean(scores[task.name])) for task in tasks}
    families: dict[str, list[float]] = {}
    for task in tasks:
        families.setdefault(task.family, []).append(means[task.name])
    return {
        family: float(np.mean(row)) for family, row in (families | {"average": [*means.values()]}).items()
    }
