"""One training loop for all stages, in this process or in several.

train(stage, model, folder)  →  this process: run(job, stage, model)
                             →  several: launch(job)  →  torchrun  →  worker  →  run(job, stage, model)
"""

import gc
import json
import math
import os
import shutil
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from transformers import PreTrainedModel

from unmask.children import on_signal, settle
from unmask.config import TrainConfig, resolved
from unmask.data.tokens import ending
from unmask.models import backbone
from unmask.models.attention import fast_attention, plain_attention
from unmask.store import alone, fingerprint, link, read_json, write_atomic, write_json
from unmask.training.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from unmask.training.distributed import Processes, full_weights, refresh, trainable
from unmask.training.identity import identity
from unmask.training.job import JOB, Job
from unmask.training.launch import STOP, TrainingStopped, launch, several
from unmask.training.stages import Stage
from unmask.training.watch import METRICS, Watch, history

CHECKPOINTS = "checkpoints"  # in a training's folder, while it runs
MILESTONES = "milestones"  # beside a checkpoint: what it was on its way
DATA_REPORT = "data.json"  # beside a checkpoint: what its training read
READ = ("rows", "tokens", "texts", "blocks", "held out")  # of its numbers, those that are no loss
RARE = 30  # times what a checkpoint takes: the least between two of them, on a slow disk
Report = Callable[[dict[str, Any]], None]


def train(stage: Stage, model: nn.Module, folder: str | Path, *, watch: Watch | None = None) -> Path:
    """Trains `model` in place, with a bar and the curve of its loss, and saves it.

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
            imported. In a run of `unmask run`, the same training is there with other code.
        FloatingPointError, CheckpointException: as `steps`.
    """
    folder, made_of = Path(folder), identity(stage, model)
    home = _home(folder, made_of)
    watch = watch or Watch()
    home.mkdir(parents=True, exist_ok=True)
    with alone(home):
        if (home / "model").is_dir():
            _finish(home)  # a kill may have come in between
            stage.restore(model, home / "model")
            print(f"{folder.parent.name}/{folder.name}: already trained")
        else:
            # Read here, where progress shows and no GPU waits for it.
            write_json(home / DATA_REPORT, report := stage.prepare())
            if told := _left_out(report):
                print(f"{folder.parent.name}/{folder.name}: {told}")
            job = stage.begun(model, home)
            write_json(home / JOB, {"made_of": made_of} | read_json(home / JOB) | {"job": resolved(job)})
            watch.open(f"{folder.parent.name}/{folder.name}", home, _before(folder, home))
            with watch:
                if several(job.parallel):
                    launch(job, watch)
                    stage.restore(model, home / "model")
                else:
                    settle()
                    run(job, stage, model, Processes.alone(stage.config.precision), watch)
    link(folder / "model", home / "model")
    return home / "model"


def run(job: Job, stage: Stage, model: nn.Module, processes: Processes, watch: Watch | None = None) -> None:
    """Trains a model for the steps of its job, together with the processes that run the same job, and saves
    it."""
    folder, signals = Path(job.folder), []
    # What lies beside the weights is made now: where it cannot be, no step is taken in vain.
    tokenizer, facts = ending(stage.tokenizer) if stage.ends else stage.tokenizer, stage.facts(job.start)

    def save(path: Path) -> None:
        """Every process must call it."""
        weights, new = full_weights(model), path.with_name(f".{path.name}.new")
        if processes.main:
            stage.save(model, tokenizer, new, weights=weights, **facts, fingerprint=job.fingerprint)
            shutil.rmtree(path, ignore_errors=True)  # of a kill
            os.replace(new, path)
        processes.wait()

    options = {"watch": watch, "save": save, "processes": processes, "signals": signals}
    options |= {"report": watch} if watch else {}
    with on_signal(signals.append):  # until the model is saved
        with _released():
            steps(stage, model, folder, **options)
        save(folder / "model")
        if processes.main:
            _finish(folder)
        stop = torch.tensor(float(_stop_requested(signals, processes)))
        if processes.sum(processes.ship(stop)):  # too late to stop this training, but not what comes next
            raise TrainingStopped("told to stop; the training had just ended, and is saved")


def data_report(checkpoint: Path) -> list[dict[str, Any]]:
    """What the training that made a checkpoint read: a row per data set or text source with what was cut,
    left out and repeated."""
    return json.loads((checkpoint.resolve().parent / DATA_REPORT).read_text(encoding="utf8"))


def _left_out(report: Sequence[dict[str, Any]]) -> str:
    """What of the data is cut or left out, all data sets together; empty where nothing is."""
    total = Counter()
    for row in report:
        total.update({what: count for what, count in row.items() if isinstance(count, int)})
    share = total["tokens cut"] / max(1, total["tokens cut"] + total["tokens"])
    told = [f"{count:,} {what}" for what, count in total.items() if count and what not in READ]
    return ", ".join(told) + (f" ({share:.1%} of all)" if share else "")


def milestones(checkpoint: Path) -> list[Path]:
    """What the training that made a checkpoint kept on its way (`Job.milestones`), in order."""
    return sorted((checkpoint.resolve().parent / MILESTONES).glob("step-*"))


def _home(folder: Path, made_of: dict[str, Any]) -> Path:
    """The folder of a training: its fingerprint's, or that of one which differs in the library's code alone
    and was accepted (`unmask run --accept-code`).

    Raises: RuntimeError in a run of `unmask run` if there is such a one and nobody has said what to do about
        it: somebody paid for it.
    """
    home, mode = folder / fingerprint(made_of), os.environ.get("UNMASK_CODE")
    if home.is_dir():
        return home
    like = [path.parent for path in folder.glob(f"*/{JOB}") if _differ(path, made_of) == ["code"]]
    paid = [one for one in like if (one / "model").is_dir() or any(one.glob("checkpoints/step-*"))]
    for one in sorted(paid, key=lambda one: one.stat().st_mtime, reverse=True):
        about = read_json(one / JOB)
        accepted = about.get("accepted", [])
        if mode == "accept":
            accepted = [*accepted, made_of["code"]]
            write_json(one / JOB, about | {"accepted": accepted})
        if made_of["code"] in accepted:
            return one
        if mode == "ask":
            raise RuntimeError(
                f"{one} holds this training, made by other code ({about['made_of']['code']} → "
                f"{made_of['code']}). Go on from it: `unmask run --accept-code`. Train anew: `--force`."
            )
    return home


def _differ(path: Path, made_of: dict[str, Any]) -> list[str]:
    earlier = read_json(path).get("made_of", {})
    return [key for key in sorted(earlier | made_of) if earlier.get(key) != made_of.get(key)]


def _before(folder: Path, home: Path) -> list[dict[str, Any]]:
    """The curve of the last training of this name, for whoever tries something by hand."""
    last = (folder / "model").resolve()
    by_hand, there = "UNMASK_CODE" not in os.environ, (last.parent / METRICS).is_file()
    return history(last) if by_hand and there and last.parent != home else []


@contextmanager
def _released() -> Iterator[None]:
    """What a training holds is given back in the end, for whatever this process does next: memory, the state
    of random numbers."""
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    except (TrainingStopped, KeyboardInterrupt) as error:
        traceback.clear_frames(error.__traceback__)  # they hold the optimiser as long as the error lives
        raise
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def steps(
    stage: Stage,
    model: nn.Module,
    folder: Path,
    *,
    report: Report = lambda row: None,
    save: Callable[[Path], None] = lambda path: None,
    watch: Watch | None = None,
    processes: Processes | None = None,
    signals: Sequence[int] = (),
) -> nn.Module:
    """Trains `model` in place for the steps that the stage's config says, and returns it.

    Every step draws its samples and random numbers from (seed, step) alone. After a kill, the next call
    continues from the last checkpoint and ends with the same weights as an uninterrupted one. On a GPU, or
    with another number of processes, samples and their order are the same, and weights differ by the rounding
    of sums.

    Args:
        folder: of this training alone; holds metrics.jsonl (one line per step) and checkpoints/.
        report: called once with "total" and "done" steps, then with each step's metrics, for progress
            displays; on the main process only.
        save: writes the model to a path after the steps that `Job.milestones` says; before the checkpoint of
            such a step, so after a restart perhaps again.
        watch: measures the model on its way, where it has a probe.
        processes: this process and its peers; default: this one alone.
        signals: grows when this process is told to stop; once any process was, the step is finished, a
            checkpoint written and the training stopped.
    Raises:
        FloatingPointError: the loss or the gradient is not finite.
        CheckpointException: a checkpoint cannot be written, for instance to a full disk.
        torch.OutOfMemoryError: a GPU's memory does not hold one text at a time; with several processes, not a
            micro-batch. The message names the key to change.
        TrainingStopped: a signal came.
    """
    config, processes = stage.config, processes or Processes.alone(stage.config.precision)
    with _equipped(stage, model, processes) as (module, forward, optimizer):
        progress = _Progress(stage, model, optimizer, folder, processes, report, save, watch, signals)
        for step, (batch, logged) in _ahead(stage.drawn, range(progress.resume(), config.steps)):
            refresh(forward, module)
            row = _backward(stage, forward, optimizer, batch, step, processes)
            row["lr"] = config.lr * lr_factor(config, step)
            values = _update(model, optimizer, row["loss"], row["lr"], config.clip, processes)
            progress.add({"step": step, **logged, **row}, values)
            progress.read(processes.ahead)
            progress.snapshot(step + 1)
    return model


@dataclass
class _Progress:
    """What is written of a training: a line of the log for each step, checkpoints, models on its way.

    On a GPU the loss of a step is read when the next one is launched, so the GPU never waits.
    """

    stage: Stage
    model: nn.Module
    optimizer: Optimizer
    folder: Path
    processes: Processes
    report: Report
    save: Callable[[Path], None]
    watch: Watch | None
    signals: Sequence[int]
    unread: deque[tuple[dict[str, Any], Callable[[], list[float]]]] = field(default_factory=deque)
    stop: float = 0  # above 0: processes were told to stop
    due: float = 0  # above 0: a checkpoint is due

    def resume(self) -> int:
        """Loads the last checkpoint, cuts the log after it, and returns the number of steps done."""
        log, config = self.folder / METRICS, self.stage.config
        self.last = self.processes.agreed(next(reversed(checkpoints(self.folder / CHECKPOINTS)), None))
        done = load_checkpoint(self.last, self.model, self.optimizer) if self.last else 0
        if self.processes.main:
            lines = log.read_text(encoding="utf8").splitlines(keepends=True) if log.is_file() else []
            write_atomic(log, "".join(lines[:done]))  # what comes after is trained again
            self.report({"total": config.steps, "done": done})
        self.processes.wait()
        self.began, self.saved, self.pause = perf_counter(), monotonic(), config.checkpoint_seconds
        return done

    def add(self, row: dict[str, Any], values: Tensor) -> None:
        """A step that was launched, with its loss and its gradient's norm."""
        due = self.processes.main and monotonic() - self.saved >= self.pause
        requests = torch.tensor([float(_stop_requested(self.signals, self.processes)), float(due)])
        requests = self.processes.sum(self.processes.ship(requests))
        self.unread.append((row, self.processes.later(torch.cat([values, requests]))))

    def read(self, most: int) -> None:
        """Reads, writes and reports the oldest steps, until at most so many are unread.

        Raises: FloatingPointError if a loss or a gradient is not finite.
        """
        while len(self.unread) > most:
            row, values = self.unread.popleft()
            row["loss"], row["grad_norm"], self.stop, self.due = values()
            if not (math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])):
                dataset, rows = self.stage.plan(row["step"])
                raise FloatingPointError(
                    f"the loss is {row['loss']}, the norm of its gradient {row['grad_norm']} at step "
                    f"{row['step']}: lower lr or clip, or look at the rows {rows[:8].tolist()} … of data set "
                    f"{dataset!r}; last good checkpoint: {self.last or 'none'}"
                )
            row["seconds"], self.began = perf_counter() - self.began, perf_counter()
            if self.processes.main:
                with (self.folder / METRICS).open("a", encoding="utf8") as log:
                    log.write(json.dumps(row) + "\n")
                self.report(row)

    def snapshot(self, done: int) -> None:
        """Measures the model after so many steps, saves it and writes a checkpoint, each where it is due.

        Raises: TrainingStopped if a process was told to stop, once that is saved.
        """
        last, milestone = done == self.stage.config.steps, done in self.stage.job.milestones
        probed = self.watch is not None and self.watch.due(done - 1)
        if not (last or milestone or probed or self.stop or self.due):
            return
        self.read(0)  # what is saved is known to be good
        if probed:
            seconds = sum(row["seconds"] for row in history(self.folder / METRICS))
            self.watch.measure(self.model, done - 1, seconds)
        if milestone:
            self.save(self.folder / MILESTONES / f"step-{done:07d}")
        if (self.stop or self.due) and not last:
            self.checkpoint(done)
        self.began = perf_counter()

    def checkpoint(self, done: int) -> None:
        """Writes a checkpoint; the longer it takes, the later the next one is due."""
        began, config = monotonic(), self.stage.config
        state, keep = (self.model, self.optimizer, done, self.processes), config.keep_checkpoints
        self.last = save_checkpoint(self.folder / CHECKPOINTS, *state, keep=keep)
        if self.stop:
            raise TrainingStopped(f"told to stop: {done} steps are saved, run it again")
        self.saved = monotonic()
        self.pause = config.checkpoint_seconds and max(config.checkpoint_seconds, RARE * (self.saved - began))


def _backward(
    stage: Stage, forward: nn.Module, optimizer: Optimizer, batch: Any, step: int, processes: Processes
) -> dict[str, Any]:
    """`stage.backward`; where memory does not hold it, again with half the tokens at a time, from then on.

    Raises: torch.OutOfMemoryError if nothing smaller is left to try, or there are other processes, which wait
        for this one.
    """
    seed = stage.config.seed * 1_000_003 + step + processes.rank * 7_368_787
    while True:
        torch.manual_seed(seed)
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
        if stage.same_length:  # else the graph for the next size would be one for all sizes
            torch.compiler.reset()
        optimizer.zero_grad()
        gc.collect()
        torch.cuda.empty_cache()


def _update(
    model: nn.Module, optimizer: Optimizer, loss: Tensor, lr: float, clip: float, processes: Processes
) -> Tensor:
    """Adds up the processes' gradients, clips them and lets the optimiser step; returns loss and norm.

    What is no number leaves weights and moments as they are: nobody needs to wait and see.
    """
    processes.sum_gradients(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip, foreach=True)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # FSDP2 leaves it in parts
    values = torch.stack([loss.float(), norm.float()])
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.found_inf = 1.0 - values.sum().isfinite().float()
    optimizer.step()
    optimizer.zero_grad()
    return values


def _stop_requested(signals: Sequence[int], processes: Processes) -> bool:
    """Whether a signal came, or the file STOP is there, for which the main process looks; a listing finds it
    on a shared file system that remembers misses."""
    folder, name = os.path.split(os.environ.get(STOP, ""))
    return bool(signals) or (processes.main and bool(name) and name in os.listdir(folder))


@contextmanager
def _equipped(
    stage: Stage, model: nn.Module, processes: Processes
) -> Iterator[tuple[nn.Module, nn.Module, Optimizer]]:
    """The stage's module, what is run forward of it, on all processes, and the optimiser; in the end the
    model is as it was, on the CPU."""
    config, module = stage.config, stage.module(model.train())
    frozen = model.get_input_embeddings() if getattr(config, "freeze_embeddings", False) else nn.Module()
    # Else cuDNN's backward pass may give NaN (torch 2.11).
    whole = getattr(config, "length", 0) % 128 == 0
    with _tuned(model, config, processes), fast_attention(stage.same_length and whole):
        frozen.requires_grad_(False)
        try:
            forward = processes.parallel(module, compiled=config.compile, same_length=stage.same_length)
            groups = parameter_groups(model, config.weight_decay)  # FSDP2 has put others in place
            betas = config.beta1, config.beta2
            yield module, forward, AdamW(groups, lr=config.lr, betas=betas, fused=True)
        finally:
            model.eval().zero_grad()
            frozen.requires_grad_(True)


@contextmanager
def _tuned(model: nn.Module, config: TrainConfig, processes: Processes) -> Iterator[None]:
    """Within, layers, attention and embeddings compute as suits the device and the config."""
    device, on_cpu = next(model.parameters()).device, processes.device.type == "cpu"
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    kernels = [part.config._attn_implementation for part in parts]
    if config.gradient_checkpointing:
        backbone.checkpoint_activations(model)
    if processes.half and on_cpu:
        plain_attention(model)
    # Else every micro-batch fills a gradient of the whole vocabulary with zeros.
    sparse = on_cpu and processes.strategy != "fsdp2"
    embeddings = [part for part in model.modules() if sparse and isinstance(part, nn.Embedding)]
    for part in embeddings:
        part.sparse = True
    try:
        yield
    finally:
        if processes.accelerator is None:  # else this process ends with the training
            model.to(device)
            for part, kernel in zip(parts, kernels):
                part.set_attn_implementation(kernel)
            for part in embeddings:
                part.sparse = False
            for layer in backbone.layers(model):
                layer._compiled_call_impl, layer.gradient_checkpointing = None, False


def _ahead(make: Callable[[int], Any], steps: range) -> Iterator[tuple[int, Any]]:
    """Each step with its batch; the next batch is made while the current one is trained on."""
    with ThreadPoolExecutor(1) as loader:
        coming = loader.submit(make, steps.start)
        for step in steps:
            batch = coming.result()
            coming = loader.submit(make, step + 1) if step + 1 in steps else None
            yield step, batch


def _finish(folder: Path) -> None:
    """Removes what a training whose model is saved needs no more."""
    for name in (CHECKPOINTS, "torchrun"):
        shutil.rmtree(folder / name, ignore_errors=True)


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


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, gains of norms do not. What is frozen is left out."""
    return [
        {"params": [p for p in trainable(model) if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable(model) if p.ndim < 2], "weight_decay": 0.0},
    ]
