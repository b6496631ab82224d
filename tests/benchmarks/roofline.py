"""What training steps would take on an H100 if each kind of work ran as fast as the data sheet says: a bound
for what `first_gpu.py steps` measures, and for where its time goes. All of it is estimated.

    products, attention   FLOPs / 989 TFLOP/s; of each token 6 (P − E) and 12 n A L, of a paid one 6 E (see
                          `unmask_study.plan` for the symbols); a pass that is repeated adds a third
    elementwise           bytes / 3.35 TB/s: of a layer as counted in results/gpu/launches.json, of a paid
                          token 16 V for its logits
    weights               bytes / 3.35 TB/s: of a micro-batch what autocast casts, or 10 P to add gradients of
                          the bfloat16 twin; of a step 40 P for the norm and AdamW, and 6 P to round the twin
    launches              5 µs each: of the layers in each micro-batch; beside the GPU's work, not after it
"""

import json
import math
from dataclasses import replace
from functools import cache
from typing import Any

from benchmarks import gpu
from unmask.config import Preset, load_preset
from unmask.store import repository
from unmask_study.plan import PEAK, forward, parameters
from unmask_study.report import markdown_table

BANDWIDTH, LAUNCH = 3.35e12, 5e-6  # bytes/s of an H100's memory; seconds of a launch from Python, roughly
MODELS = {"0.6B": "paper-0.6b", "SmolLM2-135M": "gpu"}
# Layer → micro-batch in tokens, whether contrastive stages embed all but one of them twice, what measured it.
WAYS = {
    "eager, float32 under autocast": (16_384, True, "before"),
    "eager, bfloat16": (65_536, False, "eager"),
    "compiled, bfloat16": (65_536, False, "compiled, found out"),
}


@cache
def counted() -> dict[tuple[str, str], dict[str, Any]]:
    text = (repository() / "results" / "gpu" / "launches.json").read_text(encoding="utf8")
    return {(row["model"], row["layer"]): row for row in json.loads(text)["rows"]}


def milliseconds(model: str, preset: Preset, stage: str, way: str) -> dict[str, float]:
    """The parts of a step, the bound that they give, and its MFU."""
    _, texts = gpu.work_of(preset, stage)
    layer, (total, body), layers = counted()[model, way], parameters(preset), preset.backbone.layers
    budget, repeats, _ = WAYS[way]
    tokens = sum(number * length for number, length in texts)
    micro = math.ceil(tokens / budget)
    paid = tokens * preset.diffusion.masked_share if stage == "diffusion" else 0
    again = (micro - 1) / micro if repeats and stage != "diffusion" else 0  # of the forward passes
    products = 2 * tokens * body
    attention = forward(preset, texts) - products
    logits = 6 * paid * (total - body)
    once = layer["forward"] + layer["backward"]
    weights = layers * layer["bytes of weights"] * micro if "autocast" in way else (10 * micro + 6) * total
    seconds = {
        "products": ((3 + again) * products + logits) / PEAK["bf16"],
        "attention": (3 + again) * attention / PEAK["bf16"],
        "elementwise": (tokens * layers * layer["bytes of a token"] + 16 * paid * preset.data.vocab_size)
        / BANDWIDTH,
        "weights": (weights + 40 * total) / BANDWIDTH,
        "launches": layers * micro * (once + again * layer["forward"]) * LAUNCH,
    }
    bound = max(sum(seconds.values()) - seconds["launches"], seconds["launches"])
    useful = 3 * (products + attention) + logits
    found = {name: 1000 * value for name, value in seconds.items()}
    return {"tokens": tokens} | found | {"rate": tokens / bound, "mfu": useful / bound / PEAK["bf16"]}


def launches() -> str:
    """A layer's launches and the bytes that it moves beside products and attention, as counted."""
    rows = []
    for (model, way), row in counted().items():
        numbers = {name: row[name] for name in ("forward", "backward")} | {"casts": row.get("casts", "fused")}
        moved = f"{row['bytes of a token'] / 1000:,.0f}"
        rows.append({"model": model, "layer": way} | numbers | {"kB a token": moved})
    return markdown_table(rows)


def roofline() -> str:
    """Each step in each way: the parts of its time, the bound, and what was measured."""
    rows = []
    for model, name in MODELS.items():
        for stage in gpu.BATCH:
            preset = load_preset(name)
            if model == "0.6B":
                config = replace(getattr(preset, stage), batch=gpu.BATCH[stage])
                preset = replace(preset, **{stage: config})
            for way in WAYS:
                found = milliseconds(model, preset, stage, way)
                parts = ("products", "attention", "elementwise", "weights", "launches")
                row = {"step": f"{model}, {stage}", "layers": way, "tokens": f"{found['tokens']:,}"}
                row |= {part: f"{found[part]:,.0f}" for part in parts}
                row |= {"bound, tokens/s": f"{found['rate']:,.0f}", "bound, MFU": f"{found['mfu']:.2f}"}
                rows.append(row | {"measured": measured(model, stage, way)})
    return markdown_table(rows)


def measured(model: str, stage: str, way: str) -> str:
    """Tokens/s and MFU of the step, where it has run: today's code, else what was before it."""
    for file, date in (("steps.json", ""), ("steps-before.json", ", before")):
        path = repository() / "results" / "gpu" / file
        about = json.loads(path.read_text(encoding="utf8")) if path.is_file() else {"rows": []}
        for row in about["rows"]:
            is_compiled = "compile True" in row.get("setting", "")
            same = row.get("variant", "compiled, found out" if is_compiled else "before") == WAYS[way][2]
            if (
                same
                and "rate" in row
                and (row.get("model", "0.6B"), row.get("step", row.get("name"))) == (model, stage)
            ):
                return f"{row['rate']:,.0f} ({row['mfu']:.2f}{date})"
    return "not run"
