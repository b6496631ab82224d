"""Several processes against one, with torchrun and gloo on the CPU."""

import json
import os
import subprocess
import sys

import pytest
import torch
import worker
from safetensors.torch import load_file

from unmask.training.distributed import Processes


def by_two(*arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [worker.__file__, *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, timeout=240, capture_output=True, text=True)


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def computed(request, tmp_path_factory):
    """What two processes computed, in one torchrun for all cases."""
    out = tmp_path_factory.mktemp(request.param)
    done = by_two(request.param, out)
    assert done.returncode == 0, done.stderr[-6000:]
    return out


def difference(found, expected):
    """Of gradients, in parts of their norm."""
    error = torch.stack([(found[key] - own).norm() for key, own in expected.items()]).norm()
    return error / torch.stack([own.norm() for own in expected.values()]).norm()


@pytest.mark.slow
@pytest.mark.parametrize("case", worker.CASES)
def test_two_processes_give_the_loss_and_gradient_of_one(computed, case):
    out = computed
    expected, gradients = worker.compute(case)
    for rank in (0, 1):
        facts = json.loads((out / f"{case}-{rank}.json").read_text())
        assert facts["tokens"] == expected["tokens"]
        assert facts["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert difference(load_file(out / f"{case}-{rank}.safetensors"), gradients) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "stage"), [("ddp", "pair"), ("fsdp2", "cde")])
def test_a_training_begun_by_two_processes_is_finished_by_one(tmp_path, strategy, stage):
    """Killed after its last checkpoint; the samples are the same, the sums are rounded differently."""
    by_two(strategy, tmp_path / "parts", stage)
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
    assert difference(found, gradients) <= tolerance
