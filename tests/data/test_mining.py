from dataclasses import replace

import numpy as np
import pytest
from datasets import Dataset

from unmask.config import load_preset
from unmask.data.mining import mine
from unmask.evaluation.ranking import similarity

CONFIG = replace(load_preset("smoke").triplet, negatives=3, margin=0.05, rank_window=10, seed=0)


class Stub:
    """An embedder that looks its answers up."""

    def __init__(self, vectors):
        self._vectors, self.lengths = vectors, []

    def encode(self, texts, *, max_length):
        self.lengths.append(max_length)
        return np.stack([self._vectors[text] for text in texts])


def case(count=40, *, keys=None, seed=0, spread=60):
    """Queries near their documents, documents near one another: several come within the margin."""
    rng = np.random.default_rng(seed)
    centre = rng.integers(-90, 91, 16)
    documents = np.clip(centre + rng.integers(-spread, spread + 1, (count, 16)), -127, 127).astype(np.int8)
    queries = np.clip(documents + rng.integers(-30, 31, (count, 16)), -127, 127).astype(np.int8)
    vectors = {f"q{i}": queries[i] for i in range(count)} | {f"d{i}": documents[i] for i in range(count)}
    pairs = Dataset.from_dict(
        {
            "query": [f"q{i}" for i in range(count)],
            "document": [f"d{i}" for i in range(count)],
            "key": keys or [str(i) for i in range(count)],
        }
    )
    return Stub(vectors), pairs, similarity(queries, documents).numpy()


def columns(mined):
    return [[int(text[1:]) for text in texts] for texts in mined["negatives"]]


@pytest.mark.parametrize("margin", [0.0, 0.05, 0.3, 2.5])
@pytest.mark.parametrize("window", [1, 10, 1000])
def test_every_pair_gets_its_number_of_distinct_negatives_and_never_its_own_thing(margin, window):
    keys = [str(i // 2) for i in range(40)]
    embedder, pairs, _ = case(keys=keys)
    mined, _ = mine(embedder, pairs, replace(CONFIG, margin=margin, rank_window=window))
    assert mined["query"][:] == pairs["query"][:]
    for i, chosen in enumerate(columns(mined)):
        assert len(chosen) == len(set(chosen)) == 3
        assert not {j for j in chosen if keys[j] == keys[i]}


@pytest.mark.parametrize("window", [2, 5, 1000])
def test_the_margin_is_kept_wherever_there_are_enough_other_documents(window):
    embedder, pairs, scores = case()
    mined, _ = mine(embedder, pairs, replace(CONFIG, rank_window=window, margin=0.1))
    tested = 0
    for i, chosen in enumerate(columns(mined)):
        safe = scores[i] <= scores[i, i] + 0.1
        safe[i] = False
        if safe.sum() >= 3:
            tested += 1
            assert safe[chosen].all()
    assert tested > 20


def test_where_too_few_are_safe_the_least_similar_fill_up():
    embedder, pairs, scores = case(8)
    mined, statistics = mine(embedder, pairs, replace(CONFIG, margin=-2.5, rank_window=1000))
    assert statistics["skipped"] == 1
    for i, chosen in enumerate(columns(mined)):
        others = sorted(scores[i, j] for j in range(8) if j != i)
        np.testing.assert_allclose(sorted(scores[i, chosen]), others[:3])


def test_negatives_come_from_the_window_of_the_most_similar():
    embedder, pairs, scores = case()
    mined, _ = mine(embedder, pairs, replace(CONFIG, margin=0.0, rank_window=12))
    for i, chosen in enumerate(columns(mined)):
        ranked = [j for j in np.argsort(-scores[i], kind="stable") if j != i]
        safe = [j for j in ranked[:12] if scores[i, j] <= scores[i, i]]
        if len(safe) >= 3:
            assert set(chosen) <= set(safe)


def test_mining_is_deterministic_and_its_seed_matters():
    embedder, pairs, _ = case()
    first, again = (columns(mine(embedder, pairs, CONFIG)[0]) for _ in range(2))
    assert first == again
    assert columns(mine(embedder, pairs, replace(CONFIG, seed=1))[0]) != first


def test_statistics_and_lengths():
    embedder, pairs, scores = case()
    mined, statistics = mine(embedder, pairs, replace(CONFIG, query_length=7, document_length=9))
    assert embedder.lengths == [7, 9]
    assert statistics["pairs"] == 40
    assert 0 <= statistics["skipped"] <= 1
    np.testing.assert_allclose(statistics["positive_similarity"], np.diag(scores), rtol=1e-6)
    expected = [scores[i, j] for i, chosen in enumerate(columns(mined)) for j in chosen]
    np.testing.assert_allclose(statistics["negative_similarity"], expected, rtol=1e-6)


def test_a_data_set_that_is_too_small_is_refused():
    embedder, pairs, _ = case(4, keys=["a", "a", "b", "c"])
    with pytest.raises(ValueError, match="too few distinct documents"):
        mine(embedder, pairs, CONFIG)
