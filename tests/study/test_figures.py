from itertools import combinations

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb, to_rgba_array
from matplotlib.text import Text
from PIL import Image

from unmask import run as workspace
from unmask.config import load_preset
from unmask.study import figures

plt.switch_backend("agg")

NAMES = ["BM25", "all-MiniLM-L6-v2", "pair, chunks alone", "merged", *(f"series {i}" for i in range(6))]
TITLE = "longer than a line " * 7
TEXT = {"ylabel": "quality (nDCG@10)", "title": TITLE}
AXES = {"xlabel": "size (bytes)", **TEXT}
STEPS = [{"step": i, "loss": 5 / (i + 1)} for i in range(30)]
BARS = {name: {"english": 0.1 * i, "code": 0.05} for i, name in enumerate(NAMES)}
CLAIM = {"claim": "A claim that needs more than one line to say what it says, as claims sometimes do."}
CLAIM |= {"value": 0.02, "interval": [0.01, 0.03], "bar": {"above": 0.0}, "unit": "points"}
CLAIM |= {"verdict": "reproduced", "effect": "+2.0 [+1.0, +3.0] points", "values": {"0": 0.015, "1": 0.025}}
INTERVALS = {name: {g: (v - 0.02, v + 0.03) for g, v in row.items()} for name, row in BARS.items()}
CURVES = {name: ([32, 64, 128], [0.1, 0.2, 0.3]) for name in NAMES}
TWICE = {(n, how): ([0.1, 0.2], [0.2, 0.3], ["random", "64"]) for n in NAMES[:5] for how in ("on", "off")}
POINTS = {n: [(4096, 0.5 - i / 50, "1024-d"), (128, 0.4, "32-d")] for i, n in enumerate(NAMES[:5])}
SIZES = {name: 10.0**i for i, name in enumerate(NAMES)}
ROWS = {name: {f"task {row}": 10.0 * row + i for row in range(6)} for i, name in enumerate(NAMES[:6])}
PANELS = {"the paper": ROWS, "ours": dict(list(ROWS.items())[2:])}
CHANGE = {"change": ("pair, chunks alone", "merged"), "xlabel": "nDCG@10 in %", "title": TITLE}
LOSS = {"ylabel": "loss (nats)", "title": TITLE}
DRAWINGS = {
    "loss": lambda: figures.loss_curves(dict.fromkeys(NAMES, STEPS), reference={"guess": 9.0}, **LOSS),
    "loss, one step": lambda: figures.loss_curves({"long": STEPS, "short": STEPS[:1]}, **LOSS),
    "bars": lambda: figures.grouped_bars(BARS, **TEXT),
    "bars with a gap": lambda: figures.grouped_bars({"a": {"x": 1}, "b": {"y": 2}}, **TEXT),
    "bars with intervals": lambda: figures.grouped_bars(BARS, intervals=INTERVALS, **TEXT),
    "effects": lambda: figures.effects({n: {"code": (0.02, -0.01, 0.05)} for n in NAMES[2:]}, **TEXT),
    "lines": lambda: figures.lines(CURVES, reference={"paper": 0.2}, log_x=True, **AXES),
    "bands": lambda: figures.lines(CURVES, intervals=dict.fromkeys(NAMES, [(0.0, 0.2)] * 3), **AXES),
    "lines with labels": lambda: figures.lines(TWICE, reference={"before": 0.1}, **AXES),
    "histograms": lambda: figures.histograms({name: np.arange(50.0) for name in NAMES}, **AXES),
    "pareto": lambda: figures.pareto({"ours": POINTS, "theirs": POINTS, "third": POINTS}, **AXES),
    "horizontal_bars": lambda: figures.horizontal_bars(SIZES, xlabel="text (MB)", title=TITLE),
    "beside": lambda: figures.beside(PANELS, **CHANGE),
    "beside, as differences": lambda: figures.beside(PANELS, relative=True, **CHANGE),
    "forest": lambda: figures.forest([CLAIM, CLAIM | {"unit": "nats"}], title=TITLE),
}


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


@pytest.mark.parametrize("name", DRAWINGS)
def test_every_figure_is_labelled_readable_within_its_edges_and_of_known_colours(name):
    """8 points of a figure of 7.5 inches are 12 pixels where it is shown 830 pixels wide."""
    figure = DRAWINGS[name]()
    assert figure.get_suptitle().split() == TITLE.split()
    assert figure.get_figwidth() == 7.5
    for axes in (axes for axes in figure.axes if axes.axison):
        # An axis of names needs no label, an axis of numbers does.
        place = axes.get_subplotspec()
        across, up = axes.get_xticklabels()[0].get_text(), axes.get_yticklabels()[0].get_text()
        assert axes.get_xlabel() or across[0].isalpha() or not place.is_last_row()
        assert axes.get_ylabel() or up[0].isalpha() or not place.is_first_col()
    figure.draw_without_rendering()
    box = figure.get_tightbbox()
    assert box.x0 >= -0.01 and box.x1 <= 7.51 and box.y0 >= -0.01 and box.y1 <= figure.get_figheight() + 0.01
    assert all(text.get_fontsize() >= 8 for text in figure.findobj(Text))
    for artist in figure.findobj(lambda artist: artist.get_visible()):
        for part in ("color", "facecolor", "edgecolor"):
            for rgba in to_rgba_array(getattr(artist, f"get_{part}", lambda: "none")()):
                assert not rgba[3] or to_hex(rgba[:3]) in figures.COLORS, (artist, part)


def test_a_figure_is_saved_for_light_and_for_dark_pages(tmp_path, monkeypatch):
    monkeypatch.setattr(workspace, "repository", lambda: tmp_path)
    run = workspace.Run("02_pair", "r", load_preset("smoke"))
    figure = figures.grouped_bars(BARS | {"CDE": {"english": 0.4, "code": 0.3}}, **TEXT)
    run.figure(figure, "one")
    path = run.results / "figures" / "02_pair-one.png"
    dark = path.with_name("02_pair-one-dark.png")
    assert sorted(path.parent.iterdir()) == sorted((path, dark))
    wanted = (figures.PAPER, figures.INK, figures.RECIPE[4], figures.MAGENTA)
    wanted = np.array([_rgb(color) for color in wanted])
    for file, (paper, *rest) in ((path, wanted), (dark, figures.night(wanted))):
        assert file.stat().st_size <= 100_000
        image = Image.open(file).convert("RGB")
        found = {color: count for count, color in image.getcolors(image.width * image.height)}
        # The page is what there is most of, and the colours are as they should be, a small bar's, too.
        assert max(found, key=found.get) == tuple(paper)
        for color in rest:
            assert min(np.abs(np.subtract(color, other)).max() for other in found) <= 3


def test_every_colour_is_another_on_dark_pages_where_paper_is_darkest():
    dark = figures.night(np.array([_rgb(color) for color in figures.COLORS]))
    assert len(np.unique(dark, axis=0)) == len(figures.COLORS)
    ends = dark.sum(axis=1).argmin(), dark.sum(axis=1).argmax()
    assert [figures.COLORS[i] for i in ends] == [figures.PAPER, figures.INK]
    looks = [*figures.SYSTEMS.values(), *figures.FREE, *figures.VERDICTS.values()]
    assert {look.color for look in looks} <= set(figures.COLORS)


def _rgb(color):
    return tuple(round(255 * c) for c in to_rgb(color))


def test_the_frontier_goes_through_the_points_that_nothing_beats_in_both():
    int8, binary = [(100, 0.5, "256"), (400, 0.4, "64")], [(800, 0.45, "256"), (50, 0.5, "2048")]
    points = {"one": {"int8": int8, "binary": binary}, "two": {"int8": [(1, 0.1, "a")]}}
    figure = figures.pareto(points, **AXES)
    axes, _ = figure.axes
    (frontier,) = [line for line in axes.lines if line.get_label() == "frontier"]
    assert list(zip(frontier.get_xdata(), frontier.get_ydata())) == [(100, 0.5), (800, 0.45)]
    shown = [text for text in axes.texts if text.get_visible()]
    assert [text.get_text() for text in shown] == ["256", "64", "256", "2048"]
    assert [text.get_text() for text in figure.legends[0].texts] == ["frontier", "int8", "binary"]
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in shown]
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


def test_a_forest_measures_from_the_bar_towards_the_claimed_side():
    lower = {"value": -0.3, "interval": [-0.4, -0.2], "bar": {"below": -0.1}, "unit": "nats"}
    failed = {"value": 0.05, "interval": [0.04, 0.06], "bar": {"above": 0.1}, "verdict": "contradicted"}
    untested = CLAIM | {"interval": None, "value": None, "bar": None, "values": {}}
    claims = [CLAIM, untested, CLAIM | failed, CLAIM | lower | {"values": {"0": -0.3}}]
    points, nats = figures.forest(claims, title=TITLE).axes
    drawn = [c.get_segments() for ax in (points, nats) for c in ax.collections]
    ends = [[segment[:, 0].tolist() for segment in segments] for segments in drawn]
    np.testing.assert_allclose(ends, [[[1, 3]], [[-6, -4]], [[0.3, 0.1]]])
    assert [t.get_text().splitlines()[1] for t in points.texts] == ["claimed > 0", "claimed > 10"]
    assert points.texts[0].get_text().startswith("+2.0 [+1.0, +3.0]\n")
    seeds = [line.get_xdata() for line in points.lines if line.get_marker() == "|"]
    np.testing.assert_allclose(seeds[0], [1.5, 2.5])
    assert "nats" in nats.get_title() and "points" in points.get_title()
