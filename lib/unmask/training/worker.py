"""One of the processes of a training: `torchrun … -m unmask.training.worker job.json`."""

import importlib
import os
import sys
import traceback
from pathlib import Path

import psutil
import torch

from unmask.children import PREEMPTED, die_with
from unmask.data.corpus import Corpus
from unmask.models import backbone
from unmask.store import read_json, write_atomic
from unmask.training.distributed import Processes
from unmask.training.identity import own_code, weights_hash
from unmask.training.job import Job
from unmask.training.launch import ERROR, TrainingStopped
from unmask.training.loop import run
from unmask.training.stages import Stage


def stage_of(job: Job, own: dict[str, str]) -> Stage:
    """The stage that a job describes.

    Args:
        own: the code of one's own that it has in the notebook (`own_code`).
    Raises: ValueError if it is another one here.
    """
    module, _, name = job.stage.partition(":")
    kind = getattr(importlib.import_module(module), name, None)
    corpus, tokenizer = Corpus(Path(job.corpus), job.families), backbone.load_tokenizer(job.tokenizer)
    stage = kind and kind(job, corpus, tokenizer)
    if stage is None or own_code(stage) != own:
        raise ValueError("other processes cannot import the code of a notebook: put it into a module")
    return stage


def main(path: Path) -> None:
    """Reads the job, trains, saves; whatever goes wrong is written where the notebook looks."""
    folder = path.parent
    if torch.distributed.is_torchelastic_launched():
        _die_with_torchrun()
    try:
        about = read_json(path)
        job = Job.of(about["job"])
        processes = Processes.join(job.config.precision, job.parallel.strategy)
        stage = stage_of(job, about["made_of"]["own code"])
        model = stage.model(job.start)
        if weights_hash(model) != about["made_of"]["weights"]:
            raise ValueError("the notebook's model is not what its start gives: save it, and start from that")
        run(job, stage, model, processes)
    except TrainingStopped:
        _say(folder, "TrainingStopped")
        raise SystemExit(PREEMPTED) from None
    except Exception as error:
        _say(folder, f"{type(error).__name__}: {error}")  # first: the log may be what cannot be written
        traceback.print_exc()
        raise SystemExit(1) from None
    if torch.distributed.is_initialized():  # not where a launcher starts one process without torchrun
        torch.distributed.destroy_process_group()


def _say(folder: Path, text: str) -> None:
    """The first process that fails says why: the others fail because it did."""
    if not (folder / ERROR).exists():
        write_atomic(folder / ERROR, text)


def _die_with_torchrun() -> None:
    """Makes a worker die with torchrun, which started it as a session of its own and may be dead by now."""
    parent = psutil.Process().parent()
    if parent is None or "torch" not in " ".join(parent.cmdline()):
        os._exit(1)
    die_with(parent.pid)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
