"""Synthetic training data: a language model writes the queries that passages and chunks of documents answer.

pplx-embed, section 2.6, after Qwen3-Embedding, appendix A.1: for each passage the most relevant personas are
retrieved; one request chooses the character, the type of question and its difficulty, another one writes the
query. For contextual training the prompt carries the neighbouring chunks, so that a query fits one chunk.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from unmask.config import SynthesisConfig
from unmask.evaluation.search import unit
from unmask.store import write_atomic
from unmask.synthesis.chat import Chat, Journal, RequestFailed, check_endpoint, concurrently, run
from unmask.synthesis.plan import Encoder, plan_documents, plan_pairs
from unmask.synthesis.prompts import (
    QUERY_SCHEMA,
    Choice,
    Invalid,
    Task,
    choice_from,
    configuration_messages,
    configuration_schema,
    normalized,
    query_from,
    query_messages,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Synthesis:
    """What came of a synthesis.

    Attributes:
        rows: as written to `path`.
        outcomes: "kept", "duplicate", "dissimilar", "failed" (no answer) and "invalid …: reason" → number of
            queries; the sum is the number that was wanted.
        similarities: cosine of query and passage, of every query that is valid and no duplicate.
        traffic: counts of requests, retries and tokens (`unmask.synthesis.chat.Chat`).
        structured: whether the endpoint took the JSON schema or was prompted plainly; None: it was not asked.
    """

    path: Path
    rows: list[dict[str, Any]]
    outcomes: dict[str, int]
    similarities: np.ndarray
    traffic: dict[str, int]
    structured: bool | None


@dataclass(frozen=True)
class _Draft:
    outcome: str
    query: str = ""
    choice: Choice | None = None


def synthesize_pairs(
    passages: Iterable[str], embedder: Encoder, config: SynthesisConfig, folder: Path
) -> Synthesis:
    """Writes folder/pairs.jsonl: a query for each of `config.passages` passages, as far as they are any good.

    Rows hold id, query, document, language, persona, type, difficulty and similarity. Every answer is kept in
    folder/pairs.journal at once: the same call goes on after an interruption and asks for nothing twice.

    Raises:
        ValueError: nothing to ask about, an unknown language, no endpoint, no model, or a folder in use.
        EndpointError: the endpoint cannot be used, or is gone; nothing is lost.
    """
    check_endpoint(config)
    tasks = plan_pairs(passages, embedder, config)
    drafts, chat = run(_drafts(tasks, config, folder / "pairs.journal"))
    outcomes, similarity = _sift(tasks, drafts, embedder, config)
    rows = [
        {
            "id": task.id,
            "query": draft.query,
            "document": task.passage,
            "language": task.language,
            "persona": draft.choice.persona,
            "type": draft.choice.type,
            "difficulty": draft.choice.difficulty,
            "similarity": round(float(similarity[index]), 4),
        }
        for index, (task, draft) in enumerate(zip(tasks, drafts, strict=True))
        if outcomes[index] == "kept"
    ]
    return _finish(folder / "pairs.jsonl", rows, outcomes, similarity, chat)


def synthesize_documents(
    documents: Iterable[Sequence[str]], embedder: Encoder, config: SynthesisConfig, folder: Path
) -> Synthesis:
    """Writes folder/documents.jsonl: documents of chunks, with queries that one of the chunks answers.

    Rows hold document_id, chunks, queries and golds; a document of which no query is kept is left out. A
    query is compared with its chunk and the chunks around it, because it may speak of what only these say.

    Raises: as `synthesize_pairs`.
    """
    check_endpoint(config)
    drawn, tasks = plan_documents(documents, embedder, config)
    drafts, chat = run(_drafts(tasks, config, folder / "documents.journal"))
    outcomes, similarity = _sift(tasks, drafts, embedder, config)
    kept: dict[int, list[tuple[str, int]]] = {}
    for task, draft, outcome in zip(tasks, drafts, outcomes, strict=True):
        if outcome == "kept":
            kept.setdefault(task.document, []).append((draft.query, task.gold))
    rows = [
        {
            "document_id": sha256(json.dumps(drawn[number]).encode()).hexdigest()[:16],
            "chunks": drawn[number],
            "queries": [query for query, _ in queries],
            "golds": [gold for _, gold in queries],
        }
        for number, queries in kept.items()
    ]
    return _finish(folder / "documents.jsonl", rows, outcomes, similarity, chat)


async def _drafts(tasks: Sequence[Task], config: SynthesisConfig, path: Path) -> tuple[list[_Draft], Chat]:
    with Journal(path) as journal, tqdm(total=len(tasks), unit="query") as bar:
        async with Chat(config, journal) as chat:
            drafts = await concurrently(partial(_draft, chat), tasks, config.concurrency, bar.update)
        answers = chat.traffic["answered"] + chat.traffic["resumed"]
        if tasks and not answers:  # too few requests for an outage to be noticed
            raise chat.unusable(f"no request was answered; the last: {chat.last_failure}")
    return drafts, chat


async def _draft(chat: Chat, task: Task) -> _Draft:
    stage = "choice"
    try:
        answer = await chat.ask(configuration_messages(task), configuration_schema(task))
        choice = choice_from(answer, task)
        stage = "query"
        answer = await chat.ask(query_messages(task, choice), QUERY_SCHEMA)
        return _Draft("valid", query_from(answer, task), choice)
    except Invalid as reason:
        return _Draft(f"invalid {stage}: {reason}")
    except RequestFailed:
        return _Draft("failed")


def _sift(
    tasks: Sequence[Task], drafts: Sequence[_Draft], embedder: Encoder, config: SynthesisConfig
) -> tuple[list[str], np.ndarray]:
    """Final outcome of every task, and the similarity of query and passage, NaN where there is none."""
    outcomes, seen, fresh = [draft.outcome for draft in drafts], set(), []
    for index, draft in enumerate(drafts):
        if draft.outcome == "valid":
            key = normalized(draft.query)
            if key in seen:
                outcomes[index] = "duplicate"
            else:
                seen.add(key)
                fresh.append(index)
    similarity_N = np.full(len(tasks), np.nan, np.float32)
    if fresh:
        q_ND = unit(embedder.encode([drafts[index].query for index in fresh]))
        d_ND = unit(embedder.encode([tasks[index].shown for index in fresh]))
        similarity_N[fresh] = (q_ND * d_ND).sum(1)
    for index in fresh:
        outcomes[index] = "kept" if similarity_N[index] >= config.min_similarity else "dissimilar"
    return outcomes, similarity_N


def _finish(
    path: Path, rows: list[dict[str, Any]], outcomes: list[str], similarity_N: np.ndarray, chat: Chat
) -> Synthesis:
    write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    counts = dict(Counter(outcomes).most_common())
    known = similarity_N[~np.isnan(similarity_N)]
    return Synthesis(path, rows, counts, known, dict(chat.traffic), chat.structured)
