"""One of the processes of a training: `torchrun … -m unmask.training.worker job.json`."""

import importlib
import os
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch

from unmask.children import PREEMPTED, die_with
from unmask.data.corpus import Corpus
from unmask.models import backbone
from unmask.store import read_json, write_atomic
from unmask.training.distributed import Distributed
from unmask.training.identity import outside_code, weights_hash
from unmask.training.job import OPTIONS, Job
from unmask.training.launch import ERROR, TrainingStopped
from unmask.training.loop import run
from unmask.training.stages import Stage


def stage_of(job: Job, code: dict[str, str]) -> Stage:
    """The stage that a job describes.

    Args:
        code: what it computes with in the notebook (`outside_code`).
    Raises: ValueError if that is something else here.
    """
    module, _, name = job.stage.partition(":")
    if kind := getattr(importlib.import_module(module), name, None):
        corpus, tokenizer = Corpus(Path(job.corpus)), backbone.load_tokenizer(job.tokenizer)
        preset = SimpleNamespace(**vars(job) | {job.section: job.config})
        options = {key: getattr(job, key) for key in OPTIONS}
        stage = kind(preset, corpus, tokenizer, section=job.section, **options)
        stage.begin(job.start, Path(job.folder))
    if kind is None or outside_code(stage) != code:
        raise ValueError("other processes cannot import the code of a notebook: put it into a module")
    return stage


def main(path: Path) -> None:
    """Reads the job, trains, saves; whatever goes wrong is written where the notebook looks."""
    if torch.distributed.is_torchelastic_launched():
        _die_with_torchrun()
    try:
        about = read_json(path)
        job, made_of = Job.of(about["job"]), about["made_of"]
        processes = Distributed.join(job.config.precision, job.parallel.strategy)
        stage = stage_of(job, made_of["code"])
        model = stage.model(job.start)
        if weights_hash(model) != made_of["weights"]:
            raise ValueError("the notebook's model is not what its start gives: save it, and start from that")
        run(stage, model, processes)
    except Exception as error:
        stopped = isinstance(error, TrainingStopped)
        # The first process that fails says why, before its log, which may not be writable.
        if not (file := path.with_name(ERROR)).exists():
            write_atomic(file, f"{type(error).__name__}: {error}")
        if not stopped:
            traceback.print_exc()
        raise SystemExit(PREEMPTED if stopped else 1) from None
    if torch.distributed.is_initialized():  # not where a launcher starts one process without torchrun
        torch.distributed.destroy_process_group()


def _die_with_torchrun() -> None:
    """Makes a worker die with torchrun, which started it as a session of its own and may be dead by now."""
    parent = os.getppid()
    command = Path(f"/proc/{parent}/cmdline")  # of Linux, where alone a process can die with another
    if command.exists() and b"torch" not in command.read_bytes():
        os._exit(1)
    die_with(parent)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
