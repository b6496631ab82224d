"""Executes the notebooks that are due, side by side where none needs another: papermill, a thread for each.

    unmask run  →  a kernel for each notebook, which also trains  →  torchrun, where there are more processes

A request to stop goes down this chain, as SIGTERM to the kernels. A training in one saves itself, which ends
the notebook with TrainingStopped; a kernel that does not train ends at once.
"""

import contextlib
import json
import math
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning import LocalProvisioner
from papermill import PapermillExecutionError, execute_notebook
from papermill.exceptions import strip_color
from papermill.log import logger
from traitlets.config import Config

from unmask.children import grace_seconds, on_signal
from unmask.store import naming, read_json, write_atomic
from unmask_study import mirror
from unmask_study.kernels import Kernel, Kernels
from unmask_study.page import publish
from unmask_study.pipeline import PAGE, Notebook, Pipeline, clock, utc
from unmask_study.progress import Progress
from unmask_study.run import Folders

logger.disabled = True  # what it says of a kernel that died is in the error, too
Process = subprocess.Popen | Kernel


def execute(pipeline: Pipeline, due: dict[Notebook, float], command: str, source: Kernels, jobs: int) -> None:
    """Executes the notebooks that are due, shows how far they are, and records each when it has ended.

    One starts as soon as what it needs is there and fewer than `jobs` others run.

    Args:
        due: from `Pipeline.plan`, in running order, each with the seconds that it takes (`whole_times`).
        command: the command that was given, for the record.
        source: of the notebooks' kernels.
    Raises:
        RuntimeError: notebooks failed, for the reasons that were printed when they did; those that need
            nothing of them were done.
        KeyboardInterrupt: SIGINT or SIGTERM came, or a kernel got SIGTERM; all kernels have ended. Its
            argument is the signal.
    """
    about, environment = pipeline.describe(command), source.environment
    # Notebooks that run side by side share the cores.
    share = {"OMP_NUM_THREADS": str(max(about["hardware"]["cores"] // jobs, 1))} | environment
    waiting, left = [*due], {one.name for one in due}  # left: what is not done
    running, signals, grace, deadline = {}, [], grace_seconds(), math.inf
    kernels, memory, told = {}, Counter(), set()  # told: whose kernel got SIGTERM
    progress = Progress(pipeline.folders.artifacts, due, jobs)

    def say(notebook: Notebook, text: str) -> None:
        progress.say(f"[{[*due].index(notebook) + 1}/{len(due)}] {notebook.name} · {text}")

    with (
        on_signal(signals.append),
        ThreadPoolExecutor(jobs) as threads,
        contextlib.ExitStack() as last,
    ):
        last.callback(lambda: [kernel.terminate() for kernel in kernels.values()])  # after an error here
        last.callback(progress.close)
        while True:
            ready = [one for one in waiting if left.isdisjoint(one.inputs)]
            for notebook in [] if signals else ready[: jobs - len(running)]:
                waiting.remove(notebook)
                own = share if jobs > 1 and (running or len(ready) > 1) else environment
                progress.begin(notebook)
                task = threads.submit(_run, notebook, pipeline, own, kernels, source, progress.cells)
                running[task] = notebook, time.time()
                say(notebook, "started")
            if not running:
                break
            ended, _ = wait(running, timeout=0.1, return_when=FIRST_COMPLETED)
            progress.look()
            if signals and not kernels:  # nothing is there to be saved, and imports may take a while
                source.process.kill()
            if signals and deadline == math.inf:
                progress.say(f"{signals[0].name}: trainings save themselves, in {grace:.0f} s at most")
                deadline = time.monotonic() + grace
            for name, kernel in [*kernels.items()]:
                memory[name] = max(memory[name], _memory(kernel))
                if time.monotonic() > deadline:
                    kernel.kill()
                elif signals and name not in told:
                    kernel.terminate()
                    told.add(name)
            for one in ended:
                (notebook, began), error = running.pop(one), one.exception()
                kernels.pop(notebook.name, None)
                if isinstance(error, KeyboardInterrupt) and not signals:
                    signals.append(signal.SIGTERM)
                word = "done" if error is None else "stopped" if signals else "failed"
                took, whole = round(time.time() - began, 1), round(progress.end(notebook), 1)
                say(notebook, f"{word} after {clock(took)}")
                if word == "failed":
                    progress.say(f"unmask: {error}", sys.stderr)
                if word == "done":
                    pipeline.finish(notebook, took)
                    left.remove(notebook.name)
                if word != "stopped":
                    ran = {"started": utc(began), "wall_seconds": took, "whole_seconds": whole}
                    ran |= {"peak_memory_bytes": memory[notebook.name], "exit_status": int(word == "failed")}
                    pipeline.record(notebook, ran, about)
    if signals:  # if they came at the very end, another seed may be next
        raise KeyboardInterrupt(signals[0])
    if left:
        raise RuntimeError(f"not done: {', '.join(sorted(left))}")


class Provisioner(LocalProvisioner):
    """Forks a kernel where that is possible, and starts one elsewhere."""

    source: Kernels

    async def launch_kernel(self, cmd: list[str], **options: Any) -> dict[str, Any]:
        try:
            arguments, log = cmd[cmd.index("-f") :], options["stdout"].name
            self.process = self.source.start(arguments, options["cwd"], options["env"], log)
        except OSError:
            return await super().launch_kernel(cmd, **options)
        self.pid = self.pgid = self.process.pid
        return self.connection_info


def _run(
    notebook: Notebook,
    pipeline: Pipeline,
    environment: dict[str, str],
    kernels: dict[str, Process],
    source: Kernels,
    cells: Counter[str],
) -> None:
    """Has papermill execute a notebook, which it writes while it runs; what is printed goes to a log, too.

    Args:
        cells: counts those that have begun.

    Raises: RuntimeError that says why it failed; KeyboardInterrupt if its kernel was told to stop.
    """
    mirror.require(pipeline.preset, {*notebook.reads} & {*mirror.STUDIES})
    name, folders, reason, stopped = notebook.name, pipeline.folders, "", False
    parameters = {"preset": pipeline.preset.name, "overrides": pipeline.overrides}
    parameters["run"] = folders.artifacts.name
    executed, path = folders.executed / notebook.path.name, folders.logs / f"{name}.log"
    for folder in (folders.executed, folders.logs):
        folder.mkdir(parents=True, exist_ok=True)
    # From here on the outputs are neither the old nor the new ones, and what is drawn no more must not stay.
    (folders.artifacts / name / "done.json").unlink(missing_ok=True)
    for figure in folders.results.glob(f"figures/{name}-*"):
        figure.unlink()
    written = naming(f"{path} or {executed}")  # papermill writes both
    with (
        written,
        path.open("w"),  # empties it; then papermill and the kernel append
        path.open("a", encoding="utf8") as log,
        tempfile.TemporaryDirectory() as sockets,
    ):

        class Manager(AsyncKernelManager):
            """This interpreter's, whatever kernels its user has."""

            kernel_spec = KernelSpec(**get_kernel_dict())

            async def start_kernel(self, **options: Any) -> None:
                options |= {"cwd": folders.notebooks, "env": environment, "stdout": log, "stderr": log}
                self.provisioner = Provisioner(kernel_id=name, kernel_spec=self.kernel_spec, parent=self)
                self.provisioner.source = source
                await super().start_kernel(**options)
                kernels[name] = self.provisioner.process

        # Not ports: of two kernels that look for a free one at once, one may bind what the other chose.
        transport = Config(KernelManager={"transport": "ipc", "ip": f"{sockets}/kernel"})
        options = {"kernel_name": "python3", "language": "python", "kernel_manager_class": Manager}
        options |= {"config": transport, "stdout_file": log, "stderr_file": log}
        options |= {"progress_bar": False, "record_timing": False, "start_timeout": 600}
        options["coalesce_streams"] = True  # of a progress bar its last state alone
        options["on_cell_execute"] = lambda **_: cells.update([name])
        try:
            execute_notebook(notebook.path, executed, parameters, **options)
        except PapermillExecutionError as error:
            print(error, file=log)
            stopped = error.ename == "TrainingStopped"
            line = error.source.strip().partition("\n")[0]
            reason = f" in cell {error.exec_count} (`{line}`)\n  {error.ename}: {strip_color(error.evalue)}"
        except RuntimeError as error:  # the kernel died
            status = kernels[name].returncode
            stopped = status == -signal.SIGTERM
            why = ": killed, usually for lack of memory" if status == -signal.SIGKILL else ""
            reason = f"\n  {error}, exit status {status}{why}"
    _clean(executed, folders)
    if reason:
        told = f"notebook {executed.name} failed{reason}\n  log: {path}\n  as far as it got: {executed}"
        raise (KeyboardInterrupt if stopped else RuntimeError)(told)
    if name == PAGE:
        publish(executed, folders.results)


def _memory(kernel: Process) -> int:
    """Bytes that a kernel has used at most; 0 once it has ended."""
    try:
        status = Path(f"/proc/{kernel.pid}/status").read_text()
    except OSError:
        return 0
    return 1024 * int((re.findall(r"VmHWM:\s*(\d+)", status) or [0])[0])


def _clean(path: Path, folders: Folders) -> None:
    """Takes from the executed notebook what a vanished progress bar left, and this machine's paths: they
    become those of the checkout."""
    notebook = read_json(path)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = [one for one in cell["outputs"] if "".join(one.get("text", "-")).strip()]
    text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    for folder, name in (
        (f"{folders.artifacts.parent}", "artifacts"),
        (f"{folders.root}/", ""),
        (f"{folders.root}", "."),
    ):
        begins = r"((?<![\w./-])|(?<=\\[nrt])|(?<=\\u001b\[\dm)|(?<=\\u001b\[\d\dm))"  # colours, too
        whole = begins + re.escape(folder) + r"(?![\w-]|\.\w)" * bool(name)
        text = re.sub(whole, name, text)
    write_atomic(path, text)
