"""What a language model is asked for when it writes queries: of which passages, for whom, in what words; what
that costs; and which of its queries will do.

Two requests a query, after Qwen3-Embedding (appendix A.1), in our own words (prompts.yaml): one chooses who
asks, what kind of question and how hard a one; the other writes the query that was chosen.
"""

import json
import random
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from string import Template
from typing import Any, Literal, NamedTuple

import numpy as np
import regex
import yaml
from pydantic import BaseModel, create_model

from unmask.config import SynthesisConfig
from unmask.data.mining import Encoder, unit

SHORTEST = 80  # characters; of less text there is little to ask
NEIGHBOURS = 2  # chunks that are shown on either side
LENGTHS = (5, 10, 20, 40)  # words; one is drawn for each query
LONGEST = 20  # characters for each word that a query should have
TOLD = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf8"))

Message = dict[str, str]


class Query(BaseModel, extra="forbid"):
    """The form of the second answer."""

    query: str


@cache
def choice_form(personas: int) -> type[BaseModel]:
    """The form of the first answer; characters are chosen by their number."""
    options = {"character": range(1, personas + 1), "type": TOLD["types"], "difficulty": TOLD["difficulties"]}
    fields = {name: (Literal[*allowed], ...) for name, allowed in options.items()}
    return create_model("Choice", __cls_kwargs__={"extra": "forbid"}, **fields)


class Task(NamedTuple):
    """One query that is wanted: for a passage, or for one chunk among the chunks around it."""

    passage: str
    language: str  # of the query
    length: int  # words, about
    personas: tuple[str, ...]  # candidates, the most relevant one first
    before: tuple[str, ...] = ()  # neighbouring chunks
    after: tuple[str, ...] = ()
    document: int = 0  # which document the passage is a chunk of, and which chunk it is
    gold: int = 0

    @property
    def shown(self) -> str:
        """All the text that the model sees."""
        return "\n\n".join((*self.before, self.passage, *self.after))


class Choice(NamedTuple):
    """Who asks, what kind of question, how hard: what the first request settles."""

    persona: str
    type: str
    difficulty: str


def personas() -> list[str]:
    """The characters that queries are written for."""
    return yaml.safe_load(Path(__file__).with_name("personas.yaml").read_text(encoding="utf8"))


def sample(items: Iterable, count: int, seed: int) -> list:
    """`count` distinct items (strings or lists of strings), the same ones in whatever order they come.

    A larger sample begins with the smaller one, so that what was synthesised for that remains of use.
    """
    by_hash = {sha256(f"{seed} {json.dumps(item)}".encode()).digest(): item for item in items}
    return [item for _, item in sorted(by_hash.items())[:count]]


def plan_pairs(passages: Iterable[str], embedder: Encoder, config: SynthesisConfig) -> list[Task]:
    """Draws passages of `SHORTEST` characters or more, and for each the personas, language and length of the
    query that is wanted."""
    drawn = sample((text for text in passages if len(text) >= SHORTEST), config.passages, config.seed)
    return _tasks(drawn, [{}] * len(drawn), embedder, config)


def plan_documents(
    documents: Iterable[Sequence[str]], embedder: Encoder, config: SynthesisConfig, answered: Collection[str]
) -> tuple[list[list[str]], list[Task]]:
    """Draws documents of several chunks, and in each some chunks that lack a query.

    Args:
        answered: chunks that have one.
    Returns: the documents drawn, all with several chunks, of which at least one of `SHORTEST` characters
        lacks a query; and the tasks in their order.
    """

    def lacking(chunks: Sequence[str]) -> list[int]:
        once = Counter(chunks)  # of a chunk that is there twice, neither is the right one
        fit = (len(chunk) >= SHORTEST and once[chunk] == 1 and chunk not in answered for chunk in chunks)
        return [number for number, one in enumerate(fit) if one]

    fit = (list(chunks) for chunks in documents if len(chunks) > 1 and lacking(chunks))
    drawn, places = sample(fit, config.documents, config.seed), []
    for number, chunks in enumerate(drawn):
        draw, wanted = random.Random(f"{config.seed} {json.dumps(chunks)}"), lacking(chunks)
        for gold in sorted(draw.sample(wanted, min(len(wanted), config.queries_per_document))):
            before = tuple(chunks[max(0, gold - NEIGHBOURS) : gold])
            after = tuple(chunks[gold + 1 : gold + 1 + NEIGHBOURS])
            places.append({"before": before, "after": after, "document": number, "gold": gold})
    texts = [drawn[place["document"]][place["gold"]] for place in places]
    return drawn, _tasks(texts, places, embedder, config)


def _tasks(
    texts: Sequence[str], places: Sequence[dict[str, Any]], embedder: Encoder, config: SynthesisConfig
) -> list[Task]:
    """A task for each text, with the personas that are most similar to it, the nearest first."""
    names, tasks = personas(), []
    scores_NP = unit(embedder.encode(texts)) @ unit(embedder.encode(names)).T
    order_NK = np.argsort(-scores_NP, axis=1, kind="stable")[:, : config.personas]
    for text, place, order in zip(texts, places, order_NK, strict=True):
        # In a larger sample documents have other numbers, and the same is asked about the same passage.
        draw = random.Random(f"{config.seed} {json.dumps([text, place | {'document': 0}])}")
        language, length = draw.choice(config.languages), draw.choice(LENGTHS)
        tasks.append(Task(text, language, length, tuple(names[n] for n in order), **place))
    return tasks


def estimate(tasks: Sequence[Task], tokenizer: Any, config: SynthesisConfig) -> dict[str, float]:
    """What the tasks take if a journal answers none of them, chat templates aside.

    Args:
        tokenizer: counts the prompts' tokens; another one than the model's, so this is an estimate.
    Returns: requests, prompt_tokens, answer_tokens, and price in the currency of `config.price_in` and
        `config.price_out`.
    """
    read = 0
    for task in tasks:
        choice = Choice(task.personas[0], "knowledge", "university")
        both = configuration_messages(task) + query_messages(task, choice)
        texts = [message["content"] for message in both]
        read += sum(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"]))
    written = 2 * 40 * len(tasks)  # two answers of about forty tokens
    price = (read * config.price_in + written * config.price_out) / 1e6
    return {"requests": 2 * len(tasks), "prompt_tokens": read, "answer_tokens": written, "price": price}


def configuration_messages(task: Task) -> list[Message]:
    """The first request: which of the characters would look this passage up, and with what question?"""
    numbered = "\n".join(f"{number}. {persona}" for number, persona in enumerate(task.personas, 1))
    options = {
        name: "\n".join(f"- {option}: {meaning}" for option, meaning in TOLD[name].items())
        for name in ("types", "difficulties")
    }
    return _messages("choice", task, personas=numbered, **options)


def query_messages(task: Task, choice: Choice) -> list[Message]:
    """The second request: the query itself, as the chosen character would put it."""
    told = {"persona": choice.persona, "language": task.language, "length": task.length}
    told["type"] = f"{choice.type}, {TOLD['types'][choice.type]}"
    told["difficulty"] = f"{choice.difficulty}, {TOLD['difficulties'][choice.difficulty]}"
    told["contextual"] = TOLD["contextual"] if task.before or task.after else ""
    return _messages("query", task, **told)


def _messages(name: str, task: Task, **told: Any) -> list[Message]:
    parts = {"before": task.before, "passage": (task.passage,), "after": task.after}
    texts = {tag: "\n\n".join(part) for tag, part in parts.items() if part}
    shown = [f"<{tag}>\n{text}\n</{tag}>" for tag, text in texts.items()]
    intro = [TOLD["document"] + "\n"] if len(shown) > 1 else []
    content = Template(TOLD[name]).substitute(told, material="\n".join(intro + shown))
    return [{"role": "system", "content": TOLD["system"]}, {"role": "user", "content": content}]


def flaw(query: str, task: Task) -> str:
    """Why a query will not do, worded so that equal reasons can be counted; empty if it will."""
    plain, passage = normalized(query), normalized(task.passage)
    if not plain:
        return "invalid: no words"
    if len(query) > LONGEST * task.length:
        return "invalid: too long"
    copied = passage in plain or (plain in passage and len(plain) >= SHORTEST / 2)
    return "invalid: copy of the passage" if copied else ""


def normalized(text: str) -> str:
    """Text as it is compared: case, punctuation and spaces make no difference."""
    return " ".join(regex.findall(r"[\p{L}\p{M}\p{N}]+", text.casefold()))
