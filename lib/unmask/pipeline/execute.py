"""Executing notebooks: one kernel each, live progress, and nothing left behind when something goes wrong.

A notebook that finishes is cleaned, moved into papermill_runs/<run>/ and exported as HTML, and its stage is
marked done. One that fails or is interrupted leaves its log and what it got to in artifacts/<run>/logs/, and
no process.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import nbformat
import psutil
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbclient.exceptions import DeadKernelError
from nbformat import NotebookNode
from papermill import PapermillExecutionError, execute_notebook
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, NotebookExecutionManager, papermill_engines

from unmask.pipeline import provenance
from unmask.pipeline.graph import Due, Folders, PipelineError, Stage, clock, seal
from unmask.workspace import write_atomic

logger = logging.getLogger("papermill")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class NotebookError(RuntimeError):
    """A cell failed or the kernel died; the message says which, why, and where the log is."""


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop. (asyncio lets only KeyboardInterrupt and SystemExit pass.)"""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_status = 128 + number


def run_stages(
    due: Sequence[Due],
    marks: dict[str, dict[str, Any]],
    folders: Folders,
    *,
    parameters: dict[str, Any],
    about: dict[str, Any],
    durations: dict[str, float],
    offline: bool,
) -> None:
    """Executes the stages that are due, one after the other, and records each when it is done.

    Args:
        due: from `plan`, in running order.
        marks: from `expected`.
        parameters: values of the notebooks' parameters: preset, overrides, run.
        about: from `provenance.describe`.
        durations: seconds per stage of an earlier run, for the estimate.
        offline: keep the Hugging Face libraries from calling the Hub.
    Raises:
        NotebookError: a notebook failed; those before it stay done.
        Interrupted: SIGINT, SIGTERM or SIGHUP came; the kernel and what it started have ended.
    """
    for folder in (folders.artifacts, folders.executed, folders.results / "figures", folders.logs):
        folder.mkdir(parents=True, exist_ok=True)
    with _interruptible():
        for position, task in enumerate(due):
            rest = [durations.get(later.stage.name) for later in due[position + 1 :]]
            title = f"[{position + 1}/{len(due)}] {task.stage.name}"
            with Progress(title, task.stage.cells, durations.get(task.stage.name), rest) as progress:
                _run_stage(task.stage, marks[task.stage.name], folders, parameters, about, offline, progress)


def refresh(stage: Stage, mark: dict[str, Any], folders: Folders) -> None:
    """Brings the prose of an executed notebook up to date where only the prose of its source has changed."""
    executed = folders.executed / f"{stage.name}.ipynb"
    ran = nbformat.read(executed, as_version=4)
    source = nbformat.read(stage.path, as_version=4)
    count = [sum(cell.cell_type == "code" for cell in notebook.cells) for notebook in (source, ran)]
    if count[1] != count[0] + 1:  # the injected parameters
        raise PipelineError(
            f"{_shown(executed, folders)} is not as it was written: delete it to run the stage again"
        )
    code = iter([cell for cell in ran.cells if cell.cell_type == "code"])
    cells: list[NotebookNode] = []
    for cell in source.cells:
        cells.append(next(code) if cell.cell_type == "code" else cell)
        if "parameters" in cells[-1].metadata.get("tags", []):
            cells.append(next(code))
    ran.cells = cells
    write_atomic(executed, nbformat.writes(ran) + "\n")
    _export_html(ran, stage, folders)
    done = folders.done(stage.name) | {"prose": mark["prose"]}
    _write_json(folders.artifacts / stage.name / "done.json", done)


class Progress(threading.Thread):
    """The status line of the running stage, and the peak memory of everything it started.

    On a terminal the line is refreshed every second; elsewhere a new one is printed every thirty.
    """

    def __init__(self, title: str, cells: int, estimate: float | None, rest: Sequence[float | None]) -> None:
        super().__init__(daemon=True, name="progress")
        self.title, self.cells, self.estimate, self.rest = title, cells, estimate, rest
        self.cell, self.source = 0, ""  # number and first line of the code cell that runs
        self.peak = 0  # bytes
        self.processes: set[psutil.Process] = set()
        self._older = set(psutil.Process().children(recursive=True))
        self.started = time.monotonic()
        self._ended = threading.Event()
        self._tty = sys.stdout.isatty()

    def __enter__(self) -> Progress:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ended.set()
        self.join()
        word = "done" if kind is None else "stopped" if issubclass(kind, KeyboardInterrupt) else "failed"
        self._show(
            f"{self.title} · {word} after {clock(self.elapsed)} · peak memory {self.peak / 2**30:.1f} GiB",
            end="\n",
        )

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def run(self) -> None:
        ticks = 0
        while True:
            self._sample()
            if self._tty or ticks % 30 == 0:
                self._show(self.line(), end="" if self._tty else "\n")
            ticks += 1
            if self._ended.wait(1.0):
                return

    def enter_cell(self, cell: NotebookNode, cell_index: int) -> None:
        self.cell += 1
        self.source = cell.source.strip().splitlines()[0]

    @property
    def where(self) -> str:
        """For instance "cell 5 of 12 (`model = train(pairs)`)"."""
        return f"cell {self.cell} of {self.cells} (`{self.source}`)"

    def line(self) -> str:
        """For instance "[3/9] 02_pair · cell 5/12 · 02:10 elapsed · about 05:00 left (run: 18:00)"."""
        parts = [self.title, f"cell {self.cell}/{self.cells}", f"{clock(self.elapsed)} elapsed"]
        if self.estimate is None:
            parts.append("time left unknown: no earlier run to go by")
        else:
            left = max(self.estimate - self.elapsed, 0.0)
            known = [seconds for seconds in self.rest if seconds is not None]
            run = f" (run: {clock(left + sum(known))})" if len(known) == len(self.rest) > 0 else ""
            parts.append(f"about {clock(left)} left{run}")
        return " · ".join(parts)

    def stop_processes(self) -> None:
        """Ends every process that the stage started and that is still there."""
        self._sample()
        alive = [process for process in self.processes.copy() if process.is_running()]
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        for process in psutil.wait_procs(alive, timeout=3)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=3)

    def _sample(self) -> None:
        own = psutil.Process()
        memory = own.memory_info().rss
        for process in own.children(recursive=True):
            if process not in self._older:
                with contextlib.suppress(psutil.NoSuchProcess):
                    memory += process.memory_info().rss
                    self.processes.add(process)
        self.peak = max(self.peak, memory)

    def _show(self, line: str, end: str) -> None:
        if self._tty:
            width = shutil.get_terminal_size().columns
            line = f"\r{line[: width - 1]}\x1b[K"
        print(line, end=end, flush=True)


def _run_stage(
    stage: Stage,
    mark: dict[str, Any],
    folders: Folders,
    parameters: dict[str, Any],
    about: dict[str, Any],
    offline: bool,
    progress: Progress,
) -> None:
    done = folders.artifacts / stage.name / "done.json"
    partial = folders.logs / f"{stage.name}.partial.ipynb"
    failed = folders.logs / f"{stage.name}.failed.ipynb"
    log = folders.logs / f"{stage.name}.log"
    done.parent.mkdir(parents=True, exist_ok=True)
    done.unlink(missing_ok=True)  # from here on the outputs are neither the old nor the new ones
    failed.unlink(missing_ok=True)
    resumed = partial.exists()
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")

    def keep(exit_status: int) -> None:
        outcome = {
            "started": started,
            "wall_seconds": round(progress.elapsed, 1),
            "peak_memory_bytes": progress.peak,
            "exit_status": exit_status,
            "resumed": resumed,  # the time does not hold what an interrupted attempt took
            "commit": about["commit"],
            "dirty": about["dirty"],
        }
        provenance.record(folders, about, stage.name, outcome)

    try:
        if not resumed:
            log.unlink(missing_ok=True)
        with log.open("a", encoding="utf8") as text:  # the kernel's own messages go there too
            print(f"=== {stage.name}, {started}", file=text, flush=True)
            try:
                _execute(stage, partial, text, folders, parameters, offline, progress)
            except PapermillExecutionError as error:
                print(_plain("\n".join(error.traceback)), file=text)
                raise _failure(stage, error, progress, folders) from None
            except DeadKernelError:
                raise NotebookError(
                    f"notebook {stage.path.name}: the kernel died in {progress.where}\n"
                    f"  out of memory, most often: {progress.peak / 2**30:.1f} GiB were in use\n"
                    f"  log: {_shown(log, folders)}"
                ) from None
            finally:
                progress.stop_processes()
    except Interrupted:
        raise
    except Exception:
        keep(exit_status=1)
        if partial.exists():
            _write_clean(nbformat.read(partial, as_version=4), failed, folders)
            partial.unlink()
        raise
    notebook = nbformat.read(partial, as_version=4)
    notebook.metadata.papermill["input_path"] = _shown(stage.path, folders)
    notebook.metadata.papermill["output_path"] = _shown(folders.executed / f"{stage.name}.ipynb", folders)
    _write_clean(notebook, folders.executed / f"{stage.name}.ipynb", folders)
    _export_html(notebook, stage, folders)
    keep(exit_status=0)
    partial.unlink()
    # The inputs as they were used: an input that was itself out of date keeps this stage due.
    inputs = {need: folders.done(need)["hash"] for need in stage.needs}
    finished = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    facts = {"finished": finished, "wall_seconds": round(progress.elapsed, 1)}
    _write_json(done, seal(mark | {"inputs": inputs}) | facts)


def _execute(
    stage: Stage,
    output: Path,
    log: TextIO,
    folders: Folders,
    parameters: dict[str, Any],
    offline: bool,
    progress: Progress,
) -> None:
    package = str(folders.library.parent)
    environment = os.environ | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])),
        "PYTHONHASHSEED": "0",
        "TOKENIZERS_PARALLELISM": "false",  # it deadlocks, or warns, in processes that fork
        "PYTHONWARNINGS": "ignore:IProgress not found",  # plain text bars are what is wanted
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # a warning of the debugger that nobody attaches here
    }
    environment.pop("MPLBACKEND", None)  # figures go into the notebook
    if offline:
        environment["HF_HUB_OFFLINE"] = "1"
    logger.setLevel(logging.CRITICAL)  # papermill reports every cell; the status line does that
    execute_notebook(
        str(stage.path),
        str(output),
        parameters=parameters,
        engine_name=Engine.name,
        kernel_name="python3",
        language="python",
        progress_bar=False,
        cwd=str(folders.notebooks),
        environment=environment,
        log=log,
        progress=progress,
    )


class ThisInterpreter(KernelSpecManager):
    """Offers one kernel, the interpreter that runs the pipeline, whatever kernels are installed."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        metadata = {"supported_encryption": ["curve"]}
        return KernelSpec(argv=argv, display_name="Python 3", language="python", metadata=metadata)


class Engine(NBClientEngine):
    """Papermill's engine with our own kernel: this interpreter, watched, and ended in every case."""

    name = "unmask"

    @classmethod
    def execute_managed_notebook(
        cls,
        nb_man: NotebookExecutionManager,
        kernel_name: str,
        *,
        environment: dict[str, str],
        log: TextIO,
        progress: Progress,
        start_timeout: int = 60,
        **_: Any,
    ) -> None:
        manager = AsyncKernelManager(
            kernel_name=kernel_name, kernel_spec_manager=ThisInterpreter(), transport_encryption="auto"
        )
        client = PapermillNotebookClient(
            nb_man,
            km=manager,
            timeout=None,
            startup_timeout=start_timeout,
            record_timing=False,
            on_cell_execute=progress.enter_cell,
            stdout_file=log,
            stderr_file=log,
            log=logger,
        )
        try:
            # What is printed past the notebook goes to the log: crashes, warnings of native code.
            client.start_new_kernel(env=environment, stdout=log, stderr=log)
            with _watchdog(manager.provisioner.pgid):
                client.execute()
                for step in (manager.request_shutdown, manager.finish_shutdown, manager.cleanup_resources):
                    run_sync(step)()
            client.kc.stop_channels()
        finally:
            manager.cleanup_connection_file()


papermill_engines.register(Engine.name, Engine)


@contextlib.contextmanager
def _watchdog(group: int) -> Iterator[None]:
    """Kills a process group when this process is gone, even by SIGKILL: its end of the pipe closes then."""
    command = ["sh", "-c", 'read -r _; kill -s KILL -- "-$1"', "sh", str(group)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as watchdog:
        try:
            yield
        finally:
            watchdog.kill()


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Turns the signals that end a run into `Interrupted`, once: the clean-up is not interrupted."""

    def handler(number: int, frame: FrameType | None) -> None:
        for one in SIGNALS:
            signal.signal(one, signal.SIG_IGN)
        raise Interrupted(number)

    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _failure(
    stage: Stage, error: PapermillExecutionError, progress: Progress, folders: Folders
) -> NotebookError:
    reason = f"{error.ename}: {_plain(error.evalue)}".strip(": ")
    return NotebookError(
        f"notebook {stage.path.name} failed in {progress.where}\n"
        f"  {reason}\n"
        f"  log: {_shown(folders.logs / f'{stage.name}.log', folders)}\n"
        f"  notebook as far as it got: {_shown(folders.logs / f'{stage.name}.failed.ipynb', folders)}"
    )


def _write_clean(notebook: NotebookNode, path: Path, folders: Folders) -> None:
    """Writes a notebook without this machine's paths and without the history of progress bars."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = _merged_streams(cell.outputs)
    text = nbformat.writes(notebook)
    for folder, name in ((folders.artifacts.parent, "artifacts"), (folders.root, ".")):
        text = text.replace(str(folder), name)
    write_atomic(path, text + "\n")


def _merged_streams(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """One output per stream, of which each line shows its last state, as a terminal would."""
    merged: list[NotebookNode] = []
    streams: dict[str, NotebookNode] = {}
    for output in outputs:
        if output.output_type == "stream" and output.name in streams:
            streams[output.name].text += output.text
        else:
            merged.append(output)
            if output.output_type == "stream":
                streams[output.name] = output
    for output in streams.values():
        lines = output.text.replace("\x1b[A", "").split("\n")
        output.text = "\n".join(line.rstrip("\r").rpartition("\r")[2].rstrip() for line in lines)
    return [output for output in merged if output.output_type != "stream" or output.text.strip()]


def _export_html(notebook: NotebookNode, stage: Stage, folders: Folders) -> None:
    from nbconvert import HTMLExporter  # takes a second to import

    page, _ = HTMLExporter(embed_images=True).from_notebook_node(
        notebook, resources={"metadata": {"name": stage.name}}
    )
    write_atomic(folders.executed / "html" / f"{stage.name}.html", page)


def _shown(path: Path, folders: Folders) -> str:
    """A path as a reader of this checkout would type it."""
    return str(path.relative_to(folders.root)) if path.is_relative_to(folders.root) else str(path)


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_atomic(path, json.dumps(value, indent=1) + "\n")
