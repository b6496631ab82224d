"""Executing toy notebooks through the command line: what is written, what is skipped, what is left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from joblib import cpu_count

from toy_checkout import Checkout

LOOK = """
import json, os, sys
import unmask
print(json.dumps({"python": sys.executable, "folder": os.getcwd(), "library": unmask.__file__,
                  "hub": os.environ.get("HF_HUB_OFFLINE"), "hash": os.environ["PYTHONHASHSEED"]}))
"""
BAR = """
for step in range(3):
    print(f"\\rstep {step}", end="", file=sys.stderr, flush=True)
print(file=sys.stderr)
"""
METRICS = """
from pathlib import Path
Path("../results", run).mkdir(parents=True, exist_ok=True)
Path("../results", run, "00_backbone.json").write_text('{"corpus_hash": "abc"}')
Path("../results", run, "report.md").write_text("# Report")
"""


def wait_for(condition: Callable[[], Any]) -> None:
    """Returns once the condition holds; fails after half a minute."""
    for _ in range(300):
        if condition():
            return
        time.sleep(0.1)
    pytest.fail("waited half a minute in vain")


def assert_ended(processes: list[psutil.Process]) -> None:
    """None of them runs, though nobody may have collected them."""

    def running(process: psutil.Process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    wait_for(lambda: not any(map(running, processes)))


def text_of(notebook: dict[str, Any], cell: int) -> dict[str, str]:
    outputs = notebook["cells"][cell]["outputs"]
    return {output["name"]: "".join(output["text"]) for output in outputs}


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def record(checkout: Checkout) -> dict[str, Any]:
    return json.loads((checkout.folders.results / "provenance.json").read_text())


def test_a_run_from_start_to_nothing_to_do(checkout: Checkout) -> None:
    checkout.notebook("00_backbone", [LOOK, BAR, METRICS])
    checkout.notebook("01_pair", ["print(overrides)"], needs=["00_backbone"], reads=["pair"])
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "notebooks", "lib"], ["commit", "-qm", "a"]):
        subprocess.run([*git, *arguments], check=True, cwd=checkout.root)

    first = checkout.unmask("run", "--preset", "smoke", "--set", "pair.steps=13")
    assert first.returncode == 0, first.stderr
    assert "[1/2] 00_backbone · 00:00 elapsed · time left unknown" in first.stdout
    assert "[2/2] 01_pair · done after" in first.stdout
    assert "report: results/smoke/report.md" in first.stdout
    assert first.stderr == ""

    # The notebook ran in this interpreter, beside the other notebooks, with this library and without the Hub.
    ran = checkout.executed("00_backbone")
    assert (
        source(ran["cells"][2])
        == '# Parameters\npreset = "smoke"\noverrides = {"pair.steps": 13}\nrun = "smoke"\n'
    )
    seen = json.loads(text_of(ran, 3)["stdout"])
    assert (seen["folder"], seen["library"]) == ("notebooks", "lib/unmask/__init__.py")
    assert (seen["hub"], seen["hash"]) == ("1", "0")
    assert Path(seen["python"]) == Path(sys.executable)
    assert text_of(ran, 4) == {"stderr": "step 2\n"}
    assert text_of(checkout.executed("01_pair"), 3) == {"stdout": "{'pair.steps': 13}\n"}
    assert str(checkout.root) not in json.dumps(ran)
    assert ran["metadata"]["papermill"]["input_path"] == "notebooks/00_backbone.ipynb"
    assert "step 0" in (checkout.folders.logs / "00_backbone.log").read_text()

    about = record(checkout)
    assert about["command"] == "unmask run --preset smoke --set pair.steps=13"
    assert len(about["commit"]) == 40 and about["dirty"] is True  # papermill_runs/presets was not committed
    assert about["overrides"] == {"pair.steps": 13} and about["preset"]["pair"]["steps"] == 13
    assert about["corpus_hash"] == "abc" and about["seeds"]["pair"] == 0
    assert about["versions"]["torch"].startswith("2.") and about["hardware"]["cores"] >= 1
    stage = about["stages"]["01_pair"]
    assert stage["exit_status"] == 0 and stage["wall_seconds"] > 0 and stage["started"].endswith("+00:00")
    assert 2**25 < stage["peak_memory_bytes"] < 2**34 and stage["resumed"] is False

    again = checkout.unmask("run", "--preset", "smoke", "--set", "pair.steps=13")
    assert again.returncode == 0
    assert again.stdout.startswith("nothing to do: all stages are up to date") and "report.md" in again.stdout

    stale = checkout.unmask("run", "--preset", "smoke", "--dry-run").stdout
    assert "01_pair   preset section pair changed  about 0" in stale and "00_backbone" not in stale


def test_a_failed_cell_stops_the_run_and_is_reported(checkout: Checkout) -> None:
    checkout.notebook("00_good", ["1"])
    checkout.notebook(
        "01_bad", ["print('so far')", "# setting out\nfor x in [1]:\n    x / 0"], needs=["00_good"]
    )
    checkout.notebook("02_never", ["1"], needs=["01_bad"])
    result = checkout.unmask("run", "--preset", "smoke")
    assert result.returncode == 1
    assert result.stderr == (
        "unmask: notebook 01_bad.ipynb failed in cell 4 of 4 (`# setting out`)\n"
        "  ZeroDivisionError: division by zero\n"
        "  log: artifacts/smoke/logs/01_bad.log\n"
        "  notebook as far as it got: papermill_runs/smoke/01_bad.ipynb\n"
    )
    log = (checkout.folders.logs / "01_bad.log").read_text()
    assert "so far\n" in log and "ZeroDivisionError: division by zero" in log and "\x1b" not in log
    assert "so far" in json.dumps(checkout.executed("01_bad"))
    stages = record(checkout)["stages"]
    assert (stages["00_good"]["exit_status"], stages["01_bad"]["exit_status"]) == (0, 1)

    states = checkout.unmask("status", "--preset", "smoke").stdout
    assert [line.split()[:2] for line in states.splitlines()[2:]] == [
        ["00_good", "done"],
        ["01_bad", "failed"],
        ["02_never", "never"],
    ]

    checkout.notebook("01_bad", ["import os; os._exit(9)"], needs=["00_good"])
    died = checkout.unmask("run", "--preset", "smoke")
    assert died.returncode == 1 and "[1/2] 01_bad" in died.stdout
    assert "01_bad.ipynb failed in cell 3 of 3 (`import os; os._exit(9)`)\n  Kernel died" in died.stderr


# What a training does at SIGTERM, with its number of SIGTERMs as the checkpoint.
TRAINING = """
import pathlib, signal, time
count = []
signal.signal(signal.SIGTERM, lambda *_: count.append(1))
pathlib.Path("../started").touch()
while not count:
    time.sleep(0.05)
time.sleep(2)
pathlib.Path("../checkpoint").write_text(str(len(count)))
"""
START = f"""
import subprocess, sys
from unmask.children import bound, ended_together
child = subprocess.Popen(bound([sys.executable, "-c", {TRAINING!r}]), start_new_session=True)
with ended_together(child, 60):
    child.wait()
raise RuntimeError("the training was told to stop")
"""


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_stopped_run_saves_its_training_leaves_no_process_and_goes_on(
    checkout: Checkout, number: signal.Signals, status: int
) -> None:
    checkout.notebook("00_train", [START])
    run = checkout.start("run", "--preset", "smoke")
    try:
        wait_for(lambda: (checkout.root / "started").exists() or run.poll() is not None)
        started = psutil.Process(run.pid).children(recursive=True)
        assert len(started) == 3  # papermill, kernel, training
        if number == signal.SIGTERM:
            second = checkout.unmask("run", "--preset", "smoke")
            assert second.returncode == 2
            assert f"run 'smoke' is being executed by process {run.pid}" in second.stderr
        run.send_signal(number)
        run.send_signal(number)  # as `timeout` does: to the process, and to its group
        output, errors = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == status
    assert_ended(started)
    assert not (checkout.folders.artifacts / "00_train" / "done.json").exists()
    assert (checkout.folders.executed / "00_train.ipynb").exists()  # as far as it got
    if number == signal.SIGKILL:
        assert not (checkout.root / "checkpoint").exists()
        checkout.notebook("00_train", ["2"])
        again = checkout.unmask("run", "--preset", "smoke")
        assert again.returncode == 0 and "[1/1] 00_train · done" in again.stdout
        assert record(checkout)["stages"]["00_train"]["resumed"] is True
        return
    assert (checkout.root / "checkpoint").read_text() == "1"
    said = {signal.SIGINT: "stopped by SIGINT", signal.SIGTERM: "pre-empted (SIGTERM): everything is saved"}
    assert errors == f"unmask: {said[number]}; the same command goes on from here\n"
    assert f"{number.name}: a training saves itself, 120 s at most" in output
    assert "00_train · stopped after" in output
    assert "running or interrupted" in checkout.unmask("status", "--preset", "smoke").stdout


DEAF = """
import signal, subprocess, time
from pathlib import Path
from unmask.children import bound
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the child inherits this
subprocess.Popen(bound(["sleep", "300"]), start_new_session=True)
Path("../started").touch()
time.sleep(300)
"""


@pytest.mark.parametrize("again", [False, True], ids=["time is up", "second signal"])
def test_what_does_not_end_is_killed(checkout: Checkout, again: bool) -> None:
    checkout.notebook("00_deaf", [DEAF])
    run = checkout.start("run", "--preset", "smoke", UNMASK_GRACE_SECONDS="100" if again else "1.5")
    try:
        wait_for(lambda: (checkout.root / "started").exists() or run.poll() is not None)
        started = psutil.Process(run.pid).children(recursive=True)
        run.terminate()
        if again:
            time.sleep(1.5)  # within a second it would count as the same one
            run.terminate()
        _, errors = run.communicate(timeout=30)
    finally:
        run.kill()
    assert run.returncode == 75, errors
    assert "00_deaf did not end in time and lost what came after the last checkpoint" in errors
    assert_ended(started)


def test_a_training_that_was_told_to_stop_ends_the_run_as_if_pre_empted(checkout: Checkout) -> None:
    stopped = "class TrainingStopped(RuntimeError): pass\nraise TrainingStopped('after 3 steps')"
    checkout.notebook("00_train", ["import subprocess; subprocess.Popen(['sleep', '99'])", stopped])
    result = checkout.unmask("run", "--preset", "smoke")
    assert result.returncode == 75 and "pre-empted" in result.stderr
    assert "00_train · stopped after" in result.stdout


MEET = """
import json, os, time
from pathlib import Path
Path(f"../{me}.here").touch()
for _ in range(300):
    if Path(f"../{other}.here").exists():
        break
    time.sleep(0.1)
else:
    raise RuntimeError("the other one does not run")
"""
LOOK_AROUND = """
print(json.dumps({"gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "overrides": overrides,
                  "threads": os.environ.get("OMP_NUM_THREADS")}))
"""


def meeting(me: str, other: str) -> list[str]:
    return [f"me, other = {me!r}, {other!r}", MEET, LOOK_AROUND]


@pytest.mark.parametrize("gpus", [0, 4])
def test_independent_notebooks_run_side_by_side(checkout: Checkout, gpus: int) -> None:
    lines = "".join(f"GPU {index}: NVIDIA H200 (UUID: GPU-{index})\\n" for index in range(gpus))
    path = checkout.path_with("nvidia-smi", f'printf "{lines}"' if gpus else "exit 9")
    checkout.notebook("00_left", meeting("left", "right"))
    checkout.notebook("01_right", meeting("right", "left"))
    after = "from pathlib import Path\nassert Path('../artifacts/smoke/01_right/done.json').exists()"
    alone = "import json, os\n" + LOOK_AROUND
    checkout.notebook("02_join", [after, alone], needs=["00_left", "01_right"])
    arguments = ["--gpus", "4"] if gpus else []
    environment = {"PATH": path, "CUDA_VISIBLE_DEVICES": "3,2,1,0", "OMP_NUM_THREADS": ""}
    result = checkout.unmask("run", "--preset", "smoke", "--jobs", "2", *arguments, **environment)
    assert result.returncode == 0, result.stderr
    assert "[3/3] 02_join · done after" in result.stdout
    seen = [json.loads(text_of(checkout.executed(name), 5)["stdout"]) for name in ("00_left", "01_right")]
    last = json.loads(text_of(checkout.executed("02_join"), 4)["stdout"])
    if gpus:
        assert sorted(one["gpus"] for one in seen) == ["1,0", "3,2"]
        assert [one["overrides"]["parallel.num_processes"] for one in [*seen, last]] == [2, 2, 4]
    else:
        assert [one["threads"] for one in seen] == [str(max(cpu_count() // 2, 1))] * 2
        assert [one["overrides"] for one in seen] == [{}] * 2
        assert last["threads"] == ""  # alone it has all of the machine
    assert set(record(checkout)["stages"]) == {"00_left", "01_right", "02_join"}


def test_a_failure_lets_the_notebook_beside_it_finish(checkout: Checkout) -> None:
    checkout.notebook("00_bad", [*meeting("bad", "good"), "1 / 0"])
    checkout.notebook("01_good", [*meeting("good", "bad"), "time.sleep(3)"])
    checkout.notebook("02_never", ["1"])
    result = checkout.unmask("run", "--preset", "smoke", "--jobs", "2")
    assert result.returncode == 1
    assert "00_bad.ipynb failed in cell 6 of 6" in result.stderr
    assert "01_good · done" in result.stdout and "02_never ·" not in result.stdout

    checkout.notebook("01_good", [*meeting("good", "bad"), "[][0]"])
    both = checkout.unmask("run", "--preset", "smoke", "--jobs", "2").stderr
    assert "ZeroDivisionError" in both and "IndexError" in both and both.count("unmask:") == 1
