"""Gradient caching: the loss of a large batch at the memory of a small one (Gao et al. 2021, "Scaling Deep
Contrastive Learning Batch Size under Memory Limited Setup").

The gradient of a contrastive loss factors through the embeddings. So: embed all micro-batches without a
graph, take the loss and its gradient on the embeddings, then embed each micro-batch again with a graph and
push its part of that gradient through. The result is the gradient of the whole batch, not an approximation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.encoding import TokenSequence, encode_rows, micro_batches, row_offsets, rows_of


@dataclass(frozen=True)
class Context:
    """What a stage needs of the loop: where tensors go, the precision of a forward pass, how a loss is
    backpropagated."""

    device: torch.device | str = "cpu"
    autocast: Callable[[], AbstractContextManager] = nullcontext
    backward: Callable[[Tensor], None] = Tensor.backward  # accelerate's in training


def cached_backward(
    model: torch.nn.Module,
    sequences: Sequence[TokenSequence],
    loss_of_rows: Callable[[Tensor], Tensor],
    *,
    token_budget: int,
    pooling: str = "mean",
    context: Context = Context(),
) -> Tensor:
    """Adds the gradient of `loss_of_rows(rows_RD)` to the model's parameters and returns the detached loss.

    Args:
        sequences: everything the loss looks at; rows come in this order, a document's chunks one after the
            other.
        loss_of_rows: scalar loss of all rows; quantisation belongs here.
        token_budget: padded tokens per micro-batch. If everything fits into one, plain backpropagation is
            used.

    Random numbers drawn by the model (dropout) are replayed, so cached and uncached gradients agree.
    """
    device = context.device
    groups = micro_batches([len(s) for s in sequences], token_budget)
    offsets = row_offsets(sequences)

    def embed(group) -> Tensor:
        with context.autocast():
            return encode_rows(model, [sequences[i] for i in group], pooling=pooling, device=device)

    if len(groups) == 1:
        order = torch.from_numpy(rows_of(offsets, groups[0]).argsort()).to(device)
        loss = loss_of_rows(embed(groups[0])[order])
        context.backward(loss)
        return loss.detach()

    rows_RD: Tensor | None = None
    random_states = []
    with torch.no_grad():
        for group in groups:
            random_states.append(_random_state(device))
            part = embed(group)
            if rows_RD is None:
                rows_RD = part.new_empty(int(offsets[-1]), part.shape[1])
            rows_RD[torch.from_numpy(rows_of(offsets, group)).to(device)] = part
    rows_RD.requires_grad_()
    loss = loss_of_rows(rows_RD)
    (gradient_RD,) = torch.autograd.grad(loss, rows_RD)
    after = _random_state(device)
    for group, state in zip(groups, random_states, strict=True):
        _set_random_state(state, device)
        index = torch.from_numpy(rows_of(offsets, group)).to(device)
        context.backward((embed(group) * gradient_RD[index]).sum())
    _set_random_state(after, device)
    return loss.detach()


def _random_state(device: torch.device | str) -> tuple[Tensor, Tensor | None]:
    on_gpu = torch.device(device).type == "cuda"
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if on_gpu else None


def _set_random_state(state: tuple[Tensor, Tensor | None], device: torch.device | str) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
