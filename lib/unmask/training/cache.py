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
from dataclasses import dataclass
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
    lengths, offsets = [*map(len, sequences)], row_offsets(sequences)
    groups = micro_batches(lengths, token_budget, processes.count, packed=packed)[::-1]
    row_R = np.split(np.arange(offsets[-1]), offsets[1:-1])  # of each sequence
    mine = processes.share(groups)
    rows = [np.concatenate([np.arange(0), *(row_R[i] for i in group)]) for group in mine]
    places = [processes.to_device(torch.from_numpy(place_R)) for place_R in rows]

    def embed(group: np.ndarray) -> Tensor:
        # A process without a sequence embeds one all the same, since the others wait for it in FSDP2.
        texts = [sequences[i] for i in (group if len(group) else [0])]
        with processes.autocast():
            rows_RD = encode_rows(model, texts, pooling=pooling, packed=packed, **inputs)
        return rows_RD if len(group) else rows_RD[:0]

    passes = _Passes(embed, mine, places, partial(processes.reducing, model))
    mine_RD = passes.forward(_count_graphs(groups, lengths, keep_tokens, processes.count))
    rows_RD = mine_RD.new_zeros(offsets[-1], mine_RD.shape[1])
    rows_RD[torch.cat(places)] = mine_RD
    return processes.sum(rows_RD), lambda gradient_RD: passes.push(processes.sum(gradient_RD), last)


def _count_graphs(groups: list[np.ndarray], lengths: list[int], keep_tokens: int, processes: int) -> int:
    """How many micro-batches keep their graph: as many on every process as on the one that has room for the
    fewest, since FSDP2's must go forward and back together."""
    tokens = [sum(lengths[i] for i in group) for group in groups[::-1]]
    shares = [np.cumsum(tokens[rank::processes]) for rank in range(processes)]
    return max(1, min(int(np.searchsorted(sizes, keep_tokens, side="right")) for sizes in shares))


@dataclass
class _Passes:
    """A process's passes over its micro-batches, those with the longest sequences last."""

    embed: Callable[[np.ndarray], Tensor]
    groups: Sequence[np.ndarray]  # numbers of sequences
    places: Sequence[Tensor]  # of their rows among all rows
    reducing: Callable[..., None]

    def forward(self, graphs: int) -> Tensor:
        """The rows of all micro-batches; the last so many keep their graphs."""
        replayed, parts, self.states = self.groups[:-graphs], [], []
        random = torch.cuda if self.places[0].is_cuda else torch  # where dropout draws from
        with torch.no_grad():
            for group in replayed:
                self.states.append(random.get_rng_state())
                parts.append(self.embed(group))
        self.graphs = [self.embed(group) for group in self.groups[-graphs:]]
        return torch.cat([*parts, *(part_RD.detach() for part_RD in self.graphs)])

    def push(self, gradient_RD: Tensor, last: bool) -> None:
        """Takes the gradient of all rows back through every pass."""
        replayed, parts_RD = len(self.states), [gradient_RD[place_R] for place_R in self.places]
        while self.graphs:  # the longest first; each is freed as it goes
            self.reducing(last=last and not replayed and len(self.graphs) == 1)
            self.graphs.pop().backward(parts_RD.pop())
        random = torch.cuda if gradient_RD.is_cuda else torch
        after = random.get_rng_state()
        for number, (group, state) in enumerate(zip(self.groups, self.states), 1):
            random.set_rng_state(state)
            self.reducing(last=last and number == replayed)
            self.embed(group).backward(parts_RD[number - 1])
        random.set_rng_state(after)
