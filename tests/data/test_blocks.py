"""Blocks of text: the sources' shares, the same blocks whoever made them, memory that does not grow."""

import json
import os
import signal
import sys
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from unmask.data import blocks
from unmask.data.blocks import TextWork, largest_remainder, open_blocks, prepare_text
from unmask.data.registry import Source
from unmask.data.tokens import StoredTokenizer, pack
from unmask.study import paper

TABLE_10 = [row["Prevalence"] for row in paper.table(10)]  # percent of the pretraining data by language
TEXTS = ["Read a table from a file.", "Die Datei wird gelesen.", "Compute the mean of an array, ignoring it."]


@pytest.fixture
def tokenizer():
    import tiny  # not above: the workers of the tests below import this module, and do without torch

    return tiny.tokenizer()


@pytest.fixture(autouse=True)
def _artifacts(tmp_path, monkeypatch):
    monkeypatch.setenv("UNMASK_ARTIFACTS", str(tmp_path / "artifacts"))


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
    monkeypatch.setattr(blocks, "UNIT_BYTES", 1000)


def test_the_number_of_workers_changes_no_block(tmp_path, small_units, monkeypatch, tokenizer):
    sources = [source(tmp_path, "a", varied(120)), source(tmp_path, "b", varied(50, start=1000))]
    options = {"length": 16, "wanted": 100, "seed": 0}
    results = []
    for workers in (1, 2, 3):
        monkeypatch.setenv("UNMASK_ARTIFACTS", str(tmp_path / f"artifacts-{workers}"))
        found = open_blocks(sources, tokenizer, workers=workers, **options)
        results.append((found[np.arange(len(found))].tolist(), [part.prepared.hash for part in found.parts]))
    assert results[0] == results[1] == results[2]
    assert found.parts[0].prepared.units > 5


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


@pytest.mark.parametrize("total", [1, 7, 1000])
def test_the_largest_remainders_get_the_rest(total):
    weights = np.random.default_rng(total).random(9)
    counts = largest_remainder(weights, total)
    assert sum(counts) == total
    assert all(abs(c - w / weights.sum() * total) < 1 for c, w in zip(counts, weights, strict=True))


@dataclass(frozen=True)
class Killed(TextWork):
    """Kills the process that prepares, at its first piece that starts at or after `at` bytes."""

    at: int = 0

    def __call__(self, unit):
        if unit.start >= self.at:
            os.kill(os.getppid(), signal.SIGKILL)
        return super().__call__(unit)


def prepare_and_die(one, stored, at):
    blocks.UNIT_BYTES = 1000
    blocks.TextWork = lambda *arguments: Killed(*arguments, at)
    prepare_text(one, stored, workers=2)


def test_killed_in_the_middle_it_ends_with_the_same_hash(tmp_path, small_units, monkeypatch, tokenizer):
    one, stored = source(tmp_path, "a", varied(400)), StoredTokenizer.of(tokenizer)
    whole = prepare_text(one, stored, workers=1)
    monkeypatch.setenv("UNMASK_ARTIFACTS", str(tmp_path / "again"))
    stored = StoredTokenizer.of(tokenizer)
    for at in (14_000, 12_000, 15_000):
        process = get_context("spawn").Process(target=prepare_and_die, args=(one, stored, at))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    again = prepare_text(one, stored, workers=2)
    assert (again.hash, again.units) == (whole.hash, whole.units)
    assert (again.folder / "tokens.bin").read_bytes() == (whole.folder / "tokens.bin").read_bytes()


def peak():
    """Kilobytes that this process had in memory at most, whatever the one that started it had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


class Measured(TextWork):
    """Notes the peak of the worker that does it, after every unit."""

    def __call__(self, unit):
        result = super().__call__(unit)
        self.stored.path.with_suffix(f".{os.getpid()}.peak").write_text(str(peak()))
        return result


def prepare_measured(one, stored, connection):
    blocks.UNIT_BYTES, blocks.TextWork = 200_000, Measured
    done = prepare_text(one, stored, workers=2)
    workers = [int(path.read_text()) for path in stored.path.parent.glob("*.peak")]
    connection.send((done.units, peak(), max(workers), len(workers)))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_memory_does_not_grow_with_the_text(tmp_path, tokenizer, monkeypatch):
    texts = [" ".join(varied(20, start=i)) for i in range(800)]  # half a megabyte or so
    peaks = {}
    for times in (1, 10):
        monkeypatch.setenv("UNMASK_ARTIFACTS", str(tmp_path / str(times)))
        one, stored = source(tmp_path, f"times{times}", texts * times), StoredTokenizer.of(tokenizer)
        here, there = get_context("spawn").Pipe(duplex=False)
        process = get_context("spawn").Process(target=prepare_measured, args=(one, stored, there))
        process.start()
        units, *peaks[times], workers = here.recv()
        process.join()
        assert units >= 3 * times and workers == 2
    for large, small in zip(peaks[10], peaks[1], strict=True):
        assert large < 1.15 * small, peaks
