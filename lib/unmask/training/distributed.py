"""The processes that train one model together, as one of them sees the others.

All of them lay out the same global batch. Each works on its share of the micro-batches and of the queries,
and the gradients are added up once a step. So a training computes the same on one process as on many.

On a GPU that computes in bfloat16, what runs forward is a low-precision copy of the model. Its gradients are
added to the model's, in float32, which the optimiser steps. So a step rounds each weight once, where autocast
would in every pass. FSDP2 does the same with the parts of a model that it gathers.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from unmask.losses.tensors import to_device
from unmask.models import backbone
from unmask.models.attention import compile_layers

CPU = torch.device("cpu")
PATIENCE = timedelta(hours=1)  # of those who wait for one that compiles, or writes a large checkpoint


@dataclass(frozen=True)
class Distributed:
    """One process and its peers; by default it is alone, on the CPU, in float32.

    Args:
        accelerator: knows the peers.
        strategy: "ddp" (every process holds the whole model) or "fsdp2" (they share its parameters).
        half: whether a forward pass computes in bfloat16. accelerate's own precision cannot change between
            two trainings of one process.
        rank, count: which of how many processes this is.
        device: where it computes.
    """

    accelerator: Accelerator | None = None
    strategy: str = "ddp"
    half: bool = False
    rank: int = 0
    count: int = 1
    device: torch.device = CPU

    @classmethod
    def alone(cls, precision: str) -> "Distributed":
        """This process by itself, whatever others it was started with; on a GPU if there is one."""
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU
        return cls(half=backbone.computes_in_bf16(precision), device=device)

    @classmethod
    def join(cls, precision: str, strategy: str = "ddp") -> "Distributed":
        """Joins the other processes that torchrun started."""
        patience = InitProcessGroupKwargs(timeout=PATIENCE)
        cpu = not torch.cuda.is_available()  # accelerate joins CPU processes only where the CPU is named
        peers = Accelerator(mixed_precision="no", cpu=cpu, kwargs_handlers=[patience])
        half = backbone.computes_in_bf16(precision)
        return cls(peers, strategy, half, peers.process_index, peers.num_processes, peers.device)

    @property
    def main(self) -> bool:
        return self.rank == 0

    @property
    def random(self) -> Any:
        """The module of random numbers that a forward pass draws, for instance for dropout."""
        return torch.cuda if self.device.type == "cuda" else torch

    def autocast(self) -> AbstractContextManager:
        """The precision of a forward pass."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.half else nullcontext()

    def to_device(self, x: Tensor) -> Tensor:
        """Copies a CPU tensor to this process's device without waiting for the copy."""
        return to_device(x, self.device)

    def wait(self) -> None:
        """Returns when every process is here."""
        if self.accelerator:
            self.accelerator.wait_for_everyone()

    def agreed(self, value: Any) -> Any:
        """The main process's value, on each of them: file systems may show them different things."""
        return broadcast_object_list([value])[0] if self.count > 1 else value

    def share(self, items: Sequence) -> Sequence:
        """This process's items: every `count`-th, so that items sorted by length are shared evenly."""
        return items[self.rank :: self.count]

    def slice(self, n: int) -> slice:
        """This process's part of n queries; the parts are equal to within one."""
        return slice(n * self.rank // self.count, n * (self.rank + 1) // self.count)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all processes, on each of them."""
        return self.accelerator.reduce(x, "sum") if self.count > 1 else x

    def parallel(self, module: nn.Module, *, compiled: bool = False, same_length: bool = False) -> nn.Module:
        """Puts a module on this process's device; returns what is run forward there, with layers that are
        compiled if so wished (`compile_layers`). FSDP2 divides it among the processes.

        accelerate shards with FSDP2 on accelerators only, so torch's `fully_shard` is called directly.
        """
        if self.device.type == "cuda":
            # torch's allocator runs out of memory first: not kernels that load, which end a training.
            torch.cuda.set_per_process_memory_fraction(0.95)
        module.to(self.device)
        sharded = self.strategy == "fsdp2" and torch.distributed.is_initialized()
        copied = self.half and self.device.type == "cuda" and not sharded
        forward = low_precision_copy(module) if copied else module
        if compiled:
            compile_layers(forward, same_length=same_length)
        if sharded:  # the modules of a list are run each on its own
            for part in module if isinstance(module, nn.ModuleList) else [module]:
                self._shard(part)
        return forward

    def _shard(self, module: nn.Module) -> None:
        # Gradients are summed in float32: thousands of bfloat16 ones would lose the small ones.
        policy = MixedPrecisionPolicy(*((torch.bfloat16, torch.float32) if self.half else ()))
        for part in (*backbone.layers(module), module):
            fully_shard(part, mp_policy=policy)
            part.set_gradient_divide_factor(1.0)  # a sum, no mean
            part.set_force_sum_reduction_for_comms(True)

    def reducing(self, module: nn.Module, *, last: bool) -> None:
        """To be said before a forward and backward pass: FSDP2 adds up the gradients in the last one of a
        step."""
        if hasattr(module, "set_requires_gradient_sync"):
            module.set_requires_gradient_sync(last)

    def sum_gradients(self, model: nn.Module) -> None:
        """Adds up the processes' gradients of a step, where FSDP2 has not done so. Those of embeddings, which
        are sparse on a CPU, become ordinary ones."""
        for parameter in trainable(model):
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
            if self.count > 1 and self.strategy != "fsdp2":
                if parameter.grad is None:  # nothing that this process read needs it
                    parameter.grad = torch.zeros_like(parameter)
                torch.distributed.all_reduce(parameter.grad)


ALONE = Distributed()


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not frozen."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def low_precision_copy(module: nn.Module) -> nn.Module:
    """A copy of a module whose weights are bfloat16.

    A backward pass through it adds to the float32 gradients of the module and leaves none in the copy. After
    the module's weights have changed, `refresh` copies them. What is no parameter stays as it is: angles of
    rotary positions want float32.
    """
    copy = deepcopy(module)
    for low, parameter in zip(copy.parameters(), module.parameters(), strict=True):
        low.data = low.data.bfloat16()
        if low.requires_grad:
            low.register_post_accumulate_grad_hook(partial(_hand_over, parameter))
    return copy


def _hand_over(parameter: nn.Parameter, low: nn.Parameter) -> None:
    gradient, low.grad = low.grad, None
    parameter.grad = gradient.float() if parameter.grad is None else parameter.grad.add_(gradient)


@torch.no_grad()
def refresh(forward: nn.Module, model: nn.Module) -> None:
    """Rounds the weights of a model into what is run forward of it, where that is a low-precision copy."""
    low, whole = [*forward.parameters()], [*model.parameters()]
    if low[0] is not whole[0]:
        torch._foreach_copy_(low, whole)


def full_weights(model: nn.Module) -> dict[str, Tensor] | None:
    """All weights of a model that FSDP2 divided, on the main process's CPU; None for an undivided model.

    Every process must call it.
    """
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return None
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
