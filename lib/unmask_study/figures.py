"""One style, one function per kind of figure.

Every axis has a label with its unit. A system has one colour and one marker in all figures, which its name
decides: blues are the recipe, and the further trained, the more they stand out against the page; other hues
are its neighbours; greys come from outside.
"""

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from unmask.extras import extra
from unmask.store import replacing
from unmask_study.evidence import GROUPS, is_earlier

with extra("study"):
    import matplotlib.pyplot as plt
    from adjustText import adjust_text
    from IPython.display import Image as Picture
    from IPython.display import display
    from PIL import Image

WIDTH, DPI, SHOWN = 7.5, 144, 830  # inches; shown so many pixels wide, 8 points are 12 pixels
_YAML = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf8"))
COLORS = {name: color for group in _YAML["colors"].values() for name, color in group.items()}
INK, MUTED, GRID, PAPER = (COLORS[name] for name in ("ink", "muted", "grid", "paper"))
RECIPE, OUTSIDE = ({*_YAML["colors"][group].values()} for group in ("recipe", "outside"))
GREY = COLORS["lexical"]
CLEAR = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.3}  # behind a label: hides lines
Look = dict[str, Any]  # how a system is drawn, as matplotlib draws a line
STAR = {"marker": "*", "markersize": 10, "color": MUTED, "markerfacecolor": PAPER, "linewidth": 0.8}
HOLLOW = {"linestyle": "--", "markerfacecolor": PAPER}  # a lesser way of using the system of that colour
Table = Mapping[str, Mapping[str, float]]  # series → group or row → value


def _look(words: str) -> Look:
    """A look from words such as "contextual s hollow": a colour's name, a marker, and perhaps hollow."""
    color, marker, *hollow = words.split()
    return {"color": COLORS[color], "marker": marker} | (HOLLOW if hollow else {})


SYSTEMS, VERDICTS = (
    {name: _look(words) for words, names in _YAML[key].items() for name in names}
    for key in ("systems", "verdicts")
)
FREE = [_look(words) for words in _YAML["free"]]  # of what has no look of its own


def looks(names: Iterable[str]) -> dict[str, Look]:
    """The look of each name: its own if it is one of `SYSTEMS`, else one that these leave free."""
    names = list(dict.fromkeys(names))
    known = {name: SYSTEMS[name] for name in names if name in SYSTEMS}
    taken = {look["color"] for look in known.values()} | (RECIPE if known else set())
    free = cycle(look for look in FREE if look["color"] not in taken)
    return {name: known.get(name) or next(free) for name in names}


class Figure(plt.Figure):
    """A figure that saves and shows itself."""

    def save(self, path: Path) -> None:
        """Writes the figure as PNG."""
        with replacing(path) as unfinished:
            self.savefig(unfinished, dpi=DPI, format="png")
            # Of few colours it is half the size, and the eye does not see it.
            image = Image.open(unfinished).convert("RGB").quantize(method=Image.Quantize.MAXCOVERAGE)
            image.save(unfinished, "png", optimize=True)

    def keep(self, path: Path, text: str = "") -> None:
        """Saves the figure and shows what was saved: drawing takes the longest, and is done once."""
        self.save(path)
        plt.close(self)
        show(path, text)


def show(path: Path, text: str = "") -> None:
    """Shows in a notebook a figure of its run that was saved; `text` stands for it on the report's page."""
    display(Picture(filename=path, width=SHOWN), metadata={"picture": [f"figures/{path.name}", text]})


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
        about: ylabel, title, and reference, for instance the loss of a uniform guess; see `finished`.
    """
    figure, ax = axes()
    for (name, look), rows in zip(looks(runs).items(), runs.values(), strict=True):
        steps, losses = [row["step"] + 1 for row in rows], [row["loss"] for row in rows]
        averages = list(pd.Series(losses).ewm(alpha=min(1, max(alpha, 6 / len(rows)))).mean())
        ax.plot(steps, losses, color=look["color"], alpha=0.25, linewidth=0.8)
        label = f"{name} ({averages[-1]:.2f})"
        ax.plot(steps, averages, **look, markevery=max(1, len(rows) // 7), label=label)
    ax.xaxis.get_major_locator().set_params(integer=True)
    return finished(figure, xlabel="training step (in brackets: the last moving average)", **about)


def grouped_bars(table: Table, **about: Any) -> Figure:
    """A bar per (group, series): `table[series][group]`.

    Systems from outside (BM25, a pretrained embedder) are grey levels over their group instead. Values are
    written at the bars where there is room for all of them, with as many digits as they need.
    """
    figure, ax = axes()
    frame, look = pd.DataFrame(table), looks(table)
    outside = [series for series in table if look[series]["color"] in OUTSIDE]
    inside, place_G = frame.drop(columns=outside), np.arange(len(frame))
    spacing = {"bar_spacing": 0.09, "group_spacing": 0.09 + 0.2 * len(inside.columns)}  # in widths of a bar
    digits = 3 if (top := frame.abs().max(axis=None)) < 0.2 else 2 if top < 10 else 1
    bars_by_series = ax.grouped_bar(inside, **spacing).bar_containers
    for (series, value_G), bars in zip(inside.items(), bars_by_series, strict=True):
        color = look[series]["color"]
        face = (color, 0.3) if HOLLOW.items() <= look[series].items() else color
        plt.setp(bars, facecolor=face, edgecolor=color)
        if inside.size <= 24:
            texts = ["" if np.isnan(value) else f"{value:.{digits}f}".removeprefix("0") for value in value_G]
            ax.bar_label(bars, texts, fontsize=8, padding=3, zorder=4, bbox=CLEAR)
    for series in outside:
        color, place = look[series]["color"], (frame[series], place_G - 0.45, place_G + 0.45)
        ax.hlines(*place, color=PAPER, linewidth=3, alpha=0.5, zorder=2)  # or it is lost before a dark bar
        style = "-" if color == GREY else ":"
        ax.hlines(*place, color, style, linewidth=2, zorder=2.1, label=series)  # above its bar
    ax.axhline(0, color=MUTED, linewidth=1)
    wide = max(10, 84 // len(frame))  # characters
    ax.set_xticks(place_G, [textwrap.fill(group, wide) for group in frame.index])
    ax.tick_params(axis="x", length=0, rotation=45 * (len("".join(frame.index)) > 90))  # or they overlap
    ax.grid(axis="x", visible=False)
    ax.margins(x=0.01, y=0.1)
    return finished(figure, **about)


def effects(table: Mapping[str, Mapping[str, Sequence[float]]], **about: Any) -> Figure:
    """Differences in points with their 95 % intervals, a row for each group, the first on top; the line marks
    none.

    Args:
        table: series → group → `evidence.Effect`: value, low and high, as shares. Of one series alone, each
            row has the look of the system that it is named after.
    """
    groups = list(dict.fromkeys(group for row in table.values() for group in row))
    figure, ax = axes(figsize=(WIDTH, (0.1 + 0.2 * len(table)) * len(groups) + 1.4))
    for number, ((series, look), row) in enumerate(zip(looks(table).items(), table.values(), strict=True)):
        for group, effect in row.items():
            y = groups.index(group) + 0.8 * ((number + 0.5) / len(table) - 0.5)
            drawn = SYSTEMS.get(group, look) if len(table) == 1 else look
            _interval(ax, y, *effect, drawn, label=series)
    ax.axvline(0, color=INK, linewidth=1)
    _name_rows(ax, groups, len(groups))
    return finished(figure, **about)


def lines(
    series: Mapping, *, intervals: Mapping | None = None, log_x: bool = False, frontier: bool = False, **about
) -> Figure:
    """Curves of measured points: name → (x, y) or (x, y, labels).

    A name may have two parts, (what, how): each `what` has a colour; of the `how`, the first has filled
    markers and the labels, the others hollow markers and a dashed line.

    Args:
        intervals: what → the ends (low, high) of a band at each point.
        frontier: the points that no other one beats in both x and y are joined by a grey staircase.
    """
    figure, ax = axes()
    named = {name if isinstance(name, tuple) else (name, ""): data for name, data in series.items()}
    look, (_, first), labels, bands = looks(what for what, _ in named), next(iter(named)), [], intervals or {}
    for (what, how), (x, y, *texts) in named.items():
        style = look[what] if how == first else look[what] | HOLLOW
        ax.plot(x, y, **style, label=f"{what}, {how}" if how else what)
        if what in bands:
            ends = zip(*bands[what], strict=True)
            ax.fill_between(x, *ends, color=style["color"], alpha=0.2, linewidth=0)
        if texts and how == first:
            labels += [(*point, style["color"]) for point in zip(x, y, texts[0], strict=True)]
    if log_x:
        ax.set_xscale("log", base=2)
        places = sorted({value for x, *_ in series.values() for value in x})
        ticks, apart = places[:1], (places[-1] / places[0]) ** (1 / 12)  # else their names overlap
        for value in places[1:]:
            if value >= apart * ticks[-1]:
                ticks.append(value)
        ax.set_xticks(ticks, [f"{value:,.10g}" for value in ticks])
        ax.tick_params(axis="x", which="minor", length=0)
    if frontier:
        every = [point for x, y, *_ in series.values() for point in zip(x, y)]
        best = [p for p in every if not any(o != p and o[0] >= p[0] and o[1] >= p[1] for o in every)]
        ax.step(*zip(*sorted(best)), where="pre", color=GRID, linewidth=6, zorder=1, label="frontier")
    finished(figure, **about)
    if labels:  # clear of their points and of one another
        ax.margins(x=0.2, y=0.15)
        texts = [ax.text(x, y, text, fontsize=8, color=color, bbox=CLEAR) for x, y, text, color in labels]
        room = {"expand": (1.5, 2.2), "force_explode": (0.3, 0.5), "min_arrow_len": 12}
        adjust_text(texts, ax=ax, iter_lim=100, **room, arrowprops={"arrowstyle": "-", "color": GRID})
    return figure


def histograms(series: Mapping[str, Sequence[float]], *, bins: Any = 50, **about: Any) -> Figure:
    """Overlaid distributions, each normalised to an area of one; `bins`: how many, or their edges."""
    figure, ax = axes()
    edges = np.histogram_bin_edges(np.concatenate([*map(np.ravel, series.values())]), bins)
    for (name, look), data in zip(looks(series).items(), series.values(), strict=True):
        color = {"facecolor": (look["color"], 0.3), "edgecolor": look["color"], "linewidth": 1.2}
        ax.hist(data, edges, density=True, histtype="stepfilled", label=name, **color)
    return finished(figure, **about)


def horizontal_bars(values: Mapping[str, float], *, fmt: str = "{:,.0f}", **about: Any) -> Figure:
    """One bar per name, the largest on top, with its value."""
    sizes = pd.Series(values).sort_values(kind="stable")
    figure, ax = axes(figsize=(WIDTH, 0.26 * len(sizes) + 1.2))
    ax.bar_label(ax.barh(sizes.index, sizes, color=COLORS["contextual"]), fmt=fmt, fontsize=8, padding=3)
    ax.xaxis.set_major_formatter("{x:,g}")
    ax.grid(axis="y", visible=False)
    ax.margins(x=0.12, y=0.02)
    return finished(figure, **about)


def beside(panels: Mapping, *, highlight: Sequence = (), baselines: Sequence = (), **about: Any) -> Figure:
    """Dots side by side, each panel on its own scale: panel → series → row → value.

    Rows stand in the order in which they first appear, the first on top, with a line through their dots.

    Args:
        highlight: the series in colour, where there are more than a legend should hold; the others are grey.
        baselines: the dots are differences to that one of these series which a panel has, where levels differ
            more than systems do.
    """
    frames = {name: pd.DataFrame(panel, dtype=float) for name, panel in panels.items()}
    colored = [series for frame in frames.values() for series in highlight or frame if series in frame]
    look, most = looks(colored), max(map(len, frames.values()))
    size = (WIDTH, 0.23 * most + 0.25 * len(colored) / len(panels) + 1.5)
    figure, drawn = axes(ncols=len(panels), figsize=size, squeeze=False)
    for (name, frame), ax in zip(frames.items(), drawn[0], strict=True):
        for series in frame.columns.intersection(baselines)[:1]:
            frame = frame.sub(frame[series], axis=0)
        y = np.arange(len(frame))
        ax.hlines(y, frame.min(axis=1), frame.max(axis=1), color=GRID, linewidth=1.2)
        others = frame.drop(columns=colored, errors="ignore")
        label = [f"{others.shape[1]} others"] * others.shape[1]
        ax.plot(others, y, "o", color=GREY, markersize=3.5, label=label)
        for series in (series for series in colored[::-1] if series in frame):  # the first on top
            ax.plot(frame[series], y, **look[series] | {"linestyle": ""}, label=series)
        _name_rows(ax, list(frame.index), most)
        ax.set_title(name, fontsize=9.5)
    return finished(figure, **about)


def claims(runs: Mapping[str, Sequence[Mapping]], *, title: str) -> Figure:
    """Each claim's effect with its 95 % interval, a panel for each run, first the papers' own claims, then
    controls. Small dots are seeds; a tick across the row is the bar that the effect must lie above; open
    stars are what the paper found; pale is what was measured by an earlier definition. The axis is linear up
    to 20 points, then logarithmic, and the same in all panels.

    Args:
        runs: name → claims, as in claims.json (`unmask_study.evidence.claims`), in the order of the rows.
    """
    measured = {name: [one for one in row if one["value"] is not None] for name, row in runs.items()}
    every, rows = list(chain(*measured.values())), []
    for group, heading in GROUPS.items():
        shown = {one["short"] for one in every if one["group"] == group}
        names = [one["short"] for one in chain(*runs.values()) if one["short"] in shown]
        rows += [heading, *dict.fromkeys(names)] if names else []
    shared = {"figsize": (WIDTH, 0.33 * len(rows) + 1.5), "sharex": True, "sharey": True}
    figure, drawn = axes(ncols=len(runs), squeeze=False, **shared)
    for (name, row), ax in zip(measured.items(), drawn[0], strict=True):
        for one in row:
            y, look, bar = rows.index(one["short"]), VERDICTS[one["verdict"]], 100 * one["bar"]
            ax.plot([bar, bar], [y - 0.3, y + 0.3], color=INK, linewidth=1.4)
            look = look | {"alpha": 0.35} if is_earlier(one) else look
            _interval(ax, y, one["value"], *one["interval"], look)
            seeds = [100 * seed for seed in one["seeds"].values()]
            ax.plot(seeds, [y + 0.22] * len(seeds), ".", color=look["color"], markersize=4)
            told = re.findall(r"[+-]?[\d.]+", one["paper"].partition(" (")[0].replace("−", "-"))
            ax.plot([*map(float, told)], [y - 0.25] * len(told), **STAR, label="the paper" if told else None)
            if len(runs) == 1:
                ax.text(1.01, y, one["effect"], transform=ax.get_yaxis_transform(), fontsize=8, va="center")
        ax.axvline(0, color=MUTED, linewidth=1)
        ax.set_xscale("symlog", linthresh=20, linscale=1)
        ax.set_xticks([-50, -20, -10, 0, 10, 20, 50], minor=False)
        ax.xaxis.set_major_formatter("{x:g}")
        ax.set_title(name, fontsize=9.5)
        _name_rows(ax, rows, len(rows), fontsize=9)
        for y in (y for y, text in enumerate(rows) if text in GROUPS.values()):
            plt.setp(ax.get_yticklabels()[y : y + 1], fontweight="bold")
            ax.axhline(y - 0.5, color=MUTED, linewidth=1)
    for verdict in (verdict for verdict in VERDICTS if verdict in {one["verdict"] for one in every}):
        drawn[0, 0].plot([], [], **VERDICTS[verdict] | {"linestyle": "-"}, label=verdict)
    if any(map(is_earlier, every)):
        drawn[0, 0].plot(
            [], [], color=MUTED, alpha=0.35, linewidth=2.4, label="pale: earlier code, unchecked"
        )
    return finished(figure, title=title, xlabel="points, logarithmic beyond 20")


def _interval(ax: plt.Axes, y: float, value: float, low: float, high: float, look: Look, **text: str) -> None:
    """A value and the ends of its interval, all shares, as a dot on a line in points."""
    ax.hlines(y, 100 * low, 100 * high, color=look["color"], linewidth=2.4, alpha=look.get("alpha"))
    ax.plot(100 * value, y, **look, **text)


def _name_rows(ax: plt.Axes, names: Sequence[str], room: float, **text) -> None:
    """Names the rows of a figure, the first on top, where there is room for so many."""
    ax.set_yticks(range(len(names)), names, **text)
    ax.set_ylim(room - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)


def finished(
    figure: Figure, *, title: str, xlabel: str = "", ylabel: str = "", reference: dict | None = None
) -> Figure:
    """The figure with its title at the left, labels at its axes, values for reference as lines across,
    and below it a legend where there is more than one name."""
    for ax in figure.axes:
        ax.set(xlabel=xlabel, ylabel=ylabel)
        for (name, value), style in zip((reference or {}).items(), cycle(("--", ":", "-."))):
            ax.axhline(value, color=MUTED, linestyle=style, linewidth=1.2, label=name)
    figure.suptitle(textwrap.fill(title, 80), fontsize=11.5, x=0.008, ha="left")
    pairs = chain(*(zip(*ax.get_legend_handles_labels(), strict=True) for ax in figure.axes))
    entries = {label: handle for handle, label in pairs}
    if len(entries) > 1:
        columns = max(1, 100 // (8 + max(map(len, entries))))
        figure.legend(entries.values(), entries, loc="outside lower center", ncols=columns)
    return figure
