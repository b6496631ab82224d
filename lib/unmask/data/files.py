"""Which files a source is read from: one's own, a mirror's or the Hub's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from huggingface_hub import DatasetCard, HfApi
from huggingface_hub.errors import HTTPError

from unmask.data.registry import Source, own_files
from unmask.store import fingerprint, nearest, read_json

MANIFEST = ".unmask-mirror.json"
HOW_TO_MIRROR = (
    "where the Hub can be reached, `unmask mirror pull --preset NAME --to DIR` fetches what a preset needs, "
    "and UNMASK_MIRROR=DIR serves it here"
)
# Suffix → the builder of `datasets` that reads such files. JSON and CSV may be compressed (.gz).
FORMATS = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".tsv": "csv"} | dict.fromkeys(
    (".jsonl", ".ndjson", ".json"), "json"
)
_NO_CONTENT = ("files", "share", "licence", "rows", "bytes", "documented", "optional")  # of a definition


@dataclass(frozen=True)
class DataFile:
    """A file of a source."""

    path: str  # local, or an hf:// URL
    size: int  # bytes
    version: str  # another one for other content: its checksum, or its time


def suffix_of(file: str) -> str:
    """The suffix that tells a file's format, the compression's left out."""
    return PurePosixPath(file.lower().removesuffix(".gz")).suffix


def data_files(source: Source, *, queries: bool = False) -> list[DataFile]:
    """The files of a source in the order in which they are read.

    Args:
        source: of kind files, hub or mirror. Kind hub is read from UNMASK_MIRROR, if it is set.
        queries: those of `queries_config` instead of `config`.
    Raises: ValueError if there are none, with the remedy: a pattern without a match; an unknown configuration
        or split, with the known ones; a repository that is not in the mirror; a Hub that refuses or does not
        answer.
    """
    if source.kind == "files":
        paths = dict.fromkeys(str(path) for path in own_files(source) if path.is_file())
        if not paths:
            named = " or ".join(source.files)
            raise ValueError(f"Source {source.name}: no file {named}; correct `files` in its registry")
        return [_described(path, {}) for path in paths]
    mirror = os.environ.get("UNMASK_MIRROR")
    if source.kind == "mirror" and not mirror:
        raise ValueError(f"Source {source.name} is read from a mirror: set UNMASK_MIRROR; {HOW_TO_MIRROR}")
    base = f"{Path(mirror).resolve()}/{source.repo}" if mirror else f"hf://datasets/{source.repo}"
    try:
        base += "" if mirror else f"@{_commit(source.repo, source.revision)}"
        recorded = _pulled(source, base) if mirror else {}
        found = _resolved(source, source.queries_config if queries else source.config, base)
        return [_described(path, recorded.get(os.path.relpath(path, base), {})) for path in found]
    except (OSError, HTTPError) as error:  # not there, not open to this account, no answer
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"Source {source.name}: {base} cannot be read ({reason}); {HOW_TO_MIRROR}"
        ) from error


def files_of(source: Source) -> Iterator[tuple[DataFile, bool | None]]:
    """All files of a source; in the joined layout of documents each with whether it holds the queries.

    Raises: ValueError, see `data_files`.
    """
    for queries in (False, True) if source.queries_config else (None,):
        for file in data_files(source, queries=bool(queries)):
            yield file, queries


def identity(source: Source) -> str:
    """Hash of what decides the rows of a source: its definition, and its files' names, sizes and versions.

    Raises: ValueError if the files cannot be found, see `data_files`.
    """
    definition = {key: value for key, value in asdict(source).items() if key not in _NO_CONTENT}
    listed = [(os.path.basename(file.path), file.size, file.version) for file, _ in files_of(source)]
    return fingerprint(definition, listed)


def manifest(folder: str | Path) -> dict[str, Any]:
    """What `unmask mirror pull` recorded of a repository: its revision, and files with size and sha256. Empty
    for one that was put into the mirror by hand.
    """
    return read_json(Path(folder) / MANIFEST)


def _pulled(source: Source, folder: str) -> Mapping[str, Any]:
    """The files that `unmask mirror pull` recorded, all of which must be there."""
    pulled = {"requested": source.revision, "files": {}} | manifest(folder)
    if source.revision not in (pulled["requested"], pulled.get("revision")):
        held = f"the mirror holds revision {pulled['revision']} of {source.repo}"
        raise ValueError(f"{held}, not {source.revision}: `unmask mirror pull` into another")
    for path, fact in pulled["files"].items():
        if not os.path.isfile(f"{folder}/{path}") or os.path.getsize(f"{folder}/{path}") != fact["size"]:
            raise ValueError(f"{folder}/{path} is gone or not whole: `unmask mirror pull` fetches it again")
    return pulled["files"]


def _described(path: str, recorded: Mapping[str, Any]) -> DataFile:
    info = fsspec.url_to_fs(path)[0].info(path)
    version = recorded.get("sha256") or info.get("blob_id") or str(info["mtime"])
    return DataFile(path, info["size"], version)


@cache
def _commit(repo: str, revision: str) -> str:
    """The commit of a revision: asked for once, so that a process reads one state of a repository."""
    return HfApi().dataset_info(repo, revision=revision).sha


def _resolved(source: Source, config: str, base: str) -> list[str]:
    """The files of a configuration's split, by the README of the repository in `base` (a folder, or an hf://
    URL), or else by their names. A folder may hold as many of them as are needed."""
    # Seconds to import, which a question at the command line does not need.
    from datasets.data_files import get_data_patterns, resolve_pattern, sanitize_patterns

    where, configs = f"Source {source.name}: {source.repo}", _configurations(base)
    name = config or configs.get_default_config_name() or "default"
    if configs and name not in configs:
        raise ValueError(f"{where} has no configuration {name!r}{nearest(name, configs)}")
    described = configs.get(name) or {"data_dir": config}  # on refs/convert/parquet there is no README
    folder = f"{base}/{described.get('data_dir') or ''}".rstrip("/")
    given = described.get("data_files")
    patterns = sanitize_patterns(given) if given else get_data_patterns(folder)
    if source.split not in patterns:
        raise ValueError(f"{where}, {name} has no split {source.split!r}{nearest(source.split, patterns)}")
    files: set[str] = set()
    for pattern in patterns[source.split]:
        with suppress(FileNotFoundError):
            files.update(resolve_pattern(pattern, folder))
    if not files:
        raise FileNotFoundError(f"no file of {name}, split {source.split}")
    return sorted(file for file in files if suffix_of(file) in FORMATS)


@cache  # some have a thousand, and a source for each language asks
def _configurations(base: str) -> Mapping[str, Any]:
    """The `configs:` of a repository's README."""
    from datasets.utils.metadata import MetadataConfigs

    with suppress(FileNotFoundError), fsspec.open(f"{base}/README.md", encoding="utf8", mode="rt") as file:
        card = DatasetCard(file.read(), ignore_metadata_errors=True)
        return MetadataConfigs.from_dataset_card_data(card.data)
    return MetadataConfigs()
