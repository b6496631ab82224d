"""Attention: sequences of different lengths without padding, the fastest kernels, and compiled layers.

Shape suffixes: H heads · T tokens of all sequences, one after the other · D dimensions of a head ·
N sequences of one length L.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from inspect import signature
from itertools import groupby
from typing import Any
from warnings import warn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend as Kernel
from torch.nn.attention import sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from unmask.extras import extra, lacking_compiler
from unmask.losses.tensors import shipped
from unmask.models import backbone
from unmask.store import artifacts_root

VARLEN = "varlen"
KERNEL_ON = {"cuda"}  # kinds of device for which torch has a kernel for it
# torch 2.11 lets heads of queries share keys without a word; later versions want one.
SHARED = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
_COMPILED: set[Any] = set()  # shapes of the layers that torch has graphs for, and whether for one length
KERNELS = [Kernel.CUDNN_ATTENTION, Kernel.FLASH_ATTENTION, Kernel.EFFICIENT_ATTENTION, Kernel.MATH]


def unpadded(model: nn.Module, *, inference: bool = False) -> bool:
    """Whether sequences of different lengths are best read without padding, here and in this precision.

    torch's kernel for it needs a GPU of the Ampere generation or a later one, and half precision, by autocast
    or in the parameters. On a CPU it pays off in inference; trainings pad batches of similar lengths there.
    """
    parameter = next(model.parameters())
    device = parameter.device.type
    if device == "cpu" and inference:
        return _supported(model)
    if device != "cuda" or torch.cuda.get_device_capability(parameter.device) < (8, 0):
        return False
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else parameter.dtype
    return dtype in (torch.bfloat16, torch.float16) and _supported(model)


def unpadded_inputs(model: nn.Module, lengths: list[int], device: torch.device | str) -> dict[str, object]:
    """The keyword arguments that tell the model where its one row of tokens is divided into sequences.

    The model's attention becomes `varlen_attention`, for good, because gradient checkpointing looks it up
    again in the backward pass; calls without these arguments compute what they did before.
    """
    _decoder(model).config._attn_implementation = VARLEN
    ends = torch.tensor([0, *lengths]).cumsum(0)
    position_T = torch.arange(int(ends[-1])) - ends[:-1].repeat_interleave(torch.tensor(lengths))
    starts = shipped(ends.int(), device)
    return {
        "position_ids": shipped(position_T[None], device),
        # Four dimensions say that the mask is ready, so transformers derives none. Nobody reads it.
        "attention_mask": torch.empty(1, 1, 0, 0, dtype=torch.bool, device=device),
        "cu_seq_lens_q": starts,
        "max_length_q": max(lengths),
    }


def varlen_attention(
    module: nn.Module,
    query_1HTD: Tensor,
    key_1HTD: Tensor,
    value_1HTD: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention within each of the sequences that lie one after the other in a single row.

    It has the signature that transformers' `AttentionInterface` asks for, and the division into sequences has
    the names of its flash attention. Without a division this is transformers' "sdpa".

    Args:
        cu_seq_lens_q: int32, where each sequence starts, and at the end the number of tokens.
        max_length_q: the longest sequence's length.

    Returns:
        (1, T, H, D), and no attention weights.
    """
    all_1HTD = (query_1HTD, key_1HTD, value_1HTD)
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, *all_1HTD, attention_mask, **kwargs)
    scaling, causal = kwargs.get("scaling"), kwargs.get("is_causal")
    causal = module.is_causal if causal is None else causal
    device = query_1HTD.device.type
    if device in KERNEL_ON:
        # Autocast does not know this kernel, and Qwen3's norms return the query and the key in float32.
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query_1HTD.dtype
        options = {"scale": scaling, "window_size": (-1, 0 if causal else -1)} | SHARED
        all_THD = [x[0].transpose(0, 1).to(dtype) for x in all_1HTD]
        division = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)  # of queries, and of keys
        return varlen_attn(*all_THD, *division, **options)[None], None
    found, start = [], 0
    grouped = key_1HTD.shape[1] < query_1HTD.shape[1]
    options = {"is_causal": causal, "scale": scaling, "enable_gqa": grouped}
    for length, run in groupby(cu_seq_lens_q.diff().tolist()):  # neighbours of one length at a time
        stop = start + length * len(list(run))
        all_NHLD = [x[0, :, start:stop].unflatten(1, (-1, length)).transpose(0, 1) for x in all_1HTD]
        out_NHLD = F.scaled_dot_product_attention(*all_NHLD, **options)
        found.append(out_NHLD.transpose(1, 2).flatten(0, 1))
        start = stop
    return torch.cat(found)[None], None


AttentionInterface.register(VARLEN, varlen_attention)
AttentionMaskInterface.register(VARLEN, sdpa_mask)


def fast_attention(same_length: bool) -> AbstractContextManager:
    """Which of torch's kernels come first on Hopper and later GPUs: cuDNN's for sequences that all have one
    length, flash attention for others.

    cuDNN is the faster one there, and since torch 2.11 torch's own choice. But for every new shape, in every
    thread, it makes a plan, in tens to hundreds of milliseconds. Changes nothing elsewhere. It must enclose
    the backward pass too, which may compute layers again.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        return nullcontext()
    return sdpa_kernel(KERNELS if same_length else KERNELS[1:] + KERNELS[:1], set_priority=True)


def plain_attention(model: nn.Module) -> None:
    """Makes the model attend by transformers' "eager": matrix products and a softmax in float32.

    For trainings on a CPU in bfloat16. Forward and backward it takes a quarter of the time of torch's flash
    kernel at 64 tokens and half of it at 512, and keeps 6 H L² bytes per layer and sequence for that: the
    weights in both precisions.
    """
    for part in model.modules():  # an encoder that reads context has two
        if isinstance(part, PreTrainedModel):
            part.set_attn_implementation("eager")


def compile_layers(model: nn.Module, *, same_length: bool) -> None:
    """Compiles the Transformer's layers in place, at their first use; all of them share a graph.

    A graph is made for a forward pass with gradients and one for a pass without. Where all that is read has
    one length, they are for this length, which is the fastest, and a second length makes those for all; else
    they are for any number and lengths of sequences from the first on. The next model of the same shapes
    finds them, in this process; another begins anew, since torch keeps few for a function.
    Names and parameters stay as they are. A whole model takes minutes to compile, one layer seconds; what is
    compiled is kept under artifacts, where the next process finds it. Where nothing compiles, layers stay as
    they are, and a warning says so. Wrap or shard the model afterwards.
    """
    if lacking := lacking_compiler(next(model.parameters()).device.type):
        warn(f"{lacking}: trained without, more slowly", stacklevel=2)
        return
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(artifacts_root() / "data" / "compiled"))
    layers = backbone.layers(model)
    shapes = {tuple((name, p.dtype, *p.shape) for name, p in layer.named_parameters()) for layer in layers}
    if (kind := {same_length} | shapes) != _COMPILED:
        torch.compiler.reset()
        _COMPILED.clear()
        _COMPILED.update(kind)
    for layer in layers:
        layer.compile(dynamic=None if same_length else True)


@contextmanager
def fused_layers(model: nn.Module) -> Iterator[None]:
    """Within, norms, rotary positions and SwiGLU are Liger's kernels: one launch each, nothing to compile.

    Liger also replaces names in transformers' module of the family; in the end all is as it was.

    Raises: ValueError without a GPU, or for a family other than Llama and Qwen3; ModuleNotFoundError if
        liger-kernel is not installed.
    """
    decoders = [m for m in model.modules() if isinstance(m, PreTrainedModel) and m.base_model is m]
    families = {decoder.config.model_type for decoder in decoders}
    if families - {"llama", "qwen3"} or not torch.cuda.is_available():
        here = f"{', '.join(families)} on a {'GPU' if torch.cuda.is_available() else 'CPU'}"
        raise ValueError(f"fused layers are for Llama and Qwen3 on a GPU, this is {here}: set fused to false")
    with extra("gpu"):
        liger = import_module("liger_kernel.transformers")
    before = [(own := vars(sys.modules[type(decoder).__module__]), dict(own)) for decoder in decoders]
    try:
        for decoder in decoders:
            fuse = getattr(liger, f"apply_liger_kernel_to_{decoder.config.model_type}")
            fuse(model=decoder, fused_linear_cross_entropy=False)  # our own loss knows which rows pay
        yield
    finally:
        for own, earlier in before:
            own.update(earlier)
        for part in model.modules():
            for name in vars(part).keys() & {"forward", "extra_repr", "_get_name"}:
                delattr(part, name)


def _decoder(model: nn.Module) -> PreTrainedModel:
    """The outermost Transformer: DDP hides it, and so does an encoder that reads context."""
    return next(m for m in model.modules() if isinstance(m, PreTrainedModel))


def _supported(model: nn.Module) -> bool:
    """Attention "sdpa" over all tokens, from transformers' registry, with rotary positions, no dropout."""
    decoder = _decoder(model)
    config = decoder.config
    return (
        config._attn_implementation in ("sdpa", VARLEN)
        and decoder._supports_attention_backend
        and bool(getattr(config, "rope_parameters", None))  # positions are counted anew in each sequence
        and getattr(config, "sliding_window", None) is None
        and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        and not any(getattr(config, f"attention_{name}", 0) for name in ("dropout", "probs_dropout_prob"))
    )
