"""Diffusion, next-token and answer losses: formula, weights, masking, memory-saving chunks, peers."""

import naive_losses
import pytest
import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from closeness import assert_close
from unmask.losses import answer_loss, diffusion_loss, next_token_loss
from unmask.losses import pretraining as diffusion

PADDINGS = {
    "none": None,
    "right": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]),
    "left": torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 1]]),
}


def problem(b=3, length=5, d=4, v=7, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    hidden_BLD = torch.randn(b, length, d, generator=generator, dtype=dtype)
    unembedding_VD = torch.randn(v, d, generator=generator, dtype=dtype)
    tokens_BL = torch.randint(v, (b, length), generator=generator)
    t_B = torch.rand(b, generator=generator, dtype=torch.float64) * 0.9 + 0.1
    masked_BL = torch.rand(b, length, generator=generator) < t_B[:, None]
    return hidden_BLD, unembedding_VD, tokens_BL, masked_BL, t_B


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("paid", [True, False])  # of the first token there is no prediction
def test_diffusion_loss_is_the_formula_and_has_a_graph(padding, seed, paid):
    hidden, unembedding, tokens, masked, t = problem(seed=seed)
    arguments = hidden.requires_grad_(), unembedding, tokens, masked & paid | (torch.arange(5) == 0), t
    every = torch.ones(3, 5) if PADDINGS[padding] is None else PADDINGS[padding]
    expected = naive_losses.diffusion(*(x.tolist() for x in arguments), every.tolist())
    (loss := diffusion_loss(*arguments, PADDINGS[padding])).backward()
    assert loss.item() == pytest.approx(expected, rel=1e-10)
    assert hidden.grad.any() == paid


def test_next_token_loss_equals_transformers():
    hidden, unembedding, tokens, _, _ = problem(seed=6, dtype=torch.float32)
    peer = ForCausalLMLoss(hidden @ unembedding.T, tokens, vocab_size=len(unembedding))
    assert_close(next_token_loss(hidden, unembedding, tokens), peer)


@pytest.mark.parametrize("sizes", [(4, 2), (6, 4), (1000, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 17])
def test_loss_and_gradient_in_one_pass_are_those_of_cross_entropy(rows, dtype, sizes):
    generator = torch.Generator().manual_seed(16)
    hidden, unembedding = (torch.randn(n, 6, generator=generator, dtype=dtype) for n in (rows, 11))
    targets, weights = torch.arange(rows) % 11, torch.rand(rows, generator=generator)
    inputs = [hidden.requires_grad_(), unembedding.requires_grad_()]
    nats = torch.nn.functional.cross_entropy((hidden @ unembedding.T).float(), targets, reduction="none")
    ours = diffusion._WeightedNats.apply(*inputs, targets, weights, sizes, True)
    plain = (weights * nats).sum()
    rel = 2e-2 if dtype == torch.bfloat16 else 1e-5
    assert ours.dtype == torch.float32
    assert_close(ours, plain, rel)
    expected = torch.autograd.grad(plain, inputs)
    for a, b in zip(torch.autograd.grad(ours, inputs), expected):
        assert_close(a, b, rel)
    frozen = diffusion._WeightedNats.apply(inputs[0], unembedding.detach(), targets, weights, sizes, True)
    assert torch.equal(frozen, ours)
    assert_close(torch.autograd.grad(frozen, inputs[0])[0], expected[0], rel)


def test_bad_arguments_are_refused():
    hidden, unembedding, tokens, masked, t = problem(seed=15)
    with pytest.raises(ValueError, match=r"t must lie in \(0, 1\]"):
        diffusion_loss(hidden, unembedding, tokens, masked, torch.zeros(3))
    with pytest.raises(ValueError, match=r"masked_BL must have the shape \(3, 5\); got \(3, 4\)"):
        diffusion_loss(hidden, unembedding, tokens, masked[:, 1:], t)
    with pytest.raises(ValueError, match=r"answer_B must have the shape \(3\)"):
        answer_loss(hidden, unembedding, torch.zeros(3, dtype=int), torch.zeros(4, dtype=int))
    with pytest.raises(ValueError, match="hidden_BLD has no rows"):
        answer_loss(hidden[:0], unembedding, torch.zeros(0, dtype=int), torch.zeros(0, dtype=int))
    with pytest.raises(ValueError, match="No position is predictable"):
        next_token_loss(hidden[:, :1], unembedding, tokens[:, :1])


def test_answer_loss_is_the_formula_and_adds_up_over_micro_batches():
    hidden, unembedding, *_ = problem(b=5, length=7, v=9)
    last, answer = torch.tensor([6, 0, 3, 3, 5]), torch.tensor([8, 2, 2, 8, 2])
    values = hidden.requires_grad_(), unembedding, last, answer
    loss = answer_loss(*values)
    assert loss.item() == pytest.approx(naive_losses.answer(*(x.tolist() for x in values)))
    cut = slice(2), slice(2, 5)
    parts = [answer_loss(hidden[p], unembedding, last[p], answer[p], normalizer=5) for p in cut]
    assert sum(parts).item() == pytest.approx(loss.item())
    loss.backward()  # only the last token of each prompt pays
    paid = (hidden.grad.abs().sum(-1) > 0).nonzero().tolist()
    assert paid == [[b, place] for b, place in enumerate(last.tolist())]
