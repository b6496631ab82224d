"""`Embedder.encode` against sentence-transformers' `encode`: the same model, texts, precision and threads.

Both sort the texts by length. sentence-transformers gets its best batch size, and a stock pipeline of
Transformer and mean Pooling loaded from what `Embedder.save_pretrained` wrote.
"""

from collections.abc import Callable, Sequence
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from contrastive import BF16, MIXED_LENGTH, PRESET, bidirectional, described, docstrings
from measure import Case
from transformers import PreTrainedTokenizerBase

import tiny
from closeness import assert_close
from unmask import Embedder
from unmask.data.mining import unit

LAYERS, TEXTS, EQUAL_LENGTH = 4, 512, 64
PRECISIONS = ("float32", "bf16")[: 1 + BF16]


def embedders(tokenizer: PreTrainedTokenizerBase, layers: int, *, bf16: bool) -> tuple[Embedder, object]:
    """Ours and sentence-transformers' of one model."""
    from sentence_transformers import SentenceTransformer

    model = bidirectional(layers, len(tokenizer))
    options = {"max_length": MIXED_LENGTH, "device": "cpu"}
    with TemporaryDirectory() as folder:
        saved = Embedder(model, tokenizer, mixed_precision=False, **options).save_pretrained(folder)
        peer = SentenceTransformer(str(saved), device="cpu")
    return Embedder(model, tokenizer, mixed_precision=bf16, **options), peer


def theirs(peer: object, texts: Sequence[str], batch_size: int, *, bf16: bool) -> np.ndarray:
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        return peer.encode(texts, batch_size=batch_size)


def agree(ours: Embedder, peer: object, texts: Sequence[str], *, bf16: bool) -> None:
    """Raises AssertionError unless both give the same vectors, compared at unit length."""
    first, other = unit(ours.encode(texts, "float32")), unit(theirs(peer, texts, 8, bf16=bf16))
    assert_close(other, first, 2e-2 if bf16 else 1e-5)


def mixed() -> tuple[PreTrainedTokenizerBase, list[str]]:
    """Summary lines and the rest of their docstrings."""
    tokenizer, table, order = docstrings()
    rows = table.select(order[: TEXTS // 2])
    return tokenizer, [*rows["query"], *rows["document"]]


def equal() -> tuple[PreTrainedTokenizerBase, list[str]]:
    """The beginnings of docstrings, cut where they have EQUAL_LENGTH tokens."""
    tokenizer, table, order = docstrings()
    ids = tiny.tokenize(tokenizer, list(table.select(order[: 8 * TEXTS])["document"]), EQUAL_LENGTH)
    texts = [tokenizer.decode(tokens) for tokens in ids if len(tokens) == EQUAL_LENGTH]
    lengths = map(len, tiny.tokenize(tokenizer, texts, MIXED_LENGTH))  # a text that is cut may read otherwise
    return tokenizer, [text for text, length in zip(texts, lengths) if length == EQUAL_LENGTH][:TEXTS]


def encode_case(texts_of: Callable[[], tuple[Any, list[str]]], lengths: str, *, bf16: bool) -> Case:
    """Both programs on some hundred texts; whether they agree is checked on a few of them."""
    tokenizer, texts = texts_of()
    ours, peer = embedders(tokenizer, LAYERS, bf16=bf16)
    sizes = {f"batch_size {n}": partial(theirs, peer, texts, n, bf16=bf16) for n in (4, 8, 16, 32, 64)}
    programs = {"unmask": {"": partial(ours.encode, texts, "float32")}, "sentence-transformers": sizes}
    setting = f"{LAYERS} layers, {PRESET.backbone.hidden_size}-d, {len(texts)} docstrings {lengths}"
    check = partial(agree, ours, peer, texts[:: len(texts) // 64], bf16=bf16)
    return Case(described(setting, PRECISIONS[bf16]), "texts/s", len(texts), programs, check)


CASES: dict[str, Callable[[], Case]] = {}
UP_TO, EACH = f"of up to {MIXED_LENGTH} tokens", f"of {EQUAL_LENGTH} tokens each"
for precision in PRECISIONS:
    half = precision == "bf16"
    CASES[f"encode-mixed-{precision}"] = partial(encode_case, mixed, UP_TO, bf16=half)
    CASES[f"encode-equal-{precision}"] = partial(encode_case, equal, EACH, bf16=half)
