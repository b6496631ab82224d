"""One style, one function per kind of figure, for light and for dark pages.

Every axis has a label with its unit. A system has one colour and one marker in all figures, which its name
decides: blues are the recipe, and the further trained, the more they stand out against the page; other hues
are its neighbours; greys come from outside.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.figure
import matplotlib.pyplot as plt
import numpy as np
import yaml
from matplotlib.colors import to_hex, to_rgb, to_rgba_array
from PIL import Image
from scipy.signal import lfilter

from unmask.study.evidence import in_unit

WIDTH, DPI = 7.5, 144  # inches; shown 830 pixels wide, 8 points are 12 pixels
_TOLD = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf8"))
DARK = dict(_TOLD["colors"].values())  # every colour that a figure may use → what it becomes on a dark page
INK, MUTED, GRID, PAPER, *_COLORED = DARK
RECIPE = BACKBONE, PAIR, CONTEXTUAL, TRIPLET, MERGED = _COLORED[:5]
VERMILION, GREEN, MAGENTA, AMBER, BROWN = _COLORED[5:10]
HUES = CONTEXTUAL, VERMILION, GREEN, MAGENTA, AMBER, BROWN  # of what has no colour of its own
OUTSIDE = LEXICAL, PRETRAINED = _COLORED[10:]
STYLE = Path(__file__).with_suffix(".mplstyle")


class Look(NamedTuple):
    """How a system is drawn. Hollow, with a dashed line: a lesser way of using the system of that colour."""

    color: str
    marker: str
    hollow: str = ""  # or "hollow"

    @property
    def line(self) -> dict[str, Any]:
        return {
            "color": self.color,
            "marker": self.marker,
            "linestyle": "--" if self.hollow else "-",
            "markerfacecolor": PAPER if self.hollow else self.color,
        }


FREE = [Look(*pair) for pair in zip(HUES, "oDs^vP", strict=True)]


def _told(systems: Mapping[str, Sequence[str]]) -> dict[str, Look]:
    """Look of each name; from "contextual s hollow", a colour and a marker, to the names that have it."""
    written = {tuple(look.split()): names for look, names in systems.items()}
    looks = {Look(_TOLD["colors"][color][0], *rest): names for (color, *rest), names in written.items()}
    return {name: look for look, names in looks.items() for name in names}


SYSTEMS, VERDICTS = _told(_TOLD["systems"]), _told(_TOLD["verdicts"])


def looks(names: Iterable[str]) -> dict[str, Look]:
    """The look of each name: its own if it is one of `SYSTEMS`, else one that these leave free."""
    names = list(dict.fromkeys(names))
    known = {name: SYSTEMS[name] for name in names if name in SYSTEMS}
    taken = {look.color for look in known.values()} | (set(RECIPE) if known else set())
    free = cycle(look for look in FREE if look.color not in taken)
    return {name: known.get(name) or next(free) for name in names}


class Figure(matplotlib.figure.Figure):
    """A figure that saves itself for light and for dark pages."""

    def save(self, path: Path) -> Path:
        """Writes `path`, NAME.png, and its twin for dark pages, NAME-dark.png, beside it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(self, path)
        _recolour(self, DARK)
        _write(self, path.with_stem(f"{path.stem}-dark"))
        _recolour(self, {dark: light for light, dark in DARK.items()})
        return path


def axes(**options) -> tuple[Figure, plt.Axes]:
    """A figure in our style; options as for `plt.subplots`."""
    plt.style.use(STYLE)
    return plt.subplots(FigureClass=Figure, **options)


def _write(figure: Figure, path: Path) -> None:
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=DPI)
    # Half the size, and the eye does not see it.
    Image.open(drawn).convert("RGB").quantize(method=Image.Quantize.MAXCOVERAGE).save(path, optimize=True)


def _recolour(figure: Figure, colors: Mapping[str, str]) -> None:
    """Gives whatever has one of the colours another one."""
    parts = ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor")
    for artist, part in ((artist, part) for artist in figure.findobj() for part in parts):
        if hasattr(artist, f"get_{part}") and hasattr(artist, f"set_{part}"):
            rgba = to_rgba_array(getattr(artist, f"get_{part}")())
            for row in rgba:
                row[:3] = to_rgb(colors.get(to_hex(row[:3]), row[:3]))
            if len(rgba):  # empty: not drawn
                getattr(artist, f"set_{part}")(rgba if len(rgba) > 1 else tuple(rgba[0]))


def smoothed(values: Sequence[float], alpha: float) -> np.ndarray:
    """Exponential moving average, e_k = α·v_k + (1 − α)·e_{k−1}, corrected for its start (divided by 1 − (1
    − α)^k)."""
    sums = lfilter([alpha], [1, alpha - 1], values)
    return sums / (1 - (1 - alpha) ** np.arange(1, len(sums) + 1))


def loss_curves(
    runs: Mapping[str, Sequence[Mapping[str, float]]],
    *, ylabel: str, title: str, alpha: float = 0.1, reference: dict | None = None,
) -> Figure:  # fmt: skip
    """Training loss against steps: each run's raw values faintly, their moving average on top.

    Curves that end together are named at their ends, with the last average; others in a legend.

    Args:
        runs: name → logged rows with "step" and "loss".
        reference: name → loss drawn as a dashed line, for instance a uniform guess.
    """
    figure, ax = axes()
    last = [rows[-1]["step"] for rows in runs.values()]
    together, ends = len(runs) > 1 and min(last) > 0.95 * max(last), {}
    for (name, look), rows in zip(looks(runs).items(), runs.values(), strict=True):
        steps, losses = [row["step"] + 1 for row in rows], [row["loss"] for row in rows]
        averages = smoothed(losses, alpha)
        ends[name] = averages[-1]
        ax.plot(steps, losses, color=look.color, alpha=0.25, linewidth=0.8)
        style = look.line
        if len(rows) > 5:  # a few points would not be seen without their markers
            style |= {"marker": ""} if together or len(runs) == 1 else {"markevery": 0.15}
        ax.plot(steps, averages, **style, label=None if together else f"{name} ({averages[-1]:.2f})")
    _references(ax, reference)
    if together:
        ax.margins(x=0.02)
        places = _apart(list(ends.values()), 0.06 * np.ptp(ax.get_ylim()))
        for (name, look), y in zip(looks(runs).items(), places, strict=True):
            _beside(ax, y, f"{name} {ends[name]:.2f}", color=look.color, weight="bold", fontsize=9)
    ax.set(xlabel="training step", ylabel=ylabel)
    return _finished(figure, title)


def _apart(values: Sequence[float], gap: float) -> np.ndarray:
    """The values, pushed from each other until neighbours are `gap` apart."""
    order = np.argsort(values)
    placed = np.asarray(values, dtype=float)[order]
    for _ in range(200):
        overlaps = np.maximum(gap - np.diff(placed), 0) / 2
        placed[:-1] -= overlaps
        placed[1:] += overlaps
    return placed[np.argsort(order)]


def grouped_bars(
    table: Mapping[str, Mapping[str, float]], *, ylabel: str, title: str,
    intervals: Mapping[str, Mapping[str, tuple[float, float]]] | None = None, reference: dict | None = None,
) -> Figure:  # fmt: skip
    """A bar per (group, series): `table[series][group]`; intervals, where given, as error bars.

    Systems from outside (BM25, a pretrained embedder) are grey levels over their group instead. Values are
    written at the bars, where these are many only at those of the last series.
    """
    groups = list(dict.fromkeys(group for row in table.values() for group in row))
    figure, ax = axes()
    look, top = looks(table), max(abs(value) for row in table.values() for value in row.values())
    outside = {series: row for series, row in table.items() if look[series].color in OUTSIDE}
    inside = {series: row for series, row in table.items() if series not in outside}
    width = 0.84 / max(1, len(inside))
    for number, (series, row) in enumerate(inside.items()):
        color, _, hollow = look[series]
        at = [groups.index(group) + (number - (len(inside) - 1) / 2) * width for group in row]
        face = (color, 0.3) if hollow else color
        ax.bar(at, row.values(), width * 0.92, label=series, facecolor=face, edgecolor=color, linewidth=1)
        ends = [(value, value) for value in row.values()]
        if intervals and series in intervals:
            ends = [intervals[series][group] for group in row]
            for shade, wide in ((PAPER, 3), (INK, 1)):  # seen on every bar and on the page
                ax.vlines(at, *np.transpose(ends), color=shade, linewidth=wide)
        if len(inside) * len(groups) <= 24 or series == list(inside)[-1]:
            for x, (group, value), (low, high) in zip(at, row.items(), ends, strict=True):
                levels = [other[group] for other in outside.values() if group in other]
                _value(ax, x, low if value < 0 else high, value, levels, top)
    for series, row in outside.items():
        at, style = np.array([groups.index(group) for group in row]), look[series]
        dashes = "-" if style.color == LEXICAL else (0, (1.5, 1))
        lines = {"color": style.color, "linewidth": 2.5, "linestyle": dashes, "label": series}
        ax.hlines(list(row.values()), at - 0.45, at + 0.45, **lines)
    _references(ax, reference)
    ax.axhline(0, color=MUTED, linewidth=1)
    ax.set_xticks(range(len(groups)), groups)
    ax.set(ylabel=ylabel)
    ax.tick_params(axis="x", length=0)
    ax.grid(axis="x", visible=False)
    ax.margins(x=0.01, y=0.1)
    return _finished(figure, title)


def _value(ax: plt.Axes, x: float, y: float, value: float, levels: Sequence[float], top: float) -> None:
    """Writes a bar's value at its end, or above a level that would cross the number."""
    for level in sorted(levels):
        y = level if -0.01 < (level - y) / top < 0.06 else y
    digits = 3 if top < 0.1 else 2 if top < 10 else 1
    text = f"{value:.{digits}f}".removeprefix("0" if top < 1 else "")
    place = {"xytext": (0, -2), "va": "top"} if y < 0 else {"xytext": (0, 2), "va": "bottom"}
    ax.annotate(text, (x, y), textcoords="offset points", ha="center", fontsize=8, **place)


def lines(
    series: Mapping[str | tuple[str, str], Sequence[Sequence]], *, xlabel: str, ylabel: str, title: str,
    intervals: Mapping[str, Sequence[tuple[float, float]]] | None = None, reference: dict | None = None,
    log_x: bool = False,
) -> Figure:  # fmt: skip
    """Curves of measured points: name → (x, y) or (x, y, labels); intervals, where given, as bands.

    A name may have two parts, (what, how): each `what` has a colour; of the `how`, the first has filled
    markers and the labels, the others hollow markers and a dashed line.
    """
    figure, ax = axes()
    named = {name if isinstance(name, tuple) else (name, ""): data for name, data in series.items()}
    look, (_, first), labels = looks(what for what, _ in named), next(iter(named)), []
    for (what, how), (x, y, *texts) in named.items():
        style = look[what] if how == first else look[what]._replace(hollow="hollow")
        ax.plot(x, y, **style.line, label=f"{what}, {how}" if how else what)
        if intervals and what in intervals:
            low, high = zip(*intervals[what], strict=True)
            ax.fill_between(x, low, high, color=style.color, alpha=0.2, linewidth=0)
        if texts and how == first:
            labels += [(*point, style.color) for point in zip(x, y, texts[0], strict=True)]
            ax.margins(x=0.1, y=0.15)
    if log_x:
        ax.set_xscale("log", base=2)
        ticks = sorted({value for x, *_ in series.values() for value in x})
        ax.set_xticks(ticks, [f"{value:,.10g}" for value in ticks])
        ax.tick_params(axis="x", which="minor", length=0)
    _references(ax, reference)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    return _finished(figure, title, labels={ax: labels} if labels else None)


def histograms(
    series: Mapping[str, Sequence[float]], *, xlabel: str, ylabel: str, title: str, bins: int = 50
) -> Figure:
    """Overlaid distributions, each normalised to an area of one."""
    figure, ax = axes()
    values = np.concatenate([np.asarray(v, dtype=float) for v in series.values()])
    edges = np.linspace(values.min(), values.max(), bins + 1)
    for (name, look), data in zip(looks(series).items(), series.values(), strict=True):
        style = {"facecolor": (look.color, 0.3), "edgecolor": look.color, "linewidth": 1.2}
        ax.hist(data, edges, density=True, histtype="stepfilled", label=name, **style)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    return _finished(figure, title)


def pareto(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float, str]]]], *, xlabel: str, ylabel: str,
    title: str,
) -> Figure:  # fmt: skip
    """Quality against storage: panel → name → (x, y, label) points joined in order of x, on a logarithmic x
    axis; two panels in a row.

    The frontier, the points that no other one of the panel beats in both, is drawn as a grey staircase. What
    is no system of ours (`SYSTEMS`) is grey and has no entry in the legend.
    """
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    size = (WIDTH, 0.9 + (3.7, 2.6)[columns - 1] * rows)
    figure, drawn = axes(nrows=rows, ncols=columns, figsize=size, squeeze=False)
    labels = {}
    for (panel, points), ax in zip(panels.items(), drawn.flat, strict=False):
        all_ = [(x, y) for data in points.values() for x, y, _ in data]
        best = [p for p in all_ if not any(o != p and o[0] >= p[0] and o[1] >= p[1] for o in all_)]
        stairs = zip(*sorted(best), strict=True)
        ax.step(*stairs, where="pre", color=GRID, linewidth=6, zorder=1, label="frontier")
        for name, data in points.items():
            x, y, _ = zip(*sorted(data), strict=True)
            known = name in SYSTEMS
            ax.plot(x, y, **SYSTEMS.get(name, Look(LEXICAL, "o")).line, label=name if known else None)
            color = SYSTEMS[name].color if known else MUTED
            labels.setdefault(ax, []).extend((*point, color) for point in data)
        ax.set_xscale("log")
        ax.set_title(panel, fontsize=9.5)
        ax.margins(x=0.1 + 0.08 * columns, y=0.15)
    for ax in drawn.flat[len(panels) :]:
        ax.remove()
    for ax in (*drawn[-1], *drawn[:, 0]):
        ax.set(xlabel=xlabel if ax in drawn[-1] else "", ylabel=ylabel if ax in drawn[:, 0] else "")
    return _finished(figure, title, labels=labels)


def horizontal_bars(
    values: Mapping[str, float | None], *, xlabel: str, title: str, fmt: str = "{:,.0f}", ratios: bool = False
) -> Figure:
    """One bar per name, the largest on top.

    Args:
        ratios: comparisons instead, in the order given: bars on a logarithmic axis from the line of equality
            at 1, of another colour where they are below it. None stands for "not run", and is written so.
    """
    order = list(values)[::-1] if ratios else sorted(values, key=values.get)
    sizes = [1.0 if values[name] is None else values[name] for name in order]
    texts = ["not run" if values[name] is None else fmt.format(values[name]) for name in order]
    figure, ax = axes(figsize=(WIDTH, 0.26 * len(order) + 1.2))
    colors = [CONTEXTUAL if not ratios or size >= 1 else VERMILION for size in sizes]
    left = 1 if ratios else 0
    bars = ax.barh(order, np.subtract(sizes, left), left=left, color=colors)
    ax.bar_label(bars, texts, fontsize=8, padding=3)
    if ratios:
        ax.axvline(1, color=MUTED, linewidth=1)
        ax.set_xscale("log", base=2)
    ax.set_xlabel(xlabel, loc="right")  # so that a long one ends where the figure ends
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,g}×" if ratios else f"{value:,g}")
    ax.tick_params(axis="y", labelsize=8 if ratios else None)
    ax.grid(axis="y", visible=False)
    ax.margins(x=0.12, y=0.02)
    return _finished(figure, title)


def beside(
    panels: Mapping[str, Mapping[str, Mapping[str, float]]], *, xlabel: str, title: str,
    highlight: Sequence[str] = (), like: Mapping[str, str] | None = None,
    change: tuple[str, str] | None = None, relative: bool = False,
) -> Figure:  # fmt: skip
    """Dots side by side, each panel on its own scale: panel → series → row → value.

    Rows stand in the order in which they first appear, the first on top, with a line through their dots.

    Args:
        highlight: the series in colour, where there are more than a legend should hold; the others are grey.
        like: series → the system whose part it plays, and whose colour and marker it gets.
        change: two systems, before and after; a bar joins the two that play their parts in each row, and the
            change is written beside it.
        relative: dots stand where they differ from `before`, which then is 0.
    """
    plt.style.use(STYLE)
    like, columns = like or {}, 2 if len(panels) == 1 else 1
    colored = {name: [s for s in highlight or panel if s in panel] for name, panel in panels.items()}
    look = looks(like.get(s, s) for names in colored.values() for s in names)
    rows = {name: list(dict.fromkeys(r for s in panel.values() for r in s)) for name, panel in panels.items()}
    # Inches of the rows and of the legend.
    entries = {name: min(len(colored[name]) + 1, len(panel)) for name, panel in panels.items()}
    heights = {name: (0.23 * len(rows[name]), 0.2 * -(-entries[name] // columns)) for name in panels}
    tallest = max(map(sum, heights.values()))
    figure = plt.figure(FigureClass=Figure, figsize=(WIDTH, tallest + (1.3 if relative else 1.1)))
    for (name, panel), cell in zip(panels.items(), figure.add_gridspec(1, len(panels)), strict=True):
        ratios = (*heights[name], tallest - sum(heights[name]) + 0.01)
        parts = cell.subgridspec(3, 1, height_ratios=ratios)  # dots, legend, and nothing
        ax, below = figure.add_subplot(parts[0]), figure.add_subplot(parts[1])
        at = {row: number for number, row in enumerate(rows[name])}
        played = {like.get(s, s): s for s in panel}
        before, after = (panel.get(played.get(part), {}) for part in change or ("", ""))
        zero = before if relative else dict.fromkeys(at, 0.0)
        for row, y in at.items():
            values = [series[row] - zero[row] for series in panel.values() if row in series]
            ax.hlines(y, min(values), max(values), color=GRID, linewidth=1.2)
        for row in before.keys() & after.keys():
            _change(ax, at[row], before[row], after[row], zero[row])
        others = [series for series in panel if series not in colored[name]]
        for series in (*others, *reversed(colored[name])):  # the first on top
            style = {"marker": "o", "color": LEXICAL, "markersize": 3.5, "label": f"{len(others)} others"}
            if series in colored[name]:
                style = look[like.get(series, series)].line | {"label": series}
            dots = [(value - zero[row], at[row]) for row, value in panel[series].items()]
            ax.plot(*zip(*dots, strict=True), **style | {"linestyle": ""})
        _name_rows(ax, list(at))
        ax.set_title(name, fontsize=9.5)
        ax.set_xlabel(f"{xlabel}\nagainst {played[change[0]]}" if relative else xlabel)
        handles, labels = ax.get_legend_handles_labels()
        shown = dict(zip(labels[::-1], handles[::-1], strict=True))
        below.legend(shown.values(), shown, loc="upper center", ncols=columns, borderpad=0)
        below.axis("off")
    return _finished(figure, title, legend=False)


def _name_rows(ax: plt.Axes, names: Sequence[str], **text) -> None:
    """Names the rows of a figure, the first on top."""
    ax.set_yticks(range(len(names)), names, **text)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)


def _change(ax: plt.Axes, y: float, before: float, after: float, zero: float) -> None:
    """A bar from before to after, and both values with their difference right of the axes."""
    color = CONTEXTUAL if after >= before else VERMILION
    ax.hlines(y, before - zero, after - zero, color=color, linewidth=4, alpha=0.4)
    _beside(ax, y, f"{before:.1f} → {after:.1f}")
    _beside(ax, y, f"{after - before:+.1f}", offset=98, ha="right", color=color, weight="bold")


def _beside(ax: plt.Axes, y: float, text: str, *, offset: float = 6, **style) -> None:
    """Text right of the axes, `offset` points from them, at the height of y."""
    place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center"}
    ax.annotate(text, (1, y), xytext=(offset, 0), **{"fontsize": 8} | place | style)


def forest(claims: Sequence[Mapping], *, title: str) -> Figure:
    """Each claim's effect with its 95 % interval, measured from its bar towards the side that it claims.

    Right of the line the claim holds, left of it the opposite does; an interval that crosses the line tells
    neither. Faint ticks are single seeds. The axis is linear close to the line (1 point, 0.1 nats) and
    logarithmic beyond. Units have panels of their own; claims without an interval are left out.

    Args:
        claims: as in claims.json (`unmask.study.evidence.claim`), in the order of the rows.
    Raises: ValueError if no claim has an interval.
    """
    tested = [claim for claim in claims if claim["interval"]]
    if not tested:
        raise ValueError("no claim has an interval: nothing to draw")
    units = {c["unit"]: [other for other in tested if other["unit"] == c["unit"]] for c in tested}
    heights = [0.36 * len(rows) + 0.1 for rows in units.values()]  # inches
    size = (WIDTH, sum(heights) + 0.55 * len(units) + 0.7)
    figure, drawn = axes(nrows=len(units), figsize=size, height_ratios=heights, squeeze=False)
    for (unit, rows), ax in zip(units.items(), drawn.flat, strict=True):
        percent = 100 if unit == "points" else 1
        for y, claim in enumerate(rows):
            ((side, bar),) = claim["bar"].items()
            sign, look = (1 if side == "above" else -1), VERDICTS[claim["verdict"]]
            effect = (claim["value"], *claim["interval"])
            every = (*effect, *claim["values"].values())
            value, low, high, *seeds = (sign * percent * (x - bar) for x in every)
            ax.hlines(y, low, high, color=look.color, linewidth=2.2)
            ax.plot(seeds, [y] * len(seeds), "|", color=look.color, markersize=9, alpha=0.6)
            ax.plot(value, y, **look.line, markersize=5)
            written = "{} [{}, {}]".format(*(in_unit(x, unit) for x in effect))
            _beside(ax, y, f"{written}\nclaimed {'>' if side == 'above' else '<'} {percent * bar:g}")
        ax.axvline(0, color=INK, linewidth=1)
        ax.set_xscale("symlog", linthresh=1 if unit == "points" else 0.1)
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        _name_rows(ax, [textwrap.fill(claim["claim"], 56) for claim in rows], fontsize=8)
        ax.set_xlabel(f"beyond the bar, towards the claimed side ({unit or 'as measured'})", loc="right")
    for verdict in dict.fromkeys(claim["verdict"] for claim in tested):
        drawn[0, 0].plot([], [], **VERDICTS[verdict].line | {"linestyle": "-"}, label=verdict)
    return _finished(figure, title)


def _label(ax: plt.Axes, labels: Sequence[tuple[float, float, str, str]]) -> None:
    """Writes labels at points, (x, y, text, colour): each at the corner of its point where it covers least of
    the lines, of the points and of the other labels. The last thing to be drawn."""
    ax.figure.draw_without_rendering()  # now everything has its place
    point, (left, _, right, _) = ax.figure.dpi / 72, ax.bbox.extents  # in pixels, in which all places are
    dots = np.concatenate([_along(line) for line in ax.lines])
    dots = np.hstack([dots - 2 * point, dots + 2 * point])  # boxes: left, bottom, right, top

    def box(number: int, across: int, up: int) -> np.ndarray:
        x, y, text, _ = labels[number]
        size = np.multiply((5 * len(text), 9), point)
        start = ax.transData.transform((x, y)) + np.multiply((5 * across, 3 * up), point)
        start -= size * ((across < 0), (up < 0))
        return np.concatenate([start, start + size])

    def cost(one: np.ndarray, others: Sequence[np.ndarray]) -> float:
        outside = one[0] < left or one[2] > right + 9 * point
        return _covered(one, dots) + 30 * _covered(one, np.reshape(others, (-1, 4))) + 1e4 * outside

    chosen: dict[int, tuple[int, int]] = {}
    for number in 3 * [*range(len(labels))]:  # each in turn, given the others, and again
        others = [box(n, *at) for n, at in chosen.items() if n != number]
        corners = ((1, 1), (1, -1), (-1, 1), (-1, -1))
        chosen[number] = min(corners, key=lambda at: cost(box(number, *at), others))
    for (x, y, text, color), (across, up) in zip(labels, chosen.values(), strict=True):
        place = {"ha": "left" if across > 0 else "right", "va": "bottom" if up > 0 else "top"}
        shift = {"xytext": (5 * across, 3 * up), "textcoords": "offset points"}
        ax.annotate(text, (x, y), fontsize=8, color=color, **place, **shift)


def _along(line: plt.Line2D) -> np.ndarray:
    """Places along a line, in pixels."""
    corners = line.get_transform().transform(np.column_stack(line.get_data()))
    steps = np.linspace(0, len(corners) - 1, 15 * len(corners))
    return np.column_stack([np.interp(steps, range(len(corners)), c) for c in corners.T])


def _covered(one: np.ndarray, others: np.ndarray) -> float:
    """The area of other boxes that a box covers."""
    sides = np.minimum(one[2:], others[:, 2:]) - np.maximum(one[:2], others[:, :2])
    return float(sides.clip(0).prod(axis=1).sum())


def _references(ax: plt.Axes, reference: dict | None) -> None:
    for (name, value), style in zip((reference or {}).items(), cycle(("--", ":", "-."))):
        ax.axhline(value, color=MUTED, linestyle=style, linewidth=1.2, label=name)


def _finished(
    figure: Figure, title: str, *, legend: bool = True, labels: Mapping[plt.Axes, Sequence] | None = None
) -> Figure:
    """The figure with its title at the left, where there is more than one name its legend below, and the
    labels of points."""
    figure.suptitle(title, fontsize=11.5, x=0.008, ha="left")
    found = [zip(*ax.get_legend_handles_labels(), strict=True) for ax in figure.axes]
    entries = {label: handle for pairs in found for handle, label in pairs}
    if legend and len(entries) > 1:
        fitting = max(1, int(WIDTH * 72 / (5.2 * max(map(len, entries)) + 42)))  # of 9 points
        columns = -(-len(entries) // -(-len(entries) // fitting))
        place = {"loc": "outside lower center", "ncols": columns, "columnspacing": 1.5}
        figure.legend(entries.values(), entries, **place)
    for ax, points in (labels or {}).items():
        _label(ax, points)
    return figure
