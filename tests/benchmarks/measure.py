"""How programs are compared: the same work on one machine in one run, speed in turns, memory apart."""

import ctypes
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from unmask.children import ENVIRONMENT

Step = Callable[[], Any]
PAIRS = 5
MEMORY_UNIT = "MiB above model and data"


@dataclass(frozen=True)
class Case:
    """One piece of work and the programs that do it, each in one or more variants (settings).

    `programs` maps a program to its variants and a variant to one step of the work; the first program is
    ours. `check` raises AssertionError unless all of them compute the same. `missing` says of other programs
    why they cannot run here.
    """

    setting: str
    unit: str  # of `work`
    work: float  # of one step
    programs: Mapping[str, Mapping[str, Step]]
    check: Callable[[], None]
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One comparison. A ratio above 1 means that we are better, whatever the unit; None: not run."""

    name: str
    ours: float | None
    peer: float | None
    ratio: float | None
    unit: str
    setting: str
    spread: tuple[float, float] | None = None  # of the ratio: the least and the most of the rounds


def seconds(step: Step) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def trial(case: Case) -> dict[str, dict[str, float]]:
    """Seconds of every variant, the faster of two runs; each program's fastest comes first."""
    case.check()
    found = {}
    for program, variants in case.programs.items():
        taken = {name: min(seconds(step), seconds(step)) for name, step in variants.items()}
        found[program] = dict(sorted(taken.items(), key=lambda item: item[1]))
    return found


def rounds(case: Case, chosen: Mapping[str, tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """For each peer, with the variants chosen for us and for it: both median rates, and the ratios, sorted.

    The two take turns, so that a drift of the machine's speed meets both alike; a ratio is that of one round.
    """
    found, ours = {}, next(iter(case.programs))
    for peer, (mine, theirs) in chosen.items():
        steps = case.programs[ours][mine], case.programs[peer][theirs]
        times = [[seconds(step) for step in steps] for _ in range(PAIRS)]
        rates = [case.work / statistics.median(some) for some in zip(*times, strict=True)]
        found[peer] = {"rates": rates, "ratios": sorted(their / my for my, their in times)}
    return found


def peak(step: Step, steps: int) -> dict[str, float]:
    """Bytes that `steps` steps need above what model and data take, and the seconds of the last one.

    Linux keeps the peak of the resident memory and forgets it on request; glibc keeps what was freed while
    the data were made, and gives it back on request.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    taken = [seconds(step) for _ in range(steps)]
    return {"bytes": _resident("VmHWM") - before, "seconds": taken[-1]}


def _resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def child(*arguments: str, environment: Mapping[str, str] = ENVIRONMENT) -> Any:
    """Runs run.py in a process of its own, under a training's environment, and returns what it reports.

    Raises: RuntimeError with the child's last words if it fails.
    """
    command = [sys.executable, str(Path(__file__).with_name("run.py")), "--child", *arguments]
    unset = {key: value for key, value in os.environ.items() if key not in ENVIRONMENT}
    done = subprocess.run(command, env=unset | environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: status {done.returncode}, {done.stderr[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(case: str, title: str, *, memory=True, limited=True, environment=ENVIRONMENT) -> list[Row]:
    """Rows of a case: our speed and peak memory against every other program's.

    A peer takes its fastest variant. We take our fastest one that needs no more memory than the peer's (if
    none does, that which needs least); where memory is not measured or `limited` is off, the fastest of all.
    """

    @functools.cache
    def mebibytes(program: str, variant: str) -> float:
        return child("peak", case, program, variant, "2")["bytes"] / 2**20

    found = child("trial", case, environment=environment)
    ours, *others = found["tried"]
    fastest = {program: list(variants) for program, variants in found["tried"].items()}
    chosen = {other: (fastest[ours][0], fastest[other][0]) for other in others}
    if memory and limited:
        need = partial(mebibytes, ours)
        for other, (_, theirs) in chosen.items():
            fitting = (mine for mine in fastest[ours] if need(mine) <= mebibytes(other, theirs))
            chosen[other] = next(fitting, None) or min(fastest[ours], key=need), theirs
    rows = []
    for other, measured in child("rounds", case, json.dumps(chosen), environment=environment).items():
        variants = dict(zip((ours, other), chosen[other], strict=True))
        setting = "; ".join([found["setting"], *(f"{p}: {how}" for p, how in variants.items() if how)])
        ratios = measured["ratios"]
        name, ratio, spread = f"{title}: speed, {other}", statistics.median(ratios), (ratios[0], ratios[-1])
        rows.append(Row(name, *measured["rates"], ratio, found["unit"], setting, spread))
        if memory:
            mine, theirs = (mebibytes(*item) for item in variants.items())
            name = f"{title}: peak memory, {other}"
            rows.append(Row(name, mine, theirs, theirs / mine, MEMORY_UNIT, setting))
    for other, reason in found["missing"].items():
        rows.append(Row(f"{title}: speed, {other}", None, None, None, found["unit"], f"not run: {reason}"))
    return rows
