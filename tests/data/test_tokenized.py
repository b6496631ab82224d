"""Pairs and documents as token ids, cut to a stage's lengths and mapped from files."""

import numpy as np
import pytest
from datasets import Dataset, concatenate_datasets

import tiny
from unmask.data import tokenized
from unmask.data.tokenized import distinct_rows, single_chunks, token_documents, token_pairs
from unmask.data.tokens import StoredTokenizer, tokenize

LENGTHS = {"query_length": 8, "document_length": 12}
PAIRS = Dataset.from_dict(
    {
        "query": ["Read a table", "Read a file", "Compute the mean"],
        "document": ["from a file", "from a file again", "of an array"],
        "key": ["read", "read", "mean"],
        "dataset": ["b", "b", "b"],
    }
)
DOCUMENTS = Dataset.from_dict(
    {
        "chunks": [["one", "two", "three", "four", "five"], ["six"], ["seven", "eight", "nine"]],
        "queries": [["first", "fourth", "fifth"], ["sixth", "6"], ["seventh"]],
        "golds": [[0, 3, 4], [0, 0], [0]],
    }
)


@pytest.fixture(autouse=True)
def _artifacts(tmp_path, monkeypatch):
    monkeypatch.setenv("UNMASK_ARTIFACTS", str(tmp_path))


@pytest.fixture
def stored(_artifacts):
    return StoredTokenizer.of(tiny.tokenizer())


def tokens(texts, length):
    return [ids.tolist() for ids in tokenize(tiny.tokenizer(), texts, length)]


def lists(arrays):
    return [array.tolist() for array in arrays]


def pairs(rows, stored, *, identity="", **options):
    return token_pairs(rows, stored, name="b", identity=identity, **(LENGTHS | options))


def documents(rows, stored, **options):
    return token_documents(
        rows, stored, name="d", identity="", query_length=8, chunk_length=12, **({"chunks": 2} | options)
    )


def test_pairs_are_their_texts_tokens_cut_to_the_lengths(stored):
    found = pairs(PAIRS, stored, query_length=2)
    assert lists(found.queries) == tokens(PAIRS["query"][:], 2)
    assert lists(found.documents) == tokens(PAIRS["document"][:], 12)
    assert found.keys[0] == found.keys[1] != found.keys[2]
    whole = tokens(PAIRS["query"][:], 99) + tokens(PAIRS["document"][:], 99)
    limits = [2] * 3 + [12] * 3
    over = [max(len(ids) - limit, 0) for ids, limit in zip(whole, limits, strict=True)]
    assert found.counters["texts cut"] == sum(map(bool, over)) > 0
    assert found.counters["tokens cut"] == sum(over)
    assert found.counters["rows"] == 3


def test_negatives_stay_with_their_queries_in_order(stored):
    mined = PAIRS.add_column("negatives", [["x", "y"], ["y", "z", "x"], ["z", "x"]])
    found = pairs(mined, stored, negatives=2)
    assert [lists(row) for row in found.negatives] == [tokens(list(n), 12) for n in ("xy", "yz", "zx")]
    assert lists(found.negatives[-1]) == tokens(["z", "x"], 12)


def test_rows_with_too_few_negatives_are_left_out_and_counted(stored):
    mined = PAIRS.add_column("negatives", [["x", "y"], ["y"], ["z", "x"]])
    found = pairs(mined, stored, negatives=2)
    assert lists(found.queries) == tokens(["Read a table", "Compute the mean"], 8)
    assert (len(found.keys), len(found.negatives)) == (2, 2)
    assert found.counters["rows with too few negatives"] == 1
    with pytest.raises(ValueError, match="no row of data set 'b' has 3 negatives"):
        pairs(mined, stored, negatives=3)


def test_a_long_document_becomes_windows_that_keep_their_own_queries(stored):
    found = documents(DOCUMENTS, stored)
    expected = [
        (["one", "two"], ["first"], [0]),
        (["three", "four"], ["fourth"], [1]),
        (["five"], ["fifth"], [0]),
        (["six"], ["sixth", "6"], [0, 0]),
        (["seven", "eight"], ["seventh"], [0]),
    ]
    assert [(lists(d.chunks), lists(d.queries), d.golds) for d in found] == [
        (tokens(chunks, 12), tokens(queries, 8), golds) for chunks, queries, golds in expected
    ]
    assert found.counters["documents divided"] == 2
    assert found.counters["chunks without a query near them"] == 1  # nine
    assert found.counters["rows"] == len(found) == 5


def test_single_chunks_never_hold_two_pairs_of_one_key(stored):
    for seed in range(4):
        found = single_chunks(PAIRS, stored, count=2, seed=seed, name="b", identity="", **LENGTHS)
        rows = [PAIRS[row] for row in distinct_rows(PAIRS, 2, seed)]
        assert {row["key"] for row in rows} == {"read", "mean"}
        assert [lists(d.chunks) for d in found] == [tokens([row["document"]], 12) for row in rows]
        assert [lists(d.queries) for d in found] == [tokens([row["query"]], 8) for row in rows]
        assert [d.golds for d in found] == [[0], [0]]


def test_distinct_rows_are_drawn_at_random_and_all_there_are_at_most():
    rows = Dataset.from_dict({"key": [str(i // 2) for i in range(200)]})
    drawn = distinct_rows(rows, 50, 0)
    assert len({row // 2 for row in drawn}) == len(drawn) == 50
    assert drawn == sorted(drawn) and drawn[-1] > 120
    assert drawn == distinct_rows(rows, 50, 0) != distinct_rows(rows, 50, 1)
    assert len(distinct_rows(rows, 1000, 0)) == 100


def test_tables_are_prepared_in_pieces_by_any_number_of_workers(stored, monkeypatch, tmp_path):
    monkeypatch.setattr(tokenized, "UNIT_BYTES", 400)
    many = concatenate_datasets([PAIRS] * 20).map(lambda row, i: {"key": str(i)}, with_indices=True)
    shuffled = many.shuffle(seed=0)
    results = []
    for workers in (1, 2):
        monkeypatch.setenv("UNMASK_ARTIFACTS", str(tmp_path / str(workers)))
        found = pairs(shuffled, StoredTokenizer.of(tiny.tokenizer()), workers=workers)
        results.append((lists(found.queries), lists(found.documents), found.keys.tolist(), found.counters))
    assert results[0] == results[1]
    assert results[0][0] == tokens(shuffled["query"][:], 8)
    assert len(set(results[0][2])) == 60


def test_another_identity_or_length_is_another_preparation(stored):
    first = pairs(PAIRS, stored)
    other = PAIRS.select([2, 1, 0])
    assert lists(pairs(other, stored, identity="other").queries) == lists(first.queries)[::-1]
    assert max(map(len, pairs(PAIRS, stored, query_length=1).queries)) == 1


@pytest.mark.parametrize(
    ("column", "message"), [("query", "row 1: its query"), ("document", "row 1: its document")]
)
def test_a_text_without_tokens_is_named(column, message, stored):
    rows = PAIRS.map(lambda row, i: {column: "" if i == 1 else row[column]}, with_indices=True)
    with pytest.raises(ValueError, match=f"data set 'b', {message} has no tokens: ''. Remove or fill it"):
        pairs(rows, stored)


def test_a_chunk_without_tokens_is_named(stored):
    rows = Dataset.from_dict({"chunks": [["a"], ["b", ""]], "queries": [["q"], ["r"]], "golds": [[0], [0]]})
    with pytest.raises(ValueError, match="data set 'd', row 1: one of its chunks has no tokens"):
        documents(rows, stored)


def test_large_vocabularies_take_four_bytes(stored):
    from dataclasses import replace

    found = pairs(PAIRS, replace(stored, dtype="uint32", hash="other"))
    assert {ids.dtype for ids in found.queries} == {np.dtype(np.uint32)}
    assert lists(found.queries) == tokens(PAIRS["query"][:], 8)
