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

import itertools
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
PROMPT_TOKENS = 100  # of a reranker's prompt, without query and document


@dataclass(frozen=True)
class Training:
    """One training that a notebook starts. Without GPUs asked for, there are no hours and no memory."""

    notebook: str
    name: str  # as in its artifacts folder
    stage: str  # section of the preset
    steps: int
    parameters: int
    tokens: int  # at most
    flops: float
    gpu_hours: float | None
    memory_bytes_per_gpu: float | None


def describe(
    preset: Preset,
    *,
    gpus: int,
    machines: int = 1,
    stages: Sequence[str] | None = None,
    gpu_memory: float = GPU_MEMORY,
) -> str:
    """The plan as text, for `unmask run --dry-run`.

    Args:
        gpus: over all machines; 0: a machine without, so nothing is said about GPUs.
        stages: names of the notebooks that will run; default: all.
        gpu_memory: bytes of one GPU.
    Raises: ValueError if a training does not fit into the memory of a GPU; the message says what would fit.
    """
    planned = [t for t in trainings(preset, gpus) if stages is None or t.notebook in stages]
    if not planned:
        return f"plan of preset {preset.name!r}: nothing to train"
    if gpus:
        _check_memory(preset, planned, gpus, gpu_memory)
    where = "no GPU"
    if gpus:
        where = f"{_plural(gpus, 'GPU')} on {_plural(machines, 'machine')}, {preset.parallel.strategy}"
    total, body = parameters(preset)
    lines = [
        f"plan of preset {preset.name!r} on {where}",
        f"model: {_count(total)} parameters, {_count(body)} without embeddings",
        *_table(planned, gpu_memory if gpus else None),
        f"disk: at most {_bytes(disk_bytes(preset, planned))} "
        f"(checkpoints of {_bytes(12 * total)}, at most {_kept(preset, planned)} at a time)",
        *_notes(preset, planned, gpus),
    ]
    return "\n".join(lines)


def trainings(preset: Preset, gpus: int) -> list[Training]:
    """Every training of the notebooks, in their order, with its cost on so many GPUs."""
    planned = []
    for notebook, name, stage, changed in _started(preset):
        steps, encoders = getattr(changed, stage).steps, _encoders(changed, stage)
        planned.append(
            Training(
                notebook,
                name,
                stage,
                steps,
                len(encoders) * parameters(changed)[0],
                steps * sum(count * length for texts in encoders for count, length in texts),
                steps * _flops_of_step(changed, stage, max(1, gpus)),
                _gpu_hours(changed, stage, gpus) if gpus else None,
                memory_bytes(changed, stage, gpus) if gpus else None,
            )
        )
    return planned


def parameters(preset: Preset) -> tuple[int, int]:
    """Parameters of one model, and how many of them are no embeddings (P and P − E)."""
    shape = preset.backbone
    layer = _layer_parameters(shape)
    body = shape.layers * layer + shape.hidden_size  # and the final norm
    return preset.data.vocab_size * shape.hidden_size + body, body


def memory_bytes(preset: Preset, stage: str, gpus: int) -> float:
    """Peak memory of one GPU in a stage's training; the formula stands at the top of this file."""
    config, shape = getattr(preset, stage), preset.backbone
    total, body = parameters(preset)
    embeddings = total - body
    sharded, half = preset.parallel.strategy == "fsdp2", config.precision == "bf16"
    width = 2 if half else 4
    micro_batches = [_micro_batch(preset, stage, texts, gpus) for texts in _encoders(preset, stage)]
    several = any(groups * _losses(preset, stage) > 1 for _, _, groups in micro_batches)
    total *= len(micro_batches)

    state = 16 * total / (gpus if sharded else 1)
    if sharded:
        gathered = embeddings + 2 * _layer_parameters(shape)
        weights, waiting = width * gathered, 4 * (total if several else gathered)
    else:
        weights, waiting = (2 * total if half else 0), 0

    stream = 2 if sharded and half else 4
    layer = activation_bytes(shape, half=half, sharded=sharded)
    if config.gradient_checkpointing:
        layers = shape.layers * stream * shape.hidden_size + layer
    else:
        layers = shape.layers * layer
    activations = sum(tokens for tokens, _, _ in micro_batches) * (layers + 8 * shape.hidden_size)

    if isinstance(config, PretrainConfig | RerankerConfig):
        tokens, texts, _ = micro_batches[0]
        rows = texts if isinstance(config, RerankerConfig) else min(tokens, _chunk_rows(preset))
        loss = 16 * rows * preset.data.vocab_size + 2 * embeddings
    else:
        rows, similarities = _loss_size(preset, stage)
        prefixes = len(config.dimensions) if isinstance(config, ContextualConfig | Qwen3Config) else 1
        loss = 48 * rows * shape.hidden_size + 16 * prefixes * min(similarities / gpus, TILE_SCORES)
    return state + weights + waiting + activations + loss + RUNTIME_BYTES


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
    text, blocks = preset.data.max_text_mb * 1e6, 0.0
    for training in planned:
        if training.stage in ("ar", "diffusion"):
            blocks += 4 * min(training.tokens, text / BYTES_PER_TOKEN)
    models = 4 * (sum(training.parameters for training in planned) + total * merged)
    checkpoints = 12 * max(training.parameters for training in planned) * _kept(preset, planned)
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


def _encoders(preset: Preset, stage: str) -> list[list[tuple[int, int]]]:
    """(number, tokens) of the texts of one step, each as long as it may be, for each model that is
    trained."""
    config = getattr(preset, stage)
    match config:
        case CdeConfig(context=slots) if slots:
            first = [(min(slots, config.batch), config.document_length)]
            lengths = config.query_length, config.document_length
            return [first, [(config.batch, slots + length) for length in lengths]]
        case TripletConfig() | Qwen3Config():
            documents = (1 + config.negatives) * config.batch
            return [[(config.batch, config.query_length), (documents, config.document_length)]]
        case PairConfig():
            return [[(config.batch, config.query_length), (config.batch, config.document_length)]]
        case ContextualConfig():
            queries = config.batch * config.queries_per_document
            document = config.chunks * config.chunk_length + config.chunks - 1  # separators
            return [[(queries, config.query_length), (config.batch, document)]]
        case RerankerConfig():
            prompt = PROMPT_TOKENS + config.query_length + config.document_length
            return [[((1 + config.negatives) * config.batch, prompt)]]
        case _:
            return [[(config.batch, config.length)]]


def _losses(preset: Preset, stage: str) -> int:
    """Independent losses of one step; each has its own embeddings and micro-batches."""
    config = getattr(preset, stage)
    return config.accumulation if isinstance(config, TripletConfig) else 1


def _loss_size(preset: Preset, stage: str) -> tuple[int, int]:
    """Embeddings that one contrastive loss looks at, and similarities that it computes."""
    config = getattr(preset, stage)
    match config:
        case ContextualConfig():
            queries, chunks = config.batch * config.queries_per_document, config.batch * config.chunks
            return queries + chunks, queries * (chunks + config.batch + queries)
        case TripletConfig():
            queries = math.ceil(config.batch / config.accumulation)
            return (2 + config.negatives) * queries, (1 + config.negatives) * queries**2
        case Qwen3Config():
            rows = (2 + config.negatives) * config.batch
            return rows, config.batch * (3 * config.batch + config.negatives)
        case CdeConfig():
            return 2 * config.batch + config.context, 2 * config.batch**2
        case _:
            return 2 * config.batch, 2 * config.batch**2


def _micro_batch(
    preset: Preset, stage: str, texts: Sequence[tuple[int, int]], gpus: int
) -> tuple[int, int, int]:
    """Tokens and longest texts of one micro-batch, and how many micro-batches of one loss a GPU works
    through."""
    longest = max(length for _, length in texts)
    own = math.ceil(sum(count * length for count, length in texts) / _losses(preset, stage) / gpus)
    room = max(getattr(preset, stage).token_budget, longest)
    tokens = max(longest, min(room, own))
    return tokens, tokens // longest, math.ceil(own / room)


def _flops_of_step(preset: Preset, stage: str, gpus: int) -> float:
    config, shape = getattr(preset, stage), preset.backbone
    total, body = parameters(preset)
    width = shape.heads * shape.head_size
    again = 1 if config.gradient_checkpointing else 0
    flops = 0.0
    for texts in _encoders(preset, stage):
        tokens, _, groups = _micro_batch(preset, stage, texts, gpus)
        forward = sum(
            count * length * (2 * body + 4 * shape.layers * width * length) for count, length in texts
        )
        cached = not isinstance(config, PretrainConfig | RerankerConfig)
        flops += forward * (3 + again + ((groups - 1) / groups if cached else 0))
    if isinstance(config, RerankerConfig):
        return flops + 3 * 2 * (total - body) * (1 + config.negatives) * config.batch
    if not isinstance(config, PretrainConfig):
        return flops
    paid = config.masked_share if isinstance(config, DiffusionConfig) else 1
    logits = paid * config.batch * config.length * 2 * (total - body)
    return flops + logits * (4 if paid * tokens > _chunk_rows(preset) else 3)


def _chunk_rows(preset: Preset) -> int:
    return max(CHUNK_ROWS, CHUNK_LOGITS // preset.data.vocab_size)


def _gpu_hours(preset: Preset, stage: str, gpus: int) -> float:
    config = getattr(preset, stage)
    share = UTILISATION["pretraining" if isinstance(config, PretrainConfig) else "other stages"]
    if preset.backbone.hidden_size < NARROW:
        share *= NARROW_FACTOR
    seconds = config.steps * _flops_of_step(preset, stage, gpus) / (PEAK[config.precision] * share)
    return seconds / _busy(preset, stage, gpus) / 3600


def _busy(preset: Preset, stage: str, gpus: int) -> float:
    """Share of the GPUs' time in which they have one of the longest texts to work on."""
    number, _ = max(_encoders(preset, stage)[-1], key=lambda text: text[1])
    waves = number / _losses(preset, stage) / gpus
    return waves / math.ceil(waves)


def _layer_parameters(shape: BackboneConfig) -> int:
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    norms = 2 * shape.hidden_size + 2 * shape.head_size
    return shape.hidden_size * (2 * queries + 2 * keys + 3 * shape.mlp_size) + norms


def _kept(preset: Preset, planned: Sequence[Training]) -> int:
    """Checkpoints on disk at a time: one is written before the oldest goes."""
    return max(getattr(preset, t.stage).keep_checkpoints for t in planned) + 1


def _check_memory(preset: Preset, planned: Sequence[Training], gpus: int, gpu_memory: float) -> None:
    large = [t for t in planned if t.memory_bytes_per_gpu > gpu_memory]
    if not large:
        return
    worst = max(large, key=lambda training: training.memory_bytes_per_gpu)
    remedies = _remedies(preset, planned, gpus, gpu_memory)
    raise ValueError(
        f"preset {preset.name} does not fit: the {worst.stage} training needs "
        f"{_bytes(worst.memory_bytes_per_gpu)} per GPU on {_plural(gpus, 'GPU')} under "
        f"{preset.parallel.strategy}, and a GPU has {_bytes(gpu_memory)}. "
        + (f"It would fit with {'; or with '.join(remedies)}" if remedies else "Take a smaller model")
    )


def _remedies(preset: Preset, planned: Sequence[Training], gpus: int, gpu_memory: float) -> list[str]:
    """The mildest changes after which everything fits: all those of one kind, else those of two kinds, …"""
    names = {(t.notebook, t.name) for t in planned}

    def fits(candidate: Preset, gpus: int) -> bool:
        started = ((stage, shaped) for *name, stage, shaped in _started(candidate) if tuple(name) in names)
        return all(memory_bytes(shaped, stage, gpus) <= gpu_memory for stage, shaped in started)

    large = sorted({t.stage for t in planned if t.memory_bytes_per_gpu > gpu_memory})
    configs = [getattr(preset, stage) for stage in large]
    most = max(config.token_budget for config in configs)
    machines = preset.parallel.num_machines
    kinds = {  # values from mild to harsh
        "parallel.strategy": [] if preset.parallel.strategy == "fsdp2" else ["fsdp2"],
        "gpus": [machines * 2**i for i in range(11) if machines * 2**i > gpus],
        "gradient_checkpointing": [] if all(c.gradient_checkpointing for c in configs) else [True],
        "token_budget": [2**i for i in reversed(range(8, most.bit_length())) if 2**i < most],
    }

    def mildest(chosen: Sequence[str]) -> str | None:
        for values in itertools.product(*(kinds[kind] for kind in chosen)):
            change = dict(zip(chosen, values, strict=True))
            candidate = _changed(preset, large, change)
            if "gpus" in change and candidate.parallel.strategy == "ddp":
                continue  # every GPU would hold as much
            if fits(candidate, change.get("gpus", gpus)):
                return _command(candidate, preset, large, change)
        return None

    for size in range(1, len(kinds) + 1):
        if found := list(filter(None, map(mildest, itertools.combinations(kinds, size)))):
            return found
    return []


def _changed(preset: Preset, stages: Sequence[str], change: dict) -> Preset:
    """The preset with a change of the strategy, and of these stages' micro-batches."""
    sections = {}
    if "parallel.strategy" in change:
        sections["parallel"] = replace(preset.parallel, strategy=change["parallel.strategy"])
    for stage in stages:
        config = getattr(preset, stage)
        budget = min(config.token_budget, change.get("token_budget", config.token_budget))
        again = config.gradient_checkpointing or change.get("gradient_checkpointing", False)
        sections[stage] = replace(config, token_budget=budget, gradient_checkpointing=again)
    return replace(preset, **sections)


def _command(candidate: Preset, preset: Preset, stages: Sequence[str], change: dict) -> str:
    """The options of `unmask run` that make a change."""
    options = [f"--gpus {change['gpus']}"] if "gpus" in change else []
    if "parallel.strategy" in change:
        options.append(f"--set parallel.strategy={candidate.parallel.strategy}")
    for stage in stages:
        before, after = getattr(preset, stage), getattr(candidate, stage)
        for key in ("token_budget", "gradient_checkpointing"):
            if getattr(after, key) != getattr(before, key):
                options.append(f"--set {stage}.{key}={str(getattr(after, key)).lower()}")
    return " ".join(options)


def _table(planned: Sequence[Training], gpu_memory: float | None) -> list[str]:
    rows = [["notebook", "training", "steps", "tokens", "FLOPs"]]
    rows += [[t.notebook, t.name, f"{t.steps:,}", _count(t.tokens), f"{t.flops:.2e}"] for t in planned]
    rows.append(
        ["all", "", "", _count(sum(t.tokens for t in planned)), f"{sum(t.flops for t in planned):.2e}"]
    )
    if gpu_memory:
        hours = [t.gpu_hours for t in planned]
        peaks = [t.memory_bytes_per_gpu for t in planned]
        rows[0] += ["GPU-hours", f"per GPU (of {_bytes(gpu_memory)})"]
        for row, spent, peak in zip(rows[1:], [*hours, sum(hours)], [*peaks, max(peaks)], strict=True):
            row += [f"{spent:,.2f}" if spent < 10 else f"{spent:,.0f}", _bytes(peak)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if number < 2 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _notes(preset: Preset, planned: Sequence[Training], gpus: int) -> Iterator[str]:
    yield "counted: the trainings, every text as long as it may be; not counted: evaluation, mining, merging"
    if gpus:
        hours = sum(t.gpu_hours for t in planned) / gpus
        factor = NARROW_FACTOR if preset.backbone.hidden_size < NARROW else 1
        shares = " and ".join(f"{factor * share:.0%} ({kind})" for kind, share in UTILISATION.items())
        yield (
            f"time: {_duration(hours)} of training at an MFU of {shares} of "
            f"{PEAK['bf16'] / 1e12:.0f} TFLOP/s, assumed, recomputation counted"
        )
        for stage in dict.fromkeys(t.stage for t in planned):
            busy = _busy(preset, stage, gpus)
            if busy < 0.9:
                yield (
                    f"note: {stage} has too few texts in a step for {gpus} GPUs: "
                    f"{1 - busy:.0%} of their time is idle"
                )


def _duration(hours: float) -> str:
    if hours < 2:
        return f"{60 * hours:.0f} minutes"
    return f"{hours:.0f} hours" if hours < 48 else f"{hours / 24:.1f} days"


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _count(number: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def _bytes(number: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9)):
        if number >= size:
            return f"{number / size:.{0 if number >= 100 * size else 1}f} {unit}"
    return f"{number / 1e6:.0f} MB"
