"""The bfloat16 copy of a model, which runs in its place on a GPU."""

import pytest
import tiny_stages
import torch

import tiny
from unmask.training.distributed import ALONE, Distributed, low_precision_copy, refresh

HALF = Distributed(half=True)


@pytest.mark.parametrize("name", ["ar", "diffusion", "pair", "contextual", "triplet", "cde", "reranker"])
def test_a_low_precision_copy_gives_the_gradient_in_float32(name):
    """Within what bfloat16 rounds: no worse than autocast, which rounds weights in every pass."""
    stage, model = tiny_stages.stage(name), tiny_stages.model(name)
    batch, module = stage.batch(0), stage.module(model)
    expected = tiny_stages.step(stage, model, batch)
    model.zero_grad()
    stage.backward(module, batch, HALF)
    rounding = tiny_stages.difference(tiny.gradients(model), expected[1])
    copy = low_precision_copy(module)
    assert {p.dtype for p in copy.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in copy.buffers()} == {b.dtype for b in module.buffers()}
    model.zero_grad()
    row = stage.backward(copy, batch, HALF)
    assert all(p.grad is None for p in copy.parameters())
    found = tiny.gradients(model)
    assert {g.dtype for g in found.values()} == {torch.float32}
    # Of few queries at a temperature of 0.02, INT8 codes that tip over are felt.
    assert float(row["loss"]) == pytest.approx(expected[0], rel=6e-2)
    assert tiny_stages.difference(found, expected[1]) <= max(2e-2, rounding)


def test_gradients_of_micro_batches_add_up_in_float32():
    """A thousand small ones after a large one: in bfloat16 none would count."""
    module = torch.nn.Linear(1, 1, bias=False)
    copy = low_precision_copy(module)
    for size in (256.0, *[0.1] * 1000):
        copy(torch.full((1, 1), size).bfloat16()).sum().backward()
    assert float(module.weight.grad) == pytest.approx(256 + 100, rel=1e-2)


def test_a_refreshed_copy_has_the_rounded_weights():
    module = tiny.model()
    copy = low_precision_copy(module)
    torch._foreach_mul_([parameter.data for parameter in module.parameters()], 1.01)
    refresh(copy, module)
    for low, parameter in zip(copy.parameters(), module.parameters(), strict=True):
        assert torch.equal(low, parameter.bfloat16())
    refresh(module, module)  # one that has no copy
    assert ALONE.parallel(module) is module
