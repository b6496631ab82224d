"""The loss of Qwen3-Embedding: against a naive loop, a peer library, finite differences and frozen values."""

import math
from itertools import pairwise

import naive_losses
import pytest
import torch
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

from unmask.losses import contrastive, qwen3_loss
from unmask.models.quantize import int8


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def batch(n: int, k: int, d: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pairs close enough that positives, true negatives and false ones (beyond the margin) all occur."""
    q_ND = randn(n, d, seed=seed)
    return q_ND, 0.5 * q_ND + randn(n, d, seed=seed + 1), randn(n, k, d, seed=seed + 2)


def texts(n: int, k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of documents of which some are equal, within and across the two kinds."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(n, (n,), generator=draw), torch.randint(n, (n, k), generator=draw)


def naive(q, d, hard, temperature, margin, document, hard_document) -> float:
    arguments = (x.tolist() for x in (q, d, hard))
    return naive_losses.qwen3(*arguments, temperature, margin, document.tolist(), hard_document.tolist())


@pytest.mark.parametrize(("n", "k", "d", "seed"), [(1, 2, 3, 0), (2, 1, 3, 1), (9, 3, 4, 2), (16, 0, 8, 3)])
@pytest.mark.parametrize(("temperature", "margin"), [(0.02, 0.1), (1.0, 0.0), (0.05, math.inf)])
def test_it_is_the_formula(n, k, d, seed, temperature, margin):
    inputs = batch(n, k, d, seed)
    document_N, hard_document_NK = texts(n, k, seed)
    found = qwen3_loss(
        *inputs, temperature=temperature, margin=margin,
        document_N=document_N, hard_document_NK=hard_document_NK,
    )  # fmt: skip
    expected = naive(*inputs, temperature, margin, document_N, hard_document_NK)
    assert found.item() == pytest.approx(expected, rel=1e-10, abs=1e-12)


def test_without_numbers_all_documents_differ():
    inputs = batch(7, 2, 4, 5)
    expected = naive(*inputs, 0.02, 0.1, torch.arange(7), torch.arange(7, 21).reshape(7, 2))
    assert qwen3_loss(*inputs).item() == pytest.approx(expected, rel=1e-10)


def test_each_kind_of_negative_counts_and_each_mask_masks():
    q, d, hard = batch(12, 2, 4, 6)
    document_N, hard_document_NK = texts(12, 2, 6)
    values = [
        qwen3_loss(q, d, temperature=0.2, margin=math.inf),
        qwen3_loss(q, d, hard, temperature=0.2, margin=math.inf),
        qwen3_loss(q, d, hard, temperature=0.2),
        qwen3_loss(q, d, hard, temperature=0.2, document_N=document_N),
        qwen3_loss(q, d, hard, temperature=0.2, document_N=document_N, hard_document_NK=hard_document_NK),
    ]
    assert values[0] < values[1] > values[2] > values[3] > values[4]
    assert qwen3_loss(q, d) == qwen3_loss(q, d, hard[:, :0])


def test_what_a_surrogate_calls_no_negative_is_left_out():
    """Like a document that is the positive once more, but pair by pair."""
    q, d, hard = batch(8, 2, 4, 7)
    document_N = torch.tensor([0, 1, 2, 0, 4, 1, 6, 0])
    negatives_NN = document_N[:, None] != document_N
    torch.testing.assert_close(
        qwen3_loss(q, d, hard, negatives_NN=negatives_NN), qwen3_loss(q, d, hard, document_N=document_N)
    )


def test_without_masks_and_hard_negatives_it_equals_sentence_transformers():
    q, d = (x.requires_grad_() for x in batch(12, 0, 6, 8)[:2])
    peer = MultipleNegativesRankingLoss(
        torch.nn.Sequential(torch.nn.Identity()), scale=50,
        directions=("query_to_doc", "query_to_query", "doc_to_doc"), partition_mode="joint",
    )  # fmt: skip
    ours = qwen3_loss(q, d, temperature=0.02, margin=math.inf)
    theirs = peer.compute_loss_from_embeddings([q, d], labels=None)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=0)
    for a, b in zip(torch.autograd.grad(ours, [q, d]), torch.autograd.grad(theirs, [q, d])):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-12)


def test_gradients_by_finite_differences():
    inputs = [x.requires_grad_() for x in batch(5, 2, 4, 9)]
    document_N, hard_document_NK = texts(5, 2, 9)
    numbers = {"document_N": document_N, "hard_document_NK": hard_document_NK}
    assert torch.autograd.gradcheck(lambda *x: qwen3_loss(*x, temperature=0.2, **numbers), inputs)
    assert torch.autograd.gradcheck(lambda *x: qwen3_loss(*x, temperature=0.2), inputs[:2])


def test_what_is_masked_gets_no_gradient():
    q, d, hard = (x.requires_grad_() for x in batch(4, 2, 3, 10))
    hard_document_NK = torch.tensor([[0, 9], [9, 9], [9, 2], [9, 9]])
    loss = qwen3_loss(
        q, d, hard, margin=math.inf, document_N=torch.arange(4), hard_document_NK=hard_document_NK
    )
    (gradient,) = torch.autograd.grad(loss, hard)
    assert (gradient.norm(dim=-1) == 0).equal(hard_document_NK != 9)


def loss_and_gradients(inputs, slices=(None,), **options):
    inputs = [x.clone().requires_grad_() for x in inputs]
    value = sum(qwen3_loss(*inputs, queries=part, **options) for part in slices)
    return [value.detach(), *torch.autograd.grad(value, inputs)]


@pytest.mark.parametrize("bounds", [(0, 4, 8, 11), (0, 1, 1, 10, 11), (0, 0, 11)])
@pytest.mark.parametrize("scores", [2**24, 100, 1])  # one tile, uneven ones, tiles of one query
def test_parts_and_tiles_change_neither_loss_nor_gradient(monkeypatch, bounds, scores):
    inputs = batch(11, 2, 6, 11)
    document_N, hard_document_NK = texts(11, 2, 11)
    numbers = {"document_N": document_N, "hard_document_NK": hard_document_NK}
    numbers |= {"negatives_NN": randn(11, 11, seed=12) > -1}
    whole = loss_and_gradients(inputs, **numbers)
    monkeypatch.setattr(contrastive, "TILE_SCORES", scores)
    parts = loss_and_gradients(inputs, [slice(a, b) for a, b in pairwise(bounds)], **numbers)
    for part, expected in zip(parts, whole):
        torch.testing.assert_close(part, expected, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_inputs_are_computed_in_float32(autocast):
    codes = [int8(x) for x in batch(8, 2, 16, 13)]  # codes up to 127 are exact in bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        found = qwen3_loss(*(x.bfloat16() for x in codes))
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(qwen3_loss(*codes).item(), rel=1e-5)


def test_golden_value():
    """Frozen on first writing: a refactoring must not change it."""
    q_ND, d_ND = torch.arange(12.0).reshape(4, 3).sin(), torch.arange(12.0).reshape(4, 3).cos()
    hard_NKD = torch.arange(24.0).reshape(4, 2, 3).sin().flip(0)
    assert qwen3_loss(q_ND, d_ND, hard_NKD, temperature=0.5).item() == pytest.approx(1.198409, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d_ND": torch.ones(2, 2)}, r"one document embedding per query.*\(3, 2\).*\(2, 2\)"),
        ({"hard_NKD": torch.ones(3, 2)}, r"must be \(N, K, D\)"),
        ({"hard_NKD": torch.ones(2, 1, 2)}, r"must be \(N, K, D\)"),
        ({"temperature": 0}, "temperature must be above 0"),
        ({"margin": -0.1}, "margin must be 0 or more"),
        ({"hard_document_NK": torch.ones(3, 0)}, "need those of documents"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        qwen3_loss(**{"q_ND": torch.ones(3, 2), "d_ND": torch.ones(3, 2)} | options)
