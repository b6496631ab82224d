"""A Hub on localhost: as much of its HTTP interface as huggingface_hub asks for, with faults on demand.

Large files are in LFS and come by redirect from another host, with Range, as from the Hub's CDN. Faults are
queued per file, and each request for its content takes one.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

LFS_FROM = 1000  # bytes


@dataclass
class FakeRepo:
    type: str  # "dataset" or "model"
    name: str
    files: dict[str, bytes]
    gated: bool = False
    commit: str = field(init=False)

    def __post_init__(self) -> None:
        self.commit = hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    start: int = 0  # of the range


@dataclass
class FakeHub:
    """The repositories, what goes wrong with them, and what was asked for.

    faults: file → what its next requests get: a status, "cut" (half of it, then the connection breaks),
        "corrupt" (one bit is wrong), "slow" (a tenth of a second after every megabyte).
    """

    url: str = ""
    repos: dict[str, FakeRepo] = field(default_factory=dict)
    faults: dict[str, list[int | str]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    token: str = "hf_right"

    def add(self, type: str, name: str, files: dict[str, bytes], *, gated: bool = False) -> FakeRepo:
        self.repos[name] = FakeRepo(type, name, files, gated)
        return self.repos[name]

    def fetched(self, path: str, since: int = 0) -> list[int]:
        """Where the requests for a file's content began, the first `since` requests of all left out."""
        content = next(repo.files[path] for repo in self.repos.values() if path in repo.files)
        large = f"/cdn/{hashlib.sha256(content).hexdigest()}"
        end = large if len(content) >= LFS_FROM else f"/{path}"
        asked = [one for one in self.requests[since:] if one.method == "GET"]
        return [one.start for one in asked if one.path.endswith(end)]


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.hub.requests.append(Request(self.command, path, start))
        if path == "/":
            return self._send(200, b"")
        if path.startswith("/cdn/"):
            return self._cdn(path.removeprefix("/cdn/"))
        if path.startswith("/api/"):
            if path.count("/") < 4:
                return self._send(404, b"")
            kind, name, *rest = self._split(path.removeprefix("/api/"))
        else:
            kind, name, *rest = self._split(path if path.startswith("/datasets/") else f"/models{path}")
        repo = self.hub.repos.get(name)
        if repo is None or repo.type != kind:
            return self._error(401, "RepoNotFound", "Repository not found")
        action, revision, *inside = rest or ["revision", "main"]
        if revision not in ("main", repo.commit):
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        match action:
            case "revision":
                siblings = [{"rfilename": file} for file in repo.files]
                self._json({"id": repo.name, "sha": repo.commit, "siblings": siblings, "tags": []})
            case "tree":
                self._json(self._tree(repo, "/".join(inside)))
            case "paths-info":
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                wanted = parse_qs(body)["paths"]
                self._json([_entry(file, repo.files[file]) for file in wanted if file in repo.files])
            case "resolve":
                self._resolve(repo, "/".join(inside))

    def _split(self, path: str) -> list[str]:
        kind, organisation, name, *rest = path.strip("/").split("/")
        return [kind.removesuffix("s"), f"{organisation}/{name}", *rest]

    def _tree(self, repo: FakeRepo, folder: str) -> list[dict]:
        prefix = f"{folder}/" if folder else ""
        recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() == "true"
        entries: dict[str, dict] = {}
        for file, content in repo.files.items():
            if not file.startswith(prefix):
                continue
            parts = file.removeprefix(prefix).split("/")
            for depth in range(1, len(parts)) if recursive else range(1, min(2, len(parts))):
                inner = prefix + "/".join(parts[:depth])
                entries[inner] = {"type": "directory", "path": inner, "oid": "0" * 40, "size": 0}
            if recursive or len(parts) == 1:
                entries[file] = _entry(file, content)
        return list(entries.values())

    def _resolve(self, repo: FakeRepo, file: str) -> None:
        if repo.gated and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self._error(403, "GatedRepo", "Access to this dataset is restricted")
        if file not in repo.files:
            return self._error(404, "EntryNotFound", "Entry not found")
        content = repo.files[file]
        commit = {"X-Repo-Commit": repo.commit}
        if len(content) >= LFS_FROM:
            digest = hashlib.sha256(content).hexdigest()
            linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
            cdn = self.hub.url.replace("127.0.0.1", "localhost")  # another host
            return self._send(302, b"", commit | linked | {"Location": f"{cdn}/cdn/{digest}"})
        self._content(file, content, commit | {"ETag": f'"{_blob(content)}"'})

    def _cdn(self, digest: str) -> None:
        for repo in self.hub.repos.values():
            for file, content in repo.files.items():
                if hashlib.sha256(content).hexdigest() == digest:
                    return self._content(file, content, {"ETag": f'"{digest}"'})

    def _content(self, file: str, content: bytes, headers: dict[str, str]) -> None:
        queue = self.hub.faults.get(file, []) if self.command == "GET" else []
        fault = queue.pop(0) if queue else None
        if isinstance(fault, int):
            return self._send(fault, b"sorry", {"Retry-After": "1"})
        if fault == "corrupt":
            content = content[:-1] + bytes([content[-1] ^ 1])
        asked = self.headers.get("Range")
        status = 200
        if asked:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last or len(content)), len(content) - 1)
            headers = headers | {"Content-Range": f"bytes {begin}-{end}/{len(content)}"}
            content, status = content[begin : end + 1], 206
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(content)), "Accept-Ranges": "bytes"}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        try:
            if fault == "cut":
                self.wfile.write(content[: len(content) // 2])
                self.wfile.flush()
                self.close_connection = True
            elif fault == "slow":
                for begin in range(0, len(content), 10**6):
                    self.wfile.write(content[begin : begin + 10**6])
                    self.wfile.flush()
                    time.sleep(0.1)
            else:
                self.wfile.write(content)
        except (BrokenPipeError, ConnectionResetError):  # the client is gone, as it may be
            self.close_connection = True

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, code: str, message: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": message})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in ((headers or {}) | {"Content-Length": str(len(body))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _entry(file: str, content: bytes) -> dict:
    entry = {"type": "file", "path": file, "size": len(content), "oid": _blob(content)}
    if len(content) >= LFS_FROM:
        entry["lfs"] = {
            "oid": hashlib.sha256(content).hexdigest(),
            "size": len(content),
            "pointerSize": 130,
        }
    return entry


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
