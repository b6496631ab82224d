"""Chat completions from an OpenAI-compatible endpoint: bounded, retried, and never asked for twice."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import time
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import openai
from filelock import FileLock, Timeout

from unmask.store import fingerprint

if TYPE_CHECKING:
    from unmask.config import SynthesisConfig

OUTAGE = 10  # requests in a row that fail after all their retries: nobody is there any more
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds; a pause doubles the one before it
LONGEST_WAIT = 600.0  # seconds that a server may ask for with Retry-After
HOPELESS = {401: "the key is wrong", 403: "the key has no access", 404: "there is no such path or model"}

Message = dict[str, str]
T = TypeVar("T")
R = TypeVar("R")


class EndpointError(RuntimeError):
    """An endpoint that cannot be used at all; what it has answered so far is kept."""


class RequestFailed(Exception):
    """One request without an answer, after all its retries."""


class _NoCompletion(Exception):
    """A response whose body is no chat completion: half of one, or something else."""


@dataclass(frozen=True)
class Answer:
    """What the model wrote, why it stopped ("stop", "length") and how many tokens that took."""

    text: str
    finish: str
    prompt_tokens: int
    answer_tokens: int


def check_endpoint(config: SynthesisConfig) -> None:
    """Raises ValueError if the preset names no model, or no endpoint, or one that is no URL."""
    for key in ("endpoint", "model"):
        if not getattr(config, key):
            raise ValueError(f"synthesis.{key} is empty: name one with --set synthesis.{key}=…")
    if not config.endpoint.startswith(("http://", "https://")):
        raise ValueError(
            f"synthesis.endpoint must begin with http:// or https://, got {config.endpoint!r}: "
            "for instance http://localhost:8000/v1"
        )


class Journal:
    """Answers on disk, a JSON line each, appended as they come: a killed run goes on where it was.

    Raises: ValueError if another process writes to the same journal.
    """

    def __init__(self, path: Path):
        self.path = path
        self._answers: dict[str, Answer] = {}
        self._lock = FileLock(path.with_suffix(".lock"))

    def __enter__(self) -> Journal:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(
                f"{self.path} is being written by another process: wait for it, or take another folder"
            ) from None
        self.path.touch()
        lines = self.path.read_bytes()
        whole = lines.rfind(b"\n") + 1
        os.truncate(self.path, whole)  # a line cut by a kill, to which the next one would be joined
        for line in lines[:whole].splitlines():
            with suppress(ValueError):  # a crash of the machine may leave anything
                key, answer = json.loads(line)
                self._answers[key] = Answer(**answer)
        self._file = open(self.path, "a", encoding="ascii")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._lock.release()

    def get(self, key: str) -> Answer | None:
        """The answer to the request of this key, if there was one."""
        return self._answers.get(key)

    def add(self, key: str, answer: Answer) -> None:
        """Keeps an answer; after a flush it survives the process, if not the machine."""
        self._answers[key] = answer
        self._file.write(json.dumps([key, asdict(answer)]) + "\n")  # ASCII: models write surrogates
        self._file.flush()


class Chat:
    """A model behind an endpoint. At most as many requests are under way as coroutines call `ask`.

    Attributes:
        traffic: counts: "sent", "answered", "resumed" (read from the journal), "failed", "prompt tokens",
            "answer tokens", and under "retried: …" what attempts failed of.
        structured: whether the endpoint takes a JSON schema; None before its first answer.
    """

    def __init__(self, config: SynthesisConfig, journal: Journal):
        self.config, self.journal = config, journal
        self.traffic: Counter[str] = Counter()
        self.structured: bool | None = None
        self.last_failure = ""
        self._failures = 0  # in a row
        self._key = os.environ.get(config.api_key_env, "")
        self._client = openai.AsyncOpenAI(
            base_url=config.endpoint,
            api_key=self._key or "none",  # local servers want none
            max_retries=0,  # ours, below, also know a deadline for the whole response and broken bodies
            timeout=None,
        )

    async def __aenter__(self) -> Chat:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def ask(self, messages: list[Message], schema: dict[str, Any]) -> Answer:
        """The answer to a request: from the journal, or from the endpoint and then into the journal.

        Raises:
            RequestFailed: no answer after all retries; a later run asks again.
            EndpointError: the endpoint refuses everything, or `OUTAGE` requests in a row have failed.
        """
        key = fingerprint(self.config.model, self.config.temperature, self.config.max_tokens, messages)
        if (answer := self.journal.get(key)) is not None:
            self.traffic["resumed"] += 1
            return answer
        try:
            answer = await self._persist(messages, schema)
        except RequestFailed as error:
            self.traffic["failed"] += 1
            self._failures += 1
            self.last_failure = str(error)
            if self._failures >= OUTAGE:
                raise self.unusable(f"{self._failures} requests failed in a row; the last: {error}") from None
            raise
        self._failures = 0
        self.traffic["answered"] += 1
        self.traffic["prompt tokens"] += answer.prompt_tokens
        self.traffic["answer tokens"] += answer.answer_tokens
        self.journal.add(key, answer)
        return answer

    def unusable(self, reason: str) -> EndpointError:
        """An error that says what to do about an endpoint."""
        return EndpointError(
            f"{self.config.endpoint} (model {self.config.model!r}): {reason}. See that the server runs and "
            f"serves this model, that synthesis.endpoint ends where /chat/completions begins, and that "
            f"{self.config.api_key_env} holds the key if it wants one. Every answer so far is kept in "
            f"{self.journal.path}: the same call goes on from there."
        )

    async def _persist(self, messages: list[Message], schema: dict[str, Any]) -> Answer:
        for attempt in range(self.config.retries + 1):
            # Half of the pause is chance, so that requests that failed together do not come back together.
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt) * (0.5 + 0.5 * random.random())
            try:
                return await self._attempt(messages, schema)
            except openai.APIStatusError as error:
                status, detail = error.status_code, self._plain(error)
                if status in HOPELESS:
                    raise self.unusable(f"HTTP {status}, {HOPELESS[status]}: {detail}") from None
                if status not in (408, 409, 429) and status < 500:
                    raise RequestFailed(f"HTTP {status}: {detail}") from None
                problem = f"HTTP {status}"
                wait = _asked_to_wait(error.response.headers.get("retry-after"))
                if wait > LONGEST_WAIT:
                    raise RequestFailed(f"{problem}: told to wait {wait:.0f} s") from None
                pause += wait
            except TimeoutError:
                problem, detail = "time-out", f"no whole response within {self.config.timeout:g} s"
            except _NoCompletion as error:
                problem, detail = "broken body", str(error)
            except openai.APIConnectionError as error:
                problem, detail = "connection", self._plain(error.__cause__ or error)
            if attempt < self.config.retries:
                self.traffic[f"retried: {problem}"] += 1
                await asyncio.sleep(pause)
        raise RequestFailed(f"{problem} ({detail}), {self.config.retries + 1} attempts")

    async def _attempt(self, messages: list[Message], schema: dict[str, Any]) -> Answer:
        if self.structured is False:
            return await self._send(messages)
        form = {"name": "answer", "schema": schema, "strict": True}
        try:
            answer = await self._send(messages, response_format={"type": "json_schema", "json_schema": form})
        except (openai.BadRequestError, openai.UnprocessableEntityError):
            # Was it the parameter? Without it, a request that is bad in itself fails again.
            answer = await self._send(messages)
            if self.structured is not False:
                warnings.warn(f"{self.config.endpoint} takes no JSON schema: plain prompting", stacklevel=2)
            self.structured = False
        else:
            self.structured = True
        return answer

    async def _send(self, messages: list[Message], **options: Any) -> Answer:
        self.traffic["sent"] += 1
        async with asyncio.timeout(self.config.timeout):
            response = await self._client.chat.completions.with_raw_response.create(
                model=self.config.model,
                messages=messages,
                temperature=self.config.temperature,
                max_tokens=self.config.max_tokens,
                **options,
            )
        try:
            body = json.loads(response.content)
            choice, usage = body["choices"][0], body.get("usage") or {}
            text = choice["message"].get("content") or ""
            if not isinstance(text, str):
                raise TypeError
            return Answer(
                text=text,
                finish=str(choice.get("finish_reason")),
                prompt_tokens=int(usage.get("prompt_tokens") or 0),
                answer_tokens=int(usage.get("completion_tokens") or 0),
            )
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise _NoCompletion(f"{type(error).__name__} in {self._plain(response.text)}") from None

    def _plain(self, error: object) -> str:
        """The start of a message, without the key, which servers are known to echo."""
        text = " ".join(str(error).split())
        return (text.replace(self._key, "***") if self._key else text)[:300] or repr(error)


def _asked_to_wait(header: str | None) -> float:
    """Seconds that a Retry-After header asks for, as a number or as a date; 0 for none or nonsense."""
    try:
        seconds = float(header or 0)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header).timestamp() - time.time()
        except ValueError:
            return 0.0
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0


async def concurrently(
    work: Callable[[T], Awaitable[R]], items: Sequence[T], count: int, progress: Callable[[], Any]
) -> list[R]:
    """What `work` returns for each item, up to `count` of them under way at a time; the first error ends all.

    `progress` is called after each item.
    """
    results: list[Any] = [None] * len(items)
    waiting = iter(enumerate(items))

    async def worker() -> None:
        for index, item in waiting:
            results[index] = await work(item)
            progress()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(count, len(items))):
                group.create_task(worker())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return results


def run(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`; in a thread where a loop runs already, as in Jupyter, and then interruptible too."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task]] = Future()

    async def noted() -> T:
        started.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        return await work

    with ThreadPoolExecutor(1) as thread:
        outcome = thread.submit(asyncio.run, noted())
        try:
            return outcome.result()
        except KeyboardInterrupt:
            loop, task = started.result()
            loop.call_soon_threadsafe(task.cancel)
            raise
