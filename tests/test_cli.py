"""The command line: answers that need no kernel, and what it says to a request that cannot work."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

import unmask
from toy_checkout import Checkout
from unmask import cli
from unmask.config import TRAINED
from unmask.store import repository


@pytest.fixture
def two(checkout: Checkout) -> Checkout:
    checkout.notebook("00_backbone", ["1"])
    checkout.notebook("01_pair", ["1"], needs=["00_backbone"], reads=["pair"])
    return checkout


@pytest.fixture
def seeds(checkout: Checkout) -> Checkout:
    """A training that tells its seed, and fails with seed 1 while there is a file "broken"; and a report."""
    told = "from unmask.config import load_preset; seed = load_preset(preset, overrides).pair.seed; seed"
    broken = (
        f"from pathlib import Path; assert seed != 1 or not Path({str(checkout.root / 'broken')!r}).exists()"
    )
    checkout.notebook("00_pair", [told, broken], reads=["pair"])
    about = {"needs": ["00_pair"], "reads": ["data"], "seeds": "pooled"}
    checkout.notebook("01_report", ["1"], metadata={"unmask": about})
    return checkout


def test_dry_run_says_what_is_due_and_writes_nothing(two: Checkout) -> None:
    before = sorted(two.root.rglob("*.json"))
    result = two.unmask("run", "--preset", "smoke", "--run", "mine", "--dry-run")
    assert result.returncode == 0 and result.stderr == ""
    assert result.stdout.splitlines()[:4] == [
        "2 notebooks to run as 'mine', time unknown: no earlier run to go by",
        "  notebook     why        time",
        "  00_backbone  never ran  unknown",
        "  01_pair      never ran  unknown",
    ]
    assert "plan of preset 'smoke' on no GPU" in result.stdout
    assert sorted(two.root.rglob("*.json")) == before and not (two.root / "artifacts").exists()


def test_a_run_may_end_before_the_last_notebook(two: Checkout) -> None:
    result = two.unmask("run", "--preset", "smoke", "--to", "00", "--dry-run")
    assert result.returncode == 0 and result.stdout.startswith("1 notebook to run as 'smoke'")


def executed(checkout: Checkout, run: str) -> list[str]:
    return sorted(path.stem for path in (checkout.root / "papermill_runs" / run).glob("*.ipynb"))


def test_seeds_are_runs_of_their_own_that_the_run_itself_ends(seeds: Checkout) -> None:
    command = ("run", "--preset", "smoke", "--seeds", "2")
    (seeds.root / "broken").touch()
    first = seeds.unmask(*command)
    assert first.returncode == 1 and "00_pair" in first.stderr
    assert executed(seeds, "smoke-seed1") == executed(seeds, "smoke") == []
    (seeds.root / "broken").unlink()
    second = seeds.unmask(*command)
    assert second.returncode == 0, second.stderr
    assert executed(seeds, "smoke-seed1") == ["00_pair"]
    assert executed(seeds, "smoke") == ["00_pair", "01_report"]
    for run, seed in (("smoke-seed1", 1), ("smoke", 0)):
        text = (seeds.root / "papermill_runs" / run / "00_pair.ipynb").read_text()
        assert json.loads(text)["cells"][3]["outputs"][0]["data"]["text/plain"] == [str(seed)]
        about = json.loads((seeds.root / "results" / run / "provenance.json").read_text())
        trained = {section: value for section, value in about["seeds"].items() if value}
        assert trained == (dict.fromkeys(TRAINED, seed) if seed else {})

    done = seeds.root / "artifacts" / "smoke-seed1" / "00_pair" / "done.json"
    done.write_text(json.dumps(json.loads(done.read_text()) | {"hash": "another"}))
    again = seeds.unmask(*command, "--dry-run").stdout.splitlines()
    assert again[0] == "nothing to do: all of it is up to date"
    assert again[1].startswith("1 notebook to run as 'smoke'")
    assert again[3].split("  ")[1:3] == ["01_report", "run smoke-seed1 changed"]
    state = seeds.unmask("status", "--preset", "smoke", "--seeds", "2").stdout
    assert state.startswith("run 'smoke-seed1', preset 'smoke'\n") and state.count("01_report") == 1
    assert "stale: run smoke-seed1 changed" in state


def test_a_seed_repeats_no_report(seeds: Checkout) -> None:
    result = seeds.unmask("run", "--preset", "smoke", "--seed", "1", "--only", "01")
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr == "unmask: --seed 1: no notebook selected is repeated with other seeds\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--seed", "0"), "argument --seed: must be a number from 1 on, got '0'"),
        (("--seeds", "many"), "argument --seeds: must be a number from 1 on, got 'many'"),
        (("--seed", "1", "--seeds", "2"), "argument --seeds: not allowed with argument --seed"),
    ],
)
def test_seeds_that_are_none_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run", *arguments])
    assert message in capsys.readouterr().err


REGISTRY = """
sources:
  answers: {kind: hub, role: pairs, group: english, repo: org/answers, language: eng, licence: mit,
            columns: {query: q, document: a}}
"""


def test_questions_do_not_wait_for_the_hub(two: Checkout) -> None:
    (two.root / "hub.yaml").write_text(REGISTRY)
    asked = ("--preset", "smoke", "--set", f"data.source={two.root / 'hub.yaml'}")
    # Nothing listens on port 9.
    for question in (("run", "--dry-run"), ("status",)):
        result = two.unmask(
            *question, *asked, UNMASK_MIRROR="", HF_HUB_OFFLINE="0", HF_ENDPOINT="http://127.0.0.1:9"
        )
        assert result.returncode == 0 and result.stderr == ""
        assert "note: whether the data have changed was not looked at: they are on the Hub" in result.stdout
    gone = two.unmask("status", "--preset", "smoke", "--set", "data.source=nowhere")
    assert gone.returncode == 2 and "'nowhere'" in gone.stderr


def test_a_dry_run_plans_machines_that_are_elsewhere(two: Checkout) -> None:
    arguments = ("--gpus", "8", "--machines", "2", "--machine-rank", "1", "--dry-run")
    result = two.unmask("run", "--preset", "smoke", *arguments)
    assert result.returncode == 0 and result.stderr == ""
    assert "plan of preset 'smoke' on 8 GPUs, ddp" in result.stdout


def test_status_of_a_run_that_never_was(two: Checkout) -> None:
    result = two.unmask("status", "--preset", "smoke")
    assert result.returncode == 0
    assert result.stdout.splitlines()[2:] == ["  00_backbone  never ran", "  01_pair      never ran"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "smok"], "unknown preset 'smok'; did you mean 'smoke'?"),
        (["--set", "pair.stepz=3"], "unknown key 'stepz'; did you mean 'steps'?"),
        (["--set", "pairs.steps=3"], "did you mean 'pair'?"),
        (["--set", "pair.steps=many"], "pair.steps must be a valid integer, got 'many'"),
        (["--set", "pair.steps"], "write key=value"),
        (["--set", "pair.steps=[1"], "the value is not valid YAML"),
        (["--only", "1_pair"], "no notebook '1_pair'; did you mean '01_pair'?"),
        (["--from", "00", "--only", "01"], "--from and --only exclude each other"),
        (["--from", "01", "--to", "00"], "--to 00: 00_backbone comes before 01_pair, where --from 01 begins"),
        (["--only", "01"], "01_pair needs the output of 00_backbone, which never ran"),
        (["--run", "../elsewhere"], "take one without '/'"),
        (["--gpus", "3", "--machines", "2"], "3 processes cannot be shared evenly by 2 machines"),
        (["--gpus", "0"], "parallel.num_processes must be greater than or equal to 1, got 0"),
        (["--gpus", "2"], "--gpus 2: this machine has no GPU; --set parallel.num_processes=2 trains with"),
        (["--gpus", "2", "--machines", "2"], "2 machines: name the one with rank 0 by --main-host"),
        (["--machine-rank", "1"], "--machine-rank 1: there is one machine; see --machines"),
        (["--jobs", "0"], "--jobs 0: must be at least 1"),
        (["--run", "seeds"], "--run seeds: a run's name is its folders', and this one is taken"),
    ],
)
def test_a_request_that_cannot_work_is_one_message(two: Checkout, arguments: list[str], message: str) -> None:
    path = two.path_with("nvidia-smi", "exit 9")  # as where there is a driver and no GPU
    result = two.unmask("run", "--preset", "smoke", *arguments, PATH=path)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("unmask: ") and message in result.stderr
    assert "Traceback" not in result.stderr and result.stderr.count("\n") == 1
    assert not (two.root / "results").exists() and not (two.root / "papermill_runs" / "smoke").exists()


def test_a_grace_period_that_is_none_is_refused(two: Checkout) -> None:
    for text in ("two minutes", "-1", "nan"):
        result = two.unmask("run", "--preset", "smoke", UNMASK_GRACE_SECONDS=text)
        assert result.returncode == 2
        assert result.stderr == (
            f"unmask: UNMASK_GRACE_SECONDS={text}: give a number of seconds, for instance 120\n"
        )


def test_what_is_asked_for_on_the_command_line_is_in_the_executed_notebook(two: Checkout) -> None:
    result = two.unmask("run", "--preset", "smoke", "--only", "00", "--gpus", "1", "--machines", "1")
    assert result.returncode == 0, result.stderr
    parameters = "".join(two.executed("00_backbone")["cells"][2]["source"])
    assert 'overrides = {"parallel.num_processes": 1, "parallel.num_machines": 1}' in parameters
    again = two.unmask("run", "--preset", "smoke", "--only", "00", "--set", "parallel.num_processes=2")
    assert again.stdout.startswith("nothing to do: 00_backbone is up to date")


@pytest.mark.parametrize(
    ("cell", "status", "said"),
    [
        ("import os; assert os.environ['UNMASK_MAIN_HOST'] == 'localhost'", 0, ""),
        ("1 / 0", 1, "unmask: the main machine's run ended with status 1"),
        ("import os, signal; os.kill(os.getppid(), signal.SIGTERM)", 75, "unmask: pre-empted (SIGTERM)"),
    ],
)
def test_the_other_machines_end_as_the_first_one_does(
    checkout: Checkout, cell: str, status: int, said: str
) -> None:
    checkout.notebook("00_backbone", [cell, "import time; time.sleep(1)"])
    path = checkout.path_with("nvidia-smi", "exit 9")
    several = ["--machines", "2", "--main-host", "localhost", "--set", "parallel.num_processes=2"]
    command = ["run", "--preset", "smoke", *several]
    other = checkout.start(*command, "--machine-rank", "1", PATH=path)
    try:
        line = other.stdout.readline()
        first = checkout.unmask(*command, PATH=path)
        _, errors = other.communicate(timeout=60)
    finally:
        other.kill()
    assert line == "machine 1: waiting for the machine with rank 0\n"
    assert (first.returncode, other.returncode) == (status, status), first.stderr + errors
    assert errors.startswith(said) and "Traceback" not in errors
    if not status:
        late = checkout.unmask(*command, "--machine-rank", "1", PATH=path)
        assert late.returncode == 0 and late.stdout.startswith("nothing to do")


def test_a_machine_that_waits_for_the_first_one_can_be_stopped(two: Checkout) -> None:
    several = ["--machines", "2", "--main-host", "localhost", "--set", "parallel.num_processes=2"]
    path = two.path_with("nvidia-smi", "exit 9")
    other = two.start("run", "--preset", "smoke", *several, "--machine-rank", "1", PATH=path)
    try:
        other.stdout.readline()
        other.terminate()
        _, errors = other.communicate(timeout=30)
    finally:
        other.kill()
    assert other.returncode == 75 and errors.startswith("unmask: pre-empted (SIGTERM)")


SRUN = """while [ "${1#--}" != "$1" ]; do shift; done
SLURM_NODEID=0 "$@"; first=$?
SLURM_NODEID=1 "$@"; second=$?
[ $first -gt $second ] && exit $first
exit $second"""
SCONTROL = '[ "$1" = show ] && printf "node-a\\nnode-b\\n" || echo "$@" >> "$LOG"'


@pytest.mark.parametrize(("status", "requeued"), [(0, False), (1, False), (75, True)])
def test_the_slurm_template_starts_one_run_per_node_and_goes_on_after_pre_emption(
    checkout: Checkout, status: int, requeued: bool
) -> None:
    template = repository() / "papermill_runs" / "slurm.sbatch"
    subprocess.run(["bash", "-n", template], check=True)
    (checkout.root / ".venv" / "bin").mkdir(parents=True)
    (checkout.root / ".venv" / "bin" / "activate").touch()
    checkout.path_with("srun", SRUN)
    checkout.path_with("scontrol", SCONTROL)
    path = checkout.path_with("unmask", f'echo "$@" >> "$LOG"; exit {status}')
    log = checkout.root / "log"
    slurm = {
        "SLURM_SUBMIT_DIR": str(checkout.root),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_CPUS_PER_TASK": "64",
        "SLURM_JOB_ID": "7",
    }
    environment = (
        checkout.environment | slurm | {"PATH": path, "LOG": str(log), "UNMASK_ARTIFACTS": "/shared"}
    )
    arguments = ["--preset", "smoke", "--set", "pair.lr=1e-3"]
    result = subprocess.run(
        ["bash", template, *arguments], env=environment, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == status and result.stderr == ""
    lines = log.read_text().splitlines()
    assert lines[2:] == (["requeue 7"] if requeued else [])
    for rank, line in enumerate(lines[:2]):
        options = cli._parser().parse_args(line.split())
        assert (options.gpus, options.machines, options.machine_rank) == (16, 2, rank)
        assert (options.main_host, options.preset, options.set) == ("node-a", "smoke", ["pair.lr=1e-3"])


def test_a_full_disk_is_noticed_at_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], two: Checkout
) -> None:
    monkeypatch.setattr(cli, "FREE_BYTES", 2**70)
    monkeypatch.setattr(cli, "Folders", SimpleNamespace(of=lambda run, folders=two.folders: folders))
    assert cli.main(["run", "--preset", "smoke"]) == 2
    assert "MiB free where artifacts go" in capsys.readouterr().err
    assert not two.folders.artifacts.exists()


def test_questions_are_answered_without_loading_anything_heavy(two: Checkout) -> None:
    code = (
        "import sys; from unmask.cli import main; main(['status', '--preset', 'smoke']); "
        "print({'torch', 'transformers', 'papermill', 'nbformat', 'datasets'} & sys.modules.keys())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env=two.environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[-1] == "set()"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.strip() == unmask.__version__


def test_a_checkpoint_that_is_none_is_refused_before_anything_starts(capsys, tmp_path):
    assert cli.main(["run", "--preset", "smoke", "--set", f"backbone.checkpoint={tmp_path}"]) == 2
    assert "is no checkpoint: config.json and *.safetensors missing" in capsys.readouterr().err
