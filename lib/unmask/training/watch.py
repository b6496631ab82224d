"""What is seen of a training while it runs: a bar, and in a notebook the curve of its loss, which grows."""

import io
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

from tqdm import tqdm

from unmask.extras import extra

METRICS = "metrics.jsonl"  # in a training's folder: a line for each step
RARE = 30  # times what drawing takes: the least between two curves


def draws() -> bool:
    """Whether this process is the kernel of a notebook, and has what a curve takes."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return hasattr(shell, "kernel") and find_spec("matplotlib") is not None


def history(checkpoint: Path) -> list[dict[str, Any]]:
    """The logged metrics of the training that made a checkpoint."""
    lines = (checkpoint.resolve().parent / METRICS).read_text(encoding="utf8").splitlines()
    return [json.loads(line) for line in lines]


class Watch:
    """Called with "total" and "done" steps, then with each step's metrics, see `loop.steps`.

    Args:
        curve: whether a notebook shows the curve, too.
        title: of the bar; default: notebook and name of the training.
    """

    def __init__(self, *, curve: bool = True, title: str = ""):
        self.curve, self.title = curve and draws(), title
        self.bar = tqdm(disable=True)

    def open(self, title: str, folder: Path, before: Sequence[dict[str, Any]] = ()) -> None:
        """Says what is trained, in which folder, and the steps of the last training of this name, whose curve
        is drawn beneath."""
        self.title, self.folder = self.title or title, folder
        self.before = [row["loss"] for row in before]
        self.loss, self.handle, self.next, self.size = [], None, 0.0, 0

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *error: object) -> None:
        if self.curve and self.loss:
            self.draw()
        self.bar.close()

    def read(self) -> None:
        """Shows what other processes have logged since the last look."""
        log = self.folder / METRICS
        size = log.stat().st_size if log.is_file() else 0
        if size == self.size:  # nothing new
            return
        self.size, lines = size, log.read_bytes().splitlines(keepends=True)
        for line in lines[len(self.loss) :]:
            if line.endswith(b"\n"):  # else half of it is written
                self(json.loads(line))

    def __call__(self, row: dict[str, Any]) -> None:
        if "total" in row:
            log = self.folder / METRICS
            lines = log.read_text(encoding="utf8").splitlines()[: row["done"]] if row["done"] else []
            self.loss = [json.loads(line)["loss"] for line in lines]
            self.bar.close()
            self.total = row["total"]
            if self.curve:
                self.draw()  # first, so that the bar below it stays in one piece
            about = {"total": self.total, "initial": row["done"], "unit": "step"}
            self.bar = tqdm(desc=self.title, mininterval=1, file=sys.stdout, **about)
            return
        self.loss.append(row["loss"])
        self.bar.set_postfix_str(f"loss {row['loss']:.3f}", refresh=False)
        self.bar.update()
        if self.curve and monotonic() >= self.next:
            began = monotonic()
            self.draw()
            self.next = monotonic() + max(1.0, RARE * (monotonic() - began))

    def draw(self) -> None:
        """Shows the curve, in the place of the one before. One that cannot be drawn is the last."""
        try:
            with extra("study"):  # a second to import
                from matplotlib import style  # noqa: PLC0415
            with style.context("default"):  # whatever the user's matplotlibrc says
                self._draw()
        except Exception as error:
            self.curve, why = False, " ".join(str(error).split())
            tqdm.write(f"no curve ({type(error).__name__}: {why:.200}); the training goes on")

    def _draw(self) -> None:
        with extra("study"):
            from IPython.display import Image, display  # noqa: PLC0415
            from matplotlib.figure import Figure  # noqa: PLC0415

        figure = Figure(figsize=(6, 2.2), layout="constrained")
        axes = figure.subplots()
        axes.plot(self.loss, color="C0", alpha=0.3, linewidth=0.8)
        for told, color, loss in (("the last training", "0.75", self.before), ("this one", "C0", self.loss)):
            axes.plot(smoothed(loss), color=color, label=told)
        steps = max(self.total, len(self.before), 2)
        axes.set(xlabel="step", ylabel="loss (nats)", xlim=(0, steps - 1))
        axes.spines[["top", "right"]].set_visible(False)
        if self.before:
            axes.legend(frameon=False)
        file = io.BytesIO()
        figure.savefig(file, dpi=100)
        picture = Image(file.getvalue(), alt=f"loss of {self.title}")
        if self.handle:
            self.handle.update(picture)
        else:
            self.handle = display(picture, display_id=True)


def smoothed(values: Sequence[float], share: float = 0.1) -> list[float]:
    """Exponential moving average, each value of which counts only what came before: no start is zero."""
    found, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = (1 - share) * total + value, (1 - share) * weight + 1
        found.append(total / weight)
    return found
