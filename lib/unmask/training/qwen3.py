"""Qwen3-Embedding's training of an embedder: queries with instructions, last-token pooling, five-term loss.

Shape suffixes: N queries · D dimensions · K hard negatives per query · R rows (texts).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unmask.losses import matryoshka, qwen3_loss
from unmask.models.encoding import TokenSequence
from unmask.models.quantize import int8
from unmask.training.cache import cached_backward
from unmask.training.distributed import Processes
from unmask.training.stages import Contrastive


@dataclass(frozen=True)
class Qwen3Batch:
    """N queries, then N documents, then the K hard negatives of each query."""

    dataset: str
    sequences: list[TokenSequence]
    document_N: Tensor
    hard_document_NK: Tensor  # both number what is read: equal tokens, equal numbers
    negatives_NN: Tensor | None

    def __len__(self) -> int:
        return len(self.document_N)


class Qwen3(Contrastive):
    """Contrastive training with instructions, in-batch and, where the data hold some, mined negatives, at
    every Matryoshka prefix (Qwen3-Embedding, section 3.1); `data` holds the instructions with the queries.

    Without quantiser, unless `config.quantize` asks for one.
    """

    def batch(self, step: int) -> Qwen3Batch:
        name, rows = self._plan(step)
        pairs, count = self._data[name], self._config.negatives
        documents = [pairs.documents[i] for i in rows]
        hard = [negative for i in rows for negative in pairs.negatives[i]] if count else []
        number = _numbers([*documents, *hard])
        return Qwen3Batch(
            name,
            [TokenSequence(text) for text in [*(pairs.queries[i] for i in rows), *documents, *hard]],
            number[: len(rows)],
            number[len(rows) :].unflatten(0, (len(rows), count)),
            self._negatives(name, rows),
        )

    def backward(
        self, module: nn.Module, batch: Qwen3Batch, step: int, processes: Processes
    ) -> dict[str, Any]:
        config, n = self._config, len(batch)
        loss = partial(
            qwen3_loss, temperature=config.temperature, margin=config.margin, queries=processes.slice(n),
            document_N=batch.document_N, hard_document_NK=batch.hard_document_NK,
            negatives_NN=batch.negatives_NN,
        )  # fmt: skip

        def loss_of_rows(rows_RD: Tensor) -> Tensor:
            rows_RD = int8(rows_RD) if config.quantize else rows_RD
            q_ND, d_ND, hard_RD = rows_RD.split([n, n, len(rows_RD) - 2 * n])
            hard_NKD = hard_RD.unflatten(0, (n, config.negatives))
            return matryoshka(loss, (q_ND, d_ND, hard_NKD), config.dimensions)

        total = cached_backward(
            module, batch.sequences, loss_of_rows,
            token_budget=config.token_budget, pooling=config.pooling, processes=processes,
        )  # fmt: skip
        tokens = sum(map(len, batch.sequences))
        return {"loss": total, "tokens": tokens, "dataset": batch.dataset, "pairs": n}


def _numbers(texts: list[np.ndarray]) -> Tensor:
    """A number for each text, the same for the same tokens."""
    seen: dict[bytes, int] = {}
    return torch.tensor([seen.setdefault(text.tobytes(), len(seen)) for text in texts])
