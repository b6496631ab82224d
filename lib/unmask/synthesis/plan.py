"""Which queries a synthesis asks for: of which passages, for whom, in what language; and the cost."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import yaml

from unmask.config import SynthesisConfig
from unmask.evaluation.search import unit
from unmask.synthesis.prompts import (
    DIFFICULTIES,
    LENGTHS,
    TYPES,
    Choice,
    Task,
    configuration_messages,
    query_messages,
    scripts_of,
)

SHORTEST = 80  # characters; of less text there is little to ask
NEIGHBOURS = 2  # chunks that are shown on either side
ANSWER_TOKENS = 40  # of one answer, for the estimate

T = TypeVar("T")


class Encoder(Protocol):
    """What retrieves personas and filters queries; `unmask.Embedder` for instance."""

    def encode(self, texts: Sequence[str], /) -> np.ndarray: ...


@dataclass(frozen=True)
class Estimate:
    """What a synthesis takes from its start, chat templates aside; what a journal answers costs nothing."""

    requests: int
    prompt_tokens: int
    answer_tokens: int
    price: float  # in the currency of synthesis.price_in and price_out; 0 without them


def personas() -> list[str]:
    """The characters that queries are written for."""
    return yaml.safe_load(Path(__file__).with_name("personas.yaml").read_text(encoding="utf8"))


def sample(items: Iterable[T], count: int, seed: int) -> list[T]:
    """`count` distinct items (strings or lists of strings), the same ones in whatever order they come.

    A larger sample begins with the smaller one, so that what was synthesised for that remains of use.
    """
    best: dict[bytes, T] = {}
    for item in items:
        best[sha256(f"{seed} {json.dumps(item)}".encode()).digest()] = item
        if len(best) > 2 * count + 1000:
            best = dict(sorted(best.items())[:count])
    return [item for _, item in sorted(best.items())[:count]]


def plan_pairs(passages: Iterable[str], embedder: Encoder, config: SynthesisConfig) -> list[Task]:
    """Draws passages, and for each the personas, language and length of the query that is wanted.

    Raises: ValueError for an unknown language, or if no passage has `SHORTEST` characters.
    """
    _check(config)
    drawn = sample((text for text in passages if len(text) >= SHORTEST), config.passages, config.seed)
    if not drawn:
        raise ValueError(f"no passage of at least {SHORTEST} characters: there is nothing to ask about")
    candidates = nearest_personas(drawn, embedder, config.personas)
    return [_task(config, index, text, candidates[index]) for index, text in enumerate(drawn)]


def plan_documents(
    documents: Iterable[Sequence[str]], embedder: Encoder, config: SynthesisConfig
) -> tuple[list[list[str]], list[Task]]:
    """Draws documents of several chunks, and in each some chunks that a query is wanted for.

    Returns: the documents drawn, and the tasks in their order.
    Raises: ValueError for an unknown language, or if no document has several chunks, one
            of them of `SHORTEST` characters.
    """
    _check(config)
    fit = (list(chunks) for chunks in documents if len(chunks) > 1 and max(map(len, chunks)) >= SHORTEST)
    drawn = sample(fit, config.documents, config.seed)
    if not drawn:
        raise ValueError(
            f"no document of several chunks, one of at least {SHORTEST} characters: cut long texts with "
            "unmask.synthesis.chunking.chunks"
        )
    golds = []
    for number, chunks in enumerate(drawn):
        once = Counter(chunks)  # of a chunk that is there twice, neither is the right one
        long = [i for i, chunk in enumerate(chunks) if len(chunk) >= SHORTEST and once[chunk] == 1]
        draw = random.Random(f"{config.seed} {json.dumps(chunks)}")
        chosen = draw.sample(long, min(len(long), config.queries_per_document))
        golds += [(number, index) for index in sorted(chosen)]
    candidates = nearest_personas([drawn[number][gold] for number, gold in golds], embedder, config.personas)
    tasks = []
    for index, (number, gold) in enumerate(golds):
        chunks = drawn[number]
        around = {
            "before": tuple(chunks[max(0, gold - NEIGHBOURS) : gold]),
            "after": tuple(chunks[gold + 1 : gold + 1 + NEIGHBOURS]),
        }
        place = {"document": number, "gold": gold}
        tasks.append(_task(config, index, chunks[gold], candidates[index], **around, **place))
    return drawn, tasks


def nearest_personas(texts: Sequence[str], embedder: Encoder, count: int) -> list[tuple[str, ...]]:
    """The `count` personas most similar to each text, the nearest first."""
    if not texts:
        return []
    names = personas()
    scores_NP = unit(embedder.encode(texts)) @ unit(embedder.encode(names)).T
    order_NK = np.argsort(-scores_NP, axis=1, kind="stable")[:, :count]
    return [tuple(names[index] for index in row) for row in order_NK]


def estimate(tasks: Sequence[Task], tokenizer: Any, config: SynthesisConfig) -> Estimate:
    """What the tasks will take, counted with a tokenizer (another one than the model's: an estimate)."""
    prompts = [text for task in tasks for text in _prompts(task)]
    sizes = [len(ids) for ids in tokenizer(prompts, add_special_tokens=False)["input_ids"]] if prompts else []
    requests = 2 * len(tasks)
    price = (sum(sizes) * config.price_in + requests * ANSWER_TOKENS * config.price_out) / 1e6
    return Estimate(requests, sum(sizes), requests * ANSWER_TOKENS, price)


def _check(config: SynthesisConfig) -> None:
    for language in config.languages:
        scripts_of(language)
    least = {"concurrency": 1, "personas": 1, "max_tokens": 1, "retries": 0}
    for key, low in least.items():
        if getattr(config, key) < low:
            raise ValueError(f"synthesis.{key} must be at least {low}, got {getattr(config, key)}")
    if not config.languages or config.timeout <= 0:
        raise ValueError("synthesis.languages must name a language, and synthesis.timeout be above 0")


def _task(
    config: SynthesisConfig, index: int, passage: str, candidates: tuple[str, ...], **rest: Any
) -> Task:
    language = config.languages[index % len(config.languages)]
    digest = sha256(json.dumps([passage, language, rest]).encode()).hexdigest()[:16]
    length = random.Random(f"{config.seed} {digest}").choice(LENGTHS)
    return Task(digest, passage, language, length, candidates, **rest)


def _prompts(task: Task) -> list[str]:
    choice = Choice(task.personas[0], next(iter(TYPES)), next(iter(DIFFICULTIES)))
    both = configuration_messages(task) + query_messages(task, choice)
    return [message["content"] for message in both]
