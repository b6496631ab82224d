"""Every training stage on a few random tokens, for the tests of the stages and of the loop."""

import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset

import tiny
import tiny_corpus
from unmask.config import load_preset
from unmask.data.batches import ClusterOrder
from unmask.data.mining import Neighbours, clusters, unit
from unmask.data.sources import open_corpus
from unmask.data.tokenize import TokenDocument, TokenPairs
from unmask.models import backbone
from unmask.models.context_encoder import ContextualEncoder
from unmask.training import STAGES as KINDS
from unmask.training import Stage, Watch
from unmask.training.distributed import ALONE

STAGES = tuple(KINDS)
HEADS = ("ar", "diffusion", "reranker")
MASK_ID = 3
ANSWERS = (20, 21)  # yes, no
_PRESET = load_preset("smoke")
_COMMON = {"steps": 8, "batch": 4, "lr": 1e-3, "schedule": "cosine", "warmup": 2, "decay": 0, "seed": 5}
_COMMON |= {"token_budget": 64, "precision": "fp32", "checkpoint_seconds": 2}
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
    texts = tiny.sequences(count, seed=seed, longest=8), tiny.sequences(count, seed=seed + 1, longest=12)
    hard = iter(tiny.sequences(count * negatives, seed=seed + 2, longest=12))
    hard = [[next(hard) for _ in range(negatives)] for _ in range(count)] if negatives else None
    numbers = np.arange(count * (3 + negatives))  # all texts differ
    own = numbers[: 3 * count].reshape(3, count).T.copy()
    own[:, 0] = -1 - (np.arange(count) if keys is None else np.unique(keys, return_inverse=True)[1])
    return TokenPairs(*texts, own, hard, numbers[3 * count :].reshape(count, negatives))


def documents(count):
    chunks = [tiny.sequences(2 + i % 3, seed=10 + i, longest=8) for i in range(count)]
    queries = [tiny.sequences(3, seed=100 + i, longest=6) for i in range(count)]
    return [TokenDocument(*texts, [0, 1, 1]) for texts in zip(chunks, queries)]


def neighbours(rows, settings):
    """What a surrogate embedder finds whose vectors are random numbers."""
    vectors_XD = unit(np.random.default_rng(8).normal(size=(2 * len(rows.keys), 6))).astype(np.float16)
    near, size = Neighbours(*np.split(vectors_XD, 2)), settings.cluster_size
    if not size:
        return near
    return replace(near, order=ClusterOrder.of(clusters(near, size, _PRESET.clusters, settings.seed)))


def stage(name, data=None, kind=None, **changes):
    """A stage with some values of its own, on random tokens or on the rows given; `kind` is another class
    than its section's."""
    settings = config(name, **changes)
    if data is None and name in ("ar", "diffusion"):
        data = np.random.default_rng(0).integers(4, 300, (20, 16)).astype(np.int32)
    elif data is None and name == "contextual":
        data = {"one": tiny.Distinct(documents(9))}
    elif data is None and name in ("pair", "cde"):
        data = {"one": pairs(12), "two": pairs(9, seed=7)}
    data = {"one": pairs(12, negatives=settings.negatives)} if data is None else data
    preset = replace(_PRESET, **{name: settings})
    # Groups that are named have no curriculum.
    made = (kind or KINDS[name])(preset, None, tiny.tokenizer(), section=name, only=["english"])
    vars(made).update(data=data, mask_token_id=MASK_ID, answers=ANSWERS, stored=SimpleNamespace(end=0))
    if getattr(settings, "looks_around", False):
        made.neighbours = {key: neighbours(rows, settings) for key, rows in data.items()}
    return made


def step(stage, model, batch):
    """Loss and gradients of the stage's own pass."""
    model.zero_grad()
    row = stage.backward(stage.module(model), batch, ALONE)
    return float(row["loss"]), tiny.gradients(model)


def backpropagated(loss, model):
    """The same of a loss that was computed without it."""
    model.zero_grad()
    loss.backward()
    return loss.item(), tiny.gradients(model)


def assert_same(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert difference(found[1], expected[1]) <= 1e-5


def difference(found, expected):
    """Of gradients, in parts of their norm."""
    assert found.keys() == expected.keys()
    one, two = (torch.cat([gradients[key].flatten() for key in expected]) for gradients in (found, expected))
    return (one - two).norm() / two.norm()


class Interrupted(Exception):
    pass


class Reported(Watch):
    """Keeps what is reported; once a step is, it ends the training, or sends a signal to its own process."""

    def __init__(self, stop=None, number=None, **options):
        super().__init__(curve=False, **options)
        self.rows, self.stop, self.number = [], stop, number

    def __call__(self, row):
        super().__call__(row)
        self.rows.append(row)
        if self.stop is not None and row.get("step") == self.stop:
            if self.number is None:
                raise Interrupted
            os.kill(os.getpid(), self.number)


def mined(folder, count=3):
    """A file of the pairs with so many negatives."""
    path, negatives = folder / "negatives.parquet", ["Number 7?", "Number 8", "Number 9"][:count]
    Dataset.from_list([row | {"negatives": negatives} for row in tiny_corpus.PAIRS]).to_parquet(path)
    return path


def on_the_corpus(section: str, start, *, kind: type[Stage] | None = None, **more) -> Stage:
    """A stage of a few steps of four rows, which reads the corpus of a few sentences."""
    short = {"steps": 2, "batch": 4, "warmup": 0, "decay": 0, "precision": "fp32", "checkpoint_seconds": 10}
    corpus, tokenizer = open_corpus(_PRESET.data), backbone.load_tokenizer(start)
    return (kind or KINDS[section])(_PRESET, corpus, tokenizer, section=section, **short | more)
