"""Gradient caching against plain backpropagation; for every stage: test_stages.py."""

import pytest
import torch
from tiny_stages import assert_same, backpropagated

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
        loss = cached_backward(model, ITEMS, loss_of_rows, **options)
        results.append((float(loss), tiny.gradients(model)))
    plain, *others = results
    for cached in others:
        assert_same(cached, plain)


def test_dropout_is_replayed():
    model = tiny.model()
    model.config.attention_dropout = 0.5
    for layer in model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    torch.manual_seed(0)
    cached = float(cached_backward(model, ITEMS, loss_of_rows, token_budget=60)), tiny.gradients(model)
    # The same random numbers, with a graph all along.
    torch.manual_seed(0)
    groups = micro_batches([len(s) for s in ITEMS], 60)[::-1]
    rows = torch.cat([encode_rows(model, [ITEMS[i] for i in group]) for group in groups])
    order = torch.tensor([i for group in groups for i in group]).argsort()
    assert_same(cached, backpropagated(loss_of_rows(rows[order]), model))
