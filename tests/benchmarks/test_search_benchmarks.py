"""The search benchmarks compare like with like, and their figure shows what was measured."""

from __future__ import annotations

import pytest
import search


@pytest.mark.parametrize("make", [search.integer_case, search.binary_case])
@pytest.mark.parametrize("batch", [1, 64])
def test_peers_find_the_same_documents(make, batch):
    case = make(batch, documents=3000)
    case.check()
    for variants in case.programs.values():
        variants[""]()
    assert case.work == (64 if batch > 1 else 16)


def test_another_answer_is_noticed():
    queries, documents = search.codes(500)
    peer = search.integer_peer(documents)
    wrong = search.case("wrong", queries, documents, lambda q_ND, k: peer(q_ND[::-1], k), 64)
    with pytest.raises(AssertionError, match="different documents"):
        wrong.check()


def test_metrics_are_those_of_trec_eval():
    search.metrics_case(50, 200).check()


def test_growing_corpora_are_searched_and_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(search, "artifacts_root", lambda: tmp_path)
    rows = search.scaling(tmp_path / "search.png", (1000, 4000))
    assert [row.name.partition(", ")[2] for row in rows] == [
        "1,000 documents: one query",
        "1,000 documents: batches of 64",
        "4,000 documents: one query",
        "4,000 documents: batches of 64",
        "4,000 documents: peak memory",
    ]
    assert all(row.ratio > 0 for row in rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["search-dark.png", "search.png"]
