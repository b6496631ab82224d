"""From a job (preset, stage, starting checkpoint, files) to a trained checkpoint: what a training child
process does."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from unmask.config import (
    GROUPS,
    ContrastiveConfig,
    PairConfig,
    Preset,
    Qwen3Config,
    RerankerConfig,
    TrainConfig,
    preset_from,
)
from unmask.data.clusters import LSA, Neighbours, Surrogate, negative_similarity, neighbours
from unmask.data.corpus import Corpus
from unmask.data.mining import Encoder
from unmask.data.pairs import curriculum
from unmask.data.prompt import AROUND_DOCUMENT, answers, around_query, taken
from unmask.data.sources import open_corpus
from unmask.data.tokenized import (
    Blocks,
    TokenDocuments,
    TokenPairs,
    open_blocks,
    single_chunks,
    token_documents,
    token_pairs,
)
from unmask.data.tokens import StoredTokenizer, end_token, ending
from unmask.models import backbone
from unmask.models import context_encoder as cde
from unmask.models.instructions import INSTRUCTIONS, prompt
from unmask.models.pretrained import require_checkpoint
from unmask.store import code_fingerprint, fingerprint, write_atomic
from unmask.training.cde import Cde
from unmask.training.distributed import Processes, full_weights
from unmask.training.loop import Preempted, finish, stop_signals, train
from unmask.training.qwen3 import Qwen3
from unmask.training.reranking import Reranking
from unmask.training.stages import Contextual, Diffusion, NextToken, Pair, Stage, Triplet

# What a checkpoint depends on: a change anywhere else does not train again.
_CODE = ("losses", "data", "models", "training")
MILESTONES = "milestones"  # beside a checkpoint: what it was on its way, in a folder per training
DATA_REPORT = "data.json"  # beside a checkpoint: what its training read


def run_job(job: Mapping[str, Any], report: Callable[[dict[str, Any]], None]) -> Path:
    """Trains what `job` says, together with the processes that run the same job, and returns the checkpoint
    directory.

    Args:
        job: "values" (the preset), "stage", "folder", "fingerprint"; and as the stage needs, "start"
            (checkpoint directory), "tokenizer" (for a model from scratch), "changes" (values of the stage's
            section to replace), "groups" (of pair data sets to use), "negatives" (file of mined triplets),
            "surrogate" (directory or Hub name of an embedder, instead of `clusters.surrogate`),
            "milestones" (numbers of steps after which the model is kept as well, see `launch.milestones`),
            "bidirectional" (a causal start reads both sides from the first step on, without pretraining).
    """
    preset, config = stage_config(job)
    folder = Path(job["folder"])
    stage = job["stage"]
    processes = Processes.start(config.precision, preset.parallel.strategy)
    corpus = open_corpus(preset.data)
    tokenizer = backbone.load_tokenizer(job.get("start") or job["tokenizer"])
    data, losses = _data(job, config, corpus, tokenizer)
    near = _neighbours(job, data, tokenizer) if _looks_around(config) else {}
    if processes.main:
        write_atomic(folder / DATA_REPORT, json.dumps(losses, indent=1, ensure_ascii=False) + "\n")
    contextual = stage == "cde" and config.context > 0
    if contextual:
        model = cde.build(job["start"], context=config.context)
    elif job.get("start"):
        model = backbone.load(job["start"], head=stage in ("ar", "diffusion", "reranker"))
    else:
        model = backbone.build(preset.backbone, tokenizer, seed=config.seed)
    if stage == "diffusion" or job.get("bidirectional"):
        backbone.make_bidirectional(model, tokenizer, preset.backbone.mask_token)
    if _ends(config):
        tokenizer = ending(tokenizer)
    objective = _objective(job, config, corpus, tokenizer, data, near, model.config)
    path, milestones = folder / "model", folder / MILESTONES / job["fingerprint"]

    def save(path: Path, identity: str) -> None:
        weights = full_weights(model)
        if processes.main:
            write = cde.save if contextual else backbone.save
            write(model, tokenizer, path, weights=weights, **_facts(job, config), fingerprint=identity)
        processes.wait()

    def after_step(done: int) -> None:
        if done in job.get("milestones", ()):
            save(milestones / f"step-{done:07d}", f"{job['fingerprint']}-{done}")

    with stop_signals() as signals:  # until the model is saved, which is too late to stop
        train(
            objective, model, config, folder,
            fingerprint=job["fingerprint"], report=report, after_step=after_step, processes=processes,
            signals=signals,
        )  # fmt: skip
        save(path, job["fingerprint"])
        if processes.main:
            for other in set(milestones.parent.glob("*")) - {milestones}:  # of the training replaced just now
                shutil.rmtree(other)
            finish(folder)
    if signals:  # too late to stop this training, but not the next one
        raise Preempted(config.steps)
    return path


def _facts(job: Mapping[str, Any], config: TrainConfig) -> dict[str, Any]:
    """How a stage's checkpoint is to be used, and which ready backbone it descends from."""
    facts = {"stage": job["stage"], "pooling": getattr(config, "pooling", "mean")}
    if source := backbone.facts(job.get("start") or "").get("source"):
        facts["source"] = source
    if _ends(config):
        facts["special_tokens"] = True
    if job["stage"] == "qwen3":
        prompts = {"query": prompt(INSTRUCTIONS["english"]), "document": ""}
        facts["prompts"] = prompts  # for sentence-transformers
    return facts


def _ends(config: TrainConfig) -> bool:
    """Whether an end is put after each text: a last token to pool at that means the same for all texts.

    Qwen3-Embedding's texts end so whatever their pooling."""
    last = isinstance(config, PairConfig) and config.pooling == "last"
    return last or isinstance(config, Qwen3Config)


def stage_config(job: Mapping[str, Any]) -> tuple[Preset, TrainConfig]:
    """The preset of a job and its stage's section, the job's changes applied."""
    preset = preset_from(job["values"])
    return preset, replace(getattr(preset, job["stage"]), **job.get("changes", {}))


def job_fingerprint(job: Mapping[str, Any]) -> str:
    """Identifies everything that the result depends on: configuration, corpus, starting point, files and
    code."""
    preset, config = stage_config(job)
    files = {key: identity(Path(job[key])) for key in ("start", "tokenizer", "negatives") if job.get(key)}
    if _looks_around(config):
        files["surrogate"] = _surrogate(job, preset).identity
        files["clusters"] = fingerprint(replace(preset.clusters, surrogate=""))
    shape = None if job.get("start") else preset.backbone
    asked = job.get("groups"), job.get("milestones"), job.get("bidirectional")
    parts = (config, shape and fingerprint(shape), preset.backbone.mask_token, asked, files)
    return fingerprint(job["stage"], *parts, open_corpus(preset.data).hash, code_hash())


def identity(path: Path) -> str:
    """Identity of an input: a checkpoint of ours by its fingerprint, anything else by its content."""
    if not path.exists():  # a name on the Hub
        return str(path)
    known = backbone.facts(path).get("fingerprint") if path.is_dir() else None
    if known:
        return known
    digest = hashlib.sha256()
    for file in sorted(path.glob("*")) if path.is_dir() else [path]:
        if file.is_file():
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]


def code_hash() -> str:
    """Fingerprint of the library's code that decides what a training computes."""
    root = Path(backbone.__file__).parents[1]
    return code_fingerprint(*(root / name for name in _CODE))


def prepare_data(job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tokenises what a job will read, with a progress bar, in as many processes as there are cores, and finds
    the look-alikes if it trains on such.

    A training does the same where it was not done before, with its GPUs waiting.

    Returns: see `data_report`.
    """
    preset, config = stage_config(job)
    tokenizer = backbone.load_tokenizer(job.get("start") or job["tokenizer"])
    data, report = _data(job, config, open_corpus(preset.data), tokenizer)
    if _looks_around(config):
        _neighbours(job, data, tokenizer)
    return report


def drawn_batches(job: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """The first batches of a training on the pairs of a job's groups, as the surrogate sees them.

    Returns: for each its "dataset", its "rows" there, and its "similarity": the surrogate's mean cosine of a
        query to the other documents (CDE, figure 6). The job may have random batches.
    """
    preset, config = stage_config(job)
    tokenizer = backbone.load_tokenizer(job.get("start") or job["tokenizer"])
    data, _ = _data(job, config, open_corpus(preset.data), tokenizer)
    near = _neighbours(job, data, tokenizer)
    stage = Pair(data, replace(config, steps=count), neighbours=near)
    drawn = map(stage.samples, range(count))
    return [row | {"similarity": negative_similarity(near[row["dataset"]], row["rows"])} for row in drawn]


def data_report(checkpoint: Path) -> list[dict[str, Any]]:
    """What the training that made a checkpoint read: a row per data set or text source with what was cut,
    left out and repeated."""
    return json.loads((checkpoint.parent / DATA_REPORT).read_text(encoding="utf8"))


def _data(
    job: Mapping[str, Any], config, corpus: Corpus, tokenizer: PreTrainedTokenizerBase
) -> tuple[Blocks | dict[str, Any], list[dict[str, Any]]]:
    """What a stage trains on, prepared by the process that comes first, and its report."""
    stage = job["stage"]
    if stage in ("ar", "diffusion"):
        wanted = config.steps * config.batch
        sources = corpus.text_sources()
        blocks_NL = open_blocks(sources, tokenizer, length=config.length, wanted=wanted, seed=config.seed)
        return blocks_NL, blocks_NL.report()
    stored = StoredTokenizer.of(tokenizer)
    if stage in ("pair", "cde") or (stage == "qwen3" and not config.negatives):
        data = {
            name: _pairs(corpus.pairs("train", name), corpus.identity("pairs", name), name, stored, config)
            for name in _groups(job, corpus)
        }
    elif stage == "contextual":
        data = _documents(corpus, stored, config)
    elif stage in ("triplet", "qwen3", "reranker"):
        data = _triplets(job, corpus, stored, config)
    else:
        raise ValueError(f"unknown stage {stage!r}")
    return data, [{"data set": name, **rows.counters} for name, rows in data.items()]


def _looks_around(config: TrainConfig) -> bool:
    return isinstance(config, ContrastiveConfig) and config.looks_around


def _neighbours(
    job: Mapping[str, Any], data: Mapping[str, TokenPairs | TokenDocuments], tokenizer
) -> dict[str, Neighbours]:
    """The neighbours of a contrastive stage's data sets, found by the process that comes first."""
    preset, config = stage_config(job)
    stored, surrogate = StoredTokenizer.of(tokenizer), _surrogate(job, preset)
    return {
        name: neighbours(
            rows, name=name, stored=stored, surrogate=surrogate,
            config=preset.clusters, cluster_size=config.cluster_size, seed=config.seed,
        )
        for name, rows in data.items()
    }  # fmt: skip


def _surrogate(job: Mapping[str, Any], preset: Preset) -> Surrogate:
    """The embedder that says which texts are alike: one of ours, or any of sentence-transformers'."""
    name = job.get("surrogate") or preset.clusters.surrogate
    if name == LSA:
        return Surrogate(LSA)
    path = require_checkpoint(name)

    def load() -> Encoder:
        from sentence_transformers import SentenceTransformer  # seconds to import

        from unmask.models.embedder import Embedder

        return Embedder.from_pretrained(path) if backbone.facts(path) else SentenceTransformer(path)

    return Surrogate(identity(Path(path)) if Path(path).is_dir() else path, load)


def _objective(job: Mapping[str, Any], config, corpus: Corpus, tokenizer, data, near, model) -> Stage:
    stage = job["stage"]
    if stage == "ar":
        return NextToken(data, config)
    if stage == "diffusion":
        return Diffusion(data, config, model.mask_token_id)
    if stage in ("pair", "cde", "qwen3"):
        # Groups that are named, and triplets, are trained on from the first step to the last.
        throughout = job.get("groups") or (stage == "qwen3" and config.negatives)
        allowed = None if throughout else curriculum(_groups(job, corpus), config.curriculum, config.steps)
        kind = Qwen3 if stage == "qwen3" else Cde if stage == "cde" and config.context else Pair
        return kind(data, config, allowed, near)
    if stage == "contextual":
        return Contextual(data, config, tokenizer.convert_tokens_to_ids(end_token(tokenizer)), near)
    if stage == "reranker":
        return Reranking(data, config, answers(tokenizer.backend_tokenizer))
    return Triplet(data, config, neighbours=near)


def _groups(job: Mapping[str, Any], corpus: Corpus) -> dict[str, str]:
    """Data sets of pairs that the job trains on → their groups."""
    groups = {name: corpus.pairs("train", name)[0]["group"] for name in corpus.datasets("pairs", "train")}
    return {name: group for name, group in groups.items() if group in (job.get("groups") or GROUPS)}


def _documents(corpus: Corpus, stored: StoredTokenizer, config) -> dict[str, TokenDocuments]:
    data = {}
    for name in corpus.datasets("documents", "train"):
        data[name] = token_documents(
            corpus.documents("train", name), stored, name=name, identity=corpus.identity("documents", name),
            query_length=config.query_length, chunk_length=config.chunk_length, chunks=config.chunks,
        )  # fmt: skip
    for name in corpus.datasets("pairs", "train") if config.single else ():
        data[name] = single_chunks(
            corpus.pairs("train", name), stored, name=name, identity=corpus.identity("pairs", name),
            count=config.single,
            seed=config.seed, query_length=config.query_length, document_length=config.chunk_length,
        )  # fmt: skip
    return data


def _triplets(
    job: Mapping[str, Any], corpus: Corpus, stored: StoredTokenizer, config
) -> dict[str, TokenPairs]:
    """Triplets of the corpus and mined ones."""
    data = {
        name: _pairs(
            corpus.triplets("train", name),
            corpus.identity("triplets", name),
            name,
            stored,
            config,
            config.negatives,
        )
        for name in corpus.datasets("triplets", "train")
    }
    if job.get("negatives"):
        path = Path(job["negatives"])
        mined = by_dataset(Dataset.from_parquet(str(path), cache_dir=str(Path(job["folder"]) / "cache")))
        for name, rows in mined.items():
            data[name] = _pairs(rows, identity(path), name, stored, config, config.negatives)
    return data


def _pairs(
    rows: Dataset, file: str, name: str, stored: StoredTokenizer, config, negatives: int = 0
) -> TokenPairs:
    reading = _reading(rows, stored, config)
    return token_pairs(rows, stored, name=name, identity=file, negatives=negatives, **reading)


def _reading(rows: Dataset, stored: StoredTokenizer, config) -> dict[str, Any]:
    """What a stage's model reads before and after a text, and how many tokens at most."""
    lengths = {"query_length": config.query_length, "document_length": config.document_length}
    if _ends(config):
        before = prompt(INSTRUCTIONS[rows[0]["group"]]) if isinstance(config, Qwen3Config) else ""
        end = stored.load().id_to_token(stored.end)
        return lengths | {"around_query": (before, end), "around_document": ("", end)}
    if isinstance(config, RerankerConfig):
        around = around_query(INSTRUCTIONS[rows[0]["group"]])
        return {
            "around_query": around,
            "around_document": AROUND_DOCUMENT,
            "query_length": config.query_length + taken(stored.load(), around),
            "document_length": config.document_length + taken(stored.load(), AROUND_DOCUMENT),
        }
    return lengths


def by_dataset(rows: Dataset) -> dict[str, Dataset]:
    """Splits a table by its `dataset` column, in alphabetical order."""
    names = np.asarray(rows["dataset"])
    return {str(name): rows.select(np.flatnonzero(names == name)) for name in np.unique(names)}
