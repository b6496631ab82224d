"""Every training stage on a few random tokens, for the tests of the stages and of the loop."""

from dataclasses import replace

import numpy as np

import tiny
from unmask.config import load_preset
from unmask.data.tokenized import TokenDocument, TokenPairs
from unmask.training.stages import Contextual, Diffusion, NextToken, Pair, Triplet

STAGES = ("ar", "diffusion", "pair", "contextual", "triplet")
MASK_ID = 3
_PRESET = load_preset("smoke")
_COMMON = {
    "steps": 8,
    "batch": 4,
    "lr": 1e-3,
    "schedule": "cosine",
    "warmup": 2,
    "decay": 0,
    "token_budget": 64,
    "precision": "fp32",
    "gradient_checkpointing": False,
    "compile": False,
    "checkpoint_every": 2,
    "keep_checkpoints": 1,
    "explode": 0.0,
    "log_every": 1,
    "seed": 5,
}
_OWN = {
    "ar": {"length": 16},
    "diffusion": {"length": 16, "cut_fraction": 0.3, "t_min": 0.001},
    "pair": {"pooling": "mean"},
    "contextual": {"queries_per_document": 2, "dimensions": (16, 32)},
    "triplet": {"accumulation": 2, "negatives": 3},
}


def config(name, **changes):
    return replace(getattr(_PRESET, name), **(_COMMON | _OWN[name] | changes))


def model(name):
    return tiny.model(bidirectional=name != "ar", head=name in ("ar", "diffusion"))


def pairs(count, *, keys=None, negatives=0, seed=0):
    hard = tiny.sequences(count * negatives, seed=seed + 2, longest=12)
    return TokenPairs(
        tiny.sequences(count, seed=seed, longest=8),
        tiny.sequences(count, seed=seed + 1, longest=12),
        keys or [str(i) for i in range(count)],
        [hard[i * negatives : (i + 1) * negatives] for i in range(count)] if negatives else None,
    )


def documents(count):
    return [
        TokenDocument(
            tiny.sequences(2 + i % 3, seed=10 + i, longest=8),
            tiny.sequences(3, seed=100 + i, longest=6),
            [0, 1, 1],
        )
        for i in range(count)
    ]


def blocks(count=20, length=16):
    return np.random.default_rng(0).integers(4, 300, (count, length)).astype(np.int32)


def stage(name, settings):
    if name == "ar":
        return NextToken(blocks(), settings)
    if name == "diffusion":
        return Diffusion(blocks(), settings, MASK_ID)
    if name == "pair":
        return Pair({"one": pairs(12), "two": pairs(9, seed=7)}, settings)
    if name == "contextual":
        return Contextual({"one": documents(9)}, settings, separator_id=0)
    return Triplet({"one": pairs(12, negatives=settings.negatives)}, settings)
