"""What makes two rows the same, however they are spelt: in splits, keys, batches, mining and evaluation."""

from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset

import tiny
from tiny_sources import PAIR_COLUMNS, own, write_as
from unmask.data.batches import BatchPlan
from unmask.data.registry import split_of
from unmask.data.rows import read, units
from unmask.data.spelling import canonical, distinct
from unmask.data.tokenize import Table, token_pairs
from unmask.data.tokens import PlainTokenizer, Truncation

ONES = [1, 1.0, "1", " 1", "1\n", "1.0", Decimal("1.00"), "\u00a01\u3000"]
SAME = [ONES, ["caf\u00e9 noir", "cafe\u0301  noir", "caf\u00e9\u00a0noir\n"], [-7, "-7.0"]]
DIFFERENT = ["1", "10", "01", "1.10", "1.1", "v1.0", "x\u00b2", "x2", "Word", "word"]


@pytest.mark.parametrize("spelt", SAME)
def test_spellings_of_one_value_are_one_label_and_in_one_split(spelt):
    assert len({canonical(value) for value in spelt}) == 1
    assert len({split_of(own(hold_out=0.3), str(value)) for value in spelt}) == 1


def test_other_values_stay_others():
    assert len({*map(canonical, DIFFERENT)}) == len(DIFFERENT)
    texts, number_N = distinct(["b", "a", "b ", "a", "c"])
    assert (texts, number_N.tolist()) == (["b", "a", "c"], [0, 1, 0, 1, 2])


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_one_topic_of_two_files_is_in_one_split(tmp_path, suffix):
    """In the second file a value is missing, so that its whole numbers became floats."""
    files, splits = [], {}
    for kind in (int, float):
        rows = [{"query": "q", "document": f"{kind} {i}", "topic": kind(i)} for i in range(100)]
        files.append(write_as(tmp_path / f"{kind.__name__}{suffix}", rows))
    source = own(*files, columns=PAIR_COLUMNS | {"key": "topic"}, hold_out=0.3)
    for row in (row for unit in units(source) for row in read(source, unit, {})):
        splits.setdefault(row["key"], set()).add(row["split"])
    assert len(splits) == 100 and all(len(found) == 1 for found in splits.values())


@pytest.mark.parametrize("shared", ["query", "document", "key"])
def test_rows_that_share_a_query_a_document_or_a_key_are_in_no_batch_together(shared):
    """54 of them with four rows each, every one spelt in another way."""
    rows = [{name: f"{name} {i}" for name in ("query", "document", "key")} for i in range(216)]
    spelt = ["it is {}", " it is {}", "it  is {}", "it\u00a0is {}\n"]
    rows = [row | {shared: spelt[i % 4].format(i // 4)} for i, row in enumerate(rows)]
    table = Table(Dataset.from_list(rows), shared, "", PlainTokenizer(tiny.tokenizer()))
    data = token_pairs(table, Truncation(8), Truncation(8))
    plan = BatchPlan({"x": data.keys}, SimpleNamespace(batch=48, steps=20, seed=0))
    for step in range(20):
        chosen = plan(step)[1] // 4
        assert len(chosen) == len(np.unique(chosen)) > 24
