"""Executes one notebook of a run, in a process of its own.

    unmask run  →  python -m unmask_study.execute  →  the notebook's kernel, which trains  →  torchrun

What is printed, by the kernel too, goes to stdout, which is the notebook's log; why the notebook failed goes
to stderr. A request to stop goes down this chain as SIGTERM. A training saves itself and ends its notebook
with TrainingStopped; a kernel that does not train ends at once.
"""

import contextlib
import json
import os
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from traitlets.config import Config

from unmask.children import PREEMPTED, on_signal
from unmask.store import artifacts_root, naming, read_json, repository, write_atomic
from unmask_study.run import PAGE, Folders

OPTIONS = {"kernel_name": "python3", "language": "python", "start_timeout": 600, "progress_bar": False}
OPTIONS |= {"record_timing": False, "stdout_file": sys.stdout, "stderr_file": sys.stdout}
OPTIONS |= {"coalesce_streams": True}  # of a progress bar its last state alone


def main(notebook: Path, parameters: dict[str, Any]) -> tuple[int, str]:
    """Executes a notebook, and publishes the report's as a page.

    Args:
        parameters: preset, overrides and run, as its first cell has them.
    Returns: exit status, 75 if a training was stopped, and why the notebook failed.
    """
    # To check web addresses, nbformat would load it for seconds.
    sys.modules.setdefault("rfc3987_syntax", None)
    from papermill import PapermillExecutionError, execute_notebook  # noqa: PLC0415
    from papermill.exceptions import strip_color  # noqa: PLC0415

    folders = Folders(parameters["run"])
    executed, log = folders.executed / notebook.name, folders.logs / f"{notebook.stem}.log"
    try:
        with TemporaryDirectory() as sockets, naming(f"{log} or {executed}"), on_signal(_stop):
            # Not ports: of two kernels that look for a free one at once, one may bind what the other chose.
            transport = Config(KernelManager={"transport": "ipc", "ip": f"{sockets}/kernel"})
            try:
                execute_notebook(notebook, executed, parameters, config=transport, **OPTIONS)
            finally:
                clean(executed)
            if notebook.stem == PAGE:
                from unmask_study.page import publish  # noqa: PLC0415 (with nbconvert)

                publish(executed, folders.results)
    except PapermillExecutionError as error:
        line = error.source.strip().partition("\n")[0]
        why = f" in cell {error.exec_count} (`{line}`)\n  {error.ename}: {strip_color(error.evalue)}"
        with contextlib.suppress(OSError):
            print(error, flush=True)
        return PREEMPTED if error.ename == "TrainingStopped" else 1, why
    except (RuntimeError, ValueError, OSError) as error:
        hint = ": killed, usually for lack of memory" * ("Kernel died" in str(error))
        return 1, f"\n  {error}{hint}"
    return 0, ""


def _stop(*_: Any) -> None:
    kernels = psutil.Process().children()
    for kernel in kernels:
        kernel.terminate()
    if not kernels:
        sys.exit(PREEMPTED)


def clean(executed: Path) -> None:
    """Takes from an executed notebook what a vanished progress bar left, and this machine's paths: they
    become those of the checkout."""
    notebook = read_json(executed)
    for cell in notebook.get("cells", ()):
        if cell["cell_type"] == "code":
            cell["outputs"] = [one for one in cell["outputs"] if "".join(one.get("text", "-")).strip()]
    text, root = json.dumps(notebook, indent=1, ensure_ascii=False), str(repository())
    for folder, name in ((str(artifacts_root()), "artifacts"), (f"{root}/", ""), (root, ".")):
        begins = r"((?<![\w./-])|(?<=\\[nrt])|(?<=\\u001b\[\dm)|(?<=\\u001b\[\d\dm))"  # colours, too
        text = re.sub(begins + re.escape(folder) + r"(?![\w-]|\.\w)" * bool(name), name, text)
    write_atomic(executed, f"{text}\n")


if __name__ == "__main__":
    reasons = os.fdopen(os.dup(2), "w")
    os.dup2(1, 2)  # what the kernel and libraries write below Python belongs into the log
    status, why = main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    print(why[:8000], end="", file=reasons)  # a pipe, which is read when this has ended, holds 64 KiB
    sys.exit(status)
