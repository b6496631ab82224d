"""The diffusion step with logits at the masked positions only, against logits at all positions: two layers
of Qwen3-0.6B's shape, and its vocabulary."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from contrastive import BF16, backward, bidirectional, described
from measure import Case
from torch import Tensor

from closeness import assert_close
from unmask.config import load_preset
from unmask.losses import diffusion_loss

PRESET = load_preset("paper-0.6b")
LAYERS, BATCH, LENGTH = 2, 8, 512
Loss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def full_logits(hidden_BLD, unembedding_VD, tokens_BL, masked_BL, t_B) -> Tensor:
    """The same loss as it is commonly written: logits everywhere, cross-entropy, then the mask."""
    logits_BLV = F.linear(hidden_BLD[:, :-1], unembedding_VD).float()
    nats = F.cross_entropy(logits_BLV.flatten(0, 1), tokens_BL[:, 1:].flatten(), reduction="none")
    weights = masked_BL[:, 1:] / t_B[:, None]
    return (nats.view_as(weights) * weights).sum() / weights.numel()


def diffusion_case(
    batch=BATCH, length=LENGTH, vocabulary=PRESET.data.vocab_size, shape=PRESET.backbone
) -> Case:
    """Whole steps: the model's forward pass, the loss, the backward pass of both. Whether the losses agree is
    checked in float32, on a corner of the batch."""
    model = bidirectional(LAYERS, vocabulary, shape)
    unembedding, (tokens, masked, t) = model.embed_tokens.weight, noised(batch, length, vocabulary)

    def hidden_states() -> Tensor:
        return model(tokens.masked_fill(masked, 3), use_cache=False).last_hidden_state

    def check() -> None:
        with torch.no_grad():
            corner = hidden_states()[-2:, :32], unembedding, tokens[-2:, :32], masked[-2:, :32], t[-2:]
        assert_close(diffusion_loss(*corner), full_logits(*corner))

    def step(loss_of: Loss) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=BF16):
            loss = loss_of(hidden_states(), unembedding, tokens, masked, t)
        return backward(loss)

    setting = f"{LAYERS} layers, {shape.hidden_size}-d, {batch} × {length} tokens, vocabulary {vocabulary:,}"
    programs = {"unmask": {"": lambda: step(diffusion_loss)}, "full logits": {"": lambda: step(full_logits)}}
    return Case(described(setting), "tokens/s", tokens.numel(), programs, check)


def noised(batch: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, mask and t; t takes its distribution's values without the luck of a draw: half is masked."""
    generator = torch.Generator().manual_seed(0)
    t = torch.linspace(0.001, 1, batch)
    tokens = torch.randint(vocabulary, (batch, length), generator=generator)
    return tokens, torch.rand(batch, length, generator=generator) < t[:, None], t


CASES = {"diffusion": diffusion_case}
