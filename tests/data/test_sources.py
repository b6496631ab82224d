"""Corpora from registries: composed of their sources' tables, kept, read again where a file changed; what a
source's tables hold."""

import json
import os
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from test_environment import make_config, make_packages

from unmask.data import reading, sources
from unmask.data.corpus import SCHEMAS, SPLITS
from unmask.data.registry import Source, split_of
from unmask.data.sources import collect, identity, open_corpus

REGISTRY = """
about: a few rows of one's own
defaults: {kind: files, language: eng, licence: own, hold_out: 0.2}
sources:
  notes: {role: text, files: notes.jsonl, columns: {text: body}}
  questions: {role: pairs, group: english, files: questions.jsonl, columns: {query: q, document: a}}
  manuals: {role: documents, files: manuals.jsonl, columns: {chunks: chunks, queries: asked, golds: golds}}
  synthetic:
    {role: pairs, group: english, task: questions, language: deu, files: synthetic.jsonl, optional: true,
     columns: {query: q, document: a}}
"""


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("UNMASK_ARTIFACTS", str(tmp_path / "artifacts"))
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "own.yaml").write_text(REGISTRY, encoding="utf8")
    write(folder / "notes.jsonl", [{"body": f"Note {i} is about the number {i}."} for i in range(100)])
    write(folder / "questions.jsonl", [{"q": f"What is {i}?", "a": f"{i} is a number"} for i in range(100)])
    manual = {"asked": ["open it?"], "golds": [1]}
    write(folder / "manuals.jsonl", [manual | {"chunks": [f"{i}", "open it"]} for i in range(40)])
    values = {"source": str(folder / "own.yaml"), "seed": 0, "max_packages": 0, "max_text_mb": 1}
    values["families"] = ()
    return SimpleNamespace(**values, dev_packages=("beta",), test_packages=("gamma",), folder=folder)


def test_a_registry_becomes_a_corpus(config):
    corpus = open_corpus(config)
    assert corpus.datasets("pairs", "train") == ["questions"]
    assert corpus.datasets("documents", "test") == ["manuals"]
    assert [source.name for source in corpus.text_sources()] == ["notes"]
    assert all(os.path.isabs(file) for file in corpus.text_sources()[0].files)
    splits = {split: set(corpus.pairs(split)["document"]) for split in ("train", "dev", "test")}
    assert sum(map(len, splits.values())) == len(set.union(*splits.values())) == 100
    assert all(splits.values())
    row = corpus.pairs("train", "questions")[0]
    assert [row[name] for name in ("dataset", "group", "language")] == ["questions", "english", "eng"]
    document = corpus.documents("train")[0]
    assert document["chunks"][document["golds"][0]] == "open it"
    assert set(corpus.texts("train")["kind"]) == {"text"}
    assert len(corpus.triplets("train")) == 0
    with pytest.raises(ValueError, match="no pairs 'answers' in 'train'; it has"):
        corpus.pairs("train", "answers")


def test_families_that_are_not_asked_for_are_not_there(config):
    whole = open_corpus(config)
    config.families = ("english", "contextual")
    assert open_corpus(config).datasets("pairs", "train") == ["questions"]
    assert open_corpus(config).datasets("documents", "train") == ["manuals"]
    assert open_corpus(config).hash != whole.hash
    config.families = ("code",)
    one = open_corpus(config)
    assert one.datasets("pairs", "train") == one.datasets("documents", "train") == []
    assert len(one.pairs("train")) == 0 and len(one.texts("train")) == len(whole.texts("train"))


def test_it_is_read_once_and_a_changed_file_alone_again(config, monkeypatch):
    first = open_corpus(config)
    read = []
    collect = sources.collect

    def noted(source, *args, **options):
        read.append(source.name)
        return collect(source, *args, **options)

    monkeypatch.setattr(sources, "collect", noted)
    assert open_corpus(config).hash == first.hash
    assert read == []
    before = identity(config)
    write(config.folder / "questions.jsonl", [{"q": f"Why {i}?", "a": f"{i} it is"} for i in range(50)])
    assert identity(config) != before
    second = open_corpus(config)
    assert read == ["questions"]
    assert second.hash != first.hash
    assert second.identity("documents", "manuals") == first.identity("documents", "manuals")
    assert second.identity("pairs", "questions") != first.identity("pairs", "questions")
    assert len(first.pairs("train")) > len(second.pairs("train"))


def test_an_optional_source_joins_once_it_is_there(config):
    before = identity(config)
    open_corpus(config)
    write(config.folder / "synthetic.jsonl", [{"q": f"Was ist {i}?", "a": f"{i} ist"} for i in range(9)])
    corpus = open_corpus(config)
    assert identity(config) != before
    assert corpus.datasets("pairs", "train") == ["questions", "synthetic"]
    assert corpus.pairs("train", "synthetic").unique("task") == ["questions"]


def test_max_rows_draws_pieces_of_the_files(config, monkeypatch):
    rows = [{"q": f"Was ist {i}?", "a": f"{i} ist"} for i in range(600)]
    path = config.folder / "questions.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=20)
    monkeypatch.setattr("unmask.data.reading.UNIT_BYTES", path.stat().st_size // 30)
    asked = "files: questions.parquet, max_rows: 90"
    (config.folder / "own.yaml").write_text(REGISTRY.replace("files: questions.jsonl", asked))
    found = [int(q.split()[2][:-1]) for q in open_corpus(config).pairs("train", "questions")["query"]]
    assert len(found) == len(set(found)) == 90 and max(found) > 300 and found != sorted(found)


def test_max_rows_keeps_the_first_training_rows_of_a_single_piece(config):
    whole = open_corpus(config).pairs("train", "questions")["query"]
    path = config.folder / "own.yaml"
    path.write_text(REGISTRY.replace("files: questions.jsonl", "files: questions.jsonl, max_rows: 9"))
    corpus = open_corpus(config)
    assert list(corpus.pairs("train", "questions")["query"]) == list(whole)[:9]
    assert corpus.datasets("pairs", "test") == ["questions"]


def test_the_installed_packages_can_join(config, tmp_path, monkeypatch):
    packages = make_packages(tmp_path / "site")
    monkeypatch.setattr(sources.environment, "installed_packages", lambda: packages)
    monkeypatch.setattr(sources.environment, "installed_versions", lambda: {"alpha": "1.0"})
    text = REGISTRY.partition("  notes:")[0] + (
        "  docstrings: {kind: environment, role: text, language: mul, licence: the packages' own}\n"
        "  questions:" + REGISTRY.partition("  questions:")[2]
    )
    (config.folder / "own.yaml").write_text(text, encoding="utf8")
    corpus = open_corpus(config)
    environment = open_corpus(make_config())
    (source,) = corpus.text_sources()
    assert source.name == "docstrings"
    assert os.path.samefile(source.files[0], environment.text_sources()[0].files[0])
    assert corpus.texts("dev")["text"] == environment.texts("dev")["text"]
    assert corpus.datasets("pairs", "train") == ["questions"]


def test_what_every_run_needs_is_asked_for(config):
    text = REGISTRY.partition("  notes:")[0] + "  questions:" + REGISTRY.partition("  questions:")[2]
    (config.folder / "own.yaml").write_text(text, encoding="utf8")
    with pytest.raises(ValueError, match=r"own\.yaml has no source of text.*kind: environment"):
        open_corpus(config)


def test_a_bad_row_stops_with_its_place_and_leaves_nothing(config):
    path = config.folder / "questions.jsonl"
    path.write_text(path.read_text() + '{"q": "What now?", "a": ""}\n')
    with pytest.raises(ValueError, match=r"questions\.jsonl, row 101: document is no text, or empty"):
        open_corpus(config)
    assert not list((config.folder.parent / "artifacts" / "data").glob("*/card.json"))


# --- the tables of a source

PAIR_COLUMNS = {"query": "query", "document": "document"}
FLAT = {"title": "title", "chunk": "chunk", "query": "query"}
JOINED = {"chunk_id": "chunk_id", "chunk": "chunk", "query": "query", "query_chunk_id": "chunk_id"}


def own(folder, rows, role="pairs", **values):
    """A source of one file with these rows."""
    write(folder / "a.jsonl", rows)
    columns = {"text": "text"} if role == "text" else PAIR_COLUMNS
    given = {"kind": "files", "language": "eng_Latn", "licence": "CC0-1.0", "bad_rows": "stop"}
    given |= {"columns": columns, "files": (str(folder / "a.jsonl"),)}
    return Source(name="mine", role=role, **given | values)


def tables(source, folder):
    """What `collect` wrote: the card, and the rows by split."""
    collect(source, folder)
    card = json.loads((folder / "card.json").read_text())
    stored = {split: Dataset.from_file(str(folder / f"{split}.arrow")) for split in SPLITS}
    kind = sources.KIND[source.role]
    assert card["sizes"][kind]["mine"] == {split: {"rows": len(rows)} for split, rows in stored.items()}
    assert all(rows.data.schema.remove_metadata() == SCHEMAS[kind] for rows in stored.values())
    return card, stored


def pairs(count, **more):
    return [{"query": f"what is {i}?", "document": f"{i} is a number"} | more for i in range(count)]


def test_pairs_are_stored_by_split(tmp_path):
    source = own(tmp_path, pairs(400), hold_out=0.15, group="english", task="numbers")
    card, stored = tables(source, tmp_path / "out")
    assert card["dropped"] == {"mine": {}} and sum(map(len, stored.values())) == 400
    for split, rows in stored.items():
        assert len(rows) and all(split_of(source, row["document"]) == split for row in rows)
    row = stored["train"][0]
    expected = {"dataset": "mine", "task": "numbers", "group": "english", "language": "eng_Latn"}
    assert {name: row[name] for name in expected} == expected
    again, _ = tables(source, tmp_path / "again")
    assert again["hash"] == card["hash"]
    other, _ = tables(own(tmp_path, [*pairs(399), {"query": "q", "document": "d"}]), tmp_path / "other")
    assert other["hash"] != card["hash"]


def test_equal_documents_have_equal_keys_unless_the_source_maps_another(tmp_path):
    rows = [{"query": q, "document": d, "thing": t, "no": ["x"]} for q, d, t in ("aox", "boy", "cpx")]
    columns = PAIR_COLUMNS | {"negatives": "no"}
    stored = tables(own(tmp_path, rows, "triplets", columns=columns), tmp_path / "one")[1]
    a, b, c = stored["train"]["key"]
    assert a == b != c and len(a) == 16
    assert stored["train"]["negatives"][:] == [["x"]] * 3 and len(stored["test"]) == 0
    source = own(tmp_path, rows, "triplets", columns=columns | {"key": "thing"})
    a, b, c = tables(source, tmp_path / "two")[1]["train"]["key"]
    assert a == c != b
    rows = [{"title": t, "chunk": c, "query": "q", "thing": k} for t, c, k in ("afx", "bfy", "cgx")]
    source = own(tmp_path, rows, "documents", columns=FLAT)
    a, b, c = tables(source, tmp_path / "three")[1]["train"]["key"]
    assert a == b != c
    source = own(tmp_path, rows, "documents", columns=FLAT | {"key": "thing"})
    a, b, c = tables(source, tmp_path / "four")[1]["train"]["key"]
    assert a == c != b


def test_a_source_without_a_usable_row_is_an_error_with_the_reasons(tmp_path):
    source = own(tmp_path, [{"query": None, "document": "d"}, *[{"query": "", "document": "d"}] * 2])
    reasons = "query is no text, or empty: 3"
    with pytest.raises(ValueError, match=f"Source mine has no usable row \\({reasons}\\)"):
        collect(sources.replace(source, bad_rows="drop"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_large_text_source_is_sampled_and_a_small_one_kept(tmp_path, monkeypatch):
    rows = [{"text": f"text {i:04d} " + "x" * 90} for i in range(1000)]
    source = own(tmp_path, rows, "text", hold_out=0.1)
    stored = tables(source, tmp_path / "all")[1]
    assert sum(map(len, stored.values())) == 1000
    assert {*stored["test"]["kind"], *stored["test"]["language"]} == {"text", "eng_Latn"}
    monkeypatch.setattr(sources, "SAMPLE_BYTES", 20_000)
    sample, stored = tables(source, tmp_path / "sample")
    assert len(stored["train"]) == 200 and 10 < len(stored["test"]) < 40
    own(tmp_path, [*rows, {"text": "one more, beyond the sample"}], "text")
    assert tables(source, tmp_path / "sample")[0]["hash"] != sample["hash"]


def test_flat_rows_are_gathered_by_title(tmp_path):
    rows = [
        {"title": "one", "chunk": "first", "query": "q1"},
        {"title": "two", "chunk": "alone", "query": "q2"},
        {"title": "one", "chunk": "second", "query": "q3"},
        {"title": "one", "chunk": "first", "query": "q4"},
    ]
    one, two = tables(own(tmp_path, rows, "documents", columns=FLAT), tmp_path / "out")[1]["train"]
    assert (one["document_id"], one["chunks"]) == ("mine/one", ["first", "second"])
    assert (one["queries"], one["golds"]) == (["q1", "q3", "q4"], [0, 1, 0])
    assert (two["chunks"], two["golds"]) == (["alone"], [0])


def test_chunks_and_queries_of_two_configurations_are_joined(tmp_path, monkeypatch):
    monkeypatch.setenv("UNMASK_MIRROR", str(tmp_path / "mirror"))
    folder = tmp_path / "mirror" / "org" / "name"
    folder.mkdir(parents=True)
    names = {"a_b_1": "second", "a_b_0": "first", "a_b_2": "first", "c_0": "other", "d_0": "unasked"}
    asked = {"q1": "a_b_1", "q2": "a_b_2", "q3": "c_0", "q4": "c_7", "q5": "e_0"}
    write(folder / "chunks.jsonl", [{"chunk_id": name, "chunk": text} for name, text in names.items()])
    write(folder / "queries.jsonl", [{"query": query, "chunk_id": name} for query, name in asked.items()])
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: documents\n  data_files: chunks.jsonl\n"
        "- config_name: queries\n  data_files: queries.jsonl\n---\n"
    )
    values = {"repo": "org/name", "config": "documents", "queries_config": "queries", "columns": JOINED}
    source = Source("mine", "mirror", "documents", "eng", "", **values)
    card, stored = tables(source, tmp_path / "out")
    first, second = stored["train"]
    assert first["document_id"] == "mine/a_b" and first["package"] == "org/name"
    assert (first["chunks"], first["queries"], first["golds"]) == (["first", "second"], ["q1", "q2"], [1, 0])
    assert (second["chunks"], second["queries"], second["golds"]) == (["other"], ["q3"], [0])
    assert card["dropped"]["mine"] == {"query of a missing chunk": 2, "document without a query": 1}


def test_identity_changes_with_what_decides_the_rows(tmp_path):
    source = own(tmp_path, pairs(5))
    first = reading.identity(source)
    same, other = ({"rows": 5, "documented": "https://example.org"}, {"hold_out": 0.1})
    assert reading.identity(sources.replace(source, **same)) == first
    assert reading.identity(sources.replace(source, **other)) != first
    os.utime(source.files[0], ns=(1, 1))
    assert reading.identity(source) != first
