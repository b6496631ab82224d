"""The pipeline: which notebooks there are, which of them are due and why, and running these.

A notebook says in its metadata what it depends on:

    "unmask": {"needs": ["00_backbone"], "reads": ["data", "pair"]}

`needs` are the stages whose output it reads, `takes` those whose output it reads where they ran, `reads` the
sections of the preset. Where a run is repeated with other seeds, notebooks with "seeds": "once" are left out,
and so are those with "seeds": "pooled", which read what all of these runs saved.

A stage is done when its done.json matches all that its outputs depend on. Those that are due run in processes
of their own, `execute`.
"""

import datetime
import importlib.metadata
import itertools
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from joblib import cpu_count

from unmask.children import ENVIRONMENT, bound, on_signal
from unmask.config import TRAINED, ParallelConfig, Preset, comparable, resolved
from unmask.run import PREEMPTED, Folders, grace_seconds
from unmask.store import code_fingerprint, fingerprint, nearest, read_json, visible, write_json

# Of the library: what computes nothing. Comments, docstrings and layout do not count either.
ASIDE = ("study/pipeline.py", "study/execute.py", "study/plan.py", "children.py", "cli.py", "__main__.py")
ASIDE += ("data/hub.py", "data/mirror.py")
PACKAGES = ("torch", "transformers")  # another version of these computes other numbers
PAGE = "12a_page"  # the notebook that is published as the report
Name = str | None  # of a notebook, or its number
Marks = dict[str, dict[str, Any]]  # stage → what its done.json says, or would say, see `seal`


class PipelineError(ValueError):
    """A notebook, a selection or a run that cannot work; the message says which and what would do."""


class Stage(NamedTuple):
    """One notebook."""

    name: str  # file name without its ending, for instance "02_pair"
    path: Path
    needs: tuple[str, ...]
    takes: tuple[str, ...]  # reads their output, too, where they ran
    reads: tuple[str, ...]
    seeds: str  # where a run has several seeds: "each", "once" or "pooled"
    code: str  # hash of the code cells' sources: outputs, execution counts and prose do not count

    @property
    def number(self) -> str:
        return self.name.partition("_")[0]

    @property
    def inputs(self) -> tuple[str, ...]:
        return (*self.needs, *self.takes)


# ---- what is due, and why


def discover(notebooks: Path) -> list[Stage]:
    """Every `NN_*.ipynb` of a folder, in the order of their names, in which they can run; JupyterLab's copies
    ("…-Copy1") are the user's own.

    Raises: PipelineError for one that does not say what it depends on.
    """
    paths = sorted(notebooks.glob("[0-9][0-9]*_*.ipynb"))
    stages = [_read(path) for path in paths if "-Copy" not in path.stem]
    for number, stage in enumerate(stages):
        if unknown := {*stage.needs} - {one.name for one in stages[:number]}:
            raise PipelineError(f"{stage.path} needs {min(unknown)}: no notebook before it has this name")
    return stages


def select(
    stages: list[Stage], start: Name = None, only: Name = None, stop: Name = None, *, again: int | None = None
) -> list[Stage]:
    """The stages from `start` to `stop`, or `only` some, given as numbers ("03") or names ("03_contextual")
    with commas between; where a run is repeated with another seed, `again`, only those that each seed
    runs.

    Raises: PipelineError if there is no notebook of that name, or none between the two.
    """
    first = 0 if start is None else _find(stages, start)
    last = len(stages) - 1 if stop is None else _find(stages, stop)
    if last < first or (only is not None and (start or stop)):
        raise PipelineError("no notebook is left: give --from before --to, or --only alone")
    wanted = range(first, last + 1) if only is None else {_find(stages, name) for name in only.split(",")}
    return [stages[i] for i in sorted(wanted) if stages[i].seeds == "each" or not again]


def expected(stages: Sequence[Stage], preset: dict[str, Any], folders: Folders, data: str = "") -> Marks:
    """What `done.json` of every stage would say if the stage ran now.

    Args:
        stages: all stages in running order.
        preset: the resolved preset: section → values.
        folders: of the run.
        data: what the corpus is made of, see `unmask.data.sources.identity`; counts for stages that read it.
    Returns: stage → what it depends on, and a hash of that, see `seal`.
    """
    library = folders.library
    code = (path for path in visible(library) if path.relative_to(library).as_posix() not in ASIDE)
    shared = {"library": code_fingerprint(*code)}
    shared |= {name: importlib.metadata.version(name) for name in PACKAGES}
    marks: Marks = {}
    for stage in stages:
        there = [one for one in stage.inputs if one in stage.needs or (one in marks and folders.done(one))]
        pooled = folders.repetitions(stage.inputs) if stage.seeds == "pooled" else {}
        marks[stage.name] = seal(
            shared
            | {"notebook": stage.code, "data": data if "data" in stage.reads else ""}
            | {f"preset section {name}": fingerprint(preset.get(name)) for name in stage.reads}
            | {f"input {name}": marks[name]["hash"] for name in there}
            | {f"run {name}": made for name, made in pooled.items()}
        )
    return marks


def seal(depends_on: dict[str, str]) -> dict[str, Any]:
    """What a stage depends on, with the hash of it all."""
    return {"depends_on": depends_on, "hash": fingerprint(depends_on)}


def why_due(stage: Stage, mark: dict[str, Any], folders: Folders) -> str:
    """Why a stage has to run, in a few words; empty if it is done and nothing it depends on has changed."""
    done = folders.done(stage.name)
    if not done:
        return "not done yet"
    saved = folders.results / f"{stage.name}.json" if done.get("saved") else folders.results
    if not ((folders.executed / f"{stage.name}.ipynb").is_file() and saved.exists()):
        return "executed notebook or results are missing"
    old, new = done.get("depends_on", {}), mark["depends_on"]
    return ", ".join(f"{key} changed" for key in sorted(old | new) if old.get(key) != new.get(key))


def plan(
    stages: Sequence[Stage], selected: Sequence[Stage], marks: Marks, folders: Folders, *, force: bool = False
) -> dict[Stage, str]:
    """The selected stages that have to run, in running order, and why.

    Raises:
        PipelineError: one of them needs the output of a stage that never ran and is not selected.
    """
    due: dict[Stage, str] = {}
    for one in selected:
        new = [s.name for s in due if s.name in one.takes and not folders.done(s.name)]
        why = "forced" if force else why_due(one, marks[one.name], folders)
        if why := why or ", ".join(f"input {name} is new" for name in new):
            due[one] = why
    available = {one.name for one in stages if one in selected or folders.done(one.name)}
    for stage in due:
        if missing := sorted({*stage.needs} - available):
            needs = f"{stage.name} needs the output of {', '.join(missing)}, which is not done"
            raise PipelineError(f"{needs}: --to {stage.number} runs all that is due before it, too")
    return due


def _read(path: Path) -> Stage:
    notebook = read_json(path)
    if "unmask" not in notebook["metadata"]:
        raise PipelineError(f'{path}: add "unmask": {{"needs": […], "reads": […]}} to its metadata')
    about = notebook["metadata"]["unmask"]
    code = [("".join(cell["source"]), cell) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    # The run gives the parameters, whatever was last tried by hand.
    cells = [source for source, cell in code if "parameters" not in cell["metadata"].get("tags", [])]
    needs, takes, reads = (tuple(about.get(key, ())) for key in ("needs", "takes", "reads"))
    return Stage(path.stem, path, needs, takes, reads, about.get("seeds", "each"), fingerprint(cells, about))


def _find(stages: Sequence[Stage], text: str) -> int:
    for index, stage in enumerate(stages):
        if text in (stage.name, stage.number, stage.name.removeprefix(f"{stage.number}_"), stage.path.name):
            return index
    raise PipelineError(f"no notebook {text!r}{nearest(text, [stage.name for stage in stages])}")


# ---- running it


def check_machine(preset: Preset, gpus: int | None, jobs: int) -> None:
    """Makes sure that the trainings of a run can be started here.

    Args:
        gpus, jobs: what --gpus and --jobs said; None: not given.
    Raises: PipelineError if the machine has too few GPUs, trainings on several of them would run side by
        side, nothing starts the other machines' processes, or layers are to be compiled for a GPU and nothing
        compiles C, with which Triton starts its kernels.
    """
    parallel, compiled = preset.parallel, [name for name in TRAINED if getattr(preset, name).compile]
    machines, found = parallel.num_machines, min(len(gpu_names()), len(_visible()))
    here = parallel.per_machine
    if machines > 1 and not parallel.launcher:
        need = f"trainings on {machines} machines need parallel.launcher, the command that starts them, see"
        raise PipelineError(f"{need} papermill_runs/slurm.sbatch; for one: --set parallel.num_machines=1")
    if here > max(found, 1) and (found or gpus):
        raise PipelineError(
            f"{here} GPUs are needed on this machine, and it has {found}: --gpus {max(found, 1) * machines} "
            f"uses what is there; --set parallel.num_processes={here} without --gpus trains on CPUs"
        )
    if jobs > 1 and parallel.num_processes > 1 and (found or gpus or parallel.launcher):
        raise PipelineError("a training on several GPUs takes all of them: --jobs 1")
    header = Path(sysconfig.get_path("include"), "Python.h")
    compilers = os.environ.get("CC", "gcc"), "clang"  # that Triton looks for
    if found and compiled and not (header.is_file() and any(map(shutil.which, compilers))):
        keys = " ".join(f"--set {name}.compile=false" for name in compiled)
        raise PipelineError(f"compiled layers need a C compiler and {header}: install both, or use {keys}")


def own_gpus(parallel: ParallelConfig) -> dict[str, str]:
    """What hides the GPUs of this machine that a run was not given, for evaluation as for trainings."""
    here, every = parallel.per_machine, _visible()
    return {"CUDA_VISIBLE_DEVICES": ",".join(every[:here])} if len(every) > here else {}


def _visible() -> list[str]:
    """This machine's GPUs, or those of them that CUDA_VISIBLE_DEVICES leaves."""
    every = ",".join(map(str, range(len(gpu_names()))))
    named = os.environ.get("CUDA_VISIBLE_DEVICES", every).split(",")
    return list(itertools.takewhile(lambda one: one and not one.startswith("-"), named))  # CUDA's own rule


def run_stages(
    due: Sequence[Stage], marks: Marks, about: dict[str, Any], environment: dict[str, str], jobs: int
) -> None:
    """Executes the stages that are due and records each when it is done.

    A stage starts as soon as what it needs is there and fewer than `jobs` others run.

    Args:
        due: from `plan`, in running order.
        marks: from `expected`.
        about: from `describe`; holds the notebooks' parameters (preset, overrides, run), and so the folders.
        environment: variables for the notebooks, beside this process's own.
    Raises:
        RuntimeError: notebooks failed, for the reasons that were printed when they did; those that need
            nothing of them were done.
        KeyboardInterrupt: SIGINT or SIGTERM came, or a training got SIGTERM; the kernels and what they
            started have ended. Its argument is the signal.
    """
    folders = Folders(about["run"])
    for folder in (folders.executed, folders.logs):
        folder.mkdir(parents=True, exist_ok=True)
    stages, environment = {stage.name: stage for stage in due}, _environment(folders) | environment
    # Notebooks that run side by side share the cores.
    share = {"OMP_NUM_THREADS": str(max(about["hardware"]["cores"] // jobs, 1))} | environment
    parameters = {"preset": about["preset"]["name"]} | {key: about[key] for key in ("overrides", "run")}
    sorter = TopologicalSorter({name: stages.keys() & stage.inputs for name, stage in stages.items()})
    sorter.prepare()
    ready, running, signals, grace, deadline = [], [], [], grace_seconds(), math.inf
    with on_signal(signals.append):
        while sorter.is_active():
            ready = sorted([*ready, *sorter.get_ready()])
            while ready and len(running) < jobs and not signals:
                stage = stages[ready.pop(0)]
                alone = not (ready or running)
                running.append(_start(stage, folders, parameters, environment if alone else share))
                _say(stage, due, "started")
            if not running:
                break
            time.sleep(0.1)  # between two looks at the notebooks that run
            deadline = _stop(running, signals, grace, deadline)
            for one in [one for one in running if one.ended()]:
                running.remove(one)
                word = _end(one, signals)
                _say(one.stage, due, f"{word} after {clock(one.seconds)}")
                if word == "done":
                    _finish(one, marks[one.stage.name], folders)
                    sorter.done(one.stage.name)
                    del stages[one.stage.name]
                if word != "stopped":
                    _record(one, marks[one.stage.name], about, folders)
    if signals:  # if they came at the very end, another seed may be next
        raise KeyboardInterrupt(signals[0])
    if stages:
        raise RuntimeError(f"not done: {', '.join(stages)}")


@dataclass
class _Child:
    """A notebook in a process of its own."""

    stage: Stage
    process: subprocess.Popen
    started: float  # seconds since the epoch
    seconds: float = 0.0
    peak: int = 0  # bytes of memory, of the largest process

    def ended(self) -> bool:
        pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
        if pid:
            self.process.returncode = os.waitstatus_to_exitcode(status)
            self.peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            self.seconds = round(time.time() - self.started, 1)
        return pid != 0


def _start(stage: Stage, folders: Folders, parameters: dict[str, Any], environment: dict[str, str]) -> _Child:
    # From here on the outputs are neither the old nor the new ones, and what is drawn no more must not stay.
    (folders.artifacts / stage.name / "done.json").unlink(missing_ok=True)
    for figure in folders.results.glob(f"figures/{stage.name}-*"):
        figure.unlink()
    command = bound([sys.executable, "-m", "unmask.study.execute", stage.name, json.dumps(parameters)])
    options = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    options["start_new_session"] = True  # Ctrl-C is for the run, which hands it on
    process = subprocess.Popen(command, cwd=folders.notebooks, env=environment, **options)
    return _Child(stage, process, time.time())


def _end(one: _Child, signals: list[signal.Signals]) -> str:
    """How a notebook ended: done, failed, or stopped because the run, or its training alone, was told to."""
    status, said = one.process.returncode, one.process.stderr.read().strip()
    if status == PREEMPTED and not signals:
        signals.append(signal.SIGTERM)
    if status and not signals:
        why = said or f"notebook {one.stage.name} was killed, exit status {status}"
        print(f"unmask: {why}", file=sys.stderr, flush=True)
    return "done" if status == 0 else "stopped" if signals else "failed"


def _say(stage: Stage, due: Sequence[Stage], text: str) -> None:
    print(f"[{due.index(stage) + 1}/{len(due)}] {stage.name} · {text}", flush=True)


def _stop(running: list[_Child], signals: list[signal.Signals], grace: float, deadline: float) -> float:
    """Passes on the first signal, and kills what still runs at the deadline; returns the deadline."""
    number = None
    if signals and deadline == math.inf:
        print(f"{signals[0].name}: trainings save themselves, in {grace:.0f} s at most", flush=True)
        deadline, number = time.monotonic() + grace, signal.SIGTERM
    elif time.monotonic() > deadline:
        number = signal.SIGKILL
    for one in running if number else ():
        os.kill(one.process.pid, number)
    return deadline


def _environment(folders: Folders) -> dict[str, str]:
    """Of the notebooks' processes."""
    paths = [str(folders.library.parent), os.environ.get("PYTHONPATH", "")]
    own = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONHASHSEED": "0",
        "JUPYTER_PREFER_ENV_PATH": "1",  # this interpreter's kernel before a user's own
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",  # figures go into the notebook
        "TOKENIZERS_PARALLELISM": "false",  # it deadlocks, or warns, in processes that fork
        "PYTHONWARNINGS": "ignore:IProgress not found",  # plain text bars are what is wanted
    }
    # Folders; notebooks run in another one than this process.
    named = ("UNMASK_ARTIFACTS", "UNMASK_MIRROR", "UNMASK_CORPUS")
    own |= {name: os.path.abspath(os.environ[name]) for name in named if os.environ.get(name)}
    return ENVIRONMENT | os.environ | own


def _finish(one: _Child, mark: dict[str, Any], folders: Folders) -> None:
    """Marks a stage done, with its inputs as they were used: one that was out of date keeps it due."""
    used = {f"input {name}": done["hash"] for name in one.stage.inputs if (done := folders.done(name))}
    facts = {"finished": _utc(time.time()), "wall_seconds": one.seconds}
    facts["saved"] = (folders.results / f"{one.stage.name}.json").is_file()
    write_json(folders.artifacts / one.stage.name / "done.json", seal(mark["depends_on"] | used) | facts)


# ---- what the numbers were made with: results/<run>/provenance.json


def describe(folders: Folders, preset: Preset, overrides: dict[str, Any], command: str) -> dict[str, Any]:
    """What holds for the whole run: code, parameters, versions, hardware.

    Args:
        overrides: the values that were changed on the command line.
        command: the command that was given.
    """
    git = ("git", "-C", str(folders.root))
    output = (":(exclude)results", ":(exclude,glob)papermill_runs/*/*.ipynb")  # of this run and of others
    return {
        "run": folders.artifacts.name,
        "command": command,
        "commit": _said(*git, "rev-parse", "HEAD"),
        "dirty": bool(_said(*git, "status", "--porcelain", "--", ".", *output)),
        "python": platform.python_version(),
        "versions": dict(sorted((str(one.name), one.version) for one in importlib.metadata.distributions())),
        "hardware": hardware(),
        "overrides": overrides,
        "preset": resolved(preset),
    }


def hardware() -> dict[str, Any]:
    """Processor, whether it has bf16 instructions (precision "bf16" is float32 where it has none), cores that
    this process may use, memory, and the GPUs' names."""
    about = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return {
        "cpu": (re.findall(r"model name\s*:\s*(.*)", about) or [platform.machine()])[0],
        "bf16": "avx512_bf16" in about or "amx_tile" in about,
        "cores": cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpu_names(),
    }


@cache
def gpu_names() -> list[str]:
    """The GPUs of this machine, each with its memory."""
    return _said("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader").splitlines()


def recorded(folders: Folders) -> dict[str, Any]:
    """What the stages of a run did when they last ran: stage → times, memory, exit status, commit."""
    return read_json(folders.results / "provenance.json").get("stages", {})


def _record(one: _Child, mark: dict[str, Any], about: dict[str, Any], folders: Folders) -> None:
    """Writes what one stage did beside what holds for the whole run. Other stages' records stay, and keep
    the preset values that differed when they ran."""
    earlier, now = read_json(folders.results / "provenance.json"), comparable(about["preset"])
    before, stages = comparable(earlier.get("preset", {})), earlier.get("stages", {})
    for record in stages.values():
        made = before | record.get("otherwise", {})
        record["otherwise"] = {key: made[key] for key in made.keys() & now.keys() if made[key] != now[key]}
    needed = [stages[name] for name in one.stage.needs if name in stages]
    inherited = {key for record in needed for key in record.get("reads", ())}
    # What it needs may have been made with other values.
    old = {key: value for record in needed for key, value in record["otherwise"].items()}
    stages[one.stage.name] = {
        "started": _utc(one.started),
        "wall_seconds": one.seconds,
        "peak_memory_bytes": one.peak,
        "exit_status": int(one.process.returncode != 0),
        "commit": about["commit"],
        "dirty": about["dirty"],
        "reads": sorted({*one.stage.reads, *inherited}),  # what it needs included
        "otherwise": {key: value for key, value in old.items() if key.partition(".")[0] in inherited},
        "data": mark["depends_on"]["data"],
    }
    write_json(folders.results / "provenance.json", about | {"stages": dict(sorted(stages.items()))})


def _said(*command: str) -> str:
    """What a tool prints; nothing where it fails or does not exist."""
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True).strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return ""


def _utc(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds")


def clock(seconds: float) -> str:
    """Seconds as hours, minutes and seconds: 0:02:10."""
    return str(datetime.timedelta(seconds=round(seconds)))
