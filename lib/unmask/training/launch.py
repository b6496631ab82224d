"""Trainings run in child processes: a notebook starts one, watches it, and takes it along when it dies.

    launch(run, "pair", job) in the notebook  →  python -m unmask.training.launch job.json  →  engine.train

The child prints one JSON line per step, from which the notebook draws its progress bar; everything else goes
to a log file.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from unmask.backbone import facts
from unmask.config import resolved
from unmask.training.jobs import job_fingerprint, run_job
from unmask.workspace import Run, write_atomic

# glibc returns large blocks to the system at each free and faults them in again at the next step; keeping
# them makes a step on the CPU about a fifth faster.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1", "MALLOC_TOP_PAD_": str(2**28)}


def launch(run: Run, stage: str, job: Mapping[str, Any] | None = None, *, name: str = "") -> Path:
    """Trains in a child process and returns the directory of the finished checkpoint.

    A training that already finished with the same configuration, data, code and starting point is not run
    again.

    Args:
        stage: section of the preset to train: "ar", "diffusion", "pair", "contextual" or "triplet".
        job: what else the stage needs, see `unmask.training.jobs`: `start` (checkpoint directory), changed
            values, files.
        name: folder of the training under the notebook's artifacts; default: the stage.
    Raises:
        RuntimeError: the child failed; the message carries its error and the path of its log.
    """
    folder = run.artifacts() / (name or stage)
    folder.mkdir(parents=True, exist_ok=True)
    specification = {
        "preset": run.config.name,
        "values": resolved(run.config),
        "stage": stage,
        "folder": str(folder),
        **{key: str(value) if isinstance(value, Path) else value for key, value in (job or {}).items()},
    }
    specification["fingerprint"] = job_fingerprint(specification)
    model = folder / "model"
    if facts(model).get("fingerprint") == specification["fingerprint"]:
        print(f"{run.stage}/{name or stage}: already trained")
        return model
    path = write_atomic(folder / "job.json", json.dumps(specification, indent=1))
    log_path = folder / "train.log"
    with log_path.open("w", encoding="utf8") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "unmask.training.launch", str(path)],
            stdout=subprocess.PIPE, stderr=log, text=True, env=KEEP_MEMORY | os.environ,
            preexec_fn=partial(_die_with_parent, os.getpid()),
        )  # fmt: skip
        try:
            _watch(child, f"{run.stage}/{name or stage}")
        finally:
            if child.poll() is None:
                child.terminate()
                try:
                    child.wait(10)
                except subprocess.TimeoutExpired:
                    child.kill()
            child.wait()
    if child.returncode:
        last = [line for line in log_path.read_text(encoding="utf8").splitlines() if line.strip()]
        raise RuntimeError(
            f"training {name or stage} failed: {last[-1] if last else child.returncode}\n(log: {log_path})"
        )
    return model


def history(checkpoint: Path) -> list[dict[str, Any]]:
    """The logged metrics of the training that made a checkpoint."""
    lines = (checkpoint.parent / "metrics.jsonl").read_text(encoding="utf8").splitlines()
    return [json.loads(line) for line in lines]


def _watch(child: subprocess.Popen, title: str) -> None:
    bar, seen, spent = None, 0, 0.0
    for line in child.stdout:
        row = json.loads(line)
        if "total" in row:
            bar = tqdm(
                total=row["total"],
                initial=row["done"],
                desc=title,
                unit="step",
                mininterval=1,
                file=sys.stdout,
            )
            continue
        seen, spent = seen + row["tokens"], spent + row["seconds"]
        bar.set_postfix_str(f"loss {row['loss']:.3f}, {seen / spent:,.0f} tok/s", refresh=False)
        bar.update()
    if bar is not None:
        bar.close()


def _die_with_parent(parent: int) -> None:
    """Runs in the child before exec: Linux kills it when its parent dies, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def main(path: str) -> None:
    """The child: reads the job, trains, saves; standard output carries the metrics and nothing else."""
    metrics, sys.stdout = sys.stdout, sys.stderr
    job = json.loads(Path(path).read_text(encoding="utf8"))
    run_job(job, lambda row: print(json.dumps(row), file=metrics, flush=True))


if __name__ == "__main__":
    main(sys.argv[1])
