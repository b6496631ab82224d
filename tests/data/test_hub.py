"""Mirrors: pulled over the wire from a Hub on localhost, whatever goes wrong there, then read offline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

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
        model = dict.fromkeys(("config.json", "1_Pooling/config.json", "onnx/config.json"), b"{}")
        weights = {"model.safetensors": b"W" * 25_000_000, "pytorch_model.bin": b"X" * 5000}
        fake.add("model", "org/base", {**model, **weights, "tokenizer.json": b"T" * 3000})
        yield fake


class Mirror:
    """A mirror of the fake Hub, pulled by the command line in child processes that see no other Hub."""

    def __init__(self, fake: FakeHub, folder: Path) -> None:
        self.fake, self.folder, self.registry = fake, folder / "mirror", folder / "registry.yaml"
        self.registry.write_text(REGISTRY)
        inherited = {k: v for k, v in os.environ.items() if k not in ("HF_TOKEN", "UNMASK_MIRROR")}
        self.environment = inherited | {
            "HF_ENDPOINT": fake.url,
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(folder / "home"),
            "UNMASK_ARTIFACTS": str(folder / "artifacts"),
            "NO_PROXY": "127.0.0.1,localhost",
        }

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        chosen = [part for key, value in self.settings().items() for part in ("--set", f"{key}={value}")]
        return subprocess.Popen(
            [sys.executable, "-m", "unmask", *arguments[:2], "--preset", "smoke", *chosen, *arguments[2:]],
            env=self.environment | environment,
            cwd=repository(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def settings(self) -> dict[str, Any]:
        return {"data.source": str(self.registry), "data.max_text_mb": 100, "backbone.checkpoint": "org/base"}

    def pull(self, *settings: str, **environment: str) -> tuple[int, str]:
        """Exit status and the last line, which is the message of an error."""
        chosen = [part for setting in settings for part in ("--set", setting)]
        process = self.start("mirror", "pull", "--to", str(self.folder), *chosen, **environment)
        output, errors = process.communicate(timeout=120)
        assert "Traceback" not in errors
        return process.returncode, (errors if process.returncode else output).splitlines()[-1]

    def check(self, *, quick: bool = False, **settings: Any) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("UNMASK_MIRROR", str(self.folder))
            wrong, _ = hub.check(load_preset("smoke", self.settings() | settings), quick=quick)
        return "; ".join(f"{what} {why}" for what, why in wrong)

    def files(self) -> set[str]:
        """What lies in the mirror, beside its own and the library's notes."""
        found = [path.relative_to(self.folder) for path in self.folder.rglob("*") if path.is_file()]
        return {path.as_posix() for path in found if not any(part.startswith(".") for part in path.parts)}

    def whole(self, wanted: set[str]) -> bool:
        """Whether just these files are there, as the Hub has them."""
        repos = {name: repo.files for name, repo in self.fake.repos.items()}
        names = {path: path.split("/", 2) for path in self.files()}
        return names.keys() == wanted and all(
            (self.folder / path).read_bytes() == repos[f"{organisation}/{name}"][rest]
            for path, (organisation, name, rest) in names.items()
        )


@pytest.fixture
def to(fake: FakeHub, tmp_path: Path) -> Mirror:
    return Mirror(fake, tmp_path)


TEXT = {"org/web/README.md", *(f"org/web/eng/train-0000{i}.parquet" for i in range(4))}
WEIGHTS = "org/base/model.safetensors"
SMALL = {f"org/base/{name}" for name in ("config.json", "1_Pooling/config.json", "tokenizer.json")}
ALL = TEXT | SMALL | {WEIGHTS, "org/answers/train.jsonl"}


def test_what_a_preset_needs_is_pulled_once_and_serves_offline(
    fake: FakeHub, to: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert to.pull() == (0, f"all that preset 'smoke' needs is there: UNMASK_MIRROR={to.folder} serves it")
    assert to.whole(ALL)
    noted = json.loads((to.folder / "org/web" / files.MANIFEST).read_text())
    assert noted["revision"] == fake.repos["org/web"].commit and noted["type"] == "dataset"
    content = fake.repos["org/web"].files["README.md"]
    assert noted["files"]["README.md"] == {"size": len(content), "sha256": sha256(content).hexdigest()}

    asked = len(fake.requests)
    assert to.pull()[0] == 0
    for path in ("train.jsonl", "tokenizer.json", "model.safetensors", "eng/train-00001.parquet"):
        assert fake.fetched(path) == [0] and not fake.fetched(path, since=asked), path
    checking = to.start("mirror", "check", "--from", str(to.folder), HF_HUB_OFFLINE="1")
    assert "checksums of 10 pulled files are right" in checking.communicate(timeout=60)[0]
    assert checking.returncode == 0

    monkeypatch.setenv("UNMASK_MIRROR", str(to.folder))
    preset = load_preset("smoke", to.settings())
    hub.require(preset)
    assert hub.offline(preset) and hub.local("org/base") == to.folder / "org/base"
    web, answers = load_registry(str(to.registry))
    dropped: Counter[str] = Counter()
    assert sum(1 for unit in units(web) for _ in read(web, unit, dropped)) == 800
    rows = [row for unit in units(answers) for row in read(answers, unit, dropped)]
    assert rows[3]["query"] == "why 3?" and len(rows) == 100 and not dropped.total()


def test_a_busy_hub_is_waited_for_and_after_a_failure_the_pull_goes_on(fake: FakeHub, to: Mirror) -> None:
    fake.faults = {"model.safetensors": ["cut"], "eng/train-00001.parquet": [429], "tokenizer.json": [503]}
    status, message = to.pull()
    assert status == 1 and message.startswith("unmask: the Hub fails") and message.endswith("goes on")
    assert to.pull()[0] == 0 and to.whole(ALL) and not any(fake.faults.values())


def test_a_killed_pull_goes_on_and_fetches_no_file_twice(fake: FakeHub, to: Mirror) -> None:
    fake.faults["model.safetensors"] = ["slow"]
    first = to.start("mirror", "pull", "--to", str(to.folder))
    deadline = time.monotonic() + 60
    while not (to.files() >= SMALL and fake.fetched("model.safetensors")):
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.02)
    first.kill()
    first.communicate()
    assert WEIGHTS not in to.files() and "files not there" in to.check()

    done = len(fake.requests)
    assert to.pull()[0] == 0 and to.whole(ALL) and to.check() == ""
    assert fake.fetched("model.safetensors", since=done) == [0]
    assert not fake.fetched("tokenizer.json", since=done)


def test_a_file_that_comes_altered_is_refused(fake: FakeHub, to: Mirror) -> None:
    fake.faults["train.jsonl"] = ["corrupt"]
    status, message = to.pull()
    assert status == 1 and "train.jsonl came with a wrong checksum" in message
    assert "org/answers default/train 1 of 1 files not there" in to.check()
    assert to.pull()[0] == 0 and to.whole(ALL) and to.check() == ""


def test_of_text_only_as_much_as_is_needed(to: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    little = {"data.max_text_mb": 1}
    assert to.pull("data.max_text_mb=1")[0] == 0  # a bit more is fetched: two files of 1.3 MB
    assert to.whole(ALL - {"org/web/eng/train-00002.parquet", "org/web/eng/train-00003.parquet"})
    assert to.check(**little) == ""
    assert to.check() == "org/web eng/train about 2.56MB of text, and more is wanted"
    monkeypatch.setenv("UNMASK_MIRROR", str(to.folder))
    web, _ = load_registry(str(to.registry))
    assert sum(1 for unit in units(web) for _ in read(web, unit, Counter())) == 400
    assert to.pull()[0] == 0 and to.whole(ALL)
    assert to.pull("data.max_text_mb=1")[0] == 0 and to.check() == to.check(**little) == ""


def test_check_finds_what_is_missing_short_or_altered(to: Mirror) -> None:
    with pytest.raises(ValueError, match=f"no mirror at {to.folder}: name one by --from or UNMASK_MIRROR"):
        to.check()
    assert to.pull()[0] == 0
    (to.folder / "org/base/config.json").unlink()
    first, second = (to.folder / f"org/web/eng/train-0000{i}.parquet" for i in range(2))
    first.write_bytes(first.read_bytes()[:-1])
    second.write_bytes(b"X" + second.read_bytes()[1:])
    quick = to.check(quick=True)
    assert "org/base 1 of 4 files not there" in quick and "org/web eng/train 1 of 5 files" in quick
    assert to.check() == f"{quick}; {second} wrong checksum: delete it and pull again"
    second.unlink()
    status, said = to.pull()
    assert status == 0, said
    assert to.check() == "" and to.whole(ALL)


def test_a_mirror_stays_at_its_commit_and_a_revision_can_be_pinned(fake: FakeHub, to: Mirror) -> None:
    def pin(revision: str) -> None:
        to.registry.write_text(REGISTRY.replace("config: eng", f"config: eng\n    revision: {revision}"))

    assert to.pull()[0] == 0
    commit = fake.repos["org/web"].commit
    pin(commit)
    assert to.check() == "" and to.pull()[0] == 0
    fake.repos["org/web"].commit = "f" * 40  # the branch has moved, and the old commit is gone
    pin("main")
    status, message = to.pull()
    assert status == 2 and f"org/web has no revision '{commit}'" in message and to.whole(ALL)
    pin("f" * 40)
    status, message = to.pull()
    assert status == 2 and "holds the dataset at main: a mirror holds one version" in message


@pytest.mark.slow
def test_what_the_hub_refuses_is_one_message(fake: FakeHub, to: Mirror) -> None:
    def refused(message: str, *settings: str, status: int = 2, **environment: str) -> None:
        found, last = to.pull(*settings, **environment)
        assert found == status and last.startswith("unmask: ") and message in last, last

    refused("there is nothing to mirror", "data.source=environment", "backbone.checkpoint=''")
    refused("there is no such model, or it is private", "backbone.checkpoint=org/none")
    fake.add("model", "org/old", {"config.json": b"{}", "pytorch_model.bin": b"P"})
    refused("org/old has no weights as *.safetensors", "backbone.checkpoint=org/old")
    refused("cannot be reached (HF_HUB_OFFLINE is set)", status=1, HF_HUB_OFFLINE="1")
    refused("the Hub cannot be reached (http://127.0.0.1:9", status=1, HF_ENDPOINT="http://127.0.0.1:9")
    to.registry.write_text(REGISTRY.replace("config: eng", "config: deu"))
    refused("has no configuration 'deu'")
    to.registry.write_text(REGISTRY)
    fake.repos["org/answers"].gated = True
    refused("org/answers is gated: accept its terms")
    assert to.pull(HF_TOKEN=fake.token)[0] == 0 and to.whole(ALL)


def test_too_little_space_is_said_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = hub.shutil.disk_usage(tmp_path)._replace(free=2 * 10**12)
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OSError, match=r"3\.00TB are to be fetched and 2\.00TB are free"):
        hub._check_space(3 * 10**12, tmp_path)
    hub._check_space(10**12, tmp_path)


def test_a_run_that_cannot_read_its_data_says_so_at_once(to: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    preset = load_preset("smoke", {"data.source": str(to.registry)})
    monkeypatch.delenv("UNMASK_MIRROR", raising=False)
    monkeypatch.setattr(hub, "unreachable", lambda: "HF_HUB_OFFLINE is set")
    how = "on a host with internet, `unmask mirror pull --preset smoke --to DIR`"
    with pytest.raises(ValueError, match=f"org/web, org/answers would be read from the Hub, which.*: {how}"):
        hub.require(preset)
    to.registry.write_text(REGISTRY.replace("kind: hub", "kind: mirror"))
    with pytest.raises(ValueError, match="that UNMASK_MIRROR must name lacks org/web eng/train \\(not there"):
        hub.require(preset)
    monkeypatch.setenv("UNMASK_MIRROR", str(to.folder.parent))
    with pytest.raises(ValueError, match=rf"lacks org/web eng/train \(not there\), org/answers.*: {how}"):
        hub.require(preset)


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
