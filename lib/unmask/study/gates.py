"""What a training must show before a claim may rest on it.

A training that fails its own purpose says nothing about the paper: a claim that rests on it is "invalid",
neither "contradicted" nor "not at this scale". A gate is a number, its bar, and whether it passed; notebooks
keep their gates beside their metrics, claims carry those that they rest on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from unmask.config import ContextualConfig, EvaluationConfig
from unmask.evaluation.metrics import retrieval_metrics
from unmask.evaluation.tasks import Task, compare

Gate = dict[str, Any]


def at_least(name: str, value: float, bar: float) -> Gate:
    """A gate that a value passes from the bar on."""
    return {"name": name, "value": float(value), "bar": f">= {bar:.3g}", "passed": bool(value >= bar)}


def at_most(name: str, value: float, bar: float) -> Gate:
    """A gate that a value passes up to the bar."""
    return {"name": name, "value": float(value), "bar": f"<= {bar:.3g}", "passed": bool(value <= bar)}


def learnt(name: str, curve: Sequence[Mapping[str, Any]], base_rate: float) -> list[Gate]:
    """Whether a training's loss fell: below its start, below its base rate, and did not rise at the end.

    Losses of different data sets are not comparable, so each is taken as its distance from the mean of its
    data set. Start and end are the first and the last tenth of the steps, three at least. A rise is the slope
    over the last third of the steps times their number; it counts if its 95 % interval lies above 0.

    Args:
        name: of the training; curve: its logged steps, with "loss" and perhaps "dataset".
        base_rate: nats of whoever knows only how many answers there are, or how frequent each is.
    """
    loss_S = np.array([row["loss"] for row in curve])
    of_S = np.array([row.get("dataset", "") for row in curve])
    for dataset in np.unique(of_S):
        loss_S[of_S == dataset] -= loss_S[of_S == dataset].mean()
    loss_S += np.mean([row["loss"] for row in curve])
    few = min(len(loss_S), max(3, len(loss_S) // 10))
    start, end = loss_S[:few].mean(), loss_S[-few:].mean()
    rise, error = _rise(loss_S[-max(4, len(loss_S) // 3) :])
    return [
        at_most(f"{name}: loss at the end, below its start", end, start),
        at_most(f"{name}: loss at the end, below its base rate", end, base_rate),
        at_most(f"{name}: rise over the last third, within its error", rise, error),
    ]


def contextual_guess(stage: ContextualConfig) -> float:
    """Nats of a guess at the end of the contextual stage: among the chunks of a document (weight alpha) and
    of the batch; and, unless it is InSeNT, among the documents of the batch (weight beta)."""
    own, batch, documents = (math.log(n) for n in (stage.chunks, stage.batch * stage.chunks, stage.batch))
    local = stage.alpha * own + (1 - stage.alpha) * batch
    return local if stage.objective == "insent" else stage.beta_end * documents + (1 - stage.beta_end) * local


def _rise(loss_S: np.ndarray) -> tuple[float, float]:
    """Slope of a straight line times the number of steps, and half its 95 % interval."""
    if len(loss_S) < 4:
        return 0.0, 0.0
    step_S = np.arange(len(loss_S)) - (len(loss_S) - 1) / 2
    slope = step_S @ loss_S / (step_S @ step_S)
    left_S = loss_S - loss_S.mean() - slope * step_S
    error = math.sqrt(left_S @ left_S / (len(loss_S) - 2) / (step_S @ step_S))
    return slope * len(loss_S), stats.t.ppf(0.975, len(loss_S) - 2) * error * len(loss_S)


def denoises(masked_nats: Mapping[str, float], causal: float, slope: float, *, beats: bool) -> list[Gate]:
    """Whether a diffusion backbone uses the text that is left: nats per masked token must rise with the share
    of masks.

    Args:
        masked_nats: share of masks → nats per masked token, from the fewest masks to 1.
        causal: nats per token of the causal parent; slope: nats that the right end must lie above the left.
        beats: whether the left end must come down to the parent's, as a pretrained parent allows.
    """
    shares = sorted(masked_nats, key=float)
    least, most = masked_nats[shares[0]], masked_nats[shares[-1]]
    found = [at_least(f"denoising slope, nats from t = {shares[0]} to {shares[-1]}", most - least, slope)]
    return found + ([at_most(f"nats at t = {shares[0]}, at most the causal parent's", least, causal)] * beats)


def above_chance(
    name: str, scores: Mapping[str, np.ndarray], tasks: Sequence[Task], config: EvaluationConfig
) -> Gate:
    """Whether a model finds more than shuffled documents give: the low end of the interval of the difference
    in nDCG@10, over all queries."""
    rng = np.random.default_rng(0)
    shuffled = {
        task.name: retrieval_metrics(
            rng.random((len(task.queries), len(task.chunks))), task.relevant, per_query=True
        )["ndcg@10"]
        for task in tasks
        if task.name in scores
    }
    low, _ = compare(scores, shuffled, shuffled, config).interval
    return at_least(f"{name}: nDCG@10 above that of shuffled documents", low, 0.0)


def failed(gates: Sequence[Gate]) -> str:
    """The gates that did not pass, with their numbers; empty if all did."""
    return "; ".join(f"{g['name']}: {g['value']:.3g}, not {g['bar']}" for g in gates if not g["passed"])


def table(gates: Sequence[Gate]) -> list[dict[str, Any]]:
    """Gates as rows for `report.markdown_table`."""
    return [
        {
            "gate": g["name"],
            "value": g["value"],
            "bar": g["bar"],
            "passed": "yes" if g["passed"] else "**no**",
        }
        for g in gates
    ]
