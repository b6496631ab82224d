"""How long a run takes, before it starts: 6 FLOPs for each parameter and token, by the speed of the hardware.

Texts count as long as the preset allows, and each stage as one training, in the first notebook that reads its
section. What studies train besides, shorter or on fewer texts, is not counted, nor is evaluation.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from unmask.config import TRAINED, Preset

PEAK = {"bf16": 989e12, "fp32": 67e12}  # FLOP/s, dense, data sheet of H100 and H200 SXM
USED = 0.22  # share of the peak that is useful work: assumed; 0.11 to 0.42 were measured on an H200
CORE = {True: 150e9, False: 50e9}  # FLOP/s of a processor's core, with bf16 instructions and without
BESIDE = 60.0  # seconds of a notebook beside its trainings


def parameters(preset: Preset) -> tuple[int, int]:
    """Parameters of a model of the preset's sizes, and how many of them are no embeddings."""
    shape = preset.backbone
    widths = 2 * shape.heads * shape.head_size + 2 * shape.kv_heads * shape.head_size + 3 * shape.mlp_size
    layer = shape.hidden_size * (widths + 2) + 2 * shape.head_size
    body = shape.layers * layer + shape.hidden_size
    return body + preset.data.vocab_size * shape.hidden_size, body


def tokens(preset: Preset, stage: str) -> int:
    """Tokens of a step, at most."""
    config = getattr(preset, stage)
    if stage in ("ar", "diffusion"):
        return config.batch * config.length
    queries, documents = getattr(config, "queries_per_document", 1), 1 + getattr(config, "negatives", 0)
    return config.batch * (queries * config.query_length + documents * config.document_length)


def hours(preset: Preset, stage: str, hardware: Mapping[str, Any]) -> float:
    """Hours of a training on the preset's GPUs, or on this machine's cores if it has no GPU and the preset
    names no more than one."""
    config, gpus = getattr(preset, stage), preset.parallel.num_processes
    speed = hardware["cores"] * CORE[hardware["bf16"] and config.precision == "bf16"]
    if hardware["gpus"] or gpus > 1:
        speed = gpus * USED * PEAK[config.precision]
    return 6 * parameters(preset)[0] * tokens(preset, stage) * config.steps / speed / 3600


def stages(preset: Preset, notebooks: Iterable[Any]) -> dict[str, list[str]]:
    """The trainings that count for each notebook; of all of a pipeline, in their order."""
    counted = {"ar"} if preset.backbone.checkpoint else set()
    new: dict[str, list[str]] = {}
    for one in notebooks:
        new[one.name] = [stage for stage in TRAINED if stage in {*one.reads} - counted]
        counted.update(one.reads)
    return new


def studied(preset: Preset) -> dict[str, dict[str, float]]:
    """The large trainings that notebooks have beside the recipe's: notebook → stage → how many times as much
    as that stage they read."""
    ablation, qwen3, pair = preset.ablation, preset.qwen3, preset.pair
    steps = ablation.steps + (len(ablation.rates) * ablation.rate_steps if len(ablation.rates) > 1 else 0)
    arms = (3 + len(ablation.arms)) * steps * (ablation.batch or pair.batch) / (pair.steps * pair.batch)
    pretrained = sum(arm in ablation.arms for arm in ("AR continued, mean", "masked next token, mean"))
    first = qwen3.weak_steps / qwen3.steps * (qwen3.query_length + qwen3.document_length)
    first /= qwen3.query_length + (1 + qwen3.negatives) * qwen3.document_length
    return {
        "07_diffusion_vs_ar": {"diffusion": pretrained, "pair": arms},
        "10_cde": {"cde": len(preset.cde.trainings) - 1},
        "11_qwen3_embedding": {"qwen3": first + len({"no-weak", "one-size"} & {*qwen3.trainings})},
    }


def seconds(preset: Preset, notebooks: Iterable[Any], hardware: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of each notebook, see `stages` and `studied`."""
    more, total = studied(preset), {}
    for name, new in stages(preset, notebooks).items():
        parts = [*dict.fromkeys(new, 1).items(), *more.get(name, {}).items()]
        total[name] = BESIDE + 3600 * sum(times * hours(preset, stage, hardware) for stage, times in parts)
    return total


def together(seconds: Mapping[Any, float], jobs: int) -> float:
    """Seconds that notebooks, given in running order, take together at least, up to `jobs` side by side."""
    ends: dict[str, float] = {}
    for one, took in seconds.items():
        ends[one.name] = took + max((ends.get(name, 0.0) for name in one.after), default=0.0)
    return max(*ends.values(), sum(seconds.values()) / jobs)


def describe(preset: Preset, notebooks: Iterable, due: Iterable, hardware: Mapping[str, Any]) -> str:
    """The trainings of the notebooks that are due, for `unmask run --dry-run`."""
    gpus = preset.parallel.num_processes
    on_gpus = hardware["gpus"] or gpus > 1
    rows = [f"trainings, estimated for {f'{gpus} H100' if on_gpus else 'the cores of this machine'}:"]
    names = {one.name for one in due}
    for name, new in stages(preset, notebooks).items():
        for stage in new if name in names else ():
            work = f"{getattr(preset, stage).steps:,} steps × {tokens(preset, stage):,} tokens"
            rows.append(f"  {name:<20}{stage:<12}{work:>32}{hours(preset, stage, hardware):>9,.2f} hours")
        for stage, times in studied(preset).get(name, {}).items() if name in names else ():
            work, took = f"as {times:.2f} of that stage", times * hours(preset, stage, hardware)
            rows += [f"  {name:<20}{stage:<12}{work:>32}{took:>9,.2f} hours"] * (times > 0)
    return "\n".join(rows)
