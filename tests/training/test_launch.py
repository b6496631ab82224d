"""Trainings in real child processes, on a few sentences that lie where the real corpus is cached."""

import gc
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest
from safetensors.torch import load_file

from closeness import assert_close
from toy_checkout import write_script
from unmask.models import backbone
from unmask.run import Run
from unmask.store import read_json, write_atomic
from unmask.training import launch as launching
from unmask.training import loop
from unmask.training.launch import TrainingStopped, history, launch, launch_all
from unmask.training.loop import run_job
from waiting import live_in, wait_for

OVERRIDES = {"pair.steps": 60, "pair.batch": 8, "pair.checkpoint_seconds": 0, "pair.precision": "fp32"}
# At a low rate: rounding to INT8 amplifies what two processes round otherwise.
TWO = OVERRIDES | {"parallel.num_processes": 2, "pair.steps": 40, "pair.lr": 1e-4}

STOPPED = (OVERRIDES, 1, signal.SIGKILL), (TWO, 3, signal.SIGTERM)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """NCCL refuses two processes on one GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def opened(overrides=OVERRIDES, **changes):
    return Run.open("02_pair", "smoke", overrides | changes, run="r")


def few_steps(start, **changes):
    return "pair", {"start": start, "changes": {"steps": 6, "warmup": 2, "checkpoint_seconds": 9} | changes}


def alone(model, folder):
    """The same job in this process, uninterrupted."""
    job = read_json(model.parent / "job.json")
    return run_job(job | {"folder": str(folder)}, lambda row: None)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
@pytest.mark.parametrize(("overrides", "least", "number"), STOPPED)
def test_stopped_with_its_notebook_a_training_goes_on_and_ends_as_if_uninterrupted(
    start, tmp_path, capfd, overrides, least, number
):
    """In the second of three: the first one stays, the third one is not begun."""
    run, folder, told = opened(overrides), tmp_path / "r" / "02_pair", number == signal.SIGTERM
    trainings = {"one": few_steps(start), "two": ("pair", {"start": start})}
    trainings["three"] = few_steps(start, seed=1)

    def notebook():
        try:
            launch_all(run, trainings)
        except TrainingStopped as stop:
            print(f"STOPPED {stop}")

    gc.collect()  # what other tests left: onnxruntime, freed in a fork, waits for threads that are not there
    process = multiprocessing.get_context("fork").Process(target=notebook)  # as a kernel would be
    process.start()
    try:
        wait_for(lambda: not process.is_alive() or list(folder.glob("two/checkpoints/step-*")))
        assert len(live_in(folder)) >= least
    finally:
        os.kill(process.pid, number)
        process.join(60)
    assert process.exitcode == (0 if told else -number)
    assert ("STOPPED training two was told to stop" in capfd.readouterr().out) == told
    wait_for(lambda: not live_in(folder), seconds=0 if told else 20)
    assert not [name for name in ("two", "three") if (folder / name / "model").exists()], "it was over before"
    done = max(int(path.name.split("-")[1]) for path in folder.glob("two/checkpoints/step-*"))
    before = (folder / "two" / "metrics.jsonl").read_text().splitlines()[:done]

    models = launch_all(run, trainings)
    assert capfd.readouterr().out.count("already trained") == 1
    assert [len(history(model)) for model in models.values()] == [6, run.config.pair.steps, 6]
    assert (folder / "two" / "metrics.jsonl").read_text().splitlines()[:done] == before
    left = ("checkpoints", ".bin", ".pt", ".pkl")
    assert not [path for path in folder.rglob("*") if path.name.endswith(left)]
    model, whole = models["two"], alone(models["two"], tmp_path / "whole")
    assert backbone.facts(model) == backbone.facts(whole)
    for here, there in zip(history(model), history(whole), strict=True):
        assert {"step", "dataset", "tokens"} <= {key for key in here if here[key] == there[key]}
        assert here["loss"] == pytest.approx(there["loss"], rel=1e-3 if least > 1 else 0)
    assert least > 1 or len({(one / "model.safetensors").read_bytes() for one in (model, whole)}) == 1


@pytest.mark.slow
def test_a_failure_stops_the_list_and_names_its_training(start, tmp_path, capsys, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):  # of a job that this one is part of
        monkeypatch.setenv(name, "2")
    trainings = {"one": few_steps(start), "two": few_steps(start, lr=1e30), "three": few_steps(start, seed=1)}
    with pytest.raises(RuntimeError, match=r"training two failed: FloatingPointError: .* at step") as error:
        launch_all(opened(), trainings)
    folder = tmp_path / "r" / "02_pair"
    assert str(folder / "two" / "train.log") in str(error.value)
    assert "Traceback" in (folder / "two" / "train.log").read_text()
    assert not [name for name in ("two", "three") if (folder / name / "model").exists()]

    models = launch_all(opened(), trainings | {"two": few_steps(start)})
    said = capsys.readouterr().out
    assert "02_pair/one: already trained" in said and said.count("already trained") == 1
    assert all(len(history(model)) == 6 for model in models.values())
    # What came before in the same process does not matter.
    monkeypatch.delenv("WORLD_SIZE")
    last, expected = models["three"], alone(models["three"], tmp_path / "alone") / "model.safetensors"
    assert (last / "model.safetensors").read_bytes() == expected.read_bytes()


@pytest.mark.slow
def test_a_training_that_the_system_kills_is_told_to_need_less_memory(start, tmp_path):
    def kill():
        wait_for(lambda: list((tmp_path / "r").rglob("metrics.jsonl")))
        for process in live_in(tmp_path / "r" / "02_pair"):
            process.kill()

    killing = threading.Thread(target=kill, daemon=True)
    killing.start()
    with pytest.raises(RuntimeError, match=r"training pair failed: .* memory is full. .* keep_tokens"):
        launch(opened(), "pair", {"start": start})
    killing.join()


@pytest.mark.slow
def test_a_launcher_starts_the_processes_of_all_machines(start, tmp_path, monkeypatch):
    """`srun` of two machines, which here are one."""
    tool = write_script(tmp_path / "bin" / "srun", 'echo "from srun"\n"$@" & "$@" & wait')
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{Path(sys.executable).parent}", prepend=os.pathsep)
    launcher = "srun torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29533"
    sharded = {"parallel.num_machines": 2, "parallel.strategy": "fsdp2", "parallel.launcher": launcher}
    run = opened(TWO | sharded | {"pair.steps": 10})
    with pytest.raises(RuntimeError, match="no such command, or a variable is not set"):
        launch(run, "pair", {"start": start})
    monkeypatch.setenv("HEAD", "127.0.0.1")
    two = launch(run, "pair", {"start": start})
    assert (two.parent / "rank-1.log").exists()
    one = alone(two, tmp_path / "one")
    for here, there in zip(history(two), history(one), strict=True):
        assert here["loss"] == pytest.approx(there["loss"], rel=1e-3)
    weights = load_file(two / "model.safetensors")
    for key, value in load_file(one / "model.safetensors").items():
        assert_close(weights[key], value, 1e-3)


def test_a_launcher_that_answers_sigterm_by_killing_is_asked_by_a_file(start, tmp_path, monkeypatch):
    """As srun does. This one has the notebook told to stop, and says what a training would."""
    said = '{"training": "pair", "stopped": true}'
    waits = 'until [ -e "$UNMASK_STOP" ]; do sleep 0.1; done'
    tool = write_script(tmp_path / "srun", f"kill -TERM $PPID\n{waits}\necho '{said}'\nexit 75")
    with pytest.raises(TrainingStopped, match="training pair was told to stop"):
        launch(opened(**{"parallel.launcher": str(tool)}), "pair", {"start": start})
    assert not list((tmp_path / "r" / "02_pair" / "pair").glob("stop-*"))


def test_what_was_paid_for_is_kept_when_code_or_values_change(start, tmp_path, monkeypatch):
    began: list[dict] = []
    monkeypatch.setattr(loop.Pair, "prepare", lambda stage: [])
    monkeypatch.setattr(launching, "_train", lambda run, jobs: began.extend(map(read_json, jobs.values())))
    code = write_atomic(tmp_path / "library" / "loop.py", "rate = 1\n")
    monkeypatch.setattr(loop, "CODE", [code.parent])
    launch(opened(), "pair", {"start": start})
    folder, other = tmp_path / "r" / "02_pair" / "pair", opened(**{"pair.lr": 0.5})
    (folder / "checkpoints" / "step-0000005").mkdir(parents=True)

    code.write_text("rate = 1  # a remark is no code\n")
    launch(opened(**{"pair.token_budget": 64}), "pair", {"start": start})  # goes on, as the same training
    code.write_text("rate = 2\n")
    with pytest.raises(RuntimeError, match=r"differs in code \(\w+ → \w+\)\. .* --accept-code`\. "):
        launch(opened(), "pair", {"start": start})
    monkeypatch.setenv("UNMASK_ACCEPT_CODE", "1")
    with pytest.raises(RuntimeError, match=r"code .*, pair.lr \(0.0?\d* → 0.5\)\. Train anew: move"):
        launch(other, "pair", {"start": start})
    launch(opened(), "pair", {"start": start})
    monkeypatch.delenv("UNMASK_ACCEPT_CODE")
    launch(opened(), "pair", {"start": start})  # once is enough
    assert len(began) == 4 and len({job["fingerprint"] for job in began}) == 1

    # A finished model of accepted code is not trained again; with other values it is, beside the other one.
    shutil.rmtree(folder / "checkpoints")
    write_atomic(folder / "model" / "unmask.json", json.dumps({"fingerprint": began[0]["fingerprint"]}))
    code.write_text("rate = 3\n")
    with pytest.raises(RuntimeError, match=r"holds a training that differs in code .*Train anew.*--force`"):
        launch(opened(), "pair", {"start": start})
    monkeypatch.setenv("UNMASK_ACCEPT_CODE", "1")
    launch(opened(), "pair", {"start": start})
    monkeypatch.delenv("UNMASK_ACCEPT_CODE")
    launch(opened(), "pair", {"start": start})
    assert len(began) == 4
    launch(other, "pair", {"start": start})
    assert len(began) == 5 and began[4]["fingerprint"] != began[0]["fingerprint"]
    aside = [folder.with_name(f"pair-{job['fingerprint']}") for job in (began[0], began[4])]
    assert (aside[0] / "model" / "unmask.json").is_file()

    # With the first values and code it comes back, and the other one waits.
    write_atomic(folder / "model" / "unmask.json", json.dumps({"fingerprint": began[4]["fingerprint"]}))
    code.write_text("rate = 1\n")
    launch(opened(), "pair", {"start": start})
    assert len(began) == 5 and launching.facts(folder / "model")["fingerprint"] == began[0]["fingerprint"]
    assert [path.is_dir() for path in aside] == [False, True]

    # Where the code alone has changed since, the other one is asked about, too.
    code.write_text("rate = 4\n")
    with pytest.raises(RuntimeError, match=r"holds a training that differs in code .*--force`"):
        launch(other, "pair", {"start": start})
    assert len(began) == 5 and [path.is_dir() for path in aside] == [True, False]
