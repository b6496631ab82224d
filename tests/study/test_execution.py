"""Executing toy notebooks through the command line: what is written, what is skipped, what is left behind."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from unmask.models.backbone import computes_in_bf16
from unmask.store import write_atomic
from unmask_study import execute
from unmask_study.pipeline import Pipeline, clock
from unmask_study.settings import load_preset
from waiting import live, wait_for

LOOK = """
import json, os, sys
import ipykernel, unmask
print(json.dumps([sys.executable, os.getcwd(), unmask.__file__,
                  *map(os.environ.get, ("HF_HUB_OFFLINE", "PYTHONHASHSEED", "UNMASK_CODE")),
                  ipykernel.get_connection_info(unpack=True)["transport"]]))
"""
BAR = """
for step in range(3):
    print(f"\\rstep {step}", end="", file=sys.stderr, flush=True)
print(file=sys.stderr)
"""


def text_of(notebook, cell):
    return "".join("".join(output["text"]) for output in notebook["cells"][cell]["outputs"])


def record(checkout):
    return json.loads((checkout.folders.results / "provenance.json").read_text())


def commit(checkout):
    """A repository of git, in which all that a run does not make is committed."""
    (checkout.root / ".gitignore").write_text("artifacts\n__pycache__\n")
    committed = "git init -q && git add . && git -c user.name=a -c user.email=a@b commit -qm a"
    subprocess.run(committed, shell=True, check=True, cwd=checkout.root)


def test_a_run_from_start_to_nothing_to_do(checkout, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    checkout.notebook("00_backbone", [LOOK, BAR, "os.write(2, b'from below')"])
    checkout.notebook("01_pair", ["print(overrides)"], needs=["00_backbone"], reads=["pair"])
    checkout.notebook("12_report", prose="# The report", needs=["01_pair"], reads=[])
    commit(checkout)
    (checkout.root / "papermill_runs" / "presets" / "executed.ipynb").touch()

    command = ("run", "--preset", "smoke", "--set", "pair.steps=13")
    first = checkout.unmask(*command)
    assert (first.returncode, first.stderr) == (0, "")
    assert "[1/3] 00_backbone · started" in first.stdout and "[2/3] 01_pair · done after" in first.stdout
    assert "report: results/smoke/report.md" in first.stdout
    assert (checkout.folders.results / "report.md").read_text() == "# The report\n"

    # The notebook ran in this interpreter, where the command was given, with this library, without the Hub,
    # and by ipc: kernels that start at once could take each other's ports.
    ran = checkout.executed("00_backbone")
    parameters = "".join(ran["cells"][2]["source"])
    assert parameters == '# Parameters\npreset = "smoke"\noverrides = {"pair.steps": 13}\nrun = "smoke"\n'
    expected = [sys.executable, ".", "lib/unmask/__init__.py", "1", "0", "anew", "ipc"]
    assert json.loads(text_of(ran, 3)) == expected and text_of(ran, 4) == "step 2\n"
    assert text_of(checkout.executed("01_pair"), 3) == "{'pair.steps': 13}\n"
    assert str(checkout.root) not in json.dumps(ran)
    log = (checkout.folders.logs / "00_backbone.log").read_text()
    assert "step 0" in log and "from below" in log

    about = record(checkout)
    assert about["command"] == "unmask run --preset smoke --set pair.steps=13"
    assert len(about["commit"]) == 40 and about["dirty"] is False  # what runs have made does not count
    (checkout.folders.notebooks / "new").touch()
    assert Pipeline(checkout.folders, load_preset("smoke"), {}).describe("")["dirty"] is True
    assert about["overrides"] == {"pair.steps": 13} and about["preset"]["pair"]["steps"] == 13
    assert about["versions"]["torch"].startswith("2.") and about["hardware"]["cores"] >= 1
    assert about["hardware"]["gpus"] or about["hardware"]["bf16"] is computes_in_bf16("bf16")
    stage = about["stages"]["01_pair"]
    assert stage["exit_status"] == 0 and stage["wall_seconds"] > 0 and stage["started"].endswith("+00:00")
    assert 2**25 < stage["peak_memory_bytes"] < 2**34

    again = checkout.unmask(*command)
    assert again.returncode == 0 and "nothing to do" in again.stdout and "report.md" in again.stdout
    rows = checkout.unmask("run", "--preset", "smoke", "--dry-run").stdout.splitlines()[2:]
    assert rows[0].split()[0] == "01_pair" and rows[0].endswith("preset section pair changed")
    assert rows[0].split()[-6] == "≈" and not any("00_backbone" in row for row in rows)


def test_a_run_says_where_it_is_and_its_list_what_was_recorded(checkout, monkeypatch):
    monkeypatch.setattr("unmask_study.runner.QUIET", 0)
    look = "import os; print(os.environ['UNMASK_CODE'], os.path.isdir(overrides['backbone.checkpoint']))"
    slow = "import time; print('step 1\\rstep 2', flush=True); time.sleep(2)"
    checkout.notebook("00_slow", [look, slow])
    write_atomic(checkout.root / "here" / "config.json", "{}")
    command = ("run", "--preset", "smoke", "--accept-code", "--set", "backbone.checkpoint=here")
    first = checkout.unmask(*command).stdout
    assert text_of(checkout.executed("00_slow"), 3) == "accept True\n"  # paths are those of the command
    assert re.search(r"^\d+% done, 1 min left · 00_slow: step 2$", first, re.MULTILINE)
    whole = record(checkout)["stages"]["00_slow"]["whole_seconds"]
    again = checkout.unmask(*command, "--force", "--dry-run").stdout.splitlines()[2:4]
    assert again[0].split()[3] == again[1].split()[1] == clock(whole)


def test_only_paths_of_this_machine_are_shortened(checkout, monkeypatch):
    monkeypatch.setenv("UNMASK_ARTIFACTS", "/data")
    monkeypatch.setattr(execute, "repository", lambda: Path("/app"))
    said = "/app/lib/a.py '/app' /data/smoke /apply https://host/app/v1 a/data/b file:/app/x\n/app/c"
    said += " \x1b[32m/app/d /data.old/e /app."
    path = checkout.root / "some.ipynb"
    cell = {"cell_type": "code", "source": "", "outputs": [{"output_type": "stream", "text": said}]}
    path.write_text(json.dumps({"cells": [cell]}))
    execute.clean(path)
    expected = "lib/a.py '.' artifacts/smoke /apply https://host/app/v1 a/data/b file:x\nc"
    expected += " \x1b[32md /data.old/e .."
    assert text_of(json.loads(path.read_text()), 0) == expected


def test_each_notebook_records_the_code_that_it_began_with(checkout):
    """The tree may change while a run goes on."""
    checkout.notebook("00_backbone", ["from pathlib import Path; Path('notebooks/mine.py').touch()"])
    checkout.notebook("01_pair", ["1"], needs=["00_backbone"])
    commit(checkout)
    assert checkout.unmask("run", "--preset", "smoke").returncode == 0
    stages = record(checkout)["stages"]
    assert [stages[name]["dirty"] for name in ("00_backbone", "01_pair")] == [False, True]


def test_a_failed_cell_is_reported_and_stops_what_needs_its_notebook(checkout):
    checkout.notebook("00_good", ["1"])
    checkout.notebook("01_bad", ["print('so far')", "# setting out\n1 / 0"], needs=["00_good"])
    checkout.notebook("02_never", ["1"], needs=["01_bad"])
    checkout.notebook("03_apart", ["1"], needs=["00_good"])
    result = checkout.unmask("run", "--preset", "smoke")
    log, executed = checkout.folders.logs / "01_bad.log", checkout.folders.executed / "01_bad.ipynb"
    why = "failed in cell 4 (`# setting out`)\n  ZeroDivisionError: division by zero"
    where = f"  log: {log}\n  as far as it got: {executed}\nunmask: not done: 01_bad, 02_never\n"
    assert (result.returncode, result.stderr) == (1, f"unmask: notebook 01_bad.ipynb {why}\n{where}")
    assert "so far\n" in log.read_text() and "ZeroDivisionError: division by zero" in log.read_text()
    assert "so far" in json.dumps(checkout.executed("01_bad"))
    states = checkout.unmask("status", "--preset", "smoke").stdout.splitlines()[2:]
    assert [state.split()[-1] for state in states] == ["done", "yet", "yet", "done"]


FAILURES = {
    "import os; os.kill(os.getpid(), 9)": "00_bad.ipynb failed\n  Kernel died: killed, usually for lack of",
    "raise ValueError('x' * 200_000)": "in cell 3 (`raise ValueError('x' * 200_000)`)\n  ValueError: xxx",
    "print('a log')": "[Errno 28] No space left on device: '{log} or ",
}


@pytest.mark.parametrize(("cell", "why"), FAILURES.items())
def test_a_dead_kernel_and_a_log_that_cannot_be_written_are_named(checkout, cell, why):
    checkout.notebook("00_bad", [cell])
    log = checkout.folders.logs / "00_bad.log"
    log.parent.mkdir(parents=True)
    if "Errno 28" in why:
        log.symlink_to("/dev/full")
    failed = checkout.unmask("run", "--preset", "smoke")
    assert failed.returncode == 1 and "[1/1] 00_bad · failed" in failed.stdout
    assert why.format(log=log) in failed.stderr


# As a training does at SIGTERM; its checkpoint tells how many came.
TRAINING = """
import pathlib, signal, time
class TrainingStopped(RuntimeError): pass
came = []
signal.signal(signal.SIGTERM, lambda *_: came.append(1))
pathlib.Path("started").touch()
while not came:
    time.sleep(0.05)
time.sleep(0.5)
pathlib.Path("checkpoint").write_text(str(len(came)))
raise TrainingStopped("after 3 steps")
"""
# Evaluates, say, with a process of its own.
IDLE = """
import subprocess, time
from pathlib import Path
from unmask.children import bound
subprocess.Popen(bound(["sleep", "300"]), start_new_session=True)
Path("started").touch()
time.sleep(300)
"""
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + IDLE
STOPS = {
    "SIGTERM": (TRAINING, 3000, signal.SIGTERM, 75),
    "SIGINT": (TRAINING, 3000, signal.SIGINT, 130),
    "SIGKILL": (TRAINING, 3000, signal.SIGKILL, -signal.SIGKILL),
    "no training": (IDLE, 3000, signal.SIGTERM, 75),
    "deaf": (DEAF, 1.5, signal.SIGTERM, 75),
}


@pytest.mark.parametrize(("cell", "grace", "sent", "status"), STOPS.values(), ids=STOPS)
def test_a_stopped_run_saves_its_training_leaves_no_process_and_goes_on(
    checkout, monkeypatch, cell, grace, sent, status
):
    """What does not end in time is killed."""
    monkeypatch.setenv("UNMASK_GRACE_SECONDS", str(grace))
    checkout.notebook("00_train", [cell])
    run = checkout.start("run", "--preset", "smoke")
    try:
        wait_for(lambda: (checkout.root / "started").exists() or not run.is_alive(), 120)
        started = psutil.Process(run.pid).children(recursive=True)
        assert len(started) == 2 + (cell != TRAINING)  # papermill, the kernel, and what it started
        if sent == signal.SIGINT:
            second = checkout.unmask("run", "--preset", "smoke")
            assert second.returncode == 1 and "another process works on" in second.stderr
        os.kill(run.pid, sent)
        os.kill(run.pid, sent)  # as `timeout` does: to the process, and to its group
        run.join(120)
    finally:
        run.kill()
    assert run.exitcode == status
    wait_for(lambda: not live(started), 120)
    assert not (checkout.folders.artifacts / "00_train" / "done.json").exists()
    assert (checkout.folders.executed / "00_train.ipynb").exists()  # as far as it got
    saved = [path.read_text() for path in checkout.root.glob("checkpoint")]
    assert saved == (["1"] if cell == TRAINING and sent != signal.SIGKILL else [])
    if sent != signal.SIGKILL:
        said = f"unmask: stopped by {sent.name}; the same command goes on from here\n"
        assert (checkout.root / "errors").read_text() == said
        assert "00_train · stopped after" in (checkout.root / "output").read_text()
        assert record(checkout)["stages"]["00_train"]["exit_status"] == 75


def test_a_training_that_was_told_to_stop_ends_the_run_as_if_pre_empted(checkout):
    cell = "class TrainingStopped(RuntimeError): pass\nraise TrainingStopped('after 3 steps')"
    checkout.notebook("00_train", [cell])
    result = checkout.unmask("run", "--preset", "smoke")
    assert result.returncode == 75 and "00_train · stopped after" in result.stdout


def meeting(me, other):
    """A notebook that ends only beside another one, and says what it may use."""
    wait = f"""
import os, sys
from pathlib import Path
sys.path.append({str(Path(__file__).parents[1])!r})
from waiting import wait_for
Path("{me}.here").touch()
wait_for(Path("{other}.here").exists, 120)
"""
    return [wait, 'print(os.environ.get("OMP_NUM_THREADS"), os.environ["CUDA_VISIBLE_DEVICES"])']


def test_independent_notebooks_run_side_by_side_each_with_a_gpu(checkout, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("unmask_study.runner.gpu_names", lambda: ["one", "another"])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    checkout.notebook("00_left", meeting("left", "right"))
    checkout.notebook("01_right", meeting("right", "left"))
    after = "from pathlib import Path\nassert Path('artifacts/smoke/01_right/done.json').exists()"
    alone = "import os; print(os.environ.get('OMP_NUM_THREADS'), os.environ['GOMP_SPINCOUNT'])"
    checkout.notebook("02_join", [after, alone], needs=["00_left", "01_right"])
    result = checkout.unmask("run", "--preset", "smoke", "--jobs", "2")
    assert result.returncode == 0, result.stderr
    said = [text_of(checkout.executed(name), 4).split() for name in ("00_left", "01_right", "02_join")]
    assert said[0][0].isdecimal() and [row[1] for row in said] == ["0", "1", "2000"]
    assert said[2][0] == "None"  # alone it has all of the machine
    assert set(record(checkout)["stages"]) == {"00_left", "01_right", "02_join"}
    # Each notebook by itself, without the command line.
    plain = [sys.executable, "-m", "papermill", "notebooks/02_join.ipynb", "out.ipynb", "-k", "python3"]
    environment = os.environ | {"GOMP_SPINCOUNT": "1"}
    subprocess.run([*plain, "-p", "preset", "smoke"], check=True, cwd=checkout.root, env=environment)
