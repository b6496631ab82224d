"""From a job (preset, stage, starting checkpoint, files) to a trained checkpoint: what a training child
process does, and the one training loop for all stages, on one process or many."""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from unmask.children import on_signal
from unmask.config import COMPUTED, TrainConfig, resolved
from unmask.data.tokens import ending
from unmask.models import backbone
from unmask.models.attention import compile_layers, fast_attention, plain_attention
from unmask.run import PREEMPTED
from unmask.store import code_fingerprint, replace_directory, write_atomic, write_json
from unmask.training.checkpoint import Checkpoints, load_checkpoint
from unmask.training.distributed import Processes, full_weights
from unmask.training.neighbours import Cde, Qwen3, Reranking
from unmask.training.stages import Contextual, Diffusion, NextToken, Pair, Stage, Triplet, identity

STAGES: dict[str, type[Stage]] = {"ar": NextToken, "diffusion": Diffusion}
STAGES |= {"pair": Pair, "contextual": Contextual, "triplet": Triplet}
STAGES |= {"cde": Cde, "qwen3": Qwen3, "reranker": Reranking}  # of the neighbours
CODE = ("losses", "data", "models", "training")  # what a checkpoint depends on
# Keys that change no training: how it is computed, and what notebooks alone read.
APART = COMPUTED | {"batch_sizes", "cluster_sizes", "context_sizes", "weak_steps", "weak_lr", "scratch"}
APART |= {"checkpoints", "candidates", "max_queries"}
MILESTONES = "milestones"  # beside a checkpoint: what it was on its way, in a folder per training
STOP = "UNMASK_STOP"  # names a file that stands for SIGTERM where a launcher does not hand that on
RARE = 30  # times what a checkpoint takes: the least between two of them, on a slow disk
DATA_REPORT = "data.json"  # beside a checkpoint: what its training read


class Preempted(SystemExit):
    """SIGTERM or SIGINT came: the step was finished, a checkpoint written, and the next start goes on."""


def stage_of(asked: Mapping[str, Any]) -> Stage:
    """The stage of a job, see `Stage`. CDE's without context is a pair training on CDE's batches."""
    stage = STAGES[asked["stage"]](asked)
    return Pair(asked) if isinstance(stage, Cde) and not stage.config.context else stage


def run_job(asked: Mapping[str, Any], report: Callable[[dict[str, Any]], None]) -> Path:
    """Trains what a job says, together with the processes that run the same job, and returns the checkpoint
    directory.

    Args:
        asked: see `Stage`.
        report: see `train`.
    """
    stage, folder, mark, signals = stage_of(asked), Path(asked["folder"]), asked["fingerprint"], []
    processes = Processes.start(stage.config.precision, stage.preset.parallel.strategy)
    read = stage.prepare()
    if processes.main:
        write_json(folder / DATA_REPORT, read)
    model = stage.model()
    # What lies beside the weights is made now: where it cannot be, no step is taken in vain.
    tokenizer, facts = ending(stage.tokenizer) if stage.ends else stage.tokenizer, stage.facts()

    def save(path: Path, fingerprint: str) -> None:
        """Takes an earlier model's place, whatever files that had; every process must call it."""
        weights, new = full_weights(model), path.with_name(f".{path.name}.new")
        if processes.main:
            stage.save(model, tokenizer, new, weights=weights, **facts, fingerprint=fingerprint)
            replace_directory(new, path)
        processes.wait()

    options = {"report": report, "save": save, "processes": processes, "signals": signals}
    with on_signal(signals.append):  # until the model is saved
        train(stage, model, folder, fingerprint=mark, **options)
        save(folder / "model", mark)
        if processes.main:
            finish(folder)
    told = torch.tensor(float(_told_to_stop(signals, processes)))
    if processes.sum(processes.ship(told)):  # too late to stop this training, but not the next one
        raise Preempted(PREEMPTED)
    return folder / "model"


def data_report(checkpoint: Path) -> list[dict[str, Any]]:
    """What the training that made a checkpoint read: a row per data set or text source with what was cut,
    left out and repeated."""
    return json.loads((checkpoint.parent / DATA_REPORT).read_text(encoding="utf8"))


def job_identity(stage: Stage) -> dict[str, Any]:
    """Everything that the result of a stage's job depends on, by name, so that a message can say what
    differs: values of the preset and of the job, the corpus ("data"), files, the starting point, and "code".
    A training that ran out of memory goes on with a smaller token_budget."""
    asked, told = stage.asked, ("stage", "groups", "milestones", "bidirectional", "late_chunking")
    sections = {asked["stage"]: resolved(stage.config)}
    if "start" not in asked:
        sections["backbone"] = resolved(stage.preset.backbone)
    return {
        **{f"{name}.{key}": one[key] for name, one in sections.items() for key in one.keys() - APART},
        "backbone.mask_token": stage.preset.backbone.mask_token,
        **{key: asked.get(key) for key in told},
        **{key: identity(Path(asked[key])) for key in ("start", "tokenizer", "negatives") if key in asked},
        **stage.inputs(),
        "data": stage.corpus.hash,
        "code": code_fingerprint(*(Path(__file__).parents[1] / name for name in CODE)),
    }


def train(
    stage: Stage,
    model: nn.Module,
    folder: Path,
    *,
    fingerprint: str,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
    save: Callable[[Path, str], None] = lambda path, fingerprint: None,
    processes: Processes | None = None,
    signals: Sequence[int] = (),
) -> nn.Module:
    """Trains `model` in place for the steps that the stage's config says, and returns it.

    Every step draws its samples and random numbers from (seed, step) alone. After a kill, the next call with
    the same fingerprint continues from the last checkpoint and ends with the same weights as an uninterrupted
    one. On a GPU, or with another number of processes, samples and their order are the same, and weights
    differ by the rounding of sums.

    Args:
        folder: holds metrics.jsonl (one line per step) and checkpoints/.
        fingerprint: identifies configuration, data and starting point; a checkpoint of another one is not
            continued.
        report: called once with "total" and "done" steps, then with each step's metrics, for progress
            displays; on the main process only.
        save: writes the model to a path, with a fingerprint, after the steps that the job's "milestones" say;
            before the checkpoint of such a step, so after a restart perhaps again.
        processes: this process and its peers; default: `Processes.start`.
        signals: grows when this process is told to stop; once any process was, the step is finished, a
            checkpoint written and the training stopped.
    Raises:
        FloatingPointError: the loss or the gradient is not finite.
        CheckpointException: a checkpoint cannot be written, for instance to a full disk.
        Preempted: a signal came.
    """
    config, log = stage.config, folder / "metrics.jsonl"
    checkpoints = Checkpoints(folder / "checkpoints", fingerprint, config.keep_checkpoints)
    processes = processes or Processes.start(config.precision)
    module, optimizer = _prepared(stage, model, processes)
    last = processes.agreed(next(reversed(checkpoints.all()), None))
    done = load_checkpoint(last, model, optimizer) if last else 0
    if processes.main:
        kept = log.read_text(encoding="utf8").splitlines(keepends=True)[:done] if log.is_file() else []
        write_atomic(log, "".join(kept))  # what comes after is trained again
        report({"total": config.steps, "done": done})
    processes.wait()
    whole = getattr(config, "length", 0) % 128 == 0  # else cuDNN's backward pass may give NaN (torch 2.11)
    with fast_attention(stage.same_length and whole), log.open("a", encoding="utf8") as lines:
        started, saved, pause = perf_counter(), monotonic(), config.checkpoint_seconds
        for step, (batch, logged) in _ahead(stage.drawn, range(done, config.steps)):
            lr = config.lr * lr_factor(config, step)
            torch.manual_seed(config.seed * 1_000_003 + step + processes.rank * 7_368_787)
            row = stage.backward(module, batch, processes)
            norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip, foreach=True)
            # FSDP2 leaves it in parts.
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            told = _told_to_stop(signals, processes)
            due = processes.main and monotonic() - saved >= pause
            both = processes.sum(processes.ship(torch.tensor([float(told), float(due)])))
            facts = torch.stack([row["loss"].float(), norm.float(), *both])
            row["loss"], norm, told, due = facts.tolist()
            if not (math.isfinite(row["loss"]) and math.isfinite(norm)):
                dataset, rows = stage.plan(step)
                raise FloatingPointError(
                    f"the loss is {row['loss']}, the norm of its gradient {norm} at step {step}: lower lr or "
                    f"clip in another run, or look at the rows {rows[:8].tolist()} … of data set "
                    f"{dataset!r}; last good checkpoint: {last or 'none'}"
                )
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
            row = {"step": step, **logged, **row, "lr": lr, "grad_norm": norm}
            row["seconds"] = perf_counter() - started
            if processes.main:
                report(row)
                lines.write(json.dumps(row) + "\n")
            if step + 1 in stage.asked.get("milestones", ()):
                save(folder / MILESTONES / fingerprint / f"step-{step + 1:07d}", f"{fingerprint}-{step + 1}")
            if step + 1 < config.steps and (told or due):
                lines.flush()
                began = monotonic()
                last = checkpoints.save(model, optimizer, step + 1, processes)
                if told:  # one process at least
                    raise Preempted(PREEMPTED)
                saved = monotonic()
                pause = config.checkpoint_seconds and max(config.checkpoint_seconds, RARE * (saved - began))
            started = perf_counter()
    return model.eval()


def _told_to_stop(signals: Sequence[int], processes: Processes) -> bool:
    """Whether a signal came, or the file STOP is there, for which the main process looks; a listing finds it
    on a shared file system that remembers misses."""
    folder, name = os.path.split(os.environ.get(STOP, ""))
    return bool(signals) or (processes.main and bool(name) and name in os.listdir(folder))


def _prepared(stage: Stage, model: nn.Module, processes: Processes) -> tuple[nn.Module, Optimizer]:
    """What is run forward, on all processes, and the optimiser."""
    config = stage.config
    if config.gradient_checkpointing:
        backbone.checkpoint_activations(model)
    if processes.half and processes.device.type == "cpu":
        plain_attention(model)
    if config.compile:
        compile_layers(model)
    module = processes.parallel(stage.module(model.train()))
    betas, groups = (config.beta1, config.beta2), parameter_groups(model, config.weight_decay)
    return module, AdamW(groups, lr=config.lr, betas=betas, fused=True)


def _ahead(make: Callable[[int], Any], steps: range) -> Iterator[tuple[int, Any]]:
    """Each step with its batch; the next batch is made while the current one is trained on."""
    with ThreadPoolExecutor(1) as loader:
        coming = loader.submit(make, steps.start)
        for step in steps:
            batch = coming.result()
            coming = loader.submit(make, step + 1) if step + 1 in steps else None
            yield step, batch


def finish(folder: Path) -> None:
    """Removes what the training whose model lies in a folder needs no more. Another one's checkpoints stay:
    somebody paid for them."""
    Checkpoints(folder / "checkpoints", backbone.facts(folder / "model").get("fingerprint")).remove()
    for name in ("torchrun", "cache"):
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
    """Matrices decay, gains of norms do not."""
    return [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
