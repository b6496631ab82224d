"""A mirror: a folder of Hub repositories, DIR/<organisation>/<name>/…, that serves hosts without internet.

`unmask mirror pull` fills it (`data.pull`), UNMASK_MIRROR=DIR names it. A repository with a manifest
(`data.manifest`) was pulled, and what is missing of it is known; one without was put there by hand, and is
read as it is. Nothing here needs the Hub, and nothing heavy is imported: a run looks here before it starts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unmask.data.manifest import Manifest, readable

if TYPE_CHECKING:
    from unmask.config import Preset
    from unmask.data.registry import Source

MODEL = "model"  # the selection that is a model's: all of it that is loaded
HUB_TIMEOUT = 5.0  # seconds in which the Hub answers, or is taken to be out of reach
# Text to fetch for each byte that `data.max_text_mb` allows a source. Its share is one of tokens: the cap
# takes four bytes for each, which holds for Latin script; others have up to seven.
SLACK_LATIN, SLACK = 1.1, 1.75


@dataclass(frozen=True)
class Gap:
    """Something that a preset needs and that is not there."""

    what: str  # "google/xquad xquad.en/validation", or a whole repository
    why: str
    bytes: int | None  # that are missing, where it is known


@dataclass(frozen=True)
class Need:
    """A part of a repository that a preset needs."""

    repo: str
    type: str  # "dataset" or "model"
    revision: str
    selection: str
    source: Source | None = None  # of a data set: the source, with this configuration
    text_bytes: float | None = None  # so much text will do; None: all of it

    @property
    def what(self) -> str:
        return self.repo if self.type == "model" else f"{self.repo} {self.selection}"


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

    Raises: ValueError for a registry that cannot be read, or that asks for one repository in two ways.
    """
    models = dict.fromkeys((preset.backbone.checkpoint, preset.clusters.surrogate))
    found = [Need(name, "model", "main", MODEL) for name in models if is_hub_name(name)]
    for source in _remote(preset):
        text = None
        if source.role == "text":
            slack = SLACK_LATIN if source.language.endswith("_Latn") else SLACK
            share = 100.0 if source.share is None else source.share
            text = slack * preset.data.max_text_mb * 1e6 * share / 100
        for config in dict.fromkeys((source.config, source.queries_config or source.config)):
            part = replace(source, config=config)
            selection = f"{config or 'default'}/{source.split}"
            found.append(Need(source.repo, "dataset", source.revision, selection, part, text))
    ways: dict[str, set[str]] = {}
    for need in found:
        ways.setdefault(need.repo, set()).add(f"{need.type} at {need.revision}")
        if len(ways[need.repo]) > 1:
            raise ValueError(
                f"{need.repo} is asked for as {_listed(sorted(ways[need.repo]))}: a mirror holds one of a "
                "name; make the registry and backbone.checkpoint agree"
            )
    return list({(need.repo, need.selection): need for need in found}.values())


def missing(preset: Preset) -> list[Gap]:
    """What a preset needs and the mirror does not have whole, by presence and size of the files.

    Raises: ValueError for a registry or a manifest that cannot be read.
    """
    return _together([gap for need in needs(preset) if (gap := _gap(need))])


def require(preset: Preset) -> None:
    """Makes sure, in seconds, that the data and the checkpoint of a run can be read.

    Raises: ValueError that says what cannot, and how to get it.
    """
    wanted = needs(preset)
    remote = [need for need in wanted if _from_hub(need)]
    here = [need for need in wanted if not _from_hub(need)]
    if gaps := _together([gap for need in here if (gap := _gap(need))]):
        what = _listed([f"{gap.what} ({gap.why})" for gap in gaps])
        raise ValueError(f"the mirror {root()} lacks {what}: {how(preset)}")
    if by_hand := [need.repo for need in remote if need.source and need.source.kind == "mirror"]:
        raise ValueError(
            f"{_listed(by_hand)}: of kind mirror, and there is none: set UNMASK_MIRROR to the folder that "
            "has it as <organisation>/<name>"
        )
    if remote and (why := unreachable()):
        raise ValueError(
            f"{_listed([need.repo for need in remote])} would be read from the Hub, which cannot be reached "
            f"({why}): {how(preset)}, then set UNMASK_MIRROR=DIR here"
        )


def offline(preset: Preset) -> bool:
    """Whether a run of this preset reads nothing from the Hub itself, because all of it is here."""
    return not any(_from_hub(need) for need in needs(preset))


def data_on_hub(preset: Preset) -> bool:
    """Whether the data of this preset are read from the Hub itself, so that a look at them takes its time."""
    return any(need.source and _from_hub(need) for need in needs(preset))


def how(preset: Preset) -> str:
    """How to get what is missing."""
    return f"on a host with internet, `unmask mirror pull --preset {preset.name} --to DIR`"


def finished(repositories: Sequence[str]) -> list[tuple[Path, dict[str, Any]]]:
    """Files of repositories in the mirror that were pulled and verified, with size and checksum."""
    folders = [folder for repo in dict.fromkeys(repositories) if (folder := local(repo))]
    manifests = [(folder, manifest) for folder in folders if (manifest := Manifest.read(folder))]
    return [(folder / path, fact) for folder, manifest in manifests for path, fact in manifest.files.items()]


def _remote(preset: Preset) -> list[Source]:
    """Sources of the corpus and of the benchmark that are on the Hub or in a mirror."""
    found: list[Source] = []
    if preset.conteb.tasks:
        from unmask.evaluation import conteb

        found += [conteb.source(name) for name in preset.conteb.tasks]
    if preset.data.source != "environment":
        from unmask.data.registry import load_registry

        found += [source for source in load_registry(preset.data.source) if source.kind in ("hub", "mirror")]
    return found


def _from_hub(need: Need) -> bool:
    """Data are read from the mirror wherever there is one; a model may also lie in the libraries' cache."""
    if need.type == "dataset":
        return root() is None
    return local(need.repo) is None and not _cached(need.repo)


def _cached(model: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model, "config.json")
    return isinstance(config, str) and any(Path(config).parent.glob("*.safetensors"))


def unreachable() -> str:
    """Why the Hub does not answer; empty if it does, whatever it says."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.utils import get_session

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT, follow_redirects=False)
    except (HTTPError, OSError) as error:
        return f"{constants.ENDPOINT}: {error or type(error).__name__}"
    return ""


def _gap(need: Need) -> Gap | None:
    folder, size = local(need.repo), _documented(need)
    if folder is None:
        return Gap(need.what, "not there", size)
    manifest = Manifest.read(folder)
    if manifest is None:
        return _gap_by_hand(need, folder)
    if need.type != manifest.type or need.revision not in (manifest.requested, manifest.revision):
        return Gap(need.what, f"there is the {manifest.type} at {manifest.requested}", size)
    if need.selection not in manifest.selections:
        return Gap(need.what, "never pulled", size)
    chosen = manifest.selections[need.selection]
    if left := manifest.unfinished(folder, need.selection):
        return Gap(need.what, f"{len(left)} of {len(chosen.files)} files not there", sum(left.values()))
    if chosen.text_bytes is not None and (need.text_bytes is None or chosen.text_bytes < need.text_bytes):
        wanted = "all of it" if need.text_bytes is None else readable(need.text_bytes)
        return Gap(need.what, f"about {readable(chosen.text_bytes)} of text, and {wanted} is wanted", None)
    return None


def _documented(need: Need) -> int | None:
    """Size of what is not there at all: the registry's; of text no more than is wanted of it."""
    known = [size for size in (need.source and need.source.bytes, need.text_bytes) if size]
    return int(min(known)) if known else None


def _gap_by_hand(need: Need, folder: Path) -> Gap | None:
    if need.type == "model":
        whole = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
        return None if whole else Gap(need.what, "config.json or *.safetensors not there", None)
    from unmask.data.reading import data_files

    try:
        data_files(need.source)
    except ValueError as error:
        return Gap(need.what, str(error), _documented(need))
    return None


def _together(gaps: Sequence[Gap]) -> list[Gap]:
    """What is missing of a repository for the same reason, as one."""
    groups: dict[tuple[str, str], list[Gap]] = {}
    for gap in gaps:
        groups.setdefault((gap.what.partition(" ")[0], gap.why), []).append(gap)
    together = []
    for (repo, why), group in groups.items():
        known = None if None in (sizes := [gap.bytes for gap in group]) else sum(sizes)
        what = group[0].what if len(group) == 1 else f"{repo} ({len(group)} parts)"
        together.append(Gap(what, why, known))
    return together


def _listed(names: Sequence[str], at_most: int = 3) -> str:
    unique = list(dict.fromkeys(names))
    more = len(unique) - at_most
    return ", ".join(unique[:at_most]) + (f" and {more} more" if more > 0 else "")
