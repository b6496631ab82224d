"""Which notebooks a run has, which of them are due and why, and what each was made with.

A notebook says in its metadata what it depends on:

    "unmask": {"needs": ["00_backbone"], "reads": ["data", "pair"]}

`needs` are the notebooks whose output it reads, `reads` the sections of the preset. Where a run is repeated
with other seeds, notebooks with "seeds": "once" are left out, and so are those with "seeds": "pooled", which
read what the notebooks before them saved, in all of these runs.

A notebook is done when its done.json names what its outputs depend on now.
"""

import importlib.metadata
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from unmask.config import resolved
from unmask.store import code_fingerprint, fingerprint, nearest, read_json, sha256, visible, write_json
from unmask_study import estimate
from unmask_study.run import Folders, seed_runs
from unmask_study.settings import Preset, comparable

# Of the library: what computes nothing. Comments, docstrings and layout do not count either.
ASIDE = {"unmask/children.py", "unmask/data/hub.py", "unmask_study/__main__.py"}
ASIDE |= {
    f"unmask_study/{name}.py" for name in ("cli", "estimate", "execute", "mirror", "pipeline", "runner")
}
Name = str | None  # of a notebook, or its number
PACKAGES = ("torch", "transformers")  # another version of these computes other numbers
LOCAL = {"backbone": ["checkpoint"], "clusters": ["surrogate"], "retrieval": ["log", "pool"]}  # may be paths


@dataclass(eq=False)
class Notebook:
    """One notebook of the pipeline."""

    path: Path
    code: str  # hash of the code cells' sources: outputs, execution counts and prose do not count
    after: Sequence[str]  # the notebooks that come before it, where they are to run
    needs: Sequence[str] = ()
    reads: Sequence[str] = ()
    seeds: str = "each"  # where a run has several seeds: "each", "once" or "pooled"

    @property
    def name(self) -> str:
        """For instance "02_pair"."""
        return self.path.stem


def discover(folder: Path) -> list[Notebook]:
    """Every `NN_*.ipynb` of a folder that says what it depends on, in the order of their names, in which they
    can run; others, and JupyterLab's copies ("…-Copy1"), are the user's own."""
    notebooks: list[Notebook] = []
    for path in sorted(folder.glob("[0-9][0-9]*_*.ipynb")):
        document = read_json(path) if "-Copy" not in path.stem else {"metadata": {}}
        if about := document["metadata"].get("unmask"):
            cells = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
            # The run gives the parameters, whatever was last tried by hand.
            cells = [cell for cell in cells if "parameters" not in cell["metadata"].get("tags", [])]
            code = fingerprint(["".join(cell["source"]) for cell in cells], about)
            earlier = [one.name for one in notebooks]
            after = earlier if about.get("seeds") == "pooled" else about["needs"]
            notebooks.append(Notebook(path, code, after, **about))
    return notebooks


class Pipeline:
    """The notebooks of a run, in running order, and what the outputs of each depend on now.

    Args:
        folders: of the run.
        preset, overrides: with these values of it changed, as the notebooks will read it.
        data: what the corpus is made of, see `unmask.data.sources.corpus_key`; counts for those that read it.
    """

    def __init__(self, folders: Folders, preset: Preset, overrides: dict[str, Any], data: str = ""):
        self.folders, self.preset, self.overrides, self.data = folders, preset, overrides, data
        self.notebooks = discover(folders.notebooks)
        library = {path.relative_to(folders.library).as_posix(): path for path in visible(folders.library)}
        shared = {"library": code_fingerprint(*(library[name] for name in library.keys() - ASIDE))}
        shared |= {name: importlib.metadata.version(name) for name in PACKAGES}
        sections = {name: [values, _files(name, values)] for name, values in resolved(preset).items()}
        self._parts: dict[str, dict[str, str]] = {}
        for one in self.notebooks:
            parts = shared | {"notebook": one.code, "data": data if "data" in one.reads else ""}
            parts |= {f"preset section {name}": fingerprint(sections.get(name)) for name in one.reads}
            parts |= {f"input {name}": fingerprint(self._parts.get(name)) for name in one.needs}
            self._parts[one.name] = parts

    def depends_on(self, notebook: Notebook) -> dict[str, str]:
        """All that counts for a notebook, each part with its hash. Of one that pools the seeds that is also,
        for each run, what notebooks saved, scores included."""
        parts, results = {**self._parts[notebook.name]}, self.folders.results
        for folder in [results, *seed_runs(results).values()] if notebook.seeds == "pooled" else ():
            names = {*notebook.after} | ({"provenance"} if folder != results else set())
            files = [*folder.glob("*.json"), *folder.glob("scores/*")]
            hashes = sorted([file.name, sha256(file)] for file in files if file.stem in names)
            parts[f"run {folder.name}"] = fingerprint(hashes)
        return parts

    def done(self, name: str) -> dict[str, Any]:
        """What was recorded when a notebook finished; nothing where it did not finish."""
        return read_json(self.folders.artifacts / name / "done.json")

    def select(self, start: Name = None, stop: Name = None, only: Name = None, *, again: Any = None):
        """The notebooks from `start` to `stop`, or `only` some, given as numbers ("03") or names
        ("03_contextual") with commas between; of those `again`, with another seed, only what each seed runs.

        Raises: ValueError if there is no notebook of that name, or none between the two.
        """
        first = self._position(start) if start else 0
        last = self._position(stop) if stop else len(self.notebooks) - 1
        if last < first or (only is not None and (start or stop)):
            raise ValueError("no notebook is left: give --from before --to, or --only alone")
        positions = range(first, last + 1) if only is None else {*map(self._position, only.split(","))}
        selected = [self.notebooks[position] for position in sorted(positions)]
        return [one for one in selected if one.seeds == "each" or not again]

    def _position(self, text: str) -> int:
        for position, one in enumerate(self.notebooks):
            if text in (one.name, one.name.partition("_")[0]):
                return position
        raise ValueError(f"no notebook {text!r}{nearest(text, self._parts)}")

    def why_due(self, notebook: Notebook) -> str:
        """Why a notebook has to run, in a few words; empty if it is done and nothing that counts changed."""
        if not (done := self.done(notebook.name)):
            return "not done yet"
        executed = self.folders.executed / notebook.path.name
        if not executed.is_file() or self._saved(notebook) != done.get("saved"):
            return "executed notebook or results are missing, or others'"
        old, new = done["depends_on"], self.depends_on(notebook)
        return ", ".join(f"{key} changed" for key in sorted(old | new) if old.get(key) != new.get(key))

    def due(self, selected: Sequence[Notebook], *, force: bool = False) -> dict[Notebook, str]:
        """The selected notebooks that have to run, in running order, and why.

        Raises:
            ValueError: one of them needs the output of a notebook that never ran and is not selected.
        """
        due: dict[Notebook, str] = {}
        names = {one.name for one in selected}
        for one in selected:
            pools = f"pools {', '.join(other.name for other in due)}" if due and one.seeds == "pooled" else ""
            if why := "forced" if force else self.why_due(one) or pools:
                due[one] = why
                if missing := [name for name in one.needs if name not in names and not self.done(name)]:
                    needs = f"{one.name} needs the output of {', '.join(missing)}, which is not done"
                    number = one.name.partition("_")[0]
                    raise ValueError(f"{needs}: --to {number} runs all that is due before it, too")
        return due

    def _saved(self, notebook: Notebook) -> str:
        """Checksum of what a notebook saved; empty if that is nothing."""
        path = self.folders.results / f"{notebook.name}.json"
        return sha256(path) if path.is_file() else ""

    def begin(self, notebook: Notebook) -> None:
        """Takes away what the last execution left: its outputs are neither the old nor the new ones now, and
        what is drawn no more must not stay."""
        (self.folders.artifacts / notebook.name / "done.json").unlink(missing_ok=True)
        for figure in self.folders.results.glob(f"figures/{notebook.name}-*"):
            figure.unlink()

    def finish(self, notebook: Notebook) -> None:
        """Marks a notebook done, with its inputs as they were used: one that was out of date keeps it due."""
        done = {name: self.done(name) for name in notebook.needs}
        used = {f"input {name}": fingerprint(one["depends_on"]) for name, one in done.items() if one}
        made = {"depends_on": self.depends_on(notebook) | used, "saved": self._saved(notebook)}
        write_json(self.folders.artifacts / notebook.name / "done.json", made | {"finished": utc()})

    def describe(self, command: str) -> dict[str, Any]:
        """What a notebook that starts now is made with, for provenance.json: code, parameters, versions,
        hardware.

        Args:
            command: the command that was given.
        """
        git, packages = ("git", "-C", str(self.folders.notebooks)), importlib.metadata.distributions()
        output = (":(top,exclude)results", ":(top,exclude,glob)papermill_runs/*/*.ipynb")  # of all runs
        return {
            "run": self.folders.run,
            "command": command,
            "commit": _output(*git, "rev-parse", "HEAD"),
            "dirty": bool(_output(*git, "status", "--porcelain", "--", ":(top)", *output)),
            "python": platform.python_version(),
            "versions": dict(sorted((str(one.name), one.version) for one in packages)),
            "hardware": hardware(),
            "overrides": self.overrides,
            "preset": resolved(self.preset),
        }

    def record(self, notebook: Notebook, ran: dict[str, Any], about: dict[str, Any]) -> None:
        """Writes how a notebook ran beside what holds for the whole run, in provenance.json. Records that
        hold no longer, since values or data changed, go; what was made from such is not recorded.

        Args:
            ran: with "wall_seconds" and "exit_status". "whole_seconds" is added: where trainings were there,
                or begun, it counts what they had taken.
            about: from `describe`.
        """
        path, here = self.folders.results / "provenance.json", _processor(about["hardware"])
        stages = {name: one for name, one in self._records(path).items() if one["data"] in ("", self.data)}
        last, whole = stages.pop(notebook.name, {}), ran["wall_seconds"]
        if last.get("processor") == here:
            before = last["whole_seconds"]
            whole = whole + before if last["exit_status"] else max(whole, before)
        if {*notebook.needs} <= stages.keys():
            reads = {*notebook.reads}.union(*(stages[name]["reads"] for name in notebook.needs))
            made = {"whole_seconds": whole, "processor": here, "reads": sorted(reads)}
            made |= {"commit": about["commit"], "dirty": about["dirty"]}
            stages[notebook.name] = ran | made | {"data": self.data if "data" in notebook.reads else ""}
        write_json(path, about | {"stages": dict(sorted(stages.items()))})

    def _records(self, provenance: Path) -> dict[str, dict[str, Any]]:
        """The records of a provenance.json that hold with the values of the preset as they are now."""
        about = read_json(provenance)
        made, now = comparable(about.get("preset", {})), comparable(resolved(self.preset))
        changed = {key.partition(".")[0] for key in made.keys() & now.keys() if made[key] != now[key]}
        stages = about.get("stages", {}).items()
        return {name: one for name, one in stages if changed.isdisjoint(one["reads"])}

    def times(self) -> tuple[dict[str, float], set[str]]:
        """Seconds of each notebook with its trainings, and the names of those that are estimated: no record
        with these values, of a processor of this kind, tells, in this run or in the preset's own."""
        machine, seconds = hardware(), {}
        for results in (Folders(self.preset.name).results, self.folders.results):
            for name, ran in self._records(results / "provenance.json").items():
                if ran.get("processor") == _processor(machine) and not ran["exit_status"]:
                    seconds[name] = ran["whole_seconds"]
        guessed = estimate.seconds(self.preset, self.notebooks, machine)
        return guessed | seconds, guessed.keys() - seconds.keys()


def _files(section: str, values: Any) -> list[Any]:
    """What changes with the local files and directories that a section names. Of a large file, which is not
    read, size and time."""
    named = [values[key] for key in LOCAL.get(section, ())]
    paths = [Path(one) for value in named for one in (value if isinstance(value, list) else [value]) if one]
    files = sorted(file for path in paths for file in ([path] if path.is_file() else visible(path)))
    large = {file: [x.st_size, x.st_mtime_ns] for file in files if (x := file.stat()).st_size >= 2**20}
    return [[f"{file}", large.get(file) or sha256(file)] for file in files]


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


def _processor(about: dict[str, Any]) -> dict[str, Any]:
    """Of `hardware` what decides how long a notebook takes."""
    return {key: about[key] for key in ("cpu", "bf16", "cores", "gpus")}


@cache
def gpu_names() -> list[str]:
    """The GPUs of this machine, each with its memory."""
    return _output("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader").splitlines()


def _output(*command: str) -> str:
    """What a tool prints; nothing where it fails or does not exist."""
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True).strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return ""


def utc() -> str:
    """Date and time."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def clock(seconds: float) -> str:
    """Seconds as hours, minutes and seconds: 0:02:10."""
    return str(timedelta(seconds=round(seconds)))
