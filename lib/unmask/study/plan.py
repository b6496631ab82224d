"""What a run will cost, before it starts: steps, tokens, FLOPs, memory per GPU, GPU-hours and disk of every
training, from the preset alone. A plan that cannot fit is refused, with what would.

Texts are taken to be as long as the preset allows, so the plan is an upper bound: short texts cost what they
are. Only trainings are counted, not evaluation, mining, clustering and merging.

Symbols: n layers · H hidden size · A, K widths of queries and keys · M MLP size · V vocabulary · P parameters
· E = V·H of them embeddings, tied to the output. A contextual encoder (CDE) is two such models: the first
reads the context documents of a step, the second each text behind as many slots, which count as tokens.
Weights, FLOPs and activations of the two add up.

FLOPs (a multiply-add counts two; every computation counts, repeated ones too)
    forward, per token of a text of L tokens:  2 (P − E) + 4 n A L    weights, attention (in full, not halved)
    forward, per predicted token:              2 E                    logits, at paid positions only; a
                                                                      reranker's prompt predicts one
    training = forward × (3 + repetitions): one forward pass, a backward pass of two, and
        + 1          with gradient checkpointing (not for logits), and for logits that come in several chunks
        + (g − 1)/g  with gradient caching over g micro-batches per GPU: all but the last are embedded twice
GPU-hours = FLOPs / (peak × utilisation) / 3600, divided by the share of the GPUs that have a text to work on.

Bytes per GPU, under bf16 autocast; tests compare with what autograd keeps and with the peak of a training
    weights, gradients, two moments in float32  16 P, under fsdp2 divided by the GPUs
    weights in bfloat16                         2 P under ddp; under fsdp2 2 W, gathered, W = E + two layers
    gradients before their reduction            under fsdp2 4 P with several micro-batches, else 4 W
    activations of a micro-batch, per token     n a + 8 H, where a = 26 H + 10 (A + K) + 8 M;
                                                16 H under fsdp2, whose residual stream is bfloat16 too
        with gradient checkpointing             n h + a + 8 H, where h = 4 H (2 H under fsdp2)
    logits of one chunk of R rows               16 R V + 2 E; a reranker's micro-batch is one chunk
    embeddings of the global batch              48 H for each: copies on the way to the loss and back
    similarities of this GPU's queries          16 for each, times the Matryoshka prefixes; one tile at most
    context, communication, fragmentation       RUNTIME_BYTES
In float32 weights exist once and a = 24 H + 16 (A + K + M). torch.compile keeps less than this.

Disk = kept checkpoints of one training and the one being written (12 P each: weights and moments)
    + finished models, models of steps under way and merge candidates (4 P each)
    + pretraining text and its tokens (4 bytes per token)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from unmask.config import (
    BackboneConfig,
    CdeConfig,
    ContextualConfig,
    DiffusionConfig,
    PairConfig,
    Preset,
    PretrainConfig,
    Qwen3Config,
    RerankerConfig,
    TrainConfig,
    TripletConfig,
)
from unmask.losses.contrastive import TILE_SCORES
from unmask.losses.pretraining import CHUNK_LOGITS, CHUNK_ROWS

GPU_MEMORY = 80e9  # bytes; H100 SXM
PEAK = {"bf16": 989e12, "fp32": 67e12}  # FLOP/s, dense, data sheet of H100 and H200 SXM
# Share of the peak that a training sustains, recomputation counted as work. Pretraining: llm-foundry and
# nanochat report 36 to 46 % for dense models. The rest is assumed, not measured: the other steps have short
# texts and wait for the embeddings of all processes, narrow matrices do not fill a GPU.
UTILISATION = {"pretraining": 0.40, "other stages": 0.30}
NARROW, NARROW_FACTOR = 1024, 0.75  # hidden sizes below, and what is left of the utilisation there
RUNTIME_BYTES = 4e9
BYTES_PER_TOKEN = 4  # of text: 4.07 for docstrings and source with a vocabulary of 32,768
WITHOUT_GPUS = -23  # where a row of the table ends without its last two columns
PROMPT_TOKENS = 100  # of a reranker's prompt, without query and document


Texts = list[tuple[int, int]]  # (number, tokens of each)


@dataclass(frozen=True)
class Training:
    """One training that a notebook starts, and its cost on so many GPUs."""

    notebook: str
    name: str  # as in its artifacts folder
    stage: str  # section of the preset
    steps: int
    parameters: int
    tokens: int  # at most
    flops: float
    gpu_hours: float
    memory_bytes_per_gpu: float


@dataclass(frozen=True)
class Work:
    """What one step embeds and compares, each text as long as it may be."""

    models: list[Texts]  # that each model which is trained reads
    rows: int = 0  # embeddings that one contrastive loss looks at
    similarities: int = 0  # that it computes
    losses: int = 1  # independent ones; each has its own embeddings and micro-batches


def describe(
    preset: Preset, *, gpus: int, stages: Sequence[str] | None = None, gpu_memory: float = GPU_MEMORY
) -> str:
    """The plan as text, for `unmask run --dry-run`.

    Args:
        gpus: over all machines; 0: a machine without, so nothing is said about GPUs.
        stages: names of the notebooks that will run; default: all.
        gpu_memory: bytes of one GPU.
    Raises: ValueError if a training does not fit into the memory of a GPU; the message says what would fit.
    """
    planned = [t for t in trainings(preset, max(1, gpus)) if stages is None or t.notebook in stages]
    if not planned:
        return f"plan of preset {preset.name!r}: nothing to train"
    where = f"{_plural(gpus)}, {preset.parallel.strategy}" if gpus else "no GPU"
    total, body = parameters(preset)
    lines = [
        f"plan of preset {preset.name!r} on {where}",
        f"model: {_short(total)} parameters, {_short(body)} without embeddings",
        *(row[: None if gpus else WITHOUT_GPUS].rstrip() for row in _table(planned)),
        f"disk: at most {_bytes(disk_bytes(preset, planned))} "
        f"(checkpoints of {_bytes(12 * total)}, at most {_kept(preset, planned)} at a time)",
        "counted: the trainings, every text as long as it may be; not counted: evaluation, mining, merging",
    ]
    if gpus:
        _check_memory(preset, planned, gpus, gpu_memory)
        lines += _times(preset, planned, gpus)
    return "\n".join(lines)


def trainings(preset: Preset, gpus: int) -> list[Training]:
    """Every training of the notebooks, in their order, with its cost on so many GPUs."""
    planned = []
    for notebook, name, stage, changed in _started(preset):
        config = getattr(changed, stage)
        models = work(config).models
        tokens = sum(count * length for texts in models for count, length in texts)
        flops = config.steps * _flops_of_step(changed, config, gpus)
        share = UTILISATION["pretraining" if isinstance(config, PretrainConfig) else "other stages"]
        speed = PEAK[config.precision] * share * _narrow(changed) * _busy(config, gpus)
        planned.append(
            Training(
                notebook,
                name,
                stage,
                config.steps,
                parameters=len(models) * parameters(changed)[0],
                tokens=config.steps * tokens,
                flops=flops,
                gpu_hours=flops / speed / 3600,
                memory_bytes_per_gpu=memory_bytes(changed, stage, gpus),
            )
        )
    return planned


def parameters(preset: Preset) -> tuple[int, int]:
    """Parameters of one model, and how many of them are no embeddings (P and P − E)."""
    shape = preset.backbone
    body = shape.layers * _layer_parameters(shape) + shape.hidden_size  # and the final norm
    return preset.data.vocab_size * shape.hidden_size + body, body


def work(config: TrainConfig) -> Work:
    """The work of one step of a stage."""
    n = config.batch
    match config:
        case PretrainConfig():
            return Work([[(n, config.length)]])
        case RerankerConfig():
            prompt = PROMPT_TOKENS + config.query_length + config.document_length
            return Work([[((1 + config.negatives) * n, prompt)]])
        case ContextualConfig():
            queries, chunks = n * config.queries_per_document, n * config.chunks
            document = config.chunks * config.chunk_length + config.chunks - 1  # separators
            texts = [(queries, config.query_length), (n, document)]
            return Work([texts], queries + chunks, queries * (chunks + n + queries))
        case TripletConfig():
            texts = [(n, config.query_length), ((1 + config.negatives) * n, config.document_length)]
            queries, each = math.ceil(n / config.accumulation), 1 + config.negatives
            return Work([texts], (1 + each) * queries, each * queries**2, config.accumulation)
        case Qwen3Config(negatives=hard):
            texts = [(n, config.query_length), ((1 + hard) * n, config.document_length)]
            return Work([texts], (2 + hard) * n, n * (3 * n + hard))
        case CdeConfig(context=slots) if slots:
            first = [(min(slots, n), config.document_length)]
            second = [(n, slots + config.query_length), (n, slots + config.document_length)]
            return Work([first, second], 2 * n + slots, 2 * n**2)
        case PairConfig():
            return Work([[(n, config.query_length), (n, config.document_length)]], 2 * n, 2 * n**2)


def memory_bytes(preset: Preset, stage: str, gpus: int) -> float:
    """Peak memory of one GPU in a stage's training; the formula stands at the top of this file."""
    config, shape = getattr(preset, stage), preset.backbone
    step, (total, body) = work(config), parameters(preset)
    embeddings = total - body
    sharded, half = preset.parallel.strategy == "fsdp2", config.precision == "bf16"
    micro_batches = [_micro_batch(config, texts, step.losses, gpus) for texts in step.models]
    several = any(groups * step.losses > 1 for _, _, groups in micro_batches)
    total *= len(micro_batches)
    if sharded:
        gathered = embeddings + 2 * _layer_parameters(shape)
        waiting = 4 * (total if several else gathered)
        weights = 16 * total / gpus + (2 if half else 4) * gathered + waiting
    else:
        weights = (18 if half else 16) * total

    layer = layers = activation_bytes(shape, half=half, sharded=sharded)
    layers *= shape.layers
    if config.gradient_checkpointing:
        layers = shape.layers * (2 if sharded and half else 4) * shape.hidden_size + layer
    activations = sum(tokens for tokens, _, _ in micro_batches) * (layers + 8 * shape.hidden_size)

    if step.rows:
        prefixes = len(config.dimensions) if isinstance(config, ContextualConfig | Qwen3Config) else 1
        similarities = prefixes * min(step.similarities / gpus, TILE_SCORES)
        loss = 48 * step.rows * shape.hidden_size + 16 * similarities
    else:
        tokens, texts, _ = micro_batches[0]
        rows = texts if isinstance(config, RerankerConfig) else min(tokens, _chunk_rows(preset))
        loss = 16 * rows * preset.data.vocab_size + 2 * embeddings
    return weights + activations + loss + RUNTIME_BYTES


def activation_bytes(shape: BackboneConfig, *, half: bool, sharded: bool) -> int:
    """What autograd keeps of one layer per token, without gradient checkpointing."""
    hidden, mlp = shape.hidden_size, shape.mlp_size
    attention = (shape.heads + shape.kv_heads) * shape.head_size
    if not half:
        return 24 * hidden + 16 * attention + 16 * mlp
    return (16 if sharded else 26) * hidden + 10 * attention + 8 * mlp


def disk_bytes(preset: Preset, planned: Sequence[Training]) -> float:
    """What the trainings will write, and the pretraining data they read."""
    total, _ = parameters(preset)
    merged = 2 * len(preset.merge.t) + 1  # candidates from both triplet models, and the export
    if any(training.stage == "qwen3" for training in planned):
        merged += preset.qwen3.checkpoints + 1  # of steps under way, and what they become together
    models = 4 * (sum(training.parameters for training in planned) + total * merged)
    checkpoints = 12 * max(training.parameters for training in planned) * _kept(preset, planned)
    text = preset.data.max_text_mb * 1e6
    read = [training.tokens for training in planned if training.stage in ("ar", "diffusion")]
    blocks = sum(4 * min(tokens, text / BYTES_PER_TOKEN) for tokens in read)
    return checkpoints + models + (text + blocks if blocks else 0)


def _started(preset: Preset) -> Iterator[tuple[str, str, str, Preset]]:
    """(notebook, training, stage, preset with its changes) as the notebooks start them; a test holds it
    against them."""
    shape, study = preset.backbone, preset.quantization
    if not shape.checkpoint:
        yield "00_backbone", "ar", "ar", preset
    yield "01_diffusion_cpt", "diffusion", "diffusion", preset
    yield "02_pair", "pair", "pair", preset
    yield "03_contextual", "contextual", "contextual", preset
    for parent in ("pair", "contextual"):
        yield "04_triplet", f"from_{parent}", "triplet", preset
    short = _with(preset, "pair", steps=study.steps)
    small = {
        f"{w}x{d}": replace(short, backbone=replace(shape, hidden_size=w, layers=d)) for w, d in study.shapes
    }
    for name in small:
        yield "06_quantization", name, "pair", small[name]
    widest = "{}x{}".format(*study.shapes[-1])
    yield "06_quantization", f"{widest}-float", "pair", small[widest]
    ablation = preset.ablation
    arms = ["AR-mean", "AR-last", "diffusion-mean", "diffusion-last", "bidirectional-mean"]
    if ablation.controls:
        same = {one.name: getattr(preset.diffusion, one.name) for one in fields(PretrainConfig)}
        yield "07_diffusion_vs_ar", "ar-continued", "ar", _with(preset, "ar", **same)
        yield "07_diffusion_vs_ar", "masked-next-token", "diffusion", preset
        arms += ["AR-continued-mean", "masked-next-token-mean"]
    short = _with(preset, "pair", steps=ablation.steps, batch=ablation.batch or preset.pair.batch)
    for seed in range(ablation.seeds):
        for arm in arms:
            yield "07_diffusion_vs_ar", f"{arm}-s{seed}", "pair", short
    for name in ("pplx", *(f"insent-{lam:g}" for lam in preset.conteb.lambdas)):
        yield "08_conteb", name, "contextual", _with(preset, "contextual", steps=preset.conteb.steps)
    yield "08_conteb", "insent", "contextual", preset
    for name, changes in preset.cde.trainings.items():
        yield "10_cde", name, "cde", _with(preset, "cde", **changes)
    weak = _with(preset, "qwen3", steps=preset.qwen3.weak_steps, negatives=0)
    yield "11_qwen3_embedding", "weak", "qwen3", weak
    for name in ("full", "no-weak"):
        yield "11_qwen3_embedding", name, "qwen3", preset
    yield "11_qwen3_embedding", "reranker", "reranker", preset


def _with(preset: Preset, section: str, **changes) -> Preset:
    return replace(preset, **{section: replace(getattr(preset, section), **changes)})


def _micro_batch(config: TrainConfig, texts: Texts, losses: int, gpus: int) -> tuple[int, int, int]:
    """Tokens and longest texts of one micro-batch, and how many micro-batches of one loss a GPU works
    through."""
    longest = max(length for _, length in texts)
    own = math.ceil(sum(count * length for count, length in texts) / losses / gpus)
    room = max(config.token_budget, longest)
    tokens = max(longest, min(room, own))
    return tokens, tokens // longest, math.ceil(own / room)


def _flops_of_step(preset: Preset, config: TrainConfig, gpus: int) -> float:
    shape, step, (total, body) = preset.backbone, work(config), parameters(preset)
    width, again = shape.heads * shape.head_size, int(config.gradient_checkpointing)
    flops = 0.0
    for texts in step.models:
        tokens, _, groups = _micro_batch(config, texts, step.losses, gpus)
        forward = sum(
            count * length * (2 * body + 4 * shape.layers * width * length) for count, length in texts
        )
        flops += forward * (3 + again + ((groups - 1) / groups if step.rows else 0))
    logit = 2 * (total - body)
    if isinstance(config, RerankerConfig):
        return flops + 3 * logit * (1 + config.negatives) * config.batch
    if not isinstance(config, PretrainConfig):
        return flops
    paid = config.masked_share if isinstance(config, DiffusionConfig) else 1
    passes = 4 if paid * tokens > _chunk_rows(preset) else 3
    return flops + passes * paid * config.batch * config.length * logit


def _chunk_rows(preset: Preset) -> int:
    return max(CHUNK_ROWS, CHUNK_LOGITS // preset.data.vocab_size)


def _narrow(preset: Preset) -> float:
    return NARROW_FACTOR if preset.backbone.hidden_size < NARROW else 1


def _busy(config: TrainConfig, gpus: int) -> float:
    """Share of the GPUs' time in which they have one of the longest texts to work on."""
    step = work(config)
    number, _ = max(step.models[-1], key=lambda text: text[1])
    waves = number / step.losses / gpus
    return waves / math.ceil(waves)


def _layer_parameters(shape: BackboneConfig) -> int:
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    norms = 2 * shape.hidden_size + 2 * shape.head_size
    return shape.hidden_size * (2 * queries + 2 * keys + 3 * shape.mlp_size) + norms


def _kept(preset: Preset, planned: Sequence[Training]) -> int:
    """Checkpoints on disk at a time: one is written before the oldest goes."""
    return max(getattr(preset, t.stage).keep_checkpoints for t in planned) + 1


def _check_memory(preset: Preset, planned: Sequence[Training], gpus: int, gpu_memory: float) -> None:
    worst = max(planned, key=lambda training: training.memory_bytes_per_gpu)
    if worst.memory_bytes_per_gpu <= gpu_memory:
        return
    config, stage = getattr(preset, worst.stage), worst.stage
    remedies = {
        f"--set {stage}.gradient_checkpointing=true": not config.gradient_checkpointing,
        "--set parallel.strategy=fsdp2": preset.parallel.strategy != "fsdp2" and gpus > 1,
        f"--set {stage}.token_budget={config.token_budget // 2}": True,
        f"--gpus {2 * gpus} --set parallel.strategy=fsdp2": True,
    }
    raise ValueError(
        f"preset {preset.name} does not fit: the {stage} training needs {_bytes(worst.memory_bytes_per_gpu)} "
        f"per GPU on {_plural(gpus)} under {preset.parallel.strategy}, and a GPU has {_bytes(gpu_memory)}. "
        f"Less take, together or alone: {'; '.join(remedy for remedy, helps in remedies.items() if helps)}"
    )


def _table(planned: Sequence[Training]) -> Iterator[str]:
    row = "  {:<20}{:<27}{:>9}{:>10}{:>11}{:>12}{:>11}".format
    yield row("notebook", "training", "steps", "tokens", "FLOPs", "GPU-hours", "per GPU")
    for t in planned:
        costs = _short(t.tokens), f"{t.flops:.2e}", f"{t.gpu_hours:,.2f}", _bytes(t.memory_bytes_per_gpu)
        yield row(t.notebook, t.name, f"{t.steps:,}", *costs)
    tokens, flops, hours = (sum(getattr(t, key) for t in planned) for key in ("tokens", "flops", "gpu_hours"))
    peak = max(t.memory_bytes_per_gpu for t in planned)
    yield row("all", "", "", _short(tokens), f"{flops:.2e}", f"{hours:,.2f}", _bytes(peak))


def _times(preset: Preset, planned: Sequence[Training], gpus: int) -> Iterator[str]:
    hours = sum(t.gpu_hours for t in planned) / gpus
    shares = " and ".join(f"{_narrow(preset) * share:.0%} ({kind})" for kind, share in UTILISATION.items())
    yield (
        f"time: {_duration(hours)} of training at an MFU of {shares} of "
        f"{PEAK['bf16'] / 1e12:.0f} TFLOP/s, assumed, recomputation counted"
    )
    for stage in dict.fromkeys(t.stage for t in planned):
        idle = 1 - _busy(getattr(preset, stage), gpus)
        if idle > 0.1:
            few = f"{stage} has too few texts in a step for {gpus} GPUs"
            yield f"note: {few}: {idle:.0%} of their time is idle"


def _duration(hours: float) -> str:
    if hours < 2:
        return f"{60 * hours:.0f} minutes"
    return f"{hours:.0f} hours" if hours < 48 else f"{hours / 24:.1f} days"


def _plural(gpus: int) -> str:
    return "1 GPU" if gpus == 1 else f"{gpus} GPUs"


def _short(number: float, units: Sequence[str] = ("T", "B", "M", "k")) -> str:
    for power, unit in zip((1e12, 1e9, 1e6, 1e3), units, strict=True):
        if number >= power:
            return f"{number / power:.3g} {unit}"
    return f"{number:.0f}"


def _bytes(number: float) -> str:
    return _short(number, ("TB", "GB", "MB", "kB"))
