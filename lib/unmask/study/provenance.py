"""What a run's numbers were made with: results/<run>/provenance.json, updated after every stage."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import psutil
from joblib import cpu_count

from unmask.run import Folders
from unmask.store import write_atomic

REPORTED = (
    "torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "numpy", "mergekit",
    "babel", "bm25s", "matplotlib", "papermill", "jupyterlab",
)  # fmt: skip


def describe(
    folders: Folders, preset: dict[str, Any], overrides: dict[str, Any], run: str, command: str
) -> dict[str, Any]:
    """What holds for the whole run: code, parameters, versions, seeds, hardware.

    Args:
        preset: the resolved preset: section → values, and its name.
        overrides: the values that were changed on the command line.
        command: the command that was given.
    """
    return {
        "run": run,
        "command": command,
        **commit(folders),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in REPORTED},
        "seeds": {
            section: values["seed"]
            for section, values in preset.items()
            if isinstance(values, dict) and "seed" in values
        },
        "hardware": hardware(),
        "overrides": overrides,
        "preset": preset,
    }


def read(folders: Folders) -> dict[str, Any]:
    """The record as it stands; empty where there is none."""
    return _json(folders.results / "provenance.json")


def record(folders: Folders, about: dict[str, Any], stage: str, outcome: dict[str, Any]) -> Path:
    """Writes what one stage did beside what holds for the run; other stages' records stay as they are.

    The hash of the corpus comes from the first notebook's metrics, where these hold one.
    """
    outcome |= {key: about[key] for key in ("commit", "dirty")}
    stages = read(folders).get("stages", {}) | {stage: outcome}
    corpus = _json(folders.results / "00_backbone.json").get("corpus_hash")
    document = about | {"corpus_hash": corpus, "stages": dict(sorted(stages.items()))}
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    return write_atomic(folders.results / "provenance.json", text)


def durations(*runs: Folders) -> dict[str, float]:
    """Seconds that each stage took when it last ran to its end: from the first of the runs that knows it."""
    known: dict[str, float] = {}
    for folders in reversed(runs):
        stages = read(folders).get("stages", {})
        known |= {name: one["wall_seconds"] for name, one in stages.items() if one["exit_status"] == 0}
    return known


def commit(folders: Folders) -> dict[str, Any]:
    """The commit, and whether anything but the results and this run's notebooks differs from it."""
    own = folders.executed.relative_to(folders.root)
    head = _git(folders.root, "rev-parse", "HEAD")
    changes = _git(folders.root, "status", "--porcelain", "--", ".", ":(exclude)results", f":(exclude){own}")
    return {"commit": head or None, "dirty": None if changes is None else bool(changes)}


def hardware() -> dict[str, Any]:
    """Processor, cores that this process may use, memory, and the GPUs' names."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor() or platform.machine()
    return {
        "cpu": cpu,
        "cores": cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _gpus(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _gpus() -> list[str]:
    if not shutil.which("nvidia-smi"):
        return []
    listing = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"],
        capture_output=True,
        text=True,
    )
    return listing.stdout.strip().splitlines() if listing.returncode == 0 else []


def _git(root: Path, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
