"""What a 135 M Transformer costs against the machine's own matrix product, in bf16 where it has it: steps and
encode, of a model with SmolLM2-135M's shape and random weights, against 4096 × 4096 matrices with as many
operations.

Counted are the operations that the work needs: weights and attention for every true token, logits for every
masked one, each three times in training (forward, and twice as much backward), the forward pass of gradient
caching once more. Padding, norms, the optimiser and tokenising are not counted, but they take their time.
"""

from functools import partial

import numpy as np
import torch
from contrastive import BF16, described, docstrings, real_lengths
from measure import Case, Step
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import tiny
from unmask import Embedder
from unmask.config import load_preset
from unmask.losses import pair_loss
from unmask.models.attention import plain_attention
from unmask.models.encoding import TokenSequence, micro_batches
from unmask.models.quantize import int8
from unmask.training.cache import cached_backward
from unmask.training.distributed import Processes
from unmask.training.stages import Diffusion

PRESET = load_preset("smollm2")
SIDE = 4096  # of the square matrices
TEXTS = 256


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = PRESET.backbone
    more = {"max_position_embeddings": shape.max_length, "tie_word_embeddings": True, "is_causal": False}
    config = LlamaConfig(**tiny.sizes(shape, shape.layers, PRESET.data.vocab_size), **more)
    return LlamaForCausalLM(config).train()


def forward_flops(model: nn.Module, lengths: list[int]) -> float:
    """2 (P − E) for each token, and 4 n A L for attention in texts of L tokens."""
    config, tokens = model.config, float(sum(lengths))
    weights = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name)
    width = config.num_attention_heads * config.head_dim
    return 2 * weights * tokens + 4 * config.num_hidden_layers * width * float(np.square(lengths).sum())


def product(flops: float) -> Step:
    """The same operations as products of square matrices, and one smaller product for what is left."""
    whole, left = divmod(flops, 2 * SIDE**3)
    a, b = (torch.randn(SIDE, SIDE, dtype=torch.bfloat16 if BF16 else torch.float32) for _ in range(2))
    inner = max(1, round(left / (2 * SIDE**2)))

    def step() -> None:
        for _ in range(int(whole)):
            torch.nn.functional.linear(a, b)
        torch.nn.functional.linear(a[:, :inner], b[:, :inner])

    return step


def case(setting: str, flops: float, step: Step) -> Case:
    programs = {"unmask": {"": step}, "matrix product": {"": product(flops)}}
    setting = described(f"135 M parameters, 30 layers, {setting}")
    return Case(setting, "GFLOP/s", flops / 1e9, programs, check=lambda: None)


def training(model: nn.Module, backward: Step) -> Step:
    plain_attention(model)  # as trainings on a CPU in bfloat16
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def diffusion_case() -> Case:
    """A step of preset smollm2's diffusion stage, logits at the masked positions and optimiser included."""
    model, config, processes = build(), PRESET.diffusion, Processes.start("bf16")
    size = (config.batch, config.length)
    blocks = np.random.default_rng(0).integers(4, PRESET.data.vocab_size, size, np.int32)
    stage = Diffusion(PRESET, None, None)
    stage.data, stage.mask_token_id = blocks, 3
    batch, module = stage.batch(0), stage.module(model)
    paid = int(batch.masked_BL[:, 1:].sum())
    logits = 2 * model.config.vocab_size * model.config.hidden_size * paid
    flops = 3 * (forward_flops(model, [config.length] * config.batch) + logits)
    step = training(model, lambda: stage.backward(module, batch, processes))
    return case(f"{config.batch} × {config.length} tokens, {paid} of them masked", flops, step)


def pair_case(keep: bool) -> Case:
    """A step of preset smollm2's pair stage on real lengths, with or without the activations of all of it."""
    model, config, processes = build().base_model, PRESET.pair, Processes.start("bf16")
    queries, documents = real_lengths(config.batch, (config.query_length, config.document_length))
    items = [TokenSequence(tokens) for tokens in (*queries, *documents)]
    lengths = [len(item) for item in items]
    again = [] if keep else np.concatenate(micro_batches(lengths, config.budget("cpu"))[1:])
    flops = 3 * forward_flops(model, lengths) + forward_flops(model, [lengths[i] for i in again])

    def loss(rows_RD: torch.Tensor) -> torch.Tensor:
        codes_RD = int8(rows_RD)
        return pair_loss(codes_RD[: config.batch], codes_RD[config.batch :])

    options = {"token_budget": config.budget("cpu"), "keep_tokens": keep * sum(lengths)}
    step = training(model, lambda: cached_backward(model, items, loss, processes=processes, **options))
    how = "all activations kept" if keep else "cached"
    return case(f"{config.batch} pairs of {sum(lengths):,} tokens, {how}", flops, step)


def encode_case(count: int, length: int) -> Case:
    """`Embedder.encode`, from docstrings, joined to so many texts, to codes."""
    tokenizer, table, order = docstrings()
    documents = list(table.select(order[:TEXTS])["document"])
    texts = [" ".join(documents[i::count]) for i in range(count)]
    embedder = Embedder(build().base_model, tokenizer, mixed_precision=BF16, max_length=length)
    lengths = [min(length, len(ids)) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    setting = f"{count} texts of {sum(lengths):,} tokens"
    return case(setting, forward_flops(embedder.model, lengths), lambda: embedder.encode(texts))


TITLED = {
    "share-diffusion": ("diffusion step", diffusion_case),
    "share-pair": ("pair step, activations kept", partial(pair_case, keep=True)),
    "share-pair-cached": ("pair step, cached", partial(pair_case, keep=False)),
    "share-encode": ("encode", partial(encode_case, TEXTS, 256)),
    "share-encode-long": ("encode, long texts", partial(encode_case, 2, 4096)),
}
CASES = {name: make for name, (_, make) in TITLED.items()}
TITLES = {name: f"135 M, {title}" for name, (title, _) in TITLED.items()}
