"""How programs are compared: the same work on one machine in one run, speed in turns, memory apart."""

import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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


def speeds(case: Case) -> dict[str, dict[str, Any]]:
    """For each program: its fastest variant, its median rate, and the ratios of our rate to its, sorted.

    Every variant runs twice, and its faster time counts. Then the best variants take turns, so that a drift
    of the machine's speed meets all of them alike; a ratio is that of one round.
    """
    case.check()
    chosen = {}
    for program, variants in case.programs.items():
        fastest = {name: min(seconds(step), seconds(step)) for name, step in variants.items()}
        chosen[program] = min(fastest, key=fastest.get)
    steps = [case.programs[program][variant] for program, variant in chosen.items()]
    rounds = [[seconds(step) for step in steps] for _ in range(PAIRS)]
    return {
        program: {
            "variant": variant,
            "rate": case.work / statistics.median(times[number] for times in rounds),
            "ratios": sorted(times[number] / times[0] for times in rounds),
        }
        for number, (program, variant) in enumerate(chosen.items())
    }


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


def compare(
    case: str, title: str, *, memory: bool = True, environment: Mapping[str, str] = ENVIRONMENT
) -> list[Row]:
    """Rows of a case: our speed and peak memory against every other program's, at their fastest variants."""
    found = child("speeds", case, environment=environment)
    facts, results = found["facts"], found["speeds"]
    peaks = {}
    if memory:
        peaks = {p: child("peak", case, p, r["variant"], "2")["bytes"] / 2**20 for p, r in results.items()}
    ours, *others = results
    rows = []
    for other in others:
        variants = {p: results[p]["variant"] for p in (ours, other)}
        settings = "; ".join(f"{p}: {variant}" for p, variant in variants.items() if variant)
        setting = f"{facts['setting']}; {settings}" if settings else facts["setting"]
        mine, theirs, ratios = results[ours]["rate"], results[other]["rate"], results[other]["ratios"]
        name, ratio, spread = f"{title}: speed, {other}", statistics.median(ratios), (ratios[0], ratios[-1])
        rows.append(Row(name, mine, theirs, ratio, facts["unit"], setting, spread))
        if memory:
            mine, theirs = peaks[ours], peaks[other]
            name = f"{title}: peak memory, {other}"
            rows.append(Row(name, mine, theirs, theirs / mine, MEMORY_UNIT, setting))
    for other, reason in facts["missing"].items():
        rows.append(Row(f"{title}: speed, {other}", None, None, None, facts["unit"], f"not run: {reason}"))
    return rows
