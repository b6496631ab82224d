"""Objectives of language models: masked diffusion, next-token prediction as its autoregressive counterpart,
and the one-word answer of a reranker.

Shape suffixes: B sequences · L tokens · D dimensions · V vocabulary · R rows (paid positions).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from unmask.losses.tensors import check_shapes, to_device

# Logits exist for this many rows at a time, so that their memory does not grow with the batch: 2^26 logits
# are 256 MiB in float32; but never fewer than 1,024 rows, which a GPU needs to multiply at full speed.
CHUNK_LOGITS = 2**26
CHUNK_ROWS = 1024
CPU_ROWS, CPU_SOFTMAX = 2048, 128  # on a CPU: rows of a product, and of a softmax, which stays in the cache


def diffusion_loss(
    hidden_BLD: Tensor,
    unembedding_VD: Tensor,
    tokens_BL: Tensor,
    masked_BL: Tensor,
    t_B: Tensor,
    valid_BL: Tensor | None = None,
    *,
    normalizer: float | None = None,
) -> Tensor:
    """Evidence lower bound of absorbing-state diffusion: cross-entropy at the masked tokens, weighted by 1/t.

        L = 1/Σ_b(L_b−1) · Σ_b (1/t_b) Σ_{l=2..L_b} 1[x_t^l = MASK] · (−log p(x_0^l | x_t))

    The left shift of autoregressive pretraining is kept: the hidden state at l−1 predicts token l, so the
    first token of a sequence has no prediction. Logits are computed for the paid positions only, in chunks of
    rows. Dividing by the number of predictable (not of masked) tokens keeps the weights 1/t unbiased: the
    loss is an upper bound on nats per token, and a model that loses c at every token has expectation c.
    The paper does not say how it normalises.

    Args:
        hidden_BLD: the backbone's last hidden states, after the final norm.
        unembedding_VD: the output matrix (tied models: the input embedding).
        tokens_BL: the clean tokens x_0.
        masked_BL: True where [MASK] was put.
        t_B: each sequence's masking probability, in (0, 1].
        valid_BL: True at real tokens, False at padding on either side; None if nothing is padded. Tokens,
            masks and t may be on the CPU while the hidden states are on a GPU, which then never waits.
        normalizer: replaces Σ_b(L_b−1); when gradients are accumulated over micro-batches, pass the number of
            predictable positions of the whole global batch to each.

    Returns:
        Scalar in nats per token; the cross-entropy is computed in float32 (float64 for float64 hidden
        states). Without any paid position it is zero and still has a graph.

    Raises:
        ValueError: shapes do not fit together, t lies outside (0, 1], or no position is predictable.

    Source: pplx-embed, section 2.1 and appendix A; the left shift is DiffuLLaMA's (2410.17891).

    Example:
        >>> hidden, unembedding = torch.zeros(1, 5, 8), torch.zeros(10, 8)  # every token has probability 1/10
        >>> tokens, masked = torch.arange(5)[None], torch.tensor([[True, True, False, True, False]])
        >>> loss = diffusion_loss(hidden, unembedding, tokens, masked, torch.tensor([0.5]))
        >>> f"{loss:.4f}"  # two paid tokens of four predictable ones, weight 1/0.5: log 10
        '2.3026'
    """
    check_shapes(hidden_BLD=hidden_BLD, unembedding_VD=unembedding_VD, tokens_BL=tokens_BL)
    check_shapes(tokens_BL=tokens_BL, masked_BL=masked_BL, t_B=t_B, valid_BL=valid_BL)
    if not ((t_B > 0) & (t_B <= 1)).all():
        raise ValueError(f"The masking probability t must lie in (0, 1]; got {t_B.tolist()}.")
    valid_BL = torch.ones_like(tokens_BL) if valid_BL is None else valid_BL
    predictable_BL = valid_BL[:, 1:].bool() & valid_BL[:, :-1].bool()
    if normalizer is None and not predictable_BL.any():
        raise ValueError("No position is predictable: leave out sequences of fewer than two tokens.")
    # Looked for where the tokens are: while these are on the CPU, nobody waits for a GPU.
    paid_BL = predictable_BL & masked_BL[:, 1:].bool()
    place_R = F.pad(paid_BL, (0, 1)).flatten().nonzero()[:, 0]  # of each paid token's predecessor
    weight_R = t_B.reciprocal()[:, None].expand(paid_BL.shape)[paid_BL]
    rows_RD = hidden_BLD.flatten(0, 1).index_select(0, to_device(place_R, hidden_BLD.device))
    nats = _weighted_nats(rows_RD, unembedding_VD, tokens_BL[:, 1:][paid_BL], weight_R)
    return nats / (predictable_BL.sum() if normalizer is None else normalizer)


def next_token_loss(
    hidden_BLD: Tensor, unembedding_VD: Tensor, tokens_BL: Tensor, *, normalizer: float | None = None
) -> Tensor:
    """Autoregressive cross-entropy: the hidden state at l−1 predicts token l; mean over the positions.

        L = 1/Σ_b(L_b−1) · Σ_b Σ_{l=2..L_b} −log p(x^l | x^{<l})

    Logits exist for one chunk of rows at a time, so memory stays modest for large vocabularies.

    Args:
        hidden_BLD, unembedding_VD, tokens_BL, normalizer: as in `diffusion_loss`; the hidden states come from
            a causal backbone, and nothing is padded.

    Returns:
        Scalar in nats per token; float32, or float64 for float64 hidden states.

    Raises:
        ValueError: shapes do not fit together, or no position is predictable.

    Source: the objective of the autoregressive base models (pplx-embed, section 4). Equals transformers'
    `ForCausalLM` loss.

    Example:
        >>> hidden, unembedding = torch.zeros(1, 5, 8), torch.zeros(10, 8)
        >>> f"{next_token_loss(hidden, unembedding, torch.arange(5)[None]):.4f}"  # log 10
        '2.3026'
    """
    masked_BL, t_B = torch.ones_like(tokens_BL), tokens_BL.new_ones(len(tokens_BL), dtype=torch.float32)
    return diffusion_loss(hidden_BLD, unembedding_VD, tokens_BL, masked_BL, t_B, normalizer=normalizer)


def answer_loss(
    hidden_BLD: Tensor,
    unembedding_VD: Tensor,
    last_B: Tensor,
    answer_B: Tensor,
    *,
    normalizer: float | None = None,
) -> Tensor:
    """Supervised fine-tuning on one token: the answer that follows each prompt.

        L = 1/B · Σ_b −log p(answer_b | prompt_b), with p over the whole vocabulary

    Logits exist at the last token of each prompt only.

    Args:
        hidden_BLD: a causal backbone's last hidden states, after the final norm.
        unembedding_VD: the output matrix (tied models: the input embedding).
        last_B: place of each prompt's last token.
        answer_B: the token that is to follow it: "yes" where the document answers the query, else "no".
        normalizer: replaces B; when gradients are accumulated over micro-batches, pass the number of prompts
            of the whole global batch to each.

    Returns:
        Scalar in nats per prompt; the softmax is computed in float32 (float64 for float64 hidden states).

    Raises:
        ValueError: shapes do not fit together.

    Source: Qwen3-Embedding, equation 2. How positives and negatives are weighed is not said; here every
    prompt counts the same.

    Example:
        >>> hidden, unembedding = torch.zeros(2, 5, 8), torch.zeros(10, 8)  # every token has probability 1/10
        >>> f"{answer_loss(hidden, unembedding, torch.tensor([4, 2]), torch.tensor([7, 3])):.4f}"  # log 10
        '2.3026'
    """
    check_shapes(hidden_BLD=hidden_BLD, unembedding_VD=unembedding_VD, last_B=last_B, answer_B=answer_B)
    rows_BD = hidden_BLD[torch.arange(len(last_B), device=last_B.device), last_B]
    nats = _weighted_nats(rows_BD, unembedding_VD, answer_B, torch.ones(len(answer_B)))
    return nats / (len(answer_B) if normalizer is None else normalizer)


def _weighted_nats(rows_RD: Tensor, unembedding_VD: Tensor, target_R: Tensor, weight_R: Tensor) -> Tensor:
    """Σ weight · (−log p(target)) in the precision of autocast; targets and weights may be on the CPU."""
    device, dtype = rows_RD.device, rows_RD.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    dtype = torch.float32 if dtype == torch.float16 else dtype  # which cannot hold the sum over the tokens
    weight_R = to_device(weight_R.to(torch.promote_types(dtype, torch.float32)), device)
    size = max(CHUNK_ROWS, CHUNK_LOGITS // len(unembedding_VD))
    sizes = (CPU_ROWS, CPU_SOFTMAX) if device.type == "cpu" else (size, size)
    vectors = rows_RD.to(dtype), unembedding_VD, to_device(target_R, device), weight_R
    with torch.autocast(device.type, enabled=False):
        return _WeightedNats.apply(*vectors, sizes, torch.is_grad_enabled())


class _WeightedNats(torch.autograd.Function):
    """Σ weight · (−log p(target)), with the logits of few rows at a time.

    The gradient, weight · (p − onehot(target)) at the logits, is made beside the loss: no logits are kept,
    and none are computed twice. Products run in the precision of the rows, the softmax in float32 or better.
    The unembedding's gradient is summed in the softmax's precision and rounded to its own once.

    `sizes`: rows of a product with the gradient at the logits, and of a softmax.
    """

    @staticmethod
    def forward(ctx, rows_RD, unembedding_VD, target_R, weight_R, sizes, with_gradient):
        learns, width = with_gradient and ctx.needs_input_grad[1], with_gradient * len(unembedding_VD)
        total, output_VD = weight_R.new_zeros(()), unembedding_VD.to(rows_RD.dtype)
        d_rows_RD = torch.empty_like(rows_RD)
        d_unembedding_VD = weight_R.new_zeros(unembedding_VD.shape) if learns else None
        columns = rows_RD, target_R[:, None], weight_R[:, None], d_rows_RD
        for rows, target, weight, d_rows in zip(*(x.split(sizes[0]) for x in columns)):
            d_logits = rows.new_empty(len(rows), width)
            few = rows, target, weight, d_logits
            for few_rows, few_target, few_weight, d_few in zip(*(x.split(sizes[1]) for x in few)):
                logits = F.linear(few_rows, output_VD)
                p = torch.softmax(logits, dim=1, dtype=weight.dtype)
                # log Σ e^logit = the highest logit − log of its p, which is at least 1/V.
                highest, place = logits.max(1, keepdim=True)
                log_sum = highest.to(weight.dtype) - p.gather(1, place).log()
                total += (few_weight * (log_sum - logits.gather(1, few_target))).sum()
                if with_gradient:
                    d_few.copy_(p.scatter_add_(1, few_target, -torch.ones_like(few_weight)))
            if with_gradient:
                d_rows.copy_((d_logits @ output_VD) * weight.to(rows.dtype))
            if learns:
                d_unembedding_VD += d_logits.T @ (rows * weight.to(rows.dtype))
        if with_gradient:
            ctx.save_for_backward(d_rows_RD, d_unembedding_VD.to(unembedding_VD.dtype) if learns else None)
        return total

    @staticmethod
    def backward(ctx, gradient):
        scaled = (d if d is None else d.mul_(gradient.to(d.dtype)) for d in ctx.saved_tensors)
        return *scaled, None, None, None, None
