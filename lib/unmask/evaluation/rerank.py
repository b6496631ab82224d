"""Retrieve, then rerank: what a reranker does to the best documents of an embedder, or of BM25.

Shape suffixes: N queries · M chunks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from unmask.evaluation.metrics import best_columns
from unmask.evaluation.tasks import Task, ndcg
from unmask.models.embedder import INSTRUCTIONS
from unmask.models.reranker import Reranker


def rerank_task(
    reranker: Reranker,
    task: Task,
    scores_NM: Tensor | np.ndarray,
    *,
    candidates: int,
    max_queries: int,
    query_length: int | None = None,
    document_length: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """nDCG@10 of each query before and after its best chunks were reranked; the others stay behind them.

    Equal scores, the first stage's and the reranker's, are ordered as trec_eval orders them (see
    `unmask.evaluation.metrics`). The instruction is that of the task's family.

    Args:
        scores_NM: the first stage's score of every chunk for every query.
        candidates: chunks of each query that are reranked.
        max_queries: the first so many queries of the task are asked.
        query_length, document_length: tokens that the reranker reads at most, beside the prompt around them.
    Returns: (before, after), float64, both of the same queries.
    """
    asked = replace(task, queries=task.queries[:max_queries], relevant=task.relevant[:max_queries])
    first_NM = torch.as_tensor(scores_NM)[: len(asked.queries)].double()
    chunks = asked.chunks
    best_NK = best_columns(first_NM.float(), candidates, asked.chunk_ids)
    final_NM = first_NM.cpu().numpy().copy()
    for query, best_K, final_M in zip(
        tqdm(asked.queries, desc=f"reranking {task.name}", unit="query", leave=False), best_NK, final_NM
    ):
        odds_K = reranker.log_odds(
            query, [chunks[column] for column in best_K], instruction=INSTRUCTIONS[task.family],
            query_length=query_length, document_length=document_length,
        )  # fmt: skip
        final_M += odds_K.min() - final_M.max() - 1
        final_M[best_K] = odds_K
    return ndcg(asked, first_NM), ndcg(asked, final_NM)
