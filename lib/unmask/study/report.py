"""What notebooks show: tables, gates and claims."""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import reduce
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from unmask.store import repository
from unmask.study.evidence import Gate, Scores, above_chance, failed, learnt

if TYPE_CHECKING:
    from unmask.config import EvaluationConfig
    from unmask.evaluation.tasks import Task

NBSP = "\N{NO-BREAK SPACE}"
MARKS = {"reproduced": "✔", "not at this scale": "–", "contradicted": "✘"}
# Where the rows of a table come from: the notebook that measured them, then the keys in what it saved.
STAGES = {
    "BM25": ("02_pair", "families", "BM25"),
    "all-MiniLM-L6-v2": ("02_pair", "families", "all-MiniLM-L6-v2"),
    "diffusion backbone": ("02_pair", "families", "untrained backbone"),
    "pair": ("02_pair", "families", "pair"),
    "contextual": ("03_contextual", "families", "contextual, late chunking"),
    "triplet from pair": ("04_triplet", "families", "triplet from pair"),
    "triplet from contextual": ("04_triplet", "families", "triplet from contextual"),
    "merged": ("05_merge", "families", "merged"),
}
SYSTEMS = {
    "pplx-style": ("05_merge", "families", "merged"),
    "InSeNT": ("08_conteb", "insent", "families"),
    "CDE": ("10_cde", "families", "CDE"),
    "Qwen3-style": ("11_qwen3_embedding", "families", "Qwen3"),
    "BM25": STAGES["BM25"],
    "all-MiniLM-L6-v2": STAGES["all-MiniLM-L6-v2"],
}


# Tables


def percent(table: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """A table of shares, such as nDCG, in the paper's unit: hundredths."""
    return {name: {key: 100 * value for key, value in row.items()} for name, row in table.items()}


def markdown_table(rows: Sequence[Mapping[str, Any]], *, digits: int = 3) -> str:
    """Rows of equal keys as a Markdown table; numbers are rounded, what is missing is written "not run"."""
    if not rows:
        return "not run"
    columns = list(dict.fromkeys(key for row in rows for key in row))

    def line(cells: Iterable[Any]) -> str:
        shown = (f"{cell:.{digits}f}" if isinstance(cell, float) else str(cell) for cell in cells)
        return "| " + " | ".join(cell.replace("|", r"\|").replace("\n", " ") for cell in shown) + " |"

    cells = ([row.get(key) for key in columns] for row in rows)
    body = [line("not run" if cell is None else cell for cell in row) for row in cells]
    return "\n".join([line(columns), "|" + "---|" * len(columns), *body])


def added_up(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What a training read (`unmask.training.loop.data_report`), the languages of a data set added up.

    The first column names the data set or source, "name/language"; of "epochs" the largest counts.
    """
    label, totals = next(iter(rows[0])), {}
    for row in rows:
        name = row[label].partition("/")[0]
        total = totals.setdefault(name, {label: name})
        for key, value in row.items():
            if not isinstance(value, str):
                total[key] = max(total.get(key, 0), value) if key == "epochs" else total.get(key, 0) + value
    columns = list(dict.fromkeys(key for total in totals.values() for key in total))
    return [{column: total.get(column, 0) for column in columns} for total in totals.values()]


def measured(
    rows: Mapping[str, Sequence[str]], metrics: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, float]]:
    """The rows that a run measured, without those that it did not.

    Args:
        rows: name → where to find it, such as STAGES and SYSTEMS; metrics: notebook → what it saved.
    """
    found = {name: reduce(lambda at, key: at.get(key, {}), path, metrics) for name, path in rows.items()}
    return {name: dict(row) for name, row in found.items() if row}


def gathered(tables: Iterable[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, list[float]]]:
    """Tables of several seeds as one: row → column → the value of each seed that has one."""
    values: dict[str, dict[str, list[float]]] = {}
    for name, row in ((name, row) for table in tables for name, row in table.items()):
        for column, value in row.items():
            values.setdefault(name, {}).setdefault(column, []).append(value)
    return values


def deviation(values: Sequence[float]) -> float:
    """Standard deviation over seeds, n − 1 in the denominator; 0 for one seed."""
    return stdev(values) if len(values) > 1 else 0.0


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation over seeds, "0.247 ± 0.003"; the mean alone where nothing varies."""
    varies = deviation(values) > 0
    return f"{mean(values):.3f}" + (f" ±{NBSP}{deviation(values):.3f}" if varies else "")


def elapsed(records: Iterable[Mapping[str, Any]]) -> float:
    """Seconds in which at least one of the notebooks ran, whose records say when they started and how long
    they took."""
    total, until = 0.0, -math.inf
    starts = ((datetime.fromisoformat(one["started"]).timestamp(), one["wall_seconds"]) for one in records)
    for start, seconds in sorted(starts):
        total += max(start + seconds - max(start, until), 0.0)
        until = max(until, start + seconds)
    return total


# Gates and claims


def checked(
    curves: Mapping[str, Sequence[Mapping[str, Any]]], base_rate: float | Mapping[str, float],
    scores: Mapping[str, Scores], tasks: Sequence[Task], config: EvaluationConfig,
) -> dict[str, list[Gate]]:  # fmt: skip
    """The gates of trainings: did the loss fall, and is the model better than chance?

    Args:
        curves: training → its logged steps; base_rate: nats of a guess, for all or for each; see `learnt`.
        scores: training → task → a metric per query; without one, only the loss is looked at.
        tasks: that were asked.
    """
    gates = {}
    for name, curve in curves.items():
        gates[name] = learnt(name, curve, base_rate[name] if isinstance(base_rate, Mapping) else base_rate)
        gates[name] += [above_chance(name, scores[name], tasks, config)] if name in scores else []
    return gates


def gates_table(gates: Sequence[Gate] | Mapping[str, Sequence[Gate]]) -> str:
    """Gates of one training, or of each, as a Markdown table; each once."""
    every = [gate for row in gates.values() for gate in row] if isinstance(gates, Mapping) else gates
    rows = []
    for gate in {gate["name"]: gate for gate in every}.values():
        passed = "yes" if gate["passed"] else "**no**"
        rows.append({"gate": gate["name"], "value": gate["value"], "bar": gate["bar"], "passed": passed})
    return markdown_table(rows)


def claims_table(claims: Sequence[Mapping[str, Any]], *, notebooks: str = ".", short: bool = False) -> str:
    """Claims as a Markdown table, each with a link to the notebook that tests it.

    Args:
        claims: see `evidence.claim`; notebooks: folder of the executed notebooks, as seen from the table.
        short: of our result, only the effect.
    """
    rows = []
    for claim in claims:
        ours = re.sub(r"\[(\S+), (\S+)\]", rf"[\1,{NBSP}\2]", (short and claim["effect"]) or claim["ours"])
        row = {"claim": claim["claim"], "paper": f"{claim['paper']} ({claim['source']})", "ours": ours}
        why, mark = failed(claim.get("gates", ())), MARKS.get(claim["verdict"], "")
        row["verdict"] = f"**{mark}{NBSP * bool(mark)}{claim['verdict']}**" + (f" ({why})" if why else "")
        row |= {"seeds": len(claim["seeds"]) or "–", "notebook": link(notebooks, claim["notebook"])}
        rows.append(row)
    return markdown_table(rows)


def link(notebooks: str, stage: str, text: str = "") -> str:
    """Markdown link to an executed notebook, named by its number; a dash where there is none."""
    return f"[{text or stage.partition('_')[0]}]({notebooks}/{stage}.ipynb)" if stage else "–"


def executed(run: str) -> str:
    """Folder of a run's executed notebooks, as seen from its report.

    Where git keeps the report but not these, because they quote data that are not ours to hand on, it is the
    folder of the notebooks that were executed: a link must lead somewhere in a clone, too.
    """

    def ignored(path: str) -> bool:
        return subprocess.run(["git", "-C", repository(), "check-ignore", "-q", path]).returncode == 0

    quoted, private = (ignored(f"{folder}/{run}/12_report") for folder in ("papermill_runs", "results"))
    return "../../notebooks" if quoted and not private else f"../../papermill_runs/{run}"
