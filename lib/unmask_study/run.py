"""Where things live on disk, and a notebook's view of its run.

artifacts/<run>/<notebook>/  checkpoints and logs (large, not committed; UNMASK_ARTIFACTS moves the folder)
papermill_runs/<run>/        executed notebooks
results/<run>/               metrics as JSON, figures, report
"""

import gc
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unmask.store import artifacts_root, read_json, repository, write_json
from unmask_study.settings import Preset, load_preset

LAB = "lab"  # the run of notebooks that are opened by hand; a folder for each preset
PAGE = "12_report"  # the notebook that is published as the report


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
    """Where the notebooks of a run come from and where its output goes."""

    def __init__(self, run: str):
        self.run, root = run, repository()
        self.notebooks = root / "notebooks"
        self.library = root / "lib"  # both packages, whose code is an input of every notebook
        self.artifacts = artifacts_root() / run  # checkpoints and logs of this run
        self.logs = self.artifacts / "logs"
        self.executed = root / "papermill_runs" / run  # its executed notebooks
        self.results = root / "results" / run  # its metrics, figures and report


@dataclass(frozen=True)
class Run:
    """One run of the recipe as a notebook sees it: its parameters and its folders.

    A notebook that is opened by hand works in the run "lab", of its preset. It reads what it needs from there
    if it is there, otherwise from the preset's own run, and writes to folders of its own only.
    """

    notebook: str
    name: str
    config: Preset

    @classmethod
    def open(cls, notebook: str, preset: str, overrides: dict | None = None, run: str = "") -> "Run":
        """Opens a run for a notebook, for instance "02_pair", and says where its outputs go.

        Args:
            run: its name; empty: the lab.
        """
        opened = cls(notebook, run or f"{LAB}/{preset}", load_preset(preset, overrides))
        changed = "".join(f", {key} = {value!r}" for key, value in (overrides or {}).items())
        print(f"run {opened.name!r}{changed}")
        print(f"checkpoints: {opened.root / notebook}\nmetrics and figures: {opened.results}")
        gc.freeze()  # what was imported stays; to look through it whenever a model is freed takes the longest
        return opened

    @property
    def root(self) -> Path:
        """Of everything large."""
        return artifacts_root() / self.name

    def folder(self, name: str) -> Path:
        """Where this notebook's trainings of a name lie."""
        return self.artifacts() / name

    def artifacts(self, notebook: str | None = None) -> Path:
        """Folder of what this notebook makes, or of what an earlier one has made, which must be there.

        Raises: FileNotFoundError with the command that makes it.
        """
        if notebook is None:
            (path := self.root / self.notebook).mkdir(parents=True, exist_ok=True)
            return path
        for name in self._sources():
            path = artifacts_root() / name / notebook
            if any(path.rglob("config.json")):
                if name != self.name:
                    print(f"{notebook}: taken from run {name!r}")
                return path
        preset, run, number = self.config.name, self.recorded.name, notebook.partition("_")[0]
        command = f"unmask run --preset {preset}{f' --run {run}' * (run != preset)} --to {number}"
        remedy = f"make it with `{command}` and your --set; --dry-run says how long that takes"
        raise FileNotFoundError(f"{self.notebook} needs {notebook}: {remedy}")

    @property
    def recorded(self) -> "Run":
        """The run that counts as evidence: this one, or of the lab the preset's own, which `unmask run` makes
        and keeps the record of."""
        return replace(self, name=self._sources()[-1])

    def _sources(self) -> list[str]:
        """Runs in which this one looks for what it needs, the nearest first."""
        return [self.name, self.config.name] if self.name.startswith(f"{LAB}/") else [self.name]

    def base(self) -> str:
        """The causal backbone that everything starts from: a ready checkpoint, or notebook 00's own, trained
        or cut short."""
        ready = self.config.backbone
        if ready.checkpoint and not ready.keep_layers:
            return ready.checkpoint
        return str(self.artifacts("00_backbone") / ("cut" if ready.keep_layers else "ar") / "model")

    @property
    def results(self) -> Path:
        return repository() / "results" / self.name

    def save(self, metrics: dict[str, Any]) -> Path:
        """Writes the metrics of this notebook to results/<run>/<notebook>.json."""
        return write_json(self.results / f"{self.notebook}.json", metrics)

    def load(self, notebook: str) -> dict[str, Any]:
        """Metrics that another notebook saved; nothing where it did not run."""
        saved = (read_json(repository() / "results" / name / f"{notebook}.json") for name in self._sources())
        return next(filter(None, saved), {})

    def figure(self, figure: Any, name: str, text: str = "") -> None:
        """Lets a figure of `unmask_study.figures` save and show itself, as
        results/<run>/figures/<notebook>-<name>.png."""
        figure.keep(self.results / "figures" / f"{self.notebook}-{name}.png", text)
