"""SLERP of two checkpoints with mergekit, its output checked (pplx-embed, section 2.5)."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from mergekit.config import MergeConfiguration
from mergekit.merge import MergeOptions, run_merge
from safetensors.torch import load_file

from unmask import backbone
from unmask.workspace import require_checkpoint


def slerp(base: Path, other: Path, t: float, path: Path) -> Path:
    """Spherical interpolation of two checkpoints of one shape, tensor by tensor; t = 0 is `base`, t = 1 is
    `other`.

        slerp(a, b; t) = sin((1 − t)·θ)/sin θ · a + sin(t·θ)/sin θ · b,   θ the angle between a and b

    mergekit falls back to linear interpolation where |cos θ| > 0.9995.

    Raises: ValueError for t outside of 0…1 or a directory that is no checkpoint; RuntimeError if what
        mergekit wrote is not a whole checkpoint (it returns normally even when it wrote no weights).
    """
    if not 0 <= t <= 1:
        raise ValueError(f"t must lie between 0 and 1, got {t}")
    for parent in (base, other):
        require_checkpoint(parent)
    base, other = base.resolve(), other.resolve()
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    recipe = MergeConfiguration.model_validate(
        {
            "merge_method": "slerp",
            "base_model": str(base),
            "models": [{"model": str(base)}, {"model": str(other)}],
            "parameters": {"t": t},
            "dtype": "float32",
        }
    )
    try:
        # No model card: writing one asks the Hub about the parents.
        run_merge(
            recipe, str(temporary), MergeOptions(write_model_card=False, copy_tokenizer=False, quiet=True)
        )
        _check(temporary, base)
        merged = backbone.load(temporary)
        facts = {key: value for key, value in backbone.facts(base).items() if key != "fingerprint"}
        return backbone.save(
            merged, backbone.load_tokenizer(base), path, **facts | {"stage": "merge", "t": t}
        )
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check(merged: Path, parent: Path) -> None:
    """Same tensors, same shapes, all finite."""
    expected, found = _tensors(parent), _tensors(merged)
    if missing := sorted(expected.keys() - found.keys()):
        raise RuntimeError(
            f"mergekit left out {len(missing)} of {len(expected)} tensors, {missing[0]} among them"
        )
    for name, tensor in expected.items():
        if found[name].shape != tensor.shape:
            raise RuntimeError(
                f"mergekit changed the shape of {name}: {tuple(tensor.shape)} → {tuple(found[name].shape)}"
            )
        if not torch.isfinite(found[name]).all():
            raise RuntimeError(f"mergekit wrote values that are not finite into {name}")


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
