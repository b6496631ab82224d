"""Preparation: the same bytes whatever the workers, the kills and the appetite."""

import os
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import psutil
import pytest

from unmask.data import prepare
from unmask.data.prepare import Prepared, Ragged, build, ends_of

UNITS = list(range(1, 21))


def work(unit):
    """Unit 3 → three rows of one to three numbers, two lists of such rows, and as many tokens."""
    rows = [np.full(n, unit * 10 + n) for n in range(1, unit + 1)]
    columns = {"flat": np.arange(unit, dtype=np.int32), "rows": Ragged.of(rows, np.uint16)}
    columns["nested"] = Ragged(Ragged.of([*rows, *rows], np.uint16), ends_of([unit, unit]))
    return columns, Counter(tokens=unit, odd=unit % 2)


@dataclass(frozen=True)
class Killer:
    """Does the work, and kills this process at unit `at`."""

    at: int

    def __call__(self, unit):
        if unit == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return work(unit)


@dataclass(frozen=True)
class Sleeper:
    """Tells who it is and does not end for a while."""

    folder: Path

    def __call__(self, unit):
        (self.folder / f"{os.getpid()}.pid").touch()
        time.sleep(2)
        return work(unit)


def fail_at_five(unit):
    if unit == 5:
        raise ValueError("unit 5 is bad")
    return work(unit)


def build_and_die_before_the_journal(folder, units_before):
    """Appends one unit more than it can note."""
    write, seen = prepare.write_atomic, []

    def dying(path, text):
        seen.append(path)
        if len(seen) > units_before:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(path, text)

    prepare.write_atomic = dying
    build(folder, UNITS, work, workers=1)


def in_a_process(target, *args, **kwargs):
    process = get_context("fork").Process(target=target, args=args, kwargs=kwargs)
    process.start()
    process.join()
    return process.exitcode


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return build(tmp_path_factory.mktemp("whole") / "x", UNITS, work, workers=1)


def test_the_number_of_workers_changes_nothing(whole, tmp_path):
    done = build(tmp_path / "x", UNITS, work, workers=2)
    assert done.hash == whole.hash
    assert contents(tmp_path / "x") == contents(whole.folder)


def test_columns_are_what_the_units_gave_one_after_the_other(whole):
    found = Prepared.read(whole.folder)
    expected = [work(unit)[0] for unit in UNITS]
    np.testing.assert_array_equal(found.column("flat"), np.concatenate([c["flat"] for c in expected]))
    for name in ("rows", "nested"):
        rows = [row for columns in expected for row in columns[name]]
        assert len(found.column(name)) == len(rows)
        for one, other in zip(found.column(name), rows, strict=True):
            assert [np.asarray(x).tolist() for x in one] == [np.asarray(x).tolist() for x in other]
    assert found.column("rows").values.dtype == np.uint16
    assert found.counters == {"tokens": 210, "odd": 10}


def test_killed_at_any_moment_it_goes_on_and_ends_with_the_same_bytes(whole, tmp_path):
    folder = tmp_path / "x"
    for at in (2, 3, 11):
        assert in_a_process(build, folder, UNITS, Killer(at), workers=1) == -signal.SIGKILL
        assert in_a_process(build_and_die_before_the_journal, folder, 1) == -signal.SIGKILL
    assert 0 < Prepared.read(folder).units < len(UNITS)
    assert build(folder, UNITS, work, workers=2).hash == whole.hash
    assert contents(folder) == contents(whole.folder)


def test_what_is_wanted_is_no_part_of_the_result(whole, tmp_path):
    folder = tmp_path / "x"
    assert build(folder, UNITS, work, wanted=0).units == 0
    assert build(folder, UNITS, work, wanted=15, workers=2).units == 5  # 1 + 2 + 3 + 4 + 5
    assert build(folder, UNITS, fail_at_five, wanted=15).units == 5  # nothing to do
    assert build(folder, UNITS, work, wanted=16, workers=1).units == 6
    assert build(folder, UNITS, work, wanted=10**6, workers=2).hash == whole.hash


@pytest.mark.parametrize(("broken", "message"), [(fail_at_five, "unit 5 is bad"), (Killer(5), "terminated")])
def test_a_failure_or_a_killed_worker_is_an_error_that_keeps_the_units_before(
    broken, message, whole, tmp_path
):
    with pytest.raises((ValueError, RuntimeError), match=message):
        build(tmp_path / "x", UNITS, broken, workers=2)
    assert Prepared.read(tmp_path / "x").units <= 4
    assert build(tmp_path / "x", UNITS, work, workers=2).hash == whole.hash


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_workers_end_with_the_process_that_prepares(tmp_path):
    process = get_context("spawn").Process(
        target=build, args=(tmp_path / "x", UNITS, Sleeper(tmp_path)), kwargs={"workers": 2}
    )
    process.start()
    while len(pids := [int(path.stem) for path in tmp_path.glob("*.pid")]) < 2:
        assert process.is_alive()
        time.sleep(0.01)
    workers = [psutil.Process(pid) for pid in pids]
    process.kill()
    process.join()
    assert not psutil.wait_procs(workers, timeout=60)[1]


def test_processes_that_want_the_same_wait_for_one_another(whole, tmp_path):
    processes = [
        get_context("fork").Process(target=build, args=(tmp_path / "x", UNITS, work), kwargs={"workers": 1})
        for _ in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert contents(tmp_path / "x") == contents(whole.folder)


def test_nothing_at_all_is_an_empty_column(tmp_path):
    def nothing(unit):
        return {"rows": Ragged.of([], np.uint16), "flat": np.empty(0, np.int32)}, {}

    done = build(tmp_path / "x", [1], nothing)
    assert len(done.column("rows")) == len(done.column("flat")) == 0
