import json

import matplotlib.pyplot as plt
import numpy as np
import pytest

from unmask import figures
from unmask.config import load_preset
from unmask.report import (
    VERDICTS,
    added_up,
    claim,
    claims_table,
    judge,
    markdown_table,
    not_run,
    percent,
    points,
    render,
)

CLAIM = {
    "source": "table 1",
    "paper": "+3",
    "ours": "+2 [+1, +3]",
    "interval": (0.01, 0.03),
    "seeds": [0],
    "notebook": "02_pair",
}


@pytest.mark.parametrize(
    ("interval", "above", "below"),
    [
        ((0.1, 0.3), "reproduced", "contradicted"),
        ((-0.3, -0.1), "contradicted", "reproduced"),
        ((-0.1, 0.1), "not at this scale", "not at this scale"),
        ((0.0, 0.2), "not at this scale", "not at this scale"),  # the bar itself is not above the bar
    ],
)
def test_the_interval_decides(interval, above, below):
    assert judge(interval, above=0.0) == above
    assert judge(interval, below=0.0) == below
    low, high = interval
    assert judge((low - 0.02, high - 0.02), above=-0.02) == above
    assert judge((low - 0.02, high - 0.02), below=-0.02) == below


def test_a_bar_has_one_side():
    for sides in ({}, {"above": 0.0, "below": 0.0}):
        with pytest.raises(ValueError, match="either above= or below="):
            judge((0.0, 1.0), **sides)


def test_a_claim_has_every_field_and_a_known_verdict():
    made = claim("It works.", verdict="reproduced", **CLAIM)
    assert list(made) == ["claim", "source", "paper", "ours", "interval", "seeds", "verdict", "notebook"]
    assert json.loads(json.dumps(made)) == made
    for verdict in ("Reproduced", "confirmed", ""):
        with pytest.raises(ValueError, match="choose one of reproduced, not at this scale"):
            claim("It works.", verdict=verdict, **CLAIM)


def test_what_was_not_run_says_so_and_why():
    made = not_run("It scales.", source="table 2", paper="72.1", why="needs 64 GPUs")
    assert made["verdict"] == "not run" in VERDICTS
    assert made["ours"] == "not run (needs 64 GPUs)"
    assert made["interval"] is None
    assert made["seeds"] == []


def test_points_are_hundredths_with_a_sign():
    assert points((0.123, 0.101, 0.1456)) == "+12.3 [+10.1, +14.6] points"
    assert points((-0.02, -0.03, 0.0)) == "-2.0 [-3.0, +0.0] points"


def test_a_table_rounds_escapes_and_names_what_is_missing():
    table = markdown_table(
        [{"model": "a|b", "ndcg": 0.12345}, {"model": "c\nd", "n": 3}, {"ndcg": np.float64(1)}]
    )
    assert table.splitlines() == [
        "| model | ndcg | n |",
        "|---|---|---|",
        r"| a\|b | 0.123 | not run |",
        "| c d | not run | 3 |",
        "| not run | 1.000 | not run |",
    ]
    assert "| 0.1 |" in markdown_table([{"x": 0.12345}], digits=1)


def test_the_table_of_claims_has_paper_ours_and_verdict():
    rows = [
        claim("It works.", verdict="reproduced", **CLAIM),
        not_run("It scales.", source="s", paper="p", why="w"),
    ]
    lines = claims_table(rows).splitlines()
    assert lines[0] == "| claim | paper | ours | verdict | notebook |"
    assert lines[2] == "| It works. | +3 (table 1) | +2 [+1, +3] | **reproduced** | 02_pair |"
    assert "**not run**" in lines[3]


def test_what_was_read_is_added_up_by_data_set():
    rows = [
        {"source": "text/deu", "language": "deu", "share": 10.0, "blocks": 2, "epochs": 1.5, "held out": 3},
        {"source": "text/fra", "language": "fra", "share": 20.0, "blocks": 4, "epochs": 1.0, "dropped": 1},
        {"source": "web", "language": "eng", "share": 70.0, "blocks": 14, "epochs": 1.0},
    ]
    both = {"source": "text", "share": 30.0, "blocks": 6, "epochs": 1.5, "held out": 3, "dropped": 1}
    web = {"source": "web", "share": 70.0, "blocks": 14, "epochs": 1.0, "held out": 0, "dropped": 0}
    assert added_up(rows) == [both, web]


def test_percent():
    table = {"ours": {"a": 0.25, "b": 1.0}}
    assert percent(table) == {"ours": {"a": 25.0, "b": 100.0}} and table["ours"]["a"] == 0.25


STUDIES = {
    "00_backbone": {"checkpoint": "from scratch", "parameters": 4_195_840, "train_seconds": 82.2},
    "06_quantization": {
        "quality": [
            {"dimensions": 32, "precision": "int8", "nDCG@10": 0.101},
            {"dimensions": 256, "precision": "int8", "nDCG@10": 0.202},
            {"dimensions": 256, "precision": "binary", "nDCG@10": 0.303},
        ]
    },
}


@pytest.mark.parametrize("ran", [True, False])
def test_the_report_says_what_ran_and_what_did_not(ran):
    claims = [
        claim("It works.", verdict="reproduced", **CLAIM),
        not_run("It scales.", source="s", paper="p", why="w"),
    ]
    metrics = STUDIES | ({"08_conteb": {}} if ran else {})
    stages, systems = {"pair": {"english": 0.25}}, [{"system": "BM25", "average": 44.84, "bytes": 321}]
    text = render(load_preset("smoke"), "mine", metrics, stages, systems, claims)
    assert text.startswith("# Unmask report: preset `smoke`") and "4.20 M parameters" in text
    assert "Of 2 claims: 1 reproduced, 0 not at this scale, 0 contradicted, 1 not run." in text
    assert "| pair | 0.250 |" in text and "| BM25 | 44.8 | 321 |" in text
    assert "| 00_backbone | 82 |" in text
    assert "papermill_runs/mine/12_report.ipynb" in text
    assert "0.202" in text and "0.303" in text and "0.101" not in text  # the full dimension only
    assert "(figures/12_report-table03.png)" in text and "(figures/06_quantization-pareto.png)" in text
    assert ("(figures/08_conteb-corpus-size.png)" in text) is ran  # never a figure that nothing drew


def test_ours_stands_beside_the_paper():
    panels = {
        "the paper": {"a": {"x": 1.0, "y": 2.0}, "b": {"y": 3.0, "z": 4.0}, "c": {"x": 5.0}},
        "ours": {"mine": {"x": 0.5}},
    }
    figure = figures.beside(panels, highlight=["b", "mine", "absent"], xlabel="score in %", title="A title")
    left, right, *legends = figure.axes
    assert figure.get_suptitle() == "A title" and {ax.get_xlabel() for ax in (left, right)} == {"score in %"}
    assert [tick.get_text() for tick in left.get_yticklabels()] == ["x", "y", "z"]
    assert left.get_ylim() == right.get_ylim()  # rows of one height
    dots = {line.get_label(): list(zip(*line.get_data())) for line in left.lines}
    assert dots["b"] == [(3.0, 1), (4.0, 2)]
    labels = [[text.get_text() for text in below.get_legend().get_texts()] for below in legends]
    assert labels == [["b", "2 others"], ["mine"]]
    plt.close(figure)
