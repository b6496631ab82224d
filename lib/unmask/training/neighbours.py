"""The stages of the neighbours: CDE's contextual encoder, Qwen3-Embedding, and a reranker.

Shape suffixes: N queries · K context documents, or hard negatives per query · R rows (texts) · D dimensions ·
B prompts · L tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from unmask.config import CdeConfig, Qwen3Config, RerankerConfig
from unmask.data.batches import BatchPlan
from unmask.data.lookalikes import negative_similarity
from unmask.data.tokenized import TokenPairs
from unmask.losses import answer_loss, matryoshka, qwen3_loss
from unmask.models import context_encoder
from unmask.models.context_encoder import ContextualEncoder
from unmask.models.embedder import INSTRUCTIONS, prompt
from unmask.models.encoding import TokenSequence, after_context, micro_batches
from unmask.models.quantize import int8
from unmask.models.reranker import AROUND_DOCUMENT, answers, around_query, padded, taken
from unmask.training.cache import cached_backward, cached_rows
from unmask.training.distributed import Processes
from unmask.training.stages import Allowed, Batch, Job, LanguageModel, Pair, Stage, accumulate, triplets


@dataclass(frozen=True)
class ContextBatch(Batch):
    """Pairs with room for their context, and the documents that all of them see."""

    context: list[TokenSequence]
    kept: np.ndarray  # which of these are seen; the null vector stands for the others


class Cde(Pair, name="cde"):
    """Contrastive pair training in which queries and documents are read in the context of other documents.

    The context are J documents of the batch, drawn without replacement, or all that there are: CDE shares it
    within a batch, which its clusters make one corpus. Sequence dropout is drawn for the batch too, as the
    context is. The loss is that of `Pair`.

    Both stages are gradient-cached: the first embeds the context, the second embeds the pairs around the
    context vectors, and their gradient, summed over the second's micro-batches and over the processes, is
    pushed through the first. Each stage reduces its own gradients once.
    """

    save = staticmethod(context_encoder.save)

    @classmethod
    def chosen(cls, config: CdeConfig) -> type[Stage]:
        return cls if config.context else Pair

    @classmethod
    def model(cls, job: Job) -> ContextualEncoder:
        return context_encoder.build(job.asked["start"], context=job.config.context)

    def batch(self, step: int) -> ContextBatch:
        pairs, config = super().batch(step), self._config
        documents = pairs.sequences[pairs.count :]
        rng = np.random.default_rng([config.seed, 4, step])
        context = [documents[i] for i in rng.permutation(len(documents))[: config.context]]
        kept = np.flatnonzero(rng.random(len(context)) >= config.sequence_dropout)
        sequences = [after_context(sequence, config.context) for sequence in pairs.sequences]
        return ContextBatch(pairs.dataset, sequences, pairs.count, pairs.negatives, context, kept)

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
            second, batch.sequences, lambda rows_RD: self.loss(rows_RD, batch, step, processes),
            context_KD=context_KD, **options,
        )  # fmt: skip
        gradient_KD = torch.zeros_like(documents_KD)
        gradient_KD[batch.kept] = context_KD.grad / processes.count
        push(gradient_KD)
        tokens = sum(map(len, [*batch.context, *batch.sequences]))  # slots are computed, so they count
        return {"loss": loss, "tokens": tokens, "dataset": batch.dataset, "pairs": batch.count}


@dataclass(frozen=True)
class Qwen3Batch(Batch):
    """N queries, then N documents, then the K hard negatives of each query."""

    document_N: Tensor
    hard_document_NK: Tensor  # both number what is read: equal tokens, equal numbers


class Qwen3(Pair, name="qwen3"):
    """Contrastive training with instructions, in-batch and, where the data hold some, mined negatives, at
    every Matryoshka prefix (Qwen3-Embedding, section 3.1); `data` holds the instructions with the queries.

    Without quantiser, unless `config.quantize` asks for one.
    """

    @classmethod
    def ends(cls, config: Qwen3Config) -> bool:
        return True  # whatever the pooling

    @classmethod
    def read(cls, job: Job) -> dict[str, TokenPairs]:
        return triplets(job) if job.config.negatives else super().read(job)

    @classmethod
    def reading(cls, job: Job, group: str) -> dict[str, Any]:
        reading = super().reading(job, group)
        return reading | {"around_query": (prompt(INSTRUCTIONS[group]), reading["around_query"][1])}

    @classmethod
    def allowed(cls, job: Job) -> Allowed:
        return None if job.config.negatives else super().allowed(job)

    @classmethod
    def facts(cls, job: Job) -> dict[str, Any]:
        prompts = {"query": prompt(INSTRUCTIONS["english"]), "document": ""}  # for sentence-transformers
        return super().facts(job) | {"prompts": prompts}

    def batch(self, step: int) -> Qwen3Batch:
        name, rows = self._plan(step)
        pairs, count = self._data[name], self._config.negatives
        documents = [pairs.documents[i] for i in rows]
        hard = [negative for i in rows for negative in pairs.negatives[i]] if count else []
        number = _numbers([*documents, *hard])
        n, texts = len(rows), [*(pairs.queries[i] for i in rows), *documents, *hard]
        numbers = number[:n], number[n:].unflatten(0, (n, count))
        return Qwen3Batch(name, list(map(TokenSequence, texts)), n, self._negatives(name, rows), *numbers)

    def loss(self, rows_RD: Tensor, batch: Qwen3Batch, step: int, processes: Processes) -> Tensor:
        config, n = self._config, batch.count
        loss = partial(
            qwen3_loss, temperature=config.temperature, margin=config.margin, queries=processes.slice(n),
            document_N=batch.document_N, hard_document_NK=batch.hard_document_NK,
            negatives_NN=batch.negatives,
        )  # fmt: skip
        rows_RD = int8(rows_RD) if config.quantize else rows_RD
        q_ND, d_ND, hard_RD = rows_RD.split([n, n, len(rows_RD) - 2 * n])
        hard_NKD = hard_RD.unflatten(0, (n, config.negatives))
        return matryoshka(loss, (q_ND, d_ND, hard_NKD), config.dimensions)


def _numbers(texts: list[np.ndarray]) -> Tensor:
    """A number for each text, the same for the same tokens."""
    seen: dict[bytes, int] = {}
    return torch.tensor([seen.setdefault(text.tobytes(), len(seen)) for text in texts])


class Prompts(NamedTuple):
    """A batch: whole prompts, and the token that is to follow each."""

    dataset: str
    prompts: list[np.ndarray]
    answer_B: Tensor


class Reranking(Stage, name="reranker"):
    """Supervised fine-tuning on prompts: each query with its document ("yes") and with its mined negatives
    ("no"), all of equal weight (Qwen3-Embedding, equation 2).

    Args:
        data: triplets; a query and a document, one after the other, are a prompt (`unmask.models.reranker`).
        answers: the tokens of "yes" and of "no".
    """

    head = True

    def __init__(self, data: Mapping[str, TokenPairs], config: RerankerConfig, answers: tuple[int, int]):
        self._data, self._config, self._answers = data, config, answers
        rows = {name: len(pairs.queries) for name, pairs in data.items()}
        self._plan = BatchPlan(rows, batch=config.batch, steps=config.steps, seed=config.seed)

    @classmethod
    def read(cls, job: Job) -> dict[str, TokenPairs]:
        return triplets(job)

    @classmethod
    def reading(cls, job: Job, group: str) -> dict[str, Any]:
        around, tokenizer = around_query(INSTRUCTIONS[group]), job.stored.load()
        return {
            "around_query": around,
            "around_document": AROUND_DOCUMENT,
            "query_length": job.config.query_length + taken(tokenizer, around),
            "document_length": job.config.document_length + taken(tokenizer, AROUND_DOCUMENT),
        }

    @classmethod
    def of(cls, job: Job, model: PreTrainedModel) -> Reranking:
        return cls(job.data, job.config, answers(job.tokenizer.backend_tokenizer))

    def batch(self, step: int) -> Prompts:
        name, rows = self._plan(step)
        pairs, (yes, no) = self._data[name], self._answers
        prompts, answers = [], []
        for row in rows:
            documents = [pairs.documents[row], *pairs.negatives[row]]
            prompts += [np.concatenate([pairs.queries[row], document_L]) for document_L in documents]
            answers += [yes] + [no] * (len(documents) - 1)
        return Prompts(name, prompts, torch.tensor(answers))

    def module(self, model: PreTrainedModel) -> nn.Module:
        return LanguageModel(model)

    def backward(self, module: nn.Module, batch: Prompts, step: int, processes: Processes) -> dict[str, Any]:
        lengths = [len(prompt_L) for prompt_L in batch.prompts]

        def forward(group: np.ndarray) -> Tensor:
            tokens_BL, last_B = padded([batch.prompts[i] for i in group])
            answer_B = batch.answer_B[group]
            tokens_BL, last_B, answer_B = (x.to(processes.device) for x in (tokens_BL, last_B, answer_B))
            loss = partial(answer_loss, last_B=last_B, answer_B=answer_B, normalizer=len(lengths))
            return module(tokens_BL, None, loss)

        groups = micro_batches(lengths, self._config.token_budget, processes.count)
        loss = accumulate(module, groups, forward, processes)
        return {"loss": loss, "tokens": sum(lengths), "dataset": batch.dataset, "prompts": len(lengths)}


def drawn_batches(asked: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """The first batches of a training on the pairs of a job's groups, as the surrogate sees them.

    Args:
        asked: the job, see `Job`; it may have random batches.
        count: of the batches.
    Returns: for each its "dataset", its "rows" there, and its "similarity": the surrogate's mean cosine of a
        query to the other documents (CDE, figure 6).
    """
    job = Job(asked)
    stage = Pair(job.data, replace(job.config, steps=count), neighbours=job.neighbours)
    drawn = map(stage.samples, range(count))
    return [
        row | {"similarity": negative_similarity(job.neighbours[row["dataset"]], row["rows"])}
        for row in drawn
    ]
