"""What every loss asks of its arguments before it computes anything, and how they get to its device."""

import math

import torch
from torch import Tensor


def check_shapes(**tensors: Tensor | None) -> None:
    """Refuses tensors whose shapes contradict their names, or that have no rows; one that is None is skipped.

    The letters after a name's last underscore are its axes, and a letter has one size: `q_ND` and `d_ND` have
    the same shape.

    Raises: ValueError that names the tensor, the shape it should have and the one it has; TypeError for what
        is no tensor.
    """
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor; got {type(tensor).__name__}.")
        axes, shape = name.rpartition("_")[2], tuple(tensor.shape)
        expected = ", ".join(str(sizes.get(axis, axis)) for axis in axes)
        wrong = (sizes.setdefault(axis, size) != size for axis, size in zip(axes, shape, strict=True))
        if len(shape) != len(axes) or any(wrong):
            raise ValueError(f"{name} must have the shape ({expected}); got {shape}.")
        if not len(tensor):
            raise ValueError(f"{name} has no rows: a loss is a mean over one or more.")


def check_settings(*, temperature: float, margin: float = 0.0, **weights: float) -> None:
    """Refuses a temperature that is not above 0, a margin below 0 (which would take the positive for a false
    negative), and weights outside of [0, 1]."""
    if not 0 < temperature < math.inf:
        raise ValueError(f"The temperature must be above 0, and finite; got {temperature}.")
    if not margin >= 0:
        raise ValueError(f"The margin must be 0 or more (math.inf masks nothing); got {margin}.")
    for name, weight in weights.items():
        if not 0 <= weight <= 1:
            raise ValueError(f"{name} must lie in [0, 1]; got {weight}.")


def check_index(name: str, index_N: Tensor, size: int) -> None:
    """Refuses what is no index of something that has `size` entries."""
    if index_N.dtype != torch.int64 or ((index_N < 0) | (index_N >= size)).any():
        values = f"{index_N.dtype} in {int(index_N.min())}..{int(index_N.max())}"
        raise ValueError(f"{name} must hold int64 in 0..{size - 1}; got {values}.")


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Copies a CPU tensor to a device; to a GPU from pinned memory, since other copies may wait for all that
    it has to do. What is there already stays."""
    device = torch.device(device)
    pinned = x.device.type == "cpu" and device.type == "cuda"
    return (x.pin_memory() if pinned else x).to(device, non_blocking=True)
