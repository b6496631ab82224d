"""The lists of dependencies agree, and the Makefile says what it needs."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import unmask
from unmask.data import environment

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
DECLARED = [*PROJECT["dependencies"], *chain.from_iterable(EXTRAS.values())]
LINES = (ROOT / "requirements.lock").read_text(encoding="utf8").splitlines()
PINS = (line.split("==") for line in LINES if not line.startswith("#"))
LOCKED = {canonicalize_name(name): version for name, version in PINS}


def test_conda_environment_carries_the_same_dependencies() -> None:
    conda = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf8"))
    assert conda["channels"] == ["conda-forge"]
    python, pip, packages = conda["dependencies"]
    assert (python, pip) == ("python=3.11", "pip")
    assert packages == {"pip": DECLARED}


def test_the_floors_that_are_checked_are_those_declared() -> None:
    declared = {requirement.name: requirement.specifier for requirement in map(Requirement, DECLARED)}
    for name, floor in unmask.FLOORS.items():
        assert f">={'.'.join(map(str, floor))}" in map(str, declared[name])


def test_lock_is_complete() -> None:
    """Every dependency's own dependencies are pinned, in versions that satisfy it."""
    for name in LOCKED:
        for text in importlib.metadata.requires(name) or []:
            requirement = Requirement(text)
            if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
                continue
            needed = canonicalize_name(requirement.name)
            if needed in ("setuptools", "pip") or needed.startswith(("nvidia-", "cuda-", "triton")):
                continue  # torch's CUDA build brings its own exact pins
            assert needed in LOCKED, f"{name} needs {text}, which requirements.lock does not pin"
            assert requirement.specifier.contains(LOCKED[needed], prereleases=True), f"{name} needs {text}"


def test_the_corpus_is_read_from_pinned_packages() -> None:
    """`make install` brings what `data.source: environment` lists, Python apart."""
    listed = {canonicalize_name(name): version for name, version in environment.listed().items()}
    assert listed.pop("python").startswith("3.11.") and listed.items() <= LOCKED.items()


def test_every_import_is_declared() -> None:
    """What a module imports when it is loaded is a dependency; within a function, an extra will do."""
    providers = importlib.metadata.packages_distributions()
    core = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}
    extras = {canonicalize_name(Requirement(text).name) for name in ("onnx", "ray") for text in EXTRAS[name]}
    for path in (ROOT / "lib").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf8"))
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            declared = core if node in tree.body else core | extras
            for top in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"unmask"}:
                packages = {canonicalize_name(name) for name in providers.get(top, [top])}
                where = path.relative_to(ROOT)
                assert packages & declared, f"{where} imports {top}, which pyproject.toml does not name"


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
def test_make_names_what_it_needs(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path)
    # Without the flags of the make that runs these tests.
    inherited = {key: value for key, value in os.environ.items() if "MAKE" not in key and key != "MFLAGS"}

    def make(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["make", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=inherited, capture_output=True, text=True)

    old = make("reproduce", "PYTHON=false")
    assert old.returncode != 0 and not (tmp_path / ".venv").exists()
    assert "needs Python 3.11 or newer, and 'false' is not" in old.stderr
    targets = re.findall(r"^make ([\w-]+)", make().stdout, re.MULTILINE)
    assert " ".join(targets) == "install reproduce smoke rehearse test test-faults lint lab bench"
