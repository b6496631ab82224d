from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset

import tiny
from unmask import Embedder
from unmask.config import FAMILIES, load_preset
from unmask.evaluation.tasks import (
    Task,
    Vectors,
    assess,
    build_tasks,
    embed_task,
    evaluate,
    family_means,
    score_task,
)
from unmask.models import backbone

CONFIG = replace(load_preset("smoke").evaluation, max_queries=50, max_documents=50)
PLAIN = {"docs": "english", "code": "code", "cross": "cross-lingual", "multi": "multilingual"}
CONTEXTUAL = ["modules", "statistics"]


def pair(name, query, document, key):
    row = {"dataset": name, "query": query, "document": document, "key": key}
    return row | {"group": PLAIN[name], "task": name}


def pair_rows(name):
    rows = [pair(name, f"{name} query {i}", f"{name} answer {i}", f"k{i}") for i in range(12)]
    return [
        *rows,
        pair(name, "again", f"{name} answer 3", "k3"),  # another query for a document that is there already
        pair(name, "synonym", f"{name} other words for 5", "k5"),  # another document that is the same thing
        pair(name, "copied", f"{name} answer 7", "copy"),  # the same text under another key
    ]


def document_rows(name):
    return [
        {
            "dataset": name,
            "task": name,
            "document_id": f"{name}-{d}",
            "chunks": [f"{name} {d} chunk {c}" for c in range(2 + d % 3)],
            "queries": [f"{name} {d} query {q}" for q in range(2)],
            "golds": [1, 0],
        }
        for d in range(8)
    ]


def corpus(order=1):
    rows = {
        "pairs": {name: pair_rows(name)[::order] for name in PLAIN},
        "documents": {name: document_rows(name)[::order] for name in CONTEXTUAL},
    }
    return SimpleNamespace(
        datasets=lambda kind, split: list(rows[kind])[::order],
        pairs=lambda split, name: Dataset.from_list(rows["pairs"][name]),
        documents=lambda split, name: Dataset.from_list(rows["documents"][name]),
    )


@pytest.fixture(scope="module")
def tasks():
    return build_tasks(corpus(), "test", CONFIG)


def test_there_is_a_task_for_each_data_set_in_order(tasks):
    assert {task.name: task.family for task in tasks if not task.contextual} == PLAIN
    assert [task.family for task in tasks] == sorted((t.family for t in tasks), key=FAMILIES.index)
    assert tasks == build_tasks(corpus(order=-1), "test", CONFIG)
    assert {task.name for task in tasks if task.contextual} == set(CONTEXTUAL)


def test_a_task_joins_the_data_sets_that_name_it():
    rows = {name: [row | {"task": "both", "group": "english"} for row in pair_rows(name)] for name in PLAIN}
    joined = SimpleNamespace(
        datasets=lambda kind, split: list(rows) if kind == "pairs" else [],
        pairs=lambda split, name: Dataset.from_list(rows[name]),
    )
    (task,) = build_tasks(joined, "test", replace(CONFIG, max_queries=500, max_documents=500))
    assert (task.name, task.family, len(task.queries)) == ("both", "english", 15 * len(PLAIN))
    with pytest.raises(ValueError, match="holds nothing out for 'test'"):
        build_tasks(SimpleNamespace(datasets=lambda kind, split: []), "test", CONFIG)


def test_scores_of_a_checkpoint_are_computed_once(tmp_path, monkeypatch, tasks):
    monkeypatch.setenv("UNMASK_ARTIFACTS", str(tmp_path / "artifacts"))
    path = backbone.save(tiny.model(), tiny.tokenizer(), tmp_path / "m", fingerprint="one")
    embedder = Embedder.from_pretrained(path, mixed_precision=backbone.computes_in_bf16(CONFIG.precision))
    encoded = []
    encode = Embedder.encode
    monkeypatch.setattr(Embedder, "encode", lambda *args, **kw: encoded.append(1) or encode(*args, **kw))
    alone, late = (assess(path, tasks, CONFIG, late_chunking=late) for late in (False, True))
    done = len(encoded)
    for found, option in ((alone, False), (late, True)):
        again = assess(path, tasks, CONFIG, late_chunking=option)
        assert len(encoded) == done
        expected = evaluate(embedder, tasks, CONFIG, late_chunking=option)
        done = len(encoded)
        for name in expected:
            np.testing.assert_array_equal(found[name], expected[name])
            np.testing.assert_array_equal(found[name], again[name])
    assess(path, tasks, replace(CONFIG, query_length=3))
    assert len(encoded) > done  # other lengths are other scores


def test_each_text_is_one_document_and_all_rows_of_a_key_are_relevant(tasks):
    for task in tasks:
        if task.contextual:
            continue
        assert len(task.queries) == len(task.relevant) == 15
        assert len(set(task.chunks)) == len(task.chunks) == 13
        texts = {q: {task.chunks[i] for i in r} for q, r in zip(task.queries, task.relevant, strict=True)}
        assert texts[f"{task.name} query 1"] == {f"{task.name} answer 1"}
        assert texts["again"] == texts[f"{task.name} query 3"] == {f"{task.name} answer 3"}
        both = {f"{task.name} answer 5", f"{task.name} other words for 5"}
        assert texts["synonym"] == texts[f"{task.name} query 5"] == both
        assert texts["copied"] == {f"{task.name} answer 7"}


def test_golds_are_counted_over_all_documents(tasks):
    for task in tasks:
        if not task.contextual:
            continue
        assert len(task.queries) == 16
        for query, relevant in zip(task.queries, task.relevant, strict=True):
            name, number, _, which = query.split()
            assert [task.chunks[i] for i in relevant] == [f"{name} {number} chunk {1 - int(which)}"]


def test_limits_hold_and_every_query_keeps_its_answer():
    small = build_tasks(corpus(), "test", replace(CONFIG, max_queries=3, max_documents=9))
    for task, whole in zip(small, build_tasks(corpus(), "test", CONFIG), strict=True):
        assert len(task.queries) == 3
        assert len(task.chunks) <= 9
        if not task.contextual:
            assert task.queries == whole.queries[:3]  # a smaller task is a part of the larger one
        for relevant in task.relevant:
            assert relevant
            assert max(relevant) < len(task.chunks)


@pytest.mark.parametrize("precision", ["float32", "int8", "binary", "ubinary"])
def test_an_oracle_is_perfect(tasks, precision):
    for task in tasks:
        size = -(-len(task.chunks) // 8) * 8
        # ±1, so that every precision tells them apart: a chunk is itself, a query is all its answers.
        chunks = np.where(np.eye(len(task.chunks), size) > 0, 1.0, -1.0).astype(np.float32)
        queries = np.stack([chunks[sorted(r)].max(0) for r in task.relevant])
        np.testing.assert_allclose(score_task(task, Vectors(queries, chunks), precision), 1.0)


def test_fewer_dimensions_are_scored_on_the_prefix():
    task = Task("t", "english", ["q"], [["a"], ["b"]], [{1}])
    vectors = Vectors(
        np.array([[1.0, 0.0, 9.0]], np.float32), np.array([[1.0, 0.0, -9.0], [0.9, 0.1, 9.0]], np.float32)
    )
    assert score_task(task, vectors)[0] == 1
    assert score_task(task, vectors, dimensions=2)[0] == pytest.approx(1 / np.log2(3))


class Recorder:
    """Remembers how it was asked; every text gets its own direction."""

    def __init__(self):
        self.calls = []

    def encode(self, texts, precision="int8", dimensions=None, *, max_length=None):
        self.calls.append(("encode", precision, max_length))
        rng = np.random.default_rng(len(texts))
        return rng.standard_normal((len(texts), 8)).astype(np.float32)

    def encode_documents(self, documents, precision="int8", dimensions=None, *, chunk_length=None):
        self.calls.append(("encode_documents", precision, chunk_length))
        return [np.full((len(chunks), 8), d, np.float32) for d, chunks in enumerate(documents)]


def test_only_contextual_tasks_are_chunked_late_and_each_has_its_lengths(tasks):
    config = replace(CONFIG, query_length=11, document_length=12, chunk_length=13)
    plain, contextual = tasks[0], next(task for task in tasks if task.contextual)
    for task, late, expected in (
        (plain, True, ("encode", "float32", 12)),
        (contextual, False, ("encode", "float32", 13)),
        (contextual, True, ("encode_documents", "float32", 13)),
    ):
        recorder = Recorder()
        vectors = embed_task(recorder, task, config, late_chunking=late)
        assert recorder.calls == [("encode", "float32", 11), expected]
        assert vectors.queries_ND.shape == (len(task.queries), 8)
        assert vectors.chunks_MD.shape == (len(task.chunks), 8)
    owner = [d for d, chunks in enumerate(contextual.documents) for _ in chunks]
    assert vectors.chunks_MD[:, 0].tolist() == owner


def test_means_weigh_tasks_not_queries():
    tasks = [Task(name, family, [], [], []) for name, family in (("a", "x"), ("b", "x"), ("c", "y"))]
    scores = {"a": np.array([1.0, 0.0, 0.0, 0.0]), "b": np.array([0.75]), "c": np.array([0.2, 0.4])}
    means = family_means(scores, tasks)
    assert means == pytest.approx({"x": 0.5, "y": 0.3, "average": (0.25 + 0.75 + 0.3) / 3})
    assert list(means) == ["x", "y", "average"]
