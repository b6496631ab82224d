"""Claims with their evidence, and the report that lays them beside the paper's figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unmask.config import Preset

VERDICTS = ("reproduced", "not at this scale", "contradicted", "not run")
# Questions of the report, with the figures that answer them.
STUDIES = {
    "Does context reach the chunk?": ("12_report-table03", "08_conteb-corpus-size"),
    "What does a megabyte buy?": ("12_report-table01", "06_quantization-pareto"),
    "Are bits cheaper for wider models or for larger ones?": ("06_quantization-sizes",),
    "Does retrieval hold in larger corpora?": ("12_report-table06",),
    "Is the diffusion backbone worth it?": ("07_diffusion_vs_ar-loss", "12_report-table09"),
}


def judge(interval: tuple[float, float], *, above: float | None = None, below: float | None = None) -> str:
    """The verdict on "the true value lies above (below) a bar", given its 95 % interval.

    "reproduced" if the whole interval lies on the claimed side, "contradicted" if the whole of it lies on
    the other one,
    "not at this scale" if the bar is inside.
    """
    if (above is None) == (below is None):
        raise ValueError("say either above= or below=")
    low, high = interval if below is None else (-interval[1], -interval[0])
    bar = above if below is None else -below
    return "reproduced" if low > bar else "contradicted" if high < bar else "not at this scale"


def claim(
    text: str, *, source: str, paper: str, ours: str, interval: tuple[float, float] | None,
    seeds: Sequence[int], verdict: str, notebook: str,
) -> dict[str, Any]:  # fmt: skip
    """One line of claims.json.

    Args:
        text: the claim in one sentence; source: where the paper makes it; paper, ours: the figures, as text.
        interval: 95 % interval of our effect; None where it is an exact fact or was not run.
        verdict: one of VERDICTS.
    Raises: ValueError for another verdict.
    """
    if verdict not in VERDICTS:
        raise ValueError(f"unknown verdict {verdict!r}: choose one of {', '.join(VERDICTS)}")
    return {
        "claim": text,
        "source": source,
        "paper": paper,
        "ours": ours,
        "interval": list(interval) if interval else None,
        "seeds": list(seeds),
        "verdict": verdict,
        "notebook": notebook,
    }


def not_run(text: str, *, source: str, paper: str, why: str) -> dict[str, Any]:
    """A claim that nothing here tests, and why."""
    return claim(
        text,
        source=source,
        paper=paper,
        ours=f"not run ({why})",
        interval=None,
        seeds=[],
        verdict="not run",
        notebook="",
    )


def points(effect: Sequence[float]) -> str:
    """A difference of nDCG with its interval, in points: "+12.3 [+10.1, +14.6] points"."""
    difference, low, high = (100 * value for value in effect)
    return f"{difference:+.1f} [{low:+.1f}, {high:+.1f}] points"


def percent(table: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """A table of shares, such as nDCG, in the paper's unit: hundredths."""
    return {name: {key: 100 * value for key, value in row.items()} for name, row in table.items()}


def markdown_table(rows: Sequence[Mapping[str, Any]], *, digits: int = 3) -> str:
    """Rows of equal keys as a Markdown table; numbers are rounded, a missing value is written "not run"."""
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
    """What a training read (`unmask.training.jobs.data_report`), the languages of a data set added up.

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


def render(
    preset: Preset,
    run: str,
    metrics: Mapping[str, Mapping[str, Any]],
    stages: Mapping[str, Mapping[str, float]],
    systems: Sequence[Mapping[str, Any]],
    claims: Sequence[Mapping[str, Any]],
) -> str:
    """The report as Markdown: the headline figure and the claims first, then each study with its table.

    Args:
        metrics: notebook → what it saved; stages: model → nDCG@10 by family of tasks; systems: a row for each
            system trained on the same data; claims: see `claim`.
    """
    backbone = metrics["00_backbone"]
    verdicts = ", ".join(f"{sum(c['verdict'] == v for c in claims)} {v}" for v in VERDICTS)
    seconds = [
        {"notebook": notebook, "training (s)": round(values["train_seconds"])}
        for notebook, values in metrics.items()
        if values.get("train_seconds")
    ]
    quality = metrics["06_quantization"]["quality"]
    whole = [row for row in quality if row["dimensions"] == max(row["dimensions"] for row in quality)]
    sections = [
        f"# Unmask report: preset `{preset.name}`",
        f"{preset.about}. Backbone: {backbone['checkpoint']}, {backbone['parameters'] / 1e6:.2f} M "
        f"parameters. Of {len(claims)} claims: {verdicts}. One training seed; intervals are 95 %, paired "
        "bootstrap over queries. Scores of a model this small say whether an effect is there, not how large "
        "it is for the models of the paper. Commit, versions, hardware, seeds and wall times: "
        f"`provenance.json`; the origin of every number: `papermill_runs/{run}/`.",
        _figure("12_report-stages", "What each stage adds, by family of tasks"),
        "## Claims",
        claims_table(claims),
        "## Stages: nDCG@10 by family of held-out tasks, INT8",
        markdown_table([{"model": name} | row for name, row in stages.items()]),
        "## Five systems on the same data",
        "The neighbours' methods with our data and backbone (notebook 12). nDCG@10 in hundredths; bytes of a "
        "stored document; encoding on this machine; seconds of all trainings that a system descends from.",
        _figure("12_report-systems", "Five systems on the same held-out tasks"),
        markdown_table(systems, digits=1),
        "## Beside the paper",
        "The paper's scores are of its benchmarks, ours of our own tasks: compare directions, not levels. "
        f"All twelve tables: `papermill_runs/{run}/12_report.ipynb`.",
    ]
    for question, names in STUDIES.items():
        drawn = [name for name in names if name.partition("-")[0] in (*metrics, "12_report")]
        sections += [f"### {question}", *(_figure(name, question) for name in drawn)]
    sections += ["## Precisions, all dimensions", markdown_table(whole), "## Cost", markdown_table(seconds)]
    return "\n\n".join(sections) + "\n"


def _figure(name: str, text: str) -> str:
    return f"![{text}](figures/{name}.png)"


def claims_table(claims: Sequence[Mapping[str, Any]]) -> str:
    """Claims as a Markdown table: paper, ours, verdict, notebook."""
    return markdown_table(
        [
            {
                "claim": c["claim"],
                "paper": f"{c['paper']} ({c['source']})",
                "ours": c["ours"],
                "verdict": f"**{c['verdict']}**",
                "notebook": c["notebook"],
            }
            for c in claims
        ]
    )
