"""A ready backbone may be of any family of decoders that honours `is_causal`."""

import json

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, PreTrainedTokenizerFast

import tiny
import tiny_families
from unmask import Embedder
from unmask.data.tokens import end_token, ending
from unmask.models import backbone
from unmask.models.attention import unpadded, unpadded_inputs
from unmask.models.encoding import TokenSequence, encode_rows
from unmask.models.merge import slerp
from unmask.models.onnx_export import export_onnx

FAMILIES = ("qwen3", "llama", "olmo2")
TEXTS = ["Read a table.", "def close(self): return self.stream.close()", "東京"]
family = pytest.mark.parametrize("family", FAMILIES)


def saved(family, folder, seed=0, **facts):
    built = tiny_families.model(family, bidirectional=True, head=True, seed=seed)
    return backbone.save(built, tiny.tokenizer(), folder, **facts)


@family
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("padded", [False, True])
def test_it_sees_both_sides_once_its_mask_is_off(family, attention, batch, padded, tmp_path):
    model = backbone.load(saved(family, tmp_path / "m"), attention=attention)
    tokens = torch.arange(4, 13).repeat(batch, 1)
    last = 6 if padded else 8
    mask = (torch.arange(9) <= last).long().expand(batch, 9) if padded else None
    changed = tokens.clone()
    changed[:, last] += 1
    with torch.no_grad():
        before, after = (model(x, attention_mask=mask).last_hidden_state[:, 0] for x in (tokens, changed))
    assert (before != after).any(dim=1).all()
    causal = tiny_families.model(family)
    assert not backbone.sees_both_sides(causal) and backbone.sees_both_sides(model)
    assert model.config.mask_token_id == tiny.tokenizer().convert_tokens_to_ids("<|fim_pad|>")


@family
def test_it_is_saved_for_everybody(family, tmp_path):
    embedder = Embedder.from_pretrained(saved(family, tmp_path / "m"))
    ours = embedder.encode(TEXTS, "float32")
    single = np.concatenate([embedder.encode([text], "float32") for text in TEXTS])
    np.testing.assert_allclose(ours, single, atol=1e-5)
    exported = embedder.save_pretrained(tmp_path / "st")
    np.testing.assert_allclose(SentenceTransformer(str(exported)).encode(TEXTS), ours, atol=1e-5)
    assert AutoModel.from_pretrained(exported).config.is_causal is False
    np.testing.assert_allclose(Embedder.from_pretrained(exported).encode(TEXTS, "float32"), ours, atol=1e-6)


@family
def test_it_is_read_without_padding(family):
    model = tiny_families.model(family, bidirectional=True)
    assert unpadded(model, inference=True)
    texts = [TokenSequence(tokens) for tokens in tiny.sequences(6, seed=3)]
    with torch.no_grad():
        packed, padded = (encode_rows(model, texts, packed=packed) for packed in (True, False))
    torch.testing.assert_close(packed, padded, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("built", [tiny_families.gpt_neo, tiny_families.mistral])
def test_families_that_cannot_be_are_padded(built):
    """GPT-Neo has attention of its own, Mistral a window."""
    model = built()
    assert not unpadded(model, inference=True)
    with pytest.raises(ValueError, match="pad its batches"):
        unpadded_inputs(model, [3, 4], "cpu")


@family
def test_it_is_exported_to_onnx(family, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    embedder = Embedder.from_pretrained(saved(family, tmp_path / "m"))
    session = onnxruntime.InferenceSession(export_onnx(embedder, tmp_path / "onnx") / "model.onnx")
    ids = embedder.tokenizer(TEXTS[1], add_special_tokens=False, return_tensors="np")["input_ids"]
    feed = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    vector = session.run(["sentence_embedding"], feed)[0]
    np.testing.assert_allclose(vector, embedder.encode(TEXTS[1:2], "float32"), atol=1e-4)


@family
def test_two_of_it_are_merged(family, tmp_path):
    paths = [saved(family, tmp_path / str(seed), seed, pooling="mean") for seed in (1, 2)]
    merged = backbone.load(slerp(*paths, 0.5, tmp_path / "merged"))
    assert backbone.sees_both_sides(merged)
    a, b = (dict(backbone.load(path).named_parameters()) for path in paths)
    for name, tensor in merged.named_parameters():
        cosine = torch.cosine_similarity(a[name].flatten(), b[name].flatten(), dim=0)
        if cosine.abs() < 0.9995:  # norms' gains are equal
            theta = torch.arccos(cosine)
            middle = torch.sin(theta / 2) / torch.sin(theta) * (a[name] + b[name])
            torch.testing.assert_close(tensor, middle, rtol=1e-4, atol=1e-5)


@family
def test_a_saved_checkpoint_brings_vocabulary_and_merges_beside_its_tokenizer(family, tmp_path):
    path = saved(family, tmp_path / "m")
    vocabulary = json.loads((path / "vocab.json").read_text(encoding="utf8"))
    assert vocabulary.items() <= tiny.tokenizer().get_vocab().items() and len(vocabulary) >= 256
    merges = json.loads((path / "tokenizer.json").read_text(encoding="utf8"))["model"]["merges"]
    lines = (path / "merges.txt").read_text(encoding="utf8").splitlines()
    assert [line for line in lines if not line.startswith("#version")] == [" ".join(pair) for pair in merges]


def test_a_family_that_stays_causal_is_found_out():
    with pytest.raises(ValueError, match="GPTNeoForCausalLM stays causal with is_causal = False"):
        backbone.make_bidirectional(tiny_families.gpt_neo(), tiny.tokenizer(), "<|fim_pad|>")


def test_without_a_token_of_that_name_texts_end_with_the_tokenizers_own():
    words = tiny.tokenizer().backend_tokenizer.from_str(
        tiny.tokenizer().backend_tokenizer.to_str().replace("<|endoftext|>", "</s>")
    )
    named = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
    assert (end_token(tiny.tokenizer()), end_token(named)) == ("<|endoftext|>", "</s>")
    assert ending(named)("a")["input_ids"][-1] == named.convert_tokens_to_ids("</s>")
    with pytest.raises(ValueError, match=r"neither .* nor an eos token"):
        end_token(PreTrainedTokenizerFast(tokenizer_object=words))
