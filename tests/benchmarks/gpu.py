"""Training steps on GPUs, for `first_gpu`. Others report 0.36 to 0.46 of the peak.

Whole steps of `unmask.training.loop.steps`: batch, forward, backward, clipping, optimiser, log. Weights are
untrained and tokens random; texts of pairs have an eighth of the length that the preset allows up to all of
it, even in their logarithm, all others the whole.

MFU = FLOPs that the mathematics needs / time / the GPU's peak: attention counted in full, logits at the
masked positions, nothing for what is computed twice (gradient caching, logits in chunks). That is per token
of a text of L tokens 3 (2 P + 4 n A L), P parameters without embeddings, n layers, A width of the queries,
and 6 V H per predicted token.

    torchrun --nproc-per-node N tests/benchmarks/gpu.py STAGE PRESET STRATEGY OPTIONS

measures the same steps on several processes, or on one that holds the model as FSDP2 does.
"""

import gc
import json
import statistics
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch._dynamo.utils
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen3ForCausalLM

import tiny
from unmask.config import ParallelConfig, Preset, load_preset
from unmask.data.hub import PACKAGED
from unmask.data.tokenize import TokenDocument, TokenPairs
from unmask.training import Contextual, Diffusion, Pair, Stage
from unmask.training.distributed import Distributed
from unmask.training.loop import steps as run_steps
from unmask_study.estimate import PEAK, parameters

WARM_UP, STEPS = 2, 4
BATCH = {"diffusion": 16, "pair": 512, "contextual": 16}  # of the 0.6B model; the paper's take too long


def work_of(preset: Preset, name: str) -> tuple[Stage, list[tuple[int, int]]]:
    """A stage with its data, and the texts of one step as (number, tokens)."""
    config, rng = getattr(preset, name), np.random.default_rng(0)

    def ids(*shape: int) -> np.ndarray:
        return rng.integers(4, preset.data.vocab_size, shape, np.int32)

    def on(kind: type[Stage], **made: Any) -> Stage:
        stage = kind(preset, None, None, only=["english"])
        vars(stage).update(made)
        return stage

    n = config.batch
    if name == "diffusion":
        stage = on(Diffusion, data=ids(2 * n, config.length), mask_token_id=3)
        return stage, [(n, config.length)]
    if name == "pair":
        shares = np.exp(rng.uniform(np.log(1 / 8), 0, (2, n)))
        limits = np.array([[config.query_length], [config.document_length]])
        columns = [[ids(int(length)) for length in row] for row in np.ceil(shares * limits)]
        pairs = TokenPairs(*columns, np.arange(3 * n).reshape(n, 3))
        return on(Pair, data={"random": pairs}), [(1, len(text)) for row in columns for text in row]
    shapes = (config.chunks, config.chunk_length), (1, config.query_length)
    documents = [TokenDocument(*(list(ids(*shape)) for shape in shapes), [0]) for _ in range(n)]
    stage = on(Contextual, data={"random": tiny.Distinct(documents)}, stored=SimpleNamespace(end=0))
    return stage, [(n, config.query_length), (n, config.document_length)]


def model_of(preset: Preset) -> PreTrainedModel:
    """A language model in a preset's shape; on a GPU its weights are drawn there."""
    shape = preset.backbone
    kind = LlamaForCausalLM if shape.checkpoint == PACKAGED else Qwen3ForCausalLM
    sizes = tiny.sizes(shape, shape.layers, preset.data.vocab_size)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return kind(kind.config_class(**sizes, tie_word_embeddings=True, is_causal=False)).cpu()


def measure(
    name: str, preset: Preset, *, steps: int = STEPS, warm_up: int = WARM_UP, processes=None, **changes: Any
) -> dict[str, Any]:
    """Trains for a few steps and returns the median rate, the MFU and the setting; the budgets that memory
    was found to hold, its peak, how often a step waited for the GPU (once, for its loss), and graphs that
    were compiled late."""
    changes |= {"steps": warm_up + steps, "warmup": 1, "decay": 0, "lr": 1e-5, "checkpoint_seconds": 3600}
    config = replace(getattr(preset, name), **changes)
    peers = processes or Distributed.alone(config.precision)
    parallel = ParallelConfig(num_processes=peers.count, strategy=peers.strategy)
    preset = replace(preset, parallel=parallel, **{name: config})
    (stage, texts), model = work_of(preset, name), model_of(preset)
    graphs, cuda = [], torch.cuda.is_available()

    def report(row: dict[str, Any]) -> None:  # before the first step, then of each
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        if cuda and row.get("step", -1) == warm_up - 1:
            torch.cuda.set_sync_debug_mode("warn")  # a warning for each wait

    gc.collect()  # compiled layers lie in cycles
    torch.compiler.reset()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trained = model if name == "diffusion" else model.model
        try:
            run_steps(stage, trained, Path(folder), peers, report, [])
        finally:
            if cuda:
                torch.cuda.set_sync_debug_mode("default")
        if not peers.main:
            return {}
        lines = Path(folder, "metrics.jsonl").read_text(encoding="utf8").splitlines()[warm_up:]
    rows = [json.loads(line) for line in lines]
    rate = statistics.median(row["tokens"] / row["seconds"] for row in rows)
    tokens, (total, body) = sum(number * length for number, length in texts), parameters(preset)
    paid = int(stage.batch(0).masked_BL.sum()) if name == "diffusion" else 0
    shape = preset.backbone
    attention = 4 * shape.layers * shape.heads * shape.head_size
    forward = sum(number * length * (2 * body + attention * length) for number, length in texts)
    flops = 3 * forward + 6 * paid * (total - body)  # the formula stands at the top
    found, kind = stage.config, "cuda" if cuda else "cpu"
    setting = f"{torch.cuda.get_device_name() if cuda else 'CPU'} × {peers.count}, {peers.strategy}"
    waits = sum("synchronizing CUDA operation" in str(one.message) for one in said)
    return {
        "rate": rate,
        "mfu": flops / tokens * rate / PEAK[config.precision] / peers.count,
        **{"keep_tokens": 0, **found.memory(kind)},
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else None,
        "waits_per_step": waits / steps if cuda else None,
        "graphs_after_warm_up": graphs[-1] - graphs[warm_up],
        "setting": f"{setting}; {config.batch} rows, compile {config.compile}, {config.precision}",
    }


if __name__ == "__main__":
    name, preset, strategy, options = sys.argv[1:]
    every = Distributed.join("bf16", strategy)
    found = measure(name, load_preset(preset), processes=every, **json.loads(options))
    if every.main:
        print(json.dumps(found), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
