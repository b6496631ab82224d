"""The graph of notebooks: which there are, what each needs, and which of them are due.

A notebook says in its metadata what it depends on:

    "unmask": {"needs": ["00_backbone"], "reads": ["data", "pair"]}

`needs` are the stages whose output it reads, `reads` the sections of the preset. Where a run is repeated with
other seeds, notebooks with "seeds": "once" are left out, and so are those with "seeds": "pooled", which read
what all of these runs saved. What can be wrong with a notebook is refused here, before any kernel starts.
"""

from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import heapq
import importlib.metadata
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from unmask.run import seed_runs
from unmask.store import artifacts_root, bare, fingerprint, repository

SEEDS = ("each", "once", "pooled")  # what a notebook does where a run has several seeds
INJECTED = ("preset", "overrides", "run")  # what the pipeline sets in every notebook
# Of the library: what computes nothing.
ASIDE = (
    "study/pipeline/",
    "cli.py",
    "study/plan.py",
    "data/hub.py",
    "__main__.py",
)
PACKAGES = ("torch", "transformers")  # another version of these computes other numbers


class PipelineError(ValueError):
    """A notebook, a selection or a run that cannot work; the message says which and what would do."""


@dataclass(frozen=True)
class Folders:
    """Where the notebooks of one run come from and where its output goes."""

    root: Path  # top level of the checkout
    notebooks: Path
    artifacts: Path  # checkpoints and logs of this run
    executed: Path  # executed notebooks of this run
    results: Path  # metrics, figures and report of this run
    library: Path  # the package, whose code is an input of every stage

    @classmethod
    def of(cls, run: str, root: Path | None = None, artifacts: Path | None = None) -> Folders:
        """Folders of the run named `run`, by default in this checkout."""
        artifacts = artifacts or (artifacts_root() if root is None else root / "artifacts")
        root = root or repository()
        return cls(
            root=root,
            notebooks=root / "notebooks",
            artifacts=artifacts / run,
            executed=root / "papermill_runs" / run,
            results=root / "results" / run,
            library=root / "lib" / "unmask",
        )

    @property
    def logs(self) -> Path:
        return self.artifacts / "logs"

    def done(self, stage: str) -> dict[str, Any] | None:
        """What was recorded when `stage` finished; None where it did not finish."""
        path = self.artifacts / stage / "done.json"
        try:
            return json.loads(path.read_text(encoding="utf8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return None

    def repetitions(self, stages: Iterable[str]) -> dict[str, str]:
        """What the runs that repeat this one with other seeds made of some stages: run → hash."""
        found = {}
        for folder in seed_runs(self.artifacts).values():
            other = Folders.of(folder.name, self.root, folder.parent)
            done = {stage: mark["hash"] for stage in stages if (mark := other.done(stage))}
            found |= {folder.name: fingerprint(done)} if done else {}
        return found


@dataclass(frozen=True)
class Stage:
    """One notebook of the graph."""

    name: str  # file name without its ending, for instance "02_pair"
    path: Path
    needs: tuple[str, ...]
    takes: tuple[str, ...]  # reads their output, too, where they ran
    reads: tuple[str, ...]
    seeds: str  # of SEEDS
    code: str  # hash of the code cells' sources: outputs and execution counts do not count
    prose: str  # hash of the other cells: another wording computes nothing new
    cells: int  # code cells that will run

    @property
    def number(self) -> str:
        return self.name.partition("_")[0]

    @property
    def inputs(self) -> tuple[str, ...]:
        return (*self.needs, *self.takes)


def discover(notebooks: Path, sections: Iterable[str] | None = None) -> list[Stage]:
    """Reads and checks every `NN_*.ipynb` of a folder.

    Args:
        notebooks: the folder.
        sections: the preset's sections that `reads` may name; None: any.
    Returns: the stages in an order in which they can run; among equals, in the order of their names.
    Raises:
        PipelineError: no notebook, missing metadata or parameters, unknown need or section, or a cycle.
    """
    stages = {path.stem: _read(path) for path in sorted(notebooks.glob("[0-9][0-9]*_*.ipynb"))}
    if not stages:
        raise PipelineError(f"no notebook named NN_*.ipynb in {notebooks}")
    for stage in stages.values():
        _check_names(stage.path, "needs", stage.needs, stages)
        _check_names(stage.path, "takes", stage.takes, stages)
        if sections is not None:
            _check_names(stage.path, "reads", stage.reads, list(sections))
    sorter = TopologicalSorter({stage.name: stage.inputs for stage in stages.values()})
    try:
        sorter.prepare()
    except CycleError as error:
        raise PipelineError(
            f"the notebooks need each other in a circle: {' → '.join(error.args[1])}"
        ) from None
    ready: list[str] = []
    order: list[Stage] = []
    while sorter.is_active():
        for name in sorter.get_ready():
            heapq.heappush(ready, name)
        order.append(stages[heapq.heappop(ready)])
        sorter.done(order[-1].name)
    return order


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
    Returns: stage → {"notebook", "preset", "data", "library", "versions", "inputs", "seeds", "prose",
        "hash"}, where the hash covers all but the prose.
    """
    code = library_hash(folders.library)
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    marks: dict[str, dict[str, Any]] = {}
    for stage in stages:
        marks[stage.name] = seal(
            {
                "notebook": stage.code,
                "preset": {section: fingerprint(preset.get(section)) for section in stage.reads},
                "data": data if "data" in stage.reads else "",
                "library": code,
                "versions": versions,
                "inputs": {
                    name: marks[name]["hash"]
                    for name in stage.inputs
                    if name in stage.needs or folders.done(name)
                },
                "seeds": folders.repetitions(stage.inputs) if stage.seeds == "pooled" else {},
                "prose": stage.prose,
            }
        )
    return marks


def seal(mark: dict[str, Any]) -> dict[str, Any]:
    """Adds the hash over everything in the mark that the outputs depend on."""
    return mark | {
        "hash": fingerprint({key: value for key, value in mark.items() if key not in ("prose", "hash")})
    }


def why_due(stage: Stage, mark: dict[str, Any], folders: Folders) -> str:
    """Why a stage has to run, in a few words; empty if it is done and nothing it depends on has changed."""
    done = folders.done(stage.name)
    if done is None:
        return "never ran"
    if not (folders.executed / f"{stage.name}.ipynb").is_file():
        return "executed notebook is missing"
    reasons = []
    if done["notebook"] != mark["notebook"]:
        reasons.append("notebook changed")
    reasons += [f"preset section {name} changed" for name in _differing(done["preset"], mark["preset"])]
    if done.get("data") != mark["data"]:
        reasons.append("its data changed")
    if done["library"] != mark["library"]:
        reasons.append("library changed")
    reasons += [f"{name} is another version" for name in _differing(done["versions"], mark["versions"])]
    reasons += [f"input {name} changed" for name in _differing(done["inputs"], mark["inputs"])]
    reasons += [f"run {name} changed" for name in _differing(done.get("seeds", {}), mark["seeds"])]
    return ", ".join(reasons)


@dataclass(frozen=True)
class Due:
    """A stage that has to run, and why."""

    stage: Stage
    why: str


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
    available = {stage.name for stage in selected} | {
        stage.name for stage in stages if folders.done(stage.name)
    }
    for task in due:
        missing = [need for need in task.stage.needs if need not in available]
        if missing:
            raise PipelineError(
                f"{task.stage.name} needs the output of {', '.join(missing)}, which never ran: "
                f"--to {task.stage.name.partition('_')[0]} runs all that is due before it, too"
            )
    return due


@functools.cache
def library_hash(library: Path) -> str:
    """Hash of what the library computes: its code without comments and docstrings, other files as they are.

    The command line, the plan, the mirror and the pipeline itself do not count: they compute nothing.
    """
    digest = hashlib.sha256()
    for path in sorted(library.rglob("*")):
        name = path.relative_to(library).as_posix()
        if not path.is_file() or "__pycache__" in name or name.startswith(ASIDE):
            continue
        content = path.read_bytes()
        digest.update(f"\0{name}\0".encode())
        digest.update(bare(content).encode() if path.suffix == ".py" else content)
    return digest.hexdigest()[:16]


def clock(seconds: float) -> str:
    """Seconds as mm:ss, or h:mm:ss from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes:02}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _read(path: Path) -> Stage:
    where = f"notebooks/{path.name}"
    try:
        notebook = json.loads(path.read_text(encoding="utf8"))
        cells = [
            (cell["cell_type"], "".join(cell["source"]), sorted(cell.get("metadata", {}).get("tags", [])))
            for cell in notebook["cells"]
        ]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise PipelineError(f"{where} is not a notebook: {error!r}") from None
    wanted = 'add "unmask": {"needs": […], "reads": […]} to the notebook\'s metadata'
    metadata = notebook.get("metadata", {}).get("unmask")
    if not isinstance(metadata, dict) or set(metadata) - {"seeds", "takes"} != {"needs", "reads"}:
        raise PipelineError(f"{where} does not say what it needs and reads: {wanted}")
    if (seeds := metadata.get("seeds", SEEDS[0])) not in SEEDS:
        raise PipelineError(f"{where}: seeds must be one of {', '.join(SEEDS)}, got {seeds!r}")
    takes = metadata.get("takes", [])
    named = metadata["needs"], metadata["reads"], takes
    if not all(isinstance(value, list) and all(isinstance(v, str) for v in value) for value in named):
        raise PipelineError(f"{where}: needs, takes and reads must be lists of names: {wanted}")
    _check_parameters(where, [source for _, source, tags in cells if "parameters" in tags])
    return Stage(
        name=path.stem,
        path=path,
        needs=tuple(metadata["needs"]),
        takes=tuple(takes),
        reads=tuple(metadata["reads"]),
        seeds=seeds,
        code=fingerprint([cell for cell in cells if cell[0] == "code"], metadata),
        prose=fingerprint([cell for cell in cells if cell[0] != "code"]),
        cells=sum(kind == "code" and bool(source.strip()) for kind, source, _ in cells)
        + 1,  # + the injected one
    )


def _check_parameters(where: str, tagged: list[str]) -> None:
    if len(tagged) != 1:
        found = "no cell is" if not tagged else f"{len(tagged)} cells are"
        raise PipelineError(
            f"{where}: {found} tagged 'parameters'; tag the one that declares {', '.join(INJECTED)}"
        )
    declared = set()
    try:
        for node in ast.parse(tagged[0]).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(targets[0], ast.Name):
                raise ValueError
            ast.literal_eval(node.value)
            declared.add(targets[0].id)
    except (ValueError, TypeError):
        line = tagged[0].splitlines()[node.lineno - 1].strip()
        raise PipelineError(
            f"{where}: the parameters cell may hold only `name: type = literal` lines, not `{line}`; "
            "move what is derived to the next cell"
        ) from None
    except SyntaxError as error:
        raise PipelineError(f"{where}: the parameters cell is not Python: {error}") from None
    missing = [name for name in INJECTED if name not in declared]
    if missing:
        raise PipelineError(
            f"{where}: the parameters cell does not declare {', '.join(missing)}, which the pipeline sets"
        )


def _check_names(path: Path, field: str, names: Iterable[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            raise PipelineError(
                f"notebooks/{path.name}: {field} names {name!r}, which does not exist{_nearest(name, known)}"
            )


def _find(stages: Sequence[Stage], text: str) -> Stage:
    for stage in stages:
        if text in (stage.name, stage.number, stage.name.removeprefix(f"{stage.number}_"), stage.path.name):
            return stage
    raise PipelineError(f"no notebook {text!r}{_nearest(text, [stage.name for stage in stages])}")


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are: {', '.join(known)}"


def _differing(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
