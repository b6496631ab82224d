from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset

from closeness import assert_close
from unmask.config import load_preset
from unmask.data import mining
from unmask.data.mining import draw, mine
from unmask.evaluation.search import index, similarity

CONFIG = replace(load_preset("smoke").triplet, negatives=3, margin=0.05, rank_window=10, seed=0)


class Stub:
    """An embedder that looks its answers up."""

    def __init__(self, vectors):
        self.vectors, self.lengths = vectors, []

    def encode(self, texts, *, max_length):
        self.lengths.append(max_length)
        return np.stack([self.vectors[text] for text in texts])


def case(count=40, *, keys=None, queries=None, documents=None, seed=0, spread=60):
    """Queries near their documents, documents near one another: several come within the margin.

    keys, queries, documents: number of each row's; default: its own.
    """
    rng = np.random.default_rng(seed)
    centre = rng.integers(-90, 91, 16)
    d_ND = np.clip(centre + rng.integers(-spread, spread + 1, (count, 16)), -127, 127).astype(np.int8)
    q_ND = np.clip(d_ND + rng.integers(-30, 31, (count, 16)), -127, 127).astype(np.int8)
    vectors = {f"q{i}": q_ND[i] for i in range(count)} | {f"d{i}": d_ND[i] for i in range(count)}
    keys, queries, documents = ([*(part or range(count))] for part in (keys, queries, documents))
    pairs = {"query": [f"q{i}" for i in queries], "document": [f"d{i}" for i in documents]}
    pairs |= {"key": [str(i) for i in keys], "dataset": ["few"] * len(keys)}
    scores_NN = similarity(q_ND[queries], d_ND[documents]).numpy()
    return Stub(vectors), Dataset.from_dict(pairs), scores_NN


def linked(count=60):
    """Rows that share a key, a query or a document, and documents that share their vectors."""
    keys = [i // 2 if i < 20 else i for i in range(count)]
    queries = [i // 3 * 3 if 20 <= i < 32 else i for i in range(count)]
    documents = [i - 5 if 40 <= i < 45 else i for i in range(count)]
    embedder, pairs, scores_NN = case(count, keys=keys, queries=queries, documents=documents)
    for i in range(50, 55):  # equal vectors: equal scores, to be taken in order of appearance
        embedder.vectors[f"d{i}"] = embedder.vectors["d33"]
        scores_NN[:, i] = scores_NN[:, 33]
    return embedder, pairs, scores_NN


def columns(mined):
    return [[int(text[1:]) for text in texts] for texts in mined["negatives"]]


def naive(pairs, scores_NN, config):
    """The rule, row by row, from the matrix of all scores: the negatives of each row, and the ranks of these
    and of its document."""
    query, document, key = pairs["query"][:], pairs["document"][:], pairs["key"][:]
    candidates = sorted({document.index(text) for text in document})
    window = min(max(config.rank_window, config.negatives), len(candidates))
    lottery_NW = np.random.default_rng(config.seed).random((len(pairs), window))
    negatives, ranks, own_ranks = [], [], []
    for i, score_N in enumerate(scores_NN):
        like = [j for j in range(len(pairs)) if key[j] == key[i] or query[j] == query[i]]
        own = {document[j] for j in like} | {document[i]}
        ranked = sorted(candidates, key=lambda j, s=score_N: (-s[j], j))
        others = [j for j in ranked if document[j] not in own]
        safe = [j for j in others if score_N[j] <= score_N[i] + np.float32(config.margin)]
        top = others[:window]
        chosen = sorted(set(top) & set(safe), key=lambda j, n=i, t=top: lottery_NW[n, t.index(j)])
        if len(chosen) < config.negatives:
            chosen = safe
        if len(chosen) < config.negatives:
            chosen = sorted(others, key=lambda j, s=score_N: (s[j], j))
        negatives.append(chosen[: config.negatives])
        ranks.append([min(others.index(j), window) + 1 for j in negatives[-1]])
        own_ranks.append(1 + sum(score_N[j] > score_N[i] for j in top))
    return [[int(document[j][1:]) for j in row] for row in negatives], ranks, own_ranks


@pytest.mark.parametrize("margin", [-2.5, 0.0, 0.05, 0.3, 2.5])
@pytest.mark.parametrize("window", [1, 10, 1000])
def test_mining_equals_the_rule_written_row_by_row(margin, window, monkeypatch):
    monkeypatch.setattr(mining, "SCORES", 64)
    embedder, pairs, scores_NN = linked()
    config = replace(CONFIG, margin=margin, rank_window=window)
    mined, found = mine(embedder, index, pairs, config)
    expected, ranks, own_ranks = naive(pairs, scores_NN, config)
    assert columns(mined) == expected and embedder.lengths == [config.query_length, config.document_length]
    assert (found.negative_rank.tolist(), found.positive_rank.tolist()) == (ranks, own_ranks)
    assert (found.documents, found.window) == (55, min(max(window, 3), 55))
    assert_close(found.positive_similarity, np.diag(scores_NN), 1e-6)
    first_N = [pairs["document"][:].index(f"d{j}") for row in expected for j in row]  # columns of the scores
    of_negatives = scores_NN[np.repeat(np.arange(60), 3), first_N].reshape(60, 3)
    assert_close(found.negative_similarity, of_negatives, 1e-6)
    monkeypatch.setattr(mining, "ROWS", 7)
    assert columns(mine(embedder, index, pairs, config)[0]) == expected


def test_the_text_of_a_query_is_none_of_its_negatives():
    """Of pairs in both directions; it is the most similar of all documents."""
    embedder, pairs, _ = case(12)
    again = [
        {**row, "query": row["document"], "document": f"{row['query']} ", "key": f"b{i}"}
        for i, row in enumerate(pairs)
    ]
    embedder.vectors |= {f"{text} ": vector for text, vector in embedder.vectors.items()}
    mined, _ = mine(embedder, index, Dataset.from_list([*pairs, *again]), replace(CONFIG, margin=2.0))
    assert not any(row["query"] in [text.strip() for text in row["negatives"]] for row in mined)


def test_rows_of_one_query_or_document_are_own_however_they_are_spelt():
    """Else the answer of one would be mined as a negative of the other."""
    embedder, pairs, _ = case(12, queries=[0, 0, *range(2, 12)], documents=[*range(11), 10])
    expected = columns(mine(embedder, index, pairs, CONFIG)[0])
    spelt = {"query": {1: " q0\u00a0"}, "document": {11: "d10\n"}}
    for name, texts in spelt.items():
        column = [texts.get(i, text) for i, text in enumerate(pairs[name])]
        pairs = pairs.remove_columns(name).add_column(name, column)
    assert columns(mine(embedder, index, pairs, CONFIG)[0]) == expected


SMALL = [({"keys": [0, 0, 2, 3]}, 2), ({"queries": [0, 0, 0, 3]}, 1), ({"documents": [0] * 4}, 0)]


@pytest.mark.parametrize(("columns", "left"), SMALL)
def test_a_data_set_that_is_too_small_is_named(columns, left):
    embedder, pairs, _ = case(4, **columns)
    with pytest.raises(ValueError, match=f"'few' has a query with {left} documents that are not its own"):
        mine(embedder, index, pairs, CONFIG)


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
