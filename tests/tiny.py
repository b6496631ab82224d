"""Tiny models and tokenizers that the tests share; everything in milliseconds, nothing downloaded."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import torch

from unmask.config import BackboneConfig
from unmask.data.tokens import encode, train_tokenizer
from unmask.models import backbone

TEXTS = [
    "Read a table from a file and return its rows.",
    "Die Datei wird geöffnet und zeilenweise gelesen.",
    "Compute the mean of an array along an axis, ignoring missing values.",
    "def close(self): return self.stream.close()",
    "東京は日本の首都です。",
] * 4


def write_card(folder, configs):
    """The README of a repository, which says where the rows of its configurations lie."""
    parts = [{"config_name": name, "data_files": path} for name, path in configs.items()]
    (folder / "README.md").write_text(f"---\n{json.dumps({'configs': parts})}\n---\n# A data set\n")


def tokenize(tokenizer, texts, max_length):
    """Token ids of each text, without special tokens, cut to `max_length`."""
    return list(encode(tokenizer.backend_tokenizer, texts, np.int32, max_length))


@cache
def tokenizer():
    return train_tokenizer(TEXTS, 400, Path(mkdtemp()) / "tokenizer")


def model(*, bidirectional: bool = True, head: bool = False, layers: int = 2, seed: int = 0):
    sizes = {"hidden_size": 32, "heads": 2, "kv_heads": 1, "head_size": 16, "mlp_size": 64, "max_length": 256}
    shape = BackboneConfig(layers=layers, **sizes)
    built = backbone.build(shape, tokenizer(), seed=seed)
    if bidirectional:
        backbone.make_bidirectional(built, tokenizer(), shape.mask_token)
    return (built if head else built.model).eval()


def sequences(count: int, *, seed: int = 0, longest: int = 30) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(4, 300, rng.integers(1, longest + 1)).astype(np.int32) for _ in range(count)]


class Distinct(list):
    """Tokenised documents that are all different."""

    @property
    def keys(self) -> range:
        return range(len(self))


def gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
