import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tiny_foreign
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer, Qwen3Config, Qwen3Model

import tiny
from fake_hub import fake_hub
from unmask import Embedder
from unmask.models import backbone
from unmask.models.instructions import instructed
from unmask.models.interchange import load
from unmask.models.quantizers import BinaryQuantizer, Int8Quantizer, sentence_transformer

WORDS = " ".join(tiny.TEXTS[:5]).split()
TEXTS = [" ".join(WORDS[i % 7 : i % 7 + 1 + i * 5 % 23]) for i in range(24)]
LONG = " ".join(WORDS * 12)  # more tokens than there are positions
DOCUMENTS = [TEXTS[:3], TEXTS[3:4], TEXTS[4:9]]


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("pooling", ["mean", "lasttoken"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("make", [tiny_foreign.bert, tiny_foreign.causal_qwen3])
def test_a_sentence_transformers_model_gives_the_same_vectors(tmp_path, make, normalize, pooling):
    path = tiny_foreign.sentence_transformers(
        make(tmp_path / "a"), tmp_path / "b", pooling, normalize=normalize
    )
    theirs = SentenceTransformer(str(path), device="cpu").encode([*TEXTS, " ".join(WORDS * 4)])
    embedder = Embedder.from_pretrained(path, device="cpu")
    ours = embedder.encode([*TEXTS, " ".join(WORDS * 4)], "float32")
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert (embedder.special_tokens, embedder.normalize) == (True, normalize)


def test_a_released_qwen3_embedding_gives_the_same_vectors(tmp_path):
    path = tiny_foreign.qwen3_embedding(tmp_path / "a")
    theirs = SentenceTransformer(str(path), device="cpu")
    embedder = Embedder.from_pretrained(path, device="cpu")
    assert (embedder.pooling, embedder.special_tokens, embedder.normalize) == ("last", True, True)
    vectors = embedder.encode(TEXTS, "float32")
    np.testing.assert_allclose(vectors, theirs.encode(TEXTS), atol=1e-5)
    asked = "Given a web search query, retrieve relevant passages that answer the query"
    queries = embedder.encode([instructed(asked, text) for text in TEXTS], "float32")
    np.testing.assert_allclose(queries, theirs.encode(TEXTS, prompt_name="query"), atol=1e-5)
    assert abs(queries - vectors).max() > 1e-2


def test_a_length_limit_of_a_sentence_transformers_model_holds(tmp_path):
    path = tiny_foreign.sentence_transformers(tiny_foreign.bert(tmp_path / "a"), tmp_path / "b")
    edit(path / "sentence_bert_config.json", max_seq_length=10)
    theirs = SentenceTransformer(str(path), device="cpu")
    embedder = Embedder.from_pretrained(path, device="cpu")
    assert embedder.max_length == theirs.max_seq_length == 10
    np.testing.assert_allclose(embedder.encode(TEXTS, "float32"), theirs.encode(TEXTS), atol=1e-5)


def test_padding_and_cuts_in_a_tokenizers_own_file_do_not_count(tmp_path):
    path = tiny_foreign.sentence_transformers(tiny_foreign.bert(tmp_path / "a"), tmp_path / "b")
    cut = {"max_length": 6, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    pad = {"strategy": {"Fixed": 6}, "direction": "Right", "pad_id": 0, "pad_type_id": 0}
    pad |= {"pad_token": "[PAD]", "pad_to_multiple_of": None}
    edit(path / "tokenizer.json", truncation=cut, padding=pad)
    theirs = SentenceTransformer(str(path), device="cpu").encode(TEXTS)
    ours = Embedder.from_pretrained(path, device="cpu").encode(TEXTS, "float32")
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_what_an_embedder_cannot_do_is_refused(tmp_path):
    source = tiny_foreign.bert(tmp_path / "a")
    for pooling in ("cls", "max", ("mean", "cls")):
        with pytest.raises(ValueError, match=r"pooling .* is not supported: only mean and lasttoken"):
            load(tiny_foreign.sentence_transformers(source, tmp_path / "b", pooling))
    path = tiny_foreign.sentence_transformers(source, tmp_path / "c")
    listed = json.loads((path / "modules.json").read_text())
    for kind in ("sentence_transformers.models.Dense", "their_code.Normalize"):
        more = {"idx": 2, "name": "2", "path": "2_More", "type": kind}
        (path / "modules.json").write_text(json.dumps([*listed, more]))
        with pytest.raises(ValueError, match=r"modules Transformer, Pooling, \w+ are not supported"):
            load(path)
    (path / "modules.json").write_text(json.dumps(listed))
    edit(path / "sentence_bert_config.json", do_lower_case=True)
    with pytest.raises(ValueError, match="lower case"):
        load(path)
    (path / "1_Pooling" / "config.json").unlink()
    with pytest.raises(ValueError, match=r"is no checkpoint: 1_Pooling/config.json missing"):
        load(path)


def test_a_default_prompt_is_not_added_and_the_user_is_told(tmp_path):
    path = tiny_foreign.sentence_transformers(
        tiny_foreign.bert(tmp_path / "a"),
        tmp_path / "b",
        prompts={"query": "q "},
        default_prompt_name="query",
    )
    theirs = SentenceTransformer(str(path), device="cpu").encode(TEXTS)
    with pytest.warns(UserWarning, match="adds the prompt 'q ' to every text"):
        embedder = Embedder.from_pretrained(path, device="cpu")
    np.testing.assert_allclose(embedder.encode([f"q {t}" for t in TEXTS], "float32"), theirs, atol=1e-5)


def naive(chunks: list[str]) -> np.ndarray:
    """Vectors of a document's chunks in float64, from a Qwen3Model built by hand."""
    ours = tiny.model()
    shape = ours.config
    model = Qwen3Model(
        Qwen3Config(
            vocab_size=shape.vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=256,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0}, is_causal=False,
            attn_implementation="eager",
        )
    ).double()  # fmt: skip
    model.load_state_dict({name: tensor.double() for name, tensor in ours.state_dict().items()})
    separator = tiny.tokenizer().convert_tokens_to_ids("<|endoftext|>")
    tokens, spans = [], []
    for chunk in chunks:
        tokens += [separator] if tokens else []
        ids = tiny.tokenizer()(chunk, add_special_tokens=False)["input_ids"]
        spans.append(slice(len(tokens), len(tokens) + len(ids)))
        tokens += ids
    with torch.no_grad():
        hidden_LD = model(torch.tensor([tokens])).last_hidden_state[0]
    return np.stack([hidden_LD[span].mean(dim=0).numpy() for span in spans])


@pytest.mark.parametrize("contextual", [False, True])
def test_a_released_pplx_embed_checkpoint_loads_into_the_stock_class(tmp_path, contextual):
    path = tiny_foreign.released(tmp_path / "pplx-embed", contextual=contextual)
    assert len(list(path.glob("*.safetensors"))) > 1
    embedder = Embedder.from_pretrained(path, device="cpu")
    assert type(embedder.model) is Qwen3Model
    expected = np.concatenate([naive([text]) for text in TEXTS])
    np.testing.assert_allclose(embedder.encode(TEXTS, "float32"), expected, atol=2e-6)
    codes = np.floor(127 * np.tanh(expected) + 0.5)
    difference = abs(embedder.encode(TEXTS) - codes)
    assert difference.max() <= 1
    assert (difference > 0).mean() <= 0.001
    for ours, document in zip(embedder.encode_documents(DOCUMENTS, "float32"), DOCUMENTS, strict=True):
        np.testing.assert_allclose(ours, naive(document), atol=2e-6)
    stock = SentenceTransformer(str(embedder.save_pretrained(tmp_path / "stock")), device="cpu")
    assert not hasattr(stock[0].config, "auto_map")
    np.testing.assert_allclose(stock.encode(TEXTS), expected, atol=1e-5)


def test_weights_that_do_not_fit_the_configuration_are_refused(tmp_path):
    path = tiny_foreign.released(tmp_path / "a")
    shard = next(path.glob("*.safetensors"))
    weights = load_file(shard)
    name = next(iter(weights))
    save_file(weights | {"extra.weight": weights.pop(name)}, shard, {"format": "pt"})
    with pytest.raises(ValueError, match="weights are not those of its configuration"):
        load(path)


def test_a_checkpoint_of_a_training_stage_brings_its_pooling(tmp_path):
    path = backbone.save(tiny.model(), tiny.tokenizer(), tmp_path / "m", stage="pair", pooling="last")
    assert load(path).options == {"pooling": "last"}
    tiny.model().save_pretrained(tmp_path / "plain")
    tiny.tokenizer().save_pretrained(tmp_path / "plain")
    assert load(tmp_path / "plain").options == {}


def test_what_is_no_checkpoint_is_refused_in_one_message(tmp_path, monkeypatch):
    monkeypatch.delenv("UNMASK_MIRROR", raising=False)
    for nothing in (tmp_path / "none", "artifacts/none/at/all"):
        with pytest.raises(ValueError, match="is no checkpoint: there is no such directory"):
            load(nothing)
    with pytest.raises(ValueError, match=r"config.json and \*.safetensors missing"):
        load(tmp_path)
    with pytest.raises(ValueError, match=r"nobody/nothing is no directory here.*HF_HUB_OFFLINE is set"):
        load("nobody/nothing")
    path = backbone.save(tiny.model(), tiny.tokenizer(), tmp_path / "m")
    edit(path / "config.json", model_type="mamba7", auto_map={"AutoModel": "code.Mamba"})
    with pytest.raises(ValueError, match="architecture 'mamba7' is unknown to the installed transformers"):
        load(path)


def test_a_hub_name_is_found_in_the_mirror(tmp_path, monkeypatch):
    tiny_foreign.released(tmp_path / "perplexity" / "pplx-embed")
    monkeypatch.setenv("UNMASK_MIRROR", str(tmp_path))
    model, _, options = load("perplexity/pplx-embed")
    assert type(model) is Qwen3Model
    assert options == {"pooling": "mean", "separator": "<|endoftext|>"}


@pytest.mark.slow
def test_a_hub_name_is_downloaded_once_and_found_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("fake_hub.LFS_FROM", 10**9)  # the client does not look for large files at one host
    path = tiny_foreign.sentence_transformers(tiny_foreign.bert(tmp_path / "a"), tmp_path / "b")
    files = {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}
    code = """
from huggingface_hub import constants
from unmask.models.interchange import load

def show(name):
    try:
        print(load(name).options)
    except ValueError as error:
        print(error)

for name in ("org/model", "org/none", "org/gated"):
    show(name)
constants.HF_HUB_OFFLINE = True
for name in ("org/model", "org/none"):
    show(name)
"""
    with fake_hub() as hub:
        hub.add("model", "org/model", files | {"pytorch_model.bin": b"P", "half/model.safetensors": b"S"})
        hub.add("model", "org/gated", files, gated=True)
        home = {"HF_HOME": str(tmp_path / "home"), "UNMASK_MIRROR": ""}
        settings = home | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | settings, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert not hub.fetched("pytorch_model.bin") and not hub.fetched("half/model.safetensors")
    online, unknown, gated, cached, offline = done.stdout.splitlines()
    assert online == cached == str(load(path).options)
    assert "org/none" in unknown and "Repository Not Found" in unknown
    assert "org/gated" in gated and "Access to this dataset is restricted" in gated
    assert "org/none is no directory here" in offline and "HF_HUB_OFFLINE is set" in offline


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
        "# my-model", "- int8: 32 bytes an embedding, 31,250 documents", "- binary: 4 bytes",
        "- stage: merge", "- t: 0.25",
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

    monkeypatch.setattr("unmask.models.interchange.model_card", full)
    other = Embedder(tiny.model(seed=1), tiny.tokenizer(), device="cpu")
    with pytest.raises(OSError, match="No space left"):
        other.save_pretrained(path)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    assert {file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
