"""Clusters of look-alikes: against faiss run directly, and the filter's rule written row by row."""

from dataclasses import replace
from itertools import chain, pairwise

import faiss
import numpy as np
import pytest

import tiny
from closeness import assert_close
from unmask.config import load_preset
from unmask.data import mining
from unmask.data.batches import BatchPlan, ClusterOrder
from unmask.data.mining import Neighbours, Surrogate, clusters, negative_similarity, neighbours, unit
from unmask.data.tokenize import TokenPairs
from unmask.data.tokens import PlainTokenizer

CONFIG = replace(load_preset("smoke").clusters, iterations=10, attempts=2)
PAIR = replace(load_preset("smoke").pair, batch=8, steps=100, seed=0)


def pairs(count=400, width=12, *, groups=8, finer=8, noise=0.3, seed=0):
    """Groups of groups of look-alikes, queries near their documents."""
    rng = np.random.default_rng(seed)
    coarse, fine = rng.normal(size=(groups, width)), rng.normal(size=(groups, finer, width))
    group_N, finer_N = rng.integers(groups, size=count), rng.integers(finer, size=count)
    d_ND = 2 * coarse[group_N] + fine[group_N, finer_N] + 0.3 * rng.normal(size=(count, width))
    return seen(d_ND + noise * rng.normal(size=d_ND.shape), d_ND)


def seen(q_ND, d_ND):
    """Pairs whose texts have these vectors."""
    return Neighbours(*(unit(x_ND).astype(np.float16) for x_ND in (q_ND, d_ND)))


def plan(keys, order, **options):
    return BatchPlan({"x": keys}, replace(PAIR, **options), orders={"x": order} if order else {})


def ordered(near, size, config, seed):
    return ClusterOrder.of(clusters(near, size, config, seed))


def test_clusters_are_those_of_faiss_run_directly():
    near = pairs()
    q_ND, d_ND = near.q_ND.astype(np.float32), near.d_ND.astype(np.float32)
    direct = faiss.Kmeans(24, 10, niter=10, nredo=2, spherical=True, seed=7, min_points_per_centroid=1)
    direct.train(np.vstack([np.hstack([q_ND, d_ND]), np.hstack([d_ND, q_ND])]))
    expected_N = direct.assign(np.hstack([q_ND, d_ND]))[1]
    order = ordered(near, 40, CONFIG, seed=7)
    ours = np.split(order.rows_N, order.ends_K[:-1])
    theirs = [np.flatnonzero(expected_N == cluster) for cluster in np.unique(expected_N)]
    assert sorted(map(tuple, ours)) == sorted(map(tuple, theirs))


def test_smaller_clusters_make_harder_batches():
    near, hardness = pairs(1600), []
    for size in (0, 800, 200, 50):
        batches = plan(range(1600), ordered(near, size, CONFIG, seed=0) if size else None, batch=16, seed=3)
        hardness.append(np.mean([negative_similarity(near, batches(step)[1]) for step in range(20)]))
    assert hardness == sorted(hardness) and min(np.diff(hardness)) > 0.02


def test_greedy_order_goes_to_the_nearest_centroid_left():
    centroids = unit(np.random.default_rng(0).normal(size=(30, 4)))
    order = mining.greedy_order(centroids, start=11).tolist()
    left = set(range(30)) - {11}
    assert order[0] == 11
    for last, now in pairwise(order):
        assert now == max(left, key=lambda cluster: centroids[cluster] @ centroids[last])
        left.remove(now)
    assert not left


def test_batches_of_look_alikes_are_a_function_of_seed_and_step():
    order = ordered(pairs(), 8, CONFIG, seed=0)
    one, two = plan(range(400), order), plan(range(400), order)
    backward = {step: two(step)[1].tolist() for step in reversed(range(100))}
    forward = [one(step)[1].tolist() for step in range(100)]
    assert forward == [backward[step] for step in range(100)]
    for epoch in (forward[:50], forward[50:]):
        assert sorted(chain(*epoch)) == list(range(400))
    assert {tuple(sorted(rows)) for rows in forward[:50]} != {tuple(sorted(rows)) for rows in forward[50:]}


def test_a_batch_of_look_alikes_is_filled_with_other_keys():
    """Each key four times in a row: eight rows hold two or three keys, yet a batch has eight."""
    order, keys = ClusterOrder(np.arange(400), np.arange(8, 401, 8)), [i // 4 for i in range(400)]
    for step in range(100):
        rows = plan(keys, order)(step)[1]
        assert len({keys[row] for row in rows}) == len(rows) == 8


@pytest.mark.parametrize("margin", [0.0, 0.05])
def test_the_filter_is_its_rule(margin):
    near, rows = pairs(noise=1.5), np.random.default_rng(0).permutation(400)[:60]
    q_ND, d_ND = near.q_ND[rows].astype(np.float64), near.d_ND[rows].astype(np.float64)
    bars_N = [q @ d + margin for q, d in zip(q_ND, d_ND)]
    expected = [[i == j or q @ d < bars_N[i] for j, d in enumerate(d_ND)] for i, q in enumerate(q_ND)]
    mask_NN = near.negative_mask(rows, margin)
    assert mask_NN.tolist() == expected
    assert 0 < (~mask_NN).mean() < 0.5


@pytest.fixture
def stored():
    return PlainTokenizer(tiny.tokenizer())


class Letters:
    """An embedder that counts letters, and notes what it was asked."""

    def __init__(self):
        self.seen = []

    def encode(self, texts):
        self.seen += texts
        return np.array([[1 + text.count(sign) for sign in "0123456789aei"] for text in texts], np.float32)


def tokens(texts):
    return tiny.tokenize(tiny.tokenizer(), texts, 99)


def find(data, stored, name, load, **options):
    return neighbours("docs", data, stored, Surrogate(name, load, CONFIG), replace(PAIR, **options))


def test_every_distinct_text_is_embedded_once_and_kept(stored):
    queries, documents = ["is it 1?", "is it 2?", "is it 1?"], ["one: 1", "is it 2?", "two: 2"]
    data = TokenPairs(tokens(queries), tokens(documents), np.arange(3), hash="some")
    embedder = Letters()
    near = find(data, stored, "letters", lambda: embedder)
    assert sorted(embedder.seen) == sorted({*queries, *documents})
    for x_ND, texts in ((near.q_ND, queries), (near.d_ND, documents)):
        assert_close(x_ND, unit(Letters().encode(texts)), 1e-3)
    # For clusters nothing is embedded anew.
    with pytest.raises(pytest.fail.Exception):
        find(data, stored, "others", lambda: pytest.fail("loaded"))
    again = find(data, stored, "letters", lambda: pytest.fail("loaded again"), cluster_size=2)
    np.testing.assert_array_equal(again.q_ND, near.q_ND)
    assert near.order is None
    np.testing.assert_array_equal(again.order.rows_N, ordered(near, 2, CONFIG, seed=0).rows_N)
