import dataclasses

import pytest

from unmask.config import ConfigError, load_preset, preset_from, preset_names, resolved


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_complete_and_survives_a_round_trip(name):
    preset = load_preset(name)
    assert preset_from(resolved(preset)) == preset


def test_overrides_replace_one_value_and_keep_the_others():
    before, after = load_preset("smoke"), load_preset("smoke", {"pair.lr": "1e-3"})
    assert after.pair.lr == 1e-3
    assert dataclasses.replace(after, pair=before.pair) == before


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"pairs.steps": 1}, "did you mean 'pair'"),
        ({"pair.stps": 1}, "unknown key 'stps'; did you mean 'steps'"),
        ({"steps": 1}, "write section.key"),
        ({"pair.steps": "many"}, "steps must be int, got 'many'"),
        ({"pair.steps": True}, "steps must be int"),
        ({"pair.steps": 0}, "pair.steps must be at least 1"),
        ({"pair.batch": 1}, "needs negatives"),
        ({"pair.pooling": "max"}, "'mean' or 'last'"),
        ({"pair.schedule": "linear"}, "'wsd' or 'cosine'"),
        ({"pair.warmup": 10_000}, "warmup + decay exceed steps"),
        ({"merge.t": 0.5}, "must be a list"),
        ({"quantization.dimensions": [64, 32]}, "dimensions must be positive and ascending"),
        ({"quantization.widths": [20, 40]}, "widths must be multiples of 8"),
        ({"quantization.candidates": [5]}, "candidates must be at least 10"),
        ({"quantization.steps": 0}, "steps must be at least 1"),
        ({"pair.curriculum": [1, 2]}, "list of 3 values"),
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
