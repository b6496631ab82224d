"""Notebooks by hand: their cells are run one by one, as in a kernel, but in this process."""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

from unmask.store import repository


def cells(name: str, overrides: dict | None = None) -> list[str]:
    """The code of a notebook of the recipe, with the preset smoke and some of its values changed."""
    notebook = json.loads((repository() / "notebooks" / f"{name}.ipynb").read_text(encoding="utf8"))
    parameters, *code = ("".join(one["source"]) for one in notebook["cells"] if one["cell_type"] == "code")
    assert re.search("^preset: str = .*\noverrides: dict = ", parameters)
    return [f"{parameters}\npreset, overrides = 'smoke', {overrides or {}}", *code]


class Shell:
    """Runs cells one after another."""

    def __init__(self, shell: InteractiveShell):
        self.shell = shell

    def run(self, *code: str) -> tuple[str, int]:
        """What cells print, and how many pictures they show; raises what one of them raises."""
        with capture_output() as seen:
            for cell in code:
                self.shell.run_cell(cell).raise_error()
        return seen.stdout, sum("image/png" in output.data for output in seen.outputs)


@contextmanager
def kernel() -> Iterator[Shell]:
    main = sys.modules["__main__"]
    shell = InteractiveShell.instance(config=Config(HistoryManager={"enabled": False}))
    shell.kernel = None  # that there is one means that curves are drawn
    try:
        yield Shell(shell)
    finally:
        InteractiveShell.clear_instance()
        sys.modules["__main__"] = main
