"""Public retrieval benchmarks through the `mteb` package, as appendix C of the paper runs them.

Shape suffixes: B texts · N queries · M documents · D dimensions.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import mteb
import numpy as np
import torch
from datasets import Dataset
from mteb.abstasks import AbsTask, AbsTaskRetrieval
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.models import ModelMeta
from mteb.models.abs_encoder import AbsEncoder
from mteb.types import PromptType
from torch import Tensor
from torch.utils.data import DataLoader

from unmask.config import EvaluationConfig
from unmask.data import hub
from unmask.evaluation.tasks import Task
from unmask.models.embedder import Embedder
from unmask.models.similarity import similarity
from unmask.store import fingerprint

# Benchmarks by the name that `retrieval.benchmarks` calls them, as `mteb.get_tasks` wants them; any other is
# mteb's own name of a benchmark or of a task. Only retrieval tasks are run, as in the paper.
BENCHMARKS: dict[str, dict[str, list[str]]] = {
    "MIRACL": {"tasks": ["MIRACLRetrievalHardNegatives"]},
    "table 9": {
        "tasks": [
            "CQADupstackGamingRetrieval", "CQADupstackUnixRetrieval", "DBPedia", "FEVER", "FiQA2018",
            "HotpotQA", "MIRACLRetrievalHardNegatives", "MSMARCO", "NFCorpus", "NQ", "SCIDOCS", "SciFact",
        ],
        "languages": ["eng"],
    },
}  # fmt: skip
# Appendix C.
PROMPTS = {"ArguAna": "Given a claim, find documents that refute the claim. Claim: "}  # before queries
LENGTHS = {"LEMBPasskeyRetrieval": 16_384}  # tokens, where it is not the preset's
DUPLICATES = ("SyntheticText2SQL",)  # tasks whose documents repeat, and get noise
NOISE = 1e-3  # standard deviation, in that of the embeddings themselves; the paper: "small" [choice]


class MtebEncoder(AbsEncoder):
    """An `Embedder` as mteb's encoder: `mteb.evaluate(MtebEncoder(embedder, config.evaluation), tasks)`.

    No prompt is used but ArguAna's. Similarity is the cosine of the codes, which for binary ones orders as
    the Hamming distance does. SyntheticText2SQL holds documents that are equal to one another: small noise,
    a function of the document's position alone, breaks the symmetry.

    Args:
        config: `query_length` and `document_length` are tokens at most, up to the model's window.
        precision: "int8", "binary", "ubinary" or "float32".
        dimensions: keep only the first so many.
    Source: appendix C.
    """

    def __init__(
        self,
        embedder: Embedder,
        config: EvaluationConfig,
        precision: str = "int8",
        dimensions: int | None = None,
    ):
        self.model, self.config = embedder, config
        self.precision, self.dimensions = precision, dimensions
        # mteb keeps results by name and revision: whatever changes a score changes them.
        lengths = [config.query_length, config.document_length]
        revision = fingerprint(_weights(embedder.model), embedder.pooling, embedder.mixed_precision, lengths)
        size = f"-{dimensions}d" if dimensions else ""
        self.mteb_model_meta = ModelMeta.create_empty(
            {"name": f"unmask/{precision}{size}", "revision": revision}
        )

    def encode(
        self,
        inputs: DataLoader,
        *,
        task_metadata: TaskMetadata,
        hf_split: str,
        hf_subset: str,
        prompt_type: PromptType | None = None,
        show_progress_bar: bool = True,
        **_: Any,
    ) -> np.ndarray:
        """Embeds the texts of mteb's batches, (B, D); an empty text is embedded as a space."""
        name, query = task_metadata.name, prompt_type == PromptType.query
        prompt = PROMPTS.get(name, "") if query else ""
        texts = [f"{prompt}{text}" or " " for batch in inputs for text in batch["text"]]
        length = self.config.query_length if query else self.config.document_length
        codes_BD = self.model.encode(
            texts,
            self.precision,
            self.dimensions,
            max_length=LENGTHS.get(name, length),
            progress=show_progress_bar,
        )
        return noisy(codes_BD) if name in DUPLICATES and not query else codes_BD

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Cosine similarity (N, M)."""
        return similarity(embeddings1, embeddings2)


def noisy(codes_BD: np.ndarray) -> np.ndarray:
    """Embeddings with Gaussian noise that depends on position only, float32; packed bits are unpacked."""
    if codes_BD.dtype == np.uint8:
        codes_BD = 2.0 * np.unpackbits(codes_BD, axis=1) - 1
    noise_BD = np.random.default_rng(0).standard_normal(codes_BD.shape, np.float32)
    return codes_BD.astype(np.float32) + NOISE * float(codes_BD.std()) * noise_BD


def benchmark_tasks(name: str) -> list[AbsTask]:
    """The tasks of a benchmark: a key of BENCHMARKS, or mteb's name of a benchmark or of a task.

    Raises: ValueError for a name that is none of them.
    """
    if name in BENCHMARKS:
        return list(mteb.get_tasks(**BENCHMARKS[name]))
    try:
        found = mteb.get_benchmark(name).tasks
    except KeyError:
        try:
            return [mteb.get_task(name)]
        except KeyError as error:
            known = ", ".join([*BENCHMARKS, "MTEB(Multilingual, v2)", "MTEB(Code, v1)"])
            raise ValueError(f"mteb has no benchmark and no task {name!r}; for instance: {known}") from error
    return [task for task in found if task.metadata.type == "Retrieval"]


def run_benchmark(
    embedder: Embedder,
    names: Iterable[str],
    config: EvaluationConfig,
    folder: Path,
    *,
    precision: str = "int8",
) -> list[dict[str, Any]]:
    """Scores of the tasks of benchmarks; what cannot be run says why, and the others go on.

    Data come from UNMASK_MIRROR where it holds the task's repository (as the Hub has it, README included),
    otherwise from the Hub; whether that answers is asked once. Results are kept in `folder`, each subset of a
    task as soon as it is there: the same call goes on after an interruption.

    Returns: rows of benchmark, task, "score" (the task's main score, mean over its splits and subsets, so
        validation and test count alike for MLQA; None where it was not run), "subsets" (the same for each
        subset, for MIRACL a language) and "why" it was not run (empty if it was).
    Raises: ValueError for an unknown name, before anything runs.
    """
    wanted = [(name, task) for name in names for task in benchmark_tasks(name)]
    encoder = MtebEncoder(embedder, config, precision)
    cache = mteb.ResultCache(folder)
    absent = ""
    if any(hub.local(task.metadata.dataset["path"]) is None for _, task in wanted):
        absent = hub.unreachable()
    return [
        {"benchmark": name, "task": task.metadata.name} | _run(encoder, task, cache, absent)
        for name, task in wanted
    ]


def _run(encoder: MtebEncoder, task: AbsTask, cache: mteb.ResultCache, absent: str) -> dict[str, Any]:
    repo = task.metadata.dataset["path"]
    if folder := hub.local(repo):
        dataset = task.metadata.dataset | {"path": str(folder)}
        task.metadata = task.metadata.model_copy(update={"dataset": dataset})
    elif absent:
        why = f"{repo} is in no mirror (UNMASK_MIRROR), and the Hub: {absent}"
        return {"score": None, "subsets": {}, "why": why}
    result = mteb.evaluate(encoder, task, cache=cache, raise_error=False, co2_tracker=False)
    if result.exceptions:
        reason = str(result.exceptions[0].exception).strip() or "no reason given"
        logging.getLogger(__name__).warning("%s was not run: %s", task.metadata.name, reason)
        return {"score": None, "subsets": {}, "why": reason.splitlines()[0]}
    # What is kept may hold more than is asked for here, for instance more languages.
    kept = result.task_results[0].validate_and_filter_scores(task)
    subsets: dict[str, list[float]] = {}
    for scores in kept.scores.values():  # of a split
        for row in scores:
            subsets.setdefault(row["hf_subset"], []).append(float(row["main_score"]))
    means = {subset: float(np.mean(values)) for subset, values in subsets.items()}
    return {"score": float(kept.get_score()), "subsets": means, "why": ""}


def as_mteb(task: Task) -> AbsTaskRetrieval:
    """One of our plain tasks as a task of mteb, whose nDCG@10 must then be ours.

    Raises: ValueError for a contextual task: mteb's documents have no chunks.
    """
    if task.contextual:
        raise ValueError(f"{task.name}: mteb retrieves texts, not chunks in the light of their document")
    content = fingerprint(task.queries, task.chunks)

    class HeldOut(AbsTaskRetrieval):
        metadata = TaskMetadata(
            name=f"held-out-{task.name}",
            description=f"Held-out data of this project, {task.family}.",
            dataset={"path": f"held-out/{task.name}", "revision": content},
            type="Retrieval",
            eval_langs=["eng-Latn"],
            main_score="ndcg_at_10",
        )

    built = HeldOut()
    split = {
        "corpus": _texts(task.chunks),
        "queries": _texts(task.queries),
        "relevant_docs": {
            str(query): {str(document): 1 for document in documents}
            for query, documents in enumerate(task.relevant)
        },
        "top_ranked": None,
    }
    built.dataset, built.data_loaded = {"default": {"test": split}}, True
    return built


def _texts(texts: Sequence[str]) -> Dataset:
    return Dataset.from_dict({"id": [str(number) for number in range(len(texts))], "text": list(texts)})


def _weights(model: torch.nn.Module) -> str:
    """Hash of all parameters."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()
