"""Side-by-side measurements of this library and its peers; see `make bench`.

    python tests/benchmarks/run.py [--only SUBJECT …] [--force]

Writes results/benchmarks/benchmarks.json, a list of {name, ours, peer, ratio, unit, setting, command, commit}
in which a ratio above 1 means that we are better, and a figure of the ratios. A subject that was measured at
this commit is not measured again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import clusters
import contrastive
import gpu
import matplotlib.pyplot as plt
import preparation
import search
from contrastive import SIZES
from measure import Row, child, compare
from tqdm import tqdm

from unmask.store import repository, write_atomic
from unmask.study import figures
from unmask.training.launch import MEMORY

RESULTS = repository() / "results" / "benchmarks"
NOTHING_RETURNED = MEMORY | {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1"}
LIMIT = 4096.0  # MiB that a global batch of 16,384 pairs may take on two cores


def scaling() -> list[Row]:
    """Speed against that of the smallest batch, and memory against the limit of the largest."""
    rows, smallest = [], None
    for pairs in SIZES:
        # A large batch is long enough to be timed without a warm-up.
        found = child("peak", f"scaling-{pairs}", "unmask", "", "3" if pairs < 4096 else "1")
        rate, peak = found["work"] / found["seconds"], found["bytes"] / 2**20
        smallest = smallest or rate
        setting = contrastive.scaling_setting(pairs)
        title = f"global batch {pairs:,}"
        against = f"{setting}; peer: our own step at {SIZES[0]} pairs"
        rows.append(Row(f"{title}: speed", rate, smallest, rate / smallest, found["unit"], against))
        against = f"{setting}; peer: the limit at {SIZES[-1]:,} pairs"
        unit = "MiB above model and data"
        rows.append(Row(f"{title}: peak memory", peak, LIMIT, LIMIT / peak, unit, against))
    return rows


def kept_memory() -> list[Row]:
    """The diffusion step in a process that keeps freed memory, as trainings do, and in one that does not."""

    def rate(environment: dict[str, str]) -> dict[str, Any]:
        found = child("peak", "diffusion", "unmask", "", "4", environment=environment)
        return found | {"rate": found["work"] / found["seconds"]}

    pairs = [(rate(MEMORY), rate({})) for _ in range(3)]
    ours, peer = (statistics.median(pair[side]["rate"] for pair in pairs) for side in (0, 1))
    ratio = statistics.median(a["rate"] / b["rate"] for a, b in pairs)
    return [Row("freed memory kept: speed", ours, peer, ratio, pairs[0][0]["unit"], "diffusion step, glibc")]


def encodings(kind: str, lengths: str) -> list[Row]:
    return [
        row
        for precision in ("float32", "bf16")
        for row in compare(f"encode-{kind}-{precision}", f"encode, {lengths}, {precision}", memory=False)
    ]


def searches(case: str, title: str) -> list[Row]:
    rows = compare(case, f"{title}, batches of {search.QUERIES}", memory=False, environment={})
    return rows + compare(f"{case}-one", f"{title}, one query", memory=False, environment={})


SUBJECTS: dict[str, Callable[[], list[Row]]] = {
    "contrastive-equal": lambda: compare("contrastive-equal", "cached step, equal lengths"),
    "contrastive-mixed": lambda: compare("contrastive-mixed", "cached step, real lengths"),
    "contrastive-equal-4-layers": lambda: compare(
        "contrastive-equal-4-layers", "cached step, 4 layers, equal lengths"
    ),
    "contrastive-mixed-4-layers": lambda: compare(
        "contrastive-mixed-4-layers", "cached step, 4 layers, real lengths"
    ),
    "scaling": scaling,
    "diffusion": lambda: compare("diffusion", "diffusion step"),
    # Kinder to the peer, whose logits would otherwise be faulted in anew at every step.
    "diffusion-all-kept": lambda: compare(
        "diffusion", "diffusion step, no memory returned", memory=False, environment=NOTHING_RETURNED
    ),
    "diffusion-loss": lambda: compare("diffusion-loss", "diffusion loss alone"),
    "kept-memory": kept_memory,
    "encode-mixed": lambda: encodings("mixed", "real lengths"),
    "encode-equal": lambda: encodings("equal", "equal lengths"),
    "matmul-share": lambda: [
        row
        for case, title in {
            "share-diffusion": "135 M, diffusion step",
            "share-pair": "135 M, pair step, activations kept",
            "share-pair-cached": "135 M, pair step, cached",
            "share-encode": "135 M, encode",
        }.items()
        for row in compare(case, title, memory=False)
    ],
    "integer-search": lambda: searches("integer-search", "exact INT8 search"),
    "binary-search": lambda: searches("binary-search", "exact binary search"),
    "search-scaling": lambda: search.scaling(RESULTS / "search.png"),
    "metrics": lambda: [
        *compare("metrics", "ranking metrics", memory=False, environment={}),
        *compare("metrics-tied", "ranking metrics, tied scores", memory=False, environment={}),
    ],
    "mining": lambda: compare("mining", "hard-negative mining"),
    "clusters": clusters.rows,
    "preparation": lambda: compare("preparation", "tokenising text into files", memory=False, environment={}),
    "preparation-memory": preparation.memory,
    "gpu": gpu.rows,
}


def commit() -> str:
    """The commit measured; marked if code was changed since."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(repository()), *arguments], capture_output=True, text=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "lib", "tests/benchmarks", "papermill_runs/presets")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("-changed" if changed else "")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="measure this library against its peers")
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, metavar="SUBJECT", help=", ".join(SUBJECTS))
    parser.add_argument("--force", action="store_true", help="measure what was measured at this commit, too")
    options = parser.parse_args(arguments)
    path, version = RESULTS / "benchmarks.json", commit()
    known = json.loads(path.read_text(encoding="utf8")) if path.is_file() else []
    by_subject: dict[str, list[dict]] = {name: [] for name in SUBJECTS}
    for row in known:
        if (subject := row["command"].rpartition(" ")[2]) in by_subject:
            by_subject[subject].append(row)
    bar = tqdm(options.only or list(SUBJECTS))
    for subject in bar:
        bar.set_description(subject)
        done = by_subject[subject] and all(row["commit"] == version for row in by_subject[subject])
        if done and not options.force and not version.endswith("-changed"):
            continue
        facts = {"command": f"python tests/benchmarks/run.py --only {subject}", "commit": version}
        started = time.perf_counter()
        rows = SUBJECTS[subject]()
        by_subject[subject] = [rounded(row) | facts for row in rows]
        flat = [row for rows in by_subject.values() for row in rows]
        write_atomic(path, json.dumps(flat, indent=1, ensure_ascii=False) + "\n")
        for row in rows:
            ratio = "not run" if row.ratio is None else f"{row.ratio:6.2f}×"
            bar.write(f"{ratio}  {row.name}")
        bar.write(f"{subject}: {time.perf_counter() - started:.0f} s")
    plt.switch_backend("agg")
    figure = figures.horizontal_bars(
        {
            row["name"]: row["ratio"]
            for subject, rows in by_subject.items()
            for row in rows
            if subject != "search-scaling"  # has a figure of its own
        },
        xlabel="times faster, or times less memory",
        title="Against peers on one machine",
        fmt="{:.3g}×",
        ratios=True,
    )
    figure.save(RESULTS / "benchmarks.png")
    print(f"{path} and its figure are up to date")


def rounded(row: Row) -> dict[str, Any]:
    values = dataclasses.asdict(row)
    return {
        key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in values.items()
    }


if __name__ == "__main__":
    main()
