"""Training of the contextual encoder (CDE, section 4.2): its objective, with two-stage gradient caching.

Legend: K context documents · J context slots · R rows · D dimensions · N queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from unmask.models.context_encoder import ContextualEncoder
from unmask.models.encoding import TokenSequence, after_context
from unmask.training.cache import cached_backward, cached_rows
from unmask.training.distributed import Processes
from unmask.training.stages import Pair, PairBatch


@dataclass(frozen=True)
class ContextBatch(PairBatch):
    """Pairs with room for their context, and the documents that all of them see."""

    context: list[TokenSequence]
    kept: np.ndarray  # which of these are seen; the null vector stands for the others


class Cde(Pair):
    """Contrastive pair training in which queries and documents are read in the context of other documents.

    The context are J documents of the batch, drawn without replacement, or all that there are: CDE shares it
    within a batch, which its clusters make one corpus. Sequence dropout is drawn for the batch too, as the
    context is. The loss is that of `Pair`.

    Both stages are gradient-cached: the first embeds the context, the second embeds the pairs around the
    context vectors, and their gradient, summed over the second's micro-batches and over the processes, is
    pushed through the first. Each stage reduces its own gradients once.
    """

    def batch(self, step: int) -> ContextBatch:
        pairs, config = super().batch(step), self._config
        documents = pairs.sequences[len(pairs.sequences) // 2 :]
        rng = np.random.default_rng([config.seed, 4, step])
        context = [documents[i] for i in rng.permutation(len(documents))[: config.context]]
        kept = np.flatnonzero(rng.random(len(context)) >= config.sequence_dropout)
        sequences = [after_context(sequence, config.context) for sequence in pairs.sequences]
        return ContextBatch(pairs.dataset, sequences, pairs.negatives_NN, context, kept)

    def module(self, model: ContextualEncoder) -> nn.ModuleList:
        return nn.ModuleList([model.first, model.second])

    def backward(
        self, module: nn.ModuleList, batch: ContextBatch, step: int, processes: Processes
    ) -> dict[str, Any]:
        first, second = module
        options = {"token_budget": self._config.token_budget, "processes": processes}
        documents_KD, push = cached_rows(first, batch.context, **options)
        context_KD = documents_KD[batch.kept].requires_grad_()
        loss = cached_backward(
            second, batch.sequences, lambda rows_RD: self.loss(rows_RD, batch.negatives_NN, processes),
            context_KD=context_KD, **options,
        )  # fmt: skip
        gradient_KD = torch.zeros_like(documents_KD)
        gradient_KD[batch.kept] = context_KD.grad / processes.count
        push(gradient_KD)
        tokens = sum(map(len, [*batch.context, *batch.sequences]))  # slots are computed, so they count
        pairs = len(batch.sequences) // 2
        return {"loss": loss, "tokens": tokens, "dataset": batch.dataset, "pairs": pairs}
