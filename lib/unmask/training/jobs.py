"""From a job (preset, stage, starting checkpoint, files) to a trained checkpoint: what a training child
process does."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from unmask import backbone
from unmask.config import Preset, TrainConfig, fingerprint, preset_from
from unmask.data.documents import TokenDocument
from unmask.data.pairs import curriculum
from unmask.data.sources import Corpus, open_corpus
from unmask.data.tokens import END_OF_TEXT, pack, tokenize
from unmask.training.engine import finish, stop_signals, train
from unmask.training.processes import Processes, full_weights
from unmask.training.stages import Contextual, Diffusion, NextToken, Pair, Stage, TokenPairs, Triplet

# What a checkpoint depends on: a change anywhere else does not train again.
_CODE = ("losses", "data", "training", "backbone.py", "encoding.py", "pooling.py", "quantize.py")


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
    if stage in ("ar", "diffusion"):
        model = (
            backbone.load(job["start"], head=True)
            if job.get("start")
            else backbone.build(preset.backbone, tokenizer, seed=config.seed)
        )
        blocks_NL = pretraining_blocks(
            corpus, tokenizer, config.length, config.steps * config.batch, config.seed
        )
        if stage == "diffusion":
            backbone.make_bidirectional(model, tokenizer, preset.backbone.mask_token)
            objective: Stage = Diffusion(blocks_NL, config, model.config.mask_token_id)
        else:
            objective = NextToken(blocks_NL, config)
    else:
        model = backbone.load(job["start"])
        objective = _contrastive(stage, config, job, corpus, tokenizer)
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


def pretraining_blocks(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, length: int, wanted: int, seed: int
) -> np.ndarray:
    """Up to `wanted` packed blocks of the training texts, drawn in a random order; kept beside the corpus."""
    key = fingerprint(length, wanted, seed, json.loads(tokenizer.backend_tokenizer.to_str())["model"])
    file = corpus.path / f"blocks-{key}.npy"
    if file.is_file():
        return np.load(file, mmap_mode="r")
    texts = corpus.texts("train").shuffle(seed=seed)["text"]
    parts, have, start = [], 0, 0
    while have < wanted and start < len(texts):
        part = pack(tokenizer, list(texts[start : start + 2000]), length)
        parts.append(part)
        have, start = have + len(part), start + 2000
    blocks_NL = np.concatenate(parts)[:wanted]
    if len(blocks_NL) < 2:
        raise ValueError(
            f"the corpus gives {len(blocks_NL)} blocks of {length} tokens: add text or shorten the blocks"
        )
    temporary = file.with_suffix(f".{os.getpid()}.npy")  # several processes may be at it
    np.save(temporary, blocks_NL)
    temporary.replace(file)
    return blocks_NL


def _contrastive(
    stage: str, config, job: Mapping[str, Any], corpus: Corpus, tokenizer: PreTrainedTokenizerBase
) -> Stage:
    if stage == "pair":
        pairs = corpus.pairs("train")
        groups = dict(zip(pairs["dataset"], pairs["group"], strict=True))
        if job.get("groups"):
            groups = {name: group for name, group in groups.items() if group in job["groups"]}
        data = {
            name: token_pairs(rows, tokenizer, config)
            for name, rows in by_dataset(pairs).items()
            if name in groups
        }
        allowed = None if job.get("groups") else curriculum(groups, config.curriculum, config.steps)
        return Pair(data, config, allowed)
    if stage == "contextual":
        data = {
            name: token_documents(rows, tokenizer, config)
            for name, rows in by_dataset(corpus.documents("train")).items()
        }
        if config.single:
            pairs = by_dataset(corpus.pairs("train").shuffle(seed=config.seed))
            data |= {name: single_chunks(rows, tokenizer, config) for name, rows in pairs.items()}
        return Contextual(data, config, tokenizer.convert_tokens_to_ids(END_OF_TEXT))
    if stage == "triplet":
        mined = Dataset.from_parquet(job["negatives"], cache_dir=str(Path(job["folder"]) / "cache"))
        return Triplet(
            {name: token_pairs(rows, tokenizer, config) for name, rows in by_dataset(mined).items()}, config
        )
    raise ValueError(f"unknown stage {stage!r}")


def by_dataset(rows: Dataset) -> dict[str, Dataset]:
    """Splits a table by its `dataset` column, in alphabetical order."""
    names = np.asarray(rows["dataset"])
    return {str(name): rows.select(np.flatnonzero(names == name)) for name in np.unique(names)}


def token_pairs(rows: Dataset, tokenizer: PreTrainedTokenizerBase, config) -> TokenPairs:
    """A data set of pairs, tokenised and truncated to the stage's lengths."""
    negatives = None
    if "negatives" in rows.column_names:
        flat = [text for texts in rows["negatives"] for text in texts]
        tokens = tokenize(tokenizer, flat, config.document_length)
        count = config.negatives
        negatives = [tokens[i : i + count] for i in range(0, len(tokens), count)]
    return TokenPairs(
        tokenize(tokenizer, list(rows["query"]), config.query_length),
        tokenize(tokenizer, list(rows["document"]), config.document_length),
        list(rows["key"]),
        negatives,
    )


def single_chunks(rows: Dataset, tokenizer: PreTrainedTokenizerBase, config) -> list[TokenDocument]:
    """The first `config.single` pairs of a data set, no two of one key, as documents of one chunk."""
    first = np.sort(np.unique(np.asarray(rows["key"]), return_index=True)[1])[: config.single]
    rows = rows.select(first)
    queries = tokenize(tokenizer, list(rows["query"]), config.query_length)
    chunks = tokenize(tokenizer, list(rows["document"]), config.chunk_length)
    return [TokenDocument([chunk], [query], [0]) for query, chunk in zip(queries, chunks, strict=True)]


def token_documents(rows: Dataset, tokenizer: PreTrainedTokenizerBase, config) -> list[TokenDocument]:
    """Documents with their queries, tokenised; a document of more than `config.chunks` chunks becomes
    several."""
    chunks = iter(tokenize(tokenizer, [c for chunks in rows["chunks"] for c in chunks], config.chunk_length))
    queries = iter(
        tokenize(tokenizer, [q for queries in rows["queries"] for q in queries], config.query_length)
    )
    documents = []
    for texts, asked, golds in zip(rows["chunks"], rows["queries"], rows["golds"], strict=True):
        own = [next(chunks) for _ in texts]
        pairs = [(next(queries), gold) for _, gold in zip(asked, golds, strict=True)]
        for start in range(0, len(own), config.chunks):
            window = [(q, gold - start) for q, gold in pairs if start <= gold < start + config.chunks]
            if window:
                documents.append(
                    TokenDocument(
                        own[start : start + config.chunks], [q for q, _ in window], [g for _, g in window]
                    )
                )
    return documents
