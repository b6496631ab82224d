"""What holds of every loss over queries: its gradient, its parts, its tiles, its precision."""

from functools import partial
from itertools import pairwise

import pytest
import test_contextual
import test_contrastive
import torch

from closeness import assert_close
from unmask import losses
from unmask.models.quantize import int8

N = 7
Q, D, HARD = test_contrastive.batch(N, 2, 6, 30)
CQ, CHUNKS, DOCUMENTS, DOCUMENT, GOLD, MASK = test_contextual.problem(N, 4, 3, 4, 13)
FILTER = torch.rand(N, N, generator=torch.Generator().manual_seed(29)) > 0.3
NUMBER = test_contrastive.texts(N, 2, 11)
WHERE = {"document_N": DOCUMENT, "gold_N": GOLD, "chunk_mask_MC": MASK}
WHERE |= {"query_ids_N": torch.tensor([0, 1, 1, 2, 0, 3, 4])}
LOSSES = {
    "pair": (losses.pair_loss, (Q, D)),
    "filtered": (partial(losses.pair_loss, negative_mask_NN=FILTER), (Q, D)),
    "triplet": (losses.triplet_loss, (Q, D, HARD)),
    "numbered": (partial(losses.triplet_loss, text_ids_R=NUMBER), (Q, D, HARD)),
    "qwen3": (partial(losses.qwen3_loss, negative_mask_NN=FILTER, text_ids_R=NUMBER), (Q, D, HARD)),
    "global": (partial(losses.global_loss, document_N=DOCUMENT), (CQ, DOCUMENTS)),
    "local": (partial(losses.local_loss, **WHERE), (CQ, CHUNKS)),
    "contextual": (partial(losses.contextual_loss, **WHERE, beta=0.4), (CQ, CHUNKS, DOCUMENTS)),
    "insent": (partial(losses.insent_loss, **WHERE, lam=0.4), (CQ, CHUNKS)),
}


@pytest.fixture(params=LOSSES)
def case(request):
    return LOSSES[request.param]


def loss_and_gradients(case, shares=(None,)):
    """The sum of a loss over the queries of each share, as several processes compute it."""
    loss, inputs = case
    inputs = [x.clone().requires_grad_() for x in inputs]
    total = sum(loss(*inputs, queries=queries) for queries in shares)
    return [total.detach(), *torch.autograd.grad(total, inputs)]


def test_gradients_by_finite_differences(case):
    loss, inputs = case
    inputs = [x.clone().requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(partial(loss, temperature=0.2), inputs)


@pytest.mark.parametrize("bounds", [(0, 3, 7), (0, 1, 1, 6, 7), (0, 7)])
@pytest.mark.parametrize("scores", [2**24, 30, 1])  # one tile, uneven ones, tiles of one query
def test_parts_and_tiles_change_neither_loss_nor_gradient(monkeypatch, case, bounds, scores):
    whole = loss_and_gradients(case)
    monkeypatch.setattr(losses.contrastive, "TILE_SCORES", scores)
    parts = loss_and_gradients(case, [slice(a, b) for a, b in pairwise(bounds)])
    for part, expected in zip(parts, whole, strict=True):
        assert_close(part, expected, 1e-11)


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_inputs_are_computed_in_float32(case, autocast):
    loss, inputs = case
    codes = [int8(x) for x in inputs]  # up to 127: exact in bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        found = loss(*(x.bfloat16() for x in codes))
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(loss(*codes).item(), rel=1e-5)
