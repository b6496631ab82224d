"""The command line: answers that need no kernel, and what it says to a request that cannot work."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

import tiny
from fake_hub import known_hub
from tiny_sources import write_as
from toy_checkout import Checkout
from unmask.config import TRAINED
from unmask.data.tokens import train_tokenizer
from unmask.models import backbone
from unmask.store import repository, write_atomic
from unmask_study import cli
from unmask_study.cli import _parser, main
from unmask_study.settings import load_preset


@pytest.fixture
def two(checkout: Checkout) -> Checkout:
    checkout.notebook("00_backbone", ["1"])
    checkout.notebook("01_pair", ["1"], needs=["00_backbone"], reads=["pair"])
    return checkout


def test_dry_run_says_what_is_due_and_writes_nothing(two: Checkout) -> None:
    result = two.unmask("run", "--preset", "smoke", "--run", "mine", "--to", "00", "--dry-run")
    assert result.returncode == 0 and result.stderr == ""
    head, titles, row = result.stdout.splitlines()[:3]
    assert head == "run 'mine': 1 to do" and titles.endswith("whole time, ≈ by steps and tokens  state")
    states = {name: f"{name} ≈ 0:01:00 not done yet".split() for name in ("00_backbone", "01_pair")}
    assert row.split() == states["00_backbone"]
    assert "together 0:01:00 with --jobs 1\n" in result.stdout
    whole = two.unmask("run", "--preset", "smoke", "--dry-run", "--gpus", "8").stdout
    assert "trainings, estimated for 8 H100:\n" in whole
    assert re.search(r"01_pair +pair +\d+ steps × [\d,]+ tokens +0.00 hours\n", whole)
    assert not (two.root / "artifacts").exists() and not (two.root / "results").exists()
    rows = two.unmask("status", "--preset", "smoke").stdout.partition("  state\n")[2].splitlines()
    assert [row.split() for row in rows] == [*states.values()]


def test_seeds_are_runs_of_their_own_that_the_run_itself_ends(checkout: Checkout) -> None:
    """A training that tells its seed, and fails with seed 1 while there is a file "broken"; and a report."""
    broken = checkout.root / "broken"
    seed = "from unmask.config import load_preset; seed = load_preset(preset, overrides).pair.seed; seed"
    cells = [seed, f"from pathlib import Path; assert seed != 1 or not Path({str(broken)!r}).exists()"]
    checkout.notebook("00_pair", cells, reads=["pair"])
    checkout.notebook("01_report", ["1"], needs=["00_pair"], seeds="pooled")
    runs = checkout.root / "papermill_runs"

    def executed(run: str) -> list[str]:
        return sorted(path.stem for path in (runs / run).glob("*.ipynb"))

    command = ("run", "--preset", "smoke", "--seeds", "2")
    broken.touch()
    assert checkout.unmask(*command).returncode == 1 and executed("smoke") == []
    broken.unlink()
    second = checkout.unmask(*command)
    assert second.returncode == 0, second.stderr
    assert "notebooks: papermill_runs/smoke-seed1\n" in second.stdout and "report: " not in second.stdout
    assert executed("smoke-seed1") == ["00_pair"] and executed("smoke") == ["00_pair", "01_report"]
    for run, seed in (("smoke-seed1", 1), ("smoke", 0)):
        ran = json.loads((runs / run / "00_pair.ipynb").read_text())
        assert ran["cells"][3]["outputs"][0]["data"]["text/plain"] == [str(seed)]
        preset = json.loads((checkout.root / "results" / run / "provenance.json").read_text())["preset"]
        assert {preset[section]["seed"] for section in TRAINED} == {seed}

    write_atomic(checkout.root / "results" / "smoke-seed1" / "scores" / "00_pair.parquet", "copied later")
    again = checkout.unmask(*command, "--dry-run").stdout
    assert "run 'smoke-seed1': nothing to do" in again and "run smoke-seed1 changed" in again
    assert "run 'smoke-seed2': 1 to do" in checkout.unmask(*command[:3], "--seed", "2", "--dry-run").stdout
    state = checkout.unmask("status", "--preset", "smoke", "--seeds", "2").stdout
    assert state.startswith("run 'smoke-seed1', preset 'smoke'\n") and state.count("01_report") == 1
    assert "run smoke-seed1 changed" in state
    assert checkout.unmask("status", "--preset", "smoke", "--seed", "1").stdout.count("run '") == 1
    with pytest.raises(SystemExit):  # one or the other
        checkout.unmask(*command, "--seed", "1")


def test_questions_do_not_wait_for_the_hub(two: Checkout) -> None:
    (two.root / "hub.yaml").write_text(
        "sources: {answers: {kind: hub, role: pairs, group: english, repo: org/answers, language: eng, "
        "licence: mit, columns: {query: q, document: a}}}"
    )
    asked = ("status", "--preset", "smoke", "--set")
    with known_hub("http://127.0.0.1:9"):  # where nothing listens
        question = two.unmask(*asked, "data.source=hub.yaml")
    assert question.returncode == 0 and question.stderr == ""
    assert "note: the data are on the Hub" in question.stdout
    gone = two.unmask(*asked, "data.source=nowhere")
    assert gone.returncode == 2 and "nowhere" in gone.stderr


REFUSED = {
    "unknown preset": ("run --preset smok", "unknown preset 'smok'; did you mean 'smoke'?"),
    "no value": ("run --set pair.steps", "write key=value"),
    "no YAML": ("run --set pair.lr=[1", "--set pair.lr=[1: the value is no YAML"),
    "no directory": ("run --set backbone.checkpoint=/none", "/none is no directory here"),
    "unknown notebook": ("run --only 2_pair", "no notebook '2_pair'; did you mean '02_pair'?"),
    "empty notebook": ("run --only ", "no notebook ''; "),
    "not of a seed": ("run --seed 1 --only 12", "repetitions leave these notebooks out: give the command"),
    "path as run": ("run --run ../elsewhere", "--run ../elsewhere: a run's name is its folders'"),
    "run of the lab": ("run --run lab", "--run lab: a run's name is its folders'"),
    "no GPUs": ("run --gpus 0", "parallel.num_processes must be greater than or equal to 1, got 0"),
    "too many GPUs": ("run --gpus 99", "99 GPUs are needed on this machine, and it has "),
}


@pytest.mark.parametrize(("command", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_request(capsys, tmp_path, command, message):
    name, *options = command.split(" ")
    assert main([name, "--preset", "smoke", *options]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("unmask: ") and message in errors and errors.count("\n") == 1
    assert not any(tmp_path.iterdir())


def test_preparing_says_what_is_not_there_and_where_a_disk_is_full(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("UNMASK_PREPARED", "")  # --check sets it
    backbone.save(tiny.model(bidirectional=False, head=True), tiny.tokenizer(), tmp_path / "ready")
    ready = f"--set=backbone.checkpoint={tmp_path / 'ready'}"
    for what, *changed in (["weights smollm2-135m"], ["corpus environment-", ready]):
        assert main(["prepare", "--preset", "smollm2", "--check", *changed]) == 2
        assert f"unmask: {what}" in (said := capsys.readouterr().err) and "not prepared" in said

    def full(config):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("unmask.data.sources.open_corpus", full)
    monkeypatch.setenv("UNMASK_PREPARED", "")
    assert main(["prepare", "--preset", "smollm2", ready]) == 1
    assert capsys.readouterr().err == f"unmask: [Errno 28] No space left on device: {tmp_path}\n"


def test_weights_come_before_anything_else(two: Checkout, capsys) -> None:
    """Without them nothing is read, no notebook starts, and one message says what to do."""
    for command in ("run", "prepare"):
        assert main([command, "--preset", "smollm2"]) == 2
        said = capsys.readouterr().err
        assert said.startswith("unmask: the weights of smollm2-135m (93 MB) cannot be fetched: ")
        assert said.count("\n") == 1 and "UNMASK_MIRROR=DIR, " in said and "`make smoke`" in said
    assert not [*two.root.glob("artifacts/data/made/*"), *two.root.glob("papermill_runs/smollm2/*.ipynb")]
    assert main(["run", "--preset", "smollm2", "--dry-run"]) == 0


def test_own_texts_that_the_tokenizer_hardly_knows_are_noted(tmp_path, capsys) -> None:
    registry = repository() / "papermill_runs" / "sources" / "own.yaml"
    examples = registry.with_name("own") / "pairs.jsonl"
    rows = [json.loads(line) for line in examples.read_text("utf8").splitlines()]
    (tmp_path / "ready").mkdir()
    train_tokenizer([row["document"] for row in rows] * 4, 2500, tmp_path / "ready")
    ready = {"backbone.checkpoint": str(tmp_path / "ready")}
    cli._require(load_preset("own", ready))
    assert capsys.readouterr().out == ""
    shutil.copy(registry, tmp_path)
    shutil.copytree(examples.parent, tmp_path / "own")
    german = {"document": "Was sich hier nicht übersetzen lässt.", "query": "Könnten wir das öfter sehen?"}
    write_as(tmp_path / "own" / "pairs.jsonl", [row | german for row in rows])
    cli._require(load_preset("own", ready | {"data.source": str(tmp_path / "own.yaml")}))
    note = capsys.readouterr().out
    assert note.startswith("note: bytes of text in a token: pairs ") and note.count("\n") == 1
    assert "documents" not in note and "another backbone.checkpoint" in note and "--preset scratch" in note


@pytest.mark.parametrize(("status", "requeued"), [(0, False), (1, False), (75, True)])
def test_slurm_template(checkout: Checkout, status: int, requeued: bool) -> None:
    """It runs once, hands on SIGTERM, and goes on after pre-emption."""
    template = repository() / "papermill_runs" / "slurm.sbatch"
    (checkout.root / ".venv" / "bin").mkdir(parents=True)
    (checkout.root / ".venv" / "bin" / "activate").touch()
    checkout.path_with("scontrol", '[ "$1" = show ] && printf "node-a\\nnode-b\\n" || echo "$@" >> "$LOG"')
    waits = "trap 'kill $!; exit 75' TERM; sleep 9 >&- 2>&- & kill $PPID; wait"
    stopped = waits if status == 75 else f"exit {status}"
    path = checkout.path_with("unmask", f'printf "%s\\n" "$HEAD" "$@" > "$LOG.unmask"; {stopped}')
    log = checkout.root / "log"
    slurm = {"SUBMIT_DIR": str(checkout.root), "JOB_NUM_NODES": "2", "JOB_NODELIST": "node-[a-b]"}
    slurm |= {"JOB_ID": "7", "GPUS_ON_NODE": "8", "CPUS_PER_TASK": "64"}
    environment = os.environ | {f"SLURM_{key}": value for key, value in slurm.items()}
    environment |= {"PATH": path, "LOG": str(log), "UNMASK_ARTIFACTS": "/shared"}
    command = ["bash", template, "--preset", "paper-0.6b", "--set", "pair.lr=1e-3"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == status and result.stderr == ""
    assert (log.read_text() if log.exists() else "") == "requeue 7\n" * requeued
    head, *command = log.with_name("log.unmask").read_text().splitlines()
    options = _parser().parse_args(command)
    assert (head, options.gpus, options.preset) == ("node-a", 16, "paper-0.6b")
    parallel = load_preset(options.preset, cli._overrides(options.set)).parallel
    assert parallel.num_machines == 2
    assert parallel.launcher.startswith("srun ") and "--nnodes=2 --nproc-per-node=8" in parallel.launcher
    assert parallel.launcher.endswith("--rdzv-backend=c10d --rdzv-endpoint=node-a:29500")


def test_it_ends_quietly_when_its_reader_has_left(two: Checkout) -> None:
    command = [sys.executable, "-m", "unmask_study", "status", "--preset", "smoke"]
    own = os.environ | {"PYTHONPATH": str(two.root / "lib")}
    process = subprocess.Popen(command, cwd=two.root, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 141


def test_sigterm_is_answered_with_75_before_any_notebook_runs(monkeypatch) -> None:
    monkeypatch.setattr(cli, "_open", lambda *_, **__: os.kill(os.getpid(), 15))
    assert main(["status"]) == 75


def test_help_loads_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "papermill", "nbformat", "datasets", "pyarrow", "numpy"}
    code = f"import sys, unmask_study.__main__; print({heavy} & sys.modules.keys())"
    environment = os.environ | {"PYTHONPATH": str(repository() / "lib")}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True) == "set()\n"
