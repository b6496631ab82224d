"""The pipeline: which notebooks there are, which of them are due and why, and what numbers were made with.

A notebook says in its metadata what it depends on:

    "unmask": {"needs": ["00_backbone"], "reads": ["data", "pair"]}

`needs` are the notebooks whose output it reads, `takes` those whose output it reads where they ran, `reads`
the sections of the preset. Where a run is repeated with other seeds, notebooks with "seeds": "once" are left
out, and so are those with "seeds": "pooled", which read what all of these runs saved.

A notebook is done when its done.json names what its outputs depend on now. `execute` runs those that are due.
"""

import datetime
import importlib.metadata
import itertools
import os
import platform
import re
import subprocess
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from unmask.children import ENVIRONMENT
from unmask.config import ParallelConfig, resolved
from unmask.store import (
    artifacts_root,
    code_fingerprint,
    fingerprint,
    nearest,
    read_json,
    sha256,
    visible,
    write_json,
)
from unmask_study.run import Folders
from unmask_study.settings import Preset, comparable

# Of the library: what computes nothing. Comments, docstrings and layout do not count either.
ASIDE = tuple(
    f"unmask_study/{name}.py"
    for name in ("pipeline", "execute", "kernels", "plan", "progress", "cli", "mirror", "__main__")
)
ASIDE += ("unmask/children.py", "unmask/data/hub.py")
PACKAGES = ("torch", "transformers")  # another version of these computes other numbers
PAGE = "12_report"  # the notebook that is published as the report
Name = str | None  # of a notebook, or its number


class Notebook(NamedTuple):
    """One notebook of the pipeline."""

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


def discover(folder: Path) -> list[Notebook]:
    """Every `NN_*.ipynb` of a folder that says what it depends on, in the order of their names, in which they
    can run; others, and JupyterLab's copies ("…-Copy1"), are the user's own."""
    paths = sorted(folder.glob("[0-9][0-9]*_*.ipynb"))
    documents = {path: read_json(path) for path in paths if "-Copy" not in path.stem}
    return [_read(path, document) for path, document in documents.items() if "unmask" in document["metadata"]]


def _read(path: Path, document: dict[str, Any]) -> Notebook:
    about = document["metadata"]["unmask"]
    code = [("".join(cell["source"]), cell) for cell in document["cells"] if cell["cell_type"] == "code"]
    # The run gives the parameters, whatever was last tried by hand.
    cells = [source for source, cell in code if "parameters" not in cell["metadata"].get("tags", [])]
    needs, takes, reads = (tuple(about.get(key, ())) for key in ("needs", "takes", "reads"))
    seeds = about.get("seeds", "each")
    return Notebook(path.stem, path, needs, takes, reads, seeds, fingerprint(cells, about))


class Pipeline:
    """The notebooks of a run, in running order, and what the outputs of each depend on now.

    Args:
        folders: of the run.
        preset, overrides: with these values of it changed, as the notebooks will read it.
        data: what the corpus is made of, see `unmask.data.sources.identity`; counts for those that read it.
    """

    def __init__(self, folders: Folders, preset: Preset, overrides: dict[str, Any], data: str = ""):
        self.folders, self.preset, self.overrides = folders, preset, overrides
        self.notebooks = discover(folders.notebooks)
        sections = {name: fingerprint(*_content(section)) for name, section in resolved(preset).items()}
        self.depends_on: dict[str, dict[str, str]] = {}  # notebook → all that counts
        library = folders.library
        code = (path for path in visible(library) if path.relative_to(library).as_posix() not in ASIDE)
        shared = {"library": code_fingerprint(*code)}
        shared |= {name: importlib.metadata.version(name) for name in PACKAGES}
        for one in self.notebooks:
            taken = [name for name in one.takes if name in self.depends_on and folders.done(name)]
            pooled = folders.repetitions(one.inputs) if one.seeds == "pooled" else {}
            self.depends_on[one.name] = (
                shared
                | {"notebook": one.code, "data": data if "data" in one.reads else ""}
                | {f"preset section {name}": sections.get(name, "") for name in one.reads}
                | {f"input {name}": fingerprint(self.depends_on[name]) for name in (*one.needs, *taken)}
                | {f"run {name}": made for name, made in pooled.items()}
            )

    def select(self, start: Name = None, stop: Name = None, only: Name = None, *, again: Any = None):
        """The notebooks from `start` to `stop`, or `only` some, given as numbers ("03") or names
        ("03_contextual") with commas between; of those `again`, with another seed, only what each seed runs.

        Raises: ValueError if there is no notebook of that name, or none between the two.
        """
        first = 0 if start is None else self._find(start)
        last = len(self.notebooks) - 1 if stop is None else self._find(stop)
        if last < first or (only is not None and (start or stop)):
            raise ValueError("no notebook is left: give --from before --to, or --only alone")
        wanted = range(first, last + 1) if only is None else {*map(self._find, only.split(","))}
        selected = [self.notebooks[index] for index in sorted(wanted)]
        return [one for one in selected if one.seeds == "each" or not again]

    def _find(self, text: str) -> int:
        for index, one in enumerate(self.notebooks):
            if text in (one.name, one.number):
                return index
        raise ValueError(f"no notebook {text!r}{nearest(text, self.depends_on)}")

    def why_due(self, notebook: Notebook) -> str:
        """Why a notebook has to run, in a few words; empty if it is done and nothing that counts changed."""
        done = self.folders.done(notebook.name)
        if not done:
            return "not done yet"
        executed = self.folders.executed / notebook.path.name
        if not executed.is_file() or self._saved(notebook) != done.get("saved"):
            return "executed notebook or results are missing, or others'"
        old, new = done["depends_on"], self.depends_on[notebook.name]
        return ", ".join(f"{key} changed" for key in sorted(old | new) if old.get(key) != new.get(key))

    def plan(self, selected: Sequence[Notebook], *, force: bool = False) -> dict[Notebook, str]:
        """The selected notebooks that have to run, in running order, and why.

        Raises:
            ValueError: one of them needs the output of a notebook that never ran and is not selected.
        """
        due: dict[Notebook, str] = {}
        done = {one.name for one in self.notebooks if self.folders.done(one.name)}
        for one in selected:
            new = [other.name for other in due if other.name in {*one.takes} - done]
            why = "forced" if force else self.why_due(one)
            if why := why or ", ".join(f"input {name} is new" for name in new):
                due[one] = why
        for one in due:
            if missing := sorted({*one.needs} - done - {other.name for other in selected}):
                needs = f"{one.name} needs the output of {', '.join(missing)}, which is not done"
                raise ValueError(f"{needs}: --to {one.number} runs all that is due before it, too")
        return due

    def finish(self, notebook: Notebook, seconds: float) -> None:
        """Marks a notebook done, with its inputs as they were used: one that was out of date keeps it due."""
        made = {name: self.folders.done(name).get("depends_on") for name in notebook.inputs}
        used = {f"input {name}": fingerprint(depends_on) for name, depends_on in made.items() if depends_on}
        done = {"depends_on": self.depends_on[notebook.name] | used, "finished": utc(time.time())}
        done |= {"wall_seconds": seconds, "saved": self._saved(notebook)}
        write_json(self.folders.artifacts / notebook.name / "done.json", done)

    def _saved(self, notebook: Notebook) -> str:
        """Checksum of what a notebook saved; empty if that is nothing."""
        path = self.folders.results / f"{notebook.name}.json"
        return sha256(path) if path.is_file() else ""

    def describe(self, command: str) -> dict[str, Any]:
        """What all notebooks that run now are made with, for provenance.json: code, parameters, versions,
        hardware.

        Args:
            command: the command that was given.
        """
        git = ("git", "-C", str(self.folders.root))
        output = (":(exclude)results", ":(exclude,glob)papermill_runs/*/*.ipynb")  # of this run and of others
        return {
            "run": self.folders.artifacts.name,
            "command": command,
            "commit": _said(*git, "rev-parse", "HEAD"),
            "dirty": bool(_said(*git, "status", "--porcelain", "--", ".", *output)),
            "python": platform.python_version(),
            "versions": dict(
                sorted((str(one.name), one.version) for one in importlib.metadata.distributions())
            ),
            "hardware": hardware(),
            "overrides": self.overrides,
            "preset": resolved(self.preset),
        }

    def record(self, notebook: Notebook, ran: dict[str, Any], about: dict[str, Any]) -> None:
        """Writes how one notebook ran beside what holds for the whole run, in provenance.json. Others'
        records stay, and keep the preset values that differed when they ran. Where it used trainings that
        were there, what was prepared for them was there, too: a longer whole time from before stays."""
        path = self.folders.results / "provenance.json"
        earlier, now = read_json(path), comparable(about["preset"])
        before, others = comparable(earlier.get("preset", {})), earlier.get("stages", {})
        for other in others.values():
            made = before | other.get("otherwise", {})
            other["otherwise"] = {key: made[key] for key in made.keys() & now.keys() if made[key] != now[key]}
        last, here = others.get(notebook.name, {}), processor(about["hardware"])
        same = not any(key.partition(".")[0] in notebook.reads for key in last.get("otherwise", ()))
        if same and last.get("processor") == here and ran["whole_seconds"] > ran["wall_seconds"] + 1:
            ran = ran | {"whole_seconds": max(ran["whole_seconds"], last["whole_seconds"])}
        needed = [others[name] for name in notebook.needs if name in others]
        inherited = {key for other in needed for key in other.get("reads", ())}
        # What it needs may have been made with other values.
        old = {key: value for other in needed for key, value in other["otherwise"].items()}
        others[notebook.name] = {
            **ran,
            "commit": about["commit"],
            "dirty": about["dirty"],
            "processor": here,
            "reads": sorted({*notebook.reads, *inherited}),  # what it needs included
            "otherwise": {key: value for key, value in old.items() if key.partition(".")[0] in inherited},
            "data": self.depends_on[notebook.name]["data"],
            "corpus_hash": self._corpus_hash(notebook),
        }
        write_json(path, about | {"stages": dict(sorted(others.items()))})

    def _corpus_hash(self, notebook: Notebook) -> str | None:
        """`Corpus.hash` of what a notebook has read; None if it read no corpus."""
        from unmask.data.corpus import Corpus  # noqa: PLC0415 (with `datasets`, which takes a second)

        data, elsewhere = self.depends_on[notebook.name]["data"], Path(os.environ.get("UNMASK_CORPUS", ""))
        folder = elsewhere if elsewhere.name == data else artifacts_root() / "data" / data
        known = data and (folder / "card.json").is_file()
        return Corpus(folder, self.preset.data.families).hash if known else None


def _content(section: Any) -> list[Any]:
    """A section, and the files that it names or that lie in directories that it names."""
    values = section.values() if isinstance(section, dict) else ()
    named = [one for value in values for one in (value if isinstance(value, list | tuple) else [value])]
    paths = [Path(one) for one in named if isinstance(one, str) and os.path.isabs(one)]
    files = [file for path in paths for file in ([path] if path.is_file() else visible(path))]
    return [section, *([str(file), *_version(file)] for file in sorted(files))]


def _version(file: Path) -> list[Any]:
    """What changes with a file's content; of a large one, which is not read, size and time."""
    about = file.stat()
    return [sha256(file)] if about.st_size < 2**20 else [about.st_size, about.st_mtime_ns]


def processor(about: dict[str, Any]) -> dict[str, Any]:
    """Of `hardware` what decides how long a notebook takes."""
    return {key: about[key] for key in ("cpu", "bf16", "cores", "gpus")}


def hardware() -> dict[str, Any]:
    """Processor, whether it has bf16 instructions (precision "bf16" is float32 where it has none), cores that
    this process may use, memory, and the GPUs' names."""
    from joblib import cpu_count  # noqa: PLC0415 (with numpy, for which a question need not wait)

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


def _said(*command: str) -> str:
    """What a tool prints; nothing where it fails or does not exist."""
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True).strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return ""


def utc(seconds: float) -> str:
    """Seconds since the epoch as date and time."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds")


def clock(seconds: float) -> str:
    """Seconds as hours, minutes and seconds: 0:02:10."""
    return str(datetime.timedelta(seconds=round(seconds)))


# ---- what trainings find on this machine


def check_machine(preset: Preset, gpus: int | None, jobs: int) -> None:
    """Makes sure that the trainings of a run can be started here.

    Args:
        gpus, jobs: what --gpus and --jobs said; None: not given.
    Raises: ValueError if the machine has too few GPUs, trainings on several of them would run side by
        side, or nothing starts the other machines' processes.
    """
    parallel = preset.parallel
    machines, found = parallel.num_machines, min(len(gpu_names()), len(_visible()))
    here = parallel.per_machine
    if machines > 1 and not parallel.launcher:
        need = f"trainings on {machines} machines need parallel.launcher, the command that starts them, see"
        raise ValueError(f"{need} papermill_runs/slurm.sbatch; for one: --set parallel.num_machines=1")
    if here > max(found, 1) and (found or gpus):
        raise ValueError(
            f"{here} GPUs are needed on this machine, and it has {found}: --gpus {max(found, 1) * machines} "
            f"uses what is there; --set parallel.num_processes={here} without --gpus trains on CPUs"
        )
    if jobs > 1 and parallel.num_processes > 1 and (found or gpus or parallel.launcher):
        raise ValueError("a training on several GPUs takes all of them: --jobs 1")


def own_gpus(parallel: ParallelConfig) -> dict[str, str]:
    """What hides the GPUs of this machine that a run was not given, for evaluation as for trainings."""
    here, every = parallel.per_machine, _visible()
    return {"CUDA_VISIBLE_DEVICES": ",".join(every[:here])} if len(every) > here else {}


def _visible() -> list[str]:
    """This machine's GPUs, or those of them that CUDA_VISIBLE_DEVICES leaves."""
    every = ",".join(map(str, range(len(gpu_names()))))
    named = os.environ.get("CUDA_VISIBLE_DEVICES", every).split(",")
    return list(itertools.takewhile(lambda one: one and not one.startswith("-"), named))  # CUDA's own rule


def kernel_environment(folders: Folders) -> dict[str, str]:
    """Variables for the kernels of a run, beside this process's own."""
    paths = [str(folders.library), os.environ.get("PYTHONPATH", "")]
    own = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONHASHSEED": "0",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",  # figures go into the notebook
        "TOKENIZERS_PARALLELISM": "false",  # it deadlocks, or warns, in processes that fork
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # one for each model would bury the rest
        "PYTHONWARNINGS": "ignore:IProgress not found",  # plain text bars are what is wanted
    }
    # Folders; notebooks run in another one than this process.
    named = ("UNMASK_ARTIFACTS", "UNMASK_MIRROR", "UNMASK_CORPUS")
    own |= {name: os.path.abspath(os.environ[name]) for name in named if os.environ.get(name)}
    return ENVIRONMENT | os.environ | own
