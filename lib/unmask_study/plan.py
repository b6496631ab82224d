"""What a run will cost, before it starts: steps, tokens, FLOPs, memory per GPU and GPU-hours of its
trainings, from the preset alone. What would not fit on one GPU is planned with half the tokens in memory at a
time, as often as a training in one process would halve them; where that does not help either, or there are
several processes, the plan is refused, with what would.

Texts are taken to be as long as the preset allows, so the plan is an upper bound: short texts cost what they
are. Mining, clustering and evaluation, on one machine, are not in it.

Symbols: n layers · H hidden size · A, K widths of queries and keys · M MLP size · V vocabulary · P parameters
· E = V·H of them embeddings, which are the output matrix, too; a model from scratch has one of its own, which
adds E to P where tokens are predicted. A contextual encoder (CDE) is two models: the first reads the context
documents of a step, the second each text behind as many slots, which count as tokens. Weights, FLOPs and
activations of the two add up.

FLOPs (a multiply-add counts two; every computation counts, repeated ones too)
    forward, per token of a text of L tokens:  2 (P − E) + 4 n A L    weights, attention (in full, not halved)
    forward, per predicted token:              2 E                    logits of pretraining, at paid
                                                                      positions only
    training = forward × (3 + repetitions): one forward pass, a backward pass of two, and
        + 1          with gradient checkpointing (not for logits)
        + 1 − K/T    with gradient caching: of a GPU's T tokens all are embedded twice but the K that it holds
GPU-hours = FLOPs / (peak × utilisation) / 3600

Bytes per GPU, under bf16 autocast; tests compare with what autograd keeps
    weights, gradients, two moments in float32  16 P, under fsdp2 divided by the GPUs
    weights in bfloat16                         2 P under ddp; under fsdp2 2 W, gathered, W = E + two layers
    gradients before their reduction            under fsdp2 4 P
    activations, per token that is held         n a + 8 H, where a = 16 H + 10 (A + K) + 8 M,
                                                compiled 8 H + 6 (A + K) + 6 M: the rest is computed again
        with gradient checkpointing             n h + a + 8 H, where h = 2 H
    logits of one chunk of R rows               16 R V, in pretraining, and with them
        the output matrix and its gradient      8 E: both in bfloat16, and the sum in float32
    embeddings of the texts of a step           48 H for each: copies on the way to the loss and back
    context, communication, fragmentation       RUNTIME_BYTES
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import islice
from typing import NamedTuple

from unmask.config import BackboneConfig, PretrainConfig, TrainConfig
from unmask.losses.pretraining import CHUNK_LOGITS, CHUNK_ROWS
from unmask_study.settings import Preset

PEAK = {"bf16": 989e12, "fp32": 67e12}  # FLOP/s, dense, data sheet of H100 and H200 SXM
# Share of the peak that is sustained, recomputation counted as work: estimated from operations and memory
# traffic of the 0.6B model's steps, not measured. llm-foundry and nanochat report 0.36 to 0.46 for dense
# pretraining.
UTILISATION = {"pretraining": 0.35, "others": 0.30}
PRETRAINING = ("ar", "diffusion")
PREDICTING = (*PRETRAINING, "reranker")
RUNTIME_BYTES = 4e9
PROMPT_TOKENS = 100  # of a reranker's prompt, without query and document
ROW = (
    "  {:<20}{:<12}{:>4} × {:>7,} steps{:>10.2e} tokens{:>10.2e} FLOP{:>11,.2f} GPU-hours{:>7.1f} GB for"
    "{:>8,} tokens at a time"
)

Texts = list[tuple[int, int]]  # (number, tokens of each)


class Training(NamedTuple):
    """Trainings of one size that a notebook starts, and their cost together on so many GPUs."""

    notebook: str
    stage: str  # section of the preset
    number: int
    steps: int  # of each
    tokens: int  # at most
    flops: float
    gpu_hours: float
    memory_gb: float  # of one GPU
    held: int  # tokens in its memory at a time, at most


def describe(preset: Preset, notebooks: Sequence[str] | None = None, *, gpu_memory: float = 80e9) -> str:
    """The plan as text, for `unmask run --dry-run`.

    Args:
        notebooks: names of those that will run; default: all.
        gpu_memory: bytes of one GPU.
    Raises: ValueError if a training does not fit into the memory of a GPU; the message says what would fit.
    """
    gpus = preset.parallel.num_processes
    if not (planned := trainings(preset, gpus, gpu_memory, notebooks)):
        return "nothing to train"
    worst = max(planned, key=lambda training: training.memory_gb)
    if worst.memory_gb * 1e9 > gpu_memory:
        remedies = _remedies(preset, worst.stage, gpus, gpu_memory, notebooks)
        raise ValueError(
            f"preset {preset.name} does not fit: {worst.stage} needs {worst.memory_gb:.0f} GB per GPU on "
            f"{gpus} under {preset.parallel.strategy}, and a GPU has {gpu_memory / 1e9:.0f} GB. "
            + (f"Any of these helps: {'; '.join(remedies)}" if remedies else "It takes GPUs with more memory")
        )
    flops, hours = sum(one.flops for one in planned), sum(one.gpu_hours for one in planned)
    size = f"{parameters(preset)[0]:,} parameters"
    lines = [
        f"plan of preset {preset.name!r} on {gpus} GPU{'s' * (gpus > 1)}, {preset.parallel.strategy}: {size}",
        *(ROW.format(*one) for one in planned),
        f"together {flops:.2e} FLOP, {hours:,.2f} GPU-hours: {hours / gpus:,.1f} hours of training, or "
        f"{hours / gpus / 24:.1f} days",
        f"estimated, not measured: {UTILISATION} of {PEAK['bf16']:.3g} FLOP/s (fp32: {PEAK['fp32']:.3g}); "
        "assumed: texts as long as they may be, and a checkpoint of the sizes of the preset's backbone; "
        "not counted: mining and evaluation",
    ]
    return "\n".join(lines)


def _remedies(
    preset: Preset, stage: str, gpus: int, gpu_memory: float, notebooks: Sequence[str] | None
) -> list[str]:
    """Options with which all trainings of the notebooks fit."""

    def fits(changed: Preset, gpus: int) -> bool:
        planned = trainings(changed, gpus, gpu_memory, notebooks)
        return max(one.memory_gb for one in planned) * 1e9 <= gpu_memory

    sharded = _with(preset, "parallel", strategy="fsdp2")
    counts = (n for n in (gpus * 2**k for k in range(1, 7)) if fits(sharded, n))
    again = fits(_with(preset, stage, gradient_checkpointing=True), gpus)
    remedies = [f"--set {stage}.gradient_checkpointing=true"] if again else []
    smaller = preset
    while not fits(smaller, gpus) and (fewer := getattr(smaller, stage).halved("cuda")):
        smaller = _with(smaller, stage, **fewer)
    if fits(smaller, gpus):
        remedies.append(" ".join(f"--set {stage}.{key}={value}" for key, value in fewer.items()))
    return remedies + [f"--gpus {n} --set parallel.strategy=fsdp2" for n in islice(counts, 1)]


def trainings(
    preset: Preset, gpus: int, gpu_memory: float = 80e9, notebooks: Sequence[str] | None = None
) -> list[Training]:
    """The trainings of the notebooks (None: of all), in their order, with their cost on so many GPUs."""
    planned = []
    for notebook, stage, number, changed in _started(preset):
        if not number or (notebooks is not None and notebook not in notebooks):
            continue
        alone = gpus == 1 and preset.parallel.strategy == "ddp"
        while alone and memory_bytes(changed, stage, gpus) > gpu_memory:
            fewer = getattr(changed, stage).halved("cuda")
            if not fewer:
                break
            changed = _with(changed, stage, **fewer)
        steps = getattr(changed, stage).steps
        tokens, flops = (number * steps * each for each in _step(changed, stage, gpus))
        speed = PEAK[getattr(changed, stage).precision]
        speed *= UTILISATION["pretraining" if stage in PRETRAINING else "others"]
        hours, memory = flops / speed / 3600, memory_bytes(changed, stage, gpus) / 1e9
        held = max(_on_a_gpu(texts, gpus, getattr(changed, stage))[0] for texts in work(changed, stage))
        planned.append(Training(notebook, stage, number, steps, tokens, flops, hours, memory, held))
    return planned


def parameters(preset: Preset) -> tuple[int, int]:
    """Parameters of one model, and how many of them are no embeddings (P and P − E)."""
    shape = preset.backbone
    body = shape.layers * _layer_parameters(shape) + shape.hidden_size  # and the final norm
    return preset.data.vocab_size * shape.hidden_size + body, body


def work(preset: Preset, stage: str) -> list[Texts]:
    """What each model that is trained reads for one loss, each text as long as it may be."""
    config = getattr(preset, stage)
    n = max(1, config.batch // getattr(config, "accumulation", 1))
    if stage in PRETRAINING:
        return [[(n, config.length)]]
    if stage == "contextual":
        return [[(n * config.queries_per_document, config.query_length), (n, config.document_length)]]
    read = (1 + getattr(config, "negatives", 0)) * n
    if stage == "reranker":
        return [[(read, PROMPT_TOKENS + config.query_length + config.document_length)]]
    slots = getattr(config, "context", 0)
    texts = [(n, slots + config.query_length), (read, slots + config.document_length)]
    return [[(min(slots, n), config.document_length)], texts] if slots else [texts]


def memory_bytes(preset: Preset, stage: str, gpus: int) -> float:
    """Peak memory of one GPU in a stage's training; the formula stands at the top of this file."""
    config, shape, models = getattr(preset, stage), preset.backbone, work(preset, stage)
    total, body = parameters(preset)
    embeddings, sharded = total - body, preset.parallel.strategy == "fsdp2"
    total += embeddings * (stage in PREDICTING and not preset.backbone.checkpoint)
    weights = 18 * total * len(models)
    if sharded:
        weights = 2 * (embeddings + 2 * _layer_parameters(shape)) + (16 / gpus + 4) * total * len(models)
    layers = activation_bytes(shape, config.compile)
    if config.gradient_checkpointing:
        layers += shape.layers * 2 * shape.hidden_size
    else:
        layers *= shape.layers
    tokens = sum(_on_a_gpu(texts, gpus, config)[0] for texts in models)
    loss = 48 * sum(number for texts in models for number, _ in texts) * shape.hidden_size
    if stage in PRETRAINING:
        loss = 16 * max(CHUNK_ROWS * preset.data.vocab_size, CHUNK_LOGITS) + 8 * embeddings
    return weights + tokens * (layers + 8 * shape.hidden_size) + loss + RUNTIME_BYTES


def activation_bytes(shape: BackboneConfig, compiled: bool) -> int:
    """What autograd keeps of one layer per token, without gradient checkpointing."""
    attention = (shape.heads + shape.kv_heads) * shape.head_size
    if compiled:
        return 8 * shape.hidden_size + 6 * attention + 6 * shape.mlp_size
    return 16 * shape.hidden_size + 10 * attention + 8 * shape.mlp_size


def _started(preset: Preset) -> Iterator[tuple[str, str, int, Preset]]:
    """(notebook, stage, number of trainings, perhaps none, preset with their changes), as the notebooks start
    them; a test holds it against them."""
    study, ablation, conteb, qwen3 = preset.quantization, preset.ablation, preset.conteb, preset.qwen3
    cut = bool(preset.backbone.keep_layers)  # the base is trained on in notebook 01, else in 07
    same = {field.name: getattr(preset.diffusion, field.name) for field in fields(PretrainConfig)}
    as_long = _with(preset, "ar", **same)
    yield "00_backbone", "ar", not preset.backbone.checkpoint, preset
    yield "01_diffusion_cpt", "diffusion", 1, preset
    yield "01_diffusion_cpt", "ar", cut, as_long
    yield "02_pair", "pair", 1, preset
    yield "03_contextual", "contextual", 1, preset
    yield "04_triplet", "triplet", 2, preset
    short = _with(preset, "pair", steps=study.steps)
    sized = [_with(short, "backbone", hidden_size=width, layers=depth) for width, depth in study.shapes]
    *others, widest = sized or [short]
    for one in others:
        yield "06_quantization", "pair", 1, one
    yield "06_quantization", "pair", 2, widest  # through INT8 and in floats
    fades = ablation.anneal > 0
    yield "07_diffusion_vs_ar", "ar", "AR continued, mean" in ablation.arms and not cut, as_long
    yield "07_diffusion_vs_ar", "diffusion", ("masked next token, mean" in ablation.arms) + fades, preset
    short = _with(preset, "pair", steps=ablation.steps, batch=ablation.batch or preset.pair.batch)
    arms = 3 + len(ablation.arms) + fades
    if len(ablation.rates) > 1:
        trial = _with(short, "pair", steps=ablation.rate_steps or ablation.steps)
        yield "07_diffusion_vs_ar", "pair", arms * len(ablation.rates), trial
    if len(ablation.rates) == 1 or ablation.rate_steps:
        yield "07_diffusion_vs_ar", "pair", arms, short
    yield "07_diffusion_vs_ar", "pair", 4 * ablation.parts, short
    asked, swept = conteb.queries_per_document, "sweep" in conteb.trainings
    short = _with(preset, "contextual", steps=conteb.steps, queries_per_document=asked)
    yield "08_conteb", "contextual", (2 + len(conteb.lambdas)) * swept, short
    yield "08_conteb", "contextual", len(conteb.trainings) - swept, preset
    sizes = Counter((changes["batch"], changes["context"]) for changes in preset.cde.trainings.values())
    for (batch, context), number in sizes.items():
        yield "10_cde", "cde", number, _with(preset, "cde", batch=batch, context=context)
    reranks = "reranker" in qwen3.trainings
    yield "11_qwen3_embedding", "qwen3", 1, _with(preset, "qwen3", steps=qwen3.weak_steps, negatives=0)
    yield "11_qwen3_embedding", "qwen3", 1 + len(qwen3.trainings) - reranks, preset
    yield "11_qwen3_embedding", "reranker", reranks, preset


def _with(preset: Preset, section: str, **changes) -> Preset:
    return replace(preset, **{section: replace(getattr(preset, section), **changes)})


def _on_a_gpu(texts: Texts, gpus: int, config: TrainConfig) -> tuple[int, float]:
    """Tokens of one loss whose activations a GPU holds at a time (of a micro-batch, or of several that are
    kept), and their share of all its tokens."""
    memory = config.memory("cuda")
    budget = memory["token_budget"]
    held = max(1, memory.get("keep_tokens", 0) // budget) * budget
    own = math.ceil(sum(number * length for number, length in texts) / gpus)
    tokens = max(max(length for _, length in texts), min(held, own))
    return tokens, min(1, tokens / own)


def _step(preset: Preset, stage: str, gpus: int) -> tuple[int, float]:
    """Tokens and FLOPs of one step on all GPUs."""
    config, (total, body) = getattr(preset, stage), parameters(preset)
    cached = stage not in PREDICTING
    read, flops = 0, 0.0
    for texts in work(preset, stage):
        _, share = _on_a_gpu(texts, gpus, config)
        flops += (3 + config.gradient_checkpointing + cached * (1 - share)) * forward(preset, texts)
        read += sum(number * length for number, length in texts)
    if stage in PRETRAINING:
        paid = config.masked_share if stage == "diffusion" else 1
        flops += 3 * 2 * (total - body) * paid * read  # logits
    losses = getattr(config, "accumulation", 1)  # independent ones of a step
    return losses * read, losses * flops


def forward(preset: Preset, texts: Texts) -> float:
    """FLOPs of reading texts once."""
    shape, (_, body) = preset.backbone, parameters(preset)
    attention = 4 * shape.layers * shape.heads * shape.head_size
    return sum(number * length * (2 * body + attention * length) for number, length in texts)


def _layer_parameters(shape: BackboneConfig) -> int:
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    norms = 2 * shape.hidden_size + 2 * shape.head_size
    return shape.hidden_size * (2 * queries + 2 * keys + 3 * shape.mlp_size) + norms
