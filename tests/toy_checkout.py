"""A checkout of toy notebooks, for the tests of the pipeline and of the command line."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from unmask_study.cli import main
from unmask_study.run import Folders

PARAMETERS = 'preset: str = "smoke"  # which preset\noverrides: dict = {}\nrun: str = ""'


def cell(kind: str, source: str, *tags: str) -> dict[str, Any]:
    made = {"cell_type": kind, "metadata": {"tags": list(tags)}, "source": source}
    return made | ({"outputs": [], "execution_count": None} if kind == "code" else {})


def write_script(path: Path, script: str) -> Path:
    """Writes a shell script that can be run by its path."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf8")
    path.chmod(0o755)
    return path


def unmask(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What the command line says and returns; in this process, where it need not be loaded again."""
    output, errors = StringIO(), StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        status = main(arguments)
    return subprocess.CompletedProcess(arguments, status, output.getvalue(), errors.getvalue())


@dataclass(frozen=True)
class Checkout:
    """A copy of the library and the presets, with toy notebooks, in which the command line can be tried."""

    root: Path

    @property
    def folders(self) -> Folders:
        return Folders("smoke")

    def notebook(self, name: str, cells: Sequence[str] = (), prose: str = "# A question", **about) -> Path:
        """Writes notebooks/<name>.ipynb; `about` is its metadata: needs, reads and so on."""
        code = [cell("code", PARAMETERS, "parameters"), *(cell("code", source) for source in cells)]
        kernel = {"name": "python3", "language": "python", "display_name": ""}
        metadata = {"unmask": {"needs": [], "reads": ["data"]} | about, "kernelspec": kernel}
        document = {"cells": [cell("markdown", prose), *code], "nbformat": 4, "nbformat_minor": 4}
        path = self.root / "notebooks" / f"{name}.ipynb"
        path.write_text(json.dumps(document | {"metadata": metadata}), encoding="utf8")
        return path

    def start(self, *arguments: str) -> ForkProcess:
        """Starts the command line as a process of its own, which has it loaded already; what it says goes to
        the files `output` and `errors`."""

        def work() -> None:
            output, errors = ((self.root / name).open("w") for name in ("output", "errors"))
            with output, errors, redirect_stdout(output), redirect_stderr(errors):
                status = main(arguments)
            sys.exit(status)

        process = get_context("fork").Process(target=work)
        process.start()
        return process

    unmask = staticmethod(unmask)

    def path_with(self, name: str, script: str) -> str:
        """A PATH on which `name` is this shell script."""
        tool = write_script(self.root / "tools" / name, script)
        return os.pathsep.join([str(tool.parent), os.environ["PATH"]])

    def executed(self, name: str) -> dict[str, Any]:
        return json.loads((self.folders.executed / f"{name}.ipynb").read_text(encoding="utf8"))
