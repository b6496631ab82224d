"""Pretraining on packed blocks: the next token, or masked diffusion.

Shape suffixes: B blocks · L tokens.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from unmask import losses
from unmask.config import DiffusionConfig
from unmask.data.tokenize import Blocks, open_blocks
from unmask.training.distributed import Distributed
from unmask.training.stages import WIDTH, Stage


class Pretraining(Stage):
    """What both have in common: packed blocks, a few of them at a time."""

    head = True

    @cached_property
    def data(self) -> Blocks | np.ndarray:
        return open_blocks(self.corpus.text_sources(), self.stored, self.config)

    def prepare(self) -> list[dict[str, Any]]:
        return self.data.report

    def keys(self) -> dict[str, np.ndarray]:
        return {"text": np.empty((len(self.data), 0))}  # no two blocks need to be told apart

    def blocks(self, step: int) -> np.ndarray:
        """The tokens (B, L) of a step."""
        return self.data[self.plan(step)[1]].astype(np.int64)

    def micro_batches(self, order_B: Tensor, processes: Distributed) -> Sequence[Tensor]:
        """The rows of `order_B` in groups under the token budget."""
        rows = max(1, self.config.memory(processes.device.type)["token_budget"] // self.config.length)
        passes = math.ceil(len(order_B) / (rows * processes.count))  # of every process, equally many
        return order_B.tensor_split(passes * processes.count)


def accumulate(
    module: nn.Module, groups: Sequence[Any], forward: Callable[[Any], Tensor], processes: Distributed
) -> Tensor:
    """Sums the gradients of a loss that is a sum over micro-batches, and returns the loss.

    Args:
        groups: rows of each micro-batch; equally many groups for each process, empty ones last.
        forward: the part of the loss that some rows pay.
    """
    mine = processes.share(groups)
    total = torch.zeros((), device=processes.device)
    for number, group in enumerate(mine, 1):
        processes.reducing(module, last=number == len(mine))
        with processes.autocast():
            # A process without rows left repeats some for nothing.
            loss = forward(group) if len(group) else 0 * forward(groups[0][:1])
        loss.backward()
        total += loss.detach()
    return processes.sum(total)


class NextToken(Pretraining):
    """Autoregressive pretraining on packed blocks: the stand-in for a ready base model."""

    section = "ar"

    def shown(self, step: int) -> Iterator[list[str]]:
        return ([self.text(tokens_L)] for tokens_L in self.blocks(step))

    def batch(self, step: int) -> Tensor:
        return torch.from_numpy(self.blocks(step))

    def backward(self, module: nn.Module, tokens_BL: Tensor, processes: Distributed) -> dict[str, Any]:
        def forward(rows: Tensor) -> Tensor:
            tokens = tokens_BL[rows]
            loss = partial(losses.next_token_loss, tokens_BL=tokens, normalizer=tokens_BL[:, 1:].numel())
            return module(processes.to_device(tokens), None, loss)

        groups = self.micro_batches(torch.arange(len(tokens_BL)), processes)
        loss = accumulate(module, groups, forward, processes)
        return {"loss": loss, "tokens": tokens_BL.numel()}


class Noised(NamedTuple):
    """A batch of the forward process: clean tokens, what was masked, what its nats are divided by (t, if t is
    uniform); `valid_BL` False beyond a cut; `seen_LL` while the causal mask fades: which token sees which."""

    tokens_BL: Tensor
    masked_BL: Tensor
    divisor_B: Tensor
    valid_BL: Tensor
    seen_LL: Tensor | None = None


class Diffusion(Pretraining):
    """Masked-diffusion continued pretraining (pplx-embed, section 2.1)."""

    section = "diffusion"
    bidirectional = True

    def shown(self, step: int) -> Iterator[list[str]]:
        """A block with ▒ for each masked token, and the share that is masked."""
        batch, mask = self.batch(step), self.job.backbone.mask_token
        for tokens_L, masked_L, valid_L in zip(batch.tokens_BL, batch.masked_BL, batch.valid_BL):
            tokens_L = tokens_L.masked_fill(masked_L, self.mask_token_id)[valid_L]
            text = " ".join(self.tokenizer.decode(tokens_L).replace(mask, "▒").split())
            yield [f"{masked_L[valid_L].double().mean():4.0%} masked  {text[: 3 * WIDTH]}"]

    @cached_property
    def mask_token_id(self) -> int:
        return self.tokenizer.convert_tokens_to_ids(self.job.backbone.mask_token)

    def batch(self, step: int) -> Noised:
        tokens_BL, rng = self.blocks(step), np.random.default_rng([self.config.seed, 2, step])
        noised, fading = noise(tokens_BL, self.config, rng), self.config.anneal * self.config.steps
        if step >= fading:
            return noised
        seen_LL = fading_mask(tokens_BL.shape[1], step / fading, rng)
        return noised._replace(seen_LL=torch.from_numpy(seen_LL))

    def backward(self, module: nn.Module, batch: Noised, processes: Distributed) -> dict[str, Any]:
        predictable = int((batch.valid_BL.sum(1) - 1).sum())

        def forward(rows: Tensor) -> Tensor:
            tokens, masked, divisor, valid = (x[rows] for x in batch[:4])
            mask = valid = None if valid.all() else valid
            drawn = {"tokens_BL": tokens, "masked_BL": masked, "t_B": divisor, "valid_BL": valid}
            loss = partial(losses.diffusion_loss, **drawn, normalizer=predictable)
            if batch.seen_LL is not None:
                mask = batch.seen_LL & batch.valid_BL[rows, None, None]
            # Few texts are cut: no graph of their own.
            cut = valid is not None and batch.seen_LL is None
            noised = processes.to_device(tokens.masked_fill(masked, self.mask_token_id))
            with torch.compiler.set_stance("force_eager" if cut else "default"):
                return module(noised, None if mask is None else processes.to_device(mask), loss)

        # Cut sequences go last, so that all other micro-batches need no attention mask.
        order = batch.valid_BL.all(1).logical_not().argsort(stable=True)
        loss = accumulate(module, self.micro_batches(order, processes), forward, processes)
        return {"loss": loss, "tokens": int(batch.valid_BL.sum())}


def noise(tokens_BL: np.ndarray, config: DiffusionConfig, rng: np.random.Generator) -> Noised:
    """The forward process: t ~ U(t_min, t_max) per sequence, every token masked with probability t, a share
    `cut_fraction` of the sequences cut.

    The interval is divided into as many equal parts as there are sequences, and each gets its t from one of
    them, in a random order: for a sequence by itself any t is as likely as any other, while the mean over the
    batch hardly varies (the low-discrepancy sampler of Variational Diffusion Models, 2107.00630).

    With t_min = t_max the weight 1/t is a constant: masked next-token prediction with a fixed share of masks,
    as LLM2Vec has it. With `log_uniform` t is drawn with a density in proportion to 1/t instead, so the
    weight 1/t must not be paid again: importance sampling of the same expected loss, in which every masked
    token has the same weight, one over the mean of t, and no single token can fill a step."""
    b, length = tokens_BL.shape
    share_B = (rng.permutation(b) + rng.random(b)) / b
    low, high = config.t_min, config.t_max
    if config.log_uniform and low < high:
        t_B = low * (high / low) ** share_B
        divisor_B = np.full(b, (high - low) / math.log(high / low))  # the mean of t
    else:
        t_B = divisor_B = low + (high - low) * share_B
    masked_BL = rng.random((b, length)) < t_B[:, None]
    cut_B = np.where(rng.random(b) < config.cut_fraction, rng.integers(2, length + 1, b), length)
    valid_BL = np.arange(length) < cut_B[:, None]
    drawn = tokens_BL, masked_BL & valid_BL, divisor_B.astype(np.float32), valid_BL
    return Noised(*map(torch.from_numpy, drawn))


def fading_mask(length: int, share: float, rng: np.random.Generator) -> np.ndarray:
    """A causal mask of which a share has faded: (L, L), True where a row's token sees a column's. Each later
    token is seen with probability `share` (DiffuLLaMA, 2410.17891; pplx-embed, section 2.1, tried it)."""
    return np.tri(length, dtype=bool) | (rng.random((length, length)) < share)
