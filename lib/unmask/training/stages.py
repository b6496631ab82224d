"""What each training stage computes: its batches, as pure functions of (seed, step), and its loss.

The loop (`engine.train`) knows stages only through `batch` and `backward`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from unmask.config import ContextualConfig, ContrastiveConfig, DiffusionConfig, PretrainConfig
from unmask.data.clusters import Neighbours
from unmask.data.documents import ContextualBatch, contextual_batch, split_rows
from unmask.data.pairs import BatchPlan
from unmask.data.tokenized import Blocks, TokenDocument, TokenPairs
from unmask.losses import (
    contextual_loss,
    diffusion_loss,
    insent_loss,
    matryoshka,
    next_token_loss,
    pair_loss,
    triplet_loss,
)
from unmask.models.encoding import TokenSequence
from unmask.models.quantize import int8
from unmask.training.cache import cached_backward
from unmask.training.distributed import Processes
from unmask.training.schedule import cosine_ramp


class Stage(Protocol):
    """One training objective. `batch` and `samples` must not depend on anything but the seed and the step."""

    def batch(self, step: int) -> Any:
        """The global batch of a step, the same on every process."""
        ...

    def samples(self, step: int) -> dict[str, Any]:
        """Which data set and rows a step reads, for the report of a failure."""
        ...

    def module(self, model: PreTrainedModel) -> nn.Module:
        """What is run forward: all parameters must be used inside of it, where FSDP2 gathers them. Several
        modules that are run each on its own are an nn.ModuleList."""
        ...

    def backward(self, module: nn.Module, batch: Any, step: int, processes: Processes) -> dict[str, Any]:
        """Adds this process's share of the batch's gradient to the parameters.

        Returns: metrics of the global batch, "loss" (a tensor) and "tokens" among them.
        """
        ...


class LanguageModel(nn.Module):
    """A language model that ends in its loss: logits exist inside of the loss, at the paid positions only."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(
        self, tokens_BL: Tensor, attention_mask: Tensor | None, loss: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        hidden_BLD = self.model.base_model(
            input_ids=tokens_BL, attention_mask=attention_mask, use_cache=False
        ).last_hidden_state
        return loss(hidden_BLD, self.model.get_output_embeddings().weight)


class _Pretraining:
    """What next-token and diffusion pretraining share: packed blocks, a few of them at a time."""

    def __init__(self, blocks_NL: np.ndarray | Blocks, config: PretrainConfig):
        self._blocks, self._config = blocks_NL, config
        self._plan = BatchPlan(
            {"text": len(blocks_NL)}, batch=config.batch, steps=config.steps, seed=config.seed
        )

    def samples(self, step: int) -> dict[str, Any]:
        return self._plan.samples(step)

    def module(self, model: PreTrainedModel) -> nn.Module:
        return LanguageModel(model)

    def _accumulate(
        self,
        module: nn.Module,
        order: Tensor,
        forward: Callable[[Tensor], Tensor],
        processes: Processes,
    ) -> Tensor:
        """Sums the gradients of `forward(rows)` over micro-batches of the rows in `order`."""
        rows = max(1, self._config.token_budget // self._blocks.shape[1])
        # Every process runs as many passes as the others.
        parts = order.tensor_split(_ceil(_ceil(len(order), rows), processes.count) * processes.count)
        return accumulate(module, parts, forward, processes)


def accumulate(
    module: nn.Module, groups: Sequence[Any], forward: Callable[[Any], Tensor], processes: Processes
) -> Tensor:
    """Sums the gradients of a loss that is a sum over micro-batches, and returns the loss.

    Args:
        groups: rows of each micro-batch, as many for each process, the longest groups first.
        forward: the part of the loss that some rows pay.
    """
    own = processes.share(groups)
    total = torch.zeros((), device=processes.device)
    for number, group in enumerate(own, 1):
        with processes.accumulating(module, last=number == len(own)):
            with processes.autocast():
                # A process without rows left repeats some for nothing.
                loss = forward(group) if len(group) else 0 * forward(groups[0][:1])
            processes.backward(loss)
        total += loss.detach()
    return processes.sum(total)


class NextToken(_Pretraining):
    """Autoregressive pretraining on packed blocks: the stand-in for a ready base model."""

    def batch(self, step: int) -> Tensor:
        return torch.from_numpy(self._blocks[self._plan(step)[1]].astype(np.int64))

    def backward(
        self, module: nn.Module, tokens_BL: Tensor, step: int, processes: Processes
    ) -> dict[str, Any]:
        predictable = tokens_BL.shape[0] * (tokens_BL.shape[1] - 1)

        def forward(rows: Tensor) -> Tensor:
            tokens = tokens_BL[rows].to(processes.device)
            return module(
                tokens,
                None,
                lambda hidden, head: next_token_loss(hidden, head, tokens, normalizer=predictable),
            )

        loss = self._accumulate(module, torch.arange(len(tokens_BL)), forward, processes)
        return {"loss": loss, "tokens": tokens_BL.numel()}


@dataclass(frozen=True)
class Noised:
    """A batch of the forward process: clean tokens, what was masked, what its nats are divided by (t, if t is
    uniform); `valid_BL` False beyond a cut."""

    tokens_BL: Tensor
    masked_BL: Tensor
    divisor_B: Tensor
    valid_BL: Tensor


class Diffusion(_Pretraining):
    """Masked-diffusion continued pretraining (pplx-embed, section 2.1)."""

    def __init__(self, blocks_NL: np.ndarray | Blocks, config: DiffusionConfig, mask_token_id: int):
        super().__init__(blocks_NL, config)
        self._mask_token_id = mask_token_id

    def batch(self, step: int) -> Noised:
        return noise(
            self._blocks[self._plan(step)[1]],
            self._config,
            np.random.default_rng([self._config.seed, 2, step]),
        )

    def backward(self, module: nn.Module, batch: Noised, step: int, processes: Processes) -> dict[str, Any]:
        predictable = int((batch.valid_BL.sum(1) - 1).sum())

        def forward(rows: Tensor) -> Tensor:
            whole = bool(batch.valid_BL[rows].all())
            tokens, masked, divisor, valid = (
                x[rows].to(processes.device, non_blocking=True)
                for x in (batch.tokens_BL, batch.masked_BL, batch.divisor_B, batch.valid_BL)
            )
            return module(
                tokens.masked_fill(masked, self._mask_token_id),
                None if whole else valid.long(),
                lambda hidden, head: diffusion_loss(
                    hidden, head, tokens, masked, divisor, None if whole else valid, normalizer=predictable
                ),
            )

        # Cut sequences go last, so that all other micro-batches need no attention mask.
        order = batch.valid_BL.all(1).logical_not().argsort(stable=True)
        loss = self._accumulate(module, order, forward, processes)
        return {"loss": loss, "tokens": int(batch.valid_BL.sum())}


def noise(tokens_BL: np.ndarray, config: DiffusionConfig, rng: np.random.Generator) -> Noised:
    """The forward process: t ~ U(t_min, t_max) per sequence, every token masked with probability t, 1 % of
    sequences cut.

    With t_min = t_max the weight 1/t is a constant: masked next-token prediction with a fixed share of masks,
    as LLM2Vec has it. With `log_uniform` t is drawn with a density in proportion to 1/t instead, so the
    weight 1/t must not be paid again: importance sampling of the same expected loss, in which every masked
    token has the same weight, one over the mean of t, and no single token can fill a step."""
    b, length = tokens_BL.shape
    if config.log_uniform:
        t_B = np.exp(rng.uniform(np.log(config.t_min), np.log(config.t_max), b))
        divisor_B = np.full(b, config.masked_share)
    else:
        t_B = divisor_B = rng.uniform(config.t_min, config.t_max, b)
    masked_BL = rng.random((b, length)) < t_B[:, None]
    cut_B = np.where(rng.random(b) < config.cut_fraction, rng.integers(2, length + 1, b), length)
    valid_BL = np.arange(length) < cut_B[:, None]
    return Noised(
        torch.from_numpy(tokens_BL.astype(np.int64)),
        torch.from_numpy(masked_BL & valid_BL),
        torch.from_numpy(divisor_B.astype(np.float32)),
        torch.from_numpy(valid_BL),
    )


class Contrastive:
    """What the contrastive stages share: single-dataset batches, of look-alikes if the config says so, and a
    model that is run as it is.

    Args:
        data: data sets of rows.
        allowed: as for `BatchPlan`.
        neighbours: of each data set, for a `cluster_size` or a `filter_margin`; their clusters are of this
            size.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        config: ContrastiveConfig,
        allowed: Callable[[int], set[str]] | None = None,
        neighbours: Mapping[str, Neighbours] | None = None,
    ):
        self._data, self._config, self._neighbours = data, config, neighbours or {}
        keys = {name: self._keys(rows) for name, rows in data.items()}
        packings = {name: own.packing for name, own in self._neighbours.items() if own.packing}
        self._plan = BatchPlan(
            keys, batch=config.batch, steps=config.steps, seed=config.seed, allowed=allowed, packings=packings
        )

    def samples(self, step: int) -> dict[str, Any]:
        return self._plan.samples(step)

    def module(self, model: PreTrainedModel) -> nn.Module:
        return model

    @staticmethod
    def _keys(rows: TokenPairs) -> Sequence | np.ndarray | int:
        """The keys of a data set, as `BatchPlan` takes them."""
        return rows.keys

    def _negatives(self, name: str, rows: np.ndarray, *which: np.ndarray) -> Tensor | None:
        """What the surrogate lets be negatives in a batch of these rows, see `Neighbours.negatives`; None
        without a `filter_margin`."""
        if self._config.filter_margin < 0:
            return None
        return torch.from_numpy(self._neighbours[name].negatives(rows, self._config.filter_margin, *which))


@dataclass(frozen=True)
class PairBatch:
    """N pairs of one data set."""

    dataset: str
    sequences: list[TokenSequence]  # the N queries, then the N documents
    negatives_NN: Tensor | None  # False: the document of pair j is no negative of query i


class Pair(Contrastive):
    """Contrastive pair training, with INT8 from the first step unless `config.quantize` is false
    (pplx-embed, section 2.3)."""

    def batch(self, step: int) -> PairBatch:
        name, rows = self._plan(step)
        pairs = self._data[name]
        queries = [TokenSequence(pairs.queries[i]) for i in rows]
        documents = [TokenSequence(pairs.documents[i]) for i in rows]
        return PairBatch(name, queries + documents, self._negatives(name, rows))

    def loss(self, rows_RD: Tensor, negatives_NN: Tensor | None, processes: Processes) -> Tensor:
        """This process's part of the loss of N pairs, given the vectors of queries and documents."""
        config, n = self._config, len(rows_RD) // 2
        embeddings_RD = int8(rows_RD) if config.quantize else rows_RD
        return pair_loss(
            embeddings_RD[:n], embeddings_RD[n:], temperature=config.temperature, margin=config.margin,
            negatives_NN=negatives_NN, queries=processes.slice(n),
        )  # fmt: skip

    def backward(
        self, module: nn.Module, batch: PairBatch, step: int, processes: Processes
    ) -> dict[str, Any]:
        loss = cached_backward(
            module, batch.sequences, lambda rows_RD: self.loss(rows_RD, batch.negatives_NN, processes),
            token_budget=self._config.token_budget, keep_tokens=self._config.keep_tokens,
            pooling=self._config.pooling, processes=processes,
        )  # fmt: skip
        tokens = sum(map(len, batch.sequences))
        return {"loss": loss, "tokens": tokens, "dataset": batch.dataset, "pairs": len(batch.sequences) // 2}


class Contextual(Contrastive):
    """Late chunking with INT8 and Matryoshka, and the dual objective of pplx-embed (section 2.4) or InSeNT's
    (`config.objective`).

    InSeNT weighs its terms with λ = `config.alpha` and has no document-level term. Its authors train without
    quantiser and without Matryoshka; both stay here, so that the objective is all that differs.
    """

    def __init__(
        self,
        data: Mapping[str, Sequence[TokenDocument]],
        config: ContextualConfig,
        separator_id: int,
        neighbours: Mapping[str, Neighbours] | None = None,
    ):
        super().__init__(data, config, neighbours=neighbours)
        self._separator_id = separator_id

    @staticmethod
    def _keys(rows: Sequence[TokenDocument]) -> int:
        return len(rows)

    def batch(self, step: int) -> tuple[str, ContextualBatch, Tensor | None]:
        name, rows = self._plan(step)
        batch = contextual_batch(
            [self._data[name][i] for i in rows],
            separator_id=self._separator_id,
            queries_per_document=self._config.queries_per_document,
            rng=np.random.default_rng([self._config.seed, 3, step]),
        )
        return name, batch, self._negatives(name, rows, batch.document_N.numpy(), batch.query_N.numpy())

    def backward(self, module: nn.Module, batch, step: int, processes: Processes) -> dict[str, Any]:
        name, batch, negatives_NM = batch
        config = self._config
        beta = cosine_ramp(config.beta_start, config.beta_end, step, config.steps)

        def loss_of_rows(rows_RD: Tensor) -> Tensor:
            q_ND, chunks_MCD, documents_MD, mask_MC = split_rows(rows_RD, batch)
            where = batch.document_N.to(rows_RD.device), batch.gold_N.to(rows_RD.device)
            options = {
                "chunk_mask_MC": mask_MC,
                "negatives_NM": negatives_NM,
                "queries": processes.slice(len(q_ND)),
            }

            def loss(q: Tensor, chunks: Tensor, documents: Tensor) -> Tensor:
                if config.objective == "insent":
                    return insent_loss(
                        q, chunks, *where, lam=config.alpha, temperature=config.temperature, **options
                    )
                return contextual_loss(
                    q, chunks, documents, *where,
                    beta=beta, alpha=config.alpha, temperature=config.temperature, margin=config.margin,
                    **options,
                )  # fmt: skip

            return matryoshka(loss, (int8(q_ND), int8(chunks_MCD), int8(documents_MD)), config.dimensions)

        loss = cached_backward(
            module, batch.sequences, loss_of_rows,
            token_budget=config.token_budget, keep_tokens=config.keep_tokens, processes=processes,
        )  # fmt: skip
        row = {"loss": loss, "tokens": sum(map(len, batch.sequences)), "dataset": name}
        return row if config.objective == "insent" else row | {"beta": beta}


class Triplet(Contrastive):
    """Contrastive training with mined hard negatives (pplx-embed, section 2.5)."""

    def batch(self, step: int) -> tuple[str, list[tuple[int, list[TokenSequence], Tensor | None]]]:
        name, rows = self._plan(step)
        parts = np.array_split(rows, min(self._config.accumulation, len(rows)))
        pairs = self._data[name]
        batches = []
        for part in parts:
            texts = [pairs.queries[i] for i in part] + [pairs.documents[i] for i in part]
            texts += [negative for i in part for negative in pairs.negatives[i]]
            batches.append((len(part), [TokenSequence(text) for text in texts], self._negatives(name, part)))
        return name, batches

    def backward(self, module: nn.Module, batch, step: int, processes: Processes) -> dict[str, Any]:
        config = self._config
        name, parts = batch
        total, count = torch.zeros((), device=processes.device), sum(n for n, *_ in parts)
        for number, (n, sequences, negatives_NN) in enumerate(parts, 1):

            def loss_of_rows(rows_RD: Tensor, n: int = n, negatives_NN: Any = negatives_NN) -> Tensor:
                codes_RD = int8(rows_RD)
                hard_NKD = codes_RD[2 * n :].unflatten(0, (n, config.negatives))
                loss = triplet_loss(
                    codes_RD[:n], codes_RD[n : 2 * n], hard_NKD, temperature=config.temperature,
                    negatives_NN=negatives_NN, queries=processes.slice(n),
                )  # fmt: skip
                return loss * (n / count)

            total += cached_backward(
                module, sequences, loss_of_rows,
                token_budget=config.token_budget, keep_tokens=config.keep_tokens,
                processes=processes, last=number == len(parts),
            )  # fmt: skip
        tokens = sum(len(sequence) for _, sequences, _ in parts for sequence in sequences)
        return {"loss": total, "tokens": tokens, "dataset": name, "pairs": count}


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
