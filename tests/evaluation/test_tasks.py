from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset

import tiny
from unmask import Embedder
from unmask.config import FAMILIES, load_preset
from unmask.evaluation import retrieval_metrics
from unmask.evaluation.tasks import (
    Task,
    Vectors,
    assess,
    build_tasks,
    embed_task,
    evaluate,
    family_means,
    rerank_task,
    score_task,
)
from unmask.models import backbone
from unmask.models.embedder import INSTRUCTIONS
from unmask.models.reranker import Reranker, answers

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


def test_a_split_without_tasks_says_what_to_do():
    with pytest.raises(ValueError, match=r"the test split gives no task.* set hold_out in the registry"):
        build_tasks(SimpleNamespace(datasets=lambda *_: [], pairs=None, documents=None), "test", CONFIG)


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


# --- reranking

CHUNKS = [f"Number {i}, {'and more ' * (i % 5)}that is all." for i in range(30)]
NUMBERS = Task(
    "numbers", "english", [f"Which is number {i}?" for i in range(8)], [[text] for text in CHUNKS],
    [{i, 29 - i} for i in range(8)],
)  # fmt: skip
SCORES_NM = torch.from_numpy(np.random.default_rng(0).integers(0, 6, (8, 30)) / 6)  # with ties


def reranker():
    model = tiny.model(bidirectional=False, head=True)
    model.config.max_position_embeddings = 1024
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.mul_(5 if parameter.ndim == 2 else 1)
    return Reranker(model, tiny.tokenizer())


def trec_order(scores_M, ids, columns):
    """trec_eval's: by score, then by id as a string, both descending."""
    return sorted(columns, key=lambda column: (np.float32(scores_M[column]), ids[column]), reverse=True)


@pytest.mark.parametrize("candidates", [10, 100])
@pytest.mark.parametrize("ids", [None, [f"{(7 * i) % 30:02}" for i in range(30)]])
def test_the_best_are_reordered_by_the_reranker_and_the_others_stay(candidates, ids):
    one, task = reranker(), replace(NUMBERS, chunk_ids=ids)
    before_N, after_N = rerank_task(
        one, task, SCORES_NM, candidates=candidates, max_queries=5, query_length=4, document_length=6
    )
    names = ids or [str(i) for i in range(30)]
    for query in range(5):
        order = trec_order(SCORES_NM[query], names, range(30))
        best, rest = order[:candidates], order[candidates:]
        odds = one.log_odds(
            task.queries[query], [CHUNKS[i] for i in best],
            instruction=INSTRUCTIONS["english"], query_length=4, document_length=6,
        )  # fmt: skip
        reordered = trec_order(dict(zip(best, odds)), names, best)
        for ranking, found in ((best + rest, before_N), (reordered + rest, after_N)):
            place_1M = -np.argsort(ranking)[None].astype(float)
            expected = retrieval_metrics(place_1M, [task.relevant[query]])["ndcg@10"]
            assert found[query] == pytest.approx(expected)
    assert len(before_N) == len(after_N) == 5
    assert (before_N != after_N).any()


def test_equal_answers_are_ordered_as_trec_eval_orders_them():
    one = reranker()
    with torch.no_grad():
        one.model.get_input_embeddings().weight[list(answers(one.tokenizer.backend_tokenizer))] = 0
    _, after_N = rerank_task(one, NUMBERS, SCORES_NM, candidates=30, max_queries=8)
    expected = retrieval_metrics(np.zeros((8, 30)), NUMBERS.relevant, per_query=True)["ndcg@10"]
    np.testing.assert_array_equal(after_N, expected)
