import naive_losses
import pytest
import torch

from unmask.losses import answer_loss


def batch(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden_BLD = torch.randn(5, 7, 4, generator=generator, dtype=dtype).requires_grad_()
    unembedding_VD = torch.randn(9, 4, generator=generator, dtype=dtype).requires_grad_()
    return hidden_BLD, unembedding_VD, torch.tensor([6, 0, 3, 3, 5]), torch.tensor([8, 2, 2, 8, 2])


def test_answer_loss_is_the_formula():
    values = batch()
    assert answer_loss(*values).item() == pytest.approx(naive_losses.answer(*(x.tolist() for x in values)))


def test_only_the_last_token_of_each_prompt_pays():
    hidden_BLD, unembedding_VD, last_B, answer_B = batch()
    answer_loss(hidden_BLD, unembedding_VD, last_B, answer_B).backward()
    paid_BL = hidden_BLD.grad.abs().sum(-1) > 0
    assert paid_BL.nonzero().tolist() == [[b, place] for b, place in enumerate(last_B.tolist())]


def test_micro_batches_with_the_global_normalizer_add_up():
    hidden_BLD, unembedding_VD, last_B, answer_B = batch()
    parts = [
        answer_loss(hidden_BLD[part], unembedding_VD, last_B[part], answer_B[part], normalizer=5)
        for part in (slice(2), slice(2, 5))
    ]
    assert sum(parts).item() == pytest.approx(
        answer_loss(hidden_BLD, unembedding_VD, last_B, answer_B).item()
    )


def test_the_softmax_is_taken_in_single_precision_at_least():
    values = batch(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = answer_loss(*values)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(answer_loss(*values).item(), rel=0.02)


def test_shapes_that_do_not_fit_are_refused():
    hidden_BLD, unembedding_VD, last_B, answer_B = batch()
    with pytest.raises(ValueError, match=r"\(B, L, D\)"):
        answer_loss(hidden_BLD[0], unembedding_VD, last_B, answer_B)
    with pytest.raises(ValueError, match=r"one for each prompt; got \(4,\)"):
        answer_loss(hidden_BLD, unembedding_VD, last_B[1:], answer_B)
