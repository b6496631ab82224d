"""One style, one function per kind of figure. Every axis has a label with its unit; the palette is
colour-blind-safe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

# Okabe and Ito's palette: distinguishable with the common colour-vision deficiencies, and on white when
# printed.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666", "#F0E442")
MARKERS = ("o", "D", "s", "^", "v", "P", "X", "*")
STYLE = {
    "figure.figsize": (7.2, 3.8),
    "figure.facecolor": "white",
    "figure.constrained_layout.use": True,
    "savefig.facecolor": "white",
    "axes.prop_cycle": plt.cycler(color=COLORS),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.labelsize": 10,
    "font.size": 9.5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.6,
}


def axes(**options) -> tuple[Figure, plt.Axes]:
    """A figure in our style; options as for `plt.subplots`."""
    plt.rcParams.update(STYLE)
    return plt.subplots(**options)


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

    Args:
        runs: name → logged rows with "step" and "loss".
        reference: name → loss drawn as a dashed line, for instance a uniform guess.
    """
    figure, ax = axes()
    for number, (name, rows) in enumerate(runs.items()):
        steps, losses = [r["step"] + 1 for r in rows], [r["loss"] for r in rows]
        color = COLORS[number % len(COLORS)]
        ax.plot(steps, losses, color=color, alpha=0.2, linewidth=0.8)
        ax.plot(steps, smoothed(losses, alpha), marker="." if len(rows) < 5 else "", color=color, label=name)
    _references(ax, reference)
    ax.set(xlabel="training step", ylabel=ylabel, title=title)
    ax.legend()
    return figure


def grouped_bars(
    table: Mapping[str, Mapping[str, float]], *, ylabel: str, title: str,
    intervals: Mapping[str, Mapping[str, tuple[float, float]]] | None = None, reference: dict | None = None,
) -> Figure:  # fmt: skip
    """A bar per (group, series): `table[series][group]`; intervals, where given, as error bars."""
    groups = list(dict.fromkeys(group for row in table.values() for group in row))
    figure, ax = axes(figsize=(max(7.2, 0.9 * len(groups) + 2.5), 3.9))
    width = 0.84 / len(table)
    for number, (series, row) in enumerate(table.items()):
        at = [i + (number - (len(table) - 1) / 2) * width for i, g in enumerate(groups) if g in row]
        heights = [row[g] for g in groups if g in row]
        bars = ax.bar(at, heights, width * 0.94, label=series, color=COLORS[number % len(COLORS)])
        if intervals and series in intervals:
            low, high = zip(*(intervals[series][g] for g in groups if g in row), strict=True)
            spread = [np.subtract(heights, low), np.subtract(high, heights)]
            ax.errorbar(
                at, heights, np.maximum(spread, 0), fmt="none", ecolor="#333333", elinewidth=0.8, capsize=2
            )
        elif len(table) * len(groups) <= 28:
            ax.bar_label(bars, fmt="%.2f", fontsize=7, padding=1)
    _references(ax, reference)
    ax.set_xticks(range(len(groups)), groups)
    ax.set(ylabel=ylabel, title=title)
    ax.grid(axis="x", visible=False)
    ax.margins(y=0.12)
    if len(table) > 1:
        figure.legend(ncols=3 if max(map(len, table)) > 18 else 4, loc="outside lower center")
    return figure


def lines(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, xlabel: str, ylabel: str, title: str,
    intervals: Mapping[str, Sequence[tuple[float, float]]] | None = None, reference: dict | None = None,
    log_x: bool = False,
) -> Figure:  # fmt: skip
    """Curves of measured points: name → (x, y); intervals, where given, as bands."""
    figure, ax = axes()
    for number, (name, (x, y)) in enumerate(series.items()):
        color = COLORS[number % len(COLORS)]
        ax.plot(x, y, marker=MARKERS[number % len(MARKERS)], markersize=4, color=color, label=name)
        if intervals and name in intervals:
            ax.fill_between(x, *zip(*intervals[name], strict=True), color=color, alpha=0.2, linewidth=0)
    if log_x:
        ax.set_xscale("log", base=2)
        ticks = sorted({value for x, _ in series.values() for value in x})
        ax.set_xticks(ticks, [f"{value:g}" for value in ticks])
    _references(ax, reference)
    ax.set(xlabel=xlabel, ylabel=ylabel, title=title)
    ax.legend()
    return figure


def histograms(
    series: Mapping[str, Sequence[float]], *, xlabel: str, ylabel: str, title: str, bins: int = 50
) -> Figure:
    """Overlaid distributions, each normalised to an area of one."""
    figure, ax = axes()
    values = np.concatenate([np.asarray(v, dtype=float) for v in series.values()])
    edges = np.linspace(values.min(), values.max(), bins + 1)
    for number, (name, data) in enumerate(series.items()):
        ax.hist(data, edges, density=True, alpha=0.55, color=COLORS[number % len(COLORS)], label=name)
    ax.set(xlabel=xlabel, ylabel=ylabel, title=title)
    ax.legend()
    return figure


def pareto(
    points: Mapping[str, Sequence[tuple[float, float, str]]], *, xlabel: str, ylabel: str, title: str
) -> Figure:
    """Quality against storage: name → (x, y, label) points joined in order of x, on a logarithmic x axis.

    The frontier, the points that no other one beats in both, is drawn as a grey staircase; labels of its
    points stand above them, others below.
    """
    figure, ax = axes(figsize=(7.2, 4.2))
    everything = [(x, y) for data in points.values() for x, y, _ in data]
    best = [p for p in everything if not any(o != p and o[0] >= p[0] and o[1] >= p[1] for o in everything)]
    ax.step(
        *zip(*sorted(best), strict=True),
        where="pre",
        color="#999999",
        linewidth=5,
        alpha=0.35,
        label="frontier",
    )
    for number, (name, data) in enumerate(points.items()):
        x, y, _ = zip(*sorted(data), strict=True)
        color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
        ax.plot(x, y, marker=marker, markersize=5, color=color, label=name)
        for *at, label in data:
            above = tuple(at) in best
            ax.annotate(
                label, at, textcoords="offset points", xytext=(0, 6 if above else -6), ha="center",
                va="bottom" if above else "top", fontsize=8, color=color,
            )  # fmt: skip
    ax.set_xscale("log")
    ax.set(xlabel=xlabel, ylabel=ylabel, title=title)
    ax.margins(x=0.1, y=0.12)
    ax.legend()
    return figure


def horizontal_bars(values: Mapping[str, float], *, xlabel: str, title: str, fmt: str = "{:,.0f}") -> Figure:
    """One bar per name, the largest on top."""
    order = sorted(values, key=values.get)
    figure, ax = axes(figsize=(7.2, 0.26 * len(order) + 1.2))
    bars = ax.barh(order, [values[name] for name in order], color=COLORS[0])
    ax.bar_label(bars, [fmt.format(values[name]) for name in order], fontsize=7.5, padding=3)
    ax.set(xlabel=xlabel, title=title)
    ax.grid(axis="y", visible=False)
    ax.margins(x=0.12)
    return figure


def beside(
    panels: Mapping[str, Mapping[str, Mapping[str, float]]], *, xlabel: str, title: str,
    highlight: Sequence[str] = (),
) -> Figure:  # fmt: skip
    """Dots side by side, each panel on its own scale: panel → series → row → value.

    Rows stand in the order in which they first appear, the first on top, with a line through their dots.

    Args:
        highlight: the series in colour, in this order, where there are more than a legend should hold; the
            others are grey.
    """
    plt.rcParams.update(STYLE)
    rows = {name: list(dict.fromkeys(r for s in panel.values() for r in s)) for name, panel in panels.items()}
    tallest, columns, grey = max(map(len, rows.values())), 2 if len(panels) == 1 else 1, "#b5b5b5"
    labels = min(max(map(len, panels.values())), len(highlight) + 1 if highlight else len(COLORS))
    heights = (0.21 * tallest, 0.2 * -(-labels // columns))  # inches
    size = (max(7.2, 1.2 + 3.6 * len(panels)), sum(heights) + 1.1)
    figure, drawn = plt.subplots(2, len(panels), figsize=size, height_ratios=heights, squeeze=False)
    for (name, panel), ax, below in zip(panels.items(), *drawn, strict=True):
        at = {row: number for number, row in enumerate(rows[name])}
        for row, y in at.items():
            values = [series[row] for series in panel.values() if row in series]
            ax.hlines(y, min(values), max(values), color=grey, linewidth=1)
        colored = [series for series in highlight or panel if series in panel]
        others = [series for series in panel if series not in colored]
        for series in others:
            ax.plot(list(panel[series].values()), [at[row] for row in panel[series]], "o", color=grey, ms=4)
        for series, color, marker in zip(colored, cycle(COLORS), cycle(MARKERS)):
            y = [at[row] for row in panel[series]]
            ax.plot(list(panel[series].values()), y, marker, color=color, ms=6, label=series)
        if others:
            ax.plot([], [], "o", color=grey, ms=4, label=f"{len(others)} others")
        ax.set_yticks(range(len(at)), list(at))
        ax.set_ylim(tallest - 0.5, -0.5)
        ax.set_title(name, fontsize=9.5)
        ax.set_xlabel(xlabel)
        ax.grid(axis="y", visible=False)
        below.legend(*ax.get_legend_handles_labels(), loc="upper center", ncols=columns, borderpad=0)
        below.axis("off")
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return figure


def tracks(
    series: Mapping[tuple[str, str], Sequence[tuple[float, float, str]]], *, xlabel: str, ylabel: str,
    title: str, reference: dict | None = None,
) -> Figure:  # fmt: skip
    """Labelled points, joined in their order: (what, how) → (x, y, label).

    Each `what` has a colour; of the `how`, the first has filled markers, the second hollow ones and a dashed
    line. Labels stand at the points of the first.
    """
    figure, ax = axes(figsize=(7.2, 4.2))
    whats, hows = (list(dict.fromkeys(names)) for names in zip(*series, strict=True))
    for (what, how), data in series.items():
        x, y, _ = zip(*data, strict=True)
        number, filled = whats.index(what), how == hows[0]
        color = COLORS[number % len(COLORS)]
        ax.plot(
            x, y, "-" if filled else "--", marker=MARKERS[number % len(MARKERS)], markersize=6, color=color,
            markerfacecolor=color if filled else "white", label=f"{what}, {how}",
        )  # fmt: skip
        for *at, label in data if filled else ():
            ax.annotate(label, at, xytext=(0, -15), textcoords="offset points", ha="center", fontsize=8)
    _references(ax, reference)
    ax.set(xlabel=xlabel, ylabel=ylabel, title=title)
    ax.margins(x=0.08, y=0.15)
    ax.legend()
    return figure


def ratios(values: Mapping[str, float | None], *, xlabel: str, title: str) -> Figure:
    """Comparisons as points on a logarithmic axis, from the line of equality at 1, in the order given.

    Ratios above 1 and below 1 differ in colour and in marker. None stands for "not run", and is written so.
    """
    figure, ax = axes(figsize=(8.4, 0.22 * len(values) + 1.0))
    known = [value for value in values.values() if value is not None] or [1.0]
    for row, value in enumerate(values.values()):
        better = value is None or value >= 1
        color = COLORS[0] if better else COLORS[1]
        ax.hlines(row, 1, value or 1, color=color, linewidth=2)
        if value is not None:
            ax.plot(value, row, marker="o" if better else "D", markersize=6, color=color)
        ax.annotate(
            "not run" if value is None else f"{value:.3g}×",
            (value or 1, row),
            textcoords="offset points",
            xytext=(7 if better else -7, 0),
            ha="left" if better else "right",
            va="center",
            fontsize=8,
        )
    ax.axvline(1, color="#444444", linewidth=1)
    ax.set_xscale("log", base=2)
    # Room for what is written beside the points at either end.
    ax.set_xlim(min(0.7, 0.5 * min(known)), max(1.7, 2 * max(known)))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    ax.set_yticks(range(len(values)), list(values))
    ax.set_ylim(len(values) - 0.4, -0.6)  # the first on top
    ax.set(xlabel=xlabel, title=title)
    ax.grid(axis="y", visible=False)
    return figure


def _references(ax: plt.Axes, reference: dict | None) -> None:
    for name, value in (reference or {}).items():
        ax.axhline(value, color="#444444", linestyle="--", linewidth=1)
        ax.annotate(
            name,
            (0.99, value),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            fontsize=8,
            color="#444444",
        )
