"""Whole steps of a language model on two cores, by turns in one process: as they were computed before layers
were compiled and texts read without padding, and as preset cpu computes them. Medians of ratios of steps.

    PYTHONPATH=tests python tests/benchmarks/cut.py [--steps 8] [--layers 30]
"""

import argparse
from dataclasses import replace
from time import perf_counter

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from unmask.children import settle
from unmask.config import load_preset
from unmask.data.sources import open_corpus
from unmask.models import backbone
from unmask.store import artifacts_root
from unmask.training import Diffusion, Pair
from unmask.training.distributed import Distributed
from unmask.training.loop import equip

BEFORE = {"compile": False, "token_budget": 2048}


def as_before(model: nn.Module) -> None:
    """Padded texts, and a dense gradient of the embeddings from every micro-batch."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.set_attn_implementation("eager")
        if isinstance(part, nn.Embedding):
            part.sparse = False


def ratios(kind: type, steps: int, layers: int) -> tuple[float, float]:
    """How many times as fast a step has become (median), and the tokens a second of now."""
    preset, seconds, tokens = load_preset("cpu"), {}, 0
    corpus = open_corpus(preset.data)
    start = backbone.cut_short(
        preset.backbone.checkpoint, range(layers), artifacts_root() / "benchmarks" / "cut"
    )
    tokenizer, processes = backbone.load_tokenizer(start), Distributed.alone("bf16")
    ways = {}
    for name, values in {"before": BEFORE, "now": {}}.items():
        stage = kind(preset, corpus, tokenizer, bidirectional=True, **values)
        stage.config = replace(stage.config, keep_tokens=65536) if kind is Pair else stage.config
        model = stage.model(start)
        ways[name] = stage, model, *equip(stage, model, processes)
        if name == "before":
            as_before(model)
    for step in range(steps + 3):  # the first ones compile, and fill memory
        for name, (stage, model, module, optimizer) in ways.items():
            batch, began = stage.batch(step), perf_counter()
            row = stage.backward(module, batch, processes)
            processes.sum_gradients(model)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad()
            if step >= 3:
                seconds.setdefault(name, []).append(perf_counter() - began)
                tokens += row["tokens"] * (name == "now")
    each = {name: np.array(row) for name, row in seconds.items()}
    return float(np.median(each["before"] / each["now"])), tokens / each["now"].sum()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    given = parser.parse_args()
    settle()
    for kind in (Pair, Diffusion):
        ratio, rate = ratios(kind, given.steps, given.layers)
        print(
            f"{kind.__name__}, {given.layers} layers: {ratio:.2f} times as fast; {rate:,.0f} tokens/s",
            flush=True,
        )
    print(f"{torch.get_num_threads()} threads, bf16: {backbone.has_bf16('cpu')}")
