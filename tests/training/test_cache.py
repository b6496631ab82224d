"""Gradient caching of a model with dropout; for every stage: test_stages.py."""

import tiny_stages
import torch

import tiny
from unmask.losses import pair_loss
from unmask.models.encoding import TokenSequence, encode_rows, micro_batches
from unmask.models.quantize import int8
from unmask.training.cache import cached_backward


def loss_of_rows(rows_RD):
    return pair_loss(int8(rows_RD[:10]), int8(rows_RD[10:]))


def test_dropout_is_replayed():
    model = tiny.model()
    model.config.attention_dropout = 0.5
    for layer in model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    items = [TokenSequence(tokens_L) for tokens_L in tiny.sequences(20, seed=7)]
    torch.manual_seed(0)
    cached = float(cached_backward(model, items, loss_of_rows, token_budget=60)), tiny.gradients(model)
    # The same random numbers, with a graph all along.
    torch.manual_seed(0)
    groups = micro_batches([len(s) for s in items], 60)[::-1]
    rows = torch.cat([encode_rows(model, [items[i] for i in group]) for group in groups])
    order = torch.tensor([i for group in groups for i in group]).argsort()
    tiny_stages.assert_same(cached, tiny_stages.backpropagated(loss_of_rows(rows[order]), model))
