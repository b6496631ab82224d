import matplotlib.pyplot as plt
import numpy as np
import pytest

from unmask import figures, workspace
from unmask.config import load_preset

plt.switch_backend("agg")

PRESET = load_preset("smoke")
NAMES = [f"series {i}" for i in range(10)]  # more than there are colours
TEXT = {"ylabel": "quality (nDCG@10)", "title": "A title"}
AXES = {"xlabel": "size (bytes)", **TEXT}
STEPS = [{"step": i, "loss": 5 / (i + 1)} for i in range(30)]
BARS = {name: {"english": 0.1 * i, "code": 0.05} for i, name in enumerate(NAMES)}
DRAWINGS = {
    "loss_curves": lambda: figures.loss_curves(
        dict.fromkeys(NAMES, STEPS), ylabel="loss (nats)", title="A title", reference={"uniform guess": 9.0}
    ),
    "grouped_bars": lambda: figures.grouped_bars(BARS, **TEXT, reference={"paper": 0.5}),
    "grouped_bars, one series with a gap": lambda: figures.grouped_bars(
        {"a": {"x": 1}, "b": {"y": 2}}, **TEXT
    ),
    "grouped_bars with intervals": lambda: figures.grouped_bars(
        BARS,
        **TEXT,
        intervals={name: {g: (v - 0.02, v + 0.03) for g, v in row.items()} for name, row in BARS.items()},
    ),
    "lines": lambda: figures.lines(
        {name: ([32, 64, 128], [0.1, 0.2, 0.3]) for name in NAMES},
        **AXES,
        reference={"paper": 0.2},
        log_x=True,
    ),
    "lines with intervals": lambda: figures.lines(
        {name: ([32, 64], [0.1, 0.2]) for name in NAMES},
        **AXES,
        intervals={name: [(0.0, 0.2), (0.1, 0.3)] for name in NAMES},
    ),
    "histograms": lambda: figures.histograms({name: np.arange(50.0) for name in NAMES}, **AXES),
    "pareto": lambda: figures.pareto(
        {name: [(4096, 0.5, "1024-d"), (128, 0.4, "32-d")] for name in NAMES}, **AXES
    ),
    "horizontal_bars": lambda: figures.horizontal_bars(
        {name: 10.0**i for i, name in enumerate(NAMES)}, xlabel="text (MB)", title="A title"
    ),
    "tracks": lambda: figures.tracks(
        {(name, how): [(0.1, 0.2, "random"), (0.2, 0.3, "64")] for name in NAMES for how in ("on", "off")},
        **AXES,
        reference={"before": 0.1},
    ),
    "ratios": lambda: figures.ratios(
        dict(zip(NAMES, [2.0, 0.5, None, 30.0, 1.0])), xlabel="times better", title="A title"
    ),
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(workspace, "repository", lambda: tmp_path)
    yield workspace.Run("02_pair", "r", PRESET)
    plt.close("all")


@pytest.mark.parametrize("name", DRAWINGS)
def test_every_figure_has_labelled_axes_and_a_small_file(run, name):
    figure = DRAWINGS[name]()
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "A title"
    # An axis of names needs no label, an axis of numbers does.
    assert axes.get_xlabel() or axes.get_xticklabels()[0].get_text()[0].isalpha()
    assert axes.get_ylabel() or axes.get_yticklabels()[0].get_text()[0].isalpha()
    path = run.figure(figure, "one")
    assert path == run.results / "figures" / "02_pair-one.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size <= 200_000


def test_the_moving_average_is_corrected_for_its_start():
    np.testing.assert_allclose(figures.smoothed([3.0] * 5, 0.02), 3.0)
    np.testing.assert_allclose(figures.smoothed([1.0, 2.0], 0.5), [1.0, (0.25 * 1 + 0.5 * 2) / 0.75])
    assert len(figures.smoothed([], 0.1)) == 0


def test_bars_stand_in_the_order_given_and_intervals_at_their_ends():
    figure = figures.grouped_bars(
        {"a": {"x": 0.5, "y": 0.2}}, **TEXT, intervals={"a": {"x": (0.4, 0.7), "y": (0.1, 0.3)}}
    )
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["x", "y"]
    assert [patch.get_height() for patch in axes.patches] == [0.5, 0.2]
    segments = axes.collections[0].get_segments()
    np.testing.assert_allclose([segment[:, 1] for segment in segments], [[0.4, 0.7], [0.1, 0.3]])
    plt.close("all")


def test_the_frontier_goes_through_the_points_that_nothing_beats_in_both():
    figure = figures.pareto(
        {"int8": [(100, 0.5, "256"), (400, 0.4, "64")], "binary": [(800, 0.45, "256"), (50, 0.5, "2048")]},
        **AXES,
    )
    (axes,) = figure.axes
    (frontier,) = [line for line in axes.lines if line.get_label() == "frontier"]
    assert list(zip(frontier.get_xdata(), frontier.get_ydata())) == [(100, 0.5), (800, 0.45)]
    above = {text.get_text() for text in axes.texts if text.get_va() == "bottom"}
    assert above == {"256"} and len(axes.texts) == 4
    plt.close("all")


def test_intervals_of_lines_are_bands_around_their_points():
    figure = figures.lines(
        {"a": ([32, 64], [0.1, 0.2]), "b": ([32, 64], [0.3, 0.4])},
        **AXES,
        intervals={"a": [(0.0, 0.2), (0.1, 0.3)]},
    )
    (axes,) = figure.axes
    (band,) = axes.collections
    corners = {tuple(corner) for corner in band.get_paths()[0].vertices.round(6).tolist()}
    assert corners == {(32, 0.0), (32, 0.2), (64, 0.1), (64, 0.3)}
    plt.close("all")


def test_ratios_stand_right_of_one_where_we_are_better_and_say_what_was_not_run():
    figure = figures.ratios({"speed": 2.0, "memory": 0.5, "gpu": None}, xlabel="times", title="A title")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["speed", "memory", "gpu"]
    points = [line for line in axes.lines if line.get_marker() in ("o", "D")]
    assert [(line.get_xdata()[0], line.get_marker()) for line in points] == [(2.0, "o"), (0.5, "D")]
    assert len({line.get_color() for line in points}) == 2
    assert [text.get_text() for text in axes.texts] == ["2×", "0.5×", "not run"]
    assert axes.yaxis_inverted()
    plt.close("all")


def test_the_second_way_of_a_track_is_hollow_dashed_and_without_labels():
    points = [(0.1, 0.2, "random"), (0.2, 0.3, "64")]
    figure = figures.tracks({("batch 8", "on"): points, ("batch 8", "off"): points}, **AXES)
    (ax,) = figure.axes
    on, off = ax.lines
    assert on.get_color() == off.get_color() and on.get_marker() == off.get_marker()
    assert [line.get_linestyle() for line in (on, off)] == ["-", "--"]
    assert [line.get_markerfacecolor() for line in (on, off)] == [on.get_color(), "white"]
    assert [text.get_text() for text in ax.texts] == ["random", "64"]
    assert [text.get_text() for text in ax.get_legend().texts] == ["batch 8, on", "batch 8, off"]
    plt.close("all")
