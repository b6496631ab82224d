"""The first hour on a GPU, in commands of at most ten minutes that need no internet:

    kernels   attention and cross-entropy against float32: error and TFLOP/s
    steps     diffusion, pair and contextual steps of the 0.6B model and of SmolLM2, eager and compiled, in
              three minutes: MFU, memory, graphs compiled again, waits for the GPU; with
              --large a step of 16,384 pairs
    sharded   FSDP2 on one GPU, and where there are two on both: its rate, and the losses of the smoke preset,
              beside those of a process that holds the whole model
    decide    preset gpu: is diffusion a better start? Notebooks 00, 01 and 07
    recipe    preset gpu: the recipe, notebooks 00 to 05

`papermill_runs/first_gpu.sh COMMAND` runs one and leaves results/gpu/COMMAND.json. With `--small` the same
code runs at toy size, on a CPU too, and nothing is kept. `decide` and `recipe` want their data prepared, end
by SIGTERM before ten minutes are over, and go on when they are called again.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gpu
import measure
import sittings
import steps
import torch
import torch.nn.functional as F
from sittings import SITTINGS
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from unmask.losses import pretraining
from unmask.models.attention import varlen_attn
from unmask.store import artifacts_root, repository
from unmask.training import history

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
Row = dict[str, Any]
Compute = Callable[..., Tensor]


def compared(name: str, work: float, ours: Compute, exact: Compute, *inputs: Tensor) -> Row:
    """Forward and backward in bfloat16: TFLOP/s, and relative errors of result and gradients (float32)."""

    def run(compute: Compute, *values: Tensor) -> list[Tensor]:
        values = [value.detach().requires_grad_() for value in values]
        result = compute(*values)
        return [result.detach(), *torch.autograd.grad(result.float().square().sum(), values)]

    def whole() -> None:
        run(ours, *inputs)
        if GPU:
            torch.cuda.synchronize()

    try:
        seconds = statistics.median([measure.seconds(whole) for _ in range(6)][1:])
    except RuntimeError as error:
        return {"name": name, "why": f"not run: {str(error).splitlines()[0]}"}
    pairs = zip(run(ours, *inputs), run(exact, *(value.float() for value in inputs)), strict=True)
    errors = [float((a.float() - b).norm() / b.norm()) for a, b in pairs]
    return {"name": name, "tflops": work / seconds / 1e12, "seconds": seconds, "errors": errors}


def kernels(small: bool) -> Iterator[Row]:
    """Attention at one length and at mixed ones; cross-entropy of a large vocabulary."""
    heads, length, width, texts = (2, 64, 16, 3) if small else (16, 4096, 128, 4)
    q, k, v = (torch.randn(texts, heads, length, width, device=DEVICE).bfloat16() for _ in range(3))
    work = 3.5 * 4 * texts * heads * length**2 * width  # 3.5: two products forward, five backward
    exact = partial(F.scaled_dot_product_attention, enable_gqa=True)
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):

        def attention(*values: Tensor, backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return exact(*values)

        name = f"attention, {texts} × {length}, keys shared by two heads, {backend.name}"
        yield compared(name, work, attention, exact, q, k[:, ::2], v[:, ::2])
    lengths = [length // 16 * share for share in (1, 2, 5, 8, 16, 3)]
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    packed = [torch.randn(ends[-1], heads, width, device=DEVICE).bfloat16() for _ in range(3)]
    starts = torch.tensor(ends, dtype=torch.int32, device=DEVICE)

    def varlen(*values: Tensor) -> Tensor:
        return varlen_attn(*values, starts, starts, max(lengths), max(lengths))

    def one_by_one(*values: Tensor) -> Tensor:
        parts = ([x[a:b].transpose(0, 1)[None] for x in values] for a, b in itertools.pairwise(ends))
        return torch.cat([F.scaled_dot_product_attention(*part)[0].transpose(0, 1) for part in parts])

    work = 3.5 * 4 * heads * width * sum(one**2 for one in lengths)
    yield compared(f"attention, lengths {lengths}, varlen", work, varlen, one_by_one, *packed)

    rows, width, vocabulary = (40, 16, 300) if small else (8192, 1024, 151_936)
    hidden = torch.randn(rows, width, device=DEVICE).bfloat16()
    unembedding = (torch.randn(vocabulary, width, device=DEVICE) / width**0.5).bfloat16()
    targets = torch.randint(vocabulary, (rows,), device=DEVICE)
    size = max(pretraining.CHUNK_ROWS, pretraining.CHUNK_LOGITS // vocabulary)

    def ours(hidden: Tensor, unembedding: Tensor) -> Tensor:
        weights = torch.full((rows,), 1 / rows, device=DEVICE)
        return pretraining._WeightedNats.apply(hidden, unembedding, targets, weights, (size, size), True)

    def plain(hidden: Tensor, unembedding: Tensor) -> Tensor:
        return F.cross_entropy((hidden @ unembedding.T).float(), targets)

    work = 6 * rows * width * vocabulary
    yield compared("cross-entropy, ours", work, ours, plain, hidden, unembedding)
    yield compared("cross-entropy, all logits", work, plain, plain, hidden, unembedding)


def losses(run: str) -> dict[str, list[float]]:
    """Of the last training of each name in a run, for each step."""
    links = sorted((artifacts_root() / run).glob("*/*/model"))
    return {f"{one.parts[-3]}/{one.parts[-2]}": [row["loss"] for row in history(one)] for one in links}


def sharded(small: bool) -> Iterator[Row]:
    """Rates of steps that differ in how the model is held, and losses of trainings that differ in nothing
    else or in whether layers are compiled."""
    most, strategies = min(2, torch.cuda.device_count()), ("ddp", "fsdp2")
    stages, counts = ("diffusion", "pair")[: 1 if small else 2], (1, 2)[: max(1, most)]
    for stage, count, strategy in itertools.product(stages, counts, strategies):
        yield held(stage, count, strategy, "smoke" if small else "paper-0.6b")
    if small:
        return
    runs = {name: ["--set", f"parallel.strategy={name}", "--to", "03"] for name in strategies}
    compiled = ["--set", "ar.compile=true", "--set", "diffusion.compile=true", "--to", "01"]
    runs["compiled"] = [*runs["fsdp2"][:2], *compiled]
    if most > 1:  # one alone sends nothing
        runs |= {f"{name}-on-2": [*runs[name], "--gpus", "2"] for name in strategies}
    for name, arguments in runs.items():
        run = "run", "--preset", "smoke", "--run", f"gpu-{name}"
        yield {"name": name, "status": sittings.unmask(*run, *arguments).wait()}
    ddp = losses("gpu-ddp")
    for held_as, (name, values) in itertools.product([*runs][1:], ddp.items()):
        pairs = zip(values, losses(f"gpu-{held_as}").get(name, []))
        worst = max((abs(a - b) / abs(a) for a, b in pairs), default=None)
        yield {"name": f"{name}, {held_as}", "largest_relative_difference": worst}


def held(stage: str, count: int, strategy: str, preset: str) -> Row:
    """The rate of a step on so many processes, from a process of its own for each."""
    # Budgets that fit: several processes do not halve them.
    options = {"batch": gpu.BATCH[stage], "compile": GPU, "token_budget": 16_384} if preset != "smoke" else {}
    options |= {"keep_tokens": 1} if stage != "diffusion" else {}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    program = [gpu.__file__, stage, preset, strategy, json.dumps(options)]
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([*torchrun, *program], capture_output=True, text=True, env=paths)
    name = {"name": f"{stage}, {strategy} on {count}"}
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "Error" in line]
        return name | {"why": f"not run: {said[0] if said else done.stderr[-200:]}"}
    return name | json.loads(done.stdout.splitlines()[-1])


COMMANDS = {"kernels": kernels, "steps": steps.steps, "sharded": sharded}
COMMANDS |= {name: partial(sittings.sit, name) for name in SITTINGS}


def main(arguments: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__.partition(",")[0])
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--small", action="store_true", help="toy size; nothing is kept")
    parser.add_argument("--large", action="store_true", help="steps: the row of 16,384 pairs")
    parser.add_argument("--seed", type=int, metavar="N", help="decide, recipe: of their trainings")
    options = parser.parse_args(arguments)
    named = {key: value for key in ("seed", "large") if (value := getattr(options, key))}
    allowed = {"steps": {"large"}, "decide": {"seed"}, "recipe": {"seed"}}.get(options.command, set())
    if named.keys() - allowed:
        parser.error("--large is for steps, --seed for decide and recipe")
    if not (GPU or options.small):
        parser.error("this machine has no GPU: --small runs the same code at toy size")
    about = {"device": torch.cuda.get_device_name() if GPU else "CPU", "torch": torch.__version__}
    about["time"] = time.strftime("%Y-%m-%d %H:%M")
    found = []
    for row in COMMANDS[options.command](options.small, **named):
        print(json.dumps(row), flush=True)
        found.append(row)
        if not options.small:  # what was measured before an interruption stays
            name = options.command + "-large" * options.large
            path = repository() / "results" / "gpu" / f"{name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(about | {"rows": found}, indent=1) + "\n", encoding="utf8")
    if options.command == "steps":
        print(steps.table(found))
    return found


if __name__ == "__main__":
    main()
