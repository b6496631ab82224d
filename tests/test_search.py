import numpy as np
import pytest

from unmask import search
from unmask.search import exact, index, top_k


def naive(q_ND, d_MD, k, *, ceiling_N=None, lowest=False):
    """In float64, all at once; equal scores in order of document number."""
    q_ND, d_MD = q_ND.astype(np.float64), d_MD.astype(np.float64)
    norms = [np.linalg.norm(x, axis=1, keepdims=True) for x in (q_ND, d_MD)]
    q_ND, d_MD = (x / np.where(n == 0, 1, n) for x, n in zip((q_ND, d_MD), norms, strict=True))
    scores_NM = (q_ND @ d_MD.T).round(6)
    if ceiling_N is not None:
        scores_NM[scores_NM > ceiling_N[:, None]] = -np.inf
    ids_NK = np.argsort(scores_NM if lowest else -scores_NM, axis=1, kind="stable")[:, :k]
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


def same(found, expected):
    assert found[0].dtype == np.float32
    np.testing.assert_allclose(found[0], expected[0], atol=2e-6)
    np.testing.assert_array_equal(found[1], expected[1])


@pytest.mark.parametrize("tile", [(3, 7), (128, 4096)])
@pytest.mark.parametrize("k", [1, 10, 50, 80])
def test_codes_give_the_naive_order_ties_included(tile, k, monkeypatch):
    monkeypatch.setitem(search.TILES, "cpu", tile)
    q_ND, d_MD = codes(20), codes(50, seed=1)
    same(top_k(q_ND, d_MD, k), naive(q_ND, d_MD, k))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floats_of_any_length_are_compared_by_cosine(dtype, monkeypatch):
    monkeypatch.setitem(search.TILES, "cpu", (4, 9))
    rng = np.random.default_rng(0)
    q_ND, d_MD = (5 * rng.standard_normal((count, 16)).astype(dtype) for count in (10, 100))
    same(top_k(q_ND, d_MD, 20), naive(q_ND, d_MD, 20))


def test_packed_bits_are_signs():
    rng = np.random.default_rng(0)
    q_ND, d_MD = (rng.integers(0, 256, (count, 4)).astype(np.uint8) for count in (5, 40))
    signs = [2 * np.unpackbits(x, axis=1).astype(np.int8) - 1 for x in (q_ND, d_MD)]
    same(top_k(q_ND, d_MD, 8), naive(*signs, 8))


def test_documents_may_be_mapped_into_memory(tmp_path):
    d_MD = codes(50, seed=1)
    np.save(tmp_path / "d.npy", d_MD)
    mapped = np.load(tmp_path / "d.npy", mmap_mode="r")
    same(top_k(codes(5), mapped, 9), naive(codes(5), d_MD, 9))


@pytest.mark.parametrize("tile", [(3, 7), (128, 4096)])
def test_a_ceiling_hides_what_scores_more_and_lowest_turns_the_order_round(tile, monkeypatch):
    monkeypatch.setitem(search.TILES, "cpu", tile)
    q_ND, d_MD = codes(20), codes(50, seed=1)
    ceiling_N = np.linspace(-0.9, 0.9, 20).astype(np.float32)
    scores, ids = exact(q_ND, d_MD, 30, ceiling_N=ceiling_N)
    expected = naive(q_ND, d_MD, 30, ceiling_N=ceiling_N)
    assert np.isinf(expected[0]).any() and np.isfinite(expected[0]).any()
    np.testing.assert_allclose(scores, expected[0], atol=2e-6)
    np.testing.assert_array_equal(ids[np.isfinite(scores)], expected[1][np.isfinite(scores)])
    same(exact(q_ND, d_MD, 30, lowest=True), naive(q_ND, d_MD, 30, lowest=True))


def test_faiss_finds_nearly_all_that_exact_search_finds(monkeypatch):
    monkeypatch.setattr(search, "PROBES", 4)  # of 102 lists: the share that 64 are for 170,000 documents
    d_MD, q_ND = clustered(4000), clustered(100, seed=1)
    (scores, ids), (expected, numbers) = top_k(q_ND, d_MD, 50, method="faiss"), top_k(q_ND, d_MD, 50)
    recall = np.mean([len(set(a) & set(b)) / 50 for a, b in zip(ids, numbers, strict=True)])
    assert recall > 0.95
    np.testing.assert_allclose(scores[:, 0], expected[:, 0], atol=2e-3)
    assert (np.diff(scores, axis=1) <= 0).all()


def test_faiss_is_deterministic_and_orders_equal_scores_by_number():
    d_MD = np.repeat(clustered(300), 3, axis=0)
    found = [top_k(d_MD[:50], d_MD, 9, method="faiss") for _ in range(2)]
    np.testing.assert_array_equal(*(ids for _, ids in found))
    first_three = found[0][1][:, :3]
    np.testing.assert_array_equal(first_three, (np.arange(50) // 3 * 3)[:, None] + np.arange(3))


def test_where_the_lists_hold_too_few_the_search_is_exact(monkeypatch):
    monkeypatch.setattr(search, "PROBES", 1)
    d_MD, q_ND = clustered(2000), clustered(10, seed=1)
    scores, ids = top_k(q_ND, d_MD, 1500, method="faiss")
    same((scores, ids), top_k(q_ND, d_MD, 1500))


def test_an_index_is_asked_often():
    d_MD, q_ND = clustered(500), clustered(20, seed=1)
    find = index(d_MD, "faiss")
    np.testing.assert_array_equal(find(q_ND, 5)[1][:7], find(q_ND[:7], 5)[1])


def test_what_cannot_be_searched_is_refused():
    with pytest.raises(ValueError, match="unknown search 'annoy': choose one of exact, faiss"):
        top_k(codes(2), codes(5), 1, method="annoy")
    with pytest.raises(ValueError, match="not packed bits"):
        top_k(codes(2).view(np.uint8), codes(5).view(np.uint8), 1, method="faiss")
    with pytest.raises(ValueError, match="needs queries and documents, got 2 and 0"):
        top_k(codes(2), codes(5)[:0], 1)
