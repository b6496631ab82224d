import numpy as np
import pytest

from unmask.data.batches import permuted


@pytest.mark.parametrize("size", [*range(1, 40), 255, 256, 257, 1024, 1025, 99_991])
def test_every_size_is_permuted(size):
    np.testing.assert_array_equal(np.sort(permuted(np.arange(size), size, [7, size])), np.arange(size))


def test_a_part_is_what_the_whole_says():
    whole = permuted(np.arange(1000), 1000, 3)
    some = np.array([[5, 999], [0, 5]])
    np.testing.assert_array_equal(permuted(some, 1000, 3), whole[some])
    assert permuted(np.empty(0, np.int64), 1000, 3).shape == (0,)


def test_the_seed_decides_the_order():
    orders = {tuple(permuted(np.arange(50), 50, [0, seed])) for seed in range(20)}
    assert len(orders) == 20


@pytest.mark.parametrize("size", [3, 10, 100])
def test_places_are_drawn_evenly(size):
    """Over many seeds every row comes to every place equally often (χ² within five standard deviations)."""
    seeds, places = 2000, np.arange(min(size, 10))
    counts = np.zeros((size, len(places)))
    for seed in range(seeds):
        counts[permuted(places, size, [1, seed]), places] += 1
    chi2, degrees = ((counts - seeds / size) ** 2 / (seeds / size)).sum(), (size - 1) * len(places)
    assert abs(chi2 - degrees) < 5 * (2 * degrees) ** 0.5


def test_neighbours_are_torn_apart():
    order = permuted(np.arange(10_000), 10_000, 0).astype(float)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05


def test_billions_of_rows_take_no_memory():
    rows = permuted(np.arange(10**12, 10**12 + 4096), 10**13, 0)
    assert len(np.unique(rows)) == 4096
    assert rows.min() >= 0 and rows.max() < 10**13
