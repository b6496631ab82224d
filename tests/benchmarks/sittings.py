"""Preset gpu in two sittings on one GPU, for `first_gpu`: which notebooks, what they take, their end in time.

`decide` asks whether diffusion is a better start (notebooks 00, 01, 07), `recipe` trains the whole recipe
(00 to 05). What one of them has done, the other finds. Results and executed notebooks lie where `unmask run`
puts them: in results/gpu and papermill_runs/gpu, with `--seed N` in gpu-seedN.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from unmask.config import Preset, load_preset
from unmask.store import read_json, repository
from unmask_study import cli
from unmask_study.plan import trainings
from unmask_study.run import Folders, seed_run

SITTINGS = {"decide": ("00", "01", "07"), "recipe": ("00", "01", "02", "03", "04", "05")}
STOP = 530  # seconds until SIGTERM
GRACE = 40  # seconds that a training then has to save itself: ten minutes in all, with the start of a command
# At toy size: preset smoke on little text, with two rates that are each tried shortly, as in preset gpu.
TOY = {
    "data.max_packages": 3,
    "ar.steps": 4,
    "ar.decay": 1,
    "diffusion.steps": 4,
    "diffusion.decay": 1,
    "evaluation.max_queries": 5,
    "evaluation.max_documents": 10,
    "ablation.rates": "[0.5,1.0]",
    "ablation.rate_steps": 1,
    "ablation.steps": 2,
    "ablation.arms": '["diffusion, last", "bidirectional, mean"]',
    "ablation.parts": "false",
    "ablation.squad": "false",
}
TOY_STOP = 10  # seconds until SIGTERM: notebook 02 has begun

# What the plan assumes of an H100. A trial on an H200, with eager layers, had 160,000 and 130,000 tokens/s.
PRETRAINING, OTHERS = 300_000, 250_000  # tokens/s that are to be reached
FILL = {"pair": 0.45, "contextual": 0.16, "triplet": 0.53}  # of the allowed lengths, counted in the corpus
# Seconds of the first look, and around a notebook's work (13 to 20, when each kernel imported for itself).
CHECK, PROCESS = 15, 17
COMPILING, ENDS = 20, 3  # seconds, once a notebook; begin and end of each training: estimated
# Evaluation, estimated: held-out texts at a million tokens/s (1.2 M of the test split, 0.85 M of the other,
# for each model), BM25, ranking for hard negatives, merging.
AFTER = {"00": 3, "01": 10, "02": 15, "03": 15, "04": 20, "05": 25, "07": 35}


def plan(sitting: str, preset: Preset) -> dict[str, float]:
    """What a sitting consists of, and the seconds of each part on an H100."""
    parts = {"is all prepared?": CHECK}
    for number in SITTINGS[sitting]:
        own = [one for one in trainings(preset, 1) if one.notebook.startswith(f"{number}_")]
        parts[f"{number}: process"] = PROCESS + COMPILING * bool(own)
        for one in own:
            speed = PRETRAINING if one.stage in ("ar", "diffusion") else OTHERS
            seconds = one.tokens * FILL.get(one.stage, 1) / speed + ENDS * one.number
            parts[f"{number}: {one.number} × {one.stage}, {one.steps} steps"] = seconds
        parts[f"{number}: evaluation"] = AFTER[number]
    return parts


def show_plan(sitting: str) -> None:
    """Prints what a sitting will take, and of what."""
    parts = plan(sitting, load_preset("gpu"))
    for name, seconds in (parts | {"together": sum(parts.values())}).items():
        print(f"{name:<34}{seconds:>5.0f} s")
    print("estimated for one H100: no part of this plan but the processes' was measured")


def sit(sitting: str, small: bool, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Runs a sitting's notebooks until they are done or time is up; then the same command goes on.

    Raises: SystemExit where data are not prepared (`unmask prepare --preset gpu`); the message says which.
    """
    preset, run = ("smoke", "gpu-smoke") if small else ("gpu", "gpu")
    more = ["--seed", str(seed)] if seed else []
    more += [part for key, value in (TOY if small else {}).items() for part in ("--set", f"{key}={value}")]
    stop = TOY_STOP if small and sitting == "recipe" else STOP
    started = time.monotonic()
    if not small and _unmask("prepare", "--preset", preset, "--check").wait():
        sys.exit(2)
    named = ("--preset", preset, "--run", run, *more)
    child = _unmask("run", *named, "--only", ",".join(SITTINGS[sitting]))
    try:
        status = child.wait(stop - (time.monotonic() - started))
    except subprocess.TimeoutExpired:
        child.terminate()
        status = child.wait()
    yield {"name": sitting, "status": status, "seconds": time.monotonic() - started}
    cli.main(["status", *named])
    about = read_json(Folders(seed_run(run, seed) if seed else run).results / "provenance.json")
    for name, ran in about.get("stages", {}).items():
        if name.partition("_")[0] in SITTINGS[sitting]:
            yield {"name": name, "status": ran["exit_status"], "seconds": ran["wall_seconds"]}


def _unmask(*arguments: str) -> subprocess.Popen:
    environment = os.environ | {"UNMASK_GRACE_SECONDS": str(GRACE)}
    return subprocess.Popen(
        [sys.executable, "-m", "unmask_study", *arguments], cwd=repository(), env=environment
    )
