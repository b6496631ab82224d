"""Pictures that teach: who sees whom, which texts are alike, what stands in a masked place, a dot a seed.
Drawn in the style of `figures`."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.font_manager import findfont, get_font
from matplotlib.patches import Rectangle
from PIL import Image

from unmask.store import replacing
from unmask_study.figures import COLORS, DPI, GRID, INK, MUTED, PAPER, WIDTH, Figure, axes, finished, looks

BLUES = LinearSegmentedColormap.from_list("recipe", [PAPER, COLORS["backbone"], COLORS["contextual"]])
BLUE, ORANGE = COLORS["contextual"], COLORS["vermilion"]
# What a cell of a strip says: a token that is seen; one that is masked, and may be read all the same; what a
# model puts there, and what it has just put there.
STATES = {"seen": (PAPER, INK), "masked": (GRID, GRID), "told": (GRID, MUTED), "new": (BLUE, PAPER)}
STATES |= {"right": (COLORS["green"], PAPER), "wrong": (ORANGE, PAPER)}


def plain(texts: Sequence[str]) -> list[str]:
    """Texts as names in a figure: of characters that its font has, and no formulas."""
    font = get_font(findfont("DejaVu Sans"))
    shown = ("".join(c if font.get_char_index(ord(c)) else "?" for c in text) for text in texts)
    return [text.replace("$", r"\$") for text in shown]


def heatmaps(
    panels: Mapping[str, np.ndarray],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    limits: tuple[float, float] | None = None,
    queries: int | None = None,
    numbers: str = "",
    rings: Sequence[tuple[int, int]] = (),
    borders: Mapping[str, Sequence[int]] | None = None,
    height: float = 0.3,
    **about: Any,
) -> Figure:
    """Matrices side by side, the darker a cell the larger its value.

    Args:
        panels: title → matrix (R, C), of rows and columns with these names, which stand once.
        limits: values of the palest and the darkest colour; default: the least and the largest there are.
        queries: which axis is queries, each with a scale of its own: 0 rows, 1 columns. Default: none, and
            all panels have one scale.
        numbers: format of the value in each cell, for instance ".2f"; empty: none.
        rings: cells (row, column) that are outlined, for instance the right ones.
        borders: title → before which rows (and columns, where there are as many) a line goes.
        height: of a row, in inches.
    """
    low, high = limits or (min(map(np.min, panels.values())), max(map(np.max, panels.values())))
    count, length = len(panels), max(map(len, columns))
    turned = length * len(columns) * count > 90  # names of columns that would overlap
    tall = height * len(rows) + (0.055 * length if turned else 0.1) + 0.9
    figure, drawn = axes(ncols=count, figsize=(WIDTH, tall), sharey=True, squeeze=False)
    for (title, matrix_RC), ax in zip(panels.items(), drawn[0], strict=True):
        matrix_RC = np.asarray(matrix_RC, float)
        if queries is not None:
            low, high = (end(matrix_RC, axis=1 - queries, keepdims=True) for end in (np.min, np.max))
        _shaded(ax, matrix_RC, (matrix_RC - low) / np.maximum(high - low, 1e-9), numbers)
        for r, c in rings:
            ax.add_patch(
                Rectangle((c + 0.05, r + 0.05), 0.9, 0.9, facecolor="none", edgecolor=ORANGE, linewidth=2)
            )
        edges = (borders or {}).get(title, ())
        ax.hlines(edges, 0, len(columns), color=ORANGE, linewidth=1.6)
        ax.vlines(edges if len(rows) == len(columns) else (), 0, len(rows), color=ORANGE, linewidth=1.6)
        ax.set_title(title, fontsize=9.5)
        ax.set_xticks(np.arange(len(columns)) + 0.5, plain(columns), rotation=90 * turned)
        ax.set_yticks(np.arange(len(rows)) + 0.5, plain(rows))
        ax.set_ylim(len(rows), 0)
        ax.tick_params(length=0, labelsize=8)
        ax.grid(visible=False)
    return finished(figure, **about)


def _shaded(ax: plt.Axes, matrix_RC: np.ndarray, shade_RC: np.ndarray, numbers: str) -> None:
    """Cells from the palest (0) to the darkest (1) blue, each with its value if a format is named."""
    ax.pcolormesh(shade_RC, cmap=BLUES, vmin=0, vmax=1, edgecolors=GRID, linewidth=0.6)
    for (r, c), value in np.ndenumerate(matrix_RC) if numbers else ():
        text, color = f"{value:{numbers}}".replace("0.", "."), PAPER if shade_RC[r, c] > 0.75 else INK
        ax.text(c + 0.5, r + 0.5, text, ha="center", va="center", fontsize=8, color=color)


def attention_masks() -> Figure:
    """Who sees whom in a causal decoder, after diffusion, in chunks that are read alone, in late chunking."""
    chunks = [["class", "Rea", "der"], ["read", "(", ")"], ["close", "(", ")"]]
    token_L = [token for chunk in chunks for token in chunk]
    chunk_L = np.repeat(np.arange(len(chunks)), [*map(len, chunks)])
    own_LL, edges = chunk_L[:, None] == chunk_L, np.flatnonzero(np.diff(chunk_L)) + 1
    all_LL = np.ones_like(own_LL, int)
    panels = {"causal decoder": np.tril(all_LL), "after diffusion": all_LL}
    panels |= {"chunks alone": 2 * own_LL, "late chunking": all_LL + own_LL}
    title = "A token (row) sees coloured columns; dark ones are averaged into its chunk"
    lines = {"chunks alone": edges, "late chunking": edges}
    return heatmaps(
        panels, rows=token_L, columns=token_L, limits=(0, 2), borders=lines, height=0.18, title=title
    )


Cells = Sequence[tuple[str, str]]  # words, each with one of `STATES`


def strip(rows: Mapping[str, Sequence[Cells]], *, title: str, columns: Sequence[str] = ()) -> Figure:
    """A sentence in several states, a word a cell: seen, masked, filled in right or wrong.

    Args:
        rows: name → its lines of cells, one below the other; all lines have as many cells.
        columns: a name for each line of a row, the same in all rows, for instance the share of masks.
    """
    lines = [(name, number, line) for name, block in rows.items() for number, line in enumerate(block)]
    wide = [max(len(line[c][0]) for *_, line in lines) + 1.2 for c in range(len(lines[0][2]))]
    left_C = np.cumsum([0, *wide])
    figure, ax = axes(figsize=(WIDTH, 0.24 * len(lines) + 0.22 * len(rows) + 0.5))
    size = max(8.0, min(9.0, 9.0 * 84 / (left_C[-1] + 14)))  # some 90 characters fit
    y, ticks = 0.0, []
    for name, number, line in lines:
        if number == 0:
            y += 1.0
            ax.text(0, y - 0.5, name, fontsize=9.5, va="center", fontweight="bold")
        for (word, state), left, width in zip(line, left_C, wide):
            face, ink = STATES[state]
            ax.add_patch(
                Rectangle((left + 0.1, y + 0.06), width - 0.2, 0.88, facecolor=face, edgecolor="none")
            )
            at = (left + width / 2, y + 0.52)
            ax.text(*at, word, ha="center", va="center", fontsize=size, family="monospace", color=ink)
        ticks.append((y + 0.5, columns[number] if columns else ""))
        y += 1
    ax.set(xlim=(0, left_C[-1]), ylim=(y, 0), xticks=[])
    ax.set_yticks(*zip(*ticks))
    ax.tick_params(length=0, labelsize=8)
    ax.spines[:].set_visible(False)
    ax.grid(visible=False)
    return finished(figure, title=title)


def animated(figures: Sequence[Figure], path: Path, *, seconds: float = 0.8) -> None:
    """Writes figures of one size as a GIF that repeats; the last one is shown for longer."""
    frames = []
    for figure in figures:
        figure.set_dpi(DPI * 2 / 3)
        figure.canvas.draw()
        frames.append(Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB"))
        plt.close(figure)
    times = [1000 * seconds] * (len(frames) - 1) + [4000 * seconds]
    with replacing(path) as unfinished:
        frames[0].save(unfinished, "gif", save_all=True, append_images=frames[1:], duration=times, loop=0)


def dots(groups: Mapping[str, Mapping[str, Sequence[float]]], **about: Any) -> Figure:
    """A row for each system, a dot for each of its seeds, their mean at the right.

    Args:
        groups: group → system → the value of each seed; a line stands between two groups.
    """
    rows = {name: values for group in groups.values() for name, values in group.items()}
    figure, ax = axes(figsize=(WIDTH, 0.3 * len(rows) + 1.1))
    for y, (look, values) in enumerate(zip(looks(rows).values(), rows.values(), strict=True)):
        ax.hlines(y, min(values), max(values), color=look["color"], linewidth=2.4, alpha=0.5)
        ax.plot(values, [y] * len(values), **look | {"linestyle": ""})
        ax.text(
            1.01, y, f"{np.mean(values):.2f}", transform=ax.get_yaxis_transform(), va="center", fontsize=8.5
        )
    for edge in np.cumsum([len(group) for group in groups.values()])[:-1]:
        ax.axhline(edge - 0.5, color=MUTED, linewidth=1)
    ax.set_yticks(range(len(rows)), [textwrap.fill(name, 40) for name in rows])
    ax.set(ylim=(len(rows) - 0.5, -0.5), xlim=(0, None))
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)
    return finished(figure, **about)
