"""Every measured number that README and reports tell stands in a run that is committed."""

import json
import re
from functools import cache
from statistics import mean, stdev

import pytest
import yaml

from unmask.store import repository

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
            assert missing(paragraph, named or RESULTS.iterdir()) == []
