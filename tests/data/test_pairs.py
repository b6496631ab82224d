import numpy as np
import pytest

from unmask.data.batches import BatchPlan, curriculum


def plan(**options):
    keys = {"large": [f"l{i}" for i in range(90)], "small": [f"s{i}" for i in range(10)]}
    return BatchPlan(keys, **{"batch": 8, "steps": 400, "seed": 3} | options)


def test_a_step_is_a_function_of_seed_and_step():
    one, two = plan(), plan()
    for step in (399, 0, 17):
        assert one(step)[0] == two(step)[0]
        np.testing.assert_array_equal(one(step)[1], two(step)[1])
    assert any(one(s)[0] != plan(seed=4)(s)[0] for s in range(50))


def test_data_sets_are_drawn_in_proportion_to_their_size():
    draws = [plan()(step)[0] for step in range(400)]
    assert abs(draws.count("small") / 400 - 0.1) < 0.04


def test_an_epoch_shows_every_row_at_most_once():
    one = plan()
    first_epoch = [one(s)[1] for s in range(400) if one(s)[0] == "large"][:11]
    rows = np.concatenate(first_epoch)
    assert len(rows) == len(set(rows.tolist())) == 88


def test_a_batch_never_holds_two_rows_of_one_key():
    keys = [i // 3 for i in range(60)]
    one = BatchPlan({"x": keys}, batch=30, steps=20, seed=0)
    for step in range(20):
        chosen = [keys[i] for i in one(step)[1]]
        assert len(chosen) == len(set(chosen)) > 1


def test_the_curriculum_adds_languages_in_three_steps():
    groups = {"docs": "english", "cross": "cross-lingual", "multi": "multilingual", "code": "code"}
    allowed = curriculum(groups, (0.5, 0.25, 0.25), 100)
    assert allowed(0) == allowed(49) == {"docs"}
    assert allowed(50) == allowed(74) == {"docs", "cross"}
    assert allowed(75) == allowed(99) == set(groups)


def test_one_pair_only_is_refused():
    with pytest.raises(ValueError, match="1 usable row"):
        BatchPlan({"x": ["a"]}, batch=4, steps=1, seed=0)
    with pytest.raises(ValueError, match="at least 2"):
        BatchPlan({"x": ["a", "a", "a"]}, batch=4, steps=1, seed=0)


def test_no_data_set_at_all_is_refused():
    with pytest.raises(ValueError, match="no training data"):
        BatchPlan({}, batch=4, steps=1, seed=0)


def test_a_number_stands_for_so_many_different_rows():
    one = BatchPlan({"x": 10**12, "y": 10**11}, batch=16, steps=50, seed=0)
    rows = {step: one(step) for step in range(50)}
    assert all(len(found) == 16 for _, found in rows.values())
    assert len({int(row) for name, found in rows.values() if name == "x" for row in found}) % 16 == 0


def test_keys_are_read_from_a_file_that_is_mapped(tmp_path):
    (np.arange(5000, dtype=np.uint64) // 2).tofile(tmp_path / "keys")
    keys = np.memmap(tmp_path / "keys", np.uint64, "r")
    one = BatchPlan({"x": keys}, batch=1000, steps=5, seed=0)
    for step in range(5):
        rows = one(step)[1]
        assert len(np.unique(keys[rows])) == len(rows) > 850


def test_a_batch_goes_on_to_other_rows_when_all_are_the_same_thing():
    keys = ["a"] * 97 + ["b"]
    one = BatchPlan({"x": keys}, batch=2, steps=49, seed=0)
    for step in range(49):
        rows = one(step)[1]
        assert sorted(keys[row] for row in rows) == ["a", "b"]


def test_a_second_key_is_found_far_behind():
    with pytest.raises(ValueError, match="100000 usable"):
        BatchPlan({"x": np.zeros(100_000, np.uint64)}, batch=4, steps=1, seed=0)
    keys = np.zeros(100_000, np.uint64)
    keys[-1] = 1
    assert len(BatchPlan({"x": keys}, batch=4, steps=1, seed=0)(0)[1]) == 2


def test_data_without_english_begin_with_the_next_step():
    allowed = curriculum({"a": "multilingual", "b": "cross-lingual"}, (0.5, 0.25, 0.25), 100)
    assert [allowed(step) for step in (0, 60, 99)] == [{"b"}, {"b"}, {"a", "b"}]
    assert curriculum({"a": "code"}, (0.5, 0.25, 0.25), 100)(0) == {"a"}
