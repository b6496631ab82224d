"""Registries of sources (`papermill_runs/sources/*.yaml`): the data sets of a corpus, typed and checked.

An entry describes one data set, or the same set in many languages, which is then one source per language.
Where it is read from (`kind`) is a single key: the same entry serves the Hub, a mirror and own files.
"""

from __future__ import annotations

import glob
import hashlib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from unmask.config import GROUPS, ConfigError
from unmask.data.cldr import check_language, short_code
from unmask.store import artifacts_root, nearest, repository

ROLES = ("text", "pairs", "triplets", "documents")
KINDS = ("hub", "mirror", "files", "environment")
# Column names of ours by role: what a row must have (one of the layouts), and what it may have.
REQUIRED = {
    "text": (("text",),),
    "pairs": (("query", "document"),),
    "triplets": (("query", "document", "negatives"),),
    "documents": (
        ("chunks", "queries", "golds"),  # nested: a row is a document
        ("title", "chunk", "query"),  # flat: a row is a query, a document is all rows of one title
        ("chunk_id", "chunk", "query", "query_chunk_id"),  # joined: chunks and queries in two configurations
    ),
}
ALLOWED = {
    "text": ("id",),
    "pairs": ("id", "key", "held_by"),
    "triplets": ("id", "key", "held_by"),
    "documents": ("id", "held_by"),
}
_ARTIFACTS = "${UNMASK_ARTIFACTS}"  # in `files`: the artifacts folder, wherever it is


@dataclass(frozen=True)
class Source:
    """One data set: where it is, what its columns mean, and what is held out of it."""

    name: str  # unique; batches never mix two
    kind: str  # where it is read from, one of KINDS
    role: str  # one of ROLES
    language: str  # "eng_Latn", "deu", "deu-eng" (a pair of languages), "mul", "python"
    licence: str
    group: str = ""  # pairs and triplets: one of GROUPS, the steps of the curriculum
    task: str = ""  # held-out task that its rows are evaluated in; the source's name unless given
    repo: str = ""  # hub, mirror: "organisation/name"
    revision: str = "main"
    config: str = ""  # configuration on the Hub; "": the default one
    queries_config: str = ""  # documents in the joined layout: the configuration that holds the queries
    split: str = "train"  # as the data set calls it
    files: tuple[str, ...] = ()  # files: absolute paths or patterns, see `own_files`
    # Our name → theirs; "answers.text.0" reaches into structs and lists, "neg_1, neg_2" makes a list of two.
    columns: Mapping[str, str] = field(default_factory=dict)
    share: float | None = None  # text: percent of the packed blocks
    max_rows: int | None = None  # no more training rows than these, the first ones; not for text
    hold_out: float = 0.0  # share of the keys held out for testing; a third as many for development
    rows: int | None = None  # documented size
    bytes: int | None = None  # documented size, of the text rather than of the compressed files
    documented: str = ""  # URL of the page that its columns were checked against
    bad_rows: str = "drop"  # "drop": count bad rows; "stop": the first one is an error, as in own files
    optional: bool = False  # left out, and said so, where its files do not exist


_HINTS = {name: hint for name, hint in typing.get_type_hints(Source).items() if name != "name"}
_NEEDED = ("kind", "role", "language", "licence")


def registry_names() -> list[str]:
    """Names of the registries at hand."""
    return sorted(path.stem for path in _directory().glob("*.yaml"))


def load_registry(name_or_path: str) -> list[Source]:
    """Reads and checks a registry: a name in papermill_runs/sources, or the path of a YAML file.

    Top-level keys: `about`; `sources` (name → entry); `defaults` (keys that all entries share unless they say
    otherwise). An entry has the keys of `Source`, and `languages` instead of `language` where it stands for
    many: a list of codes, or code → share. Each becomes a source "name/code", with {language} and {short}
    ("cmn_Hani" and "zh") filled in wherever the entry has them.

    Returns: the sources, in the order of the file. Files of kind `files` exist, unless they are optional.
    Raises: ConfigError (a ValueError) that names the file, the entry, the key, and the nearest known name.
    """
    path = _locate(name_or_path)
    values = _read(path)
    for key in values:
        if key not in ("about", "defaults", "sources"):
            raise ConfigError(f"{path}: unknown key {key!r}{nearest(key, ('about', 'defaults', 'sources'))}")
    defaults, entries = _mapping(values.get("defaults", {}), f"{path}: defaults"), values.get("sources")
    sources = []
    for name, entry in _mapping(entries, f"{path}: sources").items():
        where = f"{path}: {name}"
        for expanded, filled in _expand(name, {**defaults, **_mapping(entry, where)}, where):
            sources.append(_source(expanded, filled, where, path.parent))
    _check_together(sources, path)
    return sources


def split_of(source: Source, key: str) -> str:
    """The split of all rows with this key: "test", "dev" or "train".

    A hash of the key, as a number u in [0, 1): u < hold_out is test, u < 4/3 hold_out dev. Sources that share
    keys and hold_out (the languages of one set, say) therefore hold out the same things.
    """
    number = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) / 2**64
    if number < source.hold_out:
        return "test"
    return "dev" if number < source.hold_out * 4 / 3 else "train"


def own_files(source: Source) -> list[Path]:
    """The existing files of a source of kind `files`, sorted within each pattern."""
    return [path for pattern in source.files for path in _matches(pattern)]


def _directory() -> Path:
    return repository() / "papermill_runs" / "sources"


def _matches(pattern: str) -> list[Path]:
    # A file whose own name looks like a pattern is that file.
    if Path(pattern).exists():
        return [Path(pattern)]
    return [Path(path) for path in sorted(glob.glob(pattern, recursive=True))]


def _locate(name_or_path: str) -> Path:
    is_path = name_or_path.endswith((".yaml", ".yml"))
    path = Path(name_or_path).resolve() if is_path else _directory() / f"{name_or_path}.yaml"
    if not path.is_file():
        near = "" if is_path else nearest(name_or_path, ["environment", *registry_names()])
        raise ConfigError(f"data.source: unknown registry {name_or_path!r}{near} (there is no {path})")
    return path


class _Loader(yaml.SafeLoader):
    """YAML without duplicate keys, of which PyYAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _read(path: Path) -> dict[str, Any]:
    try:
        return _mapping(yaml.load(path.read_text(encoding="utf8"), _Loader), str(path))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{where}: expected lines of key: value, the keys being text, got {value!r}")
    return value


def _expand(name: str, entry: dict[str, Any], where: str) -> list[tuple[str, dict[str, Any]]]:
    """An entry with `languages` as one entry per language, the others as they are."""
    if "languages" not in entry:
        return [(name, entry)]
    languages = entry["languages"]
    if not isinstance(languages, list | dict) or not languages:
        raise ConfigError(f"{where}: languages must be a list of codes or lines of code: share")
    rest = {"language": "{language}"} | {key: value for key, value in entry.items() if key != "languages"}
    sources = []
    for code in languages:
        _check_language(code, f"{where}: languages")
        filled = _fill(rest, {"language": code, "short": short_code(code)}, where)
        if isinstance(languages, dict):
            filled["share"] = languages[code]
        sources.append((f"{name}/{code}", filled))
    return sources


def _fill(value: Any, names: Mapping[str, str], where: str) -> Any:
    if isinstance(value, dict):
        return {key: _fill(one, names, where) for key, one in value.items()}
    if isinstance(value, list):
        return [_fill(one, names, where) for one in value]
    try:
        return value.format_map(names) if isinstance(value, str) else value
    except (KeyError, ValueError, IndexError) as error:
        known = ", ".join(f"{{{name}}}" for name in names)
        raise ConfigError(f"{where}: cannot fill in {value!r}; what can be filled in is {known}") from error


def _source(name: str, entry: dict[str, Any], where: str, folder: Path) -> Source:
    for key in entry:
        if key not in _HINTS:
            raise ConfigError(f"{where}: unknown key {key!r}{nearest(key, [*_HINTS, 'languages'])}")
    missing = [key for key in _NEEDED if key not in entry]
    if missing:
        raise ConfigError(f"{where}: missing {', '.join(missing)}")
    values = {key: _typed(_HINTS[key], value, f"{where}: {key}") for key, value in entry.items()}
    values.setdefault("task", name)
    values.setdefault("bad_rows", "stop" if values["kind"] == "files" else "drop")
    files = (file.replace(_ARTIFACTS, str(artifacts_root())) for file in values.get("files", ()))
    values["files"] = tuple(str(folder / file) for file in files)
    source = Source(name=name, **values)
    _check(source, where)
    return source


def _typed(hint: Any, value: Any, where: str) -> Any:
    if hint == tuple[str, ...]:
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
            raise ConfigError(f"{where} must be a list of text, got {value!r}")
        return tuple(names)
    if hint == Mapping[str, str]:
        return {key: _typed(str, one, f"{where}.{key}") for key, one in _mapping(value, where).items()}
    kinds = typing.get_args(hint) or (hint,)
    if float in kinds and type(value) is int:
        value = float(value)
    if type(value) not in kinds:
        names = "text (in quotes)" if hint is str else kinds[0].__name__
        raise ConfigError(f"{where} must be {names}, got {value!r}")
    return value


def _check(source: Source, where: str) -> None:
    _one_of(source.kind, KINDS, f"{where}: kind")
    _one_of(source.role, ROLES, f"{where}: role")
    _one_of(source.bad_rows, ("drop", "stop"), f"{where}: bad_rows")
    _check_language(source.language, f"{where}: language")
    if not 0 <= source.hold_out <= 0.5:
        raise ConfigError(f"{where}: hold_out must be between 0 and 0.5, got {source.hold_out}")
    if source.share is not None and (source.role != "text" or source.optional or source.share <= 0):
        raise ConfigError(f"{where}: share is for text that is not optional, and above 0 percent")
    if source.max_rows is not None and (source.role == "text" or source.max_rows < 2):
        raise ConfigError(f"{where}: max_rows is for pairs, triplets and documents, and at least 2")
    if source.kind == "environment":  # its own columns and groups
        return
    if source.kind in ("hub", "mirror") and source.repo.count("/") != 1:
        raise ConfigError(f"{where}: repo must be organisation/name, got {source.repo!r}")
    if source.kind == "files" and not source.optional:
        missing = [pattern for pattern in source.files if not _matches(pattern)]
        if missing or not source.files:
            raise ConfigError(
                f"{where}: files: {' and '.join(missing) or 'none given'}: there is no such file; relative "
                "paths start at the registry's folder, and `optional: true` allows a source to be absent"
            )
    if source.role in ("pairs", "triplets"):
        _one_of(source.group, GROUPS, f"{where}: group")
    _check_columns(source, where)


def _check_columns(source: Source, where: str) -> None:
    layouts, columns = REQUIRED[source.role], set(source.columns)
    for name in source.columns:
        known = [*dict.fromkeys(sum(layouts, ())), *ALLOWED[source.role]]
        _one_of(name, known, f"{where}: columns")
    if not any(columns - set(ALLOWED[source.role]) == set(layout) for layout in layouts):
        wanted = ", or ".join(", ".join(layout) for layout in layouts)
        raise ConfigError(
            f"{where}: columns: {source.role} need {wanted}; got {', '.join(columns) or 'none'}"
        )
    if ("chunk_id" in columns) != bool(source.queries_config):
        raise ConfigError(f"{where}: queries_config goes with the columns chunk_id and query_chunk_id")


def _check_together(sources: Sequence[Source], path: Path) -> None:
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{path}: two sources are called {name!r}")
    groups: dict[str, str] = {}
    for source in sources:
        if source.role in ("pairs", "documents") and source.kind != "environment":
            group = source.group or "documents"
            if groups.setdefault(source.task, group) != group:
                raise ConfigError(
                    f"{path}: {source.name}: task {source.task!r} has sources of {groups[source.task]} "
                    f"and of {group}; a task is one of them, so give it another name"
                )
    shares = {source.name: source.share for source in sources if source.role == "text"}
    without = [name for name, share in shares.items() if share is None]
    if 0 < len(without) < len(shares):
        raise ConfigError(f"{path}: either all text has a share or none; {', '.join(without)} have none")
    total = sum(share for share in shares.values() if share is not None)
    if shares and not without and abs(total - 100) > 0.01:
        raise ConfigError(f"{path}: the shares of the text sum to {total:.2f} percent, not to 100")


def _one_of(value: str, known: Sequence[str], where: str) -> None:
    if value not in known:
        raise ConfigError(f"{where}: unknown name {value!r}{nearest(value, known)}")


def _check_language(code: Any, where: str) -> None:
    if not isinstance(code, str):
        raise ConfigError(f"{where}: a language must be text (in quotes), got {code!r}")
    try:
        check_language(code)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
