"""Hard negatives: documents that an embedder takes for an answer and that are none."""

from __future__ import annotations

from typing import Any

import numpy as np
from datasets import Dataset

from unmask.config import TripletConfig
from unmask.embedder import Embedder
from unmask.evaluation.ranking import similarity


def mine(embedder: Embedder, pairs: Dataset, config: TripletConfig) -> tuple[Dataset, dict[str, Any]]:
    """Adds to each pair of one data set `config.negatives` hard negatives from the same data set.

    Candidates are the `rank_window` documents most similar to the query. The positive, documents with the
    same key, and whatever is more than `margin` better than the positive (a likely unlabelled positive, the
    rule of the pair loss) are skipped; `negatives` of the rest are drawn at random. Where too few are left,
    documents from below the window fill up in rank order.

    Returns: the pairs with a column `negatives`, and statistics: similarities of positives and negatives,
        skipped shares.
    Raises: ValueError if the data set is too small to hold that many negatives.
    Source: pplx-embed, section 2.5; window and margin are choices of ours, the paper gives none.
    """
    keys = np.unique(np.asarray(pairs["key"]), return_inverse=True)[1]
    count, window = config.negatives, min(config.rank_window, len(pairs) - 1)
    documents = list(pairs["document"])
    q_ND = embedder.encode(list(pairs["query"]), max_length=config.query_length)
    d_ND = embedder.encode(documents, max_length=config.document_length)
    rng = np.random.default_rng(config.seed)
    negatives, chosen_similarity, positive_similarity = [], [], []
    skipped = considered = 0
    for start in range(0, len(pairs), 1024):
        scores = np.asarray(similarity(q_ND[start : start + 1024], d_ND))
        for row, score_M in enumerate(scores):
            i = start + row
            ranked = np.argsort(-score_M, kind="stable")
            ranked = ranked[keys[ranked] != keys[i]]
            if len(ranked) < count:
                raise ValueError(
                    f"data set has too few distinct documents ({len(ranked)}) for {count} negatives per query"
                )
            safe = score_M[ranked] <= score_M[i] + config.margin
            top, below = ranked[:window][safe[:window]], ranked[window:][safe[window:]]
            skipped += min(window, len(ranked)) - len(top)
            considered += min(window, len(ranked))
            drawn = np.concatenate([rng.permutation(top), below])[:count]
            # The last resort, least similar first: so few documents are safely none of the answers.
            drawn = np.concatenate([drawn, ranked[~safe][::-1][: count - len(drawn)]])
            negatives.append([documents[j] for j in drawn])
            chosen_similarity.append(score_M[drawn])
            positive_similarity.append(score_M[i])
    statistics = {
        "pairs": len(pairs),
        "skipped": skipped / considered,
        "positive_similarity": np.asarray(positive_similarity).tolist(),
        "negative_similarity": np.concatenate(chosen_similarity).tolist(),
    }
    return pairs.add_column("negatives", negatives), statistics
