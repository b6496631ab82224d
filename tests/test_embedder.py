import numpy as np
import pytest
import torch

import tiny
from unmask import Embedder
from unmask.embedder import PRECISIONS

WORDS = " ".join(tiny.TEXTS[:5]).split()
TEXTS = [" ".join(WORDS[i % 7 : i % 7 + 1 + i * 5 % 23]) for i in range(64)]
DOCUMENTS = [TEXTS[:3], TEXTS[3:4], TEXTS[4:9]]


@pytest.fixture(scope="module")
def embedder():
    return Embedder(tiny.model(), tiny.tokenizer(), token_budget=200, device="cpu")


def test_batched_equals_single_in_the_order_of_the_texts(embedder):
    batched = embedder.encode(TEXTS, "float32")
    single = np.concatenate([embedder.encode([text], "float32") for text in TEXTS])
    assert batched.dtype == np.float32
    np.testing.assert_allclose(batched, single, atol=2e-6, rtol=1e-5)
    codes = np.concatenate([embedder.encode([text]) for text in TEXTS]).astype(int)
    difference = abs(embedder.encode(TEXTS).astype(int) - codes)
    assert difference.max() <= 1
    assert (difference > 0).mean() <= 0.001


def test_the_token_budget_changes_nothing_but_memory():
    small, large = (
        Embedder(tiny.model(), tiny.tokenizer(), token_budget=n, device="cpu") for n in (1, 10**6)
    )
    np.testing.assert_allclose(
        small.encode(TEXTS, "float32"), large.encode(TEXTS, "float32"), atol=2e-6, rtol=1e-5
    )


def test_precisions_come_from_the_same_unquantised_mean(embedder):
    mean, int8, binary, packed = (embedder.encode(TEXTS, p) for p in ("float32", "int8", "binary", "ubinary"))
    assert (int8.dtype, binary.dtype, packed.dtype) == (np.int8, np.int8, np.uint8)
    assert int8.shape == binary.shape == mean.shape == (64, 32)
    np.testing.assert_array_equal(int8, np.floor(127 * torch.from_numpy(mean).tanh().numpy() + 0.5))
    np.testing.assert_array_equal(binary, np.where(mean >= 0, 1, -1))
    assert ((binary == -1) & (int8 == 0)).any()  # the sign of the codes would differ
    np.testing.assert_array_equal(packed, np.packbits(binary > 0, axis=1))
    assert packed.shape == (64, 4)
    np.testing.assert_array_equal(embedder.encode(TEXTS), int8)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_fewer_dimensions_are_a_prefix(embedder, precision):
    whole, prefix = embedder.encode(TEXTS, precision), embedder.encode(TEXTS, precision, dimensions=16)
    np.testing.assert_array_equal(prefix, whole[:, : 2 if precision == "ubinary" else 16])
    for one, two in zip(
        embedder.encode_documents(DOCUMENTS, precision, 16),
        embedder.encode_documents(DOCUMENTS, precision),
        strict=True,
    ):
        np.testing.assert_array_equal(one, two[:, : one.shape[1]])


def test_nothing_in_nothing_out(embedder):
    assert embedder.encode([]).shape == (0, 32)
    assert embedder.encode([], "ubinary", 16).shape == (0, 2)
    assert embedder.encode([]).dtype == np.int8
    assert embedder.encode_documents([]) == []


def test_unusable_input_is_refused(embedder):
    with pytest.raises(ValueError, match=r"Text 1 of 3 has no tokens"):
        embedder.encode(["one", "", "two"])
    for encode in (embedder.encode, embedder.encode_documents):
        with pytest.raises(ValueError, match="got one string"):
            encode("a text")
        with pytest.raises(ValueError, match="unknown precision 'int4': choose one of float32, int8"):
            encode([], "int4")
        for dimensions in (0, 33, -1):
            with pytest.raises(ValueError, match="between 1 and 32"):
                encode([], "int8", dimensions)
    with pytest.raises(ValueError, match="multiple of 8"):
        embedder.encode(TEXTS, "ubinary", 12)
    for documents in ([["one"], []], [["one"], "a text"]):
        with pytest.raises(ValueError, match="document 1 must be a non-empty list of chunks"):
            embedder.encode_documents(documents)
    with pytest.raises(ValueError, match="has no tokens"):
        embedder.encode_documents([["one", ""]])


def test_a_text_longer_than_the_limit_is_cut(embedder):
    tokens = tiny.tokenizer().backend_tokenizer.encode(" ".join(WORDS), add_special_tokens=False)
    text, length = " ".join(WORDS), tokens.offsets[9][1]
    np.testing.assert_allclose(
        embedder.encode([text], "float32", max_length=10),
        embedder.encode([text[:length]], "float32"),
        atol=1e-6,
    )
    short = Embedder(tiny.model(), tiny.tokenizer(), max_length=10, device="cpu")
    np.testing.assert_array_equal(short.encode([text]), embedder.encode([text], max_length=10))
    assert Embedder(tiny.model(), tiny.tokenizer(), max_length=10**6, device="cpu").max_length == 256


def test_a_document_of_one_chunk_is_its_chunk(embedder):
    parts = embedder.encode_documents([[text] for text in TEXTS], "float32")
    assert [part.shape for part in parts] == [(1, 32)] * 64
    np.testing.assert_allclose(np.concatenate(parts), embedder.encode(TEXTS, "float32"), atol=2e-6, rtol=1e-5)


def test_context_flows_between_the_chunks_of_a_document_and_not_between_documents(embedder):
    before = embedder.encode_documents(DOCUMENTS, "float32")
    assert [part.shape for part in before] == [(3, 32), (1, 32), (5, 32)]
    changed = [[DOCUMENTS[0][0], "def close(self)", DOCUMENTS[0][2]], *DOCUMENTS[1:]]
    after = embedder.encode_documents(changed, "float32")
    for chunk in range(3):
        assert abs(before[0][chunk] - after[0][chunk]).max() > 1e-4
    for one, two in zip(before[1:], after[1:], strict=True):
        np.testing.assert_allclose(one, two, atol=2e-6, rtol=1e-5)
    alone = embedder.encode_documents(DOCUMENTS[2:], "float32")[0]
    np.testing.assert_allclose(before[2], alone, atol=2e-6, rtol=1e-5)


def test_a_document_longer_than_the_window_is_refused_with_the_remedy(embedder):
    long = [" ".join(WORDS)] * 8
    with pytest.raises(ValueError, match=r"document 1 has \d+ tokens .* reads 256: split .* chunk_length"):
        embedder.encode_documents([["short"], long])
    assert embedder.encode_documents([["short"], long], chunk_length=20)[1].shape == (8, 32)


def test_a_saved_embedder_comes_back_the_same(embedder, tmp_path):
    path = embedder.save_pretrained(tmp_path / "deep" / "model")
    loaded = Embedder.from_pretrained(path, device="cpu")
    np.testing.assert_array_equal(loaded.encode(TEXTS), embedder.encode(TEXTS))
    assert [p.name for p in path.parent.iterdir()] == ["model"]
    assert not [p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pkl")]


def test_pooling_is_saved_and_last_token_pooling_has_no_late_chunking(tmp_path):
    causal = Embedder(tiny.model(bidirectional=False), tiny.tokenizer(), pooling="last", device="cpu")
    loaded = Embedder.from_pretrained(causal.save_pretrained(tmp_path / "m"), device="cpu")
    assert loaded.pooling == "last"
    np.testing.assert_array_equal(loaded.encode(TEXTS), causal.encode(TEXTS))
    assert Embedder.from_pretrained(tmp_path / "m", pooling="mean").pooling == "mean"
    with pytest.raises(ValueError, match="no late chunking"):
        loaded.encode_documents(DOCUMENTS)


def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is no checkpoint"):
        Embedder.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no such directory"):
        Embedder.from_pretrained(tmp_path / "none")


def test_mixed_precision_is_close(embedder):
    mixed = Embedder(tiny.model(), tiny.tokenizer(), mixed_precision=True, device="cpu")
    one, two = embedder.encode(TEXTS, "float32"), mixed.encode(TEXTS, "float32")
    assert two.dtype == np.float32
    cosine = (one * two).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(two, axis=1)
    assert cosine.min() > 0.999
    assert abs(embedder.encode(TEXTS).astype(int) - mixed.encode(TEXTS)).max() <= 4
