"""Files and folders that two processes write, that a kill interrupts, and that a disk does not hold."""

import contextlib
import errno
import operator
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest

import tiny
from limits import full_disk
from unmask import Embedder
from unmask.data.mining import cached_array
from unmask.data.tokenize import build
from unmask.models.jobs import encode_file
from unmask.models.merge import slerp
from unmask.models.onnx import export_onnx
from unmask.store import alone, link, locked, new_directory, read_json, write_json
from unmask_study import mirror
from unmask_study.figures import Figure
from unmask_study.settings import load_preset


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    embedder = Embedder(tiny.model(), tiny.tokenizer(), device="cpu")
    model = embedder.save_pretrained(tmp_path_factory.mktemp("store") / "model")
    shutil.copytree(model, model.with_name("other"))
    return model


def encoded(model: Path, output: Path) -> None:
    texts = output.with_name("texts.txt")
    texts.write_text("a text\n" * 100)
    encode_file(model, texts, output, "text", "float32", None)


WRITERS: dict[str, Callable[[Path, Path], object]] = {
    "save": lambda model, path: Embedder.from_pretrained(model).save_pretrained(path),
    "merge": lambda model, path: slerp(model, model.with_name("other"), 0.5, path),
    "encode": encoded,
    "pull": lambda model, path: mirror.pull(load_preset("smoke"), path),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_of_two_writers_the_second_is_refused(model, tmp_path, write):
    path = tmp_path / "out.npy"
    if write is WRITERS["pull"]:
        path.mkdir()  # a mirror is there before its lock
    with alone(path), pytest.raises(RuntimeError, match=r"another process works on .*/out\.npy: wait"):
        write(model, path)
    assert not path.is_file() and not list(tmp_path.glob("out.npy/*")) and not list(tmp_path.glob(".*"))


FOLDER = """
import sys, time
from pathlib import Path
from unmask.store import new_directory
with new_directory(Path(sys.argv[1])) as new:
    new.mkdir()
    (new / "half").touch()
    print(flush=True)
    time.sleep(99)
"""


def test_a_killed_writer_bars_nobody(tmp_path):
    path = tmp_path / "model"
    killed = started(FOLDER, path)
    with pytest.raises(RuntimeError, match="another process works on"), new_directory(path):
        pass
    killed.kill()
    killed.communicate()
    with new_directory(path) as new:
        new.mkdir()
        (new / "whole").touch()
    assert [one.name for one in tmp_path.rglob("*")] == ["model", "whole"]


FILE = """
import sys
from pathlib import Path
from unmask.store import write_json
path, times, text = sys.argv[1:]
for _ in range(int(times)):
    write_json(Path(path), text * 10**6)
    print(flush=True)
"""


def started(code: str, *arguments: object) -> subprocess.Popen:
    """A process that has begun to write."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    process.stdout.readline()
    return process


def test_a_file_is_one_of_those_that_writers_meant_and_a_kill_leaves_nothing_for_good(tmp_path):
    path = tmp_path / "out.json"
    one, other = started(FILE, path, 20, "a"), started(FILE, path, 999, "b")
    time.sleep(0.05)
    other.kill()
    assert one.wait(60) == 0 and other.wait() == -signal.SIGKILL
    assert len(set(read_json(path))) == 1
    (tmp_path / ".out.json.tmp").write_text("half of it")
    write_json(path, "whole")
    with full_disk(), pytest.raises(OSError, match="too large"):
        write_json(path, "x" * 9999)
    assert read_json(path) == "whole" and [one.name for one in tmp_path.iterdir()] == ["out.json"]


def test_a_folder_that_exists_stays_and_gets_the_files(model, tmp_path, monkeypatch):
    """As a mount point has to, and one below a folder of somebody else: nothing is written beside it."""
    path, names, opened = tmp_path / "model", set(), os.open
    (path / "lost+found").mkdir(parents=True)
    path.chmod(0o2770)
    facts = operator.attrgetter("st_ino", "st_mode", "st_gid")
    before = facts(path.stat())

    def seen(*arguments: object, **options: object) -> int:
        names.update(os.listdir(tmp_path))
        return opened(*arguments, **options)

    monkeypatch.setattr(os, "open", seen)
    for _ in range(2):
        Embedder.from_pretrained(model).save_pretrained(path)
    assert {*os.listdir(path)} == {*os.listdir(model), "lost+found"} and names == {"model"}
    assert facts(path.stat()) == before and Embedder.from_pretrained(path)


ONE, SHARDS = ["model.safetensors"], ["model-1-of-2.safetensors", "model-2-of-2.safetensors"]
# Old names of weights, new ones, and what they hold after a kill before each move.
KILLS = [
    (ONE, ONE, [set(), set(), {"new"}]),
    (SHARDS, SHARDS, [set(), set(), {"new"}, {"new"}]),
    (ONE, SHARDS, [set(), set(), {"new"}, {"new"}]),
]


@pytest.mark.parametrize(("before", "after", "weights"), KILLS)
def test_a_kill_while_a_folder_is_filled_leaves_no_mixture(before, after, weights, tmp_path, monkeypatch):
    def write(path, names, content):
        with new_directory(path) as folder:
            folder.mkdir()
            for name in ("config.json", *names):
                (folder / name).write_text(content)

    for moves, contents in enumerate(weights):
        path, replace = tmp_path / str(moves), [os.replace] * moves
        write(path, before, "old")
        with monkeypatch.context() as patch, contextlib.suppress(IndexError):  # of the move after these
            patch.setattr(os, "replace", lambda *paths, left=replace: left.pop()(*paths))
            write(path, after, "new")
        assert {one.read_text() for one in path.glob("*.safetensors")} == contents
        write(path, after, "newest")
        assert sorted(os.listdir(path)) == ["config.json", *after]


def test_a_model_of_another_format_stays(model, tmp_path):
    embedder = Embedder.from_pretrained(model)
    exported = export_onnx(embedder, tmp_path / "onnx")
    before = {file: file.stat().st_mtime_ns for file in exported.iterdir()}
    with pytest.raises(ValueError, match=r"onnx holds model\.onnx.*name another folder"):
        embedder.save_pretrained(exported)
    assert {file: file.stat().st_mtime_ns for file in exported.iterdir()} == before


@pytest.mark.parametrize("umask", [0o022, 0o007])
def test_files_have_the_mode_that_the_umask_says(model, tmp_path, umask):
    embedder, before = Embedder.from_pretrained(model), os.umask(umask)
    try:
        embedder.save_pretrained(tmp_path / "model")
        export_onnx(embedder, tmp_path / "onnx")
        write_json(tmp_path / "one.json", {})
        drawn(tmp_path, tmp_path / "one.png")
    finally:
        os.umask(before)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) > 12 and {file.stat().st_mode & 0o777 for file in files} == {0o666 & ~umask}


@pytest.mark.parametrize("writer", ["save", "pull", "encode"])
def test_a_file_system_without_locks_is_told_with_place_and_remedy(model, tmp_path, monkeypatch, writer):
    refused = OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=refused))  # as NFS and FUSE do
    with pytest.raises(OSError, match=r"No locks available; name a folder .*UNMASK_ARTIFACTS.*out") as caught:
        WRITERS[writer](model, tmp_path / "out.npy")
    assert caught.value.errno == errno.ENOLCK and not list(tmp_path.rglob("*lock"))


def test_a_lock_of_somebody_else_stays(tmp_path, monkeypatch):
    """Whoever may not open it does not delete it."""
    (file := tmp_path / "one.lock").touch()
    monkeypatch.setattr("filelock.FileLock.acquire", Mock(side_effect=PermissionError(errno.EACCES, "no")))
    with pytest.raises(OSError, match="can be written and locked"), locked(file):
        pass
    assert file.exists()


def test_an_array_is_computed_by_the_first_of_several(tmp_path, monkeypatch):
    monkeypatch.setenv("UNMASK_ARTIFACTS", str(tmp_path))
    compute = Mock(side_effect=lambda: time.sleep(0.3) or np.arange(3))
    with ThreadPoolExecutor(3) as pool:
        found = [*pool.map(lambda _: cached_array("mined", ["a"], compute), range(3))]
    assert [one.tolist() for one in found] == [[0, 1, 2]] * 3 and compute.call_count == 1


def test_a_link_changes_at_once(tmp_path):
    for target in (tmp_path / "one", tmp_path / "two"):
        target.mkdir()
        link(tmp_path / "model", target)
        assert (tmp_path / "model").resolve() == target
    assert len(list(tmp_path.iterdir())) == 3
    link(tmp_path / "one", tmp_path / "two")  # as in a copy that followed the links
    assert not (tmp_path / "one").is_symlink()


def drawn(model: Path, path: Path) -> None:
    figure = Figure()
    figure.subplots().plot(range(9))
    figure.save(path)


TOO_LARGE: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "json": (lambda model, path: write_json(path, "x" * 9999), "out"),
    "figure": (drawn, "out"),
    "mined": (lambda model, path: cached_array("mined", ["a"], lambda: np.ones(9999)), ".npy"),
    "tokens": (
        lambda model, path: build(path.parent, lambda: [9999], lambda n: pa.table({"a": np.ones(n)}), ""),
        "00000.arrow",
    ),
    "save": (WRITERS["save"], "out"),
    "merge": (WRITERS["merge"], "out"),
    "encode": (lambda model, path: encoded(model, path.with_suffix(".npy")), "out.npy"),
}


@pytest.mark.parametrize(("write", "name"), TOO_LARGE.values(), ids=TOO_LARGE)
def test_what_a_disk_does_not_hold_is_told_with_its_place(model, tmp_path, monkeypatch, write, name):
    with full_disk(), pytest.raises((OSError, RuntimeError), match=r"[Ff]ile too large") as caught:
        write(model, tmp_path / "out")
    assert str(tmp_path) in str(caught.value) and name in str(caught.value)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*.tmp"))


def test_embeddings_go_into_no_folder(model, tmp_path):
    (tmp_path / "out.npy").mkdir()
    with pytest.raises(ValueError, match=r"go into an \.npy file"):
        encoded(model, tmp_path / "out.npy")
