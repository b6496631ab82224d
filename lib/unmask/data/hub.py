"""What the Hub has of a preset's needs: files with sizes and checksums, and its refusals in plain words."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import pyarrow.parquet as pq
from huggingface_hub import HfApi, HfFileSystem, constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from tqdm.auto import tqdm

from unmask.data.files import DataFile, data_files
from unmask.data.manifest import Manifest, Selection
from unmask.data.mirror import Need

# Of a model: what transformers loads, and its licence. Other formats of the weights stay on the Hub.
MODEL_FILES = (".safetensors", ".json", ".txt", ".model", ".jinja", ".md", "LICENSE")
# Of a module of sentence-transformers, its pooling for instance.
MODULE = re.compile(r"\d+_\w+/(config\.json|model\.safetensors)")
BATCH = 500  # paths of one question to the Hub
PAUSES = (1.0, 2.0, 4.0, 8.0)  # seconds before each new attempt at what may have been bad luck
# Text for each byte of a file, on the low side, where no footer says it: compressed and plain JSON lines.
PACKED, PLAIN = 1.0, 0.5

T = TypeVar("T")


@dataclass
class Repository:
    """A repository with those of its files that a preset needs."""

    repo: str
    type: str  # "dataset" or "model"
    revision: str  # the commit
    requested: str
    selections: dict[str, Selection] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)  # path → SHA-256, or "git:" and a blob's id

    @property
    def files(self) -> dict[str, int]:
        return {path: size for chosen in self.selections.values() for path, size in chosen.files.items()}


def list_files(wanted: Sequence[Need], folder: Path) -> list[Repository]:
    """Asks the Hub for the files of each need, with sizes and checksums.

    A repository that is in the mirror already stays at its commit, so that a branch that moves meanwhile does
    not mix two versions.
    """
    found: dict[str, Repository] = {}
    for need in tqdm(wanted, desc="listing", unit="part", leave=False):
        with explained(need):
            if need.repo not in found:
                found[need.repo] = _open(need, folder / need.repo)
            repository = found[need.repo]
            find = _model_files if need.type == "model" else _data_files
            repository.selections[need.selection] = find(need, repository)
    return list(found.values())


def _open(need: Need, folder: Path) -> Repository:
    known, revision = Manifest.read(folder), need.revision
    if known and known.type != need.type:
        raise ValueError(
            f"{need.repo} is wanted as a {need.type}, and {folder} holds the {known.type} of that name: "
            "pull this preset into a mirror of its own"
        )
    if known and need.revision in (known.requested, known.revision):
        revision = known.revision
    with explained(replace(need, revision=revision)):
        commit = patiently(lambda: HfApi().repo_info(need.repo, repo_type=need.type, revision=revision).sha)
    if known and known.revision != commit:
        raise ValueError(
            f"{need.repo} is wanted at {need.revision} ({commit[:12]}), and {folder} holds {known.requested} "
            f"({known.revision[:12]}): delete that folder, or pull into another mirror"
        )
    return Repository(need.repo, need.type, commit, known.requested if known else need.revision)


def _model_files(need: Need, repository: Repository) -> Selection:
    def tree() -> list[RepoFile]:
        entries = HfApi().list_repo_tree(
            need.repo, revision=repository.revision, repo_type="model", recursive=True
        )
        return [entry for entry in entries if isinstance(entry, RepoFile)]

    def wanted(path: str) -> bool:
        return MODULE.fullmatch(path) is not None if "/" in path else path.endswith(MODEL_FILES)

    entries = [entry for entry in patiently(tree) if wanted(entry.path)]
    if not any(entry.path.endswith(".safetensors") for entry in entries):
        raise ValueError(f"{need.repo} has no weights as *.safetensors, and no other format is loaded")
    return _selection(entries, repository)


def _data_files(need: Need, repository: Repository) -> Selection:
    source = replace(need.source, kind="hub", revision=repository.revision)
    base = f"hf://datasets/{need.repo}@{repository.revision}/"
    listed, text = patiently(lambda: data_files(source)), None
    if need.text_bytes is not None:
        share = patiently(lambda: _text_share(listed[0], source.columns["text"]))
        sums = list(itertools.accumulate(share * file.size for file in listed))
        taken = bisect.bisect_left(sums, need.text_bytes) + 1
        if taken < len(listed):
            listed, text = listed[:taken], sums[taken - 1]
    paths = ["README.md", *(file.path.removeprefix(base) for file in listed)]
    entries: list[RepoFile] = []
    for start in range(0, len(paths), BATCH):
        batch = paths[start : start + BATCH]
        entries += patiently(
            lambda batch=batch: HfApi().get_paths_info(
                need.repo, batch, revision=repository.revision, repo_type="dataset"
            )
        )
    by_path = {entry.path: entry for entry in entries}
    entries = [by_path[path] for path in paths if path in by_path]  # a repository may do without a README
    return _selection(entries, repository, text)


def _selection(entries: Sequence[RepoFile], repository: Repository, text: float | None = None) -> Selection:
    for entry in entries:
        digest = entry.lfs.sha256 if entry.lfs else f"git:{entry.blob_id}"
        repository.checksums[entry.path] = digest
    return Selection({entry.path: entry.size for entry in entries}, None if text is None else int(text))


def _text_share(file: DataFile, column: str) -> float:
    """Bytes of text for each byte of files like this one; of Parquet, the footer knows."""
    if not file.path.endswith(".parquet"):
        return PLAIN if file.path.endswith((".jsonl", ".json", ".csv", ".tsv")) else PACKED
    with HfFileSystem().open(file.path) as stream:
        footer = pq.ParquetFile(stream).metadata
    text = sum(
        part.total_uncompressed_size
        for group in map(footer.row_group, range(footer.num_row_groups))
        for part in map(group.column, range(group.num_columns))
        if part.path_in_schema == column
    )
    return text / file.size if text else PLAIN


def patiently(call: Callable[[], T]) -> T:
    """Calls again, after a pause, where the Hub is busy or the connection breaks."""
    for pause in (*PAUSES, None):
        try:
            return call()
        except (HTTPError, ValueError) as error:
            reason = error if isinstance(error, HTTPError) else error.__cause__
            if pause is None or not _passing(reason):
                raise
            time.sleep(pause)
    raise AssertionError


def _passing(reason: BaseException | None) -> bool:
    """Whether a refusal may have an end: a broken connection, or a Hub that is busy or restarts."""
    response = getattr(reason, "response", None)
    if response is None:
        return isinstance(reason, HTTPError)
    return response.status_code in (408, 429) or response.status_code >= 500


@contextlib.contextmanager
def explained(need: Need) -> Iterator[None]:
    """The Hub's refusals as messages that say what to do."""
    kind = "" if need.type == "model" else f"{need.type}s/"
    page = f"{constants.ENDPOINT}/{kind}{need.repo}"
    try:
        yield
    except GatedRepoError:
        raise ValueError(
            f"{need.repo} is gated: accept its terms at {page} and set HF_TOKEN to a token of that account"
        ) from None
    except RepositoryNotFoundError:
        raise ValueError(
            f"{page}: there is no such {need.type}, or it is private: check the name, or set HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise ValueError(f"{need.repo} has no revision {need.revision!r}: see {page}/tree/main") from None
    except RemoteEntryNotFoundError as error:
        raise OSError(f"{need.repo}: a file has gone from the Hub ({_line(error)})") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise ValueError(f"{page}: refused ({status}): set HF_TOKEN to one that may read it") from None
        raise OSError(f"the Hub answers {status} ({_line(error)}): try later, and it goes on") from None
    except HTTPError as error:
        raise OSError(
            f"the Hub cannot be reached any more ({constants.ENDPOINT}: {_line(error)}): "
            "try later, and it goes on"
        ) from None


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
