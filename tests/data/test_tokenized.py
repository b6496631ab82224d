"""Pairs, documents and blocks of text as token ids: cut to a stage's lengths, in the sources' shares."""

import json
from dataclasses import replace

import numpy as np
import pytest
from datasets import Dataset, concatenate_datasets

import tiny
from unmask.data import tokenized
from unmask.data.registry import Source
from unmask.data.tokenized import (
    distinct_rows,
    open_blocks,
    single_chunks,
    token_documents,
    token_pairs,
)
from unmask.data.tokens import StoredTokenizer, pack, tokenize
from unmask.study import paper

TABLE_10 = [row["Prevalence"] for row in paper.table(10)]  # percent of the pretraining data by language
TEXTS = ["Read a table from a file.", "Die Datei wird gelesen.", "Compute the mean of an array, ignoring it."]

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


def test_large_vocabularies_take_four_bytes(stored):
    from dataclasses import replace

    found = pairs(PAIRS, replace(stored, dtype="uint32", hash="other"))
    assert {ids.dtype for ids in found.queries} == {np.dtype(np.uint32)}
    assert lists(found.queries) == tokens(PAIRS["query"][:], 8)


# --- blocks


@pytest.fixture
def tokenizer():
    return tiny.tokenizer()


def source(folder, name, texts, **more):
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    about = {"kind": "files", "role": "text", "language": "eng_Latn", "licence": "none"}
    return Source(name=name, **about, files=(str(path),), columns={"text": "text"}, **more)


def varied(count, start=0):
    return [f"{TEXTS[i % 3]} {i * 7919}" for i in range(start, start + count)]


def sorted_blocks(found):
    return sorted(found[np.arange(len(found))].tolist())


def test_shares_are_exact_to_the_block(tmp_path, tokenizer):
    """Thirty sources of one block's worth each, told apart by a token of their own."""
    stored = StoredTokenizer.of(tokenizer)
    letters = [chr(code) for code in range(ord("A"), ord("A") + 30)]
    ids = [stored.load().encode(letter, add_special_tokens=False).ids[0] for letter in letters]
    sources = [
        source(tmp_path, f"s{i}", [letter] * 100, share=share)
        for i, (letter, share) in enumerate(zip(letters, TABLE_10, strict=True))
    ]
    wanted = 9_973
    found = open_blocks(sources, tokenizer, length=16, wanted=wanted, seed=0)
    assert found.shape == (wanted, 16)
    first_N = found[np.arange(wanted)].max(1)
    shares = [100 * (first_N == one).mean() for one in ids]
    np.testing.assert_allclose(shares, np.array(TABLE_10) / sum(TABLE_10) * 100, atol=100 / wanted)
    np.testing.assert_allclose(shares, TABLE_10, atol=0.1)
    report = found.report()
    np.testing.assert_allclose([row["share"] for row in report], shares)
    assert report[0]["epochs"] == pytest.approx(report[0]["blocks"] / 12)  # 100 texts of two tokens


def test_blocks_are_the_packed_texts(tmp_path, tokenizer):
    texts = varied(300)
    found = open_blocks([source(tmp_path, "a", texts)], tokenizer, length=32, wanted=10**6, seed=1)
    packed = pack(tokenizer, texts, 32)
    assert sorted_blocks(found) == sorted(packed.tolist())
    assert found[np.arange(len(found))].tolist() != packed.tolist()  # in another order
    assert found[np.array([3, 3])].dtype == np.uint16
    (row,) = found.report()
    assert row["unused tokens"] == row["tokens"] - found.shape[0] * 32
    assert (row["texts"], row["epochs"], row["share"]) == (300, 1.0, 100.0)


@pytest.fixture
def small_units(monkeypatch):
    monkeypatch.setattr(tokenized, "UNIT_BYTES", 1000)


def test_a_larger_appetite_later_changes_no_earlier_block(tmp_path, small_units, tokenizer):
    sources = [source(tmp_path, "a", varied(400), share=60.0), source(tmp_path, "b", varied(300), share=40.0)]

    def opened(wanted, length=16):
        return open_blocks(sources, tokenizer, length=length, wanted=wanted, seed=0, workers=1)

    few = opened(40)
    before, prepared = few[np.arange(40)].tolist(), few.parts[0].prepared
    many = opened(300, length=8)
    assert many.parts[0].prepared.units > prepared.units
    assert many.parts[0].prepared.folder == prepared.folder  # one file for every length
    assert opened(40)[np.arange(40)].tolist() == before


def test_without_shares_sources_give_what_they_have(tmp_path, tokenizer):
    sources = [source(tmp_path, "a", varied(300)), source(tmp_path, "b", varied(100))]
    found = open_blocks(sources, tokenizer, length=16, wanted=40, seed=0)
    counts, tokens = zip(*((p.count, len(p.tokens)) for p in found.parts), strict=True)
    assert sum(counts) == 40
    assert counts[0] / 40 == pytest.approx(tokens[0] / sum(tokens), abs=1 / 40)
    everything = open_blocks(sources, tokenizer, length=16, wanted=10**6, seed=0)
    assert [part.count for part in everything.parts] == [n // 16 for n in tokens]


def test_a_small_source_repeats_in_another_order(tmp_path, tokenizer):
    sources = [source(tmp_path, "a", varied(40), share=50.0), source(tmp_path, "b", varied(400), share=50.0)]
    found = open_blocks(sources, tokenizer, length=16, wanted=200, seed=0)
    part, rows = found.parts[0], found[np.arange(100)].tolist()
    assert part.distinct < 50
    one, two = rows[: part.distinct], rows[part.distinct : 2 * part.distinct]
    assert sorted(one) == sorted(two) and one != two
    assert found.report()[0]["epochs"] == pytest.approx(100 / part.distinct)


def test_held_out_and_bad_rows_are_left_out_and_counted(tmp_path, tokenizer):
    texts = varied(400)
    one = source(tmp_path, "a", [*texts, " ", "\ud800"], hold_out=0.3, bad_rows="drop")
    found = open_blocks([one], tokenizer, length=16, wanted=10**6, seed=0)
    (row,) = found.report()
    assert row["texts"] + row["held out"] == 400
    assert 100 < row["held out"] < 220
    assert sum(count for key, count in row.items() if key.startswith("dropped: ")) == 2


def test_less_than_a_block_is_refused(tmp_path, tokenizer):
    full, short = source(tmp_path, "full", varied(50)), source(tmp_path, "short", ["Two words"])
    with pytest.raises(ValueError, match=r"'short' has .* not one block of 64"):
        open_blocks([full, short], tokenizer, length=64, wanted=10, seed=0)
    shared = [replace(full, share=99.0), replace(short, share=1.0)]
    with pytest.raises(ValueError, match=r"'short' has .* not one block of 64"):
        open_blocks(shared, tokenizer, length=64, wanted=100, seed=0)
    assert len(open_blocks(shared, tokenizer, length=64, wanted=10, seed=0)) == 10  # not a block of it
    with pytest.raises(ValueError, match="no text"):
        open_blocks([], tokenizer, length=64, wanted=10, seed=0)
