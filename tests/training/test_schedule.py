from dataclasses import replace

import pytest

from unmask.config import load_preset
from unmask.training.loop import lr_factor
from unmask.training.stages import cosine_ramp


def factors(**changes):
    config = replace(load_preset("smoke").pair, steps=110, warmup=10, **changes)
    return [lr_factor(config, step) for step in range(110)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"schedule": "wsd", "decay": 20}, {0: 0.1, 9: 1, 50: 1, 90: 1, 100: 0.5}),
        ({"schedule": "cosine"}, {0: 0.1, 9: 1, 10: 1, 60: 0.5}),
        ({"schedule": "linear"}, {0: 0.1, 9: 1, 10: 1, 35: 0.75, 60: 0.5, 109: 0.01}),
    ],
)
def test_a_schedule_rises_and_falls_as_its_name_says(changes, expected):
    found = factors(**changes)
    assert {step: found[step] for step in expected} == pytest.approx(expected)
    assert found[10:] == sorted(found[10:], reverse=True) and 0 < found[-1] < 0.02


def test_beta_goes_from_its_start_to_its_end():
    assert [cosine_ramp(0.2, 0.5, step, 11) for step in (0, 5, 10)] == pytest.approx([0.2, 0.35, 0.5])
