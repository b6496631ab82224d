"""What README and reports tell stands in a run that is committed: every effect with its interval, every mark
of the table of claims, what `TOLD` names. Any other number is looked for among all that was saved, so many
that of small ones hardly a wrong one is found out."""

import json
import re
from functools import cache, reduce
from operator import getitem
from statistics import mean, stdev

import pytest
import yaml

from unmask.store import repository
from unmask.study.evidence import judge

ROOT = repository()
RESULTS = ROOT / "results"
PAPER = ROOT / "lib" / "unmask" / "study" / "paper.yaml"
NUMBER = re.compile(r"(?<!≥ )(?<![\w.,/=-])[−+-]?(\d{1,3}(?:,\d{3})+|\d+\.\d+)(?![\w.]*\d|[/-])")
TRIPLE = re.compile(r"([+-]\d+\.\d+) \[([+-]\d+\.\d+), ([+-]\d+\.\d+)\]")  # an effect and its interval
LISTED = re.compile(r"\[\s*" + r",\s*".join([r"(-?\d\.\d+(?:e-\d+)?)"] * 3) + r"\s*\]")
SCALES = 1, 100, 1e-2, 1e-6, 2**-30  # as it is, in hundredths, a share of hundredths, in millions, in GiB


def leaves(value, path=()):
    """(path, number) of all numbers in a nested value; of a text those with decimals or thousands."""
    if isinstance(value, dict | list):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            if key != "versions":  # of packages, which measure nothing
                yield from leaves(one, (*path, key))
    elif isinstance(value, str):
        found = NUMBER.findall(value)
        yield from ((path, float(number.replace(",", ""))) for number in found)
    elif isinstance(value, int | float):
        yield path, abs(value)


def effects(text):
    """(value, low, high) of all effects in a text, or in JSON, where they may be lists of shares."""
    listed = {tuple(f"{100 * float(x):+.1f}" for x in row) for row in LISTED.findall(text)}
    return listed.union(TRIPLE.findall(text.replace("−", "-").replace("\n", " ")))


def files(run):
    """What a run and its seeds saved."""
    return [file for folder in (run, *RESULTS.glob(f"{run.name}-seed*")) for file in folder.glob("*.json")]


@cache
def measured(run):
    """What a run saved, and what its seeds make of it: means and standard deviations."""
    by_path = {}
    for file in files(run):
        for path, value in leaves(json.loads(file.read_text()), (file.name,)):
            by_path.setdefault(path, []).append(value)
    pooled = {of(values) for values in by_path.values() if len(values) > 1 for of in (mean, stdev)}
    both = (("07_diffusion_vs_ar.json", f"{kind}_seconds") for kind in ("train", "pretrain"))
    return pooled.union(*by_path.values(), [sum(by_path.get(path, [0])[0] for path in both)])


def missing(text, runs):
    """Numbers of a text that neither these runs nor the papers have, rounded as the text does."""
    values = {value for _, value in leaves(yaml.safe_load(PAPER.read_text()))}.union(*map(measured, runs))
    known = set().union(*(effects(file.read_text()) for run in runs for file in files(run)))
    found, rounded = sorted(effects(text) - known), {}
    for number in NUMBER.findall(text):
        whole, _, decimals = number.replace(",", "").partition(".")
        digits = len(decimals) or len(whole.rstrip("0")) - len(whole)
        if digits not in rounded:
            rounded[digits] = {round(value * scale, digits) for value in values for scale in SCALES}
        if float(f"{whole}.{decimals}") not in rounded[digits]:
            found.append(number)
    return found


REPORTS = sorted(path for path in RESULTS.glob("*/report.md") if path.parent.name != "smoke")  # a test's own


@pytest.mark.parametrize("report", REPORTS, ids=lambda path: path.parent.name)
def test_every_number_of_a_report_is_measured(report):
    text = re.sub(r"\| \*\*together.*", "", report.read_text())  # sums of what stands above
    assert missing(text, [report.parent]) == []


@pytest.mark.parametrize("folder", [ROOT, ROOT / "papermill_runs", RESULTS, RESULTS / "benchmarks"], ids=str)
def test_every_number_of_a_readme_is_measured(folder):
    """Of tables those count whose first line names runs; the others tell what presets plan."""
    text = re.sub(r"```.*?```|arXiv [\d.]+", "", (folder / "README.md").read_text(), flags=re.S)
    for paragraph in text.split("\n\n"):
        head = paragraph.partition("\n")[0] if paragraph.startswith("|") else paragraph
        named = [folder for folder in RESULTS.iterdir() if f"`{folder.name}`" in head]
        if named or head is paragraph:
            assert missing(paragraph, named or list(RESULTS.iterdir())) == []


SIGNS = {"reproduced": "✔", "contradicted": "✘", "undecided": "–"}
ROWS = [row for row in (ROOT / "README.md").read_text().split("\n") if re.search(r"\| [(✔✘–]", row)]


def told(run, cell):
    """The claims whose effect a cell of the README's table tells, behind the mark that it has to have."""
    for one in json.loads((RESULTS / run / "claims.json").read_text()):
        if one["effect"] and one["effect"].rpartition(" ")[0] in cell.replace("−", "-"):
            alone, own = SIGNS[judge(one["interval"], **one["bar"])], SIGNS.get(one["verdict"])
            mark = own if own == alone else f"({alone})"  # before Holm's correction
            if cell.startswith(f"{mark} "):
                yield named(one)


def named(claim):
    return re.sub(r" \(.*?\)", "", claim["claim"])


def effect(run, name):
    """What the notebooks of a run say of a claim, without its interval."""
    stages = [json.loads(path.read_text()) for path in (RESULTS / run).glob("[0-9]*.json")]
    found = [one["effect"] for stage in stages for one in stage["claims"] if named(one) == name]
    return found[0].partition(" ")[0] if found else "not run"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:30])
def test_a_row_of_the_table_tells_one_claim_with_its_marks(row):
    _, ours, others, cpu = row.strip("| ").split(" | ")
    (name,) = {*told("smollm2", ours)} & {*told("cpu", cpu)}
    seeds = ("smollm2", "smollm2-seed1", "smollm2-seed2")
    assert others.replace("−", "-") == "; ".join(effect(run, name) for run in seeds)


# Without an interval: words of the README, a file, and where in it their numbers stand; of a table, the mean.
TOLD = [
    ("have 0.775 to", "smollm2-seed1/02_pair", "test/pair/code"),
    ("0.798 in code (BM25 0.574", "smollm2/02_pair", "test/pair/code;test/BM25/code"),
    ("and 0.769 to", "smollm2-seed1/02_pair", "test/pair/docs"),
    ("0.800 in docstrings (0.720", "smollm2/02_pair", "test/pair/docs;test/BM25/docs"),
    ("and code (0.28 against 0.58)", "cpu*/05_merge", "families/merged/average;families/BM25/average"),
    ("token costs 2.3 nats", "smollm2/01_diffusion_cpt", "masked_nats/0.05"),
    ("switched off 5.3)", "smollm2/01_diffusion_cpt", "untrained_nats/0.05"),
    ("more, needs 2.6", "smollm2/01_diffusion_cpt", "causal_nats"),
    ("step has 1.9×", "benchmarks/benchmarks", "cached step, real lengths: speed, sentence-transformers"),
    ("encode` 1.33×", "benchmarks/benchmarks", "encode, real lengths, float32: speed, sentence-transformers"),
    ("search has 4.0×", "benchmarks/benchmarks", "exact INT8 search, batches of 64: speed, faiss SQ8"),
]


def at(path, place):
    value = json.loads(path.read_text())
    value = {row["name"]: row["ratio"] for row in value} if isinstance(value, list) else value
    return mean(number for _, number in leaves(reduce(getitem, place.split("/"), value)))


@pytest.mark.parametrize(("words", "file", "places"), TOLD)
def test_what_the_readme_tells_stands_where_it_was_measured(words, file, places):
    assert words in (ROOT / "README.md").read_text()
    for number, place in zip(NUMBER.findall(words), places.split(";"), strict=True):
        found = mean(at(path, place) for path in RESULTS.glob(f"{file}.json"))
        assert round(found, len(number.partition(".")[2])) == float(number)
