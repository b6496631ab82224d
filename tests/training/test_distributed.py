"""Two processes against one, with gloo on the CPU; started by torchrun: test_launch.py."""

import json
import os
import subprocess
import sys
from itertools import product

import pytest
import tiny_stages
import torch
import worker
from filelock import FileLock
from safetensors.torch import load_file

from closeness import assert_close
from unmask.training import history
from unmask.training.distributed import Distributed


@pytest.fixture(scope="module")
def by_two(tmp_path_factory):
    """The folder of what two processes computed and began; once for all workers."""
    base = tmp_path_factory.getbasetemp()
    out = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "by_two"
    with FileLock(f"{out}.lock"):
        if not out.is_dir():
            work(out, CUDA_VISIBLE_DEVICES="")
    return out


def work(out, **environment):
    """Two processes compute all cases and begin their trainings."""
    out.mkdir()
    command, environment = [sys.executable, worker.__file__, str(out)], os.environ | environment
    done = subprocess.run(command, env=environment, timeout=900, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]


def agree(out, case, tolerance):
    expected, gradients = worker.compute(case)
    for strategy, rank in product(worker.STRATEGIES, (0, 1)):
        file = out / strategy / f"{case}-{rank}"
        facts = json.loads(file.with_suffix(".json").read_text())
        assert facts["tokens"] == expected["tokens"]
        assert facts["loss"] == pytest.approx(expected["loss"], rel=tolerance)
        assert tiny_stages.difference(load_file(file.with_suffix(".safetensors")), gradients) <= tolerance


@pytest.mark.slow
@pytest.mark.parametrize("case", worker.CASES)
def test_two_processes_give_the_loss_and_gradient_of_one(by_two, case):
    agree(by_two, case, 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
def test_two_gpus_give_the_loss_and_gradient_of_one_process(tmp_path):
    work(tmp_path / "out")
    for case in worker.CASES:
        agree(tmp_path / "out", case, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "name"), worker.BEGUN)
def test_a_training_begun_by_two_processes_is_finished_by_one(by_two, tmp_path, strategy, name):
    """The samples are the same, the sums are rounded differently."""
    parts = by_two / strategy / name
    whole, _ = worker.train_stage(name, tmp_path)
    resumed, first = worker.train_stage(name, parts)
    assert first == {"total": 8, "done": 4}
    for one, two in zip(*(history(path / "model") for path in (tmp_path, parts)), strict=True):
        rounded = [{key: row.pop(key) for key in ("loss", "grad_norm")} for row in (one, two)]
        assert one | {"seconds": 0} == two | {"seconds": 0}
        assert rounded[1] == pytest.approx(rounded[0], rel=1e-4)
    assert_close(*(tuple(model.parameters()) for model in (whole, resumed)), 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-3), ("bf16", 0.1)])
@pytest.mark.parametrize("case", worker.CASES)
def test_the_gpu_gives_the_loss_and_gradient_of_the_cpu(case, precision, tolerance):
    """In bf16 with its own kernels: sequences without padding, fused cross-entropy."""
    expected, gradients = worker.compute(case)
    facts, found = worker.compute(case, Distributed.alone(precision))
    assert facts["loss"] == pytest.approx(expected["loss"], rel=tolerance)
    assert tiny_stages.difference(found, gradients) <= tolerance
