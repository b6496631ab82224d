"""Mirrors of the Hub, for hosts without internet.

A mirror is a folder of repositories, DIR/<organisation>/<name>/…, laid out as on the Hub. `pull` fills it,
`check` looks through it, and UNMASK_MIRROR=DIR names it: what is there is read from there, without the Hub.
Of a repository that was pulled `huggingface_hub` keeps the commit and the list of all its files, so what is
missing is known; one without was put there by hand, and is read as it is.
"""

import glob
import math
import os
import re
from collections.abc import Collection
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import get_cached_repo_tree, snapshot_download
from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from unmask.data import hub
from unmask.data.registry import Source, conteb, halves, load_registry
from unmask.data.rows import data_files, patterns, tables
from unmask.extras import extra
from unmask.store import alone, sha256
from unmask_study.settings import Preset

with extra("study"):
    from fsspec.utils import glob_translate

# Sections of a preset with models or data of their own: those that each training needs, and those of studies.
RECIPE = ("backbone", "clusters", "data")
PARTS = (*RECIPE, "retrieval", "conteb")
# Bytes of files to fetch for each byte of text that `data.max_text_mb` allows a source. One of Parquet holds
# two of text, but other columns take some, and other scripts than Latin more bytes a token than the cap says.
FILE_BYTES = 1.5


class Need(NamedTuple):
    """A model, or a configuration of a data set, that a preset needs."""

    repo: str
    revision: str = "main"
    source: Source | None = None  # of a data set: the source, with this configuration
    file_bytes: float = math.inf  # the first files that make up so much will do


def needs(preset: Preset, folder: Path | None = None, sections: Collection[str] = PARTS) -> list[Need]:
    """What a preset reads from the Hub or a mirror (default: UNMASK_MIRROR), each part of a repository once.

    Args:
        sections: of the preset, whose models and data count.
    Raises: ValueError for a registry that cannot be read.
    """
    models = {"backbone": [preset.backbone.checkpoint], "clusters": [preset.clusters.surrogate]}
    models |= {"retrieval": preset.retrieval.pool}
    names = [name for section in models if section in sections for name in models[section]]
    revisions = preset.retrieval.pool_revisions
    parts = {name: Need(name, revisions.get(name, "main")) for name in names if hub.is_name(name, folder)}
    sources = [conteb(name) for name in preset.conteb.tasks if "conteb" in sections]
    if "data" in sections:
        sources += [one for one in load_registry(preset.data.source) if one.kind in ("hub", "mirror")]
    for source in sources:
        share = (source.share or 100) / 100 if source.role == "text" else math.inf
        size = FILE_BYTES * preset.data.max_text_mb * 1e6 * share
        for half in halves(source):
            need = Need(source.repo, source.revision, half, size)
            parts.setdefault((source.repo, half.config, half.split), need)
    return [*parts.values()]


def offline(preset: Preset) -> bool:
    """Whether a run of this preset reads nothing from the Hub itself. Public benchmarks count as read from
    it: a mirror may lack them."""
    studies = preset.retrieval, preset.conteb, preset.cde, preset.qwen3, preset.ablation
    return not any(study.benchmarks for study in studies) and bool(hub.root() or not needs(preset))


def data_on_hub(preset: Preset) -> bool:
    """Whether the data of this preset are read from the Hub itself, so that a look at them takes its time."""
    return not hub.root() and any(need.source.kind == "hub" for need in needs(preset, sections=["data"]))


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


def pull(preset: Preset, folder: Path) -> None:
    """Fetches all models and data of a preset into a mirror, and goes on where an earlier call was stopped.

    Args:
        folder: the mirror, which is created.
    Raises:
        ValueError: a registry cannot be read, or the mirror holds another version; and as `hub.fetch`.
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
    except (HTTPError, LocalEntryNotFoundError) as error:
        why = " ".join(str(error).split())
        raise OSError(f"the Hub fails ({why}); the same command goes on") from error
    os.environ["UNMASK_MIRROR"] = str(folder)
    require(preset, PARTS)
    print(f"all that preset {preset.name!r} needs is there: UNMASK_MIRROR={folder} serves it")


def _lacking(preset: Preset, sections: Collection[str] = PARTS) -> list[tuple[str, str]]:
    mirror, wanted = hub.root(), needs(preset, sections=sections)
    if wanted and not (mirror and mirror.is_dir()):
        raise ValueError(f"no mirror{f' at {mirror}' if mirror else ''}: UNMASK_MIRROR names one")
    reasons = ((need.repo, _why(need, mirror / need.repo)) for need in wanted)
    return [(repo, why) for repo, why in dict.fromkeys(reasons) if why]


def _why(need: Need, folder: Path) -> str:
    """Why a repository of the mirror does not do for a need; empty if it does."""
    if not folder.is_dir():
        return "not there"
    try:
        if not (data_files(need.source) if need.source else any(folder.glob("*.safetensors"))):
            return "*.safetensors not there"
        sizes = {str(one.relative_to(folder)): one.stat().st_size for one in folder.rglob("*")}
        wrong = [name for name, size in _files(need, folder, str(folder)).items() if sizes.get(name) != size]
        return f"{wrong[0]} not there or not whole: pull again" if wrong else ""
    except ValueError as error:
        return str(error)


def _files(need: Need, folder: Path, base: str) -> dict[str, int]:
    """The names of a need's files and their sizes, of text the first that hold enough; none of a repository
    that was put into the mirror by hand.

    Args:
        folder: of the repository in the mirror.
        base: the same, or the repository's hf:// URL: where its patterns are looked up.
    """
    if not (commit := hub.commit(folder, need.revision)):
        return {}
    listed = get_cached_repo_tree(need.repo, revision=commit, local_dir=folder)
    sizes = {file.path: file.size for file in listed}
    names = [*filter_repo_objects(sizes, allow_patterns=hub.MODEL_FILES)]
    if need.source:
        matches = [*map(glob_translate, patterns(need.source, base))]
        names = tables(name for name in sizes if any(re.match(pattern, name) for pattern in matches))
    before = accumulate((sizes[name] for name in names), initial=0)
    return {name: sizes[name] for name, size in zip(names, before) if size < need.file_bytes}


def _pull(need: Need, folder: Path) -> None:
    """Fetches what is needed of a repository. One that is in the mirror already stays at its commit, so that
    a branch that moves meanwhile does not mix two versions."""
    kind, place = ("dataset", "datasets/") if need.source else ("model", "")
    fetch = partial(snapshot_download, need.repo, repo_type=kind, local_dir=folder)
    revision = hub.commit(folder, need.revision) or need.revision
    fetch(revision=revision, allow_patterns=["README.md", ".gitattributes"])  # and the list of all files
    commit = hub.commit(folder)
    files = _files(need, folder, f"hf://{place}{need.repo}@{commit}")
    print(f"{need.repo} at {commit[:12]}: {len(files)} files, {sum(files.values()):,} bytes", flush=True)
    fetch(revision=commit, allow_patterns=[*map(glob.escape, files)])
