"""The stages of other recipes: ConTEB's late interaction, CDE's contextual encoder, Qwen3-Embedding, and a
reranker.

Shape suffixes: N queries · K context documents, or hard negatives per query · R rows (texts, or tokens) ·
D dimensions · B prompts · L tokens · M documents · C chunks of a document.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from unmask.data.tokens import Truncation
from unmask.losses import answer_loss, insent_loss, matryoshka, mean_maxsim, qwen3_loss
from unmask.models import context_encoder
from unmask.models.context_encoder import ContextEmbedder, ContextualEncoder
from unmask.models.embedder import INSTRUCTIONS, prompt
from unmask.models.encoding import after_context, every_token, micro_batches
from unmask.models.reranker import AROUND_DOCUMENT, answers, around_query, padded, taken
from unmask.training.cache import cached_rows
from unmask.training.contrastive import Batch, Contextual, ContextualBatch, Pair, with_negatives
from unmask.training.distributed import Distributed
from unmask.training.pretraining import accumulate
from unmask.training.stages import TextStage


class LateInteraction(Contextual):
    """InSeNT for token vectors (ConTEB, section 4): documents are read whole, every token keeps its vector,
    and MaxSim compares; λ is `config.alpha`. In floats, without Matryoshka.
    """

    def batch(self, step: int) -> list[ContextualBatch]:
        [batch] = super().batch(step)
        return [replace(batch, sequences=list(map(every_token, batch.sequences)))]

    def loss(self, rows_RD: Tensor, batch: ContextualBatch, **shared: Any) -> Tensor:
        queries = [text.rows for text in batch.sequences[: batch.count]]
        texts = rows_RD.split(queries + batch.chunk_tokens_MC[batch.mask_MC].int().tolist())
        q_NLD, chunks_XKD = (pad_sequence(x, True) for x in (texts[: batch.count], texts[batch.count :]))
        shared |= batch.labels() | {"similarity": mean_maxsim}
        return insent_loss(q_NLD, batch.by_document(chunks_XKD), lam=self.config.alpha, **shared)


class Cde(Pair):
    """Contrastive pair training in which queries and documents are read in the context of other documents.

    The context is J documents of the batch, drawn without replacement, or all if there are fewer: CDE shares
    it within a batch, since its clusters make each batch one corpus. Sequence dropout, too, is
    drawn per batch. The loss is that of `Pair`.

    Both stages are gradient-cached: the first embeds the context, the second embeds the pairs around the
    context vectors, and their gradient, summed over the second's micro-batches and over the processes, is
    pushed through the first. Each stage reduces its own gradients once.
    """

    section = "cde"

    def model(self, start: str | Path = "") -> ContextualEncoder:
        """Both of its stages start from one checkpoint (CDE, section 5).

        Raises: ValueError if no context documents are asked for.
        """
        if not self.config.context:
            raise ValueError("cde.context is 0: a plain encoder is trained by stage Pair")
        first, second = (super(Cde, self).model(start) for _ in range(2))
        model = ContextualEncoder(first, second, self.config.context)
        model.start = str(start)
        return model

    def save(self, model: ContextualEncoder, path: Path, **options: Any) -> None:
        context_encoder.save(model, self.tokenizer, path, **self.facts(self.job.start), **options)

    def restore(self, model: ContextualEncoder, path: Path) -> None:
        saved = ContextEmbedder.from_pretrained(path, device="cpu", mixed_precision=False)
        model.load_state_dict(saved.encoder.state_dict())

    def batch(self, step: int) -> list[Batch]:
        [pairs], config = super().batch(step), self.config
        documents = pairs.sequences[pairs.count :]
        rng = np.random.default_rng([config.seed, 4, step])
        context = [documents[i] for i in rng.permutation(len(documents))[: config.context]]
        visible = np.flatnonzero(rng.random(len(context)) >= config.sequence_dropout)
        sequences = [after_context(sequence, config.context) for sequence in pairs.sequences]
        return [replace(pairs, sequences=sequences, context=context, visible=visible)]

    def module(self, model: ContextualEncoder) -> nn.ModuleList:
        return nn.ModuleList([model.first, model.second])

    def part_backward(
        self, module: nn.ModuleList, part: Batch, processes: Distributed, token_budget: int, **options: Any
    ) -> Tensor:
        (first, second), shared = module, {"processes": processes, "token_budget": token_budget}
        documents_KD, push = cached_rows(first, part.context, **shared)
        visible = processes.to_device(torch.from_numpy(part.visible))
        context_KD = documents_KD[visible].requires_grad_()
        loss = super().part_backward(second, part, context_KD=context_KD, **shared, **options)
        gradient_KD = torch.zeros_like(documents_KD)
        gradient_KD[visible] = context_KD.grad
        push(gradient_KD)
        return loss


class Qwen3(Pair):
    """Contrastive training with instructions, in-batch and, where the data hold some, mined negatives, at
    every Matryoshka prefix (Qwen3-Embedding, section 3.1); `data` holds the instructions with the queries.

    Without quantiser, unless `config.quantize` asks for one.
    """

    section = "qwen3"
    ends = True  # whatever the pooling

    def reading(self, group: str) -> tuple[Truncation, Truncation]:
        query, document = super().reading(group)
        return query._replace(prefix=prompt(INSTRUCTIONS[group])), document

    def facts(self, start: str) -> dict[str, Any]:
        """With prompts for sentence-transformers."""
        return super().facts(start) | {"prompts": {"query": prompt(INSTRUCTIONS["english"]), "document": ""}}

    def loss(self, rows_RD: Tensor, batch: Batch, **shared: Any) -> Tensor:
        rows_RD = self.served(rows_RD)
        shared |= {"margin": self.config.margin, "negative_mask_NN": batch.negatives}
        vectors, shared["text_ids_R"] = with_negatives(rows_RD, batch)
        return matryoshka(partial(qwen3_loss, **shared), vectors, self.config.dimensions)


class Prompts(NamedTuple):
    """A batch: whole prompts, and the token that is to follow each."""

    dataset: str
    prompts: list[np.ndarray]
    answer_B: Tensor


class Reranking(TextStage):
    """Supervised fine-tuning on prompts: each query with its document ("yes") and with its mined negatives
    ("no"), all of equal weight (Qwen3-Embedding, equation 2).

    A query and a document of `data`, one after the other, are a prompt (`unmask.models.reranker`).
    """

    section = "reranker"
    head = True

    @cached_property
    def answers(self) -> tuple[int, int]:
        return answers(self.tokenizer.backend_tokenizer)

    def model(self, start: str | Path = "") -> PreTrainedModel:
        model = super().model(start)
        if not getattr(model.config, "is_causal", True):
            raise ValueError(f"{start} is bidirectional: a reranker starts from a causal model")
        return model

    def shown(self, step: int) -> Iterator[list[str]]:
        """The end of each prompt, and its answer."""
        batch = self.batch(step)
        for prompt_L, answer in zip(batch.prompts, batch.answer_B):
            yield [f"{self.tokenizer.decode(prompt_L)}{self.tokenizer.decode(answer)}"]

    def keys(self) -> dict[str, np.ndarray]:
        return {name: np.arange(len(pairs.queries)) for name, pairs in self.data.items()}

    def reading(self, group: str) -> tuple[Truncation, Truncation]:
        def framed(length: int, around: tuple[str, str]) -> Truncation:
            length += taken(self.stored.backend, around)
            return Truncation(length, *around, escape_special_tokens=True)

        query = framed(self.config.query_length, around_query(INSTRUCTIONS[group]))
        return query, framed(self.config.document_length, AROUND_DOCUMENT)

    def batch(self, step: int) -> Prompts:
        name, rows = self.plan(step)
        pairs, (yes, no) = self.data[name], self.answers
        prompts, replies = [], []
        for row in rows:
            documents = [pairs.documents[row], *pairs.negatives[row]]
            prompts += [np.concatenate([pairs.queries[row], document_L]) for document_L in documents]
            replies += [yes] + [no] * (len(documents) - 1)
        return Prompts(name, prompts, torch.tensor(replies))

    def facts(self, start: str) -> dict[str, Any]:
        return super().facts(start) | {"instruction": INSTRUCTIONS["english"]}  # until one is named

    def backward(self, module: nn.Module, batch: Prompts, processes: Distributed) -> dict[str, Any]:
        lengths = [len(prompt_L) for prompt_L in batch.prompts]

        def forward(group: np.ndarray) -> Tensor:
            inputs = (*padded([batch.prompts[i] for i in group]), batch.answer_B[group])
            tokens_BL, last_B, answer_B = map(processes.to_device, inputs)
            loss = partial(answer_loss, last_B=last_B, answer_B=answer_B, normalizer=len(lengths))
            return module(tokens_BL, None, loss)

        budget = self.config.memory(processes.device.type)["token_budget"]
        groups = micro_batches(lengths, budget, processes.count)
        loss = accumulate(module, groups, forward, processes)
        return {"loss": loss, "tokens": sum(lengths), "dataset": batch.dataset, "prompts": len(lengths)}
