"""One style, one function per kind of figure, for light and for dark pages.

Every axis has a label with its unit. A system has one colour and one marker in all figures, which its name
decides: blues are the recipe, and the further trained, the more they stand out against the page; other hues
are its neighbours; greys come from outside.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import to_hex, to_rgb, to_rgba_array
from matplotlib.figure import Figure
from PIL import Image

from unmask.study.evidence import in_unit

WIDTH, DPI = 7.5, 144  # inches; shown 830 pixels wide, 8 points are 12 pixels
INK, MUTED, GRID, PAPER = "#1f2328", "#59636e", "#d9dee3", "#ffffff"
RECIPE = BACKBONE, PAIR, CONTEXTUAL, TRIPLET, MERGED = "#b9d4f1", "#67a6e6", "#307bc0", "#0c528c", "#002c53"
VERMILION, GREEN, MAGENTA, AMBER, BROWN = "#d55e00", "#009e73", "#a6307c", "#e69f00", "#7a4b2a"
HUES = CONTEXTUAL, VERMILION, GREEN, MAGENTA, AMBER, BROWN  # of what has no colour of its own
OUTSIDE = LEXICAL, PRETRAINED = "#929ba5", "#4b4b4b"
# Every colour that a figure may use, and what it becomes on a dark page; no colour is on both sides.
DARK = {
    INK: "#e6edf3", MUTED: "#9da7b1", GRID: "#30363d", PAPER: "#0d1117",
    BACKBONE: "#2e5072", PAIR: "#3a75af", CONTEXTUAL: "#5b9ddf", TRIPLET: "#94c6f9", MERGED: "#ddedff",
    VERMILION: "#f0803c", GREEN: "#1fb888", MAGENTA: "#e27fc0", AMBER: "#f7c948", BROWN: "#b98a62",
    LEXICAL: "#768089", PRETRAINED: "#c9c5bf",
}  # fmt: skip
STYLE = {
    "figure.figsize": (WIDTH, 4.0),
    "figure.facecolor": PAPER,
    "figure.constrained_layout.use": True,
    "text.color": INK,
    "axes.facecolor": PAPER,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": plt.cycler(color=HUES),
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.labelsize": 10,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "font.size": 9.5,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "lines.markersize": 6,
}


class Look(NamedTuple):
    """How a system is drawn. Hollow, with a dashed line: a lesser way of using the system of that colour."""

    color: str
    marker: str
    hollow: bool = False

    @property
    def line(self) -> dict[str, Any]:
        return {
            "color": self.color,
            "marker": self.marker,
            "linestyle": "--" if self.hollow else "-",
            "markerfacecolor": PAPER if self.hollow else self.color,
        }


FREE = [Look(*pair) for pair in zip(HUES, "oDs^vP", strict=True)]
SYSTEMS = {
    "BM25": Look(LEXICAL, "X"),
    "bm25": Look(LEXICAL, "X"),
    "all-MiniLM-L6-v2": Look(PRETRAINED, "*"),
    "untrained backbone": Look(BACKBONE, "o"),
    "diffusion backbone": Look(BACKBONE, "o"),
    "pair": Look(PAIR, "o"),
    "pair, late chunking": Look(PAIR, "o"),
    "pair, chunks alone": Look(PAIR, "o", hollow=True),
    "contextual": Look(CONTEXTUAL, "s"),
    "contextual, late chunking": Look(CONTEXTUAL, "s"),
    "contextual, chunks alone": Look(CONTEXTUAL, "s", hollow=True),
    "triplet": Look(TRIPLET, "^"),
    "from contextual": Look(TRIPLET, "^"),
    "from pair": Look(TRIPLET, "^", hollow=True),
    "triplet from contextual": Look(TRIPLET, "^"),
    "triplet from pair": Look(TRIPLET, "^", hollow=True),
    "merged": Look(MERGED, "D"),
    "pplx-style": Look(MERGED, "D"),
    "ours": Look(MERGED, "D"),
    "ours (INT8)": Look(MERGED, "D"),
    "ours (INT8), instructed": Look(MERGED, "D", hollow=True),
    "ours (BIN)": Look(VERMILION, "v"),
    "ours (float)": Look(GREEN, "s"),
    "int8": Look(MERGED, "D"),
    "binary": Look(VERMILION, "v"),
    "float32": Look(GREEN, "s"),
    "pplx-embed-v1-0.6B": Look(MERGED, "D"),
    "pplx-embed-v1-0.6B (INT8)": Look(MERGED, "D"),
    "pplx-embed-v1-0.6B (BIN)": Look(VERMILION, "v"),
    "pplx-embed-v1-4B": Look(CONTEXTUAL, "s"),
    "pplx-embed-v1-4B (INT8)": Look(CONTEXTUAL, "s"),
    "AR, last": Look(VERMILION, "v", hollow=True),
    "AR, mean": Look(VERMILION, "v"),
    "diffusion, last": Look(CONTEXTUAL, "o", hollow=True),
    "diffusion, mean": Look(CONTEXTUAL, "o"),
    "mask off, untrained": Look(BACKBONE, "o", hollow=True),
    "after diffusion pretraining": Look(CONTEXTUAL, "o"),
    "AR continued, mean": Look(BROWN, "P"),
    "bidirectional, mean": Look(AMBER, "s"),
    "masked next token, mean": Look(GREEN, "^"),
    "InSeNT": Look(AMBER, "v"),
    "CDE": Look(MAGENTA, "^"),
    "Qwen3": Look(GREEN, "s"),
    "Qwen3-style": Look(GREEN, "s"),
    "qwen3-embed-0.6B": Look(GREEN, "s"),
}


def looks(names: Iterable[str]) -> dict[str, Look]:
    """The look of each name: its own if it is one of `SYSTEMS`, else one that these leave free."""
    names = list(dict.fromkeys(names))
    known = {name: SYSTEMS[name] for name in names if name in SYSTEMS}
    taken = {look.color for look in known.values()} | (set(RECIPE) if known else set())
    free = cycle(look for look in FREE if look.color not in taken)
    return {name: known.get(name) or next(free) for name in names}


def axes(**options) -> tuple[Figure, plt.Axes]:
    """A figure in our style; options as for `plt.subplots`."""
    plt.rcParams.update(STYLE)
    return plt.subplots(**options)


def save(figure: Figure, path: Path) -> Path:
    """Writes a figure for light pages to `path`, NAME.png, and for dark ones to NAME-dark.png beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(figure, path)
    with _recoloured(figure, DARK):
        _write(figure, path.with_stem(f"{path.stem}-dark"))
    return path


def picture(path: str, text: str) -> str:
    """HTML, also for Markdown, that shows what `save` wrote in the variant that fits the reader's page.

    Example:
        >>> picture("figures/loss.png", "Training loss")  # doctest: +NORMALIZE_WHITESPACE
        '<picture><source media="(prefers-color-scheme: dark)" srcset="figures/loss-dark.png"><img
        alt="Training loss" src="figures/loss.png"></picture>'
    """
    dark = path.removesuffix(".png") + "-dark.png"
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img alt="{escape(text)}" src="{path}"></picture>'
    )


def _write(figure: Figure, path: Path) -> None:
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=DPI)
    # Half the size, and the eye does not see it.
    Image.open(drawn).convert("RGB").quantize(method=Image.Quantize.MAXCOVERAGE).save(path, optimize=True)


@contextmanager
def _recoloured(figure: Figure, colors: Mapping[str, str]) -> Iterator[None]:
    """The figure with other colours, for a while; the mapping must have an inverse."""

    def swap(colors: Mapping[str, str]) -> None:
        for artist in figure.findobj():
            for part in ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor"):
                if hasattr(artist, f"get_{part}") and hasattr(artist, f"set_{part}"):
                    rgba = to_rgba_array(getattr(artist, f"get_{part}")())
                    for row in rgba:
                        row[:3] = to_rgb(colors.get(to_hex(row[:3]), row[:3]))
                    if len(rgba):  # empty: not drawn
                        getattr(artist, f"set_{part}")(rgba if len(rgba) > 1 else tuple(rgba[0]))

    swap(colors)
    try:
        yield
    finally:
        swap({new: old for old, new in colors.items()})


def smoothed(values: Sequence[float], alpha: float) -> np.ndarray:
    """Exponential moving average, e_k = α·v_k + (1 − α)·e_{k−1}, corrected for its start (divided by 1 − (1
    − α)^k)."""
    total, out = 0.0, []
    for k, value in enumerate(values, 1):
        total = alpha * value + (1 - alpha) * total
        out.append(total / (1 - (1 - alpha) ** k))
    return np.asarray(out)


def loss_curves(
    runs: Mapping[str, Sequence[Mapping[str, float]]],
    *,
    ylabel: str,
    title: str,
    alpha: float = 0.1,
    reference: dict | None = None,
) -> Figure:
    """Training loss against steps: each run's raw values faintly, their moving average on top.

    Curves that end together are named at their ends, with the last average; others in a legend.

    Args:
        runs: name → logged rows with "step" and "loss".
        reference: name → loss drawn as a dashed line, for instance a uniform guess.
    """
    figure, ax = axes()
    last = [rows[-1]["step"] for rows in runs.values()]
    together = len(runs) > 1 and min(last) > 0.95 * max(last)
    look, ends = looks(runs), {}
    for name, rows in runs.items():
        steps, losses = [r["step"] + 1 for r in rows], [r["loss"] for r in rows]
        averages = smoothed(losses, alpha)
        ends[name] = averages[-1]
        ax.plot(steps, losses, color=look[name].color, alpha=0.25, linewidth=0.8)
        style, label = look[name].line, f"{name} ({averages[-1]:.2f})"
        if len(rows) > 5:  # a few points would not be seen without their markers
            style |= {"marker": ""} if together or len(runs) == 1 else {"markevery": 0.15}
        ax.plot(steps, averages, **style, label=None if together else label)
    _references(ax, reference)
    if together:
        ax.margins(x=0.02)
        places = _apart(list(ends.values()), 0.06 * np.ptp(ax.get_ylim()))
        for (name, value), y in zip(ends.items(), places, strict=True):
            _beside(ax, y, f"{name} {value:.2f}", color=look[name].color, weight="bold", fontsize=9)
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
    look = looks(table)
    outside = [series for series in table if look[series].color in OUTSIDE]
    inside = [series for series in table if series not in outside]
    values = [value for row in table.values() for value in row.values()]
    width, top = 0.84 / max(1, len(inside)), max(map(abs, values))
    digits = 3 if top < 0.1 else 2 if top < 10 else 1
    for number, series in enumerate(inside):
        row, (color, _, hollow) = table[series], look[series]
        at = [i + (number - (len(inside) - 1) / 2) * width for i, g in enumerate(groups) if g in row]
        named = [g for g in groups if g in row]
        heights = np.array([row[g] for g in named])
        face = (color, 0.3) if hollow else color
        ax.bar(at, heights, width * 0.92, label=series, facecolor=face, edgecolor=color, linewidth=1)
        ends = heights
        if intervals and series in intervals:
            low, high = np.transpose([intervals[series][g] for g in named])
            spread = np.maximum([heights - low, high - heights], 0)
            for ecolor, elinewidth in ((PAPER, 3), (INK, 1)):  # seen on every bar and on the page
                ax.errorbar(at, heights, spread, fmt="none", ecolor=ecolor, elinewidth=elinewidth)
            ends = np.where(heights < 0, heights - spread[0], heights + spread[1])
        if len(inside) * len(groups) <= 24 or series == inside[-1]:
            for x, y, group in zip(at, ends, named, strict=True):
                for level in sorted(table[other][group] for other in outside if group in table[other]):
                    y = level if -0.01 < (level - y) / top < 0.06 else y  # no number across a level
                text = f"{row[group]:.{digits}f}".removeprefix("0" if top < 1 else "")
                place = {"xytext": (0, -2), "va": "top"} if y < 0 else {"xytext": (0, 2), "va": "bottom"}
                ax.annotate(text, (x, y), textcoords="offset points", ha="center", fontsize=8, **place)
    for series in outside:
        at = [i for i, g in enumerate(groups) if g in table[series]]
        levels = [table[series][groups[i]] for i in at]
        style = "-" if look[series].color == LEXICAL else (0, (1.5, 1))
        left, right = np.subtract(at, 0.45), np.add(at, 0.45)
        ax.hlines(levels, left, right, color=look[series].color, linewidth=2.5, linestyle=style, label=series)
    _references(ax, reference)
    if min(values) < 0:
        ax.axhline(0, color=MUTED, linewidth=1)
    ax.set_xticks(range(len(groups)), groups)
    ax.set(ylabel=ylabel)
    ax.tick_params(axis="x", length=0)
    ax.grid(axis="x", visible=False)
    ax.margins(x=0.01, y=0.1)
    return _finished(figure, title)


def lines(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, xlabel: str, ylabel: str, title: str,
    intervals: Mapping[str, Sequence[tuple[float, float]]] | None = None, reference: dict | None = None,
    log_x: bool = False,
) -> Figure:  # fmt: skip
    """Curves of measured points: name → (x, y); intervals, where given, as bands."""
    figure, ax = axes()
    for (name, look), (x, y) in zip(looks(series).items(), series.values(), strict=True):
        ax.plot(x, y, **look.line, label=name)
        if intervals and name in intervals:
            low, high = zip(*intervals[name], strict=True)
            ax.fill_between(x, low, high, color=look.color, alpha=0.2, linewidth=0)
    if log_x:
        ax.set_xscale("log", base=2)
        ticks = sorted({value for x, _ in series.values() for value in x})
        ax.set_xticks(ticks, [f"{value:,.10g}" for value in ticks])
        ax.tick_params(axis="x", which="minor", length=0)
    _references(ax, reference)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    return _finished(figure, title)


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
    for (panel, points), ax in zip(panels.items(), drawn.flat, strict=False):
        all_ = [(x, y) for data in points.values() for x, y, _ in data]
        best = [p for p in all_ if not any(o != p and o[0] >= p[0] and o[1] >= p[1] for o in all_)]
        stairs = zip(*sorted(best), strict=True)
        ax.step(*stairs, where="pre", color=GRID, linewidth=6, zorder=1, label="frontier")
        for name, data in points.items():
            look = SYSTEMS.get(name, Look(LEXICAL, "o"))
            x, y, _ = zip(*sorted(data), strict=True)
            ax.plot(x, y, **look.line, label=name if name in SYSTEMS else None)
        ax.set_xscale("log")
        ax.set_title(panel, fontsize=9.5)
        ax.margins(x=0.1 + 0.08 * columns, y=0.15)
    for ax in drawn.flat[len(panels) :]:
        ax.remove()
    for ax in drawn[-1]:
        ax.set_xlabel(xlabel)
    for ax in drawn[:, 0]:
        ax.set_ylabel(ylabel)
    _finished(figure, title)
    for points, ax in zip(panels.values(), figure.axes, strict=True):
        colors = {name: SYSTEMS[name].color if name in SYSTEMS else MUTED for name in points}
        _label(ax, [(data, colors[name]) for name, data in points.items()])
    return figure


def horizontal_bars(values: Mapping[str, float], *, xlabel: str, title: str, fmt: str = "{:,.0f}") -> Figure:
    """One bar per name, the largest on top."""
    order = sorted(values, key=values.get)
    figure, ax = axes(figsize=(WIDTH, 0.26 * len(order) + 1.2))
    bars = ax.barh(order, [values[name] for name in order], color=CONTEXTUAL)
    ax.bar_label(bars, [fmt.format(values[name]) for name in order], fontsize=8, padding=3)
    ax.set_xlabel(xlabel, loc="right")  # so that a long one ends where the figure ends
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
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
    plt.rcParams.update(STYLE)
    like = like or {}
    colored = {name: [s for s in highlight or panel if s in panel] for name, panel in panels.items()}
    look = looks(like.get(s, s) for names in colored.values() for s in names)
    rows = {name: list(dict.fromkeys(r for s in panel.values() for r in s)) for name, panel in panels.items()}
    entries = {name: len(colored[name]) + (len(colored[name]) < len(panel)) for name, panel in panels.items()}
    columns = 2 if len(panels) == 1 else 1
    # Inches of the rows and of the legend.
    heights = {name: (0.23 * len(rows[name]), 0.2 * -(-entries[name] // columns)) for name in panels}
    tallest = max(map(sum, heights.values()))
    figure = plt.figure(figsize=(WIDTH, tallest + (1.3 if relative else 1.1)))
    for (name, panel), cell in zip(panels.items(), figure.add_gridspec(1, len(panels)), strict=True):
        ratios = (*heights[name], tallest - sum(heights[name]) + 0.01)
        parts = cell.subgridspec(3, 1, height_ratios=ratios)  # dots, legend, and nothing
        ax, below = figure.add_subplot(parts[0]), figure.add_subplot(parts[1])
        at = {row: number for number, row in enumerate(rows[name])}
        played = {like.get(s, s): s for s in panel}
        before, after = (panel.get(played.get(part), {}) for part in change or ("", ""))
        zero = before if relative else dict.fromkeys(at, 0.0)
        dots = {s: ([v - zero[r] for r, v in row.items()], [at[r] for r in row]) for s, row in panel.items()}
        for row, y in at.items():
            values = [series[row] - zero[row] for series in panel.values() if row in series]
            ax.hlines(y, min(values), max(values), color=GRID, linewidth=1.2)
        for row in before.keys() & after.keys():
            _change(ax, at[row], before[row], after[row], zero[row])
        others = [series for series in panel if series not in colored[name]]
        for series in others:
            ax.plot(*dots[series], "o", color=LEXICAL, markersize=3.5)
        for series in reversed(colored[name]):  # the first on top
            style = look[like.get(series, series)].line | {"linestyle": ""}
            ax.plot(*dots[series], **style, label=series)
        ax.set_yticks(range(len(at)), list(at))
        ax.set_ylim(len(at) - 0.5, -0.5)
        ax.set_title(name, fontsize=9.5)
        ax.set_xlabel(f"{xlabel}\nagainst {played[change[0]]}" if relative else xlabel)
        ax.grid(axis="y", visible=False)
        handles, labels = (found[::-1] for found in ax.get_legend_handles_labels())
        if others:
            handles += ax.plot([], [], "o", color=LEXICAL, markersize=3.5)
            labels += [f"{len(others)} others"]
        below.legend(handles, labels, loc="upper center", ncols=columns, borderpad=0)
        below.axis("off")
    return _finished(figure, title, legend=False)


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


def tracks(
    series: Mapping[tuple[str, str], Sequence[tuple[float, float, str]]], *, xlabel: str, ylabel: str,
    title: str, reference: dict | None = None,
) -> Figure:  # fmt: skip
    """Labelled points, joined in their order: (what, how) → (x, y, label).

    Each `what` has a colour; of the `how`, the first has filled markers, the second hollow ones and a dashed
    line. Labels stand at the points of the first.
    """
    figure, ax = axes(figsize=(WIDTH, 4.4))
    whats, hows = (list(dict.fromkeys(names)) for names in zip(*series, strict=True))
    look = looks(whats)
    for (what, how), data in series.items():
        x, y, _ = zip(*data, strict=True)
        style = look[what]._replace(hollow=how != hows[0])
        ax.plot(x, y, **style.line, label=f"{what}, {how}")
    _references(ax, reference)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.margins(x=0.1, y=0.15)
    _finished(figure, title)
    _label(ax, [(data, look[what].color) for (what, how), data in series.items() if how == hows[0]])
    return figure


def ratios(values: Mapping[str, float | None], *, xlabel: str, title: str) -> Figure:
    """Comparisons as points on a logarithmic axis, from the line of equality at 1, in the order given.

    Ratios above 1 and below 1 differ in colour and in marker. None stands for "not run", and is written so.
    """
    figure, ax = axes(figsize=(WIDTH, 0.22 * len(values) + 1.1))
    known = [value for value in values.values() if value is not None] or [1.0]
    for row, value in enumerate(values.values()):
        better = value is None or value >= 1
        color = CONTEXTUAL if better else VERMILION
        ax.hlines(row, 1, value or 1, color=color, linewidth=2)
        if value is not None:
            ax.plot(value, row, marker="o" if better else "D", color=color)
        text, place = "not run" if value is None else f"{value:.3g}×", max(value or 1, 1)
        ax.annotate(text, (place, row), xytext=(7, 0), textcoords="offset points", va="center", fontsize=8)
    ax.axvline(1, color=MUTED, linewidth=1)
    ax.set_xscale("log", base=2)
    ax.set_xlim(0.8 * min(1, *known), 3 * max(1, *known))  # room for what is written at the largest
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    ax.set_yticks(range(len(values)), list(values), fontsize=8)
    ax.set_ylim(len(values) - 0.4, -0.6)  # the first on top
    ax.set(xlabel=xlabel)
    ax.grid(axis="y", visible=False)
    return _finished(figure, title)


VERDICTS = {
    "reproduced": Look(CONTEXTUAL, "o"),
    "not at this scale": Look(LEXICAL, "s", hollow=True),
    "contradicted": Look(VERMILION, "D"),
    "invalid": Look(AMBER, "X", hollow=True),
}


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
            effect = [percent * x for x in (claim["value"], *claim["interval"])]
            seeds = [percent * x for x in claim["values"].values()]
            value, low, high, *seeds = (sign * (x - percent * bar) for x in effect + seeds)
            ax.hlines(y, low, high, color=look.color, linewidth=2.2)
            ax.plot(seeds, [y] * len(seeds), "|", color=look.color, markersize=9, alpha=0.6)
            ax.plot(value, y, **look.line, markersize=5)
            written = "{} [{}, {}]".format(*(in_unit(x, unit) for x in (claim["value"], *claim["interval"])))
            claimed = f"claimed {'>' if side == 'above' else '<'} {percent * bar:g}"
            _beside(ax, y, f"{written}\n{claimed}")
        ax.axvline(0, color=INK, linewidth=1)
        ax.set_xscale("symlog", linthresh=1 if unit == "points" else 0.1)
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.set_yticks(range(len(rows)), [textwrap.fill(c["claim"], 56) for c in rows], fontsize=8)
        ax.tick_params(axis="y", length=0)
        ax.set_ylim(len(rows) - 0.5, -0.5)
        ax.set_xlabel(f"beyond the bar, towards the claimed side ({unit or 'as measured'})", loc="right")
        ax.grid(axis="y", visible=False)
    for verdict in dict.fromkeys(claim["verdict"] for claim in tested):
        drawn[0, 0].plot([], [], **VERDICTS[verdict].line | {"linestyle": "-"}, label=verdict)
    return _finished(figure, title)


def _label(ax: plt.Axes, series: Sequence[tuple[Sequence[tuple[float, float, str]], str]]) -> None:
    """Writes the labels of points, (x, y, label), in their series' colour: each at the corner of its point
    where it covers least of the lines, of the points and of the other labels. The last thing to be drawn."""
    ax.figure.draw_without_rendering()  # now everything has its place
    point = ax.figure.dpi / 72  # in pixels, in which all places are
    left, _, right, _ = ax.bbox.extents
    dots = []
    for line in ax.lines:
        corners = line.get_transform().transform(np.column_stack(line.get_data()))
        steps = np.linspace(0, len(corners) - 1, 15 * len(corners))
        dots.append(np.column_stack([np.interp(steps, range(len(corners)), c) for c in corners.T]))
    lines = np.concatenate(dots)
    lines = np.hstack([lines - 2 * point, lines + 2 * point])  # boxes: left, bottom, right, top

    def box(label: tuple[float, float, str], across: int, up: int) -> np.ndarray:
        x, y, text = label
        wide, high = 5 * point * len(text), 9 * point
        start_x, start_y = ax.transData.transform((x, y))
        start_x += 5 * point if across > 0 else -5 * point - wide
        start_y += 3 * point if up > 0 else -3 * point - high
        return np.array([start_x, start_y, start_x + wide, start_y + high])

    def covered(one: np.ndarray, others: np.ndarray) -> float:
        sides = np.minimum(one[2:], others[:, 2:]) - np.maximum(one[:2], others[:, :2])
        return float(sides.clip(0).prod(axis=1).sum())

    labels = [(label, color) for data, color in series for label in data]
    chosen: dict[int, tuple[int, int]] = {}
    for number in 3 * [*range(len(labels))]:  # each in turn, given the others, and again
        others = np.array([box(labels[n][0], *at) for n, at in chosen.items() if n != number])
        options = {at: box(labels[number][0], *at) for at in ((1, 1), (1, -1), (-1, 1), (-1, -1))}
        costs = {
            at: covered(one, lines)
            + 30 * covered(one, others.reshape(-1, 4))
            + 1e4 * (one[0] < left or one[2] > right + 9 * point)
            for at, one in options.items()
        }
        chosen[number] = min(costs, key=costs.get)
    for ((x, y, text), color), (across, up) in zip(labels, chosen.values(), strict=True):
        ax.annotate(
            text, (x, y), xytext=(5 * across, 3 * up), textcoords="offset points", fontsize=8, color=color,
            ha="left" if across > 0 else "right", va="bottom" if up > 0 else "top",
        )  # fmt: skip


def _references(ax: plt.Axes, reference: dict | None) -> None:
    for (name, value), style in zip((reference or {}).items(), cycle(("--", ":", "-."))):
        ax.axhline(value, color=MUTED, linestyle=style, linewidth=1.2, label=name)


def _finished(figure: Figure, title: str, *, legend: bool = True) -> Figure:
    """The figure with its title at the left and, where there is more than one name, its legend below."""
    figure.suptitle(title, fontsize=11.5, x=0.008, ha="left")
    entries = {
        label: handle
        for ax in figure.axes
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    if legend and len(entries) > 1:
        fitting = max(1, int(WIDTH * 72 / (5.2 * max(map(len, entries)) + 42)))  # of 9 points
        rows = -(-len(entries) // fitting)
        figure.legend(
            entries.values(),
            entries,
            loc="outside lower center",
            ncols=-(-len(entries) // rows),
            columnspacing=1.5,
        )
    return figure
