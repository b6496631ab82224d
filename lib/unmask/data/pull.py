"""Filling a mirror: every file comes whole and right, or not at all, and nothing comes twice.

A file is written to DIR/<organisation>/<name>/.partial/, where an interrupted download goes on. It gets its
name once its checksum is right, and its line in the manifest after that (see `unmask.data.mirror`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout
from huggingface_hub import hf_hub_url
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers, disable_progress_bars
from tqdm.auto import tqdm

from unmask.config import Preset
from unmask.data.hub import Repository, explained, list_files, patiently
from unmask.data.manifest import Manifest, readable, sha256_of, size_of
from unmask.data.mirror import Need, needs, unreachable

SPARE_BYTES = 100e6  # of disk space, beside the files themselves


def pull(preset: Preset, folder: Path, *, jobs: int = 4, say: Callable[[str], object] = print) -> None:
    """Fetches all models and data of a preset into a mirror, and goes on where an earlier call was stopped.

    Args:
        folder: the mirror, which is created.
        jobs: files that are fetched at a time.
        say: is told what is needed, and what was done.
    Raises:
        ValueError: the preset needs nothing of the Hub, or what it names is not there or not open to this
            account.
        OSError: the Hub cannot be reached, the folder cannot be written, there is too little space, or a file
            comes with a wrong checksum twice. Each message says what to do.
    """
    wanted = needs(preset)
    if not wanted:
        raise ValueError(f"preset {preset.name} reads nothing from the Hub: there is nothing to mirror")
    if why := unreachable():
        raise OSError(
            f"the Hub cannot be reached ({why}): pull on a host with internet, "
            "or set HTTPS_PROXY or HF_ENDPOINT"
        )
    folder = folder.resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder} cannot be made ({error.strerror}): name another folder by --to") from None
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{folder} cannot be written: name another folder by --to")
    disable_progress_bars()  # ours counts all files together
    os.environ.pop("UNMASK_MIRROR", None)  # else the data would be looked for in a mirror
    with _alone(folder):
        repositories = list_files(wanted, folder)
        tasks = []
        for one in repositories:
            have = _begin(one, folder / one.repo)
            left = [path for path in one.files if path not in have.files]
            size = sum(one.files[path] for path in left)
            done = "all there" if not left else f"{readable(size)} of it in {len(left)} to fetch"
            total = readable(sum(one.files.values()))
            say(f"{one.repo} ({one.type}, {one.revision[:12]}): {total} in {len(one.files)} files, {done}")
            tasks += [(one, path) for path in left]
        _check_space(tasks, folder)
        if tasks:
            _fetch_all(tasks, folder, jobs)
        say(f"all that preset {preset.name!r} needs is there: UNMASK_MIRROR={folder} serves it")


def _begin(one: Repository, folder: Path) -> Manifest:
    """Writes down what is asked for, and counts as finished what is there and right already."""
    known = Manifest.read(folder) or Manifest(one.repo, one.type, one.revision, one.requested)
    selections = dict(known.selections)
    for name, chosen in one.selections.items():
        old = selections.get(name)
        if not old or len(old.files) < len(chosen.files):  # an earlier, larger preset's text stays asked for
            selections[name] = chosen
    files = {path: fact for path, fact in known.files.items() if size_of(folder / path) == fact["size"]}
    for path in one.files.keys() - files.keys():
        if size_of(folder / path) == one.files[path]:
            with contextlib.suppress(ValueError):
                files[path] = _fact(folder / path, one.checksums[path])
    manifest = replace(known, selections=selections, files=files)
    manifest.write(folder)
    return manifest


def _check_space(tasks: Sequence[tuple[Repository, str]], folder: Path) -> None:
    needed = sum(one.files[path] - max(0, size_of(_partial(one, path, folder))) for one, path in tasks)
    free = shutil.disk_usage(folder).free
    if needed + SPARE_BYTES > free:
        raise OSError(
            f"{readable(needed)} are to be fetched and {readable(free)} are free at {folder}: "
            "free some, name another folder by --to, or lower data.max_text_mb"
        )


def _fetch_all(tasks: Sequence[tuple[Repository, str]], folder: Path, jobs: int) -> None:
    total = sum(one.files[path] for one, path in tasks)
    stop, lock = threading.Event(), threading.Lock()
    with (
        tqdm(total=total, unit="B", unit_scale=True, desc=f"{len(tasks)} files") as bar,
        ThreadPoolExecutor(jobs) as pool,
    ):

        def work(one: Repository, path: str) -> None:
            if stop.is_set():
                return
            fact = _fetch(one, path, folder, bar, stop)
            with lock:
                manifest = Manifest.read(folder / one.repo)
                replace(manifest, files=manifest.files | {path: fact}).write(folder / one.repo)

        futures = [pool.submit(work, one, path) for one, path in tasks]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        finally:
            stop.set()  # what is under way ends at its next block, and goes on from there next time
    for one, _ in tasks:
        shutil.rmtree(folder / one.repo / ".partial", ignore_errors=True)


def _fetch(one: Repository, path: str, folder: Path, bar: tqdm, stop: threading.Event) -> dict[str, Any]:
    target, partial = folder / one.repo / path, _partial(one, path, folder)
    partial.parent.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    url = hf_hub_url(one.repo, path, repo_type=one.type, revision=one.revision)
    with explained(Need(one.repo, one.type, one.revision, path)):
        bar.update(max(0, size_of(partial)))
        for last in (False, True):
            patiently(lambda: _download(url, partial, one.files[path], bar, stop))
            try:
                fact = _fact(partial, one.checksums[path])
                break
            except ValueError as error:
                bar.update(-partial.stat().st_size)
                partial.unlink()
                if last:
                    raise OSError(
                        f"{url} came with a wrong checksum twice ({error}): something on the way alters it, "
                        "for instance a proxy; the same command tries again"
                    ) from None
    os.replace(partial, target)
    return fact


def _download(url: str, partial: Path, size: int, bar: tqdm, stop: threading.Event) -> None:
    """Fetches what is still missing of a file; the library asks for the rest when a connection breaks."""
    with partial.open("ab") as file:
        if file.tell() > size:
            file.truncate(0)
        http_get(
            url,
            _Metered(file, bar, stop),  # type: ignore[arg-type]
            resume_size=file.tell(),
            headers=build_hf_headers(),
            expected_size=size,
        )


class _Metered:
    """A file that moves the progress bar, and that stops a download when asked to."""

    def __init__(self, file: BinaryIO, bar: tqdm, stop: threading.Event) -> None:
        self.file, self.bar, self.stop = file, bar, stop

    def write(self, block: bytes) -> int:
        if self.stop.is_set():
            raise InterruptedError("stopped")
        self.bar.update(len(block))
        return self.file.write(block)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def _partial(one: Repository, path: str, folder: Path) -> Path:
    """Where a file is until it is whole; by its checksum too, so that another version of it starts anew."""
    name = f"{path} {one.checksums[path]}"
    return folder / one.repo / ".partial" / hashlib.sha256(name.encode()).hexdigest()


def _fact(path: Path, checksum: str) -> dict[str, Any]:
    """What the manifest says of a file. Raises: ValueError if it is not what the Hub has."""
    size, digest = path.stat().st_size, sha256_of(path)
    found = digest
    if checksum.startswith("git:"):
        blob = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        blob.update(path.read_bytes())  # such files are small: large ones are in LFS
        found = f"git:{blob.hexdigest()}"
    if found != checksum:
        raise ValueError(f"{found[:16]}…, where the Hub says {checksum[:16]}…")
    return {"size": size, "sha256": digest}


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    try:
        with FileLock(folder / ".unmask-mirror.lock", timeout=0):
            yield
    except Timeout:
        raise ValueError(f"another pull into {folder} is under way: wait for it") from None
