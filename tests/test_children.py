"""The signals that stop a child, and its memory. That it dies with its parent: test_execution.py."""

import ctypes
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from unmask.children import bound, ended_together, settle

DEAF = "import signal as s, time; s.signal(s.SIGTERM, s.SIG_IGN); print(flush=True); time.sleep(99)"


@pytest.mark.parametrize("deaf", [False, True])
def test_a_child_is_asked_first_and_killed_when_its_time_is_up(deaf: bool) -> None:
    command = [sys.executable, "-c", DEAF] if deaf else ["sleep", "99"]
    child = subprocess.Popen(bound(command), stdout=subprocess.PIPE)
    with ended_together(child, 0.5, child.terminate) as received:
        if deaf:
            child.stdout.readline()
            signal.raise_signal(signal.SIGTERM)
    assert child.returncode == (-signal.SIGKILL if deaf else -signal.SIGTERM)
    assert received == [signal.SIGTERM] * deaf
    child.stdout.close()


def test_a_thread_may_have_a_child() -> None:
    """Signals come to the main thread alone."""

    def run() -> int:
        child = subprocess.Popen(["true"])
        with ended_together(child, 9, child.terminate):
            child.wait()
        return child.returncode

    assert ThreadPoolExecutor(1).submit(run).result() == 0


def test_what_the_environment_says_of_memory_counts(monkeypatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "4096")
    monkeypatch.setattr(ctypes, "CDLL", Mock())
    settle()
    asked = dict(call.args for call in ctypes.CDLL.return_value.mallopt.call_args_list)
    assert asked[-1] == 4096 and asked[-3] == 2**25
