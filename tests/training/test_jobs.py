from types import SimpleNamespace

from datasets import Dataset

import tiny
from unmask.data.tokens import tokenize
from unmask.training.jobs import by_dataset, single_chunks, token_documents, token_pairs

LENGTHS = SimpleNamespace(
    query_length=8, document_length=12, chunk_length=12, chunks=2, single=2, negatives=2
)
PAIRS = Dataset.from_dict(
    {
        "query": ["Read a table", "Read a file", "Compute the mean"],
        "document": ["from a file", "from a file again", "of an array"],
        "key": ["read", "read", "mean"],
        "dataset": ["b", "a", "b"],
    }
)


def tokens(texts, length):
    return [t.tolist() for t in tokenize(tiny.tokenizer(), texts, length)]


def lists(arrays):
    return [array.tolist() for array in arrays]


def test_a_long_document_becomes_windows_that_keep_their_own_queries():
    rows = Dataset.from_dict(
        {
            "chunks": [["one", "two", "three", "four", "five"]],
            "queries": [["first", "fourth", "fifth"]],
            "golds": [[0, 3, 4]],
        }
    )
    documents = token_documents(rows, tiny.tokenizer(), LENGTHS)
    assert [lists(d.chunks) for d in documents] == [
        tokens(["one", "two"], 12),
        tokens(["three", "four"], 12),
        tokens(["five"], 12),
    ]
    assert [lists(d.queries) for d in documents] == [tokens([q], 8) for q in ("first", "fourth", "fifth")]
    assert [d.golds for d in documents] == [[0], [1], [0]]


def test_single_chunks_never_hold_two_pairs_of_one_key():
    documents = single_chunks(PAIRS, tiny.tokenizer(), LENGTHS)
    assert [lists(d.chunks) for d in documents] == [tokens(["from a file"], 12), tokens(["of an array"], 12)]
    assert [lists(d.queries) for d in documents] == [
        tokens(["Read a table"], 8),
        tokens(["Compute the mean"], 8),
    ]
    assert [d.golds for d in documents] == [[0], [0]]


def test_pairs_keep_their_negatives_in_order():
    mined = PAIRS.add_column("negatives", [["x", "y"], ["y", "z"], ["z", "x"]])
    pairs = token_pairs(mined, tiny.tokenizer(), LENGTHS)
    assert [lists(row) for row in pairs.negatives] == [tokens(list(n), 12) for n in ("xy", "yz", "zx")]
    assert pairs.keys == ["read", "read", "mean"]


def test_rows_are_split_by_their_data_set():
    assert {name: rows["query"][:] for name, rows in by_dataset(PAIRS).items()} == {
        "a": ["Read a file"],
        "b": ["Read a table", "Compute the mean"],
    }
