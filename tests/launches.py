"""What one layer launches, counted without a GPU; and torch's operation for sequences without padding, which
has a kernel for GPUs alone, on a CPU.

A launch is an operation that is no view. Compiled, it is what inductor has left to run after fusion; for a
GPU it fuses by nearly the same rules as for a CPU. `python tests/launches.py` counts layers of both models'
real widths anew, in a minute or two, for results/gpu/README.md.

Shape suffixes: H heads, G of keys, R of queries for each of these · L tokens of a sequence · D dimensions.
"""

import copy
import json
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
from torch.utils._pytree import tree_leaves
from transformers import AutoModel, LlamaConfig, PreTrainedConfig, Qwen3Config

import tiny
from unmask.config import load_preset
from unmask.models import attention
from unmask.store import repository


@varlen._varlen_attn.register_kernel("cpu")
def _forward(q, k, v, ends, ends_of_keys, max_q, max_k, causal=False, scale=None, *more):
    found = []
    for start, stop in pairwise(ends.tolist()):
        parts = (x[start:stop].transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(*parts, is_causal=causal, scale=scale, enable_gqa=True)
        found.append(out[0].transpose(0, 1))
    return (
        torch.cat(found),
        q.new_zeros(q.shape[1::-1], dtype=torch.float32),
        torch.zeros(2, dtype=torch.uint64),
    )


@varlen._varlen_attn_backward.register_kernel("cpu")
def _backward(gradient, q, k, v, out, lse, ends, ends_of_keys, max_q, max_k, causal, rng, scale=None, *more):
    found, scale = [], scale or q.shape[-1] ** -0.5
    for start, stop in pairwise(ends.tolist()):
        q_GRLD, g_GRLD = (
            x[start:stop].transpose(0, 1).unflatten(0, (k.shape[1], -1)).float() for x in (q, gradient)
        )
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
    """Counts operations that are no views: matrix products, casts and casts of weights among them; and the
    bytes that all but products and attention read and write, those of weights and their gradients apart."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.weights = {_storage(parameter) for parameter in module.parameters()}
        self.shapes = {parameter.shape for parameter in module.parameters() if parameter.ndim == 2}
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        given = [x for x in args if isinstance(x, Tensor)]
        where = {_storage(x) for x in given}
        if func._schema.is_mutable or not (isinstance(result, Tensor) and _storage(result) in where):
            cast = name == "_to_copy"
            kinds = {"all": True, "products": name == "mm", "casts": cast}
            self.counts += Counter(kinds | {"casts of weights": cast and bool(where & self.weights)})
            if name != "mm" and func.namespace != "torch_attn":
                made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
                moved = sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in given + made)
                self.counts["bytes of weights" if made[0].shape in self.shapes else "bytes"] += moved
        return result


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


PASSES = ("forward", "backward")
LENGTHS = [5, 2, 4]
SMALL = Qwen3Config(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=8,
)


def layer(
    dtype: torch.dtype, shape: PreTrainedConfig = SMALL
) -> tuple[nn.Module, Callable[[list[int]], dict[str, Any]]]:
    """A layer, by default with Qwen3-0.6B's heads in small widths, and what it takes for some lengths."""
    torch.manual_seed(0)
    shape = copy.deepcopy(shape)
    shape.num_hidden_layers, shape.is_causal = 1, False
    model = AutoModel.from_config(shape).to(dtype)
    model.config._attn_implementation = attention.VARLEN

    def inputs(lengths: list[int]) -> dict[str, Any]:
        given = attention.unpadded_inputs(model, lengths, "cpu")
        hidden = torch.randn(1, sum(lengths), shape.hidden_size, dtype=dtype, requires_grad=True)
        positions = model.rotary_emb(hidden, given["position_ids"])
        return {"hidden_states": hidden, "position_embeddings": positions} | given

    return model.layers[0], inputs


def eager(dtype: torch.dtype, lengths: list[int] = LENGTHS, **options: Any) -> tuple[Counter, Counter]:
    """Launches forward and backward with weights in float32 under autocast, or in bfloat16 without."""
    part, inputs = layer(dtype, **options)
    given = inputs(lengths)
    with as_on_a_gpu():
        with Launches(part) as there, torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            out = part(**given)
        with Launches(part) as back:
            out.backward(torch.ones_like(out))
    return there.counts, back.counts


def compiled(lengths: list[int] = LENGTHS, **options: Any) -> list[Counter]:
    """Launches forward and backward of the compiled layer with weights in bfloat16."""
    part, inputs = layer(torch.bfloat16, **options)
    attention.compile_layers(part, same_length=False)
    given = inputs(lengths)
    torch._dynamo.reset()
    with as_on_a_gpu(), after_fusion() as found:
        out = part(**given)
        out.backward(torch.ones_like(out))
    return found


@contextmanager
def after_fusion() -> Iterator[list[Counter]]:
    """Within, the list grows by the launches of each graph that inductor makes, as `Launches` counts them."""
    found = []

    def count(nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        run = [node for node in nodes if not isinstance(node.node, MultiOutput | NopKernel)]
        own = [node for node in run if not node.is_extern()]
        moved = sum(node.get_read_write_buffers_sizes() for node in own)
        found.append(Counter({"all": len(run), "bytes": moved}))
        return nodes

    with inductor.patch(_post_fusion_custom_pass=count, fx_graph_cache=False):
        yield found


def main() -> None:
    """Counts for both models' layers, into results/gpu/launches.json."""
    presets = {"0.6B": ("paper-0.6b", Qwen3Config), "SmolLM2-135M": ("gpu", LlamaConfig)}
    rows, lengths = [], [20, 30, 14]
    for model, (preset, kind) in presets.items():
        shape = kind(**tiny.sizes(load_preset(preset).backbone, 1, 32))
        ways = {
            "eager, float32 under autocast": eager(torch.float32, lengths, shape=shape),
            "eager, bfloat16": eager(torch.bfloat16, lengths, shape=shape),
            "compiled, bfloat16": compiled(lengths, shape=shape),
        }
        for way, both in ways.items():
            row = {"model": model, "layer": way} | {name: one["all"] for name, one in zip(PASSES, both)}
            row |= {} if "compiled" in way else {"casts": sum(one["casts"] for one in both)}
            row |= {"bytes of a token": sum(one["bytes"] for one in both) / sum(lengths)}
            rows.append(row | {"bytes of weights": sum(one["bytes of weights"] for one in both)})
    text = json.dumps({"torch": torch.__version__, "rows": rows}, indent=1)
    (repository() / "results" / "gpu" / "launches.json").write_text(text + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
