"""One notebook, executed in a process of its own: `python -m unmask.study.execute STAGE PARAMETERS`."""

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.modules["rfc3987_syntax"] = None  # a check of IRIs that nbformat would load, in seconds, for nothing

# ruff: noqa: E402
import psutil
from papermill import PapermillExecutionError, execute_notebook
from papermill.exceptions import strip_color
from traitlets.config import Config

from unmask.children import on_signal
from unmask.run import PREEMPTED, Folders
from unmask.store import read_json, write_atomic
from unmask.study.page import publish
from unmask.study.pipeline import PAGE


def execute(stage: str, parameters: dict[str, Any]) -> str:
    """Executes a notebook with papermill, which writes it while it runs; what it prints goes to the log, too.

    Args:
        stage: name of the notebook.
        parameters: its own: name → value.
    Returns: why it failed, if it did.
    Raises: SystemExit with status 75 if it was stopped.
    """
    stopped: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        """The kernel hands this on to a training and waits for it; otherwise it ends at once."""
        stopped.append(number)
        kernels = psutil.Process().children()
        for kernel in kernels:
            kernel.terminate()
        if not kernels:
            os._exit(PREEMPTED)

    folders, reason = Folders(parameters["run"]), ""
    executed, path = folders.executed / f"{stage}.ipynb", folders.logs / f"{stage}.log"
    with (
        path.open("w", encoding="utf8") as log,
        tempfile.TemporaryDirectory() as sockets,
        on_signal(stop, signal.SIGTERM),
    ):
        # Not ports: of two kernels that look for a free one at once, one may bind what the other chose.
        transport = Config(KernelManager={"transport": "ipc", "ip": f"{sockets}/kernel"})
        for stream in (1, 2):  # the kernel inherits them
            os.dup2(log.fileno(), stream)
        try:
            seldom = "--IPKernelApp.exec_lines=import unmask.children as c; c.collect_rarely()"
            options = {"kernel_name": "python3", "language": "python", "extra_arguments": [seldom]}
            options |= {"config": transport, "stdout_file": log, "stderr_file": log}
            options |= {"progress_bar": False, "record_timing": False, "start_timeout": 600}
            options["coalesce_streams"] = True  # of a progress bar its last state
            execute_notebook(folders.notebooks / executed.name, executed, parameters, **options)
        except PapermillExecutionError as error:
            print(error, file=log)
            stopped += [signal.SIGTERM] * (error.ename == "TrainingStopped")
            line = error.source.strip().partition("\n")[0]
            reason = f" in cell {error.exec_count} (`{line}`)\n  {error.ename}: {strip_color(error.evalue)}"
        except Exception as error:
            # A RuntimeError: the kernel died.
            why = ", usually for lack of memory" if isinstance(error, RuntimeError) else ""
            reason = f"\n  {error}{why}"
    try:
        _clean(executed, folders)
        if stage == PAGE and not reason:
            publish(executed, folders.results)
    except Exception as error:  # it may not have been written
        reason = reason or f"\n  {error}"
    if stopped and reason:
        raise SystemExit(PREEMPTED)
    told = f"notebook {executed.name} failed{reason}\n  log: {path}\n  as far as it got: {executed}"
    return told if reason else ""


def _clean(path: Path, folders: Folders) -> None:
    """Takes from the executed notebook what a vanished progress bar left, and this machine's paths: they
    become those of the checkout."""
    notebook = read_json(path)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = [one for one in cell["outputs"] if "".join(one.get("text", "-")).strip()]
    root, text = str(folders.root), json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    text = text.replace(str(folders.artifacts.parent), "artifacts").replace(f"{root}/", "")
    write_atomic(path, text.replace(root, "."))


if __name__ == "__main__":
    with os.fdopen(os.dup(2), "w", encoding="utf8") as complaints:
        failure = execute(sys.argv[1], json.loads(sys.argv[2]))
        complaints.write(failure[:20_000])  # a pipe holds so much until it is read
    sys.exit(bool(failure))
