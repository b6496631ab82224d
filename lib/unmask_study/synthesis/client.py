"""Asks a language model behind an OpenAI-compatible endpoint; a journal holds every reply, for good."""

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import BaseModel, ValidationError
from tqdm.contrib.concurrent import thread_map

from unmask.extras import extra
from unmask.store import fingerprint, naming
from unmask_study.settings import EndpointConfig

with extra("synthesis"):
    import openai

# A wrong key, no access, no such path or model, no such method of a path, no JSON schema.
HOPELESS = (401, 403, 404, 405, 422, 501)

Messages = list[dict[str, str]]  # one request
Form = type[BaseModel] | None  # of a reply; None: text


class EndpointError(RuntimeError):
    """An endpoint that cannot be used at all; what it has replied so far is in the journal."""

    def __init__(self, config: EndpointConfig, reason: str):
        super().__init__(
            f"{config.endpoint} (model {config.model!r}): {reason}. See that the server runs, serves this "
            f"model and takes a JSON schema where one is sent, that {config.section}.endpoint ends where "
            f"/chat/completions begins, and that {config.api_key_env} holds the key if any. Replies are in "
            "the journal: the same call goes on from there."
        )


def replies(config: EndpointConfig, journal: Path, requests: Sequence[Messages]) -> list[str]:
    """Returns the text of the reply to each request, "" where none is usable; see `ask`."""
    return [text or "" for text in ask(config, journal, requests)]


def ask(config: EndpointConfig, journal: Path, requests: Sequence[Messages], form: Form = None) -> list[Any]:
    """Returns the reply to each request, a text or an instance of `form`; None where none is usable.

    A reply becomes a JSON line of the journal as soon as it comes. A request that has a line is never sent
    again, even if its reply is unusable: empty, cut, or not in the form. How many are unusable is printed.

    Args:
        form: its JSON schema goes with each request.
    Raises:
        ValueError: the preset names no model, or no endpoint, or one that is no URL.
        EndpointError: the endpoint cannot be reached, refuses every request, or replies to none.
    """
    if not config.endpoint.startswith(("http://", "https://")) or not config.model:
        raise ValueError(
            f"{config.section}.endpoint is {config.endpoint!r}, {config.section}.model {config.model!r}: "
            f"name both, for instance --set {config.section}.endpoint=http://localhost:8000/v1"
        )
    keys = [fingerprint(config.model, config.temperature, config.max_tokens, one) for one in requests]
    texts = _read(journal)
    missing = {key: one for key, one in zip(keys, requests, strict=True) if key not in texts}
    failures = _send(config, journal, missing, form) if missing else {}
    if keys and failures.keys() >= {*keys}:
        raise EndpointError(config, f"no request has a reply ({', '.join({*failures.values()})})")
    texts = _read(journal) if missing else texts
    parsed = [_parse(texts.get(key, ""), form) for key in keys]
    unusable = Counter(failures.get(key, "bad reply") for key, reply in zip(keys, parsed) if reply is None)
    if unusable:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in unusable.most_common())
        print(f"{config.section}: no usable reply to {unusable.total()} of {len(keys)} requests ({reasons})")
    return parsed


def _read(journal: Path) -> dict[str, str]:
    """Reads the text of each reply, by the key of its request."""
    texts = {}
    for line in journal.read_bytes().splitlines() if journal.is_file() else ():
        with suppress(ValueError):  # cut by a kill
            key, reply = json.loads(line)
            texts[key] = reply["text"]
    return texts


def _parse(text: str, form: Form) -> Any:
    with suppress(ValidationError):
        return form.model_validate_json(text) if form else text if text.strip() else None


def _send(config: EndpointConfig, journal: Path, requests: dict[str, Messages], form: Form) -> dict[str, str]:
    """Sends requests, by key; returns why those without a reply have none."""
    options = {"model": config.model, "temperature": config.temperature, "max_tokens": config.max_tokens}
    if form:
        schema = {"name": "answer", "schema": form.model_json_schema(), "strict": True}
        options["response_format"] = {"type": "json_schema", "json_schema": schema}
    key = os.environ.get(config.api_key_env, "").strip() or "none"  # local servers want none
    patience = {"max_retries": config.retries, "timeout": openai.Timeout(config.timeout, connect=10)}
    journal.parent.mkdir(parents=True, exist_ok=True)
    with (
        openai.OpenAI(base_url=config.endpoint, api_key=key, **patience) as client,
        naming(journal),
        open(journal, "ab", buffering=0) as file,  # a line is one write, which survives the process
    ):
        send = partial(_send_one, config, partial(client.chat.completions.create, **options), file)
        # After an error or an interrupt, only requests under way are waited for.
        reasons = thread_map(send, requests, requests.values(), max_workers=config.concurrency, leave=False)
    return {key: reason for key, reason in zip(requests, reasons) if reason}


def _send_one(config: EndpointConfig, create: Callable, file: BinaryIO, key: str, messages: Messages) -> str:
    """Writes the reply to a request into the journal; returns why there is none, else ""."""
    try:
        completion = create(messages=messages)
        reply = {"text": completion.choices[0].message.content or ""}
        reply |= completion.usage.to_dict() if completion.usage else {}
    except openai.APIError as error:
        code = getattr(error, "code", None)  # for instance "unsupported_parameter"
        reason = f"{type(error).__name__} ({code})" if code else type(error).__name__
        if type(error) is openai.APIConnectionError:  # and no time-out, which is one as well
            raise EndpointError(config, f"cannot be reached ({type(error.__cause__).__name__})") from None
        if getattr(error, "status_code", 0) in HOPELESS:
            raise EndpointError(config, reason) from None  # without the server's words: some echo the key
        return reason
    except (AttributeError, IndexError, TypeError, ValueError):  # a page with status 200, or an error
        return "no chat completion"
    file.write(b"\n" + json.dumps([key, reply]).encode())  # a line begins anew after one that a kill has cut
    return ""
