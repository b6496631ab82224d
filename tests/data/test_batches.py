"""Random order without a list of it, and the rows of every step."""

from types import SimpleNamespace

import numpy as np
import pytest

from unmask.data.batches import BatchPlan, curriculum, permuted


@pytest.mark.parametrize("size", [*range(1, 40), 255, 256, 257, 1024, 1025, 99_991])
def test_every_size_is_permuted_and_a_part_is_what_the_whole_says(size):
    whole = permuted(np.arange(size), size, [7, size])
    np.testing.assert_array_equal(np.sort(whole), np.arange(size))
    some = np.array([[5, size - 1], [0, 5]]) % size
    np.testing.assert_array_equal(permuted(some, size, [7, size]), whole[some])


@pytest.mark.parametrize("size", [3, 10, 100])
def test_places_are_drawn_evenly(size):
    """Over many seeds every row comes to every place equally often (χ² within five standard deviations)."""
    seeds, places = 2000, np.arange(min(size, 10))
    counts = np.zeros((size, len(places)))
    for seed in range(seeds):
        counts[permuted(places, size, [1, seed]), places] += 1
    chi2, degrees = ((counts - seeds / size) ** 2 / (seeds / size)).sum(), (size - 1) * len(places)
    assert abs(chi2 - degrees) < 5 * (2 * degrees) ** 0.5


def test_data_sets_are_drawn_by_their_size_and_an_epoch_shows_every_row_at_most_once():
    keys = {"large": [f"l{i}" for i in range(90)], "small": [f"s{i}" for i in range(10)]}
    plan = BatchPlan(keys, SimpleNamespace(batch=8, steps=400, seed=3))
    names, rows = zip(*map(plan, range(400)), strict=True)
    assert abs(names.count("small") / 400 - 0.1) < 0.04
    first_epoch = np.concatenate([own for name, own in zip(names, rows, strict=True) if name == "large"][:11])
    assert len(first_epoch) == len(set(first_epoch.tolist())) == 88


@pytest.mark.parametrize(("keys", "batch"), [([i // 3 for i in range(60)], 30), ([0] * 97 + [1], 2)])
def test_a_batch_never_holds_two_rows_of_one_key(keys, batch):
    """It goes on to other rows where all are the same thing."""
    one = BatchPlan({"x": keys}, SimpleNamespace(batch=batch, steps=49, seed=0))
    for step in range(49):
        chosen = [keys[row] for row in one(step)[1]]
        assert len(chosen) == len(set(chosen)) > 1


def test_rows_that_share_any_of_their_keys_are_apart():
    """In whatever places; a row that shares one with all others is passed over."""
    keys = [(0, 9), *((0, i) for i in range(1, 5)), *((i, 9) for i in range(1, 5)), (2, 5), (5, 2)]
    one = BatchPlan({"x": keys}, SimpleNamespace(batch=3, steps=60, seed=0))
    for step in range(60):
        chosen = [key for row in one(step)[1] for key in keys[row]]
        assert len(chosen) > 2 and len(set(chosen)) == len(chosen)
    for few in (keys[:5], [(0, 1), (2, 0), (0, 3)], ["a"] * 5, []):
        with pytest.raises(ValueError, match=rf"{len(few)} usable row.* at least 2"):
            BatchPlan({"x": few}, SimpleNamespace(batch=3, steps=1, seed=0))


def test_the_curriculum_adds_languages_in_three_steps():
    groups = {"docs": "english", "cross": "cross-lingual", "multi": "multilingual", "code": "code"}
    allowed = curriculum(groups, (0.5, 0.25, 0.25), 100)
    assert allowed(0) == allowed(49) == {"docs"}
    assert allowed(50) == allowed(74) == {"docs", "cross"}
    assert allowed(75) == allowed(99) == set(groups)
    # Data without English begin with the next step.
    allowed = curriculum({"a": "multilingual", "b": "cross-lingual"}, (0.5, 0.25, 0.25), 100)
    assert [allowed(step) for step in (0, 60, 99)] == [{"b"}, {"b"}, {"a", "b"}]
    assert curriculum({"a": "code"}, (0.5, 0.25, 0.25), 100)(0) == {"a"}


def test_shares_hold_whatever_the_sizes_and_the_curriculum():
    """A set whose share is used up is drawn where no other may be."""
    groups = {"docs": "english", "cross": "cross-lingual", "multi": "multilingual", "code": "code"}
    keys = dict(zip(groups, map(np.arange, (900, 30, 50, 8)), strict=True))
    shares, config = dict(zip(groups, (0.6, 0.1, 0.2, 0.1))), SimpleNamespace(batch=4, steps=1000, seed=0)
    for parts, most in (((0.1, 0.1, 0.8), 600), ((0, 0, 1), 600), ((0.7, 0, 0.3), 700)):
        plan = BatchPlan(keys, config, curriculum(groups, parts, 1000), shares=shares)
        drawn = [plan(step)[0] for step in range(1000)]
        assert set(drawn[: int(1000 * parts[0])]) <= {"docs"}
        assert drawn.count("docs") == most
        left = {name: drawn.count(name) * 0.4 / (1 - most / 1000) for name in ("cross", "multi", "code")}
        assert left == pytest.approx({"cross": 100, "multi": 200, "code": 100}, abs=30 if most > 600 else 1)
