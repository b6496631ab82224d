"""Mirrors: pulled over the wire from a Hub on localhost, whatever goes wrong there, then read offline."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fake_hub import FakeHub, fake_hub
from unmask.config import load_preset
from unmask.data import files, hub
from unmask.data.reading import read, units
from unmask.data.registry import load_registry
from unmask.store import repository

README = """---
configs:
- config_name: other
  data_files:
  - split: train
    path: other/*.parquet
- config_name: eng
  data_files:
  - split: train
    path: eng/train-*.parquet
  - split: test
    path: eng/test-*.parquet
---
# A data set
"""
REGISTRY = """
sources:
  web:
    kind: hub
    role: text
    repo: org/web
    config: eng
    language: eng
    licence: odc-by
    columns: {text: text}
  answers:
    kind: hub
    role: pairs
    group: english
    repo: org/answers
    language: eng
    licence: mit
    columns: {query: question, document: answer}
"""
ANSWERS = "".join(json.dumps({"question": f"why {i}?", "answer": f"because {i}"}) + "\n" for i in range(100))


def parquet(path: Path, texts: list[str]) -> bytes:
    pq.write_table(pa.table({"id": list(range(len(texts))), "text": texts}), path)
    return path.read_bytes()


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeHub]:
    with fake_hub() as fake:
        parts = {
            f"eng/train-0000{i}.parquet": parquet(
                tmp_path / "part", [sha256(b"%d" % (1000 * i + j)).hexdigest() * 100 for j in range(200)]
            )
            for i in range(4)
        }
        rest = {"eng/test-00000.parquet": b"P" * 2000, "other/0.parquet": b"P" * 2000, "big.bin": b"B" * 9000}
        fake.add("dataset", "org/web", {"README.md": README.encode(), **rest, **parts})
        fake.add("dataset", "org/answers", {"train.jsonl": ANSWERS.encode()})
        model = {
            "config.json": b"{}",
            "model.safetensors": b"W" * 25_000_000,
            "pytorch_model.bin": b"X" * 5000,
            "1_Pooling/config.json": b"{}",
        }
        fake.add(
            "model",
            "org/base",
            {**model, "onnx/config.json": b"{}", "added_tokens.json": b"{}", "tokenizer.json": b"T" * 3000},
        )
        yield fake


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    path = tmp_path / "registry.yaml"
    path.write_text(REGISTRY)
    return path


class Mirror:
    """The command line on a mirror of the fake Hub, in child processes that see no other Hub."""

    def __init__(self, fake: FakeHub, registry: Path, folder: Path, home: Path) -> None:
        self.fake, self.folder, self.registry = fake, folder, registry
        inherited = {k: v for k, v in os.environ.items() if k not in ("HF_TOKEN", "UNMASK_MIRROR")}
        self.environment = inherited | {
            "HF_ENDPOINT": fake.url,
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(home),
            "UNMASK_ARTIFACTS": str(home / "artifacts"),
            "NO_PROXY": "127.0.0.1,localhost",
        }

    def command(self, *arguments: str, settings: tuple[str, ...] = ()) -> list[str]:
        chosen = (f"data.source={self.registry}", "data.max_text_mb=100", *settings)
        sets = [part for setting in chosen for part in ("--set", setting)]
        return [sys.executable, "-m", "unmask", *arguments, "--preset", "smoke", *sets]

    def run(
        self, *arguments: str, settings: tuple[str, ...] = (), **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments, settings=settings),
            env=self.environment | environment,
            cwd=repository(),
            capture_output=True,
            text=True,
            timeout=120,
        )

    def pull(self, *settings: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.run("mirror", "pull", "--to", str(self.folder), settings=settings, **environment)

    def check(self, *arguments: str, settings: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        return self.run(
            "mirror", "check", "--from", str(self.folder), *arguments, settings=settings, HF_HUB_OFFLINE="1"
        )

    def start(self, *settings: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command("mirror", "pull", "--to", str(self.folder), settings=settings),
            env=self.environment,
            cwd=repository(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def files(self) -> set[str]:
        """What lies in the mirror, beside its own and the library's notes."""
        found = [path.relative_to(self.folder) for path in self.folder.rglob("*") if path.is_file()]
        return {path.as_posix() for path in found if not any(part.startswith(".") for part in path.parts)}

    def manifest(self, repo: str) -> dict:
        return json.loads((self.folder / repo / files.MANIFEST).read_text())

    def whole(self) -> bool:
        return all(
            (self.folder / path).read_bytes() == repo.files[path.removeprefix(f"{name}/")]
            for path in self.files()
            for name, repo in self.fake.repos.items()
            if path.startswith(f"{name}/")
        )


@pytest.fixture
def to(fake: FakeHub, registry: Path, tmp_path: Path) -> Mirror:
    return Mirror(fake, registry, tmp_path / "mirror", tmp_path / "home")


DATA = {
    "org/web/README.md",
    *(f"org/web/eng/train-0000{i}.parquet" for i in range(4)),
    "org/answers/train.jsonl",
}
MODEL = {
    "org/base/config.json",
    "org/base/1_Pooling/config.json",
    "org/base/model.safetensors",
    "org/base/tokenizer.json",
    "org/base/added_tokens.json",
}
BASE = "backbone.checkpoint=org/base"


def test_what_a_preset_needs_is_pulled_once_and_serves_offline(
    fake: FakeHub, to: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = to.pull(BASE)
    assert result.returncode == 0, result.stderr
    assert to.files() == DATA | MODEL and to.whole()
    noted = to.manifest("org/web")
    assert noted["revision"] == fake.repos["org/web"].commit and noted["type"] == "dataset"
    for path, content in fake.repos["org/web"].files.items():
        if f"org/web/{path}" in DATA:
            assert noted["files"][path] == {"size": len(content), "sha256": sha256(content).hexdigest()}

    asked = len(fake.requests)
    assert to.pull(BASE).returncode == 0
    for path in ("train.jsonl", "tokenizer.json", "model.safetensors", "eng/train-00001.parquet"):
        assert fake.fetched(path) == [0] and not fake.fetched(path, since=asked), path
    checked = to.check(settings=(BASE,))
    assert checked.returncode == 0 and "checksums of 11 pulled files are right" in checked.stdout, checked

    monkeypatch.setenv("UNMASK_MIRROR", str(to.folder))
    preset = load_preset("smoke", {"data.source": str(to.registry), "backbone.checkpoint": "org/base"})
    hub.require(preset)
    assert hub.offline(preset) and hub.local("org/base") == to.folder / "org/base"
    web, answers = load_registry(str(to.registry))
    dropped: Counter[str] = Counter()
    assert sum(1 for unit in units(web) for _ in read(web, unit, dropped)) == 800
    rows = [row for unit in units(answers) for row in read(answers, unit, dropped)]
    assert rows[3]["query"] == "why 3?" and len(rows) == 100 and not dropped.total()


def test_a_busy_hub_is_waited_for_and_a_failing_one_is_asked_again(fake: FakeHub, to: Mirror) -> None:
    fake.faults = {"model.safetensors": ["cut"], "eng/train-00001.parquet": [429], "tokenizer.json": [503]}
    failed = to.pull(BASE)
    assert failed.returncode == 1 and "the Hub fails" in failed.stderr and "goes on" in failed.stderr
    assert failed.stderr.splitlines()[-1].startswith("unmask: ")
    assert to.pull(BASE).returncode == 0
    assert to.files() == DATA | MODEL and to.whole() and not any(fake.faults.values())


def test_a_killed_pull_goes_on_and_fetches_no_file_twice(fake: FakeHub, to: Mirror) -> None:
    fake.faults["model.safetensors"] = ["slow"]
    first = to.start(BASE)
    try:
        deadline = time.monotonic() + 60
        while not (
            MODEL - {"org/base/model.safetensors"} <= to.files() and fake.fetched("model.safetensors")
        ):
            assert time.monotonic() < deadline and first.poll() is None
            time.sleep(0.02)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait(timeout=20)
    assert "org/base/model.safetensors" not in to.files()
    checked = to.check(settings=(BASE,))
    assert checked.returncode == 1 and "files not there" in checked.stdout

    done = len(fake.requests)
    assert to.pull(BASE).returncode == 0
    assert to.files() == DATA | MODEL and to.whole() and fake.fetched("model.safetensors", since=done) == [0]
    assert not fake.fetched("tokenizer.json", since=done)
    assert to.check(settings=(BASE,)).returncode == 0


def test_a_file_that_comes_altered_is_refused(fake: FakeHub, to: Mirror) -> None:
    fake.faults["train.jsonl"] = ["corrupt"]
    result = to.pull()
    assert result.returncode == 1 and "train.jsonl came with a wrong checksum" in result.stderr
    assert not (to.folder / "org/answers/train.jsonl").exists()
    assert to.check().returncode == 1
    assert to.pull().returncode == 0 and to.whole() and to.check().returncode == 0


def test_of_text_only_as_much_as_is_needed(to: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    result = to.pull("data.max_text_mb=1")  # a bit more is fetched: two files of 1.3 MB
    assert result.returncode == 0, result.stderr
    assert to.files() == DATA - {"org/web/eng/train-00002.parquet", "org/web/eng/train-00003.parquet"}
    assert to.check(settings=("data.max_text_mb=1",)).returncode == 0
    checked = to.check()
    assert checked.returncode == 1 and "about 2.56MB of text, and more is wanted" in checked.stdout

    monkeypatch.setenv("UNMASK_MIRROR", str(to.folder))
    web, _ = load_registry(str(to.registry))
    assert sum(1 for unit in units(web) for _ in read(web, unit, Counter())) == 400

    assert to.pull().returncode == 0 and to.files() == DATA
    assert to.pull("data.max_text_mb=1").returncode == 0 and to.check().returncode == 0


def test_check_finds_what_is_missing_short_or_altered(to: Mirror) -> None:
    nothing = to.check(settings=(BASE,))
    assert nothing.returncode == 2 and f"no mirror at {to.folder}" in nothing.stderr
    assert to.pull(BASE).returncode == 0
    (to.folder / "org/base/config.json").unlink()
    first, second = (to.folder / "org/web/eng" / f"train-0000{i}.parquet" for i in range(2))
    first.write_bytes(first.read_bytes()[:-1])
    second.write_bytes(b"X" + second.read_bytes()[1:])
    quick = to.check("--quick", settings=(BASE,))
    assert quick.returncode == 1 and "wrong checksum" not in quick.stdout
    assert quick.stdout.count("1 of 5 files not there") == 2
    checked = to.check(settings=(BASE,))
    assert checked.returncode == 1 and f"{second}" in checked.stdout
    assert "wrong checksum: delete it and pull again" in checked.stdout
    assert "`unmask mirror pull --preset smoke --to DIR`" in checked.stdout

    second.unlink()
    assert to.pull(BASE).returncode == 0 and to.check(settings=(BASE,)).returncode == 0
    assert to.whole()


def test_a_mirror_stays_at_its_commit_and_a_revision_can_be_pinned(fake: FakeHub, to: Mirror) -> None:
    assert to.pull().returncode == 0
    commit = fake.repos["org/web"].commit
    original = to.registry.read_text()
    to.registry.write_text(original.replace("config: eng", f"config: eng\n    revision: {commit}"))
    assert to.check().returncode == 0 and to.pull().returncode == 0
    to.registry.write_text(original)
    fake.repos["org/web"].commit = "f" * 40  # what was pulled is gone: nothing else takes its place
    result = to.pull()
    assert result.returncode == 2 and f"org/web has no revision '{commit}'" in result.stderr and to.whole()
    to.registry.write_text(original.replace("config: eng", f"config: eng\n    revision: {'f' * 40}"))
    result = to.pull()
    assert result.returncode == 2 and "holds the dataset at main: a mirror holds one version" in result.stderr


@pytest.mark.slow
def test_what_the_hub_refuses_is_one_message(fake: FakeHub, to: Mirror) -> None:
    def refused(message: str, *settings: str, status: int = 2, **environment: str) -> None:
        result = to.pull(*settings, **environment)
        *_, last = result.stderr.splitlines()
        assert result.returncode == status and last.startswith("unmask: ") and message in last, result.stderr
        assert "Traceback" not in result.stderr

    refused("there is nothing to mirror", "data.source=environment")
    refused("there is no such model, or it is private", "backbone.checkpoint=org/none")
    fake.add("model", "org/old", {"config.json": b"{}", "pytorch_model.bin": b"P"})
    refused("org/old has no weights as *.safetensors", "backbone.checkpoint=org/old")
    refused("cannot be reached (HF_HUB_OFFLINE is set)", status=1, HF_HUB_OFFLINE="1")
    refused("the Hub cannot be reached (http://127.0.0.1:9", status=1, HF_ENDPOINT="http://127.0.0.1:9")

    original = to.registry.read_text()
    to.registry.write_text(original.replace("config: eng", "config: deu"))
    refused("has no configuration 'deu'")
    to.registry.write_text(original)
    fake.repos["org/answers"].gated = True
    refused("org/answers is gated: accept its terms")
    assert to.pull(HF_TOKEN=fake.token).returncode == 0 and to.whole()


def test_too_little_space_is_said_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = hub.shutil.disk_usage(tmp_path)._replace(free=2 * 10**12)
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OSError, match=r"3\.00TB are to be fetched and 2\.00TB are free"):
        hub._check_space(3 * 10**12, tmp_path)
    hub._check_space(10**12, tmp_path)


def test_a_run_that_cannot_read_its_data_says_so_at_once(to: Mirror) -> None:
    def refused(message: str, **environment: str) -> None:
        result = to.run("run", **environment)
        assert result.returncode == 2 and message in result.stderr, result.stderr
        assert result.stderr.count("\n") == 1 and result.stdout == ""

    how = "on a host with internet, `unmask mirror pull --preset smoke --to DIR`"
    refused(f"cannot be reached (HF_HUB_OFFLINE is set): {how}", HF_HUB_OFFLINE="1")
    refused("org/web, org/answers would be read from the Hub", HF_ENDPOINT="http://127.0.0.1:9")
    refused(
        f"lacks org/web eng/train (not there), org/answers default/train (not there): {how}",
        UNMASK_MIRROR=str(to.folder.parent),
    )
    to.registry.write_text(REGISTRY.replace("kind: hub", "kind: mirror"))
    refused("the mirror that UNMASK_MIRROR must name lacks org/web eng/train (not there)")


def test_a_checkpoint_in_the_mirror_needs_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preset = load_preset("smoke", {"backbone.checkpoint": "org/base"})
    monkeypatch.setenv("UNMASK_MIRROR", str(tmp_path))
    assert hub.local("org/base") is None and not hub.offline(preset)
    (tmp_path / "org/base").mkdir(parents=True)
    assert hub.check(preset) == ([("org/base", "*.safetensors not there")], 0)
    (tmp_path / "org/base/model.safetensors").touch()
    assert hub.local("org/base") == tmp_path / "org/base" and hub.offline(preset)
    assert hub.check(preset) == ([], 0)
    for path in ("/org/base", "./org/base", "org", "", "a/b/c"):
        assert not hub.is_hub_name(path) and hub.local(path) is None
    monkeypatch.delenv("UNMASK_MIRROR")
    assert hub.local("org/base") is None and hub.offline(load_preset("smoke"))


@pytest.mark.mirror
def test_a_mirror_made_by_hand_is_read_as_it_is() -> None:
    preset = load_preset("smoke", {"data.source": "mirror"})
    assert len(hub.needs(preset)) > 100
    hub.require(preset)
    assert hub.offline(preset) and hub.check(preset) == ([], 0)
