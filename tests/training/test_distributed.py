"""Several processes against one, with torchrun and gloo on the CPU."""

import json
import os
import subprocess
import sys

import pytest
import torch
import worker
from filelock import FileLock
from safetensors.torch import load_file
from tiny_stages import difference

from closeness import assert_close
from unmask.training.distributed import Processes


@pytest.fixture(scope="module", params=worker.BEGUN)
def by_two(request, tmp_path_factory):
    """A strategy, and the folder of what two processes computed and began with it; once for all workers."""
    base, strategy = tmp_path_factory.getbasetemp(), request.param
    out = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / strategy
    with FileLock(f"{out}.lock"):
        if not out.is_dir():
            work(strategy, out, CUDA_VISIBLE_DEVICES="")
    return strategy, out


def work(strategy, out, **environment):
    """Two processes compute all cases and begin a training."""
    out.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [worker.__file__, strategy, str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(command, env=environment, timeout=900, capture_output=True, text=True)
    assert [path.name for path in out.glob("checkpoints/*")] == ["step-0000004"], done.stderr[-6000:]


def agree(out, case, tolerance):
    expected, gradients = worker.compute(case)
    for rank in (0, 1):
        facts = json.loads((out / f"{case}-{rank}.json").read_text())
        assert facts["tokens"] == expected["tokens"]
        assert facts["loss"] == pytest.approx(expected["loss"], rel=tolerance)
        assert difference(load_file(out / f"{case}-{rank}.safetensors"), gradients) <= tolerance


@pytest.mark.slow
@pytest.mark.parametrize("case", worker.CASES)
def test_two_processes_give_the_loss_and_gradient_of_one(by_two, case):
    agree(by_two[1], case, 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
@pytest.mark.parametrize("strategy", worker.BEGUN)
def test_two_gpus_give_the_loss_and_gradient_of_one_process(strategy, tmp_path):
    work(strategy, tmp_path / "out")
    for case in worker.CASES:
        agree(tmp_path / "out", case, 1e-3)


@pytest.mark.slow
def test_a_training_begun_by_two_processes_is_finished_by_one(by_two, tmp_path):
    """Killed after its last checkpoint; the samples are the same, the sums are rounded differently."""
    strategy, parts = by_two
    whole, _ = worker.train_stage(worker.BEGUN[strategy], tmp_path)
    resumed, first = worker.train_stage(worker.BEGUN[strategy], parts)
    assert first == {"total": 8, "done": 4}
    rows = [[json.loads(line) for line in (path / "metrics.jsonl").open()] for path in (tmp_path, parts)]
    for one, two in zip(*rows, strict=True):
        assert (one["step"], one["dataset"], one["tokens"]) == (two["step"], two["dataset"], two["tokens"])
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
    for one, two in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert_close(one, two, 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-3), ("bf16", 0.1)])
@pytest.mark.parametrize("case", worker.CASES)
def test_the_gpu_gives_the_loss_and_gradient_of_the_cpu(case, precision, tolerance):
    """In bf16 with its own kernels: sequences without padding, fused cross-entropy."""
    expected, gradients = worker.compute(case)
    facts, found = worker.compute(case, Processes.alone(precision))
    assert facts["loss"] == pytest.approx(expected["loss"], rel=tolerance)
    assert difference(found, gradients) <= tolerance
