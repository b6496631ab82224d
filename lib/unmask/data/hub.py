"""The Hub, and mirrors of it for hosts without internet.

A mirror is a folder of repositories, DIR/<organisation>/<name>/…, laid out as on the Hub. `pull` fills it,
`check` looks through it, and UNMASK_MIRROR=DIR names it: what is there is read from there, without the Hub.
A repository that was pulled has a manifest, so what is missing of it is known; one without was put there by
hand, and is read as it is.
"""

from __future__ import annotations

import bisect
import contextlib
import glob
import hashlib
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from huggingface_hub import HfApi, HfFileSystem, constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import get_session
from tqdm.auto import tqdm

from unmask.config import Preset
from unmask.data import files
from unmask.data.files import DataFile, data_files
from unmask.data.registry import Source, conteb, load_registry
from unmask.store import write_atomic

MODEL = "model"  # the selection that is a model's: all of it that is loaded
# Of a model: what transformers loads, and its licence. Other formats of the weights stay on the Hub.
MODEL_FILES = (".safetensors", ".json", ".txt", ".model", ".jinja", ".md", "LICENSE")
# Of a module of sentence-transformers, its pooling for instance.
MODULE = re.compile(r"\d+_\w+/(config\.json|model\.safetensors)")
HUB_TIMEOUT = 5.0  # seconds in which the Hub answers, or is taken to be out of reach
SPARE_BYTES = 100e6  # of disk space, beside the files themselves
# Text to fetch for each byte that `data.max_text_mb` allows a source. Its share is one of tokens: the cap
# takes four bytes for each, which holds for Latin script; others have up to seven.
SLACK_LATIN, SLACK = 1.1, 1.75
# Text for each byte of a file, on the low side, where no footer says it: compressed and plain JSON lines.
PACKED, PLAIN = 1.0, 0.5
REFUSALS = {
    GatedRepoError: "{repo} is gated: accept its terms at {page} and set HF_TOKEN to a token of that account",
    RepositoryNotFoundError: "{page}: there is no such {type}, or it is private: correct it, or set HF_TOKEN",
    RevisionNotFoundError: "{repo} has no revision {revision!r}: see {page}/tree/main",
}


@dataclass(frozen=True)
class Need:
    """A part of a repository that a preset needs."""

    repo: str
    type: str  # "dataset" or "model"
    revision: str
    selection: str  # "configuration/split", or MODEL
    source: Source | None = None  # of a data set: the source, with this configuration
    text_bytes: float | None = None  # so much text will do; None: all of it

    @property
    def what(self) -> str:
        return self.repo if self.type == "model" else f"{self.repo} {self.selection}"


@dataclass
class Manifest:
    """What is known of a repository that is pulled: .unmask-mirror.json in its folder."""

    repo: str
    type: str  # "dataset" or "model"
    revision: str  # the commit
    requested: str  # the branch, tag or commit that the registry names
    # Name → {"files": {path: bytes}, "text_bytes": text in them, about; None: they are all there is}.
    selections: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Path → {"size": bytes, "sha256": digest}; of small files the digest comes with the file.
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The manifest of a repository's folder; None where there is none."""
        values = files.manifest(folder)
        return cls(**values) if values else None

    def write(self, folder: Path) -> None:
        write_atomic(folder / files.MANIFEST, json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")

    def left(self, folder: Path, selection: str) -> dict[str, int]:
        """Files of a selection that are not there, not whole or not known to be right; path → bytes."""
        return {
            path: size
            for path, size in self.selections[selection]["files"].items()
            if _size(folder / path) != size or not self.files.get(path, {}).get("sha256")
        }


# ---- what a preset needs, and what is there


def root() -> Path | None:
    """The mirror that UNMASK_MIRROR names."""
    name = os.environ.get("UNMASK_MIRROR")
    return Path(name).resolve() if name else None


def local(repo: str) -> Path | None:
    """Folder of a repository in the mirror; None without a mirror, or where it does not have it."""
    folder = root()
    return folder / repo if folder and is_hub_name(repo) and (folder / repo).is_dir() else None


def is_hub_name(text: str) -> bool:
    """Whether this is "organisation/name", as on the Hub, rather than a path."""
    return text.count("/") == 1 and not text.startswith((".", "/", "~")) and not Path(text).exists()


def needs(preset: Preset) -> list[Need]:
    """What a preset reads from the Hub or a mirror, each part of a repository once.

    Raises: ValueError for a registry that cannot be read.
    """
    models = dict.fromkeys((preset.backbone.checkpoint, preset.clusters.surrogate))
    found = [Need(name, "model", "main", MODEL) for name in models if is_hub_name(name)]
    sources = [conteb(name) for name in preset.conteb.tasks]
    if preset.data.source != "environment":
        sources += [one for one in load_registry(preset.data.source) if one.kind in ("hub", "mirror")]
    for source in sources:
        text = _text_wanted(source, preset.data.max_text_mb) if source.role == "text" else None
        for config in dict.fromkeys((source.config, source.queries_config or source.config)):
            part, selection = replace(source, config=config), f"{config or 'default'}/{source.split}"
            found.append(Need(source.repo, "dataset", source.revision, selection, part, text))
    return list({(need.repo, need.revision, need.selection): need for need in found}.values())


def require(preset: Preset) -> None:
    """Makes sure, in seconds, that the data and the checkpoint of a run can be read.

    Raises: ValueError that says what cannot, and how to get it.
    """
    wanted = needs(preset)
    if lacking := _lacking([need for need in wanted if not _from_hub(need)]):
        what = _listed([f"{what} ({why})" for what, why in lacking])
        raise ValueError(f"the mirror {root() or 'that UNMASK_MIRROR must name'} lacks {what}: {how(preset)}")
    remote = [need.repo for need in wanted if _from_hub(need)]
    if remote and (why := unreachable()):
        raise ValueError(
            f"{_listed(remote)} would be read from the Hub, which cannot be reached ({why}): {how(preset)}, "
            "then set UNMASK_MIRROR=DIR here"
        )


def check(preset: Preset, *, quick: bool = False, jobs: int = 4) -> tuple[list[tuple[str, str]], int]:
    """Looks for what a preset needs in the mirror: names, sizes, and unless `quick` checksums.

    Returns: what is missing or altered, each with why; and how many pulled files are there.
    Raises: ValueError if there is no mirror.
    """
    if not (folder := root()) or not folder.is_dir():
        raise ValueError(f"no mirror{f' at {folder}' if folder else ''}: name one by --from or UNMASK_MIRROR")
    wanted = needs(preset)
    wrong, pulled = _lacking(wanted), _pulled(wanted)
    if not quick:
        with ThreadPoolExecutor(jobs) as pool:
            found = tqdm(pool.map(_sha256, pulled), "checksums", len(pulled), leave=False, unit="file")
            altered = [path for path, digest in zip(pulled, found, strict=True) if digest != pulled[path]]
        wrong += [(str(path), "wrong checksum: delete it and pull again") for path in altered]
    return wrong, len(pulled)


def offline(preset: Preset) -> bool:
    """Whether a run of this preset reads nothing from the Hub itself, because all of it is here."""
    return not any(_from_hub(need) for need in needs(preset))


def data_on_hub(preset: Preset) -> bool:
    """Whether the data of this preset are read from the Hub itself, so that a look at them takes its time."""
    return any(need.source and _from_hub(need) for need in needs(preset))


def how(preset: Preset) -> str:
    """How to get what is missing."""
    return f"on a host with internet, `unmask mirror pull --preset {preset.name} --to DIR`"


def unreachable() -> str:
    """Why the Hub does not answer; empty if it does, whatever it says."""
    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT, follow_redirects=False)
    except (HTTPError, OSError) as error:
        return f"{constants.ENDPOINT}: {error or type(error).__name__}"
    return ""


def _text_wanted(source: Source, max_text_mb: float) -> float:
    """Bytes of text that are enough for a source's share."""
    slack = SLACK_LATIN if source.language.endswith("_Latn") else SLACK
    return slack * max_text_mb * 1e6 * (100.0 if source.share is None else source.share) / 100


def _from_hub(need: Need) -> bool:
    """Data are read from the mirror wherever there is one; a model may also lie in the libraries' cache."""
    if need.source:
        return root() is None and need.source.kind == "hub"
    return local(need.repo) is None and not _cached(need.repo)


def _cached(model: str) -> bool:
    config = try_to_load_from_cache(model, "config.json")
    return isinstance(config, str) and any(Path(config).parent.glob("*.safetensors"))


def _lacking(wanted: Sequence[Need]) -> list[tuple[str, str]]:
    """What is missing, and why; parts of a repository that are missing for the same reason are one."""
    groups: dict[tuple[str, str], list[str]] = {}
    for need in wanted:
        if why := _why(need):
            groups.setdefault((need.repo, why), []).append(need.what)
    return [
        (parts[0] if len(parts) == 1 else f"{repo} ({len(parts)} parts)", why)
        for (repo, why), parts in groups.items()
    ]


def _why(need: Need) -> str:
    """Why the mirror does not do for a need; empty if it does."""
    folder = local(need.repo)
    if folder is None:
        return "not there"
    manifest = Manifest.read(folder)
    if manifest is None:
        return _why_by_hand(need, folder)
    chosen, versions = manifest.selections.get(need.selection), (manifest.requested, manifest.revision)
    if not chosen or need.type != manifest.type or need.revision not in versions:
        return f"never pulled at {need.revision}"
    if left := manifest.left(folder, need.selection):
        return f"{len(left)} of {len(chosen['files'])} files not there, {_readable(sum(left.values()))}"
    held = chosen["text_bytes"]
    if held is not None and held < (need.text_bytes or math.inf):
        return f"about {_readable(held)} of text, and more is wanted"
    return ""


def _why_by_hand(need: Need, folder: Path) -> str:
    try:
        whole = data_files(need.source) if need.source else any(folder.glob("*.safetensors"))
        return "" if whole else "*.safetensors not there"
    except ValueError as error:
        return str(error)


def _pulled(wanted: Sequence[Need]) -> dict[Path, str]:
    """Whole files of repositories that were pulled, with their checksums."""
    folders = {folder for need in wanted if (folder := local(need.repo))}
    return {
        folder / path: fact["sha256"]
        for folder in sorted(folders)
        for path, fact in files.manifest(folder).get("files", {}).items()
        if fact["sha256"] and _size(folder / path) == fact["size"]
    }


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _readable(count: float) -> str:
    return tqdm.format_sizeof(count, "B")


def _listed(names: Sequence[str], at_most: int = 3) -> str:
    unique = list(dict.fromkeys(names))
    more = len(unique) - at_most
    return ", ".join(unique[:at_most]) + (f" and {more} more" if more > 0 else "")


# ---- filling a mirror


def pull(preset: Preset, folder: Path, *, jobs: int = 4) -> None:
    """Fetches all models and data of a preset into a mirror, and goes on where an earlier call was stopped.

    Args:
        folder: the mirror, which is created.
        jobs: files that are fetched at a time.
    Raises:
        ValueError: the preset needs nothing of the Hub, or what it names is not there, not open to this
            account, or in the mirror in another version.
        OSError: the Hub cannot be reached, the folder cannot be written, there is too little space, or a file
            comes with a wrong checksum. Each message says what to do.
    """
    wanted = needs(preset)
    if not wanted:
        raise ValueError(f"preset {preset.name} reads nothing from the Hub: there is nothing to mirror")
    if why := unreachable():
        raise OSError(f"the Hub cannot be reached ({why}): pull elsewhere, or set HTTPS_PROXY or HF_ENDPOINT")
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.pop("UNMASK_MIRROR", None)  # else the data would be looked for in a mirror
    left: dict[str, dict[str, int]] = {need.repo: {} for need in wanted}
    for need in tqdm(wanted, "listing", unit="part", leave=False):
        left[need.repo] |= _ask(need, folder / need.repo)
    _check_space(sum(sum(sizes.values()) for sizes in left.values()), folder)
    for need in {need.repo: need for need in wanted}.values():
        with explained(need):
            _fetch(need, left[need.repo], folder / need.repo, jobs)
    print(f"all that preset {preset.name!r} needs is there: UNMASK_MIRROR={folder} serves it")


def _ask(need: Need, folder: Path) -> dict[str, int]:
    """Asks the Hub for the files of a need, and notes them in the manifest.

    A repository that is in the mirror already stays at its commit, so that a branch that moves meanwhile does
    not mix two versions; nor does one version replace another.

    Returns: what is left to fetch; path → bytes.
    """
    known = Manifest.read(folder)
    same = known and need.revision == known.requested
    asked = replace(need, revision=known.revision) if same else need
    with explained(asked):
        commit, tree = _tree(asked.repo, asked.type, asked.revision)
        chosen = _data_files(need, commit, tree) if need.source else _model_files(need, tree)
    manifest = known or Manifest(need.repo, need.type, commit, need.revision)
    if (manifest.type, manifest.revision) != (need.type, commit):
        raise ValueError(
            f"{need.repo} is asked for as {need.type} at {need.revision}, and {folder} holds "
            f"the {manifest.type} at {manifest.requested}: a mirror holds one version; pull into another"
        )
    before = manifest.selections.get(need.selection)
    if not before or len(before["files"]) < len(chosen["files"]):  # a larger preset's text stays asked for
        manifest.selections[need.selection] = chosen
    for path, size in chosen["files"].items():
        lfs = tree[path].lfs
        manifest.files.setdefault(path, {"size": size, "sha256": lfs.sha256 if lfs else ""})
    manifest.write(folder)
    return manifest.left(folder, need.selection)


@cache
def _tree(repo: str, type: str, revision: str) -> tuple[str, dict[str, RepoFile]]:
    """The commit of a revision, and all of its files."""
    hub = HfApi()
    commit = hub.repo_info(repo, repo_type=type, revision=revision).sha
    entries = hub.list_repo_tree(repo, recursive=True, revision=commit, repo_type=type)
    return commit, {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}


def _model_files(need: Need, tree: dict[str, RepoFile]) -> dict[str, Any]:
    sizes = {
        path: entry.size
        for path, entry in tree.items()
        if (MODULE.fullmatch(path) if "/" in path else path.endswith(MODEL_FILES))
    }
    if not any(path.endswith(".safetensors") for path in sizes):
        raise ValueError(f"{need.repo} has no weights as *.safetensors, and no other format is loaded")
    return {"files": sizes, "text_bytes": None}


def _data_files(need: Need, commit: str, tree: dict[str, RepoFile]) -> dict[str, Any]:
    """The files of a source's configuration; of text the first ones, as many as hold what is needed of it."""
    source = replace(need.source, kind="hub", revision=commit)
    listed, text = data_files(source), None
    if need.text_bytes is not None:
        share = _text_share(listed[0], source.columns["text"])
        sums = list(itertools.accumulate(share * file.size for file in listed))
        taken = bisect.bisect_left(sums, need.text_bytes) + 1
        if taken < len(listed):
            listed, text = listed[:taken], int(sums[taken - 1])
    base = f"hf://datasets/{need.repo}@{commit}/"
    paths = ["README.md", *(file.path.removeprefix(base) for file in listed)]
    return {"files": {path: tree[path].size for path in paths if path in tree}, "text_bytes": text}


def _text_share(file: DataFile, column: str) -> float:
    """Bytes of text for each byte of files like this one; of Parquet, the footer knows."""
    if not file.path.endswith(".parquet"):
        return PLAIN if file.path.endswith((".jsonl", ".json", ".csv", ".tsv")) else PACKED
    with HfFileSystem().open(file.path) as stream:
        footer = pq.ParquetFile(stream).metadata
    groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
    parts = [group.column(i) for group in groups for i in range(group.num_columns)]
    text = sum(part.total_uncompressed_size for part in parts if part.path_in_schema == column)
    return text / file.size if text else PLAIN


def _check_space(needed: int, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if needed + SPARE_BYTES > free:
        sizes = f"{_readable(needed)} are to be fetched and {_readable(free)} are free at {folder}"
        raise OSError(f"{sizes}: free some, name another folder by --to, or lower data.max_text_mb")


def _fetch(need: Need, left: dict[str, int], folder: Path, jobs: int) -> None:
    """Fetches what is left of a repository; the library skips what it has fetched before."""
    size = f"{_readable(sum(left.values()))} in {len(left)} files to fetch" if left else "all there"
    manifest = Manifest.read(folder)
    print(f"{need.repo} ({need.type}, {manifest.revision[:12]}): {size}", flush=True)
    if not left:
        return
    for path in left:  # of a wrong size, which the library does not always see
        (folder / path).unlink(missing_ok=True)
    where = {"repo_type": need.type, "revision": manifest.revision, "local_dir": folder}
    snapshot_download(need.repo, **where, allow_patterns=[*map(glob.escape, left)], max_workers=jobs)
    for path in left:
        fact, digest = manifest.files[path], _sha256(folder / path)
        if fact["sha256"] not in ("", digest):
            (folder / path).unlink()
            raise OSError(
                f"{need.repo}/{path} came with a wrong checksum: a proxy, perhaps, alters it; the same "
                "command tries again"
            )
        fact["sha256"] = digest
    manifest.write(folder)


# ---- the Hub's refusals


@contextlib.contextmanager
def explained(need: Need) -> Iterator[None]:
    """The Hub's refusals as messages that say what to do.

    Raises: ValueError for what is not there or not open to this account, OSError for a Hub that fails.
    """
    try:
        yield
    except tuple(REFUSALS) as error:
        message = next(message for kind, message in REFUSALS.items() if isinstance(error, kind))
        page = f"{constants.ENDPOINT}/{'' if need.type == 'model' else 'datasets/'}{need.repo}"
        facts = {"repo": need.repo, "type": need.type, "revision": need.revision, "page": page}
        raise ValueError(message.format(**facts)) from None
    except HTTPError as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise OSError(
            f"the Hub fails ({constants.ENDPOINT}: {why}): try later, and the same command goes on"
        ) from None
