"""What several processes compute, for test_distributed.py: torchrun --nproc-per-node 2 worker.py STRATEGY OUT

Every process writes OUT/<case>-<rank>.safetensors (whole gradients) and OUT/<case>-<rank>.json. Then they
begin a training in OUT and are killed after its last checkpoint.
"""

import json
import os
import sys
from itertools import count
from pathlib import Path

from safetensors.torch import save_file

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS.parent / "lib"), str(TESTS), str(TESTS / "training")]

import tiny_stages  # noqa: E402

from unmask.training import loop  # noqa: E402
from unmask.training.distributed import ALONE, Processes  # noqa: E402

# Odd numbers, so that nothing divides evenly; budgets that give every process more than two micro-batches.
CASES = {
    "ar": {"batch": 11, "token_budget": 16},
    "diffusion": {"batch": 11, "token_budget": 16, "cut_fraction": 0.3},
    "pair": {"batch": 9, "token_budget": 20},
    "kept": {
        "stage": "pair",
        "batch": 9,
        "token_budget": 20,
        "keep_tokens": 45,
    },  # of one process more fit than of the other
    "contextual": {"batch": 5, "token_budget": 20},
    "insent": {"stage": "contextual", "objective": "insent", "batch": 5, "token_budget": 20},
    "triplet": {"batch": 7, "token_budget": 20, "accumulation": 2},
    "look-alikes": {"stage": "pair", "batch": 9, "token_budget": 20, "cluster_size": 3, "filter_margin": 0.0},
    "qwen3": {"batch": 7, "token_budget": 20},
    "reranker": {"batch": 7, "token_budget": 40},
    "cde": {"batch": 9, "token_budget": 14},
    "one block": {"stage": "diffusion", "batch": 1, "token_budget": 16},
    "one micro-batch": {"stage": "pair", "batch": 9, "token_budget": 10_000},
    "too few": {"stage": "pair", "batch": 2, "token_budget": 10_000},
}
BEGUN = {"ddp": "pair", "fsdp2": "cde"}  # by two processes


def compute(case, processes=ALONE):
    """Metrics and whole gradients of one step."""
    settings = dict(CASES[case])
    name = settings.pop("stage", case)
    stage, model = tiny_stages.stage(name, **settings), tiny_stages.model(name)
    module = processes.parallel(stage.module(model))
    row = stage.backward(module, stage.batch(3), processes)
    processes.sum_gradients(model)
    gradients = {}
    for key, parameter in model.named_parameters():
        gradient = parameter.grad
        gradients[key] = (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).cpu()
    return {"loss": float(row["loss"]), "tokens": row["tokens"]}, gradients


def train_stage(name, folder, processes=ALONE, stop_after=-1):
    """A training of eight steps; the model and what was reported first."""
    seen = []

    def report(row):
        seen.append(row)
        if row.get("step") == stop_after:
            os._exit(1)

    stage, model = tiny_stages.stage(name, **CASES[name]), tiny_stages.model(name)
    loop.steps(stage, model, folder, report=report, processes=processes)
    return model, seen[0]


def main(strategy, out):
    processes = Processes.join("fp32", strategy)
    loop.monotonic, loop.RARE = count().__next__, 0  # as in conftest.py
    for case in CASES:
        facts, gradients = compute(case, processes)
        name = f"{case}-{processes.rank}"
        save_file(gradients, Path(out) / f"{name}.safetensors")
        (Path(out) / f"{name}.json").write_text(json.dumps(facts))
    train_stage(BEGUN[strategy], Path(out), processes, stop_after=5)


if __name__ == "__main__":
    main(*sys.argv[1:])
