"""The command line: `unmask run` executes the notebooks that are due, `unmask status` says which are.

Nothing here imports torch or papermill before there is something to run: a question is answered at once.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from unmask import __version__
from unmask.config import SECTIONS, Preset, load_preset, preset_names, resolved
from unmask.pipeline import graph, machines, signals
from unmask.pipeline.graph import Due, Folders, PipelineError
from unmask.workspace import GRACE, PREEMPTED, grace_seconds, require_checkpoint

FREE_BYTES = 2**30  # of disk space; a cpu run needs less than this


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Returns: exit status: 0 done, 1 a notebook failed, 2 the request is wrong, 75 pre-empted by SIGTERM,
        128 + n stopped by another signal n.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser().parse_args(arguments)
    try:
        return options.command(options, arguments)
    except ValueError as error:  # ConfigError and PipelineError among them
        print(f"unmask: {error}", file=sys.stderr)
        return 2
    except (RuntimeError, OSError) as error:  # NotebookError, a full disk
        print(f"unmask: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        print(f"unmask: {error or 'interrupted'}; the same command goes on from here", file=sys.stderr)
        return getattr(error, "exit_status", 130)


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """`unmask run`: executes the selected notebooks that are due."""
    with signals.on_signal(signals.interrupt):
        return _run(options, arguments)


def _run(options: argparse.Namespace, arguments: list[str]) -> int:
    overrides = _overrides(options.set)
    for key, value in (("num_processes", options.gpus), ("num_machines", options.machines)):
        if value is not None:
            overrides[f"parallel.{key}"] = value
    preset = load_preset(options.preset, overrides)
    if preset.backbone.checkpoint:
        require_checkpoint(preset.backbone.checkpoint)
    name = _run_name(options)
    folders = Folders.of(name)
    stages = graph.discover(folders.notebooks, SECTIONS)
    selected = graph.select(stages, options.start, options.only)
    marks = graph.expected(stages, resolved(preset), folders.library)

    def plan() -> list[Due]:
        return graph.plan(stages, selected, marks, folders, force=options.force)

    if options.dry_run:
        due = plan()
        _print_plan(due, name, options.preset, options.jobs)
        if due:
            _print_cost(preset, options.gpus, options.gpu_memory, due)
        return 0
    slots = machines.slots(
        preset.parallel,
        gpus=options.gpus,
        jobs=options.jobs,
        machine_rank=options.machine_rank,
        main_host=options.main_host,
    )
    grace = grace_seconds()
    if options.main_host:
        os.environ["UNMASK_MAIN_HOST"] = options.main_host  # for the kernels and their trainings
    _check_space(folders.artifacts)
    if options.machine_rank:
        return _follow(plan(), folders, options.machine_rank, grace)
    several = preset.parallel.num_machines > 1
    with _lock(folders, name), machines.leading(folders) if several else contextlib.nullcontext():
        due = plan()
        _note_stale_inputs(due, stages, marks, folders)
        _refresh_prose(selected, due, marks, folders)
        if due:
            _print_plan(due, name, options.preset, options.jobs)
            command = shlex.join(["unmask", *arguments])
            _execute(due, marks, folders, preset, overrides, name, command, slots, grace)
        else:
            which = "all stages are" if len(selected) > 1 else f"{selected[0].name} is"
            print(f"nothing to do: {which} up to date in run {name!r} (--force runs again)")
    report = folders.results / "report.md"
    if report.is_file():
        print(f"report: {_shown(report)}")
    return 0


def status(options: argparse.Namespace, arguments: list[str]) -> int:
    """`unmask status`: the state of every stage of a run."""
    overrides = _overrides(options.set)
    preset = load_preset(options.preset, overrides)
    name = _run_name(options)
    folders = Folders.of(name)
    stages = graph.discover(folders.notebooks, SECTIONS)
    marks = graph.expected(stages, resolved(preset), folders.library)
    rows = [("stage", "state", "finished (UTC)", "took")]
    for stage in stages:
        state, finished, took = graph.why_due(stage, marks[stage.name], folders), "", ""
        if done := folders.done(stage.name):
            state = f"stale: {state}" if state else "done"
            finished, took = done["finished"][:19].replace("T", " "), graph.clock(done["wall_seconds"])
        elif (folders.logs / f"{stage.name}.failed.ipynb").is_file():
            state = "failed"
        elif (folders.logs / f"{stage.name}.partial.ipynb").is_file():
            state = "running or interrupted"
        rows.append((stage.name, state, finished, took))
    print(f"run {name!r}, preset {options.preset!r}")
    _print_table(rows)
    return 0


def _execute(
    due: Sequence[Due],
    marks: dict[str, dict[str, Any]],
    folders: Folders,
    preset: Preset,
    overrides: dict[str, Any],
    name: str,
    command: str,
    slots: Sequence[machines.Slot],
    grace: float,
) -> None:
    from unmask.pipeline import execute, provenance  # papermill takes two seconds to import

    execute.run_stages(
        due,
        marks,
        folders,
        parameters={"preset": preset.name, "overrides": overrides, "run": name},
        about=provenance.describe(folders, resolved(preset), overrides, name, command),
        durations=provenance.durations(folders, Folders.of(preset.name)),
        # A run that builds everything here must not wait for a Hub that may be out of reach.
        offline=not preset.backbone.checkpoint and "hub" not in preset.data.source,
        slots=slots,
        grace=grace,
    )


def _follow(due: Sequence[Due], folders: Folders, rank: int, grace: float) -> int:
    """A machine that executes no notebook: its part of the trainings, until the first machine has ended."""
    if not due:
        print("nothing to do: all of it is up to date")
        return 0
    print(f"machine {rank}: waiting for the machine with rank 0", flush=True)
    machines.wait_for_leader(folders)
    from unmask.training.launch import follow

    try:
        with machines.following(folders):
            follow(folders.artifacts, machine_rank=rank)
    except RuntimeError:
        if machines.told(folders).get("exit_status") == PREEMPTED:
            raise signals.Interrupted(signal.SIGTERM) from None
        raise
    finally:
        signals.end_children(grace)
    return 0


def _refresh_prose(
    selected: Sequence[graph.Stage], due: Sequence[Due], marks: dict[str, dict[str, Any]], folders: Folders
) -> None:
    running = {task.stage.name for task in due}
    for stage in selected:
        if stage.name not in running and folders.done(stage.name)["prose"] != stage.prose:
            from unmask.pipeline import execute

            execute.refresh(stage, marks[stage.name], folders)
            print(f"{stage.name}: only its prose changed; brought up to date without running it")


def _note_stale_inputs(
    due: Sequence[Due], stages: Sequence[graph.Stage], marks: dict[str, dict[str, Any]], folders: Folders
) -> None:
    running = {task.stage.name for task in due}
    needed = {need for task in due for need in task.stage.needs} - running
    for stage in stages:
        if stage.name in needed and (why := graph.why_due(stage, marks[stage.name], folders)):
            print(f"note: {stage.name} is out of date ({why}) and is used as it is")


def _print_plan(due: Sequence[Due], name: str, preset: str, jobs: int) -> None:
    from unmask.pipeline import provenance

    known = provenance.durations(Folders.of(name), Folders.of(preset))
    if not due:
        print("nothing to do: all of it is up to date")
        return
    times = [known.get(task.stage.name) for task in due]
    total = (
        f"about {graph.clock(sum(times))}" if None not in times else "time unknown: no earlier run to go by"
    )
    if jobs > 1 and None not in times:
        total += " one after the other"
    print(f"{len(due)} notebook{'s' if len(due) > 1 else ''} to run as {name!r}, {total}")
    rows = [("notebook", "why", "time")]
    for task, seconds in zip(due, times, strict=True):
        rows.append((task.stage.name, task.why, f"about {graph.clock(seconds)}" if seconds else "unknown"))
    _print_table(rows)


def _print_cost(preset: Preset, gpus: int | None, gpu_memory: float, due: Sequence[Due]) -> None:
    """What the trainings take, on as many GPUs as the preset has processes unless --gpus says otherwise.

    Raises: ValueError if they cannot work; the message says what would.
    """
    from unmask.plan import describe

    parallel = preset.parallel
    if gpus is None:
        gpus = parallel.num_processes if parallel.num_processes > 1 else 0
    names = [task.stage.name for task in due]
    machines = parallel.num_machines
    print(describe(preset, gpus=gpus, machines=machines, stages=names, gpu_memory=gpu_memory * 1e9))


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@contextlib.contextmanager
def _lock(folders: Folders, name: str) -> Iterator[None]:
    """Keeps two processes from executing the same run at once; it is free again when the holder is gone."""
    folders.artifacts.mkdir(parents=True, exist_ok=True)
    with (folders.artifacts / ".lock").open("a+", encoding="utf8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise PipelineError(
                f"run {name!r} is being executed by process {file.read().strip() or '?'}; "
                "wait for it, or give this one another name with --run"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _check_space(folder: Path) -> None:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < FREE_BYTES:
        raise PipelineError(
            f"only {free / 2**20:.0f} MiB free where artifacts go ({existing}), a run needs at least "
            f"{FREE_BYTES / 2**20:.0f} MiB: free some, or name another folder in UNMASK_ARTIFACTS"
        )


def _overrides(settings: Sequence[str]) -> dict[str, Any]:
    overrides = {}
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator:
            raise PipelineError(f"--set {setting}: write key=value, for instance --set pair.steps=50")
        try:
            overrides[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise PipelineError(f"--set {setting}: the value is not valid YAML") from None
    checkpoint = overrides.get("backbone.checkpoint")
    if isinstance(checkpoint, str) and Path(checkpoint).is_dir():
        overrides["backbone.checkpoint"] = str(Path(checkpoint).resolve())  # kernels run in notebooks/
    return overrides


def _run_name(options: argparse.Namespace) -> str:
    name = options.run or options.preset
    if name in (".", "..", "presets", "data") or "/" in name:
        raise PipelineError(
            f"--run {name}: a run's name is its folders', and this one is taken; take one without '/'"
        )
    return name


def _shown(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="unmask", description=__doc__.partition("\n")[0])
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="command")

    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--preset", default="cpu", metavar="NAME", help=f"default cpu; there are: {', '.join(preset_names())}"
    )
    shared.add_argument(
        "--run", default="", metavar="NAME", help="name of the run's folders; default: the preset's"
    )
    shared.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a value of the preset, for instance pair.steps=50; may be repeated",
    )

    one = commands.add_parser(
        "run",
        parents=[shared],
        help="execute the notebooks that are due",
        description=run.__doc__,
        epilog=(
            "SIGTERM and SIGINT let a training write a checkpoint before the run ends, with status 75 after "
            "SIGTERM; a second one ends it at once. UNMASK_GRACE_SECONDS is the time that this may take "
            f"(default {GRACE:.0f})."
        ),
    )
    one.add_argument("--from", dest="start", metavar="NN", help="leave out the notebooks before this one")
    one.add_argument("--only", metavar="NN", help="this notebook only")
    one.add_argument(
        "--force", action="store_true", help="run the selected notebooks even if they are up to date"
    )
    one.add_argument(
        "--dry-run",
        action="store_true",
        help="say what would run, why, and what it takes, and run nothing; needs no GPU",
    )
    one.add_argument(
        "--gpu-memory",
        type=float,
        default=80,
        metavar="GB",
        help="memory of a GPU that --dry-run plans with, default 80",
    )
    one.add_argument(
        "--gpus", type=int, metavar="N", help="GPUs of a training, over all machines; default: the preset's"
    )
    one.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="J",
        help="run up to J independent notebooks side by side, each on its share of the GPUs; default 1",
    )
    one.add_argument(
        "--machines",
        type=int,
        metavar="M",
        help="machines that share the artifacts folder and are given the same command; default: the preset's",
    )
    one.add_argument(
        "--machine-rank",
        type=int,
        default=0,
        metavar="R",
        help="which of them this is, from 0; machine 0 executes the notebooks, the others train along",
    )
    one.add_argument(
        "--main-host", default="", metavar="HOST", help="name of machine 0 as the others reach it"
    )
    one.set_defaults(command=run)

    two = commands.add_parser(
        "status", parents=[shared], help="what is done, and what is due", description=status.__doc__
    )
    two.set_defaults(command=status)
    return parser
