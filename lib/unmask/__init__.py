"""Unmask: diffusion-pretrained dense and contextual text embeddings, from backbone to report."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["Embedder", "__version__"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: the command line must answer without waiting for torch.
    if name == "Embedder":
        from unmask.models.embedder import Embedder

        return Embedder
    raise AttributeError(f"module 'unmask' has no attribute {name!r}")
