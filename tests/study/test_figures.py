from itertools import combinations

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.collections import QuadMesh
from matplotlib.colors import to_hex, to_rgb, to_rgba_array
from matplotlib.text import Text
from PIL import Image

from unmask_study import figures, pictures
from unmask_study import run as workspace
from unmask_study.settings import load_preset

plt.switch_backend("agg")

NAMES = ["BM25", "all-MiniLM-L6-v2", "pair, chunks alone", "merged", *(f"series {i}" for i in range(6))]
TITLE = "longer than a line " * 7
TEXT = {"ylabel": "quality (nDCG@10)", "title": TITLE}
AXES = {"xlabel": "size (bytes)", **TEXT}
STEPS = [{"step": i, "loss": 5 / (i + 1)} for i in range(30)]
BARS = {name: {"english": 0.1 * i, "code": 0.05} for i, name in enumerate(NAMES)}
CLAIM = {"short": "contextual − heading before each chunk", "bar": 0.0, "seeds": {"0": 0.015, "1": 0.025}}
CLAIM |= {
    "group": "paper",
    "paper": "+1.5 (2.0 − 0.5)",
    "value": 0.02,
    "interval": [0.01, 0.03],
    "verdict": "holds",
    "effect": "+2.0 [+1.0, +3.0]",
    "why": "",
}
CURVES = {name: ([32, 64, 128], [0.1, 0.2, 0.3]) for name in NAMES}
TWICE = {(n, how): ([0.1, 0.2], [0.2, 0.3], ["random", "64"]) for n in NAMES[:5] for how in ("on", "off")}
POINTS = {n: ([128, 4096], [0.4, 0.5 - i / 50], ["32-d", "1024-d"]) for i, n in enumerate(NAMES[:5])}
SIZES = {name: 10.0**i for i, name in enumerate(NAMES)}
ROWS = {name: {f"task {row}": 10.0 * row + i for row in range(6)} for i, name in enumerate(NAMES[:6])}
PANELS = {"the paper": ROWS, "ours": dict(list(ROWS.items())[2:])}
GAIN = {"xlabel": "points of nDCG@10", "title": TITLE}
LOSS = {"ylabel": "loss (nats)", "title": TITLE}
HEAT = {"a": np.eye(3), "b": np.full((3, 3), 0.5)}
NAMED = {"rows": ["x", "y: $1", "z: 文"], "columns": ["one", "two", "three"], "title": TITLE}
STRIP = [[("word", state) for state in pictures.STATES], [("other", "seen")] * len(pictures.STATES)]
DRAWINGS = {
    "loss": lambda: figures.loss_curves(dict.fromkeys(NAMES, STEPS), reference={"guess": 9.0}, **LOSS),
    "loss, one step": lambda: figures.loss_curves({"long": STEPS, "short": STEPS[:1]}, **LOSS),
    "bars": lambda: figures.grouped_bars(BARS, **TEXT),
    "bars with a gap": lambda: figures.grouped_bars({"a": {"x": 1}, "b": {"y": 2}}, **TEXT),
    "effects": lambda: figures.effects({n: {"code": (0.02, -0.01, 0.05)} for n in NAMES[2:]}, **GAIN),
    "effects of one": lambda: figures.effects({"": dict.fromkeys(NAMES, (0.1, -0.02, 0.3))}, **GAIN),
    "lines": lambda: figures.lines(CURVES, reference={"paper": 0.2}, log_x=True, **AXES),
    "bands": lambda: figures.lines(CURVES, intervals=dict.fromkeys(NAMES, [(0.0, 0.2)] * 3), **AXES),
    "lines with labels": lambda: figures.lines(TWICE, reference={"before": 0.1}, **AXES),
    "histograms": lambda: figures.histograms({name: np.arange(50.0) for name in NAMES}, **AXES),
    "frontier": lambda: figures.lines(POINTS, frontier=True, log_x=True, **AXES),
    "horizontal_bars": lambda: figures.horizontal_bars(SIZES, xlabel="text (MB)", title=TITLE),
    "beside": lambda: figures.beside(PANELS, highlight=NAMES[:3], **GAIN),
    "beside, as differences": lambda: figures.beside(PANELS, baselines=["merged"], **GAIN),
    "heatmaps": lambda: pictures.heatmaps(HEAT, numbers=".2f", rings=[(0, 1)], borders={"b": [2]}, **NAMED),
    "strip": lambda: pictures.strip({"text": STRIP, "model": STRIP}, title=TITLE, columns=["a", "b"]),
    "dots": lambda: pictures.dots({"a": {n: [0.2, 0.3] for n in NAMES}, "b": {"c": [0.1]}}, **GAIN),
    "claims": lambda: figures.claims({"cpu": [CLAIM, CLAIM | {"short": "bits", "bar": -0.1}]}, title=TITLE),
    "claims of two runs": lambda: figures.claims({"cpu": [CLAIM], "gpu": [CLAIM]}, title=TITLE),
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
        both = (axes.get_xticklabels(), axes.get_yticklabels())  # none where panels share them
        across, up = ("".join(tick.get_text() for tick in ticks[:1]) for ticks in both)
        assert axes.get_xlabel() or across[:1].isalpha() or not len(axes.get_xticks())
        assert axes.get_ylabel() or up[:1].isalpha() or not axes.get_subplotspec().is_first_col()
    figure.draw_without_rendering()
    box = figure.get_tightbbox()
    assert box.x0 >= -0.01 and box.x1 <= 7.51 and box.y0 >= -0.01 and box.y1 <= figure.get_figheight() + 0.01
    assert all(text.get_fontsize() >= 8 for text in figure.findobj(Text))
    # A heat map's colours lie between two of ours.
    for artist in figure.findobj(lambda artist: artist.get_visible() and not isinstance(artist, QuadMesh)):
        for part in ("color", "facecolor", "edgecolor"):
            for rgba in to_rgba_array(getattr(artist, f"get_{part}", lambda: "none")()):
                assert not rgba[3] or to_hex(rgba[:3]) in figures.COLORS.values(), (artist, part)


def test_in_late_chunking_a_token_sees_all_and_its_chunk_averages_its_own():
    shades = [ax.collections[0].get_array().reshape(9, 9) for ax in pictures.attention_masks().axes]
    causal, both, alone, late = (2 * shade_LL for shade_LL in shades)  # of 2, which is darkest
    assert (causal == np.tril(both)).all() and (both == 1).all()
    assert (alone == 2 * np.kron(np.eye(3), np.ones((3, 3)))).all() and (late == 1 + alone / 2).all()


def test_each_query_of_a_heat_map_has_its_own_scale():
    one = {"": np.array([[0.1, 8.0], [0.2, 9.0], [0.4, 7.0]])}
    for queries, matrix in ((1, one[""]), (0, one[""].T)):
        names = {"rows": "abc"[: len(matrix)], "columns": "abc"[: matrix.shape[1]]}
        figure = pictures.heatmaps({"": matrix}, **names, queries=queries, title="two queries")
        shade = np.asarray(figure.axes[0].collections[0].get_array()).reshape(matrix.shape)
        assert np.allclose(shade if queries else shade.T, [[0, 1 / 2], [1 / 3, 1], [1, 0]])


def test_a_figure_is_saved_small_and_in_its_colours(tmp_path, monkeypatch):
    monkeypatch.setattr(workspace, "repository", lambda: tmp_path)
    run = workspace.Run("02_pair", "r", load_preset("smoke"))
    run.figure(figures.grouped_bars(BARS | {"CDE": {"english": 0.4, "code": 0.3}}, **TEXT), "one")
    (path,) = (run.results / "figures").iterdir()
    assert path.name == "02_pair-one.png" and path.stat().st_size <= 100_000
    image = Image.open(path).convert("RGB")
    counts = {color: count for count, color in image.getcolors(image.width * image.height)}
    # The page is what there is most of, and the colours are as they should be, a small bar's, too.
    assert max(counts, key=counts.get) == (255, 255, 255)
    for name in ("ink", "merged", "magenta"):
        color = [255 * part for part in to_rgb(figures.COLORS[name])]
        assert min(np.abs(np.subtract(color, other)).max() for other in counts) <= 3


def test_the_style_is_ours_whatever_a_matplotlibrc_says(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")  # no LaTeX
    for name, settings in {"one.png": {"text.usetex": True, "font.size": 40}, "other.png": {}}.items():
        with plt.rc_context(settings):
            figures.effects({"": {"pair": (0.1, 0.0, 0.2)}}, **GAIN).keep(tmp_path / name)
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "other.png").read_bytes()


def test_the_frontier_goes_through_the_points_that_nothing_beats_in_both():
    points = {"int8": ([100, 400], [0.5, 0.4], ["256", "64"])}
    points |= {"binary": ([50, 800], [0.5, 0.45], ["2048", "256"])}
    figure = figures.lines(points, frontier=True, log_x=True, **AXES)
    (axes,) = figure.axes
    (frontier,) = [line for line in axes.lines if line.get_label() == "frontier"]
    assert list(zip(frontier.get_xdata(), frontier.get_ydata())) == [(100, 0.5), (800, 0.45)]
    shown = [text for text in axes.texts if text.get_visible()]
    assert [text.get_text() for text in shown] == ["256", "64", "2048", "256"]
    assert [text.get_text() for text in figure.legends[0].texts] == ["int8", "binary", "frontier"]
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in shown]
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


def test_claims_show_signed_effects_seeds_and_bars_and_no_row_that_no_run_measured():
    bits = CLAIM | {"short": "bits", "value": -0.05, "interval": [-0.06, -0.04], "bar": -0.044}
    bits |= {"verdict": "open", "seeds": {}, "paper": "−2 to −4.4", "why": "by an earlier definition: …"}
    control = CLAIM | {"short": "control", "group": "control", "paper": "none", "seeds": {}}
    unasked = CLAIM | {"short": "unasked", "interval": None, "value": None, "seeds": {}}
    other = {"short": "elsewhere"}
    runs = {"cpu": [unasked | other, CLAIM], "gpu": [CLAIM | other, CLAIM]}
    one, both = (
        figures.claims(some, title=TITLE) for some in ({"cpu": [control, unasked, CLAIM, bits]}, runs)
    )
    rows = [[label.get_text() for label in drawn.axes[0].get_yticklabels()] for drawn in (one, both)]
    own, ours = "The papers' own", "Our controls"
    assert rows == [[own, CLAIM["short"], "bits", ours, "control"], [own, "elsewhere", CLAIM["short"]]]
    (ax,) = one.axes
    ends = [segment[:, 0].tolist() for drawn in ax.collections for segment in drawn.get_segments()]
    np.testing.assert_allclose(ends, [[1, 3], [1, 3], [-6, -4]])
    across = [line.get_xdata() for line in ax.lines if line.get_marker() == "None" and len(line.get_xdata())]
    bars = [x[0] for x in across if x[0] == x[1]]
    np.testing.assert_allclose(bars, [0, 0, -4.4, 0])  # and the line at zero
    stars = [line.get_xdata().tolist() for line in ax.lines if line.get_marker() == "*"]
    assert stars == [[], [1.5], [-2, -4.4]]
    seeds, *_ = (line.get_xdata() for line in ax.lines if line.get_marker() == "." and len(line.get_xdata()))
    np.testing.assert_allclose(seeds, [1.5, 2.5])
    assert ax.texts[0].get_text() == "+2.0 [+1.0, +3.0]"
    assert [lines.get_alpha() for lines in ax.collections] == [None, None, 0.35]  # pale: earlier


def test_names_keep_what_the_font_has_and_are_no_formulas():
    assert pictures.plain(["τ = 0.5", "文 costs $1"]) == ["τ = 0.5", r"? costs \$1"]
