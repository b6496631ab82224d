"""The objective of a reranker that answers with a word.

Shape suffixes: B prompts · L tokens · D dimensions · V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


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
    if hidden_BLD.ndim != 3 or unembedding_VD.ndim != 2 or hidden_BLD.shape[-1] != unembedding_VD.shape[-1]:
        raise ValueError(
            "Hidden states must be (B, L, D) and the output matrix (V, D); got "
            f"{tuple(hidden_BLD.shape)} and {tuple(unembedding_VD.shape)}."
        )
    if not last_B.shape == answer_B.shape == hidden_BLD.shape[:1]:
        raise ValueError(
            f"last_B and answer_B must be ({len(hidden_BLD)},), one for each prompt; got "
            f"{tuple(last_B.shape)} and {tuple(answer_B.shape)}."
        )
    rows_BD = hidden_BLD[torch.arange(len(last_B), device=last_B.device), last_B]
    logits_BV = F.linear(rows_BD, unembedding_VD)
    logits_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    nats = F.cross_entropy(logits_BV, answer_B, reduction="sum")
    return nats / (len(answer_B) if normalizer is None else normalizer)
