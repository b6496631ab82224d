"""Mirrors: pulled over the wire from a Hub on localhost, whatever goes wrong there, then read offline."""

import json
import os
from collections import Counter
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fake_hub import fake_hub, known_hub
from toy_checkout import unmask
from unmask.data import hub
from unmask.data.registry import load_registry
from unmask.data.rows import read, units
from unmask.store import visible
from unmask_study import mirror
from unmask_study.settings import load_preset

README = """---
configs:
- config_name: other
  data_files: [{split: train, path: other/*.parquet}]
- config_name: eng
  data_files: [{split: train, path: eng/train-*.parquet}, {split: test, path: eng/test-*.parquet}]
---
"""
REGISTRY = """
sources:
  web: {kind: hub, role: text, repo: org/web, config: eng, language: eng, licence: x, columns: {text: text}}
  answers: {kind: hub, role: pairs, group: english, repo: org/answers, language: eng, licence: mit,
    columns: {query: question, document: answer}}
"""
ANSWERS = "".join(json.dumps({"question": f"why {i}?", "answer": f"because {i}"}) + "\n" for i in range(100))
WEB = [f"eng/train-0000{i}.parquet" for i in range(4)]
ALL = {"org/web/README.md", *(f"org/web/{part}" for part in WEB), "org/answers/train.jsonl"}
ALL |= {f"org/base/{name}" for name in ("config.json", "tokenizer.json", "model.safetensors")}


def parquet(path, part):
    text = Random(part).randbytes(3200 * 200).hex()  # which nothing compresses by much
    texts = [text[6400 * row : 6400 * (row + 1)] for row in range(200)]
    pq.write_table(pa.table({"id": list(range(200)), "text": texts}), path)
    return path.read_bytes()


@pytest.fixture
def fake(tmp_path):
    with fake_hub() as fake:
        parts = {name: parquet(tmp_path / "part", part) for part, name in enumerate(WEB)}
        rest = {"eng/test-00000.parquet": b"P" * 2000, "other/0.parquet": b"P" * 2000, "big.bin": b"B" * 9000}
        fake.add("dataset", "org/web", {"README.md": README.encode(), **rest, **parts})
        fake.add("dataset", "org/answers", {"train.jsonl": ANSWERS.encode()})
        weights = {"model.safetensors": b"W" * 5_000_000, "pytorch_model.bin": b"X" * 5000}
        fake.add("model", "org/base", {"config.json": b"{}", "tokenizer.json": b"T" * 3000, **weights})
        yield fake


class Mirror:
    """A mirror of the fake Hub."""

    def __init__(self, fake, folder):
        self.fake, self.folder, self.registry = fake, folder / "mirror", folder / "registry.yaml"
        self.registry.write_text(REGISTRY)
        self.settings = {"data.source": str(self.registry), "data.max_text_mb": 100}
        self.settings |= {"backbone.checkpoint": "org/base"}

    def pull(self, **settings):
        """Exit status and the last line, which is the message of an error."""
        changes = [f"--set={key}={value}" for key, value in (self.settings | settings).items()]
        done = unmask("mirror", "pull", "--to", str(self.folder), "--preset", "smoke", *changes)
        return done.returncode, (done.stderr if done.returncode else done.stdout).strip().splitlines()[-1]

    def check(self, **settings):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("UNMASK_MIRROR", str(self.folder))
            wrong = mirror.check(load_preset("smoke", self.settings | settings))
        return "; ".join(f"{what} {why}" for what, why in wrong)

    def whole(self, wanted):
        """Whether just these files are there, beside hidden ones, as the Hub has them."""
        stored = {str(path.relative_to(self.folder)): path.read_bytes() for path in visible(self.folder)}
        repos = self.fake.repos.items()
        contents = {f"{name}/{file}": data for name, repo in repos for file, data in repo.files.items()}
        return stored == {name: contents[name] for name in wanted}

    def rows(self):
        """How many rows each source has."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("UNMASK_MIRROR", str(self.folder))
            sources = load_registry(str(self.registry))
            return [sum(1 for unit in units(one) for _ in read(one, unit, Counter())) for one in sources]


@pytest.fixture
def to(fake, tmp_path):
    return Mirror(fake, tmp_path)


def test_what_a_preset_needs_is_pulled_once_and_serves_offline(fake, to, monkeypatch):
    assert to.pull() == (0, f"all that preset 'smoke' needs is there: UNMASK_MIRROR={to.folder} serves it")
    assert to.whole(ALL)
    before = len(fake.requests)
    assert to.pull()[0] == 0
    for path in ("train.jsonl", "tokenizer.json", "model.safetensors", WEB[1]):
        assert path in fake.requests[:before] and path not in fake.requests[before:], path
    preset = load_preset("smoke", to.settings)
    with known_hub("http://127.0.0.1:9", offline=True):
        assert to.check() == "" and to.rows() == [800, 100]
        monkeypatch.setenv("UNMASK_MIRROR", str(to.folder))
        mirror.require(preset)
        assert mirror.offline(preset) and hub.local("org/base") == to.folder / "org/base"


def test_after_a_failure_the_same_command_goes_on(fake, to, monkeypatch):
    """Also from within the mirror, where the repositories lie at paths like their names."""
    to.folder.mkdir()
    monkeypatch.chdir(to.folder)
    fake.faults = {"train.jsonl": ["cut"], WEB[1]: [429], "tokenizer.json": [503]}
    status, message = to.pull()
    assert status == 1 and "goes on" in message
    assert "not there or not whole" in to.check() and "org/base" in to.check()
    done = len(fake.requests)
    assert to.pull()[0] == 0 and to.whole(ALL) and to.check() == "" and not any(fake.faults.values())
    assert "model.safetensors" not in fake.requests[done:]


def test_of_text_only_as_much_as_is_needed(fake, to):
    little, fake.faults = {"data.max_text_mb": 1}, {WEB[3]: [503]}
    assert to.pull()[0] == 1  # what was planned beyond does not stand in the way of a pull of less
    for part in WEB[2:]:
        (to.folder / "org/web" / part).unlink(missing_ok=True)
    assert to.pull(**little)[0] == 0  # a bit more is fetched: two files of 1.3 MB
    assert to.whole(ALL - {f"org/web/{part}" for part in WEB[2:]})
    assert to.check(**little) == "" and to.rows() == [400, 100]
    assert to.check() == f"org/web {WEB[2]} not there or not whole: pull again"
    assert to.pull()[0] == 0 and to.whole(ALL)
    assert to.pull(**little)[0] == 0 and to.check() == to.check(**little) == ""


def test_check_finds_what_is_missing_or_short_and_a_revision_can_be_pinned(fake, to, monkeypatch):
    with pytest.raises(ValueError, match=f"no mirror at {to.folder}: UNMASK_MIRROR names one"):
        to.check()
    assert to.pull()[0] == 0
    (to.folder / "org/base/config.json").unlink()
    first, second = (to.folder / "org/web" / part for part in WEB[:2])
    first.write_bytes(first.read_bytes()[:-1])
    second.unlink()
    for lacking in ("org/base config.json", f"org/web {WEB[0]}"):
        assert f"{lacking} not there or not whole: pull again" in to.check()
    os.utime(first, (2e9, 2e9))  # within the second of its arrival the library does not see a change
    pinned = REGISTRY.replace("config: eng", f"config: eng, revision: {fake.repos['org/web'].commit}")
    to.registry.write_text(pinned)
    assert to.pull()[0] == 0 and to.check() == "" and to.whole(ALL)
    to.registry.write_text(pinned.replace(fake.repos["org/web"].commit, "f" * 40))
    status, message = to.pull()
    assert status == 2 and "the mirror holds revision" in message and "holds revision" in to.check()


def test_what_the_hub_refuses_is_one_message(fake, to, monkeypatch):
    def refused(message, base="org/none"):
        status, last = to.pull(**{"backbone.checkpoint": base})
        assert status in (1, 2) and message in last, last

    refused("Repository Not Found")
    fake.repos["org/answers"].gated = True
    refused("org/answers", "org/base")
    with monkeypatch.context() as patch:
        patch.setenv("HF_TOKEN", fake.token)
        assert to.pull()[0] == 0
    fake.add("model", "org/old", {"config.json": b"{}", "pytorch_model.bin": b"P"})
    refused("org/old (*.safetensors not there)", "org/old")
    to.registry.write_text(REGISTRY.replace("config: eng", "config: deu"))
    refused("has no configuration 'deu'", "org/base")
    with known_hub(fake.url, offline=True):
        refused("HF_HUB_OFFLINE")
    with known_hub("http://127.0.0.1:9"):
        refused("Connection refused")


def test_a_run_whose_mirror_lacks_something_says_so_at_once(to, monkeypatch):
    preset = load_preset("smoke", to.settings)
    assert not mirror.offline(preset) and mirror.data_on_hub(preset) and mirror.offline(load_preset("smoke"))
    assert not mirror.data_on_hub(load_preset("smoke", {"conteb.tasks": ["insurance"]}))
    for section in ("retrieval", "conteb", "cde", "qwen3", "ablation"):
        assert not mirror.offline(load_preset("smoke", {f"{section}.benchmarks": ["MTEB(Code, v1)"]}))
    monkeypatch.setenv("UNMASK_MIRROR", str(to.folder.parent))
    assert mirror.offline(preset) and not mirror.data_on_hub(preset)
    how = "with internet, `unmask mirror pull --preset NAME --to DIR`"
    mirror.require(load_preset("smoke", {"retrieval.pool": ["org/voter"]}))  # stops its study alone
    with pytest.raises(ValueError, match=rf"lacks org/base \(not there\), org/web \(not there\), .*: {how}"):
        mirror.require(preset)


def test_a_checkpoint_put_there_by_hand_is_read(tmp_path, monkeypatch):
    preset = load_preset("smoke", {"backbone.checkpoint": "org/base"})
    monkeypatch.setenv("UNMASK_MIRROR", str(tmp_path))
    (tmp_path / "org/base").mkdir(parents=True)
    assert mirror.check(preset) == [("org/base", "*.safetensors not there")]
    (tmp_path / "org/base/model.safetensors").touch()
    assert hub.local("org/base") == tmp_path / "org/base" and mirror.check(preset) == []
    for path in ("/org/base", "./org/base", "org", "", "a/b/c"):
        assert hub.local(path) is None
