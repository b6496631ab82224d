"""Shared by all tests: what is skipped where, and a checkout of toy notebooks."""

import gc
import os
import shutil
import signal
from pathlib import Path

import pytest

# Tests never reach for the network, whatever the machine's settings are. The Hub's client reads this once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["PIP_NO_INDEX"] = "1"  # pip fetches weights
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from toy_checkout import Checkout

ROOT = Path(__file__).resolve().parents[1]


def pytest_configure(config: pytest.Config) -> None:
    # A shell that starts a job in the background has it ignore SIGINT, which tests send.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Each of two processes begins with one half of the list: with the pipeline, or with what else is slow. So
    # none is left with a long one at the end.
    slow = [item for item in items if item.get_closest_marker("slow") and item.path.name != "test_smoke.py"]
    others = sorted((x for x in items if x not in slow), key=lambda x: x.path.name != "test_smoke.py")
    items[:] = others[: len(items) // 2] + slow + others[len(items) // 2 :]
    offline = os.environ["HF_HUB_OFFLINE"] == "1"
    reasons = {
        "gpu": None if shutil.which("nvidia-smi") else "no NVIDIA GPU on this machine",
        "hub": "no Hub: set HF_HUB_OFFLINE=0 where it can be reached" if offline else None,
        "faults": None if os.environ.get("UNMASK_FAULTS") else "fault injection: make test-faults",
    }
    for item in items:
        for name, reason in reasons.items():
            if reason and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    gc.freeze()  # each training collects its garbage: what is imported is none, and need not be looked at


@pytest.fixture(autouse=True)
def artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test leaves behind lies in a folder of its own, and it knows no mirror."""
    monkeypatch.setenv("UNMASK_ARTIFACTS", str(tmp_path))
    monkeypatch.setenv("UNMASK_MIRROR", "")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    """In which the test then works."""
    no_output = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "lib", tmp_path / "lib", ignore=no_output)
    for name in ("presets", "sources"):
        shutil.copytree(ROOT / "papermill_runs" / name, tmp_path / "papermill_runs" / name)
    (tmp_path / "notebooks").mkdir()
    monkeypatch.setattr("unmask_study.run.repository", lambda: tmp_path)
    monkeypatch.setenv("UNMASK_ARTIFACTS", str(tmp_path / "artifacts"))
    monkeypatch.chdir(tmp_path)
    return Checkout(tmp_path)
