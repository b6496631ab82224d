"""A corpus of a few sentences, in place of the installed packages', for tests that train in real child
processes."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from unmask.data import sources
from unmask.data.registry import SPLITS, Source, load_registry

OF_PAIRS = dict.fromkeys(("dataset", "task"), "docs") | {"group": "english"}
EVERYWHERE = {"language": "en", "package": "numbers"}
SCRIPT = "/nowhere/environment/make.py"
NAMES = {"text": "environment", "pairs": "docs", "documents": "counting"}  # of the data sets


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
        {"document_id": str(i), "key": str(i), **EVERYWHERE}
        | {"chunks": [f"Number {i} comes first.", f"Then comes {i + 1}.", f"The last one is {i + 2}."]}
        | {"queries": [f"What comes after {i}?", f"Where does {i} end?"], "golds": [1, 2]}
        for i in range(first, first + 30)
    ]
    return {"text": texts, "pairs": pairs, "documents": documents}


TEXTS, PAIRS, DOCUMENTS = rows(0).values()


def run(script: str, *arguments: str) -> str:
    """In place of the script: as many rows in every split, about other numbers."""
    for folder in map(Path, arguments[:1]):
        folder.mkdir()
        (folder / "card.json").write_text('{"dropped": {}}')
        for role, name in NAMES.items():
            own = [row | {"split": split} for i, split in enumerate(SPLITS) for row in rows(100 * i)[role]]
            pq.write_table(pa.Table.from_pylist(own), folder / f"{name}.parquet")
    return ""


def registry(name: str) -> list[Source]:
    """In place of the environment's."""
    if name != "environment":
        return load_registry(name)
    sources = []
    for role, name in NAMES.items():
        columns = {column: column for column in [*rows(0)[role][0], "split"] if column not in OF_PAIRS}
        group, files = "english" * (role == "pairs"), (f"{name}.parquet",)
        about = {"group": group, "files": files, "columns": columns, "script": SCRIPT}
        sources.append(Source(name, "files", role, "eng", "", **about))
    return sources


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the environment's corpus, where it is not there yet, is this one."""
    monkeypatch.setattr(sources, "load_registry", registry)
    monkeypatch.setattr(sources, "_run", run)
    sources._inputs.cache_clear()
