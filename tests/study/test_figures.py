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
    "values": {"0": 0.015, "1": 0.025},
}
RATIOS = {"speed": 2.0, "memory": 0.5, "gpu": None}
TIMES = {"xlabel": "times better", "title": "A title", "fmt": "{:.3g}×", "ratios": True}
DRAWINGS = {
    "loss_curves": lambda: figures.loss_curves(
        dict.fromkeys(NAMES, STEPS), ylabel="loss (nats)", title="A title", reference={"uniform guess": 9.0}
    ),
    "loss_curves that end apart": lambda: figures.loss_curves(
        {"long": STEPS, "short": STEPS[:9]}, ylabel="loss (nats)", title="A title"
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
        {
            "ours": {
                name: [(4096, 0.5 - i / 50, "1024-d"), (128, 0.4, "32-d")] for i, name in enumerate(NAMES)
            }
        },
        **AXES,
    ),
    "horizontal_bars": lambda: figures.horizontal_bars(
        {name: 10.0**i for i, name in enumerate(NAMES)}, xlabel="text (MB)", title="A title"
    ),
    "beside": lambda: figures.beside(
        {"the paper": BARS, "ours": dict(list(BARS.items())[2:])},
        xlabel="nDCG@10 in %",
        title="A title",
        change=("pair, chunks alone", "merged"),
        relative=True,
    ),
    "lines with labels": lambda: figures.lines(
        {(name, how): ([0.1, 0.2], [0.2, 0.3], ["random", "64"]) for name in NAMES for how in ("on", "off")},
        **AXES,
        reference={"before": 0.1},
    ),
    "ratios": lambda: figures.horizontal_bars(RATIOS, **TIMES),
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
        assert axes.get_xlabel() or axes.get_xticklabels()[0].get_text()[0].isalpha()
        assert axes.get_ylabel() or axes.get_yticklabels()[0].get_text()[0].isalpha()
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
    figure = figures.grouped_bars(
        BARS | {"CDE": {"english": 0.4, "code": 0.3}}, **TEXT, reference={"paper": 0.5}
    )
    before = [to_hex(patch.get_facecolor(), keep_alpha=True) for patch in figure.axes[0].patches]
    path = run.figure(figure, "one")
    assert path == run.results / "figures" / "02_pair-one.png"
    dark = path.with_name("02_pair-one-dark.png")
    assert sorted(path.parent.iterdir()) == sorted((path, dark))
    for file, paper, ink, merged, cde in (
        (path, figures.PAPER, figures.INK, figures.MERGED, figures.MAGENTA),
        (dark, *(figures.DARK[c] for c in (figures.PAPER, figures.INK, figures.MERGED, figures.MAGENTA))),
    ):
        assert file.stat().st_size <= 100_000
        image = Image.open(file).convert("RGB")
        found = {color: count for count, color in image.getcolors(image.width * image.height)}
        # The page is what there is most of, and the colours are as they should be, a small bar's, too.
        assert max(found, key=found.get) == _rgb(paper)
        for color in (ink, merged, cde):
            assert min(np.abs(np.subtract(_rgb(color), other)).max() for other in found) <= 3
    light_only = {_rgb(c) for c in (figures.MERGED, figures.INK)}
    assert not light_only & {color for _, color in Image.open(dark).convert("RGB").getcolors(10**7)}
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


def test_curves_that_end_together_are_named_at_their_ends_and_apart():
    flat = {
        name: [{"step": i, "loss": loss} for i in range(9)]
        for name, loss in (("a", 1.0), ("b", 1.01), ("c", 3))
    }
    figure = figures.loss_curves(flat, ylabel="loss (nats)", title="A title")
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts] == ["a 1.00", "b 1.01", "c 3.00"]
    assert not figure.legends
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    assert boxes[0].y0 < boxes[1].y0 < boxes[2].y0
    short = figures.loss_curves({"a": STEPS[:1], "b": STEPS[:1]}, ylabel="loss (nats)", title="A title")
    assert [line.get_marker() for line in short.axes[0].lines if line.get_linewidth() > 1] == ["o", "D"]
    apart = DRAWINGS["loss_curves that end apart"]()
    assert apart.legends[0].texts[0].get_text().startswith("long (")


def test_systems_from_outside_are_levels_and_no_number_stands_across_one():
    table = {"BM25": {"x": 0.52, "y": 0.9}, "pair": {"x": 0.5, "y": 0.2}, "merged": {"x": 0.4, "y": 0.3}}
    (axes,) = figures.grouped_bars(table, **TEXT).axes
    assert [patch.get_height() for patch in axes.patches] == [0.5, 0.2, 0.4, 0.3]
    (levels,) = (c for c in axes.collections if isinstance(c, LineCollection))
    segments = levels.get_segments()
    np.testing.assert_allclose([segment[:, 1] for segment in segments], [[0.52, 0.52], [0.9, 0.9]])
    assert all(segment[1, 0] - segment[0, 0] > 0.84 for segment in segments)  # over the whole group
    assert [(text.get_text(), text.xy[1]) for text in axes.texts] == [
        (".50", 0.52), (".20", 0.2), (".40", 0.4), (".30", 0.3),
    ]  # fmt: skip


def test_the_frontier_goes_through_the_points_that_nothing_beats_in_both():
    points = {
        "int8": [(100, 0.5, "256"), (400, 0.4, "64")],
        "binary": [(800, 0.45, "256"), (50, 0.5, "2048")],
    }
    figure = figures.pareto({"one": points, "two": {"int8": [(1, 0.1, "a")]}}, **AXES)
    axes, second = figure.axes
    (frontier,) = [line for line in axes.lines if line.get_label() == "frontier"]
    assert list(zip(frontier.get_xdata(), frontier.get_ydata())) == [(100, 0.5), (800, 0.45)]
    assert [text.get_text() for text in axes.texts] == ["256", "64", "256", "2048"]
    assert [text.get_text() for text in second.texts] == ["a"]
    assert [text.get_text() for text in figure.legends[0].texts] == ["frontier", "int8", "binary"]
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


def test_rows_keep_their_order_and_what_is_not_highlighted_is_grey():
    panels = {
        "the paper": {"a": {"x": 1.0, "y": 2.0}, "b": {"y": 3.0, "z": 4.0}, "c": {"x": 5.0}},
        "ours": {"mine": {"x": 0.5}},
    }
    figure = figures.beside(panels, highlight=["b", "mine", "absent"], xlabel="score in %", title="A title")
    paper, paper_legend, ours, ours_legend = figure.axes
    assert [label.get_text() for label in paper.get_yticklabels()] == ["x", "y", "z"]
    (b,) = [line for line in paper.lines if line.get_label() == "b"]
    assert list(zip(*b.get_data())) == [(3.0, 1), (4.0, 2)]
    legends = [[text.get_text() for text in axes.get_legend().texts] for axes in (paper_legend, ours_legend)]
    assert legends == [["b", "2 others"], ["mine"]]
    figure.draw_without_rendering()
    heights = [ax.bbox.height / rows for ax, rows in ((paper, 3), (ours, 1))]
    np.testing.assert_allclose(*heights, rtol=0.05)


def test_ratios_stand_right_of_one_where_we_are_better_and_say_what_was_not_run():
    (axes,) = figures.horizontal_bars(RATIOS, **TIMES).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["gpu", "memory", "speed"]  # upwards
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [(1, 0), (1, -0.5), (1, 1)]
    assert axes.patches[1].get_facecolor() != axes.patches[2].get_facecolor()
    assert [text.get_text() for text in axes.texts] == ["not run", "0.5×", "2×"]


def test_a_forest_measures_from_the_bar_towards_the_claimed_side():
    lower = {
        "value": -0.3,
        "interval": [-0.4, -0.2],
        "bar": {"below": -0.1},
        "unit": "nats",
        "values": {"0": -0.3},
    }
    failed = {"value": 0.05, "interval": [0.04, 0.06], "bar": {"above": 0.1}, "verdict": "contradicted"}
    untested = CLAIM | {"interval": None, "value": None, "bar": None, "unit": "", "values": {}}
    figure = figures.forest([CLAIM, untested, CLAIM | failed, CLAIM | lower], title="A title")
    points, nats = figure.axes
    ends = [
        [segment[:, 0].tolist() for segment in c.get_segments()]
        for ax in (points, nats)
        for c in ax.collections
    ]
    np.testing.assert_allclose(ends, [[[1, 3]], [[-6, -4]], [[0.3, 0.1]]])
    assert [t.get_text() for t in points.texts] == [
        "+2.0 [+1.0, +3.0]\nclaimed > 0", "+5.0 [+4.0, +6.0]\nclaimed > 10",
    ]  # fmt: skip
    assert [t.get_text() for t in nats.texts] == ["-0.300 [-0.400, -0.200]\nclaimed < -0.1"]
    seeds = [line.get_xdata() for line in points.lines if line.get_marker() == "|"]
    np.testing.assert_allclose(seeds[0], [1.5, 2.5])
    assert "nats" in nats.get_xlabel() and "points" in points.get_xlabel()
    with pytest.raises(ValueError, match="no claim has an interval"):
        figures.forest([untested], title="A title")
