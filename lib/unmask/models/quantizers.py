"""sentence-transformers modules for the embeddings that are stored and searched: INT8 codes and signs.

Legend: B texts, D dimensions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Module
from torch import Tensor

from unmask.models.quantize import binary, int8


class Int8Quantizer(Module):
    """Turns the pooled embedding into INT8 codes, ⌊127 · tanh(mean) + 1/2⌋ (pplx-embed, section 2.2).

        model = SentenceTransformer(path)
        model.append(Int8Quantizer())

    The codes come as floats that are whole numbers, so that `model.similarity` (cosine) takes them;
    `.astype("int8")` makes bytes of them and loses nothing. Gradients pass the rounding (straight-through).

    `encode(precision="int8")` is something else: it scales each dimension by the range of the texts at hand.

    sentence-transformers takes every module that is not its own for remote code: a pipeline that was saved
    with this one is loaded with `trust_remote_code=True`, which imports it from the installed Unmask.
    """

    def forward(self, features: dict[str, Tensor | Any], **kwargs: Any) -> dict[str, Tensor | Any]:
        features["sentence_embedding"] = int8(features["sentence_embedding"])
        return features

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        self.save_config(output_path)


class BinaryQuantizer(Int8Quantizer):
    """Turns the pooled embedding into signs: +1 where it is 0 or above, −1 below (pplx-embed, section 2.2).

    They come as floats; `quantize.pack_binary` packs eight into a byte. Use and reloading as with
    `Int8Quantizer`; signs have no gradient.
    """

    def forward(self, features: dict[str, Tensor | Any], **kwargs: Any) -> dict[str, Tensor | Any]:
        features["sentence_embedding"] = binary(features["sentence_embedding"])
        return features


QUANTIZERS = {"int8": Int8Quantizer, "binary": BinaryQuantizer}


def sentence_transformer(path: str | Path, precision: str = "int8", **options: Any) -> SentenceTransformer:
    """A saved embedder in sentence-transformers, with the quantiser of the precision at its end.

    Args:
        path: what `Embedder.save_pretrained` wrote.
        precision: "float32", "int8" or "binary".
        options: of `SentenceTransformer`, for instance `device`.

    Raises: ValueError for an unknown precision.
    """
    if precision != "float32" and precision not in QUANTIZERS:
        raise ValueError(f"unknown precision {precision!r}: choose float32, {', '.join(QUANTIZERS)}")
    model = SentenceTransformer(str(path), **options)
    if precision in QUANTIZERS:
        model.append(QUANTIZERS[precision]())
    return model
