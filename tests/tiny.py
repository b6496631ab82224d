"""Tiny models and tokenizers that the tests share; everything in milliseconds, nothing downloaded."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import torch

from unmask.config import BackboneConfig
from unmask.data.tokens import Truncation, encode, train_tokenizer
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
    return list(encode(tokenizer.backend_tokenizer, texts, np.int32, Truncation(max_length)))


@cache
def tokenizer():
    return train_tokenizer(TEXTS, 400, Path(mkdtemp()) / "tokenizer")


def model(*, bidirectional=True, head=False, layers=2, seed=0, length=256):
    sizes = {"hidden_size": 32, "heads": 2, "kv_heads": 1, "head_size": 16, "mlp_size": 64}
    shape = BackboneConfig(layers=layers, max_length=length, **sizes)
    built = backbone.build(shape, tokenizer(), seed=seed)
    if bidirectional:
        backbone.make_bidirectional(built, tokenizer(), shape.mask_token)
    return (built if head else built.model).eval()


def sizes(shape: BackboneConfig, layers: int, vocabulary: int) -> dict[str, int | None]:
    """So many layers of a shape, in the words of a configuration of transformers."""
    widths = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.mlp_size,
        "head_dim": shape.head_size,
    }
    heads = {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads}
    special = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    return {"vocab_size": vocabulary, "num_hidden_layers": layers} | widths | heads | special


def sequences(count: int, *, seed: int = 0, longest: int = 30) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(4, 300, rng.integers(1, longest + 1)).astype(np.int32) for _ in range(count)]


class Distinct(list):
    """Tokenised documents that are all different."""

    @property
    def keys(self) -> range:
        return range(len(self))

    @property
    def query_count(self) -> int:
        return sum(len(document.queries) for document in self)


def with_gradients(values: torch.Tensor, module: torch.nn.Module) -> tuple:
    """Values, and the gradients of their sum, weighted so that hardly two count alike."""
    module.zero_grad()
    (values * torch.linspace(-1, 1, values.numel()).view_as(values)).sum().backward()
    return values.detach(), gradients(module)


def gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
