"""A sentence-transformers module for the embeddings that are stored and searched: INT8 codes."""

from typing import Any

from sentence_transformers.base.modules import Module
from torch import Tensor

from unmask.models.quantize import int8


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
