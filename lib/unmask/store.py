"""Where a checkout keeps its files, how one is written so that a kill leaves nothing half-done, and how
content is hashed: one rule each for the whole library."""

import ast
import contextlib
import dataclasses
import difflib
import functools
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

WEIGHTS = re.compile(r"model(?:-\d+-of-\d+)?\.(safetensors|onnx)(?:\.data|\.index\.json)?")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def repository() -> Path:
    """Returns the top level of the checkout that the package runs from; of no use without a checkout."""
    return Path(__file__).resolve().parents[2]


def artifacts_root() -> Path:
    """Returns the folder of everything large and reproducible: UNMASK_ARTIFACTS, or that of the checkout, or
    without one the user's cache."""
    here = repository()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "unmask")
    default = here / "artifacts" if (here / "papermill_runs").is_dir() else cache
    return Path(os.environ.get("UNMASK_ARTIFACTS") or default).resolve()


def preparing(what: str) -> None:
    """Refuses to prepare data where UNMASK_PREPARED says that all of them are there.

    Raises: ValueError that names the data.
    """
    if os.environ.get("UNMASK_PREPARED"):
        raise ValueError(
            f"{what}: not prepared in {artifacts_root() / 'data'}, or of another corpus, for another "
            "tokenizer or by other code: `unmask prepare` with this checkout, anywhere, then copy that folder"
        )


@contextlib.contextmanager
def naming(path: object) -> Iterator[None]:
    """Has errors of the system name what was being written, which a full disk's do not."""
    try:
        yield
    except SafetensorError as error:
        raise RuntimeError(f"{path}: {error}") from error
    except OSError as error:
        if error.errno and error.filename is None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def locked(file: Path, *, timeout: float = -1) -> Iterator[None]:
    """Holds a lock, and removes its file in the end.

    Args:
        timeout: seconds to wait for it; negative: as long as it takes.
    Raises: Timeout if another process held it so long; OSError with place and remedy where none is to be had.
    """
    lock, new = FileLock(file, timeout=timeout), not file.exists()
    try:
        lock.acquire()
    except Timeout:
        raise
    except OSError as error:
        if new:
            with contextlib.suppress(OSError):
                file.unlink()
        remedy = "name a folder that can be written and locked (UNMASK_ARTIFACTS: that of all runs)"
        raise OSError(error.errno, f"{error.strerror}; {remedy}", str(file)) from None
    try:
        yield
    finally:
        file.unlink(missing_ok=True)  # while it is held: who has just opened it sees that
        lock.release()


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Keeps other processes from making the same file or folder, and has errors of the system name it. The
    lock of a folder that exists lies in it: the one above may be another's, or on another disk.

    Raises: RuntimeError if another process makes it; and as `locked`.
    """
    path = path.resolve()
    try:
        lock = path / ".lock" if path.is_dir() else path.with_name(f".{path.name}.lock")
        with locked(lock, timeout=0), naming(path):
            yield
    except Timeout:
        raise RuntimeError(f"another process works on {path}: wait until it has ended") from None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a name to write a file under, which becomes `path` once it is whole: a reader sees the old or the
    new content, never half of it. A second writer waits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")  # the same each time: a killed one is cleared away
    with locked(temporary.with_suffix(".tmp.lock")):
        temporary.unlink(missing_ok=True)
        try:
            with naming(path):
                yield temporary
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def write_atomic(path: Path, text: str) -> Path:
    """Writes a text file, see `replacing`."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf8")
    return path


def write_json(path: Path, value: Any) -> Path:
    """Writes a value as JSON, see `replacing`.

    Raises: ValueError for NaN and infinity, which JSON has not.
    """
    return write_atomic(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def link(path: Path, target: Path) -> None:
    """Makes `path` a link to a folder beside or below it, at once. A folder of that name, as a copy that
    follows links has, stays, with a word."""
    if path.is_dir() and not path.is_symlink():
        print(f"{path} is a folder and stays as it is: the model is {target}")
        return
    with replacing(path) as new:
        new.symlink_to(os.path.relpath(target, path.parent), target_is_directory=True)


def read_json(path: Path) -> dict[str, Any]:
    """Returns what a JSON file says; nothing where there is none.

    Raises: ValueError that names a file which is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf8")) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path} is broken ({error}): copy or make it again") from None


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Gives a temporary name for a directory, which the block makes and fills, and which becomes `path`. One
    that exists gets its files and stays what it is: a mount point, of a mode and a group. After an error
    `path` is as it was.

    Raises: ValueError if `path` is a file, or holds what the new one does not, hidden files and such weights
        in other pieces aside; RuntimeError if another process makes it, too; OSError as `locked`.
    """
    path = path.resolve()  # a link stays one
    if path.is_file():
        raise ValueError(f"{path} is a file: name a folder")
    with alone(path):
        exists = path.is_dir()
        # The same each time: a killed one is cleared away.
        new = path / ".new.tmp" if exists else path.with_name(f".{path.name}.tmp")
        shutil.rmtree(new, ignore_errors=True)
        try:
            yield new
            mode = new.stat().st_mode & 0o666  # as the umask says; safetensors lets nobody else read
            for file in filter(Path.is_file, new.rglob("*")):
                file.chmod(mode)
            if exists:
                _refill(path, new)
            else:
                os.replace(new, path)
        finally:
            shutil.rmtree(new, ignore_errors=True)


def _refill(path: Path, new: Path) -> None:
    """Moves the content of `new` into a folder that exists. The old weights go first and the new ones come
    last, so that a kill in between leaves no mixture."""
    theirs, ours = ({one for one in os.listdir(folder) if one[0] != "."} for folder in (path, new))
    weights = {name: kind[1] for name in sorted(ours) if (kind := WEIGHTS.fullmatch(name))}
    old = {one for one in theirs if (kind := WEIGHTS.fullmatch(one)) and kind[1] in weights.values()}
    if foreign := theirs - ours - old - {"lost+found"}:
        raise ValueError(f"{path} holds {min(foreign)}, which is of something else: name another folder")
    for name in old:
        (path / name).unlink()
    for name in [*(ours - weights.keys()), *weights]:
        if (path / name).is_dir():
            shutil.rmtree(path / name)
        os.replace(new / name, path / name)


def fingerprint(*parts: Any) -> str:
    """Returns a short hash of JSON-able values and dataclasses, the same on every machine."""
    content = json.dumps(parts, sort_keys=True, default=dataclasses.asdict)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def content_hash(path: Path) -> str:
    """Returns a short hash of a file's or a folder's content; a name on the Hub as it is."""
    if not path.exists():
        return str(path)
    return fingerprint([sha256(file) for file in (sorted(visible(path)) if path.is_dir() else [path])])


def hash64(content: bytes) -> int:
    """Returns a number below 2⁶⁴ for some bytes, the same on every machine and in every version."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())


def code_fingerprint(*paths: str | Path) -> str:
    """Returns a short hash of the code in files, and in all Python files of folders. Comments, docstrings and
    layout do not count."""
    files = [one for path in map(Path, paths) for one in (visible(path, "*.py") if path.is_dir() else [path])]
    return source_fingerprint({file: file.read_bytes() for file in files})


def source_fingerprint(sources: Mapping[Path, bytes]) -> str:
    """Returns the same of files that were read before."""
    return fingerprint([[file.name, bare(source)] for file, source in sorted(sources.items())])


def visible(folder: Path, pattern: str = "*") -> list[Path]:
    """Returns the files of a folder, without hidden ones, an editor's copies and what Python compiled."""
    every = ((one, f"/{one.relative_to(folder)}") for one in folder.rglob(pattern) if one.is_file())
    return [one for one, name in every if not re.search(r"/\.|/__pycache__/|~$", name)]


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name: the nearest known one, or all of them."""
    known = list(known)
    close = difflib.get_close_matches(str(name), known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


@functools.cache  # a process asks for each training and each source
def bare(source: bytes) -> str:
    """Returns Python code without comments, docstrings and layout; other text as it is."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return source.decode(errors="replace")
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
            del node.body[0]
    return ast.unparse(tree)
