from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
import torch

from closeness import assert_close
from unmask.evaluation import search
from unmask.evaluation.search import index, similarity, top_k, two_step
from unmask.models.quantize import binary, pack_binary


def naive(q_ND, d_MD, k):
    """In float64, all at once; equal scores in order of document number."""
    q_ND, d_MD = q_ND.astype(np.float64), d_MD.astype(np.float64)
    norms = [np.linalg.norm(x, axis=1, keepdims=True) for x in (q_ND, d_MD)]
    q_ND, d_MD = (x / np.where(n == 0, 1, n) for x, n in zip((q_ND, d_MD), norms, strict=True))
    scores_NM = q_ND @ d_MD.T
    ids_NK = np.argsort(-scores_NM.round(6), axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores_NM, ids_NK, 1), ids_NK


def codes(count, size=6, *, seed=0, spread=3):
    """Few values, so that many scores are equal; a zero vector among them."""
    found = np.random.default_rng(seed).integers(-spread, spread + 1, (count, size)).astype(np.int8)
    found[count // 2] = 0
    return found


def clustered(count, size=32, clusters=50, seed=0):
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).standard_normal((clusters, size))
    found = centres[rng.integers(0, clusters, count)] + 0.5 * rng.standard_normal((count, size))
    return np.clip(np.rint(30 * found), -127, 127).astype(np.int8)


def packed(count, bits=64, *, seed=0, values=256):
    """Packed bits with many equal distances."""
    return np.random.default_rng(seed).integers(0, values, (count, bits // 8)).astype(np.uint8)


def signs(bits_XB):
    return 2 * np.unpackbits(bits_XB, axis=1).astype(np.int8) - 1


def same(found, expected):
    assert found[0].dtype == np.float32
    assert_close(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


@pytest.fixture(params=[(3, 7, 9), (64, 2**14, 2**14)], ids=["tiny tiles", "one tile"])
def tiling(request, monkeypatch):
    """Queries and documents of a tile, documents of a tile of few queries."""
    for name, value in zip(("QUERIES", "DOCUMENTS", "FOR_FEW"), request.param, strict=True):
        monkeypatch.setattr(search, name, value)


@pytest.mark.parametrize("k", [1, 10, 400])
@pytest.mark.parametrize("order", ["as they come", "better and better", "mostly equal", "floats"])
def test_any_order_of_the_documents_and_any_length_of_floats_give_the_naive_ranking(k, order, tiling):
    q_ND, d_MD = codes(9, 32, spread=100), codes(300, 32, seed=1, spread=100)
    if order == "better and better":
        d_MD = d_MD[np.argsort(np.asarray(similarity(q_ND[:1], d_MD))[0])]
    if order == "mostly equal":
        q_ND, d_MD = codes(20), codes(300, seed=1)
    if order == "floats":
        rng = np.random.default_rng(0)
        q_ND, d_MD = (5 * rng.standard_normal((count, 16)).astype(np.float32) for count in (10, 100))
    same(top_k(q_ND, d_MD, k), naive(q_ND, d_MD, k))


@pytest.mark.parametrize("length", [1e30, 1e-30, 1e38, 65504.0])
def test_floats_have_a_cosine_however_long_they_are(length, tiling):
    rng, dtype = np.random.default_rng(0), np.float16 if length == 65504.0 else np.float32
    q_ND, d_MD = ((length * rng.uniform(-1, 1, (count, 16))).astype(dtype) for count in (10, 100))
    scores_NK, ids_NK = expected = naive(q_ND, d_MD, 5)
    same(top_k(q_ND, d_MD, 5), expected)
    assert_close(np.take_along_axis(similarity(q_ND, d_MD).numpy(), ids_NK, 1), scores_NK)


@pytest.mark.parametrize("bits", [32, 1024])
@pytest.mark.parametrize("values", [3, 256])
@pytest.mark.parametrize("k", [8, 60])
def test_packed_bits_are_signs(bits, values, k):
    q_NB, d_MB = packed(5, bits, values=values), packed(60, bits, seed=1, values=values)
    same(top_k(q_NB, d_MB, k), naive(signs(q_NB), signs(d_MB), k))


def test_a_pair_scores_the_same_in_any_search(tiling):
    q_ND, d_MD = clustered(30), clustered(200, seed=1)
    scores_NK, ids_NK = top_k(q_ND, d_MD, 7)
    expected_NM = np.asarray(similarity(q_ND, d_MD))
    np.testing.assert_array_equal(scores_NK, np.take_along_axis(expected_NM, ids_NK, 1))
    np.testing.assert_array_equal(index(d_MD)(q_ND[4][None], 7)[0][0], scores_NK[4])


def test_what_becomes_an_array_is_searched_as_one():
    both = (np.eye(5), np.tri(5))
    for make in (np.ndarray.tolist, torch.from_numpy):
        same(top_k(*map(make, both), 3), top_k(*both, 3))


WRONG = [np.ones(2), np.ones((1, 3)), np.ones((1, 2), np.int64), np.ones((1, 2), bool)]


@pytest.mark.parametrize("wrong", WRONG)
def test_what_has_no_similarity_is_refused(wrong):
    right = np.ones((3, 2), np.int8)
    for pair in ((wrong, right), (right, wrong)):
        with pytest.raises(ValueError, match=r"two matrices of one width|embeddings are floats, int8 or"):
            similarity(*pair)


FLOATS = np.ones((2, 6), np.float32)
REFUSED = {
    "k must be at least 1, and whole, got 0": (codes(2), codes(5), 0),
    "k must be at least 1, and whole, got 2.5": (codes(2), codes(5), 2.5),
    "k must be at least 1, and whole, got True": (codes(2), codes(5), True),
    "queries have 8 columns of int8, documents 6 columns of int8": (codes(2, 8), codes(5), 1),
    "floats, documents 6 columns of int8: encode both in one precision": (FLOATS, codes(5), 1),
    "row 1 of the queries contains NaN": (FLOATS * [[1], [np.nan]], FLOATS, 1),
    "row 0 of the documents contains NaN": (FLOATS, FLOATS * [[np.nan], [1]], 1),
    "row 1 of the documents contains NaN or infinity": (FLOATS, FLOATS * [[1], [np.inf]], 1),
    "queries as float16, float32, .*, got <i2": (codes(2).astype(np.int16), codes(5), 1),
    "in this machine's byte order, got >f4": (codes(2).astype(">f4"), codes(5).astype("f4"), 1),
    r"queries as a matrix of one or more rows, got shape \(0, 6\)": (codes(2)[:0], codes(5), 1),
    r"documents as a matrix of one or more rows, got shape \(5, 0\)": (FLOATS[:, :0], np.ones((5, 0)), 1),
}


@pytest.mark.parametrize(("message", "arguments"), REFUSED.items())
def test_what_cannot_be_searched_is_refused(message, arguments):
    with pytest.raises(ValueError, match=message):
        top_k(*arguments)


def test_two_steps_rescore_the_candidates():
    q_ND, d_MD = clustered(10), clustered(90, seed=1)
    q_NB, d_MB = (np.packbits(x > 0, axis=1) for x in (q_ND, d_MD))
    for candidates in (90, 1000):
        found = two_step(q_ND, d_MD, q_NB, d_MB, 12, candidates=candidates)
        np.testing.assert_array_equal(found, top_k(q_ND, d_MD, 12))
    scores_NK, ids_NK = two_step(q_ND, d_MD, q_NB, d_MB, 12, candidates=20)
    near_NC = naive(signs(q_NB), signs(d_MB), 20)[1]
    for query, near_C in enumerate(np.sort(near_NC)):
        expected = naive(q_ND[query : query + 1], d_MD[near_C], 12)
        same((scores_NK[query], ids_NK[query]), (expected[0][0], near_C[expected[1][0]]))
    row_3_is_nan = np.where(np.arange(10)[:, None] == 3, np.nan, q_ND)
    refused = {
        "both kinds of embeddings of the same texts, and packed bits": (q_ND, d_MD, q_NB, d_MB[1:], 2),
        "k must be at least 1, and whole, got 0": (q_ND, d_MD, q_NB, d_MB, 0),
        "give both kinds": (q_ND, d_MD[0], q_NB, d_MB, 2),
        "row 3 of the queries contains NaN": (row_3_is_nan, d_MD + 0.0, q_NB, d_MB, 2),
        "scores of the candidates contains NaN": (q_ND + 0.0, d_MD * np.nan, q_NB, d_MB, 2),
    }
    for message, arguments in refused.items():
        with pytest.raises(ValueError, match=message):
            two_step(*arguments, candidates=3)


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("dimensions", [1, 8, 2560])
def test_similarity_of_int8_codes_is_exact(dimensions, n):
    # Codes near the corners sum to more than 2^24 at 2,560 dimensions, where one float32 sum would round.
    q, d = np.split(np.random.default_rng(2).choice([-127, 126, 125], (45, dimensions)).astype(np.int8), [n])
    dot = q.astype(np.int64) @ d.astype(np.int64).T
    norm = [np.sqrt((x.astype(np.int64) ** 2).sum(1).astype(np.float64)) for x in (q, d)]
    np.testing.assert_allclose(similarity(q, d), dot / norm[0][:, None] / norm[1], rtol=3e-7)
    # Equal codes tie exactly, wherever they stand.
    repeated = similarity(q, np.concatenate([d, d[::-1]]))
    assert torch.equal(repeated[:, : len(d)], repeated[:, len(d) :].flip(1))


def test_similarity_of_floats_bits_and_mixtures():
    q, d = torch.randn(6, 32, generator=torch.Generator().manual_seed(3)).split([2, 4])
    for x, y, ours in (
        (q, d, similarity(q, d)),
        (binary(q), binary(d), similarity(binary(q), binary(d))),
        (binary(q), binary(d), similarity(pack_binary(q), pack_binary(d))),
        (q, binary(d), similarity(q, pack_binary(d))),
    ):
        assert_close(ours, torch.nn.functional.cosine_similarity(x[:, None], y[None], dim=-1))
    assert similarity(q.double(), d.double()).dtype == torch.float64


def test_processors_without_integer_products_search_as_exactly(monkeypatch):
    """oneDNN's sums overflow on processors without VNNI instructions."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        process.submit(test_similarity_of_int8_codes_is_exact, 2560, 5).result()


@pytest.mark.gpu
def test_a_gpu_finds_the_same(monkeypatch):
    q_ND, d_MD = codes(5, 1000, spread=127), codes(999, 1000, seed=1, spread=127)
    found = top_k(q_ND, d_MD, 10)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    same(found, top_k(q_ND, d_MD, 10))
