"""Which training steps are measured on one GPU, in three minutes, and the table of them; for `first_gpu`.

Seconds of a row on an H100, estimated (six steps each; layers are compiled in the row before "found out"):

                          0.6B: diffusion, pair, contextual    SmolLM2-135M     together
    eager, 16k                       8, 11, 11                    3, 3, 3          39
    compiled, 32k                   14, 17, 10                   12, 13, 7         73
    compiled, found out              7,  6,  6                    5, 3, 3          30
    start                                                                          10
"""

from collections.abc import Iterator, Sequence
from typing import Any

import gpu
import torch

from unmask.config import load_preset
from unmask_study.report import markdown_table

Row = dict[str, Any]
MODELS = {"0.6B": "paper-0.6b", "SmolLM2-135M": "gpu"}  # and the preset whose lengths and batches are taken
FOUND = {"token_budget": 0, "keep_tokens": 0}  # starts high; an out-of-memory error halves it
VARIANTS = {
    "eager, 16k": {"compile": False, "token_budget": 16_384, "keep_tokens": 1},
    "compiled, 32k": {"compile": True, "token_budget": 32_768, "keep_tokens": 1},
    "compiled, found out": {"compile": True} | FOUND,
}
SHORT = {"warm_up": 2, "steps": 4}


def steps(small: bool, large: bool = False) -> Iterator[Row]:
    """A row for each model, stage and variant; with `large` one of a batch of the paper's size, once."""
    if large:
        once = {"batch": 16_384, "steps": 1, "warm_up": 1, "processes": gpu.Distributed.alone("bf16")}
        yield row("0.6B", "pair", "compiled, found out", "paper-0.6b", once)
        return
    for model, preset in ({"toy": "smoke"} if small else MODELS).items():
        for stage, batch in gpu.BATCH.items():
            options = SHORT | ({"batch": batch} if model == "0.6B" else {})
            for variant in [*VARIANTS][:1] if small else VARIANTS:  # there may be no compiler
                yield row(model, stage, variant, preset, options)


def row(model: str, stage: str, variant: str, preset: str, options: dict[str, Any]) -> Row:
    """What `gpu.measure` found, or why it found nothing."""
    about, changes = {"model": model, "step": stage, "variant": variant}, dict(VARIANTS[variant])
    if stage == "diffusion":  # which computes nothing twice
        del changes["keep_tokens"]
    try:
        return about | gpu.measure(stage, load_preset(preset), **options, **changes)
    except (RuntimeError, ValueError, ImportError) as error:  # such as a GPU with too little memory
        return about | {"why": f"not run: {str(error).splitlines()[0]}"}
    finally:
        torch.cuda.empty_cache()


def best(rows: Sequence[Row]) -> list[Row]:
    """The fastest variant of each step."""
    measured = sorted((one for one in rows if "rate" in one), key=lambda one: one["rate"])
    return [*{(one["model"], one["step"]): one for one in measured}.values()]


def table(rows: Sequence[Row]) -> str:
    """The rows beside each other; the fastest of each step is bold."""
    fastest, lines = best(rows), []
    for one in rows:
        variant = f"**{one['variant']}**" if one in fastest else one["variant"]
        line = {"model": one["model"], "step": one["step"], "variant": variant}
        if "why" in one:
            lines.append(line | {"tokens/s": one["why"]})
            continue
        waits, memory = one["waits_per_step"], one["peak_gb"]
        line |= {"tokens/s": f"{one['rate']:,.0f}", "MFU": f"{one['mfu']:.2f}"}
        line |= {"micro-batch": one["token_budget"], "kept": one["keep_tokens"]}
        line |= {"GB": memory and f"{memory:.0f}", "waits a step": None if waits is None else f"{waits:.1f}"}
        lines.append(line)
    return markdown_table(lines)
