"""A Hub on localhost: as much of its HTTP interface as huggingface_hub asks for, with faults on demand.

Files come with Range, as from the Hub's CDN, but from the same host. Faults are queued per file, and each
request for its content takes one.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from huggingface_hub import HfFileSystem, close_session, constants

from unmask.data import rows

Files = dict[str, bytes]


@dataclass
class FakeRepo:
    type: str  # "dataset" or "model"
    name: str
    files: Files
    gated: bool = False
    revision: str = "main"

    @cached_property
    def commit(self) -> str:
        return hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()


@dataclass
class FakeHub:
    """The repositories, what goes wrong with them, and the paths whose content was asked for.

    faults: file → what its next requests get: a status, or "cut" (half of it, then the connection breaks).
    """

    url: str = ""
    repos: dict[str, FakeRepo] = field(default_factory=dict)
    faults: dict[str, list[int | str]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    token: str = "hf_right"

    def add(self, type: str, name: str, files: Files, revision: str = "main", gated: bool = False) -> None:
        key = name if revision == "main" else f"{name}@{revision}"
        self.repos[key] = FakeRepo(type, name, files, gated, revision)

    def at(self, name: str, revision: str) -> FakeRepo | None:
        """A repository in a revision, a branch or a commit."""
        known = (one for one in self.repos.values() if one.name == name)
        return next((one for one in known if revision in (one.revision, one.commit)), None)


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A Hub, and the only one that this process knows."""
    hub = FakeHub()
    with served(_Handler, hub=hub) as hub.url, known_hub(hub.url):
        yield hub


@contextmanager
def known_hub(url: str, *, offline: bool = False) -> Iterator[None]:
    """As with HF_ENDPOINT and HF_HUB_OFFLINE, which huggingface_hub reads once, when it is imported."""
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, url)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setattr(constants, "ENDPOINT", url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_OFFLINE", offline)
        patch.setattr("datasets.config.HF_ENDPOINT", url)
        forget()
        yield
    forget()


def forget() -> None:
    """What is kept of a Hub for as long as a process lives."""
    close_session()
    HfFileSystem.clear_instance_cache()
    rows._commit.cache_clear()
    rows._configurations.cache_clear()


class Handler(BaseHTTPRequestHandler):
    """What a server of a test needs, whatever it serves."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # head and body in one packet

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def send(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_json(self, value: object, status: int = 200) -> None:
        self.send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})


@contextmanager
def served(handler: type[Handler], **given: Any) -> Iterator[str]:
    """The address of a server in a thread; `given` are attributes of its handlers."""
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Given", (handler,), given)) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


class _Handler(Handler):
    hub: FakeHub

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if not path.startswith(("/api/", "/datasets/")):
            path = f"/models{path}"
        path = path.removeprefix("/api")
        if path.count("/") < 3:
            return self.send(200 if path == "/models/" else 404)
        kind, organisation, name, *rest = map(unquote, path.strip("/").split("/"))  # some hold a slash
        repo = self.hub.repos.get(f"{organisation}/{name}")
        if repo is None or f"{repo.type}s" != kind:
            return self._error(401, "RepoNotFound", "Repository not found")
        action, revision, *inside = rest or ["revision", "main"]
        if (repo := self.hub.at(repo.name, revision)) is None:
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        match action:
            case "revision":
                self.send_json({"id": repo.name, "sha": repo.commit, "tags": []})
            case "tree":
                self.send_json(_tree(repo, "".join(f"{part}/" for part in inside)))
            case "paths-info":
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                wanted = parse_qs(body)["paths"]
                self.send_json([_entry(file, repo.files[file]) for file in wanted if file in repo.files])
            case "resolve":
                self._resolve(repo, "/".join(inside))

    do_HEAD = do_POST = do_GET

    def _resolve(self, repo: FakeRepo, file: str) -> None:
        if repo.gated and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self._error(403, "GatedRepo", "Access to this dataset is restricted")
        if file not in repo.files:
            return self._error(404, "EntryNotFound", "Entry not found")
        content = repo.files[file]
        self._content(file, content, {"X-Repo-Commit": repo.commit, "ETag": f'"{_blob(content)}"'})

    def _content(self, file: str, content: bytes, headers: dict[str, str]) -> None:
        queue = self.hub.faults.get(file, []) if self.command == "GET" else []
        fault, status = queue.pop(0) if queue else None, 200
        if self.command == "GET":
            self.hub.requests.append(file)
        if isinstance(fault, int):
            return self.send(fault, b"sorry", {"Retry-After": "1"})
        if asked := self.headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last or len(content)), len(content) - 1)
            headers = headers | {"Content-Range": f"bytes {begin}-{end}/{len(content)}"}
            content, status = content[begin : end + 1], 206
        sent = content[: len(content) // 2] if fault == "cut" else content
        self.close_connection = self.close_connection or fault == "cut"
        self.send(status, sent, headers | {"Content-Length": str(len(content)), "Accept-Ranges": "bytes"})

    def _error(self, status: int, code: str, message: str) -> None:
        self.send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": message})


def _tree(repo: FakeRepo, folder: str) -> list[dict]:
    """All below a folder, asked for or not."""
    folders = {str(parent) for file in repo.files for parent in PurePosixPath(file).parents} - {"."}
    entries = [{"type": "directory", "path": path, "oid": "", "size": 0} for path in folders]
    entries += [_entry(*file) for file in repo.files.items()]
    return [entry for entry in entries if entry["path"].startswith(folder)]


def _entry(file: str, content: bytes) -> dict:
    return {"type": "file", "path": file, "size": len(content), "oid": _blob(content)}


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
