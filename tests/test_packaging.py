"""The lists of dependencies agree, and the Makefile says what it needs."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import make
import unmask
from toy_checkout import write_script
from unmask import config, store
from unmask_study import cli
from unmask_study.__main__ import main

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
    """What is declared is pinned, and every dependency's own dependencies, in versions that satisfy it."""
    listed = {name: importlib.metadata.requires(name) or [] for name in LOCKED} | {"this project": DECLARED}
    for name, requirement in ((name, Requirement(text)) for name, texts in listed.items() for text in texts):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        needed = canonicalize_name(requirement.name)
        if needed in ("setuptools", "pip") or needed.startswith(("nvidia-", "cuda-", "triton")):
            continue  # torch's CUDA build brings its own exact pins
        assert needed in LOCKED, f"{name} needs {requirement}, which requirements.lock does not pin"
        assert requirement.specifier.contains(LOCKED[needed], prereleases=True), f"{name} needs {requirement}"


def test_the_corpus_is_read_from_pinned_packages() -> None:
    """`make install` brings what `data.source: environment` lists, Python apart."""
    listed = {canonicalize_name(name): version for name, version in make.listed().items()}
    assert listed.pop("python").startswith("3.11.") and listed.items() <= LOCKED.items()


def imported(node: ast.AST, extra: str = "") -> Iterator[tuple[str, str]]:
    """The packages that code imports, each with the extra that it is imported under: `with extra(NAME):`."""
    match node:
        case ast.Import(names=names):
            yield from ((alias.name.partition(".")[0], extra) for alias in names)
        case ast.ImportFrom(module=module, level=0):
            yield module.partition(".")[0], extra
        case ast.With(items=[ast.withitem(ast.Call(ast.Name("extra"), [ast.Constant(name)]))]):
            extra = name
    for child in ast.iter_child_nodes(node):
        yield from imported(child, extra)


def test_every_import_is_declared_for_its_use() -> None:
    """By the dependencies, or by the extra of a room (study, synthesis) or of the import itself. What
    transformers brings in a version of its own choice is declared by it."""
    providers = importlib.metadata.packages_distributions()
    declared = {}
    for name, listed in {"": PROJECT["dependencies"], **EXTRAS}.items():
        declared[name] = {canonicalize_name(Requirement(text).name) for text in listed}
    assert len(declared[""]) <= 17
    declared[""] |= {"huggingface-hub", "safetensors", "tokenizers"}
    scripts = ROOT / "papermill_runs" / "sources"
    for path in chain((ROOT / "lib").rglob("*.py"), scripts.rglob("*.py")):
        parts = path.relative_to(ROOT).parts
        extras = set() if parts[1] == "unmask" else {"study", parts[2]}
        for top, extra in imported(ast.parse(path.read_text(encoding="utf8"))):
            if top in sys.stdlib_module_names or top in ("unmask", "unmask_study", "cldr"):
                continue
            packages = {canonicalize_name(name) for name in providers.get(top, [top])}
            allowed = declared[""].union(*(declared.get(one, ()) for one in (extra, *extras)))
            where = f"{path.relative_to(ROOT)}, extra {extra or extras!r}"
            assert packages & allowed, f"{where}: {top} is not among its dependencies"


def test_the_library_names_no_notebook() -> None:
    named = re.compile(r"notebook \d|\b\d\d[a-z]?_[a-z]+")
    for path in (ROOT / "lib" / "unmask").rglob("*.py"):
        assert not named.search(path.read_text(encoding="utf8")), path


def test_the_eight_that_the_recipe_is_made_of_are_installed() -> None:
    """With `make install` and with conda: both bring all extras."""
    eight = {"torch", "transformers", "accelerate", "datasets"}
    eight |= {"jupyterlab", "papermill", "mergekit", "matplotlib"}
    assert eight <= {Requirement(text).name for text in DECLARED} & {*LOCKED}


def test_run_names_the_extra_it_needs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    missing = importlib.metadata.PackageNotFoundError("papermill")
    monkeypatch.setattr(cli, "version", Mock(side_effect=missing))
    assert main(["run"]) == 1
    told = "unmask: papermill is not installed: pip install '.[study]' in the checkout\n"
    assert capsys.readouterr().err == told


def test_installed_without_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "repository", lambda: tmp_path / "lib" / "python3.11")
    monkeypatch.delenv("UNMASK_ARTIFACTS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert store.artifacts_root() == tmp_path / "cache" / "unmask"
    monkeypatch.setattr(config, "PRESETS", tmp_path / "lib" / "python3.11" / "papermill_runs" / "presets")
    with pytest.raises(config.ConfigError, match="presets and notebooks lie in the repository: clone it"):
        config.load_preset("cpu")


EMBEDDING = """
import sys
from pathlib import Path
import tiny
from unmask import Embedder

embedder = Embedder(tiny.model(), tiny.tokenizer(), device="cpu")
embedder.save_pretrained("model")
Embedder.from_pretrained("model", device="cpu").encode(["Read a file.", "Close it."])
print(*sorted({name.partition(".")[0] for name in sys.modules}))

sys.modules["mergekit"] = None  # as if it were not installed
import unmask.models.merge
"""
# Not accelerate and scipy, which transformers itself loads.
ELSEWHERE = "babel bm25s datasets faiss joblib matplotlib mergekit mteb openai pandas papermill sklearn"


def test_embedding_loads_nothing_of_data_and_study_and_a_lacking_extra_is_named(tmp_path: Path) -> None:
    """From text to vector, outside of a checkout; then a merge."""
    command, paths = [sys.executable, "-c", EMBEDDING], {"PYTHONPATH": f"{ROOT / 'lib'}:{ROOT / 'tests'}"}
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | paths, capture_output=True, text=True)
    assert "torch" in done.stdout and {*ELSEWHERE.split()} & {*done.stdout.split()} == set()
    told = "mergekit is not installed: pip install '.[study]' in the checkout"
    assert done.stderr.splitlines()[-1].endswith(told)


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
def test_make_names_what_it_needs(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path)
    # Without the flags of the make that runs these tests.
    inherited = {key: value for key, value in os.environ.items() if "MAKE" not in key and key != "MFLAGS"}
    inherited["PATH"] = f"{tmp_path / 'bin'}:{inherited['PATH']}"

    def make(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["make", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=inherited, capture_output=True, text=True)

    old = make("reproduce", "PYTHON=false")
    assert old.returncode != 0 and not (tmp_path / ".venv").exists()
    assert "needs Python 3.11 or newer, and 'false' is not" in old.stderr
    for lists, arguments, said in (  # what nvidia-smi lists, and the preset that is taken
        ("GPU 0: some (UUID: x)", [], "preset gpu: nvidia-smi lists 1 GPU"),
        ("No devices were found", [], "preset cpu: nvidia-smi lists no GPU"),
        ("GPU 0: some (UUID: x)", ["PRESET=smollm2"], "preset smollm2: as named"),
    ):
        write_script(tmp_path / "bin" / "nvidia-smi", f'echo "{lists}"')
        assert said in make("-n", "reproduce", *arguments).stdout
    targets = re.findall(r"^make ([\w-]+)", make().stdout, re.MULTILINE)
    assert " ".join(targets) == "install reproduce smoke rehearse test test-faults lint lab bench"
