"""From token sequences to pooled vectors, in length-sorted micro-batches under a token budget.

Training and inference share this module: what is trained is what is served. Legend: B sequences, L tokens, D
dimensions, C chunks of a document, R rows (one per sequence, or one per chunk), T tokens of all sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from unmask.data.tokens import TokenSequence
from unmask.models.attention import unpadded, unpadded_inputs
from unmask.models.pooling import last_token_pool, mean_pool, segment_mean


def context_windows(lengths: SequenceOf[int], window: int, overlap: int) -> list[tuple[int, int, np.ndarray]]:
    """Windows of whole chunks over a document, and which window each chunk takes its vector from.

    A window is as many chunks as fit; the next one starts `overlap` chunks before its end, or later, where it
    would otherwise not reach a further chunk. A chunk belongs to the window in which it has most context: in
    which the smaller one of the numbers of tokens before and after it is largest, the earliest of several.
    Where the document itself starts or ends, nothing is missing: that side counts as unlimited.

    Args:
        lengths: tokens of each chunk, at most `window`; a separator comes between two chunks.
        window: tokens of a window at most, separators included.
        overlap: chunks that neighbouring windows share at most.
    Returns: (start, stop, chunks) of each window that a chunk belongs to: it reads chunks start to stop − 1
        of the document, and those of them in `chunks`, ascending, belong to it.
    """
    lengths = np.asarray(lengths, np.int64)
    ends_C = np.cumsum(lengths + 1)  # each with the separator that follows it
    starts_C = ends_C - lengths - 1
    best_C, owner_C = np.full(len(lengths), -1.0), np.zeros(len(lengths), int)
    spans, start, stop = [], 0, 0
    while stop < len(lengths):
        if spans:
            start = max(stop - overlap, int(np.searchsorted(starts_C, ends_C[stop] - 1 - window)))
        stop = int(np.searchsorted(ends_C, starts_C[start] + window + 1, side="right"))
        before = starts_C[start:stop] - starts_C[start] if start else np.inf
        after = ends_C[stop - 1] - ends_C[start:stop] if stop < len(lengths) else np.inf
        context = np.broadcast_to(np.minimum(before, after), stop - start)
        better = start + np.flatnonzero(context > best_C[start:stop])
        best_C[better], owner_C[better] = context[better - start], len(spans)
        spans.append((start, stop))
    owned = np.split(
        np.argsort(owner_C, kind="stable"), np.cumsum(np.bincount(owner_C, minlength=len(spans)))
    )
    return [(*span, chunks) for span, chunks in zip(spans, owned) if len(chunks)]


def only_chunks(sequence: TokenSequence, chunks: np.ndarray) -> TokenSequence:
    """The sequence as it is, with vectors for these of its chunks only; the others are context."""
    if len(chunks) == sequence.rows:
        return sequence
    number_C = np.full(sequence.rows + 1, -1, np.int32)  # the last one for separators
    number_C[chunks] = np.arange(len(chunks))
    return TokenSequence(sequence.tokens_L, number_C[sequence.chunk_L], len(chunks))


def only_tokens(sequence: TokenSequence) -> TokenSequence:
    """The sequence as it is, with a vector for each token of its chunks rather than for each chunk."""
    belongs_L = np.ones(len(sequence), bool) if sequence.chunk_L is None else sequence.chunk_L >= 0
    number_L = np.where(belongs_L, belongs_L.cumsum() - 1, -1).astype(np.int32)
    return TokenSequence(sequence.tokens_L, number_L, int(belongs_L.sum()))


def after_context(sequence: TokenSequence, slots: int) -> TokenSequence:
    """The sequence with room in front of it for so many vectors: tokens that are not read and belong to no
    row, but count for its length. It then has no pooling but the mean."""
    own_L = np.zeros(len(sequence), np.int32) if sequence.chunk_L is None else sequence.chunk_L
    tokens_L = np.concatenate([np.zeros(slots, sequence.tokens_L.dtype), sequence.tokens_L])
    return TokenSequence(tokens_L, np.concatenate([np.full(slots, -1, np.int32), own_L]), sequence.rows)


def micro_batches(
    lengths: SequenceOf[int], token_budget: int, multiple_of: int = 1, *, packed: bool = False
) -> list[np.ndarray]:
    """Indices of sequences grouped by length so that no group exceeds `token_budget` tokens, longest first.

    A sequence longer than the budget forms a group of its own.

    Args:
        multiple_of: the number of groups is a multiple of this, so that so many processes run equally many
            forward passes: the largest groups are halved, and empty groups fill up where sequences run out.
        packed: the groups will be encoded without padding, so the budget counts their own tokens only.
    """
    lengths = np.asarray(lengths, np.int64)
    order = np.argsort(-lengths, kind="stable")
    ends = np.cumsum(lengths[order])
    groups, start = [], 0
    while start < len(order):
        if packed:
            limit = ends[start] - lengths[order[start]] + token_budget
            size = int(np.searchsorted(ends, limit, side="right")) - start
        else:
            size = token_budget // int(lengths[order[start]])
        groups.append(order[start : start + max(1, size)])
        start += max(1, size)

    def tokens(index: int) -> int:
        group = groups[index]
        return int(lengths[group].sum()) if packed else len(group) * int(lengths[group[0]])

    while len(groups) % multiple_of:
        largest = max((i for i in range(len(groups)) if len(groups[i]) > 1), key=tokens, default=None)
        if largest is None:
            groups += [np.array([], int)] * (-len(groups) % multiple_of)
        else:
            groups[largest : largest + 1] = np.array_split(groups[largest], 2)
    return groups


def encode_rows(
    model: PreTrainedModel,
    sequences: SequenceOf[TokenSequence],
    *,
    pooling: str = "mean",
    device: torch.device | str = "cpu",
    packed: bool | None = None,
    **inputs: Tensor,
) -> Tensor:
    """One forward pass; returns rows_RD in float32, chunks of a document in order.

    No attention mask is passed when nothing is padded: an all-ones mask keeps attention off its fast path.

    Args:
        model: the backbone, possibly wrapped by DDP or FSDP2.
        pooling: "mean" or "last".
        packed: lay sequences of different lengths one after the other instead of padding them. Default: where
            that is possible and fast (`unmask.models.attention.unpadded`).
        inputs: what else the model takes.

    Raises:
        ValueError: pooling is not "mean" and a sequence has chunks.
    """
    if pooling != "mean" and any(s.chunk_L is not None for s in sequences):
        raise ValueError(f"chunks of a document are mean-pooled; pooling {pooling!r} has no late chunking")
    different = len({len(s) for s in sequences}) > 1
    if different and (unpadded(model) if packed is None else packed):
        return _encode_packed(model, sequences, pooling, device, inputs)
    return _encode_padded(model, sequences, pooling, device, inputs)


def _encode_packed(
    model: PreTrainedModel,
    sequences: SequenceOf[TokenSequence],
    pooling: str,
    device: torch.device | str,
    inputs: Mapping[str, Tensor],
) -> Tensor:
    lengths = [len(s) for s in sequences]
    tokens_T = torch.from_numpy(np.concatenate([s.tokens_L for s in sequences]).astype(np.int64))
    hidden_TD = model(
        input_ids=tokens_T[None].to(device, non_blocking=True),
        use_cache=False,
        **unpadded_inputs(model, lengths, device),
        **inputs,
    ).last_hidden_state[0]
    if pooling == "last":
        return hidden_TD[torch.tensor(lengths).cumsum(0).to(device) - 1].float()
    segment_T = torch.from_numpy(np.concatenate(_segments(sequences))).to(device, non_blocking=True)
    return segment_mean(hidden_TD, segment_T, int(row_offsets(sequences)[-1])).float()


def _encode_padded(
    model: PreTrainedModel,
    sequences: SequenceOf[TokenSequence],
    pooling: str,
    device: torch.device | str,
    inputs: Mapping[str, Tensor],
) -> Tensor:
    length = max(len(s) for s in sequences)
    padded = any(len(s) != length for s in sequences)
    tokens_BL = np.zeros((len(sequences), length), np.int64)
    mask_BL = np.zeros((len(sequences), length), np.int64)
    for row, sequence in enumerate(sequences):
        tokens_BL[row, : len(sequence)] = sequence.tokens_L
        mask_BL[row, : len(sequence)] = 1
    mask = torch.from_numpy(mask_BL).to(device, non_blocking=True) if padded else None
    tokens = torch.from_numpy(tokens_BL).to(device, non_blocking=True)
    output = model(input_ids=tokens, attention_mask=mask, use_cache=False, **inputs)
    hidden_BLD = output.last_hidden_state
    if all(s.chunk_L is None for s in sequences):
        return (last_token_pool if pooling == "last" else mean_pool)(hidden_BLD, mask).float()
    segment_BL = np.full((len(sequences), length), -1, np.int64)
    for row, segment in enumerate(_segments(sequences)):
        segment_BL[row, : len(segment)] = segment
    segment_T = torch.from_numpy(segment_BL.ravel()).to(device, non_blocking=True)
    return segment_mean(hidden_BLD.flatten(0, 1), segment_T, int(row_offsets(sequences)[-1])).float()


def _segments(sequences: SequenceOf[TokenSequence]) -> list[np.ndarray]:
    """For each token of each sequence the row that it is averaged into, -1 for none."""
    return [
        np.full(len(s), first) if s.chunk_L is None else np.where(s.chunk_L < 0, -1, first + s.chunk_L)
        for s, first in zip(sequences, row_offsets(sequences)[:-1], strict=True)
    ]


def row_offsets(sequences: SequenceOf[TokenSequence]) -> np.ndarray:
    """First row of each sequence, and the total at the end."""
    return np.concatenate([[0], np.cumsum([s.rows for s in sequences])])


def rows_of(offsets: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Row indices of the sequences of a micro-batch, in the order in which `encode_rows` returns them."""
    first, count = offsets[group], offsets[group + 1] - offsets[group]
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    return np.repeat(first, count) + within
