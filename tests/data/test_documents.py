import numpy as np
import pytest
import torch

import tiny
from unmask.data.documents import TokenDocument, chunks, contextual_batch, split_rows

SENTENCE = "Read a table from a file and return its rows. "
JAPANESE = "東京は日本の首都です。大きな都市です。" * 30


def size(text: str) -> int:
    return len(tiny.tokenizer()(text)["input_ids"])


@pytest.mark.parametrize(
    "text",
    [
        "\n\n".join(SENTENCE * n for n in range(1, 15)),
        JAPANESE,
        "x" * 900,
        "one very long sentence without an end " * 60,
        "Title\n\n" + SENTENCE * 3 + "\r\n\r\n- item\n- item\n\n\n" + "def close(self):\n    return 1\n" * 40,
        " One. Two.\n",
        " \n\t ",
    ],
)
@pytest.mark.parametrize(("length", "count"), [(16, 4), (64, 16), (64, 1)])
def test_nothing_is_lost_and_nothing_is_too_long(text, length, count):
    documents = chunks(text, tiny.tokenizer(), length, count)
    flat = [chunk for document in documents for chunk in document]
    assert "".join("".join(flat).split()) == "".join(text.split())
    assert all(chunk == chunk.strip() and 0 < size(chunk) <= length for chunk in flat)
    sizes = [len(document) for document in documents] or [0]
    assert max(sizes) <= count and max(sizes) - min(sizes) <= 1
    assert len(documents) == -(-len(flat) // count)
    # Chunks are filled: there are at most four times as many as there must be.
    assert len(flat) <= 4 * -(-size(text) // length)


def test_chunks_end_where_sentences_and_paragraphs_do():
    for document in chunks(SENTENCE * 40, tiny.tokenizer(), 64):
        assert all(chunk.startswith("Read") and chunk.endswith("rows.") for chunk in document)
    for document in chunks(JAPANESE, tiny.tokenizer(), 64):
        assert all(chunk.endswith("。") for chunk in document)
    text = f"{SENTENCE * 3}\n\n{SENTENCE * 3}\n\n{SENTENCE * 2}"
    first = chunks(text, tiny.tokenizer(), size(SENTENCE * 5))[0][0]
    assert first == (SENTENCE * 3).strip()  # more would fit, but a paragraph is kept together


@pytest.fixture
def documents() -> list[TokenDocument]:
    return [
        TokenDocument(tiny.sequences(chunks, seed=chunks), tiny.sequences(queries, seed=20 + chunks), golds)
        for chunks, queries, golds in ((2, 1, [1]), (5, 4, [0, 4, 2, 2]), (1, 2, [0, 0]))
    ]


def batch(documents, limit):
    rng = np.random.default_rng(0)
    return contextual_batch(documents, separator_id=0, queries_per_document=limit, rng=rng)


@pytest.mark.parametrize("limit", [1, 2, 10])
def test_queries_point_at_their_document_and_chunk(limit, documents):
    found = batch(documents, limit)
    counts = [min(limit, len(document.queries)) for document in documents]
    assert len(found.sequences) == sum(counts) + 3
    assert found.document_N.tolist() == np.repeat([0, 1, 2], counts).tolist()
    for n, (m, query, gold) in enumerate(zip(found.document_N, found.query_N, found.gold_N, strict=True)):
        assert np.array_equal(found.sequences[n].tokens_L, documents[m].queries[query])
        assert gold == documents[m].golds[query]


def test_rows_are_split_into_queries_chunks_and_documents(documents):
    found = batch(documents, 2)
    n = len(found.document_N)
    rows = torch.randn(n + 8, 4, dtype=torch.float64, requires_grad=True)
    q_ND, chunks_MCD, documents_MD, mask_MC = split_rows(rows, found)
    assert torch.equal(q_ND, rows[:n])
    assert mask_MC.tolist() == [[c < count for c in range(5)] for count in (2, 5, 1)]
    assert torch.equal(chunks_MCD[mask_MC], rows[n:])
    assert not chunks_MCD[~mask_MC].any()
    start = n
    for m, document in enumerate(documents):
        parts = rows[start : start + len(document.chunks)]
        weights = torch.tensor([len(chunk) for chunk in document.chunks], dtype=torch.float64)
        expected = (parts * weights[:, None]).sum(0) / weights.sum()
        torch.testing.assert_close(documents_MD[m], expected, rtol=1e-6, atol=1e-7)
        start += len(document.chunks)
    (chunks_MCD.sum() + q_ND.sum()).backward()
    assert torch.equal(rows.grad, torch.ones_like(rows))
