"""What notebooks show: the paper's tables and ours, gates and claims."""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pandas as pd
import yaml
from IPython.display import SVG, Markdown, display
from scipy import stats

from unmask.evaluation.tasks import Task
from unmask.store import artifacts_root, read_json, write_json
from unmask_study.evidence import Gate, Scores, above_chance, gathered, keep, learnt, runs
from unmask_study.recipe import recipe
from unmask_study.run import Run

MARKS = {"holds": "✔ ", "does not hold": "✘ ", "open": "– "}
# Where the rows of the tables of stages and of systems come from: name → notebook, and keys in what it saved.
_TOLD = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf8"))
STAGES, SYSTEMS = _TOLD["stages"], _TOLD["systems"]
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
    columns = list(dict.fromkeys(key for row in rows for key in row))

    def line(cells: Iterable[Any]) -> str:
        numbers = (f"{cell:,}" if type(cell) is int else cell for cell in cells)
        shown = (f"{cell:.{digits}f}" if isinstance(cell, float) else str(cell) for cell in numbers)
        return "| " + " | ".join(cell.replace("|", r"\|").replace("\n", " ") for cell in shown) + " |"

    cells = ([row.get(key) for key in columns] for row in rows)
    body = [line("not run" if cell is None else cell for cell in row) for row in cells]
    return "\n".join([line(columns), "|" + "---|" * len(columns), *body]) if rows else "not run"


def added_up(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What a training read (`unmask.training.loop.data_report`), the languages of a data set added up.

    The first column names the data set or source, "name/language"; of "epochs" the largest counts.
    """
    table = pd.DataFrame(rows).fillna(0).convert_dtypes()
    label = table.columns[0]
    table[label] = table[label].str.partition("/")[0]
    how = {name: "max" if name == "epochs" else "sum" for name in table.select_dtypes("number")}
    return table.groupby(label, sort=False, as_index=False).agg(how).to_dict("records")


def by_dataset(curve: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The logged steps of a training by data set, all languages of one together."""
    names = [row["dataset"].partition("/")[0] for row in curve]
    return {one: [row for name, row in zip(names, curve) if name == one] for one in sorted(set(names))}


def quoted(text: str, width: int = 90) -> str:
    """The beginning of a text in one line, as code, for a cell of a table."""
    line = " ".join(text.replace("`", "'").split())
    return f"`{line if len(line) <= width else line[: width - 1] + '…'}`"


def measured(
    rows: Mapping[str, Sequence[str]], metrics: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, float]]:
    """The rows that a run measured, without those that it did not.

    Args:
        rows: name → where to find it, such as STAGES and SYSTEMS; metrics: notebook → what it saved.
    """
    found = {name: reduce(lambda at, key: at.get(key, {}), path, metrics) for name, path in rows.items()}
    return {name: dict(row) for name, row in found.items() if row}


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation over seeds (n − 1 in the denominator), "0.247 ± 0.003"; the mean alone where
    nothing varies."""
    deviation = stdev(values) if len(values) > 1 else 0.0
    return f"{mean(values):.3f}" + (f" ± {deviation:.3f}" if deviation >= 0.0005 else "")


# Gates, claims and the notebook's answer


def checked(
    curves: Mapping[str, Sequence[Mapping[str, Any]]],
    scores: Mapping[str, Scores],
    tasks: Sequence[Task],
    base_rates: Mapping[str, float] | None = None,
) -> dict[str, list[Gate]]:
    """The gates of trainings: did the loss fall, and is the model better than chance?

    Args:
        curves: training → its logged steps.
        scores: training → task → a metric per query; without one, only the loss is looked at.
        tasks: that were asked.
        base_rates: training → nats of a guess, see `learnt`. Default: as the steps logged it.
    """
    gates = {}
    for name, curve in curves.items():
        gates[name] = learnt(name, curve, (base_rates or {}).get(name))
        gates[name] += [above_chance(name, scores[name], tasks)] if name in scores else []
    return gates


def gates_table(gates: Mapping[str, Sequence[Gate]]) -> str:
    """Gates of some trainings as a Markdown table, each once; of many only those that failed."""
    once = {gate["name"]: gate for row in gates.values() for gate in row}.values()
    missed, rows = [gate for gate in once if not gate["passed"]], []
    for gate in once if len(once) <= 8 else missed:
        passed, bar = "yes" if gate["passed"] else "**no**", f"{gate['side']} {gate['bar']:.3f}"
        rows.append({"gate": gate["name"], "value": gate["value"], "bar": bar, "passed": passed})
    told = f"Gates: {len(once) - len(missed)} of {len(once)} passed."
    return told + f"\n\n{markdown_table(rows)}" * bool(rows)


class Answer:
    """The place below a notebook's question where its last cell writes the answer; above it the recipe, with
    this notebook's box in colour."""

    def __init__(self, study: Run):
        display(SVG(recipe(study.notebook)))
        waiting = Markdown("*Not answered yet: run the cells below.*")
        self._place = display(waiting, display_id=True)

    def write(self, text: str) -> None:
        """Shows the answer, in Markdown."""
        self._place.update(Markdown(text))


def close(
    study: Run,
    answer: Answer,
    text: str,
    *,
    gates: Mapping[str, Sequence[Gate]] | None = None,
    tasks: Sequence[Task] = (),
    scores: Mapping[str, Scores] | None = None,
    **metrics: Any,
) -> None:
    """The last cell of a notebook: writes its answer, shows the gates of its trainings, and keeps what
    notebook 12 computes the claims from.

    Args:
        text: the answer, a sentence or two; gates: of each training, if there is one.
        tasks, scores: what `evidence.keep` keeps.
        metrics: what else results/<run>/<notebook>.json holds.
    """
    if scores:
        keep(study, tasks, scores)
    study.save(metrics | {"answer": text, "gates": gates or {}})
    answer.write(f"**Answer, run `{study.name}`.** {text}")
    if gates:
        display(Markdown(gates_table(gates)))


def claims_table(claims: Sequence[Mapping[str, Any]], *, notebooks: str = ".") -> str:
    """Claims as a Markdown table, each with a link to the notebook that measures it.

    Args:
        claims: see `evidence.claims`; notebooks: folder of the executed notebooks, as seen from the table.
    """
    rows = []
    for claim in claims:
        mark, why = MARKS.get(claim["verdict"], ""), f" ({claim['why']})" if claim["why"] else ""
        rows.append(
            {
                "claim": claim["claim"],
                "paper": f"{claim['paper']}; {claim['source']}",
                "ours": claim["effect"],
                "seeds": "; ".join(f"{100 * value:+.1f}" for value in claim["seeds"].values()) or "–",
                "verdict": f"**{mark}{claim['verdict']}**{why}",
                "notebook": link(notebooks, claim["notebook"]),
            }
        )
    return markdown_table(rows)


def told(claims: Sequence[Mapping[str, Any]]) -> str:
    """What held, what did not, and what is open: the claims by verdict, each with its effect, in Markdown."""
    heads = {
        "holds": "What held",
        "does not hold": "What did not hold",
        "open": "What is open",
        "two runs": "Two runs, so no verdict",
        "one run": "One run, so no verdict",
        "invalid": "Invalid: a training failed its gate, or has none",
    }
    text = ""
    for verdict, head in heads.items():
        rows = [f"- {one['claim']} {one['effect']} points" for one in claims if one["verdict"] == verdict]
        text += f"**{head}**\n\n" + "\n".join(rows) + "\n\n" if rows else ""
    rest = [one for one in claims if one["verdict"] in ("not asked", "not run")]
    return text + (f"Not asked, or not run: {len(rest)} of {len(claims)} claims." if rest else "")


def beside_seeds(study: Run, tables: Mapping[int, Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """Whether this run's qualities are what one more seed would give, by the seeds of its preset that are
    committed in results/seeds. A preset's own run with three seeds or more, all made here, is kept there.

        one more seed's value lies with 95 % within mean ± t · s · √(1 + 1/n), n − 1 degrees of freedom

    Args:
        tables: seed → model → family → nDCG@10.
    Returns: "text" that says so, and "rows" with each number.
    """
    path = study.results.parent / "seeds" / f"{study.config.name}.json"
    provenance, every = study.load("provenance"), runs(study).values()
    made_with = {"corpus_hash": study.load("00_backbone").get("corpus_hash")}
    made_with |= {key: provenance.get(key) for key in ("commit", "versions")}
    changed = sorted(key for key in provenance.get("overrides") or {} if not key.startswith("parallel."))
    here = all((artifacts_root() / run.name).is_dir() for run in every)
    if len(tables) >= 3 and study.name == study.config.name and here and not changed:
        write_json(path, {"seeds": list(tables)} | made_with | {"values": gathered(tables.values())})
        return {"text": "Other runs are compared with the seeds of this one.", "rows": []}
    kept = read_json(path)
    if not kept:
        return {"text": f"Not asked: results/seeds keeps no numbers of {study.config.name}.", "rows": []}
    ours, rows = tables[study.config.pair.seed], []
    for name, family, values in ((n, f, v) for n, row in kept["values"].items() for f, v in row.items()):
        value = ours.get(name, {}).get(family)
        if len(values) < 3 or not stdev(values) or value in (None, *values):  # or this run itself
            continue
        half = float(stats.t.ppf(0.975, len(values) - 1)) * stdev(values) * (1 + 1 / len(values)) ** 0.5
        row = {"model": name, "family": family, "ours": value, "mean of seeds": mean(values)}
        inside = abs(value - mean(values)) <= half + 1e-6
        rows.append(row | {"from": mean(values) - half, "to": mean(values) + half, "inside": inside})
    count = sum(row["inside"] for row in rows)
    verdict = "Reproduced" if count >= 0.9 * len(rows) else "Not reproduced"  # see results/PROTOCOL.md
    differs = [key for key in made_with if made_with[key] != kept[key]] + changed
    text = (
        f"**{verdict}**: {count} of {len(rows)} qualities lie where one more seed of the committed run "
        f"would; nine in ten must. What differs: {', '.join(differs) or 'nothing'}."
    )
    return {"text": text if rows else "Nothing to compare: this is the committed run itself.", "rows": rows}


def link(notebooks: str, stage: str, text: str = "") -> str:
    """Markdown link to an executed notebook, named by its number; a dash where there is none."""
    return f"[{text or stage.partition('_')[0]}]({notebooks}/{stage}.ipynb)" if stage else "–"
