"""Trainings in several processes: torchrun's, and what stands in for a cluster's launcher."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_stages
import torch
from safetensors.torch import load_file

import tiny
from closeness import assert_close
from limits import full_disk
from toy_checkout import write_script
from unmask.config import ParallelConfig
from unmask.training import Pair, TrainingStopped, history, train
from unmask.training.identity import outside_code
from unmask.training.watch import Watch
from unmask.training.worker import stage_of
from waiting import live_in, wait_for

TWO, ALONE, SAVED = ParallelConfig(num_processes=2), ParallelConfig(), "model.safetensors"


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """NCCL refuses two processes on one GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def made(start, parallel=TWO, **more):
    # At a low rate: rounding to INT8 amplifies what two processes round otherwise.
    short = {"steps": 10, "batch": 8, "lr": 1e-4}
    stage = tiny_stages.on_the_corpus("pair", start, **short | more)
    stage.job = replace(stage.job, parallel=parallel)
    return stage


def trained(stage, start, folder, **options):
    return train(stage, stage.model(start), folder, **options)


def assert_alike(two, one):
    """As far as rounding goes."""
    for here, there in zip(history(two), history(one), strict=True):
        assert {"step", "dataset", "tokens"} <= {key for key in here if here[key] == there[key]}
        assert here["loss"] == pytest.approx(there["loss"], rel=1e-3)
    assert_close(*(load_file(path / SAVED) for path in (two, one)), rel=1e-3)


# Of another job, which this one may be part of, as its launcher or a cluster sets them.
TWOS = "PET_NNODES RANK LOCAL_RANK GROUP_RANK ROLE_RANK WORLD_SIZE LOCAL_WORLD_SIZE SLURM_NTASKS SLURM_PROCID"
TWOS += " OMPI_COMM_WORLD_SIZE PMI_SIZE MV2_COMM_WORLD_SIZE MPI_LOCALNRANKS"
FOREIGN = dict.fromkeys(TWOS.split(), "2") | {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "none"}
FOREIGN |= {"PET_NO_PYTHON": "1", "TORCHELASTIC_ERROR_FILE": "/none/error"}
FOREIGN |= {"ACCELERATE_TORCH_DEVICE": "meta", "ACCELERATE_USE_PARALLELISM_CONFIG": "true"}


@pytest.fixture
def importable(start, monkeypatch):
    """Other processes find what lies beside the tests."""
    for path in (Path(tiny.__file__), Path(__file__)):
        monkeypatch.setenv("PYTHONPATH", str(path.parent), prepend=os.pathsep)


class Cramped(Pair):
    """One of two GPUs does not hold as many tokens as the other."""

    def backward(self, module, batch, processes):
        if processes.rank and self.config.memory("cpu")["token_budget"] > 1000:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().backward(module, batch, processes)


@pytest.mark.slow
def test_two_processes_train_as_one(start, importable, tmp_path, monkeypatch, capsys):
    """Where one has too little memory, both end, and the message names what both take; another job's
    variables reach neither, nor a training in this process."""
    for name, value in FOREIGN.items():
        monkeypatch.setenv(name, value)
    stage = made(start, kind=Cramped, token_budget=1024)
    model = stage.model(start)
    with pytest.raises(RuntimeError, match=r"of pair: set pair\.token_budget=512, pair\.keep_tokens="):
        train(stage, model, tmp_path / "two")
    stage = made(start, kind=Cramped, token_budget=512)
    two = train(stage, model, tmp_path / "two")
    assert "10/10" in capsys.readouterr().out
    saved = load_file(two / SAVED)
    assert_close({key: model.state_dict()[key] for key in saved}, saved, 0)
    assert_alike(two, trained(made(start, ALONE), start, tmp_path / "one"))


LONG = {"steps": 30, "checkpoint_seconds": 0}  # long enough to be stopped; each step leaves a checkpoint
NOTEBOOK = """
    import sys
    import pytest, test_launch, tiny_corpus
    tiny_corpus.install(pytest.MonkeyPatch())
    start, folder = sys.argv[1:]
    test_launch.trained(test_launch.made(start, **test_launch.LONG), start, folder)
"""


@pytest.mark.slow
def test_stopped_with_its_notebook_it_goes_on(start, importable, tmp_path):
    """Killed with it, and told to stop."""
    folder, log = tmp_path / "pair", (tmp_path / "log").open("w")
    command = [sys.executable, "-c", textwrap.dedent(NOTEBOOK), str(start), str(folder)]
    process = subprocess.Popen(command, stdout=log, stderr=log)
    wait_for(lambda: len(list(folder.glob("*/checkpoints/step-*"))) or process.poll() is not None)
    process.kill()
    process.wait()
    wait_for(lambda: not live_in(folder))
    saved = list(folder.glob("*/checkpoints/step-*"))
    assert saved, (tmp_path / "log").read_text()
    stage = made(start, **LONG)
    with pytest.raises(TrainingStopped):
        trained(stage, start, folder, watch=tiny_stages.Reported(10, signal.SIGTERM))
    two = trained(stage, start, folder)
    assert two.parent == saved[0].parents[1]
    assert_alike(two, trained(made(start, ALONE, steps=30), start, tmp_path / "one"))


def test_a_failure_is_told_with_its_log(start, tmp_path):
    alone = ParallelConfig(launcher=sys.executable)
    with pytest.raises(RuntimeError, match=r"FloatingPointError: .* at step .*\n\(log: .*train\.log\)"):
        trained(made(start, alone, lr=1e30), start, tmp_path / "pair")
    assert not list(tmp_path.glob("pair/*/model"))


class Killed(Pair):
    """The system kills one of two processes; the other sees a broken connection."""

    def backward(self, module, batch, processes):
        if processes.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().backward(module, batch, processes)


@pytest.mark.slow
def test_a_killed_process_is_told(start, importable, tmp_path):
    with pytest.raises(RuntimeError, match=r"^killed: memory is full\?[^\n]*\n\(log: .*train\.log\)$"):
        trained(made(start, kind=Killed), start, tmp_path / "pair")


def test_where_nothing_can_be_said_the_disk_is_told(start, tmp_path):
    """From the first report on no file may grow: neither the log nor what a process wants to say."""
    stage = made(start, ParallelConfig(launcher=str(write_script(tmp_path / "srun", "sleep 1; exit 1"))))
    with ExitStack() as until, pytest.raises(OSError, match=r"File too large: '.*/error\.txt'"):

        class Full(Watch):
            def __call__(self, row):
                until.enter_context(full_disk(0))

        trained(stage, start, tmp_path / "pair", watch=Full())


def test_code_of_a_notebook_needs_one_process(start, tmp_path):
    """A class of a cell, and a loss that a cell has put into one."""
    stage = made(start, kind=Cramped)
    stage.begin(str(start), tmp_path)
    job, code = stage.job, outside_code(stage)
    assert stage_of(job, code).job == job
    for other in ((replace(job, stage="__main__:OfACell"), code), (job, code | {"loss": "of a cell"})):
        with pytest.raises(ValueError, match="other processes cannot import the code of a notebook"):
            stage_of(*other)


@pytest.mark.slow
def test_a_launcher_starts_the_processes_of_all_machines(start, tmp_path, monkeypatch):
    """`srun` of two machines, which here are one."""
    tool = write_script(tmp_path / "bin" / "srun", 'echo "from srun"\n"$@" & "$@" & wait')
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{Path(sys.executable).parent}", prepend=os.pathsep)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    launcher = f"srun torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:{port}"
    sharded = {"num_processes": 2, "num_machines": 2, "strategy": "fsdp2", "launcher": launcher}
    stage = made(start, ParallelConfig(**sharded))
    with pytest.raises(RuntimeError, match="no such command, or a variable is not set"):
        trained(stage, start, tmp_path / "pair")
    monkeypatch.setenv("HEAD", "127.0.0.1")
    two = trained(stage, start, tmp_path / "pair")
    assert "from srun" in (two.parent / "train.log").read_text()
    assert_alike(two, trained(made(start, ALONE), start, tmp_path / "one"))


@pytest.mark.parametrize("sent", ["TERM", "INT"])
def test_a_launcher_that_ignores_signals_is_asked_by_a_file(start, tmp_path, sent):
    """As srun does. This one has the notebook told to stop, and does what a training would."""
    waits = 'until [ -e "$UNMASK_STOP" ]; do sleep 0.1; done'
    tool = write_script(tmp_path / "srun", f"kill -{sent} $PPID\n{waits}\nexit 75")
    with pytest.raises(TrainingStopped, match="told to stop"):
        trained(made(start, ParallelConfig(launcher=str(tool))), start, tmp_path / "pair")
    assert not list((tmp_path / "pair").rglob("stop-*"))
