"""Pair, triplet and Qwen3-Embedding's loss: against naive loops, a peer library and frozen values."""

import math

import naive_losses
import pytest
import torch
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

from closeness import assert_close
from unmask.losses import pair_loss, qwen3_loss, triplet_loss
from unmask.losses.contrastive import cosine


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def batch(n, k, d, seed):
    """Pairs close enough that positives, true negatives and false ones (beyond the margin) all occur."""
    q_ND = randn(n, d, seed=seed)
    return q_ND, 0.5 * q_ND + randn(n, d, seed=seed + 1), randn(n, k, d, seed=seed + 2)


def texts(n, k, seed):
    """Numbers of queries, documents and hard negatives, of which some are equal, within and across the three
    kinds, and some negatives are none."""
    numbers = torch.randint(n, (2 * n + n * k,), generator=torch.Generator().manual_seed(seed))
    numbers[2 * n :: 3] = -1
    return numbers


@pytest.mark.parametrize("shape", [(2, 1, 3, 0), (5, 3, 2, 1), (9, 2, 4, 2), (16, 0, 8, 3)])  # N, K, D, seed
@pytest.mark.parametrize(("temperature", "margin"), [(0.02, 0.1), (1.0, 0.0), (0.05, math.inf)])
def test_the_losses_are_the_formulas(shape, temperature, margin):
    n, k, _, seed = shape
    q_ND, d_ND, hard_NKD = batch(*shape)
    q, d, hard = (x.tolist() for x in (q_ND, d_ND, hard_NKD))
    settings = {"temperature": temperature, "margin": margin}
    expected = naive_losses.pair(q, d, temperature, margin)
    assert pair_loss(q_ND, d_ND, **settings).item() == pytest.approx(expected, rel=1e-10)
    expected = naive_losses.triplet(q, d, hard, temperature)
    found = triplet_loss(q_ND, d_ND, hard_NKD, temperature=temperature)
    assert found.item() == pytest.approx(expected, rel=1e-10)
    found = pair_loss(q_ND, d_ND, temperature=temperature, margin=math.inf, query_query=False)
    expected = naive_losses.triplet(q, d, [[] for _ in q], temperature)
    assert found.item() == pytest.approx(expected, rel=1e-10, abs=1e-12)
    number_R = texts(n, k, seed)
    numbers = *number_R[: 2 * n].view(2, n).tolist(), number_R[2 * n :].view(n, k).tolist()
    expected = naive_losses.qwen3(q, d, hard, temperature, margin, *numbers)
    found = qwen3_loss(q_ND, d_ND, hard_NKD, **settings, text_ids_R=number_R)
    assert found.item() == pytest.approx(expected, rel=1e-10, abs=1e-12)
    expected = naive_losses.triplet(q, d, hard, temperature, *numbers)
    found = triplet_loss(q_ND, d_ND, hard_NKD, temperature=temperature, text_ids_R=number_R)
    assert found.item() == pytest.approx(expected, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("diagonal", [False, True])
def test_what_is_known_to_be_no_negative_is_left_out(share, diagonal):
    """Documents and the queries of their pairs; of a query's own pair the mask says nothing."""
    q_ND, d_ND, _ = batch(9, 2, 4, 2)
    negatives_NN = torch.rand(9, 9, generator=torch.Generator().manual_seed(5)) >= share
    negatives_NN.fill_diagonal_(diagonal)
    q, d, negatives = (x.tolist() for x in (q_ND, d_ND, negatives_NN))
    found = pair_loss(q_ND, d_ND, temperature=0.05, negative_mask_NN=negatives_NN)
    expected = naive_losses.pair(q, d, 0.05, 0.1, negatives)
    assert found.item() == pytest.approx(expected, rel=1e-10, abs=1e-12)


PAIR = {"scale": 50, "directions": ("query_to_doc", "query_to_query")}
QWEN3 = PAIR | {"directions": (*PAIR["directions"], "doc_to_doc"), "partition_mode": "joint"}
PEERS = {
    "pair": (lambda q, d, hard: pair_loss(q, d, margin=math.inf), PAIR),
    "triplet": (triplet_loss, {"scale": 1 / 0.03}),
    "qwen3": (lambda q, d, hard: qwen3_loss(q, d, hard[:, :0], margin=math.inf), QWEN3),
}


@pytest.mark.parametrize("name", PEERS)
def test_without_masks_they_equal_sentence_transformers(name):
    """The cached one: tests/benchmarks."""
    loss, options = PEERS[name]
    inputs = [x.requires_grad_() for x in batch(12, 3, 6, 5)]
    columns = [*inputs[:2], *(inputs[2].unbind(1) if name == "triplet" else [])]
    peer = MultipleNegativesRankingLoss(torch.nn.Sequential(torch.nn.Identity()), **options)  # is not called
    ours, theirs = loss(*inputs), peer.compute_loss_from_embeddings(columns, labels=None)
    assert_close(ours, theirs, 1e-9)
    gradients = (torch.autograd.grad(x, inputs, materialize_grads=True) for x in (ours, theirs))
    for a, b in zip(*gradients):
        assert_close(a, b, 1e-8)


def test_a_zero_embedding_is_like_nothing_and_gets_no_gradient():
    q_ND, d_ND, _ = batch(4, 0, 3, 24)
    d_ND[2] = 0
    d_ND.requires_grad_()
    (loss := pair_loss(q_ND, d_ND)).backward()
    assert loss.isfinite() and d_ND.grad.isfinite().all() and d_ND.grad[2].eq(0).all()
    assert cosine(d_ND, q_ND)[2].eq(0).all()


TWO, HARD = torch.ones(2, 2), torch.ones(2, 1, 2)


REFUSED = {
    r"d_ND must have the shape \(3, 2\); got \(2, 2\)": lambda: pair_loss(torch.ones(3, 2), TWO),
    "d_ND must be a tensor; got list": lambda: pair_loss(TWO, TWO.tolist()),
    "at least two pairs": lambda: pair_loss(TWO[:1], TWO[:1]),
    "^q_ND has no rows": lambda: pair_loss(TWO[:0], TWO[:0]),
    "q_ND has no rows: a loss": lambda: triplet_loss(TWO[:0], TWO[:0], HARD[:0]),
    "q_ND has no rows: a loss is a mean": lambda: qwen3_loss(TWO[:0], TWO[:0], HARD[:0]),
    "temperature must be above 0": lambda: pair_loss(TWO, TWO, temperature=0),
    "above 0, and finite": lambda: pair_loss(TWO, TWO, temperature=math.inf),
    "a slice without a step": lambda: pair_loss(TWO, TWO, queries=slice(0, 2, 2)),
    "margin must be 0 or more": lambda: pair_loss(TWO, TWO, margin=-0.1),
    r"hard_NKD must have the shape \(2, K, 2\)": lambda: triplet_loss(TWO, TWO, torch.ones(3, 1, 2)),
    r"text_ids_R must have the shape \(6\)": lambda: triplet_loss(TWO, TWO, HARD, text_ids_R=torch.arange(2)),
}


@pytest.mark.parametrize(("message", "call"), REFUSED.items())
def test_bad_arguments_are_refused(message, call):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_an_embedding_that_is_no_number_makes_the_loss_none():
    bad = torch.tensor([[1.0, 0.0], [0.0, 1.0], [math.nan, 0.0]])
    assert pair_loss(torch.eye(3)[:, :2] + 1, bad).isnan()
