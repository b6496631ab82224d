"""What is seen of a training while it runs: a bar, and in a notebook the curve of its loss, which grows."""

import copy
import io
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from time import monotonic
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from unmask.extras import extra
from unmask.store import write_atomic

METRICS = "metrics.jsonl"  # in a training's folder: a line for each step
PROBES = "probes.jsonl"  # and a line for each tenth of the steps, if something is measured meanwhile
TENTHS = 10
PAUSE = 5  # seconds between two curves, of which one takes a tenth
Probe = Callable[[nn.Module], dict[str, float]]
Bars = Mapping[str, float]


def draws() -> bool:
    """Whether this process is the kernel of a notebook, and has what a curve takes."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return hasattr(shell, "kernel") and find_spec("matplotlib") is not None


def history(checkpoint: str | Path) -> list[dict[str, Any]]:
    """The logged metrics of the training that made a checkpoint."""
    return _rows(Path(checkpoint).resolve().with_name(METRICS))


def probes(checkpoint: str | Path) -> list[dict[str, Any]]:
    """What was measured of a training on its way (`Watch.probe`): rows with "step", "seconds" of training so
    far, and the values; none where nothing was."""
    file = Path(checkpoint).resolve().with_name(PROBES)
    return _rows(file) if file.is_file() else []


def _rows(file: Path) -> list[dict[str, Any]]:
    lines = file.read_text(encoding="utf8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]  # else half of it was written


def seconds_until(rows: Sequence[dict[str, Any]], bar: float) -> float | None:
    """Seconds of training after which the mean of a probe's values stays above a bar; None: it does not."""
    above = [row["seconds"] for row in itertools.takewhile(lambda row: quality(row) > bar, reversed(rows))]
    return min(above, default=None)


def quality(row: dict[str, Any]) -> float:
    """The mean of a probe's values."""
    return mean(value for name, value in row.items() if name not in ("step", "seconds"))


class Watch:
    """Called with "total" and "done" steps, then with each step's metrics, see `loop.steps`.

    Args:
        curve: whether a notebook shows the curve, too.
        title: of the bar; default: notebook and name of the training.
        probe: measures the model every tenth of the steps, for instance nDCG@10 of some tasks by name; drawn
            beneath the loss. It gets a copy, and takes no time of the training's. Only a training in this
            process is measured.
        bars: levels to compare with, by name.
        label: what the probe measures; lower: whether less is better, so that its axis need not begin at 0.
    """

    def __init__(
        self,
        *,
        curve: bool = True,
        title: str = "",
        probe: Probe | None = None,
        bars: Bars | None = None,
        label: str = "nDCG@10",
        lower: bool = False,
    ):
        self.curve, self.title = curve and draws(), title
        self.probe, self.bars, self.label, self.lower = probe, bars or {}, label, lower
        self.bar = tqdm(disable=True)

    def open(self, title: str, folder: Path) -> None:
        """Says what is trained, and in which folder."""
        self.title, self.folder = self.title or title, folder
        self.loss, self.probed, self.handle, self.next, self.size = [], [], None, 0.0, 0

    def replay(self, title: str, folder: Path) -> None:
        """Shows a training that is finished, as it was seen in the end."""
        self.open(title, folder)
        rows, self.probed = history(folder / METRICS), probes(folder / METRICS)
        self.loss, self.total = [row["loss"] for row in rows], len(rows)
        seconds = sum(row["seconds"] for row in rows)
        print(f"{self.title}: trained before, {self.total} steps in {seconds:.0f} s")
        if self.curve:
            self.draw()

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *error: object) -> None:
        if self.curve and self.loss:
            self.draw()
        self.bar.close()

    def __call__(self, row: dict[str, Any]) -> None:
        if "total" in row:
            self._begin(row["total"], row["done"])
            return
        self.loss.append(row["loss"])
        self.bar.set_postfix_str(f"loss {row['loss']:.3f}", refresh=False)
        self.bar.update()
        if self.curve and monotonic() >= self.next:
            self.draw()
            self.next = monotonic() + PAUSE

    def _begin(self, total: int, done: int) -> None:
        """Shows what an interrupted training has done already."""
        self.loss = [row["loss"] for row in history(self.folder / METRICS)[:done]] if done else []
        self.probed = [row for row in probes(self.folder / METRICS) if row["step"] <= done]
        write_atomic(self.folder / PROBES, "".join(json.dumps(row) + "\n" for row in self.probed))
        self.bar.close()
        self.total = total
        if self.curve:
            self.draw()  # first, so that the bar below it stays in one piece
        options = {"total": total, "initial": done, "unit": "step", "mininterval": 1}
        self.bar = tqdm(desc=self.title, file=sys.stdout, **options)

    def read(self) -> None:
        """Shows what other processes have logged since the last look."""
        log = self.folder / METRICS
        if log.is_file() and log.stat().st_size != self.size:
            self.size = log.stat().st_size
            for line in log.read_bytes().splitlines(keepends=True)[len(self.loss) :]:
                if line.endswith(b"\n"):  # else half of it is written
                    self(json.loads(line))

    def measure(self, model: nn.Module, step: int) -> None:
        """Measures the model after every tenth of the steps, and logs what comes out."""
        if not self.probe or step + 1 not in [round(self.total * n / TENTHS) for n in range(1, TENTHS + 1)]:
            return
        seconds = sum(row["seconds"] for row in history(self.folder / METRICS))
        as_it_was = torch.random.fork_rng(devices=range(torch.cuda.device_count()))
        with as_it_was, torch.compiler.set_stance("force_eager"):
            row = {"step": step + 1, "seconds": seconds} | self.probe(copy.deepcopy(model))
        self.probed.append(row)
        with (self.folder / PROBES).open("a", encoding="utf8") as lines:
            lines.write(json.dumps(row) + "\n")

    def draw(self) -> None:
        """Shows the curve, in the place of the one before. One that cannot be drawn is the last."""
        try:
            with extra("study"):  # a second to import
                from IPython.display import Image, display  # noqa: PLC0415
                from matplotlib import style  # noqa: PLC0415
            with style.context("default"):  # whatever the user's matplotlibrc says
                picture = Image(self._picture(), alt=f"loss of {self.title}")
            if self.handle:
                self.handle.update(picture)
            else:
                self.handle = display(picture, display_id=True)
        except Exception as error:
            self.curve, why = False, " ".join(str(error).split())
            tqdm.write(f"no curve ({type(error).__name__}: {why:.200}); the training goes on")

    def _picture(self) -> bytes:
        with extra("study"):
            import pandas as pd  # noqa: PLC0415
            from matplotlib.figure import Figure  # noqa: PLC0415
        figure = Figure(figsize=(6, 4.0 if self.probe else 2.2), layout="constrained")
        axes, *beneath = figure.subplots(2 if self.probe else 1, squeeze=False, sharex=True).flat
        axes.plot(self.loss, color="C0", alpha=0.3, linewidth=0.8)
        axes.plot(pd.Series(self.loss).ewm(alpha=0.1).mean(), color="C0")
        axes.set(title=self.title, ylabel="loss (nats)", xlim=(0, max(self.total, 2) - 1))
        for below in beneath:
            at = [row["step"] - 1 for row in self.probed]  # after this step, as the loss counts them
            below.plot(at, list(map(quality, self.probed)), marker="o", color="C0", label="this model")
            for style, (name, level) in zip(itertools.cycle(("--", ":", "-.")), self.bars.items()):
                below.axhline(level, color="0.4", linestyle=style, label=name)
            below.set(ylabel=self.label, ylim=(None if self.lower else 0, None))
            below.legend(frameon=False, ncols=3)
        figure.axes[-1].set_xlabel("step")
        for each in figure.axes:
            each.spines[["top", "right"]].set_visible(False)
        file = io.BytesIO()
        figure.savefig(file, dpi=100)
        return file.getvalue()
