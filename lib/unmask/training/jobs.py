"""From a job (preset, stage, starting checkpoint, files) to a trained checkpoint: what a training child
process does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from unmask import backbone
from unmask.config import GROUPS, Preset, TrainConfig, fingerprint, preset_from
from unmask.data.blocks import Blocks, open_blocks
from unmask.data.corpus import Corpus
from unmask.data.pairs import curriculum
from unmask.data.sources import open_corpus
from unmask.data.tokenized import TokenDocuments, TokenPairs, single_chunks, token_documents, token_pairs
from unmask.data.tokens import END_OF_TEXT, StoredTokenizer
from unmask.training.engine import finish, stop_signals, train
from unmask.training.processes import Processes, full_weights
from unmask.training.stages import Contextual, Diffusion, NextToken, Pair, Stage, Triplet
from unmask.workspace import write_atomic

# What a checkpoint depends on: a change anywhere else does not train again.
_CODE = ("losses", "data", "training", "backbone.py", "encoding.py", "pooling.py", "quantize.py")
DATA_REPORT = "data.json"  # beside a checkpoint: what its training read


def run_job(job: Mapping[str, Any], report: Callable[[dict[str, Any]], None]) -> Path:
    """Trains what `job` says, together with the processes that run the same job, and returns the checkpoint
    directory.

    Args:
        job: "values" (the preset), "stage", "folder", "fingerprint"; and as the stage needs, "start"
            (checkpoint directory), "tokenizer" (for a model from scratch), "changes" (values of the stage's
            section to replace), "groups" (of pair data sets to use), "negatives" (file of mined triplets).
    """
    preset, config = stage_config(job)
    folder = Path(job["folder"])
    stage = job["stage"]
    processes = Processes.start(config.precision, preset.parallel.strategy)
    corpus = open_corpus(preset.data)
    tokenizer = backbone.load_tokenizer(job.get("start") or job["tokenizer"])
    data, losses = _data(job, config, corpus, tokenizer)
    if processes.main:
        write_atomic(folder / DATA_REPORT, json.dumps(losses, indent=1, ensure_ascii=False) + "\n")
    if job.get("start"):
        model = backbone.load(job["start"], head=stage in ("ar", "diffusion"))
    else:
        model = backbone.build(preset.backbone, tokenizer, seed=config.seed)
    if stage == "diffusion":
        backbone.make_bidirectional(model, tokenizer, preset.backbone.mask_token)
    objective = _objective(job, config, corpus, tokenizer, data, model.config)
    path = folder / "model"
    with stop_signals() as signals:  # until the model is saved, which is too late to stop
        train(
            objective, model, config, folder,
            fingerprint=job["fingerprint"], report=report, processes=processes, signals=signals,
        )  # fmt: skip
        weights = full_weights(model)
        if processes.main:
            backbone.save(
                model, tokenizer, path,
                weights=weights, stage=stage, pooling=getattr(config, "pooling", "mean"),
                fingerprint=job["fingerprint"],
            )  # fmt: skip
            finish(folder)
        processes.wait()
    return path


def stage_config(job: Mapping[str, Any]) -> tuple[Preset, TrainConfig]:
    """The preset of a job and its stage's section, the job's changes applied."""
    preset = preset_from(job["values"])
    return preset, replace(getattr(preset, job["stage"]), **job.get("changes", {}))


def job_fingerprint(job: Mapping[str, Any]) -> str:
    """Identifies everything that the result depends on: configuration, corpus, starting point, files and
    code."""
    preset, config = stage_config(job)
    files = {key: identity(Path(job[key])) for key in ("start", "tokenizer", "negatives") if job.get(key)}
    shape = None if job.get("start") else preset.backbone
    parts = (config, shape and fingerprint(shape), preset.backbone.mask_token, job.get("groups"), files)
    return fingerprint(job["stage"], *parts, open_corpus(preset.data).hash, code_hash())


def identity(path: Path) -> str:
    """Identity of an input: a checkpoint of ours by its fingerprint, anything else by its content."""
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
    """Hash of the library's code that decides what a training computes."""
    root = Path(backbone.__file__).parent
    digest = hashlib.sha256()
    for entry in _CODE:
        path = root / entry
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def prepare_data(job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tokenises what a job will read, with a progress bar, in as many processes as there are cores.

    A training does the same where it was not done before, with its GPUs waiting.

    Returns: see `data_report`.
    """
    preset, config = stage_config(job)
    tokenizer = backbone.load_tokenizer(job.get("start") or job["tokenizer"])
    return _data(job, config, open_corpus(preset.data), tokenizer)[1]


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
    if stage == "pair":
        data = {
            name: _pairs(corpus.pairs("train", name), corpus.identity("pairs", name), name, stored, config)
            for name in _groups(job, corpus)
        }
    elif stage == "contextual":
        data = _documents(corpus, stored, config)
    elif stage == "triplet":
        data = _triplets(job, corpus, stored, config)
    else:
        raise ValueError(f"unknown stage {stage!r}")
    return data, [{"data set": name, **rows.counters} for name, rows in data.items()]


def _objective(job: Mapping[str, Any], config, corpus: Corpus, tokenizer, data, model) -> Stage:
    stage = job["stage"]
    if stage == "ar":
        return NextToken(data, config)
    if stage == "diffusion":
        return Diffusion(data, config, model.mask_token_id)
    if stage == "pair":
        named = job.get("groups")  # which are trained on from the first step to the last
        allowed = None if named else curriculum(_groups(job, corpus), config.curriculum, config.steps)
        return Pair(data, config, allowed)
    if stage == "contextual":
        return Contextual(data, config, tokenizer.convert_tokens_to_ids(END_OF_TEXT))
    return Triplet(data, config)


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
    lengths = {"query_length": config.query_length, "document_length": config.document_length}
    return token_pairs(rows, stored, name=name, identity=file, negatives=negatives, **lengths)


def by_dataset(rows: Dataset) -> dict[str, Dataset]:
    """Splits a table by its `dataset` column, in alphabetical order."""
    names = np.asarray(rows["dataset"])
    return {str(name): rows.select(np.flatnonzero(names == name)) for name in np.unique(names)}
