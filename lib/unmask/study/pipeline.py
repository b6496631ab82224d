"""The pipeline: which notebooks there are, which of them are due and why, and running these.

A notebook says in its metadata what it depends on:

    "unmask": {"needs": ["00_backbone"], "reads": ["data", "pair"]}

`needs` are the stages whose output it reads, `takes` those whose output it reads where they ran, `reads` the
sections of the preset. Where a run is repeated with other seeds, notebooks with "seeds": "once" are left out,
and so are those with "seeds": "pooled", which read what all of these runs saved.

A stage is done when its done.json matches all that its outputs depend on. Those that are due run in processes
of their own, see `unmask.study.notebook`; nothing heavy is imported here.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from joblib import cpu_count

from unmask.children import SIGNALS, bound, on_signal
from unmask.config import ParallelConfig
from unmask.run import GRACE, PREEMPTED, Folders
from unmask.store import code_fingerprint, fingerprint, nearest, write_atomic
from unmask.study import provenance

SEEDS = ("each", "once", "pooled")  # what a notebook does where a run has several seeds
INJECTED = ("preset", "overrides", "run")  # what the pipeline sets in every notebook
# Of the library: what computes nothing.
ASIDE = (
    "study/pipeline.py",
    "study/notebook.py",
    "study/provenance.py",
    "study/plan.py",
    "children.py",
    "cli.py",
    "data/hub.py",
    "__main__.py",
)
PACKAGES = ("torch", "transformers")  # another version of these computes other numbers
PAGE = "12a_page"  # the notebook that is published as the report
TICK = 0.1  # seconds between two looks at the notebooks that run
INTERVAL = 30.0  # seconds between two lines about a notebook
ECHO = 1.0  # seconds in which a signal is the first one again: `timeout` sends it to a process and its group


class PipelineError(ValueError):
    """A notebook, a selection or a run that cannot work; the message says which and what would do."""


class NotebookError(RuntimeError):
    """Notebooks that failed; the message says in which cell, why, and where the logs are."""


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop.

    Args:
        number: the signal.
        killed: names of the stages that did not end in time.
    """

    def __init__(self, number: int, killed: Iterable[str] = ()) -> None:
        number = signal.Signals(number)
        self.exit_status = PREEMPTED if number == signal.SIGTERM else 128 + number
        text = f"stopped by {number.name}"
        if killed := ", ".join(killed):
            text += f"; {killed} did not end in time and lost what came after the last checkpoint"
        elif number == signal.SIGTERM:
            text = "pre-empted (SIGTERM): everything is saved"
        super().__init__(text)


def interrupt(number: signal.Signals) -> None:
    """For `on_signal`: raises Interrupted, once: the clean-up is not interrupted."""
    for one in SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    raise Interrupted(number)


@dataclass(frozen=True)
class Stage:
    """One notebook."""

    name: str  # file name without its ending, for instance "02_pair"
    path: Path
    needs: tuple[str, ...]
    takes: tuple[str, ...]  # reads their output, too, where they ran
    reads: tuple[str, ...]
    seeds: str  # of SEEDS
    code: str  # hash of the code cells' sources: outputs, execution counts and prose do not count
    cells: int  # code cells that will run

    @property
    def number(self) -> str:
        return self.name.partition("_")[0]

    @property
    def inputs(self) -> tuple[str, ...]:
        return (*self.needs, *self.takes)


@dataclass(frozen=True)
class Due:
    """A stage that has to run, and why."""

    stage: Stage
    why: str


def discover(notebooks: Path, sections: Iterable[str] | None = None) -> list[Stage]:
    """Reads and checks every `NN_*.ipynb` of a folder.

    Args:
        notebooks: the folder.
        sections: the preset's sections that `reads` may name; None: any.
    Returns: the stages in the order of their names, in which they can run.
    Raises:
        PipelineError: no notebook, missing metadata or parameters, or a need that is not an earlier notebook.
    """
    stages: dict[str, Stage] = {}
    for path in sorted(notebooks.glob("[0-9][0-9]*_*.ipynb")):
        stage = _read(path)
        _check_names(path, "needs or takes", stage.inputs, stages, "is no earlier notebook")
        _check_names(path, "reads", stage.reads, sections or stage.reads, "is no section of a preset")
        stages[stage.name] = stage
    if not stages:
        raise PipelineError(f"no notebook named NN_*.ipynb in {notebooks}")
    return list(stages.values())


def select(
    stages: Sequence[Stage], start: str | None = None, only: str | None = None, stop: str | None = None
) -> list[Stage]:
    """The stages from `start` on and up to `stop`, or `only` one, given as number ("03") or name
    ("03_contextual").

    Raises:
        PipelineError: no notebook of that name, `only` together with another, or `stop` before `start`.
    """
    if only and (start or stop):
        raise PipelineError(f"--{'from' if start else 'to'} and --only exclude each other")
    if only:
        return [_find(stages, only)]
    first = stages.index(_find(stages, start)) if start else 0
    last = stages.index(_find(stages, stop)) if stop else len(stages) - 1
    if last < first:
        raise PipelineError(
            f"--to {stop}: {stages[last].name} comes before {stages[first].name}, where --from {start} begins"
        )
    return list(stages[first : last + 1])


def repeated(stages: Sequence[Stage]) -> list[Stage]:
    """Those that a repetition of the run with other seeds executes."""
    return [stage for stage in stages if stage.seeds == "each"]


def expected(
    stages: Sequence[Stage], preset: dict[str, Any], folders: Folders, data: str = ""
) -> dict[str, dict[str, Any]]:
    """What `done.json` of every stage would say if the stage ran now.

    Args:
        stages: all stages in running order.
        preset: the resolved preset: section → values.
        folders: of the run.
        data: what the corpus is made of, see `unmask.data.sources.identity`; counts for stages that read it.
    Returns: stage → {"notebook", "preset", "data", "library", "versions", "inputs", "seeds", "hash"}.
    """
    code = library_hash(folders.library)
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    marks: dict[str, dict[str, Any]] = {}
    for stage in stages:
        there = [name for name in stage.inputs if name in stage.needs or folders.done(name)]
        marks[stage.name] = seal(
            {
                "notebook": stage.code,
                "preset": {section: fingerprint(preset.get(section)) for section in stage.reads},
                "data": data if "data" in stage.reads else "",
                "library": code,
                "versions": versions,
                "inputs": {name: marks[name]["hash"] for name in there},
                "seeds": folders.repetitions(stage.inputs) if stage.seeds == "pooled" else {},
            }
        )
    return marks


def seal(mark: dict[str, Any]) -> dict[str, Any]:
    """Adds the hash over everything in the mark."""
    return mark | {"hash": fingerprint({key: value for key, value in mark.items() if key != "hash"})}


def why_due(stage: Stage, mark: dict[str, Any], folders: Folders) -> str:
    """Why a stage has to run, in a few words; empty if it is done and nothing it depends on has changed."""
    done = folders.done(stage.name)
    if done is None:
        return "never ran"
    if not (folders.executed / f"{stage.name}.ipynb").is_file():
        return "executed notebook is missing"
    wholes = {"notebook": "notebook changed", "data": "its data changed", "library": "library changed"}
    parts = {
        "preset": "preset section {} changed",
        "versions": "{} is another version",
        "inputs": "input {} changed",
        "seeds": "run {} changed",
    }
    reasons = [text for key, text in wholes.items() if done[key] != mark[key]]
    for key, text in parts.items():
        names = sorted(done[key].keys() | mark[key].keys())
        reasons += [text.format(name) for name in names if done[key].get(name) != mark[key].get(name)]
    return ", ".join(reasons)


def plan(
    stages: Sequence[Stage],
    selected: Sequence[Stage],
    marks: dict[str, dict[str, Any]],
    folders: Folders,
    *,
    force: bool = False,
) -> list[Due]:
    """The selected stages that have to run, in running order.

    Raises:
        PipelineError: one of them needs the output of a stage that never ran and is not selected.
    """
    due = [Due(s, "forced" if force else why_due(s, marks[s.name], folders)) for s in selected]
    due = [task for task in due if task.why]
    available = {s.name for s in selected} | {s.name for s in stages if folders.done(s.name)}
    for task in due:
        if missing := [need for need in task.stage.needs if need not in available]:
            raise PipelineError(
                f"{task.stage.name} needs the output of {', '.join(missing)}, which never ran: "
                f"--to {task.stage.number} runs all that is due before it, too"
            )
    return due


@functools.cache
def library_hash(library: Path) -> str:
    """Hash of what the library computes. The command line, the plan, the mirror and the pipeline itself do
    not count, and neither do comments and docstrings."""
    names = {path.relative_to(library).as_posix(): path for path in library.rglob("*") if path.is_file()}
    return code_fingerprint(
        *(path for name, path in names.items() if "__pycache__" not in name and name not in ASIDE)
    )


def clock(seconds: float) -> str:
    """Seconds as mm:ss, or h:mm:ss from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes:02}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


@dataclass(frozen=True)
class Slot:
    """Room for one notebook at a time: what its kernel is told about its share of the machine."""

    environment: dict[str, str] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)


def slots(parallel: ParallelConfig, *, gpus: int | None, jobs: int) -> list[Slot]:
    """Shares this machine among `jobs` notebooks, once it is sure that the run can work here.

    Args:
        parallel: processes of one training, as if it had this machine for itself.
        gpus: what --gpus said; None: not given.
        jobs: notebooks that may run at once; no more than there are GPUs, where there are any.
    Raises:
        PipelineError: the machine has too few GPUs, or the options do not fit together.
    """
    processes, machines = parallel.num_processes, parallel.num_machines
    devices, here = visible_gpus(), processes // machines
    troubles = {
        f"trainings on {machines} machines need parallel.launcher, the command that starts them, see "
        "papermill_runs/slurm.sbatch; for one machine: --set parallel.num_machines=1": machines > 1
        and not parallel.launcher,
        f"--jobs {jobs}: what parallel.launcher starts needs all GPUs": jobs > 1 and parallel.launcher,
        f"--gpus {gpus}: this machine has no GPU; --set parallel.num_processes=2 trains with two CPU "
        "processes": not devices and (gpus or 1) > 1,
        f"{here} GPUs are needed on this machine, and it has {len(devices)}: --gpus "
        f"{len(devices) * machines} uses all of them": devices and here > len(devices),
    }
    for message, wrong in troubles.items():
        if wrong:
            raise PipelineError(message)
    devices = devices[:gpus]
    jobs = min(jobs, len(devices) or jobs)  # every notebook needs a GPU
    if jobs == 1:
        return [Slot()]
    if not devices:
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(cpu_count() // jobs, 1))
        return [Slot({"OMP_NUM_THREADS": threads})] * jobs
    share, overrides = len(devices) // jobs, {"parallel.num_processes": max(processes // jobs, 1)}
    chosen = [devices[start : start + share] for start in range(0, share * jobs, share)]
    return [Slot({"CUDA_VISIBLE_DEVICES": ",".join(names)}, overrides) for names in chosen]


def visible_gpus() -> list[str]:
    """GPUs that a process started here may use, named as in CUDA_VISIBLE_DEVICES."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not shutil.which("nvidia-smi") or chosen in ("", "-1"):
        return []
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    count = listing.stdout.count("GPU ") if listing.returncode == 0 else 0
    names = chosen.split(",") if chosen else map(str, range(count))
    return [name.strip() for name in names] if count else []


def run_stages(
    due: Sequence[Due],
    marks: dict[str, dict[str, Any]],
    folders: Folders,
    *,
    parameters: dict[str, Any],
    about: dict[str, Any],
    durations: Mapping[str, float],
    offline: bool,
    slots: Sequence[Slot] = (Slot(),),
    grace: float = GRACE,
) -> None:
    """Executes the stages that are due and records each when it is done.

    A stage starts as soon as what it needs is there and a slot is free.

    Args:
        due: from `plan`, in running order.
        marks: from `expected`.
        parameters: values of the notebooks' parameters: preset, overrides, run.
        about: from `provenance.describe`.
        durations: seconds per stage of an earlier run, for the estimate.
        offline: keep the Hugging Face libraries from calling the Hub.
        slots: room for as many notebooks at once, from `slots`.
        grace: seconds that trainings get to save themselves when the run is stopped.
    Raises:
        NotebookError: a notebook failed; those that ran beside it were finished, no other one was started.
        Interrupted: SIGINT, SIGTERM or SIGHUP came, or a training got SIGTERM; the kernels and what they
            started have ended. A second signal ends them at once.
    """
    for folder in (folders.artifacts, folders.executed, folders.results / "figures", folders.logs):
        folder.mkdir(parents=True, exist_ok=True)
    left, environment = {task.stage.name: task.stage for task in due}, _environment(folders, offline)
    crew = _Crew(left, [*slots], folders, parameters, environment, durations, grace)
    with on_signal(crew.received.append):
        for one in crew.run():
            if one.status == 0:
                _finish(one, marks[one.stage.name], folders)
            provenance.record(folders, about, one.stage.name, one.outcome())
    if crew.stopped and crew.left:
        for failure in crew.failures:  # of before
            _say(failure)
        raise Interrupted(crew.stopped, crew.killed)
    if crew.failures:
        raise NotebookError("\n".join(crew.failures))


@dataclass
class _Process:
    """A notebook in a process of its own."""

    stage: Stage
    slot: Slot
    title: str  # for instance "[3/9] 02_pair"
    estimate: float | None  # seconds
    child: subprocess.Popen
    resumed: bool  # the time will not hold what an interrupted attempt took
    started: float  # seconds since the epoch
    shown: float  # when its progress was last said
    seconds: float = 0.0
    status: int | None = None
    peak: int = 0  # bytes of memory, of the largest process

    def ended(self) -> bool:
        pid, status, usage = os.wait4(self.child.pid, os.WNOHANG)
        if pid:
            self.child.returncode = self.status = os.waitstatus_to_exitcode(status)
            self.peak = usage.ru_maxrss * 1024
        self.seconds = time.time() - self.started
        return pid != 0

    def line(self) -> str:
        """For instance "[3/9] 02_pair · 02:10 elapsed · about 05:00 left"."""
        left = "time left unknown: no earlier run to go by"
        if self.estimate is not None:
            left = f"about {clock(max(self.estimate - self.seconds, 0))} left"
        return f"{self.title} · {clock(self.seconds)} elapsed · {left}"

    def outcome(self) -> dict[str, Any]:
        """For the record of the run."""
        return {
            "started": _utc(self.started),
            "wall_seconds": round(self.seconds, 1),
            "peak_memory_bytes": self.peak,
            "exit_status": int(self.status != 0),
            "resumed": self.resumed,
        }


@dataclass
class _Crew:
    """The notebooks of a run: which wait, which run in processes of their own, and how they are stopped."""

    left: dict[str, Stage]  # those that are not done, by name, in running order
    free: list[Slot]
    folders: Folders
    parameters: dict[str, Any]
    environment: dict[str, str]
    durations: Mapping[str, float]
    grace: float
    running: list[_Process] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    received: list[signal.Signals] = field(default_factory=list)
    stopped: signal.Signals | None = None
    stopped_at: float = 0.0
    killed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.titles = {name: f"[{i}/{len(self.left)}] {name}" for i, name in enumerate(self.left, 1)}

    def run(self) -> Iterator[_Process]:
        """Runs all notebooks, or as many as it can before a failure or a signal.

        Yields: those that are done or have failed.
        """
        names = self.left.keys()
        sorter = TopologicalSorter({name: names & stage.inputs for name, stage in self.left.items()})
        sorter.prepare()
        ready: list[str] = []
        try:
            while True:
                ready = sorted([*ready, *sorter.get_ready()])
                while ready and self.free and not self.stopped and not self.failures:
                    name, slot = ready.pop(0), self.free.pop(0)
                    # The whole machine for a stage that all others wait for.
                    self._start(self.left[name], slot, slot if ready or self.running else Slot())
                if not self.running:
                    return
                time.sleep(TICK)
                self._stop()
                ended = [one for one in self.running if one.ended()]
                self.running = [one for one in self.running if one.status is None]
                for one in ended:
                    yield from self._end(one)
                    if one.status == 0:
                        sorter.done(one.stage.name)
                self._say_progress()
        finally:
            self._send(signal.SIGKILL)  # only something unforeseen leaves any

    def _start(self, stage: Stage, slot: Slot, room: Slot) -> None:
        executed, log = self.folders.executed / f"{stage.name}.ipynb", self.folders.logs / f"{stage.name}.log"
        done = self.folders.artifacts / stage.name / "done.json"
        resumed = executed.is_file() and not done.is_file()
        if not resumed:
            log.unlink(missing_ok=True)
        done.unlink(missing_ok=True)  # from here on the outputs are neither the old nor the new ones
        job = {
            "source": str(stage.path),
            "output": str(executed),
            "log": str(log),
            "parameters": self.parameters | {"overrides": self.parameters["overrides"] | room.overrides},
            "cells": stage.cells,
            "report": str(self.folders.results) if stage.name == PAGE else "",
            # Paths of this machine that a reader is not to see.
            "names": {str(self.folders.artifacts.parent): "artifacts", str(self.folders.root): "."},
        }
        child = subprocess.Popen(
            bound([sys.executable, "-m", "unmask.study.notebook", json.dumps(job)]),
            cwd=self.folders.notebooks,
            env=self.environment | room.environment,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the run, which hands it on
            text=True,
        )
        now, title = time.time(), self.titles[stage.name]
        self.running.append(
            _Process(stage, slot, title, self.durations.get(stage.name), child, resumed, now, now)
        )
        _say(self.running[-1].line())

    def _end(self, one: _Process) -> Iterator[_Process]:
        self.free.append(one.slot)
        if one.status == PREEMPTED and not self.stopped:
            self.received.append(signal.SIGTERM)  # only its training was told
            self._stop()
        stopped = one.status == PREEMPTED or (one.status != 0 and self.stopped)
        word = "stopped" if stopped else "failed" if one.status else "done"
        _say(f"{one.title} · {word} after {clock(one.seconds)}")
        if one.status == 0:
            del self.left[one.stage.name]
        elif not stopped:
            said = one.child.stderr.read().strip()
            log = self.folders.logs / f"{one.stage.name}.log"
            self.failures.append(said or f"notebook {one.stage.name} was killed, see {log}")
        if not stopped:
            yield one

    def _stop(self) -> None:
        """Hands on the signals that came: the first asks the notebooks to end, a later one ends them, and so
        does the end of their time."""
        now = time.monotonic()
        again = self.stopped and self.received and now > self.stopped_at + ECHO
        if self.received and not self.stopped:
            self.stopped, self.stopped_at = self.received[0], now
            _say(f"{self.stopped.name}: a training saves itself, {self.grace:.0f} s at most; again: at once")
            self._send(signal.SIGTERM)
        elif again or (self.stopped and now > self.stopped_at + self.grace):
            self.killed = self.killed or [one.stage.name for one in self.running]
            self._send(signal.SIGKILL)
        self.received.clear()

    def _send(self, number: signal.Signals) -> None:
        for one in self.running:
            os.kill(one.child.pid, number)

    def _say_progress(self) -> None:
        for one in self.running:
            if time.time() > one.shown + INTERVAL:
                one.shown = time.time()
                _say(one.line())


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # a terminal that is gone stops nothing
        print(line, flush=True)


def _environment(folders: Folders, offline: bool) -> dict[str, str]:
    """Of the notebooks' processes."""
    environment = (os.environ | {"HF_HUB_OFFLINE": "1"} if offline else dict(os.environ)) | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(folders.library.parent), os.environ.get("PYTHONPATH")])
        ),
        "PYTHONHASHSEED": "0",
        "TOKENIZERS_PARALLELISM": "false",  # it deadlocks, or warns, in processes that fork
        "PYTHONWARNINGS": "ignore:IProgress not found",  # plain text bars are what is wanted
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # a warning of the debugger that nobody attaches here
    }
    environment.pop("MPLBACKEND", None)  # figures go into the notebook
    return environment


def _finish(one: _Process, mark: dict[str, Any], folders: Folders) -> None:
    """Marks a stage done, with its inputs as they were used: one that was out of date keeps it due."""
    inputs = {name: found["hash"] for name in one.stage.inputs if (found := folders.done(name))}
    facts = {"finished": _utc(time.time()), "wall_seconds": round(one.seconds, 1)}
    text = json.dumps(seal(mark | {"inputs": inputs}) | facts, indent=1) + "\n"
    write_atomic(folders.artifacts / one.stage.name / "done.json", text)


def _utc(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds")


def _read(path: Path) -> Stage:
    try:
        notebook = json.loads(path.read_text(encoding="utf8"))
        about = notebook["metadata"]["unmask"]
        cells = [
            ("".join(cell["source"]), sorted(cell.get("metadata", {}).get("tags", [])))
            for cell in notebook["cells"]
            if cell["cell_type"] == "code"
        ]
        stage = Stage(
            name=path.stem,
            path=path,
            needs=tuple(about["needs"]),
            takes=tuple(about.get("takes", [])),
            reads=tuple(about["reads"]),
            seeds=about.get("seeds", SEEDS[0]),
            code=fingerprint(cells, about),
            cells=sum(bool(source.strip()) for source, _ in cells) + 1,  # + the injected one
        )
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise PipelineError(
            f"notebooks/{path.name} is no notebook that says what it needs and reads ({error!r}): add "
            '"unmask": {"needs": […], "reads": […]} to its metadata'
        ) from None
    _check_names(path, "seeds", [stage.seeds], SEEDS, "is not known")
    tagged = [source for source, tags in cells if "parameters" in tags]
    if len(tagged) != 1 or not all(f"{name}:" in tagged[0] for name in INJECTED):
        raise PipelineError(
            f"notebooks/{path.name}: one cell must be tagged 'parameters' and declare {', '.join(INJECTED)}"
        )
    return stage


def _check_names(path: Path, key: str, names: Iterable[str], known: Iterable[str], trouble: str) -> None:
    for name in names:
        if name not in known:
            raise PipelineError(
                f"notebooks/{path.name}: {key} {name!r}, which {trouble}{nearest(name, known)}"
            )


def _find(stages: Sequence[Stage], text: str) -> Stage:
    for stage in stages:
        if text in (stage.name, stage.number, stage.name.removeprefix(f"{stage.number}_"), stage.path.name):
            return stage
    raise PipelineError(f"no notebook {text!r}{nearest(text, [stage.name for stage in stages])}")
