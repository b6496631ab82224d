"""Quantisation: the paper's formulas exactly, the straight-through gradient, storage."""

import math

import numpy as np
import pytest
import torch

from unmask.models.embedder import quantized
from unmask.models.quantize import binary, bytes_per_embedding, int8, pack_binary

MEANS = 1.5 * torch.randn(200, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_int8_is_the_formula():
    expected = [[math.floor(127 * math.tanh(x) + 0.5) for x in row] for row in MEANS.tolist()]
    assert int8(MEANS).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_codes_are_exactly_whole_and_in_range(dtype):
    extremes = torch.tensor([-torch.inf, -50.0, 50.0, torch.inf, 0.0, -0.0])
    codes = int8(torch.cat([MEANS.flatten(), extremes]).to(dtype).requires_grad_())
    assert torch.equal(codes, codes.round()) and codes.abs().max() == 127
    assert codes.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_gradient_is_that_of_the_tanh():
    mean = MEANS[:3].clone().requires_grad_()
    weight = torch.randn(3, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    straight = torch.autograd.grad((weight * int8(mean)).sum(), mean)[0]
    smooth = torch.autograd.grad((weight * 127 * torch.tanh(mean)).sum(), mean)[0]
    assert torch.equal(straight, smooth) and straight.ne(0).any()


def test_binary_is_the_sign_of_the_unquantised_mean():
    assert binary(torch.tensor([-0.001, -0.0, 0.0, 3.0, -3.0])).tolist() == [-1, 1, 1, 1, -1]
    assert binary(MEANS.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("code", [binary, pack_binary, lambda x: quantized(x.numpy(), "int8")])
def test_nan_becomes_no_code(code):
    """In a training it stays NaN, and the loss is refused."""
    broken = MEANS.clone()
    broken[3, 5] = torch.nan
    assert int8(broken).isnan().sum() == 1
    with pytest.raises(ValueError, match="embeddings with NaN have no codes"):
        code(broken)


def test_codes_are_not_coded_again():
    with pytest.raises(TypeError, match="are these codes already"):
        int8(int8(MEANS).to(torch.int8))
    for dimensions in (0, -8):
        with pytest.raises(ValueError, match=f"whole bytes; got {dimensions}"):
            bytes_per_embedding(dimensions, "binary")


def test_packing_is_numpys_with_the_first_dimension_first_and_bytes_are_those_of_the_arrays():
    packed = pack_binary(MEANS)
    assert np.array_equal(packed, np.packbits(MEANS.numpy() >= 0, axis=-1))
    assert bytes_per_embedding(64, "binary") == packed[0].nbytes
    with pytest.raises(ValueError, match="Only a multiple of 8 dimensions packs into whole bytes; got 12"):
        bytes_per_embedding(12, "binary")
    with pytest.raises(ValueError, match="unknown precision 'float16': choose one of float32, int8"):
        bytes_per_embedding(64, "float16")
    assert bytes_per_embedding(64, "float32") == MEANS[0].float().numpy().nbytes
    assert np.array_equal(packed, pack_binary(binary(MEANS)))
    with pytest.raises(ValueError, match="multiple of 8"):
        pack_binary(MEANS[:, :60])
