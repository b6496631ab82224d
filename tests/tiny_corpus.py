"""A corpus of a few sentences, in place of the harvest of the installed packages, for tests that train in
real child processes."""

import json
from dataclasses import asdict

import pytest

from unmask.data import environment
from unmask.data.corpus import SCHEMAS, SPLITS, write_tables
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
ROWS = {"texts": ("environment", TEXTS), "pairs": ("docs", PAIRS), "documents": ("counting", DOCUMENTS)}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the environment's corpus, where it is not there yet, is this one."""
    monkeypatch.setattr(environment, "build", build)
    monkeypatch.setattr(environment, "installed_packages", list)  # looking at all their files takes seconds


def build(config, packages, path, languages):
    """The same rows in every split."""
    path.mkdir(parents=True)
    sizes = {kind: {} for kind in SCHEMAS}
    for kind, (name, rows) in ROWS.items():
        every = [row | {"split": split} for split in SPLITS for row in rows]
        sizes[kind][name] = write_tables(path / kind / name, every, SCHEMAS[kind])
    place = {"files": ("texts/environment/train.arrow",), "columns": {"text": "text"}}
    text = Source("environment", "files", "text", "mul", "", **place)
    folders = {kind: {name: f"{kind}/{name}" for name in sizes[kind]} for kind in SCHEMAS}
    card = {"hash": "tiny", "text_sources": [asdict(text)], "sizes": sizes, "folders": folders}
    (path / "card.json").write_text(json.dumps(card))
