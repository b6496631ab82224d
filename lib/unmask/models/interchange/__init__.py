"""Embedders to and from other libraries: sentence-transformers, the released pplx-embed checkpoints, ONNX.

Nothing here runs code from a checkpoint: every model is a stock class of transformers.
"""

from typing import Any

from unmask.models.interchange.loading import Loaded, load
from unmask.models.interchange.onnx import export_onnx
from unmask.models.interchange.saving import save

__all__ = [
    "load",
    "Loaded",
    "save",
    "export_onnx",
    "sentence_transformer",
    "Int8Quantizer",
    "BinaryQuantizer",
]


def __getattr__(name: str) -> Any:
    # Loaded on first use: sentence-transformers takes seconds to import, and few need it.
    if name in ("sentence_transformer", "Int8Quantizer", "BinaryQuantizer"):
        from unmask.models.interchange import modules

        return getattr(modules, name)
    raise AttributeError(f"module 'unmask.models.interchange' has no attribute {name!r}")
