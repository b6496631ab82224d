"""Late interaction: every token keeps its vector, and a text answers a query as well as its best tokens do.

Legend: N queries, M documents, D dimensions, L tokens of a text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from sentence_transformers import util
from torch import Tensor
from torch.nn.functional import normalize

from unmask.config import EvaluationConfig
from unmask.evaluation.tasks import Task, ndcg
from unmask.models.embedder import Embedder

TILE_ELEMENTS = 2**24  # token vectors and their similarities in memory at once: 64 MiB


def maxsim(
    queries: Sequence[np.ndarray],
    documents: Sequence[np.ndarray],
    *,
    device: torch.device | str | None = None,
) -> np.ndarray:
    """MaxSim of every query with every document: for each token of the query the most similar token of the
    document, summed.

        s(q, d) = Σ_i max_j cos(q_i, d_j)

    sentence-transformers computes it tile by tile; texts are sorted by length first, which halves its time.

    Args:
        queries, documents: token vectors (L, D) of each text, of any scale
            (`Embedder.encode_tokens`, `Embedder.encode_document_tokens`).
        device: where to compute; default: the GPU, if there is one.
    Returns: (N, M), float32, between −L and L of the query.
    Raises: ValueError for a text without tokens, or vectors of different dimensions.
    Source: ColBERT (2004.12832), section 3.3; with late chunking, ConTEB (2505.24782), section 4.1.
    """
    texts = [*queries, *documents]
    for index, tokens_LD in enumerate(texts):
        if tokens_LD.ndim != 2 or not len(tokens_LD) or tokens_LD.shape[1] != texts[0].shape[1]:
            name, index = ("query", index) if index < len(queries) else ("document", index - len(queries))
            raise ValueError(
                f"{name} {index} has token vectors of shape {tokens_LD.shape}: give (tokens, dimensions), "
                "one token at least and the same dimensions for all"
            )
    order_N, order_M = (np.argsort([len(text) for text in side]) for side in (queries, documents))
    scores_NM = np.empty((len(queries), len(documents)), np.float32)
    scores_NM[np.ix_(order_N, order_M)] = util.maxsim(
        [_unit(queries[i]) for i in order_N],
        [_unit(documents[i]) for i in order_M],
        chunk_elements=TILE_ELEMENTS,
        device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
    ).numpy()
    return scores_NM


def evaluate(embedder: Embedder, task: Task, config: EvaluationConfig, *, late_chunking: bool) -> np.ndarray:
    """nDCG@10 of each query of a task by MaxSim; chunks in the light of their document, or each alone."""
    queries = embedder.encode_tokens(task.queries, max_length=config.query_length)
    return ndcg(task, maxsim(queries, chunk_tokens(embedder, task, config, late_chunking=late_chunking)))


def chunk_tokens(
    embedder: Embedder, task: Task, config: EvaluationConfig, *, late_chunking: bool
) -> list[np.ndarray]:
    """The token vectors (L, D) of each chunk of a task."""
    if not late_chunking:
        return embedder.encode_tokens(task.chunks, max_length=config.chunk_length)
    documents = embedder.encode_document_tokens(task.documents, chunk_length=config.chunk_length)
    return [tokens_LD for chunks in documents for tokens_LD in chunks]


def _unit(tokens_LD: np.ndarray) -> Tensor:
    return normalize(torch.from_numpy(tokens_LD), dim=-1)
