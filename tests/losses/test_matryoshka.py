from functools import partial

import torch

from closeness import assert_close
from unmask.losses import contextual_loss, matryoshka


def test_it_is_the_mean_over_the_prefixes_that_fit_of_every_embedding():
    generator = torch.Generator().manual_seed(1)
    q_ND, documents_MD = torch.randn(2, 4, 8, generator=generator)
    chunks_MCD = torch.randn(4, 3, 8, generator=generator)
    document_N, gold_N = torch.arange(4), torch.tensor([0, 1, 2, 0])
    loss = partial(contextual_loss, document_N=document_N, gold_N=gold_N, beta=0.3)
    embeddings = (q_ND, chunks_MCD, documents_MD)
    expected = (loss(*(x[..., :4] for x in embeddings)) + loss(*embeddings)) / 2
    assert_close(matryoshka(loss, embeddings, [4, 8, 16]), expected)
    assert_close(matryoshka(loss, embeddings, [4]), expected)  # all is trained anyhow
