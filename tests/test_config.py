import dataclasses

import pytest

from unmask.config import ConfigError, load_preset, preset_from, preset_names, resolved, seeded


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_survives_a_round_trip(name):
    preset = load_preset(name)
    assert preset_from(resolved(preset)) == preset


def test_overrides_replace_one_value_and_keep_the_others():
    before, after = load_preset("smoke"), load_preset("smoke", {"pair.lr": "1e-3"})
    assert after.pair.lr == 1e-3
    assert dataclasses.replace(after, pair=before.pair) == before


@pytest.mark.parametrize("name", preset_names())
def test_a_seed_is_that_of_every_training_and_not_of_the_corpus(name):
    before, after = (resolved(load_preset(name, overrides)) for overrides in ({}, seeded(7)))
    seeds = {key: values["seed"] for key, values in after.items() if "seed" in values}
    kept = {key: before[key]["seed"] for key in ("data", "synthesis")}
    assert seeds == dict.fromkeys(seeds, 7) | kept and len(seeds) == 10
    assert before == after | {key: after[key] | {"seed": before[key]["seed"]} for key in seeds}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"pairs.steps": 1}, "did you mean 'pair'"),
        ({"pair.stps": 1}, "pair.stps: unknown key 'stps'; did you mean 'steps'"),
        ({"steps": 1}, "write section.key"),
        ({"pair.steps": "many"}, "pair.steps must be a valid integer, got 'many'"),
        ({"pair.steps": True}, "pair.steps must be a valid integer"),
        ({"pair.steps": 0}, "pair.steps must be greater than or equal to 1, got 0"),
        ({"pair.lr": float("nan")}, "pair.lr must be a finite number"),
        ({"pair.quantize": "no"}, "pair.quantize must be a valid boolean"),
        ({"triplet.batch": 1}, "triplet.batch must be greater than or equal to 2"),
        ({"pair.pooling": "max"}, "pair.pooling must be 'mean' or 'last', got 'max'"),
        ({"cde.pooling": "last"}, "cde.pooling must be 'mean'"),
        ({"contextual.cluster_size": 1}, "cluster_size must be at least 2, or 0"),
        ({"pair.filter_margin": -0.5}, "filter_margin must be at least 0, or -1"),
        ({"cde.context": 0}, "cde.context must be at least 1"),
        ({"cde.context": 4, "cde.context_sizes": [0, 8]}, "no less than cde.context_sizes"),
        ({"qwen3.checkpoints": 5}, "checkpoints exceed its steps"),
        ({"pair.warmup": 10_000}, "warmup + decay exceed steps"),
        ({"merge.t": 0.5}, "merge.t must be a valid list"),
        ({"pair.curriculum": [1, 0]}, "missing pair.curriculum.2"),
        ({"quantization.dimensions": [64, 32]}, "quantization.dimensions must be ascending"),
        ({"quantization.widths": [20, 40]}, "must be a multiple of 8, got 20"),
        ({"data.families": ["english", "codes"]}, "families.1 must be .*'code'.*, got 'codes'"),
        ({"diffusion.t_min": 0.5, "diffusion.t_max": 0.2}, "0 < t_min <= t_max <= 1"),
    ],
)
def test_a_wrong_key_or_value_is_refused_with_the_remedy(overrides, message):
    with pytest.raises(ConfigError, match=message.replace("+", r"\+")):
        load_preset("smoke", overrides)


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'smoke'"):
        load_preset("smoek")


def test_the_small_model_is_made_deeper_and_wider_one_at_a_time():
    study = load_preset("cpu", {"quantization.widths": [64, 256], "quantization.depths": [1, 6]}).quantization
    assert study.shapes == ((64, 1), (64, 6), (256, 1))


def test_the_study_of_batches_crosses_sizes_and_filters_and_encoders():
    changes = {
        "batch": 64, "cluster_size": 16, "filter_margin": 0.1, "context": 4, "context_sizes": [0, 4],
        "batch_sizes": [32, 128], "cluster_sizes": [16],
    }  # fmt: skip
    cde = load_preset("smoke", {f"cde.{key}": value for key, value in changes.items()}).cde
    assert {name: tuple(row.values()) for name, row in cde.trainings.items()} == {
        "b32-crandom": (32, 0, -1.0, 0),
        "b32-crandom-filtered": (32, 0, 0.1, 0),
        "b32-c16": (32, 16, -1.0, 0),
        "b32-c16-filtered": (32, 16, 0.1, 0),
        "b128-crandom": (128, 0, -1.0, 0),
        "b128-crandom-filtered": (128, 0, 0.1, 0),
        "b128-c16": (128, 16, -1.0, 0),
        "b128-c16-filtered": (128, 16, 0.1, 0),
        "plain-random": (64, 0, 0.1, 0),
        "plain": (64, 16, 0.1, 0),
        "context-random": (64, 0, 0.1, 4),
        "context": (64, 16, 0.1, 4),
    }
    assert all(dataclasses.replace(cde, **row) for row in cde.trainings.values())


def test_what_the_study_of_batches_holds_already_is_not_trained_again():
    cde = load_preset("smoke", {"cde.filter_margin": -1.0, "cde.batch_sizes": [8, 16]}).cde
    assert cde.batch == 16 and cde.cluster_size in cde.cluster_sizes
    assert not {"plain", "plain-random"} & cde.trainings.keys()
    assert {"context", "context-random"} < cde.trainings.keys()
    every = [tuple(row.values()) for row in cde.trainings.values()]
    assert len(set(every)) == len(every) and (16, cde.cluster_size, -1.0, 0) in every
