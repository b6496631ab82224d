"""Merges of checkpoints with mergekit, its output checked (pplx-embed, section 2.5; Qwen3-Embedding, section
3.2)."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from mergekit.config import MergeConfiguration
from mergekit.merge import MergeOptions, run_merge
from safetensors.torch import load_file

from unmask.models import backbone
from unmask.models.pretrained import require_checkpoint


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
    recipe = {"merge_method": "slerp", "base_model": str(base.resolve()), "parameters": {"t": t}}
    return _merge(recipe, [base, other], path, t=t)


def slerp_all(checkpoints: Sequence[Path], path: Path) -> Path:
    """The middle of several checkpoints of one shape, on the sphere, tensor by tensor, in whatever order.

        m(a_1, …, a_n) = r · Σ_i u_i / ‖Σ_i u_i‖,   u_i = a_i/‖a_i‖,   r the mean of the ‖a_i‖

    This is what mergekit's multislerp comes to with equal weights. Of two checkpoints of one norm it is
    `slerp` with t = 1/2. Qwen3-Embedding (section 3.2) merges "multiple model checkpoints" by slerp and does
    not say how; slerp by slerp, with t = 1/2, 1/3, …, the result would depend on their order.

    Raises: ValueError if there are none, one comes twice or is no checkpoint; RuntimeError as in `slerp`.
    """
    if not checkpoints:
        raise ValueError("there are no checkpoints to merge")
    recipe = {"merge_method": "multislerp", "parameters": {"weight": 1.0}}
    return _merge(recipe, checkpoints, path, merged=len(checkpoints))


def _merge(recipe: dict[str, Any], parents: Sequence[Path], path: Path, **facts: Any) -> Path:
    """Merges into a temporary directory, checks it, and saves it with the first parent's tokenizer and
    facts."""
    for parent in parents:
        require_checkpoint(parent)
    first = parents[0]
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    models = [{"model": str(parent.resolve())} for parent in parents]
    configuration = MergeConfiguration.model_validate(recipe | {"models": models, "dtype": "float32"})
    # No model card: writing one asks the Hub about the parents.
    options = MergeOptions(write_model_card=False, copy_tokenizer=False, quiet=True)
    try:
        with _silent_root():
            run_merge(configuration, str(temporary), options)
        _check(temporary, first)
        merged = backbone.load(temporary)
        known = {key: value for key, value in backbone.facts(first).items() if key != "fingerprint"}
        return backbone.save(
            merged, backbone.load_tokenizer(first), path, **known | {"stage": "merge"} | facts
        )
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _silent_root() -> Iterator[None]:
    """mergekit logs through the root logger and sets it up, for good: every library would speak up from then
    on. With a handler there, which says nothing, it leaves it alone."""
    handler = logging.NullHandler()
    logging.root.addHandler(handler)
    try:
        yield
    finally:
        logging.root.removeHandler(handler)


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
