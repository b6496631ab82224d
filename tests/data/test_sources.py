"""Corpora from registries: composed of their sources' tables, kept, read again where a file changed; what a
source's tables hold."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import tiny
from tiny_sources import PAIR_COLUMNS, own, write_as
from unmask.config import load_preset
from unmask.data import rows as source_rows
from unmask.data import sources
from unmask.data.corpus import SCHEMAS, read_table
from unmask.data.registry import SPLITS, Source, split_of
from unmask.data.sources import collect, corpus_key, open_corpus
from unmask.data.spelling import held_texts
from unmask.training import Pair

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


@pytest.fixture
def config(tmp_path):
    folder = tmp_path / "own"
    write_as(folder / "notes.jsonl", [{"body": f"Note {i} is about the number {i}."} for i in range(100)])
    (folder / "own.yaml").write_text(REGISTRY, encoding="utf8")
    questions = [{"q": f"What is {i}?", "a": f"{i} is a number"} for i in range(100)]
    write_as(folder / "questions.jsonl", questions)
    manual = {"asked": ["open it?"], "golds": [1]}
    write_as(folder / "manuals.jsonl", [manual | {"chunks": [f"{i}", "open it"]} for i in range(40)])
    values = {"seed": 0, "dev_packages": (), "test_packages": (), "max_packages": 0, "max_text_mb": 1}
    return SimpleNamespace(source=str(folder / "own.yaml"), folder=folder, families=(), **values)


def change(config, old, new):
    """Writes the registry with something else in it."""
    (config.folder / "own.yaml").write_text(REGISTRY.replace(old, new), encoding="utf8")


def names(corpus):
    """Data sets of pairs and of documents."""
    return [corpus.datasets(role, "train") for role in ("pairs", "documents")]


def test_a_registry_becomes_a_corpus(config):
    corpus = open_corpus(config)
    assert names(corpus) == [["questions"], ["manuals"]]
    (text,) = corpus.text_sources()
    assert text.name == "notes" and os.path.isabs(text.files[0])
    sizes = [len(corpus.pairs(split)) for split in SPLITS]
    assert sum(sizes) == 100 and all(sizes) and len(corpus.triplets("train")) == 0
    document = corpus.documents("train")[0]
    assert document["chunks"][document["golds"][0]] == "open it"


def test_families_that_are_not_asked_for_are_not_there(config):
    whole = open_corpus(config)
    config.families = ("english", "contextual")
    both = open_corpus(config)
    assert names(both) == names(whole) and both.hash == whole.hash
    config.families = ("code",)
    with pytest.raises(ValueError, match=r"leaves out questions: --set data\.families=\[\]"):
        open_corpus(config)  # somebody's own
    config.families = ("english",)
    one = open_corpus(config)
    assert names(one) == [["questions"], []] and len(one.documents("train")) == 0
    assert len(one.texts("train")) == len(whole.texts("train")) and one.hash != whole.hash


def test_it_is_read_once_and_a_changed_file_alone_again(config, monkeypatch):
    first, before = open_corpus(config), corpus_key(config)
    read = Mock(wraps=sources.collect)
    monkeypatch.setattr(sources, "collect", read)
    assert open_corpus(config).hash == first.hash and not read.called
    write_as(config.folder / "questions.jsonl", [{"q": f"Why {i}?", "a": f"{i} it is"} for i in range(50)])
    assert corpus_key(config) != before
    second = open_corpus(config)
    assert [call.args[0].name for call in read.call_args_list] == ["questions"]
    assert second.hash != first.hash
    for name, unchanged in {("documents", "manuals"): True, ("pairs", "questions"): False}.items():
        assert (second.rows_hash(*name) == first.rows_hash(*name)) == unchanged
    read.reset_mock()
    change(config, "{text: body}", "{text: body}, share: 100, licence: mit, optional: true, rows: 100")
    assert open_corpus(config).hash != second.hash and not read.called
    change(config, "hold_out: 0.2", "hold_out: 0.3")
    third = open_corpus(config)
    assert read.call_count == 3
    os.utime(config.folder / "manuals.jsonl", ns=(1, 1))
    assert corpus_key(config) != third.path.name


def test_an_optional_source_joins_once_it_is_there(config):
    before = corpus_key(config)
    write_as(config.folder / "synthetic.jsonl", [{"q": f"Was ist {i}?", "a": f"{i} ist"} for i in range(9)])
    corpus = open_corpus(config)
    assert corpus_key(config) != before and corpus.datasets("pairs", "train") == ["questions", "synthetic"]
    assert corpus.pairs("train", "synthetic").unique("task") == ["questions"]


def test_no_training_reads_what_is_held_out_in_another_row_or_data_set(config):
    """A query with four documents, the other direction of a pair, a query of another data set."""
    rows = [{"q": f"What is {i // 4}?", "a": f"{i} is a number"} for i in range(400)]
    rows += [{"q": row["a"], "a": row["q"]} for row in rows[::4]]
    write_as(config.folder / "questions.jsonl", rows)
    more = [{"q": f"What is {i}?", "a": f"{i} as well"} for i in range(60)]
    write_as(config.folder / "synthetic.jsonl", more)
    corpus = open_corpus(config)
    stage = Pair(load_preset("smoke"), corpus, tiny.tokenizer(), query_length=64, document_length=64)
    tables = [table(split) for split in ("dev", "test") for table in (corpus.pairs, corpus.documents)]
    held = [text for table in tables for row in table for text in held_texts(row)]
    held = {tuple(one.tolist()) for one in tiny.tokenize(tiny.tokenizer(), held, None)}
    for name, data in stage.data.items():
        read = {tuple(one.tolist()) for texts in (data.queries, data.documents) for one in texts}
        assert read and held.isdisjoint(read)
        out = data.counters["rows that share a text with a held-out row"]
        assert 0 < out == len(corpus.pairs("train", name)) - len(data.keys)
    assert [*stage.data] == ["questions", "synthetic"]


def test_max_rows_takes_the_first_training_rows_of_pieces_that_are_drawn(config, monkeypatch):
    whole = open_corpus(config).pairs("train", "questions")["query"]
    change(config, "questions.jsonl", "questions.jsonl, max_rows: 9")  # a single piece
    corpus = open_corpus(config)
    assert list(corpus.pairs("train", "questions")["query"]) == list(whole)[:9]
    assert corpus.datasets("pairs", "test") == ["questions"]
    rows = [{"q": f"Was ist {i}?", "a": f"{i} ist"} for i in range(600)]
    path = write_as(config.folder / "questions.parquet", rows)
    monkeypatch.setattr(source_rows, "UNIT_BYTES", path.stat().st_size // 30)
    change(config, "questions.jsonl", "questions.parquet, max_rows: 90")
    found = [int(q.split()[2][:-1]) for q in open_corpus(config).pairs("train", "questions")["query"]]
    assert len(found) == len(set(found)) == 90 and max(found) > 300 and found != sorted(found)


SCRIPTED = """
script: made/make.py
defaults: {kind: files, files: rows.jsonl, language: mul, licence: own}
sources:
  docstrings: {role: text, columns: {text: text, package: text, kind: text, language: language, split: split}}
  docs:
    {role: pairs, group: english,
     columns: {query: text, document: d, key: k, language: language, package: d, split: split}}
"""
SCRIPT = """
import json, pathlib, sys

if len(sys.argv) == 1:
    print(pathlib.Path(__file__).with_name("inputs").read_text())
elif '"delta"' in sys.argv[2]:
    sys.exit(print("data.test_packages: delta is not installed") or 2)
else:
    print("made", file=open(pathlib.Path(__file__).parents[1] / "log", "a"))
    (folder := pathlib.Path(sys.argv[1])).mkdir()
    splits = enumerate(("train", "dev", "test") * 40)
    rows = [{"text": f"q {i}", "d": f"d {i}", "k": f"k {i}", "split": s, "language": "de"} for i, s in splits]
    (folder / "rows.jsonl").write_text(chr(10).join(map(json.dumps, rows)))
    card = {"settings": json.loads(sys.argv[2]), "origins": ["p 1.0"], "dropped": {"packages": {"bad": 3}}}
    (folder / "card.json").write_text(json.dumps(card))
"""


def edit(config, name, text):
    """Writes a file of the script's folder, and lets it be asked again."""
    (config.folder / "made" / name).write_text(text)
    sources._inputs.cache_clear()


@pytest.fixture
def scripted(config):
    """A registry whose files a script makes, of inputs that may change."""
    (config.folder / "made").mkdir()
    for name, text in {"make.py": SCRIPT, "inputs": "alpha 1.0", "../scripted.yaml": SCRIPTED}.items():
        edit(config, name, text)
    config.source = str(config.folder / "scripted.yaml")
    return config


def test_a_script_makes_files_once_whose_rows_bring_their_split_and_labels(scripted, monkeypatch):
    monkeypatch.setattr(sources, "SAMPLE_BYTES", 9)  # of text that is whole nowhere else
    with ThreadPoolExecutor(2) as both:  # the second one waits
        corpus, again = both.map(open_corpus, [scripted] * 2)
    assert corpus.hash == again.hash and (scripted.folder / "log").read_text() == "made\n"
    assert [len(corpus.texts(split)) for split in SPLITS] == [40, 40, 40]
    expected = {"query": "q 1", "key": "k 1", "package": "d 1", "language": "de", "dataset": "docs"}
    assert expected.items() <= corpus.pairs("dev")[0].items() and corpus.languages == ["de"]
    assert corpus.card["origins"] == ["p 1.0"] and corpus.card["dropped"]["packages"] == {"bad": 3}
    (text,) = corpus.text_sources()
    rows = [row for unit in source_rows.units(text) for row in source_rows.read(text, unit, {})]
    assert [row["text"] for row in rows] == list(corpus.texts("train")["text"])
    keys = {corpus_key(scripted)}
    for name, change in {"inputs": "alpha 2.0", "make.py": SCRIPT.replace("40", "41")}.items():
        edit(scripted, name, change)
        keys.add(corpus_key(scripted))
    assert len(keys) == 3 and len(open_corpus(scripted).texts("test")) == 41


def test_a_script_refuses_settings_or_breaks_and_leaves_nothing(scripted, tmp_path):
    scripted.test_packages = ("delta",)
    with pytest.raises(ValueError, match=r"^data\.test_packages: delta is not installed$"):
        open_corpus(scripted)
    assert not [*(tmp_path / "data" / "made").iterdir()]
    edit(scripted, "make.py", "import no_such_package")
    with pytest.raises(ValueError, match=r"made/make\.py ended with status 1"):
        corpus_key(scripted)


def test_a_machine_with_other_packages_reads_the_same_where_it_is_named(scripted, tmp_path, monkeypatch):
    corpus = open_corpus(scripted)
    (made,) = (tmp_path / "data" / "made").iterdir()
    elsewhere = shutil.copytree(made, tmp_path / "elsewhere" / made.name, copy_function=shutil.copy)
    edit(scripted, "inputs", "alpha 2.0")
    monkeypatch.setenv("UNMASK_CORPUS", str(elsewhere))
    monkeypatch.setattr(sources.store, "locked", None)  # its place may allow no lock
    assert (corpus_key(scripted), open_corpus(scripted)) == (corpus.path.name, corpus)
    scripted.test_packages = ("delta",)
    with pytest.raises(ValueError, match=r"UNMASK_CORPUS=.* is no corpus of .*'delta'"):
        open_corpus(scripted)


@pytest.mark.parametrize("absolute", [True, False])
def test_a_registry_includes_sources_of_another(scripted, absolute):
    """As the text that every run needs; its path may begin at the registry."""
    whole, scripted.source = open_corpus(scripted), str(scripted.folder / "own.yaml")
    notes = next(line for line in REGISTRY.splitlines() if line.startswith("  notes:"))
    change(scripted, notes, "")
    with pytest.raises(ValueError, match=r"own\.yaml has no source of text.*`include: .environment: "):
        open_corpus(scripted)
    other = str(scripted.folder / "scripted.yaml") if absolute else "scripted.yaml"
    include = f"include: {{{other}: [text]}}\nsources:"
    (scripted.folder / "own.yaml").write_text(REGISTRY.replace(notes, "").replace("sources:", include))
    corpus = open_corpus(scripted)
    assert corpus.texts("dev")["text"] == whole.texts("dev")["text"]
    assert corpus.datasets("pairs", "train") == ["questions"]
    assert corpus.text_sources()[0].known_as == whole.text_sources()[0].known_as
    assert {*sources.texts_of_files(scripted)} == {"questions", "manuals"}


def test_bad_rows_stop_with_their_place_or_their_reasons_and_leave_nothing(config):
    path = config.folder / "questions.jsonl"
    path.write_text(path.read_text() + '{"q": "What now?", "a": ""}\n')
    with pytest.raises(ValueError, match=r"questions\.jsonl, row 101: document is no text, or empty"):
        open_corpus(config)
    write_as(path, [{"q": text, "a": "d"} for text in (None, "", "")])
    change(config, "questions.jsonl", "questions.jsonl, bad_rows: drop")
    with pytest.raises(ValueError, match=r"questions has no usable row \(query is no text, or empty: 3\)"):
        open_corpus(config)
    (kept,) = config.folder.parent.rglob("card.json")
    assert kept.parent.name.startswith("notes-")


# --- the tables of a source

FLAT = {"title": "title", "chunk": "chunk", "query": "query"}
JOINED = {"chunk_id": "chunk_id", "chunk": "chunk", "query": "query", "query_chunk_id": "chunk_id"}


def tables(source, folder):
    """What `collect` wrote: the card, and the rows by split."""
    collect(source, folder)
    card = sources.store.read_json(folder / "card.json")
    return card, {split: read_table(folder, split) for split in SPLITS}


def test_pairs_are_stored_by_split(tmp_path):
    rows = [{"query": f"what is {i}?", "document": f"{i} is a number"} for i in range(400)]
    path = write_as(tmp_path / "a.jsonl", rows)
    source = own(path, hold_out=0.15, group="english", task="numbers")
    card, stored = tables(source, tmp_path / "out")
    assert card["dropped"] == {"mine": {}} and sum(map(len, stored.values())) == 400
    for split, table in stored.items():
        assert len(table) and all(split_of(source, row["document"]) == split for row in table)
    row = stored["train"][0]
    expected = {"dataset": "mine", "task": "numbers", "group": "english", "language": "eng_Latn"}
    assert row.keys() == {*SCHEMAS["pairs"].names} and expected.items() <= row.items()
    assert tables(source, tmp_path / "again")[0]["hash"] == card["hash"]


@pytest.mark.parametrize("role", ["pairs", "triplets", "documents"])
def test_equal_documents_have_equal_keys_unless_the_source_maps_another(tmp_path, role):
    """However a single text is spelt."""
    spelt = "1 b" if role == "documents" else "1\u00a0 b\n"
    texts = [("a", "1 b", "x"), ("b", spelt, "y"), ("c", "1 B", "x")]
    both = [{"query": q, "document": d, "thing": thing, "no": ["x"]} for q, d, thing in texts]
    rows = [row | {"title": row["query"], "chunk": row["document"]} for row in both]
    columns = {"documents": FLAT, "pairs": PAIR_COLUMNS, "triplets": PAIR_COLUMNS | {"negatives": "no"}}[role]
    source = own(write_as(tmp_path / "a.jsonl", rows), role=role, columns=columns)
    stored = tables(source, tmp_path / "one")[1]["train"]
    a, b, c = stored["key"]
    assert a == b != c and len(a) == 16
    assert role != "triplets" or stored["negatives"][:] == [["x"]] * 3
    a, b, c = tables(replace(source, columns=columns | {"key": "thing"}), tmp_path / "two")[1]["train"]["key"]
    assert a == c != b


def test_a_large_text_source_is_sampled_and_a_small_one_kept(tmp_path, monkeypatch):
    rows = [{"text": f"text {i:04d} " + "x" * 90} for i in range(1000)]
    source = own(write_as(tmp_path / "a.jsonl", rows), role="text", hold_out=0.1)
    stored = tables(source, tmp_path / "all")[1]
    assert sum(map(len, stored.values())) == 1000
    assert {*stored["test"]["kind"], *stored["test"]["language"]} == {"text", "eng_Latn"}
    monkeypatch.setattr(sources, "SAMPLE_BYTES", 20_000)
    sample, stored = tables(source, tmp_path / "sample")
    assert len(stored["train"]) == 200 and 10 < len(stored["test"]) < 40
    write_as(tmp_path / "a.jsonl", [*rows, {"text": "one more, beyond the sample"}])
    assert tables(source, tmp_path / "more")[0]["hash"] != sample["hash"]


def test_flat_rows_are_gathered_by_title(tmp_path):
    texts = (("one", "first", "q1"), ("two", "alone", "q2"), (" one", "second", "q3"), ("one", "first", "q4"))
    path = write_as(tmp_path / "a.jsonl", [dict(zip(FLAT, row, strict=True)) for row in texts])
    one, two = tables(own(path, role="documents", columns=FLAT), tmp_path / "out")[1]["train"]
    assert (one["document_id"], one["chunks"]) == ("mine/one", ["first", "second"])
    assert (one["queries"], one["golds"]) == (["q1", "q3", "q4"], [0, 1, 0])
    assert (two["chunks"], two["golds"]) == (["alone"], [0])


def test_chunks_and_queries_of_two_configurations_are_joined(tmp_path, monkeypatch):
    monkeypatch.setenv("UNMASK_MIRROR", str(tmp_path / "mirror"))
    folder = tmp_path / "mirror" / "org" / "name"
    chunks = {"a_b_1": "second", "a_b_0": "first", "a_b_2": "first", "c_0": "other", "d_0": "unasked"}
    asked = {"q1": "a_b_1", "q2": "a_b_2", "q3": "c_0", "q4": "c_7", "q5": "e_0"}
    write_as(folder / "chunks.jsonl", [{"chunk_id": name, "chunk": text} for name, text in chunks.items()])
    write_as(folder / "queries.jsonl", [{"query": query, "chunk_id": name} for query, name in asked.items()])
    tiny.write_card(folder, {"documents": "chunks.jsonl", "queries": "queries.jsonl"})
    values = {"repo": "org/name", "config": "documents", "queries_config": "queries", "columns": JOINED}
    source = Source("mine", "mirror", "documents", "eng", "", **values)
    card, stored = tables(source, tmp_path / "out")
    first, second = stored["train"]
    assert first["document_id"] == "mine/a_b" and first["package"] == "org/name"
    assert (first["chunks"], first["queries"], first["golds"]) == (["first", "second"], ["q1", "q2"], [1, 0])
    assert (second["chunks"], second["queries"], second["golds"]) == (["other"], ["q3"], [0])
    assert card["dropped"]["mine"] == {"query of a missing chunk": 2, "document without a query": 1}
