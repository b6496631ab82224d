"""What is seen of a training while it runs."""

import sys

import matplotlib
import pytest
from matplotlib.axes import Axes

from unmask.training import Watch


@pytest.fixture
def watch(tmp_path, monkeypatch):
    monkeypatch.setattr("unmask.training.watch.draws", lambda: True)  # as in a notebook
    watch = Watch()
    watch.open("pair", tmp_path)
    return watch


def trained(watch):
    """Shows a training of three steps; returns the losses."""
    with watch:
        watch({"total": 3, "done": 0})
        for step in range(3):
            watch({"step": step, "loss": 1.0 / (step + 1)})
    return watch.loss


def test_a_curve_is_in_a_style_of_its_own(watch, monkeypatch, capsys):
    """Whatever a matplotlibrc says, for instance that a LaTeX which is not there sets the text."""
    monkeypatch.setenv("PATH", "")
    with matplotlib.rc_context({"text.usetex": True}):
        assert len(trained(watch)) == 3 and watch.curve
        assert matplotlib.rcParams["text.usetex"]
    assert "no curve" not in capsys.readouterr().out


def test_a_curve_that_cannot_be_drawn_stops_no_training(watch, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # a broken installation
    assert len(trained(watch)) == 3
    said = [line for line in capsys.readouterr().out.splitlines() if "curve" in line]
    assert len(said) == 1 and "matplotlib" in said[0] and said[0].endswith("the training goes on")


def test_what_is_measured_meanwhile_is_named(watch, monkeypatch):
    axes = []
    monkeypatch.setattr(Axes, "set", lambda self, **options: axes.append(options))
    watch.probe, watch.label, watch.lower = dict, "nats of a masked token", True
    trained(watch)
    assert {"ylabel": "nats of a masked token", "ylim": (None, None)} in axes
