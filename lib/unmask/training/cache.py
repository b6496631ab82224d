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

import numpy as np
import torch
from torch import Tensor, nn

from unmask.models.attention import unpadded
from unmask.models.encoding import TokenSequence, encode_rows, micro_batches, row_offsets
from unmask.training.distributed import ALONE, Processes


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
    processes: Processes = ALONE,
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
    groups = micro_batches([len(s) for s in sequences], token_budget, processes.count, packed=packed)[::-1]
    own, offsets = processes.share(groups), row_offsets(sequences)

    def embed(group: np.ndarray) -> Tensor:
        # A process without a sequence embeds one all the same, since the others wait for it in FSDP2.
        texts = [sequences[i] for i in (group if len(group) else [0])]
        with processes.autocast():
            rows_RD = encode_rows(model, texts, pooling=pooling, packed=packed, **inputs)
        return rows_RD if len(group) else rows_RD[:0]

    def places(group: np.ndarray) -> Tensor:
        rows = [np.arange(offsets[i], offsets[i + 1]) for i in group]  # of each sequence
        return processes.ship(torch.from_numpy(np.concatenate([np.arange(0), *rows])))

    # As many on every process as on the one that holds the fewest: FSDP2's must go forward and back together.
    tokens = [sum(len(sequences[i]) for i in group) for group in groups[::-1]]
    shares = [np.cumsum(tokens[rank :: processes.count]) for rank in range(processes.count)]
    kept = max(1, min(int(np.searchsorted(sizes, keep_tokens, side="right")) for sizes in shares))
    again = own[:-kept]  # embedded twice
    parts, random_states = [], []
    random = torch.cuda if processes.device.type == "cuda" else torch  # where dropout draws from
    with torch.no_grad():
        for group in again:
            random_states.append(random.get_rng_state())
            parts.append(embed(group))
    graphs = [embed(group) for group in own[-kept:]]
    own_RD = torch.cat([*parts, *(part_RD.detach() for part_RD in graphs)])
    rows_RD = own_RD.new_zeros(offsets[-1], own_RD.shape[1])
    rows_RD[places(np.concatenate(own))] = own_RD
    rows_RD = processes.sum(rows_RD)  # each row comes from one process

    def push(gradient_RD: Tensor) -> None:
        gradient_RD = processes.sum(gradient_RD)
        while graphs:  # the longest first; each is freed as it goes
            processes.reducing(model, last=last and not again and len(graphs) == 1)
            graphs.pop().backward(gradient_RD[places(own[len(again) + len(graphs)])])
        after = random.get_rng_state()
        for number, (group, state) in enumerate(zip(again, random_states, strict=True), 1):
            random.set_rng_state(state)
            processes.reducing(model, last=last and number == len(again))
            embed(group).backward(gradient_RD[places(group)])
        random.set_rng_state(after)

    return rows_RD, push
