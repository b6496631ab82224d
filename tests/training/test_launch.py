"""Trainings in real child processes, on a few sentences that lie where the real corpus is cached."""

import json
import multiprocessing
import os
import shutil
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

import tiny
import tiny_corpus
from unmask.models import backbone
from unmask.run import Run
from unmask.store import write_atomic
from unmask.training import launch as launching
from unmask.training import loop
from unmask.training.launch import TrainingStopped, history, launch, launch_all
from unmask.training.loop import run_job

LIB = Path(backbone.__file__).parents[2]
STEPS = 100
OVERRIDES = {
    "pair.steps": STEPS,
    "pair.batch": 8,
    "pair.checkpoint_every": 5,
    "pair.precision": "fp32",
    "pair.log_every": 1,
}


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A checkpoint to start from, in a workspace whose corpus is already there."""
    monkeypatch.setenv("UNMASK_ARTIFACTS", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(LIB))
    tiny_corpus.install(monkeypatch)
    return backbone.save(tiny.model(), tiny.tokenizer(), tmp_path / "start", stage="tiny", fingerprint="tiny")


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "nothing happened in time"
        time.sleep(0.005)
    return value


def read(path):
    return json.loads(path.read_text())


def dead(process):
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
def test_killed_with_its_notebook_a_training_goes_on_and_ends_as_if_uninterrupted(start, tmp_path, capsys):
    run = Run.open("02_pair", "smoke", OVERRIDES, run="r")
    folder = tmp_path / "r" / "02_pair" / "pair"
    notebook = multiprocessing.get_context("fork").Process(
        target=launch, args=(run, "pair", {"start": start})
    )
    notebook.start()
    try:
        wait_for(lambda: not notebook.is_alive() or list(folder.glob("checkpoints/step-*")))
        (child,) = psutil.Process(notebook.pid).children()
    finally:
        notebook.kill()
        notebook.join()
    wait_for(lambda: dead(child), seconds=20)
    assert not (folder / "model").exists(), "the training was over before it could be killed"
    assert list(folder.glob("checkpoints/step-*"))

    model = launch(run, "pair", {"start": start})
    assert model == folder / "model"
    assert not (folder / "checkpoints").exists()
    assert launch(run, "pair", {"start": start}) == model
    assert "already trained" in capsys.readouterr().out

    job = json.loads((folder / "job.json").read_text())
    whole = run_job(job | {"folder": str(tmp_path / "whole")}, lambda row: None)
    assert [row["step"] for row in history(model)] == list(range(STEPS))
    assert [row["loss"] for row in history(model)] == [row["loss"] for row in history(whole)]
    assert (model / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert backbone.facts(model) == backbone.facts(whole)
    assert not [path for path in folder.rglob("*") if path.suffix in (".bin", ".pt", ".pkl")]


def test_a_failed_training_says_why_and_where_its_log_is(start, tmp_path, monkeypatch):
    # A package that cannot be imported fails in milliseconds, and as every other error in the child does.
    (tmp_path / "broken" / "unmask").mkdir(parents=True)
    (tmp_path / "broken" / "unmask" / "__init__.py").write_text("raise ValueError('no such luck')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    run = Run.open("02_pair", "smoke", OVERRIDES, run="r")
    log = tmp_path / "r" / "02_pair" / "pair" / "train.log"
    with pytest.raises(RuntimeError, match="training pair failed: ValueError: no such luck") as error:
        launch(run, "pair", {"start": start})
    assert str(log) in str(error.value)
    assert "Traceback" in log.read_text()
    assert not (log.parent / "model").exists()


def few_steps(start, **changes):
    return "pair", {"start": start, "changes": {"steps": 6, "warmup": 2} | changes}


@pytest.mark.slow
def test_a_training_is_the_same_whether_another_came_before_it_in_its_process(start, tmp_path):
    run = Run.open("02_pair", "smoke", OVERRIDES, run="r")
    trainings = {
        "half": few_steps(start, precision="bf16", pooling="last"),
        "whole": few_steps(start),
        "half again": few_steps(start, precision="bf16"),
    }
    models = launch_all(run, trainings)
    assert models == {name: tmp_path / "r" / "02_pair" / name / "model" for name in trainings}
    for name, model in models.items():
        job = json.loads((model.parent / "job.json").read_text())
        alone = run_job(job | {"folder": str(tmp_path / "alone" / name)}, lambda row: None)
        assert [row["loss"] for row in history(model)] == [row["loss"] for row in history(alone)]
        assert (model / "model.safetensors").read_bytes() == (alone / "model.safetensors").read_bytes()
    different = len({(model / "model.safetensors").read_bytes() for model in models.values()})
    assert different == 2 + backbone.computes_in_bf16("bf16")


@pytest.mark.slow
def test_a_failure_stops_the_list_and_names_its_training(start, tmp_path, capsys):
    run = Run.open("02_pair", "smoke", OVERRIDES, run="r")
    trainings = {"one": few_steps(start), "two": few_steps(start, lr=1e30), "three": few_steps(start, seed=1)}
    with pytest.raises(RuntimeError, match=r"training two failed: FloatingPointError: .* at step") as error:
        launch_all(run, trainings)
    folder = tmp_path / "r" / "02_pair"
    assert str(folder / "two" / "train.log") in str(error.value)
    assert "Traceback" in (folder / "two" / "train.log").read_text()
    assert "Traceback" not in (folder / "one" / "train.log").read_text()
    assert len(history(folder / "one" / "model")) == 6
    assert not [name for name in ("two", "three") if (folder / name / "model").exists()]
    assert not (folder / "three" / "train.log").exists()

    models = launch_all(run, trainings | {"two": few_steps(start)})
    said = capsys.readouterr().out
    assert "02_pair/one: already trained" in said
    assert said.count("already trained") == 1
    assert all(len(history(model)) == 6 for model in models.values())


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_sigterm_in_the_second_of_three_keeps_what_was_done(start, tmp_path, processes, capfd):
    run = Run.open("02_pair", "smoke", OVERRIDES | {"parallel.num_processes": processes}, run="r")
    folder = tmp_path / "r" / "02_pair"
    trainings = {
        "one": few_steps(start),
        "two": few_steps(start, steps=120),
        "three": few_steps(start, seed=1),
    }

    def notebook():
        try:
            launch_all(run, trainings)
        except TrainingStopped as stop:
            print(f"STOPPED {stop}")

    process = multiprocessing.get_context("fork").Process(target=notebook)
    process.start()
    wait_for(lambda: not process.is_alive() or (folder / "two" / "checkpoints").exists(), seconds=120)
    process.terminate()
    process.join(60)
    assert process.exitcode == 0
    assert "STOPPED training two was told to stop" in capfd.readouterr().out
    assert not processes_of(folder)
    assert len(history(folder / "one" / "model")) == 6
    (checkpoint,) = (folder / "two" / "checkpoints").glob("step-*")
    assert not (folder / "two" / "model").exists()
    assert not (folder / "three" / "model").exists()

    done = int(checkpoint.name.split("-")[1])
    before = (folder / "two" / "metrics.jsonl").read_text().splitlines()[:done]
    models = launch_all(run, trainings | {"two": few_steps(start, steps=120)})
    assert "02_pair/one: already trained" in capfd.readouterr().out
    assert [len(history(model)) for model in models.values()] == [6, 120, 6]
    assert (folder / "two" / "metrics.jsonl").read_text().splitlines()[:done] == before


# At a low rate: rounding to INT8 amplifies what two processes round otherwise.
TWO = OVERRIDES | {"parallel.num_processes": 2, "pair.steps": 40, "pair.lr": 1e-4}


def processes_of(folder):
    """Every live process whose command line names a folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(folder) in part for part in process.info["cmdline"] or []) and not dead(process):
            found.append(process)
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
def test_two_processes_die_with_their_notebook_and_end_as_one_would(start, tmp_path):
    run, folder = Run.open("02_pair", "smoke", TWO, run="r"), tmp_path / "r" / "02_pair" / "pair"
    notebook = multiprocessing.get_context("fork").Process(
        target=launch, args=(run, "pair", {"start": start})
    )
    notebook.start()
    try:
        wait_for(
            lambda: not notebook.is_alive() or list(folder.glob("checkpoints/step-*/state.json")), seconds=120
        )
        assert len(processes_of(folder)) >= 3  # torchrun and its two workers
    finally:
        notebook.kill()
        notebook.join()
    wait_for(lambda: not processes_of(folder), seconds=20)
    assert not (folder / "model").exists(), "the training was over before it could be killed"

    two = launch(run, "pair", {"start": start})
    job = json.loads((folder / "job.json").read_text())
    one = run_job(job | {"folder": str(tmp_path / "one")}, lambda row: None)
    assert [row["step"] for row in history(two)] == [row["step"] for row in history(one)]
    for here, there in zip(history(two), history(one), strict=True):
        assert (here["dataset"], here["tokens"]) == (there["dataset"], there["tokens"])
        assert here["loss"] == pytest.approx(there["loss"], rel=1e-3)
    assert backbone.facts(two) == backbone.facts(one)


@pytest.mark.slow
def test_a_launcher_starts_the_processes_of_all_machines(start, tmp_path, monkeypatch):
    """`srun` of two machines, which here are one."""
    tool = tmp_path / "bin" / "srun"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\necho "from srun"\n"$@" & "$@" & wait\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{Path(sys.executable).parent}", prepend=os.pathsep)
    launcher = "srun torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29533"
    sharded = {"parallel.num_machines": 2, "parallel.strategy": "fsdp2", "parallel.launcher": launcher}
    run = Run.open("02_pair", "smoke", TWO | sharded | {"pair.steps": 10}, run="r")
    with pytest.raises(RuntimeError, match="no such command, or a variable is not set"):
        launch(run, "pair", {"start": start})
    monkeypatch.setenv("HEAD", "127.0.0.1")
    two = launch(run, "pair", {"start": start})
    assert (two.parent / "rank-1.log").exists()
    job = json.loads((two.parent / "job.json").read_text())
    one = run_job(job | {"folder": str(tmp_path / "one")}, lambda row: None)
    for here, there in zip(history(two), history(one), strict=True):
        assert here["loss"] == pytest.approx(there["loss"], rel=1e-3)
    weights = [load_file(path / "model.safetensors") for path in (two, one)]
    assert weights[0].keys() == weights[1].keys()
    for key, value in weights[1].items():
        torch.testing.assert_close(weights[0][key], value, rtol=1e-3, atol=1e-4)


def test_what_was_paid_for_is_kept_when_code_or_values_change(start, tmp_path, monkeypatch):
    def opened(**changes):
        return Run.open("02_pair", "smoke", OVERRIDES | changes, run="r")

    began: list[dict] = []
    monkeypatch.setattr(launching, "prepare_data", lambda job: None)
    monkeypatch.setattr(launching, "_train", lambda run, jobs: began.extend(map(read, jobs.values())))
    launch(opened(), "pair", {"start": start})
    folder = tmp_path / "r" / "02_pair" / "pair"
    checkpoint = folder / "checkpoints" / "step-0000005"
    checkpoint.mkdir(parents=True)

    monkeypatch.setattr(loop, "code_fingerprint", lambda *paths: "tomorrow's")
    with pytest.raises(RuntimeError, match=r"differs in code \(.* → tomorrow's\)\. .* --accept-code`\. "):
        launch(opened(), "pair", {"start": start})
    with pytest.raises(
        RuntimeError, match=r"differs in code .*, pair.lr \(0.0?\d* → 0.5\)\. Train anew: move"
    ):
        launch(opened(**{"pair.lr": 0.5}), "pair", {"start": start})
    monkeypatch.setenv("UNMASK_ACCEPT_CODE", "1")
    with pytest.raises(RuntimeError, match=r"differs in code .*, pair.lr"):
        launch(opened(**{"pair.lr": 0.5}), "pair", {"start": start})
    launch(opened(), "pair", {"start": start})  # goes on, as the same training
    monkeypatch.delenv("UNMASK_ACCEPT_CODE")
    launch(opened(), "pair", {"start": start})  # once is enough
    assert len(began) == 3 and len({job["fingerprint"] for job in began}) == 1
    assert checkpoint.is_dir()

    # A finished model of accepted code is not trained again; with other values it is.
    shutil.rmtree(folder / "checkpoints")
    facts = {"fingerprint": began[0]["fingerprint"]}
    write_atomic(folder / "model" / "unmask.json", json.dumps(facts))
    launch(opened(), "pair", {"start": start})
    assert len(began) == 3
    launch(opened(**{"pair.lr": 0.5}), "pair", {"start": start})
    assert len(began) == 4 and began[3]["fingerprint"] != began[0]["fingerprint"]


def test_history_reads_the_metrics_beside_a_checkpoint(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 2.0}\n{"step": 1, "loss": 1.5}\n')
    assert history(tmp_path / "model") == [{"step": 0, "loss": 2.0}, {"step": 1, "loss": 1.5}]
