"""ToolRet (Shi et al., 2025): which tools of a large collection does a request need? The paper's table 5.

Shape suffixes: N queries · M tools · K ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from unmask.data import hub
from unmask.evaluation.metrics import ranking_metrics
from unmask.evaluation.search import index
from unmask.models.embedder import Embedder

TOOLS, QUERIES = "mangopy/ToolRet-Tools", "mangopy/ToolRet-Queries"
METRICS = ("ndcg@10", "precision@10", "recall@10", "completeness@10")


@dataclass(frozen=True)
class ToolTask:
    """Requests, each with an instruction that says what kind of tool is wanted, and the tools it needs."""

    name: str
    category: str  # "web", "code" or "customized"
    queries: list[str]
    instructions: list[str]
    relevant: list[set[int]]


@dataclass(frozen=True)
class ToolRet:
    """One collection of tools, all categories together, and the tasks that search it."""

    tools: list[str]
    tasks: list[ToolTask]


def load_toolret() -> ToolRet:
    """The public benchmark, from UNMASK_MIRROR or the Hub: 35 tasks over about 43,000 tools.

    Layout: the tools' repository has a configuration for each category with columns id and documentation, the
    queries' one for each task with id, query, instruction, labels (JSON: id and relevance of each tool) and
    category.

    Raises: OSError if the repositories can be had from neither; ValueError for a label without its tool.
    """
    from datasets import load_dataset

    tools: dict[str, str] = {}
    for repository, config in _configs(TOOLS):
        rows = load_dataset(repository, config, split="tools")
        tools |= zip(map(str, rows["id"]), rows["documentation"], strict=True)
    number = {id: index for index, id in enumerate(tools)}
    tasks = [
        _task(name, load_dataset(repository, name, split="queries"), number)
        for repository, name in _configs(QUERIES)
    ]
    return ToolRet(list(tools.values()), tasks)


def _configs(repo: str) -> list[tuple[str, str]]:
    """Where a data set is, with each of its configurations."""
    from datasets import get_dataset_config_names

    folder = hub.local(repo)
    if folder is None and (why := hub.unreachable()):
        raise OSError(f"{repo}: neither in a mirror (UNMASK_MIRROR) nor on the Hub ({why})")
    return [(str(folder or repo), name) for name in get_dataset_config_names(str(folder or repo))]


def _task(name: str, rows: Iterable[Mapping[str, Any]], number: Mapping[str, int]) -> ToolTask:
    task = ToolTask(name, "", [], [], [])
    for row in rows:
        wanted = {str(label["id"]) for label in json.loads(row["labels"]) if label["relevance"] > 0}
        if missing := wanted - number.keys():
            raise ValueError(f"ToolRet, {name}, query {row['id']}: no such tool: {sorted(missing)}")
        if wanted:
            task.queries.append(row["query"])
            task.instructions.append(row["instruction"] or "")
            task.relevant.append({number[id] for id in wanted})
            category = row["category"]
    if not task.queries:
        raise ValueError(f"ToolRet, {name}: no query has a relevant tool")
    return ToolTask(name, category, task.queries, task.instructions, task.relevant)


def instructed(query: str, instruction: str) -> str:
    """A query with its instruction, in the form that the benchmark's authors give plain models."""
    return f"Instruct: {instruction}\nQuery: {query}" if instruction else query


def tool_metrics(ids_NK: np.ndarray, relevant: Sequence[Set[int]]) -> dict[str, float]:
    """nDCG, precision, recall and completeness at 10, means over queries.

    Completeness is 1 for a query of which all tools are among the first ten, else 0: half of the tools for a
    request is no answer to it. (The paper calls it comprehensiveness.)

    Args:
        ids_NK: tools of each query, best first, at least ten where there are so many.
    """
    values = ranking_metrics(ids_NK, relevant, (10,), per_query=True)
    values["completeness@10"] = values["recall@10"] == 1
    return {name: float(np.mean(values[name])) for name in METRICS}


def evaluate_toolret(
    embedder: Embedder,
    data: ToolRet,
    *,
    instructions: bool = True,
    precision: str = "int8",
    query_length: int | None = None,
    document_length: int | None = None,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """`tool_metrics` of each task, over the tools of all categories together.

    Args:
        instructions: put each query's instruction before it (`instructed`).
        query_length, document_length: tokens at most.
    Returns: rows of task, category and METRICS.
    """
    tools_MD = embedder.encode(data.tools, precision, max_length=document_length, progress=progress)
    search, rows = index(tools_MD), []
    for task in data.tasks:
        queries = list(map(instructed, task.queries, task.instructions)) if instructions else task.queries
        q_ND = embedder.encode(queries, precision, max_length=query_length)
        rows.append(
            {"task": task.name, "category": task.category} | tool_metrics(search(q_ND, 10)[1], task.relevant)
        )
    return rows


def by_category(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Means over the tasks of each category, then over the categories as "average": the paper's table 5.

    Its averages are those of its three categories; that tasks count alike within one is a [choice].
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["category"], []).append(row)
    table = [{"category": category} | _means(members) for category, members in groups.items()]
    return [*table, {"category": "average"} | _means(table)]


def _means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {metric: float(np.mean([row[metric] for row in rows])) for metric in METRICS}
