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
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
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

from unmask.run import GRACE
from unmask.store import write_atomic
from unmask.study import page
from unmask.study.pipeline import provenance, signals
from unmask.study.pipeline.graph import Due, Folders, PipelineError, Stage, clock, seal
from unmask.study.pipeline.machines import Slot
from unmask.study.pipeline.signals import Interrupted, on_signal

logger = logging.getLogger("papermill")
LEFTOVERS = 3.0  # seconds for what a notebook started and did not end
ECHO = (
    1.0  # seconds in which a signal is the first one again: `timeout` sends it to the process and its group
)


class NotebookError(RuntimeError):
    """A cell failed or the kernel died; the message says which, why, and where the log is."""


def run_stages(
    due: Sequence[Due],
    marks: dict[str, dict[str, Any]],
    folders: Folders,
    *,
    parameters: dict[str, Any],
    about: dict[str, Any],
    durations: dict[str, float],
    offline: bool,
    slots: Sequence[Slot] = (Slot(),),
    grace: float = GRACE,
) -> None:
    """Executes the stages that are due and records each when it is done.

    A stage starts as soon as what it needs is there and a slot is free. The notebooks are watched from
    threads, so that signals find the main thread waiting and never in the middle of something.

    Args:
        due: from `plan`, in running order.
        marks: from `expected`.
        parameters: values of the notebooks' parameters: preset, overrides, run.
        about: from `provenance.describe`.
        durations: seconds per stage of an earlier run, for the estimate.
        offline: keep the Hugging Face libraries from calling the Hub.
        slots: room for as many notebooks at once, from `machines.slots`.
        grace: seconds that trainings get to save themselves when the run is stopped.
    Raises:
        NotebookError: a notebook failed; those that ran beside it were finished, no other one was started.
        Interrupted: SIGINT, SIGTERM or SIGHUP came, or a training got SIGTERM; the kernels and what they
            started have ended. A second signal ends them at once.
    """
    for folder in (folders.artifacts, folders.executed, folders.results / "figures", folders.logs):
        folder.mkdir(parents=True, exist_ok=True)

    def begin(task: Due, slot: Slot) -> Progress:
        position, stage = due.index(task), task.stage
        rest = [durations.get(later.stage.name) for later in due[position + 1 :]]
        alone = len(slots) == 1
        title = f"[{position + 1}/{len(due)}] {stage.name}"
        return Progress(title, stage.cells, durations.get(stage.name), rest if alone else [], live=alone)

    def work(task: Due, slot: Slot, progress: Progress) -> None:
        own = parameters | {"overrides": parameters["overrides"] | slot.overrides}
        environment = slot.environment | ({"HF_HUB_OFFLINE": "1"} if offline else {})
        with progress:
            _run_stage(task.stage, marks[task.stage.name], folders, own, about, environment, progress)

    _Crew(due, slots, grace).run(begin, work)


class _Crew:
    """The stages of a run: which wait, which run in a thread of their own, and how the run ends.

    Args:
        due: in running order.
        slots: room for as many stages at once.
        grace: seconds that trainings get to save themselves when the run is stopped.
    """

    def __init__(self, due: Sequence[Due], slots: Sequence[Slot], grace: float) -> None:
        self.waiting, self.free, self.grace = list(due), list(slots), grace
        self.shared = len(slots) > 1
        self.running: dict[Future[None], tuple[Due, Slot, Progress]] = {}
        self.failures: list[BaseException] = []
        self.stopped: signal.Signals | None = None
        self.stopped_at = 0.0
        self.deadline: float | None = None  # when the stages of a stopped run are killed
        self.unfinished = False  # whether that kept a stage from ending
        self.killed: list[str] = []
        # What the main thread waits for: stages that ended, and signals. Handlers may fill such a queue.
        self.events: queue.SimpleQueue[Future[None] | signal.Signals] = queue.SimpleQueue()

    def run(
        self, begin: Callable[[Due, Slot], Progress], work: Callable[[Due, Slot, Progress], None]
    ) -> None:
        """Runs all stages, or as many as it can before a failure or a signal; raises what went wrong."""
        with on_signal(self.events.put), ThreadPoolExecutor(len(self.free)) as pool:
            try:
                while True:
                    while task := self._next():
                        slot = self.free.pop(0)
                        # The whole machine for a stage that all others wait for.
                        room = slot if self.running or self._able(task) else Slot()
                        progress = begin(task, room)
                        future = pool.submit(work, task, room, progress)
                        self.running[future] = task, slot, progress
                        future.add_done_callback(self.events.put)
                    if not self.running:
                        break
                    self._handle(self._event())
            finally:
                self._kill()  # only something unforeseen leaves any
        if self.stopped and (self.unfinished or self.waiting):
            for failure in self.failures:
                print(f"unmask: {failure}", file=sys.stderr)
            raise Interrupted(self.stopped, self.killed)
        if len(self.failures) > 1:
            raise NotebookError("\n".join(map(str, self.failures)))
        for failure in self.failures:
            raise failure

    def _next(self) -> Due | None:
        """Takes the first waiting stage that may start now; of several slots' choice, that for which most
        others wait, so that none is left to run alone at the end."""
        if self.stopped or self.failures or not self.free:
            return None
        if not (able := self._able()):
            return None
        task = max(able, key=self._awaited) if self.shared else able[0]
        self.waiting.remove(task)
        return task

    def _able(self, *begun: Due) -> list[Due]:
        """Waiting stages whose needs are met, now that some more have begun."""
        unfinished = [*self.waiting, *begun, *(task for task, *_ in self.running.values())]
        missing = {task.stage.name for task in unfinished}
        return [task for task in self.waiting if not missing.intersection(task.stage.inputs)]

    def _awaited(self, task: Due) -> int:
        """How many waiting stages need this one, directly or through others."""
        held = {task.stage.name}
        for other in self.waiting:  # in running order: after all that they need
            if held.intersection(other.stage.inputs):
                held.add(other.stage.name)
        return len(held) - 1

    def _event(self) -> Future[None] | signal.Signals | None:
        """The next event; None when the deadline has come."""
        try:
            return self.events.get(timeout=self.deadline and max(self.deadline - time.monotonic(), 0.0))
        except queue.Empty:
            return None

    def _handle(self, event: Future[None] | signal.Signals | None) -> None:
        if isinstance(event, Future):
            _, slot, progress = self.running.pop(event)
            self.free.append(slot)
            error = event.exception()
            if isinstance(error, Interrupted) and not self.stopped:
                self._stop(signal.SIGTERM)  # only its training was told
            if progress.stopped or isinstance(error, Interrupted):
                self.unfinished |= error is not None
            elif error:
                self.failures.append(error)
        elif event and not self.stopped:
            self._stop(event)
        elif event is None or time.monotonic() > self.stopped_at + ECHO:  # the time is up, or a second signal
            self.killed = self.killed or [task.stage.name for task, *_ in self.running.values()]
            self._kill()

    def _stop(self, number: signal.Signals) -> None:
        self.stopped, self.stopped_at = number, time.monotonic()
        self.deadline = self.stopped_at + self.grace
        if sys.stdout.isatty():
            _say("\n")  # the status line stays
        _say(f"{number.name}: a training saves itself, {self.grace:.0f} s at most; again to stop at once\n")
        for _, _, progress in self.running.values():
            progress.stop(self.deadline)

    def _kill(self) -> None:
        self.deadline = None
        for _, _, progress in self.running.values():
            progress.kill()


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
    if stage.name == page.NOTEBOOK:
        page.publish(executed, folders.results)
    done = folders.done(stage.name) | {"prose": mark["prose"]}
    _write_json(folders.artifacts / stage.name / "done.json", done)


class Progress(threading.Thread):
    """The status line of a running stage, the processes that it started, and their peak memory.

    On a terminal, and when it is the only one, the line is refreshed every second; else a new one is printed
    every thirty.
    """

    def __init__(
        self, title: str, cells: int, estimate: float | None, rest: Sequence[float | None], *, live: bool
    ) -> None:
        super().__init__(daemon=True, name="progress")
        self.title, self.cells, self.estimate, self.rest = title, cells, estimate, rest
        self.cell, self.source = 0, ""  # number and first line of the code cell that runs
        self.peak = 0  # bytes
        self.kernel: psutil.Process | None = None
        self.processes: set[psutil.Process] = set()  # all that were seen, the kernel included
        self.deadline: float | None = None  # on the monotonic clock: when a stopped stage is killed
        self.started = time.monotonic()
        self._ended = threading.Event()
        self._live = live and sys.stdout.isatty()

    def __enter__(self) -> Progress:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ended.set()
        self.join()
        word = "done" if kind is None else "stopped" if self.stopped or kind is Interrupted else "failed"
        self._show(
            f"{self.title} · {word} after {clock(self.elapsed)} · peak memory {self.peak / 2**30:.1f} GiB",
            end="\n",
        )

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    @property
    def stopped(self) -> bool:
        """Whether the stage was asked to stop; what goes wrong from then on is no failure."""
        return self.deadline is not None

    def run(self) -> None:
        ticks = 0
        while True:
            self._sample()
            if self._live or ticks % 30 == 0:
                self._show(self.line(), end="" if self._live else "\n")
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

    def watch(self, kernel: int) -> None:
        """Says which process is the kernel, as soon as it runs."""
        self.kernel = psutil.Process(kernel)
        if self.stopped:
            signals.send([self.kernel], signal.SIGTERM)

    def stop(self, deadline: float) -> None:
        """Asks the kernel to end. It hands this on to a training and waits for it; otherwise it ends at once.

        Only the kernel is asked: a process that gets SIGTERM from two sides, as torchrun would, gives up.
        """
        self._sample()
        self.deadline = deadline
        if self.kernel:
            signals.send([self.kernel], signal.SIGTERM)

    def kill(self) -> None:
        """Ends everything at once."""
        self._sample()
        self.deadline = time.monotonic()
        signals.send(signals.alive(self.processes.copy()), signal.SIGKILL)

    def stop_processes(self) -> None:
        """Ends every process that the stage started and that is still there."""
        self._sample()
        patience = time.monotonic() + LEFTOVERS
        signals.end(
            self.processes | self._session(), lambda: patience if self.deadline is None else self.deadline
        )

    def _sample(self) -> None:
        memory = psutil.Process().memory_info().rss
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [self.kernel, *self.kernel.children(recursive=True)] if self.kernel else []:
                self.processes.add(process)
                with contextlib.suppress(psutil.NoSuchProcess):
                    memory += process.memory_info().rss
        self.peak = max(self.peak, memory)

    def _session(self) -> set[psutil.Process]:
        """Processes of the kernel's session, also those that lost their parent before they were seen."""
        found = set()
        for process in psutil.process_iter() if self.kernel else ():
            with contextlib.suppress(OSError):
                if os.getsid(process.pid) == self.kernel.pid:
                    found.add(process)
        return found

    def _show(self, line: str, end: str) -> None:
        if self._live:
            width = shutil.get_terminal_size().columns
            line = f"\r{line[: width - 1]}\x1b[K"
        _say(line + end)


def _run_stage(
    stage: Stage,
    mark: dict[str, Any],
    folders: Folders,
    parameters: dict[str, Any],
    about: dict[str, Any],
    environment: dict[str, str],
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
                _execute(stage, partial, text, folders, parameters, environment, progress)
            except PapermillExecutionError as error:
                print(_plain("\n".join(error.traceback)), file=text)
                if error.ename == "TrainingStopped":
                    raise Interrupted(signal.SIGTERM) from None
                raise _failure(stage, error, progress, folders) from None
            except DeadKernelError:
                raise NotebookError(
                    f"notebook {stage.path.name}: the kernel died in {progress.where}\n"
                    f"  out of memory, most often: {progress.peak / 2**30:.1f} GiB were in use\n"
                    f"  log: {_shown(log, folders)}"
                ) from None
            finally:
                progress.stop_processes()
    except Exception:
        if progress.stopped:
            raise
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
    if stage.name == page.NOTEBOOK:
        page.publish(folders.executed / f"{stage.name}.ipynb", folders.results)
    keep(exit_status=0)
    partial.unlink()
    # The inputs as they were used: an input that was itself out of date keeps this stage due.
    inputs = {name: found["hash"] for name in stage.inputs if (found := folders.done(name))}
    finished = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    facts = {"finished": finished, "wall_seconds": round(progress.elapsed, 1)}
    _write_json(done, seal(mark | {"inputs": inputs}) | facts)


def _execute(
    stage: Stage,
    output: Path,
    log: TextIO,
    folders: Folders,
    parameters: dict[str, Any],
    environment: dict[str, str],
    progress: Progress,
) -> None:
    package = str(folders.library.parent)
    environment = {
        **os.environ,
        **environment,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])),
        "PYTHONHASHSEED": "0",
        "TOKENIZERS_PARALLELISM": "false",  # it deadlocks, or warns, in processes that fork
        "PYTHONWARNINGS": "ignore:IProgress not found",  # plain text bars are what is wanted
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # a warning of the debugger that nobody attaches here
    }
    environment.pop("MPLBACKEND", None)  # figures go into the notebook
    logger.setLevel(logging.CRITICAL)  # papermill reports every cell; the status line does that
    execute_notebook(
        str(stage.path),
        str(output),
        parameters=parameters,
        engine_name=Engine.name,
        kernel_name="python3",
        language="python",
        progress_bar=False,
        folder=str(folders.notebooks),  # papermill's own `cwd` would move all threads of this process
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
        folder: str,
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
            client.start_new_kernel(env=environment, cwd=folder, stdout=log, stderr=log)
            progress.watch(manager.provisioner.pid)
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


def _say(text: str) -> None:
    """Prints in one piece, because several threads do; a terminal that is gone stops nothing."""
    with contextlib.suppress(OSError):
        print(text, end="", flush=True)


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
