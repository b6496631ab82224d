"""Preset gpu in two sittings on one GPU, for `first_gpu`: which notebooks, and their end in time.

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

from unmask.store import read_json, repository
from unmask_study import cli
from unmask_study.run import Folders, seed_run

SITTINGS = {"decide": ("00", "01", "07"), "recipe": ("00", "01", "02", "03", "04", "05")}
STOP = 530  # seconds until SIGTERM
GRACE = 40  # seconds that a training then has to save itself: ten minutes in all, with the start of a command
# At toy size: preset smoke on little text, with two rates that are each tried shortly, as in preset gpu.
TOY = {"data.max_packages": 3, "evaluation.max_queries": 5, "evaluation.max_documents": 10}
TOY |= {"ar.steps": 4, "ar.decay": 1, "diffusion.steps": 4, "diffusion.decay": 1}
TOY |= {"ablation.rates": "[0.5,1.0]", "ablation.rate_steps": 1, "ablation.steps": 2}
TOY |= {"ablation.arms": '["diffusion, last", "bidirectional, mean"]'}
TOY |= {"ablation.squad": "false"}
TOY_STOP = 10  # seconds until SIGTERM: notebook 02 has begun


def sit(sitting: str, small: bool, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Runs a sitting's notebooks until they are done or time is up; then the same command goes on.

    Raises: SystemExit where data are not prepared (`unmask prepare --preset gpu`); the message says which.
    """
    preset, run = ("smoke", "gpu-smoke") if small else ("gpu", "gpu")
    more = ["--seed", str(seed)] if seed else []
    more += [part for key, value in (TOY if small else {}).items() for part in ("--set", f"{key}={value}")]
    stop = TOY_STOP if small and sitting == "recipe" else STOP
    started = time.monotonic()
    if not small and unmask("prepare", "--preset", preset, "--check").wait():
        sys.exit(2)
    named = ("--preset", preset, "--run", run, *more)
    child = unmask("run", *named, "--only", ",".join(SITTINGS[sitting]))
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


def unmask(*arguments: str) -> subprocess.Popen:
    """Starts a command of `unmask` in the checkout."""
    environment = os.environ | {"UNMASK_GRACE_SECONDS": str(GRACE)}
    command = [sys.executable, "-m", "unmask_study", *arguments]
    return subprocess.Popen(command, cwd=repository(), env=environment)
