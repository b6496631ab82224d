"""Tables of a source: what is stored, the same for any number of workers, whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from unmask.data import tables
from unmask.data.corpus import SCHEMAS, SPLITS
from unmask.data.reading import units
from unmask.data.registry import Source, split_of
from unmask.data.tables import collect, identity

PAIR_COLUMNS = {"query": "query", "document": "document"}
NESTED = {"chunks": "chunks", "queries": "queries", "golds": "golds"}
FLAT = {"title": "title", "chunk": "chunk", "query": "query"}
JOINED = {"chunk_id": "chunk_id", "chunk": "chunk", "query": "query", "query_chunk_id": "chunk_id"}


def own(path: Path, role: str = "pairs", **values: Any) -> Source:
    given = {"kind": "files", "language": "eng_Latn", "licence": "CC0-1.0", "bad_rows": "stop"}
    columns = {"pairs": PAIR_COLUMNS, "text": {"text": "text"}, "documents": NESTED}.get(role)
    return Source(name="mine", role=role, files=(str(path),), **given | {"columns": columns} | values)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")
    return path


def pairs(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"query": f"what is {i}?", "document": f"{i} is a number"} | more for i in range(count)]


def table(folder: Path, split: str) -> Dataset:
    return Dataset.from_file(str(folder / f"{split}.arrow"))


def test_pairs_are_stored_by_split_in_the_schema_of_the_corpus(tmp_path: Path) -> None:
    source = own(write(tmp_path / "a.jsonl", pairs(400)), hold_out=0.15, group="english", task="numbers")
    card = collect(source, tmp_path / "out")
    assert card == json.loads((tmp_path / "out" / "card.json").read_text())
    stored = {split: table(tmp_path / "out", split) for split in SPLITS}
    assert {split: card["sizes"][split]["rows"] for split in SPLITS} == {
        split: len(stored[split]) for split in SPLITS
    }
    assert sum(len(rows) for rows in stored.values()) == 400
    assert card["sizes"]["train"]["characters"] == sum(
        len(row["query"] + row["document"]) for row in stored["train"]
    )
    for split, rows in stored.items():
        assert rows.data.schema.remove_metadata() == SCHEMAS["pairs"]
        assert all(split_of(source, row["document"]) == split for row in rows)
    row = stored["train"][0]
    assert {name: row[name] for name in ("dataset", "task", "group", "language", "package")} == {
        "dataset": "mine",
        "task": "numbers",
        "group": "english",
        "language": "eng_Latn",
        "package": "a.jsonl",
    }
    assert card["examples"][0] == row and card["complete"] and card["dropped"] == {}


def test_equal_documents_have_equal_keys_unless_the_source_maps_another(tmp_path: Path) -> None:
    rows = [
        {"query": "a", "document": "same", "thing": "x"},
        {"query": "b", "document": "same", "thing": "y"},
        {"query": "c", "document": "other", "thing": "x"},
    ]
    path = write(tmp_path / "a.jsonl", rows)
    collect(own(path), tmp_path / "one")
    a, b, c = table(tmp_path / "one", "train")["key"]
    assert a == b != c and len(a) == 16
    collect(own(path, columns=PAIR_COLUMNS | {"key": "thing"}), tmp_path / "two")
    a, b, c = table(tmp_path / "two", "train")["key"]
    assert a == c != b


def test_triplets_have_negatives(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", pairs(3, no=["x", "y"]))
    card = collect(own(path, "triplets", columns=PAIR_COLUMNS | {"negatives": "no"}), tmp_path / "out")
    stored = table(tmp_path / "out", "train")
    assert stored.data.schema.remove_metadata() == SCHEMAS["triplets"]
    assert stored["negatives"][2] == ["x", "y"] and card["sizes"]["train"]["negatives"] == 6
    assert card["sizes"]["test"] == {"rows": 0, "characters": 0, "negatives": 0}
    assert len(table(tmp_path / "out", "test")) == 0  # an empty table can be mapped


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_the_number_of_workers_changes_nothing(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row | {"id": f"id {i % 2900}"} for i, row in enumerate(pairs(3000))]
    rows[1234]["query"] = " "
    path = tmp_path / name
    if name == "a.jsonl":
        write(path, rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=200)
    monkeypatch.setattr(tables, "units", lambda source: units(source, unit_bytes=20_000))
    source = own(path, columns=PAIR_COLUMNS | {"id": "id"}, hold_out=0.1, bad_rows="drop")
    assert len(tables.units(source)) > 5
    cards = [collect(source, tmp_path / str(workers), workers=workers) for workers in (1, 2, 3)]
    assert cards[0] == cards[1] == cards[2]
    assert cards[0]["dropped"] == {"duplicate id": 100, "empty query": 1}
    for split in SPLITS:
        contents = {(tmp_path / str(workers) / f"{split}.arrow").read_bytes() for workers in (1, 2, 3)}
        assert len(contents) == 1


def test_the_hash_is_of_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jsonl = write(tmp_path / "a.jsonl", pairs(500))
    source = own(jsonl, hold_out=0.1)
    first = collect(source, tmp_path / "one")["hash"]
    monkeypatch.setattr(tables, "units", lambda source: units(source, unit_bytes=700))
    assert collect(source, tmp_path / "two")["hash"] == first
    write(jsonl, [*pairs(499), {"query": "another", "document": "499 is a number"}])
    assert collect(source, tmp_path / "two")["hash"] != first


def test_duplicate_ids_are_refused_with_both_rows(tmp_path: Path) -> None:
    rows = [row | {"id": i} for i, row in enumerate(pairs(30))]
    rows[20]["id"] = 3
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(ValueError) as caught:
        collect(own(path, columns=PAIR_COLUMNS | {"id": "id"}), tmp_path / "out")
    message = str(caught.value)
    assert message.startswith(
        f"{path}, line 21: the row at {path}, line 4 has the id '3' too; an id names one row"
    )
    assert "correct it, or have source mine leave such rows out" in message
    assert not (tmp_path / "out").exists()


def test_a_source_without_a_usable_row_is_an_error_with_the_reasons(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"query": 1, "document": "d"}, {"query": "", "document": "d"}])
    with pytest.raises(ValueError, match=r"mine has no usable row \(wrong type: 1, empty query: 1\)"):
        collect(own(path, bad_rows="drop"), tmp_path / "out")
    empty = tmp_path / "b.parquet"
    pq.write_table(pa.table({name: pa.array([], pa.string()) for name in FLAT}), empty)
    with pytest.raises(ValueError, match="no usable row"):
        collect(own(empty, "documents", columns=FLAT), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- text


def test_a_large_text_source_is_sampled_and_a_small_one_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": f"text {i:04d} " + "x" * 90} for i in range(1000)])
    card = collect(own(path, "text", hold_out=0.1), tmp_path / "all")
    assert card["complete"] and sum(size["rows"] for size in card["sizes"].values()) == 1000
    row = table(tmp_path / "all", "test")[0]
    assert (row["package"], row["kind"], row["language"]) == ("mine", "text", "eng_Latn")
    monkeypatch.setattr(tables, "SAMPLE_BYTES", 20_000)
    sample = collect(own(path, "text", hold_out=0.1), tmp_path / "sample")
    assert not sample["complete"] and sample["sizes"]["train"] == {"rows": 200, "characters": 20_000}
    assert 10 < sample["sizes"]["test"]["rows"] < 40
    with path.open("a") as file:  # beyond the sample
        file.write('{"text": "one more"}\n')
    assert collect(own(path, "text", hold_out=0.1), tmp_path / "sample")["hash"] != sample["hash"]


# --- documents


def test_nested_documents(tmp_path: Path) -> None:
    rows = [
        {"document_id": f"d{i}", "chunks": [f"a{i}", f"b{i}"], "queries": ["q"], "golds": [1]}
        for i in range(40)
    ]
    path = write(tmp_path / "a.jsonl", rows)
    card = collect(
        own(path, "documents", columns=NESTED | {"id": "document_id"}, hold_out=0.2), tmp_path / "out"
    )
    assert sum(size["chunks"] for size in card["sizes"].values()) == 80
    stored = table(tmp_path / "out", "train")
    assert stored.data.schema.remove_metadata() == SCHEMAS["documents"]
    assert stored[0]["document_id"].startswith("mine/d") and stored[0]["golds"] == [1]


def test_flat_rows_are_gathered_by_title(tmp_path: Path) -> None:
    rows = [
        {"title": "one", "chunk": "first", "query": "q1"},
        {"title": "two", "chunk": "alone", "query": "q2"},
        {"title": "one", "chunk": "second", "query": "q3"},
        {"title": "one", "chunk": "first", "query": "q4"},
    ]
    collect(own(write(tmp_path / "a.jsonl", rows), "documents", columns=FLAT), tmp_path / "out")
    one, two = table(tmp_path / "out", "train")
    assert (one["document_id"], one["chunks"]) == ("mine/one", ["first", "second"])
    assert (one["queries"], one["golds"]) == (["q1", "q3", "q4"], [0, 1, 0])
    assert (two["chunks"], two["golds"]) == (["alone"], [0])


@pytest.fixture
def joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """A repository of a mirror with chunks and queries in two configurations, some of them bad."""
    monkeypatch.setenv("UNMASK_MIRROR", str(tmp_path / "mirror"))
    folder = tmp_path / "mirror" / "org" / "name"
    folder.mkdir(parents=True)
    chunks = [
        ("a_b_1", "second"),
        ("a_b_0", "first"),
        ("a_b_2", "first"),
        ("c_0", "other"),
        ("d_0", "unasked"),
    ]
    asked = [("q1", "a_b_1"), ("q2", "a_b_2"), ("q3", "c_0"), ("q4", "c_7"), ("q5", "e_0")]
    write(folder / "chunks.jsonl", [{"chunk_id": name, "chunk": text} for name, text in chunks])
    write(folder / "queries.jsonl", [{"query": query, "chunk_id": name} for query, name in asked])
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: documents\n  data_files: chunks.jsonl\n"
        "- config_name: queries\n  data_files: queries.jsonl\n---\n"
    )
    return Source(
        name="mine", kind="mirror", role="documents", language="eng", licence="", repo="org/name",
        config="documents", queries_config="queries", columns=JOINED,
    )  # fmt: skip


def test_chunks_and_queries_of_two_configurations_are_joined(joined: Source, tmp_path: Path) -> None:
    card = collect(joined, tmp_path / "out")
    first, second = table(tmp_path / "out", "train")
    assert first["document_id"] == "mine/a_b" and first["package"] == "org/name"
    assert (first["chunks"], first["queries"], first["golds"]) == (["first", "second"], ["q1", "q2"], [1, 0])
    assert (second["chunks"], second["queries"], second["golds"]) == (["other"], ["q3"], [0])
    assert card["dropped"] == {"query of a missing chunk": 2, "document without a query": 1}


# --- whole or not at all


# --- identity


def test_identity_changes_with_what_decides_the_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", pairs(5))
    source = own(path)
    first = identity(source)
    assert identity(own(path)) == first
    assert identity(own(path, rows=5, documented="https://example.org")) == first
    assert identity(own(path, hold_out=0.1)) != first
    os.utime(path, ns=(1, 1))
    assert identity(source) != first


def test_identity_of_a_pulled_file_is_its_checksum(joined: Source, tmp_path: Path) -> None:
    folder = tmp_path / "mirror" / "org" / "name"
    files = {
        name: {"size": (folder / name).stat().st_size, "sha256": name}
        for name in ("chunks.jsonl", "queries.jsonl")
    }
    manifest = folder / ".unmask-mirror.json"
    manifest.write_text(json.dumps({"revision": "a" * 40, "files": files}))
    first = identity(joined)
    os.utime(folder / "chunks.jsonl", ns=(1, 1))
    assert identity(joined) == first
    files["queries.jsonl"]["sha256"] = "another"
    manifest.write_text(json.dumps({"revision": "a" * 40, "files": files}))
    assert identity(joined) != first
