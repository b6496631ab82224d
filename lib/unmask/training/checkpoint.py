"""Checkpoints of a running training: complete, atomic, without pickle.

A step's samples and random numbers are functions of (seed, step), so a checkpoint is the weights, the
optimiser's moments and the step; nothing else has a memory. Every process writes its part with torch's
distributed checkpointing, as safetensors, and any number of processes reads them.
"""

from __future__ import annotations

import errno
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from unmask.store import replace_directory
from unmask.training.distributed import ALONE, Processes

MOMENTS = ("exp_avg", "exp_avg_sq")


def save_checkpoint(
    folder: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    fingerprint: str,
    *,
    keep: int = 1,
    processes: Processes = ALONE,
) -> Path:
    """Writes `folder`/step-N under a temporary name, renames it, then removes all but the `keep` newest.

    A full disk or a kill in between leaves the previous checkpoint as it was.

    Raises: OSError that names the folder and the space needed, on every process if one of them fails.
    """
    path = folder / f"step-{step:07d}"
    temporary = folder / f".{path.name}.tmp"
    state = _state(model, optimizer)
    if processes.main:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    processes.wait()
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # that there is one process only
            writer = dcp.HuggingFaceStorageWriter(str(temporary), save_distributed=True)
            dcp.save(state, storage_writer=writer)
        if processes.main:
            files = sorted(file.name for file in temporary.iterdir())
            facts = {"step": step, "fingerprint": fingerprint, "files": files}
            (temporary / "state.json").write_text(json.dumps(facts))
            replace_directory(temporary, path)
    except (Exception, CheckpointException) as error:  # the latter is none of the former
        size = sum(t.numel() * t.element_size() for t in state.values())
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        message = f"checkpoint of step {step} not written to {folder} ({size / 1e6:.0f} MB needed): {cause}"
        raise OSError(getattr(cause, "errno", None) or errno.EIO, message) from error
    finally:
        if processes.main:
            shutil.rmtree(temporary, ignore_errors=True)
    if processes.main:
        for old in sorted(folder.glob("step-*"))[:-keep]:
            shutil.rmtree(old)
    processes.wait()
    return path


def latest_checkpoint(folder: Path, fingerprint: str) -> Path | None:
    """The newest complete checkpoint of the same training; what a kill left half-written is removed, what
    another training wrote stays."""
    found = None
    for path in sorted(folder.iterdir()):
        facts = _facts(path) if path.name.startswith("step-") else {}
        if not facts or not all((path / name).is_file() for name in facts["files"]):
            shutil.rmtree(path)
        elif facts["fingerprint"] == fingerprint:
            found = path
    return found


def load_checkpoint(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Puts weights and moments back in place and returns the number of steps done.

    The processes may be another number than those that wrote the checkpoint.
    """
    step = _facts(path)["step"]
    start_moments(optimizer, step)
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        reader = dcp.HuggingFaceStorageReader(str(path))
        dcp.load(_state(model, optimizer), storage_reader=reader)
    return step


def start_moments(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Gives AdamW the state that it makes itself at its first step, ready to be filled."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # The fused optimiser reads its step count on the parameter's device.
            count = torch.tensor(float(step), device=parameter.device)
            optimizer.state[parameter] = {"step": count} | {k: torch.zeros_like(parameter) for k in MOMENTS}


def _facts(path: Path) -> dict[str, Any]:
    file = path / "state.json"
    return json.loads(file.read_text(encoding="utf8")) if file.is_file() else {}


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything to keep, by name: weights and moments, in parts where FSDP2 divides them."""
    state = {f"model/{name}": parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        state |= {f"{key}/{name}": optimizer.state[parameter][key] for key in MOMENTS}
    return state
