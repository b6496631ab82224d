"""From token sequences to pooled vectors, in length-sorted micro-batches under a token budget.

Training and inference share this module: what is trained is what is served. Legend: B sequences, L tokens, D
dimensions, R rows (one per sequence, or one per chunk of a document).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from unmask.pooling import last_token_pool, late_chunk_pool, mean_pool


@dataclass(frozen=True)
class TokenSequence:
    """Tokens of one forward pass. For a document, `chunk_L` says which chunk each token belongs to (-1: a
    separator)."""

    tokens_L: np.ndarray
    chunk_L: np.ndarray | None = None
    rows: int = 1  # vectors that the sequence yields: its number of chunks

    def __len__(self) -> int:
        return len(self.tokens_L)


def join_chunks(chunks: SequenceOf[np.ndarray], separator_id: int) -> TokenSequence:
    """One sequence for a document of chunks, with a separator token between them (pplx-embed, section 2.4).

    Separators are read by the model and belong to no chunk.
    """
    tokens, owner = [], []
    for index, chunk in enumerate(chunks):
        if index:
            tokens.append([separator_id])
            owner.append([-1])
        tokens.append(chunk)
        owner.append(np.full(len(chunk), index))
    return TokenSequence(
        np.concatenate(tokens).astype(np.int32), np.concatenate(owner).astype(np.int32), len(chunks)
    )


def micro_batches(lengths: SequenceOf[int], token_budget: int) -> list[np.ndarray]:
    """Indices of sequences grouped by length so that no group exceeds `token_budget` padded tokens, longest
    first.

    A sequence longer than the budget forms a group of its own.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    groups, start = [], 0
    while start < len(order):
        size = max(1, token_budget // int(lengths[order[start]]))
        groups.append(order[start : start + size])
        start += size
    return groups


def encode_rows(
    model: PreTrainedModel,
    sequences: SequenceOf[TokenSequence],
    *,
    pooling: str = "mean",
    device: torch.device | str = "cpu",
) -> Tensor:
    """One forward pass over padded sequences; returns rows_RD in float32, chunks of a document in order.

    No attention mask is passed when nothing is padded: an all-ones mask keeps attention off its fast path.
    """
    length = max(len(s) for s in sequences)
    padded = any(len(s) != length for s in sequences)
    tokens_BL = np.zeros((len(sequences), length), np.int64)
    mask_BL = np.zeros((len(sequences), length), np.int64)
    for row, sequence in enumerate(sequences):
        tokens_BL[row, : len(sequence)] = sequence.tokens_L
        mask_BL[row, : len(sequence)] = 1
    mask = torch.from_numpy(mask_BL).to(device, non_blocking=True) if padded else None
    tokens = torch.from_numpy(tokens_BL).to(device, non_blocking=True)
    hidden_BLD = model(input_ids=tokens, attention_mask=mask, use_cache=False).last_hidden_state
    if all(s.chunk_L is None for s in sequences):
        return (last_token_pool if pooling == "last" else mean_pool)(hidden_BLD, mask).float()
    if pooling != "mean":
        raise ValueError(f"chunks of a document are mean-pooled; pooling {pooling!r} has no late chunking")
    n_chunks = max(s.rows for s in sequences)
    chunk_BL = np.full((len(sequences), length), -1, np.int64)
    for row, sequence in enumerate(sequences):
        chunk_BL[row, : len(sequence)] = 0 if sequence.chunk_L is None else sequence.chunk_L
    chunks_BCD = late_chunk_pool(hidden_BLD, torch.from_numpy(chunk_BL).to(device), n_chunks)
    real_BC = torch.arange(n_chunks) < torch.tensor([s.rows for s in sequences])[:, None]
    return chunks_BCD.float()[real_BC.to(device)]


def row_offsets(sequences: SequenceOf[TokenSequence]) -> np.ndarray:
    """First row of each sequence, and the total at the end."""
    return np.concatenate([[0], np.cumsum([s.rows for s in sequences])])


def rows_of(offsets: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Row indices of the sequences of a micro-batch, in the order in which `encode_rows` returns them."""
    return np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in group])
