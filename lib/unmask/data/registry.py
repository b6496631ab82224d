"""Registries of sources (`papermill_runs/sources/*.yaml`): the data sets of a corpus, typed and checked.

An entry describes one data set, or the same set in many languages, which is then one source per language.
Where it is read from (`kind`) is a single key: the same entry serves the Hub, a mirror and own files. A
registry may name a script that makes its files.
"""

import glob
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from unmask.config import GROUPS
from unmask.data.spelling import canonical
from unmask.extras import extra
from unmask.schema import ConfigError, Strict, explained
from unmask.store import artifacts_root, hash64, nearest, repository

# Columns of ours that a row must have, one layout of its role. Documents are nested (a row is a document),
# flat (a row is a query, and all rows of one title a document) or joined (chunks here, queries there).
REQUIRED = {
    "text": ["text"],
    "pairs": ["query document"],
    "triplets": ["query document negatives"],
    "documents": ["chunks queries golds", "title chunk query", "chunk_id chunk query query_chunk_id"],
}
# What else a row may have. One that has its split has its other labels, too, and they stay as they are.
LABELS = {"id", "key", "held_by", "split", "language", "package", "kind", "document_id"}
CODE = "c|code|cpp|csharp|go|java|javascript|php|python|ruby|rust|sql"  # code: several of them
_HUMAN = "[a-z]{3}(_[A-Z][a-z]{3})?"
SPLITS = ("train", "dev", "test")
YAML = (".yaml", ".yml")  # names that end so are paths
FOLDER = repository() / "papermill_runs" / "sources"


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Source:
    """One data set: where it is, what its columns mean, and what is held out of it."""

    name: str  # unique; batches never mix two
    kind: Literal["hub", "mirror", "files"]  # where it is read from
    role: Literal["text", "pairs", "triplets", "documents"]
    # An ISO 639-3 code, with a script or without (deu, rus_Cyrl), a pair (deu-eng), mul for many, or CODE.
    language: Annotated[str, Field(pattern=f"^({_HUMAN}(-{_HUMAN})?|{CODE})$")]
    licence: str
    group: Literal["", *GROUPS] = ""  # pairs and triplets: the step of the curriculum
    task: str = ""  # held-out task that its rows are evaluated in; the source's name unless given
    repo: Annotated[str, Field(pattern="^$|^[^/]+/[^/]+$")] = ""  # hub, mirror: "organisation/name"
    revision: str = "main"  # a branch, a tag or, so that nothing changes under a run, a commit
    config: str = ""  # configuration on the Hub; "": the default one
    queries_config: str = ""  # documents in the joined layout: the configuration that holds the queries
    split: str = "train"  # as the data set calls it
    # files: absolute paths or patterns (`existing_files`); in a registry ${UNMASK_ARTIFACTS} is that folder
    files: Annotated[tuple[str, ...], Field(strict=False)] = ()
    # Our name → theirs; "answers.text.0" reaches into structs and lists, "neg_1, neg_2" makes a list of two.
    columns: Mapping[str, str] = field(default_factory=dict)
    share: Annotated[float, Field(gt=0)] | None = None  # text: percent of the packed blocks
    # No more training rows than these, of pieces of the files that are drawn at random; not for text.
    max_rows: Annotated[int, Field(ge=2)] | None = None
    # Share of the keys held out for testing; a third as many for development. Of 9 / hold_out keys, one in
    # twenty draws leaves development without any.
    hold_out: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    rows: int | None = None  # documented size
    documented: str = ""  # URL of the page that its columns were checked against
    bad_rows: Literal["drop", "stop"] = "drop"  # count them, or the first one is an error, as in own files
    optional: bool = False  # kind files: left out while its files do not exist
    script: str = ""  # kind files: what makes them, in a folder of its own where `files` lie
    known_as: str = ""  # names the content of the files, so that nobody need look at them


class _Registry(BaseModel, extra="forbid", strict=True):
    about: str = ""
    script: str = ""
    include: dict[str, list[str]] = {}
    defaults: dict[str, Any] = {}
    sources: dict[str, dict[str, Any]]


def load_registry(name_or_path: str) -> list[Source]:
    """Reads and checks a registry: a name in papermill_runs/sources, or the path of a YAML file.

    Top-level keys: `about`; `sources` (name → entry); `defaults` (keys that all entries share unless they say
    otherwise); `include` (another registry, by name or by path from this one → roles, whose sources of it are
    taken, too); `script` (a Python file in a folder of its own beside the registry, which makes the files of
    all entries, see `sources.make`). An entry has the keys of `Source`, and `languages` instead of `language`
    where it stands for many: a list of codes, or code → share. Each becomes a source "name/code", with
    {language} and {short} ("cmn_Hani" and "zh") filled in wherever the entry has them.

    Returns: the sources, in the order of the file. Files of kind `files` exist, unless they are optional.
    Raises: ConfigError (a ValueError) that names the file, the entry and the key.
    """
    path = _locate(name_or_path)
    where, sources = f"{path}: ", []
    try:
        registry = _Registry.model_validate(yaml.load(path.read_text(encoding="utf8"), Strict))
        script = str(path.parent / registry.script) if registry.script else ""
        for name, entry in registry.sources.items():
            where = f"{path}: {name}: "
            entries = _expanded(name, registry.defaults | entry)
            sources += [_source(one, values | {"script": script}, path.parent) for one, values in entries]
        where = f"{path}: "
        for name, roles in registry.include.items():
            other = load_registry(str(path.parent / name) if name.endswith(YAML) else name)
            sources += [source for source in other if source.role in roles]
        names = [source.name for source in sources]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two sources are called {min(twice)}: rename yours")
        shares = [source.share or 0.0 for source in sources if source.role == "text"]
        if any(shares) and (0.0 in shares or abs(sum(shares) - 100) > 0.01):
            raise ValueError(f"shares of text sum to {sum(shares):.2f} percent: all need one, 100 together")
    except (yaml.YAMLError, ValueError, TypeError, AttributeError) as error:  # the last two: a value's type
        reason = explained(error, Source) if isinstance(error, ValidationError) else error
        raise ConfigError(f"{where}{reason}") from error
    return sources


def halves(source: Source) -> list[Source]:
    """A source as it is read: documents in the joined layout as two, their chunks and their queries, each of
    its own configuration."""
    if not source.queries_config:
        return [source]
    queries = {name: path for name, path in source.columns.items() if name in ("query", "query_chunk_id")}
    chunks = {name: path for name, path in source.columns.items() if name not in queries}
    both = (source.config, chunks), (source.queries_config, queries)
    return [replace(source, config=config, columns=columns, queries_config="") for config, columns in both]


def split_of(source: Source, key: str) -> str:
    """The split of all rows with this key, however it is spelt: "test", "dev" or "train".

    A hash of the key, as a number u in [0, 1): u < hold_out is test, u < 4/3 hold_out dev. Sources that share
    keys and hold_out (the languages of one set, say) therefore hold out the same things.
    """
    number = hash64(canonical(key).encode()) / 2**64
    if number < source.hold_out:
        return "test"
    return "dev" if number < source.hold_out * 4 / 3 else "train"


def existing_files(source: Source) -> list[Path]:
    """The existing files of a source of kind `files`, sorted within each pattern, each once."""
    paths = ([one] if Path(one).exists() else sorted(glob.glob(one, recursive=True)) for one in source.files)
    return [Path(path) for path in dict.fromkeys(chain.from_iterable(paths))]


def _locate(name_or_path: str) -> Path:
    is_path = name_or_path.endswith(YAML)
    path = Path(name_or_path).resolve() if is_path else FOLDER / f"{name_or_path}.yaml"
    if not path.is_file():
        near = nearest(name_or_path, (path.stem for path in FOLDER.glob("*.yaml")))
        raise ConfigError(f"data.source: there is no registry {path}{near}")
    return path


def _expanded(name: str, entry: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """An entry with `languages` as one entry per language, the others as they are."""
    if "languages" not in entry:
        yield name, entry
        return
    languages, entry = entry["languages"], {"language": "{language}"} | entry
    if not isinstance(languages, list | dict):
        raise ConfigError(f"{name}: languages are a list, or language: share, not {languages!r}")
    del entry["languages"]
    text = json.dumps(entry)
    for code in languages:
        short = _short(code.partition("_")[0]) if "{short}" in text else ""
        filled = json.loads(text.replace("{language}", code).replace("{short}", short))
        yield f"{name}/{code}", filled | ({"share": languages[code]} if isinstance(languages, dict) else {})


def _short(language: str) -> str:
    """An ISO 639-3 code as it is in web standards: de, zh, gsw."""
    with extra("study"):
        from babel.core import get_global  # noqa: PLC0415 (few registries need it)

    return get_global("language_aliases").get(language, language)


def _placed(file: str, folder: Path) -> str:
    """A file, or a pattern of files, as a whole path; only its own part is a pattern."""
    made, escaped = artifacts_root(), glob.escape
    path = os.path.join(folder, file.replace("${UNMASK_ARTIFACTS}", str(made)))
    if Path(path).exists():
        return path
    return os.path.join(escaped(str(folder)), file.replace("${UNMASK_ARTIFACTS}", escaped(str(made))))


def _source(name: str, entry: dict[str, Any], folder: Path) -> Source:
    values = {"task": name, "bad_rows": "stop" if entry.get("kind") == "files" else "drop"} | entry
    files = values.get("files", [])
    files = [files] if isinstance(files, str) else files
    values["files"] = [file if values["script"] else _placed(str(file), folder) for file in files]
    source = Source(**values | {"name": name})
    _check(source)
    return source


def _check(source: Source) -> None:
    """What a key's type does not say."""
    if (source.max_rows if source.role == "text" else source.share) is not None:
        raise ValueError("share is for text, and max_rows for pairs, triplets and documents")
    if source.kind == "files" and not (source.optional or source.script or existing_files(source)):
        raise ValueError(f"files: there is no {', '.join(source.files)}; `optional: true` lets it be absent")
    if source.kind != "files" and not source.repo:
        raise ValueError(f"repo: kind {source.kind} needs the name of a data set, organisation/name")
    if source.role in ("pairs", "triplets") and not source.group:
        raise ValueError(f"{source.role} need a group (english, cross-lingual, multilingual or code)")
    layouts, columns = REQUIRED[source.role], set(source.columns) - LABELS
    if columns not in [set(layout.split()) for layout in layouts]:
        wanted, more, got = ", or ".join(layouts), ", ".join(sorted(LABELS)), " ".join(source.columns)
        raise ValueError(f"columns: {source.role} need {wanted}, and may have {more}; got {got}")
    if ("chunk_id" in columns) != bool(source.queries_config):
        raise ValueError("queries_config goes with the columns chunk_id and query_chunk_id")
    if source.queries_config and source.max_rows:  # of so many rows few have both
        raise ValueError("max_rows would part queries from their chunks: leave it out where they lie apart")
