"""Asking a language model for queries: never for the same one twice, and only good ones are kept.

For each passage one request chooses the character, the type of question and its difficulty, another one
writes the query (pplx-embed, section 2.6, after Qwen3-Embedding, appendix A.1).
"""

from __future__ import annotations

import json
import math
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import openai
from pydantic import BaseModel
from tqdm.auto import tqdm

from unmask.config import SynthesisConfig
from unmask.evaluation.search import unit
from unmask.store import fingerprint, write_atomic
from unmask.synthesis.prompts import (
    Answer,
    Choice,
    Encoder,
    Invalid,
    Message,
    Query,
    Task,
    choice_form,
    choice_from,
    configuration_messages,
    normalized,
    plan_documents,
    plan_pairs,
    query_from,
    query_messages,
)

SLICE = 10_000  # items that wait for a thread at a time
HOPELESS = (401, 403, 404)  # wrong key, no access, no such path or model

T = TypeVar("T")
R = TypeVar("R")


class EndpointError(RuntimeError):
    """An endpoint that cannot be used at all; what it has answered so far is kept."""


class RequestFailed(Exception):
    """One request without an answer, after all its retries; the message is the kind of failure."""


class Chat:
    """A model behind an endpoint, and the journal of its answers.

    The journal is a JSON line for each answer, appended as it comes: a killed run goes on where it was. The
    openai client tries again what fails (`config.retries`, `config.timeout`), as late as the server asks.

    Attributes:
        traffic: counts: "answered", "resumed" (read from the journal), "prompt tokens", "answer tokens".
        structured: whether the endpoint takes a JSON schema; None before its first answer.

    Raises: ValueError if the preset names no model, or no endpoint, or one that is no URL.
    """

    def __init__(self, config: SynthesisConfig, journal: Path):
        for key in ("endpoint", "model"):
            if not getattr(config, key):
                raise ValueError(f"synthesis.{key} is empty: name one with --set synthesis.{key}=…")
        if not config.endpoint.startswith(("http://", "https://")):
            raise ValueError(
                f"synthesis.endpoint must begin with http:// or https://, got {config.endpoint!r}: "
                "for instance http://localhost:8000/v1"
            )
        self.config, self.journal = config, journal
        self.traffic: Counter[str] = Counter()
        self.structured: bool | None = None
        self._key = os.environ.get(config.api_key_env, "")
        self._known = _answers(journal)
        self._lock = threading.Lock()  # of journal and traffic

    def each(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """What `work`, which may `ask`, returns for each item; `config.concurrency` of them at a time.

        Raises: EndpointError if the endpoint refuses everything or is gone.
        """
        config, results = self.config, []
        with (
            openai.OpenAI(
                base_url=config.endpoint,
                api_key=self._key or "none",  # local servers want none
                max_retries=config.retries,
                timeout=config.timeout,
            ) as self._client,
            open(self.journal, "ab") as self._file,
            tqdm(total=len(items), unit="query", leave=False) as bar,
            ThreadPoolExecutor(config.concurrency) as pool,
        ):
            try:
                for start in range(0, len(items), SLICE):
                    for result in pool.map(work, items[start : start + SLICE]):
                        results.append(result)
                        bar.update()
            except BaseException:  # an interrupted cell, too, ends with the requests that are under way
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return results

    def ask(self, messages: list[Message], form: type[BaseModel]) -> Answer:
        """The answer to a request: from the journal, or from the endpoint and then into the journal.

        Args:
            form: what the answer is to be; it may be something else all the same.
        Raises:
            RequestFailed: no answer after all retries; a later run asks again.
            EndpointError: the endpoint refuses everything, or is gone.
        """
        config = self.config
        key = fingerprint(config.model, config.temperature, config.max_tokens, messages)
        if (known := self._known.get(key)) is not None:
            with self._lock:
                self.traffic["resumed"] += 1
            return known
        try:
            answer = self._answer(messages, form)
        except openai.APITimeoutError:
            raise RequestFailed("time-out") from None
        except openai.APIConnectionError as error:
            raise self._unusable(error.__cause__ or error) from None
        except openai.APIStatusError as error:
            if error.status_code in HOPELESS:
                raise self._unusable(error) from None
            raise RequestFailed(f"HTTP {error.status_code}") from None
        except (openai.OpenAIError, ValueError, TypeError, LookupError, AttributeError):
            raise RequestFailed("no chat completion") from None
        with self._lock:
            self._known[key] = answer
            self._file.write(json.dumps([key, asdict(answer)]).encode() + b"\n")
            self._file.flush()  # then it survives the process, if not the machine
            self.traffic["answered"] += 1
            self.traffic["prompt tokens"] += answer.prompt_tokens
            self.traffic["answer tokens"] += answer.answer_tokens
        return answer

    def _answer(self, messages: list[Message], form: type[BaseModel]) -> Answer:
        if self.structured is False:
            return self._send(messages)
        schema = {"name": "answer", "schema": form.model_json_schema(), "strict": True}
        try:
            answer = self._send(messages, response_format={"type": "json_schema", "json_schema": schema})
        except (openai.BadRequestError, openai.UnprocessableEntityError):
            # Was it the parameter? Without it, a request that is bad in itself fails again.
            answer = self._send(messages)
            warnings.warn(f"{self.config.endpoint} takes no JSON schema: plain prompting", stacklevel=2)
            self.structured = False
        else:
            self.structured = True
        return answer

    def _send(self, messages: list[Message], **options: Any) -> Answer:
        config = self.config
        limits = {"temperature": config.temperature, "max_tokens": config.max_tokens}
        create = self._client.chat.completions.create
        completion = create(model=config.model, messages=messages, **limits, **options)
        choice, usage = completion.choices[0], completion.usage
        tokens = (usage.prompt_tokens, usage.completion_tokens) if usage else (0, 0)
        return Answer(choice.message.content or "", str(choice.finish_reason), *tokens)

    def _unusable(self, error: Exception) -> EndpointError:
        reason = " ".join(str(error).split())
        if self._key:  # which servers are known to echo
            reason = reason.replace(self._key, "***")
        return EndpointError(
            f"{self.config.endpoint} (model {self.config.model!r}): {reason[:300]}. See that the server runs "
            f"and serves this model, that synthesis.endpoint ends where /chat/completions begins, and that "
            f"{self.config.api_key_env} holds the key if it wants one. Every answer so far is kept in "
            f"{self.journal}: the same call goes on from there."
        )


def _answers(journal: Path) -> dict[str, Answer]:
    journal.parent.mkdir(parents=True, exist_ok=True)
    with journal.open("a+b") as file:
        file.seek(0)
        lines = file.read().split(b"\n")
        if lines[-1]:  # cut by a kill; the next answer begins a line of its own
            file.write(b"\n")
    found = {}
    for line in lines:
        with suppress(ValueError, TypeError):  # a crash may leave anything
            key, answer = json.loads(line)
            found[key] = Answer(**answer)
    return found


@dataclass(frozen=True)
class Synthesis:
    """What came of a synthesis.

    Attributes:
        rows: as written to `path`.
        outcomes: "kept", "duplicate", "dissimilar", "failed: reason" and "invalid …: reason" → number of
            queries; the sum is the number that was wanted.
        similarities: cosine of query and passage, of every query that is valid and no duplicate.
        traffic: counts of requests and tokens, see `Chat`.
        structured: whether the endpoint took the JSON schema or was prompted plainly; None: it was not asked.
    """

    path: Path
    rows: list[dict[str, Any]]
    outcomes: dict[str, int]
    similarities: np.ndarray
    traffic: dict[str, int]
    structured: bool | None


@dataclass
class Draft:
    """A query on its way: what became of it so far, and its cosine with the passage once that is known."""

    task: Task
    outcome: str = "valid"
    query: str = ""
    choice: Choice | None = None
    similarity: float = math.nan


def synthesize_pairs(
    passages: Iterable[str], embedder: Encoder, config: SynthesisConfig, folder: Path
) -> Synthesis:
    """Writes folder/pairs.jsonl: a query for each of `config.passages` passages, as far as they are any good.

    Rows hold id, query, document, language, persona, type, difficulty and similarity. Every answer is kept in
    folder/pairs.journal at once: the same call goes on after an interruption and asks for nothing twice.

    Raises:
        ValueError: nothing to ask about, an unknown language, no endpoint or no model.
        EndpointError: the endpoint cannot be used, or is gone; nothing is lost.
    """
    chat = Chat(config, folder / "pairs.journal")
    drafts = _drafts(chat, plan_pairs(passages, embedder, config), embedder)
    rows = [
        {
            "id": draft.task.id,
            "query": draft.query,
            "document": draft.task.passage,
            "language": draft.task.language,
            **asdict(draft.choice),
            "similarity": round(draft.similarity, 4),
        }
        for draft in drafts
        if draft.outcome == "kept"
    ]
    return _written(folder / "pairs.jsonl", rows, drafts, chat)


def synthesize_documents(
    documents: Iterable[Sequence[str]], embedder: Encoder, config: SynthesisConfig, folder: Path
) -> Synthesis:
    """Writes folder/documents.jsonl: documents of chunks, with queries that one of the chunks answers.

    Rows hold document_id, chunks, queries and golds; a document of which no query is kept is left out. A
    query is compared with its chunk and the chunks around it, because it may speak of what only these say.

    Raises: as `synthesize_pairs`.
    """
    chat = Chat(config, folder / "documents.journal")
    drawn, tasks = plan_documents(documents, embedder, config)
    drafts = _drafts(chat, tasks, embedder)
    kept: dict[int, list[Draft]] = {}
    for draft in drafts:
        if draft.outcome == "kept":
            kept.setdefault(draft.task.document, []).append(draft)
    rows = [
        {
            "document_id": sha256(json.dumps(drawn[number]).encode()).hexdigest()[:16],
            "chunks": drawn[number],
            "queries": [draft.query for draft in own],
            "golds": [draft.task.gold for draft in own],
        }
        for number, own in kept.items()
    ]
    return _written(folder / "documents.jsonl", rows, drafts, chat)


def _drafts(chat: Chat, tasks: Sequence[Task], embedder: Encoder) -> list[Draft]:
    drafts = chat.each(lambda task: _draft(chat, task), tasks)
    seen: set[str] = set()
    for draft in drafts:
        if draft.outcome == "valid" and (key := normalized(draft.query)) in seen:
            draft.outcome = "duplicate"
        elif draft.outcome == "valid":
            seen.add(key)
    fresh = [draft for draft in drafts if draft.outcome == "valid"]
    if fresh:
        q_ND = unit(embedder.encode([draft.query for draft in fresh]))
        d_ND = unit(embedder.encode([draft.task.shown for draft in fresh]))
        for draft, similarity in zip(fresh, (q_ND * d_ND).sum(1).tolist(), strict=True):
            draft.similarity = similarity
            draft.outcome = "kept" if similarity >= chat.config.min_similarity else "dissimilar"
    return drafts


def _draft(chat: Chat, task: Task) -> Draft:
    stage = "choice"
    try:
        answer = chat.ask(configuration_messages(task), choice_form(len(task.personas)))
        choice = choice_from(answer, task)
        stage = "query"
        answer = chat.ask(query_messages(task, choice), Query)
        return Draft(task, query=query_from(answer, task), choice=choice)
    except Invalid as reason:
        return Draft(task, f"invalid {stage}: {reason}")
    except RequestFailed as reason:
        return Draft(task, f"failed: {reason}")


def _written(path: Path, rows: list[dict[str, Any]], drafts: Sequence[Draft], chat: Chat) -> Synthesis:
    write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    outcomes = dict(Counter(draft.outcome for draft in drafts).most_common())
    known = np.array([draft.similarity for draft in drafts if not math.isnan(draft.similarity)], np.float32)
    return Synthesis(path, rows, outcomes, known, dict(chat.traffic), chat.structured)
