"""`fit`: an embedder from one's own rows, in five lines.

It is the notebooks' training (`unmask.training`) on the rows that are given, with values that suit small
data, and with an answer to the question whether it helped.
"""

import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto import AutoConfig

from unmask.config import BackboneConfig, ClustersConfig, ConfigError, EvaluationConfig, ParallelConfig
from unmask.data.batches import permuted
from unmask.data.corpus import SCHEMAS, Corpus, write_tables
from unmask.data.registry import Source
from unmask.evaluation.tasks import Task, evaluate, evaluate_bm25
from unmask.models import backbone
from unmask.models.embedder import Embedder
from unmask.store import fingerprint, nearest, new_directory, write_json
from unmask.training import STAGES, Watch, train
from unmask.training.job import SECTIONS

COLUMNS: dict[str, dict[str, type]] = {
    "pair": {"query": str, "document": str},
    "triplet": {"query": str, "document": str, "negatives": list},
    "contextual": {"chunks": list, "queries": list, "golds": list},
    "diffusion": {"text": str},
}
KIND = {"pair": "pairs", "triplet": "triplets", "contextual": "documents", "diffusion": "texts"}
MASKS = "<|fim_pad|>", "<empty_output>"  # rare tokens of Qwen3's and of SmolLM2's vocabulary
EPOCHS = 3
FEWEST = 20  # groups of which a part can be held out
ASKED, AMONG = 1_000, 10_000  # held-out queries, and texts that they are asked of, at most


@dataclass(frozen=True)
class Helped:
    """nDCG@10 of held-out queries before the training, after it, and of BM25. They are asked of the held-out
    and of the training texts together, in INT8."""

    before: float
    after: float
    bm25: float
    queries: int
    texts: int

    def __str__(self) -> str:
        numbers = f"{self.before:.3f} before, {self.after:.3f} after, BM25 {self.bm25:.3f}"
        return f"nDCG@10 of {self.queries:,} held-out queries among {self.texts:,} texts: {numbers}"


def fit(
    model: Embedder | str | Path,
    data: Iterable[Any],
    *,
    stage: str = "pair",
    folder: str | Path | None = None,
    hold_out: float = 0.1,
    **values: Any,
) -> Embedder:
    """Trains an embedder on rows of one's own, and says whether it helped.

    A tenth of the groups is held out: rows that share a query or a text are one group, and never each other's
    negatives. nDCG@10 of their queries is printed, before and after, beside BM25's, and kept as `helped` of
    the result. With several GPUs all of them train.

    Args:
        model: an `Embedder`, a directory, a name on the Hub, or "smollm2-135m". A causal language model is
            made to read both sides.
        data: rows, as tuples, as dicts or as a `datasets.Dataset`. Their columns, by stage:
            "pair": query, document; "triplet": query, document, negatives (a list);
            "contextual": chunks (a list), queries (a list), golds (for each query the number of its chunk);
            "diffusion": text.
        stage: one of these.
        folder: where the training is kept. The same call finds it there, or goes on with it after an
            interruption. Default: nothing is kept but the result.
        hold_out: share of the groups; 0: none.
        values: any value of the stage's section (`unmask.config`), for instance steps, batch, lr. By default
            three epochs of batches of 128 rows, or of all rows if there are fewer.
    Returns: the embedder, with `helped` (None if nothing was held out) and `checkpoint`.
    Raises: ConfigError for an unknown stage or key, ValueError for rows that cannot be used, before a model
        is loaded; TrainingStopped, if it was interrupted.

    Example:
        >>> pairs = [(f"how is {i} written?", f"{i} is written with {len(str(i))} digits") for i in range(40)]
        >>> embedder = fit(model, pairs, steps=4)  # doctest: +ELLIPSIS
        pair: 36 rows in 36 groups, ...
        >>> embedder.encode(["how is 7 written?"]).dtype
        dtype('int8')
    """
    rows = _rows(data, stage)
    _check_keys(stage, values)
    if not 0 <= hold_out < 1:
        raise ValueError(f"hold_out must be a share below 1, got {hold_out}")
    group_N = _groups(stage, rows)
    held_N = _held_out(group_N, hold_out, stage)
    with ExitStack() as stack:
        place = Path(folder or stack.enter_context(tempfile.TemporaryDirectory())).absolute()
        start = _start(model, place)
        tokenizer, shape = backbone.load_tokenizer(start), AutoConfig.from_pretrained(start).get_text_config()
        config = _config(stage, [row for row, held in zip(rows, held_N) if not held], shape, values)
        recipe = SimpleNamespace(
            backbone=_shape(shape, tokenizer),
            clusters=ClustersConfig(),
            parallel=ParallelConfig(num_processes=max(1, torch.cuda.device_count())),
            **{stage: config},
        )
        corpus = _corpus(place, stage, rows, group_N, held_N)
        training = STAGES[stage](recipe, corpus, tokenizer)
        network = training.model(start)
        if not backbone.sees_both_sides(network):
            training = STAGES[stage](recipe, corpus, tokenizer, bidirectional=True)
            network = training.model(start)
        groups = len(np.unique(group_N[~held_N]))
        print(
            f"{stage}: {(~held_N).sum():,} rows in {groups:,} groups, {config.steps:,} steps of "
            f"{config.batch:,}; {held_N.sum():,} rows are held out"
        )
        tasks, limits = _tasks(stage, rows, held_N), _limits(config)
        before = _score(_embedder(network, tokenizer, config), tasks, limits)
        checkpoint = train(training, network, place / stage, watch=Watch(title=stage))
        embedder = Embedder.from_pretrained(checkpoint)
        embedder.checkpoint, embedder.helped = checkpoint if folder else None, None
        if tasks:
            after, bm25 = _score(embedder, tasks, limits), float(evaluate_bm25(tasks)[stage].mean())
            embedder.helped = Helped(before, after, bm25, len(tasks[0].queries), len(tasks[0].chunks))
            print(embedder.helped)
    return embedder


# --- rows


def _rows(data: Iterable[Any], stage: str) -> list[dict[str, Any]]:
    """The rows as dicts of the stage's columns, each checked."""
    if stage not in COLUMNS:
        raise ConfigError(f"unknown stage {stage!r}{nearest(stage, COLUMNS)}")
    wanted, rows = COLUMNS[stage], []
    for number, row in enumerate(data):
        if not isinstance(row, Mapping):
            if isinstance(row, str) and len(wanted) == 1:
                row = (row,)
            if isinstance(row, str) or not isinstance(row, Sequence) or len(row) != len(wanted):
                raise ValueError(
                    f"row {number} is {str(row)[:80]!r}: give ({', '.join(wanted)}), or a dict of them"
                )
            row = dict(zip(wanted, row))
        if lacking := [name for name in wanted if name not in row]:
            raise ValueError(
                f"row {number} has no {lacking[0]!r}{nearest(lacking[0], map(str, row))}: "
                f"stage {stage!r} reads {', '.join(wanted)}"
            )
        rows.append({name: _checked(row[name], name, number, kind) for name, kind in wanted.items()})
        if stage == "contextual":
            _check_golds(rows[-1], number)
    if len(rows) < 2:
        raise ValueError(f"{len(rows)} rows: a training needs two at least")
    return rows


def _checked(value: Any, name: str, number: int, kind: type) -> Any:
    if kind is list and not isinstance(value, str) and isinstance(value, Iterable):
        items = list(value)
        whole = [int(one) for one in items] if name == "golds" else items
        if items and (name == "golds" or all(isinstance(one, str) and one.strip() for one in items)):
            return whole
    elif kind is str and isinstance(value, str) and value.strip():
        return value
    texts = "a list of texts" if kind is list else "a text"
    raise ValueError(f"row {number}: {name} must be {texts} that is not empty, got {str(value)[:80]!r}")


def _check_golds(row: dict[str, Any], number: int) -> None:
    wrong = [gold for gold in row["golds"] if not 0 <= gold < len(row["chunks"])]
    if wrong or len(row["golds"]) != len(row["queries"]):
        raise ValueError(
            f"row {number}: golds must be the number of a chunk (0 to {len(row['chunks']) - 1}) for each "
            f"of {len(row['queries'])} queries, got {row['golds']}"
        )


def _groups(stage: str, rows: list[dict[str, Any]]) -> np.ndarray:
    """The group of each row: rows that share a query or a text, directly or through others."""
    if stage == "contextual":
        marks = [["\0".join(row["chunks"])] for row in rows]
    else:
        marks = [
            [f"{name} {row[name]}" for name in ("query", "document", "text") if name in row] for row in rows
        ]
    number = {text: i for i, text in enumerate(dict.fromkeys(chain(*marks)))}
    owner = np.repeat(np.arange(len(rows)), [len(own) for own in marks])
    texts = np.array([number[text] for own in marks for text in own]) + len(rows)
    size = len(rows) + len(number)
    edges = coo_array((np.ones(len(owner), bool), (owner, texts)), shape=(size, size))
    return connected_components(edges, directed=False)[1][: len(rows)]


def _held_out(group_N: np.ndarray, share: float, stage: str) -> np.ndarray:
    """Which rows are held out: those of every so many-th group, in a random order."""
    names, number_N = np.unique(group_N, return_inverse=True)
    if stage == "diffusion" or not share:
        return np.zeros(len(group_N), bool)
    if len(names) < FEWEST:
        print(
            f"{len(names)} groups of rows: fewer than {FEWEST}, so none is held out, and nothing is measured"
        )
        return np.zeros(len(group_N), bool)
    count = max(1, round(share * len(names)))
    return np.isin(number_N, permuted(np.arange(count), len(names), 0))


# --- values


def _check_keys(stage: str, values: Mapping[str, Any]) -> None:
    known = SECTIONS[stage].__dataclass_fields__
    if unknown := values.keys() - known.keys():
        raise ConfigError(f"{stage}: unknown key {min(unknown)!r}{nearest(min(unknown), known)}")


def _config(
    stage: str, rows: list[dict[str, Any]], shape: PretrainedConfig, values: Mapping[str, Any]
) -> Any:
    """The stage's section: what is given, and what suits small data."""
    kind, positions = SECTIONS[stage], shape.max_position_embeddings
    batch = values.get("batch") or min({"contextual": 32, "diffusion": 16}.get(stage, 128), len(rows))
    own: dict[str, Any] = {"lr": 2e-4}
    if stage == "diffusion":
        length = values.get("length") or min(256, positions)
        tokens = sum(len(row["text"]) for row in rows) / 4  # about
        batch = values.get("batch") or max(1, min(16, int(tokens // length)))
        own |= {"length": length, "log_uniform": True, "t_min": 0.05}
        steps = EPOCHS * tokens / (batch * length)
    else:
        own |= {"query_length": min(64, positions)}
        steps = EPOCHS * len(rows) / batch
    if stage == "pair":
        own |= {"document_length": min(256, positions), "curriculum": (1, 0, 0)}
    if stage == "triplet":
        own |= {"document_length": min(256, positions), "accumulation": 1, "lr": 5e-5}
        own |= {"groups": ("english",), "max_pairs": len(rows)}  # of mining, which is done
        own |= {"negatives": min(len(row["negatives"]) for row in rows)}
    if stage == "contextual":
        chunks = max(len(row["chunks"]) for row in rows)
        own |= {"chunks": chunks, "chunk_length": max(1, min(128, positions // chunks - 1)), "lr": 1e-4}
        own |= {"dimensions": (shape.hidden_size,)}
    steps = values.get("steps") or max(1, math.ceil(steps))
    own |= {"batch": batch, "steps": steps, "warmup": steps // 10}
    if kind.__dataclass_fields__["schedule"].default == "wsd":
        own |= {"decay": steps // 5}
    try:
        return kind(**own | values)
    except ValueError as error:
        raise ConfigError(f"{stage}.{error.errors()[0]['loc'][-1]}: {error.errors()[0]['msg']}") from None


def _shape(shape: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> BackboneConfig:
    """The Transformer's, in a preset's words; and the token that plays [MASK]."""
    vocabulary = tokenizer.get_vocab()
    masks = [token for token in (tokenizer.mask_token, *MASKS) if token in vocabulary]
    heads = shape.num_attention_heads
    return BackboneConfig(
        hidden_size=shape.hidden_size,
        layers=shape.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(shape, "num_key_value_heads", None) or heads,
        head_size=getattr(shape, "head_dim", None) or shape.hidden_size // heads,
        mlp_size=shape.intermediate_size,
        max_length=shape.max_position_embeddings,
        mask_token=masks[0] if masks else str(tokenizer.unk_token or tokenizer.pad_token),
    )


def _start(model: Embedder | str | Path, place: Path) -> str:
    """Where the model to start from lies; an embedder in memory is written first."""
    return (
        str(model.save_pretrained(place / "start"))
        if isinstance(model, Embedder)
        else backbone.require_checkpoint(model)
    )


# --- the corpus, and the question whether it helped


def _corpus(
    place: Path, stage: str, rows: list[dict[str, Any]], group_N: np.ndarray, held_N: np.ndarray
) -> Corpus:
    """The rows as a corpus, in a folder that their hash names."""
    made_of = fingerprint(stage, rows, group_N.tolist(), held_N.tolist())
    kind, path = KIND[stage], place / f"data-{made_of}"
    if not path.exists():
        same = dict.fromkeys(("dataset", "task"), "rows") | {"group": "english", "language": "mul"}
        same |= {"package": "", "kind": "text"}
        rows = [
            same | row | {"key": str(group), "document_id": str(i), "split": "dev" if held else "train"}
            for i, (row, group, held) in enumerate(zip(rows, group_N, held_N))
        ]
        source = Source(
            "rows", "files", "text", "mul", "", files=("texts/rows/train.arrow",), columns={"text": "text"}
        )
        with new_directory(path) as folder:
            sizes: dict[str, Any] = {name: {} for name in SCHEMAS}
            sizes[kind]["rows"] = write_tables(folder / kind / "rows", rows, SCHEMAS[kind])
            folders = {name: {one: f"{name}/{one}" for one in own} for name, own in sizes.items()}
            text = [vars(source)] if stage == "diffusion" else []
            card = {"hash": made_of, "sizes": sizes, "folders": folders, "text_sources": text}
            write_json(folder / "card.json", card)
    return Corpus(path)


def _tasks(stage: str, rows: list[dict[str, Any]], held_N: np.ndarray) -> list[Task]:
    """One, which asks the held-out queries of all texts; none where nothing is held out."""
    if not held_N.any():
        return []
    order = [*np.flatnonzero(held_N), *np.flatnonzero(~held_N)]  # the held-out texts first
    if stage == "contextual":
        documents, relevant, first = [], {}, 0
        for row in (rows[i] for i in order[:AMONG]):
            documents.append(row["chunks"])
            for query, gold in zip(row["queries"], row["golds"]) if first >= 0 else ():
                relevant.setdefault(query, set()).add(first + gold)
            first += len(row["chunks"])
        own = set(chain(*(rows[i]["queries"] for i in np.flatnonzero(held_N))))
        asked = [query for query in relevant if query in own][:ASKED]
        return [Task(stage, stage, asked, documents, [relevant[query] for query in asked])]
    texts = list(dict.fromkeys(rows[i]["document"] for i in order))[:AMONG]
    number, relevant = {text: i for i, text in enumerate(texts)}, {}
    for row in (rows[i] for i in np.flatnonzero(held_N)):
        if row["document"] in number:
            relevant.setdefault(row["query"], set()).add(number[row["document"]])
    asked = list(relevant)[:ASKED]
    return [Task(stage, "english", asked, [[text] for text in texts], [relevant[query] for query in asked])]


def _limits(config: Any) -> EvaluationConfig:
    lengths = {key: getattr(config, key, 64) for key in ("query_length", "document_length", "chunk_length")}
    return EvaluationConfig(**lengths, max_queries=ASKED, max_documents=AMONG)


def _embedder(network: Any, tokenizer: PreTrainedTokenizerBase, config: Any) -> Embedder:
    return Embedder(network, tokenizer, pooling=getattr(config, "pooling", "mean"), mixed_precision=False)


def _score(embedder: Embedder, tasks: list[Task], limits: EvaluationConfig) -> float:
    scores = evaluate(embedder, tasks, limits, late_chunking=True)
    return float(np.mean([values.mean() for values in scores.values()])) if tasks else 0.0
