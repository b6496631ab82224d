"""Every training stage on a few random tokens, for the tests of the stages and of the loop."""

from dataclasses import replace

import numpy as np

import tiny
from unmask.config import load_preset
from unmask.data.lookalikes import Neighbours, pack
from unmask.data.mining import unit
from unmask.data.tokenized import Ragged, TokenDocument, TokenPairs
from unmask.models.context_encoder import ContextualEncoder
from unmask.training.neighbours import Cde, Qwen3, Reranking
from unmask.training.stages import Contextual, Diffusion, NextToken, Pair, Triplet

STAGES = ("ar", "diffusion", "pair", "contextual", "triplet", "cde", "qwen3", "reranker")
HEADS = ("ar", "diffusion", "reranker")
MASK_ID = 3
ANSWERS = (20, 21)  # yes, no
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
    "cde": {"context": 7, "sequence_dropout": 0.3, "cluster_size": 0, "filter_margin": -1.0},
    "qwen3": {"pooling": "last", "negatives": 2, "dimensions": (16, 32)},
    "reranker": {"negatives": 2},
}


def config(name, **changes):
    return replace(getattr(_PRESET, name), **(_COMMON | _OWN[name] | changes))


def model(name):
    if name == "cde":
        return ContextualEncoder(tiny.model(seed=1), tiny.model(seed=2), _OWN["cde"]["context"])
    return tiny.model(bidirectional=name not in ("ar", "qwen3", "reranker"), head=name in HEADS)


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


def neighbours(data, settings):
    """What a surrogate embedder finds whose vectors are random numbers; nothing if it is not asked."""
    if not settings.cluster_size and settings.filter_margin < 0:
        return {}
    return {name: _seen(rows, settings) for name, rows in data.items()}


def _seen(rows, settings):
    if isinstance(rows, TokenPairs):
        queries, chunks = [1] * len(rows.keys), [1] * len(rows.keys)
    else:
        queries, chunks = (
            [len(part) for part in parts]
            for parts in zip(*((document.queries, document.chunks) for document in rows))
        )
    texts = np.arange(sum(queries) + sum(chunks))
    vectors_UD = unit(np.random.default_rng(8).normal(size=(len(texts), 6))).astype(np.float16)
    own = Neighbours(
        vectors_UD,
        Ragged(texts[: sum(queries)], np.cumsum(queries)),
        Ragged(texts[sum(queries) :], np.cumsum(chunks)),
    )
    size = settings.cluster_size
    return replace(own, packing=pack(own, size, _PRESET.clusters, settings.seed)) if size else own


def stage(name, settings):
    if name == "ar":
        return NextToken(blocks(), settings)
    if name == "diffusion":
        return Diffusion(blocks(), settings, MASK_ID)
    if name == "reranker":
        return Reranking({"one": pairs(12, negatives=settings.negatives)}, settings, ANSWERS)
    if name == "contextual":
        data = {"one": documents(9)}
        return Contextual(data, settings, 0, neighbours(data, settings))
    if name in ("triplet", "qwen3"):
        data = {"one": pairs(12, negatives=settings.negatives)}
        kind = {"triplet": Triplet, "qwen3": Qwen3}[name]
        return kind(data, settings, neighbours=neighbours(data, settings))
    data = {"one": pairs(12), "two": pairs(9, seed=7)}
    return {"pair": Pair, "cde": Cde}[name](data, settings, neighbours=neighbours(data, settings))
