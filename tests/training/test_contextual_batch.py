from dataclasses import replace

import numpy as np
import pytest
import tiny_stages
import torch

import tiny
from closeness import assert_close
from unmask import losses
from unmask.data.tokenize import TokenDocument

DOCUMENTS = [
    TokenDocument(tiny.sequences(chunks, seed=chunks), tiny.sequences(queries, seed=20 + chunks), golds)
    for chunks, queries, golds in ((2, 1, [1]), (5, 4, [0, 4, 2, 2]), (1, 2, [0, 0]))
]


def batch(limit):
    """One of all of them, and in which order they came."""
    stage = tiny_stages.stage("contextual", {"one": tiny.Distinct(DOCUMENTS)}, queries_per_document=limit)
    [found] = stage.batch(0)
    return found, [DOCUMENTS[i] for i in stage.plan(0)[1]]


@pytest.mark.parametrize("limit", [1, 2, 10])
def test_queries_point_at_their_document_and_chunk(limit):
    found, documents = batch(limit)
    counts = [min(limit, len(document.queries)) for document in documents]
    assert len(found.sequences) == sum(counts) + 3
    assert found.document_N.tolist() == np.repeat([0, 1, 2], counts).tolist()
    for text, m, gold in zip(found.sequences, found.document_N, found.gold_N):
        asked = [ids.tolist() for ids in documents[m].queries]
        assert gold == documents[m].golds[asked.index(text.tokens_L.tolist())]


@pytest.mark.parametrize(("draw", "share"), [("queries", 0.9), ("documents", 0.5)])
def test_data_sets_are_drawn_by_their_queries(draw, share):
    """As the paper's by their pairs; or by their documents."""
    few, many = ([TokenDocument([one], [one] * n, [0] * n) for one in tiny.sequences(9)] for n in (1, 9))
    data = {"few": tiny.Distinct(few), "many": tiny.Distinct(many)}
    stage = tiny_stages.stage("contextual", data, draw=draw, steps=400)
    assert sum(stage.plan(step)[0] == "many" for step in range(400)) / 400 == pytest.approx(share, abs=0.05)


def test_a_query_that_is_asked_twice_has_all_its_answers(monkeypatch):
    """Of one document, and of another one: to the loss, equal queries are one."""
    documents = [one._replace(queries=[tiny.sequences(1, seed=0)[0]] * len(one.queries)) for one in DOCUMENTS]
    stage, seen = tiny_stages.stage("contextual", {"one": tiny.Distinct(documents)}), {}
    monkeypatch.setattr(losses, "contextual_loss", lambda *_, **given: seen.update(given) or torch.zeros(()))
    [found] = stage.batch(0)
    stage.loss(torch.zeros(found.count + 8, 4), found)
    assert found.count == 5 and not seen["query_ids_N"].any()


def test_rows_are_split_into_queries_chunks_and_documents():
    found, documents = batch(2)
    n, counts = len(found.document_N), [len(document.chunks) for document in documents]
    rows = torch.randn(n + 8, 4, dtype=torch.float64, requires_grad=True)
    q_ND, chunks_MCD, documents_MD = found.split(rows)
    assert torch.equal(q_ND, rows[:n])
    assert found.mask_MC.tolist() == [[c < count for c in range(5)] for count in counts]
    assert torch.equal(chunks_MCD[found.mask_MC], rows[n:])
    assert not chunks_MCD[~found.mask_MC].any()
    for found_D, document, parts_CD in zip(documents_MD, documents, rows[n:].split(counts), strict=True):
        weights_C = torch.tensor([len(chunk) for chunk in document.chunks]).double()
        assert_close(found_D, weights_C @ parts_CD / weights_C.sum(), 1e-6)
    (chunks_MCD.sum() + q_ND.sum()).backward()
    assert torch.equal(rows.grad, torch.ones_like(rows))


def test_special_tokens_count_for_a_chunk_that_is_read_alone():
    stage = tiny_stages.stage("contextual", {"one": tiny.Distinct(DOCUMENTS)})
    stage.job = replace(stage.job, late_chunking=False)
    stage.around = np.array([1], np.int32), np.array([2, 3], np.int32)
    [found] = stage.batch(0)
    assert found.chunk_tokens_MC[found.mask_MC].tolist() == [*map(len, found.sequences[found.count :])]
