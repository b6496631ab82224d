"""How long notebooks take, before a run and while it runs.

Whole times, trainings included, are those that were recorded with these values on a processor of this kind,
or else come from steps and tokens. What is under way is read from what trainings log (`training.watch`), or
papermill says which cell runs.
"""

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from tqdm import tqdm

from unmask.config import resolved
from unmask.store import read_json
from unmask_study.pipeline import Notebook, Pipeline, hardware, processor
from unmask_study.run import Folders, seed_runs
from unmask_study.settings import comparable

AROUND = 60.0  # seconds of a notebook beside its trainings, if nothing is recorded
# Two cores with bf16 instructions take so many times what `plan` says of a GPU, and without them thrice that.
TWO_CORES = 1000
QUIET = 30.0  # seconds between two lines where no terminal is
BAR = "|{bar:20}| {desc}"


def whole_times(pipeline: Pipeline, notebooks: Iterable[Notebook]) -> tuple[dict[Notebook, float], set[str]]:
    """Seconds of each notebook with all its trainings, and the names of those that no record tells."""
    preset, machine, recorded = pipeline.preset, hardware(), {}
    now, runs = comparable(resolved(preset)), Folders(preset.name).results
    for folder in (*seed_runs(runs).values(), runs, pipeline.folders.results):
        about = read_json(folder / "provenance.json")
        for one in pipeline.notebooks:
            ran = about.get("stages", {}).get(one.name, {})
            made = now | comparable(about.get("preset", {})) | ran.get("otherwise", {})
            counts = (key for key in now if key.partition(".")[0] in {*one.reads, "parallel"})
            same = ran.get("processor") == processor(machine) and all(made[key] == now[key] for key in counts)
            if same and not ran["exit_status"]:
                recorded[one.name] = ran["whole_seconds"]
    seconds = {one: recorded.get(one.name, AROUND) for one in notebooks}
    if estimated := {one.name: one for one in seconds if one.name not in recorded}:
        from unmask_study.plan import trainings  # noqa: PLC0415 (with torch, which takes seconds)

        gpus, slow = preset.parallel.num_processes, TWO_CORES * 2 / machine["cores"]
        factor = 1 if machine["gpus"] or gpus > 1 else slow if machine["bf16"] else 3 * slow
        for training in trainings(preset, gpus, notebooks=[*estimated]):
            seconds[estimated[training.notebook]] += factor * 3600 * training.gpu_hours / gpus
    return seconds, {*estimated}


def until_done(seconds: Mapping[Notebook, float], jobs: int) -> float:
    """Seconds that notebooks, given in running order, take together at least, up to `jobs` side by side."""
    ends: dict[str, float] = {}
    for one, took in seconds.items():
        ends[one.name] = took + max((ends.get(name, 0.0) for name in one.inputs), default=0.0)
    return max(*ends.values(), sum(seconds.values()) / jobs)


class Progress:
    """Shows a run: how much of the whole is done, the minutes left, and of each notebook under way its
    training or else its cell. On a terminal bars, elsewhere a line now and then.

    Args:
        artifacts: folder of the run.
        seconds: whole times.
    """

    def __init__(self, artifacts: Path, seconds: Mapping[Notebook, float], jobs: int):
        self.artifacts, self.seconds, self.jobs = artifacts, seconds, jobs
        self.began, self.shown, self.text = time.time(), time.monotonic(), ""
        self.cells: Counter[str] = Counter()  # begun, of each notebook
        self.running: dict[Notebook, tuple[float, int, dict[Path, float]]] = {}
        self.took: dict[Notebook, float] = {}
        options = {"file": sys.stdout, "dynamic_ncols": True, "leave": False, "bar_format": " ", "total": 1}
        self.bars = [tqdm(position=row, **options) for row in range(sys.stdout.isatty() * (1 + jobs))]

    def close(self) -> None:
        for bar in reversed(self.bars):  # so that the cursor ends at the first
            bar.close()

    def say(self, text: str, file: TextIO | None = None) -> None:
        """Prints a line, above the bars."""
        with tqdm.external_write_mode(file=file):
            print(text, file=file, flush=True)

    def begin(self, notebook: Notebook) -> None:
        kinds = [cell["cell_type"] for cell in read_json(notebook.path)["cells"]]
        before = {log: sum(row["seconds"] for row in _rows(log)) for log in self._logs(notebook)}
        self.running[notebook] = time.time(), kinds.count("code") + 1, before  # one more: the parameters

    def end(self, notebook: Notebook) -> float:
        """Returns: the whole time of a notebook that has ended."""
        self.took[notebook] = self._so_far(notebook)
        del self.running[notebook]
        return self.took[notebook]

    def look(self) -> None:
        """Shows what is under way, if the last look was long enough ago."""
        if time.monotonic() - self.shown < (1 if self.bars else QUIET):
            return
        self.shown, lines = time.monotonic(), []
        # If notebooks took longer than expected, others will, too. What is a small part of all says little.
        some = sum(self.seconds.values()) / 10
        pace = (some + sum(self.took.values())) / (some + sum(self.seconds[one] for one in self.took))
        left = {one: pace * took * (one not in self.took) for one, took in self.seconds.items()}
        for one in self.running:
            text, share, training = self._state(one)
            left[one] = max(training, left[one] - self._so_far(one), self._so_far(one) / 10)
            lines.append((f"{one.name}: {text}", share))
        rest = until_done(left, self.jobs)
        share = 1 - rest / (time.time() - self.began + rest)
        lines.insert(0, (f"{share:.0%} done, {math.ceil(rest / 60)} min left", share))
        for bar, (bar.desc, bar.n) in zip(self.bars, lines + [("", 0)] * self.jobs, strict=False):
            bar.bar_format = BAR if bar.desc else " "
            bar.refresh()
        before, self.text = self.text, " · ".join(text for text, _ in lines)
        if not self.bars and self.text != before:
            self.say(self.text)

    def _state(self, notebook: Notebook) -> tuple[str, float, float]:
        """What a notebook does, the share of it that is done, and the seconds that its training has left."""
        began, cells, _ = self.running[notebook]
        for log in self._logs(notebook):
            if log.stat().st_mtime >= began and not (log.parent / "model").exists():
                steps = read_json(log.parent / "job.json")["job"]["config"]["steps"]
                rows = _rows(log, 20)
                if not rows:  # the first step, or what is compiled for it, is under way
                    return f"{log.parents[1].name} 0/{steps}", 0.0, 0.0
                step, pace = rows[-1]["step"] + 1, median(row["seconds"] for row in rows)
                text = f"{log.parents[1].name} {step}/{steps}, loss {rows[-1]['loss']:.3f}"
                return text, step / steps, (steps - step) * pace
        return f"cell {self.cells[notebook.name]}/{cells}", self.cells[notebook.name] / cells, 0.0

    def _logs(self, notebook: Notebook) -> list[Path]:
        return [*(self.artifacts / notebook.name).glob("*/*/metrics.jsonl")]

    def _so_far(self, notebook: Notebook) -> float:
        """Seconds since a notebook began, and those that trainings which it uses had taken before."""
        began, _, before = self.running[notebook]
        return time.time() - began + sum(took for log, took in before.items() if _used(log, began))


def _rows(log: Path, last: int = 0) -> list[dict[str, Any]]:
    """The last steps of a training, or all; not one of which half is written."""
    rows = [row for row in log.read_bytes().splitlines(keepends=True) if row.endswith(b"\n")]
    return [json.loads(row) for row in rows[-last:]]


def _used(log: Path, since: float) -> bool:
    """Whether a training has gone on since then, or its model was asked for (`training.train` links it)."""
    link = log.parents[1] / "model"
    linked = link.resolve() == log.parent.resolve() / "model" and link.lstat().st_mtime >= since
    return linked or log.stat().st_mtime >= since
