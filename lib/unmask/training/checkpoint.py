"""Checkpoints of a running training: complete, atomic, without pickle.

A step's samples and random numbers are functions of (seed, step), so a checkpoint is the weights, the
optimiser's moments and the step; nothing else has a memory.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from unmask.backbone import replace_directory

_FILES = ("model.safetensors", "optimizer.safetensors", "state.json")


def save_checkpoint(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, fingerprint: str
) -> None:
    """Writes `folder`/step-N under a temporary name, renames it, then removes older ones.

    A full disk or a kill in between leaves the previous checkpoint as it was.

    Raises: OSError that names the folder and the space needed.
    """
    path = folder / f"step-{step:07d}"
    temporary = folder / f".{path.name}.{os.getpid()}.tmp"
    names = {parameter: name for name, parameter in model.named_parameters()}
    moments = {
        f"{key}/{names[parameter]}": value.detach().contiguous().cpu()
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }
    weights = {name: parameter.detach().contiguous().cpu() for name, parameter in model.named_parameters()}
    try:
        temporary.mkdir(parents=True)
        save_file(weights, temporary / "model.safetensors")
        save_file(moments, temporary / "optimizer.safetensors")
        (temporary / "state.json").write_text(json.dumps({"step": step, "fingerprint": fingerprint}))
        replace_directory(temporary, path)
    except Exception as error:  # safetensors reports a full disk as an error type of its own
        size = sum(t.numel() * t.element_size() for t in (*weights.values(), *moments.values()))
        message = f"checkpoint of step {step} not written to {folder} ({size / 1e6:.0f} MB needed): {error}"
        raise OSError(getattr(error, "errno", None) or errno.EIO, message) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for other in folder.glob("step-*"):
        if other != path:
            shutil.rmtree(other)


def latest_checkpoint(folder: Path, fingerprint: str) -> Path | None:
    """The newest complete checkpoint of the same training; what a kill left half-written or another training
    wrote is removed."""
    found = None
    for path in sorted(folder.iterdir()):
        whole = path.name.startswith("step-") and all((path / name).is_file() for name in _FILES)
        if whole and json.loads((path / "state.json").read_text())["fingerprint"] == fingerprint:
            found = path
        else:
            shutil.rmtree(path)
    return found


def load_checkpoint(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Puts weights and moments back in place and returns the number of steps done."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in load_file(path / "model.safetensors").items():
            parameters[name].copy_(value)
    for key, value in load_file(path / "optimizer.safetensors").items():
        kind, _, name = key.partition("/")
        parameter = parameters[name]
        # The step count too: the fused optimiser reads it on the parameter's device.
        optimizer.state[parameter][kind] = value.to(parameter.device)
    return json.loads((path / "state.json").read_text())["step"]
