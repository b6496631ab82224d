"""Mirrors: pulled over the wire from a Hub on localhost, whatever goes wrong there, then read offline."""

from __future__ import annotations

import json
import os
import re
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
from filelock import FileLock

from fake_hub import FakeHub, fake_hub
from unmask.config import load_preset
from unmask.data import manifest, mirror
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
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    with fake_hub() as hub:
        parts = {
            f"eng/train-0000{i}.parquet": parquet(
                tmp_path / "part", [sha256(b"%d" % (1000 * i + j)).hexdigest() * 100 for j in range(200)]
            )
            for i in range(4)
        }
        rest = {"eng/test-00000.parquet": b"P" * 2000, "other/0.parquet": b"P" * 2000, "big.bin": b"B" * 9000}
        hub.add("dataset", "org/web", {"README.md": README.encode(), **rest, **parts})
        hub.add("dataset", "org/answers", {"train.jsonl": ANSWERS.encode()})
        model = {
            "config.json": b"{}",
            "model.safetensors": b"W" * 25_000_000,
            "pytorch_model.bin": b"X" * 5000,
            "1_Pooling/config.json": b"{}",
        }
        hub.add(
            "model",
            "org/base",
            {**model, "onnx/config.json": b"{}", "added_tokens.json": b"{}", "tokenizer.json": b"T" * 3000},
        )
        yield hub


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    path = tmp_path / "registry.yaml"
    path.write_text(REGISTRY)
    return path


class Mirror:
    """The command line on a mirror of the fake Hub, in child processes that see no other Hub."""

    def __init__(self, hub: FakeHub, registry: Path, folder: Path, home: Path) -> None:
        self.hub, self.folder, self.registry = hub, folder, registry
        inherited = {k: v for k, v in os.environ.items() if k not in ("HF_TOKEN", "UNMASK_MIRROR")}
        self.environment = inherited | {
            "HF_ENDPOINT": hub.url,
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(home),
            "UNMASK_ARTIFACTS": str(home / "artifacts"),
            "NO_PROXY": "127.0.0.1",
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
        """What lies in the mirror, beside its own notes."""
        found = (path for path in self.folder.rglob("*") if path.is_file())
        return {
            path.relative_to(self.folder).as_posix() for path in found if "unmask-mirror" not in path.name
        }

    def manifest(self, repo: str) -> dict:
        return json.loads((self.folder / repo / manifest.MANIFEST).read_text())

    def whole(self) -> bool:
        return all(
            (self.folder / path).read_bytes() == repo.files[path.removeprefix(f"{name}/")]
            for path in self.files()
            for name, repo in self.hub.repos.items()
            if path.startswith(f"{name}/")
        )


@pytest.fixture
def to(hub: FakeHub, registry: Path, tmp_path: Path) -> Mirror:
    return Mirror(hub, registry, tmp_path / "mirror", tmp_path / "home")


def table(result: subprocess.CompletedProcess[str]) -> str:
    return re.sub(r" +", " ", result.stdout)


BLOCK = 10 * 2**20  # that the library writes at a time
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


def test_what_a_preset_needs_is_pulled_once_and_serves_offline(
    hub: FakeHub, to: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = "backbone.checkpoint=org/base"
    result = to.pull(checkpoint)
    assert result.returncode == 0, result.stderr
    assert to.files() == DATA | MODEL and to.whole()
    noted = to.manifest("org/web")
    assert noted["revision"] == hub.repos["org/web"].commit and noted["type"] == "dataset"
    for path, content in hub.repos["org/web"].files.items():
        if f"org/web/{path}" in DATA:
            assert noted["files"][path] == {"size": len(content), "sha256": sha256(content).hexdigest()}

    asked = len(hub.requests)
    again = to.pull(checkpoint)
    assert again.returncode == 0 and again.stdout.count("all there") == 3
    for path in ("train.jsonl", "tokenizer.json", "model.safetensors", "eng/train-00001.parquet"):
        assert hub.fetched(path) == hub.fetched(path)[:1] and not hub.fetched(path, since=asked), path

    checked = to.check(settings=(checkpoint,))
    assert checked.returncode == 0 and "checksums of 11 pulled files are right" in checked.stdout, checked

    monkeypatch.setenv("UNMASK_MIRROR", str(to.folder))
    preset = load_preset("smoke", {"data.source": str(to.registry), "backbone.checkpoint": "org/base"})
    mirror.require(preset)
    assert mirror.offline(preset) and mirror.local("org/base") == to.folder / "org/base"
    web, answers = load_registry(str(to.registry))
    dropped: Counter[str] = Counter()
    assert sum(1 for unit in units(web) for _ in read(web, unit, dropped)) == 800
    rows = [row for unit in units(answers) for row in read(answers, unit, dropped)]
    assert rows[3]["query"] == "why 3?" and len(rows) == 100 and not dropped.total()


def test_what_goes_wrong_on_the_way_is_made_good(hub: FakeHub, to: Mirror) -> None:
    hub.faults = {
        "model.safetensors": ["cut", "corrupt"],
        "tokenizer.json": [503],
        "eng/train-00001.parquet": [429],
        "eng/train-00002.parquet": ["corrupt"],
    }
    hub.busy = [500]
    result = to.pull("backbone.checkpoint=org/base")
    assert result.returncode == 0, result.stderr
    assert to.files() == DATA | MODEL and to.whole()
    # It goes on after the cut, and starts anew for the bit.
    assert hub.fetched("model.safetensors") == [0, BLOCK, 0]
    assert hub.fetched("tokenizer.json") == hub.fetched("eng/train-00001.parquet") == [0, 0]
    assert hub.fetched("eng/train-00002.parquet") == [0, 0]
    assert not any(hub.faults.values()) and not hub.busy


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_pull_goes_on_where_it_was(hub: FakeHub, to: Mirror, how: signal.Signals) -> None:
    checkpoint = "backbone.checkpoint=org/base"
    hub.faults["model.safetensors"] = ["slow"]
    first = to.start(checkpoint)
    partial = to.folder / "org/base/.partial"
    others = DATA | MODEL - {"org/base/model.safetensors"}
    try:
        deadline = time.monotonic() + 60
        while not others <= to.files() or not any(path.stat().st_size for path in partial.glob("*")):
            assert time.monotonic() < deadline and first.poll() is None
            time.sleep(0.02)
    finally:
        first.send_signal(how)
        assert first.wait(timeout=20) == (-9 if how == signal.SIGKILL else 130)
    assert not (to.folder / "org/base/model.safetensors").exists()
    checked = to.check(settings=(checkpoint,))
    assert checked.returncode == 1 and "org/base 1 of 5 files not there 25.0 MB" in table(checked)

    done = len(hub.requests)
    assert to.pull(checkpoint).returncode == 0
    assert to.files() == DATA | MODEL and to.whole()
    first_start, then = hub.fetched("model.safetensors")
    assert first_start == 0 < then
    assert not hub.fetched("tokenizer.json", since=done) and not hub.fetched("train.jsonl", since=done)
    assert to.check(settings=(checkpoint,)).returncode == 0


def test_a_file_that_stays_wrong_is_refused(hub: FakeHub, to: Mirror) -> None:
    hub.faults["train.jsonl"] = ["corrupt", "corrupt"]
    result = to.pull()
    assert result.returncode == 1 and "train.jsonl came with a wrong checksum twice" in result.stderr
    assert not (to.folder / "org/answers/train.jsonl").exists()
    assert "train.jsonl" not in to.manifest("org/answers")["files"]
    assert to.pull().returncode == 0 and to.whole()


def test_of_text_only_as_much_as_is_needed(hub: FakeHub, to: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    result = to.pull("data.max_text_mb=1")  # a bit more is fetched: two files of 1.3 MB
    assert result.returncode == 0, result.stderr
    assert to.files() == DATA - {"org/web/eng/train-00002.parquet", "org/web/eng/train-00003.parquet"}
    assert to.check(settings=("data.max_text_mb=1",)).returncode == 0
    checked = to.check()
    assert checked.returncode == 1 and "about 2.6 MB of text, and 175.0 MB is wanted" in checked.stdout

    monkeypatch.setenv("UNMASK_MIRROR", str(to.folder))
    web, _ = load_registry(str(to.registry))
    assert sum(1 for unit in units(web) for _ in read(web, unit, Counter())) == 400

    assert to.pull().returncode == 0 and to.files() == DATA
    assert to.pull("data.max_text_mb=1").returncode == 0 and to.check().returncode == 0


def test_check_finds_what_is_missing_short_or_altered(hub: FakeHub, to: Mirror) -> None:
    checkpoint = ("backbone.checkpoint=org/base",)
    nothing = to.check(settings=checkpoint)
    assert nothing.returncode == 2 and f"no mirror at {to.folder}" in nothing.stderr
    assert to.pull().returncode == 0
    missing = to.check(settings=checkpoint)
    assert missing.returncode == 1 and "org/base not there unknown" in table(missing)

    assert to.pull(*checkpoint).returncode == 0
    (to.folder / "org/base/config.json").unlink()
    first, second = (to.folder / "org/web/eng" / f"train-0000{i}.parquet" for i in range(2))
    first.write_bytes(first.read_bytes()[:-1])
    second.write_bytes(b"X" + second.read_bytes()[1:])
    quick = to.check("--quick", settings=checkpoint)
    assert quick.returncode == 1 and "wrong checksum" not in quick.stdout
    assert "org/base 1 of 5 files not there 2 B" in table(quick)
    assert "org/web eng/train 1 of 5 files not there" in table(quick)
    checked = to.check(settings=checkpoint)
    assert checked.returncode == 1 and f"{second}" in checked.stdout
    assert "wrong checksum: delete it and pull again" in checked.stdout
    assert "`unmask mirror pull --preset smoke --to DIR`" in checked.stdout

    second.unlink()
    assert to.pull(*checkpoint).returncode == 0 and to.check(settings=checkpoint).returncode == 0
    assert to.whole()


@pytest.mark.slow
def test_what_the_hub_refuses_is_one_message(hub: FakeHub, to: Mirror, tmp_path: Path) -> None:
    def refused(message: str, *settings: str, status: int = 2, **environment: str) -> None:
        result = to.pull(*settings, **environment)
        *_, last = result.stderr.splitlines()
        assert result.returncode == status and last.startswith("unmask: ") and message in last, result.stderr
        assert "Traceback" not in result.stderr

    refused("there is nothing to mirror", "data.source=environment")
    refused("there is no such model, or it is private", "backbone.checkpoint=org/none")
    hub.add("model", "org/old", {"config.json": b"{}", "pytorch_model.bin": b"P"})
    refused("org/old has no weights as *.safetensors", "backbone.checkpoint=org/old")
    refused("org/web is asked for as dataset at main, model at main", "backbone.checkpoint=org/web")
    refused("cannot be reached (HF_HUB_OFFLINE is set)", status=1, HF_HUB_OFFLINE="1")
    refused("the Hub cannot be reached (http://127.0.0.1:9", status=1, HF_ENDPOINT="http://127.0.0.1:9")

    original = to.registry.read_text()
    to.registry.write_text(original.replace("config: eng", "config: deu"))
    refused("has no configuration 'deu'")
    to.registry.write_text(original.replace("config: eng", "config: eng\n    revision: v2"))
    refused("org/web has no revision 'v2'")
    to.registry.write_text(original)

    hub.repos["org/answers"].gated = True
    refused("org/answers is gated: accept its terms")
    assert to.pull(HF_TOKEN=hub.token).returncode == 0 and to.whole()

    with FileLock(to.folder / ".unmask-mirror.lock"):
        refused("another pull into")
    hub.repos["org/web"].commit = "f" * 40
    refused("org/web has no revision", HF_TOKEN=hub.token)  # it stays at its commit, which is gone
    to.folder = tmp_path / "file"
    to.folder.touch()
    refused("cannot be made (File exists): name another folder by --to")


def test_a_question_is_asked_again_where_the_hub_may_recover(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import HTTPError

    from unmask.data import hub

    monkeypatch.setattr(hub, "PAUSES", (0.0, 0.0))
    asked = []

    def ask(*errors: Exception) -> str:
        asked.append(errors)
        if len(asked) <= len(errors):
            raise errors[len(asked) - 1] from HTTPError("broken")
        return "answer"

    assert hub.patiently(lambda: ask(HTTPError("broken"), ValueError("cannot be reached"))) == "answer"
    asked.clear()
    with pytest.raises(HTTPError):
        hub.patiently(lambda: ask(*[HTTPError("broken")] * 9))
    assert len(asked) == 3
    with pytest.raises(ValueError, match="the user's"):
        hub.patiently(lambda: int("the user's"))


def test_too_little_space_is_said_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unmask.data import pull
    from unmask.data.hub import Repository

    chosen = manifest.Selection({"a": 2 * 10**12, "b": 10**12})
    one = Repository("org/web", "dataset", "0" * 40, "main", {"eng/train": chosen}, {"a": "1", "b": "2"})
    usage = pull.shutil.disk_usage(tmp_path)._replace(free=2 * 10**12)
    monkeypatch.setattr(pull.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OSError, match=r"3\.00 TB are to be fetched and 2\.00 TB are free"):
        pull._check_space([(one, "a"), (one, "b")], tmp_path)
    pull._check_space([(one, "b")], tmp_path)


def test_a_run_that_cannot_read_its_data_says_so_at_once(hub: FakeHub, to: Mirror) -> None:
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
    refused("org/web, org/answers: of kind mirror, and there is none: set UNMASK_MIRROR")


def test_a_checkpoint_in_the_mirror_needs_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preset = load_preset("smoke", {"backbone.checkpoint": "org/base"})
    monkeypatch.setenv("UNMASK_MIRROR", str(tmp_path))
    assert mirror.local("org/base") is None and not mirror.offline(preset)
    (tmp_path / "org/base").mkdir(parents=True)
    assert [gap.why for gap in mirror.missing(preset)] == ["config.json or *.safetensors not there"]
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "org/base" / name).touch()
    assert mirror.local("org/base") == tmp_path / "org/base" and mirror.offline(preset)
    assert mirror.missing(preset) == []
    for path in ("/org/base", "./org/base", "org", "", "a/b/c"):
        assert not mirror.is_hub_name(path) and mirror.local(path) is None
    monkeypatch.delenv("UNMASK_MIRROR")
    assert mirror.local("org/base") is None
    assert mirror.offline(load_preset("smoke"))


@pytest.mark.mirror
def test_a_mirror_made_by_hand_is_read_as_it_is() -> None:
    preset = load_preset("smoke", {"data.source": "mirror"})
    assert len(mirror.needs(preset)) > 100
    mirror.require(preset)
    assert mirror.offline(preset) and mirror.missing(preset) == []
