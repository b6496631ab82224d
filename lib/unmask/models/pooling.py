"""From token vectors to one vector per text, or per chunk of a text.

Sums run in float32 (float64 for float64 input), also under autocast and for bfloat16 hidden states, so that
an embedding does not depend on how long the padding is.

Shape suffixes: B sequences · L tokens · D dimensions · C chunks per document · T tokens of all sequences · S
segments.
"""

import torch
from torch import Tensor


def mean_pool(hidden_BLD: Tensor, mask_BL: Tensor | None = None) -> Tensor:
    """Mean over each sequence's real tokens.

    Args:
        hidden_BLD: token vectors after the final norm.
        mask_BL: True (or 1) at the tokens to average, for instance the attention mask; None: all of them.

    Returns:
        (B, D), float32 or better.

    Raises:
        ValueError: the shapes do not fit together, or a sequence has no token.

    Source: pplx-embed, section 2.2.

    Example:
        >>> mean_pool(torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([[1, 1, 0]]))
        tensor([[2.]])
    """
    mask_BL = _checked(mask_BL, hidden_BLD)
    if mask_BL is None:
        return hidden_BLD.mean(dim=1, dtype=_accumulator(hidden_BLD))
    total_BD = hidden_BLD.masked_fill(~mask_BL[..., None], 0).sum(dim=1, dtype=_accumulator(hidden_BLD))
    return total_BD / mask_BL.sum(dim=1, keepdim=True)


def last_token_pool(hidden_BLD: Tensor, mask_BL: Tensor | None = None) -> Tensor:
    """The vector of each sequence's last real token, whichever side the padding is on.

    Arguments, result and errors are those of `mean_pool`.

    Source: the ablation of pplx-embed, section 4; Qwen3-Embedding pools at its final `<|endoftext|>`.

    Example:
        >>> last_token_pool(torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([[1, 1, 0]]))
        tensor([[3.]])
    """
    mask_BL = _checked(mask_BL, hidden_BLD)
    if mask_BL is None:
        return hidden_BLD[:, -1].to(_accumulator(hidden_BLD))
    last_B = mask_BL.shape[1] - 1 - mask_BL.flip(1).int().argmax(dim=1)
    return hidden_BLD[torch.arange(len(last_B), device=last_B.device), last_B].to(_accumulator(hidden_BLD))


def late_chunk_pool(hidden_BLD: Tensor, chunk_of_token_BL: Tensor, n_chunks: int) -> Tensor:
    """Mean over the tokens of each chunk, taken after the whole document went through the model together.

    Args:
        hidden_BLD: token vectors after the final norm.
        chunk_of_token_BL: index of each token's chunk in its own document, in 0..n_chunks−1; −1 for
            separators and padding, which belong to no chunk.
        n_chunks: C, the largest number of chunks of a document in the batch.

    Returns:
        (B, C, D), float32 or better. Chunks without tokens (a document has fewer than C chunks) are zero:
        pass the losses a `chunk_mask_MC` for them.

    Raises:
        ValueError: the shapes do not fit together, or an index lies outside −1..n_chunks−1.

    Source: pplx-embed, section 2.4; late chunking, 2409.04701.

    Example:
        >>> late_chunk_pool(torch.tensor([[[1.0], [3.0], [7.0], [9.0]]]), torch.tensor([[0, 0, -1, 1]]), 3)
        tensor([[[2.],
                 [9.],
                 [0.]]])
    """
    if chunk_of_token_BL.shape != hidden_BLD.shape[:2]:
        raise ValueError(
            f"chunk_of_token_BL must be {tuple(hidden_BLD.shape[:2])}, like the hidden states; got "
            f"{tuple(chunk_of_token_BL.shape)}."
        )
    if ((chunk_of_token_BL < -1) | (chunk_of_token_BL >= n_chunks)).any():
        raise ValueError(
            f"Chunk indices must lie in -1..{n_chunks - 1} (n_chunks is {n_chunks}); got "
            f"{int(chunk_of_token_BL.min())}..{int(chunk_of_token_BL.max())}."
        )
    b = len(hidden_BLD)
    first_B1 = n_chunks * torch.arange(b, device=hidden_BLD.device)[:, None]
    segment_BL = torch.where(chunk_of_token_BL >= 0, first_B1 + chunk_of_token_BL, -1)
    mean_SD = segment_mean(hidden_BLD.flatten(0, 1), segment_BL.flatten(), b * n_chunks)
    return mean_SD.unflatten(0, (b, n_chunks))


def segment_mean(hidden_TD: Tensor, segment_T: Tensor, n_segments: int) -> Tensor:
    """Mean over the tokens of each segment, where sequences lie one after the other without padding.

    Args:
        hidden_TD: token vectors of all sequences, after the final norm.
        segment_T: index of each token's segment (a text, or a chunk of a document), in 0..n_segments−1; −1
            for separators, which belong to none.
        n_segments: S, how many there are.

    Returns:
        (S, D), float32 or better; zero for a segment without tokens.

    Source: pplx-embed, sections 2.2 and 2.4; `mean_pool` and `late_chunk_pool` do it for padded batches.

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


def _checked(mask_BL: Tensor | None, hidden_BLD: Tensor) -> Tensor | None:
    if mask_BL is None:
        if hidden_BLD.shape[1] == 0:
            raise ValueError("The sequences have no token to pool; leave empty texts out.")
        return None
    if mask_BL.shape != hidden_BLD.shape[:2]:
        raise ValueError(
            f"The mask must be {tuple(hidden_BLD.shape[:2])}, like the hidden states; got "
            f"{tuple(mask_BL.shape)}."
        )
    mask_BL = mask_BL.bool()
    filled_B = mask_BL.any(dim=1)
    if not filled_B.all():
        raise ValueError(
            f"Sequence {int((~filled_B).nonzero()[0])} has no token to pool; leave empty texts out."
        )
    return mask_BL
