import numpy as np
import pytest
import tiny_foreign
import torch
from huggingface_hub import ModelCard
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

import tiny
from unmask import Embedder
from unmask.models import backbone
from unmask.models.interchange import BinaryQuantizer, Int8Quantizer, sentence_transformer

WORDS = " ".join(tiny.TEXTS[:5]).split()
TEXTS = [" ".join(WORDS[i % 7 : i % 7 + 1 + i * 5 % 23]) for i in range(64)]
LONG = " ".join(WORDS * 12)  # more tokens than there are positions


@pytest.fixture(scope="module")
def embedder():
    return Embedder(tiny.model(), tiny.tokenizer(), token_budget=200, device="cpu")


@pytest.fixture(scope="module")
def path(embedder, tmp_path_factory):
    return embedder.save_pretrained(tmp_path_factory.mktemp("saved") / "deep" / "model")


def test_sentence_transformers_returns_the_same_vectors_without_remote_code(embedder, path):
    model = SentenceTransformer(str(path), device="cpu", trust_remote_code=False)
    assert [type(module).__name__ for module in model] == ["Transformer", "Pooling"]
    assert not list(path.rglob("*.py"))
    assert (model.max_seq_length, model.similarity_fn_name) == (256, "cosine")
    np.testing.assert_allclose(
        model.encode([*TEXTS, LONG]), embedder.encode([*TEXTS, LONG], "float32"), atol=1e-5
    )


def test_the_last_token_reaches_the_first_position_in_sentence_transformers(path):
    model = SentenceTransformer(str(path), device="cpu")
    for more in ([], [LONG]):  # alone, and padded
        one, two = (model.encode([f"Read {end}", *more], output_value="token_embeddings")[0] for end in "12")
        assert len(one) == len(two) > 2
        assert abs(one[0] - two[0]).max() > 1e-4


@pytest.mark.parametrize("precision", ["int8", "binary"])
def test_the_quantiser_module_gives_the_same_codes(embedder, path, precision):
    model = sentence_transformer(path, precision, device="cpu")
    codes, expected = model.encode(TEXTS), embedder.encode(TEXTS, precision)
    assert codes.dtype == np.float32
    np.testing.assert_array_equal(codes, codes.astype(np.int8))
    differing = codes != expected
    assert differing.mean() <= 0.001
    assert abs(codes - expected)[differing].max(initial=0) <= (1 if precision == "int8" else 2)
    cosine = model.similarity(codes[:4], codes[:9])
    unit = expected / np.linalg.norm(expected.astype(float), axis=1, keepdims=True)
    np.testing.assert_allclose(cosine, unit[:4] @ unit[:9].T, atol=0.01)


def test_float_takes_no_quantiser_and_an_unknown_precision_is_refused(embedder, path):
    floats = sentence_transformer(path, "float32", device="cpu").encode(TEXTS)
    np.testing.assert_allclose(floats, embedder.encode(TEXTS, "float32"), atol=1e-5)
    with pytest.raises(ValueError, match="unknown precision 'int4': choose float32, int8, binary"):
        sentence_transformer(path, "int4")


@pytest.mark.parametrize("kind", [Int8Quantizer, BinaryQuantizer])
def test_a_pipeline_with_a_quantiser_is_saved_and_loaded(path, tmp_path, kind):
    model = SentenceTransformer(str(path), device="cpu")
    model.append(kind())
    model.save(str(tmp_path / "m"))
    loaded = SentenceTransformer(str(tmp_path / "m"), device="cpu", trust_remote_code=True)
    assert type(loaded[-1]) is kind
    np.testing.assert_array_equal(loaded.encode(TEXTS), model.encode(TEXTS))


def test_transformers_loads_what_is_saved(embedder, path):
    model, tokenizer = AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    assert type(model).__name__ == "Qwen3Model"
    with torch.no_grad():
        hidden_1LD = model(**tokenizer(TEXTS[5], return_tensors="pt")).last_hidden_state
    np.testing.assert_allclose(hidden_1LD[0].mean(0), embedder.encode(TEXTS[5:6], "float32")[0], atol=1e-5)


def test_an_embedder_comes_back_with_all_its_options(tmp_path):
    options = {"pooling": "last", "max_length": 20, "separator": "<|im_end|>", "normalize": True}
    saved = Embedder(tiny.model(bidirectional=False), tiny.tokenizer(), device="cpu", **options)
    path = saved.save_pretrained(tmp_path / "m")
    loaded = Embedder.from_pretrained(path, device="cpu")
    for name in ("pooling", "max_length", "separator_id", "special_tokens", "normalize"):
        assert getattr(loaded, name) == getattr(saved, name), name
    np.testing.assert_array_equal(loaded.encode(TEXTS), saved.encode(TEXTS))
    model = SentenceTransformer(str(path), device="cpu")
    assert [type(module).__name__ for module in model] == ["Transformer", "Pooling", "Normalize"]
    assert model.max_seq_length == 20
    np.testing.assert_allclose(
        model.encode([*TEXTS, LONG]), saved.encode([*TEXTS, LONG], "float32"), atol=1e-5
    )


@pytest.mark.parametrize("special_tokens", [False, True])
@pytest.mark.parametrize("make", [tiny_foreign.bert, tiny_foreign.causal_qwen3])
def test_special_tokens_are_added_exactly_where_the_embedder_adds_them(tmp_path, make, special_tokens):
    source = make(tmp_path / "a")
    model, tokenizer = backbone.load(source), backbone.load_tokenizer(source)
    embedder = Embedder(model, tokenizer, special_tokens=special_tokens, device="cpu")
    path = embedder.save_pretrained(tmp_path / "b")
    theirs = SentenceTransformer(str(path), device="cpu").encode([*TEXTS, LONG])
    np.testing.assert_allclose(theirs, embedder.encode([*TEXTS, LONG], "float32"), atol=1e-5)
    loaded = Embedder.from_pretrained(path, device="cpu")
    assert loaded.tokenizer.padding_side == "right"
    np.testing.assert_array_equal(loaded.encode(TEXTS), embedder.encode(TEXTS))
    assert embedder.tokenizer.num_special_tokens_to_add() > 0  # the embedder's own tokenizer is as it was


def test_the_model_card_says_what_the_checkpoint_says(tmp_path):
    stage = backbone.save(
        tiny.model(), tiny.tokenizer(), tmp_path / "stage", stage="merge", t=0.25, fingerprint="0123"
    )
    path = Embedder.from_pretrained(stage, device="cpu").save_pretrained(tmp_path / "my-model")
    card = ModelCard.load(path / "README.md")
    assert card.data.library_name == "sentence-transformers"
    assert card.data.pipeline_tag == "feature-extraction"
    for line in (
        "# my-model", "| int8 | 32 | 31,250 |", "| binary | 4 | 250,000 |", "- stage: merge", "- t: 0.25",
        "Qwen3Model with bidirectional attention", "mean pooling, 32 dimensions, at most 256 tokens",
        'Embedder.from_pretrained("my-model")',
    ):  # fmt: skip
        assert line in card.text, line
    assert backbone.facts(path)["stage"] == "merge"
    assert "fingerprint" not in backbone.facts(path)
    causal = Embedder(tiny.model(bidirectional=False), tiny.tokenizer(), device="cpu")
    card = ModelCard.load(causal.save_pretrained(tmp_path / "other") / "README.md")
    assert "with causal attention" in card.text
    assert "Not recorded." in card.text


def test_an_older_transformers_that_would_ignore_the_attention_is_refused(path, monkeypatch):
    monkeypatch.setattr(
        "sentence_transformers.util.environment.get_installed_version",
        lambda name: "5.1.0" if name == "transformers" else "1.0",
    )
    with pytest.raises(ImportError, match=r"transformers>=5.2.* ignore is_causal"):
        SentenceTransformer(str(path), device="cpu")


def test_a_failed_save_leaves_the_old_directory_and_nothing_else(embedder, tmp_path, monkeypatch):
    path = embedder.save_pretrained(tmp_path / "m")
    before = {file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()}

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("unmask.models.interchange.saving.model_card", full)
    other = Embedder(tiny.model(seed=1), tiny.tokenizer(), device="cpu")
    with pytest.raises(OSError, match="No space left"):
        other.save_pretrained(path)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    assert {file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
