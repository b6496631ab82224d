"""What notebooks show, and the page: what stands in it."""

import re
from dataclasses import replace
from types import SimpleNamespace

import nbformat
import numpy as np
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from unmask.evaluation.tasks import Task
from unmask_study import page, report
from unmask_study.evidence import VERDICTS, gate, gathered, load_scores
from unmask_study.report import added_up, markdown_table, measured, spread
from unmask_study.run import Run
from unmask_study.settings import load_preset

CLAIM = {"claim": "It works.", "source": "table 1", "paper": "+3", "effect": "+2.0 [+1.0, +3.0]", "why": ""}
CLAIM |= {"group": "paper", "verdict": "holds", "seeds": {"0": 0.015, "1": 0.025}, "notebook": "02_pair"}
METRICS = {
    "02_pair": {"families": {"BM25": {"english": 0.5, "average": 0.45}, "pair": {"english": 0.2}}},
    "05_merge": {"families": {"merged": {"english": 0.3, "average": 0.35}}},
    "08a_insent": {"insent": {"families": {"english": 0.4, "average": 0.41}, "train_seconds": 3}},
}


def rows(markdown, label):
    """Cells of all table rows whose first cell holds the label."""
    table = [line.strip("| ").split(" | ") for line in markdown.splitlines() if line.startswith("| ")]
    return [cells for cells in table if label in cells[0]]


# Tables


def test_a_table_rounds_escapes_and_names_what_is_missing():
    cells = [{"model": "a|b", "ndcg": 0.12345}, {"model": "c\nd", "n": 3}, {"ndcg": np.float64(1)}]
    lines = ["| model | ndcg | n |", "|---|---|---|", r"| a\|b | 0.123 | not run |", "| c d | not run | 3 |"]
    assert markdown_table(cells).splitlines() == [*lines, "| not run | 1.000 | not run |"]
    assert "| 0.1 |" in markdown_table([{"x": 0.12345}], digits=1)
    assert markdown_table([]) == "not run"


def test_what_was_read_is_added_up_by_data_set():
    german = {"source": "text/deu", "share": 10.0, "blocks": 2, "epochs": 1.5, "held out": 3}
    french = {"source": "text/fra", "share": 20.0, "blocks": 4, "epochs": 1.0, "dropped": 1}
    web = {"source": "web", "share": 70.0, "blocks": 14, "epochs": 1.0}
    both = {"source": "text", "share": 30.0, "blocks": 6, "epochs": 1.5, "held out": 3, "dropped": 1}
    rows = [row | {"language": "deu"} for row in (german, french, web)]
    assert added_up(rows) == [both, web | {"held out": 0, "dropped": 0}]


def test_seeds_become_a_mean_and_a_deviation_of_what_was_measured():
    systems = measured(report.SYSTEMS, METRICS)
    assert list(systems) == ["pplx-style", "InSeNT", "BM25"]
    assert systems["InSeNT"] == {"english": 0.4, "average": 0.41}
    several = gathered([{"a": {"x": 0.1}, "b": {"x": 1.0}}, {"a": {"x": 0.2}}, {"a": {"x": 0.3, "y": 0.5}}])
    assert several == {"a": {"x": [0.1, 0.2, 0.3], "y": [0.5]}, "b": {"x": [1.0]}}
    lists = (several["a"]["x"], several["a"]["y"], [0.5, 0.5, 0.5])
    assert [*map(spread, lists)] == ["0.200 ± 0.100", "0.500", "0.500"]  # n − 1 in the denominator


# Gates and claims


def test_trainings_are_checked_and_the_gates_shown():
    task = Task("t", "english", ["q"] * 50, [[str(i)] for i in range(50)], [{i} for i in range(50)])
    falling = [{"loss": 5 - 0.1 * step} for step in range(30)]
    gates = report.checked({"a": falling, "b": falling[::-1]}, {"a": {"t": np.ones(50)}}, [task])
    table = report.gates_table(gates)
    assert table.startswith("Gates: 2 of 3 passed.") and all(one["passed"] for one in gates["a"])
    assert rows(table, "b: loss at the end, below its start")[0][1:] == ["4.900", "<= 2.200", "**no**"]
    assert table == report.gates_table(gates | {"again": gates["a"]})  # each once


UNTESTED = {"claim": "It scales.", "effect": "–", "verdict": "not run", "why": "no", "seeds": {}}
EVERY = [CLAIM, CLAIM | {"claim": "It is fit.", "verdict": "invalid", "why": "slope"}, CLAIM | UNTESTED]
EVERY.append(CLAIM | {"claim": "It is needed.", "group": "control"})


def test_the_table_of_claims_has_paper_ours_seeds_and_verdict():
    table = report.claims_table(EVERY, notebooks="there")
    assert table.startswith("**The papers' own**\n\n| claim | paper | ours | seeds | verdict | notebook |\n")
    assert rows(table.partition("**Our controls**")[2], "It is needed.") and table.count("It is needed.") == 1
    works = ["+3; table 1", "+2.0 [+1.0, +3.0]", "+1.5; +2.5", "**✔ holds**", "[02](there/02_pair.ipynb)"]
    assert rows(table, "It works.")[0][1:] == works
    assert rows(table, "It is fit.")[0][4] == "**invalid** (slope)"
    assert rows(table, "It scales.")[0][2:5] == ["–", "–", "**not run** (no)"]
    assert report.MARKS.keys() < set(VERDICTS)


def test_a_machine_is_told_by_its_processor_and_gpus():
    about = {"cpu": "AMD EPYC", "bf16": True, "cores": 2, "gpus": []}
    assert report.machine(about) == "2 cores of AMD EPYC, with bf16"
    about |= {"bf16": False, "gpus": ["NVIDIA H200"]}
    assert report.machine(about) == "2 cores of AMD EPYC, without bf16, NVIDIA H200"


def test_a_notebook_closes_with_its_answer_gates_and_scores(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("unmask_study.run.repository", lambda: tmp_path)
    study = Run("02_pair", "smoke", load_preset("smoke"))
    task = Task("t", "english", ["q"] * 3, [["a"], ["b"]], [{0}, {1}, {0}])
    learns = gate("learns", 1.0, ">=", 0.5)
    scores = {"pair, late chunking": {"t": np.array([0.5, 1.0, 0.25])}}
    shown = []

    def display(one, **how):
        shown.append(one.data)
        return SimpleNamespace(update=display)

    monkeypatch.setattr(report, "display", display)
    answer = report.Answer(study)
    report.close(study, answer, "Yes.", gates={"pair": [learns]}, tasks=[task], scores=scores, test={"a": 1})
    assert study.load("02_pair") == {"test": {"a": 1}, "answer": "Yes.", "gates": {"pair": [learns]}}
    assert "<svg" in shown[0] and "#n02" in shown[0] and shown[2] == "**Answer, run `smoke`.** Yes."
    rows = [["t", "english", 0, 0.5], ["t", "english", 1, 1.0], ["t", "english", 0, 0.25]]
    columns = ["task", "family", "documents", "pair, late chunking"]
    assert load_scores(study)[columns].values.tolist() == rows
    assert len(load_scores(replace(study, notebook="03_contextual"))) == 0


# The page


def test_the_report_is_the_executed_page_without_code_and_follows_the_readers_theme(tmp_path):
    def shown(data, **metadata):
        return new_output("display_data", data=data, metadata=metadata)

    table = shown({"text/markdown": "# Report: a & b\n\n| claim |\n|---|\n| **not run** |"})
    figure = shown({"image/png": "aGk="}, picture=["figures/a.png", 'A "curve"'])
    printed = new_output("stream", text="checkpoints: /secret")
    aside = new_markdown_cell("How it is made", metadata={"tags": ["aside"]})
    told = new_code_cell("secret = 1", outputs=[printed, table, figure])
    cells = [aside, told, new_markdown_cell("## Seeds")]
    nbformat.write(new_notebook(cells=cells), tmp_path / "12_report.ipynb")
    markdown, html = (path.read_text() for path in page.publish(tmp_path / "12_report.ipynb", tmp_path))
    assert markdown.startswith("# Report: a & b\n") and "## Seeds" in markdown
    assert "<details><summary>Seeds</summary>" in html  # folded
    assert not re.search("secret|How it is made", markdown + html)
    assert '<img alt="A &quot;curve&quot;" src="figures/a.png">' in markdown
    assert "<script" not in html and html.count("<table") == 1 and 'name="viewport"' in html
    assert 'src="figures/a.png"' in html and html.endswith("</body>\n</html>\n")
    assert "prefers-color-scheme: dark" in html and "<title>Report: a &amp; b</title>" in html
