"""Corpora from registries: composed of their sources' tables, kept, read again where a file changed."""

import json
import os
from types import SimpleNamespace

import pytest
from test_environment import make_config, make_packages

from unmask.data import sources
from unmask.data.sources import identity, open_corpus

REGISTRY = """
about: a few rows of one's own
sources:
  notes:
    kind: files
    role: text
    language: eng
    licence: own
    files: notes.jsonl
    columns: {text: body}
    hold_out: 0.2
  questions:
    kind: files
    role: pairs
    group: english
    language: eng
    licence: own
    files: questions.jsonl
    columns: {query: q, document: a}
    hold_out: 0.2
  manuals:
    kind: files
    role: documents
    language: eng
    licence: own
    files: manuals.jsonl
    columns: {chunks: chunks, queries: asked, golds: golds}
    hold_out: 0.2
  synthetic:
    kind: files
    role: pairs
    group: english
    task: questions
    language: deu
    licence: own
    files: synthetic.jsonl
    columns: {query: q, document: a}
    optional: true
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
    manuals = [
        {"chunks": [f"manual {i}", "open it", "close it"], "asked": [f"open {i}?"], "golds": [1]}
        for i in range(40)
    ]
    write(folder / "manuals.jsonl", manuals)
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
    assert corpus.card["absent"] == ["synthetic"]
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
    with pytest.raises(ValueError, match="no pairs 'questions'"):
        one.pairs("train", "questions")


def test_it_is_read_once_and_a_changed_file_alone_again(config, monkeypatch):
    first = open_corpus(config)
    read = []
    collect = sources.tables.collect

    def noted(source, *args, **options):
        read.append(source.name)
        return collect(source, *args, **options)

    monkeypatch.setattr(sources.tables, "collect", noted)
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


def test_max_rows_keeps_the_first_training_rows(config):
    whole = open_corpus(config).pairs("train", "questions")["query"]
    path = config.folder / "own.yaml"
    path.write_text(
        REGISTRY.replace("    files: questions.jsonl\n", "    files: questions.jsonl\n    max_rows: 9\n")
    )
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
    with pytest.raises(ValueError, match=r"questions\.jsonl, line 101: document is empty"):
        open_corpus(config)
    assert not list((config.folder.parent / "artifacts" / "data").glob("*/card.json"))
