"""Hard-negative mining (`unmask.data.mining`) against a ranking of all documents for every query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from datasets import Dataset
from measure import Case

from unmask.config import TripletConfig, load_preset
from unmask.data.mining import mine
from unmask.evaluation import similarity
from unmask.evaluation.search import index

PAIRS, WIDTH, CLUSTERS = 20_000, 256, 500


class Known:
    """An embedder whose answers are there already, so that mining alone is measured."""

    def __init__(self, pairs: int):
        rng = np.random.default_rng(0)
        centres = rng.standard_normal((CLUSTERS, WIDTH))[rng.integers(0, CLUSTERS, pairs)]
        documents = centres + 0.7 * rng.standard_normal((pairs, WIDTH))
        queries = documents + 0.7 * rng.standard_normal((pairs, WIDTH))
        self.codes = {
            name: np.clip(np.rint(30 * values), -127, 127).astype(np.int8)
            for name, values in (("query", queries), ("document", documents))
        }

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        kind = texts[0].partition(" ")[0]
        return self.codes[kind][[int(text.partition(" ")[2]) for text in texts]]


def full_matrix(embedder: Known, pairs: Dataset, config: TripletConfig) -> Dataset:
    """Every similarity of 1024 queries at once, and each row sorted by itself."""
    keys = np.unique(np.asarray(pairs["key"]), return_inverse=True)[1]
    documents = list(pairs["document"])
    q_ND, d_ND = embedder.encode(list(pairs["query"])), embedder.encode(documents)
    rng = np.random.default_rng(config.seed)
    negatives = []
    for start in range(0, len(pairs), 1024):
        scores = np.asarray(similarity(q_ND[start : start + 1024], d_ND))
        for i, score_M in enumerate(scores, start):
            ranked = np.argsort(-score_M, kind="stable")
            ranked = ranked[keys[ranked] != keys[i]]
            safe = score_M[ranked] <= score_M[i] + config.margin
            window = config.rank_window
            top, below = ranked[:window][safe[:window]], ranked[window:][safe[window:]]
            drawn = np.concatenate([rng.permutation(top), below])[: config.negatives]
            negatives.append([documents[j] for j in drawn])
    return pairs.add_column("negatives", negatives)


def mining_case(pairs: int = PAIRS) -> Case:
    config = replace(load_preset("cpu").triplet, search="exact")
    embedder, numbers = Known(pairs), range(pairs)
    table = Dataset.from_dict(
        {
            "query": [f"query {i}" for i in numbers],
            "document": [f"document {i}" for i in numbers],
            "key": [str(i) for i in numbers],
        }
    )

    def check() -> None:
        """Where nothing is left to chance, both take the same documents."""
        few = replace(config, rank_window=config.negatives, margin=2.5)
        some = table.select(range(min(pairs, 1000)))
        ours, peer = mine(embedder, index, some, few)[0], full_matrix(embedder, some, few)
        for mined, ranked in zip(ours["negatives"], peer["negatives"], strict=True):
            assert set(mined) == set(ranked)

    programs = {
        "unmask": {"": lambda: mine(embedder, index, table, config)},
        "full matrix": {"": lambda: full_matrix(embedder, table, config)},
    }
    setting = (
        f"{pairs:,} pairs and documents, {WIDTH} codes, window {config.rank_window}, "
        f"{torch.get_num_threads()} threads"
    )
    return Case(setting, "pairs/s", pairs, programs, check)


CASES = {"mining": mining_case}
