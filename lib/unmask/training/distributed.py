"""The processes that train one model together, as one of them sees the others.

All of them lay out the same global batch. Each works on its share of the micro-batches and of the queries,
and the gradients are reduced once, in the last backward pass of a step. So a training computes the same on
one process as on many.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from unmask.models import backbone

CPU = torch.device("cpu")
PATIENCE = timedelta(hours=1)  # of those who wait for one that compiles, or writes a large checkpoint


@dataclass(frozen=True)
class Processes:
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
    def alone(cls, precision: str) -> "Processes":
        """This process by itself, whatever others it was started with; on a GPU if there is one."""
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU
        return cls(half=backbone.computes_in_bf16(precision), device=device)

    @classmethod
    def join(cls, precision: str, strategy: str = "ddp") -> "Processes":
        """Joins the other processes that torchrun started."""
        patience = InitProcessGroupKwargs(timeout=PATIENCE)
        cpu = not torch.cuda.is_available()  # accelerate joins CPU processes only where the CPU was asked for
        peers = Accelerator(mixed_precision="no", cpu=cpu, kwargs_handlers=[patience])
        half = backbone.computes_in_bf16(precision)
        return cls(peers, strategy, half, peers.process_index, peers.num_processes, peers.device)

    @property
    def main(self) -> bool:
        return self.rank == 0

    def autocast(self) -> AbstractContextManager:
        """The precision of a forward pass."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.half else nullcontext()

    def ship(self, x: Tensor) -> Tensor:
        """Copies a CPU tensor to this process's device without waiting for the copy."""
        return (x.pin_memory() if self.device.type == "cuda" else x).to(self.device, non_blocking=True)

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

    def parallel(self, module: nn.Module) -> nn.Module:
        """Puts a module on this process's device and divides it, or its gradients, among the processes.

        The modules of an nn.ModuleList are run, and so divided, each on its own.

        accelerate shards with FSDP2 on accelerators only, so torch's `fully_shard` is called directly.
        """
        if isinstance(module, nn.ModuleList):
            return nn.ModuleList(self.parallel(part) for part in module)
        module.to(self.device)
        if self.strategy == "fsdp2" and torch.distributed.is_initialized():
            # Gradients are summed in float32: thousands of bfloat16 ones would lose the small ones.
            policy = MixedPrecisionPolicy(*((torch.bfloat16, torch.float32) if self.half else ()))
            for layer in backbone.layers(module):
                fully_shard(layer, mp_policy=policy)
            return fully_shard(module, mp_policy=policy)
        if self.count > 1:
            return DistributedDataParallel(module, gradient_as_bucket_view=True)
        return module

    def accumulating(self, module: nn.Module, *, last: bool) -> AbstractContextManager:
        """Around a forward and backward pass: gradients stay on this process, unless it is the last pass of
        the step."""
        if hasattr(module, "set_requires_gradient_sync"):  # FSDP2 keeps the setting; DDP has a context
            module.set_requires_gradient_sync(last)
        return module.no_sync() if hasattr(module, "no_sync") and not last else nullcontext()

    def backward(self, output: Tensor, gradient: Tensor | None = None) -> None:
        """Adds this process's part of the gradient, scaled so that DDP's and FSDP2's average is a sum."""
        (output * self.count).backward(gradient)


ALONE = Processes()


def full_weights(model: nn.Module) -> dict[str, Tensor] | None:
    """All weights of a model that FSDP2 divided, on the main process's CPU; None for an undivided model.

    Every process must call it.
    """
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return None
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
