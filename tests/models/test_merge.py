"""Merges of several checkpoints; those of two are in test_backbone.py."""

import logging

import numpy as np
import pytest
import torch

import tiny
from unmask import Embedder
from unmask.data.tokens import ending
from unmask.models import backbone
from unmask.models.merge import slerp, slerp_all


def checkpoints(folder, seeds):
    paths = [folder / f"parent-{number}" for number in range(len(seeds))]
    for path, seed in zip(paths, seeds, strict=True):
        model = tiny.model(seed=seed)
        backbone.save(model, tiny.tokenizer(), path, pooling="mean", fingerprint=path.name)
    return paths


def naive(tensors):
    """The formula in float64."""
    flat = [t.double().flatten() for t in tensors]
    mean = sum(x / x.norm() for x in flat)
    radius = sum(x.norm() for x in flat) / len(flat)
    return (radius * mean / mean.norm()).reshape(tensors[0].shape)


@pytest.mark.parametrize("seeds", [[1, 2, 3], [3, 1, 2], [1, 2], [4], [5, 5, 5]])
def test_it_is_the_middle_on_the_sphere(tmp_path, seeds):
    parents = checkpoints(tmp_path, seeds)
    merged = backbone.load(slerp_all(parents, tmp_path / "m"))
    assert merged.config.is_causal is False
    assert backbone.facts(tmp_path / "m") == {"pooling": "mean", "stage": "merge", "merged": len(seeds)}
    assert not list(tmp_path.glob(".*"))
    models = [dict(tiny.model(seed=seed).named_parameters()) for seed in seeds]
    for name, parameter in merged.named_parameters():
        expected = naive([model[name].data for model in models]).float()
        torch.testing.assert_close(parameter.data, expected, atol=1e-6, rtol=1e-5)


def test_of_two_at_one_distance_from_the_origin_it_is_slerp(tmp_path):
    one, other = tiny.model(seed=1), tiny.model(seed=2)
    weights = dict(one.named_parameters())
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.mul_(weights[name].norm() / parameter.norm())
    parents = [
        backbone.save(model, tiny.tokenizer(), tmp_path / name) for model, name in ((one, "a"), (other, "b"))
    ]
    all_at_once = backbone.load(slerp_all(parents, tmp_path / "m"))
    halfway = dict(backbone.load(slerp(*parents, 0.5, tmp_path / "h")).named_parameters())
    for name, parameter in all_at_once.named_parameters():
        torch.testing.assert_close(parameter, halfway[name], atol=1e-6, rtol=1e-5)


def test_a_merge_is_used_as_its_parents_are(tmp_path):
    parents = []
    for seed in (1, 2):
        model = tiny.model(bidirectional=False, seed=seed)
        parents.append(
            backbone.save(
                model, ending(tiny.tokenizer()), tmp_path / str(seed), pooling="last", special_tokens=True
            )
        )
    merged = Embedder.from_pretrained(slerp_all(parents, tmp_path / "m"), device="cpu")
    assert (merged.pooling, merged.special_tokens) == ("last", True)
    assert merged.around[1].tolist() == [merged.tokenizer.convert_tokens_to_ids("<|endoftext|>")]
    assert np.isfinite(merged.encode(tiny.TEXTS, "float32")).all()


def test_what_is_no_checkpoint_is_refused(tmp_path):
    parents = checkpoints(tmp_path, [1])
    with pytest.raises(ValueError, match="no checkpoints to merge"):
        slerp_all([], tmp_path / "m")
    with pytest.raises(ValueError, match="is no checkpoint"):
        slerp_all([*parents, tmp_path / "none"], tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_a_merge_leaves_the_root_logger_as_it_was(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(logging.root, "handlers", [])
    slerp_all(checkpoints(tmp_path, [1, 2]), tmp_path / "m")
    assert logging.root.handlers == []
    assert "Inferred" not in capfd.readouterr().err
