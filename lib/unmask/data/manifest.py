"""What a mirror knows of a repository that was pulled: DIR/<organisation>/<name>/.unmask-mirror.json.

    {"repo": …, "type": "dataset" | "model", "revision": commit, "requested": "main",
     "files": {path: {"size": bytes, "sha256": digest}},                        finished and verified
     "selections": {"configuration/split": {"files": {path: bytes}, "text_bytes": n}}}   asked for, in order

It is rewritten, whole, whenever a file is finished.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from unmask.data.files import MANIFEST
from unmask.store import write_atomic


@dataclass(frozen=True)
class Selection:
    """The files of one configuration and split, or of a model, that were asked for; path → bytes."""

    files: dict[str, int]
    text_bytes: int | None = None  # what they hold of text, about; None: they are all there is


@dataclass(frozen=True)
class Manifest:
    """What is known of one repository in a mirror."""

    repo: str
    type: str  # "dataset" or "model"
    revision: str  # the commit
    requested: str  # the branch, tag or commit that the registry names
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    selections: dict[str, Selection] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The manifest of a repository's folder; None where there is none.

        Raises: ValueError if it cannot be read.
        """
        path = folder / MANIFEST
        try:
            values = json.loads(path.read_text(encoding="utf8"))
            chosen = {name: Selection(**one) for name, one in values.pop("selections", {}).items()}
            return cls(**{"requested": values["revision"]} | values, selections=chosen)
        except FileNotFoundError:
            return None
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged ({error!r}): delete it and pull again") from None

    def write(self, folder: Path) -> None:
        write_atomic(folder / MANIFEST, json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")

    def unfinished(self, folder: Path, selection: str) -> dict[str, int]:
        """Files of a selection that are not there, not whole or not verified yet; path → bytes."""
        return {
            path: size
            for path, size in self.selections[selection].files.items()
            if path not in self.files or size_of(folder / path) != size
        }


def verify(
    files: Sequence[tuple[Path, dict[str, Any]]],
    *,
    jobs: int = 4,
    progress: Callable[[int], object] = lambda _: None,
) -> list[tuple[Path, int]]:
    """Compares checksums; returns the files that are wrong, with their bytes.

    Args:
        files: with what the manifest says of each; those of another size are left out: they are not whole.
        progress: is told how many bytes have been read.
    """

    def compare(task: tuple[Path, dict[str, Any]]) -> bool:
        path, fact = task
        return size_of(path) != fact["size"] or sha256_of(path, progress) == fact["sha256"]

    with ThreadPoolExecutor(jobs) as pool:
        right = pool.map(compare, files)
        return [(path, fact["size"]) for (path, fact), fine in zip(files, right, strict=True) if not fine]


def sha256_of(path: Path, progress: Callable[[int], object] = lambda _: None) -> str:
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            progress(len(block))
    return digest.hexdigest()


def size_of(path: Path) -> int:
    """Bytes of a file; -1 where there is none."""
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return -1


def readable(count: float) -> str:
    """Bytes in decimal units: 1.5 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"
