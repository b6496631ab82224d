"""What two processes compute, for test_distributed.py: python worker.py OUT

Each of them writes OUT/<strategy>/<case>-<rank>.safetensors (whole gradients) and .json. Then they begin
trainings in OUT/<strategy>/<case> and leave each after its last checkpoint.
"""

import json
import os
import shutil
import socket
import sys
from contextlib import suppress
from itertools import count
from pathlib import Path

from safetensors.torch import save_file
from torch.multiprocessing import start_processes

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS.parent / "lib"), str(TESTS), str(TESTS / "training")]

import tiny_stages  # noqa: E402

from unmask.training import loop  # noqa: E402
from unmask.training.distributed import ALONE, Distributed  # noqa: E402

# Odd numbers, so that nothing divides evenly; budgets that give every process more than two micro-batches.
CASES = {
    "ar": {"batch": 11, "token_budget": 16},
    "diffusion": {"batch": 11, "token_budget": 16, "cut_fraction": 0.3},
    "frozen": {"stage": "diffusion", "batch": 11, "token_budget": 16, "freeze_embeddings": True},
    "pair": {"batch": 9, "token_budget": 20},
    # Of one process more fit than of the other.
    "kept": {"stage": "pair", "batch": 9, "token_budget": 20, "keep_tokens": 45},
    "contextual": {"batch": 5, "token_budget": 20},
    "insent": {"stage": "contextual", "objective": "insent", "batch": 5, "token_budget": 20},
    "triplet": {"batch": 7, "token_budget": 20, "accumulation": 2},
    "look-alikes": {"stage": "pair", "batch": 9, "token_budget": 20, "cluster_size": 3, "filter_margin": 0.0},
    "qwen3": {"batch": 7, "token_budget": 20},
    "reranker": {"batch": 7, "token_budget": 40},
    "cde": {"batch": 9, "token_budget": 14},
    "compiled": {"stage": "pair", "batch": 9, "token_budget": 20, "compile": bool(shutil.which("g++"))},
    "one block": {"stage": "diffusion", "batch": 1, "token_budget": 16},
    "one micro-batch": {"stage": "pair", "batch": 9, "token_budget": 10_000},
    "too few": {"stage": "pair", "batch": 2, "token_budget": 10_000},
}
STRATEGIES = ("ddp", "fsdp2")
BEGUN = [("ddp", "pair"), ("fsdp2", "cde"), ("ddp", "frozen"), ("fsdp2", "frozen")]  # trainings


def stage_of(case):
    settings = dict(CASES[case])
    name = settings.pop("stage", case)
    return tiny_stages.stage(name, **settings), tiny_stages.model(name)


def compute(case, processes=ALONE):
    """Metrics and whole gradients of one step."""
    stage, model = stage_of(case)
    forward, _ = loop.equip(stage, model, processes)
    row = stage.backward(forward, stage.batch(3), processes)
    processes.sum_gradients(model)
    sums = {key: weight.grad for key, weight in model.named_parameters() if weight.requires_grad}
    whole = {key: x.full_tensor() if hasattr(x, "full_tensor") else x for key, x in sums.items()}
    return {"loss": float(row["loss"]), "tokens": row["tokens"]}, {key: x.cpu() for key, x in whole.items()}


def train_stage(case, folder, processes=ALONE, stop_at=None):
    """A training of eight steps; the model and what was reported first."""
    seen, (stage, model) = [], stage_of(case)
    whole, done = stage.backward, count()

    def backward(*arguments):
        if next(done) == stop_at:
            raise tiny_stages.Interrupted
        return whole(*arguments)

    stage.backward = backward
    loop.steps(stage, model, folder, processes, seen.append, [])
    return model, seen[0]


def main(rank, out, port):
    place = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2"}
    os.environ |= place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    loop.monotonic, loop.RARE = count().__next__, 0  # as in conftest.py
    for strategy in STRATEGIES:
        processes, folder = Distributed.join("fp32", strategy), Path(out, strategy)
        folder.mkdir(exist_ok=True)
        for case in CASES:
            facts, gradients = compute(case, processes)
            save_file(gradients, folder / f"{case}-{rank}.safetensors")
            (folder / f"{case}-{rank}.json").write_text(json.dumps(facts))
        for case in [case for how, case in BEGUN if how == strategy]:
            with suppress(tiny_stages.Interrupted):
                train_stage(case, folder / case, processes, stop_at=5)


if __name__ == "__main__":  # forked, as loading the library takes longer than what they compute
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start_processes(main, (sys.argv[1], port), nprocs=2, start_method="fork")
