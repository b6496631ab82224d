"""A corpus of a few sentences, in place of the harvest of the installed packages, for tests that train in
real child processes."""

import json
from dataclasses import asdict
from functools import cache

import pytest

from unmask.data import environment
from unmask.data.corpus import SPLITS, write_tables
from unmask.data.registry import Source

OF_PAIRS = dict.fromkeys(("dataset", "task"), "docs") | {"group": "english"}
EVERYWHERE = {"language": "en", "package": "numbers"}
NAMES = {"texts": "environment", "pairs": "docs", "documents": "counting"}  # of the data sets
VERSIONS = cache(environment.installed_versions)  # as reading them takes half a second


def rows(first: int) -> dict[str, list[dict]]:
    """By kind, rows about the numbers from one on."""
    pairs = [
        {"query": f"How is number {i} written?", "key": str(i), **OF_PAIRS, **EVERYWHERE}
        | {"document": f"Number {i} is written with {len(str(i))} digits. " * (1 + i % 3)}
        for i in range(first, first + 60)
    ]
    sums = [f"{i} and {i + 1} make {2 * i + 1}. " * 8 for i in range(first, first + 60)]
    texts = [{"text": text, "kind": "prose", **EVERYWHERE} for text in sums]
    documents = [
        {"document_id": str(i), "key": str(i), **dict.fromkeys(("dataset", "task"), "counting"), **EVERYWHERE}
        | {"chunks": [f"Number {i} comes first.", f"Then comes {i + 1}.", f"The last one is {i + 2}."]}
        | {"queries": [f"What comes after {i}?", f"Where does {i} end?"], "golds": [1, 2]}
        for i in range(first, first + 30)
    ]
    return {"texts": texts, "pairs": pairs, "documents": documents}


TEXTS, PAIRS, DOCUMENTS = rows(0).values()


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the environment's corpus, where it is not there yet, is this one."""
    monkeypatch.setattr(environment, "build", build)
    monkeypatch.setattr(environment, "installed_packages", list)  # looking at all their files takes seconds
    monkeypatch.setattr(environment, "installed_versions", VERSIONS)


def build(config, packages, path, languages):
    """As many rows in every split, about other numbers."""
    by_split = {split: rows(100 * number) for number, split in enumerate(SPLITS)}
    every = {
        kind: [row | {"split": split} for split, own in by_split.items() for row in own[kind]]
        for kind in NAMES
    }
    card = write_tables(path, [(kind, name, every[kind]) for kind, name in NAMES.items()])
    place = {"files": ("texts/environment/train.arrow",), "columns": {"text": "text"}}
    text = Source("environment", "files", "text", "mul", "", **place)
    card |= {"hash": "tiny", "text_sources": [asdict(text)]}
    card |= {"languages": ["en"], "origins": [], "dropped": {}}
    (path / "card.json").write_text(json.dumps(card))
