import numpy as np
import pytest
import torch

import tiny
from unmask.data.documents import TokenDocument, contextual_batch, split_rows
from unmask.losses import contextual_loss, pair_loss, triplet_loss
from unmask.models.encoding import TokenSequence, encode_rows, micro_batches
from unmask.models.quantize import int8
from unmask.training import cache
from unmask.training.cache import cached_backward


def pair(rows):
    n = len(rows) // 2
    return pair_loss(int8(rows[:n]), int8(rows[n:]))


def triplet(rows):
    n = len(rows) // 5
    return triplet_loss(int8(rows[:n]), int8(rows[n : 2 * n]), int8(rows[2 * n :]).unflatten(0, (n, 3)))


def contextual(batch):
    def loss(rows):
        q, chunks, documents, mask = split_rows(int8(rows), batch)
        return contextual_loss(
            q, chunks, documents, batch.document_N, batch.gold_N, beta=0.3, chunk_mask_MC=mask
        )

    return loss


def case(name):
    if name == "contextual":
        documents = [
            TokenDocument(
                tiny.sequences(chunks, seed=chunks), tiny.sequences(2, seed=50 + chunks), [0, chunks - 1]
            )
            for chunks in (2, 5, 3, 4)
        ]
        batch = contextual_batch(
            documents, separator_id=0, queries_per_document=2, rng=np.random.default_rng(0)
        )
        return batch.sequences, contextual(batch)
    items = [TokenSequence(s) for s in tiny.sequences(20, seed=7)]
    return items, pair if name == "pair" else triplet


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("name", ["pair", "contextual", "triplet"])
def test_cached_gradients_equal_plain_backpropagation(name, pooling):
    if name == "contextual" and pooling == "last":
        pytest.skip("late chunking has no last-token pooling")
    items, loss_of_rows = case(name)
    results = []
    for budget, keep in ((10**6, 0), (60, 0), (60, 150), (60, 10**6)):
        model = tiny.model()
        loss = cached_backward(
            model, items, loss_of_rows, token_budget=budget, keep_tokens=keep, pooling=pooling
        )
        results.append((loss, tiny.gradients(model)))
    assert len(micro_batches([len(s) for s in items], 60)) > 2
    (plain, expected), *others = results
    norm = torch.stack([g.norm() for g in expected.values()]).norm()
    for cached, found in others:
        torch.testing.assert_close(cached, plain, rtol=1e-5, atol=0)
        for name_, gradient in expected.items():
            assert (found[name_] - gradient).norm() <= 1e-5 * norm


def test_what_is_kept_is_embedded_once(monkeypatch):
    items, loss_of_rows = case("pair")
    tokens, passes = sum(map(len, items)), []
    embed = cache.encode_rows
    monkeypatch.setattr(
        cache, "encode_rows", lambda *args, **kw: passes.append(len(args[1])) or embed(*args, **kw)
    )
    counts = []
    for keep in (0, tokens // 2, tokens):
        passes.clear()
        cached_backward(tiny.model(), items, loss_of_rows, token_budget=60, keep_tokens=keep)
        counts.append(len(passes))
    groups = len(micro_batches([len(s) for s in items], 60))
    assert counts[0] == 2 * groups - 1 > counts[1] > counts[2] == groups


@pytest.mark.parametrize("name", ["pair", "contextual"])
def test_a_process_without_a_sequence_takes_part_all_the_same(monkeypatch, name):
    """With fewer sequences than processes, a group is empty: it is run forward and adds nothing."""
    items, loss_of_rows = case(name)
    results = []
    for places in ((), (0,), (2, -1)):

        def with_empty_groups(*arguments, places=places, **options):
            groups = micro_batches(*arguments, **options)
            for place in places:
                groups.insert(place if place >= 0 else len(groups), np.array([], int))
            return groups

        monkeypatch.setattr(cache, "micro_batches", with_empty_groups)
        model = tiny.model()
        loss = cached_backward(model, items, loss_of_rows, token_budget=60)
        results.append((loss, tiny.gradients(model)))
    for loss, gradients in results[1:]:
        torch.testing.assert_close(loss, results[0][0])
        for key, gradient in results[0][1].items():
            torch.testing.assert_close(gradients[key], gradient)


def test_dropout_is_replayed():
    model = tiny.model()
    model.config.attention_dropout = 0.5
    for layer in model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    items = [TokenSequence(s) for s in tiny.sequences(12, seed=7)]
    torch.manual_seed(0)
    first = cached_backward(model, items, pair, token_budget=60)
    gradients = tiny.gradients(model)
    model.zero_grad()
    # The same random numbers, with a graph all along.
    torch.manual_seed(0)
    groups = micro_batches([len(s) for s in items], 60)[::-1]
    rows = torch.cat([encode_rows(model, [items[i] for i in group]) for group in groups])
    order = torch.tensor([i for group in groups for i in group]).argsort()
    loss = pair(rows[order])
    loss.backward()
    torch.testing.assert_close(first, loss.detach())
    for name, gradient in tiny.gradients(model).items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-5, rtol=1e-4)
