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
PAIRS = [
    {"query": f"How is number {i} written?", "key": str(i), **OF_PAIRS, **EVERYWHERE}
    | {"document": f"Number {i} is written with {len(str(i))} digits. " * (1 + i % 3)}
    for i in range(60)
]
SUMS = [f"{i} and {i + 1} make {2 * i + 1}. " * 8 for i in range(60)]
TEXTS = [{"text": text, "kind": "prose", **EVERYWHERE} for text in SUMS]
DOCUMENTS = [
    {"document_id": str(i), "key": str(i), **dict.fromkeys(("dataset", "task"), "counting"), **EVERYWHERE}
    | {"chunks": [f"Number {i} comes first.", f"Then comes {i + 1}.", f"The last one is {i + 2}."]}
    | {"queries": [f"What comes after {i}?", f"Where does {i} end?"], "golds": [1, 2]}
    for i in range(30)
]
VERSIONS = cache(environment.installed_versions)  # as reading them takes half a second
ROWS = {"texts": ("environment", TEXTS), "pairs": ("docs", PAIRS), "documents": ("counting", DOCUMENTS)}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the environment's corpus, where it is not there yet, is this one."""
    monkeypatch.setattr(environment, "build", build)
    monkeypatch.setattr(environment, "installed_packages", list)  # looking at all their files takes seconds
    monkeypatch.setattr(environment, "installed_versions", VERSIONS)


def build(config, packages, path, languages):
    """The same rows in every split."""
    every = {kind: [row | {"split": split} for split in SPLITS for row in ROWS[kind][1]] for kind in ROWS}
    card = write_tables(path, [(kind, ROWS[kind][0], rows) for kind, rows in every.items()])
    place = {"files": ("texts/environment/train.arrow",), "columns": {"text": "text"}}
    text = Source("environment", "files", "text", "mul", "", **place)
    card |= {"hash": "tiny", "text_sources": [asdict(text)]}
    card |= {"languages": ["en"], "origins": [], "dropped": {}}
    (path / "card.json").write_text(json.dumps(card))
