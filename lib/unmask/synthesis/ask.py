"""Asking a language model: never the same twice. Of the queries that it writes only good ones are kept.

For each passage one request chooses the character, the type of question and its difficulty, another one
writes the query (pplx-embed, section 2.6, after Qwen3-Embedding, appendix A.1).
"""

import json
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ValidationError
from tqdm.auto import tqdm

from unmask.config import EndpointConfig, SynthesisConfig
from unmask.data.mining import Encoder, unit
from unmask.extras import extra
from unmask.store import fingerprint, naming, write_atomic
from unmask.synthesis import prompts
from unmask.synthesis.prompts import Choice, Message, Query, Task

with extra("synthesis"):
    import openai

HOPELESS = (401, 403, 404, 422)  # wrong key, no access, no such path or model, no JSON schema


class EndpointError(RuntimeError):
    """An endpoint that cannot be used at all; what it has answered so far is kept."""


class Dropped(Exception):
    """A request that led to nothing; the message is the reason, worded so that equal ones can be counted."""


class Chat:
    """A model behind an endpoint, and the journal of its answers.

    The journal is a JSON line for each answer, appended as it comes: a killed run goes on where it was. The
    openai client tries again what fails (`config.retries`, `config.timeout`), as late as the server asks.

    Attributes:
        traffic: counts of what was not in the journal: "answered", "prompt tokens", "answer tokens".

    Raises: ValueError if the preset names no model, or no endpoint, or one that is no URL.
    """

    def __init__(self, config: EndpointConfig, journal: Path):
        if not config.endpoint.startswith(("http://", "https://")) or not config.model:
            raise ValueError(
                f"{config.section}.endpoint is {config.endpoint!r}, {config.section}.model {config.model!r}: "
                f"name both, for instance --set {config.section}.endpoint=http://localhost:8000/v1"
            )
        journal.parent.mkdir(parents=True, exist_ok=True)
        self.config, self.journal = config, journal
        self.traffic: Counter[str] = Counter()
        self._known = _answers(journal)
        self._lock = threading.Lock()  # of journal and traffic

    def each(self, work: Callable[[Any], Any], items: Sequence) -> list:
        """What `work`, which may `ask`, returns for each item; `config.concurrency` of them at a time.

        Raises: EndpointError if the endpoint refuses everything or is gone.
        """
        config = self.config
        key = os.environ.get(config.api_key_env) or "none"  # local servers want none
        patience = {"max_retries": config.retries, "timeout": config.timeout}
        with (
            openai.OpenAI(base_url=config.endpoint, api_key=key, **patience) as self._client,
            naming(self.journal),
            open(self.journal, "ab") as self._file,
            ThreadPoolExecutor(config.concurrency) as pool,
        ):
            return list(tqdm(pool.map(work, items), total=len(items), unit="query", leave=False))

    def ask(self, messages: list[Message], form: type[BaseModel] | None = None) -> Any:
        """The answer to a request: from the journal, or from the endpoint and then into the journal.

        Args:
            form: of the answer, by a JSON schema; None: its text will do.

        Raises:
            Dropped: no answer after all retries, so that a later run asks again; or one not of this form.
            EndpointError: the endpoint refuses everything, or is gone.
        """
        key = fingerprint(self.config.model, self.config.temperature, self.config.max_tokens, messages)
        read = form.model_validate_json if form else str
        # What did not fit the schema is asked for again: the server may be fixed, or answer differently.
        with suppress(KeyError, ValidationError):
            return read(self._known[key])
        self._known[key] = self._answer(key, messages, form)
        try:
            return read(self._known[key])
        except ValidationError:
            raise Dropped("invalid: not by the schema") from None

    def _answer(self, key: str, messages: list[Message], form: type[BaseModel] | None) -> str:
        config = self.config
        request = {"model": config.model, "temperature": config.temperature, "max_tokens": config.max_tokens}
        if form:
            schema = {"name": "answer", "schema": form.model_json_schema(), "strict": True}
            request["response_format"] = {"type": "json_schema", "json_schema": schema}
        try:
            completion = self._client.chat.completions.create(messages=messages, **request)
        except openai.APIError as error:
            gone = type(error) is openai.APIConnectionError  # and no time-out, which is one as well
            if gone or getattr(error, "status_code", 0) in HOPELESS:
                # Without the server's own words: some are known to echo the key.
                raise EndpointError(
                    f"{config.endpoint} (model {config.model!r}): {type(error).__name__}. See that the "
                    "server runs, serves this model and takes a JSON schema where one is asked for, that "
                    f"{config.section}.endpoint ends where /chat/completions begins, and that "
                    f"{config.api_key_env} holds the key if any. "
                    f"Answers are kept in {self.journal}: the same call goes on from there."
                ) from None
            code = getattr(error, "code", None)  # of a refusal, for instance "unsupported_parameter"
            raise Dropped(f"failed: {type(error).__name__}{f' ({code})' if code else ''}") from None
        choices = getattr(completion, "choices", None)  # some servers send none, or a page, with status 200
        if not choices:
            raise Dropped("failed: an answer without choices")
        text, usage = choices[0].message.content or "", completion.usage
        if not text.strip():  # the answer of a model that thought for too long, or of a filter
            raise Dropped("failed: an empty answer")
        read, written = (usage.prompt_tokens, usage.completion_tokens) if usage else (0, 0)
        answer = {"text": text, "prompt_tokens": read, "answer_tokens": written}
        with self._lock:  # a line begins anew after one that a kill has cut
            self._file.write(b"\n" + json.dumps([key, answer]).encode())
            self._file.flush()  # then it survives the process, if not the machine
            self.traffic.update({"answered": 1, "prompt tokens": read, "answer tokens": written})
        return text


def _answers(journal: Path) -> dict[str, str]:
    """What a journal holds: a request's key → the text of its answer."""
    found = {}
    for line in journal.read_bytes().splitlines() if journal.is_file() else ():
        with suppress(ValueError):  # cut by a kill
            key, answer = json.loads(line)
            if answer["text"].strip():  # earlier code kept empty ones
                found[key] = answer["text"]
    return found


def replies(config: EndpointConfig, journal: Path, requests: Sequence[list[Message]]) -> list[str]:
    """The text of the answer to each request; "" where there was none, which the same call asks for again.

    Raises: as `Chat`; EndpointError if the endpoint cannot be used, or answers nothing.
    """
    chat = Chat(config, journal)

    def reply(messages: list[Message]) -> str:
        with suppress(Dropped):
            return chat.ask(messages)
        return ""

    texts = chat.each(reply, requests)
    if not any(texts):
        raise EndpointError(f"{config.endpoint} answers no request: look at what it logs")
    return texts


class Synthesis(NamedTuple):
    """What came of a synthesis.

    Attributes:
        rows: as written to `path`.
        outcomes: "kept", "duplicate", "dissimilar", "failed: reason" and "invalid: reason" → number of
            queries; the sum is the number that was wanted.
        similarities: cosine of query and passage, of every query that is valid and no duplicate.
        traffic: counts of requests and tokens, see `Chat`.
    """

    path: Path
    rows: list[dict[str, Any]]
    outcomes: dict[str, int]
    similarities: np.ndarray
    traffic: dict[str, int]


@dataclass
class Draft:
    """A query on its way: what became of it so far, and its cosine with the passage once that is known."""

    task: Task
    outcome: str = ""
    query: str = ""
    choice: Choice | None = None
    similarity: float = math.nan


def synthesize_pairs(
    passages: Iterable[str], embedder: Encoder, config: SynthesisConfig, folder: Path
) -> Synthesis:
    """Writes folder/pairs.jsonl: a query for each of `config.passages` passages, as far as they are any good.

    Rows hold id, query, document, language, persona, type, difficulty and similarity. Every answer is kept in
    folder/pairs.journal at once: the same call goes on after an interruption and asks for nothing twice, but
    for what had no answer by the schema.

    Raises:
        ValueError: nothing to ask about, no endpoint or no model.
        EndpointError: the endpoint cannot be used, answers nothing, or is gone; nothing is lost.
    """
    chat = Chat(config, folder / "pairs.journal")
    drafts, rows = _drafts(chat, prompts.plan_pairs(passages, embedder, config), embedder), []
    for draft in drafts:
        if draft.outcome == "kept":
            passage, language = draft.task.passage, draft.task.language
            row = {"id": fingerprint(passage, language), "query": draft.query, "document": passage}
            row |= {"language": language} | draft.choice._asdict()
            rows.append(row | {"similarity": round(draft.similarity, 4)})
    return _written(folder / "pairs.jsonl", rows, drafts, chat)


def synthesize_documents(
    documents: Iterable[Sequence[str]],
    embedder: Encoder,
    config: SynthesisConfig,
    folder: Path,
    answered: Collection[str] = (),
) -> Synthesis:
    """Writes folder/documents.jsonl: documents of chunks, with queries that one of the chunks answers; those
    `answered` already get no other.

    Rows hold document_id, chunks, queries and golds; a document of which no query is kept is left out. A
    query is compared with its chunk and the chunks around it, because it may speak of what only these say.

    Raises: as `synthesize_pairs`.
    """
    chat = Chat(config, folder / "documents.journal")
    drawn, tasks = prompts.plan_documents(documents, embedder, config, answered)
    drafts, rows = _drafts(chat, tasks, embedder), {}
    for draft in drafts:
        if draft.outcome == "kept":
            chunks = drawn[draft.task.document]
            row = {"document_id": fingerprint(chunks), "chunks": chunks, "queries": [], "golds": []}
            row = rows.setdefault(draft.task.document, row)
            row["queries"].append(draft.query)
            row["golds"].append(draft.task.gold)
    return _written(folder / "documents.jsonl", list(rows.values()), drafts, chat)


def _drafts(chat: Chat, tasks: Sequence[Task], embedder: Encoder) -> list[Draft]:
    """What became of each task: a query is kept if nothing is wrong with it, if no other says the same, and
    if it is similar to what its model was shown."""
    if not tasks:
        raise ValueError(f"no passage of {prompts.SHORTEST} characters lacks a query: nothing to ask about")
    drafts, fresh = chat.each(lambda task: _draft(chat, task), tasks), {}
    if all(draft.outcome.startswith("failed") for draft in drafts):
        raise EndpointError(f"{chat.config.endpoint} answers no request: the first {drafts[0].outcome}")
    for draft in drafts:
        if not draft.outcome and fresh.setdefault(prompts.normalized(draft.query), draft) is not draft:
            draft.outcome = "duplicate"
    if fresh:
        q_ND = unit(embedder.encode([draft.query for draft in fresh.values()]))
        d_ND = unit(embedder.encode([draft.task.shown for draft in fresh.values()]))
        for draft, similarity in zip(fresh.values(), (q_ND * d_ND).sum(1).tolist(), strict=True):
            draft.similarity = similarity
            draft.outcome = "kept" if similarity >= chat.config.min_similarity else "dissimilar"
    return drafts


def _draft(chat: Chat, task: Task) -> Draft:
    try:
        chosen = chat.ask(prompts.configuration_messages(task), prompts.choice_form(len(task.personas)))
        choice = Choice(task.personas[chosen.character - 1], chosen.type, chosen.difficulty)
        query = " ".join(chat.ask(prompts.query_messages(task, choice), Query).query.split())
    except Dropped as reason:
        return Draft(task, str(reason))
    return Draft(task, prompts.flaw(query, task), query, choice)


def _written(path: Path, rows: list[dict[str, Any]], drafts: Sequence[Draft], chat: Chat) -> Synthesis:
    write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    outcomes = dict(Counter(draft.outcome for draft in drafts).most_common())
    known = np.array([draft.similarity for draft in drafts if not math.isnan(draft.similarity)], np.float32)
    return Synthesis(path, rows, outcomes, known, dict(chat.traffic))
