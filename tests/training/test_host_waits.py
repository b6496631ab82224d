"""Where a training step would make a CPU wait for its GPU, without a GPU: by what would lie there."""

from collections import Counter

import pytest
import tiny_stages
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface

from unmask.models import attention
from unmask.training import cache
from unmask.training.distributed import ALONE

WAITS = {"item", "tolist", "numpy", "cpu", "nonzero", "masked_select", "unique", "equal", "is_nonzero"}
WAITS |= {"__bool__", "__int__", "__float__", "__index__", "__array__"}


class Gpu(TorchFunctionMode):
    """Knows which tensors would lie on a GPU (weights, what was moved there, what is computed from either),
    and counts the calls that fetch one of them, or must know its content."""

    def __init__(self, model):
        super().__init__()
        self.there, self.waits = WeakTensorKeyDictionary(), Counter()
        self.there.update((tensor, True) for tensor in (*model.parameters(), *model.buffers()))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.__name__
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        computed = any(tensor in self.there for tensor in given)
        chosen = name in ("__getitem__", "__setitem__") and any(t.dtype == torch.bool for t in given[1:])
        if computed and (name in WAITS or chosen):
            self.waits[name] += 1
        result = func(*args, **kwargs)
        moved = name == "to" and any(isinstance(one, torch.device | str) for one in (*args, *kwargs.values()))
        if moved:
            result = result.view_as(result)  # on the CPU it is the same tensor, which stays there
        if moved or computed or kwargs.get("device") is not None:
            self.there.update((leaf, True) for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result


class Backward(TorchDispatchMode):
    """Counts what a backward pass computes whose size depends on what a tensor holds, and what it fetches."""

    def __init__(self):
        super().__init__()
        self.waits = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, waits = func.overloadpacket.__name__, WAITS | {"_local_scalar_dense", "masked_scatter_backward"}
        if torch._C._current_graph_task_id() >= 0 and name in waits:
            self.waits[name] += 1
        return func(*args, **(kwargs or {}))


# What is left: transformers asks, in each forward pass of a causal model that gets no positions, whether they
# are those of several sequences.
EXPECTED = {"ar": 1, "reranker": 3}


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Sequences without padding; the kernel for them does on a GPU what this one fetches on a CPU."""

    def kernel(*args, **kwargs):
        with torch._C.DisableTorchFunction():
            return attention.varlen_attention(*args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, attention.VARLEN, kernel)
    monkeypatch.setattr(cache, "unpadded", lambda model: True)


@pytest.mark.parametrize("name", tiny_stages.STAGES)
def test_a_step_fetches_nothing_from_a_gpu_in_between(name, as_on_a_gpu):
    # What is cut needs a mask, which is looked at.
    changes = {"cut_fraction": 0.0} if name == "diffusion" else {}
    stage, model = tiny_stages.stage(name, **changes), tiny_stages.model(name)
    batch = stage.batch(0)
    with Backward() as backward, Gpu(model) as gpu:
        row = stage.backward(stage.module(model), batch, ALONE)
        assert gpu.waits.total() == EXPECTED.get(name, 0), gpu.waits
        assert not backward.waits
        assert float(row["loss"]) > 0 and gpu.waits.total() == EXPECTED.get(name, 0) + 1  # it does follow
