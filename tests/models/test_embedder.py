import copy
import math

import numpy as np
import pytest
import torch
from tokenizers import normalizers, processors

import tiny
from unmask import Embedder
from unmask.data.tokens import tokenize
from unmask.models.embedder import PRECISIONS, ahead

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


def test_requests_that_cannot_work_are_refused(embedder):
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
    for documents in ([["one"], []], [["one"], "a text"], [["one"], None]):
        with pytest.raises(ValueError, match="document 1 must be a non-empty list of chunks"):
            embedder.encode_documents(documents)
    for options in ({"window": 0}, {"overlap": -1}, {"chunk_length": 0}):
        with pytest.raises(ValueError, match="must be at least"):
            embedder.encode_documents([["one"]], **options)
    for length in (0, -1):
        with pytest.raises(ValueError, match="max_length must be at least 1"):
            embedder.encode(["one"], max_length=length)
    with pytest.raises(ValueError, match="none of '<sep>' is in the vocabulary"):
        Embedder(tiny.model(), tiny.tokenizer(), separator="<sep>", device="cpu")
    for devices in ([], ["cpu", "cuda"]):
        with pytest.raises(ValueError, match="of one kind"):
            Embedder(tiny.model(), tiny.tokenizer(), device=devices)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ("", ValueError, "has no tokens: ''"),
        ("half \ud800", ValueError, r"has a lone surrogate \(U\+D800 at character 5\)"),
        (None, TypeError, "is no string but of type NoneType"),
        (7, TypeError, "is no string but of type int"),
        (b"one", TypeError, "is no string but of type bytes"),
        (float("nan"), TypeError, "is no string but of type float"),
    ],
)
def test_a_bad_text_is_named_before_anything_is_computed(embedder, bad, error, message):
    def computed(*_):
        raise AssertionError("the model was called")

    hook = embedder.model.register_forward_pre_hook(computed)
    try:
        for encode in (embedder.encode, embedder.encode_tokens):
            with pytest.raises(error, match=f"Text 70 of 71 {message}"):
                encode([*TEXTS, *TEXTS[:6], bad])
        for encode in (embedder.encode_documents, embedder.encode_document_tokens):
            with pytest.raises(error, match=f"Chunk 2 of document 3 {message}"):
                encode([*DOCUMENTS, ["one", "two", bad, "four"], TEXTS])
    finally:
        hook.remove()


def test_white_space_is_a_text(embedder):
    rows = embedder.encode([" ", "\n\t ", "a"], "float32")
    assert np.isfinite(rows).all() and len(np.unique(rows, axis=0)) == 3
    assert np.isfinite(embedder.encode_documents([[" ", "a"]], "float32")[0]).all()


def test_a_text_for_which_the_tokenizer_has_no_token_is_named(embedder, monkeypatch):
    words = copy.deepcopy(tiny.tokenizer())
    words.backend_tokenizer.normalizer = normalizers.Strip()
    stripping = Embedder(tiny.model(), words, device="cpu")
    with pytest.raises(ValueError, match=r"Text 1 of 2 has no tokens: '  '"):
        stripping.encode(["a", "  "])
    with pytest.raises(ValueError, match=r"Chunk 1 of document 1 has no tokens: '  '"):
        stripping.encode_documents([["a"], ["a", "  "]])


def test_what_the_model_cannot_compute_is_named():
    model = tiny.model()
    broken = int(tiny.tokenizer()("東")["input_ids"][-1])
    model.embed_tokens.weight.data[broken] = torch.nan
    embedder = Embedder(model, tiny.tokenizer(), device="cpu")
    with pytest.raises(ValueError, match=r"Text 3 of 6: the model returns NaN or infinity"):
        embedder.encode(["a", "b", "c", "東", "d", "long 東 text"])
    with pytest.raises(ValueError, match=r"Chunk 0 of document 1: the model returns NaN or infinity"):
        embedder.encode_document_tokens([["a"], ["東"]])


def test_a_megabyte_is_cut_as_the_beginning_of_it_would_be(embedder):
    text = " ".join(WORDS * (10**6 // len(" ".join(WORDS)) + 1))
    assert len(text) > 10**6
    np.testing.assert_array_equal(embedder.encode([text, "a"])[0], embedder.encode([text[:9_000]])[0])
    part = embedder.encode_documents([["a", text]], "float32", chunk_length=100)[0]
    np.testing.assert_allclose(
        part, embedder.encode_documents([["a", text[:9_000]]], "float32", chunk_length=100)[0], atol=1e-6
    )


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


def test_a_document_beyond_the_window_has_the_vectors_of_the_windows_with_most_context(embedder):
    """Against one forward pass per window in float64, and windows and contexts counted one by one."""
    chunks = [TEXTS[i] for i in np.random.default_rng(0).integers(0, len(TEXTS), 40)]
    ids = tokenize(tiny.tokenizer(), chunks, 1_000)
    for window, overlap in ((120, 2), (120, 35), (256, 0), (max(map(len, ids)), 3)):
        expected = naive_windows(ids, window, overlap)
        found = embedder.encode_documents(
            [["a"], chunks, ["b", "c"]], "float32", window=window, overlap=overlap
        )
        assert [len(part) for part in found] == [1, 40, 2]
        np.testing.assert_allclose(found[1], expected, atol=1e-5)


def naive_windows(ids: list[np.ndarray], window: int, overlap: int) -> np.ndarray:
    def tokens(start: int, stop: int) -> int:
        return sum(len(chunk) + 1 for chunk in ids[start:stop]) - 1

    spans, start, count = [], 0, len(ids)
    while not spans or spans[-1][1] < count:
        if spans:
            reached = spans[-1][1]
            start = max(reached - overlap, 0)
            while tokens(start, reached + 1) > window:
                start += 1
        stop = max(n for n in range(start + 1, count + 1) if tokens(start, n) <= window)
        spans.append((start, stop))

    def context(chunk: int, start: int, stop: int) -> float:
        before = tokens(start, chunk) + 1 if start else math.inf
        after = tokens(chunk + 1, stop) + 1 if stop < count else math.inf
        return min(before, after)

    model, rows = tiny.model().double(), []
    for chunk in range(count):
        holding = [span for span in spans if span[0] <= chunk < span[1]]
        start, stop = max(holding, key=lambda span: context(chunk, *span))
        text = [token for i in range(start, stop) for token in (*ids[i], 0)][:-1]
        first = tokens(start, chunk) + 1 if chunk > start else 0
        with torch.no_grad():
            hidden_LD = model(input_ids=torch.tensor([text])).last_hidden_state[0]
        rows.append(hidden_LD[first : first + len(ids[chunk])].mean(0).numpy())
    return np.stack(rows)


def test_a_document_far_beyond_the_window_is_read_in_bounded_memory():
    embedder = Embedder(tiny.model(layers=1), tiny.tokenizer(), device="cpu")
    chunks = [TEXTS[i % 64] for i in range(14_000)]
    total = sum(map(len, tokenize(tiny.tokenizer(), chunks, 1_000)))
    assert total > 200_000
    read = []
    embedder.model.register_forward_pre_hook(
        lambda module, _, kwargs: read.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    (codes,) = embedder.encode_documents([chunks], overlap=2)
    assert codes.shape == (14_000, 32) and (codes != 0).any(axis=1).all()
    assert max(read) <= 1_024 and total < sum(read) < 2 * total


def test_a_chunk_longer_than_the_window_is_refused_with_the_remedy(embedder):
    long = " ".join(WORDS * 5)
    with pytest.raises(
        ValueError, match=r"Chunk 1 of document 1 has \d+ tokens, the window holds 256: split"
    ):
        embedder.encode_documents([["short"], ["a", long]])
    with pytest.raises(ValueError, match="the window holds 20"):
        embedder.encode_documents([[long]], window=20, chunk_length=21)
    assert embedder.encode_documents([["short"], ["a", long] * 8], chunk_length=20)[1].shape == (16, 32)


def test_the_mean_of_the_token_vectors_is_the_vector(embedder):
    tokens = embedder.encode_tokens(TEXTS)
    assert [len(part) for part in tokens] == [len(ids) for ids in tokenize(tiny.tokenizer(), TEXTS, 256)]
    means = np.stack([part.mean(0) for part in tokens])
    np.testing.assert_allclose(means, embedder.encode(TEXTS, "float32"), atol=2e-6, rtol=1e-5)
    assert {part.shape[1] for part in embedder.encode_tokens(TEXTS, dimensions=8)} == {8}
    assert [len(part) for part in embedder.encode_tokens(TEXTS, max_length=1)] == [1] * 64
    options = {"window": 60, "overlap": 2, "chunk_length": 9}
    expected = embedder.encode_documents(DOCUMENTS, "float32", **options)
    found = embedder.encode_document_tokens(DOCUMENTS, **options)
    for chunks, rows in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.stack([c.mean(0) for c in chunks]), rows, atol=2e-6, rtol=1e-5)
    assert embedder.encode_tokens([]) == embedder.encode_document_tokens([]) == []


def test_several_devices_give_what_one_gives(embedder):
    both = Embedder(tiny.model(), tiny.tokenizer(), token_budget=40, device=["cpu", "cpu"])
    np.testing.assert_allclose(
        both.encode(TEXTS * 8, "float32"), embedder.encode(TEXTS * 8, "float32"), atol=2e-6, rtol=1e-5
    )
    for one, two in zip(both.encode_tokens(TEXTS), embedder.encode_tokens(TEXTS), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5)
    both.model.norm.weight.data[:] = torch.nan  # an error in one thread ends the others
    with pytest.raises(ValueError, match="NaN"):
        both.encode(TEXTS)


def test_what_lies_ahead_is_made_in_time_and_its_errors_arrive():
    def items():
        yield from (1, 2)
        raise ValueError("three")

    found = ahead(items())
    assert [next(found), next(found)] == [1, 2]
    with pytest.raises(ValueError, match="three"):
        next(found)
    assert list(ahead(iter([]))) == []
    started = []
    lazy = ahead(started.append(n) or n for n in range(1, 9))
    assert next(lazy) == 1
    lazy.close()
    assert started in ([1], [1, 2])


def test_special_tokens_stand_around_texts_and_documents(embedder):
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    special = Embedder(
        tiny.model(), tokenizer, device="cpu", special_tokens=True, separator="<|fim_pad|>", max_length=9
    )
    assert (embedder.separator_id, special.separator_id, special.special_tokens) == (0, 3, True)
    marked = [f"<|im_start|>{text}<|im_end|>" for text in TEXTS]
    np.testing.assert_allclose(
        special.encode(TEXTS, "float32", max_length=200), embedder.encode(marked, "float32"), atol=1e-5
    )
    one = special.encode_tokens([TEXTS[4]])[0]  # cut to its limit, the last token kept
    ids = tokenizer(TEXTS[4])["input_ids"]
    assert len(one) == 9 < len(ids)
    cut = embedder.tokenizer.decode([*ids[:8], ids[-1]])
    np.testing.assert_allclose(one, embedder.encode_tokens([cut])[0], atol=1e-5)
    document = special.encode_documents([TEXTS[:2]], "float32")[0]
    joined = embedder.encode_tokens([f"<|im_start|>{TEXTS[0]}<|fim_pad|>{TEXTS[1]}<|im_end|>"])[0]
    first = len(tokenizer(TEXTS[0])["input_ids"]) - 1
    expected = np.stack([joined[:first].mean(0), joined[first + 1 :].mean(0)])
    np.testing.assert_allclose(document, expected, atol=1e-5)
    alone = special.encode_documents([[text] for text in TEXTS], "float32")
    np.testing.assert_allclose(
        np.concatenate(alone), special.encode(TEXTS, "float32", max_length=200), atol=1e-5
    )
    with pytest.raises(ValueError, match="at least 3, got 2: a text has 2 special tokens"):
        special.encode(TEXTS, max_length=2)


def test_truncation_and_padding_set_by_others_change_nothing(embedder):
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    other = Embedder(tiny.model(), tokenizer, device="cpu")
    np.testing.assert_array_equal(other.encode(TEXTS), embedder.encode(TEXTS))


def test_normalised_vectors_have_unit_length(embedder):
    unit = Embedder(tiny.model(), tiny.tokenizer(), normalize=True, device="cpu")
    rows = embedder.encode(TEXTS, "float32")
    expected = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    np.testing.assert_allclose(unit.encode(TEXTS, "float32"), expected, atol=1e-6)
    np.testing.assert_allclose(unit.encode(TEXTS, "float32", 8), expected[:, :8], atol=1e-6)
    np.testing.assert_array_equal(unit.encode(TEXTS, "binary"), embedder.encode(TEXTS, "binary"))


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
