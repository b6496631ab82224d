"""The command line: `unmask run` executes the notebooks that are due, `unmask status` says which are,
`unmask encode` embeds a file of texts, and `unmask mirror` brings what is read from the Hub to hosts without
internet.

Nothing here imports torch or papermill before there is something to run: a question is answered at once.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from unmask import __version__
from unmask.children import on_signal
from unmask.config import SECTIONS, Preset, load_preset, preset_names, resolved, seeded
from unmask.data import hub
from unmask.models import pretrained
from unmask.models.pretrained import require_checkpoint
from unmask.run import GRACE, Folders, grace_seconds, seed_run
from unmask.study import pipeline, provenance
from unmask.study.pipeline import Due, PipelineError

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
    """`unmask run`: executes the selected notebooks that are due.

    With --seeds K the run is repeated with the seeds 1 to K − 1, each as a run of its own, before it is
    executed itself: its report holds what all of them found.
    """
    with on_signal(pipeline.interrupt):
        for seed in _seeds(options):
            _run(options, arguments, seed)
    return 0


def _run(options: argparse.Namespace, arguments: list[str], seed: int | None) -> None:
    overrides = _overrides(options.set, seed)
    if options.gpus is not None:
        overrides["parallel.num_processes"] = options.gpus
    preset = load_preset(options.preset, overrides)
    if preset.backbone.checkpoint and not (options.dry_run and _packaged(preset)):
        require_checkpoint(preset.backbone.checkpoint)
    name = _run_name(options, seed)
    folders = Folders.of(name)
    stages = pipeline.discover(folders.notebooks, SECTIONS)
    selected = pipeline.select(stages, options.start, options.only, options.stop)
    if seed and not (selected := pipeline.repeated(selected)):
        if options.seed:
            raise PipelineError(f"--seed {seed}: no notebook selected is repeated with other seeds")
        return
    if not options.dry_run:
        hub.require(preset)
    data = _identity(preset, folders, stages, sure=not options.dry_run)
    marks = pipeline.expected(stages, resolved(preset), folders, data)

    def plan() -> list[Due]:
        return pipeline.plan(stages, selected, marks, folders, force=options.force)

    if options.dry_run:
        due = plan()
        _print_plan(due, name, options.preset, options.jobs)
        if due:
            _print_cost(preset, options.gpus, options.gpu_memory, due)
        return
    slots = pipeline.slots(preset.parallel, gpus=options.gpus, jobs=options.jobs)
    grace = grace_seconds()
    if options.accept_code:
        os.environ["UNMASK_ACCEPT_CODE"] = "1"  # for the trainings, see `unmask.training.launch`
    _check_space(folders.artifacts)
    with _lock(folders, name):
        due = plan()
        _note_stale_inputs(due, stages, marks, folders)
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


def status(options: argparse.Namespace, arguments: list[str]) -> int:
    """`unmask status`: the state of every stage of a run, and of its repetitions with other seeds."""
    for seed in _seeds(options):
        _status(options, seed)
    return 0


def _status(options: argparse.Namespace, seed: int | None) -> None:
    preset = load_preset(options.preset, _overrides(options.set, seed))
    name = _run_name(options, seed)
    folders = Folders.of(name)
    stages = pipeline.discover(folders.notebooks, SECTIONS)
    data = _identity(preset, folders, stages, sure=False)
    marks = pipeline.expected(stages, resolved(preset), folders, data)
    rows = [("stage", "state", "finished (UTC)", "took")]
    records = provenance.read(folders).get("stages", {})
    for stage in pipeline.repeated(stages) if seed else stages:
        state, finished, took = pipeline.why_due(stage, marks[stage.name], folders), "", ""
        if done := folders.done(stage.name):
            state = f"stale: {state}" if state else "done"
            finished, took = done["finished"][:19].replace("T", " "), pipeline.clock(done["wall_seconds"])
        elif (folders.executed / f"{stage.name}.ipynb").is_file():
            failed = records.get(stage.name, {}).get("exit_status")
            state = "failed" if failed else "running or interrupted"
        rows.append((stage.name, state, finished, took))
    print(f"run {name!r}, preset {options.preset!r}")
    _print_table(rows)


def encode(options: argparse.Namespace, arguments: list[str]) -> int:
    """`unmask encode`: embeds the texts of a file with a trained model, on all GPUs of this machine.

    The embeddings are a NumPy array with a row for each text, in their order. The same command goes on with
    what was interrupted.
    """
    from unmask.models.file_job import encode_file

    encode_file(
        options.model,
        options.input,
        options.output,
        column=options.column,
        precision=options.precision,
        dimensions=options.dimensions,
    )
    return 0


def mirror_pull(options: argparse.Namespace, arguments: list[str]) -> int:
    """`unmask mirror pull`: fetches the models and the data that a preset reads, on a host with internet.

    The files are laid out as on the Hub, DIR/<organisation>/<name>/…, and their checksums are compared; of a
    text source only as much is fetched as data.max_text_mb needs. The same command goes on with what was
    interrupted. UNMASK_MIRROR=DIR then serves hosts without internet.
    """
    preset = load_preset(options.preset, _overrides(options.set))
    if name := _packaged(preset):
        print(f"{name}: {pretrained.fetch(name, options.to)}")
    if hub.needs(preset) or not name:
        hub.pull(preset, options.to)
    return 0


def _packaged(preset: Preset) -> str:
    """Name of the preset's backbone if a package carries it."""
    name = preset.backbone.checkpoint
    return name if name in pretrained.PACKAGES else ""


def mirror_check(options: argparse.Namespace, arguments: list[str]) -> int:
    """`unmask mirror check`: says what of a preset's models and data is missing, and whether the checksums of
    the rest are right. Exit status 1 if anything is missing or wrong."""
    if options.source:
        os.environ["UNMASK_MIRROR"] = str(options.source)
    preset = load_preset(options.preset, _overrides(options.set))
    lacks = False
    if name := _packaged(preset):
        lacks = pretrained.missing(name)
        print(f"{name}: {f'missing: {pretrained.PACKAGES[name].wheel}' if lacks else 'there'}")
    if not hub.needs(preset):
        if not name:
            print(f"preset {preset.name!r} reads nothing from the Hub or a mirror")
        return int(lacks)
    wrong, pulled = hub.check(preset, quick=options.quick)
    where, wanted = f"mirror {hub.root()}", f"all that preset {preset.name!r} needs"
    if wrong:
        _print_table([("missing or wrong", "why"), *wrong])
        print(f"{where}: not {wanted}: {hub.how(preset)}")
        return 1
    compared = "sizes" if options.quick else "checksums"
    print(f"{where}: {wanted} is there, {compared} of {pulled} pulled files are right")
    return int(lacks)


def _identity(preset: Preset, folders: Folders, stages: Sequence[pipeline.Stage], *, sure: bool) -> str:
    """What the corpus is made of. A question neither waits for the Hub nor fails for missing data: unless
    `sure`, what the last run recorded is taken for it."""
    from unmask.data.sources import identity

    why = "they are on the Hub" if not sure and hub.data_on_hub(preset) else ""
    try:
        if not why:
            return identity(preset.data)
    except ValueError as error:
        if sure:
            raise
        why = str(error)
    print(f"note: whether the data have changed was not looked at: {why}")
    recorded = [done.get("data") for stage in stages if (done := folders.done(stage.name))]
    return next(filter(None, recorded), "")


def _execute(
    due: Sequence[Due],
    marks: dict[str, dict[str, Any]],
    folders: Folders,
    preset: Preset,
    overrides: dict[str, Any],
    name: str,
    command: str,
    slots: Sequence[pipeline.Slot],
    grace: float,
) -> None:
    pipeline.run_stages(
        due,
        marks,
        folders,
        parameters={"preset": preset.name, "overrides": overrides, "run": name},
        about=provenance.describe(folders, resolved(preset), overrides, name, command),
        durations=provenance.durations(folders, Folders.of(preset.name)),
        # A run that has everything here must not wait for a Hub that may be out of reach.
        offline=hub.offline(preset),
        slots=slots,
        grace=grace,
    )


def _note_stale_inputs(
    due: Sequence[Due], stages: Sequence[pipeline.Stage], marks: dict[str, dict[str, Any]], folders: Folders
) -> None:
    running = {task.stage.name for task in due}
    needed = {need for task in due for need in task.stage.needs} - running
    for stage in stages:
        if stage.name in needed and (why := pipeline.why_due(stage, marks[stage.name], folders)):
            print(f"note: {stage.name} is out of date ({why}) and is used as it is")


def _print_plan(due: Sequence[Due], name: str, preset: str, jobs: int) -> None:
    known = provenance.durations(Folders.of(name), Folders.of(preset))
    if not due:
        print("nothing to do: all of it is up to date")
        return
    times = [known.get(task.stage.name) for task in due]
    total = "time unknown: no earlier run to go by"
    if None not in times:
        total = f"about {pipeline.clock(sum(times))}{' one after the other' * (jobs > 1)}"
    print(f"{len(due)} notebook{'s' * (len(due) > 1)} to run as {name!r}, {total}")
    said = [f"about {pipeline.clock(seconds)}" if seconds else "unknown" for seconds in times]
    rows = [(task.stage.name, task.why, time) for task, time in zip(due, said, strict=True)]
    _print_table([("notebook", "why", "time"), *rows])


def _print_cost(preset: Preset, gpus: int | None, gpu_memory: float, due: Sequence[Due]) -> None:
    """What the trainings take, on as many GPUs as the preset has processes unless --gpus says otherwise.

    Raises: ValueError if they cannot work; the message says what would.
    """
    from unmask.study.plan import describe

    if gpus is None:
        gpus = preset.parallel.num_processes if preset.parallel.num_processes > 1 else 0
    names = [task.stage.name for task in due]
    print(describe(preset, gpus=gpus, stages=names, gpu_memory=gpu_memory * 1e9))


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


def _seeds(options: argparse.Namespace) -> list[int | None]:
    """The seeds to run with, in order; None is the run itself, with its preset's own."""
    return [options.seed] if options.seed else [*range(1, options.seeds), None]


def _overrides(settings: Sequence[str], seed: int | None = None) -> dict[str, Any]:
    overrides: dict[str, Any] = seeded(seed) if seed else {}
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator:
            raise PipelineError(f"--set {setting}: write key=value, for instance --set pair.steps=50")
        try:
            overrides[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise PipelineError(f"--set {setting}: the value is not valid YAML") from None
    local = {
        "backbone.checkpoint": Path.is_dir,
        "clusters.surrogate": Path.is_dir,
        "data.source": Path.is_file,
    }
    for key, is_local in local.items():
        if isinstance(path := overrides.get(key), str) and is_local(Path(path)):
            overrides[key] = str(Path(path).resolve())  # kernels run in notebooks/
    return overrides


def _run_name(options: argparse.Namespace, seed: int | None) -> str:
    name = options.run or options.preset
    if name in (".", "..", "presets", "data", "seeds") or "/" in name:
        raise PipelineError(
            f"--run {name}: a run's name is its folders', and this one is taken; take one without '/'"
        )
    return seed_run(name, seed) if seed else name


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number from 1 on, got {text!r}")
    return int(text)


def _shown(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="unmask", description=__doc__.partition("\n")[0])
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="command")

    preset = argparse.ArgumentParser(add_help=False)
    there = f"default cpu; there are: {', '.join(preset_names())}"
    preset.add_argument("--preset", default="cpu", metavar="NAME", help=there)
    change = "change a value of the preset, for instance pair.steps=50; may be repeated"
    preset.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=change)
    shared = argparse.ArgumentParser(add_help=False, parents=[preset])
    shared.add_argument(
        "--run", default="", metavar="NAME", help="name of its folders; default: the preset's"
    )
    seeds = shared.add_mutually_exclusive_group()
    again = "repeat the run with seed N in all trainings, as run NAME-seedN"
    seeds.add_argument("--seed", type=_count, metavar="N", help=again)
    pooled = "K seeds: those from 1 to K - 1 as runs of their own, then the run itself, which pools them"
    seeds.add_argument("--seeds", type=_count, default=1, metavar="K", help=pooled)

    def command(name: str, function: Callable, about: str, *parents: argparse.ArgumentParser, of=commands):
        added = of.add_parser(name, parents=parents, help=about, description=function.__doc__)
        added.set_defaults(command=function)
        return added

    _add_run_options(command("run", run, "execute the notebooks that are due", shared))
    command("status", status, "what is done, and what is due", shared)

    texts = command("encode", encode, "embed a file of texts")
    texts.add_argument("model", metavar="MODEL", help="a checkpoint directory, or a name on the Hub")
    kinds = ".parquet, .jsonl, .csv and the like, or .txt with a text in each line"
    texts.add_argument("input", type=Path, metavar="INPUT", help=kinds)
    texts.add_argument("output", type=Path, metavar="OUTPUT", help="the array, an .npy file")
    numbers = ("float32", "int8", "binary", "ubinary")
    texts.add_argument("--precision", default="int8", choices=numbers, help="of an embedding, default int8")
    texts.add_argument("--dimensions", type=_count, metavar="N", help="keep only the first N; default: all")
    texts.add_argument("--column", default="text", metavar="NAME", help="where the texts are, default text")

    mirrors = commands.add_parser("mirror", help="models and data for hosts without internet")
    actions = mirrors.add_subparsers(required=True, metavar="action")
    pull = command("pull", mirror_pull, "fetch what a preset reads, or go on with that", preset, of=actions)
    pull.add_argument("--to", type=Path, required=True, metavar="DIR", help="the mirror; created if need be")
    check = command("check", mirror_check, "say what is missing, and verify the rest", preset, of=actions)
    known = "the mirror; default: UNMASK_MIRROR"
    check.add_argument("--from", dest="source", type=Path, metavar="DIR", help=known)
    check.add_argument("--quick", action="store_true", help="compare sizes only, not checksums")
    return parser


def _add_run_options(one: argparse.ArgumentParser) -> None:
    one.epilog = (
        "SIGTERM and SIGINT let a training write a checkpoint before the run ends, with status 75 after "
        "SIGTERM; a second one ends it at once. UNMASK_GRACE_SECONDS is the time that this may take "
        f"(default {GRACE:.0f})."
    )
    add = one.add_argument
    add("--from", dest="start", metavar="NN", help="leave out the notebooks before this one")
    add("--to", dest="stop", metavar="NN", help="leave out the notebooks after this one")
    add("--only", metavar="NN", help="this notebook only")
    add("--force", action="store_true", help="run the selected notebooks even if they are up to date")
    add("--dry-run", action="store_true", help="say what would run, why, and what it takes, and run nothing")
    add("--gpu-memory", type=float, default=80, metavar="GB", help="that --dry-run plans with, default 80")
    add("--gpus", type=int, metavar="N", help="of a training, over all machines; default: the preset's")
    share = "run up to J independent notebooks side by side, each on its share of the GPUs; default 1"
    add("--jobs", type=_count, default=1, metavar="J", help=share)
    accept = "go on from checkpoints, and with models, that earlier versions of the code made"
    add("--accept-code", action="store_true", help=accept)
