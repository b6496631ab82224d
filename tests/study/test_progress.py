"""How long notebooks take, and what is seen of a run under way."""

import json
import re
import sys
import time
from io import StringIO

import pytest

from unmask.store import link, write_atomic, write_json
from unmask_study import progress
from unmask_study.pipeline import Pipeline, hardware
from unmask_study.progress import Progress, until_done, whole_times
from unmask_study.settings import load_preset

RAN = {"exit_status": 0, "wall_seconds": 48.0, "whole_seconds": 341.0}
HERE = {**hardware(), "cpu": "a processor", "bf16": True, "cores": 2, "gpus": []}


@pytest.fixture
def made(checkout):
    """00 → {01, 02} → 03."""
    checkout.notebook("00_backbone", ["1"])
    checkout.notebook("01_diffusion_cpt", ["1"], needs=["00_backbone"], reads=["diffusion"])
    checkout.notebook("02_pair", ["1"], needs=["00_backbone"], reads=["pair"])
    checkout.notebook("03_join", ["1"], needs=["01_diffusion_cpt", "02_pair"])
    return opened(checkout)


def opened(checkout, changes=None):
    return Pipeline(checkout.folders, load_preset("smoke", changes), changes or {})


def train(made, notebook, steps, of, *, seconds=1.0, fingerprint="a" * 16):
    """What so many steps of a training leave on disk."""
    folder = made.folders.artifacts / notebook / "pair" / fingerprint
    rows = [json.dumps({"step": step, "loss": 4 - step / 10, "seconds": seconds}) for step in range(steps)]
    write_json(folder / "job.json", {"job": {"config": {"steps": of}}})
    write_atomic(folder / "metrics.jsonl", "".join(f"{row}\n" for row in rows) + '{"step": half')
    return folder


@pytest.mark.parametrize(
    ("there", "changes", "known"),
    [
        ({}, {}, True),
        ({}, {"pair.seed": 3, "diffusion.steps": 30}, True),  # of other notebooks, or as long
        ({}, {"pair.steps": 3}, False),
        ({"cpu": "another"}, {}, False),
        ({"cores": 64}, {}, False),
    ],
)
def test_a_time_is_the_record_of_such_a_processor_and_these_values(
    checkout, made, monkeypatch, there, changes, known
):
    made.record(made.notebooks[2], RAN, made.describe("") | {"hardware": HERE})
    monkeypatch.setattr(progress, "hardware", lambda: HERE | there)
    now = opened(checkout, changes)
    seconds, estimated = whole_times(now, now.notebooks[2:3])
    assert ([*seconds.values()] == [341.0]) is known is not bool(estimated)


def test_without_a_record_steps_and_tokens_tell(checkout, monkeypatch):
    checkout.notebook("02_pair")

    def trained(steps, **machine):
        monkeypatch.setattr(progress, "hardware", lambda: HERE | machine)
        pipeline = opened(checkout, {"pair.steps": steps})
        return sum(whole_times(pipeline, pipeline.notebooks)[0].values()) - progress.AROUND

    assert trained(2000) == pytest.approx(2 * trained(1000)) and trained(1000) > 0
    assert trained(1000, cores=4) == pytest.approx(trained(500))
    assert trained(1000, bf16=False) == pytest.approx(trained(3000))
    assert 1000 * trained(1000, gpus=["one"]) == pytest.approx(trained(1000))


def test_notebooks_side_by_side_end_sooner(made):
    seconds = dict(zip(made.notebooks, (1.0, 10.0, 20.0, 100.0), strict=True))
    assert [until_done(seconds, jobs) for jobs in (1, 2)] == [131.0, 121.0]


def test_a_line_tells_trainings_and_cells_the_share_and_the_minutes(made, monkeypatch, capsys):
    shown = Progress(made.folders.artifacts, dict.fromkeys(made.notebooks, 100.0), jobs=2)
    shown.took[made.notebooks[0]] = 100.0
    for one in made.notebooks[1:3]:
        shown.begin(one)
    shown.cells.update(["01_diffusion_cpt"])
    train(made, "02_pair", steps=12, of=200, seconds=2.0)

    def look(later):
        shown.shown -= later
        shown.look()
        return capsys.readouterr().out.splitlines()

    shown.began -= 119
    assert look(29) == []
    # 188 steps of two seconds, then a hundred for what waits.
    line = "20% done, 8 min left · 01_diffusion_cpt: cell 1/3 · 02_pair: pair 12/200, loss 2.900"
    assert look(2) == [line]
    assert look(2) == look(31) == []  # too soon; nothing new
    train(made, "02_pair", steps=0, of=200)
    assert look(31)[0].endswith("02_pair: pair 0/200")
    folder = train(made, "02_pair", steps=200, of=200)
    (folder / "model").mkdir()
    assert look(31)[0].endswith("02_pair: cell 0/3")


def test_a_whole_time_counts_the_trainings_that_a_notebook_uses(made):
    notebook = made.notebooks[2]
    folder = train(made, notebook.name, steps=40, of=40)
    train(made, notebook.name, steps=7, of=40, fingerprint="b" * 16)  # of other values: not used
    (folder / "model").mkdir()
    shown = Progress(made.folders.artifacts, {notebook: 9.0}, jobs=1)
    shown.begin(notebook)
    assert shown.end(notebook) < 1
    shown.begin(notebook)
    time.sleep(0.02)  # files' times are coarse
    link(folder.parent / "model", folder / "model")  # as `train` does where it finds a model
    assert 40 <= shown.end(notebook) < 41


def test_a_terminal_is_left_as_it_was(made, monkeypatch):
    terminal = StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", terminal)
    shown = Progress(made.folders.artifacts, dict.fromkeys(made.notebooks[1:2], 100.0), jobs=2)
    shown.begin(made.notebooks[1])
    shown.say("started")
    shown.shown -= 2
    shown.look()
    assert screen(terminal.getvalue())[1:3] == [
        "|                    | 0% done, 2 min left",
        "|                    | 01_diffusion_cpt: cell 0/3",
    ]
    shown.say("stopped")
    shown.close()
    print("the prompt")
    assert screen(terminal.getvalue()) == ["started", "stopped", "the prompt"]


def screen(text):
    """The lines that a terminal shows, as far as they are not empty at the end."""
    rows, row, column = [""], 0, 0
    for up, sign in re.findall(r"(\x1b\[A)|([^\x1b])", text):
        if up:
            row -= 1
        elif sign == "\n":
            row, column = row + 1, 0
            rows += [""] * (row == len(rows))
        elif sign == "\r":
            column = 0
        else:
            rows[row] = rows[row][:column].ljust(column) + sign + rows[row][column + 1 :]
            column += 1
    return [one.rstrip() for one in "\n".join(one.rstrip() for one in rows).rstrip().split("\n")]
