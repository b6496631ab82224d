"""Several processes against one, with torchrun and gloo on the CPU."""

import json
import os
import subprocess
import sys
from itertools import chain

import pytest
import torch
import worker
from safetensors.torch import load_file

from unmask.training.distributed import ALONE, Processes

LAYER_GROUPS = 3  # of parameters that FSDP2 gathers and reduces together: two layers, and the rest


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def computed(request, tmp_path_factory):
    """What two processes computed, in one torchrun for all cases."""
    out = tmp_path_factory.mktemp(request.param)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, worker.__file__, request.param, str(out)],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=240, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    return request.param, out


@pytest.mark.slow
@pytest.mark.parametrize("case", worker.CASES)
def test_two_processes_give_the_loss_and_gradient_of_one(computed, case):
    _, out = computed
    expected, gradients = worker.compute(case)
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    for rank in (0, 1):
        facts = json.loads((out / f"{case}-{rank}.json").read_text())
        found = load_file(out / f"{case}-{rank}.safetensors")
        assert facts["tokens"] == expected["tokens"]
        assert facts["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert found.keys() == gradients.keys()
        error = torch.stack([(found[key] - gradients[key]).norm() for key in gradients]).norm()
        assert error <= 1e-5 * norm


@pytest.mark.slow
@pytest.mark.parametrize("case", worker.CASES)
def test_every_gradient_is_reduced_once_per_step(computed, case):
    strategy, out = computed
    for rank in (0, 1):
        facts = json.loads((out / f"{case}-{rank}.json").read_text())
        models = 2 if case == "cde" else 1
        assert len(facts["reductions"]) == models * (1 if strategy == "ddp" else LAYER_GROUPS)
        if case in ("pair", "contextual", "triplet", "cde"):
            assert min(facts["passes"]) > 2


def test_the_shares_of_the_processes_cover_everything_once():
    team = [Processes(rank=rank, count=3) for rank in range(3)]
    for n in (0, 1, 2, 7, 9):
        parts = [list(range(n))[one.slice(n)] for one in team]
        assert list(chain(*parts)) == list(range(n))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        assert sorted(chain(*(one.share(range(n)) for one in team))) == list(range(n))
    assert ALONE.slice(5) == slice(0, 5)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "stage"), [("ddp", "pair"), ("fsdp2", "cde")])
def test_a_training_begun_by_two_processes_is_finished_by_one(tmp_path, strategy, stage):
    """Killed after its last checkpoint; the samples are the same, the sums are rounded differently."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run(
        [*command, worker.__file__, strategy, str(tmp_path / "parts"), stage],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=240, capture_output=True,
    )  # fmt: skip
    assert [p.name for p in (tmp_path / "parts" / "checkpoints").iterdir()] == ["step-0000004-a"]
    whole, _ = worker.train_stage(stage, tmp_path / "whole")
    resumed, first = worker.train_stage(stage, tmp_path / "parts")
    assert first == {"total": 8, "done": 4}
    rows = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").open()]
        for name in ("whole", "parts")
    ]
    for one, two in zip(*rows, strict=True):
        assert (one["step"], one["dataset"], one["tokens"]) == (two["step"], two["dataset"], two["tokens"])
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
    for one, two in zip(whole.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-3), ("bf16", 0.1)])
@pytest.mark.parametrize("case", worker.CASES)
def test_the_gpu_gives_the_loss_and_gradient_of_the_cpu(case, precision, tolerance):
    """In bf16 with its own kernels: sequences without padding, fused cross-entropy."""
    expected, gradients = worker.compute(case)
    facts, found = worker.compute(case, Processes.start(precision))
    assert facts["loss"] == pytest.approx(expected["loss"], rel=tolerance)
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    error = torch.stack([(found[key] - gradients[key]).norm() for key in gradients]).norm()
    assert error <= tolerance * norm
