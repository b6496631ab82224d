"""The command line: `unmask run` executes the notebooks that are due, `unmask status` says which are,
`unmask prepare` tokenises what trainings read, `unmask encode` embeds a file of texts, and `unmask mirror`
brings what is read from the Hub to hosts without internet.

Nothing here imports torch, datasets or papermill before there is something to do: help is there at once.
"""

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from unmask.config import Preset, load_preset, preset_names, resolved, seeded
from unmask.data import hub
from unmask.run import PREEMPTED, Folders, Run, seed_run
from unmask.study import pipeline
from unmask.study.pipeline import Marks, PipelineError, Stage, clock

LOCAL = ("backbone.checkpoint", "clusters.surrogate", "data.source")  # may be paths


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Returns: exit status: 0 done, 1 a notebook failed, 2 the request is wrong, 75 pre-empted by SIGTERM, 130
        stopped by SIGINT.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser().parse_args(arguments)
    options.said = shlex.join(["unmask", *arguments])
    try:
        return options.command(options) or 0
    except Timeout:
        print("unmask: another process executes this run: wait, or use --run", file=sys.stderr)
        return 2
    # A wrong request; a preset that is no YAML; a failed notebook; a full disk.
    except (ValueError, yaml.YAMLError, RuntimeError, OSError) as error:
        print(f"unmask: {error}", file=sys.stderr)
        return 1 if isinstance(error, RuntimeError | OSError) else 2
    except KeyboardInterrupt as error:
        number = next((one for one in error.args if isinstance(one, signal.Signals)), signal.SIGINT)
        print(f"unmask: stopped by {number.name}; the same command goes on from here", file=sys.stderr)
        return PREEMPTED if number == signal.SIGTERM else 128 + number


def run(options: argparse.Namespace) -> None:
    """`unmask run`: executes the selected notebooks that are due.

    With --seeds K the run is repeated with the seeds 1 to K − 1, each as a run of its own, before it is
    executed itself: its report holds what all of them found, and what lies in results/NAME-seedN from other
    machines, where --seed N makes one of them alone. SIGTERM and SIGINT let a training write a
    checkpoint before the run ends, with status 75 after SIGTERM; UNMASK_GRACE_SECONDS is the time that this
    may take, 120 by default.
    """
    for seed in [options.seed] if options.seed else (*range(1, options.seeds), None):
        preset, overrides, folders, stages, marks = _open(options, seed, sure=not options.dry_run)
        selected = pipeline.select(stages, options.start, options.only, options.stop, again=seed)
        due = pipeline.plan(stages, selected, marks, folders, force=options.force)
        _print_due(due, preset, folders)
        if due and options.dry_run:
            from unmask.study.plan import describe

            print(describe(preset, stages=[one.name for one in due], gpu_memory=options.gpu_memory * 1e9))
        elif due:
            pipeline.check_machine(preset, options.gpus)
            about = pipeline.describe(folders, preset, overrides, options.said)
            # A run that has everything here must not wait for a Hub that may be out of reach.
            environment = {"HF_HUB_OFFLINE": "1"} if hub.offline(preset) else {}
            environment |= pipeline.own_gpus(preset.parallel)
            environment |= {"UNMASK_ACCEPT_CODE": "1"} if options.accept_code else {}
            environment |= {"UNMASK_TRAIN_ANEW": "1"} if options.force else {}
            folders.artifacts.mkdir(parents=True, exist_ok=True)
            with FileLock(folders.artifacts / ".lock", timeout=0):
                pipeline.run_stages(list(due), marks, about, environment, options.jobs)
        whole = pipeline.PAGE in {stage.name for stage in selected}
        name, shown = ("report", folders.results / "report.md") if whole else ("notebooks", folders.executed)
        if shown.exists():
            print(f"{name}: {os.path.relpath(shown)}")


def prepare(options: argparse.Namespace) -> None:
    """`unmask prepare`: reads and tokenises what a preset's trainings read, on a machine without GPUs.

    What texts are mined for, and look-alikes, need a trained model: their notebooks prepare them. Killed at
    any moment, the same command goes on.
    """
    from unmask.training.loop import stage_of

    preset = load_preset(options.preset, _overrides(options.set))
    hub.require(preset)
    start = Run("prepare", _run_name(options, None), preset).base()
    for name in ("diffusion", "pair", "contextual", "triplet", "qwen3"):
        asked = {"values": resolved(preset), "stage": name, "start": start}
        asked |= {"changes": {"negatives": 0}} if name == "qwen3" else {}  # its first phase
        for row in stage_of(asked).prepare():
            print(f"{name}: {', '.join(f'{key} {value}' for key, value in row.items())}", flush=True)


def status(options: argparse.Namespace) -> None:
    """`unmask status`: the state of every stage of a run, and of its repetitions with other seeds."""
    for seed in (*range(1, options.seeds), None):
        _, _, folders, stages, marks = _open(options, seed, sure=False)
        rows = [("stage", "state", "finished (UTC)", "took")]
        for stage in pipeline.select(stages, again=seed):
            row = [stage.name, pipeline.why_due(stage, marks[stage.name], folders) or "done", "", ""]
            if done := folders.done(stage.name):
                row[2:] = done["finished"][:19].replace("T", " "), clock(done["wall_seconds"])
            rows.append(row)
        print(f"run {folders.artifacts.name!r}, preset {options.preset!r}")
        _print_table(rows)


def _open(
    options: argparse.Namespace, seed: int | None, *, sure: bool
) -> tuple[Preset, dict[str, Any], Folders, list[Stage], Marks]:
    """A run as the command line names it: preset, overrides, folders, stages and what these depend on.

    Args:
        sure: it is about to begin, so its data must be there; a question does not wait for the Hub.
    """
    from unmask.data.sources import identity

    overrides = _overrides(options.set) | (seeded(seed) if seed else {})
    if getattr(options, "gpus", None) is not None:
        overrides["parallel.num_processes"] = options.gpus
    preset, folders = load_preset(options.preset, overrides), Folders(_run_name(options, seed))
    stages = pipeline.discover(folders.notebooks)
    if sure:
        hub.require(preset)
    if sure or not hub.data_on_hub(preset):
        data = identity(preset.data)
    else:
        print("note: the data are on the Hub, and taken to be as they were")
        known = (done.get("depends_on", {}).get("data") for one in stages if (done := folders.done(one.name)))
        data = next(filter(None, known), "")
    return preset, overrides, folders, stages, pipeline.expected(stages, resolved(preset), folders, data)


def encode(options: argparse.Namespace) -> None:
    """`unmask encode`: embeds the texts of a file with a trained model, on all GPUs of this machine.

    The embeddings are a NumPy array with a row for each text, in their order. The same command goes on with
    what was interrupted.
    """
    from unmask.models.jobs import encode_file

    named = {key: getattr(options, key) for key in ("column", "precision", "dimensions")}
    encode_file(options.model, options.input, options.output, **named)


def mirror_pull(options: argparse.Namespace) -> None:
    """`unmask mirror pull`: fetches the models and the data that a preset reads, on a host with internet.

    The files are laid out as on the Hub, DIR/<organisation>/<name>/…, and their checksums noted for `check`;
    of a text source only as much is fetched as data.max_text_mb needs. The same command goes on with what was
    interrupted. UNMASK_MIRROR=DIR then serves hosts without internet.
    """
    hub.pull(load_preset(options.preset, _overrides(options.set)), options.to)


def mirror_check(options: argparse.Namespace) -> int:
    """`unmask mirror check`: says what of a preset's models and data UNMASK_MIRROR lacks, and whether the
    checksums of the rest are right. Exit status 1 if anything is missing or wrong."""
    preset = load_preset(options.preset, _overrides(options.set))
    if wrong := hub.check(preset):
        _print_table([("missing or wrong", "why"), *wrong])
        print(hub.HOW_TO_MIRROR)
        return 1
    print(f"all that preset {preset.name!r} needs is there, and whole")
    return 0


def _print_due(due: dict[Stage, str], preset: Preset, folders: Folders) -> None:
    """What will run, why, and how long it took last time: in this run, or else in its preset's."""
    known = pipeline.recorded(Folders(preset.name)) | pipeline.recorded(folders)
    times = {name: clock(one["wall_seconds"]) for name, one in known.items() if not one["exit_status"]}
    rows = [(stage.name, why, times.get(stage.name, "unknown")) for stage, why in due.items()]
    print(f"run {folders.artifacts.name!r}: {len(due) or 'nothing'} to do")
    _print_table([("notebook", "why", "took last time, without earlier trainings"), *rows] if due else [])


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
            overrides[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise PipelineError(f"--set {setting}: the value is no YAML") from None
        if key in LOCAL and Path(value).exists():
            overrides[key] = str(Path(value).resolve())  # kernels run in notebooks/
    return overrides


def _run_name(options: argparse.Namespace, seed: int | None) -> str:
    name = options.run or options.preset
    if name in (".", "..", "presets", "sources", "data", "seeds", "benchmarks") or "/" in name:
        raise PipelineError(f"--run {name}: a run's name is its folders', and this one cannot be taken")
    return seed_run(name, seed) if seed else name


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="unmask", description=__doc__.partition("\n\n")[0])
    commands = parser.add_subparsers(required=True, metavar="command")

    preset = argparse.ArgumentParser(add_help=False)
    add = preset.add_argument
    add("--preset", default="cpu", metavar="NAME", help=f"one of {', '.join(preset_names())}; default cpu")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="such as pair.steps=50; repeatable")
    named = argparse.ArgumentParser(add_help=False, parents=[preset])
    named.add_argument("--run", metavar="NAME", help="name of its folders; default: the preset's")
    shared = argparse.ArgumentParser(add_help=False, parents=[named])
    several = "repeat it with seeds 1 to K - 1, as NAME-seedN, then run it and pool all"
    shared.add_argument("--seeds", type=_positive, default=1, metavar="K", help=several)

    def command(name: str, function: Callable, about: str, *parents: argparse.ArgumentParser, of=commands):
        added = of.add_parser(name, parents=parents, help=about, description=function.__doc__)
        added.set_defaults(command=function)
        return added.add_argument

    add = command("run", run, "execute the notebooks that are due", shared)
    add("--from", dest="start", default="", metavar="NN", help="leave out the notebooks before this one")
    add("--to", dest="stop", default="", metavar="NN", help="leave out the notebooks after this one")
    add("--only", default="", metavar="NN,…", help="these notebooks only")
    add("--force", action="store_true", help="also what is up to date; train anew what other code trained")
    add("--dry-run", action="store_true", help="say what would run, why, and what it takes, and run nothing")
    add("--gpu-memory", type=_positive, default=80, metavar="GB", help="for --dry-run; default 80")
    add("--gpus", type=int, metavar="N", help="over all machines; default: the preset's")
    add("--seed", type=_positive, default=0, metavar="N", help="repeat it with this seed only, as NAME-seedN")
    add("--jobs", type=_positive, default=1, metavar="J", help="up to J independent notebooks side by side")
    add("--accept-code", action="store_true", help="go on from what earlier versions of the code trained")

    command("prepare", prepare, "read and tokenise for trainings, where no GPU waits", named)
    command("status", status, "what is done, and what is due", shared)

    add = command("encode", encode, "embed a file of texts")
    add("model", help="a checkpoint directory, or a name on the Hub")
    add("input", type=Path, help=".parquet, .jsonl, .csv and the like, or .txt with a text in each line")
    add("output", type=Path, help="the array, an .npy file")
    add("--precision", default="int8", help="float32, int8 (default), binary or ubinary")
    add("--dimensions", type=_positive, metavar="N", help="keep only the first N; default: all")
    add("--column", default="text", metavar="NAME", help="where the texts are, default text")

    mirrors = commands.add_parser("mirror", help="models and data for hosts without internet")
    actions = mirrors.add_subparsers(required=True, metavar="action")
    add = command("pull", mirror_pull, "fetch what a preset reads, or go on with that", preset, of=actions)
    add("--to", type=Path, required=True, metavar="DIR", help="the mirror; created if need be")
    command("check", mirror_check, "say what UNMASK_MIRROR lacks, and verify the rest", preset, of=actions)
    return parser
