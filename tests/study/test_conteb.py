"""ConTEB: its layout on the Hub, tasks from own documents, variations of a task."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset

import tiny
from by_hand import cells
from chat_servers import chat_server
from closeness import assert_close
from fake_hub import fake_hub
from unmask.data.mining import unit
from unmask.evaluation.tasks import Task, evaluate_bm25, ndcg
from unmask.models.embedder import Embedder
from unmask_study import conteb
from unmask_study.conteb import articles, as_task, load, squad, token_scores, xquad
from unmask_study.report import PAPER
from unmask_study.settings import CONTEB, ContextsConfig, load_preset
from unmask_study.synthesis import replies

MIRROR = os.environ.get("UNMASK_MIRROR", "")  # before a fixture takes it away
CHUNKS = [("b_1", "second of b"), ("b_0", "first of b"), ("a_10", "last of a"), ("a_2", "middle of a")]
DOCUMENTS = [{"chunk_id": name, "chunk": text} for name, text in CHUNKS]
SQUAD = "plain_text/validation-00000-of-00001.parquet"
QUERIES = [{"query": "what ends a?", "chunk_id": "a_10"}, {"query": "what is b?", "chunk_id": "b_0"}]


@pytest.fixture(autouse=True)
def mirror(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("UNMASK_MIRROR", str(tmp_path))


def test_a_repository_of_the_mirror_is_a_task(tmp_path):
    folder = tmp_path / "illuin-conteb" / "insurance"
    extra = [row | {"og_chunk": "…"} for row in DOCUMENTS]  # as football has it
    for config, rows in (("documents", extra), ("queries", QUERIES)):
        Dataset.from_list(rows).to_parquet(folder / config / "train-00000-of-00001.parquet")
    tiny.write_card(folder, {name: f"{name}/train-*" for name in ("documents", "queries")})
    task = load("insurance")
    # Documents by name, chunks by number rather than by letters, each with its own id.
    assert task.documents == [["middle of a", "last of a"], ["first of b", "second of b"]]
    assert task.chunk_ids == ["a_2", "a_10", "b_0", "b_1"]
    assert (task.queries, task.relevant) == (["what ends a?", "what is b?"], [{1}, {2}])
    assert task.contextual and task.name == "insurance"


def test_a_language_model_writes_each_chunks_context_from_its_whole_document(tmp_path):
    task = as_task("toy", DOCUMENTS, QUERIES)

    def write(prompt):
        """The first line of the document, as the chunk's context; none of one chunk."""
        assert prompt.index("<document>") < prompt.index("<chunk>")
        return "" if "<chunk>\nsecond of b\n" in prompt else "Of “{}”:".format(prompt.split("\n")[1])

    with chat_server(write=write) as server:
        config = ContextsConfig(endpoint=server.url, model="test", retries=0, timeout=600.0)
        found = conteb.situated(task, replies(config, tmp_path / "journal", conteb.situating(task)))
    a = ["Of “middle of a”: middle of a", "Of “middle of a”: last of a"]
    assert found.documents == [a, ["Of “first of b”: first of b", "second of b"]]  # no reply, no context
    assert (found.relevant, found.chunk_ids, found.queries) == (task.relevant, task.chunk_ids, task.queries)
    assert all(body["temperature"] == 0 and body["max_tokens"] == 128 for body in server.bodies)
    whole = ["\n\n".join(chunks) for chunks in task.documents for _ in chunks]
    assert sorted(whole) == sorted(prompt.split("\n</document>")[0][11:] for prompt in server.prompts)


@pytest.mark.parametrize("kind", ["pairs", "documents"])
@pytest.mark.parametrize(("name", "trained"), [("xquad/eng", True), ("squad-like", False)])
def test_who_trains_on_xquad_is_not_asked_squad(kind, name, trained):
    corpus = SimpleNamespace(datasets=lambda role, split: [name] if role == kind else [])
    assert bool(conteb.trained_on(corpus)) == trained


def test_squad_is_cut_into_pieces_and_the_one_where_the_answer_begins_is_right(tmp_path):
    assert squad() is None and squad(ask_hub=True) is None  # the mirror lacks it, and stands for the Hub
    texts = ["aaa bbb  ccc dddddddddd e", "ff gg", "h"]
    asked = [(0, "c?", texts[0].index("ccc")), (0, "a?", 0), (1, "g?", 3), (2, "h?", 0), (0, "e?", 24)]
    rows = [
        {"context": texts[n], "question": query, "answers": {"text": ["…"] * 2, "answer_start": [start, 0]}}
        for n, query, start in asked
    ]
    Dataset.from_list(rows).to_parquet(tmp_path / "rajpurkar" / "squad" / SQUAD)
    task = squad(characters=8)
    assert task.documents == [["aaa bbb", "ccc", "dddddddddd", "e"], ["ff gg"], ["h"]]
    assert (task.queries, task.relevant) == (["c?", "g?", "h?"], [{1}, {4}, {5}])  # a question a paragraph
    assert task.contextual and task.name == "SQuAD"
    assert squad(paragraphs=2, characters=3).documents[1] == ["ff", "gg"]


def test_squad_is_read_from_the_hub_without_a_mirror_where_that_is_wanted(tmp_path, monkeypatch):
    monkeypatch.setenv("UNMASK_MIRROR", "")
    row = {"context": "a b", "question": "b?", "answers": {"text": ["b"], "answer_start": [2]}}
    Dataset.from_list([row]).to_parquet(tmp_path / SQUAD)
    tiny.write_card(tmp_path, {"plain_text": [{"split": "validation", "path": SQUAD}]})
    with fake_hub() as hub:
        files = {name: (tmp_path / name).read_bytes() for name in ("README.md", SQUAD)}
        hub.add("dataset", "rajpurkar/squad", files)
        assert squad() is None and squad(ask_hub=True, characters=1).documents == [["a", "b"]]


@pytest.mark.skipif(not Path(MIRROR, "rajpurkar/squad").is_dir(), reason="UNMASK_MIRROR holds no SQuAD")
def test_squad_is_as_large_and_as_hard_as_contebs(monkeypatch):
    monkeypatch.setenv("UNMASK_MIRROR", MIRROR)
    task = squad()
    assert (len(task.queries), len(task.documents), len(task.chunks)) == (2067, 2067, 17384)  # 17.6k there
    assert evaluate_bm25([task])["SQuAD"].mean() == pytest.approx(0.617, abs=1e-3)  # 56.2 in ConTEB, table 2


def test_articles_are_read_from_the_mirror_and_nowhere_else(tmp_path, monkeypatch):
    assert articles() is None
    asked = [(t, p, q) for t, count in (("Z", 2), ("A", 3), ("M", 1)) for p in range(count) for q in range(2)]
    rows = [{"title": t, "context": f"{t} part {p}", "question": f"{t} part {p}? {q}"} for t, p, q in asked]
    Dataset.from_list(rows).to_parquet(tmp_path / "rajpurkar" / "squad" / SQUAD)
    task = articles()
    assert task.name == "Wikipedia" and len(task.queries) == 12
    parts = [["Z part 0", "Z part 1"], ["A part 0", "A part 1", "A part 2"], ["M part 0"]]
    assert task.documents == parts  # in the data's order
    for query, relevant in zip(task.queries, task.relevant, strict=True):
        assert [task.chunks[i] for i in relevant] == [query.partition("?")[0]]
    monkeypatch.setattr(conteb, "QUESTIONS", 3)
    fewer = articles(paragraphs=5)
    assert fewer.documents == task.documents[:2]
    assert fewer.queries == [query for query in task.queries if not query.startswith("M")][:3]
    assert xquad("de") is None
    untitled = [{"context": "c", "question": "q"}]  # as the Hub has it
    for language, some in {"de": rows[:2], "fr": untitled}.items():
        folder = tmp_path / "google" / "xquad" / f"xquad.{language}"
        Dataset.from_list(some).to_parquet(folder / "validation-0.parquet")
    german = xquad("de")
    assert (german.name, german.chunks, len(german.queries)) == ("XQuAD de", ["Z part 0"], 2)
    assert xquad("fr") is None


def test_its_tasks_stand_in_the_order_of_the_papers_columns():
    columns = dict(zip(CONTEB, PAPER[3]["columns"][2:], strict=True))
    assert all(name.startswith(columns[name].lower()) for name in ("covid-qa", "esg-reports", "insurance"))
    assert [columns[name] for name in ("football", "geography", "mldr-conteb-eval")] == ["FB", "Geo", "MLDR"]


def test_what_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"no task 'geografy'; did you mean 'geography'"):
        load("geografy")
    with pytest.raises(ValueError, match=r"/illuin-conteb/geography cannot be read .*mirror pull"):
        load("geography")
    with pytest.raises(ValueError, match=r"task bad, queries, row 1: no chunks \['a_2', 'c_7'\]"):
        as_task("bad", DOCUMENTS, [QUERIES[0], {"query": "?", "chunk_ids": ["a_2", "c_7"]}])
    several = as_task("several", DOCUMENTS, [{"query": "what is where?", "chunk_ids": ["a_2", "b_1"]}])
    assert several.relevant == [{0, 3}]


# --- late interaction


@pytest.mark.parametrize("tile", [1, 10**6])
def test_token_scores_are_their_formula_however_they_are_tiled(monkeypatch, tile):
    monkeypatch.setattr(conteb, "TILE_ELEMENTS", tile)
    rng = np.random.default_rng(0)
    q, d = ([rng.normal(size=(n, 6)).astype(np.float32) for n in rng.integers(1, 8, k)] for k in (9, 23))
    # A short document whose tokens all point away, beside long ones: its padding would have cosine 0.
    d.append(-q[0][:1])
    units = [[unit(x_LD).astype(float) for x_LD in texts] for texts in (q, d)]
    expected = [[(q_LD @ d_LD.T).max(axis=1).sum() for d_LD in units[1]] for q_LD in units[0]]
    assert_close(token_scores(q, d), expected)


def test_notebook_09a_reads_public_chunks_as_far_by_token_as_by_chunk():
    """Its cell, run on a task whose chunks are longer than the preset's own."""
    (cell,) = (cell for cell in cells("09a_public") if "conteb.late_interaction(" in cell)
    loop = cell[cell.index("    for name, path in by_token") :]
    rng, words = np.random.default_rng(0), " ".join(tiny.TEXTS).split()
    documents = [[" ".join(rng.choice(words, 100))] for _ in range(40)]
    queries = [text[-40:] for (text,) in documents]
    task = Task("public", "contextual", queries, documents, [{i} for i in range(40)])
    config, reader = load_preset("smoke"), Embedder(tiny.model(), tiny.tokenizer())
    scores, longer = {}, replace(config.evaluation, chunk_length=config.conteb.chunk_length)
    names = {"config": config.evaluation, "load": lambda *_: reader, "conteb": conteb, "public": [task]}
    names |= {"settings": replace(config.conteb, late_documents=40), "longer": longer, "scores": scores}
    exec("if True:\n" + loop.replace("one.close()", "pass"), names | {"by_token": {"alone": "path"}})
    queries = reader.encode_tokens(task.queries, max_length=longer.query_length)
    both = (one.chunk_length for one in (longer, config.evaluation))
    read = (reader.encode_tokens(task.chunks, max_length=length) for length in both)
    whole, cut = (ndcg(task, token_scores(queries, chunks)) for chunks in read)
    found = scores["alone, token vectors"]["public"]
    assert (found == whole).all() and (found != cut).any()


# --- variations of a task


def test_a_document_is_cut_and_joined_by_length_and_every_part_of_the_right_chunk_is_right():
    documents = [["head", "one two three four five", "six seven"], ["title", "a b"]]
    task = conteb.resized(Task("toy", "contextual", ["q0", "q1"], documents, [{1}, {3, 4}]), 3)
    assert task.documents == [["head", "one two three", "four five", "six seven"], ["title a b"]]
    assert task.relevant == [{1, 2}, {4}]


def test_texts_that_look_alike_become_a_document():
    task = Task("toy", "english", ["q"], [[name] for name in "abcd"], [{1}])
    task = conteb.joined(task, np.array([[1.0, 0], [0, 1], [1, 0.1], [0.1, 1]]), 8)
    assert task.chunks == ["a", "c", "d", "b"] and task.relevant == [{3}] and len(task.documents) == 1
