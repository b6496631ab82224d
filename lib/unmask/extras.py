"""What `pip install unmask` does not bring: packages, see pyproject.toml, and a compiler."""

import contextlib
import os
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
    """Around imports of what `pip install unmask` does not bring: whoever lacks it reads which extra does."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = error.name.partition(".")[0]
        remedy = f"pip install '.[{name}]' in the checkout"
        raise ModuleNotFoundError(f"{package} is not installed: {remedy}") from None


def require_compiler(device: str, remedy: str) -> None:
    """Makes sure that layers can be compiled for a kind of device: Triton starts a GPU's kernels with C, a
    CPU's are C++.

    Raises: ValueError that names what is missing, and the remedy.
    """
    compiler = os.environ.get("CC", "gcc") if device == "cuda" else os.environ.get("CXX", "g++")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not (shutil.which(compiler) and header.is_file()):
        raise ValueError(f"compiled layers need {compiler} and {header}: install both, or {remedy}")
