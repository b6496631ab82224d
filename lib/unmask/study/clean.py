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
    """Folders of trainings that no link names, each with the bytes that it holds; but for the last one where
    it has not finished, or a kill came before its link: the same call would go on with it, or take it.

    Args:
        artifacts: folder of a run.
    """
    artifacts, trainings = artifacts.resolve(), defaultdict(list)
    for folder in sorted(artifacts.glob(f"*/*/{FINGERPRINT}")):
        trainings[folder.parent].append(folder)
    found = [*artifacts.glob(f"*/*/.{FINGERPRINT}.removed")]  # a kill came in between
    for name, folders in trainings.items():
        last, link = max(folders, key=lambda one: one.stat().st_mtime), name / "model"
        linked = (last / "model").is_dir() and link.is_symlink()
        linked = linked and link.lstat().st_mtime >= (last / "model").stat().st_mtime
        kept = {link.resolve().parent} | (set() if linked else {last})
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
