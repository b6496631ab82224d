import numpy as np
import pytest
import torch

import tiny
from unmask.data.tokenized import TokenDocument
from unmask.training.stages import contextual_batch, split_rows

DOCUMENTS = [
    TokenDocument(tiny.sequences(chunks, seed=chunks), tiny.sequences(queries, seed=20 + chunks), golds)
    for chunks, queries, golds in ((2, 1, [1]), (5, 4, [0, 4, 2, 2]), (1, 2, [0, 0]))
]


def batch(limit):
    rng = np.random.default_rng(0)
    return contextual_batch(DOCUMENTS, separator_id=0, queries_per_document=limit, rng=rng)


@pytest.mark.parametrize("limit", [1, 2, 10])
def test_queries_point_at_their_document_and_chunk(limit):
    found = batch(limit)
    counts = [min(limit, len(document.queries)) for document in DOCUMENTS]
    assert len(found.sequences) == sum(counts) + 3
    assert found.document_N.tolist() == np.repeat([0, 1, 2], counts).tolist()
    for text, m, gold in zip(found.sequences, found.document_N, found.gold_N):
        asked = [ids.tolist() for ids in DOCUMENTS[m].queries]
        assert gold == DOCUMENTS[m].golds[asked.index(text.tokens_L.tolist())]


def test_rows_are_split_into_queries_chunks_and_documents():
    found = batch(2)
    n = len(found.document_N)
    rows = torch.randn(n + 8, 4, dtype=torch.float64, requires_grad=True)
    q_ND, chunks_MCD, documents_MD, mask_MC = split_rows(rows, found)
    assert torch.equal(q_ND, rows[:n])
    assert mask_MC.tolist() == [[c < count for c in range(5)] for count in (2, 5, 1)]
    assert torch.equal(chunks_MCD[mask_MC], rows[n:])
    assert not chunks_MCD[~mask_MC].any()
    start = n
    for m, document in enumerate(DOCUMENTS):
        parts = rows[start : start + len(document.chunks)]
        weights = torch.tensor([len(chunk) for chunk in document.chunks], dtype=torch.float64)
        expected = (parts * weights[:, None]).sum(0) / weights.sum()
        torch.testing.assert_close(documents_MD[m], expected, rtol=1e-6, atol=1e-7)
        start += len(document.chunks)
    (chunks_MCD.sum() + q_ND.sum()).backward()
    assert torch.equal(rows.grad, torch.ones_like(rows))
