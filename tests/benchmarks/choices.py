"""What three speed choices of the library bring on this machine, as ratios in one run (above 1: faster).

    python tests/benchmarks/choices.py

- freed memory kept by glibc in training processes (`unmask.training.launch`);
- logits at masked positions only (`unmask.losses.diffusion_loss`) against full logits;
- integer dot products for exact INT8 search (`unmask.evaluation.similarity`) against float32.

Prints one JSON object per choice. Measurements alternate in pairs, and the ratio is the median over pairs,
since a shared machine's speed drifts.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time

import torch

from unmask.evaluation import similarity
from unmask.losses import diffusion_loss
from unmask.training.launch import KEEP_MEMORY

LAYERS, WIDTH, VOCABULARY, BATCH, LENGTH = 3, 256, 8192, 16, 512


def seconds(action, repeats: int = 1) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        action()
    return (time.perf_counter() - started) / repeats


def paired(name: str, ours, other, setting: str, pairs: int = 5) -> None:
    ours(), other()
    times = [(ours(), other()) for _ in range(pairs)]
    row = {
        "name": name,
        "ours_s": statistics.median(a for a, _ in times),
        "other_s": statistics.median(b for _, b in times),
        "ratio": statistics.median(b / a for a, b in times),
        "setting": setting,
    }
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)


def training_step() -> float:
    """Median time of a diffusion step; in a process of its own, whose environment is compared."""
    from transformers import Qwen3Config, Qwen3Model

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, is_causal=False,
    )  # fmt: skip
    model = Qwen3Model(config)
    tokens, masked, t = sample()

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model(tokens, use_cache=False).last_hidden_state
            diffusion_loss(hidden, model.embed_tokens.weight, tokens, masked, t).backward()
        model.zero_grad()

    step()
    return statistics.median(seconds(step) for _ in range(5))


def sample() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
    t = torch.rand(BATCH) * 0.999 + 0.001
    return tokens, torch.rand(BATCH, LENGTH) < t[:, None], t


def child(environment: dict[str, str]) -> float:
    command = [sys.executable, __file__, "step"]
    return float(subprocess.run(command, env=os.environ | environment, capture_output=True, text=True).stdout)


def full_logits(hidden, unembedding, tokens, masked, t) -> torch.Tensor:
    logits = torch.nn.functional.linear(hidden[:, :-1], unembedding).float()
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    weights = masked[:, 1:] / t[:, None]
    return (nats.view_as(weights) * weights).sum() / weights.numel()


def main() -> None:
    setting = f"{LAYERS} layers, {WIDTH}-d, {BATCH}×{LENGTH} tokens, bf16, {torch.get_num_threads()} threads"
    paired("freed memory kept", lambda: child(KEEP_MEMORY), lambda: child({}), setting, pairs=3)

    hidden = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    unembedding = torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    arguments = (hidden, unembedding, *sample())

    def loss_time(loss) -> float:
        with torch.autocast("cpu", torch.bfloat16):
            return seconds(lambda: loss(*arguments).backward())

    setting = f"{BATCH}×{LENGTH} tokens, {VOCABULARY} words, mean masked share 0.5"
    paired(
        "logits at masked positions",
        lambda: loss_time(diffusion_loss),
        lambda: loss_time(full_logits),
        setting,
    )

    documents = torch.randint(-127, 128, (100_000, WIDTH), dtype=torch.int8)
    queries, floats = documents[:64].clone(), documents.float()
    ours = lambda: seconds(lambda: similarity(queries, documents))  # noqa: E731
    other = lambda: seconds(lambda: similarity(queries.float(), floats))  # noqa: E731
    paired("integer search", ours, other, f"64 queries, 100,000 × {WIDTH} codes")


if __name__ == "__main__":
    print(training_step()) if sys.argv[1:] == ["step"] else main()
