from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset

from closeness import assert_close
from unmask.config import load_preset
from unmask.data import mining
from unmask.data.mining import draw, mine
from unmask.data.spelling import canonical
from unmask.evaluation.search import index, similarity

CONFIG = replace(load_preset("smoke").triplet, negatives=3, margin=0.05, rank_window=10, seed=0)


class Stub:
    """An embedder that looks its answers up."""

    def __init__(self, vectors):
        self.vectors, self.lengths = vectors, []

    def encode(self, texts, *, max_length):
        self.lengths.append(max_length)
        return np.stack([self.vectors[text.strip()] for text in texts])


def case(count=40, *, keys=None, queries=None, documents=None):
    """Queries near their documents, documents near one another: several come within the margin.

    keys, queries, documents: number of each row's; default: its own.
    """
    rng = np.random.default_rng(0)
    d_ND = np.clip(rng.integers(-90, 91, 16) + rng.integers(-60, 61, (count, 16)), -127, 127).astype(np.int8)
    q_ND = np.clip(d_ND + rng.integers(-30, 31, (count, 16)), -127, 127).astype(np.int8)
    vectors = {f"q{i}": q_ND[i] for i in range(count)} | {f"d{i}": d_ND[i] for i in range(count)}
    keys, queries, documents = ([*(part or range(count))] for part in (keys, queries, documents))
    pairs = {"query": [f"q{i}" for i in queries], "document": [f"d{i}" for i in documents]}
    return Stub(vectors), pairs | {"key": [str(i) for i in keys], "dataset": ["few"] * len(keys)}


def linked(count=60):
    """Rows that share a key, a query or a document, however it is spelt; a document that is another row's
    query; and documents that share their vectors."""
    keys = [i // 2 if i < 20 else i for i in range(count)]
    queries = [i // 3 * 3 if 20 <= i < 32 else i for i in range(count)]
    documents = [i - 5 if 40 <= i < 45 else i for i in range(count)]
    embedder, pairs = case(count, keys=keys, queries=queries, documents=documents)
    pairs["query"][22] += "\u00a0"
    pairs["document"][41] += "\n"
    pairs["document"][56] = "q33 "  # the most similar of all documents
    for i in range(50, 55):  # equal vectors: equal scores, to be taken in order of appearance
        embedder.vectors[f"d{i}"] = embedder.vectors["d33"]
    return embedder, pairs


def naive(pairs, scores_NN, config):
    """The rule, row by row, from the matrix of all scores: the rows of the negatives, the ranks of these and
    of the document."""
    query, document, key = ([*map(canonical, pairs[name])] for name in ("query", "document", "key"))
    candidates = sorted({document.index(text) for text in document})
    window = min(max(config.rank_window, config.negatives), len(candidates))
    lottery_NW = np.random.default_rng(config.seed).random((len(query), window))
    negatives, ranks, positive_ranks = [], [], []
    for i, score_N in enumerate(scores_NN):
        like = [j for j in range(len(query)) if key[j] == key[i] or query[j] == query[i]]
        known = {document[j] for j in like} | {query[i]}
        ranked = sorted(candidates, key=lambda j, s=score_N: (-s[j], j))
        others = [j for j in ranked if document[j] not in known]
        safe = [j for j in others if score_N[j] <= score_N[i] + np.float32(config.margin)]
        top = others[:window]
        chosen = sorted(set(top) & set(safe), key=lambda j, n=i, t=top: lottery_NW[n, t.index(j)])
        if len(chosen) < config.negatives:
            chosen = safe
        if len(chosen) < config.negatives:
            chosen = sorted(others, key=lambda j, s=score_N: (s[j], j))
        negatives.append(chosen[: config.negatives])
        ranks.append([min(others.index(j), window) + 1 for j in negatives[-1]])
        positive_ranks.append(1 + sum(score_N[j] > score_N[i] for j in top))
    return negatives, ranks, positive_ranks


@pytest.mark.parametrize("margin", [-2.5, 0.0, 0.05, 0.3, 2.5])
@pytest.mark.parametrize("window", [1, 10, 1000])
def test_mining_equals_the_rule_written_row_by_row(margin, window, monkeypatch):
    monkeypatch.setattr(mining, "SCORES", 64)
    embedder, pairs = linked()
    texts = (embedder.encode(pairs[name], max_length=0) for name in ("query", "document"))
    scores_NN, config = similarity(*texts).numpy(), replace(CONFIG, margin=margin, rank_window=window)
    mined, statistics = mine(embedder, index, Dataset.from_dict(pairs), config)
    expected, ranks, positive_ranks = naive(pairs, scores_NN, config)
    assert mined["negatives"][:] == [[pairs["document"][j] for j in row] for row in expected]
    assert embedder.lengths[2:] == [config.query_length, config.document_length]
    assert (statistics.negative_rank.tolist(), statistics.positive_rank.tolist()) == (ranks, positive_ranks)
    assert (statistics.documents, statistics.window) == (55, min(max(window, 3), 55))
    assert_close(statistics.positive_similarity, np.diag(scores_NN), 1e-6)
    assert_close(statistics.negative_similarity, np.take_along_axis(scores_NN, np.array(expected), 1), 1e-6)
    monkeypatch.setattr(mining, "ROWS", 7)
    assert mine(embedder, index, Dataset.from_dict(pairs), config)[0]["negatives"][:] == mined["negatives"][:]


SMALL = [({"keys": [0, 0, 2, 3]}, 2), ({"queries": [0, 0, 0, 3]}, 1), ({"documents": [0] * 4}, 0)]


@pytest.mark.parametrize(("columns", "left"), SMALL)
def test_a_data_set_that_is_too_small_is_named(columns, left):
    embedder, pairs = case(4, **columns)
    with pytest.raises(ValueError, match=f"'few' has a query with {left} documents that are not its own"):
        mine(embedder, index, Dataset.from_dict(pairs), CONFIG)


def test_pairs_are_drawn_from_the_wanted_groups_in_proportion():
    sizes = {"a": ("english", 3000), "b": ("code", 1000), "tiny": ("english", 80)}
    tables, groups = {}, ("english", "code")
    for name, (group, size) in (sizes | {"other": ("multilingual", 500)}).items():
        rows = [{"query": f"q{i}", "document": f"d{i}", "key": str(i)} for i in range(size)]
        tables[name] = Dataset.from_list([row | {"dataset": name, "group": group} for row in rows])
    whole = SimpleNamespace(datasets=lambda *_: list(tables), pairs=lambda split, name: tables[name])
    drawn, again, other = (draw(whole, groups, 1020, seed) for seed in (0, 0, 1))
    assert {name: len(rows) for name, rows in drawn.items()} == {"a": 750, "b": 250, "tiny": 64}
    assert len(set(drawn["a"]["query"])) == 750
    assert drawn["a"]["query"][:] == again["a"]["query"][:] != other["a"]["query"][:]
    everything = draw(whole, groups, 10_000, seed=0)
    assert {name: len(rows) for name, rows in everything.items()} == {"a": 3000, "b": 1000, "tiny": 80}
    with pytest.raises(ValueError, match="no training pairs of the groups cross-lingual: set triplet"):
        draw(whole, ["cross-lingual"], 10, seed=0)
