"""From a job (preset, stage, starting checkpoint, files) to a trained checkpoint: what a training child
process does. What differs between stages is theirs (`stages`, `neighbours`)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import unmask.training.neighbours  # noqa: F401  (its stages put their names into STAGES)
from unmask.data.tokens import ending
from unmask.store import code_fingerprint, fingerprint, write_atomic
from unmask.training.distributed import Processes, full_weights
from unmask.training.loop import Preempted, finish, stop_signals, train
from unmask.training.stages import Job, identity

LIBRARY = Path(__file__).parents[1]
CODE = ("losses", "data", "models", "training")  # what a checkpoint depends on
MILESTONES = "milestones"  # beside a checkpoint: what it was on its way, in a folder per training
DATA_REPORT = "data.json"  # beside a checkpoint: what its training read


def run_job(asked: Mapping[str, Any], report: Callable[[dict[str, Any]], None]) -> Path:
    """Trains what a job says, together with the processes that run the same job, and returns the checkpoint
    directory.

    Args:
        asked: see `stages.Job`.
        report: see `loop.train`.
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


def job_identity(asked: Mapping[str, Any]) -> dict[str, str]:
    """What the result of a job depends on, in named parts, to say which of them differs: "values" (of the
    preset and of the job), "data" (the corpus, mined triplets, look-alikes), "code" and "start"."""
    job = Job(asked)
    backbone = job.preset.backbone
    shape = None if job.get("start") else fingerprint(backbone)
    own = job.get("groups"), job.get("milestones"), job.get("bidirectional")
    start = identity(Path(job.get("start") or asked["tokenizer"]))
    return {
        "values": fingerprint(asked["stage"], job.config, shape, backbone.mask_token, own),
        "data": fingerprint(job.corpus.hash, job.stage.inputs(job)),
        "code": code_fingerprint(*(LIBRARY / name for name in CODE)),
        "start": start,
    }


def job_fingerprint(asked: Mapping[str, Any]) -> str:
    """One name for all of `job_identity`."""
    return fingerprint(job_identity(asked))
