"""MaxSim against its definition, in loops."""

import numpy as np
import pytest

import tiny
from unmask import Embedder
from unmask.config import load_preset
from unmask.evaluation import late_interaction
from unmask.evaluation.late_interaction import chunk_tokens, evaluate, maxsim
from unmask.evaluation.tasks import Task


def naive(queries, documents):
    def score(q_LD, d_LD):
        cosines = [[float(q @ d) / np.sqrt(float(q @ q) * float(d @ d)) for d in d_LD] for q in q_LD]
        return sum(max(row) for row in cosines)

    return [[score(q.astype(float), d.astype(float)) for d in documents] for q in queries]


def texts(count, seed, dimensions=6, longest=7):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, longest + 1, count)
    return [rng.normal(size=(size, dimensions)).astype(np.float32) * rng.uniform(0.1, 9) for size in sizes]


@pytest.mark.parametrize("tile", [1, 200, 10**6])
def test_maxsim_is_its_formula_however_it_is_tiled(monkeypatch, tile):
    monkeypatch.setattr(late_interaction, "TILE_ELEMENTS", tile)
    q, d = texts(9, seed=0), texts(23, seed=1)
    scores = maxsim(q, d)
    assert scores.shape == (9, 23) and scores.dtype == np.float32
    np.testing.assert_allclose(scores, naive(q, d), atol=1e-5)


def test_padding_never_wins():
    """A short document whose tokens all point away, beside a long one: its padding would have cosine 0."""
    q = [np.array([[1.0, 0.0]], np.float32)]
    d = [np.array([[-1.0, 0.1]], np.float32), np.array([[0.0, 1.0]] * 5, np.float32)]
    np.testing.assert_allclose(maxsim(q, d), naive(q, d), atol=1e-6)
    assert maxsim(q, d)[0, 0] < -0.9


def test_one_token_each_is_the_cosine():
    q, d = texts(4, 2, longest=1), texts(5, 3, longest=1)
    unit = [np.concatenate(x) / np.linalg.norm(np.concatenate(x), axis=1, keepdims=True) for x in (q, d)]
    np.testing.assert_allclose(maxsim(q, d), unit[0] @ unit[1].T, atol=1e-6)


def test_a_text_without_tokens_or_of_other_dimensions_is_named():
    q, d = texts(2, 4), texts(2, 5)
    with pytest.raises(ValueError, match=r"document 1 has token vectors of shape \(0, 6\)"):
        maxsim(q, [d[0], d[1][:0]])
    with pytest.raises(ValueError, match=r"query 1 has token vectors of shape \(\d+, 5\)"):
        maxsim([q[0], q[1][:, :5]], d)


@pytest.mark.gpu
def test_the_gpu_gives_the_scores_of_the_cpu():
    q, d = texts(9, seed=0), texts(23, seed=1)
    np.testing.assert_allclose(maxsim(q, d, device="cuda"), maxsim(q, d, device="cpu"), atol=1e-4)


TASK = Task("t", "contextual", tiny.TEXTS[:3], [tiny.TEXTS[:2], tiny.TEXTS[2:5]], [{0}, {1}, {2}])


def test_a_text_is_found_by_its_own_tokens():
    embedder, config = Embedder(tiny.model(), tiny.tokenizer()), load_preset("smoke").evaluation
    np.testing.assert_allclose(evaluate(embedder, TASK, config, late_chunking=False), 1.0)
    assert evaluate(embedder, TASK, config, late_chunking=True).shape == (3,)


@pytest.mark.parametrize("late_chunking", [False, True])
def test_the_mean_of_a_chunks_tokens_is_its_vector(late_chunking):
    embedder, config = Embedder(tiny.model(), tiny.tokenizer()), load_preset("smoke").evaluation
    tokens = chunk_tokens(embedder, TASK, config, late_chunking=late_chunking)
    if late_chunking:
        vectors = np.concatenate(
            embedder.encode_documents(TASK.documents, "float32", chunk_length=config.chunk_length)
        )
    else:
        vectors = embedder.encode(TASK.chunks, "float32", max_length=config.chunk_length)
    np.testing.assert_allclose([tokens_LD.mean(0) for tokens_LD in tokens], vectors, atol=1e-5)
