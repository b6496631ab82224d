"""Processes that die with their parent, and the signals that stop them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil
import pytest

from unmask.children import SIGNALS, bound, ended_together, on_signal
from unmask.study.pipeline import Interrupted, interrupt

# Starts a child, says which, and waits.
PARENT = """
import subprocess, sys, time
from unmask.children import bound
print(subprocess.Popen(bound(["sleep", "99"]), start_new_session=True).pid, flush=True)
time.sleep(99)
"""
DEAF = "import signal as s, time; s.signal(s.SIGTERM, s.SIG_IGN); print(flush=True); time.sleep(99)"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
def test_a_child_dies_with_its_killed_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    for _ in range(100):
        if not child.is_running() or child.status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.1)
    pytest.fail("it lives")


@pytest.mark.parametrize(
    ("command", "status"),
    [(["sleep", "99"], -signal.SIGTERM), ([sys.executable, "-c", DEAF], -signal.SIGKILL)],
)
def test_a_child_is_asked_first_and_killed_when_its_time_is_up(command: list[str], status: int) -> None:
    child = subprocess.Popen(bound(command), stdout=subprocess.PIPE)
    with ended_together(child, 0.5) as received:
        if status == -signal.SIGKILL:
            child.stdout.readline()
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
    assert child.returncode == status
    assert received == ([signal.SIGTERM] * 2 if status == -signal.SIGKILL else [])
    child.stdout.close()


def test_the_first_signal_interrupts_and_the_clean_up_is_left_alone() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(Interrupted, match="pre-empted"), on_signal(interrupt):
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGINT)  # would raise KeyboardInterrupt
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_nohup_is_respected() -> None:
    seen: list[signal.Signals] = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with on_signal(seen.append):
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert seen == [signal.SIGTERM]
