"""GPUs and machines: what is refused at the start, who gets what, and how machines find each other."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from pathlib import Path

import pytest

from unmask.config import SECTIONS, ParallelConfig, load_preset, resolved
from unmask.study.pipeline import machines
from unmask.study.pipeline.graph import Folders, PipelineError, discover, expected
from unmask.study.pipeline.machines import (
    Slot,
    following,
    leading,
    slots,
    told,
    visible_gpus,
    wait_for_leader,
)
from unmask.study.pipeline.signals import Interrupted, interrupt, on_signal

LISTING = """GPU 0: NVIDIA H200 (UUID: GPU-aaaa)
GPU 1: NVIDIA H200 (UUID: GPU-bbbb)
  MIG 1g.18gb     Device  0: (UUID: MIG-cccc)
GPU 2: NVIDIA H200 (UUID: GPU-dddd)
"""


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders.of("shared", root=tmp_path)


def fake_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(machines, "visible_gpus", lambda: [str(index) for index in range(count)])


def share(processes: int, count: int = 1, **options) -> list[Slot]:
    """`slots` with the options' defaults."""
    parallel = ParallelConfig(num_processes=processes, num_machines=count)
    return slots(parallel, **{"gpus": None, "jobs": 1, "machine_rank": 0, "main_host": ""} | options)


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (None, ["0", "1", "2"]),
        ("2,0", ["2", "0"]),
        ("GPU-bbbb, MIG-cccc", ["GPU-bbbb", "MIG-cccc"]),
        ("1,7,0", ["1"]),  # CUDA stops at the first that is not there
        ("GPU-zzzz", []),
        ("-1", []),
        ("", []),
    ],
)
def test_the_visible_gpus_are_those_that_cuda_would_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None, names: list[str]
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{LISTING}END\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    if chosen is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert visible_gpus() == names

    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert visible_gpus() == []


def test_one_notebook_at_a_time_has_the_machine_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, 8)
    assert share(1) == share(8, gpus=8) == share(16, 2, gpus=16, main_host="a", machine_rank=1) == [Slot()]
    fake_gpus(monkeypatch, 0)
    assert share(2) == share(1, gpus=1) == [Slot()]  # two processes on the CPU are the preset's wish


@pytest.mark.parametrize(
    ("gpus", "jobs", "here", "devices", "processes"),
    [
        (8, 2, 8, ["0,1,2,3", "4,5,6,7"], 4),
        (4, 2, 8, ["0,1", "2,3"], 2),
        (8, 3, 8, ["0,1", "2,3", "4,5"], 2),
        (None, 2, 8, ["0,1,2,3", "4,5,6,7"], 1),  # the preset's one process each
    ],
)
def test_notebooks_side_by_side_have_disjoint_gpus(
    monkeypatch: pytest.MonkeyPatch,
    gpus: int | None,
    jobs: int,
    here: int,
    devices: list[str],
    processes: int,
) -> None:
    fake_gpus(monkeypatch, here)
    assert share(gpus or 1, gpus=gpus, jobs=jobs) == [
        Slot({"CUDA_VISIBLE_DEVICES": names}, {"parallel.num_processes": processes}) for names in devices
    ]


def test_notebooks_side_by_side_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, 0)
    monkeypatch.setattr(machines, "cores", lambda: 7)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert share(1, jobs=3) == [Slot({"OMP_NUM_THREADS": "2"})] * 3
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert share(1, jobs=2) == [Slot({"OMP_NUM_THREADS": "5"})] * 2


def test_no_more_notebooks_at_once_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, 1)
    assert share(1, jobs=2) == [Slot()]
    fake_gpus(monkeypatch, 2)
    assert share(2, gpus=2, jobs=3) == [
        Slot({"CUDA_VISIBLE_DEVICES": gpu}, {"parallel.num_processes": 1}) for gpu in "01"
    ]


@pytest.mark.parametrize(
    ("here", "processes", "count", "options", "message"),
    [
        (0, 2, 1, {"gpus": 2}, "this machine has no GPU; --set parallel.num_processes=2 trains with two"),
        (4, 8, 1, {"gpus": 8}, "8 GPUs are needed on this machine, and it has 4: --gpus 4 uses all"),
        (
            4,
            16,
            2,
            {"gpus": 16, "main_host": "a"},
            "8 GPUs are needed on this machine, and it has 4: --gpus 8",
        ),
        (4, 8, 1, {}, "8 GPUs are needed on this machine, and it has 4"),  # the preset's wish
        (8, 8, 2, {"machine_rank": 2, "main_host": "a"}, "--machine-rank 2: ranks are 0 to 1"),
        (8, 8, 2, {"machine_rank": -1, "main_host": "a"}, "--machine-rank -1: ranks are 0 to 1"),
        (8, 8, 1, {"machine_rank": 1}, "--machine-rank 1: there is one machine; see --machines"),
        (8, 8, 2, {}, "2 machines: name the one with rank 0 by --main-host, or use one with --machines 1"),
        (8, 8, 2, {"jobs": 2, "main_host": "a"}, "side by side on one machine only, these are 2"),
        (8, 8, 1, {"jobs": 0}, "--jobs 0: must be at least 1"),
    ],
)
def test_what_cannot_work_here_is_refused(
    monkeypatch: pytest.MonkeyPatch, here: int, processes: int, count: int, options: dict, message: str
) -> None:
    fake_gpus(monkeypatch, here)
    with pytest.raises(PipelineError) as error:
        share(processes, count, **options)
    assert message in str(error.value)


def test_more_processes_make_no_stage_due_again() -> None:
    folders = Folders.of("smoke")
    stages = discover(folders.notebooks, SECTIONS)
    marks = [
        expected(stages, resolved(load_preset("smoke", overrides)), folders)
        for overrides in (
            {},
            {"parallel.num_processes": 8, "parallel.num_machines": 2, "parallel.strategy": "fsdp2"},
        )
    ]
    assert marks[0] == marks[1]


@pytest.mark.parametrize(
    ("error", "status"), [(None, 0), (RuntimeError("no"), 1), (Interrupted(15), 75), (Interrupted(2), 130)]
)
def test_the_others_are_told_how_the_run_ended(
    folders: Folders, error: BaseException | None, status: int
) -> None:
    with pytest.raises(type(error)) if error else contextlib.nullcontext(), leading(folders):
        assert told(folders) == {}
        if error:
            raise error
    assert told(folders) == {"finished": True, "exit_status": status}


def test_what_an_earlier_run_left_does_not_count(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    machines.tell(folders, {"finished": True, "exit_status": 75})
    with pytest.raises(PipelineError, match="no sign of the machine with rank 0 in 0 s: start the same"):
        wait_for_leader(folders, seconds=0.2)

    # A run that is under way shows it by its heartbeat alone, whatever the file says.
    monkeypatch.setattr(machines, "HEARTBEAT", 0.05)
    with leading(folders):
        machines.tell(folders, {"training": {"job": "j"}})
        wait_for_leader(folders, seconds=10)
        assert told(folders) == {"training": {"job": "j"}}


def test_a_machine_that_lost_the_first_one_gives_up(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "HEARTBEAT", 0.05)
    monkeypatch.setattr(machines, "LOST", 0.5)
    with leading(folders), on_signal(interrupt), following(folders):
        time.sleep(1.0)  # it lives
    with (
        pytest.raises(RuntimeError, match="the machine with rank 0 has given no sign"),
        on_signal(interrupt),
        following(folders),
    ):
        time.sleep(60)


def test_a_machine_may_be_there_before_the_first_one(folders: Folders) -> None:
    there = threading.Event()

    def follow() -> None:
        wait_for_leader(folders, seconds=30)
        there.set()

    thread = threading.Thread(target=follow)
    thread.start()
    time.sleep(0.1)
    assert not there.is_set()
    with leading(folders):
        assert there.wait(30)
    thread.join()
    assert json.loads((folders.artifacts / ".trainings.json").read_text())["finished"]
