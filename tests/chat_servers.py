"""An OpenAI-compatible server on localhost that computes answers from the prompts, with faults to order; and
what is asked of it."""

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from fake_hub import Handler, served
from unmask_study.settings import SynthesisConfig


@dataclass
class ChatServer:
    """What a server answers, and what it was asked.

    Args:
        fault: (prompt, how often it has come before) → a status as a string, "0" to hang up, or None.
        write: prompt → the message's content; by default what a good model would write.
        delay: seconds that an answer takes.

    Attributes:
        prompts: how often each prompt has come; answered: how many whole answers were sent.
        keys: what came as authorization; bodies: what was posted.
        current, most: number of requests under way, and the largest so far.
    """

    fault: Callable[[str, int], str | None] = lambda prompt, before: None
    write: Callable[[str], str] = lambda prompt: good(prompt)
    delay: float = 0.0
    url: str = ""
    prompts: Counter[str] = field(default_factory=Counter)
    keys: set[str] = field(default_factory=set)
    bodies: list[dict] = field(default_factory=list)
    answered: int = 0
    most: int = 0
    current: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def chat_server(*faults: Callable[[str, int], str | None], **given: Any) -> Iterator[ChatServer]:
    """A server in a thread."""
    server = ChatServer(*faults, **given)
    with served(Chat, owner=server) as url:
        server.url = f"{url}/v1"
        yield server


class Chat(Handler):
    owner: ChatServer

    def do_POST(self) -> None:
        owner = self.owner
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][-1]["content"]
        with owner.lock:
            before = owner.prompts[prompt]
            owner.prompts[prompt] += 1
            owner.keys.add(self.headers["Authorization"])
            owner.bodies.append(body)
            owner.current += 1
            owner.most = max(owner.most, owner.current)
        try:
            with suppress(BrokenPipeError, ConnectionResetError):
                self.reply(prompt, before)
        finally:
            with owner.lock:
                owner.current -= 1

    def reply(self, prompt: str, before: int) -> None:
        owner, fault = self.owner, self.owner.fault(prompt, before)
        time.sleep(owner.delay)
        if fault == "0":
            self.close_connection = True
        elif fault:
            self.send_json({"error": {"message": f"bad key: {self.headers['Authorization']}"}}, int(fault))
        elif self.path != "/v1/chat/completions":
            self.send_json({"error": {"message": "no such path"}}, 404)
        else:
            message = {"role": "assistant", "content": owner.write(prompt)}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": 7}
            self.send_json({"choices": [choice], "usage": usage})
            with owner.lock:
                owner.answered += 1


def lines(path: Path) -> list[Any]:
    """The values of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf8").splitlines() if line]


def passage_of(prompt: str) -> str:
    return re.search(r"<passage>\n(.*?)\n</passage>", prompt, re.DOTALL)[1]


def good(prompt: str) -> str:
    """A choice, or a query out of the passage's longest words."""
    passage = passage_of(prompt)
    if '"character"' in prompt:
        number = sha256(passage.encode()).digest()[0]
        kind, level = ("knowledge", "overview", "background"), ("school", "university", "expert")
        chosen = {"type": kind[number % 3], "difficulty": level[number % 3]}
        return json.dumps({"character": 1 + number % 5} | chosen)
    words = sorted(set(re.findall(r"\w+", passage)), key=lambda word: (-len(word), word))
    return json.dumps({"query": f"Why {words[0]} {words[1]} {words[2]}?"})


ANIMALS = ["otter", "badger", "falcon", "salmon", "lynx", "heron"]
PLACES = ["riverbank", "mountain", "harbour", "orchard", "glacier", "meadow"]


def passage(number: int) -> str:
    """Text that no other number has."""
    animal, place = f"{ANIMALS[number % 6]}{number}", f"{PLACES[number // 6 % 6]}{number}"
    lives = f"The {animal} lives near the {place} and rarely leaves it before dusk."
    return f"{lives} Observers counted {number + 3} animals last year."


class Words:
    """Hashed bags of words: texts that share words are similar."""

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        rows = np.zeros((len(texts), 512), np.float32)
        for row, text in zip(rows, texts):
            for word in re.findall(r"\w+", text.lower()):
                row[int.from_bytes(sha256(word.encode()).digest()[:2]) % 512] += 1
        return rows


def config(server: ChatServer | str, **changes: Any) -> SynthesisConfig:
    place = {"endpoint": getattr(server, "url", server), "model": "test", "api_key_env": "UNMASK_TEST_KEY"}
    amounts = {"passages": 24, "documents": 5, "queries_per_document": 3, "min_similarity": 0.1}
    patience = {"concurrency": 4, "timeout": 600.0, "retries": 2}
    return SynthesisConfig(**place | amounts | patience | changes)
