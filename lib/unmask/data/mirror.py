"""Mirrors of the Hub, for hosts without internet.

A mirror is a folder of repositories, DIR/<organisation>/<name>/…, laid out as on the Hub. `pull` fills it,
`check` looks through it, and UNMASK_MIRROR=DIR names it: what is there is read from there, without the Hub.
Of a repository that was pulled `huggingface_hub` keeps the commit and the list of all its files, so what is
missing is known; one without was put there by hand, and is read as it is.
"""

import glob
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import fsspec
import huggingface_hub
from fsspec.utils import glob_translate
from huggingface_hub.errors import HTTPError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import filter_repo_objects
from pyarrow import parquet

from unmask.config import Preset
from unmask.data import hub
from unmask.data.reading import data_files, patterns, pulled, tables
from unmask.data.registry import Source, conteb, halves, load_registry
from unmask.store import alone, sha256

# Sections of a preset with models or data of their own: those that each training needs, and those of studies.
RECIPE, STUDIES = ("backbone", "clusters", "data"), ("retrieval", "conteb")
PARTS = RECIPE + STUDIES
ALL = 10**18  # bytes of text: more than there is of anything
# Text to fetch for each byte that `data.max_text_mb` allows a source. Its share counts tokens: the cap
# assumes four bytes per token, as in Latin script; others have up to seven.
SLACK_LATIN, SLACK = 1.1, 1.75
PLAIN = 0.5  # text for each byte of a file, on the low side, where no footer says it


class Need(NamedTuple):
    """A model, or a configuration of a data set, that a preset needs."""

    repo: str
    source: Source | None = None  # of a data set: the source, with this configuration
    text_bytes: float = ALL  # so much text will do
    revision: str = "main"


def needs(preset: Preset, folder: Path | None = None, sections: Collection[str] = PARTS) -> list[Need]:
    """What a preset reads from the Hub or a mirror (default: UNMASK_MIRROR), each part of a repository once.

    Args:
        sections: of the preset, whose models and data count.
    Raises: ValueError for a registry that cannot be read.
    """
    models = {"backbone": [preset.backbone.checkpoint], "clusters": [preset.clusters.surrogate]}
    models |= {"retrieval": preset.retrieval.pool}
    wanted = (name for part, names in models.items() if part in sections for name in names)
    named = [name for name in wanted if hub.is_name(name, folder)]
    at = preset.retrieval.pool_revisions
    found = {(name, "", ""): Need(name, revision=at.get(name, "main")) for name in named}
    sources = [conteb(name) for name in preset.conteb.tasks if "conteb" in sections]
    if "data" in sections:
        sources += [one for one in load_registry(preset.data.source) if one.kind in ("hub", "mirror")]
    for source in sources:
        text = ALL
        if source.role == "text":
            slack = SLACK_LATIN if source.language.endswith("_Latn") else SLACK
            text = slack * preset.data.max_text_mb * 1e6 * (source.share or 100) / 100
        for half in halves(source):
            need = Need(source.repo, half, text, source.revision)
            found.setdefault((need.repo, half.config, half.split), need)
    return list(found.values())


def offline(preset: Preset) -> bool:
    """Whether a run of this preset reads nothing from the Hub itself. Public benchmarks count as read from
    it: a mirror may lack them."""
    sections = preset.retrieval, preset.conteb, preset.cde, preset.qwen3, preset.ablation
    benchmarks = any(section.benchmarks for section in sections)
    return not benchmarks and (hub.root() is not None or not needs(preset))


def data_on_hub(preset: Preset) -> bool:
    """Whether the data of this preset are read from the Hub itself, so that a look at them takes its time."""
    data = replace(preset, conteb=replace(preset.conteb, tasks=()))
    return hub.root() is None and any(one.source and one.source.kind == "hub" for one in needs(data))


def reads_packaged(preset: Preset) -> bool:
    """Whether a preset reads the model that a Python package carries."""
    return hub.PACKAGED in (preset.backbone.checkpoint, preset.clusters.surrogate)


def require(preset: Preset, sections: Collection[str] = RECIPE) -> None:
    """Makes sure, in seconds, that local models exist, and that a mirror has all that a run reads. Without a
    mirror, what the Hub lacks is reported when it is read.

    Args:
        sections: as for `needs`; by default what a study alone reads keeps no training from starting.
    Raises: ValueError that says what is missing, and how to get it.
    """
    if (log := preset.retrieval.log) and not Path(log).is_file():
        raise ValueError(f"retrieval.log: there is no file {log}")
    pool = [name for name in preset.retrieval.pool if "/" in name]
    for name in (preset.backbone.checkpoint, preset.clusters.surrogate, *pool):
        if name not in ("", hub.PACKAGED) and not hub.is_name(name) and not Path(name).is_dir():
            raise ValueError(f"{name} is no directory here, no name on the Hub, and not {hub.PACKAGED}")
    if hub.root() and (lacking := _lacking(preset, sections)):
        what = ", ".join(f"{repo} ({why})" for repo, why in lacking)
        raise ValueError(f"the mirror {hub.root()} lacks {what}: {hub.HOW_TO_MIRROR}")


def check(preset: Preset) -> list[tuple[str, str]]:
    """Looks for what a preset needs in the mirror, by name and size; of the packaged model by checksum.

    Returns: what is missing or not whole, each with why.
    Raises: ValueError if there is no mirror, and something is needed of one.
    """
    packaged = reads_packaged(preset)  # a run would fetch it
    whole = packaged and hub.mirrored() and sha256(hub.mirrored() / hub.WHEEL) == hub.SHA256
    wrong = [(hub.PACKAGED, f"missing, or another file: {hub.WHEEL}")] if packaged and not whole else []
    return wrong + _lacking(preset)


def _lacking(preset: Preset, sections: Collection[str] = PARTS) -> list[tuple[str, str]]:
    mirror, wanted = hub.root(), needs(preset, sections=sections)
    if wanted and not (mirror and mirror.is_dir()):
        raise ValueError(f"no mirror{f' at {mirror}' if mirror else ''}: UNMASK_MIRROR names one")
    every = ((need.repo, _why(need)) for need in wanted)
    return [(repo, why) for repo, why in dict.fromkeys(every) if why]


def _why(need: Need) -> str:
    """Why the mirror does not do for a need; empty if it does."""
    if not (folder := hub.local(need.repo)):
        return "not there"
    try:
        _, files = pulled(folder, need.revision)
        if not (data_files(need.source) if need.source else any(folder.glob("*.safetensors"))):
            return "*.safetensors not there"
        for name in _wanted(need, str(folder), files) if files else ():
            if not (folder / name).is_file() or (folder / name).stat().st_size != files[name].size:
                return f"{name} not there or not whole: pull again"
    except ValueError as error:
        return str(error)
    return ""


def _wanted(need: Need, base: str, files: Mapping[str, RepoFile]) -> Iterator[str]:
    """The names of a need's files: of text, of the first that hold enough.

    Args:
        base: the repository, a folder or an hf:// URL.
        files: all that it has on the Hub, by name.
    """
    if not need.source:
        yield from filter_repo_objects(files, allow_patterns=hub.MODEL_FILES)
        return
    yield from files.keys() & {"README.md"}
    share, text = 0.0, 0.0
    which = [*map(glob_translate, patterns(need.source, base))]
    for name in tables(name for name in files if any(re.match(pattern, name) for pattern in which)):
        if text >= need.text_bytes:
            return
        yield name
        if need.text_bytes < ALL:
            column, size = need.source.columns["text"], files[name].size
            share = share or _text_share(f"{base}/{name}", size, column)  # the first file's
            text += share * size


def _text_share(file: str, size: int, column: str) -> float:
    """Bytes of text for each byte of files like this one; of Parquet, the footer knows."""
    if not file.endswith(".parquet"):
        return PLAIN
    with fsspec.open(file) as stream:
        groups = parquet.read_metadata(stream).to_dict()["row_groups"]
    columns = [part for group in groups for part in group["columns"]]
    text = sum(part["total_uncompressed_size"] for part in columns if part["path_in_schema"] == column)
    return text / size if text else PLAIN


def pull(preset: Preset, folder: Path) -> None:
    """Fetches all models and data of a preset into a mirror, and goes on where an earlier call was stopped.

    Args:
        folder: the mirror, which is created.
    Raises:
        ValueError: a registry cannot be read, or the mirror holds another version; and as `fetch`.
        RuntimeError: another process pulls into it.
        OSError: the Hub cannot be reached or refuses, there is too little space, or the folder cannot be
            written. The same command goes on.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if reads_packaged(preset):
        print(f"{hub.PACKAGED} ({hub.ABOUT})", flush=True)
        hub.fetch(folder)
    os.environ.pop("UNMASK_MIRROR", None)  # else the data would be looked for in a mirror
    try:
        with alone(folder):  # of a branch that moves, two would mix two versions
            for need in needs(preset, folder):
                _pull(need, folder / need.repo)
    except HTTPError as error:
        why = " ".join(str(error).split())
        raise OSError(f"the Hub fails ({why}); the same command goes on") from error
    os.environ["UNMASK_MIRROR"] = str(folder)
    require(preset, PARTS)
    print(f"all that preset {preset.name!r} needs is there: UNMASK_MIRROR={folder} serves it")


def _pull(need: Need, folder: Path) -> None:
    """Fetches what is needed of a repository. One that is in the mirror already stays at its commit, so that
    a branch that moves meanwhile does not mix two versions."""
    api, repo, source = huggingface_hub.HfApi(), need.repo, need.source
    kind, place = ("dataset", "datasets/") if source else ("model", "")
    commit, files = pulled(folder, need.revision)
    if not commit:
        commit = api.repo_info(repo, repo_type=kind, revision=need.revision).sha
        tree = api.list_repo_tree(repo, recursive=True, repo_type=kind, revision=commit)
        files = {one.path: one for one in tree if isinstance(one, RepoFile)}
    wanted = list(_wanted(need, f"hf://{place}{repo}@{commit}", files))
    size = sum(files[name].size for name in wanted)
    print(f"{repo} at {commit[:12]}: {len(wanted)} files, {size:,} bytes", flush=True)
    told = {"repo_type": kind, "revision": commit, "allow_patterns": [*map(glob.escape, wanted)]}
    huggingface_hub.snapshot_download(repo, local_dir=folder, **told)
