"""The command line: answers that need no kernel, and what it says to a request that cannot work."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

import unmask
from toy_checkout import Checkout
from unmask import cli


@pytest.fixture
def two(checkout: Checkout) -> Checkout:
    checkout.notebook("00_backbone", ["1"])
    checkout.notebook("01_pair", ["1"], needs=["00_backbone"], reads=["pair"])
    return checkout


def test_dry_run_says_what_is_due_and_writes_nothing(two: Checkout) -> None:
    before = sorted(two.root.rglob("*.json"))
    result = two.unmask("run", "--preset", "smoke", "--run", "mine", "--dry-run")
    assert result.returncode == 0 and result.stderr == ""
    assert result.stdout.splitlines() == [
        "2 notebooks to run as 'mine', time unknown: no earlier run to go by",
        "  notebook     why        time",
        "  00_backbone  never ran  unknown",
        "  01_pair      never ran  unknown",
    ]
    assert sorted(two.root.rglob("*.json")) == before and not (two.root / "artifacts").exists()


def test_status_of_a_run_that_never_was(two: Checkout) -> None:
    result = two.unmask("status", "--preset", "smoke")
    assert result.returncode == 0
    assert result.stdout.splitlines()[2:] == ["  00_backbone  never ran", "  01_pair      never ran"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "smok"], "unknown preset 'smok'; did you mean 'smoke'?"),
        (["--set", "pair.stepz=3"], "unknown key 'stepz'; did you mean 'steps'?"),
        (["--set", "pairs.steps=3"], "did you mean 'pair'?"),
        (["--set", "pair.steps=many"], "pair: steps must be int, got 'many'"),
        (["--set", "pair.steps"], "write key=value"),
        (["--set", "pair.steps=[1"], "the value is not valid YAML"),
        (["--only", "1_pair"], "no notebook '1_pair'; did you mean '01_pair'?"),
        (["--from", "00", "--only", "01"], "--from and --only exclude each other"),
        (["--only", "01"], "01_pair needs the output of 00_backbone, which never ran"),
        (["--run", "../elsewhere"], "take one without '/'"),
    ],
)
def test_a_request_that_cannot_work_is_one_message(two: Checkout, arguments: list[str], message: str) -> None:
    result = two.unmask("run", "--preset", "smoke", *arguments)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("unmask: ") and message in result.stderr
    assert "Traceback" not in result.stderr and result.stderr.count("\n") == 1
    assert not (two.root / "results").exists() and not (two.root / "papermill_runs" / "smoke").exists()


def test_a_full_disk_is_noticed_at_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], two: Checkout
) -> None:
    monkeypatch.setattr(cli, "FREE_BYTES", 2**70)
    monkeypatch.setattr(cli, "Folders", SimpleNamespace(of=lambda run, folders=two.folders: folders))
    assert cli.main(["run", "--preset", "smoke"]) == 2
    assert "MiB free where artifacts go" in capsys.readouterr().err
    assert not two.folders.artifacts.exists()


def test_questions_are_answered_without_loading_anything_heavy(two: Checkout) -> None:
    code = (
        "import sys; from unmask.cli import main; main(['status', '--preset', 'smoke']); "
        "print({'torch', 'transformers', 'papermill', 'nbformat', 'numpy'} & sys.modules.keys())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env=two.environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[-1] == "set()"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.strip() == unmask.__version__


def test_a_checkpoint_that_is_none_is_refused_before_anything_starts(capsys, tmp_path):
    assert cli.main(["run", "--preset", "smoke", "--set", f"backbone.checkpoint={tmp_path}"]) == 2
    assert "is no checkpoint: config.json and *.safetensors missing" in capsys.readouterr().err
