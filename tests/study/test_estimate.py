"""How long a run takes by parameters, tokens and hardware."""

import re
from pathlib import Path

import pytest

from unmask.store import repository
from unmask_study import estimate
from unmask_study.pipeline import Notebook, discover
from unmask_study.settings import load_preset

NOTEBOOKS = discover(repository() / "notebooks")
GPU = {"gpus": ["one"], "bf16": True, "cores": 2}
CORES = GPU | {"gpus": []}


HOURS = [
    ({"pair.steps": 2000}, GPU, 2),
    ({"pair.batch": 32, "pair.precision": "fp32"}, GPU, 0.5 * 989 / 67),
    ({"parallel.num_processes": 4}, GPU, 1 / 4),
    ({"parallel.num_processes": 4}, CORES, 1 / 4),  # GPUs of another machine
    ({}, CORES | {"cores": 4}, 0.22 * 989e12 / 600e9),
    ({}, CORES | {"bf16": False}, 0.22 * 989e12 / 100e9),
]


@pytest.mark.parametrize(("changes", "hardware", "factor"), HOURS)
def test_hours_follow_steps_tokens_and_hardware(changes, hardware, factor):
    base = {"pair.steps": 1000, "pair.batch": 64, "pair.precision": "bf16"}
    one, other = (load_preset("smoke", base | more) for more in ({}, changes))
    expected = factor * estimate.hours(one, "pair", GPU)
    assert estimate.hours(other, "pair", hardware) == pytest.approx(expected)


def test_hours_are_six_flops_for_each_parameter_and_token():
    preset = load_preset("paper-4b")
    flops = 6 * 4.02e9 * preset.diffusion.steps * preset.diffusion.batch * preset.diffusion.length
    assert flops == pytest.approx(6.1e21, rel=0.01)
    expected = flops / (64 * 0.22 * 989e12) / 3600
    assert estimate.hours(preset, "diffusion", GPU) == pytest.approx(expected, rel=0.01)
    one = preset.contextual
    text = one.queries_per_document * one.query_length + one.document_length
    assert estimate.tokens(preset, "contextual") == one.batch * text


def test_each_stage_counts_once_where_it_is_first_read():
    counted = estimate.stages(load_preset("scratch"), NOTEBOOKS)
    expected = ["ar", "diffusion", "pair", "contextual", "triplet", "cde", "qwen3", "reranker"]
    assert [stage for stages in counted.values() for stage in stages] == expected
    assert counted["02_pair"] == ["pair"] and counted["07_diffusion_vs_ar"] == counted["12_report"] == []
    assert estimate.stages(load_preset("cpu"), NOTEBOOKS)["00_backbone"] == []  # from a ready checkpoint
    text = estimate.describe(load_preset("paper-4b"), NOTEBOOKS, NOTEBOOKS[:2], GPU)
    assert re.search(r"01_diffusion_cpt +diffusion +60,000 steps × 4,194,304 tokens +\d+\.\d\d hours", text)
    assert "02_pair" not in text


def test_notebooks_side_by_side_end_sooner():
    rows = (("00", [], 1.0), ("01", ["00"], 10.0), ("02", ["00"], 20.0), ("03", ["01", "02"], 100.0))
    seconds = {Notebook(Path(name), "", after): took for name, after, took in rows}
    assert [estimate.together(seconds, jobs) for jobs in (1, 2)] == [131.0, 121.0]


ROWS = re.compile(r"\| `([\w.-]+)` \|.*\| (\d+) GPUs?, ([\d.]+) (\w+)")  # preset, GPUs, time
README = (repository() / "papermill_runs" / "README.md").read_text()


@pytest.mark.parametrize(("name", "gpus", "time", "unit"), ROWS.findall(README))
def test_the_readme_says_what_the_estimate_says(name, gpus, time, unit):
    preset = load_preset(name, {"parallel.num_processes": int(gpus)})
    seconds = sum(estimate.seconds(preset, NOTEBOOKS, GPU).values()) - estimate.BESIDE * len(NOTEBOOKS)
    assert f"{seconds / (3600 if unit == 'hours' else 86400):.1f}" == time
