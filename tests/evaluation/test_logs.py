"""Benchmarks from logs, against what the paper's steps say and against naive sums."""

from __future__ import annotations

import doctest
from fractions import Fraction

import numpy as np
import pytest

from unmask.evaluation import logs
from unmask.evaluation.logs import (
    LogBenchmark,
    length_class,
    page,
    personal,
    query_to_document,
    query_to_query,
    recall_at_sizes,
    reciprocal_rank_fusion,
    stratified,
)
from unmask.evaluation.search import top_k


def clicks(*rows: tuple[str, str, int]) -> list[dict]:
    return [{"query": query, "url": url, "time": time} for query, url, time in rows]


def found(built: LogBenchmark) -> dict[str, set[str]]:
    return {
        q: {built.documents[d] for d in numbers}
        for q, numbers in zip(built.queries, built.relevant, strict=True)
    }


def test_the_docstrings_examples():
    assert doctest.testmod(logs).failed == 0


def test_the_earliest_query_of_a_page_is_asked_and_the_others_answer():
    built = query_to_query(
        clicks(
            ("late", "https://www.a.org/x/", 9),
            ("first", "http://a.org/x?utm_source=mail", 1),
            ("middle", "https://a.org/x#part", 5),
            ("late", "https://a.org/x", 3),  # an exact duplicate, whichever comes first
            ("alone", "https://b.org", 2),
            ("twice", "https://c.org", 1),
            ("twice", "https://c.org", 2),  # one distinct query: no group
        )
    )
    assert found(built) == {"first": {"late", "middle"}}
    assert set(built.documents) == {"late", "middle", "alone", "twice"}
    assert set(built.documents[: built.answers]) == {"late", "middle"}


def test_a_text_occurs_once_and_answers_all_its_pages():
    built = query_to_query(
        clicks(("a", "p.org", 1), ("shared", "p.org", 2), ("b", "q.org", 1), ("shared", "q.org", 2))
    )
    assert built.documents == ["shared"]
    assert found(built) == {"a": {"shared"}, "b": {"shared"}}


def test_a_query_that_is_asked_is_no_document():
    rows = clicks(("a", "p.org", 1), ("b", "p.org", 2), ("b", "q.org", 1), ("a", "q.org", 2))
    built = query_to_query([*rows, *clicks(("c", "q.org", 3))])
    assert built.documents == ["c"]
    assert found(built) == {"a": {"c"}, "b": {"c"}}


def test_queries_that_only_lead_where_asked_ones_do_are_counted():
    rows = clicks(
        ("a", "p.org", 1), ("b", "p.org", 2), ("b", "q.org", 1), ("c", "q.org", 2), ("c", "r.org", 1)
    )
    rows += clicks(("x", "r.org", 2))
    built = query_to_query(rows)  # asked: a, b, c; of them "a" shares its page with "b" alone
    assert built.dropped == {"only asked queries led to its pages": 2}
    assert found(built) == {"c": {"x"}}


def test_personal_queries_are_dropped_and_counted():
    rows = clicks(
        ("how to bake", "p.org", 1),
        ("bread for jane@example.org", "p.org", 2),
        ("call +49 30 901820", "p.org", 3),
        ("4111 1111 1111 1111", "p.org", 4),
        ("bake bread", "p.org", 5),
        (" ", "p.org", 0),
    )
    built = query_to_query(rows)
    assert built.dropped == {"email": 1, "phone": 1, "card": 1, "empty": 1}
    assert found(built) == {"how to bake": {"bake bread"}}


@pytest.mark.parametrize(
    ("query", "kind"),
    [
        ("mail john.smith+x@mail.example.co.uk", "email"),
        ("5500-0000-0000-0004", "card"),
        ("4111111111111112", ""),  # fails the checksum
        ("(030) 901820-12", "phone"),
        ("555 123 4567", "phone"),
        ("0049 171 5551234", "phone"),
        ("python 3.11.2 against 3.12", ""),
        ("2024-01-02 12:30 weather", ""),
        ("population 1990 2000 2010 2020", ""),
        ("pi 0.3333333333", ""),
        ("@user tweets", ""),
    ],
)
def test_what_is_personal(query, kind):
    assert personal(query) == kind


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("https://a.org", "a.org/", True),
        ("https://a.org:443/x", "http://A.org/x", True),
        ("https://a.org/x?b=2&a=1", "https://a.org/x?a=1&b=2&gclid=7", True),
        ("https://a.org/X", "https://a.org/x", False),
        ("https://a.org/?id=1", "https://a.org/?id=2", False),
        ("https://a.org:8080", "https://a.org", False),
    ],
)
def test_one_page_has_one_name(one, other, same):
    assert (page(one) == page(other)) is same


def test_bad_rows_are_named():
    with pytest.raises(ValueError, match="row 1 of the log"):
        query_to_query([*clicks(("a", "p.org", 1)), {"query": "b", "url": "p.org"}])
    with pytest.raises(ValueError, match=r"row 0 of the log.*no URL"):
        query_to_query(clicks(("a", "", 1)))
    with pytest.raises(ValueError, match="more days"):
        query_to_query(clicks(("a", "p.org", 1), ("b", "q.org", 1)))
    with pytest.raises(ValueError, match=r"only asked queries.*more days"):
        query_to_query(clicks(("a", "p.org", 1), ("b", "p.org", 2), ("b", "q.org", 1), ("a", "q.org", 2)))


def test_distractors_join_the_corpus_and_answer_nothing():
    rows = clicks(("a", "p.org", 1), ("b", "p.org", 2))
    built = query_to_query(rows, distractors=["x", "a", "b", "y", "x", "me@example.org"])
    assert built.documents[0] == "b" and sorted(built.documents) == ["b", "x", "y"]
    assert built.dropped == {"email": 1}
    assert found(built) == {"a": {"b"}}


def test_corpora_are_nested_and_reproducible():
    rows = clicks(*((f"q{page} {i}", f"p{page}.org", i) for page in range(40) for i in range(1 + page % 3)))
    one, again, other = (query_to_query(rows, max_queries=10, seed=s) for s in (0, 0, 1))
    assert one == again and one != other
    assert len(one.queries) == 10
    assert set().union(*one.relevant) == set(range(one.answers))
    assert one.sizes([1, 20, 10**6]) == [one.answers, 20, len(one.documents)]


def test_fusion_equals_a_naive_sum():
    rng = np.random.default_rng(0)
    rankings = [[list(rng.permutation(30)[: rng.integers(1, 20)]) for _ in range(5)] for _ in range(4)]
    for query, scores in enumerate(reciprocal_rank_fusion(rankings, k=60)):
        for document in range(30):
            exact = sum(
                Fraction(1, 60 + 1 + ranking[query].index(document))
                for ranking in rankings
                if document in ranking[query]
            )
            assert scores.get(document, 0) == pytest.approx(float(exact), abs=1e-12)


def test_consensus_of_several_systems_labels_a_document():
    documents = list("abcdefg")
    pool = {"bm25": [[0, 1, 2]], "one": [[0, 3, 1]], "two": [[0, 4, 5]]}
    built = query_to_document(["q"], documents, pool, judges={"engine": [[1, 6]]}, threshold=3 / 70)
    # a: three systems at rank 1. b: ranks 2 and 3, and 1 with the judge. The others have two at most.
    assert found(built) == {"q": {"a", "b"}}
    assert set(built.documents) == set("abcdef")  # "g" is the judge's alone: no candidate


def test_depth_cuts_every_system():
    pool = {"one": [[0, 1]], "two": [[1, 0]]}
    built = query_to_document(["q"], ["a", "b"], pool, depth=1, threshold=1 / 61)
    assert found(built) == {"q": {"a", "b"}}
    with pytest.raises(ValueError, match=r"reaches the threshold 0\.0200, the best has 0\.0164"):
        query_to_document(["q"], ["a", "b"], pool, depth=1, threshold=0.02)


def test_a_query_without_consensus_is_dropped():
    pool = {"one": [[0], [1]], "two": [[0], [2]]}
    built = query_to_document(["p", "q"], ["a", "b", "c"], pool, threshold=2 / 61)
    assert built.queries == ["p"] and built.dropped == {"no consensus": 1}
    assert built.documents[0] == "a" and set(built.documents) == {"a", "b", "c"}


def test_bad_pools_are_refused():
    with pytest.raises(ValueError, match="'one' ranks 2 queries, there are 1"):
        query_to_document(["q"], ["a"], {"one": [[0], [0]]})
    with pytest.raises(ValueError, match="repeat"):
        query_to_document(["q", "q"], ["a"], {"one": [[0], [0]]})
    with pytest.raises(ValueError, match="at least one system"):
        query_to_document(["q"], ["a"], {})


def test_recall_at_sizes_equals_a_naive_count():
    rng = np.random.default_rng(0)
    q_ND = rng.standard_normal((20, 8)).astype(np.float32)
    d_MD = rng.standard_normal((300, 8)).astype(np.float32)
    relevant = [set(map(int, rng.permutation(50)[: rng.integers(1, 4)])) for _ in range(20)]
    sizes, ks = (50, 100, 300), (10, 100, 1000)
    values = recall_at_sizes(
        lambda size, k: top_k(q_ND, d_MD[:size], k)[1], relevant, sizes, ks, per_query=True
    )
    scores_NM = (q_ND / np.linalg.norm(q_ND, axis=1, keepdims=True)).astype(float) @ (
        d_MD / np.linalg.norm(d_MD, axis=1, keepdims=True)
    ).T.astype(float)
    for size in sizes:
        for k in ks:
            best = np.argsort(-scores_NM[:, :size], axis=1)[:, :k]
            naive = [len(set(row) & gold) / len(gold) for row, gold in zip(best, relevant, strict=True)]
            assert values[size][f"recall@{k}"] == pytest.approx(naive)
    assert set(values[50]) == {f"recall@{k}" for k in ks}


def test_recall_needs_all_answers_in_every_corpus():
    with pytest.raises(ValueError, match="a corpus of 5 leaves relevant documents out: take 8 or more"):
        recall_at_sizes(lambda size, k: np.zeros((1, k), int), [{7}], [5, 10])


def test_strata_are_drawn_evenly():
    rows = [("a", i) for i in range(90)] + [("b", i) for i in range(8)] + [("c", 0)]
    drawn = stratified(rows, lambda row: row[0], 21)
    counts = {name: sum(row[0] == name for row in drawn) for name in "abc"}
    assert counts == {"a": 12, "b": 8, "c": 1} and len(set(drawn)) == 21
    assert stratified(rows, lambda row: row[0], 21) == drawn
    with pytest.raises(ValueError, match="100 of 99"):
        stratified(rows, len, 100)


def test_length_classes_are_the_papers():
    expected = {1: "short", 2: "short", 3: "medium", 11: "medium", 12: "long"}
    assert {words: length_class("w " * words) for words in expected} == expected
