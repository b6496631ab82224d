"""What the signals that stop a run mean, and how processes are ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from unmask.study.pipeline.signals import SIGNALS, Interrupted, alive, end, interrupt, on_signal


@pytest.mark.parametrize(
    ("number", "killed", "status", "text"),
    [
        (signal.SIGTERM, [], 75, "pre-empted (SIGTERM): everything is saved"),
        (signal.SIGINT, [], 130, "stopped by SIGINT"),
        (signal.SIGHUP, [], 129, "stopped by SIGHUP"),
        (
            signal.SIGTERM,
            ["02_pair", "07_ablation"],
            75,
            "stopped by SIGTERM; 02_pair, 07_ablation did not end in time and lost what came after the last "
            "checkpoint",
        ),
    ],
)
def test_how_a_stopped_run_ends(number: int, killed: list[str], status: int, text: str) -> None:
    error = Interrupted(number, killed)
    assert (error.exit_status, str(error)) == (status, text)


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


def test_processes_are_asked_first_and_killed_at_the_deadline() -> None:
    deaf = "import signal as s, time; s.signal(s.SIGTERM, s.SIG_IGN); print(flush=True); time.sleep(99)"
    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE) as stubborn:
        stubborn.stdout.readline()
        with subprocess.Popen(["sleep", "99"]) as polite:
            processes = [
                psutil.Process(stubborn.pid),
                psutil.Process(polite.pid),
                psutil.Process(os.getpid()),
            ]
            assert alive(processes) == processes
            deadline = time.monotonic() + 0.5
            end(processes[:2], lambda: deadline)
            assert alive(processes) == processes[2:]  # not even while nobody has collected the other two
            assert (stubborn.wait(), polite.wait()) == (-signal.SIGKILL, -signal.SIGTERM)
