"""From token sequences to pooled vectors, in length-sorted micro-batches under a token budget.

Training and inference share this module: what is trained is what is served, but for rounding (a training in
bf16 on a GPU adds up the layers in bfloat16, an `Embedder` in float32). Sums run in float32 (float64 for
float64 input), also under autocast and for bfloat16 hidden states, so that an embedding does not depend on
the length of the padding.

Shape suffixes: B sequences · L tokens · D dimensions · C chunks of a document · R rows (one per sequence, or
one per chunk) · T tokens of all sequences · S segments.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from unmask.data.tokens import TokenSequence
from unmask.losses.tensors import to_device
from unmask.models.attention import unpadded_inputs


def mean_pool(hidden_BLD: Tensor, mask_BL: Tensor | None = None) -> Tensor:
    """Mean over each sequence's real tokens.

    Args:
        hidden_BLD: token vectors after the final norm.
        mask_BL: True (or 1) at the tokens to average, for instance the attention mask, one at least in each
            sequence; None: all of them.

    Returns:
        (B, D), float32 or better.

    Source: pplx-embed, section 2.2.

    Example:
        >>> mean_pool(torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([[1, 1, 0]]))
        tensor([[2.]])
    """
    if mask_BL is None:
        return hidden_BLD.mean(dim=1, dtype=_accumulator(hidden_BLD))
    mask_BL = mask_BL.bool()
    total_BD = hidden_BLD.masked_fill(~mask_BL[..., None], 0).sum(dim=1, dtype=_accumulator(hidden_BLD))
    return total_BD / mask_BL.sum(dim=1, keepdim=True)


def last_token_pool(hidden_BLD: Tensor, mask_BL: Tensor | None = None) -> Tensor:
    """The vector of each sequence's last real token, whichever side the padding is on.

    Arguments and result are those of `mean_pool`.

    Source: the ablation of pplx-embed, section 4; Qwen3-Embedding pools at its final `<|endoftext|>`.

    Example:
        >>> last_token_pool(torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([[1, 1, 0]]))
        tensor([[3.]])
    """
    if mask_BL is None:
        return hidden_BLD[:, -1].to(_accumulator(hidden_BLD))
    mask_BL = mask_BL.bool()
    last_B = mask_BL.shape[1] - 1 - mask_BL.flip(1).int().argmax(dim=1)
    return hidden_BLD[torch.arange(len(last_B), device=last_B.device), last_B].to(_accumulator(hidden_BLD))


POOLS = {"mean": mean_pool, "last": last_token_pool}


def segment_mean(hidden_TD: Tensor, segment_T: Tensor, n_segments: int) -> Tensor:
    """Mean over the tokens of each segment, where sequences lie one after the other without padding.

    Args:
        hidden_TD: token vectors of all sequences, after the final norm.
        segment_T: index of each token's segment (a text, or a chunk of a document), in 0..n_segments−1; −1
            for separators, which belong to none.
        n_segments: S, how many there are.

    Returns:
        (S, D), float32 or better; zero for a segment without tokens.

    Source: pplx-embed, sections 2.2 and 2.4; with chunks as segments it is late chunking, 2409.04701.

    Example:
        >>> segment_mean(torch.tensor([[1.0], [3.0], [7.0], [9.0]]), torch.tensor([0, 0, -1, 1]), 2)
        tensor([[2.],
                [9.]])
    """
    # Separators are added up in one more row, which is dropped.
    segment_T = segment_T.where(segment_T >= 0, n_segments)
    hidden_TD = hidden_TD.to(_accumulator(hidden_TD))
    total_SD = hidden_TD.new_zeros(n_segments + 1, hidden_TD.shape[1]).index_add(0, segment_T, hidden_TD)
    ones_T = torch.ones_like(segment_T)
    count_S = ones_T.new_zeros(n_segments + 1).index_add(0, segment_T, ones_T)
    return (total_SD / count_S.clamp(min=1)[:, None])[:n_segments]


def _accumulator(hidden_BLD: Tensor) -> torch.dtype:
    return torch.promote_types(hidden_BLD.dtype, torch.float32)


def context_windows(lengths: Sequence[int], window: int, overlap: int) -> list[tuple[int, int, np.ndarray]]:
    """Windows of whole chunks over a document, and which window each chunk takes its vector from.

    A window is as many chunks as fit; the next one starts `overlap` chunks before its end, or later, where it
    would otherwise not reach a further chunk. A chunk belongs to the window in which it has most context: in
    which the smaller one of the numbers of tokens before and after it is largest, the earliest of several.

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
    spans, contexts, start, stop = [], [], 0, 0
    while stop < len(lengths):
        if spans:
            start = max(stop - overlap, int(np.searchsorted(starts_C, ends_C[stop] - 1 - window)))
        stop = int(np.searchsorted(ends_C, starts_C[start] + window + 1, side="right"))
        spans.append((start, stop))
        # Below 0 for a chunk outside of the window.
        contexts.append(np.minimum(starts_C - starts_C[start], ends_C[stop - 1] - ends_C))
    owner_C = np.argmax(contexts, axis=0)
    owned = ((*span, np.flatnonzero(owner_C == number)) for number, span in enumerate(spans))
    return [window for window in owned if len(window[2])]


def only_chunks(sequence: TokenSequence, chunks: np.ndarray) -> TokenSequence:
    """The sequence as it is, with vectors for these of its chunks only; the others are context."""
    number_C = np.full(sequence.rows + 1, -1, np.int32)  # the last one for separators
    number_C[chunks] = np.arange(len(chunks))
    return TokenSequence(sequence.tokens_L, number_C[sequence.chunk_L], len(chunks))


def owners(sequence: TokenSequence) -> np.ndarray:
    """For each token the row of its sequence that it is averaged into, −1 for none."""
    return np.zeros(len(sequence), np.int32) if sequence.chunk_L is None else sequence.chunk_L


def every_token(sequence: TokenSequence) -> TokenSequence:
    """The sequence with a vector for each token that belongs to a row, for late interaction."""
    real_L = owners(sequence) >= 0
    return TokenSequence(sequence.tokens_L, np.where(real_L, real_L.cumsum() - 1, -1), int(real_L.sum()))


def after_context(sequence: TokenSequence, slots: int) -> TokenSequence:
    """The sequence with room for `slots` vectors in front: tokens that are not read and belong to no row, but
    count towards its length. It can then only be mean-pooled."""
    tokens_L = np.concatenate([np.zeros(slots, sequence.tokens_L.dtype), sequence.tokens_L])
    row_L = np.concatenate([np.full(slots, -1, np.int32), owners(sequence)])
    return TokenSequence(tokens_L, row_L, sequence.rows)


def micro_batches(
    lengths: Sequence[int], token_budget: int, multiple_of: int = 1, *, packed: bool = False
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
    sequences: Sequence[TokenSequence],
    *,
    pooling: str = "mean",
    packed: bool = False,
    **inputs: Tensor,
) -> Tensor:
    """One forward pass; returns rows_RD in float32, chunks of a document in order.

    No attention mask is passed when nothing is padded: an all-ones mask keeps attention off its fast path.

    Args:
        model: the backbone, possibly divided by FSDP2.
        pooling: "mean" or "last".
        packed: lay sequences of different lengths one after the other instead of padding them; only for a
            model that `unmask.models.attention.unpadded` says yes to.
        inputs: what else the model takes.

    Raises:
        ValueError: pooling is not "mean" and a sequence has chunks.
    """
    chunked = any(s.chunk_L is not None for s in sequences)
    if pooling != "mean" and chunked:
        raise ValueError(f"chunks of a document are mean-pooled; pooling {pooling!r} has no late chunking")
    device, lengths = next(model.parameters()).device, [len(s) for s in sequences]
    different = len(set(lengths)) > 1
    # In inference on a CPU sequences of one length are read side by side, which is faster. Elsewhere it is as
    # fast in one row, and with a single way to read them compiled layers do without a graph for these.
    if packed and (different or torch.is_grad_enabled() or device.type != "cpu"):
        return _encode_packed(model, sequences, pooling, inputs)

    def padded(x_T: Tensor, filler: int = 0) -> Tensor:
        x_BL = pad_sequence(x_T.split(lengths), batch_first=True, padding_value=filler)
        return to_device(x_BL, device)

    tokens_T = _tokens(sequences)
    mask_BL = padded(torch.ones_like(tokens_T)) if different else None
    output = model(input_ids=padded(tokens_T), attention_mask=mask_BL, use_cache=False, **inputs)
    hidden_BLD = output.last_hidden_state
    if not chunked:
        return POOLS[pooling](hidden_BLD, mask_BL).float()
    segment_BL = padded(_segments(sequences), -1)
    return segment_mean(hidden_BLD.flatten(0, 1), segment_BL.flatten(), row_offsets(sequences)[-1]).float()


def _encode_packed(
    model: PreTrainedModel, sequences: Sequence[TokenSequence], pooling: str, inputs: dict[str, Any]
) -> Tensor:
    """The same with all sequences in one row, one after the other."""
    device = next(model.parameters()).device
    inputs = inputs | unpadded_inputs(model, [len(s) for s in sequences], device)
    tokens_1T, segment_T = (to_device(x, device) for x in (_tokens(sequences)[None], _segments(sequences)))
    hidden_TD = model(input_ids=tokens_1T, use_cache=False, **inputs).last_hidden_state[0]
    if pooling == "last":
        return hidden_TD[inputs["cu_seq_lens_q"][1:].long() - 1].float()
    return segment_mean(hidden_TD, segment_T, row_offsets(sequences)[-1]).float()


def _tokens(sequences: Sequence[TokenSequence]) -> Tensor:
    return torch.from_numpy(np.concatenate([s.tokens_L for s in sequences]).astype(np.int64))


def _segments(sequences: Sequence[TokenSequence]) -> Tensor:
    """For each token of all sequences (T,) the row that it is averaged into, -1 for none."""
    row_T = np.repeat(row_offsets(sequences)[:-1], [len(s) for s in sequences])
    chunk_T = np.concatenate([owners(s) for s in sequences])
    return torch.from_numpy(np.where(chunk_T < 0, -1, row_T + chunk_T))


def row_offsets(sequences: Sequence[TokenSequence]) -> np.ndarray:
    """First row of each sequence, and the total at the end."""
    return np.concatenate([[0], np.cumsum([s.rows for s in sequences])])
