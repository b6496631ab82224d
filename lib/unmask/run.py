"""Where things live on disk, and a notebook's view of its run.

artifacts/<run>/<stage>/     checkpoints and logs (large, not committed; UNMASK_ARTIFACTS moves the folder)
papermill_runs/<run>/        executed notebooks
results/<run>/               metrics as JSON, figures, report
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unmask.config import Preset, load_preset
from unmask.store import artifacts_root, fingerprint, read_json, repository, write_json

PREEMPTED = 75  # exit status of what SIGTERM ended in good order; EX_TEMPFAIL: try again


def grace_seconds() -> float:
    """Seconds that a training which is told to stop gets to finish its step and to write a checkpoint."""
    said = os.environ.get("UNMASK_GRACE_SECONDS") or "120"
    if not said.replace(".", "", 1).isdecimal():
        raise ValueError(f"UNMASK_GRACE_SECONDS={said}: give a number of seconds")
    return float(said)


def seed_run(run: str, seed: int) -> str:
    """Name of the run that repeats another one with another seed of its trainings."""
    return f"{run}-seed{seed}"


def seed_runs(results: Path) -> dict[int, Path]:
    """Runs that repeat one with other seeds, on this machine or on others that handed on their results.

    Args:
        results: folder of the run that they repeat; need not exist.
    Returns: seed → folder of that run's results, ascending.
    """
    name = re.compile(rf"{re.escape(results.name)}-seed([1-9]\d*)")
    matches = ((name.fullmatch(path.name), path) for path in results.parent.glob("*"))
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


class Folders:
    """Where the notebooks of a run come from and where its output goes, by default in this checkout."""

    def __init__(self, run: str, root: Path | None = None):
        artifacts = root / "artifacts" if root else artifacts_root()
        self.root = root = root or repository()
        self.notebooks = root / "notebooks"
        self.library = root / "lib" / "unmask"  # the package, whose code is an input of every stage
        self.artifacts = artifacts / run  # checkpoints and logs of this run
        self.logs = self.artifacts / "logs"
        self.executed = root / "papermill_runs" / run  # its executed notebooks
        self.results = root / "results" / run  # its metrics, figures and report

    def done(self, stage: str) -> dict[str, Any]:
        """What was recorded when `stage` finished; nothing where it did not finish."""
        return read_json(self.artifacts / stage / "done.json")

    def repetitions(self, stages: Iterable[str]) -> dict[str, str]:
        """For each run that repeats this one with another seed, a hash of its preset and of
        some stages' results."""
        folders = seed_runs(self.results).values()
        names = [f"{stage}.json" for stage in ("provenance", *stages)]
        saved = {one.name: [read_json(one / name) for name in names] for one in folders}
        made = {name: (about.get("preset"), *rows) for name, (about, *rows) in saved.items() if any(rows)}
        return {name: fingerprint(*rows) for name, rows in made.items()}


@dataclass(frozen=True)
class Run:
    """One run of the recipe as a notebook sees it: its parameters and its folders."""

    stage: str
    name: str
    config: Preset

    @classmethod
    def open(cls, stage: str, preset: str, overrides: dict[str, Any] | None = None, run: str = "") -> "Run":
        """Opens the run `run` (default: the preset's name) for the notebook `stage`, for instance "02_pair",
        and says where its outputs go.

        The notebook counts as due until `unmask run` executes it: changes made by hand are recorded
        nowhere.
        """
        opened = cls(stage, run or preset, load_preset(preset, overrides))
        folder = artifacts_root() / opened.name / stage
        (folder / "done.json").unlink(missing_ok=True)
        changed = "".join(f", {key} = {value!r}" for key, value in (overrides or {}).items())
        print(f"run {opened.name!r}{changed}\ncheckpoints: {folder}\nmetrics and figures: {opened.results}")
        return opened

    def artifacts(self, stage: str | None = None) -> Path:
        """Folder of this stage's checkpoints, or of an earlier stage's, which must exist.

        Raises: FileNotFoundError with the command that makes it.
        """
        path = artifacts_root() / self.name / (stage or self.stage)
        if stage is None:
            path.mkdir(parents=True, exist_ok=True)
        elif not any(path.rglob("config.json")):
            command = f"unmask run --preset {self.config.name} --run {self.name} --to {stage[:2]}"
            raise FileNotFoundError(f"{self.stage} needs {stage}: make it with `{command}` and your --set")
        return path

    def base(self) -> str:
        """The causal backbone that everything starts from: a ready checkpoint, or notebook 00's own."""
        return self.config.backbone.checkpoint or str(self.artifacts("00_backbone") / "ar" / "model")

    @property
    def results(self) -> Path:
        return repository() / "results" / self.name

    def save(self, metrics: dict[str, Any]) -> Path:
        """Writes the metrics of this stage to results/<run>/<stage>.json."""
        return write_json(self.results / f"{self.stage}.json", metrics)

    def load(self, stage: str) -> dict[str, Any]:
        """Metrics that another stage saved; nothing where it did not run."""
        return read_json(self.results / f"{stage}.json")

    def figure(self, figure: Any, name: str) -> None:
        """Lets a figure of `unmask.study.figures` save itself: results/<run>/figures/<stage>-<name>.png and,
        for dark pages, as <stage>-<name>-dark.png; it stays open for the notebook to show."""
        figure.save(self.results / "figures" / f"{self.stage}-{name}.png")
