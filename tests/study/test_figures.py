from itertools import combinations

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex, to_rgb, to_rgba_array
from matplotlib.text import Text
from PIL import Image

from unmask import run as workspace
from unmask.config import load_preset
from unmask.study import figures

plt.switch_backend("agg")

PRESET = load_preset("smoke")
NAMES = ["BM25", "all-MiniLM-L6-v2", "pair, chunks alone", "merged", *(f"series {i}" for i in range(6))]
TEXT = {"ylabel": "quality (nDCG@10)", "title": "A title"}
AXES = {"xlabel": "size (bytes)", **TEXT}
STEPS = [{"step": i, "loss": 5 / (i + 1)} for i in range(30)]
BARS = {name: {"english": 0.1 * i, "code": 0.05} for i, name in enumerate(NAMES)}
CLAIM = {
    "claim": "A claim that needs more than one line to say what it says, as claims sometimes do.",
    "value": 0.02,
    "interval": [0.01, 0.03],
    "bar": {"above": 0.0},
    "unit": "points",
    "verdict": "reproduced",
    "effect": "+2.0 [+1.0, +3.0] points",
    "values": {"0": 0.015, "1": 0.025},
}
INTERVALS = {name: {g: (v - 0.02, v + 0.03) for g, v in row.items()} for name, row in BARS.items()}
CURVES = {name: ([32, 64, 128], [0.1, 0.2, 0.3]) for name in NAMES}
TWICE = {(n, how): ([0.1, 0.2], [0.2, 0.3], ["random", "64"]) for n in NAMES for how in ("on", "off")}
POINTS = {n: [(4096, 0.5 - i / 50, "1024-d"), (128, 0.4, "32-d")] for i, n in enumerate(NAMES)}
SIZES = {name: 10.0**i for i, name in enumerate(NAMES)}
ROWS = {name: {f"task {row}": 10.0 * row + i for row in range(6)} for i, name in enumerate(NAMES[:6])}
PANELS = {"the paper": ROWS, "ours": dict(list(ROWS.items())[2:])}
LOSS = {"ylabel": "loss (nats)", "title": "A title"}
DRAWINGS = {
    "loss": lambda: figures.loss_curves(dict.fromkeys(NAMES, STEPS), reference={"guess": 9.0}, **LOSS),
    "loss, one step": lambda: figures.loss_curves({"long": STEPS, "short": STEPS[:1]}, **LOSS),
    "bars": lambda: figures.grouped_bars(BARS, **TEXT),
    "bars with a gap": lambda: figures.grouped_bars({"a": {"x": 1}, "b": {"y": 2}}, **TEXT),
    "bars with intervals": lambda: figures.grouped_bars(BARS, intervals=INTERVALS, **TEXT),
    "lines": lambda: figures.lines(CURVES, reference={"paper": 0.2}, log_x=True, **AXES),
    "bands": lambda: figures.lines(CURVES, intervals=dict.fromkeys(NAMES, [(0.0, 0.2)] * 3), **AXES),
    "lines with labels": lambda: figures.lines(TWICE, reference={"before": 0.1}, **AXES),
    "histograms": lambda: figures.histograms({name: np.arange(50.0) for name in NAMES}, **AXES),
    "pareto": lambda: figures.pareto({"ours": POINTS, "theirs": POINTS, "third": POINTS}, **AXES),
    "horizontal_bars": lambda: figures.horizontal_bars(SIZES, xlabel="text (MB)", title="A title"),
    "beside": lambda: figures.beside(
        PANELS, xlabel="nDCG@10 in %", title="A title", change=("pair, chunks alone", "merged")
    ),
    "forest": lambda: figures.forest([CLAIM, CLAIM | {"unit": "nats"}], title="A title"),
}


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


@pytest.mark.parametrize("name", DRAWINGS)
def test_every_figure_is_labelled_readable_within_its_edges_and_of_known_colours(name):
    """8 points of a figure of 7.5 inches are 12 pixels where it is shown 830 pixels wide."""
    figure = DRAWINGS[name]()
    assert figure.get_suptitle() == "A title"
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
                assert not rgba[3] or to_hex(rgba[:3]) in figures.DARK, (artist, part)


def test_a_figure_is_saved_for_light_and_for_dark_pages(tmp_path, monkeypatch):
    monkeypatch.setattr(workspace, "repository", lambda: tmp_path)
    run = workspace.Run("02_pair", "r", PRESET)
    figure = figures.grouped_bars(BARS | {"CDE": {"english": 0.4, "code": 0.3}}, **TEXT)
    before = [to_hex(patch.get_facecolor(), keep_alpha=True) for patch in figure.axes[0].patches]
    path = run.figure(figure, "one")
    assert path == run.results / "figures" / "02_pair-one.png"
    dark = path.with_name("02_pair-one-dark.png")
    assert sorted(path.parent.iterdir()) == sorted((path, dark))
    wanted = (figures.PAPER, figures.INK, figures.MERGED, figures.MAGENTA)
    for file, (paper, *rest) in ((path, wanted), (dark, [figures.DARK[color] for color in wanted])):
        assert file.stat().st_size <= 100_000
        image = Image.open(file).convert("RGB")
        found = {color: count for count, color in image.getcolors(image.width * image.height)}
        # The page is what there is most of, and the colours are as they should be, a small bar's, too.
        assert max(found, key=found.get) == _rgb(paper)
        for color in rest:
            assert min(np.abs(np.subtract(_rgb(color), other)).max() for other in found) <= 3
    # And the notebook goes on to show the light one.
    assert [to_hex(patch.get_facecolor(), keep_alpha=True) for patch in figure.axes[0].patches] == before
    assert to_hex(figure.get_facecolor()) == figures.PAPER


def test_every_colour_has_one_of_its_own_on_dark_pages():
    light, dark = set(figures.DARK), set(figures.DARK.values())
    assert len(dark) == len(light) and not light & dark
    used = {look.color for look in [*figures.SYSTEMS.values(), *figures.FREE, *figures.VERDICTS.values()]}
    assert used <= light


# Machado, Oliveira and Fernandes (2009), severity 1.0, on linear RGB.
VISIONS = {
    "normal": np.eye(3),
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
}


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("page", ["light", "dark"])
def test_colours_that_meet_differ_for_every_eye(page, vision):
    together = (
        (*figures.RECIPE, *figures.OUTSIDE),  # the stages
        (figures.MERGED, figures.AMBER, figures.MAGENTA, figures.GREEN, *figures.OUTSIDE),  # the systems
        (figures.MERGED, figures.VERMILION, figures.GREEN, *figures.OUTSIDE),  # the precisions
        (figures.CONTEXTUAL, figures.VERMILION, figures.LEXICAL),  # the verdicts
    )
    for colors in together:
        labs = [_oklab(figures.DARK[c] if page == "dark" else c, VISIONS[vision]) for c in colors]
        for (a, first), (b, second) in combinations(zip(colors, labs, strict=True), 2):
            assert np.linalg.norm(first - second) > 0.045, (page, vision, a, b)


def _rgb(color):
    return tuple(round(255 * c) for c in to_rgb(color))


def _oklab(color, vision):
    """Björn Ottosson's space, in which distances are seen as equal, of a colour as an eye sees it."""
    rgb = np.array(to_rgb(color))
    linear = np.clip(
        np.asarray(vision) @ np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4), 0, 1
    )
    to_lms = [[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740], [0.08830, 0.28172, 0.62998]]
    to_lab = [[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45059], [0.02590, 0.78277, -0.80868]]
    return np.asarray(to_lab) @ np.cbrt(np.asarray(to_lms) @ linear)


def test_a_loss_is_named_with_its_last_average():
    figure = DRAWINGS["loss, one step"]()
    assert [text.get_text() for text in figure.legends[0].texts] == ["long (0.30)", "short (5.00)"]
    assert figures.smoothed([1.0, 2.0], 0.5) == pytest.approx([1.0, 5 / 3])


def test_systems_from_outside_are_levels():
    table = {"BM25": {"x": 0.52, "y": 0.9}, "pair": {"x": 0.5, "y": 0.2}, "merged": {"x": 0.4, "y": 0.3}}
    (axes,) = figures.grouped_bars(table, **TEXT).axes
    assert [patch.get_height() for patch in axes.patches] == [0.5, 0.2, 0.4, 0.3]
    (levels,) = (c for c in axes.collections if isinstance(c, LineCollection))
    segments = levels.get_segments()
    np.testing.assert_allclose([segment[:, 1] for segment in segments], [[0.52, 0.52], [0.9, 0.9]])
    assert all(segment[1, 0] - segment[0, 0] > 0.84 for segment in segments)  # over the whole group
    assert [text.get_text() for text in axes.texts] == [".50", ".20", ".40", ".30"]


def test_the_frontier_goes_through_the_points_that_nothing_beats_in_both():
    points = {
        "int8": [(100, 0.5, "256"), (400, 0.4, "64")],
        "binary": [(800, 0.45, "256"), (50, 0.5, "2048")],
    }
    figure = figures.pareto({"one": points, "two": {"int8": [(1, 0.1, "a")]}}, **AXES)
    axes, _ = figure.axes
    (frontier,) = [line for line in axes.lines if line.get_label() == "frontier"]
    assert list(zip(frontier.get_xdata(), frontier.get_ydata())) == [(100, 0.5), (800, 0.45)]
    shown = [text for text in axes.texts if text.get_visible()]
    assert [text.get_text() for text in shown] == ["256", "64", "256", "2048"]
    assert [text.get_text() for text in figure.legends[0].texts] == ["frontier", "int8", "binary"]
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in shown]
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


def test_rows_keep_their_order_and_what_is_not_highlighted_is_grey():
    panels = {
        "the paper": {"a": {"x": 1.0, "y": 2.0}, "b": {"y": 3.0, "z": 4.0}, "c": {"x": 5.0}},
        "ours": {"mine": {"x": 0.5}},
    }
    figure = figures.beside(panels, highlight=["b", "mine", "absent"], xlabel="score in %", title="A title")
    paper, _ = figure.axes
    assert [label.get_text() for label in paper.get_yticklabels()] == ["x", "y", "z"]
    (b,) = [line for line in paper.lines if line.get_label() == "b"]
    assert list(zip(*b.get_data())) == [(3.0, 1), (4.0, 2)]
    legends = [[text.get_text() for text in legend.texts] for legend in figure.legends]
    assert legends == [["b", "2 others"], ["mine"]]


def test_a_forest_measures_from_the_bar_towards_the_claimed_side():
    lower = {"value": -0.3, "interval": [-0.4, -0.2], "bar": {"below": -0.1}, "unit": "nats"}
    failed = {"value": 0.05, "interval": [0.04, 0.06], "bar": {"above": 0.1}, "verdict": "contradicted"}
    untested = CLAIM | {"interval": None, "value": None, "bar": None, "values": {}}
    claims = [CLAIM, untested, CLAIM | failed, CLAIM | lower | {"values": {"0": -0.3}}]
    points, nats = figures.forest(claims, title="A title").axes
    ends = [
        [segment[:, 0].tolist() for segment in c.get_segments()]
        for ax in (points, nats)
        for c in ax.collections
    ]
    np.testing.assert_allclose(ends, [[[1, 3]], [[-6, -4]], [[0.3, 0.1]]])
    assert [t.get_text().splitlines()[1] for t in points.texts] == ["claimed > 0", "claimed > 10"]
    assert points.texts[0].get_text().startswith("+2.0 [+1.0, +3.0]\n")
    seeds = [line.get_xdata() for line in points.lines if line.get_marker() == "|"]
    np.testing.assert_allclose(seeds[0], [1.5, 2.5])
    assert "nats" in nats.get_title() and "points" in points.get_title()
