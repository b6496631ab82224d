"""An OpenAI-compatible server on localhost that computes answers from the prompts, with faults to order; and
what is asked of it. Light to import: a child process of a test does."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from unmask.config import SynthesisConfig
from unmask.synthesis.ask import Synthesis, synthesize_pairs

# What a fault does in place of a right answer; see Handler.do_POST.
FAULTS = ("half", "cut", "429", "500", "hang")


class ChatServer:
    """A server in a thread.

    Args:
        fault: (prompt, how often it has come before) → name of a fault, a status as a string, or None.
        write: prompt → the message's content; by default what a good model would write.
        delay: seconds that an answer takes.
        structured: False refuses `response_format` with status 400.
        key: what the Authorization header must hold, if anything.

    Attributes:
        prompts: how often each prompt has come.
        answered: how many whole answers were sent.
        times: when each prompt came (monotonic).
        most: largest number of requests under way.
        bodies: what was posted.
    """

    def __init__(
        self,
        fault: Callable[[str, int], str | None] = lambda prompt, before: None,
        write: Callable[[str], str] | None = None,
        *,
        delay: float = 0.0,
        structured: bool = True,
        key: str = "",
        port: int = 0,
    ):
        self.fault, self.write, self.delay, self.structured = fault, write or good, delay, structured
        self.key = key
        self.prompts: Counter[str] = Counter()
        self.times: dict[str, list[float]] = {}
        self.bodies: list[dict] = []
        self.answered = self.most = self.current = 0
        self.lock, self.closing = threading.Lock(), threading.Event()
        self.http = ThreadingHTTPServer(("127.0.0.1", port), type("H", (Handler,), {"owner": self}))
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True)

    @property
    def port(self) -> int:
        return self.http.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> ChatServer:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self.http.shutdown()
        self.http.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # head and body in one packet
    owner: ChatServer

    def do_POST(self) -> None:
        owner = self.owner
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][-1]["content"]
        with owner.lock:
            before = owner.prompts[prompt]
            owner.prompts[prompt] += 1
            owner.times.setdefault(prompt, []).append(time.monotonic())
            owner.bodies.append(body)
            owner.current += 1
            owner.most = max(owner.most, owner.current)
        try:
            with suppress(BrokenPipeError, ConnectionResetError):
                self.reply(owner, body, prompt, before)
        finally:
            with owner.lock:
                owner.current -= 1

    def reply(self, owner: ChatServer, body: dict, prompt: str, before: int) -> None:
        authorization = self.headers.get("Authorization", "")
        if owner.key and authorization != f"Bearer {owner.key}":
            return self.send(401, {"error": {"message": f"no such key: {authorization}"}})
        if self.path != "/v1/chat/completions":
            return self.send(404, {"error": {"message": "no such path"}})
        if not owner.structured and "response_format" in body:
            return self.send(400, {"error": {"message": "unknown parameter"}})
        time.sleep(owner.delay)
        fault = owner.fault(prompt, before)
        if fault == "hang":
            owner.closing.wait(30)
            self.close_connection = True
            return None
        if fault in ("429", "503"):
            return self.send(int(fault), {"error": {"message": "busy"}}, {"Retry-After": "0.3"})
        if fault is not None and fault.isdigit():
            return self.send(int(fault), {"error": {"message": f"fault for {authorization}"}})
        whole = json.dumps(
            {
                "object": "chat.completion",
                "choices": [
                    {
                        "index": 0,
                        "finish_reason": "stop",
                        "message": {"role": "assistant", "content": owner.write(prompt)},
                    }
                ],
                "usage": {"prompt_tokens": len(prompt.split()), "completion_tokens": 7},
            }
        ).encode()
        if fault == "half":  # promises more than it sends, then hangs up
            return self.send(200, whole[: len(whole) // 2], {"Content-Length": str(len(whole))})
        if fault == "cut":  # hangs up before the status line
            self.close_connection = True
            return None
        self.send(200, whole)
        with owner.lock:
            owner.answered += 1

    def send(self, status: int, body: dict | bytes, headers: dict | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(data))} | (headers or {})
        self.close_connection |= int(headers["Content-Length"]) != len(data)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def passage_of(prompt: str) -> str:
    return re.search(r"<passage>\n(.*?)\n</passage>", prompt, re.DOTALL)[1]


def good(prompt: str) -> str:
    """A choice, or a query out of the passage's longest words."""
    passage = passage_of(prompt)
    if '"character"' in prompt:
        number = sha256(passage.encode()).digest()[0]
        kind, level = ("knowledge", "overview", "background"), ("school", "university", "expert")
        return json.dumps(
            {"character": 1 + number % 5, "type": kind[number % 3], "difficulty": level[number % 3]}
        )
    words = sorted(set(re.findall(r"\w+", passage)), key=lambda word: (-len(word), word))
    return json.dumps({"query": f"Why {words[0]} {words[1]} {words[2]}?"})


ANIMALS = ["otter", "badger", "falcon", "salmon", "lynx", "heron"]
PLACES = ["riverbank", "mountain", "harbour", "orchard", "glacier", "meadow"]


def passage(number: int) -> str:
    """Text that no other number has."""
    animal, place = ANIMALS[number % 6], PLACES[number // 6 % 6]
    return (
        f"The {animal}{number} lives near the {place}{number} and rarely leaves it before dusk. "
        f"Observers counted {number + 3} animals last year."
    )


class Words:
    """Hashed bags of words: texts that share words are similar."""

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        rows = np.zeros((len(texts), 512), np.float32)
        for row, text in zip(rows, texts):
            for word in re.findall(r"\w+", text.lower()):
                row[int.from_bytes(sha256(word.encode()).digest()[:2]) % 512] += 1
        return rows


def config(server: ChatServer | str, **changes: Any) -> SynthesisConfig:
    return SynthesisConfig(
        **{
            "endpoint": server if isinstance(server, str) else server.url,
            "model": "test",
            "api_key_env": "UNMASK_TEST_KEY",
            "passages": 24,
            "documents": 5,
            "queries_per_document": 3,
            "personas": 5,
            "concurrency": 4,
            "timeout": 20.0,
            "retries": 2,
            "temperature": 0.7,
            "max_tokens": 100,
            "min_similarity": 0.1,
            "languages": ("English",),
            "price_in": 1.0,
            "price_out": 2.0,
            "seed": 0,
        }
        | changes
    )


def many_pairs(url: str, folder: Path) -> Synthesis:
    """A run of 60 passages that a child process can do."""
    return synthesize_pairs([passage(n) for n in range(60)], Words(), config(url, passages=60), folder)
