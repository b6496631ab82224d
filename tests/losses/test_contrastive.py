"""Pair and triplet losses: against naive loops, a peer library, finite differences and frozen values."""

import math
from functools import partial
from itertools import pairwise

import naive_losses
import pytest
import torch
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)

from unmask.losses import contrastive, pair_loss, triplet_loss
from unmask.losses.contrastive import cosine
from unmask.models.quantize import int8


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def aligned(n: int, d: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs close enough that positives, true negatives and false negatives (beyond the margin) all occur."""
    q_ND = randn(n, d, seed=seed)
    return q_ND, 0.5 * q_ND + randn(n, d, seed=seed + 1)


@pytest.mark.parametrize(("n", "d", "seed"), [(2, 3, 0), (5, 2, 1), (9, 4, 2), (16, 8, 3)])
@pytest.mark.parametrize(("temperature", "margin"), [(0.02, 0.1), (1.0, 0.0), (0.05, math.inf)])
def test_pair_loss_is_the_formula(n, d, seed, temperature, margin):
    q_ND, d_ND = aligned(n, d, seed)
    expected = naive_losses.pair(q_ND.tolist(), d_ND.tolist(), temperature, margin)
    assert pair_loss(q_ND, d_ND, temperature=temperature, margin=margin).item() == pytest.approx(
        expected, rel=1e-10
    )


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("diagonal", [False, True])
def test_what_is_known_to_be_no_negative_is_left_out(share, diagonal):
    """Documents and the queries of their pairs; of a query's own pair the mask says nothing."""
    q_ND, d_ND = aligned(9, 4, 2)
    hard_NKD = randn(9, 2, 4, seed=4)
    negatives_NN = torch.rand(9, 9, generator=torch.Generator().manual_seed(5)) >= share
    negatives_NN.fill_diagonal_(diagonal)
    lists = [x.tolist() for x in (q_ND, d_ND, hard_NKD)]
    pair = naive_losses.pair(*lists[:2], 0.05, 0.1, negatives_NN.tolist())
    triplet = naive_losses.triplet(*lists, 0.05, negatives_NN.tolist())
    found = pair_loss(q_ND, d_ND, temperature=0.05, negatives_NN=negatives_NN)
    assert found.item() == pytest.approx(pair, rel=1e-10)
    found = triplet_loss(q_ND, d_ND, hard_NKD, temperature=0.05, negatives_NN=negatives_NN)
    assert found.item() == pytest.approx(triplet, rel=1e-10)
    if share == 0:
        assert pair_loss(q_ND, d_ND, negatives_NN=negatives_NN) == pair_loss(q_ND, d_ND)
        assert triplet_loss(q_ND, d_ND, hard_NKD, negatives_NN=negatives_NN) == triplet_loss(
            q_ND, d_ND, hard_NKD
        )


def test_a_query_without_any_negative_has_no_loss_and_a_finite_gradient():
    q_ND, d_ND = (x.requires_grad_() for x in aligned(4, 3, 2))
    nothing_NN = torch.zeros(4, 4, dtype=torch.bool)
    loss = pair_loss(q_ND, d_ND, negatives_NN=nothing_NN)
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-9)
    assert torch.isfinite(q_ND.grad).all() and d_ND.grad.abs().max() < 1e-9


def test_margin_masks_in_these_batches():
    q_ND, d_ND = aligned(16, 8, 3)
    assert pair_loss(q_ND, d_ND) < pair_loss(q_ND, d_ND, margin=math.inf)


@pytest.mark.parametrize("loss_class", [MultipleNegativesRankingLoss, CachedMultipleNegativesRankingLoss])
def test_unmasked_pair_loss_equals_sentence_transformers(loss_class):
    q_ND, d_ND = (x.requires_grad_() for x in aligned(12, 6, 5))
    peer = peer_loss(loss_class, temperature=0.02, directions=("query_to_doc", "query_to_query"))
    ours = pair_loss(q_ND, d_ND, temperature=0.02, margin=math.inf)
    theirs = peer([q_ND, d_ND])
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=0)
    for a, b in zip(torch.autograd.grad(ours, [q_ND, d_ND]), torch.autograd.grad(theirs, [q_ND, d_ND])):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-12)


def peer_loss(loss_class, temperature: float, directions: tuple[str, ...]):
    """sentence-transformers' loss as a function of embeddings: it never calls this model."""
    model = torch.nn.Sequential(torch.nn.Identity())
    loss = loss_class(model, scale=1 / temperature, directions=directions)
    if loss_class is CachedMultipleNegativesRankingLoss:
        return lambda columns: loss.calculate_loss([[column] for column in columns])
    return lambda columns: loss.compute_loss_from_embeddings(columns, labels=None)


@pytest.mark.parametrize(("n", "k", "d", "seed"), [(1, 2, 3, 0), (4, 3, 5, 1), (9, 1, 4, 2), (5, 0, 3, 3)])
@pytest.mark.parametrize("temperature", [0.03, 1.0])
def test_triplet_loss_is_the_formula(n, k, d, seed, temperature):
    q_ND, d_ND = aligned(n, d, seed)
    hard_NKD = randn(n, k, d, seed=seed + 2)
    expected = naive_losses.triplet(q_ND.tolist(), d_ND.tolist(), hard_NKD.tolist(), temperature)
    assert triplet_loss(q_ND, d_ND, hard_NKD, temperature=temperature).item() == pytest.approx(
        expected, rel=1e-10
    )


@pytest.mark.parametrize("loss_class", [MultipleNegativesRankingLoss, CachedMultipleNegativesRankingLoss])
def test_triplet_loss_equals_sentence_transformers(loss_class):
    q_ND, d_ND = (x.requires_grad_() for x in aligned(7, 5, 8))
    hard_NKD = randn(7, 3, 5, seed=9).requires_grad_()
    ours = triplet_loss(q_ND, d_ND, hard_NKD)
    theirs = peer_loss(loss_class, 0.03, ("query_to_doc",))([q_ND, d_ND, *hard_NKD.unbind(1)])
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=0)
    inputs = [q_ND, d_ND, hard_NKD]
    for a, b in zip(torch.autograd.grad(ours, inputs), torch.autograd.grad(theirs, inputs)):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-12)


def test_gradients_by_finite_differences():
    q_ND, d_ND = (x.requires_grad_() for x in aligned(5, 4, 11))
    hard_NKD = randn(5, 2, 4, seed=13).requires_grad_()
    assert torch.autograd.gradcheck(lambda q, d: pair_loss(q, d, temperature=0.2), (q_ND, d_ND))
    assert torch.autograd.gradcheck(lambda *x: triplet_loss(*x, temperature=0.2), (q_ND, d_ND, hard_NKD))


def test_a_masked_false_negative_has_no_say():
    q_ND = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    d_ND = torch.tensor([[0.5, 1.0, 0.0], [1.0, 0.1, 0.0]])  # d_1 is far closer to q_0 than d_0 is
    moved = torch.tensor([[0.5, 1.0, 0.0], [1.0, 0.2, 0.0]])  # still is, and as far from q_1 as before
    assert pair_loss(q_ND, d_ND) == pair_loss(q_ND, moved)
    assert (
        pair_loss(q_ND, d_ND, margin=math.inf)
        > pair_loss(q_ND, moved, margin=math.inf)
        > pair_loss(q_ND, moved)
    )


def test_scale_of_the_embeddings_does_not_matter():
    q_ND, d_ND = aligned(6, 4, 20)
    torch.testing.assert_close(pair_loss(q_ND, d_ND), pair_loss(100 * q_ND, 1e-3 * d_ND))


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_inputs_are_computed_in_float32(autocast):
    codes_q, codes_d = (int8(x) for x in aligned(8, 16, 21))  # codes up to 127 are exact in bfloat16
    hard_NKD = int8(randn(8, 2, 16, seed=23))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        pair = pair_loss(codes_q.bfloat16(), codes_d.bfloat16())
        triplet = triplet_loss(codes_q.bfloat16(), codes_d.bfloat16(), hard_NKD.bfloat16())
    assert pair.dtype == triplet.dtype == torch.float32
    assert pair.item() == pytest.approx(pair_loss(codes_q, codes_d).item(), rel=1e-5)
    assert triplet.item() == pytest.approx(triplet_loss(codes_q, codes_d, hard_NKD).item(), rel=1e-5)


def loss_and_gradients(loss, inputs):
    inputs = [x.clone().requires_grad_() for x in inputs]
    value = loss(*inputs)
    return [value.detach(), *torch.autograd.grad(value, inputs)]


def in_parts(loss, bounds):
    """The sum of the loss over a partition of the queries, as several processes compute it."""
    return lambda *x: sum(loss(*x, queries=slice(a, b)) for a, b in pairwise(bounds))


NEGATIVES_NN = torch.rand(11, 11, generator=torch.Generator().manual_seed(29)) > 0.3
LOSSES = {
    "filtered": (partial(pair_loss, negatives_NN=NEGATIVES_NN), lambda: [*aligned(11, 6, 30)]),
    "pair": (pair_loss, lambda: [*aligned(11, 6, 30)]),
    "triplet": (triplet_loss, lambda: [*aligned(11, 6, 31), randn(11, 2, 6, seed=33)]),
}


@pytest.mark.parametrize("bounds", [(0, 4, 8, 11), (0, 1, 1, 10, 11), (0, 0, 11)])
@pytest.mark.parametrize("name", LOSSES)
def test_the_parts_of_a_partition_add_up(name, bounds):
    loss, inputs = LOSSES[name]
    for whole, parts in zip(
        loss_and_gradients(loss, inputs()), loss_and_gradients(in_parts(loss, bounds), inputs())
    ):
        torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", LOSSES)
def test_no_queries_are_zero_with_a_graph(name):
    loss, inputs = LOSSES[name]
    value, *gradients = loss_and_gradients(lambda *x: loss(*x, queries=slice(5, 5)), inputs())
    assert value == 0 and all(gradient.eq(0).all() for gradient in gradients)


@pytest.mark.parametrize("scores", [1, 80, 100])  # tiles of one query; uneven tiles; one tile for the smaller
@pytest.mark.parametrize("queries", [None, slice(2, 9)])
@pytest.mark.parametrize("name", LOSSES)
def test_tiles_change_neither_loss_nor_gradient(monkeypatch, name, queries, scores):
    loss, inputs = LOSSES[name]
    whole = loss_and_gradients(lambda *x: loss(*x, queries=queries), inputs())
    monkeypatch.setattr(contrastive, "TILE_SCORES", scores)
    for tiled, expected in zip(loss_and_gradients(lambda *x: loss(*x, queries=queries), inputs()), whole):
        torch.testing.assert_close(tiled, expected, rtol=1e-12, atol=1e-14)


def test_tiles_are_the_formula(monkeypatch):
    monkeypatch.setattr(contrastive, "TILE_SCORES", 40)
    (q, d), hard = aligned(9, 4, 34), randn(9, 2, 4, seed=36)
    pair = naive_losses.pair(q.tolist(), d.tolist(), 0.05, 0.1)
    triplet = naive_losses.triplet(q.tolist(), d.tolist(), hard.tolist(), 0.05)
    assert pair_loss(q, d, temperature=0.05).item() == pytest.approx(pair, rel=1e-10)
    assert triplet_loss(q, d, hard, temperature=0.05).item() == pytest.approx(triplet, rel=1e-10)


def test_tiles_keep_no_similarities_for_the_backward_pass(monkeypatch):
    monkeypatch.setattr(contrastive, "TILE_SCORES", 2 * 64 * 8)
    q, d = (x.requires_grad_() for x in aligned(64, 4, 37))
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        pair_loss(q, d)
    assert max(sizes, default=0) <= q.numel()


def test_a_zero_embedding_is_harmless():
    q_ND, d_ND = (x.float() for x in aligned(4, 3, 24))
    d_ND[2] = 0
    d_ND.requires_grad_()
    loss = pair_loss(q_ND, d_ND)
    loss.backward()
    assert loss.isfinite() and d_ND.grad.isfinite().all() and d_ND.grad[2].eq(0).all()
    assert cosine(d_ND, q_ND)[2].eq(0).all()


def test_gradient_passes_through_the_quantiser():
    q_ND, d_ND = (x.requires_grad_() for x in aligned(4, 6, 25))
    loss = pair_loss(int8(q_ND), int8(d_ND), temperature=0.2)
    through = torch.autograd.grad(loss, q_ND)[0]
    codes_q = int8(q_ND).detach().requires_grad_()
    at_codes = torch.autograd.grad(pair_loss(codes_q, int8(d_ND).detach(), temperature=0.2), codes_q)[0]
    torch.testing.assert_close(through, at_codes * 127 * (1 - torch.tanh(q_ND.detach()) ** 2))


def test_golden_values():
    """Frozen on first writing: a refactoring must not change them."""
    q_ND, d_ND = torch.arange(12.0).reshape(4, 3).sin(), torch.arange(12.0).reshape(4, 3).cos()
    hard_NKD = torch.arange(24.0).reshape(4, 2, 3).sin().flip(0)
    assert pair_loss(q_ND, d_ND).item() == pytest.approx(1.384914, rel=1e-5)
    assert triplet_loss(q_ND, d_ND, hard_NKD).item() == pytest.approx(31.889668, rel=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: pair_loss(torch.ones(3, 2), torch.ones(2, 2)),
            r"one document embedding per query.*\(3, 2\).*\(2, 2\)",
        ),
        (lambda: pair_loss(torch.ones(1, 2), torch.ones(1, 2)), "at least two pairs"),
        (lambda: pair_loss(torch.ones(2, 2), torch.ones(2, 2), temperature=0), "temperature must be above 0"),
        (lambda: pair_loss(torch.ones(2, 2), torch.ones(2, 2), margin=-0.1), "margin must be 0 or more"),
        (
            lambda: pair_loss(torch.ones(2, 2), torch.ones(2, 2), negatives_NN=torch.ones(2, 2)),
            r"booleans of shape \(2, 2\); got torch.float32 of \(2, 2\)",
        ),
        (
            lambda: pair_loss(torch.ones(2, 2), torch.ones(2, 2), queries=slice(0, 2, 2)),
            "queries must be a slice without a step",
        ),
        (lambda: triplet_loss(torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 2)), r"must be \(N, K, D\)"),
        (
            lambda: triplet_loss(torch.ones(2, 2), torch.ones(2, 2), torch.ones(3, 1, 2)),
            r"must be \(N, K, D\)",
        ),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
