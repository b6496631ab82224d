"""What a training reads, tokenised once: the same whatever the kills and the number of shards; pairs and
documents cut to a stage's lengths, blocks of text in the sources' shares."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset

import tiny
from tiny_sources import own, write_as
from unmask.config import load_preset
from unmask.data import tokenize
from unmask.data.batches import BatchPlan
from unmask.data.registry import split_of
from unmask.data.spelling import text_id
from unmask.data.tokenize import Table, build, open_blocks, pairs_as_documents, token_documents, token_pairs
from unmask.data.tokens import PlainTokenizer, Truncation, pack
from unmask_study.report import paper_table

PIECES = range(1, 21)


def work(piece):
    """Piece 3 → three numbers, and as many tokens."""
    counters = json.dumps({"tokens": piece, "odd": piece % 2})
    return pa.table({"flat": np.full(piece, piece, np.int32)}, metadata={"counters": counters})


def built(folder, work=work, **wanted):
    return build(folder, lambda: PIECES, work, "", **wanted)


def killed(folder, at):
    """Makes shards in a process that is killed before the last of `at` is whole."""

    def kill(source, path):
        if path.name == f"{at - 1:05}.arrow":
            os.kill(os.getpid(), signal.SIGKILL)
        os.rename(source, path)

    if not (child := os.fork()):
        os.replace = kill
        built(folder)
    return os.waitpid(child, 0)[1]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def whole(tmp_path):
    done = built(tmp_path / "whole")
    np.testing.assert_array_equal(done.column("flat").to_numpy(), np.repeat(PIECES, PIECES))
    assert done.counters == {"tokens": 210, "odd": 10}
    return contents(done.folder)


def test_killed_at_any_moment_it_goes_on_and_ends_with_the_same_bytes(whole, tmp_path):
    folder = tmp_path / "x"
    for at in (1, 3, 11):
        assert killed(folder, at) == signal.SIGKILL
        assert len([*folder.glob("0*.arrow")]) == at - 1
    for size in (None, 0, 8, 300):  # cut short by a power failure
        if size is not None:
            os.truncate(folder / "00004.arrow", size)
        with ThreadPoolExecutor() as pool:  # who wants the same waits
            list(pool.map(built, [folder] * 3))
        assert contents(folder) == whole


def test_what_is_wanted_is_no_part_of_the_result(whole, tmp_path, monkeypatch):
    folder = tmp_path / "x"
    for wanted, shards in ((0, 0), (15, 5), (16, 6)):  # 1 + 2 + 3 + 4 + 5
        assert len(built(folder, wanted=wanted).tables) == shards
    built(folder, wanted=10**6)
    assert contents(folder) == whole
    monkeypatch.setattr(tokenize, "locked", None)  # what is finished is neither locked nor touched
    assert len(built(folder, None).tables) == len(built(folder, None, wanted=15).tables) == 20


# --- pairs and documents

SHARES = [row["Prevalence"] for row in paper_table(10).values()]  # of the pretraining data, by language
TEXTS = ["Read a table from a file.", "Die Datei wird gelesen.", "Compute the mean of an array, ignoring it."]

CONTEXTUAL = replace(load_preset("smoke").contextual, query_length=8, chunk_length=12, chunks=2)
ANSWERS = {"document": ["from a file", "from a file again", "of an array"], "key": ["read", "read", "mean"]}
PAIRS = Dataset.from_dict({"query": ["Read a table", "Read a file", "Compute the mean"]} | ANSWERS)
CHUNKS = [["one", "two", "three", "four", "five"], ["six"], ["seven", "eight", "nine"]]
ASKED = {"queries": [["first", "fourth", "fifth"], ["sixth", "6"], ["seventh"]]}
ASKED |= {"golds": [[0, 3, 4], [0, 0], [0]], "key": ["a", "b", "a"]}
DOCUMENTS = Dataset.from_dict({"chunks": CHUNKS} | ASKED)


@pytest.fixture
def stored():
    return PlainTokenizer(tiny.tokenizer())


def tokens(texts, length=12):
    return [ids.tolist() for ids in tiny.tokenize(tiny.tokenizer(), texts, length)]


def lists(arrays):
    return [array.tolist() for array in arrays]


def pairs(rows, stored, **options):
    return token_pairs(
        Table(rows, "b", "", stored), **{"query": Truncation(8), "document": Truncation(12)} | options
    )


def test_pairs_are_their_texts_tokens_cut_to_the_lengths(stored, monkeypatch):
    """In any number of shards."""
    monkeypatch.setattr(tokenize, "ROWS", 7)
    many = Dataset.from_list([row | {"key": str(i)} for i, row in enumerate(PAIRS.to_list() * 20)]).shuffle(0)
    found = pairs(many, stored, query=Truncation(2))
    assert lists(found.queries) == tokens(many["query"][:], 2)
    assert lists(found.documents) == tokens(many["document"][:])
    assert [len({*column}) for column in found.keys.T.tolist()] == [60, 3, 3]  # keys, queries, documents
    over = [len(ids) - 2 for ids in tokens(many["query"][:]) if len(ids) > 2]
    assert {"texts cut": len(over), "tokens cut": sum(over), "rows": 60}.items() <= found.counters.items()
    assert lists(pairs(PAIRS, stored).queries) == tokens(PAIRS["query"][:], 8)  # another preparation


def test_a_row_has_the_negatives_that_it_has_and_rows_without_are_counted(stored):
    mined = PAIRS.add_column("negatives", [["x", "y"], [], ["z", "x", "y"]])
    found = pairs(mined, stored, negatives=3)
    assert lists(found.queries) == tokens(["Read a table", "Compute the mean"])
    assert [lists(row) for row in found.negatives] == [tokens(["x", "y"]), tokens(["z", "x", "y"])]
    assert len(found.keys) == 2 and found.counters["rows without negatives"] == 1
    (x, y), (_, *again) = found.negative_keys
    assert again == [x, y] and lists(pairs(mined, stored, negatives=1).negatives[0]) == tokens(["x"])


def held(*texts):
    return np.array([text_id(text) for text in texts], np.uint64)


def test_what_shares_a_text_with_a_held_out_row_is_left_out_and_counted(stored):
    """Whatever the columns: a held-out query is no document, a negative that is held out leaves its row."""
    mined = PAIRS.add_column("negatives", [["x", "y"], ["x"], ["z", "x", "y"]])
    found = token_pairs(
        Table(mined, "b", "", stored, held("of  an array", "x")), Truncation(8), Truncation(12), 2
    )
    assert lists(found.queries) == tokens(["Read a table"])
    assert [lists(row) for row in found.negatives] == [tokens(["y"])]
    shared = "rows that share a text with a held-out row"
    assert (found.counters[shared], found.counters["negatives that are held out"]) == (2, 1)
    out = held("first", "six", "three")  # a query, a whole document, and a chunk, which is another one here
    found = token_documents(Table(DOCUMENTS, "d", "", stored, out), CONTEXTUAL)
    assert [lists(d.queries) for d in found] == [tokens([q]) for q in ("fourth", "fifth", "seventh")]
    assert (found.counters[shared], found.counters["queries that are held out"]) == (1, 1)


def test_pairs_as_documents_share_no_batch_where_they_share_a_text(stored):
    both = [
        {"query": q, "document": d, "key": d} for q, d in (("a", "b"), ("b", "a"), ("c", "d"), ("d", "e"))
    ]
    config = replace(CONTEXTUAL, single=9)
    found = pairs_as_documents(Table(Dataset.from_list(both), "b", "", stored), config)
    assert sorted(len({*row}) for row in found.keys.tolist()) == [2, 2, 2, 2]
    plan = BatchPlan({"b": found.keys}, replace(load_preset("smoke").contextual, batch=4, steps=20))
    for step in range(20):
        texts = [key for row in plan(step)[1] for key in {*found.keys[row].tolist()}]
        assert len(texts) == len({*texts}) > 2


def test_a_long_document_becomes_windows_that_keep_their_own_queries(stored):
    found = token_documents(Table(DOCUMENTS, "d", "", stored), CONTEXTUAL)
    expected = [(["one", "two"], ["first"], [0]), (["three", "four"], ["fourth"], [1])]
    expected += [(["five"], ["fifth"], [0]), (["six"], ["sixth", "6"], [0, 0])]
    expected += [(["seven", "eight"], ["seventh"], [0])]
    windows = [(lists(d.chunks), lists(d.queries), d.golds) for d in found]
    assert windows == [(tokens(chunks), tokens(queries), golds) for chunks, queries, golds in expected]
    a, *same, b, last = found.keys[:, 0]
    assert same == [a, a] and last == a != b  # parts of one, or a document of its key
    counted = {"documents divided": 2, "chunks without a query near them": 1, "rows": 5}
    assert counted.items() <= found.counters.items()


def test_pairs_as_documents_are_random_pairs_of_different_keys(stored):
    many = Dataset.from_list([row | {"key": str(i // 2)} for i, row in enumerate(PAIRS.to_list() * 40)])
    rows = [(tokens([row["document"]]), tokens([row["query"]]), [0]) for row in PAIRS.to_list()]

    def drawn(count, seed):
        found = pairs_as_documents(Table(many, "b", "", stored), replace(CONTEXTUAL, single=count, seed=seed))
        return [rows.index((lists(d.chunks), lists(d.queries), d.golds)) for d in found]

    assert len(drawn(50, 0)) == 50 and drawn(50, 0) != drawn(50, 1)
    assert len(drawn(1000, 0)) == 60  # as many as there are keys


@pytest.mark.parametrize("column", ["query", "document"])
def test_no_tokens_and_no_room_are_refused(column, stored):
    rows = PAIRS.map(lambda row, i: {column: "" if i == 1 else row[column]}, with_indices=True)
    with pytest.raises(ValueError, match=r"data set 'b', \w+, row 1: '' has no tokens. Remove or fill it"):
        pairs(rows, stored)
    with pytest.raises(ValueError, match=r"2 tokens at most, .* raise the length"):
        pairs(PAIRS, stored, **{column: Truncation(2, "one two three ")})


# --- blocks


def source(folder, name, texts, **more):
    path = write_as(folder / f"{name}.jsonl", [{"text": text} for text in texts])
    return own(path, role="text", name=name, **more)


def opened(*sources, wanted=10**6, length=16, seed=0):
    config = replace(load_preset("smoke").ar, length=length, steps=wanted, batch=1, seed=seed)
    return open_blocks(sources, PlainTokenizer(tiny.tokenizer()), config)


def varied(count, start=0):
    return [f"{TEXTS[i % 3]} {i * 7919}" for i in range(start, start + count)]


def test_shares_are_exact_to_the_block(tmp_path):
    """Thirty sources of one block's worth each, told apart by a token of their own."""
    letters, wanted = [chr(ord("A") + i) for i in range(len(SHARES))], 9_973
    ids = [ids[0] for ids in tokens(letters)]
    sources = [source(tmp_path, one, [one] * 100, share=share) for one, share in zip(letters, SHARES)]
    found = opened(*sources, wanted=wanted)
    assert len(found) == wanted and found[np.arange(wanted)].shape == (wanted, 16)
    first_N = found[np.arange(wanted)].max(1)
    shares = [100 * (first_N == one).mean() for one in ids]
    np.testing.assert_allclose(shares, np.array(SHARES) / sum(SHARES) * 100, atol=100 / wanted)
    np.testing.assert_allclose([row["share"] for row in found.report], shares)


def test_blocks_are_the_packed_texts_without_what_is_held_out_or_bad(tmp_path):
    texts = varied(400)
    one = source(tmp_path, "a", [*texts, " ", ""], hold_out=0.3, bad_rows="drop")
    found = opened(one, length=32, seed=1)
    packed = pack(tiny.tokenizer(), [text for text in texts if split_of(one, text) == "train"], 32)
    assert sorted(found[np.arange(len(found))].tolist()) == sorted(packed.tolist())
    assert found[np.arange(len(found))].tolist() != packed.tolist()  # in another order
    assert found[np.array([3, 3])].dtype == np.uint16
    (row,) = found.report
    assert (row["epochs"], row["share"]) == (1.0, 100.0)
    assert row["texts"] + row["held out"] == 400 and 100 < row["held out"] < 220
    assert sum(count for key, count in row.items() if key.startswith("dropped: ")) == 2


def test_a_larger_appetite_later_changes_no_earlier_block(tmp_path):
    files = tuple(source(tmp_path, f"{i}", varied(40, 40 * i)).files[0] for i in range(9))
    sources = [own(*files, role="text", name=name, share=share) for name, share in (("a", 60.0), ("b", 40.0))]
    few = opened(*sources, wanted=40)
    before, texts = few[np.arange(40)].tolist(), few.report[0]["texts"]
    assert 0 < texts < opened(*sources, wanted=300, length=8).report[0]["texts"]
    assert opened(*sources, wanted=40)[np.arange(40)].tolist() == before
    prepared = {path.name for path in (tmp_path / "data" / "prepared").iterdir() if path.is_dir()}
    assert len(prepared) == 2  # one file for every length


def test_without_shares_sources_give_what_they_have(tmp_path):
    sources = [source(tmp_path, "a", varied(300)), source(tmp_path, "b", varied(100))]
    found = opened(*sources, wanted=40)
    counts, tokens = zip(*((row["blocks"], row["tokens"]) for row in found.report), strict=True)
    assert sum(counts) == 40
    assert counts[0] / 40 == pytest.approx(tokens[0] / sum(tokens), abs=1 / 40)
    assert [row["blocks"] for row in opened(*sources).report] == [n // 16 for n in tokens]


def test_a_small_source_repeats_in_another_order(tmp_path):
    sources = [source(tmp_path, "a", varied(40), share=50.0), source(tmp_path, "b", varied(400), share=50.0)]
    found = opened(*sources, wanted=200)
    rows, distinct = found[np.arange(100)].tolist(), found.report[0]["tokens"] // 16
    assert distinct < 50
    one, two = rows[:distinct], rows[distinct : 2 * distinct]
    assert sorted(one) == sorted(two) and one != two
    assert found.report[0]["epochs"] == pytest.approx(100 / distinct)


def test_less_than_a_block_is_refused(tmp_path):
    full, short = source(tmp_path, "full", varied(50)), source(tmp_path, "short", ["Two words"])
    shared = [replace(full, share=99.0), replace(short, share=1.0)]
    for sources, wanted in (([full, short], 10), (shared, 100)):
        with pytest.raises(ValueError, match=r"'short' has .* not one block of 64"):
            opened(*sources, length=64, wanted=wanted)
    assert len(opened(*shared, length=64, wanted=10)) == 10  # not a block of it
