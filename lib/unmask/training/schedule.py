"""Learning-rate schedules and the weight of the global contextual loss, as functions of the step."""

from __future__ import annotations

import math

from unmask.config import TrainConfig


def lr_factor(config: TrainConfig, step: int) -> float:
    """Factor on the peak learning rate at `step` (0-based).

    "wsd": linear warm-up, constant, cosine to zero over the last `decay` steps (pplx-embed, appendix A).
    "cosine", "linear": linear warm-up, then to zero in that form (CDE's is linear). The last step trained
    still has a positive rate.
    """
    if step < config.warmup:
        return (step + 1) / config.warmup
    decay = config.decay if config.schedule == "wsd" else config.steps - config.warmup
    start = config.steps - decay
    if decay == 0 or step < start:
        return 1.0
    share = (step - start) / decay
    return 1 - share if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * share))


def cosine_ramp(start: float, end: float, step: int, steps: int) -> float:
    """Half a cosine from `start` at step 0 to `end` at the last step: β of pplx-embed, section 2.4."""
    share = step / max(1, steps - 1)
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * share))
