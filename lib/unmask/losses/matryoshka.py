"""Matryoshka training: the same loss at several prefixes of the embedding.

Shape suffix: D dimensions.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def matryoshka(loss: Callable[..., Tensor], vectors: Sequence[Tensor], dimensions: Sequence[int]) -> Tensor:
    """The mean of a loss over prefixes of the embeddings, all weighted equally.

        L = mean over the dimensions p < D, and D, of loss(x[..., :p] for every x in vectors)

    Dimensions larger than D are left out, so that the paper's list [128, 256, 512, 1024, 2048, 2560] serves
    every model size; D itself is always trained. Cutting INT8 codes is the same as quantising
    the cut embedding, because quantisation acts on each entry alone. The paper weights equally; that it
    averages is assumed.

    Args:
        loss: function of the embeddings, in their order; other arguments are bound with `functools.partial`.
        vectors: the embeddings, tensors (…, D).
        dimensions: the prefixes.

    Returns:
        Scalar.

    Source: pplx-embed, appendix B; Matryoshka representation learning, 2205.13147. sentence-transformers'
    MatryoshkaLoss sums over the dimensions instead of averaging.

    Example:
        >>> from functools import partial
        >>> from unmask.losses import pair_loss
        >>> at_any_prefix = partial(pair_loss, temperature=1.0)
        >>> queries, documents = torch.eye(4), torch.eye(4).roll(1, 0)
        >>> loss = matryoshka(at_any_prefix, (queries, documents), [2, 4, 128])
        >>> halves = at_any_prefix(queries[:, :2], documents[:, :2]), at_any_prefix(queries, documents)
        >>> bool(loss == sum(halves) / 2)
        True
    """
    width = vectors[0].shape[-1]
    prefixes = sorted({prefix for prefix in dimensions if 0 < prefix < width} | {width})
    return torch.stack([loss(*(x[..., :prefix] for x in vectors)) for prefix in prefixes]).mean()
