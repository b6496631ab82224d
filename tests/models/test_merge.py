"""Merges against the formulas in float64."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

import tiny
import tiny_families
import tiny_foreign
from closeness import assert_close
from unmask import Embedder, fit
from unmask.data.tokens import END_OF_TEXT
from unmask.models import backbone
from unmask.models.checkpoint import Settings
from unmask.models.merge import slerp, slerp_all


def checkpoints(folder, seeds, family="qwen3"):
    models = {f"parent-{seed}": tiny_families.model(family, bidirectional=True, seed=seed) for seed in seeds}
    facts = {"pooling": "mean", "fingerprint": "0"}
    return [backbone.save(model, tiny.tokenizer(), folder / name, **facts) for name, model in models.items()]


def naive_slerp(t, a, b):
    cosine = (a * b).sum() / (a.norm() * b.norm())
    if cosine.abs() > 0.9995:
        return (1 - t) * a + t * b
    theta = torch.arccos(cosine)
    return (torch.sin((1 - t) * theta) * a + torch.sin(t * theta) * b) / torch.sin(theta)


def naive_middle(*tensors):
    mean = sum(x / x.norm() for x in tensors)
    return sum(x.norm() for x in tensors) / len(tensors) * mean / mean.norm()


def check(merged, parents, formula, facts):
    settings = Settings.of(backbone.facts(merged))
    assert settings == Settings() and settings.about == {"stage": "merge", "plain": False} | facts
    assert not list(merged.parent.glob(".*"))
    model = backbone.load(merged)
    assert model.config.is_causal is False
    models = [dict(backbone.load(parent).named_parameters()) for parent in parents]
    for name, parameter in model.named_parameters():
        expected = formula(*(one[name].data.double() for one in models)).float()
        assert_close(parameter.data, expected)


@pytest.mark.parametrize("family", ["qwen3", "llama", "olmo2"])
def test_slerp_is_the_formula(family, tmp_path):
    parents = checkpoints(tmp_path, [1, 2], family)
    merged = slerp(*map(str, parents), 0.3, str(tmp_path / "m"))
    check(merged, parents, lambda a, b: naive_slerp(0.3, a, b), {"t": 0.3})


@pytest.mark.parametrize("seeds", [[1, 2, 3], [1, 2], [4]])
def test_the_middle_on_the_sphere_is_the_formula(tmp_path, seeds, monkeypatch, capfd):
    monkeypatch.setattr(logging.root, "handlers", [])
    parents = checkpoints(tmp_path, seeds)
    merged = slerp_all(parents, tmp_path / "m")
    check(merged, parents, naive_middle, {"merged": len(seeds)})
    assert logging.root.handlers == []  # mergekit sets it up otherwise, and every library speaks up
    assert "Inferred" not in capfd.readouterr().err


def test_a_merge_is_plain_if_its_parents_are(tmp_path):
    """So that `fit` makes it read both sides."""
    plain = [tiny_foreign.causal_qwen3(tmp_path / name) for name in "ab"]
    tiny.model(bidirectional=False, seed=1).save_pretrained(plain[1])
    merged = slerp(*plain, 0.5, tmp_path / "m")
    both = Embedder.from_pretrained(merged), Embedder.from_pretrained(slerp_all(plain, tmp_path / "n"))
    assert [one.settings.plain for one in both] == [True, True]
    mine = Embedder.from_pretrained(plain[0]).save_pretrained(tmp_path / "mine")
    assert not Embedder.from_pretrained(slerp(merged, mine, 0.5, tmp_path / "mixed")).settings.plain
    again = slerp(merged, plain[0], 0.5, tmp_path / "again")
    turned = fit(again, [(f"q {i}", f"d {i}") for i in range(4)], hold_out=0, steps=1, precision="fp32")
    assert backbone.sees_both_sides(turned.model) and not turned.settings.plain


def test_what_cannot_be_merged_is_refused(tmp_path):
    (one,) = checkpoints(tmp_path, [1])
    with pytest.raises(ValueError, match="is no checkpoint"):
        slerp_all([one, tmp_path / "none"], tmp_path / "m")
    with pytest.raises(ValueError, match="num_hidden_layers: their weights"):
        slerp(one, backbone.save(tiny.model(layers=3), tiny.tokenizer(), tmp_path / "3"), 0.5, tmp_path / "m")
    for t in (-0.1, 1.5, float("nan"), "0.5"):
        with pytest.raises(ValueError, match=r"t must lie in \[0, 1\]"):
            slerp(one, one, t, tmp_path / "m")
    opposite = tiny_families.model("qwen3", bidirectional=True, seed=1)
    for parameter in opposite.parameters():
        parameter.data.neg_()
    other = backbone.save(opposite, tiny.tokenizer(), tmp_path / "opposite", pooling="mean")
    with pytest.raises(ValueError, match="weighted sum of the input tensors is zero"):
        copies = [Path(shutil.copytree(path, f"{path}-again")) for path in (one, other)]
        slerp_all([one, other, *copies], tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_parents_are_directories_each_named_once_and_none_is_overwritten(tmp_path):
    one, two = checkpoints(tmp_path, [1, 2])
    before, right = (one / "model.safetensors").read_bytes(), "name at least one parent, none twice, and"
    for merge in (
        lambda: slerp(one, one, 0.5, tmp_path / "m"),
        lambda: slerp_all([one, two, f"{one}/"], tmp_path / "m"),
        lambda: slerp_all([], tmp_path / "m"),
        lambda: slerp(one, two, 0.5, one),
        lambda: slerp_all([one, two], f"{tmp_path}/x/../{two.name}"),
    ):
        with pytest.raises(ValueError, match=right):
            merge()
    with pytest.raises(ValueError, match="a parent is a directory, got one Embedder: save_pretrained it"):
        slerp(Embedder.from_pretrained(one), two, 0.5, tmp_path / "m")
    assert not (tmp_path / "m").exists() and (one / "model.safetensors").read_bytes() == before


def embedder_of_others(folder, seed=0, **options):
    """A sentence-transformers directory with every setting that changes vectors."""
    source = tiny_foreign.causal_qwen3(folder / "plain")
    tiny.model(bidirectional=False, seed=seed).save_pretrained(source)
    prompts = {"prompts": {"query": "Find: ", "document": ""}}
    path = tiny_foreign.sentence_transformers(
        source, folder / "model", **{"pooling": "lasttoken", "normalize": True} | options
    )
    tiny_foreign.edit(path / "config_sentence_transformers.json", **prompts)
    return path


def test_settings_of_sentence_transformers_stay(tmp_path, capsys):
    one, two = (embedder_of_others(tmp_path / str(seed), seed) for seed in range(2))
    tiny_foreign.edit(one / "sentence_bert_config.json", max_seq_length=20)
    tiny_foreign.edit(two / "sentence_bert_config.json", max_seq_length=30)
    parent, merged = map(Embedder.from_pretrained, (one, slerp(one, two, 0.0, tmp_path / "m")))
    assert merged.max_length == 30
    assert "max_length is 20, 30: the merge has the longest, 30" in capsys.readouterr().out
    texts = [*tiny.TEXTS[:2], "7"]  # all shorter
    assert_close(merged.encode(texts, "float32", max_length=20), parent.encode(texts, "float32"))
    assert vars(merged.settings) | {"max_length": 20, "about": 0} == vars(parent.settings) | {"about": 0}
    assert merged.settings.prompts == {"query": "Find: ", "document": ""} and merged.special_tokens
    assert merged.about == {"stage": "merge", "plain": False, "t": 0.0}


@pytest.mark.parametrize("what", ["normalize", "prompts", "special_tokens"])
def test_parents_that_read_differently_are_refused_by_name(tmp_path, what):
    one, two = (embedder_of_others(tmp_path / str(seed), seed) for seed in range(2))
    if what == "normalize":
        two = embedder_of_others(tmp_path / "other", 1, normalize=False)
    elif what == "prompts":
        tiny_foreign.edit(two / "config_sentence_transformers.json", prompts={"query": "Ask: "})
    else:  # another template
        backend = json.loads((two / "tokenizer.json").read_text())
        backend["post_processor"]["single"].insert(0, backend["post_processor"]["single"][-1])
        (two / "tokenizer.json").write_text(json.dumps(backend))
    with pytest.raises(ValueError, match=f"have another {what}: their weights"):
        slerp(one, two, 0.5, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_released_parents_are_merged_without_their_code(tmp_path):
    one, two = (tiny_foreign.released(tmp_path / str(seed)) for seed in range(2))
    parent, merged = map(Embedder.from_pretrained, (one, slerp(one, two, 0.5, tmp_path / "m")))
    assert_close(merged.encode(tiny.TEXTS[:3], "float32"), parent.encode(tiny.TEXTS[:3], "float32"))


def test_what_mergekit_cannot_merge_is_said(tmp_path):
    one, two = (tiny_foreign.bert(tmp_path / str(seed)) for seed in range(2))
    with pytest.raises(ValueError, match=r"mergekit cannot merge .* \(BertModel\): .*decoders such as Qwen3"):
        slerp(one, two, 0.5, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def another_tokenizer():
    """As large as the usual one, with two of its tokens exchanged."""
    content = json.loads(tiny.tokenizer().backend_tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    a, b = list(vocabulary)[10:12]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)), eos_token=END_OF_TEXT
    )


# Of one shape each.
OTHERS = {
    "tokenizer": {},
    "pooling": {"pooling": "last"},
    "special_tokens": {"special_tokens": True},
    "is_causal": {"is_causal": True},
    "rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "hidden_act": {"hidden_act": "gelu"},
}


@pytest.mark.parametrize(("what", "changed"), OTHERS.items())
def test_parents_whose_weights_mean_different_things_are_refused(tmp_path, what, changed):
    (one,) = checkpoints(tmp_path, [1])
    model = tiny_families.model("qwen3", bidirectional=True, seed=2)
    facts = {"pooling": "mean"} | {
        key: changed[key] for key in changed.keys() & {"pooling", "special_tokens"}
    }
    for key in changed.keys() - facts.keys():
        setattr(model.config, key, changed[key])
    tokenizer = another_tokenizer() if what == "tokenizer" else tiny.tokenizer()
    other = backbone.save(model, tokenizer, tmp_path / "other", **facts)
    for merge in (
        lambda: slerp(one, other, 0.5, tmp_path / "m"),
        lambda: slerp_all([one, other], tmp_path / "m"),
    ):
        with pytest.raises(ValueError, match=f"have another {what}: their weights"):
            merge()
    assert not (tmp_path / "m").exists()
