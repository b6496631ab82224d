"""A checkout of toy notebooks, for the tests of the pipeline and of the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unmask.run import Folders

PARAMETERS = 'preset: str = "smoke"  # which preset\noverrides: dict = {}\nrun: str = ""'


@dataclass(frozen=True)
class Checkout:
    """A copy of the library and the presets, with toy notebooks, in which the command line can be tried."""

    root: Path

    @property
    def folders(self) -> Folders:
        return Folders.of("smoke", root=self.root)

    def notebook(
        self,
        name: str,
        cells: Sequence[str] = (),
        needs: Sequence[str] = (),
        reads: Sequence[str] = ("data",),
        parameters: str | None = PARAMETERS,
        prose: str = "# A question",
        metadata: dict[str, Any] | None = None,
    ) -> Path:
        """Writes notebooks/<name>.ipynb; parameters=None leaves the tagged cell out."""
        code = [(source, []) for source in cells]
        if parameters is not None:
            code.insert(0, (parameters, ["parameters"]))
        document = {
            "cells": [
                {"cell_type": "markdown", "id": "title", "metadata": {}, "source": prose},
                *(
                    {
                        "cell_type": "code",
                        "id": f"cell-{index}",
                        "metadata": {"tags": tags} if tags else {},
                        "source": source,
                        "outputs": [],
                        "execution_count": None,
                    }
                    for index, (source, tags) in enumerate(code)
                ),
            ],
            "metadata": {"unmask": {"needs": list(needs), "reads": list(reads)}}
            if metadata is None
            else metadata,
            "nbformat": 4,
            "nbformat_minor": 5,
        }
        path = self.root / "notebooks" / f"{name}.ipynb"
        path.write_text(json.dumps(document), encoding="utf8")
        return path

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "unmask", *arguments]

    @property
    def environment(self) -> dict[str, str]:
        environment = {key: value for key, value in os.environ.items() if key != "UNMASK_ARTIFACTS"}
        return environment | {"PYTHONPATH": str(self.root / "lib")}

    def unmask(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs the command line in this checkout and waits for it."""
        return subprocess.run(
            self.command(*arguments),
            cwd=self.root,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Starts the command line in this checkout."""
        return subprocess.Popen(
            self.command(*arguments),
            cwd=self.root,
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def path_with(self, name: str, script: str) -> str:
        """A PATH on which `name` is this shell script."""
        tool = self.root / "tools" / name
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f"#!/bin/sh\n{script}\n", encoding="utf8")
        tool.chmod(0o755)
        return os.pathsep.join([str(tool.parent), os.environ["PATH"]])

    def executed(self, name: str) -> dict[str, Any]:
        return json.loads((self.folders.executed / f"{name}.ipynb").read_text(encoding="utf8"))
