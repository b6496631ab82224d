"""The command `unmask`: its arguments, and what it returns. What a command does is in `cli`, which is loaded
when there is something to do, so that help is there at once.

Diffusion-pretrained dense and contextual text embeddings, reproduced notebook by notebook.

run: Executes the selected notebooks that are due. --seeds K first repeats the run with the seeds 1 to K - 1,
each as a run of its own, NAME-seedN; the run's report then pools them all, and those from other machines
that lie in results/NAME-seedN. --seed N makes one repetition alone. SIGTERM and
SIGINT let a training write a checkpoint before the run ends, with status 75 after SIGTERM;
UNMASK_GRACE_SECONDS is the time that this may take, 120 by default.

prepare: Reads and tokenises what a preset's trainings read, on a machine without GPUs. Hard
negatives and look-alikes need a trained model: their notebooks prepare them. Killed at any moment, the
same command goes on.

status: The state of every notebook of a run, and of its repetitions with other seeds.

encode: Embeds the texts of a file with a trained model, on all GPUs of this machine. The embeddings are a
NumPy array with a row for each text, in their order. The same command goes on with what was interrupted.

pull: Fetches the models and the data that a preset reads, on a host with internet. The files are laid out
as on the Hub, DIR/<organisation>/<name>/... Of a text source only what data.max_text_mb needs is fetched. The
same command resumes an interrupted download. UNMASK_MIRROR=DIR then serves hosts without internet.

check: Lists a preset's models and data that UNMASK_MIRROR lacks, by the names and sizes on the Hub when they
were pulled. Exit status 1 if anything is missing.
"""

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from filelock import Timeout

from unmask.children import on_signal
from unmask.config import preset_names
from unmask.run import PREEMPTED

# What each command does, from above: what `unmask COMMAND --help` says.
MANUAL = dict(part.split(": ", 1) for part in __doc__.split("\n\n")[2:])


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
            from unmask import cli  # noqa: PLC0415 (seconds, with datasets; help need not wait for it)

            status = getattr(cli, options.command)(options) or 0
            sys.stdout.flush()  # here, where an error can be answered
            return status
    except Timeout:
        print("unmask: another process executes this run: wait, or use --run", file=sys.stderr)
        return 2
    except BrokenPipeError:  # who read this has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    # A wrong request; a preset that is no YAML; a failed notebook; a full disk; an extra that is lacking.
    except (ValueError, yaml.YAMLError, RuntimeError, OSError, ImportError) as error:
        print(f"unmask: {error}", file=sys.stderr)
        return 1 if isinstance(error, RuntimeError | OSError | ImportError) else 2
    except KeyboardInterrupt as error:
        number = next((one for one in error.args if isinstance(one, signal.Signals)), signal.SIGINT)
        print(f"unmask: stopped by {number.name}; the same command goes on from here", file=sys.stderr)
        return PREEMPTED if number == signal.SIGTERM else 128 + number


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="unmask", description=__doc__.split("\n\n")[1])
    commands = parser.add_subparsers(required=True, metavar="command")

    preset = argparse.ArgumentParser(add_help=False)
    add = preset.add_argument
    add("--preset", default="cpu", metavar="NAME", help=f"one of {', '.join(preset_names())}; default cpu")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="such as pair.steps=50; repeatable")
    named = argparse.ArgumentParser(add_help=False, parents=[preset])
    named.add_argument("--run", metavar="NAME", help="name of its folders; default: the preset's")
    shared = argparse.ArgumentParser(add_help=False, parents=[named])
    seeds = shared.add_mutually_exclusive_group().add_argument
    # Each gives the seeds of the repetitions that are meant, and None for the run itself.
    every, one = (lambda k: [*range(1, _positive(k)), None]), (lambda n: [_positive(n)])
    seeds("--seeds", type=every, default=[None], metavar="K", help="the run and K - 1 repetitions, pooled")
    seeds("--seed", dest="seeds", type=one, metavar="N", help="only its repetition NAME-seedN")

    def command(name: str, about: str, *parents: argparse.ArgumentParser, of=commands):
        added = of.add_parser(name, parents=parents, help=about, description=MANUAL[name])
        added.set_defaults(command=name)
        return added.add_argument

    add = command("run", "execute the notebooks that are due", shared)
    add("--from", dest="start", metavar="NN", help="leave out the notebooks before this one")
    add("--to", dest="stop", metavar="NN", help="leave out the notebooks after this one")
    add("--only", metavar="NN,…", help="these notebooks only")
    add("--force", action="store_true", help="run what is up to date, too; retrain what other code made")
    add("--dry-run", action="store_true", help="say what would run, why, and what it takes, and run nothing")
    add("--gpu-memory", type=_positive, default=80, metavar="GB", help="for --dry-run; default 80")
    add("--gpus", type=int, metavar="N", help="over all machines; default: the preset's")
    add("--jobs", type=_positive, default=1, metavar="J", help="up to J independent notebooks side by side")
    add("--accept-code", action="store_true", help="go on from what earlier versions of the code trained")

    command("prepare", "read and tokenise training data, without a GPU", named)
    command("status", "what is done, and what is due", shared)

    add = command("encode", "embed a file of texts")
    add("model", help="a checkpoint directory, or a name on the Hub")
    add("input", type=Path, help=".parquet, .jsonl, .csv and the like, or .txt with a text in each line")
    add("output", type=Path, help="the array, an .npy file")
    add("--precision", default="int8", help="float32, int8 (default), binary or ubinary")
    add("--dimensions", type=_positive, metavar="N", help="keep only the first N; default: all")
    add("--column", default="text", metavar="NAME", help="where the texts are, default text")

    mirrors = commands.add_parser("mirror", help="models and data for hosts without internet")
    actions = mirrors.add_subparsers(required=True, metavar="action")
    add = command("pull", "fetch what a preset reads, or go on with that", preset, of=actions)
    add("--to", type=Path, required=True, metavar="DIR", help="the mirror; created if need be")
    command("check", "say what UNMASK_MIRROR lacks", preset, of=actions)
    return parser


if __name__ == "__main__":
    sys.exit(main())
