"""Ranking metrics against trec_eval, and the lexical baseline."""

import subprocess
import sys

import numpy as np
import pytest
import pytrec_eval
import torch

from closeness import assert_close
from unmask.evaluation import Bm25, ranking_metrics, retrieval_metrics

KS = (1, 3, 10, 100)
WORDS = ["zoo", "Äpfel", "a", "文", "Z", "10", "9"]
IDS = {
    "column numbers": lambda m: None,
    "words": lambda m: [f"{WORDS[i % 7]}_{i % 7}_{i}" for i in range(m)],
    "conteb": lambda m: [f"{i // 16}_{i % 16}" for i in range(m)],
}
SCORES = {
    "distinct": lambda rng, shape: rng.standard_normal(shape),
    "heavily tied": lambda rng, shape: rng.integers(0, 4, shape).astype(np.int64),
    "equal in float32 only": lambda rng, shape: 1 + rng.integers(0, 3, shape) * 1e-9,
    "signed zeros": lambda rng, shape: rng.choice([-1.0, -0.0, 0.0, 1e-30], shape),
    "some minus infinity": lambda rng, shape: rng.choice([-np.inf, -np.inf, -np.inf, 0, 1, 2], shape),
}


def trec_eval(scores, relevant, ids, ks):
    queries, documents = scores.shape
    ids = ids or [str(j) for j in range(documents)]
    cuts = ",".join(map(str, ks))
    measures = {f"ndcg_cut.{cuts}", f"recall.{cuts}", f"map_cut.{cuts}", f"P.{cuts}", "recip_rank"}
    answers = {str(i): {ids[j]: 1 for j in columns} for i, columns in enumerate(relevant)}
    evaluator = pytrec_eval.RelevanceEvaluator(answers, measures)
    run = {str(i): dict(zip(ids, map(float, scores[i]))) for i in range(queries)}
    results = [evaluator.evaluate(run)[str(i)] for i in range(queries)]
    names = {"ndcg": "ndcg_cut", "recall": "recall", "map": "map_cut", "precision": "P"}
    wanted = {f"{ours}@{k}": f"{theirs}_{k}" for ours, theirs in names.items() for k in ks}
    expected = {ours: np.array([result[theirs] for result in results]) for ours, theirs in wanted.items()}
    reciprocal = np.array([result["recip_rank"] for result in results])  # which has no cut-off
    return expected | {f"mrr@{k}": np.where(reciprocal * k >= 1 - 1e-9, reciprocal, 0) for k in ks}


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert_close(found[name], values, 1e-9)


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("shape", [(13, 150), (5, 4)])
def test_metrics_equal_trec_eval(ids, scores, shape):
    rng = np.random.default_rng(0)
    scores_NM, ids = SCORES[scores](rng, shape), IDS[ids](shape[1])
    counts = rng.integers(1, min(40, shape[1]) + 1, shape[0])
    relevant = [set(rng.choice(shape[1], count, replace=False).tolist()) for count in counts]
    expected = trec_eval(scores_NM, relevant, ids, KS)
    metrics = retrieval_metrics(torch.from_numpy(scores_NM), relevant, ks=KS, document_ids=ids)
    same(retrieval_metrics(scores_NM, relevant, ks=KS, document_ids=ids, per_query=True), expected)
    assert metrics == pytest.approx({name: values.mean() for name, values in expected.items()}, rel=1e-9)


def test_a_ranking_has_the_metrics_of_its_scores():
    """Also where it is shorter than a cut-off, or filled up with −1."""
    rng, (queries, documents) = np.random.default_rng(5), (17, 60)
    scores_NM = rng.integers(0, 4, (queries, documents))
    relevant = [set(rng.choice(documents, 1 + i % 9, False).astype(np.int8)) for i in range(queries)]
    ids = [f"{99 - j}" for j in range(documents)]  # so that the order of ids is that of the numbers
    ids_NM = np.argsort(-scores_NM, axis=1, kind="stable")
    expected = trec_eval(scores_NM, relevant, ids, KS)
    filled_NX = np.concatenate([ids_NM, np.full((queries, 5), -1)], axis=1)
    for ids_NK in (ids_NM, filled_NX):
        same(ranking_metrics(ids_NK, relevant, KS, per_query=True), expected)
    short = ranking_metrics(ids_NM[:, :3], relevant, KS)
    assert short["ndcg@3"] == pytest.approx(expected["ndcg@3"].mean(), rel=1e-9)


REFUSED = {
    "Query 1 has no relevant document": (torch.eye(2), [{0}, set()]),
    "no document 2, which is said to be relevant: 2 columns": (torch.eye(2), [{0}, {2}]),
    "one row per query": (torch.eye(2), [{0}]),
    r"no number from 0 on, or one twice: \[False, True\]": (torch.eye(2), [[False, True], [True, False]]),
    r"no number from 0 on, or one twice: \[0.5\]": (torch.eye(2), [{0.5}, {1}]),
    "Cut-offs must be 1 or more": (torch.eye(2), [{0}, {1}], (0,)),
    "each differently": (torch.eye(2), [{0}, {1}], (10,), ["a", "a"]),
    "must name the 2 columns": (torch.eye(2), [{0}, {1}], (10,), ["a"]),
    "query 1 contain NaN": (torch.tensor([[0.0, 1.0], [0.0, torch.nan]]), [{0}, {1}]),
}


@pytest.mark.parametrize(("message", "arguments"), REFUSED.items())
def test_bad_rankings_are_refused(message, arguments):
    with pytest.raises(ValueError, match=message):
        retrieval_metrics(*arguments)


REFUSED_RANKINGS = {
    "ranking of query 1 holds a document twice": (np.array([[0, 1, -1, -1], [1, 1, 1, -1]]), [{0}, {1}]),
    "as integers; got float64": (np.array([[0.0, 1.0]]), [{0}]),
    "one row per query": (np.array([[0, 1]]), [{0}, {1}]),
    r"or one twice: \[0, 0\]": (np.array([[0, 1]]), [[0, 0]]),
    "Query 0 has no relevant document": (np.array([[0, 1]]), [set()]),
}


@pytest.mark.parametrize(("message", "arguments"), REFUSED_RANKINGS.items())
def test_a_ranking_is_asked_what_scores_are(message, arguments):
    with pytest.raises(ValueError, match=message):
        ranking_metrics(*arguments)


def test_bm25_is_lucenes_formula():
    documents = ["a red apple", "a green green pear and more", "the red car"]
    words = [text.split() for text in documents]
    average = np.mean([len(text) for text in words])

    def score(word, text):
        n = sum(word in other for other in words)
        idf = np.log(1 + (len(words) - n + 0.5) / (n + 0.5))
        return idf * text.count(word) / (text.count(word) + 1.5 * (0.25 + 0.75 * len(text) / average))

    queries = ["red", "green car", "a a pear", "unknown"]
    expected = [[sum(score(word, text) for word in query.split()) for text in words] for query in queries]
    np.testing.assert_allclose(Bm25(documents).scores(queries), expected, rtol=1e-5)


FOUND = {
    "ÜBER die brücke": ["Er ging über die Brücke.", "Er ging über Land."],
    "हिन्दी भाषा": ["यह हिन्दी भाषा है", "यह हवा नहीं है"],
    "東京の天気": ["今日の東京の天気は晴れです", "大阪で電車に乗る"],
    "東京 100": ["2020年に東京で100円", "2020年に大阪で200円"],
    "ภาษาไทย": ["เรียนภาษาไทยทุกวัน", "ฝนตกหนัก"],
    "Maximal length?": ["set maximal_length=3", "set a maximum"],  # an identifier is its words
}


@pytest.mark.parametrize(("query", "documents"), FOUND.items())
def test_bm25_finds_words_of_any_script(query, documents):
    scores = Bm25(documents).scores([query])[0]
    assert scores[0] > scores[1]


def test_bm25_of_nothing():
    assert Bm25(["word", "", "other"]).scores(["", "…", "word"])[:2].tolist() == [[0, 0, 0], [0, 0, 0]]
    with pytest.raises(ValueError, match="at least one document with a word"):
        Bm25(["", "!"])


@pytest.mark.parametrize("give", [Bm25, Bm25(["a text"]).scores])
def test_one_string_is_no_list_of_letters(give):
    with pytest.raises(ValueError, match="got one string, 'a word'"):
        give("a word")
    with pytest.raises(TypeError, match="Text 1 of 2 is no string"):
        give(["a text", None])


@pytest.mark.gpu
def test_the_baseline_leaves_the_gpu_alone():
    """bm25s starts JAX where that is installed, which would take three quarters of it."""
    said = "import torch, unmask.evaluation; free, whole = torch.cuda.mem_get_info(); print(free / whole)"
    assert float(subprocess.check_output([sys.executable, "-c", said])) > 0.5
