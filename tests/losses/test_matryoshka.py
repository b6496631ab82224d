"""The Matryoshka mean over prefixes."""

from functools import partial

import pytest
import torch

from unmask.losses import contextual_loss, matryoshka, pair_loss
from unmask.models.quantize import int8

PAPER = [128, 256, 512, 1024, 2048, 2560]


def test_it_is_the_mean_over_the_prefixes_that_fit():
    q_ND, d_ND = torch.randn(2, 6, 300, generator=torch.Generator().manual_seed(0)).double()
    expected = (pair_loss(q_ND[:, :128], d_ND[:, :128]) + pair_loss(q_ND[:, :256], d_ND[:, :256])) / 2
    torch.testing.assert_close(matryoshka(pair_loss, (q_ND, d_ND), PAPER), expected)


def test_every_embedding_of_the_contextual_loss_is_cut():
    generator = torch.Generator().manual_seed(1)
    q_ND, documents_MD = torch.randn(2, 4, 8, generator=generator)
    chunks_MCD = torch.randn(4, 3, 8, generator=generator)
    document_N, gold_N = torch.arange(4), torch.tensor([0, 1, 2, 0])
    loss = partial(contextual_loss, document_N=document_N, gold_N=gold_N, beta=0.3)
    embeddings = (q_ND, chunks_MCD, documents_MD)
    expected = (loss(*(x[..., :4] for x in embeddings)) + loss(*embeddings)) / 2
    torch.testing.assert_close(matryoshka(loss, embeddings, [4, 8, 16]), expected)


def test_cutting_codes_is_quantising_the_cut():
    mean_BD = torch.randn(5, 16, generator=torch.Generator().manual_seed(2))
    assert torch.equal(int8(mean_BD)[:, :8], int8(mean_BD[:, :8]))


@pytest.mark.parametrize(
    ("dimensions", "message"),
    [
        ([], "different and 1 or more"),
        ([4, 4], "different"),
        ([0, 4], "1 or more"),
        ([16], "fits embeddings of 8; add 8"),
    ],
)
def test_bad_dimensions_are_refused(dimensions, message):
    with pytest.raises(ValueError, match=message):
        matryoshka(pair_loss, (torch.ones(3, 8), torch.ones(3, 8)), dimensions)


def test_embeddings_of_different_dimension_are_refused():
    with pytest.raises(ValueError, match=r"one dimension; got \[4, 8\]"):
        matryoshka(pair_loss, (torch.ones(3, 8), torch.ones(3, 4)), [4])
