"""What notebooks show: the paper's tables and ours, gates and claims."""

from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pandas as pd
import yaml
from IPython.display import SVG, Markdown, display

from unmask.evaluation.tasks import Task
from unmask_study.evidence import (
    GROUPS,
    Gate,
    Scores,
    above_chance,
    learnt,
    save_scores,
)
from unmask_study.recipe import recipe
from unmask_study.run import Run

Curve = Sequence[Mapping[str, Any]]  # the logged steps of a training
Gates = Mapping[str, Sequence[Gate]]  # training → its gates
MARKS = {"holds": "✔ ", "does not hold": "✘ ", "open": "– "}
# Where the rows of the tables of stages and of systems come from: name → notebook, and keys in what it saved.
_ROWS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf8"))
STAGES, SYSTEMS, GATES = (_ROWS[key] for key in ("stages", "systems", "gates"))
# The paper's tables 1 to 12, in its order and units: number → title, unit, columns and rows.
PAPER = yaml.safe_load(Path(__file__).with_name("paper.yaml").read_text(encoding="utf8"))


# Tables


def paper_table(number: int) -> dict[str, dict[str, Any]]:
    """What the paper reports in a table: row → column → value.

    Example:
        >>> paper_table(3)["pplx-embed-context-v1-0.6B (INT8)"]["Ins"]
        99.28
    """
    _, *columns = PAPER[number]["columns"]
    return {name: dict(zip(columns, row, strict=True)) for name, row in PAPER[number]["rows"].items()}


def percent(table: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """A table of shares, such as nDCG, in the paper's unit: hundredths."""
    return {name: {key: 100 * value for key, value in row.items()} for name, row in table.items()}


def markdown_table(rows: Sequence[Mapping[str, Any]], *, digits: int = 3) -> str:
    """Rows as a Markdown table; numbers are rounded, what is missing is written "not run"."""
    if not rows:
        return "not run"
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([row.get(key) for key in columns] for row in rows)]
    head, *lines = (f"| {' | '.join(_cell(value, digits) for value in row)} |" for row in cells)
    return "\n".join([head, "|" + "---|" * len(columns), *lines])


def _cell(value: Any, digits: int) -> str:
    if isinstance(value, float):
        return f"{value:.{digits}f}"
    text = "not run" if value is None else f"{value:,}" if type(value) is int else str(value)
    return text.replace("|", r"\|").replace("\n", " ")


def added_up(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What a training read (`unmask.training.loop.data_report`), the languages of a data set added up.

    The first column names the data set or source, "name/language"; of "epochs" the largest counts.
    """
    table = pd.DataFrame(rows).fillna(0).convert_dtypes()
    label = table.columns[0]
    table[label] = table[label].str.partition("/")[0]
    how = {name: "max" if name == "epochs" else "sum" for name in table.select_dtypes("number")}
    return table.groupby(label, sort=False, as_index=False).agg(how).to_dict("records")


def by_dataset(curve: Curve) -> dict[str, Curve]:
    """The logged steps of a training by data set, all languages of one together."""
    names = [row["dataset"].partition("/")[0] for row in curve]
    return {one: [row for name, row in zip(names, curve) if name == one] for one in sorted(set(names))}


def quoted(text: str, width: int = 90) -> str:
    """The beginning of a text in one line, as code, for a cell of a table."""
    line = " ".join(text.replace("`", "'").split())
    return f"`{line if len(line) <= width else line[: width - 1] + '…'}`"


def measured(rows: Mapping[str, Sequence[str]], metrics: Mapping) -> dict[str, dict[str, float]]:
    """The rows that a run measured, without those that it did not.

    Args:
        rows: name → where to find it, such as STAGES and SYSTEMS; metrics: notebook → what it saved.
    """
    tables = {name: reduce(lambda at, key: at.get(key, {}), path, metrics) for name, path in rows.items()}
    return {name: dict(row) for name, row in tables.items() if row}


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation over seeds (n − 1 in the denominator), "0.247 ± 0.003"; the mean alone where
    nothing varies."""
    deviation = stdev(values) if len(values) > 1 else 0.0
    return f"{mean(values):.3f}" + (f" ± {deviation:.3f}" if deviation >= 0.0005 else "")


# Gates, claims and the notebook's answer


def checked(curves: Mapping[str, Curve], scores: Mapping[str, Scores], tasks: Sequence[Task]) -> Gates:
    """The gates of trainings: did the loss fall, and is the model better than chance?

    Args:
        curves: training → its logged steps.
        scores: training → task → a metric per query; without one, only the loss is looked at.
        tasks: of the scores.
    """
    chance = {name: [above_chance(name, scores[name], tasks)] for name in curves if name in scores}
    return {name: [learnt(name, curve), *chance.get(name, [])] for name, curve in curves.items()}


def gates_table(gates: Gates) -> str:
    """Gates of some trainings as a Markdown table, each once; of many only those that failed."""
    once = {gate["name"]: gate for row in gates.values() for gate in row}.values()
    missed = [gate for gate in once if not gate["passed"]]
    rows = []
    for gate in once if len(once) <= 8 else missed:
        bar, passed = f"{gate['side']} {gate['bar']:.3f}", "yes" if gate["passed"] else "**no**"
        rows.append({"gate": gate["name"], "value": gate["value"], "bar": bar, "passed": passed})
    summary = f"Gates: {len(once) - len(missed)} of {len(once)} passed."
    return summary + f"\n\n{markdown_table(rows)}" * bool(rows)


class Answer:
    """The place below a notebook's question where its last cell writes the answer; above it the recipe, with
    this notebook's box in colour."""

    def __init__(self, study: Run):
        display(SVG(recipe(study.notebook)))
        self._place = display(Markdown("*Not answered yet: run the cells below.*"), display_id=True)

    def write(self, text: str) -> None:
        """Shows the answer, in Markdown."""
        self._place.update(Markdown(text))


def close(
    study: Run,
    answer: Answer,
    text: str,
    *,
    gates: Gates | None = None,
    tasks: Sequence[Task] = (),
    scores: Mapping[str, Scores] | None = None,
    **metrics: Any,
) -> None:
    """The last cell of a notebook: writes its answer, shows the gates of its trainings, and saves what
    notebook 12 computes the claims from.

    Args:
        text: the answer, a sentence or two; gates: of each training, if there is one.
        tasks, scores: as for `evidence.save_scores`.
        metrics: what else results/<run>/<notebook>.json holds.
    """
    if scores:
        save_scores(study, tasks, scores)
    study.save(metrics | {"answer": text, "gates": gates or {}})
    answer.write(f"**Answer, run `{study.name}`.** {text}")
    if gates:
        display(Markdown(gates_table(gates)))


def claims_table(claims: Sequence[Mapping[str, Any]], *, notebooks: str = ".") -> str:
    """Claims as Markdown tables, the papers' own and controls, each with a link to the notebook that measures
    it.

    Args:
        claims: see `evidence.claims`; notebooks: folder of the executed notebooks, as seen from the table.
    """
    rows: dict[str, list[dict[str, str]]] = {heading: [] for heading in GROUPS.values()}
    for one in claims:
        why = f" ({one['why']})" if one["why"] else ""
        paper = f"{one['paper']}; {one['source']}".removeprefix("none; ")
        row = {"claim": one["claim"], "paper": paper, "ours": one["effect"]}
        row["seeds"] = "; ".join(f"{100 * value:+z.1f}" for value in one["seeds"].values()) or "–"
        row["verdict"] = f"**{MARKS.get(one['verdict'], '')}{one['verdict']}**{why}"
        rows[GROUPS[one["group"]]].append(row | {"notebook": link(notebooks, one["notebook"])})
    return "\n\n".join(f"**{heading}**\n\n{markdown_table(some)}" for heading, some in rows.items() if some)


def machine(processor: Mapping[str, Any]) -> str:
    """Words for what a notebook ran on, as its record in provenance.json has it."""
    bf16 = "with bf16" if processor["bf16"] else "without bf16"
    return ", ".join([f"{processor['cores']} cores of {processor['cpu']}", bf16, *processor["gpus"]])


def link(notebooks: str, stage: str, text: str = "") -> str:
    """Markdown link to an executed notebook, named by its number; a dash where there is none."""
    return f"[{text or stage.partition('_')[0]}]({notebooks}/{stage}.ipynb)" if stage else "–"
