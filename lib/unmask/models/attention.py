"""Attention: sequences of different lengths without padding, the fastest kernels, and compiled layers.

Shape suffixes: H heads · T tokens of all sequences, one after the other · D dimensions of a head ·
N sequences of one length L, or padded to it.
"""

import os
from contextlib import AbstractContextManager, nullcontext
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
from transformers.masking_utils import eager_mask, sdpa_mask

from unmask.extras import lacking_compiler
from unmask.losses.tensors import to_device
from unmask.models import backbone
from unmask.store import artifacts_root

VARLEN, PLAIN = "varlen", "plain"
KERNEL_ON = {"cuda"}  # kinds of device for which torch has a kernel for it
# torch 2.11 lets heads of queries share keys without a word; later versions want one.
SHARED = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
_COMPILED: set[Any] = set()  # shapes of the layers that torch has graphs for, and whether for one length
KERNELS = [Kernel.CUDNN_ATTENTION, Kernel.FLASH_ATTENTION, Kernel.EFFICIENT_ATTENTION, Kernel.MATH]


def unpadded(model: nn.Module, *, inference: bool = False) -> bool:
    """Whether sequences of different lengths are best read without padding, here and in this precision.

    torch's kernel for it needs a GPU of the Ampere generation or a later one, and half precision, by autocast
    or in the parameters. On a CPU it pays off in inference, and in trainings with `plain_attention`; others
    pad batches of similar lengths there.
    """
    parameter = next(model.parameters())
    device = parameter.device.type
    if device == "cpu" and (inference or _decoder(model).config._attn_implementation == PLAIN):
        return _supported(model)
    if device != "cuda" or torch.cuda.get_device_capability(parameter.device) < (8, 0):
        return False
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else parameter.dtype
    return dtype in (torch.bfloat16, torch.float16) and _supported(model)


def unpadded_inputs(model: nn.Module, lengths: list[int], device: torch.device | str) -> dict[str, object]:
    """The keyword arguments that tell the model where its one row of tokens is divided into sequences.

    The model's attention becomes `varlen_attention`, unless it is `plain`; for good, because gradient
    checkpointing looks it up again in the backward pass; calls without these arguments compute what they did
    before.
    """
    config, length_N = _decoder(model).config, torch.tensor(lengths)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    row_T = torch.arange(len(lengths)).repeat_interleave(length_N)
    position_T = torch.arange(int(ends[-1])) - ends[:-1][row_T]
    inputs = {
        "position_ids": to_device(position_T[None], device),
        # Four dimensions say that the mask is ready, so transformers derives none. Nobody reads it.
        "attention_mask": torch.empty(1, 1, 0, 0, dtype=torch.bool, device=device),
        "cu_seq_lens_q": to_device(ends.int(), device),
    }
    if config._attn_implementation == PLAIN:
        place_T = row_T * max(lengths) + position_T
        token_NL = torch.full((len(lengths), max(lengths)), -1)
        token_NL.view(-1)[place_T] = torch.arange(len(place_T))
        return inputs | {"place_T": place_T, "token_NL": token_NL}
    config._attn_implementation = VARLEN
    return inputs | {"max_length_q": max(lengths)}


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
    all_1HTD, device = (query_1HTD, key_1HTD, value_1HTD), query_1HTD.device.type
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, *all_1HTD, attention_mask, **kwargs)
    scaling, causal = kwargs.get("scaling"), _causal(module, kwargs)
    if device in KERNEL_ON:
        # Autocast does not know this kernel, and Qwen3's norms return the query and the key in float32.
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query_1HTD.dtype
        options = {"scale": scaling, "window_size": (-1, 0 if causal else -1)} | SHARED
        all_THD = [x[0].transpose(0, 1).to(dtype) for x in all_1HTD]
        division = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)  # of queries, and of keys
        return varlen_attn(*all_THD, *division, **options)[None], None
    return _by_length(*all_1HTD, cu_seq_lens_q, is_causal=causal, scale=scaling), None


def _by_length(query_1HTD: Tensor, key_1HTD: Tensor, value_1HTD: Tensor, ends: Tensor, **options) -> Tensor:
    """Attention within each sequence (1, T, H, D), of neighbours of one length at a time."""
    out, start, grouped = [], 0, key_1HTD.shape[1] < query_1HTD.shape[1]
    for length, run in groupby(ends.diff().tolist()):
        stop = start + length * len(list(run))
        all_HTD = (x[0, :, start:stop] for x in (query_1HTD, key_1HTD, value_1HTD))
        all_NHLD = [x.unflatten(1, (-1, length)).transpose(0, 1) for x in all_HTD]
        out_NHLD = F.scaled_dot_product_attention(*all_NHLD, enable_gqa=grouped, **options)
        out.append(out_NHLD.transpose(1, 2).flatten(0, 1))
        start = stop
    return torch.cat(out)[None]


def _causal(module: nn.Module, kwargs: dict[str, object]) -> bool:
    given = kwargs.get("is_causal")
    return module.is_causal if given is None else bool(given)


def plain(
    module: nn.Module,
    query_NHLD: Tensor,
    key_NHLD: Tensor,
    value_NHLD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    place_T: Tensor | None = None,
    token_NL: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention by matrix products and a softmax in float32, as transformers' "eager".

    Where sequences lie one after the other in a single row, only what attention itself needs is padded.

    Args:
        place_T: place of each token in the padded sequences.
        token_NL: the token at each of their places, −1 for padding.

    Returns:
        (N, L, H, D), or (1, T, H, D), and no attention weights.
    """
    all_NHLD = (query_NHLD, key_NHLD, value_NHLD)
    if token_NL is not None:
        all_NHLD = [_Moved.apply(x[0].transpose(0, 1), token_NL, place_T).transpose(1, 2) for x in all_NHLD]
        real_NL = token_NL >= 0
        seen = real_NL[:, None, None].expand(-1, -1, token_NL.shape[1], -1)
        if _causal(module, kwargs):
            seen = seen.tril()
        attention_mask = torch.zeros_like(seen, dtype=all_NHLD[0].dtype).masked_fill(~seen, -1e4)
    query, key, value = all_NHLD
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * scaling
    scores = scores if attention_mask is None else scores + attention_mask
    weights = scores.softmax(-1, torch.float32).to(value.dtype)
    weights = F.dropout(weights, dropout) if dropout else weights
    out_NLHD = (weights @ value).transpose(1, 2)
    if token_NL is None:
        return out_NLHD.contiguous(), None
    return _Moved.apply(out_NLHD.flatten(0, 1), place_T, token_NL)[None], None


class _Moved(torch.autograd.Function):
    """Rows of x at some places, zeros at −1. The gradient is taken in the same way by the inverse: nothing is
    added up."""

    @staticmethod
    def forward(ctx: Any, x_X: Tensor, place: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(place, inverse)
        return _moved(x_X, place)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        place, inverse = ctx.saved_tensors
        back = _moved(gradient.flatten(0, place.dim() - 1), inverse)
        return back.flatten(0, inverse.dim() - 1), None, None


def _moved(x_X: Tensor, place: Tensor) -> Tensor:
    rows = x_X.index_select(0, place.clamp(min=0).flatten()).unflatten(0, place.shape)
    return rows * (place >= 0)[(..., *[None] * (x_X.dim() - 1))]


AttentionInterface.register(VARLEN, varlen_attention)
AttentionMaskInterface.register(VARLEN, sdpa_mask)
AttentionInterface.register(PLAIN, plain)
AttentionMaskInterface.register(PLAIN, eager_mask)


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
    """Makes the model attend by matrix products and a softmax in float32.

    For trainings on a CPU in bfloat16. Forward and backward it takes a quarter of the time of torch's flash
    kernel at 64 tokens and half of it at 512, and keeps 6 H L² bytes per layer and sequence for that: the
    weights in both precisions.
    """
    for part in model.modules():  # an encoder that reads context has two
        if isinstance(part, PreTrainedModel):
            part.set_attn_implementation(PLAIN)


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


def _decoder(model: nn.Module) -> PreTrainedModel:
    """The outermost Transformer: DDP hides it, and so does an encoder that reads context."""
    return next(m for m in model.modules() if isinstance(m, PreTrainedModel))


def _supported(model: nn.Module) -> bool:
    """Attention "sdpa" over all tokens, from transformers' registry, with rotary positions, no dropout."""
    decoder = _decoder(model)
    config = decoder.config
    return (
        config._attn_implementation in ("sdpa", VARLEN, PLAIN)
        and decoder._supports_attention_backend
        and bool(getattr(config, "rope_parameters", None))  # positions are counted anew in each sequence
        and getattr(config, "sliding_window", None) is None
        and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        and not any(getattr(config, f"attention_{name}", 0) for name in ("dropout", "probs_dropout_prob"))
    )
