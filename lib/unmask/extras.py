"""What `pip install .` does not bring: packages, see pyproject.toml, and a compiler."""

import contextlib
import os
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
    """Around imports of what `pip install .` does not bring: whoever lacks it reads which extra does."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = error.name.partition(".")[0]
        remedy = f"pip install '.[{name}]' in the checkout"
        raise ModuleNotFoundError(f"{package} is not installed: {remedy}") from None


def lacking_compiler(device: str) -> str:
    """What is missing to compile layers for a kind of device; empty if nothing is. Triton starts a GPU's
    kernels with C, a CPU's are C++."""
    compiler = os.environ.get("CC", "gcc") if device == "cuda" else os.environ.get("CXX", "g++")
    header = Path(sysconfig.get_path("include"), "Python.h")
    there = shutil.which(compiler) and header.is_file()
    return "" if there else f"compiled layers need {compiler} and {header}"
