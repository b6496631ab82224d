"""Public retrieval benchmarks through the `mteb` package, as appendix C of the paper runs them.

Shape suffixes: B texts · N queries · M documents · D dimensions.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import joblib
import numpy as np
import torch
import yaml
from torch import Tensor

from unmask.config import EvaluationConfig
from unmask.data import hub
from unmask.evaluation.search import similarity
from unmask.evaluation.tasks import code_hash
from unmask.extras import extra
from unmask.models.embedder import Embedder, instructed
from unmask.store import fingerprint

with extra("study"):
    import mteb
    from mteb import AbsTask, TaskMetadata
    from mteb.models import ModelMeta
    from mteb.models.abs_encoder import AbsEncoder
    from mteb.types import PromptType

# Appendix C, and what the paper's tables are made of; a benchmark that is not named is mteb's own.
_TOLD = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf8"))
BENCHMARKS, PROMPTS, LENGTHS, REPEATING = _TOLD.values()
_unreachable = cache(hub.unreachable)  # the Hub is asked once
# Scores of a subset that are kept beside its main one, as table 5 calls them → mteb's names; C is ours.
MEASURES = {"nDCG": "ndcg_at_10", "P": "precision_at_10", "R": "recall_at_10", "C": "complete_at_10"}
NOISE = 1e-3  # standard deviation, in that of the embeddings themselves; the paper: "small" [choice]


class MtebEncoder(AbsEncoder):
    """An `Embedder` as mteb's encoder: `mteb.evaluate(MtebEncoder(embedder, config.evaluation), tasks)`.

    No prompt is used but ArguAna's, and instructions that come with queries. Similarity is the cosine of the
    codes, which for binary ones orders as the Hamming distance does. SyntheticText2SQL holds documents that
    are equal to one another: small noise, a function of the document's position alone, breaks the symmetry.

    Args:
        config: `query_length` and `document_length` are tokens at most, up to the model's positions.
        precision: "int8", "binary", "ubinary" or "float32".
    Source: appendix C.
    """

    def __init__(self, embedder: Embedder, config: EvaluationConfig, precision: str = "int8"):
        self.model, self.config, self.precision = embedder, config, precision
        self._asked, self._found = None, None  # the last corpus, which the subsets of a task may share
        # mteb keeps results by name and revision: whatever changes a score changes them.
        read = [*embedder.model.parameters(), getattr(embedder, "context_KD", torch.empty(0))]
        weights = joblib.hash([x.detach().float().cpu().numpy() for x in read])
        how = embedder.mixed_precision, config.query_length, config.document_length
        revision = fingerprint(weights, embedder.settings, how, _TOLD, mteb.__version__, code_hash())
        self.mteb_model_meta = ModelMeta.create_empty({"name": f"unmask/{precision}", "revision": revision})

    def encode(
        self, inputs: Iterable[Mapping], *, task_metadata: TaskMetadata, prompt_type: PromptType, **_: Any
    ) -> np.ndarray:
        """Embeds the texts of mteb's batches, (B, D); an empty text is embedded as a space, for
        which the tokenizer must have a token."""
        name, query = task_metadata.name, prompt_type == PromptType.query
        length = LENGTHS.get(name, self.config.query_length if query else self.config.document_length)
        if query:
            texts = [PROMPTS.get(name, "") + text or " " for batch in inputs for text in _queries(batch)]
            return self.model.encode(texts, self.precision, max_length=length)
        texts = [text or " " for batch in inputs for text in batch["text"]]
        if self._asked != (length, texts):
            self._asked = length, texts
            self._found = self.model.encode(texts, self.precision, max_length=length)
        return noisy(self._found) if name in REPEATING else self._found

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Cosine similarity (N, M)."""
        return similarity(embeddings1, embeddings2)


def _queries(batch: Mapping[str, Any]) -> list[str]:
    """Queries, after the instruction of each where the benchmark has one."""
    if "instruction" not in batch:
        return batch["text"]
    pairs = zip(batch["instruction"], batch["query"], strict=True)
    return [instructed(instruction or "", query) for instruction, query in pairs]


def noisy(codes_BD: np.ndarray) -> np.ndarray:
    """Embeddings with Gaussian noise that depends on position only, float32; packed bits are unpacked."""
    if codes_BD.dtype == np.uint8:
        codes_BD = 2.0 * np.unpackbits(codes_BD, axis=1) - 1
    noise_BD = np.random.default_rng(0).standard_normal(codes_BD.shape, np.float32)
    return codes_BD.astype(np.float32) + NOISE * float(codes_BD.std()) * noise_BD


def benchmark_tasks(name: str) -> list[AbsTask]:
    """The tasks of a benchmark: a key of BENCHMARKS, or mteb's name of a benchmark or of a task.

    Raises: KeyError for a name that is none of them.
    """
    if name in BENCHMARKS:
        return list(mteb.get_tasks(**BENCHMARKS[name]))
    if name in {benchmark.name for benchmark in mteb.get_benchmarks()}:
        return [task for task in mteb.get_benchmark(name).tasks if task.metadata.type == "Retrieval"]
    return [mteb.get_task(name)]


def tool_kinds(subsets: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Table 5's columns from ToolRet's sets of requests: the mean of each kind of tool, and of the kinds."""
    names = list(mteb.get_task("ToolRetrieval").hf_subsets)  # by kind
    custom, web = names.index("appbench"), names.index("apibank")
    kinds = {"Web": names[web:], "Code": names[:custom], "Custom": names[custom:web]}
    means = {
        f"{kind} {measure}": fmean(subsets[name][measure] for name in own)
        for kind, own in kinds.items()
        for measure in MEASURES
    }
    return means | {f"Avg {x}": fmean(means[f"{kind} {x}"] for kind in kinds) for x in ("nDCG", "C")}


def _completeness(scores: Mapping[str, Mapping[str, float]], *_: Any, **__: Any) -> dict[str, float]:
    """ToolRet's comprehensiveness: the share of the queries whose documents are all among the first ten."""
    return {MEASURES["C"]: round(fmean(row["recall_10"] == 1 for row in scores.values()), 5)}  # as mteb's


def run_benchmark(
    embedder: Embedder, names: Iterable[str], config: EvaluationConfig, folder: Path, precision: str = "int8"
) -> list[dict[str, Any]]:
    """Scores of the tasks of benchmarks; what cannot be run says why, and the others go on.

    Data come from UNMASK_MIRROR where it holds the task's repository (as the Hub has it, README included),
    otherwise from the Hub. Results are kept in `folder`, each subset of a task as soon as it is there: the
    same call goes on after an interruption.

    Returns: rows of benchmark, task, "score" (the task's main score, mean over its splits and subsets, so
        validation and test count alike for MLQA; None where it was not run), "subsets" (the same "score" and
        MEASURES for each subset, for MIRACL a language) and "why" it was not run (empty if it was).
    Raises: KeyError for an unknown name, before anything runs.
    """
    wanted = [(name, task) for name in names for task in benchmark_tasks(name)]
    if not wanted:
        return []
    encoder, results = MtebEncoder(embedder, config, precision), mteb.ResultCache(folder)
    return [{"benchmark": name, "task": t.metadata.name} | _run(encoder, t, results) for name, t in wanted]


def _run(encoder: MtebEncoder, task: AbsTask, results: mteb.ResultCache) -> dict[str, Any]:
    repo = task.metadata.dataset["path"]
    folder = hub.local(repo)
    if folder is None and (why := _unreachable()):
        why = f"{repo} is in no mirror (UNMASK_MIRROR), and the Hub: {why}"
        return {"score": None, "subsets": {}, "why": why}
    dataset = task.metadata.dataset | {"path": str(folder or repo)}
    task.metadata = task.metadata.model_copy(update={"dataset": dataset})
    task.task_specific_scores = _completeness
    result = mteb.evaluate(encoder, task, cache=results, raise_error=False, co2_tracker=False)
    if result.exceptions:
        reason = str(result.exceptions[0].exception).strip() or "no reason given"
        return {"score": None, "subsets": {}, "why": reason.splitlines()[0]}
    # What is kept may hold more than is asked for here, for instance more languages.
    found = result.task_results[0].validate_and_filter_scores(task)
    subsets: dict[str, list[Mapping]] = {}
    for row in chain(*found.scores.values()):  # of each split
        subsets.setdefault(row["hf_subset"], []).append(row)
    kept = {"score": "main_score"} | MEASURES  # a task that is no retrieval has the first alone
    means = {
        subset: {name: fmean(row[key] for row in rows) for name, key in kept.items() if key in rows[0]}
        for subset, rows in subsets.items()
    }
    return {"score": float(found.get_score()), "subsets": means, "why": ""}
