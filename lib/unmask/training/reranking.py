"""The training of a reranker: a language model that learns to answer "yes" or "no"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from unmask.config import RerankerConfig
from unmask.data.batches import BatchPlan
from unmask.data.tokenized import TokenPairs
from unmask.losses import answer_loss
from unmask.models.encoding import micro_batches
from unmask.models.reranker import padded
from unmask.training.distributed import Processes
from unmask.training.stages import LanguageModel, accumulate


class Prompts(NamedTuple):
    """A batch: whole prompts, and the token that is to follow each."""

    dataset: str
    prompts: list[np.ndarray]
    answer_B: Tensor


class Reranking:
    """Supervised fine-tuning on prompts: each query with its document ("yes") and with its mined negatives
    ("no"), all of equal weight (Qwen3-Embedding, equation 2).

    Args:
        data: triplets; a query and a document, one after the other, are a prompt (`unmask.data.prompt`).
        answers: the tokens of "yes" and of "no".
    """

    def __init__(self, data: Mapping[str, TokenPairs], config: RerankerConfig, answers: tuple[int, int]):
        self._data, self._config, self._answers = data, config, answers
        rows = {name: len(pairs.queries) for name, pairs in data.items()}
        self._plan = BatchPlan(rows, batch=config.batch, steps=config.steps, seed=config.seed)

    def batch(self, step: int) -> Prompts:
        name, rows = self._plan(step)
        pairs, (yes, no) = self._data[name], self._answers
        prompts, answers = [], []
        for row in rows:
            documents = [pairs.documents[row], *pairs.negatives[row]]
            prompts += [np.concatenate([pairs.queries[row], document_L]) for document_L in documents]
            answers += [yes] + [no] * (len(documents) - 1)
        return Prompts(name, prompts, torch.tensor(answers))

    def samples(self, step: int) -> dict[str, Any]:
        return self._plan.samples(step)

    def module(self, model: PreTrainedModel) -> nn.Module:
        return LanguageModel(model)

    def backward(self, module: nn.Module, batch: Prompts, step: int, processes: Processes) -> dict[str, Any]:
        lengths = [len(prompt_L) for prompt_L in batch.prompts]

        def forward(group: np.ndarray) -> Tensor:
            tokens_BL, last_B = padded([batch.prompts[i] for i in group])
            where = last_B.to(processes.device), batch.answer_B[group].to(processes.device)
            return module(
                tokens_BL.to(processes.device, non_blocking=True),
                None,
                lambda hidden, head: answer_loss(hidden, head, *where, normalizer=len(lengths)),
            )

        groups = micro_batches(lengths, self._config.token_budget, processes.count)
        loss = accumulate(module, groups, forward, processes)
        return {"loss": loss, "tokens": sum(lengths), "dataset": batch.dataset, "prompts": len(lengths)}
