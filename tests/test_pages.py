"""What the pages say is what was measured, once, and in words that a reader can follow."""

import json
import re

import pytest

import pages
from unmask_study import evidence

README, RESULTS_README, SPEED, GPUS, LIBRARY, PAPERS, LOG = pages.PAGES
LIMITS = {  # bytes; words with a digit in a hundred
    README: (7_000, 5),
    RESULTS_README: (14_000, 6),
    SPEED: (10_000, 6),
    GPUS: (8_000, 6),
    pages.RESULTS / "PROTOCOL.md": (6_600, 6),
    LOG: (17_000, 6),
    PAPERS: (11_500, 8),
}


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.parent.name + page.name)
def test_blocks_are_made_from_the_committed_results(page):
    assert page.read_text("utf8") == pages.written(page), "run: python tests/pages.py"


def test_the_drawn_recipe_is_the_librarys():
    assert all(path.read_text("utf8") == text for path, text in pages.drawings().items())


@pytest.mark.parametrize("page", LIMITS, ids=lambda page: page.parent.name + page.name)
def test_pages_are_short_and_hold_few_numbers(page):
    size, most = LIMITS[page]
    assert page.stat().st_size <= size
    assert pages.numbers(page.read_text("utf8")) <= most


def test_the_readme_shows_a_picture_within_sixty_words():
    before, picture, _ = README.read_text("utf8").partition("<img")
    assert picture and len(pages.prose(before).split()) <= 60


def test_the_readme_names_winners_that_its_table_has():
    """Better in docstrings and code, in context by training and by the heading, worse on Wikipedia."""
    table = re.findall(r"^\| (.+) \|$", pages.quality("smollm2"), re.M)
    (_, *columns), *rows = (line.split(" | ") for line in table)
    value = {
        (name, x): float(cell.split()[0])
        for name, *row in rows
        for x, cell in zip(columns, row)
        if cell not in ("–", "not run")
    }
    pairs, trained = "ours, pairs", "ours, context"
    for other in ("BM25", "all-MiniLM-L6-v2"):
        assert all(value[pairs, column] > value[other, column] for column in ("docstrings", "code"))
        assert value[other, "Wikipedia"] > value[pairs, "Wikipedia"]
    alone = value[pairs, "in context"]
    assert min(value[trained, "in context"], value[pairs, "… with the heading"]) > 2 * alone
    assert value["all-MiniLM-L6-v2", "… with the heading"] > value[trained, "in context"]


@pytest.mark.parametrize("page", LIMITS, ids=lambda page: page.parent.name + page.name)
def test_links_lead_somewhere(page):
    assert not pages.dead_links(page)


@pytest.mark.parametrize(
    ("paper", "tables", "figures"),
    [("pplx-embed", 12, 2), ("ConTEB and InSeNT", 4, 4), ("CDE", 7, 18), ("Qwen3-Embedding", 9, 2)],
)
def test_each_table_and_figure_of_the_papers_has_a_notebook_or_says_what_is_missing(paper, tables, figures):
    """Links are followed by another test."""
    page = PAPERS.read_text("utf8")
    section, missing = (page.partition(f"## {name}\n")[2] for name in (paper, "What is missing"))
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", section.partition("\n## ")[0], re.M)[1:]
    numbered = {found[0] for what, *_ in rows if (found := re.match(r"(table|figure) \d+", what))}
    expected = {f"table {number + 1}" for number in range(tables)}
    assert numbered == expected | {f"figure {number + 1}" for number in range(figures)}
    for what, here, _ in rows:
        (number,) = re.findall(r"not built \((\d+)\)", here) or [""]
        assert not number or f"\n{number}. " in missing, what
        assert number or pages.LINK.search(here) or "missing from the text" in here, what


def test_every_link_of_the_committed_reports_leads_somewhere():
    for page in pages.committed("results/*/report.md", "results/*/report.html"):
        assert not pages.dead_links(page), page


@pytest.mark.parametrize("run", pages.RUNS)
def test_a_claim_has_one_verdict_in_claims_report_and_readme(run):
    every = pages.claims(run)
    assert json.loads((pages.RESULTS / run / "claims.json").read_text("utf8")) == every
    report = (pages.RESULTS / run / "report.md").read_text("utf8")
    for one in every:
        row = next(line for line in report.split("\n") if line.startswith(f"| {one['claim']}"))
        assert f"{one['verdict']}**" in row and one["effect"] in row
    table = pages.written(RESULTS_README)
    assert all(one["short"] in table for one in every)


def test_verdicts_stand_in_notebook_12_alone():
    every = pages.committed("papermill_runs/*/*.ipynb", "notebooks/*.ipynb")
    words = "|".join(["reproduced", "contradicted", "undecided", "not at this scale"])
    told = re.compile(rf"\*\*(✔ |✘ |– )?({words}|{'|'.join(evidence.VERDICTS[:3])})\*\*")
    for path in (path for path in every if not path.name.startswith("12")):
        assert not told.search(path.read_text("utf8")), path


def test_executed_notebooks_of_the_default_show_their_trainings_and_no_warnings():
    """Bars and curves are in the files: nothing was trained before, and nothing went to stderr."""
    for path in pages.committed("papermill_runs/cpu/*.ipynb"):
        for cell in json.loads(path.read_text("utf8"))["cells"]:
            for output in cell.get("outputs", ()):
                text = "".join(output.get("text", ""))
                assert output.get("name") != "stderr" or not text, (path.name, text[:200])
                assert "trained before" not in text, path.name


NOTEBOOKS = sorted((pages.ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_short_and_answer_first(path):
    every = json.loads(path.read_text("utf8"))["cells"]
    code = [one for one in every if one["cell_type"] == "code"]
    told = " ".join("".join(one["source"]) for one in every if one["cell_type"] == "markdown")
    assert len(re.sub(r"\$\$.*?\$\$|```.*?```", "", told, flags=re.S).split()) <= 1000
    for one in code:
        apparatus = "apparatus" in one["metadata"].get("tags", ())
        assert "".join(one["source"]).count("\n") < (41 if apparatus else 15)
        assert one["metadata"].get("jupyter", {}).get("source_hidden") or not apparatus
    if not path.stem.startswith("12"):  # which is the page itself
        sources = ["".join(one["source"]) for one in code]
        first = next(source for source in sources if "Run.open(" in source)
        assert "Answer(study)" in first and "close(" in sources[-1]
