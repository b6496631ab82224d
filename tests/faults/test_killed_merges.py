"""A merge that is killed leaves nothing that passes for a checkpoint, and nothing at all once it was done
again."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

import pytest

import tiny
from faults import assert_no_process_left, dice, family, frozen, hidden, linux, say, start, until
from unmask.models import backbone

pytestmark = [pytest.mark.faults, pytest.mark.skipif(**linux)]


def merge(parents: list[Path], path: Path) -> None:
    from unmask.models.merge import slerp  # slow to import, and the child has done so

    slerp(*parents, 0.3, path)


def begun(folder: Path, name: str, since: float) -> bool:
    """Whether a merge writes, or has written, since a time; an earlier one may have left its files."""
    paths = [*folder.glob(f".{name}.*"), folder / name]
    return any(path.exists() and path.stat().st_mtime > since for path in paths)


def test_a_merge_hit_six_times_ends_as_if_uninterrupted(tmp_path):
    rng = dice("merge")
    parents = [
        backbone.save(tiny.model(seed=seed), tiny.tokenizer(), tmp_path / f"parent-{seed}", stage="tiny")
        for seed in range(2)
    ]

    def begin(name):
        since, process = time.time() - 0.01, start(merge, tmp_path, parents, tmp_path / name)
        until(lambda: begun(tmp_path, name, since), "mergekit to write")
        return process

    expected, path = tmp_path / "expected", tmp_path / "hit"
    whole, began = begin("expected"), time.monotonic()
    whole.join(60)
    assert whole.exitcode == 0, (tmp_path / "processes.log").read_text()
    duration = time.monotonic() - began

    left = [signal.SIGKILL, signal.SIGTERM] * 3
    while left:
        process = begin("hit")
        there, moment = family(process.pid), rng.uniform(0, 0.8)
        time.sleep(moment * duration)
        with frozen(there):
            ended = path.exists()
            if not ended:
                say(left[0], "merge", f"after {moment:.0%} of its writing")
                process.terminate() if left[0] == signal.SIGTERM else process.kill()
        process.join(60)
        assert_no_process_left(tmp_path, there)
        if ended:  # it was quicker than the first one
            shutil.rmtree(path)
            continue
        assert process.exitcode == -left.pop(0)
        assert not path.exists()

    last = begin("hit")
    last.join(60)
    assert last.exitcode == 0, (tmp_path / "processes.log").read_text()
    assert_no_process_left(tmp_path, [])
    assert {file.name for file in path.iterdir()} == {file.name for file in expected.iterdir()}
    for file in expected.iterdir():
        assert (path / file.name).read_bytes() == file.read_bytes(), file.name
    assert not hidden(tmp_path)
