"""One training loop for all stages, on accelerate."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from unmask.config import TrainConfig
from unmask.training.cache import Context
from unmask.training.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from unmask.training.schedule import lr_factor
from unmask.training.stages import Stage
from unmask.workspace import write_atomic


def train(
    stage: Stage,
    model: PreTrainedModel,
    config: TrainConfig,
    folder: Path,
    *,
    fingerprint: str,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> PreTrainedModel:
    """Trains `model` in place for `config.steps` steps and returns it.

    Every step draws its samples and random numbers from (seed, step) alone. Killed at any moment, the next
    call with the same fingerprint continues from the last checkpoint and ends with the same weights as an
    uninterrupted one.

    Args:
        folder: holds metrics.jsonl (one line per logged step) and checkpoints/.
        fingerprint: identifies configuration, data and starting point; a checkpoint of another one is not
            continued.
        report: called once with "total" and "done" steps, then with each step's metrics, for progress
            displays.
    Raises: FloatingPointError at the first loss that is not finite; OSError if a checkpoint cannot be
        written.
    """
    accelerator = Accelerator(mixed_precision="bf16" if config.precision == "bf16" else "no")
    if accelerator.num_processes > 1:
        raise ValueError("training on several processes is not supported yet: start one process")
    torch.manual_seed(config.seed)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, config.weight_decay),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        fused=True,
    )
    model.train()
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    model = accelerator.unwrap_model(wrapped)
    context = Context(accelerator.device, accelerator.autocast, accelerator.backward)

    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    done, inner = 0, optimizer.optimizer
    if last := latest_checkpoint(checkpoints, fingerprint):
        done = load_checkpoint(last, model, inner)
    log = folder / "metrics.jsonl"
    _keep_rows(log, done)
    report({"total": config.steps, "done": done})

    with log.open("a", encoding="utf8") as lines:
        for step in range(done, config.steps):
            started = time.perf_counter()
            torch.manual_seed(config.seed * 1_000_003 + step)
            lr = config.lr * lr_factor(config, step)
            for group in inner.param_groups:
                group["lr"] = lr
            row = stage.backward(wrapped, stage.batch(step), step, context)
            norm = float(accelerator.clip_grad_norm_(wrapped.parameters(), config.clip))
            for what, value in (("loss", row["loss"]), ("gradient norm", norm)):
                if not math.isfinite(value):
                    raise FloatingPointError(
                        f"{what} is {value} at step {step}: lower lr or clip; "
                        f"last good checkpoint: {last or 'none'}"
                    )
            optimizer.step()
            optimizer.zero_grad()
            row = {
                "step": step,
                **row,
                "lr": lr,
                "grad_norm": norm,
                "seconds": time.perf_counter() - started,
            }
            report(row)
            if step % config.log_every == 0 or step + 1 == config.steps:
                lines.write(json.dumps(row) + "\n")
            if (step + 1) % config.checkpoint_every == 0 and step + 1 < config.steps:
                lines.flush()
                save_checkpoint(checkpoints, model, inner, step + 1, fingerprint)
                last = checkpoints / f"step-{step + 1:07d}"
    return model.eval()


def finish(folder: Path) -> None:
    """Removes the checkpoints of a training whose result is saved."""
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, gains of norms do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def _keep_rows(log: Path, done: int) -> None:
    """Drops log lines of steps that will be trained again, and a half-written last line."""
    if not log.is_file():
        return
    kept = []
    for line in log.read_text(encoding="utf8").splitlines():
        try:
            if json.loads(line)["step"] < done:
                kept.append(line + "\n")
        except ValueError:
            break
    write_atomic(log, "".join(kept))
