"""Where things live on disk, and a notebook's view of its run.

artifacts/<run>/<stage>/     checkpoints and logs (large, not committed; UNMASK_ARTIFACTS moves the folder)
papermill_runs/<run>/        executed notebooks
results/<run>/               metrics as JSON, figures, report
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.figure import Figure

    from unmask.config import Preset

GRACE = 120.0  # seconds, see grace_seconds
PREEMPTED = 75  # exit status of what SIGTERM ended in good order; EX_TEMPFAIL: try again
ANNOUNCEMENT = ".trainings.json"  # in a run's artifacts: what the first machine tells the others


def repository() -> Path:
    """Top level of the checkout that the package runs from."""
    return Path(__file__).resolve().parents[2]


def artifacts_root() -> Path:
    """Folder of everything large and reproducible."""
    return Path(os.environ.get("UNMASK_ARTIFACTS") or repository() / "artifacts").resolve()


def grace_seconds() -> float:
    """Seconds that a training which is told to stop gets to finish its step and to write a checkpoint.

    Raises: ValueError if UNMASK_GRACE_SECONDS, which changes them, is no number of seconds.
    """
    text = os.environ.get("UNMASK_GRACE_SECONDS") or str(GRACE)
    with contextlib.suppress(ValueError):
        if 0 <= (seconds := float(text)) < math.inf:
            return seconds
    raise ValueError(f"UNMASK_GRACE_SECONDS={text}: give a number of seconds, for instance {GRACE:.0f}")


def seed_run(run: str, seed: int) -> str:
    """Name of the run that repeats another one with another seed of its trainings."""
    return f"{run}-seed{seed}"


def seed_runs(artifacts: Path) -> dict[int, Path]:
    """Runs that repeat one with other seeds on this machine.

    Args:
        artifacts: folder of the run that they repeat; need not exist.
    Returns: seed → folder of that run's artifacts, ascending.
    """
    name = re.compile(rf"{re.escape(artifacts.name)}-seed([1-9]\d*)")
    matches = ((name.fullmatch(path.name), path) for path in artifacts.parent.glob("*"))
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def require_checkpoint(path: str | Path, *, weights: bool = True) -> str:
    """The path as the libraries want it, once it is sure to be a checkpoint directory or a Hub name.

    A model that a package carries and a GGUF file become directories first, see `unmask.pretrained`. A Hub
    name that UNMASK_MIRROR holds is the folder there.

    Raises: ValueError that says what is missing.
    """
    from unmask import pretrained

    if str(path) in pretrained.PACKAGES:
        return str(pretrained.packaged(str(path)))
    folder = Path(path)
    if folder.suffix == ".gguf" and folder.is_file():
        return str(pretrained.from_gguf(folder))
    looks_local = (
        isinstance(path, Path) or folder.is_absolute() or str(path).startswith(".") or folder.exists()
    )
    if not looks_local and str(path).count("/") <= 1:
        from unmask import mirror

        folder = mirror.local(str(path))
        if folder is None:
            return str(path)
    if not folder.is_dir():
        raise ValueError(f"{path} is no checkpoint: there is no such directory")
    wanted = ["config.json"] if weights else ["tokenizer.json"]
    missing = [name for name in wanted if not (folder / name).is_file()]
    if weights and not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise ValueError(f"{path} is no checkpoint: {' and '.join(missing)} missing")
    return str(folder)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name to write a file under, which becomes `path` once it is whole: a reader sees the old or the new
    content, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, text: str) -> Path:
    """Writes a text file, see `replacing`."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf8")
    return path


@dataclass(frozen=True)
class Run:
    """One run of the recipe as a notebook sees it: its parameters and its folders."""

    stage: str
    name: str
    config: Preset

    @classmethod
    def open(cls, stage: str, preset: str, overrides: dict[str, Any] | None = None, run: str = "") -> Run:
        """Opens the run `run` (default: the preset's name) for the notebook `stage`, for instance "02_pair",
        and says where its outputs go.

        With overrides the notebook is due again for `unmask run`, which knows nothing of those set by hand.
        """
        from unmask.config import load_preset

        opened = cls(stage, run or preset, load_preset(preset, overrides))
        folder = artifacts_root() / opened.name / stage
        if overrides:
            (folder / "done.json").unlink(missing_ok=True)
        changed = "".join(f", {key} = {value!r}" for key, value in (overrides or {}).items())
        print(f"run {opened.name!r}{changed}")
        print(f"checkpoints: {folder}\nmetrics and figures: {opened.results}")
        return opened

    def artifacts(self, stage: str | None = None) -> Path:
        """Folder of this stage's checkpoints, or of an earlier stage's, which must exist.

        Raises: FileNotFoundError with the command that makes it.
        """
        path = artifacts_root() / self.name / (stage or self.stage)
        if stage is None:
            path.mkdir(parents=True, exist_ok=True)
        elif not path.is_dir():
            named = "" if self.name == self.config.name else f" --run {self.name}"
            number = stage.partition("_")[0]
            raise FileNotFoundError(
                f"{self.stage} needs the output of {stage}: run the earlier notebooks first, "
                f"for instance with `unmask run --preset {self.config.name} --to {number}{named}`"
            )
        return path

    def base(self) -> str:
        """The causal backbone that everything starts from: a ready checkpoint, or notebook 00's own."""
        ready = self.config.backbone.checkpoint
        return require_checkpoint(ready or self.artifacts("00_backbone") / "ar" / "model")

    @property
    def results(self) -> Path:
        return repository() / "results" / self.name

    def save(self, metrics: dict[str, Any], name: str | None = None) -> Path:
        """Writes the metrics of this stage to results/<run>/<stage>.json."""
        text = json.dumps(metrics, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        return write_atomic(self.results / f"{name or self.stage}.json", text)

    def load(self, stage: str) -> dict[str, Any] | None:
        """Metrics that another stage saved; None where it did not run."""
        path = self.results / f"{stage}.json"
        return json.loads(path.read_text(encoding="utf8")) if path.is_file() else None

    def figure(self, figure: Figure, name: str) -> Path:
        """Saves a figure as results/<run>/figures/<stage>-<name>.png, its twin for dark pages as
        <stage>-<name>-dark.png beside it, and leaves it open for the notebook to show."""
        from unmask.figures import save

        return save(figure, self.results / "figures" / f"{self.stage}-{name}.png")
