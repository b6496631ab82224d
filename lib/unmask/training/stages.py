"""What each training stage computes: its batches, as pure functions of (seed, step), and its loss.

The loop (`engine.train`) knows stages only through `batch` and `backward`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from unmask.config import ContextualConfig, DiffusionConfig, PairConfig, PretrainConfig, TripletConfig
from unmask.data.documents import TokenDocument, contextual_batch, split_rows
from unmask.data.pairs import BatchPlan
from unmask.encoding import TokenSequence
from unmask.losses import (
    contextual_loss,
    diffusion_loss,
    matryoshka,
    next_token_loss,
    pair_loss,
    triplet_loss,
)
from unmask.quantize import int8
from unmask.training.cache import Context, cached_backward
from unmask.training.schedule import cosine_ramp


class Stage(Protocol):
    """One training objective. `batch(step)` must not depend on anything but the seed and the step."""

    def batch(self, step: int) -> Any: ...

    def backward(self, model: PreTrainedModel, batch: Any, step: int, context: Context) -> dict[str, float]:
        """Adds the batch's gradient to the parameters; returns metrics, "loss" and "tokens" among them."""
        ...


class NextToken:
    """Autoregressive pretraining on packed blocks: the stand-in for a ready base model."""

    def __init__(self, blocks_NL: np.ndarray, config: PretrainConfig):
        self._blocks, self._config = blocks_NL, config
        self._plan = BatchPlan(
            {"text": np.arange(len(blocks_NL))}, batch=config.batch, steps=config.steps, seed=config.seed
        )

    def batch(self, step: int) -> Tensor:
        return torch.from_numpy(self._blocks[self._plan(step)[1]].astype(np.int64))

    def backward(
        self, model: PreTrainedModel, tokens_BL: Tensor, step: int, context: Context
    ) -> dict[str, float]:
        total = 0.0
        rows = max(1, self._config.token_budget // tokens_BL.shape[1])
        predictable = tokens_BL.shape[0] * (tokens_BL.shape[1] - 1)
        for part in tokens_BL.to(context.device).split(rows):
            with context.autocast():
                hidden_BLD = model.base_model(input_ids=part, use_cache=False).last_hidden_state
                loss = next_token_loss(
                    hidden_BLD, model.get_output_embeddings().weight, part, normalizer=predictable
                )
            context.backward(loss)
            total += loss.item()
        return {"loss": total, "tokens": tokens_BL.numel()}


@dataclass(frozen=True)
class Noised:
    """A batch of the forward process: clean tokens, what was masked, at which t; `valid_BL` False beyond a
    cut."""

    tokens_BL: Tensor
    masked_BL: Tensor
    t_B: Tensor
    valid_BL: Tensor


class Diffusion:
    """Masked-diffusion continued pretraining (pplx-embed, section 2.1)."""

    def __init__(self, blocks_NL: np.ndarray, config: DiffusionConfig, mask_token_id: int):
        self._blocks, self._config, self._mask_token_id = blocks_NL, config, mask_token_id
        self._plan = BatchPlan(
            {"text": np.arange(len(blocks_NL))}, batch=config.batch, steps=config.steps, seed=config.seed
        )

    def batch(self, step: int) -> Noised:
        return noise(
            self._blocks[self._plan(step)[1]],
            self._config,
            np.random.default_rng([self._config.seed, 2, step]),
        )

    def backward(
        self, model: PreTrainedModel, batch: Noised, step: int, context: Context
    ) -> dict[str, float]:
        total = 0.0
        length = batch.tokens_BL.shape[1]
        rows = max(1, self._config.token_budget // length)
        predictable = int((batch.valid_BL.sum(1) - 1).sum())
        # Cut sequences go last, so that all other micro-batches need no attention mask.
        order = batch.valid_BL.all(1).logical_not().argsort(stable=True)
        for part in order.split(rows):
            tokens, masked, t, valid = (
                x[part].to(context.device)
                for x in (batch.tokens_BL, batch.masked_BL, batch.t_B, batch.valid_BL)
            )
            whole = bool(valid.all())
            with context.autocast():
                hidden_BLD = model.base_model(
                    input_ids=tokens.masked_fill(masked, self._mask_token_id),
                    attention_mask=None if whole else valid.long(),
                    use_cache=False,
                ).last_hidden_state
                loss = diffusion_loss(
                    hidden_BLD, model.get_output_embeddings().weight, tokens, masked, t,
                    None if whole else valid, normalizer=predictable,
                )  # fmt: skip
            context.backward(loss)
            total += loss.item()
        return {"loss": total, "tokens": int(batch.valid_BL.sum())}


def noise(tokens_BL: np.ndarray, config: DiffusionConfig, rng: np.random.Generator) -> Noised:
    """The forward process: t ~ U(t_min, 1) per sequence, every token masked with probability t, 1 % of
    sequences cut."""
    b, length = tokens_BL.shape
    t_B = rng.uniform(config.t_min, 1.0, b)
    masked_BL = rng.random((b, length)) < t_B[:, None]
    cut_B = np.where(rng.random(b) < config.cut_fraction, rng.integers(2, length + 1, b), length)
    valid_BL = np.arange(length) < cut_B[:, None]
    return Noised(
        torch.from_numpy(tokens_BL.astype(np.int64)),
        torch.from_numpy(masked_BL & valid_BL),
        torch.from_numpy(t_B.astype(np.float32)),
        torch.from_numpy(valid_BL),
    )


@dataclass(frozen=True)
class TokenPairs:
    """A tokenised data set of pairs; `negatives` hold mined documents per query where there are any."""

    queries: list[np.ndarray]
    documents: list[np.ndarray]
    keys: list[str]
    negatives: list[list[np.ndarray]] | None = None


class Pair:
    """Contrastive pair training with INT8 from the first step (pplx-embed, section 2.3)."""

    def __init__(
        self,
        data: Mapping[str, TokenPairs],
        config: PairConfig,
        allowed: Callable[[int], set[str]] | None = None,
    ):
        self._data, self._config = data, config
        keys = {name: pairs.keys for name, pairs in data.items()}
        self._plan = BatchPlan(
            keys, batch=config.batch, steps=config.steps, seed=config.seed, allowed=allowed
        )

    def batch(self, step: int) -> tuple[str, list[TokenSequence]]:
        name, rows = self._plan(step)
        pairs = self._data[name]
        queries = [TokenSequence(pairs.queries[i]) for i in rows]
        return name, queries + [TokenSequence(pairs.documents[i]) for i in rows]

    def backward(self, model: PreTrainedModel, batch, step: int, context: Context) -> dict[str, Any]:
        name, sequences = batch
        config, n = self._config, len(batch[1]) // 2

        def loss_of_rows(rows_RD: Tensor) -> Tensor:
            codes_RD = int8(rows_RD)
            return pair_loss(codes_RD[:n], codes_RD[n:], temperature=config.temperature, margin=config.margin)

        loss = cached_backward(
            model, sequences, loss_of_rows,
            token_budget=config.token_budget, pooling=config.pooling, context=context,
        )  # fmt: skip
        return {"loss": loss.item(), "tokens": sum(map(len, sequences)), "dataset": name}


class Contextual:
    """Late chunking with the dual objective, INT8 and Matryoshka (pplx-embed, section 2.4)."""

    def __init__(self, data: Mapping[str, list[TokenDocument]], config: ContextualConfig, separator_id: int):
        self._data, self._config, self._separator_id = data, config, separator_id
        keys = {name: np.arange(len(documents)) for name, documents in data.items()}
        self._plan = BatchPlan(keys, batch=config.batch, steps=config.steps, seed=config.seed)

    def batch(self, step: int):
        name, rows = self._plan(step)
        return name, contextual_batch(
            [self._data[name][i] for i in rows],
            separator_id=self._separator_id,
            queries_per_document=self._config.queries_per_document,
            rng=np.random.default_rng([self._config.seed, 3, step]),
        )

    def backward(self, model: PreTrainedModel, batch, step: int, context: Context) -> dict[str, Any]:
        name, batch = batch
        config = self._config
        beta = cosine_ramp(config.beta_start, config.beta_end, step, config.steps)

        def loss_of_rows(rows_RD: Tensor) -> Tensor:
            q_ND, chunks_MCD, documents_MD, mask_MC = split_rows(rows_RD, batch)

            def loss(q: Tensor, chunks: Tensor, documents: Tensor) -> Tensor:
                return contextual_loss(
                    q, chunks, documents, batch.document_N.to(q.device), batch.gold_N.to(q.device),
                    beta=beta, alpha=config.alpha, temperature=config.temperature, margin=config.margin,
                    chunk_mask_MC=mask_MC,
                )  # fmt: skip

            return matryoshka(loss, (int8(q_ND), int8(chunks_MCD), int8(documents_MD)), config.dimensions)

        loss = cached_backward(
            model, batch.sequences, loss_of_rows,
            token_budget=config.token_budget, context=context,
        )  # fmt: skip
        return {"loss": loss.item(), "tokens": sum(map(len, batch.sequences)), "dataset": name, "beta": beta}


class Triplet:
    """Contrastive training with mined hard negatives (pplx-embed, section 2.5)."""

    def __init__(self, data: Mapping[str, TokenPairs], config: TripletConfig):
        self._data, self._config = data, config
        keys = {name: pairs.keys for name, pairs in data.items()}
        self._plan = BatchPlan(keys, batch=config.batch, steps=config.steps, seed=config.seed)

    def batch(self, step: int):
        name, rows = self._plan(step)
        parts = np.array_split(rows, min(self._config.accumulation, len(rows)))
        pairs = self._data[name]
        batches = []
        for part in parts:
            texts = [pairs.queries[i] for i in part] + [pairs.documents[i] for i in part]
            texts += [negative for i in part for negative in pairs.negatives[i]]
            batches.append((len(part), [TokenSequence(text) for text in texts]))
        return name, batches

    def backward(self, model: PreTrainedModel, batch, step: int, context: Context) -> dict[str, Any]:
        config = self._config
        name, parts = batch
        total, tokens, count = 0.0, 0, sum(n for n, _ in parts)
        for n, sequences in parts:

            def loss_of_rows(rows_RD: Tensor, n: int = n) -> Tensor:
                codes_RD = int8(rows_RD)
                hard_NKD = codes_RD[2 * n :].unflatten(0, (n, config.negatives))
                loss = triplet_loss(
                    codes_RD[:n], codes_RD[n : 2 * n], hard_NKD, temperature=config.temperature
                )
                return loss * (n / count)

            loss = cached_backward(
                model, sequences, loss_of_rows,
                token_budget=config.token_budget, context=context,
            )  # fmt: skip
            total += loss.item()
            tokens += sum(map(len, sequences))
        return {"loss": total, "tokens": tokens, "dataset": name}
