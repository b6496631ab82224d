"""Backbones, and what becomes of their token vectors: pooling, quantisation, embedders."""

from importlib import import_module
from typing import Any

_PLACES = {
    **dict.fromkeys(("last_token_pool", "late_chunk_pool", "mean_pool"), "encoding"),
    **dict.fromkeys(("binary", "int8", "pack_binary"), "quantize"),
}
__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    # Loaded on first use: the command line must answer without waiting for torch.
    if name in _PLACES:
        return getattr(import_module(f"unmask.models.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'unmask.models' has no attribute {name!r}")
