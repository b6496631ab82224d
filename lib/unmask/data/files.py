"""Which files a source is read from (one's own, a mirror's, the Hub's), and whether they are whole."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import DatasetCard, HfApi, HfFileSystem
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from unmask.data.registry import Source, own_files
from unmask.store import artifacts_root, nearest, read_json, write_atomic

MANIFEST = ".unmask-mirror.json"
HOW_TO_MIRROR = (
    "where the Hub can be reached, `unmask mirror pull --preset NAME --to DIR` fetches what a preset needs, "
    "and UNMASK_MIRROR=DIR serves it here"
)
JSONL, CSV = (".jsonl", ".ndjson", ".json"), (".csv", ".tsv")
SUFFIXES = (".parquet", ".arrow", *JSONL, *CSV)
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}  # of JSON lines and CSV
TIMEOUT = 20.0  # seconds for the Hub's first answer


@dataclass(frozen=True)
class DataFile:
    """A file of a source."""

    path: str  # local, or an hf:// URL
    size: int  # bytes
    sha256: str = ""  # where a mirror's manifest has it


def suffix_of(file: str) -> str:
    """The suffix that tells a file's format, the compression's left out."""
    path = PurePosixPath(file.lower())
    return PurePosixPath(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix


def is_data(file: str) -> bool:
    """Whether a file's name tells a format that is read."""
    return suffix_of(file) in SUFFIXES


def data_files(source: Source, *, queries: bool = False) -> list[DataFile]:
    """The files of a source in the order in which they are read.

    Args:
        source: of kind files, hub or mirror. Kind hub is read from UNMASK_MIRROR, if it is set.
        queries: those of `queries_config` instead of `config`.
    Raises: ValueError if there are none, with the remedy: a pattern without a match; an unknown configuration
        or split, with the known ones; a repository that is not in the mirror, or not whole; a Hub that does
        not answer.
    """
    if source.kind == "files":
        return _own_files(source)
    config = source.queries_config if queries else source.config
    if mirror := os.environ.get("UNMASK_MIRROR"):
        return _mirror_files(source, config, Path(mirror).resolve())
    if source.kind == "mirror":
        raise ValueError(f"Source {source.name} is read from a mirror: set UNMASK_MIRROR; {HOW_TO_MIRROR}")
    return _hub_files(source, config)


def resolved(source: Source, config: str, base: str, readme: Path | None) -> list[str]:
    """Paths of the files of a configuration's split, by the repository's README, or else by their names.

    Args:
        base: local folder or hf:// URL of the repository.
        readme: the repository's README.md; None if there is none.
    Raises: ValueError for an unknown configuration or split, or if no file is there.
    """
    # Seconds to import, which a question at the command line does not need.
    from datasets.data_files import EmptyDatasetError, get_data_patterns, resolve_pattern, sanitize_patterns

    where = f"Source {source.name}: {source.repo}"
    folder, patterns, wanted = base, None, config or "default"
    if configs := readme and _configurations(readme, readme.stat().st_mtime_ns):
        name = config or configs.get_default_config_name()
        if name not in configs:
            raise ValueError(f"{where} has no configuration {wanted!r}{nearest(wanted, configs)}")
        folder = "/".join(filter(None, [base, configs[name].get("data_dir")]))
        if given := configs[name].get("data_files"):
            patterns = sanitize_patterns(given)
    elif config:
        folder = f"{base}/{config}"  # so it is on the branch refs/convert/parquet, which has no README
    where += f", configuration {wanted}"
    try:
        patterns = patterns or get_data_patterns(folder)
    except EmptyDatasetError:
        raise ValueError(f"{where}: there is no data file in {folder}") from None
    if source.split not in patterns:
        raise ValueError(f"{where} has no split {source.split!r}{nearest(source.split, patterns)}")
    files: dict[str, None] = {}
    for pattern in patterns[source.split]:
        with suppress(FileNotFoundError):  # a mirror may hold as many files of a text as are needed
            files.update(dict.fromkeys(sorted(filter(is_data, resolve_pattern(pattern, folder)))))
        _require_recorded(base, os.path.relpath(f"{folder}/{pattern}", base))
    if not files:
        raise ValueError(f"{where}: no file of split {source.split} is in {folder}; {HOW_TO_MIRROR}")
    return list(files)


def manifest(folder: str | Path) -> dict[str, Any]:
    """What `unmask mirror pull` recorded of a repository: its revision, and files with size and sha256. Empty
    for one that was put into the mirror by hand.
    """
    return read_json(Path(folder) / MANIFEST)


def verify(path: str, sha256: str) -> None:
    """Compares a file with its checksum, once: a marker among the artifacts remembers it by size and time.

    Raises: ValueError that names the file and what to do.
    """
    status = os.stat(path)
    known = f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0{sha256}"
    marker = artifacts_root() / "data" / "verified" / hashlib.sha256(known.encode()).hexdigest()[:32]
    if marker.exists():
        return
    with open(path, "rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != sha256:
        raise ValueError(
            f"{path} has a wrong checksum (SHA-256 {found[:12]}…, not {sha256[:12]}…): `unmask mirror check` "
            "names all such files; delete them, and `unmask mirror pull` fetches them again"
        )
    write_atomic(marker, path + "\n")


def _own_files(source: Source) -> list[DataFile]:
    found = dict.fromkeys(path for path in own_files(source) if path.is_file())
    if not found:
        named = " or ".join(source.files)
        raise ValueError(f"Source {source.name}: no file {named}; correct `files` in its registry")
    return [DataFile(str(path), path.stat().st_size) for path in found]


def _mirror_files(source: Source, config: str, mirror: Path) -> list[DataFile]:
    folder = mirror / source.repo
    if not folder.is_dir():
        raise ValueError(
            f"Source {source.name}: {source.repo} is not in the mirror {mirror} (UNMASK_MIRROR); "
            + HOW_TO_MIRROR
        )
    pulled = manifest(folder)
    if pulled and len(source.revision) == 40 and source.revision != pulled.get("revision"):
        raise ValueError(
            f"Source {source.name}: the mirror holds revision {pulled.get('revision')} of {source.repo}, not "
            f"{source.revision}: `unmask mirror pull` fetches that"
        )
    readme = folder / "README.md"
    result = []
    for file in resolved(source, config, str(folder), readme if readme.is_file() else None):
        size = os.path.getsize(file)
        entry = pulled.get("files", {}).get(os.path.relpath(file, folder), {})
        if size != entry.get("size", size):
            raise ValueError(
                f"{file} has {size:,} bytes, not {entry['size']:,}: `unmask mirror pull` fetches it again"
            )
        result.append(DataFile(file, size, entry.get("sha256", "")))
    return result


def _hub_files(source: Source, config: str) -> list[DataFile]:
    where = f"Source {source.name}: {source.repo}"
    try:
        api, hub = HfApi(), HfFileSystem()
        commit = _commit(source.repo, source.revision)
        try:
            readme = Path(api.hf_hub_download(source.repo, "README.md", repo_type="dataset", revision=commit))
        except LocalEntryNotFoundError:  # no answer, though its class says that there is no such file
            raise
        except EntryNotFoundError:
            readme = None
        files = resolved(source, config, f"hf://datasets/{source.repo}@{commit}", readme)
        return [DataFile(file, hub.info(file)["size"]) for file in files]
    except GatedRepoError as error:
        remedy = "accept its terms on its page on the Hub, and set HF_TOKEN to a token of that account"
        raise ValueError(f"{where} is gated: {remedy}") from error
    except RevisionNotFoundError as error:
        raise ValueError(f"{where} has no revision {source.revision!r}: correct `revision`") from error
    except RepositoryNotFoundError as error:
        raise ValueError(f"{where} is not on the Hub, or private: correct `repo`, or set HF_TOKEN") from error
    except (OSError, HTTPError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{where}: the Hub cannot be reached ({reason}); {HOW_TO_MIRROR}") from error


@cache
def _commit(repo: str, revision: str) -> str:
    """The commit of a revision: asked for once, so that a process reads one state of a repository."""
    return HfApi().dataset_info(repo, revision=revision, timeout=TIMEOUT).sha


@cache
def _configurations(readme: Path, changed: int) -> Mapping[str, Any]:
    """The `configs:` of a README, parsed once: some have a thousand, and a source for each language asks."""
    from datasets.utils.metadata import MetadataConfigs

    return MetadataConfigs.from_dataset_card_data(DatasetCard.load(readme, ignore_metadata_errors=True).data)


def _require_recorded(base: str, pattern: str) -> None:
    """What the manifest of a mirror's repository lists must be there."""
    for file in manifest(base).get("files", ()) if "://" not in base else ():
        if fnmatch(file, pattern) and not os.path.isfile(f"{base}/{file}"):
            raise ValueError(f"{base}/{file} was pulled and is gone: `unmask mirror pull` fetches it again")
