"""The report on toy runs: what stands in it, where its links lead, and that it says what did not run."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from unmask.config import load_preset
from unmask.store import repository
from unmask.study import report
from unmask.study.evidence import VERDICTS, Effect, claim, fact, not_run
from unmask.study.report import (
    SYSTEMS,
    Report,
    added_up,
    claims_table,
    executed,
    gathered,
    link,
    markdown_table,
    measured,
    page,
    percent,
    spread,
)

ABOUT = {"source": "table 1", "paper": "+3"}


def effect(value: float, half: float = 0.01) -> Effect:
    return Effect(value, np.linspace(value - half / 0.95, value + half / 0.95, 2001))


def claims(seeds=(0,)) -> list[dict]:
    """A headline claim of each verdict, another claim, a fact, and one that was not run."""
    own = ABOUT | {"seeds": seeds}
    made = [
        claim("It works.", effect=effect(0.02), above=0, notebook="02_pair", headline=True, **own),
        claim("It is large.", effect=effect(0.02), above=0.1, notebook="02_pair", headline=True, **own),
        claim("It is fast.", effect=effect(0), above=0, notebook="03_contextual", headline=True, **own),
        claim("Loss.", effect=effect(-0.3), below=0, unit="nats", detail="in all", notebook="07_x", **own),
        fact("Bytes.", ours="390", holds=True, notebook="06_quantization", **own),
        not_run("It scales.", why="needs 64 GPUs", **ABOUT),
    ]
    return [{key: value for key, value in one.items() if key != "replicates_B"} for one in made]


METRICS = {
    "00_backbone": {"checkpoint": "from scratch", "parameters": 4_195_840, "train_seconds": 82.2},
    "02_pair": {
        "families": {
            "BM25": {"english": 0.5, "average": 0.45},
            "untrained backbone": {"english": 0.01, "average": 0.02},
            "pair": {"english": 0.2, "average": 0.25},
        },
        "train_seconds": 100.0,
    },
}
LATER = {
    "05_merge": {
        "families": {"merged": {"english": 0.3, "average": 0.35}},
    },
    "06_quantization": {
        "quality": [
            {"dimensions": 32, "precision": "int8", "nDCG@10": 0.101},
            {"dimensions": 256, "precision": "int8", "nDCG@10": 0.202},
            {"dimensions": 256, "precision": "binary", "nDCG@10": 0.303},
        ]
    },
    "08_conteb": {"insent": {"families": {"english": 0.4, "average": 0.41}, "train_seconds": 3}},
}
RECORD = {"wall_seconds": 120.4, "peak_memory_bytes": 2**31, "resumed": False}
FIRST = RECORD | {"started": "2026-11-21T20:00:00+00:00"}
SECOND = RECORD | {"started": "2026-11-21T20:02:01+00:00"}
HOST = {"cores": 2, "cpu": "a processor", "memory_gib": 23.5, "gpus": []}
PROVENANCE = {"hardware": HOST, "stages": {"00_backbone": FIRST, "02_pair": SECOND}}


def toy(**changes) -> Report:
    return replace(
        Report(
            preset=load_preset("smoke"),
            notebooks="../../papermill_runs/toy",
            by_seed={0: METRICS},
            left_out={},
            claims=claims(),
            against_bm25={},
            costs={},
            provenance={},
            committed=None,
        ),
        **changes,
    )


def rows(markdown: str, label: str) -> list[list[str]]:
    """Cells of all table rows whose first cell holds the label, with plain spaces."""
    lines = markdown.replace("\N{NO-BREAK SPACE}", " ").splitlines()
    table = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return [cells for cells in table if label in cells[0]]


# Tables


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
    assert markdown_table([]) == "not run"


def test_percent():
    table = {"ours": {"a": 0.25, "b": 1.0}}
    assert percent(table) == {"ours": {"a": 25.0, "b": 100.0}} and table["ours"]["a"] == 0.25


def test_what_was_read_is_added_up_by_data_set():
    read = [
        {"source": "text/deu", "language": "deu", "share": 10.0, "blocks": 2, "epochs": 1.5, "held out": 3},
        {"source": "text/fra", "language": "fra", "share": 20.0, "blocks": 4, "epochs": 1.0, "dropped": 1},
        {"source": "web", "language": "eng", "share": 70.0, "blocks": 14, "epochs": 1.0},
    ]
    both = {"source": "text", "share": 30.0, "blocks": 6, "epochs": 1.5, "held out": 3, "dropped": 1}
    web = {"source": "web", "share": 70.0, "blocks": 14, "epochs": 1.0, "held out": 0, "dropped": 0}
    assert added_up(read) == [both, web]


def test_what_was_measured_is_found_where_it_was_saved():
    found = measured(SYSTEMS, METRICS | LATER)
    assert list(found) == ["pplx-style", "InSeNT", "BM25"]
    assert found["InSeNT"] == {"english": 0.4, "average": 0.41}


def test_seeds_become_a_mean_and_a_deviation():
    several = gathered([{"a": {"x": 0.1}, "b": {"x": 1.0}}, {"a": {"x": 0.2}}, {"a": {"x": 0.3, "y": 0.5}}])
    assert several == {"a": {"x": [0.1, 0.2, 0.3], "y": [0.5]}, "b": {"x": [1.0]}}
    assert spread(several["a"]["x"]) == "0.200 ±\N{NO-BREAK SPACE}0.100"  # n − 1 in the denominator
    assert spread(several["a"]["y"]) == "0.500" == spread([0.5, 0.5, 0.5])


def test_the_table_of_claims_has_paper_ours_and_verdict():
    table = claims_table(claims((0, 1)), notebooks="there")
    assert table.splitlines()[0] == "| claim | paper | ours | verdict | seeds | notebook |"
    assert rows(table, "It works.")[0][1:] == [
        "+3 (table 1)", "+2.0 [+1.0, +3.0] points", "**✔ reproduced**", "2", "[02](there/02_pair.ipynb)",
    ]  # fmt: skip
    assert [rows(table, text)[0][3] for text in ("It is large.", "It is fast.", "It scales.")] == [
        "**✘ contradicted**", "**– not at this scale**", "**not run**",
    ]  # fmt: skip
    assert rows(table, "It scales.")[0][2:] == ["not run (needs 64 GPUs)", "**not run**", "–", "–"]
    assert "in all" in table and "in all" not in claims_table(claims(), short=True)
    assert rows(claims_table(claims(), short=True), "Bytes.")[0][2] == "390"
    assert set(report.MARKS) == set(VERDICTS)


# The report


def test_the_first_sentence_counts_the_headline_claims():
    text = toy().markdown()
    assert text.startswith("# Unmask report: preset smoke\n\n**An embedder of 4.2 M parameters, trained from")
    assert "with one seed, reproduces 1 of 3 headline claims, contradicts 1, and leaves 1 open" in text
    assert "All 6 claims, the neighbours' papers included: 3 reproduced, 1 not at this scale" in text
    pretrained = {"00_backbone": METRICS["00_backbone"] | {"checkpoint": "Qwen/Qwen3-0.6B-Base"}}
    assert "built on Qwen/Qwen3-0.6B-Base with one seed" in toy(by_seed={0: METRICS | pretrained}).markdown()


def test_the_front_page_holds_the_headline_claims_and_the_details_all():
    front, details = toy().markdown().split("\n# Details\n")
    assert "It works." in front and "Loss." not in front and "It scales." not in front
    for text in ("It works.", "Loss.", "Bytes.", "It scales."):
        assert rows(details, text)
    headings = re.findall(r"^### (.*)$", details, re.MULTILINE)
    assert headings[0] == "[02_pair](../../papermill_runs/toy/02_pair.ipynb)"
    assert headings[4] == "Not run"


def test_what_did_not_run_is_said_and_not_shown():
    text = toy().markdown()
    assert rows(text, "[pair]")[0][1:] == ["0.200", "0.250"]
    assert rows(text, "merged") == [["merged", "not run", "not run"]]  # and no link to what is not there
    assert rows(text, "[all-MiniLM-L6-v2]")[0][1:] == ["not run", "not run"]
    assert "06_quantization-pareto.png" not in text and "distance from BM25" not in text
    assert "nDCG@10 against documents per megabyte: not run" in text
    assert "Not recorded: the notebooks were not run by the pipeline." in text and "provenance" not in text
    distance = {"english": Effect(-0.2, np.linspace(-0.25, -0.15, 1001))}
    whole = toy(by_seed={0: METRICS | LATER}, against_bm25=distance).markdown()
    assert "merged 0.350, BM25 0.450" in whole
    assert "figures/06_quantization-pareto.png" in whole
    assert rows(whole, "-20.0 [-24.8, -15.2] points")
    assert "0.202" in whole and "0.303" in whole and "0.101" not in whole  # the full dimension only


def test_cost_is_what_the_pipeline_recorded():
    text = toy(provenance=PROVENANCE).markdown()
    assert "Took 04:01 on 2 cores of a processor, 23.5 GiB of memory, GPUs: none." in text
    assert rows(text, "[00_backbone]")[0][1:] == ["82", "120", "2.0"]
    assert rows(text, "together")[0][1:] == ["182", "241", "2.0"]
    interrupted = PROVENANCE | {"stages": {"02_pair": FIRST | {"resumed": True}}}
    assert "interrupted notebooks count from their last start" in toy(provenance=interrupted).markdown()
    beside = PROVENANCE | {"stages": {"00_backbone": FIRST, "02_pair": FIRST}}
    told = toy(provenance=beside).markdown()
    assert "Took 02:00 on" in told and "ran side by side, so their times add up to more" in told


def test_several_seeds_are_a_mean_and_a_deviation_and_each_is_shown():
    pair = METRICS["02_pair"]["families"] | {"pair": {"english": 0.3, "average": 0.25}}
    other = METRICS | {"02_pair": {"families": pair}}
    several = claims((0, 1))
    several[0] |= {"values": {"0": 0.01, "1": 0.03}}
    text = toy(by_seed={0: METRICS, 1: other}, claims=several, left_out={"toy-seed2": "differs"}).markdown()
    assert "trained from scratch with 2 seeds" in text
    assert text.count("mean ± standard deviation over 2 seeds") == 2
    assert rows(text, "[pair]")[0][1:] == ["0.250 ± 0.071", "0.250"]
    assert rows(text, "It works.")[-1][1:] == ["+1.0", "+3.0", "+2.0 [+1.0, +3.0] points"]
    assert "Not pooled: toy-seed2 (differs)." in text and "One seed:" not in text


def test_a_run_is_laid_beside_the_committed_seeds():
    row = {"model": "pair", "family": "average", "ours": 0.25, "mean": 0.24, "low": 0.2, "high": 0.28, "n": 3}
    compared = [
        row | {"inside": True},
        row | {"family": "code", "inside": True},
        row | {"family": "english", "ours": 0.3, "inside": False},
    ]
    committed = {"rows": compared, "differs": {"torch": ("2.14", "2.13")}}
    text = toy(committed=committed).markdown()
    assert "**Not reproduced**: 2 of 3 numbers" in text
    assert "the 3 seeds of [smoke.json](../seeds/smoke.json)" in text
    assert "What differs: torch 2.14 (committed: 2.13)." in text
    assert "| pair | average | 0.250 | 0.240 | 0.200 to 0.280 | yes |" in text
    assert "| pair | english | 0.300 | 0.240 | 0.200 to 0.280 | **no** |" in text
    assert "| pair | code |" not in text  # inside, and no average
    inside = {"rows": [*10 * compared[:1], compared[2]], "differs": {}}
    text = toy(committed=inside).markdown()
    assert "**Reproduced**: 10 of 11 numbers" in text and "What differs: nothing." in text


# Links and the page


def test_links_lead_to_what_a_clone_has(tmp_path, monkeypatch):
    assert link("../x", "02_pair") == "[02](../x/02_pair.ipynb)" and link("../x", "") == "–"
    assert link("../x", "02_pair", "pair") == "[pair](../x/02_pair.ipynb)"
    monkeypatch.setattr(report, "repository", lambda: tmp_path)
    assert executed("quoted") == "../../papermill_runs/quoted"  # no git here: it has what it has
    if not shutil.which("git"):
        pytest.skip("no git on this machine")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text("papermill_runs/quoted/\npapermill_runs/own/\nresults/own/\n")
    assert executed("quoted") == "../../notebooks"
    assert executed("own") == "../../papermill_runs/own"
    assert executed("cpu") == "../../papermill_runs/cpu"


def test_every_link_of_the_committed_reports_leads_somewhere():
    listed = subprocess.run(
        ["git", "-C", repository(), "ls-files", "results/*/report.md", "results/*/report.html"],
        capture_output=True,
        text=True,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    for name in listed.stdout.split():
        path = repository() / name
        text = path.read_text(encoding="utf8")
        targets = re.findall(r'\]\(([^)]+)\)|(?:src|srcset|href)="([^"#][^"]*)"', text)
        missing = {
            target
            for target in map("".join, targets)
            if "://" not in target and not (path.parent / target).exists()
        }
        assert not missing, f"{name} links to {sorted(missing)}"


class Page(HTMLParser):
    VOID = ("meta", "img", "source", "br", "hr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict]] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_follows_the_readers_theme():
    text = toy(by_seed={0: METRICS | LATER}, provenance=PROVENANCE).html()
    parsed = Page(text)
    assert not parsed.open, "an element is left open"
    tags = [tag for tag, _ in parsed.seen]
    assert "script" not in tags and tags.count("table") >= 8
    assert [attributes["content"] for tag, attributes in parsed.seen if "viewport" in attributes.values()]
    images = [attributes for tag, attributes in parsed.seen if tag == "img"]
    assert all(image["alt"] and image["src"].startswith("figures/") for image in images)
    darker = [attributes["srcset"] for tag, attributes in parsed.seen if tag == "source"]
    assert darker == [image["src"].replace(".png", "-dark.png") for image in images]
    assert "prefers-color-scheme: dark" in text and "<title>Unmask report: preset smoke</title>" in text
    assert "<title>a &amp; b</title>" in page("text", "a & b")
