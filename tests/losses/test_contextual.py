"""The contextual objective: against naive loops, finite differences and its own identities."""

import naive_losses
import pytest
import torch

from unmask.losses import (
    batch_loss,
    contextual_loss,
    global_loss,
    insent_loss,
    local_loss,
    mean_maxsim,
    sequence_loss,
)


def problem(n, m, c, d, seed, *, padded=True, dtype=torch.float64):
    """Queries that share documents, documents without query, and documents with fewer chunks than C."""
    generator = torch.Generator().manual_seed(seed)
    chunks_MCD = torch.randn(m, c, d, generator=generator, dtype=dtype)
    length_M = torch.randint(1, c + 1, (m,), generator=generator) if padded else torch.full((m,), c)
    mask_MC = torch.arange(c) < length_M[:, None]
    document_N = torch.randint(m, (n,), generator=generator)
    gold_N = (torch.rand(n, generator=generator) * length_M[document_N]).long()
    q_ND = chunks_MCD[document_N, gold_N] + torch.randn(n, d, generator=generator, dtype=dtype)
    documents_MD = (chunks_MCD * mask_MC[..., None]).sum(1) / length_M[:, None]
    return q_ND, chunks_MCD, documents_MD, document_N, gold_N, mask_MC


# N, M, C, D, seed
@pytest.mark.parametrize("shape", [(4, 3, 3, 4, 0), (7, 2, 5, 3, 1), (6, 6, 1, 5, 2), (3, 4, 2, 2, 3)])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("temperature", [0.02, 0.05, 1.0])
def test_the_losses_are_the_formulas(shape, padded, temperature):
    q, chunks, documents, document, gold, mask = problem(*shape, padded=padded)
    lists = [x.tolist() for x in (q, chunks, document, gold)]
    sequence = naive_losses.sequence(*lists, temperature, mask.tolist())
    batch = naive_losses.batch(*lists, temperature, mask.tolist())
    document_level = naive_losses.global_(q.tolist(), documents.tolist(), document.tolist(), temperature, 0.1)
    options = {"temperature": temperature, "chunk_mask_MC": mask if padded else None}
    arguments = (q, chunks, document, gold)
    assert sequence_loss(*arguments, **options).item() == pytest.approx(sequence, rel=1e-10)
    assert batch_loss(*arguments, **options).item() == pytest.approx(batch, rel=1e-10)
    local = 0.3 * sequence + 0.7 * batch
    assert local_loss(*arguments, alpha=0.3, **options).item() == pytest.approx(local, rel=1e-10)
    found = global_loss(q, documents, document, temperature=temperature).item()
    assert found == pytest.approx(document_level, rel=1e-10)
    total = contextual_loss(q, chunks, documents, document, gold, beta=0.35, alpha=0.3, **options).item()
    assert total == pytest.approx(0.35 * document_level + 0.65 * local, rel=1e-10)
    for lam in (0.0, 0.3, 1.0):
        insent = naive_losses.insent(*lists, lam, temperature, mask.tolist())
        assert insent_loss(*arguments, lam=lam, **options).item() == pytest.approx(insent, rel=1e-10)


@pytest.mark.parametrize("query", [[0, 0, 1, 2, 0, 1, 3], [5] * 7])
def test_what_answers_a_query_is_no_negative_where_it_is_asked_again(query):
    """Of the same document, of another one, or of the same chunk."""
    q, chunks, documents, document, gold, mask = problem(7, 3, 4, 5, 3)
    document[1], gold[1] = document[0], gold[0]
    where = [x.tolist() for x in (q, chunks, document, gold)]
    told = {"temperature": 0.1, "mask": mask.tolist(), "query": query}
    options = {"temperature": 0.1, "chunk_mask_MC": mask, "query_ids_N": torch.tensor(query)}
    local = 0.3 * naive_losses.sequence(*where, **told) + 0.7 * naive_losses.batch(*where, **told)
    wide = naive_losses.global_(q.tolist(), documents.tolist(), document.tolist(), 0.1, 0.1, query=query)
    found = contextual_loss(q, chunks, documents, document, gold, beta=0.35, alpha=0.3, **options)
    assert found.item() == pytest.approx(0.35 * wide + 0.65 * local, rel=1e-10)
    found = insent_loss(q, chunks, document, gold, lam=0.3, **options)
    assert found.item() == pytest.approx(naive_losses.insent(*where, 0.3, **told), rel=1e-10)


def test_late_interaction_is_the_formula():
    """Queries and chunks of different numbers of tokens, zeros beyond; some documents have fewer chunks."""
    _, _, _, document, gold, mask = problem(7, 3, 4, 5, 3)
    generator = torch.Generator().manual_seed(0)
    counts = [torch.randint(1, 4, shape, generator=generator) for shape in ((7,), (3, 4))]
    q, chunks = (torch.randn(*n.shape, 3, 5, generator=generator, dtype=torch.float64) for n in counts)
    for x, count in zip((q, chunks), counts):
        x[torch.arange(3) >= count[..., None]] = 0
    chunks[~mask] = 0
    texts = [text[:n].tolist() for text, n in zip(q, counts[0])]
    held = [[text[:n].tolist() for text, n in zip(*both)] for both in zip(chunks, counts[1])]
    where = (document.tolist(), gold.tolist(), 0.3, 0.05, mask.tolist())
    expected = naive_losses.insent(texts, held, *where, cosine=naive_losses.maxsim)
    options = {"lam": 0.3, "temperature": 0.05, "chunk_mask_MC": mask, "similarity": mean_maxsim}
    inputs = [x.requires_grad_() for x in (q, chunks)]
    loss = insent_loss(*inputs, document, gold, **options)
    assert loss.item() == pytest.approx(expected, rel=1e-10)
    parts = sum(insent_loss(*inputs, document, gold, **options, queries=slice(i, i + 1)) for i in range(7))
    assert parts.item() == pytest.approx(expected, rel=1e-10)
    assert all(x.isfinite().all() and x.any() for x in torch.autograd.grad(loss, inputs))


@pytest.mark.parametrize("document", [[0, 0, 0], [0, 1, 2]])
def test_distinct_documents_do_what_the_papers_mask_does(document):
    """The printed sum over queries with M^dup, where it meets no other document twice."""
    q, _, documents, _, _, _ = problem(3, max(document) + 1, 2, 5, 6)
    expected = naive_losses.global_of_the_paper(q.tolist(), documents[document].tolist(), document, 0.1, 0.1)
    ours = global_loss(q, documents, torch.tensor(document), temperature=0.1)
    assert ours.item() == pytest.approx(expected, rel=1e-10)


Q, CHUNKS, _, DOCUMENT, GOLD, MASK = problem(4, 3, 3, 4, 12, padded=False)
WHERE, NONE = (Q, CHUNKS, DOCUMENT, GOLD), (Q[:0], CHUNKS, DOCUMENT[:0], GOLD[:0])
REFUSED = {
    r"gold_N must hold int64 in 0\.\.2": lambda: sequence_loss(Q, CHUNKS, DOCUMENT, GOLD + 3),
    r"document_N must have the shape \(4\); got \(2,\)": lambda: batch_loss(Q, CHUNKS, DOCUMENT[:2], GOLD),
    "gold chunk of query 0 is masked out": lambda: local_loss(*WHERE, chunk_mask_MC=torch.zeros_like(MASK)),
    "alpha must lie in": lambda: local_loss(*WHERE, alpha=1.5),
    "lam must lie in": lambda: insent_loss(*WHERE, lam=1.5),
    "q_ND has no rows": lambda: local_loss(*NONE),
    "q_ND has no rows: a loss": lambda: contextual_loss(Q[:0], CHUNKS, CHUNKS.sum(1), *NONE[2:], beta=0.2),
    "q_ND has no rows: a loss is": lambda: global_loss(Q[:0], CHUNKS.sum(1), DOCUMENT[:0]),
}


@pytest.mark.parametrize(("message", "call"), REFUSED.items())
def test_bad_arguments_are_refused(message, call):
    with pytest.raises(ValueError, match=message):
        call()
