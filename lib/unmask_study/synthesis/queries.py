"""Queries that a language model writes (pplx-embed, section 2.6).

Two requests for each, after Qwen3-Embedding (appendix A.1), in our own words (prompts.yaml): one chooses the
character, the type of question and its difficulty; the other writes the query. Only good ones are accepted.
"""

import json
import random
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from string import Template
from typing import Any, Literal, NamedTuple

import numpy as np
import regex
import yaml
from pydantic import BaseModel

from unmask.data.mining import Encoder, unit
from unmask.store import fingerprint, write_atomic
from unmask_study.settings import SynthesisConfig
from unmask_study.synthesis.client import Messages, ask

SHORTEST = 80  # characters; of less text there is little to ask
NEIGHBOURS = 2  # chunks that are shown on either side
LENGTHS = (5, 10, 20, 40)  # words; one is drawn for each query
LONGEST = 20  # characters for each word that a query should have
_FILES = (Path(__file__).with_name(f"{name}.yaml") for name in ("prompts", "personas"))
PROMPTS, PERSONAS = (yaml.safe_load(file.read_text(encoding="utf8")) for file in _FILES)


class Choice(BaseModel, extra="forbid"):
    """The form of the first reply: who asks, what kind of question, how hard."""

    character: int  # from 1: the number of a persona
    type: Literal[*PROMPTS["types"]]
    difficulty: Literal[*PROMPTS["difficulties"]]


class Query(BaseModel, extra="forbid"):
    """The form of the second reply."""

    query: str


class Task(NamedTuple):
    """One query that is wanted: for a chunk of a document. A passage by itself is the only chunk."""

    chunks: tuple[str, ...]
    gold: int  # the number of the chunk
    language: str  # of the query
    length: int  # words, about
    personas: tuple[str, ...]  # candidates, the most relevant one first

    @property
    def passage(self) -> str:
        """The chunk."""
        return self.chunks[self.gold]

    @property
    def shown(self) -> dict[str, str]:
        """All the text that the model sees: the chunk and its neighbours, by tag."""
        start, end = max(0, self.gold - NEIGHBOURS), self.gold + 1 + NEIGHBOURS
        before, after = self.chunks[start : self.gold], self.chunks[self.gold + 1 : end]
        parts = {"before": before, "passage": (self.passage,), "after": after}
        return {tag: "\n\n".join(part) for tag, part in parts.items() if part}


class Synthesis(NamedTuple):
    """What came of a synthesis.

    Attributes:
        rows: as written to `path`.
        outcomes: "accepted", "duplicate", "dissimilar", "unusable" (no reply, or a bad one) and
            "invalid: reason" → number of queries; the sum is the number that was wanted.
        similarities: the cosine of each query that has no flaw, accepted or dissimilar, with what was shown.
    """

    path: Path
    rows: list[dict[str, Any]]
    outcomes: dict[str, int]
    similarities: list[float]


def sample(items: Iterable, count: int, seed: int) -> list:
    """Draws `count` distinct items (strings or lists of strings), the same ones in whatever order they come.

    A larger sample begins with the smaller one, so that what was synthesised for that remains of use.
    """
    by_hash = {sha256(f"{seed} {json.dumps(item)}".encode()).digest(): item for item in items}
    return [item for _, item in sorted(by_hash.items())[:count]]


def draw_passages(passages: Iterable[str], embedder: Encoder, config: SynthesisConfig) -> list[Task]:
    """Draws passages of `SHORTEST` characters or more, and for each the personas, language and length of the
    query that is wanted."""
    drawn = sample((text for text in passages if len(text) >= SHORTEST), config.passages, config.seed)
    return _tasks([((text,), 0) for text in drawn], embedder, config)


def draw_documents(
    documents: Iterable[Sequence[str]], embedder: Encoder, config: SynthesisConfig, answered: Collection[str]
) -> list[Task]:
    """Draws documents of several chunks, and in each some chunks of `SHORTEST` characters that lack a query.

    Args:
        answered: chunks that have one.
    """

    def lacking(chunks: Sequence[str]) -> list[int]:
        count = Counter(chunks)  # of a chunk that is there twice, neither is the right one
        once = ((i, text) for i, text in enumerate(chunks) if count[text] == 1)
        return [i for i, text in once if len(text) >= SHORTEST and text not in answered]

    fit, places = (list(chunks) for chunks in documents if len(chunks) > 1 and lacking(chunks)), []
    for chunks in sample(fit, config.documents, config.seed):
        draw, wanted = random.Random(f"{config.seed} {json.dumps(chunks)}"), lacking(chunks)
        golds = draw.sample(wanted, min(len(wanted), config.queries_per_document))
        places += [(tuple(chunks), gold) for gold in sorted(golds)]
    return _tasks(places, embedder, config)


def _tasks(places: Sequence[tuple], embedder: Encoder, config: SynthesisConfig) -> list[Task]:
    """Makes a task of each chunk, with the personas that are most similar to it, the nearest first."""
    texts = [chunks[gold] for chunks, gold in places]
    scores_NP, tasks = unit(embedder.encode(texts)) @ unit(embedder.encode(PERSONAS)).T, []
    order_NK = np.argsort(-scores_NP, axis=1, kind="stable")[:, : config.personas]
    for place, order in zip(places, order_NK, strict=True):
        draw = random.Random(f"{config.seed} {json.dumps(place)}")
        language, length = draw.choice(config.languages), draw.choice(LENGTHS)
        tasks.append(Task(*place, language, length, tuple(PERSONAS[number] for number in order)))
    return tasks


def configuration_messages(task: Task) -> Messages:
    """The first request: which of the characters would look this passage up, and with what question?"""
    values = {"personas": "\n".join(f"{i}. {persona}" for i, persona in enumerate(task.personas, 1))}
    for name in ("types", "difficulties"):
        values[name] = "\n".join(f"- {option}: {meaning}" for option, meaning in PROMPTS[name].items())
    return _messages("choice", task, **values)


def query_messages(task: Task, choice: Choice) -> Messages:
    """The second request: the query itself, as the chosen character would put it."""
    persona = task.personas[choice.character - 1]
    values = {"persona": persona, "language": task.language, "length": task.length}
    values["type"] = f"{choice.type}, {PROMPTS['types'][choice.type]}"
    values["difficulty"] = f"{choice.difficulty}, {PROMPTS['difficulties'][choice.difficulty]}"
    contextual = PROMPTS["contextual"] if len(task.shown) > 1 else ""
    return _messages("query", task, contextual=contextual, **values)


def _messages(name: str, task: Task, **values: Any) -> Messages:
    shown = [f"<{tag}>\n{text}\n</{tag}>" for tag, text in task.shown.items()]
    intro = [PROMPTS["document"] + "\n"] if len(shown) > 1 else []
    content = Template(PROMPTS[name]).substitute(values, material="\n".join(intro + shown))
    return [{"role": "system", "content": PROMPTS["system"]}, {"role": "user", "content": content}]


def synthesize_pairs(
    tasks: Sequence[Task], embedder: Encoder, config: SynthesisConfig, folder: Path
) -> Synthesis:
    """Writes folder/pairs.jsonl: the passage of each task with a query, where that is any good.

    Rows hold id, query, document, language, persona, type, difficulty and similarity. Replies are in
    folder/pairs.journal as soon as they come: after an interruption the same call goes on from there.

    Raises: as `client.ask`; ValueError without a task.
    """
    accepted, *about = _accepted(tasks, embedder, config, folder / "pairs.journal")
    rows = [
        {"id": fingerprint(task.passage, task.language), "query": query, "document": task.passage}
        | {"language": task.language, "persona": task.personas[choice.character - 1], "type": choice.type}
        | {"difficulty": choice.difficulty, "similarity": round(similarity, 4)}
        for task, choice, query, similarity in accepted
    ]
    return Synthesis(_write(folder / "pairs.jsonl", rows), rows, *about)


def synthesize_documents(
    tasks: Sequence[Task], embedder: Encoder, config: SynthesisConfig, folder: Path
) -> Synthesis:
    """Writes folder/documents.jsonl: the documents of the tasks, with queries that one of the chunks answers.

    Rows hold document_id, chunks, queries and golds; a document of which no query is accepted is left out. A
    query is compared with its chunk and the chunks around it, because it may speak of what only these say.

    Raises: as `synthesize_pairs`.
    """
    accepted, *about = _accepted(tasks, embedder, config, folder / "documents.journal")
    rows = {}
    for task, _, query, _ in accepted:
        new = {"document_id": fingerprint(task.chunks), "chunks": task.chunks, "queries": [], "golds": []}
        row = rows.setdefault(task.chunks, new)
        row["queries"].append(query)
        row["golds"].append(task.gold)
    return Synthesis(_write(folder / "documents.jsonl", rows.values()), [*rows.values()], *about)


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    return write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _accepted(
    tasks: Sequence[Task], embedder: Encoder, config: SynthesisConfig, journal: Path
) -> tuple[list[tuple[Task, Choice, str, float]], dict[str, int], list[float]]:
    """Has a query written for each task; accepts those without a flaw that resemble what the model was shown.

    Returns: of each accepted query its task, the choice, itself and its cosine with what was shown; and the
        outcomes and the similarities as in `Synthesis`.
    """
    if not tasks:
        raise ValueError(f"no passage of {SHORTEST} characters lacks a query: nothing to ask about")
    choices = zip(tasks, ask(config, journal, [*map(configuration_messages, tasks)], Choice), strict=True)
    chosen = [(task, one) for task, one in choices if one and 0 < one.character <= len(task.personas)]
    distinct, outcomes = {}, Counter()
    replies = ask(config, journal, [query_messages(*one) for one in chosen], Query)
    for (task, choice), reply in zip(chosen, replies, strict=True):
        if reply:
            query = " ".join(reply.query.split())
            if flaw := _flaw(query, task, distinct):
                outcomes[flaw] += 1
            else:
                distinct[normalized(query)] = task, choice, query
    q_ND = unit(embedder.encode([query for *_, query in distinct.values()]))
    d_ND = unit(embedder.encode(["\n\n".join(task.shown.values()) for task, *_ in distinct.values()]))
    rated = [*zip(distinct.values(), (q_ND * d_ND).sum(1).tolist(), strict=True)]
    accepted = [(*query, cosine) for query, cosine in rated if cosine >= config.min_similarity]
    outcomes["unusable"] = len(tasks) - len(distinct) - outcomes.total()
    outcomes.update(accepted=len(accepted), dissimilar=len(distinct) - len(accepted))
    return accepted, dict((+outcomes).most_common()), [cosine for _, cosine in rated]


def _flaw(query: str, task: Task, others: Collection[str]) -> str:
    """Returns why a query will not do, worded so that equal reasons can be counted; empty if it will."""
    plain, passage = normalized(query), normalized(task.passage)
    if not plain:
        return "invalid: no words"
    if len(query) > LONGEST * task.length:
        return "invalid: too long"
    if passage in plain or (plain in passage and len(plain) >= SHORTEST / 2):
        return "invalid: copy of the passage"
    return "duplicate" if plain in others else ""


def normalized(text: str) -> str:
    """Returns text as it is compared: case, punctuation and spaces make no difference."""
    return " ".join(regex.findall(r"[\p{L}\p{M}\p{N}]+", text.casefold()))
