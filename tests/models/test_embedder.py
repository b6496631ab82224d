import copy
import math
import weakref

import numpy as np
import pandas as pd
import pytest
import torch
from tokenizers import normalizers, processors

import tiny
import tiny_families
from closeness import assert_close
from unmask import Embedder, fit
from unmask.data.tokens import SPECIAL_TOKENS
from unmask.models import backbone
from unmask.models import embedder as module
from unmask.models.quantize import BITS

WORDS = " ".join(tiny.TEXTS[:5]).split()
TEXTS = [" ".join(WORDS[i % 7 : i % 7 + 1 + i * 5 % 23]) for i in range(64)]
DOCUMENTS = [TEXTS[:3], TEXTS[3:4], TEXTS[4:9]]


def make(**options):
    return Embedder(tiny.model(), tiny.tokenizer(), **{"device": "cpu", **options})


@pytest.fixture(scope="module")
def embedder():
    return make(token_budget=200)


def test_batched_equals_single_in_the_order_of_the_texts_and_a_document_of_one_chunk_is_its_chunk(embedder):
    batched = embedder.encode(TEXTS, "float32")
    single = np.concatenate([embedder.encode([text], "float32") for text in TEXTS])
    assert batched.dtype == np.float32
    assert_close(batched, single)
    parts = embedder.encode_documents([[text] for text in TEXTS], "float32")
    assert [part.shape for part in parts] == [(1, 32)] * 64
    assert_close(np.concatenate(parts), batched)


@pytest.mark.parametrize("options", [{"token_budget": 1}, {"token_budget": 10**6}, {"device": ["cpu"] * 2}])
def test_neither_the_token_budget_nor_several_devices_change_a_vector(embedder, options):
    other = make(**options)
    expected = embedder.encode(TEXTS * 8, "float32")
    assert_close(other.encode(TEXTS * 8, "float32"), expected)
    for one, two in zip(other.encode_tokens(TEXTS), embedder.encode_tokens(TEXTS), strict=True):
        assert_close(one, two)


def test_precisions_come_from_the_same_unquantised_mean(embedder):
    mean, int8, binary, packed = (embedder.encode(TEXTS, p) for p in ("float32", "int8", "binary", "ubinary"))
    assert (int8.dtype, binary.dtype, packed.dtype) == (np.int8, np.int8, np.uint8)
    np.testing.assert_array_equal(int8, np.floor(127 * torch.from_numpy(mean).tanh().numpy() + 0.5))
    np.testing.assert_array_equal(binary, np.where(mean >= 0, 1, -1))
    assert ((binary == -1) & (int8 == 0)).any()  # the sign of the codes would differ
    np.testing.assert_array_equal(packed, np.packbits(binary > 0, axis=1))
    np.testing.assert_array_equal(embedder.encode(TEXTS), int8)


@pytest.mark.parametrize("precision", BITS)
def test_fewer_dimensions_are_a_prefix(embedder, precision):
    whole, prefix = embedder.encode(TEXTS, precision), embedder.encode(TEXTS, precision, dimensions=16)
    np.testing.assert_array_equal(prefix, whole[:, : 2 if precision == "ubinary" else 16])
    parts = [embedder.encode_documents(DOCUMENTS, precision, dimensions) for dimensions in (16, None)]
    for one, two in zip(*parts, strict=True):
        np.testing.assert_array_equal(one, two[:, : one.shape[1]])


def test_nothing_in_nothing_out_and_a_generator_is_a_list(embedder):
    assert embedder.encode([]).shape == (0, 32)
    assert embedder.encode([], "ubinary", 16).shape == (0, 2)
    assert embedder.encode_documents([]) == embedder.encode_tokens([]) == []
    found = embedder.encode(text for text in TEXTS)
    np.testing.assert_array_equal(found, embedder.encode(TEXTS))


REFUSED = {
    "got one string": [lambda one: one.encode("a"), lambda one: one.encode_documents("a")],
    "got one string, 'a text'": [lambda one: one.encode_documents([["one"], "a text"])],
    "unknown precision 'int4': choose one of float32, int8": [lambda one: one.encode([], "int4")],
    "there are 32 dimensions, not 33": [lambda one: one.encode_documents([], "int8", 33)],
    "multiple of 8": [lambda one: one.encode(TEXTS, "ubinary", 12)],
    "document 1 has no chunks": [lambda one: one.encode_documents([["one"], []])],
    "expected a list, got one dict": [lambda one: one.encode({"one": 1})],
    "expected a list, got one set": [lambda one: one.encode_documents([{"one"}])],
    "expected a list, got one DataFrame": [lambda one: one.encode(pd.DataFrame({"texts": ["one"]}))],
    "max_length must be at least 1, and whole, got": [
        lambda one, n=n: one.encode(["one"], max_length=n) for n in (0, 2.5, "2", float("nan"))
    ],
    "dimensions must be at least 1, and whole, got 0": [lambda one: one.encode(["one"], dimensions=0)],
    "chunk_length must be at least 1": [lambda one: one.encode_documents(DOCUMENTS, chunk_length=-1)],
    "window must be at least 1, and whole, got 0": [lambda one: make(window=0)],
    "token_budget must be at least 1, and whole, got 0": [lambda one: make(token_budget=0)],
    "pooling must be 'mean' or 'last', got 'cls'": [lambda one: make(pooling="cls")],
    "no late chunking": [lambda one: make(pooling="last").encode_documents(DOCUMENTS)],
}


@pytest.mark.parametrize(("message", "calls"), REFUSED.items())
def test_requests_that_cannot_work_are_refused(embedder, message, calls):
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call(embedder)


BAD = {"": "has no tokens", "half \ud83d": "has a lone surrogate"}
BAD |= {None: "is no string but of type NoneType", 3.0: "is no string but of type float"}


@pytest.mark.parametrize(("bad", "message"), BAD.items())
def test_a_bad_text_is_named_before_anything_is_computed(embedder, bad, message, monkeypatch):
    monkeypatch.setattr(type(embedder.model), "forward", lambda *_, **__: pytest.fail("computed"))
    error = ValueError if isinstance(bad, str) else TypeError
    with pytest.raises(error, match=f"Text 70 of 71 {message}"):
        embedder.encode([*TEXTS, *TEXTS[:6], bad])
    with pytest.raises(error, match=f"Chunk 2 of document 3 {message}"):
        embedder.encode_documents([*DOCUMENTS, ["one", "two", bad, "four"], TEXTS])


def test_white_space_is_a_text_where_the_tokenizer_has_tokens_for_it(embedder):
    rows = embedder.encode([" ", "\n\t ", "a"], "float32")
    assert np.isfinite(rows).all() and len(np.unique(rows, axis=0)) == 3
    words = copy.deepcopy(tiny.tokenizer())
    words.backend_tokenizer.normalizer = normalizers.Strip()
    with pytest.raises(ValueError, match="Text 1 of 2 has no tokens"):
        Embedder(tiny.model(), words, device="cpu").encode(["a", "  "])


@pytest.mark.parametrize("device", ["cpu", ["cpu", "cpu"]])
def test_what_the_model_cannot_compute_is_named(device):
    broken = make(device=device)
    broken.model.embed_tokens.weight.data[int(tiny.tokenizer()("東")["input_ids"][-1])] = torch.nan
    with pytest.raises(ValueError, match=r"Text 3 of 6 \('東'\): the model returns NaN or infinity"):
        broken.encode(["a", "b", "c", "東", "d", "long 東 text"])
    with pytest.raises(ValueError, match=r"Chunk 0 of document 1 \('東'\): the model returns NaN"):
        broken.encode_document_tokens([["a"], ["東"]])


def test_tokens_that_are_added_later_are_refused_before_anything_is_read_or_written(tmp_path):
    folder = make().save_pretrained(tmp_path / "model")
    late = Embedder.from_pretrained(folder, device="cpu")
    late.tokenizer.add_tokens(["[LATE]"])
    for use in (
        lambda: late.save_pretrained(folder),
        lambda: late.encode(["a [LATE] one"]),
        lambda: late.encode_documents([["a", "[LATE]"]]),
        lambda: fit(late, [(f"q {i}", f"d {i}") for i in range(4)], hold_out=0, steps=1),
    ):
        with pytest.raises(ValueError, match=r"token '\[LATE\]' has the number 400, the model has"):
            use()
    assert Embedder.from_pretrained(folder, device="cpu").encode(["a"]).shape == (1, 32)


def test_a_text_longer_than_the_limit_is_cut(embedder):
    tokens = tiny.tokenizer().backend_tokenizer.encode(" ".join(WORDS), add_special_tokens=False)
    text, length = " ".join(WORDS), tokens.offsets[9][1]
    expected = embedder.encode([text[:length]], "float32")
    assert_close(embedder.encode([text], "float32", max_length=10), expected)
    assert_close(make(max_length=10).encode([text], "float32"), expected)
    assert make(max_length=10**6).max_length == 256
    roberta = Embedder(tiny_families.xlm_roberta(), tiny.tokenizer(), device="cpu")
    assert roberta.max_length == 255 and roberta.encode([text * 9]).shape == (1, 32)


def test_context_flows_between_the_chunks_of_a_document_and_not_between_documents(embedder):
    before = embedder.encode_documents(DOCUMENTS, "float32")
    changed = [[DOCUMENTS[0][0], "def close(self)", DOCUMENTS[0][2]], *DOCUMENTS[1:]]
    after = embedder.encode_documents(changed, "float32")
    assert (abs(before[0] - after[0]).max(axis=1) > 1e-4).all()
    for one, two in zip(before[1:], after[1:], strict=True):
        assert_close(one, two)


@pytest.mark.parametrize("given", [{}, {"window": 50}])
@pytest.mark.parametrize(("window", "overlap"), [(120, 2), (120, 35), (120, 0), (25, 3)])
def test_a_document_beyond_the_window_has_the_vectors_of_the_windows_with_most_context(
    monkeypatch, window, overlap, given
):
    """Against one forward pass per window in float64, and windows and contexts counted one by one."""
    chunks = [TEXTS[i] for i in np.random.default_rng(0).integers(0, len(TEXTS), 40)]
    ids = [chunk.tolist() for chunk in tiny.tokenize(tiny.tokenizer(), chunks, 20)]
    monkeypatch.setattr(module, "WINDOW", window)  # the paper's, although the model has room for 256 tokens
    monkeypatch.setattr(module, "OVERLAP", overlap)
    documents = [["a"], chunks, chunks[:12]]
    found = make(token_budget=200, **given).encode_documents(documents, "float32", chunk_length=20)
    assert [len(part) for part in found] == [1, 40, 12]
    window = given.get("window", window)
    assert_close(found[1], naive_windows(ids, window, overlap))
    assert_close(found[2], naive_windows(ids[:12], window, overlap))


def naive(model, ids):
    """Vectors of a document's chunks, from one forward pass in float64."""
    tokens, spans = [], []
    for chunk in ids:
        tokens += [0] if tokens else []  # <|endoftext|>
        spans.append(slice(len(tokens), len(tokens) + len(chunk)))
        tokens += chunk
    with torch.no_grad():
        hidden_LD = model.double()(torch.tensor([tokens])).last_hidden_state[0]
    return np.stack([hidden_LD[span].mean(dim=0).numpy() for span in spans])


def naive_windows(ids, window, overlap):
    def tokens(start, stop):
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

    def context(chunk, start, stop):
        before = tokens(start, chunk) + 1 if start else math.inf
        after = tokens(chunk + 1, stop) + 1 if stop < count else math.inf
        return min(before, after)

    model, rows = tiny.model(), []
    for chunk in range(count):
        holding = [span for span in spans if span[0] <= chunk < span[1]]
        start, stop = max(holding, key=lambda span: context(chunk, *span))
        rows.append(naive(model, ids[start:stop])[chunk - start])
    return np.stack(rows)


def test_a_too_long_chunk_is_refused(embedder):
    long = " ".join(WORDS * 5)
    message = r"Chunk 1 of document 1 has \d+ tokens, the window holds 256: split"
    with pytest.raises(ValueError, match=message):
        embedder.encode_documents([["short"], ["a", long]])
    assert embedder.encode_documents([["short"], ["a", long] * 8], chunk_length=20)[1].shape == (16, 32)


def test_the_mean_of_the_token_vectors_is_the_vector(embedder):
    tokens = embedder.encode_tokens(TEXTS)
    assert [len(part) for part in tokens] == [len(ids) for ids in tiny.tokenize(tiny.tokenizer(), TEXTS, 256)]
    assert_close([part.mean(0) for part in tokens], embedder.encode(TEXTS, "float32"))
    expected = embedder.encode_documents(DOCUMENTS, "float32", chunk_length=9)
    found = embedder.encode_document_tokens(DOCUMENTS, chunk_length=9)
    for chunks, rows in zip(found, expected, strict=True):
        assert_close([chunk.mean(0) for chunk in chunks], rows)


def test_special_tokens_stand_around_texts_and_documents(embedder):
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|> <|endoftext|>", special_tokens=[*zip(SPECIAL_TOKENS, range(4))]
    )
    tokenizer.backend_tokenizer.enable_padding(length=12)  # as some files have it; none of these is special
    special = Embedder(tiny.model(), tokenizer, device="cpu", special_tokens=True, max_length=9)
    around = "<|im_start|>{}<|im_end|><|endoftext|>".format
    found = special.encode(TEXTS, "float32", max_length=200)
    assert_close(found, embedder.encode(map(around, TEXTS), "float32"))
    one = special.encode_tokens([TEXTS[4]])[0]  # cut to its limit, the last tokens kept
    ids = tokenizer(TEXTS[4])["input_ids"]
    cut = embedder.tokenizer.decode([*ids[:7], *ids[-2:]])
    assert_close(one, embedder.encode_tokens([cut])[0])
    document = special.encode_documents([TEXTS[:2]], "float32")[0]
    joined = embedder.encode_tokens([around("<|endoftext|>".join(TEXTS[:2]))])[0]
    first = len(tokenizer(TEXTS[0])["input_ids"]) - 2
    assert_close(document, [joined[:first].mean(0), joined[first + 1 :].mean(0)])
    with pytest.raises(ValueError, match="at least 4, got 3: a text has 3 special tokens"):
        special.encode(TEXTS, max_length=3)


def test_normalised_vectors_have_unit_length(embedder):
    unit, rows = make(normalize=True), embedder.encode(TEXTS, "float32")
    expected = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    assert_close(unit.encode(TEXTS, "float32"), expected)
    assert_close(unit.encode(TEXTS, "float32", 8), expected[:, :8])


def test_a_language_model_with_its_output_matrix_is_refused():
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM ends in words: give its \.base_model"):
        Embedder(tiny.model(head=True), tiny.tokenizer(), device="cpu")


@pytest.mark.parametrize("device", ["gpu", "cuda:99", ["cpu", "cuda:99"]])
def test_a_device_that_is_not_there_is_named(device):
    with pytest.raises(ValueError, match=r"device .* is not on this machine: leave it out"):
        make(device=device)


@pytest.mark.parametrize(("dtype", "options"), [("float32", {"mixed_precision": True}), ("bfloat16", {})])
def test_emulated_bf16_is_refused(dtype, options, monkeypatch):
    monkeypatch.setattr(backbone, "has_bf16", lambda device: False)
    with pytest.raises(ValueError, match=r"cpu has no bf16 .* leave mixed_precision out, .* float32"):
        Embedder(tiny.model().to(getattr(torch, dtype)), tiny.tokenizer(), device="cpu", **options)


def test_mixed_precision_is_close_and_halved_weights_are_what_autocast_reads(embedder, tmp_path, monkeypatch):
    monkeypatch.setattr(backbone, "has_bf16", lambda device: True)  # a tiny model may be emulated
    half, whole = make(mixed_precision=True), make(mixed_precision=False)
    one, two = (model.encode(TEXTS, "float32") for model in (embedder, half))
    assert two.dtype == np.float32
    cosine = (one * two).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(two, axis=1)
    assert 0.999 < cosine.min() < 0.9999999
    layer = backbone.layers(half.model)[0]
    assert {p.dtype for p in layer.mlp.parameters()} == {torch.bfloat16}
    assert layer.input_layernorm.weight.dtype == torch.float32
    whole.mixed_precision = True  # autocast, over weights in float32
    assert np.array_equal(two, whole.encode(TEXTS, "float32"))
    with pytest.raises(ValueError, match="were rounded to bfloat16: load it with mixed_precision=False"):
        half.save_pretrained(tmp_path / "model")
    assert not any(tmp_path.iterdir())


def test_how_texts_are_read_is_asked_in_the_precision_that_reads_them(monkeypatch):
    """On a GPU only half precision can do without padding; the embedding matrix stays in float32."""
    asked, half = [], make()
    half.mixed_precision = True
    spy = lambda model, inference: asked.append(torch.is_autocast_enabled("cpu"))  # noqa: E731
    monkeypatch.setattr("unmask.models.embedder.unpadded", spy)
    half.encode(TEXTS[:2])
    assert asked == [True]


def test_a_closed_embedder_gives_its_memory_back():
    embedder = make()
    model = weakref.ref(embedder.model)
    embedder.encode(TEXTS)
    embedder.close()
    assert model() is None
