"""What one layer launches, counted without a GPU; and torch's operation for sequences without padding, which
has a kernel for GPUs alone, on a CPU.

A launch is an operation that is no view. Compiled, it is what inductor has left to run after fusion; for a
GPU it fuses by nearly the same rules as for a CPU.

Shape suffixes: H heads, G of keys, R of queries for each of these · L tokens of a sequence · D dimensions.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.ir import MultiOutput, NopKernel
from torch._inductor.scheduler import BaseSchedulerNode
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel, Qwen3Config

from unmask.models import attention


@varlen._varlen_attn.register_kernel("cpu")
def _forward(q, k, v, ends, ends_of_keys, max_q, max_k, causal=False, scale=None, *more):
    found = []
    for start, stop in pairwise(ends.tolist()):
        parts = (x[start:stop].transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(*parts, is_causal=causal, scale=scale, enable_gqa=True)
        found.append(out[0].transpose(0, 1))
    nothing = q.new_zeros(q.shape[1::-1], dtype=torch.float32), torch.zeros(2, dtype=torch.uint64)
    return torch.cat(found), *nothing


@varlen._varlen_attn_backward.register_kernel("cpu")
def _backward(gradient, q, k, v, out, lse, ends, ends_of_keys, max_q, max_k, causal, rng, scale=None, *more):
    found, scale = [], scale or q.shape[-1] ** -0.5
    for start, stop in pairwise(ends.tolist()):
        parts = (x[start:stop].transpose(0, 1).float() for x in (q, gradient))
        q_GRLD, g_GRLD = (x_HLD.unflatten(0, (k.shape[1], -1)) for x_HLD in parts)
        k_G1LD, v_G1LD = (x[start:stop].transpose(0, 1)[:, None].float() for x in (k, v))
        scores_GRLL = q_GRLD @ k_G1LD.mT * scale
        if causal:
            future_LL = torch.ones(scores_GRLL.shape[-2:], dtype=torch.bool).triu(1)
            scores_GRLL = scores_GRLL.masked_fill(future_LL, -torch.inf)
        p_GRLL, dp_GRLL = scores_GRLL.softmax(-1), g_GRLD @ v_G1LD.mT
        ds_GRLL = p_GRLL * (dp_GRLL - (dp_GRLL * p_GRLL).sum(-1, keepdim=True)) * scale
        dq_HLD = (ds_GRLL @ k_G1LD).flatten(0, 1)
        dk_GLD, dv_GLD = (ds_GRLL.mT @ q_GRLD).sum(1), (p_GRLL.mT @ g_GRLD).sum(1)
        found.append([x.transpose(0, 1).to(q.dtype) for x in (dq_HLD, dk_GLD, dv_GLD)])
    return tuple(map(torch.cat, zip(*found)))


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Sequences without padding go through torch's own operation, so through what is traced on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "KERNEL_ON", {"cuda", "cpu"})
        yield


class Launches(TorchDispatchMode):
    """Counts operations that are no views: matrix products, casts and casts of weights among them."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.weights = {_storage(parameter) for parameter in module.parameters()}
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        inputs = {_storage(x) for x in args if isinstance(x, Tensor)}
        if func._schema.is_mutable or not (isinstance(result, Tensor) and _storage(result) in inputs):
            cast = name == "_to_copy"
            kinds = {"all": True, "products": name == "mm", "casts": cast}
            self.counts += Counter(kinds | {"casts of weights": cast and bool(inputs & self.weights)})
        return result


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


SHAPE = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
SHAPE |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 8, "is_causal": False}


def layer(dtype: torch.dtype) -> tuple[nn.Module, Callable[[list[int]], dict[str, Any]]]:
    """A layer with Qwen3-0.6B's heads in small widths, and what it takes for some lengths."""
    torch.manual_seed(0)
    model = AutoModel.from_config(Qwen3Config(**SHAPE)).to(dtype)
    model.config._attn_implementation = attention.VARLEN

    def inputs(lengths: list[int]) -> dict[str, Any]:
        arguments = attention.unpadded_inputs(model, lengths, "cpu")
        hidden = torch.randn(1, sum(lengths), SHAPE["hidden_size"], dtype=dtype, requires_grad=True)
        positions = model.rotary_emb(hidden, arguments["position_ids"])
        return {"hidden_states": hidden, "position_embeddings": positions} | arguments

    return model.layers[0], inputs


def eager(dtype: torch.dtype) -> tuple[Counter, Counter]:
    """Launches forward and backward with weights in float32 under autocast, or in bfloat16 without."""
    part, inputs = layer(dtype)
    arguments = inputs([5, 2, 4])
    with as_on_a_gpu():
        with Launches(part) as there, torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            out = part(**arguments)
        with Launches(part) as back:
            out.backward(torch.ones_like(out))
    return there.counts, back.counts


@contextmanager
def after_fusion() -> Iterator[list[int]]:
    """Within, the list grows by the launches of each graph that inductor makes."""
    launches = []

    def count(nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        launches.append(sum(not isinstance(node.node, MultiOutput | NopKernel) for node in nodes))
        return nodes

    with inductor.patch(_post_fusion_custom_pass=count, fx_graph_cache=False):
        yield launches
