"""Trained models and checkpoints that are not the current ones: of other values, data or code.

A training lies in artifacts/<run>/<notebook>/<name>/<fingerprint>; the link <name>/model names the model of
the current one. Nothing but `unmask clean` deletes any.
"""

import os
import shutil
from collections import defaultdict
from pathlib import Path

FINGERPRINT = "[0-9a-f]" * 16


def outdated(artifacts: Path) -> dict[Path, int]:
    """Folders of trainings that no link names, each with the bytes that it holds; but for the one that was
    begun last where it has not finished: the same call would go on with it.

    Args:
        artifacts: folder of a run.
    """
    artifacts, trainings = artifacts.resolve(), defaultdict(list)
    for folder in sorted(artifacts.glob(f"*/*/{FINGERPRINT}")):
        trainings[folder.parent].append(folder)
    found = [*artifacts.glob(f"*/*/.{FINGERPRINT}.removed")]  # a kill came in between
    for name, folders in trainings.items():
        last = max(folders, key=lambda one: one.stat().st_mtime)
        kept = {(name / "model").resolve().parent} | ({last} if not (last / "model").is_dir() else set())
        found += [one for one in folders if one not in kept]
    return {folder: size(folder) for folder in found}


def size(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*"))


def remove(folder: Path) -> None:
    """Deletes a folder. It vanishes first, so that what is left by a kill is not taken for a whole model."""
    hidden = folder if folder.name.startswith(".") else folder.with_name(f".{folder.name}.removed")
    os.replace(folder, hidden)
    shutil.rmtree(hidden)
