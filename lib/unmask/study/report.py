"""The report of a run: a page to be read in two minutes, then the details; as Markdown and as HTML."""

from __future__ import annotations

import math
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import reduce
from html import escape
from importlib.resources import files
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from unmask.store import repository
from unmask.study.evidence import VERDICTS, Effect, in_unit, points
from unmask.study.figures import picture
from unmask.study.gates import failed
from unmask.study.pipeline import clock

if TYPE_CHECKING:
    from unmask.config import Preset

NBSP = "\N{NO-BREAK SPACE}"
Metrics = Mapping[str, Mapping[str, Any]]  # notebook → what it saved

MARKS = {
    "reproduced": f"✔{NBSP}reproduced",
    "not at this scale": f"–{NBSP}not at this scale",
    "contradicted": f"✘{NBSP}contradicted",
    "invalid": "invalid",
    "not run": "not run",
}
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
ENOUGH = 0.9  # share of a run's numbers that must be where the committed seeds say, see results/PROTOCOL.md
# Questions of the details, with the figures that answer them.
STUDIES = {
    "Does context reach the chunk?": ("12_report-table03", "08_conteb-corpus-size"),
    "What does a megabyte buy?": ("12_report-table01",),
    "Are bits cheaper for wider models or for larger ones?": ("06_quantization-sizes",),
    "Does retrieval hold in larger corpora?": ("12_report-table06",),
    "Is the diffusion backbone worth it?": ("07_diffusion_vs_ar-loss", "12_report-table09"),
}


def percent(table: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """A table of shares, such as nDCG, in the paper's unit: hundredths."""
    return {name: {key: 100 * value for key, value in row.items()} for name, row in table.items()}


def markdown_table(rows: Sequence[Mapping[str, Any]], *, digits: int = 3) -> str:
    """Rows of equal keys as a Markdown table; numbers are rounded, what is missing is written "not run"."""
    if not rows:
        return "not run"
    columns = list(dict.fromkeys(key for row in rows for key in row))

    def cell(value: Any) -> str:
        if value is None:
            return "not run"
        if isinstance(value, float):
            return f"{value:.{digits}f}"
        return str(value).replace("|", r"\|").replace("\n", " ")

    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(row.get(column)) for column in columns) + " |" for row in rows]
    return "\n".join(lines)


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


def measured(rows: Mapping[str, Sequence[str]], metrics: Metrics) -> dict[str, dict[str, float]]:
    """The rows that a run measured, without those that it did not.

    Args:
        rows: name → where to find it, such as STAGES and SYSTEMS; metrics: notebook → what it saved.
    """
    found = {name: reduce(lambda at, key: at.get(key, {}), path, metrics) for name, path in rows.items()}
    return {name: dict(row) for name, row in found.items() if row}


def gathered(tables: Iterable[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, list[float]]]:
    """Tables of several seeds as one: row → column → the value of each seed that has one."""
    values: dict[str, dict[str, list[float]]] = {}
    for table in tables:
        for name, row in table.items():
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


def link(notebooks: str, stage: str, text: str = "") -> str:
    """Markdown link to an executed notebook, named by its number; a dash where there is none."""
    return f"[{text or stage.partition('_')[0]}]({notebooks}/{stage}.ipynb)" if stage else "–"


def executed(run: str) -> str:
    """Folder of a run's executed notebooks, as seen from its report.

    Where git keeps the report but not these, because they quote data that are not ours to hand on, it is the
    folder of the notebooks that were executed: a link must lead somewhere in a clone, too.
    """
    folders = (f"{folder}/{run}" for folder in ("papermill_runs", "results"))
    quoted, private = (_ignored(f"{folder}/12_report") for folder in folders)
    return "../../notebooks" if quoted and not private else f"../../papermill_runs/{run}"


def claims_table(claims: Sequence[Mapping[str, Any]], *, notebooks: str = ".", short: bool = False) -> str:
    """Claims as a Markdown table, each with a link to the notebook that tests it.

    Args:
        claims: see `evidence.claim`; notebooks: folder of the executed notebooks, as seen from the table.
        short: of our result, only the effect.
    """
    return markdown_table(
        [
            {
                "claim": claim["claim"],
                "paper": f"{claim['paper']} ({claim['source']})",
                "ours": _unbroken((short and claim["effect"]) or claim["ours"]),
                "verdict": _verdict(claim),
                "seeds": len(claim["seeds"]) or "–",
                "notebook": link(notebooks, claim["notebook"]),
            }
            for claim in claims
        ]
    )


def _verdict(claim: Mapping[str, Any]) -> str:
    """The mark of a claim's verdict, and of an invalid one the gates that failed."""
    why = failed(claim.get("gates", ()))
    return f"**{MARKS[claim['verdict']]}**" + (f" ({why})" if why else "")


def page(markdown: str, title: str) -> str:
    """A Markdown text as an HTML page: light or dark as the reader's system is, for any width, no scripts."""
    from nbconvert.filters import markdown2html

    style = files("unmask").joinpath("report.css").read_text(encoding="utf8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f"{markdown2html(markdown)}</body>\n</html>\n"
    )


@dataclass(frozen=True)
class Report:
    """What a run found: one page for a reader in a hurry, then the details.

    Args:
        preset: the run's preset; notebooks: folder of its executed notebooks, as seen from the report.
        by_seed: seed → what the notebooks saved, of this run first and then of those that repeat it;
            left_out: run that should repeat it and does not → why.
        claims: see `evidence.pooled`.
        against_bm25: family of tasks → how far the merged model is from BM25.
        costs: for each of SYSTEMS that ran, bytes of a document, encoding speed and seconds of training.
        provenance: see `pipeline.provenance`; empty where the pipeline did not run the notebooks.
        committed: see `evidence.against_committed`; None where there is nothing to compare with.
    """

    preset: Preset
    notebooks: str
    by_seed: Mapping[int, Metrics]
    left_out: Mapping[str, str]
    claims: Sequence[Mapping[str, Any]]
    against_bm25: Mapping[str, Effect]
    costs: Mapping[str, Mapping[str, Any]]
    provenance: Mapping[str, Any]
    committed: Mapping[str, Any] | None

    @property
    def metrics(self) -> Metrics:
        """Of this run."""
        return next(iter(self.by_seed.values()))

    @property
    def title(self) -> str:
        return f"Unmask report: preset {self.preset.name}"

    def html(self) -> str:
        return page(self.markdown(), self.title)

    def markdown(self) -> str:
        return "\n\n".join([*self._front_page(), "# Details", *self._details()]) + "\n"

    def _front_page(self) -> list[str]:
        return [
            f"# {self.title}",
            *self._summary(),
            self._figure("12_report-stages", "What each stage adds, by family of held-out tasks"),
            "## The claims in short",
            claims_table(self._headline, notebooks=self.notebooks, short=True),
            "✔: the whole 95 % interval lies on the claimed side of a bar that was set beforehand; ✘: all of "
            "it on the other side; –: the bar lies inside ([protocol](../PROTOCOL.md)). Invalid: a training "
            "that the claim rests on failed a check of its own, which is named.",
            "## Quality, stage by stage",
            f"nDCG@10 by family of held-out tasks, INT8{self._over_seeds}. BM25 and all-MiniLM-L6-v2, a "
            "small pretrained embedder of English, are references from outside.",
            self._quality("model", STAGES),
            *self._against_bm25(),
            "## What a megabyte buys",
            self._figure("06_quantization-pareto", "nDCG@10 against documents per megabyte"),
            "## What context adds",
            self._figure("08_conteb-context", "nDCG@10 where chunks need their document"),
            "## Cost",
            *self._cost(),
        ]

    def _details(self) -> list[str]:
        own = link(self.notebooks, "12_report")
        return [
            "## Every claim",
            *self._every_claim(),
            "## Seeds",
            *self._seeds(),
            "## The neighbours on the same data",
            f"Other papers' methods with our data and our backbone's shape (notebook {own}): nDCG@10 by "
            f"family of held-out tasks{self._over_seeds}, and cost.",
            self._figure("12_report-systems", "The neighbours' methods on the same held-out tasks"),
            self._quality("system", SYSTEMS),
            markdown_table([{"system": name} | dict(row) for name, row in self.costs.items()]),
            "## Precisions",
            f"All dimensions (notebook {self._link('06_quantization', '06')}).",
            markdown_table(self._precisions()),
            "## Beside the paper",
            "The paper's scores are of its benchmarks, ours of our own tasks: compare directions, not "
            f"levels. All twelve tables are in notebook {own}.",
            *self._studies(),
        ]

    @property
    def _headline(self) -> list[Mapping[str, Any]]:
        return [claim for claim in self.claims if claim["headline"]]

    @property
    def _over_seeds(self) -> str:
        return f", mean ± standard deviation over {len(self.by_seed)} seeds" if len(self.by_seed) > 1 else ""

    def _gathered(self, rows: Mapping[str, Sequence[str]]) -> dict[str, dict[str, list[float]]]:
        return gathered(measured(rows, metrics) for metrics in self.by_seed.values())

    def _figure(self, name: str, text: str) -> str:
        ran = name.partition("-")[0] in (*self.metrics, "12_report")
        return picture(f"figures/{name}.png", text) if ran else f"{text}: not run"

    def _link(self, stage: str, text: str) -> str:
        """The text, as a link to the executed notebook if it ran."""
        return link(self.notebooks, stage, text) if stage in self.metrics else text

    def _quality(self, label: str, rows: Mapping[str, Sequence[str]]) -> str:
        table = self._gathered(rows)
        return markdown_table(
            [
                {label: self._link(path[0], name)}
                | {family: spread(values) for family, values in table.get(name, {}).items()}
                for name, path in rows.items()
            ]
        )

    def _summary(self) -> list[str]:
        of, every = (Counter(c["verdict"] for c in claims) for claims in (self._headline, self.claims))
        backbone, table = self.metrics["00_backbone"], self._gathered(STAGES)
        scratch = backbone["checkpoint"] == "from scratch"
        origin = "trained from scratch" if scratch else f"built on {backbone['checkpoint']}"
        seeds = f"{len(self.by_seed)} seeds" if len(self.by_seed) > 1 else "one seed"
        outside = [name for name in ("BM25", "all-MiniLM-L6-v2") if name in table]
        furthest = [name for name in table if name not in outside][-1:]  # the stage that the run came to
        quality = [f"{name} {spread(table[name]['average'])}" for name in (*furthest, *outside)]
        read = self.preset.data.families
        invalid = f" **{of['invalid']} invalid: a training failed its own check.**" if of["invalid"] else ""
        left_out = f" Read are the families {', '.join(read)}; the others are left out." if read else ""
        return [
            f"**An embedder of {backbone['parameters'] / 1e6:.1f} M parameters, {origin} with {seeds}, "
            f"reproduces {of['reproduced']} of {len(self._headline)} headline claims, contradicts "
            f"{of['contradicted']}, and leaves {of['not at this scale']} open at this scale.**"
            f"{invalid}",
            f"Preset `{self.preset.name}`: {self.preset.about}.{left_out} Average nDCG@10 over held-out "
            f"tasks: {', '.join(quality) or 'not run'}. All {len(self.claims)} claims, the neighbours' "
            f"papers included: {', '.join(f'{every[verdict]} {verdict}' for verdict in VERDICTS)} "
            "([claims.json](claims.json)). Our tasks are not the paper's benchmarks, nor our models its own: "
            "what compares is whether an effect is there, not how large it is."
            + (" Commit, versions and seeds: [provenance.json](provenance.json)." if self.provenance else ""),
        ]

    def _against_bm25(self) -> list[str]:
        if not self.against_bm25:
            return []
        seeds = f"over queries and {len(self.by_seed)} seeds" if len(self.by_seed) > 1 else "over queries"
        return [
            "The merged model's distance from BM25 in plain retrieval, in points of nDCG@10 with the 95 % "
            f"interval {seeds} (notebook {link(self.notebooks, '05_merge')}):",
            markdown_table([{family: points(effect) for family, effect in self.against_bm25.items()}]),
        ]

    def _cost(self) -> list[str]:
        record = self.provenance.get("stages", {})
        ran = {name: record[name] for name in self.metrics if name in record}
        if not ran:
            return ["Not recorded: the notebooks were not run by the pipeline."]
        training = {name: self.metrics[name].get("train_seconds", 0.0) for name in ran}
        rows = [
            {
                "notebook": link(self.notebooks, name, name),
                "training (s)": round(training[name]),
                "whole notebook (s)": round(one["wall_seconds"]),
                "peak memory (GiB)": one["peak_memory_bytes"] / 2**30,
            }
            for name, one in ran.items()
        ]
        together = {
            "notebook": "**together**",
            "training (s)": round(sum(training.values())),
            "whole notebook (s)": round(sum(one["wall_seconds"] for one in ran.values())),
            "peak memory (GiB)": max(row["peak memory (GiB)"] for row in rows),
        }
        host = self.provenance["hardware"]
        machine = f"{host['cores']} cores of {host['cpu']}, {host['memory_gib']} GiB of memory"
        interrupted = any(one["resumed"] for one in ran.values())
        note = "; interrupted notebooks count from their last start" if interrupted else ""
        took = elapsed(ran.values())
        if together["whole notebook (s)"] > took + len(ran):  # started in whole seconds
            note += "; notebooks ran side by side, so their times add up to more"
        return [
            f"Took {clock(took)} on {machine}, GPUs: {', '.join(host['gpus']) or 'none'}{note}.",
            markdown_table([*rows, together], digits=1),
        ]

    def _every_claim(self) -> list[str]:
        sections = [self._figure("12_report-claims", "The headline claims' effects against their bars")]
        notebooks = dict.fromkeys(claim["notebook"] for claim in self.claims)
        for notebook in sorted(notebooks, key=lambda name: not name):  # what was not run comes last
            heading = link(self.notebooks, notebook, notebook) if notebook else "Not run"
            some = [claim for claim in self.claims if claim["notebook"] == notebook]
            sections += [f"### {heading}", claims_table(some, notebooks=self.notebooks)]
        return sections

    def _seeds(self) -> list[str]:
        sections = [f"Not pooled: {name} ({why})." for name, why in self.left_out.items()]
        if len(self.by_seed) > 1:
            rows = [
                {"claim": claim["claim"]}
                | {f"seed {seed}": in_unit(value, claim["unit"]) for seed, value in claim["values"].items()}
                | {"all": claim["effect"]}
                for claim in self._headline
                if claim["values"]
            ]
            sections += ["The headline claims' effects, seed by seed:", markdown_table(rows)]
        else:
            sections += ["One seed: the intervals say how sure we are of this model, not of the recipe."]
        return sections + (self._against_committed(**self.committed) if self.committed else [])

    def _against_committed(
        self, rows: Sequence[Mapping[str, Any]], differs: Mapping[str, tuple[Any, Any]]
    ) -> list[str]:
        inside, kept = sum(row["inside"] for row in rows), f"{self.preset.name}.json"
        changes = [f"{what} {ours} (committed: {theirs})" for what, (ours, theirs) in differs.items()]
        table = [
            {
                "model": row["model"],
                "family": row["family"],
                "this run": row["ours"],
                "committed mean": row["mean"],
                "95 % for one more run": f"{row['low']:.3f} to {row['high']:.3f}",
                "inside": "yes" if row["inside"] else "**no**",
            }
            for row in rows
            if row["family"] == "average" or not row["inside"]
        ]
        return [
            "### Against the committed seeds",
            f"**{'Reproduced' if inside >= ENOUGH * len(rows) else 'Not reproduced'}**: {inside} of "
            f"{len(rows)} numbers in the table of stages lie where one more run is expected with 95 % by the "
            f"{rows[0]['n']} seeds of [{kept}](../seeds/{kept}); nine in ten must. What differs: "
            f"{', '.join(changes) or 'nothing'}. The averages, and what lies outside:",
            markdown_table(table),
        ]

    def _precisions(self) -> list[Mapping[str, Any]]:
        quality = self.metrics.get("06_quantization", {}).get("quality", [])
        full = max((row["dimensions"] for row in quality), default=0)
        return [row for row in quality if row["dimensions"] == full]

    def _studies(self) -> list[str]:
        sections = []
        for question, names in STUDIES.items():
            sections += [f"### {question}", *(self._figure(name, question) for name in names)]
        return sections


def _ignored(path: str) -> bool:
    try:
        return subprocess.run(["git", "-C", repository(), "check-ignore", "-q", path]).returncode == 0
    except FileNotFoundError:  # no git: the copy holds what it holds
        return False


def _unbroken(text: str) -> str:
    """No line ends within an interval, "[+1.0, +3.0]"."""
    return re.sub(r"\[(\S+), (\S+)\]", rf"[\1,{NBSP}\2]", text)
