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
from closeness import assert_close
from unmask.data.tokens import END_OF_TEXT
from unmask.models import backbone
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
    assert backbone.facts(merged) == {"stage": "merge", "pooling": "mean"} | facts
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


def test_what_cannot_be_merged_is_refused(tmp_path):
    (one,) = checkpoints(tmp_path, [1])
    with pytest.raises(ValueError, match="is no checkpoint"):
        slerp_all([one, tmp_path / "none"], tmp_path / "m")
    with pytest.raises(ValueError, match="num_hidden_layers: their weights"):
        slerp(one, backbone.save(tiny.model(layers=3), tiny.tokenizer(), tmp_path / "3"), 0.5, tmp_path / "m")
    for t in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"t must lie in \[0, 1\]"):
            slerp(one, one, t, tmp_path / "m")
    opposite = tiny_families.model("qwen3", bidirectional=True, seed=1)
    for parameter in opposite.parameters():
        parameter.data.neg_()
    other = backbone.save(opposite, tiny.tokenizer(), tmp_path / "opposite", pooling="mean")
    rounded = backbone.save(opposite.bfloat16(), tiny.tokenizer(), tmp_path / "rounded", pooling="mean")
    for merge in (
        lambda: slerp(one, other, 0.3, tmp_path / "m"),
        lambda: slerp(one, rounded, 0.3, tmp_path / "m"),
        lambda: slerp_all([one, other], tmp_path / "m"),
    ):
        with pytest.raises(ValueError, match=r"^embed_tokens\.weight of .* point opposite ways"):
            merge()
    with pytest.raises(ValueError, match="weighted sum of the input tensors is zero"):
        copies = [Path(shutil.copytree(path, f"{path}-again")) for path in (one, other)]
        slerp_all([one, other, *copies], tmp_path / "m")
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
