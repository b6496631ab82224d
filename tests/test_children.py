"""Processes that die with their parent, and the signals that stop them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil
import pytest

from unmask.children import bound, ended_together

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


@pytest.mark.parametrize("deaf", [False, True])
def test_a_child_is_asked_first_and_killed_when_its_time_is_up(deaf: bool) -> None:
    command = [sys.executable, "-c", DEAF] if deaf else ["sleep", "99"]
    child = subprocess.Popen(bound(command), stdout=subprocess.PIPE)
    with ended_together(child, 0.5) as received:
        if deaf:
            child.stdout.readline()
            signal.raise_signal(signal.SIGTERM)
    assert child.returncode == (-signal.SIGKILL if deaf else -signal.SIGTERM)
    assert received == [signal.SIGTERM] * deaf
    child.stdout.close()
