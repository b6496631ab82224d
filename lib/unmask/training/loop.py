"""One training loop for all stages, on one process or many."""

from __future__ import annotations

import json
import math
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from unmask.config import TrainConfig
from unmask.models.attention import compile_layers, fast_attention
from unmask.models.context_encoder import ContextualEncoder
from unmask.run import PREEMPTED
from unmask.store import write_atomic
from unmask.training.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from unmask.training.distributed import Processes
from unmask.training.schedule import lr_factor
from unmask.training.stages import Stage

EXPLOSION_WINDOW = 20  # logged steps over which the loss is averaged before it is called exploding


class Preempted(SystemExit):
    """SIGTERM or SIGINT came: the step was finished, a checkpoint written, and the next start goes on."""

    def __init__(self, step: int):
        super().__init__(PREEMPTED)
        self.step = step


def train(
    stage: Stage,
    model: PreTrainedModel | ContextualEncoder,
    config: TrainConfig,
    folder: Path,
    *,
    fingerprint: str,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
    after_step: Callable[[int], None] = lambda done: None,
    processes: Processes | None = None,
    signals: Sequence[int] = (),
) -> PreTrainedModel | ContextualEncoder:
    """Trains `model` in place for `config.steps` steps and returns it.

    Every step draws its samples and random numbers from (seed, step) alone. Killed at any moment, the next
    call with the same fingerprint continues from the last checkpoint and ends with the same weights as an
    uninterrupted one; on another number of processes with the same samples in the same order, and weights
    that differ by the rounding of sums.

    Args:
        folder: holds metrics.jsonl (one line per logged step), checkpoints/, and stopped.json after a
            failure.
        fingerprint: identifies configuration, data and starting point; a checkpoint of another one is not
            continued.
        report: called once with "total" and "done" steps, then with each step's metrics, for progress
            displays; on the main process only.
        after_step: called on every process with the number of steps done, before the checkpoint of that step
            is written: after a restart it is called again unless that checkpoint was.
        processes: this process and its peers; default: alone.
        signals: from `stop_signals`; once there is one, on any process, the step is finished, a checkpoint
            written and the training stopped.
    Raises:
        FloatingPointError: the loss or the gradient is not finite, or the loss explodes.
        OSError: a checkpoint cannot be written.
        Preempted: a signal came.
    """
    processes = processes or Processes.start(config.precision)
    torch.manual_seed(config.seed)
    if config.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    if config.compile:
        compile_layers(model)
    model.train()
    module = processes.parallel(stage.module(model))
    optimizer = torch.optim.AdamW(
        parameter_groups(model, config.weight_decay),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        fused=True,
    )
    checkpoints, log = folder / "checkpoints", folder / "metrics.jsonl"
    if processes.main:
        checkpoints.mkdir(parents=True, exist_ok=True)
        (folder / "stopped.json").unlink(missing_ok=True)
        latest_checkpoint(checkpoints, fingerprint)  # removes what is of no use
    processes.wait()
    last, done = latest_checkpoint(checkpoints, fingerprint), 0
    if last:
        done = load_checkpoint(last, model, optimizer)
    losses = _keep_rows(log, done, write=processes.main)
    if processes.main:
        report({"total": config.steps, "done": done})

    def stop(reason: str, step: int) -> FloatingPointError:
        facts = {"step": step, "reason": reason, **stage.samples(step), "checkpoint": last and str(last)}
        if processes.main:
            write_atomic(folder / "stopped.json", json.dumps(facts) + "\n")
        rows = facts["rows"]
        shown = ", ".join(map(str, rows[:8])) + (f", … ({len(rows)} in all)" if len(rows) > 8 else "")
        return FloatingPointError(
            f"{reason} at step {step}: lower lr or clip, or look at the batch (rows {shown} of data set "
            f"{facts['dataset']!r}; all in {folder / 'stopped.json'}); last good checkpoint: {last or 'none'}"
        )

    with (
        fast_attention(),
        log.open("a", encoding="utf8") if processes.main else nullcontext() as lines,
        ThreadPoolExecutor(1) as loader,
    ):
        # The next batch is made while the current one is trained on.
        batch = loader.submit(stage.batch, done) if done < config.steps else None
        for step in range(done, config.steps):
            started = time.perf_counter()
            torch.manual_seed(config.seed * 1_000_003 + step + processes.rank * 7_368_787)
            lr = config.lr * lr_factor(config, step)
            for group in optimizer.param_groups:
                group["lr"] = lr
            current = batch.result()
            if step + 1 < config.steps:
                batch = loader.submit(stage.batch, step + 1)
            row = stage.backward(module, current, step, processes)
            # Every process asks whether any of them was told to stop, so that all stop at the same step.
            asked = processes.sum(torch.tensor(float(bool(signals)), device=processes.device))
            norm = _clip(model, config.clip)
            row["loss"], norm, asked = torch.stack([row["loss"].float(), norm.float(), asked]).tolist()
            for what, value in (("loss", row["loss"]), ("gradient norm", norm)):
                if not math.isfinite(value):
                    raise stop(f"{what} is {value}", step)
            finished = step + 1 == config.steps
            logged = finished or step % config.log_every == 0
            if logged:  # the others are not known after a restart
                losses.append(row["loss"])
            if exploding(losses, config.explode):
                raise stop(f"the loss is {config.explode:g} times what it was at the start", step)
            optimizer.step()
            optimizer.zero_grad()
            row = {
                "step": step,
                **row,
                "lr": lr,
                "grad_norm": norm,
                "seconds": time.perf_counter() - started,
            }
            if processes.main:
                report(row)
                if logged:
                    lines.write(json.dumps(row) + "\n")
            after_step(step + 1)
            if not finished and (asked or (step + 1) % config.checkpoint_every == 0):
                if processes.main:
                    lines.flush()
                last = save_checkpoint(
                    checkpoints, model, optimizer, step + 1, fingerprint,
                    keep=config.keep_checkpoints, processes=processes,
                )  # fmt: skip
                if asked:
                    raise Preempted(step + 1)
    return model.eval()


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collects SIGTERM and SIGINT instead of dying of them.

    SIGTERM may come several times, from torchrun, the notebook and the batch system; whoever cannot wait
    sends SIGKILL. A second SIGINT has its usual effect.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield received
        return
    before = {}

    def handler(number: int, frame: object) -> None:
        received.append(number)
        if number == signal.SIGINT:
            signal.signal(number, before[number])

    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def finish(folder: Path) -> None:
    """Removes what a training needs no more once its result is saved."""
    for name in ("checkpoints", "torchrun"):
        shutil.rmtree(folder / name, ignore_errors=True)


def exploding(losses: Sequence[float], factor: float) -> bool:
    """Whether the loss, averaged over the last steps, is `factor` times what it was over the first ones.

    One nat counts as the smallest start, since a fine-tuning may begin near zero. A factor of 0 never stops.
    """
    if not factor or len(losses) < 2 * EXPLOSION_WINDOW:
        return False
    start = sum(losses[:EXPLOSION_WINDOW]) / EXPLOSION_WINDOW
    return sum(losses[-EXPLOSION_WINDOW:]) / EXPLOSION_WINDOW > factor * max(start, 1.0)


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, gains of norms do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def _clip(model: torch.nn.Module, threshold: float) -> torch.Tensor:
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), threshold)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # FSDP2 leaves it in parts


def _keep_rows(log: Path, done: int, *, write: bool) -> list[float]:
    """The losses of the steps done; drops log lines of steps that will be trained again, and a half-written
    last line."""
    kept, losses = [], []
    for line in log.read_text(encoding="utf8").splitlines() if log.is_file() else []:
        try:
            row = json.loads(line)
        except ValueError:
            break
        if row["step"] < done:
            kept.append(line + "\n")
            losses.append(row["loss"])
    if write and log.is_file():
        write_atomic(log, "".join(kept))
    return losses
