"""Gradient caching against plain backpropagation; for every stage: test_stages.py."""

import pytest
import torch

import tiny
from unmask.losses import pair_loss
from unmask.models.encoding import TokenSequence, encode_rows, micro_batches
from unmask.models.quantize import int8
from unmask.training.cache import cached_backward

ITEMS = [TokenSequence(tokens_L) for tokens_L in tiny.sequences(20, seed=7)]


def loss_of_rows(rows_RD):
    return pair_loss(int8(rows_RD[:10]), int8(rows_RD[10:]))


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_cached_gradients_equal_plain_backpropagation(pooling):
    assert len(micro_batches([len(s) for s in ITEMS], 60)) > 2
    results = []
    for budget, keep in ((10**6, 0), (60, 0), (60, 150), (60, 10**6)):
        model, options = tiny.model(), {"token_budget": budget, "keep_tokens": keep, "pooling": pooling}
        results.append((cached_backward(model, ITEMS, loss_of_rows, **options), tiny.gradients(model)))
    (plain, expected), *others = results
    norm = torch.stack([g.norm() for g in expected.values()]).norm()
    for cached, found in others:
        torch.testing.assert_close(cached, plain, rtol=1e-5, atol=0)
        for name, gradient in expected.items():
            assert (found[name] - gradient).norm() <= 1e-5 * norm


def test_dropout_is_replayed():
    model = tiny.model()
    model.config.attention_dropout = 0.5
    for layer in model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    torch.manual_seed(0)
    first = cached_backward(model, ITEMS, loss_of_rows, token_budget=60)
    gradients = tiny.gradients(model)
    model.zero_grad()
    # The same random numbers, with a graph all along.
    torch.manual_seed(0)
    groups = micro_batches([len(s) for s in ITEMS], 60)[::-1]
    rows = torch.cat([encode_rows(model, [ITEMS[i] for i in group]) for group in groups])
    order = torch.tensor([i for group in groups for i in group]).argsort()
    loss = loss_of_rows(rows[order])
    loss.backward()
    torch.testing.assert_close(first, loss.detach())
    for name, gradient in tiny.gradients(model).items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-5, rtol=1e-4)
