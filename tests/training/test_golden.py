"""Loss and gradient norm of every stage's first batches, frozen: a refactoring must not change them."""

import json
from pathlib import Path

import pytest
import tiny_stages
import torch

ALIKE = {"cluster_size": 3, "filter_margin": 0.0}
CASES = {name: (name, {}) for name in tiny_stages.STAGES} | {
    "insent": ("contextual", {"objective": "insent"}),
    "pair of look-alikes": ("pair", ALIKE),
    "qwen3 of look-alikes": ("qwen3", ALIKE),
}
VECTORS = "AVX" in torch.backends.cpu.get_cpu_capability()  # without, sums run in another order
FILE = Path(__file__).with_name("golden.json")  # {case: [[loss, norm of the gradient], …]}


def measured(case):
    name, changes = CASES[case]
    stage, model = tiny_stages.stage(name, **changes), tiny_stages.model(name)
    found = []
    for number in range(3):
        loss, gradients = tiny_stages.step(stage, model, stage.batch(number))
        norm = torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm()
        found.append([loss, float(norm)])
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_first_batches_give_the_loss_and_gradient_of_before(case):
    for found, expected in zip(measured(case), json.loads(FILE.read_text())[case], strict=True):
        assert found == pytest.approx(expected, rel=1e-6 if VECTORS else 1e-5)


if __name__ == "__main__":  # writes the file anew
    lines = (f" {json.dumps(case)}: {json.dumps(measured(case))}" for case in CASES)
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
