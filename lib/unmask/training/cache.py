"""Gradient caching: the loss of a large batch at the memory of a small one (Gao et al. 2021, "Scaling Deep
Contrastive Learning Batch Size under Memory Limited Setup").

The gradient of a contrastive loss factors through the embeddings. So: embed all micro-batches without a
graph, take the loss and its gradient on the embeddings, then embed each micro-batch again with a graph and
push its part of that gradient through. The result is the gradient of the whole batch, not an approximation.

With several processes each embeds its share of the micro-batches, all see all embeddings, and each computes
the loss terms of its share of the queries.

Two models of which one reads the other's rows are cached one after the other (two-stage gradient caching,
CDE, section 4.2): the gradient that the second model's passes leave in those rows is pushed through the
first.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from unmask.models.attention import unpadded
from unmask.models.encoding import TokenSequence, encode_rows, micro_batches, row_offsets
from unmask.training.distributed import ALONE, Distributed


def cached_backward(
    model: nn.Module, sequences: Sequence[TokenSequence], loss_of_rows: Callable[[Tensor], Tensor], **options
) -> Tensor:
    """Adds the gradient of the loss to the model's parameters and returns this process's part of the loss.

    Args:
        sequences: everything the loss looks at, the same on every process; rows come in this order, a
            document's chunks one after the other.
        loss_of_rows: scalar loss of all rows (R, D), of which each process gives its part, so that the parts
            add up; quantisation belongs here.
        options: as for `cached_rows`.

    If everything fits into one micro-batch, this is plain backpropagation.
    """
    rows_RD, push = cached_rows(model, sequences, **options)
    loss = loss_of_rows(rows_RD.requires_grad_())
    push(*torch.autograd.grad(loss, rows_RD))
    return loss.detach()


def cached_rows(
    model: nn.Module,
    sequences: Sequence[TokenSequence],
    *,
    token_budget: int,
    keep_tokens: int = 0,
    pooling: str = "mean",
    processes: Distributed = ALONE,
    last: bool = True,
    **inputs: Tensor,
) -> tuple[Tensor, Callable[[Tensor], None]]:
    """Embeds now and backpropagates later: the two halves of gradient caching, for models whose rows other
    models read.

    Random numbers drawn by the model (dropout) are replayed, so cached and uncached gradients agree. The last
    micro-batch, which has the longest sequences, keeps its graph and is embedded once; so do those before it
    while their tokens fit into `keep_tokens`.

    Args:
        sequences: the same on every process.
        token_budget: tokens per micro-batch, padding included where there is any.
        keep_tokens: memory for speed: so many tokens' activations, of this process, are kept instead of being
            computed twice.
        last: False if more gradients of the same step follow for this model; FSDP2 adds up the processes'
            gradients in the last call.
        inputs: what else the model takes, the same in every forward pass. Each that requires a gradient gets
            in `grad` this process's part of it.
    Returns:
        rows_RD: all rows on every process, in the order of the sequences, detached.
        push: takes this process's part of their gradient and adds it to the parameters'; to be called once.
    """
    with processes.autocast():
        packed = unpadded(model)
    embed = partial(_embed, model, sequences, processes, pooling=pooling, packed=packed, **inputs)
    lengths, offsets = [*map(len, sequences)], row_offsets(sequences)
    groups = micro_batches(lengths, token_budget, processes.count, packed=packed)[::-1]
    mine, graphs = processes.share(groups), _count_graphs(groups, lengths, keep_tokens, processes.count)
    row_R = np.split(np.arange(offsets[-1]), offsets[1:-1])  # of each sequence
    passes = []
    for number, group in enumerate(mine):
        places = np.concatenate([np.arange(0), *(row_R[i] for i in group)])
        place_R, state = processes.to_device(torch.from_numpy(places)), processes.random.get_rng_state()
        with torch.set_grad_enabled(number >= len(mine) - graphs):
            passes.append((group, place_R, state, embed(group)))
    part_RD = passes[0][-1]
    rows_RD = part_RD.new_zeros(offsets[-1], part_RD.shape[1])
    for _, place_R, _, part_RD in passes:
        rows_RD[place_R] = part_RD.detach()
    push = partial(_push, passes, embed, model, processes, last)
    return processes.sum(rows_RD), push  # each row comes from one process


def _count_graphs(groups: list[np.ndarray], lengths: list[int], keep_tokens: int, processes: int) -> int:
    """How many micro-batches keep their graph: as many on every process as on the one that has room for the
    fewest, since FSDP2's must go forward and back together."""
    tokens = [sum(lengths[i] for i in group) for group in groups[::-1]]
    shares = [np.cumsum(tokens[rank::processes]) for rank in range(processes)]
    return max(1, min(int(np.searchsorted(sizes, keep_tokens, side="right")) for sizes in shares))


def _embed(
    model: nn.Module, sequences: Sequence[TokenSequence], processes: Distributed, group: np.ndarray, **options
) -> Tensor:
    """The rows of a micro-batch. A process without a sequence embeds one all the same, since the others wait
    for it in FSDP2."""
    with processes.autocast():
        rows_RD = encode_rows(model, [sequences[i] for i in (group if len(group) else [0])], **options)
    return rows_RD if len(group) else rows_RD[:0]


def _push(
    passes: list, embed: Callable, model: nn.Module, processes: Distributed, last: bool, gradient_RD: Tensor
) -> None:
    """Takes the gradient of all rows, of which each process gives its part, back through every pass, the
    longest sequences first. Each graph is freed as it goes; what has none is embedded again."""
    gradient_RD, after = processes.sum(gradient_RD), processes.random.get_rng_state()
    while passes:
        group, place_R, state, rows_RD = passes.pop()
        processes.reducing(model, last=last and not passes)
        if not rows_RD.requires_grad:
            processes.random.set_rng_state(state)
            rows_RD = embed(group)
        rows_RD.backward(gradient_RD[place_R])
    processes.random.set_rng_state(after)
