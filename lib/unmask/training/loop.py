"""One training loop for all stages. First what a training computes; then how it goes on after an
interruption, in this process or in several:

train(stage, model, folder)  →  this process: run(stage, model, …)  →  steps  →  optimize
                             →  several: launch(job)  →  torchrun  →  worker  →  run(stage, model, …)
"""

import copy
import gc
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from unmask.children import on_signal, settle
from unmask.config import TrainConfig, resolved
from unmask.models import backbone
from unmask.models.attention import fast_attention, plain_attention
from unmask.store import alone, link, write_atomic, write_json
from unmask.training.checkpoint import CHECKPOINTS, checkpoints, load_checkpoint, save_checkpoint
from unmask.training.distributed import Distributed, full_weights, refresh, trainable
from unmask.training.identity import home_of, identity
from unmask.training.job import JOB
from unmask.training.launch import STOP, TrainingStopped, launch, several
from unmask.training.stages import Stage
from unmask.training.watch import METRICS, Watch

MILESTONES = "milestones"  # beside a checkpoint: what it was on its way
DATA_REPORT = "data.json"  # beside a checkpoint: what its training read
READ = ("rows", "tokens", "texts", "blocks", "held out")  # of its numbers, those that are no loss
RARE = 30  # times what a checkpoint takes: the least between two of them, on a slow disk
Row = dict[str, Any]  # what is logged of a step
Report = Callable[[Row], None]


def optimize(
    stage: Stage, model: nn.Module, forward: nn.Module, optimizer: Optimizer, steps: range, peers: Distributed
) -> Iterator[Row]:
    """Trains a model for some steps, and yields what each of them computed.

    A step draws its batch and its random numbers from (seed, step) alone.

    Args:
        model: its weights, in float32, which the optimiser steps.
        forward: what computes with them, `stage.module(model)` or a copy of that in bfloat16.
    """
    for step, batch in prefetched(stage.batch, steps):
        refresh(forward, model)
        row = backward(stage, model, forward, batch, step, peers)  # the loss, and gradients in `model`
        peers.sum_gradients(model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), stage.config.clip, foreach=True)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm  # FSDP2 leaves it in parts
        lr = stage.config.lr * lr_factor(stage.config, step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        # A loss or norm that is no number leaves weights and moments as they are.
        optimizer.found_inf = 1.0 - (row["loss"].float() + norm.float()).isfinite().float()
        optimizer.step()
        optimizer.zero_grad()
        yield {"step": step} | row | {"grad_norm": norm, "lr": lr}


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
    if step < start:
        return 1.0
    share = (step - start) / decay
    return 1 - share if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * share))


def prefetched(make: Callable[[int], Any], steps: range) -> Iterator[tuple[int, Any]]:
    """Each step with its batch; the next batch is made while the current one is trained on."""
    with ThreadPoolExecutor(1) as loader:
        coming = loader.submit(make, steps.start)
        for step in steps:
            batch = coming.result()
            coming = loader.submit(make, step + 1) if step + 1 in steps else None
            yield step, batch


def backward(
    stage: Stage, model: nn.Module, forward: nn.Module, batch: Any, step: int, processes: Distributed
) -> Row:
    """`stage.backward`; where memory does not hold it, again with half the tokens at a time, from then on.

    Raises: torch.OutOfMemoryError if nothing smaller is left to try, or there are other processes, which wait
        for this one.
    """
    while True:
        torch.manual_seed((stage.config.seed * 1_000_003 + step + processes.rank * 7_368_787) % 2**63)
        try:
            return stage.backward(forward, batch, processes)
        except torch.OutOfMemoryError:
            pass  # what the error refers to is free from here on
        section, smaller = stage.job.section, stage.config.halved(processes.device.type)
        if not smaller or processes.accelerator:  # whose peers, and FSDP2, are in the middle of a pass
            keys = ", ".join(f"{section}.{key}={value}" for key, value in smaller.items())
            keys = keys or f"{section}.gradient_checkpointing=true, lower lengths, or parallel.strategy=fsdp2"
            raise torch.OutOfMemoryError(f"memory does not hold a micro-batch of {section}: set {keys}")
        stage.config = replace(stage.config, **smaller)
        torch.compiler.reset()  # else the graph for the next size would be one for all sizes
        model.zero_grad()
        gc.collect()
        torch.cuda.empty_cache()


# --- how it computes, and what is written of it


def equip(stage: Stage, model: nn.Module, processes: Distributed) -> tuple[nn.Module, Optimizer]:
    """Makes a model compute as suits config and device, for good; returns what is run forward of it on all
    processes, and the optimiser."""
    config, on_cpu = stage.config, processes.device.type == "cpu"
    if getattr(config, "freeze_embeddings", False):
        model.get_input_embeddings().requires_grad_(False)
    if config.gradient_checkpointing:
        backbone.checkpoint_activations(model)
    if processes.half and on_cpu:
        plain_attention(model)
    for part in model.modules() if on_cpu and processes.strategy != "fsdp2" else ():
        if isinstance(part, nn.Embedding):  # else each micro-batch fills a gradient of the vocabulary's size
            part.sparse = True
    same_length = hasattr(config, "length")
    module = stage.module(model.train())
    forward = processes.parallel(module, compiled=config.compile, same_length=same_length)
    groups = parameter_groups(model, config.weight_decay)  # FSDP2 has put others in place
    return forward, AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, gains of norms do not. What is frozen is left out."""
    matrices, gains = ([p for p in trainable(model) if (p.ndim >= 2) == kind] for kind in (True, False))
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": gains, "weight_decay": 0.0}]


def steps(
    stage: Stage, model: nn.Module, folder: Path, processes: Distributed, report: Report, signals: list[int]
) -> int:
    """Trains `model` for the steps that the stage's config says, and returns how many are done.

    After a kill, the next call continues from the last checkpoint and ends with the same weights as an
    uninterrupted one. On a GPU, or with another number of processes, samples and their order are the same,
    and weights differ by the rounding of sums.

    Args:
        model: gets the weights in the end. What is trained in this process is a copy, so that the model stays
            as it is: where it lies, how it computes, and after an interruption its weights.
        folder: of this training alone; holds metrics.jsonl (one line per step) and checkpoints/.
        report: called once with "total" and "done" steps, then with each step's metrics, on the main process
            only. A `Watch` measures the model on its way, too.
        processes: this process and its peers.
        signals: grows when this process is told to stop; once any process was, the step is finished and a
            checkpoint written, and what is returned is less than all steps.
    Raises:
        FloatingPointError: the loss or the gradient is not finite.
        CheckpointException: a checkpoint cannot be written, for instance to a full disk.
        torch.OutOfMemoryError: a GPU's memory does not hold one text at a time; with several processes, not a
            micro-batch. The message names the key to change.
    """
    trained = model if processes.accelerator else copy.deepcopy(model)
    forward, optimizer = equip(stage, trained, processes)
    progress = Progress(stage, trained, optimizer, folder, processes, report, signals)
    done, total, length = progress.resume(), stage.config.steps, getattr(stage.config, "length", 1)
    # Of other lengths cuDNN's backward pass may give NaN (torch 2.11).
    with torch.random.fork_rng(range(torch.cuda.device_count())), fast_attention(length % 128 == 0):
        for row in optimize(stage, trained, forward, optimizer, range(done, total), processes):
            done = row["step"] + 1
            if progress.add(row):
                break
    if trained is not model and done == total:
        model.load_state_dict(trained.state_dict())
    model.eval()
    return done


@dataclass
class Progress:
    """What is written of a training: a line of the log for each step, checkpoints, models on its way."""

    stage: Stage
    model: nn.Module
    optimizer: Optimizer
    folder: Path
    processes: Distributed
    report: Report
    signals: Sequence[int]

    def resume(self) -> int:
        """Loads the last checkpoint, cuts the log after it, and returns the number of steps done."""
        log, config = self.folder / METRICS, self.stage.config
        self.last = self.processes.agreed(next(reversed(checkpoints(self.folder)), None))
        done = load_checkpoint(self.last, self.model, self.optimizer) if self.last else 0
        if self.processes.main:
            lines = log.read_text(encoding="utf8").splitlines(keepends=True) if log.is_file() else []
            write_atomic(log, "".join(lines[:done]))  # what comes after is trained again
            self.report({"total": config.steps, "done": done})
        self.processes.wait()
        self.began, self.saved, self.pause = perf_counter(), monotonic(), config.checkpoint_seconds
        return done

    def add(self, row: Row) -> bool:
        """Logs a step, measures the model, saves it and writes a checkpoint, each where it is due; returns
        whether the training is to stop.

        Raises: FloatingPointError if loss or gradient is not finite.
        """
        due = self.processes.main and monotonic() - self.saved >= self.pause
        requests = torch.tensor([float(stop_requested(self.signals, self.processes)), float(due)])
        requests = self.processes.sum(self.processes.to_device(requests))
        values = torch.stack([row["loss"].float(), row["grad_norm"].float(), *requests]).tolist()
        row["loss"], row["grad_norm"], stop, due = values
        self.check(row)
        row["seconds"], done = perf_counter() - self.began, row["step"] + 1
        if self.processes.main:
            with (self.folder / METRICS).open("a", encoding="utf8") as log:
                log.write(json.dumps(row) + "\n")
            self.report(row)
        if isinstance(self.report, Watch):
            self.report.measure(self.model, row["step"])
        if done in self.stage.job.milestones:
            save(self.stage, self.model, self.folder / MILESTONES / f"step-{done:07d}", self.processes)
        more = done < self.stage.config.steps
        if more and (stop or due):
            self.checkpoint(done)
        self.began = perf_counter()
        return bool(more and stop)

    def check(self, row: Row) -> None:
        if not (math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])):
            look = ""
            if self.stage.data:  # a stage may make its batches itself
                dataset, rows = self.stage.plan(row["step"])
                look = f", or look at the rows {rows[:8].tolist()} … of data set {dataset!r}"
            raise FloatingPointError(
                f"the loss is {row['loss']}, the norm of its gradient {row['grad_norm']} at step "
                f"{row['step']}: lower lr or clip{look}; last good checkpoint: {self.last or 'none'}"
            )

    def checkpoint(self, done: int) -> None:
        """Writes a checkpoint; the longer it takes, the later the next one is due."""
        began, pause = monotonic(), self.stage.config.checkpoint_seconds
        self.last = save_checkpoint(self.folder, self.model, self.optimizer, done, self.processes)
        self.saved = monotonic()
        self.pause = pause and max(pause, RARE * (self.saved - began))


def stop_requested(signals: Sequence[int], processes: Distributed) -> bool:
    """Whether a signal came, or the file STOP is there, for which the main process looks; a listing finds it
    on a shared file system that remembers misses."""
    folder, name = os.path.split(os.environ.get(STOP, ""))
    return bool(signals) or (processes.main and bool(name) and name in os.listdir(folder))


def save(stage: Stage, model: nn.Module, path: Path, processes: Distributed) -> None:
    """Writes the stage's checkpoint; every process must call it."""
    weights = full_weights(model)
    if processes.main:
        stage.save(model, path, weights=weights, fingerprint=Path(stage.job.folder).name)
    processes.wait()


# --- a training and its folder


def train(stage: Stage, model: nn.Module, folder: str | Path, *, watch: Watch | None = None) -> Path:
    """Trains `model`, with a bar and the curve of its loss, and saves it.

    Interrupted, it finishes its step and writes a checkpoint; the same call goes on from there and ends with
    the same weights. What is trained already is not trained again: the same training has the same values,
    data, starting weights and code (`identity`). Each training has a folder of its own,
    FOLDER/FINGERPRINT, in which nothing else is ever written, and FOLDER/model is a link to the last one's
    model. With several processes (`parallel`) torchrun starts them, and this one waits.

    Args:
        model: from `stage.model`; holds the finished weights in the end, whoever trained them.
        folder: of the trainings of this name.
        watch: what is shown meanwhile.
    Returns: the checkpoint directory.
    Raises:
        TrainingStopped: it was told to stop, by SIGINT or SIGTERM; it is saved.
        RuntimeError: another process trains in this folder. A file of the library has changed since it was
            imported.
        FloatingPointError, CheckpointException: as `steps`.
    """
    folder, made_of, watch = Path(folder), identity(stage, model), watch or Watch()
    home, name = home_of(folder, made_of), f"{folder.parent.name}/{folder.name}"
    home.mkdir(parents=True, exist_ok=True)
    with alone(home):
        if (home / "model").is_dir():
            finish(home)  # a kill may have come in between
            stage.restore(model, home / "model")
            watch.replay(name, home)
        else:
            watch.open(name, home)
            begin(stage, model, home, watch, made_of)
    link(folder / "model", home / "model")
    return home / "model"


def begin(stage: Stage, model: nn.Module, home: Path, watch: Watch, made_of: dict[str, Any]) -> None:
    """Prepares the data and writes the job down, then trains, here or in several processes."""
    # Read here, where progress shows and no GPU waits for it.
    write_json(home / DATA_REPORT, report := stage.prepare())
    if text := left_out(report):
        print(f"{watch.title}: {text}")
    stage.begin(model.start, home)
    write_json(home / JOB, {"made_of": made_of, "job": resolved(stage.job)})
    with watch:
        if several(stage.job.parallel):
            launch(stage.job, watch)
            stage.restore(model, home / "model")
        else:
            settle()
            run(stage, model, Distributed.alone(stage.config.precision), watch)


def run(stage: Stage, model: nn.Module, processes: Distributed, report: Report = lambda row: None) -> None:
    """Trains a model as the stage's job says, together with the processes that run the same job, and saves
    it.

    Raises: TrainingStopped; and as `steps`.
    """
    folder, signals = Path(stage.job.folder), []
    with on_signal(signals.append):  # until the model is saved
        try:
            done = steps(stage, model, folder, processes, report, signals)
        finally:  # for whatever this process does next
            gc.collect()
            torch.cuda.empty_cache()
        if done < stage.config.steps:
            raise TrainingStopped(f"told to stop: {done} steps are saved, run it again")
        save(stage, model, folder / "model", processes)
        if processes.main:
            finish(folder)
        # Too late to stop this training, but not what comes next.
        if processes.agreed(stop_requested(signals, processes)):
            raise TrainingStopped("told to stop; the training had just ended, and is saved")


def finish(folder: Path) -> None:
    """Removes what a training whose model is saved needs no more."""
    for name in (CHECKPOINTS, "torchrun"):
        shutil.rmtree(folder / name, ignore_errors=True)


def left_out(report: Sequence[dict[str, Any]]) -> str:
    """What of the data is cut or left out, all data sets together; empty where nothing is."""
    counted = ({what: count for what, count in row.items() if isinstance(count, int)} for row in report)
    total = sum(map(Counter, counted), Counter())
    share = total["tokens cut"] / max(1, total["tokens cut"] + total["tokens"])
    counts = [f"{count:,} {what}" for what, count in total.items() if what not in READ]
    return ", ".join(counts) + (f" ({share:.1%} of all)" if share else "")


def data_report(checkpoint: str | Path) -> list[dict[str, Any]]:
    """What the training that made a checkpoint read: a row per data set or text source with what was cut,
    left out and repeated."""
    return json.loads((Path(checkpoint).resolve().parent / DATA_REPORT).read_text(encoding="utf8"))


def milestones(checkpoint: str | Path) -> list[Path]:
    """The models that the training which made a checkpoint saved on its way (`Job.milestones`), in order."""
    return sorted((Path(checkpoint).resolve().parent / MILESTONES).glob("step-*"))
