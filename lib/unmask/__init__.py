"""Unmask: trains and serves text embedders, dense and contextual, pretrained by masked diffusion."""

import os
from importlib.metadata import version
from typing import Any

__version__ = "0.1.0"
__all__ = ["Embedder", "__version__", "fit"]

FLOORS = {"torch": (2, 11), "transformers": (5, 17)}  # tested; requirements.lock has what else was
for name, floor in FLOORS.items():
    if tuple(map(int, (installed := version(name)).split(".")[:2])) < floor:
        raise ImportError(f"unmask needs {name} {floor[0]}.{floor[1]} or later, and {installed} is installed")

# bm25s starts JAX where that is installed, and JAX takes three quarters of every GPU that it finds.
os.environ.setdefault("JAX_PLATFORMS", "cpu")


def __getattr__(name: str) -> Any:
    # Loaded on first use: the command line must answer without waiting for torch.
    if name == "Embedder":
        from unmask.models.embedder import Embedder  # noqa: PLC0415

        return Embedder
    if name == "fit":
        # A module of that name would take the function's place once it is imported: hence `fitting`.
        from unmask.fitting import fit  # noqa: PLC0415

        return fit
    raise AttributeError(f"module 'unmask' has no attribute {name!r}")
