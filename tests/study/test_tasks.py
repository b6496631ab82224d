"""Tasks from a corpus, and what models score on them: ours, with a reranker behind them, the reference."""

from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset

import tiny
from closeness import assert_close
from unmask import Embedder
from unmask.data.mining import unit
from unmask.evaluation import retrieval_metrics
from unmask.evaluation.tasks import Task, Vectors, embed_task, evaluate, ndcg, score_task
from unmask.models import backbone
from unmask.models.embedder import INSTRUCTIONS
from unmask.models.reranker import Reranker
from unmask_study import tasks
from unmask_study.report import markdown_table
from unmask_study.settings import load_preset
from unmask_study.tasks import REFERENCE, assess, build_tasks

CONFIG = replace(load_preset("smoke").evaluation, max_queries=50, max_documents=50)
PLAIN = {"docs": "english", "code": "code", "cross": "cross-lingual", "multi": "multilingual"}
CONTEXTUAL = ["modules", "statistics"]


def pair_rows(name):
    def pair(query, document, key):
        row = {"dataset": name, "task": name, "group": PLAIN[name]}
        return row | {"query": query, "document": document, "key": key}

    return [
        *(pair(f"{name} query {i}", f"{name} answer {i}", f"k{i}") for i in range(12)),
        pair("again", f"{name} answer 3", "k3"),  # another query for a document that is there already
        pair("again", f"{name} another answer", "k"),  # a query that two rows answer
        pair("synonym", f"{name} other words for 5", "k5"),  # another document that is the same thing
        pair("copied", f"{name} answer 7", "copy"),  # the same text under another key
    ]


def document_row(name, d):
    chunks = [f"{name} {d} chunk {c}" for c in range(2 + d % 3)]
    queries = [f"{name} {d} query {q}" for q in range(2)]
    return {"task": name, "document_id": f"{name}-{d}", "chunks": chunks, "queries": queries, "golds": [1, 0]}


def holding(pairs, documents):
    """A corpus with these rows in every split."""
    return SimpleNamespace(pairs=lambda split: pairs, documents=lambda split: documents)


def corpus(order=1):
    pairs = [row for name in PLAIN for row in pair_rows(name)][::order]
    documents = [document_row(name, d) for name in CONTEXTUAL for d in range(8)][::order]
    return holding(*map(Dataset.from_list, (pairs, documents)))


@pytest.fixture(scope="module")
def built():
    return build_tasks(corpus(), "test", CONFIG)


def test_there_is_a_task_for_each_data_set_in_order(built):
    assert {task.name: task.family for task in built} == PLAIN | dict.fromkeys(CONTEXTUAL, "contextual")
    assert built == build_tasks(corpus(order=-1), "test", CONFIG)
    with pytest.raises(ValueError, match=r"the test split gives no task.* set hold_out .* 60 at 0\.15"):
        build_tasks(holding([], []), "test", CONFIG)
    twice = holding(pair_rows("docs"), [document_row("docs", 0)])
    with pytest.raises(ValueError, match="two families have held-out tasks of one name"):
        build_tasks(twice, "test", CONFIG)


def test_scores_of_a_checkpoint_are_computed_once(tmp_path, monkeypatch, built):
    path = backbone.save(tiny.model(), tiny.tokenizer(), tmp_path / "m", fingerprint="one")
    embedder = Embedder.from_pretrained(path, mixed_precision=backbone.computes_in_bf16(CONFIG.precision))
    found = {late: assess(path, built, CONFIG, late_chunking=late) for late in (False, True)}
    for late, scores in found.items():
        expected = evaluate(embedder, built, CONFIG, late_chunking=late)
        assert all((scores[name] == expected[name]).all() for name in expected)
    monkeypatch.setattr(Embedder, "encode", lambda *_, **__: pytest.fail("encoded again"))
    again = assess(path, built, CONFIG, late_chunking=True)
    assert all((again[name] == found[True][name]).all() for name in again)
    trained_anew = backbone.save(tiny.model(seed=1), tiny.tokenizer(), tmp_path / "o", fingerprint="one")
    for other, config in ((path, replace(CONFIG, query_length=3)), (trained_anew, CONFIG)):
        with pytest.raises(pytest.fail.Exception):
            assess(other, built, config)
    monkeypatch.setattr(tasks, "code_hash", lambda: "another")
    with pytest.raises(pytest.fail.Exception):
        assess(path, built, CONFIG)


def answers(task):
    """Of each query."""
    return {q: {task.chunks[i] for i in r} for q, r in zip(task.queries, task.relevant, strict=True)}


def test_each_text_is_one_document_and_all_rows_of_a_key_are_relevant(built):
    for task in built[: len(PLAIN)]:
        assert len(task.queries) == 15 and len(set(task.chunks)) == len(task.chunks) == 14
        expected = {f"{task.name} query {i}": {f"{task.name} answer {i}"} for i in range(12)}
        expected["again"] = {f"{task.name} answer 3", f"{task.name} another answer"}
        expected["copied"] = {f"{task.name} answer 7"}
        expected["synonym"] = {f"{task.name} answer 5", f"{task.name} other words for 5"}
        expected[f"{task.name} query 5"] = expected["synonym"]
        assert answers(task) == expected


def test_a_query_is_not_asked_of_its_own_text():
    """Both directions of a pair, and a chunk that is a query; unless it is the answer."""
    both = [("a", "b"), ("b", "a "), ("c", "d"), ("e", "e")]
    rows = [dict(zip(("query", "document"), pair)) | {"key": pair[1].strip()} for pair in both]
    pairs = [row | {"group": "english", "task": "both"} for row in rows]
    row = {"task": "chunks", "document_id": "1", "chunks": ["x", "y", "z"], "queries": ["x"], "golds": [1]}
    plain, contextual = build_tasks(holding(pairs, [row]), "test", CONFIG)
    found = {plain.queries[i]: plain.chunks[j].strip() for i, j in zip(*plain.identical)}
    assert found == {"a": "a", "b": "b"} and contextual.identical == ([0], [0])
    own_NM = np.array([[text.strip() == query for text in plain.chunks] for query in plain.queries])
    scores_NM = own_NM + 0.5 * np.array([[j in r for j in range(4)] for r in plain.relevant])
    assert ndcg(plain, scores_NM).tolist() == [1, 1, 1, 1]
    assert ndcg(replace(plain, ignore_identical=False), scores_NM).mean() < 1
    assert plain.content_hash != replace(plain, ignore_identical=False).content_hash


def test_golds_are_counted_over_all_documents(built):
    for task in built[len(PLAIN) :]:
        numbered = [(f"{task.name} {number}", query) for number in range(8) for query in range(2)]
        assert answers(task) == {f"{d} query {q}": {f"{d} chunk {1 - q}"} for d, q in numbered}


def test_a_query_of_several_rows_has_all_their_golds_however_it_is_spelt():
    """Copies of a chunk are as right as it is. One large document is left out."""
    again = {"query": "again\u00a0", "document": "docs  answer 3", "key": "k3"}
    pairs = [*pair_rows("docs"), pair_rows("docs")[0] | again]
    rows = [document_row("d", n) for n in range(8)]
    rows[0] |= {"queries": ["who?", " who?"], "golds": [0, 1]}
    rows[1] |= {"chunks": ["head", "the same", "the  same"], "queries": ["q"], "golds": [2]}
    rows[5] |= {"chunks": rows[5]["chunks"] * 30}
    plain, contextual = build_tasks(holding(pairs, rows), "test", CONFIG)
    assert (len(plain.queries), len(plain.chunks)) == (15, 14)
    assert (len(contextual.queries), len(contextual.documents)) == (12, 7)
    both = [relevant for task in (plain, contextual) for relevant in task.relevant if len(relevant) == 2]
    assert len(both) == 5  # of "again", of the two that have a synonym, of "q" and "who?"
    right = answers(contextual)
    assert right["q"] == {"the same", "the  same"}
    assert {"d 0 chunk 0", "d 0 chunk 1"} in (right.get("who?"), right.get(" who?"))


def test_limits_hold_and_every_query_keeps_its_answer(built):
    small = build_tasks(corpus(), "test", replace(CONFIG, max_queries=3, max_documents=9))
    for task, whole in zip(small, built, strict=True):
        assert len(task.queries) == 3 and len(task.chunks) <= 9
        assert task.contextual or task.queries == whole.queries[:3]  # a part of the larger one
        assert all(relevant and max(relevant) < len(task.chunks) for relevant in task.relevant)
    with pytest.raises(ValueError, match=r"of at most 1 chunks: raise evaluation\.dev_documents"):
        build_tasks(corpus(), "dev", replace(CONFIG, dev_documents=1))


def test_fewer_dimensions_are_scored_on_the_prefix():
    task = Task("t", "english", ["q"], [["a"], ["b"]], [{1}])
    chunks_MD = np.array([[1.0, 0.0, -9.0], [0.9, 0.1, 9.0]], np.float32)
    vectors = Vectors(np.array([[1.0, 0.0, 9.0]], np.float32), chunks_MD)
    for precision in ("float32", "int8"):
        assert score_task(task, vectors, precision)[0] == 1
        assert score_task(task, vectors, precision, 2)[0] == pytest.approx(1 / np.log2(3))


def test_only_contextual_tasks_are_chunked_late_and_each_has_its_lengths(built):
    embedder = Embedder(tiny.model(), tiny.tokenizer())
    config = replace(CONFIG, query_length=3, document_length=4, chunk_length=5)
    plain, contextual = built[0], built[-1]
    plain_MD = embedder.encode(plain.chunks, "float32", max_length=4)
    alone_MD = embedder.encode(contextual.chunks, "float32", max_length=5)
    late_MD = np.concatenate(embedder.encode_documents(contextual.documents, "float32", chunk_length=5))
    cases = [(plain, True, plain_MD), (contextual, False, alone_MD), (contextual, True, late_MD)]
    for task, late_chunking, expected_MD in cases:
        vectors = embed_task(embedder, task, config, late_chunking=late_chunking)
        np.testing.assert_array_equal(vectors.chunks_MD, expected_MD)
        queries_ND = embedder.encode(task.queries, "float32", max_length=3)
        np.testing.assert_array_equal(vectors.queries_ND, queries_ND)


def test_an_answer_stands_behind_all_that_score_as_high():
    documents = [[text] for text in ("asked", "a", "b", "c")]
    task = Task("t", "code", ["asked", "twice"], documents, [{1}, {2, 3}], ignore_identical=True)
    scores_NM = torch.tensor([[9.0, 2.0, 3.0, 2.0], [1.0, 0.0, 5.0, 5.0]])
    assert tasks.ranks(task, scores_NM).tolist() == [3, 1]  # its own text is no candidate
    assert scores_NM[1, 2] == 5.0


def test_means_weigh_tasks_not_queries():
    scores = {"a": np.array([1.0, 0.0, 0.0, 0.0]), "b": np.array([0.75]), "c": np.array([0.2, 0.4])}

    def means(*families):
        named = [Task(name, family, [], [], []) for name, family in zip("abc", families, strict=True)]
        return tasks.family_means(scores, named)

    found = means("x", "x", "y")
    assert found == pytest.approx({"x": 0.5, "y": 0.3, "average": (0.25 + 0.75 + 0.3) / 3})
    assert list(found) == ["x", "y", "average"]
    assert means("english", "code", "y")["average"] == pytest.approx((0.25 + 0.75) / 2)


CHUNKS = [f"Number {i}, {'and more ' * (i % 5)}that is all." for i in range(30)]
IDS = [f"{(7 * i) % 30:02}" for i in range(30)]
ASKED = {f"Which is number {i}?": {i, 29 - i} for i in range(8)}
NUMBERS = Task("numbers", "code", [*ASKED], [[text] for text in CHUNKS], [*ASKED.values()], IDS)
SCORES_NM = torch.from_numpy(np.random.default_rng(0).integers(0, 6, (8, 30)) / 6)  # with ties


@pytest.mark.parametrize("candidates", [10, 100])
def test_the_best_are_reordered_by_the_reranker_and_the_others_stay(candidates):
    model = tiny.model(bidirectional=False, head=True, length=1024)
    one, lengths = Reranker(model, tiny.tokenizer()), {"query_length": 4, "document_length": 6}
    config = replace(load_preset("smoke").reranker, candidates=candidates, max_queries=5, **lengths)
    before_N, after_N = tasks.rerank_task(one, NUMBERS, SCORES_NM, config)
    assert len(before_N) == len(after_N) == 5 and (before_N != after_N).any()

    def ordered(scores, columns):
        """As trec_eval: by score, then by id as a string, both descending."""
        return sorted(columns, key=lambda column: (np.float32(scores[column]), IDS[column]), reverse=True)

    for query in range(5):
        order = ordered(SCORES_NM[query], range(30))
        best, rest = order[:candidates], order[candidates:]
        texts, asked = [CHUNKS[i] for i in best], NUMBERS.queries[query]
        odds = one.log_odds(asked, texts, instruction=INSTRUCTIONS["code"], **lengths)
        reordered = ordered(dict(zip(best, odds, strict=True)), best)
        for ranking, found in ((best + rest, before_N), (reordered + rest, after_N)):
            place_1M = -np.argsort(ranking)[None].astype(float)
            expected = retrieval_metrics(place_1M, [NUMBERS.relevant[query]])["ndcg@10"]
            assert found[query] == pytest.approx(expected)


# --- the reference

TEXTS = ["Read a table from a file.", "東京は日本の首都です。", "Compute the mean of an array."]
FILES = Task("files", "english", TEXTS[:2], [[text] for text in reversed(TEXTS)], [{2}, {1}])
EXACT = replace(CONFIG, precision="fp32")


def referred():
    """What the reference scores on the task."""
    return tasks.evaluate_reference([FILES], EXACT)[REFERENCE]["files"]


def test_scores_of_the_reference_are_those_of_cosine_similarity_and_computed_once(monkeypatch):
    embedder = Embedder(tiny.model(), tiny.tokenizer(), device="cpu")
    monkeypatch.setattr(tasks, "PACKAGE", "numpy")  # one that is there
    monkeypatch.setattr(tasks, "load_reference", lambda config: embedder)
    scores_N = referred()
    q_ND, d_MD = (unit(embedder.encode(texts, "float32")) for texts in (FILES.queries, FILES.chunks))
    rank_N = [1 + (row > row[min(own)]).sum() for row, own in zip(q_ND @ d_MD.T, FILES.relevant, strict=True)]
    np.testing.assert_allclose(scores_N, 1 / np.log2(1 + np.array(rank_N)))
    monkeypatch.setattr(tasks, "load_reference", lambda config: pytest.fail("loaded again"))
    np.testing.assert_array_equal(referred(), scores_N)


def test_without_the_extra_tables_say_not_run(monkeypatch):
    monkeypatch.setattr(tasks, "PACKAGE", "no_such_package")
    assert tasks.load_reference(EXACT) is None and tasks.evaluate_reference([FILES], EXACT) == {}
    table = markdown_table([{"model": "BM25", "files": 0.5}, *tasks.missing_reference("model")])
    assert table.splitlines()[-1] == f"| {REFERENCE} | not run |"


@pytest.mark.skipif(not find_spec(tasks.PACKAGE), reason="no extra: install unmask[reference]")
def test_the_reference_is_the_model_that_sentence_transformers_loads():
    from sentence_transformers import SentenceTransformer

    found = tasks.load_reference(EXACT)
    texts = [*TEXTS, "a very long text of many words " * 60]  # 256 tokens are read
    theirs = SentenceTransformer(found.model.config._name_or_path, device="cpu")
    assert_close(found.encode(texts, "float32"), theirs.encode(texts))
    assert referred().tolist() == [1, 1] and tasks.missing_reference("model") == []
