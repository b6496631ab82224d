"""INT8 and binary embeddings, and what they cost to store.

Shape suffixes: B embeddings · D dimensions.
"""

import numpy as np
import torch
from torch import Tensor

BITS = {"float32": 32, "int8": 8, "binary": 1, "ubinary": 1}
NO_BYTES = "Only a multiple of 8 dimensions packs into whole bytes"


def int8(mean_BD: Tensor) -> Tensor:
    """Quantise pooled vectors to whole numbers in −127..127, with a straight-through gradient.

        code = ⌊127 · tanh(mean) + 1/2⌋

    Halves are rounded up, as the formula says (`torch.round` would round them to even). The backward pass
    ignores the rounding: the gradient is that of 127 · tanh(mean).

    Args:
        mean_BD: pooled, unquantised embeddings of any shape.

    Returns:
        Codes of the same shape, exactly whole, as floats (float32 or better), ready for the losses. NaN
        stays NaN: a check would have a GPU wait in every step, and a training stops at the loss.

    Source: pplx-embed, section 2.2; used in all contrastive training and at inference.

    Example:
        >>> int8(torch.tensor([-9.0, -0.001, 0.0, 0.5, 9.0]))
        tensor([-127.,    0.,    0.,   59.,  127.])
    """
    if not mean_BD.is_floating_point():
        raise TypeError(f"INT8 codes are made of floats, not of {mean_BD.dtype}: are these codes already?")
    scaled = 127 * torch.tanh(mean_BD.to(torch.promote_types(mean_BD.dtype, torch.float32)))
    codes = torch.floor(scaled.detach() + 0.5)
    # The difference is exactly zero, so the value stays whole while the gradient of `scaled` flows.
    return codes + (scaled - scaled.detach())


def binary(mean_BD: Tensor) -> Tensor:
    """Sign of each entry: +1 where it is 0 or above, −1 below.

    Take it from the *unquantised* mean: −0.001 is −1 here, while its INT8 code is 0 and would become +1.
    It is applied after training and has no gradient.

    Raises: ValueError for NaN.

    Source: pplx-embed, section 2.2.

    Example:
        >>> binary(torch.tensor([-0.001, 0.0, 2.0]))
        tensor([-1.,  1.,  1.])
    """
    return torch.where(numbers(mean_BD) >= 0, 1, -1).to(mean_BD.dtype)


def pack_binary(mean_BD: Tensor) -> np.ndarray:
    """Binary embeddings as bits, eight to a byte, the first dimension in the most significant bit.

    Args:
        mean_BD: unquantised means, or the ±1 output of `binary`; the last axis a multiple of 8.

    Returns:
        uint8 array with D/8 bytes in the last axis. Equals sentence-transformers' "ubinary" of the same
        vectors, except that an entry of exactly 0 counts as +1, as in the paper.

    Raises:
        ValueError: D is not a multiple of 8, or NaN.

    Example:
        >>> pack_binary(torch.tensor([[1.0, -1.0, -1.0, -1.0, -1.0, -1.0, 1.0, 1.0]])).tolist()
        [[131]]
    """
    if mean_BD.shape[-1] % 8:
        raise ValueError(f"{NO_BYTES}; got {mean_BD.shape[-1]}; cut the embeddings first.")
    return np.packbits((numbers(mean_BD) >= 0).numpy(force=True), axis=-1)


def numbers(mean_BD: Tensor) -> Tensor:
    """The embeddings, unless NaN is among them: as a whole number or a bit it would look like any other."""
    if mean_BD.isnan().any():
        raise ValueError("embeddings with NaN have no codes: look for what computed it")
    return mean_BD


def bytes_per_embedding(dimensions: int, precision: str) -> int:
    """Bytes that one embedding takes: 4 per dimension as float32, 1 as int8, 1/8 as (packed) binary.

    Args:
        dimensions: D; for binary a multiple of 8.
        precision: "float32", "int8", "binary" or "ubinary".

    Raises:
        ValueError: an unknown precision, or dimensions that do not pack into whole bytes.

    Example:
        >>> [bytes_per_embedding(1024, precision) for precision in ("float32", "int8", "binary")]
        [4096, 1024, 128]
    """
    bits = dimensions * BITS[check_precision(precision)]
    if bits % 8 or bits < 8:
        raise ValueError(f"{NO_BYTES}; got {dimensions}; cut the embeddings first.")
    return bits // 8


def check_precision(precision: str) -> str:
    """The precision, unless it is unknown."""
    if precision not in BITS:
        raise ValueError(f"unknown precision {precision!r}: choose one of {', '.join(BITS)}")
    return precision


def documents_per_megabyte(dimensions: int, precision: str) -> int:
    """Whole embeddings that fit into 10⁶ bytes, the paper's storage measure (table 1).

    Arguments are those of `bytes_per_embedding`.

    Example:
        >>> documents_per_megabyte(1024, "int8"), documents_per_megabyte(2560, "binary")
        (976, 3125)
    """
    return 10**6 // bytes_per_embedding(dimensions, precision)
