"""Public benchmarks through the `mteb` package: our embedders, a reranker behind one. Retrieval is run as
appendix C of the paper says.

Shape suffixes: B texts · N queries · M documents · D dimensions.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache, lru_cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import joblib
import numpy as np
import pandas as pd
import torch
import yaml
from datasets import Dataset
from torch import Tensor

from unmask.config import RerankerConfig
from unmask.data import hub
from unmask.data.mining import unit
from unmask.evaluation.search import similarity, values
from unmask.evaluation.tasks import Task
from unmask.extras import extra
from unmask.models.context_encoder import ContextEmbedder
from unmask.models.embedder import Embedder, instructed, prompt
from unmask.models.reranker import Reranker
from unmask.store import fingerprint
from unmask_study.settings import EvaluationConfig
from unmask_study.tasks import code_hash

with extra("study"):
    import mteb
    from mteb import AbsTask, TaskMetadata
    from mteb.abstasks import AbsTaskRetrieval
    from mteb.models import ModelMeta, SearchEncoderWrapper
    from mteb.models.abs_encoder import AbsEncoder
    from mteb.types import PromptType

# Appendix C, and what the paper's tables are made of; a benchmark that is not named is mteb's own.
_YAML = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf8"))
BENCHMARKS, PROMPTS, LENGTHS = (_YAML[key] for key in ("benchmarks", "prompts", "lengths"))
_unreachable = cache(hub.unreachable)  # the Hub is asked once
# Scores of a subset that are kept beside its main one, as table 5 calls them → mteb's names; C is ours.
MEASURES = {"nDCG": "ndcg_at_10", "P": "precision_at_10", "R": "recall_at_10", "C": "complete_at_10"}
NOISE = 1e-3  # standard deviation, in that of the embeddings themselves; the paper: "small" [choice]


class MtebEncoder(AbsEncoder):
    """An `Embedder` as mteb's encoder: `mteb.evaluate(MtebEncoder(embedder, config.evaluation), tasks)`.

    No prompt is used but ArguAna's, and instructions that come with queries. Similarity is the cosine of the
    codes, which for binary ones orders as the Hamming distance does. SyntheticText2SQL holds documents that
    are equal to one another: small noise, a function of the document's position alone, breaks the symmetry.
    What is no search (classification, clusters, pairs of sentences) gets float vectors of unit length.

    Args:
        config: `query_length` and `document_length` are tokens at most, but for LENGTHS, up to the model's
            positions.
        precision: "int8", "binary", "ubinary" or "float32".
        instruct: every text but a searched document comes after mteb's instruction for its task, in
            Qwen3-Embedding's template; ArguAna's prompt is not used.
    Source: appendix C.
    """

    def __init__(
        self, embedder: Embedder, config: EvaluationConfig, precision: str = "int8", instruct: bool = False
    ):
        self.model, self.config, self.precision, self.instruct = embedder, config, precision, instruct
        self.instruction_template = prompt("{instruction}")
        self.reader = lambda subset: embedder  # of a task's subset
        # The last corpus is embedded once: the subsets of a task may share it.
        self._codes = lru_cache(1)(lambda reader, *texts, **how: reader.encode(texts, precision, **how))
        tensors = [*getattr(embedder, "encoder", embedder.model).parameters()]
        tensors.append(getattr(embedder, "context_KD", torch.empty(0)))
        how = embedder.mixed_precision, config.query_length, config.document_length, instruct
        self.mteb_model_meta = _meta(precision, tensors, embedder.settings, how)

    def encode(self, inputs: Iterable[Mapping], *, task_metadata: TaskMetadata, **about: Any) -> np.ndarray:
        """Embeds the texts of mteb's batches, (B, D); an empty text is embedded as a space, for
        which the tokenizer must have a token."""
        name, kind, reader = task_metadata.name, about.get("prompt_type"), self.reader(about.get("hf_subset"))
        prefix, column, length = "", lambda rows: rows["text"], self.length(name, kind or PromptType.document)
        if self.instruct and kind != PromptType.document:
            prefix = self.get_task_instruction(task_metadata, kind)
        elif kind == PromptType.query:
            prefix, column = PROMPTS.get(name, ""), _queries
        texts = [prefix + text or " " for batch in inputs for text in column(batch)]
        if kind == PromptType.query:
            return reader.encode(texts, self.precision, max_length=length)
        codes_BD = self._codes(reader, *texts, max_length=length)
        if kind is None:  # no search
            return unit(_floats(codes_BD))
        return noisy(codes_BD) if name in _YAML["repeating"] else codes_BD

    def length(self, task: str, kind: PromptType) -> int:
        """Tokens that are read of a query or a document."""
        return LENGTHS.get(task, getattr(self.config, f"{kind}_length"))

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Cosine similarity (N, M); one vector may come as (D,)."""
        return similarity(*(torch.atleast_2d(torch.as_tensor(x)) for x in (embeddings1, embeddings2)))


def _queries(batch: Mapping[str, Any]) -> list[str]:
    """Queries, after the instruction of each where the benchmark has one."""
    if "instruction" not in batch:
        return batch["text"]
    pairs = zip(batch["instruction"], batch["query"], strict=True)
    return [instructed(instruction or "", query) for instruction, query in pairs]


def _floats(codes_BD: np.ndarray) -> np.ndarray:
    """Embeddings as float32; packed bits are unpacked."""
    return values(torch.as_tensor(codes_BD)).float().numpy()


def noisy(codes_BD: np.ndarray) -> np.ndarray:
    """Embeddings with Gaussian noise that depends on position only, as `_floats`."""
    values_BD = _floats(codes_BD)
    noise_BD = np.random.default_rng(0).standard_normal(values_BD.shape, np.float32)
    return values_BD + NOISE * float(values_BD.std()) * noise_BD


class MtebReranker(SearchEncoderWrapper):
    """A `Reranker` behind an `MtebEncoder`, as mteb's search: it orders the encoder's best documents anew.

    Queries come with mteb's instruction for their task.

    Args:
        config: `candidates` of each query are reranked, read as far as `first` reads.
    Source: Qwen3-Embedding, section 4.2.
    """

    def __init__(self, first: MtebEncoder, reranker: Reranker, config: RerankerConfig):
        super().__init__(first)
        self.reranker, self.candidates = reranker, config.candidates
        how = reranker.reader.mixed_precision, reranker.reader.max_length, config.candidates
        revision = first.mteb_model_meta.revision
        self.mteb_model_meta = _meta("reranked", reranker.model.parameters(), revision, how)

    def search(self, queries: Dataset, *, top_k: int, **about: Any) -> dict[str, dict[str, float]]:
        """The score of each candidate, by the ids of queries and documents."""
        corpus, number = self.task_corpus, {name: i for i, name in enumerate(self.task_corpus["id"])}
        first, task = super().search(queries, top_k=self.candidates, **about), about["task_metadata"]
        options = {f"{kind}_length": self.model.length(task.name, kind) for kind in PromptType}
        options["instruction"] = self.model.get_instruction(task, PromptType.query)
        scores = {}
        for row in queries:
            best = sorted(first[row["id"]], key=first[row["id"]].get, reverse=True)
            query = " ".join(filter(None, (row["text"], row.get("instruction"))))
            odds = self.reranker.log_odds(query, [_text(corpus[number[name]]) for name in best], **options)
            scores[row["id"]] = dict(zip(best, odds.tolist(), strict=True))
        return scores


def _meta(name: str, tensors: Iterable[Tensor], *how: Any) -> ModelMeta:
    """mteb keeps results by name and revision: whatever changes a score changes them."""
    weights = joblib.hash([x.detach().float().cpu().numpy() for x in tensors])
    revision = fingerprint(weights, *how, _YAML, mteb.__version__, code_hash())
    return ModelMeta.create_empty({"name": f"unmask/{name}", "revision": revision})


def context_texts(task: AbsTask, subset: str, count: int) -> list[str]:
    """Texts of a task whose data mteb has loaded, drawn at random from the splits that are evaluated: of a
    search documents, not queries; of other tasks whatever is read (CDE, section 10.12)."""
    rng, texts = np.random.default_rng(0), []
    for split in task.eval_splits:
        rows, columns = task.dataset.get(subset, task.dataset)[split], task._get_content_columns()
        search, rows = isinstance(rows, dict), rows["corpus"] if isinstance(rows, dict) else rows
        for row in rows.select(rng.permutation(len(rows))[:count]):
            for text in [_text(row)] if search else [row[column] for column in columns]:
                texts += [text] if isinstance(text, str) else text  # or a list of them
    return [texts[i] or " " for i in rng.permutation(len(texts))[:count]]


def _text(row: Mapping[str, str]) -> str:
    """A document of a search as encoders read it."""
    return " ".join(filter(None, (row.get("title"), row["text"]))).strip() or " "


def benchmark_tasks(name: str, every_type: bool = False) -> list[AbsTask]:
    """The tasks of a benchmark: a key of BENCHMARKS, or mteb's name of a benchmark or of a task.

    Args:
        every_type: of mteb's benchmarks not retrieval alone.
    Raises: KeyError for a name that is none of them.
    """
    if name in BENCHMARKS:
        return list(mteb.get_tasks(**BENCHMARKS[name]))
    if name in {benchmark.name for benchmark in mteb.get_benchmarks()}:
        tasks = mteb.get_benchmark(name).tasks
        return [task for task in tasks if every_type or task.metadata.type == "Retrieval"]
    return [mteb.get_task(name)]


def type_means(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """A benchmark's rows of `run_benchmark` as leaderboards show them: the mean over its tasks, that over its
    types of tasks, and each type's. A mean of what was not all run is left out."""
    table = pd.DataFrame(rows, columns=["type", "score"]).astype({"score": float})
    types = table.groupby("type", sort=False).score.agg(lambda scores: scores.mean(skipna=False))
    means = {"mean (task)": table.score.mean(skipna=False), "mean (type)": types.mean(skipna=False), **types}
    return {name: float(mean) for name, mean in means.items() if mean == mean}


def side_by_side(public: Mapping[str, Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The rows of `run_benchmark` for several systems, as a row a task: each one's score, and why one was not
    run."""
    lines: dict[tuple[str, str], dict[str, Any]] = {}
    for system, row in ((system, row) for system, rows in public.items() for row in rows):
        line = lines.setdefault((row["benchmark"], row["task"]), {})
        line |= {key: row[key] for key in ("benchmark", "task")} | {"why": line.get("why") or row["why"]}
        line[system] = row["score"]
    return [*lines.values()]


def tool_kinds(subsets: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Table 5's columns from ToolRet's sets of requests: the mean of each kind of tool, and of the kinds."""
    names = list(mteb.get_task("ToolRetrieval").hf_subsets)  # by kind
    custom, web = names.index("appbench"), names.index("apibank")
    kinds = {"Web": names[web:], "Code": names[:custom], "Custom": names[custom:web]}
    means = {}
    for kind, sets in kinds.items():
        means |= {f"{kind} {one}": fmean(subsets[name][one] for name in sets) for one in MEASURES}
    return means | {f"Avg {x}": fmean(means[f"{kind} {x}"] for kind in kinds) for x in ("nDCG", "C")}


def _completeness(task: AbsTaskRetrieval, scores: Mapping[str, Mapping], *about: Any, **more: Any) -> dict:
    """ToolRet's comprehensiveness: the share of the queries whose documents are all among the first ten.
    Beside it what the task itself counts."""
    share = round(fmean(row["recall_10"] == 1 for row in scores.values()), 5)  # as mteb's
    return type(task).task_specific_scores(task, scores, *about, **more) | {MEASURES["C"]: share}


def _absent(task: AbsTask) -> str:
    """Why a task's data cannot be had; empty if they can. A mirror that has them is where it reads them."""
    repo = task.metadata.dataset["path"]
    folder = Path(repo) if Path(repo).is_dir() else hub.local(repo)  # mteb's tasks are shared: found before
    if folder is None and (why := _unreachable()):
        return f"{repo} is in no mirror (UNMASK_MIRROR), and the Hub: {why}"
    dataset = task.metadata.dataset | {"path": str(folder or repo)}
    task.metadata = task.metadata.model_copy(update={"dataset": dataset})
    return ""


def as_task(task: AbsTaskRetrieval) -> Task:
    """A search of mteb's in one language as a task of ours, every document alone. Queries that nothing
    answers are left out.

    Raises: ValueError that says why its data cannot be had.
    """
    if why := _absent(task):
        raise ValueError(why)
    task.load_data()
    task.convert_v1_dataset_format_to_v2(None)
    [[data]] = (splits.values() for splits in task.dataset.values())
    number = {name: i for i, name in enumerate(data["corpus"]["id"])}
    queries, relevant = [], []
    for row in data["queries"]:
        grades = data["relevant_docs"].get(row["id"], {})
        if right := {number[name] for name, grade in grades.items() if grade}:
            queries.append(row["text"])
            relevant.append(right)
    texts = [[_text(row)] for row in data["corpus"]]
    return Task(task.metadata.name, "english", queries, texts, relevant, list(number))


def run_benchmark(
    embedder: Embedder,
    names: Iterable[str],
    config: EvaluationConfig,
    folder: Path,
    precision: str = "int8",
    every_type: bool = False,
    instruct: bool = False,
    reranking: tuple[Reranker, RerankerConfig] | None = None,
) -> list[dict[str, Any]]:
    """Scores of the tasks of benchmarks; what cannot be run says why, and the others go on.

    Data come from UNMASK_MIRROR where it holds the task's repository (as the Hub has it, README included),
    otherwise from the Hub. Results are kept in `folder`, each subset of a task as soon as it is there: the
    same call goes on after an interruption.

    A `ContextEmbedder` without a context reads each task's own documents beside its texts.

    Args:
        every_type: also classification, clusters and whatever else is in a benchmark of mteb's.
        instruct: as for `MtebEncoder`.
        reranking: scores are those of the embedder's best documents reranked.
    Returns: rows of benchmark, task, its type, "score" (the task's main score, mean over its splits and
        subsets, so validation and test count alike for MLQA; None where it was not run), "subsets" (the same
        "score" and MEASURES for each subset, for MIRACL a language) and "why" it was not run (empty if it
        was).
    Raises: KeyError for an unknown name, before anything runs.
    """
    wanted = [(name, task) for name in names for task in benchmark_tasks(name, every_type)]
    results = mteb.ResultCache(folder)

    @cache
    def model(length: int | None) -> MtebEncoder | MtebReranker:
        read = replace(config, query_length=length, document_length=length) if length else config
        encoder = MtebEncoder(embedder, read, precision, instruct)
        return MtebReranker(encoder, *reranking) if reranking else encoder

    return [
        {"benchmark": name, "task": task.metadata.name, "type": task.metadata.type}
        | _run(model(LENGTHS.get(name)), task, results)
        for name, task in wanted
    ]


def _run(encoder: MtebEncoder | MtebReranker, task: AbsTask, results: mteb.ResultCache) -> dict[str, Any]:
    if task.is_aggregate:  # CQADupstack: its forums
        parts = [_run(encoder, part, results) for part in task.metadata.tasks]
        why = next((part["why"] for part in parts if part["why"]), "")
        return {"score": None if why else fmean(part["score"] for part in parts), "subsets": {}, "why": why}
    if why := _absent(task):
        return {"score": None, "subsets": {}, "why": why}
    task.task_specific_scores = partial(_completeness, task)
    if isinstance(model := encoder.model, ContextEmbedder) and not len(model.context_KD):
        texts, read = partial(context_texts, task, count=model.encoder.context), encoder.config
        encoder.reader = cache(lambda name: model.with_context(texts(name), max_length=read.document_length))
    result = mteb.evaluate(encoder, task, cache=results, raise_error=False, co2_tracker=False)
    if result.exceptions:
        reason = str(result.exceptions[0].exception).strip() or "no reason given"
        return {"score": None, "subsets": {}, "why": reason.splitlines()[0]}
    # What is kept may hold more than is asked for here, for instance more languages.
    scores = result.task_results[0].validate_and_filter_scores(task)
    names = {"main_score": "score"} | {key: name for name, key in MEASURES.items()}
    table = pd.concat(map(pd.DataFrame, scores.scores.values())).rename(columns=names)  # a row a subset
    measured = [name for name in names.values() if name in table]  # of what is no search the score alone
    subsets = table.groupby("hf_subset", sort=False)[measured].mean().to_dict("index")
    return {"score": float(scores.get_score()), "subsets": subsets, "why": ""}
