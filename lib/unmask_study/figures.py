"""One style, one function per kind of figure, for light and for dark pages.

Every axis has a label with its unit. A system has one colour and one marker in all figures, which its name
decides: blues are the recipe, and the further trained, the more they stand out against the page; other hues
are its neighbours; greys come from outside.
"""

import io
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml

from unmask.extras import extra
from unmask.store import replacing

with extra("study"):
    import matplotlib.pyplot as plt
    from adjustText import adjust_text
    from IPython.display import Image as Picture
    from IPython.display import display
    from PIL import Image

WIDTH, DPI, SHOWN = 7.5, 144, 830  # inches; shown so many pixels wide, 8 points are 12 pixels
_TOLD = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf8"))
COLORS = tuple(_TOLD["colors"].values())  # all that a figure may use
INK, MUTED, GRID, PAPER, *_COLORED = COLORS
DARKEST, LIGHTEST = np.array([13, 17, 23]), np.array([230, 237, 243])  # of dark pages
CLEAR = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.3}  # behind a label: hides lines
RECIPE, CONTEXTUAL = _COLORED[:5], _COLORED[2]
VERMILION, _, MAGENTA, *_ = _COLORED[5:10]
OUTSIDE, LEXICAL = _COLORED[10:], _COLORED[10]
Table = Mapping[str, Mapping[str, float]]  # series → group or row → value


class Look(NamedTuple):
    """How a system is drawn. Hollow, with a dashed line: a lesser way of using the system of that colour."""

    color: str
    marker: str
    hollow: str = ""  # or "hollow"

    @property
    def line(self) -> dict[str, Any]:
        style, face = ("--", PAPER) if self.hollow else ("-", self.color)
        return {"color": self.color, "marker": self.marker, "linestyle": style, "markerfacecolor": face}


# Of what has no look of its own.
FREE = [Look(*pair) for pair in zip((CONTEXTUAL, *_COLORED[5:10]), "oDs^vP", strict=True)]


def _told(systems: Mapping[str, Sequence[str]]) -> dict[str, Look]:
    """Look of each name; from "contextual s hollow", a colour and a marker, to the names that have it."""
    written = {tuple(look.split()): names for look, names in systems.items()}
    looks = {Look(_TOLD["colors"][color], *rest): names for (color, *rest), names in written.items()}
    return {name: look for look, names in looks.items() for name in names}


SYSTEMS, VERDICTS = _told(_TOLD["systems"]), _told(_TOLD["verdicts"])


def looks(names: Iterable[str]) -> dict[str, Look]:
    """The look of each name: its own if it is one of `SYSTEMS`, else one that these leave free."""
    names = list(dict.fromkeys(names))
    known = {name: SYSTEMS[name] for name in names if name in SYSTEMS}
    taken = {look.color for look in known.values()} | (set(RECIPE) if known else set())
    free = cycle(look for look in FREE if look.color not in taken)
    return {name: known.get(name) or next(free) for name in names}


class Figure(plt.Figure):
    """A figure that saves itself for light and for dark pages."""

    def save(self, path: Path) -> None:
        """Writes `path`, NAME.png, and its twin for dark pages, NAME-dark.png, beside it."""
        drawn = io.BytesIO()
        self.savefig(drawn, dpi=DPI)
        # Of few colours it is half the size, and the eye does not see it.
        image = Image.open(drawn).convert("RGB").quantize(method=Image.Quantize.MAXCOVERAGE)
        with replacing(path) as unfinished:
            image.save(unfinished, "png", optimize=True)
        image.putpalette(night(np.array(image.getpalette()).reshape(-1, 3)).ravel().tolist())
        with replacing(path.with_stem(f"{path.stem}-dark")) as unfinished:
            image.save(unfinished, "png", optimize=True)

    def keep(self, path: Path, text: str = "") -> None:
        """Saves the figure and shows what was saved: drawing takes the longest, and is done once."""
        self.save(path)
        plt.close(self)
        show(path, text)


def show(path: Path, text: str = "") -> None:
    """Shows in a notebook a figure of its run that was saved; on the report's page, where `text` stands for
    it, its dark variant stands beside it."""
    picture = {"picture": [f"figures/{path.name}", text]}
    display(Picture(filename=path, width=SHOWN), metadata=picture)


def night(rgb_C3: np.ndarray) -> np.ndarray:
    """What colours, 0 to 255, become on a dark page: as light as they were dark, of the same hue."""
    turned_C3 = rgb_C3 + 255 - rgb_C3.max(1, keepdims=True) - rgb_C3.min(1, keepdims=True)
    # Lifted a little: the eye tells dark shades apart less well.
    return (DARKEST + (turned_C3 / 255) ** 0.75 * (LIGHTEST - DARKEST)).round().astype(int)


def axes(**options) -> tuple[Figure, plt.Axes]:
    """A figure in our style; options as for `plt.subplots`."""
    plt.style.use(["default", Path(__file__).with_suffix(".mplstyle")])  # not the user's matplotlibrc
    return plt.subplots(FigureClass=Figure, **options)


def loss_curves(runs: Mapping[str, Sequence[Mapping]], *, alpha: float = 0.1, **about: Any) -> Figure:
    """Training loss against steps: each run's raw values faintly, their moving average on top, whose last
    value the legend tells.

    Args:
        alpha: weight of a step in the average; that of the one before is 1 − alpha times as much. At least
            6 / steps, so over a third of the steps at most.
        runs: name → logged rows with "step" and "loss".
        about: ylabel, title, and reference, for instance the loss of a uniform guess; see `_finished`.
    """
    figure, ax = axes()
    for (name, look), rows in zip(looks(runs).items(), runs.values(), strict=True):
        steps, losses = [row["step"] + 1 for row in rows], [row["loss"] for row in rows]
        averages = list(pd.Series(losses).ewm(alpha=min(1, max(alpha, 6 / len(rows)))).mean())
        ax.plot(steps, losses, color=look.color, alpha=0.25, linewidth=0.8)
        label = f"{name} ({averages[-1]:.2f})"
        ax.plot(steps, averages, **look.line, markevery=max(1, len(rows) // 7), label=label)
    ax.xaxis.get_major_locator().set_params(integer=True)
    return _finished(figure, xlabel="training step (in brackets: the last moving average)", **about)


def grouped_bars(
    table: Table,
    *,
    intervals: Mapping[str, Mapping] | None = None,
    seeds: Mapping[str, Mapping[str, Sequence[float]]] | None = None,
    fmt: str = "",
    **about: Any,
) -> Figure:
    """A bar per (group, series): `table[series][group]`; intervals, where given, as error bars, single seeds
    as dots.

    Systems from outside (BM25, a pretrained embedder) are grey levels over their group instead. Values are
    written at the bars where there is room for all of them, by `fmt` or with as many digits as they need.
    """
    groups = list(dict.fromkeys(group for row in table.values() for group in row))
    figure, ax = axes()
    look, top = looks(table), max(abs(value) for row in table.values() for value in row.values())
    inside = [series for series in table if look[series].color not in OUTSIDE]
    width, digits = 0.84 / max(1, len(inside)), 3 if top < 0.2 else 2 if top < 10 else 1
    for number, series in enumerate(inside):
        (color, _, hollow), row, options = look[series], table[series], {}
        at = [groups.index(group) + (number - (len(inside) - 1) / 2) * width for group in row]
        if intervals and series in intervals:
            ends = [np.subtract(intervals[series][group], value) for group, value in row.items()]
            options = {"yerr": np.abs(ends).T, "ecolor": MUTED}
            ax.errorbar(at, row.values(), options["yerr"], fmt="none", ecolor=PAPER, elinewidth=4)
        options |= {"facecolor": (color, 0.3) if hollow else color, "edgecolor": color, "label": series}
        bars = ax.bar(at, row.values(), width * 0.92, **options)
        if seeds:
            dots = [(x, value) for x, group in zip(at, row) for value in seeds[series][group]]
            ax.plot(*zip(*dots), ".", color=INK, markersize=3, zorder=3.5)
        if len(inside) * len(groups) <= 24:
            shown = [f"{value:{fmt or f'.{digits}f'}}".removeprefix("0") for value in row.values()]
            ax.bar_label(bars, shown, fontsize=8, padding=3, zorder=4, bbox=CLEAR)
    for series in (series for series in table if series not in inside):
        at, color = np.array([groups.index(group) for group in table[series]]), look[series].color
        style = {"color": color, "linestyle": "-" if color == LEXICAL else ":", "linewidth": 2}
        place = list(table[series].values()), at - 0.45, at + 0.45
        ax.hlines(*place, color=PAPER, linewidth=3, alpha=0.5, zorder=2)  # or it is lost before a dark bar
        ax.hlines(*place, **style, zorder=2.1, label=series)  # above all that is under a line
    ax.axhline(0, color=MUTED, linewidth=1)
    wide = max(10, 84 // len(groups))  # characters
    ax.set_xticks(range(len(groups)), [textwrap.fill(group, wide) for group in groups])
    ax.tick_params(axis="x", length=0, rotation=45 if len("".join(groups)) > 90 else 0)  # or they overlap
    ax.grid(axis="x", visible=False)
    ax.margins(x=0.01, y=0.1)
    return _finished(figure, **about)


def effects(table: Mapping[str, Mapping[str, tuple[float, float, float]]], **about: Any) -> Figure:
    """Differences in points with their 95 % intervals: a bar per (group, series), up or down from zero.

    Args:
        table: series → group → `evidence.Effect`: value, low and high, as shares.
    """
    values = {name: {group: 100 * found[0] for group, found in row.items()} for name, row in table.items()}
    ends = {
        name: {group: (100 * low, 100 * high) for group, (_, low, high) in row.items()}
        for name, row in table.items()
    }
    return grouped_bars(values, intervals=ends, fmt="+.1f", **about)


def lines(
    series: Mapping[Any, Sequence], *, intervals: Mapping | None = None, log_x: bool = False, **about: Any
) -> Figure:
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
    if log_x:
        ax.set_xscale("log", base=2)
        ticks = sorted({value for x, *_ in series.values() for value in x})
        ax.set_xticks(ticks, [f"{value:,.10g}" for value in ticks])
        ax.tick_params(axis="x", which="minor", length=0)
    figure = _finished(figure, **about)
    _label(ax, labels)
    return figure


def histograms(series: Mapping[str, Sequence[float]], *, bins: Any = 50, **about: Any) -> Figure:
    """Overlaid distributions, each normalised to an area of one; `bins`: how many, or their edges."""
    figure, ax = axes()
    edges = np.histogram_bin_edges(np.concatenate([np.ravel(data) for data in series.values()]), bins)
    for (name, look), data in zip(looks(series).items(), series.values(), strict=True):
        style = {"facecolor": (look.color, 0.3), "edgecolor": look.color, "linewidth": 1.2}
        ax.hist(data, edges, density=True, histtype="stepfilled", label=name, **style)
    return _finished(figure, **about)


def pareto(points: Mapping[str, Sequence[tuple]], **about: Any) -> Figure:
    """Quality against storage: name → (x, y, label) points joined in order of x, on a logarithmic x axis. The
    frontier, the points that no other one beats in both, is drawn as a grey staircase."""
    figure, ax = axes(figsize=(WIDTH, 4.1))
    every = [(x, y) for data in points.values() for x, y, _ in data]
    best = [p for p in every if not any(o != p and o[0] >= p[0] and o[1] >= p[1] for o in every)]
    stairs = zip(*sorted(best), strict=True)
    ax.step(*stairs, where="pre", color=GRID, linewidth=6, zorder=1, label="frontier")
    look = looks(points)
    for name, data in points.items():
        x, y, _ = zip(*sorted(data), strict=True)
        ax.plot(x, y, **look[name].line, label=name)
    ax.set_xscale("log")
    figure = _finished(figure, **about)
    _label(ax, [(*point, look[name].color) for name, data in points.items() for point in data])
    return figure


def differences(rows: Mapping[str, Sequence[float]], *, title: str, xlabel: str) -> Figure:
    """Differences in points with their 95 % intervals, a row each, the first on top; the line marks none.

    Args:
        rows: name → `evidence.Effect`: value, low and high, as shares.
    """
    figure, ax = axes(figsize=(WIDTH, 0.3 * len(rows) + 1.2))
    for y, (name, found) in enumerate(rows.items()):
        look, (value, low, high) = SYSTEMS.get(name, FREE[0]), 100 * np.array(found)
        ax.hlines(y, low, high, color=look.color, linewidth=2.2)
        ax.plot(value, y, **look.line)
        _beside(ax, y, f"{value:+.1f}", color=INK)
    ax.axvline(0, color=INK, linewidth=1)
    _name_rows(ax, list(rows), len(rows))
    return _finished(figure, title=title, xlabel=xlabel)


def horizontal_bars(values: Mapping[str, float], *, fmt: str = "{:,.0f}", **about: Any) -> Figure:
    """One bar per name, the largest on top, with its value."""
    values = dict(sorted(values.items(), key=lambda item: item[1]))
    figure, ax = axes(figsize=(WIDTH, 0.26 * len(values) + 1.2))
    bars = ax.barh(list(values), list(values.values()), color=CONTEXTUAL)
    ax.bar_label(bars, [fmt.format(size) for size in values.values()], fontsize=8, padding=3)
    ax.xaxis.set_major_formatter("{x:,g}")
    ax.grid(axis="y", visible=False)
    ax.margins(x=0.12, y=0.02)
    return _finished(figure, **about)


def beside(
    panels: Mapping[str, Table],
    *,
    highlight: Sequence[str] = (),
    like: Mapping[str, str] | None = None,
    change: tuple[str, str] | None = None,
    relative: bool = False,
    **about: Any,
) -> Figure:
    """Dots side by side, each panel on its own scale: panel → series → row → value.

    Rows stand in the order in which they first appear, the first on top, with a line through their dots.

    Args:
        highlight: the series in colour, where there are more than a legend should hold; the others are grey.
        like: series → the system whose part it plays, and whose colour and marker it gets.
        change: two systems, before and after; a bar joins the two that play their parts in each row, and the
            change is written beside it.
        relative: the dots are differences to the system before, where levels differ more than systems do.
    """
    like = like or {}
    colored = [s for panel in panels.values() for s in highlight or panel if s in panel]
    look = looks(like.get(series, series) for series in colored)
    rows = {name: list(dict.fromkeys(r for s in panel.values() for r in s)) for name, panel in panels.items()}
    most = max(map(len, rows.values()))
    size = (WIDTH, 0.23 * most + 0.25 * len(colored) / len(panels) + 1.5)
    figure, drawn = axes(ncols=len(panels), figsize=size, squeeze=False)
    for (name, panel), ax in zip(panels.items(), drawn[0], strict=True):
        played = {like.get(series, series): values for series, values in panel.items()}
        before, after = (played.get(part, {}) for part in change or ("", ""))
        zero = dict.fromkeys(rows[name], 0) | (before if relative else {})
        for y, row in enumerate(rows[name]):
            values = [series[row] - zero[row] for series in panel.values() if row in series]
            ax.hlines(y, min(values), max(values), color=GRID, linewidth=1.2)
            if row in before and row in after:
                start, gain = before[row] - zero[row], after[row] - before[row]
                color = CONTEXTUAL if gain >= 0 else VERMILION
                ax.hlines(y, start, start + gain, color=color, linewidth=4, alpha=0.4)
                _beside(ax, y, f"{before[row]:.1f} → {after[row]:.1f} ({gain:+.1f})", color=color)
        others = [series for series in panel if series not in colored]
        grey = {"marker": "o", "color": LEXICAL, "markersize": 3.5, "label": f"{len(others)} others"}
        for series in (*others, *(series for series in colored[::-1] if series in panel)):  # the first on top
            style = look[like.get(series, series)].line | {"label": series} if series in colored else grey
            at = [rows[name].index(row) for row in panel[series]]
            values = [value - zero[row] for row, value in panel[series].items()]
            ax.plot(values, at, **style | {"linestyle": ""})
        _name_rows(ax, rows[name], most)
        ax.set_title(name, fontsize=9.5)
        handles, labels = ax.get_legend_handles_labels()
        shown = dict(zip(labels[::-1], handles[::-1], strict=True))
        figure.legend(shown.values(), shown, loc=f"outside lower {'left' if ax is drawn[0, 0] else 'right'}")
    return _finished(figure, **about)


def _name_rows(ax: plt.Axes, names: Sequence[str], room: float, **text) -> None:
    """Names the rows of a figure, the first on top, where there is room for so many."""
    ax.set_yticks(range(len(names)), names, **text)
    ax.set_ylim(room - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)


def _beside(ax: plt.Axes, y: float, text: str, **style) -> None:
    """Text right of the axes at the height of y."""
    place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center"}
    ax.annotate(text, (1, y), xytext=(6, 0), fontsize=8, **place, **style)


def claims(runs: Mapping[str, Sequence[Mapping]], *, title: str) -> Figure:
    """Each claim's effect with its 95 % interval, a panel for each run. Small dots are seeds; a tick across
    the row is the bar that the effect must lie above. The axis is linear up to 10 points, then logarithmic,
    and the same in all panels.

    Args:
        runs: name → claims, as in claims.json (`unmask_study.evidence.claims`), in the order of the rows.
    """
    measured = {one["short"] for told in runs.values() for one in told if one["value"] is not None}
    rows = [
        name
        for name in dict.fromkeys(one["short"] for told in runs.values() for one in told)
        if name in measured
    ]
    size = (WIDTH, 0.33 * len(rows) + 1.5)
    figure, drawn = axes(ncols=len(runs), figsize=size, squeeze=False, sharex=True, sharey=True)
    for (name, told), ax in zip(runs.items(), drawn[0], strict=True):
        for one in (one for one in told if one["value"] is not None):
            y, look = rows.index(one["short"]), VERDICTS[one["verdict"]]
            value, bar = 100 * one["value"], 100 * one["bar"]
            ax.plot([bar, bar], [y - 0.3, y + 0.3], color=INK, linewidth=1.4)
            ax.hlines(y, *(100 * end for end in one["interval"]), color=look.color, linewidth=2.4)
            seeds = [100 * seed for seed in one["seeds"].values()]
            ax.plot(seeds, [y + 0.22] * len(seeds), ".", color=look.color, markersize=4)
            ax.plot(value, y, **look.line, markersize=6)
            if len(runs) == 1:
                _beside(ax, y, one["effect"])
        ax.axvline(0, color=MUTED, linewidth=1)
        ax.set_xscale("symlog", linthresh=10, linscale=1.5)
        ticks = [-50, -20, -10, -5, 0, 5, 10, 20, 50] if len(runs) == 1 else [-50, -10, -5, 0, 5, 10, 50]
        ax.set_xticks(ticks, minor=False)
        ax.xaxis.set_major_formatter("{x:g}")
        ax.set_title(name, fontsize=9.5)
        _name_rows(ax, rows, len(rows), fontsize=9)
    every = dict.fromkeys(one["verdict"] for row in runs.values() for one in row if one["value"] is not None)
    for verdict in sorted(every, key=list(VERDICTS).index):
        drawn[0, 0].plot([], [], **VERDICTS[verdict].line | {"linestyle": "-"}, label=verdict)
    return _finished(figure, title=title, xlabel="points, logarithmic beyond 10")


def _label(ax: plt.Axes, labels: Sequence[tuple[float, float, str, str]]) -> None:
    """Writes labels, (x, y, text, colour), near their points and clear of them and of one another."""
    if labels:
        ax.margins(x=0.2, y=0.15)
        texts = [ax.text(x, y, text, fontsize=8, color=color, bbox=CLEAR) for x, y, text, color in labels]
        room = {"expand": (1.5, 2.2), "force_explode": (0.3, 0.5), "min_arrow_len": 12}
        adjust_text(texts, ax=ax, iter_lim=100, **room, arrowprops={"arrowstyle": "-", "color": GRID})


def _finished(
    figure: Figure, *, title: str, xlabel: str = "", ylabel: str = "", reference: dict | None = None
) -> Figure:
    """The figure with its title at the left, labels at its axes, values for reference as lines across,
    and below it a legend where there is more than one name."""
    for ax in figure.axes:
        ax.set(xlabel=xlabel, ylabel=ylabel)
        for (name, value), style in zip((reference or {}).items(), cycle(("--", ":", "-."))):
            ax.axhline(value, color=MUTED, linestyle=style, linewidth=1.2, label=name)
    figure.suptitle(textwrap.fill(title, 80), fontsize=11.5, x=0.008, ha="left")
    found = [zip(*ax.get_legend_handles_labels(), strict=True) for ax in figure.axes]
    entries = {label: handle for pairs in found for handle, label in pairs}
    if len(entries) > 1 and not figure.legends:
        columns = max(1, 100 // (8 + max(map(len, entries))))
        figure.legend(entries.values(), entries, loc="outside lower center", ncols=columns)
    return figure
