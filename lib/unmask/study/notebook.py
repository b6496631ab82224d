"""One notebook, executed by papermill in a process of its own: `python -m unmask.study.notebook JOB`.

The pipeline starts it. Exit status: 0 done, 1 failed, with the reason on standard error, 75 stopped in good
order. The executed notebook is written while it runs; what is printed past it goes to the log.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
import psutil
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import DeadKernelError
from nbformat import NotebookNode
from papermill import PapermillExecutionError, execute_notebook

from unmask.children import bound, on_signal
from unmask.run import PREEMPTED
from unmask.store import write_atomic


class ThisInterpreter(KernelSpecManager):
    """Offers one kernel, the interpreter that runs the pipeline, whatever kernels are installed."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        command = bound([sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"])
        metadata = {"supported_encryption": ["curve"]}
        return KernelSpec(argv=command, display_name="Python 3", language="python", metadata=metadata)


class Kernel(AsyncKernelManager):
    """This interpreter as a kernel."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(kernel_spec_manager=ThisInterpreter(), transport_encryption="auto", **settings)


class Execution:
    """The execution of one notebook.

    Args:
        job: "source", "output" and "log" (paths), "parameters" (name → value), "cells" (how many will run),
            "report" (folder that it is published to, or ""), "names" (folders of this machine → what a
            reader sees in their place).
    """

    def __init__(self, job: Mapping[str, Any]) -> None:
        self.job = job
        self.kernel: int | None = None  # its process, and its group's
        self.stopped = False
        self.cell, self.source = 0, ""  # number and first line of the code cell that runs

    def run(self) -> str:
        """Executes the notebook; returns why it failed, if it did.

        Raises: SystemExit if it was stopped.
        """
        job = self.job
        with open(job["log"], "a", encoding="utf8") as log, on_signal(self._stop, [signal.SIGTERM]):
            for stream in (1, 2):  # the kernel inherits them
                os.dup2(log.fileno(), stream)
            try:
                execute_notebook(
                    job["source"],
                    job["output"],
                    job["parameters"],
                    kernel_name="python3",
                    language="python",
                    progress_bar=False,
                    stdout_file=log,
                    stderr_file=log,
                    kernel_manager_class=Kernel,
                    coalesce_streams=True,  # of a progress bar its last state
                    record_timing=False,
                    on_notebook_start=self._started,
                    on_cell_execute=self._entered,
                )
                return ""
            except PapermillExecutionError as error:
                print(_plain("\n".join(error.traceback)), file=log)
                self.stopped |= error.ename == "TrainingStopped"
                reason = f"{error.ename}: {_plain(error.evalue)}".strip(": ")
            except (DeadKernelError, RuntimeError) as error:
                reason = f"{error}, most often for want of memory"
            finally:
                with contextlib.suppress(ProcessLookupError, TypeError):
                    os.killpg(self.kernel, signal.SIGKILL)  # what the notebook left running
                self._clean()
        if self.stopped:
            raise SystemExit(PREEMPTED)
        return self._named(
            f"notebook {Path(job['source']).name} failed in cell {self.cell} of {job['cells']} "
            f"(`{self.source}`)\n  {reason}\n  log: {job['log']}\n"
            f"  notebook as far as it got: {job['output']}"
        )

    def _started(self, notebook: NotebookNode) -> None:
        (kernel,) = psutil.Process().children()
        self.kernel = kernel.pid

    def _entered(self, cell: NotebookNode, cell_index: int) -> None:
        self.cell, self.source = self.cell + 1, cell.source.strip().splitlines()[0]

    def _stop(self, number: signal.Signals) -> None:
        """The kernel hands this on to a training and waits for it; otherwise it ends at once."""
        self.stopped = True
        if self.kernel is None:
            os._exit(PREEMPTED)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.kernel, number)

    def _clean(self) -> None:
        """Takes from the executed notebook this machine's paths and what a vanished progress bar left."""
        path = Path(self.job["output"])
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs = [one for one in cell.outputs if "text" not in one or one.text.strip()]
        write_atomic(path, self._named(nbformat.writes(notebook) + "\n"))

    def _named(self, text: str) -> str:
        """A text with paths as a reader of the checkout would write them."""
        for folder, name in self.job["names"].items():
            text = text.replace(f"{folder}/", "" if name == "." else f"{name}/").replace(folder, name)
        return text


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


if __name__ == "__main__":
    with os.fdopen(os.dup(2), "w", encoding="utf8") as complaints:
        job = json.loads(sys.argv[1])
        complaints.write(failure := Execution(job).run())
        if job["report"] and not failure:
            from unmask.study.report import publish  # the others need not wait for torch

            publish(Path(job["output"]), Path(job["report"]))
    sys.exit(int(bool(failure)))
