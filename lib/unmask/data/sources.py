"""Corpora by kind of source: `open_corpus` builds what a preset asks for once, then caches it."""

from __future__ import annotations

import difflib
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock

from unmask.data import cldr, environment
from unmask.data.environment import FileHarvest, Package, digest
from unmask.workspace import artifacts_root

if TYPE_CHECKING:
    from datasets import Dataset

    from unmask.config import DataConfig

SPLITS = ("train", "dev", "test")
SMALL_PACKAGE = 2_000_000  # bytes
PROSE_SHARE = 0.5  # of the pretraining text; source code and CLDR fill the rest

_text, _number = pa.string(), pa.int32()
SCHEMAS = {
    "texts": pa.schema(dict.fromkeys(("text", "package", "kind", "language"), _text)),
    "pairs": pa.schema(
        dict.fromkeys(("query", "document", "key", "dataset", "group", "language", "package"), _text)
    ),
    "documents": pa.schema(
        dict.fromkeys(("document_id", "dataset", "package", "language"), _text)
        | {"chunks": pa.list_(_text), "queries": pa.list_(_text), "golds": pa.list_(_number)}
    ),
}
Rows = dict[str, dict[str, list[dict[str, Any]]]]  # kind → split → rows


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus on disk: three tables in three splits ("train", "dev", "test") and a card.

    texts: text, package, kind ("prose", "code" or "cldr"), language.
    pairs: query, document, key, dataset, group, language, package; rows of one key are the same thing, never
        negatives.
    documents: document_id, dataset, package, language, chunks, queries, golds (index of each query's gold
        chunk).
    """

    path: Path

    @cached_property
    def card(self) -> dict[str, Any]:
        """Sizes, languages, packages with version and licence, examples, and what was dropped and why."""
        return json.loads((self.path / "card.json").read_text(encoding="utf8"))

    @property
    def hash(self) -> str:
        """SHA-256 of all rows."""
        return self.card["hash"]

    def texts(self, split: str) -> Dataset:
        """Text for pretraining."""
        return self._read("texts", split)

    def pairs(self, split: str) -> Dataset:
        """Queries with the document that answers each."""
        return self._read("pairs", split)

    def documents(self, split: str) -> Dataset:
        """Documents in chunks, with the queries that one of the chunks answers."""
        return self._read("documents", split)

    def _read(self, kind: str, split: str) -> Dataset:
        # Slow to import, and the harvest's child processes do not need it.
        from datasets import Dataset, disable_progress_bars

        if split not in SPLITS:
            raise ValueError(f"There is no split {split!r} in a corpus; take one of {', '.join(SPLITS)}.")
        disable_progress_bars()  # tables of this size take no time that is worth a bar
        return Dataset(pq.read_table(self.path / f"{kind}-{split}.parquet"))


def open_corpus(config: DataConfig) -> Corpus:
    """The corpus that the preset's `data` section asks for, built on first use, then cached.

    Args:
        config: `source` picks the kind (see SOURCES); the rest is that source's parameters.
    Returns: the corpus; its hash is the same wherever the same packages are installed.
    Raises: ValueError for an unknown source, an unknown held-out package or an empty corpus.
    """
    if config.source not in SOURCES:
        raise ValueError(
            f"data.source is {config.source!r}, which is unknown; take one of: {', '.join(sorted(SOURCES))}."
        )
    return SOURCES[config.source](config)


def _open_environment(config: DataConfig) -> Corpus:
    key = sha256(json.dumps([_parameters(config), environment.installed_versions()]).encode())
    for source in (__file__, environment.__file__, cldr.__file__):
        key.update(Path(source).read_bytes())
    path = artifacts_root() / "data" / f"environment-{key.hexdigest()[:16]}"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may want the corpus at once: the first builds it, the others wait and read it.
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            languages = cldr.SLICE_LANGUAGES if config.max_packages else cldr.LANGUAGES
            build(config, environment.installed_packages(), path, languages)
    return Corpus(path)


SOURCES = {"environment": _open_environment}


def build(
    config: DataConfig, packages: Sequence[Package], path: Path, languages: Sequence[str] = cldr.LANGUAGES
) -> Corpus:
    """Harvest `packages` and CLDR into a corpus at `path`, which appears only when it is complete.

    Args:
        config: held-out packages, number of packages, cap of the text, seed.
        packages: what to read, see `environment.installed_packages`.
        path: folder to create.
        languages: of the CLDR part.
    Raises: ValueError if a held-out package is not among `packages`, or if a split would be empty.
    """
    split_of = assign_splits(config, packages)
    chosen = [package for package in packages if package.name in split_of]
    rows, dropped = _collect(config, chosen, split_of, languages)
    for kind in SCHEMAS:
        for split in SPLITS:
            if all(row["package"] == "cldr" for row in rows[kind][split]):
                raise ValueError(
                    f"The corpus has no {kind} for {split!r} after reading {len(chosen)} packages; raise "
                    "data.max_packages, or name well-documented data.dev_packages and data.test_packages."
                )
    partial = path.with_name(f".partial-{path.name}")
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
    partial.mkdir(parents=True)
    try:
        for kind, schema in SCHEMAS.items():
            for split in SPLITS:
                table = pa.Table.from_pylist(rows[kind][split], schema=schema)
                pq.write_table(table, partial / f"{kind}-{split}.parquet", compression="zstd")
        card = _card(config, chosen, split_of, rows, dropped)
        (partial / "card.json").write_text(json.dumps(card, indent=1, ensure_ascii=False), encoding="utf8")
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Corpus(path)


def assign_splits(config: DataConfig, packages: Sequence[Package]) -> dict[str, str]:
    """Split of every package that is to be read: the held-out ones and up to `max_packages` others.

    A slice takes the largest packages under 2 MB first: rich in documentation and still quick to read.

    Raises: ValueError for a held-out package that is not installed or is held out twice, or an empty split.
    """
    by_name = {package.name.lower(): package for package in packages}
    splits: dict[str, str] = {}
    for split, wanted in (("test", config.test_packages), ("dev", config.dev_packages)):
        for name in wanted:
            if name.lower() not in by_name:
                near = difflib.get_close_matches(name.lower(), sorted(by_name), n=1, cutoff=0)
                hint = (
                    f"the nearest installed one is {by_name[near[0]].name!r}" if near else "none is installed"
                )
                raise ValueError(
                    f"data.{split}_packages names {name!r}, which is not installed; {hint}. "
                    "Install it, or hold out another package."
                )
            known = by_name[name.lower()].name
            if splits.setdefault(known, split) != split:
                raise ValueError(
                    f"Package {known!r} is in data.test_packages and data.dev_packages; remove it from one."
                )
    others = [package for package in packages if package.name not in splits]
    others.sort(key=lambda package: (package.size > SMALL_PACKAGE, -package.size, package.name))
    slots = len(others) if config.max_packages == 0 else max(config.max_packages - len(splits), 0)
    splits |= {package.name: "train" for package in others[:slots]}
    for split in SPLITS:
        if split not in splits.values():
            raise ValueError(
                f"No package is left for {split!r}: {len(packages)} are installed, data.max_packages is "
                f"{config.max_packages} and {len(splits)} are taken. Raise data.max_packages (0: all), and "
                "name packages in both data.dev_packages and data.test_packages."
            )
    return splits


def _collect(
    config: DataConfig, packages: Sequence[Package], split_of: dict[str, str], languages: Sequence[str]
) -> tuple[Rows, Counter[str]]:
    """Rows of all splits. A split later in (test, dev, train) never repeats a text of an earlier one."""
    by_split: dict[str, list[FileHarvest]] = {split: [] for split in SPLITS}
    dropped: Counter[str] = Counter()
    for harvested in environment.harvest(packages):
        if harvested.skipped:
            dropped[f"files: {harvested.skipped}"] += 1
        else:
            by_split[split_of[harvested.package]].append(harvested)
    spoken = cldr.harvest(config.seed, languages)

    rows: Rows = {kind: {split: [] for split in SPLITS} for kind in SCHEMAS}
    seen: set[int] = set()  # texts of the splits before
    for split in reversed(SPLITS):
        files = by_split[split]
        found = {kind: [row for row in spoken[kind] if row["split"] == split] for kind in SCHEMAS}
        pairs = [pair for harvested in files for pair in harvested.pairs] + found["pairs"]
        rows["pairs"][split] = list(_new_pairs(pairs, seen, dropped))
        owners = [owner for harvested in files for owner in harvested.owners]
        documents = environment.documents_of(owners, config.seed) + found["documents"]
        rows["documents"][split] = list(_new_documents(documents, seen, dropped))
        texts = [row for harvested in files for row in environment.texts_of(harvested, seen)] + found["texts"]
        # Held-out text only measures the loss: a tenth will do.
        cap = config.max_text_mb * 1_000_000 // (1 if split == "train" else 10)
        rows["texts"][split] = _capped(texts, cap, config.seed, dropped)
        if split != "train":
            seen |= _digests(files, rows["pairs"][split], rows["documents"][split])
    return rows, dropped


def _digests(files: Iterable[FileHarvest], pairs: Iterable[dict], documents: Iterable[dict]) -> set[int]:
    """Digests of all that a split holds: docstrings, functions, queries, documents."""
    marks = {mark for harvested in files for mark in harvested.digests}
    marks |= {mark for harvested in files for _, _, mark in harvested.docstrings}
    marks |= {digest(pair[column]) for pair in pairs for column in ("query", "document")}
    for document in documents:
        marks.update(map(digest, [*document["queries"], " ".join(document["chunks"][1:])]))
    return marks


def _new_pairs(pairs: Iterable[dict], seen: set[int], dropped: Counter[str]) -> Iterator[dict]:
    """Pairs whose texts no earlier split holds, and which in their dataset mean one thing (one key) only.

    A query that fits several documents has no right answer, nor has a document that answers several queries.
    """
    key_of: dict[tuple[str, str, int], str] = {}
    for pair in pairs:
        marks = [(pair["dataset"], column, digest(pair[column])) for column in ("query", "document")]
        if any(mark[2] in seen for mark in marks):
            dropped["pairs: text of another split"] += 1
        elif any(key_of.get(mark, pair["key"]) != pair["key"] for mark in marks):
            dropped["pairs: ambiguous"] += 1
        elif all(mark in key_of for mark in marks):
            dropped["pairs: repeated"] += 1
        else:
            key_of.update(dict.fromkeys(marks, pair["key"]))
            yield {column: pair[column] for column in SCHEMAS["pairs"].names}


def _new_documents(documents: Iterable[dict], seen: set[int], dropped: Counter[str]) -> Iterator[dict]:
    """Documents whose sections and queries no earlier split holds, and no earlier document of their split."""
    used: set[int] = set()
    for document in documents:
        body = digest(" ".join(document["chunks"][1:]))
        # Figures of two countries may well be equal; a class copied into another package is a repetition.
        if document["dataset"] == "modules" and (body in seen or body in used):
            dropped["documents: repeated"] += 1
            continue
        asked = [
            (query, gold)
            for query, gold in zip(document["queries"], document["golds"])
            if digest(query) not in seen and digest(query) not in used
        ]
        dropped["queries: repeated"] += len(document["queries"]) - len(asked)
        if asked:
            used |= {body, *(digest(query) for query, _ in asked)}
            kept = {column: document[column] for column in SCHEMAS["documents"].names}
            yield kept | {"queries": [query for query, _ in asked], "golds": [gold for _, gold in asked]}


def _capped(texts: Iterable[dict], cap: int, seed: int, dropped: Counter[str]) -> list[dict]:
    """Distinct texts, drawn by hash up to `cap` bytes: prose to its share, then CLDR, then source code."""
    distinct = list({row["text"]: row for row in texts}.values())
    order = {"prose": 0, "cldr": 1, "code": 2}
    distinct.sort(key=lambda row: (order[row["kind"]], sha256(f"{seed}{row['text']}".encode()).digest()))
    kept, size = [], Counter()
    for row in distinct:
        length = len(row["text"].encode())
        room = cap * PROSE_SHARE - size["prose"] if row["kind"] == "prose" else cap - size.total()
        if length <= room:
            size[row["kind"]] += length
            kept.append(row)
        else:
            dropped[f"texts: {row['kind']} over the cap"] += 1
    return [{column: row[column] for column in SCHEMAS["texts"].names} for row in kept]


def _parameters(config: DataConfig) -> dict[str, Any]:
    """What of the configuration decides the content; the tokenizer's size does not."""
    return {
        "source": config.source,
        "seed": config.seed,
        "dev_packages": list(config.dev_packages),
        "test_packages": list(config.test_packages),
        "max_packages": config.max_packages,
        "max_text_mb": config.max_text_mb,
    }


def _card(
    config: DataConfig,
    packages: Sequence[Package],
    split_of: dict[str, str],
    rows: Rows,
    dropped: Counter[str],
) -> dict[str, Any]:
    content = sha256()
    sizes: dict[str, dict[str, dict[str, Any]]] = {}
    examples: dict[str, Any] = {}
    for kind, schema in SCHEMAS.items():
        label = "kind" if kind == "texts" else "dataset"
        for split in SPLITS:
            counts: dict[str, dict[str, Any]] = {}
            for row in rows[kind][split]:
                content.update(json.dumps([row[column] for column in schema.names]).encode())
                count = counts.setdefault(row[label], Counter())
                count["rows"] += 1
                if kind == "texts":
                    count["characters"] += len(row["text"])
                elif kind == "documents":
                    count["chunks"] += len(row["chunks"])
                    count["queries"] += len(row["queries"])
                if split == "train":
                    examples.setdefault(f"{kind}/{row[label]}", row)
            sizes.setdefault(kind, {})[split] = {name: dict(counts[name]) for name in sorted(counts)}
    languages = {
        language
        for kind in rows.values()
        for split in kind.values()
        for row in split
        for language in row["language"].split("-")
    }
    return {
        "hash": content.hexdigest(),
        "parameters": _parameters(config),
        "sizes": sizes,
        "languages": sorted(languages - {"mul", "python"}),
        "packages": [
            {
                "name": package.name,
                "version": package.version,
                "licence": package.licence,
                "split": split_of[package.name],
                "files": len(package.files),
            }
            for package in packages
        ],
        "examples": examples,
        "dropped": dict(sorted(dropped.items())),
    }
