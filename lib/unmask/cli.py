"""What the commands of `unmask` do, each a function of the arguments that `__main__` has read. Those that
need torch load it themselves: the others answer without waiting for it."""

import argparse
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock

from unmask.config import Preset, load_preset, resolved, seeded
from unmask.data import mirror, sources
from unmask.data.hub import HOW_TO_MIRROR
from unmask.extras import extra
from unmask.run import Folders, Run, seed_run
from unmask.study import pipeline
from unmask.study.pipeline import Marks, PipelineError, Stage, clock

# Keys of --set whose value may be a local path, and what it must be; kernels run in notebooks/.
PATHS = {"backbone.checkpoint": Path.is_dir, "clusters.surrogate": Path.is_dir, "data.source": Path.is_file}


def run(options: argparse.Namespace) -> None:
    """`unmask run`: executes the selected notebooks that are due, of each seed."""
    with extra("study"):
        version("papermill")  # for the notebooks' processes
    for seed in options.seeds:
        preset, overrides, folders, stages, marks = _open(options, seed, sure=not options.dry_run)
        selected = pipeline.select(stages, options.start, options.only, options.stop, again=seed)
        if not selected and None not in options.seeds:
            raise PipelineError("repetitions leave these notebooks out: give the command without --seed")
        due = pipeline.plan(stages, selected, marks, folders, force=options.force)
        _print_due(due, preset, folders)
        if due and options.dry_run:
            from unmask.study.plan import describe  # noqa: PLC0415

            print(describe(preset, stages=[one.name for one in due], gpu_memory=options.gpu_memory * 1e9))
        elif due:
            pipeline.check_machine(preset, options.gpus, options.jobs)
            about = pipeline.describe(folders, preset, overrides, options.said)
            # A run that has everything here must not wait for a Hub that may be out of reach.
            environment = {"HF_HUB_OFFLINE": "1"} if mirror.offline(preset) else {}
            environment |= pipeline.own_gpus(preset.parallel)
            environment |= {"UNMASK_ACCEPT_CODE": "1"} if options.accept_code else {}
            environment |= {"UNMASK_TRAIN_ANEW": "1"} if options.force else {}
            with FileLock(folders.artifacts / ".lock", timeout=0):
                pipeline.run_stages(list(due), marks, about, environment, options.jobs)
        whole = pipeline.PAGE in {stage.name for stage in selected}
        name, shown = ("report", folders.results / "report.md") if whole else ("notebooks", folders.executed)
        if shown.exists():
            print(f"{name}: {os.path.relpath(shown)}")


def prepare(options: argparse.Namespace) -> None:
    """`unmask prepare`: reads and tokenises what a preset's trainings read."""
    from unmask.training.loop import stage_of  # noqa: PLC0415

    preset = load_preset(options.preset, _overrides(options.set))
    _require(preset)
    start = Run("prepare", _run_name(options, None), preset).base()
    for name in ("diffusion", "pair", "contextual", "triplet", "qwen3"):
        asked = {"values": resolved(preset), "stage": name, "start": start}
        asked |= {"changes": {"negatives": 0}} if name == "qwen3" else {}  # its first phase
        for row in stage_of(asked).prepare():
            print(f"{name}: {', '.join(f'{key} {value}' for key, value in row.items())}", flush=True)


def status(options: argparse.Namespace) -> None:
    """`unmask status`: the state of every stage of a run, and of its repetitions with other seeds."""
    for seed in options.seeds:
        _, _, folders, stages, marks = _open(options, seed, sure=False)
        rows = [("stage", "finished (UTC)", "took", "state")]
        for stage in pipeline.select(stages, again=seed):
            row = [stage.name, "", "", pipeline.why_due(stage, marks[stage.name], folders) or "done"]
            if done := folders.done(stage.name):
                row[1:3] = done["finished"][:19].replace("T", " "), clock(done["wall_seconds"])
            rows.append(row)
        print(f"run {folders.artifacts.name!r}, preset {options.preset!r}")
        _print_table(rows)


def _open(
    options: argparse.Namespace, seed: int | None, *, sure: bool
) -> tuple[Preset, dict[str, Any], Folders, list[Stage], Marks]:
    """A run as the command line names it: preset, overrides, folders, stages and what these depend on.

    Args:
        sure: the run is about to start, so its data must exist; otherwise the Hub is not asked.
    """
    overrides = _overrides(options.set) | (seeded(seed) if seed else {})
    if getattr(options, "gpus", None) is not None:
        overrides["parallel.num_processes"] = options.gpus
    preset, folders = load_preset(options.preset, overrides), Folders(_run_name(options, seed))
    stages = pipeline.discover(folders.notebooks)
    if sure:
        _require(preset)
    if sure or not mirror.data_on_hub(preset):
        data = sources.identity(preset.data)
    else:
        print("note: the data are on the Hub, and assumed to be unchanged")
        known = (done.get("depends_on", {}).get("data") for one in stages if (done := folders.done(one.name)))
        data = next(filter(None, known), "")
    return preset, overrides, folders, stages, pipeline.expected(stages, resolved(preset), folders, data)


def _require(preset: Preset) -> None:
    """Makes sure that there is what a run reads, and says where its corpus will be another than the committed
    runs'."""
    mirror.require(preset)
    if note := sources.departures(preset.data):
        print(f"note: {note}", flush=True)


def encode(options: argparse.Namespace) -> None:
    """`unmask encode`: embeds the texts of a file with a trained model."""
    from unmask.models.jobs import encode_file  # noqa: PLC0415

    named = {key: getattr(options, key) for key in ("column", "precision", "dimensions")}
    encode_file(options.model, options.input, options.output, **named)


def pull(options: argparse.Namespace) -> None:
    """`unmask mirror pull`: fetches the models and the data that a preset reads."""
    mirror.pull(load_preset(options.preset, _overrides(options.set)), options.to)


def check(options: argparse.Namespace) -> int | None:
    """`unmask mirror check`: says what of a preset's models and data UNMASK_MIRROR lacks, 1 if anything."""
    preset = load_preset(options.preset, _overrides(options.set))
    if wrong := mirror.check(preset):
        _print_table([("missing or wrong", "why"), *wrong])
        print(HOW_TO_MIRROR)
        return 1
    print(f"all that preset {preset.name!r} needs is there, and whole")


def _print_due(due: dict[Stage, str], preset: Preset, folders: Folders) -> None:
    """What will run, why, and how long it took last time: in this run, or else in its preset's."""
    known = pipeline.recorded(Folders(preset.name)) | pipeline.recorded(folders)
    times = {name: clock(one["wall_seconds"]) for name, one in known.items() if not one["exit_status"]}
    rows = [(stage.name, times.get(stage.name, "unknown"), why) for stage, why in due.items()]
    print(f"run {folders.artifacts.name!r}: {len(due) or 'nothing'} to do")
    _print_table([("notebook", "took, earlier trainings apart", "why"), *rows] if due else [])


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  " + "  ".join(map(str.ljust, row, widths)).rstrip())


def _overrides(settings: Sequence[str]) -> dict[str, Any]:
    overrides: dict[str, Any] = {}
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator:
            raise PipelineError(f"--set {setting}: write key=value, for instance --set pair.steps=50")
        try:
            overrides[key] = yaml.safe_load(value) if value else ""
        except yaml.YAMLError:
            raise PipelineError(f"--set {setting}: the value is no YAML") from None
        if value and key in PATHS and PATHS[key](Path(value)):
            overrides[key] = str(Path(value).resolve())
    return overrides


def _run_name(options: argparse.Namespace, seed: int | None) -> str:
    name = options.run or options.preset
    if name in (".", "..", "presets", "sources", "data", "seeds", "benchmarks") or "/" in name:
        raise PipelineError(f"--run {name}: a run's name is its folders', and this one cannot be taken")
    return seed_run(name, seed) if seed else name
