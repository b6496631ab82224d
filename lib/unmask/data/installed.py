"""The corpus that needs no download: the installed packages and CLDR, split, deduplicated, capped."""

from __future__ import annotations

import difflib
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unmask.data import cldr, environment
from unmask.data.corpus import SCHEMAS, SPLITS, Corpus, write_table
from unmask.data.environment import FileHarvest, Package, digest
from unmask.data.registry import Source

if TYPE_CHECKING:
    from unmask.config import DataConfig

SMALL_PACKAGE = 2_000_000  # bytes
PROSE_SHARE = 0.5  # of the pretraining text; source code and CLDR fill the rest
CODE = (__file__, environment.__file__, cldr.__file__)  # what the content depends on

KINDS = ("texts", "pairs", "documents")
TEXTS = "environment"  # the one data set of text

Rows = dict[str, dict[str, list[dict[str, Any]]]]  # kind → split → rows


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
    for kind in KINDS:
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
        sizes: dict[str, Any] = {kind: {} for kind in SCHEMAS}
        for kind in KINDS:
            for name, parts in _by_dataset(kind, rows[kind]).items():
                folder = partial / kind / name
                sizes[kind][name] = {
                    split: write_table(folder / f"{split}.arrow", part, SCHEMAS[kind])
                    for split, part in parts.items()
                }
        card = _card(config, chosen, split_of, rows, dropped, sizes)
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

    rows: Rows = {kind: {split: [] for split in SPLITS} for kind in KINDS}
    seen: set[int] = set()  # texts of the splits before
    for split in reversed(SPLITS):
        files = by_split[split]
        found = {kind: [row for row in spoken[kind] if row["split"] == split] for kind in KINDS}
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
            row = pair | {"task": pair["dataset"]}
            yield {column: row[column] for column in SCHEMAS["pairs"].names}


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
            row = document | {"task": document["dataset"]}
            kept = {column: row[column] for column in SCHEMAS["documents"].names}
            yield kept | {"queries": [query for query, _ in asked], "golds": [gold for _, gold in asked]}


def _capped(texts: Iterable[dict], cap: int, seed: int, dropped: Counter[str]) -> list[dict]:
    """Distinct texts, drawn by hash up to `cap` bytes: prose to its share, then CLDR, then source code."""
    distinct = list({row["text"]: row for row in texts}.values())
    order = {"prose": 0, "cldr": 1, "code": 2}

    def drawn(row: dict) -> bytes:
        return sha256(f"{seed}{row['text']}".encode()).digest()

    distinct.sort(key=lambda row: (order[row["kind"]], drawn(row)))
    kept, size = [], Counter()
    for row in distinct:
        length = len(row["text"].encode())
        room = cap * PROSE_SHARE - size["prose"] if row["kind"] == "prose" else cap - size.total()
        if length <= room:
            size[row["kind"]] += length
            kept.append(row)
        else:
            dropped[f"texts: {row['kind']} over the cap"] += 1
    kept.sort(key=drawn)  # whoever reads the first part of them reads all kinds
    return [{column: row[column] for column in SCHEMAS["texts"].names} for row in kept]


def parameters(config: DataConfig) -> dict[str, Any]:
    """What of the configuration decides the content; the tokenizer's size does not."""
    return {
        "seed": config.seed,
        "dev_packages": list(config.dev_packages),
        "test_packages": list(config.test_packages),
        "max_packages": config.max_packages,
        "max_text_mb": config.max_text_mb,
    }


def _by_dataset(kind: str, rows: dict[str, list[dict]]) -> dict[str, dict[str, list[dict]]]:
    """Data set → split → rows; all text is one data set."""
    names = {TEXTS} if kind == "texts" else {row["dataset"] for part in rows.values() for row in part}
    return {
        name: {
            split: [row for row in part if kind == "texts" or row["dataset"] == name]
            for split, part in rows.items()
        }
        for name in sorted(names)
    }


def _card(
    config: DataConfig,
    packages: Sequence[Package],
    split_of: dict[str, str],
    rows: Rows,
    dropped: Counter[str],
    sizes: dict[str, Any],
) -> dict[str, Any]:
    content = sha256()
    for kind in KINDS:
        for split in SPLITS:
            for row in rows[kind][split]:
                content.update(json.dumps([row[column] for column in SCHEMAS[kind].names]).encode())
    languages = {
        language
        for kind in rows.values()
        for split in kind.values()
        for row in split
        for language in row["language"].split("-")
    }
    text = Source(
        name=TEXTS, kind="files", role="text", language="mul", licence="",
        files=(f"texts/{TEXTS}/train.arrow",), columns={"text": "text"},
    )  # fmt: skip
    return {
        "hash": content.hexdigest(),
        "parameters": parameters(config),
        "sizes": sizes,
        "folders": {kind: {name: f"{kind}/{name}" for name in sizes[kind]} for kind in SCHEMAS},
        "text_sources": [asdict(text)],
        "languages": sorted(languages - {"mul", "python"}),
        "origins": [
            {
                "name": f"{package.name} {package.version}",
                "licence": package.licence,
                "split": split_of[package.name],
            }
            for package in packages
        ],
        "dropped": {TEXTS: dict(sorted(dropped.items()))},
    }
