"""Side-by-side measurements of this library and its peers; see `make bench`.

    PYTHONPATH=tests python tests/benchmarks/run.py [--only SUBJECT …] [--force]

Writes results/benchmarks/benchmarks.json, a list of {name, ours, peer, ratio, unit, setting, spread, command,
commit} in which a ratio above 1 means that we are better, and figures of them. A subject that was
measured at this commit is not measured again.

`run.py --child …` is one measurement in a process of its own, see `measure.child`.
"""

import argparse
import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import contrastive
import diffusion
import encode
import matplotlib.pyplot as plt
import measure
import search
from measure import Row, child, compare
from tqdm import tqdm

from unmask.children import ENVIRONMENT
from unmask.store import repository, write_atomic
from unmask_study import figures

RESULTS = repository() / "results" / "benchmarks"
NOTHING_RETURNED = ENVIRONMENT | {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1"}
LIMIT = 4096.0  # MiB that a global batch of 16,384 pairs may take on two cores
MODULES = (contrastive, diffusion, encode, search)
CASES = {name: case for module in MODULES for name, case in module.CASES.items()}


def scaling() -> list[Row]:
    """Speed against that of the smallest batch, and memory against the limit of the largest."""
    rows, smallest = [], None
    for pairs in contrastive.SIZES:
        # A large batch is long enough to be timed without a warm-up.
        found = child("peak", f"scaling-{pairs}", "unmask", "", "3" if pairs < 4096 else "1")
        rate, peak = found["work"] / found["seconds"], found["bytes"] / 2**20
        smallest = smallest or rate
        title, setting = f"global batch {pairs:,}", found["setting"]
        against = f"{setting}; peer: our own step at {contrastive.SIZES[0]} pairs"
        rows.append(Row(f"{title}: speed", rate, smallest, rate / smallest, found["unit"], against))
        against = f"{setting}; peer: the limit at {contrastive.SIZES[-1]:,} pairs"
        rows.append(Row(f"{title}: peak memory", peak, LIMIT, LIMIT / peak, measure.MEMORY_UNIT, against))
    return rows


def several(titles: dict[str, str], **options: Any) -> list[Row]:
    """Rows of several cases, given with their titles."""
    return [row for case, title in titles.items() for row in compare(case, title, **options)]


SPEED = {"memory": False, "environment": {}}  # outside of a training
LAYERS = {"": "", "-4-layers": "4 layers, "}
LENGTHS = {"equal": "equal lengths", "mixed": "real lengths"}
SUBJECTS: dict[str, Callable[[], list[Row]]] = {}
for ending, layers in LAYERS.items():
    for kind, lengths in LENGTHS.items():
        case = f"contrastive-{kind}{ending}"
        SUBJECTS[case] = partial(compare, case, f"cached step, {layers}{lengths}")
    case, title = f"contrastive-equal{ending}", f"cached step, {layers}memory to spare"
    SUBJECTS[f"contrastive-kept{ending}"] = partial(compare, case, title, limited=False)
SUBJECTS |= {"scaling": scaling, "diffusion": partial(compare, "diffusion", "diffusion step")}
# Where the C library gives no memory back, no step faults it in anew.
kept = {"memory": False, "environment": NOTHING_RETURNED}
SUBJECTS["diffusion-all-kept"] = partial(compare, "diffusion", "diffusion step, no memory returned", **kept)
for kind, lengths in LENGTHS.items():
    titles = {f"encode-{kind}-{p}": f"encode, {lengths}, {p}" for p in encode.PRECISIONS}
    SUBJECTS[f"encode-{kind}"] = partial(several, titles, memory=False)
for kind, title in {"integer": "exact INT8 search", "binary": "exact binary search"}.items():
    titles = {f"{kind}-search": f"{title}, batches of {search.QUERIES}"}
    titles |= {f"{kind}-search-one": f"{title}, one query"}
    SUBJECTS[f"{kind}-search"] = partial(several, titles, **SPEED)
SUBJECTS["search-scaling"] = search.scaling

AXES = {"speed": "our speed, in times the peer's", "peak memory": "the peer's memory, in times ours"}
WITHOUT_PEER = {"scaling", "search-scaling"}  # not in the figure of peers
PEERS = {"uncached": "plain backpropagation", "faiss SQ8": "faiss", "faiss IndexBinaryFlat": "faiss"}


def commit() -> str:
    """The commit measured; marked if code was changed since."""
    git = partial(subprocess.run, cwd=repository(), capture_output=True, text=True)
    changed = git(["git", "status", "--porcelain", "lib", "tests/benchmarks", "papermill_runs/presets"])
    head = git(["git", "rev-parse", "--short", "HEAD"]).stdout.strip()
    return (head or "unknown") + ("-changed" if changed.stdout else "")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="measure this library against its peers")
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, metavar="SUBJECT", help=", ".join(SUBJECTS))
    parser.add_argument("--force", action="store_true", help="measure what was measured at this commit, too")
    options = parser.parse_args(arguments)
    path, version = RESULTS / "benchmarks.json", commit()
    known = json.loads(path.read_text(encoding="utf8")) if path.is_file() else []
    of = {name: [row for row in known if row["command"].endswith(f" {name}")] for name in SUBJECTS}
    for subject in tqdm(options.only or list(SUBJECTS)):
        measured = {row["commit"] for row in of[subject]} == {version} and not version.endswith("-changed")
        if measured and not options.force:
            continue
        command = f"PYTHONPATH=tests python tests/benchmarks/run.py --only {subject}"
        facts = {"command": command, "commit": version}
        of[subject] = [rounded(row) | facts for row in SUBJECTS[subject]()]
        flat = [row for rows in of.values() for row in rows]
        write_atomic(path, json.dumps(flat, indent=1, ensure_ascii=False) + "\n")
        for row in of[subject]:
            tqdm.write(f"{row['ratio'] or 'not run'} ×  {row['name']}")
    draw(of)


def draw(by_subject: dict[str, list[dict]]) -> None:
    """Figures of what was measured: against peers, batches that grow, corpora that grow."""
    plt.switch_backend("agg")
    panels: dict[str, dict] = {what: {} for what in AXES}
    spreads: dict[str, list] = {what: [] for what in panels}  # of the rows whose rounds were compared
    for row in (row for name, some in by_subject.items() if name not in WITHOUT_PEER for row in some):
        case, what, peer = re.fullmatch("(.+): ([^,]+), (.+)", row["name"]).groups()
        if row["ratio"] is not None:
            panels[what].setdefault(PEERS.get(peer, peer), {})[case] = row["ratio"]
            spreads[what] += [(case, row["spread"])] if row["spread"] else []
    for what, table in panels.items():
        rounds = " (lines: least and most of five rounds)" if spreads[what] else ""
        title = f"Against peers, on one machine{rounds}"
        figure = figures.beside({what: table}, xlabel=AXES[what], title=title)
        ax = figure.axes[0]
        place = {label.get_text(): y for y, label in zip(ax.get_yticks(), ax.get_yticklabels())}
        for case, ends in spreads[what]:
            ax.hlines(place[case], *ends, color=figures.MUTED, linewidth=1)
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter("{x:g}×")
        ax.axvline(1, color=figures.INK, linewidth=1)
        figure.save(RESULTS / f"{what.split()[-1]}.png")
    batches = growth(by_subject["scaling"], lambda row, size: row["ratio"])
    sizes, ratios = batches["peak memory"]
    shares = {"speed, of the smallest": batches["speed"]}
    shares["peak memory, of 4 GiB"] = sizes, [1 / ratio for ratio in ratios]
    text = {"xlabel": "pairs of a global batch", "ylabel": "share", "title": "Larger global batches"}
    figures.lines(shares, log_x=True, **text).save(RESULTS / "batches.png")
    rows = [row for row in by_subject["search-scaling"] if row["unit"] == "queries/s"]
    read = growth(rows, lambda row, size: row["ours"] * size / 1e6)
    read["reading the codes once"] = growth(rows, lambda row, size: row["peer"] * size / 1e6)["one query"]
    text = {"xlabel": "documents of 1,024 INT8 codes", "title": "Larger corpora: exact INT8 search"}
    figure = figures.lines(read, log_x=True, ylabel="millions of comparisons per second", **text)
    figure.save(RESULTS / "corpora.png")


def growth(rows: list[dict], value: Callable[[dict, int], float]) -> dict[str, tuple[list, list]]:
    """What rows measured → the sizes in their names, and a value of each."""
    found: dict[str, list] = {}
    for row in rows:
        written, what = re.search(r"([\d,]+)(?: documents)?: (.+)", row["name"]).groups()
        size = int(written.replace(",", ""))
        found.setdefault(what, []).append((size, value(row, size)))
    return {what: tuple(map(list, zip(*points))) for what, points in found.items()}


def rounded(row: Row) -> dict[str, Any]:
    text = json.dumps(dataclasses.asdict(row))
    return json.loads(text, parse_float=lambda number: float(f"{float(number):.4g}"))


def in_child(kind: str, name: str, *rest: str) -> dict:
    """trial CASE: all variants; rounds CASE CHOSEN: some in turn; peak CASE PROGRAM VARIANT STEPS: memory."""
    case = CASES[name]()
    facts = {"setting": case.setting, "unit": case.unit, "work": case.work, "missing": case.missing}
    if kind == "trial":
        return facts | {"tried": measure.trial(case)}
    if kind == "rounds":
        return measure.rounds(case, json.loads(rest[0]))
    program, variant, steps = rest
    return facts | measure.peak(case.programs[program][variant], int(steps))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(in_child(*sys.argv[2:])))
    else:
        main()
