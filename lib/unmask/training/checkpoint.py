"""Checkpoints of a running training: complete, atomic, without pickle.

A step's samples and random numbers are functions of (seed, step), so a checkpoint is the weights, the
optimiser's moments and the step; nothing else has a memory. Every process writes its part with torch's
distributed checkpointing, as safetensors, and any number of processes reads them.
"""

import math
import os
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import Optimizer

from unmask.training.distributed import Distributed, trainable

CHECKPOINTS = "checkpoints"  # in a training's folder, while it runs
MOMENTS = ("exp_avg", "exp_avg_sq")


def checkpoints(folder: Path) -> list[Path]:
    """Those of a training, the oldest first."""
    return sorted((folder / CHECKPOINTS).glob("step-*"))


def save_checkpoint(
    folder: Path, model: nn.Module, optimizer: Optimizer, step: int, processes: Distributed
) -> Path:
    """Writes CHECKPOINTS/step-N under a temporary name and renames it; older ones go.

    A full disk or a kill in between leaves the previous checkpoint as it was.

    Raises: torch's CheckpointException with the cause, on every process if one of them fails.
    """
    # A name of its own: other machines may still see what a shared one stood for.
    path, temporary = (folder / CHECKPOINTS / name for name in (f"step-{step:07d}", f".step-{step:07d}.tmp"))
    if processes.main:
        for left in temporary.parent.glob(".*.tmp"):  # of a kill
            shutil.rmtree(left, ignore_errors=True)
        temporary.mkdir(parents=True)
    processes.wait()
    writer = dcp.HuggingFaceStorageWriter(str(temporary), save_distributed=True)
    writer.per_thread_copy_ahead = 0  # else all of it lies in pinned memory, which is never given back
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that there is one process only
        dcp.save(_state(model, optimizer), storage_writer=writer)
    if processes.main:
        os.replace(temporary, path)
        for old in checkpoints(folder)[:-1]:
            shutil.rmtree(old)
    processes.wait()
    return path


def load_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer) -> int:
    """Puts weights and moments back in place and returns the number of steps done.

    The number of processes may differ from that at the time of writing.

    Raises: ValueError for a checkpoint whose files hold a part of a tensor only.
    """
    reader = dcp.HuggingFaceStorageReader(str(path))
    for name, tensor in reader.read_metadata().state_dict_metadata.items():
        if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.size):
            remedy = "delete it, and the training goes on from the one before, or begins"
            raise ValueError(f"{path}: a part of {name} is missing: {remedy}")
    step = int(path.name.split("-")[1])
    for parameter in trainable(model):  # the state that AdamW makes itself at its first step
        count = torch.tensor(float(step), device=parameter.device)  # where the fused one reads it
        optimizer.state[parameter] = {"step": count} | {k: torch.zeros_like(parameter) for k in MOMENTS}
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        dcp.load(_state(model, optimizer), storage_reader=reader)
    return step


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Everything to keep, by name: weights and moments, in parts where FSDP2 divides them."""
    named = dict(model.named_parameters())
    states = {name: optimizer.state[p] for name, p in named.items() if p.requires_grad}
    moments = {f"{key}/{name}": state[key] for name, state in states.items() for key in MOMENTS}
    return {f"model/{name}": p.detach() for name, p in named.items()} | moments
