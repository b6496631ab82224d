"""From a job (preset, stage, starting checkpoint, files) to a trained checkpoint: what a training child
process does, and the one training loop for all stages, on one process or many."""

from __future__ import annotations

import json
import math
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import unmask.training.neighbours  # noqa: F401  (its stages put their names into STAGES)
from unmask.config import TrainConfig, resolved
from unmask.data.tokens import ending
from unmask.models import backbone
from unmask.models.attention import compile_layers, fast_attention
from unmask.run import PREEMPTED
from unmask.store import code_fingerprint, write_atomic
from unmask.training import checkpoint
from unmask.training.distributed import Processes, full_weights
from unmask.training.stages import Job, Stage, identity

LIBRARY = Path(__file__).parents[1]
CODE = ("losses", "data", "models", "training")  # what a checkpoint depends on
MILESTONES = "milestones"  # beside a checkpoint: what it was on its way, in a folder per training
DATA_REPORT = "data.json"  # beside a checkpoint: what its training read
EXPLOSION_WINDOW = 20  # logged steps over which the loss is averaged before it is called exploding


class Preempted(SystemExit):
    """SIGTERM or SIGINT came: the step was finished, a checkpoint written, and the next start goes on."""

    def __init__(self, step: int):
        super().__init__(PREEMPTED)
        self.step = step


def run_job(asked: Mapping[str, Any], report: Callable[[dict[str, Any]], None]) -> Path:
    """Trains what a job says, together with the processes that run the same job, and returns the checkpoint
    directory.

    Args:
        asked: see `stages.Job`.
        report: see `train`.
    """
    job, folder, mark = Job(asked), Path(asked["folder"]), asked["fingerprint"]
    config, stage_class = job.config, job.stage
    processes = Processes.start(config.precision, job.preset.parallel.strategy)
    read = stage_class.prepare(job)
    if processes.main:
        write_atomic(folder / DATA_REPORT, json.dumps(read, indent=1, ensure_ascii=False) + "\n")
    model = stage_class.model(job)
    stage, facts = stage_class.of(job, model), stage_class.facts(job)
    tokenizer = ending(job.tokenizer) if stage_class.ends(config) else job.tokenizer
    path, milestones = folder / "model", folder / MILESTONES / mark

    def save(path: Path, identity: str) -> None:
        weights = full_weights(model)
        if processes.main:
            stage_class.save(model, tokenizer, path, weights=weights, **facts, fingerprint=identity)
        processes.wait()

    def after_step(done: int) -> None:
        if done in job.get("milestones", ()):
            save(milestones / f"step-{done:07d}", f"{mark}-{done}")

    with stop_signals() as signals:  # until the model is saved, which is too late to stop
        train(
            stage, model, config, folder,
            fingerprint=mark, report=report, after_step=after_step, processes=processes, signals=signals,
        )  # fmt: skip
        save(path, mark)
        if processes.main:
            for other in set(milestones.parent.glob("*")) - {milestones}:  # of the training replaced just now
                shutil.rmtree(other)
            finish(folder)
    if signals:  # too late to stop this training, but not the next one
        raise Preempted(config.steps)
    return path


def prepare_data(asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tokenises what a job will read, with a progress bar, in as many processes as there are cores, and finds
    the look-alikes if it trains on such.

    A training does the same where it was not done before, with its GPUs waiting.

    Returns: see `data_report`.
    """
    job = Job(asked)
    return job.stage.prepare(job)


def data_report(checkpoint: Path) -> list[dict[str, Any]]:
    """What the training that made a checkpoint read: a row per data set or text source with what was cut,
    left out and repeated."""
    return json.loads((checkpoint.parent / DATA_REPORT).read_text(encoding="utf8"))


def job_identity(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that the result of a job depends on, by name, so that a message can say what differs: values
    of the preset and of the job, the corpus ("data"), files, the starting point, and "code"."""
    job = Job(asked)
    sections = {asked["stage"]: job.config} | ({} if job.get("start") else {"backbone": job.preset.backbone})
    start = {key: identity(Path(job.get(key))) for key in ("start", "tokenizer") if job.get(key)}
    return {
        **{f"{name}.{key}": value for name, one in sections.items() for key, value in resolved(one).items()},
        "backbone.mask_token": job.preset.backbone.mask_token,
        **{key: job.get(key) for key in ("stage", "groups", "milestones", "bidirectional")},
        **start,
        **job.stage.inputs(job),
        "data": job.corpus.hash,
        "code": code_fingerprint(*(LIBRARY / name for name in CODE)),
    }


def train(
    stage: Stage, model: nn.Module, config: TrainConfig, folder: Path, *, fingerprint: str,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
    after_step: Callable[[int], None] = lambda done: None,
    processes: Processes | None = None, signals: Sequence[int] = (),
) -> nn.Module:  # fmt: skip
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
    betas, groups = (config.beta1, config.beta2), parameter_groups(model, config.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=True)
    checkpoints, log = folder / "checkpoints", folder / "metrics.jsonl"
    if processes.main:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "stopped.json").unlink(missing_ok=True)
    processes.wait()
    last = checkpoint.latest_checkpoint(checkpoints, fingerprint)
    done = checkpoint.load_checkpoint(last, model, optimizer) if last else 0
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
            try:
                row = stage.backward(module, current, step, processes)
            except FloatingPointError as error:  # a loss that was given NaN
                raise stop(str(error), step) from None
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
            seconds = time.perf_counter() - started
            row = {"step": step, **row, "lr": lr, "grad_norm": norm, "seconds": seconds}
            if processes.main:
                report(row)
                if logged:
                    lines.write(json.dumps(row) + "\n")
            after_step(step + 1)
            if not finished and (asked or (step + 1) % config.checkpoint_every == 0):
                if processes.main:
                    lines.flush()
                last = checkpoint.save_checkpoint(
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
    """Removes what the training whose model lies in a folder needs no more. Another one's checkpoints stay:
    somebody paid for them."""
    checkpoint.remove_checkpoints(folder / "checkpoints", backbone.facts(folder / "model").get("fingerprint"))
    shutil.rmtree(folder / "torchrun", ignore_errors=True)


def lr_factor(config: TrainConfig, step: int) -> float:
    """Factor on the peak learning rate at `step` (0-based).

    "wsd": linear warm-up, constant, cosine to zero over the last `decay` steps (pplx-embed, appendix A).
    "cosine", "linear": linear warm-up, then to zero in that form (CDE's is linear). The last step trained
    still has a positive rate.
    """
    if step < config.warmup:
        return (step + 1) / config.warmup
    decay = config.decay if config.schedule == "wsd" else config.steps - config.warmup
    start = config.steps - decay
    if decay == 0 or step < start:
        return 1.0
    share = (step - start) / decay
    return 1 - share if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * share))


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
