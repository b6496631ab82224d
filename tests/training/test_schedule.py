from dataclasses import replace

import pytest

from unmask.config import load_preset
from unmask.training.loop import lr_factor
from unmask.training.stages import cosine_ramp

PAIR = load_preset("smoke").pair


def test_wsd_rises_stays_and_falls():
    config = replace(PAIR, schedule="wsd", steps=100, warmup=10, decay=20)
    factors = [lr_factor(config, step) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9] == 1.0
    assert set(factors[10:81]) == {1.0}
    assert factors[90] == pytest.approx(0.5)
    assert 0 < factors[99] < 0.01
    assert factors[80:] == sorted(factors[80:], reverse=True)


def test_cosine_falls_from_the_end_of_the_warm_up():
    config = replace(PAIR, schedule="cosine", steps=110, warmup=10)
    assert lr_factor(config, 10) == 1.0
    assert lr_factor(config, 60) == pytest.approx(0.5)
    assert lr_factor(config, 109) > 0


def test_linear_falls_evenly_from_the_end_of_the_warm_up():
    config = replace(PAIR, schedule="linear", steps=110, warmup=10)
    factors = [lr_factor(config, step) for step in range(110)]
    assert factors[9] == factors[10] == 1.0
    assert factors[35] == pytest.approx(0.75) and factors[60] == pytest.approx(0.5)
    assert factors[109] == pytest.approx(0.01)


def test_beta_goes_from_its_start_to_its_end():
    assert cosine_ramp(0.2, 0.5, 0, 11) == pytest.approx(0.2)
    assert cosine_ramp(0.2, 0.5, 5, 11) == pytest.approx(0.35)
    assert cosine_ramp(0.2, 0.5, 10, 11) == pytest.approx(0.5)
    assert cosine_ramp(0.2, 0.5, 0, 1) == pytest.approx(0.2)
