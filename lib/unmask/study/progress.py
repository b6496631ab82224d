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

from unmask.config import comparable, resolved
from unmask.run import Folders, seed_runs
from unmask.store import read_json
from unmask.study.pipeline import Notebook, Pipeline, hardware, processor

AROUND = 60.0  # seconds of a notebook beside its trainings, if nothing is recorded
# Two cores with bf16 instructions take so many times what `plan` says of a GPU, and without them thrice that.
TWO_CORES = 1000
QUIET = 30.0  # seconds between two lines where no terminal is
BAR = "|{bar:20}| {desc}"


def whole_times(pipeline: Pipeline, notebooks: Iterable[Notebook]) -> tuple[dict[str, float], set[str]]:
    """Seconds of each notebook with all its trainings, and the names of those that no record tells."""
    notebooks, preset, about = [*notebooks], pipeline.preset, hardware()
    now, runs, seconds = comparable(resolved(preset)), Folders(preset.name).results, {}
    for folder in (*seed_runs(runs).values(), runs, pipeline.folders.results):
        record = read_json(folder / "provenance.json")
        for one in notebooks:
            ran = record.get("stages", {}).get(one.name, {})
            made = comparable(record.get("preset", {})) | ran.get("otherwise", {})
            counts = (key for key in now if key.partition(".")[0] in {*one.reads, "parallel"})
            same = ran.get("processor") == processor(about) and not ran["exit_status"]
            if same and all(made.get(key, now[key]) == now[key] for key in counts):
                seconds[one.name] = ran["whole_seconds"]
    if estimated := {one.name for one in notebooks} - {*seconds}:
        from unmask.study.plan import trainings  # noqa: PLC0415 (with torch, which takes seconds)

        gpus = preset.parallel.num_processes
        slow = TWO_CORES * 2 / about["cores"] * (1 if about["bf16"] else 3)
        factor = 1 if about["gpus"] or gpus > 1 else slow
        seconds |= dict.fromkeys(estimated, AROUND)
        for training in trainings(preset, gpus, notebooks=[*estimated]):
            seconds[training.notebook] += factor * 3600 * training.gpu_hours / gpus
    return seconds, estimated


def until_done(
    waiting: Iterable[Notebook], running: Mapping[str, float], seconds: Mapping[str, float], jobs: int
) -> float:
    """Seconds until all notebooks are done, if they start as `execute` starts them.

    Args:
        running: name → seconds that are left.
        seconds: name → those of one that waits.
    """
    now, waiting, running = 0.0, [*waiting], dict(running)
    while waiting or running:
        left = {*running, *(one.name for one in waiting)}
        for one in [one for one in waiting if left.isdisjoint(one.inputs)][: jobs - len(running)]:
            waiting.remove(one)
            running[one.name] = now + seconds[one.name]
        now = running.pop(min(running, key=running.get))
    return now


class Progress:
    """Shows a run: how much of the whole is done, the minutes left, and of each notebook under way its
    training or else its cell. On a terminal bars, elsewhere a line now and then.

    Args:
        seconds: name → whole time.
    """

    def __init__(self, artifacts: Path, seconds: Mapping[str, float], jobs: int):
        self.artifacts, self.seconds, self.jobs = artifacts, seconds, jobs
        self.terminal, self.text = sys.stdout.isatty(), ""
        self.began, self.shown = time.time(), time.monotonic()
        self.cells: Counter[str] = Counter()  # begun, of each notebook
        self.running: dict[str, tuple[float, int, dict[Path, float]]] = {}
        self.took: dict[str, float] = {}
        options = {"file": sys.stdout, "dynamic_ncols": True, "leave": False, "bar_format": " "}
        places = range(self.terminal * (1 + jobs))
        self.bars = [tqdm(total=1, position=place, **options) for place in places]

    def close(self) -> None:
        for bar in reversed(self.bars):  # so that the cursor ends at the first
            bar.close()

    def say(self, text: str, file: TextIO | None = None) -> None:
        """Prints a line, above the bars."""
        with tqdm.external_write_mode(file=file):
            print(text, file=file, flush=True)

    def begin(self, notebook: Notebook) -> None:
        kinds = [cell["cell_type"] for cell in read_json(notebook.path)["cells"]]
        before = {log: sum(row["seconds"] for row in _rows(log)) for log in self._logs(notebook.name)}
        self.running[notebook.name] = time.time(), kinds.count("code") + 1, before  # one more: the parameters

    def end(self, notebook: Notebook) -> float:
        """Returns: the whole time of a notebook that has ended."""
        self.took[notebook.name] = whole = self._so_far(notebook.name)
        del self.running[notebook.name]
        return whole

    def look(self, waiting: Iterable[Notebook]) -> None:
        """Shows what is under way, if the last look was long enough ago."""
        if time.monotonic() - self.shown < (1 if self.terminal else QUIET):
            return
        self.shown = time.monotonic()
        # If notebooks took longer than expected, others will, too. What is a small part of all says little.
        some = sum(self.seconds.values()) / 10
        pace = (some + sum(self.took.values())) / (some + sum(self.seconds[name] for name in self.took))
        expected = {name: pace * seconds for name, seconds in self.seconds.items()}
        left, lines = {}, []
        for name in self.running:
            text, share, training = self._state(name)
            so_far = self._so_far(name)
            left[name] = max(training, expected[name] - so_far, so_far / 10)
            lines.append((f"{name}: {text}", share))
        rest = until_done(waiting, left, expected, self.jobs)
        share = 1 - rest / (time.time() - self.began + rest)
        lines.insert(0, (f"{share:.0%} done, {math.ceil(rest / 60)} min left", share))
        for bar, (text, share) in zip(self.bars, lines + [("", 0)] * self.jobs, strict=False):
            bar.desc, bar.n, bar.bar_format = text, share, BAR if text else " "
            bar.refresh()
        text = " · ".join(text for text, _ in lines)
        if not self.terminal and text != self.text:
            self.say(text)
        self.text = text

    def _state(self, notebook: str) -> tuple[str, float, float]:
        """What a notebook does, the share of it that is done, and the seconds that its training has left."""
        began, cells, _ = self.running[notebook]
        logs = [log for log in self._logs(notebook) if log.stat().st_mtime >= began]
        for log in logs:
            if not (log.parent / "model").exists():  # else it is finished
                rows, steps = _rows(log, 20), read_json(log.parent / "job.json")["job"]["config"]["steps"]
                step, loss = (rows[-1]["step"] + 1, f", loss {rows[-1]['loss']:.3f}") if rows else (0, "")
                pace = median(row["seconds"] for row in rows) if rows else 0
                name = log.parent.parent.name
                return f"{name} {step}/{steps}{loss}", step / steps, (steps - step) * pace
        return f"cell {self.cells[notebook]}/{cells}", self.cells[notebook] / cells, 0.0

    def _logs(self, notebook: str) -> list[Path]:
        return [*(self.artifacts / notebook).glob("*/*/metrics.jsonl")]

    def _so_far(self, notebook: str) -> float:
        """Seconds since a notebook began, and those that trainings which it uses had taken before."""
        began, _, before = self.running[notebook]
        return time.time() - began + sum(taken for log, taken in before.items() if _used(log, began))


def _rows(log: Path, last: int = 0) -> list[dict[str, Any]]:
    """The last steps of a training, or all of them; not one of which half is written."""
    lines = [line for line in log.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return [json.loads(line) for line in lines[-last:]]


def _used(log: Path, since: float) -> bool:
    """Whether a training has gone on since then, or its model was asked for (`training.train` links it)."""
    link = log.parents[1] / "model"
    linked = link.resolve() == log.parent.resolve() / "model" and link.lstat().st_mtime >= since
    return linked or log.stat().st_mtime >= since
