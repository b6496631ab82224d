"""`fit`: an embedder from one's own rows, in five lines.

It is the notebooks' training (`unmask.training`) on the rows that are given, with values that suit small
data, and with an answer to the question whether it helped.
"""

import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field, ValidationError
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto import AutoConfig

from unmask.config import (
    BackboneConfig,
    ClustersConfig,
    ConfigError,
    EvaluationConfig,
    ParallelConfig,
    Section,
)
from unmask.data.batches import permuted
from unmask.data.corpus import SCHEMAS, Corpus, write_tables
from unmask.data.registry import Source
from unmask.evaluation.tasks import Task, build_tasks, evaluate, evaluate_bm25
from unmask.models import backbone
from unmask.models.embedder import Embedder
from unmask.store import fingerprint, nearest, new_directory, write_json
from unmask.training import STAGES, Watch, train
from unmask.training.job import SECTIONS

Text = Annotated[str, Field(pattern=r"\S")]
Texts = Annotated[list[Text], Field(min_length=1)]


class PairRow(Section):
    query: Text
    document: Text


class TripletRow(PairRow):
    negatives: Texts


class DocumentRow(Section):
    chunks: Texts
    queries: Texts
    golds: list[int]


class TextRow(Section):
    text: Text


ROWS = {"pair": PairRow, "triplet": TripletRow, "contextual": DocumentRow, "diffusion": TextRow}
KIND = {"pair": "pairs", "triplet": "triplets", "contextual": "documents", "diffusion": "texts"}
SMALL: dict[str, dict[str, Any]] = {  # values for small data
    "pair": {"batch": 128, "lr": 2e-4, "query_length": 64, "document_length": 256, "curriculum": (1, 0, 0)},
    "triplet": {"batch": 128, "lr": 5e-5, "query_length": 64, "document_length": 256, "accumulation": 1}
    | {"groups": ("english",), "max_pairs": 1},  # of mining, which is done
    "contextual": {"batch": 32, "lr": 1e-4, "query_length": 64, "chunk_length": 128, "chunks": 16},
    "diffusion": {"batch": 16, "lr": 4e-4, "length": 256, "log_uniform": True, "t_min": 0.05},
}
MASKS = "<|fim_pad|>", "<empty_output>"  # rare tokens of Qwen3's and of SmolLM2's vocabulary
EPOCHS = 3
FEWEST = 20  # groups of which a part can be held out
ASKED, AMONG = 1_000, 10_000  # held-out queries, and rows whose texts they are asked of, at most


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
        if isinstance(model, Embedder):
            model = model.save_pretrained(place / "start")
        start = backbone.require_checkpoint(model)
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
        kept = len(np.unique(group_N[~held_N]))
        print(
            f"{stage}: {(~held_N).sum():,} rows in {kept:,} groups, {config.steps:,} steps of "
            f"{config.batch:,}; {held_N.sum():,} rows are held out"
        )
        lengths = {
            key: getattr(config, key, 1) for key in ("query_length", "document_length", "chunk_length")
        }
        limits = EvaluationConfig(**lengths, max_queries=AMONG, max_documents=AMONG)

        def ndcg(embedder: Embedder) -> float:
            return float(evaluate(embedder, [task], limits, late_chunking=True)[stage].mean())

        if held_N.any():
            task, pooling = _task(corpus, rows, held_N, limits), getattr(config, "pooling", "mean")
            before = ndcg(Embedder(network, tokenizer, pooling=pooling, mixed_precision=False))
        checkpoint = train(training, network, place / stage, watch=Watch(title=stage))
        embedder = Embedder.from_pretrained(checkpoint)
        embedder.checkpoint, embedder.helped = checkpoint if folder else None, None
        if held_N.any():
            bm25, size = float(evaluate_bm25([task])[stage].mean()), (len(task.queries), len(task.chunks))
            embedder.helped = Helped(before, ndcg(embedder), bm25, *size)
            print(embedder.helped)
    return embedder


# --- rows


def _rows(data: Iterable[Any], stage: str) -> list[dict[str, Any]]:
    """The rows as dicts of the stage's columns, each checked."""
    if stage not in ROWS:
        raise ConfigError(f"unknown stage {stage!r}{nearest(stage, ROWS)}")
    kind, wanted, rows = ROWS[stage], [*ROWS[stage].__dataclass_fields__], []
    for number, row in enumerate(data):
        if not isinstance(row, Mapping):
            row = (row,) if isinstance(row, str) else row
            if not isinstance(row, Sequence) or len(row) != len(wanted):
                told = f"({', '.join(wanted)})"
                raise ValueError(f"row {number} is {str(row)[:80]}: give {told}, or a dict of these")
            row = dict(zip(wanted, row))
        if lacking := [name for name in wanted if name not in row]:
            near = nearest(lacking[0], map(str, row))
            raise ValueError(f"row {number} has no {lacking[0]!r}{near}: {stage} reads {', '.join(wanted)}")
        try:
            rows.append(vars(kind(**{name: row[name] for name in wanted})))
        except ValidationError as error:
            first = error.errors()[0]
            where, what = ".".join(map(str, first["loc"])), "a text that is not empty"
            what = (
                what if first["type"].startswith("string") else first["msg"].removeprefix("Input should be ")
            )
            raise ValueError(f"row {number}: {where} must be {what}, got {first['input']!r:.80}") from None
        golds, chunks = rows[-1].get("golds", ()), len(rows[-1].get("chunks", ()))
        if len(golds) != len(rows[-1].get("queries", ())) or not all(0 <= gold < chunks for gold in golds):
            each = f"the number of a chunk, 0 to {chunks - 1}, for each query"
            raise ValueError(f"row {number}: golds must be {each}, got {golds}")
    if len(rows) < 2:
        raise ValueError(f"{len(rows)} rows: a training needs two at least")
    return rows


def _groups(stage: str, rows: list[dict[str, Any]]) -> np.ndarray:
    """The group of each row: rows that share a query or a text, directly or through others."""
    named = ("chunks",) if stage == "contextual" else ("query", "document", "text")
    marks = [[f"{name} {row[name]}" for name in named if name in row] for row in rows]
    number = {text: len(rows) + i for i, text in enumerate(dict.fromkeys(chain(*marks)))}
    owner = np.repeat(np.arange(len(rows)), [len(own) for own in marks])
    texts, size = [number[text] for own in marks for text in own], len(rows) + len(number)
    edges = coo_array((np.ones(len(owner), bool), (owner, texts)), shape=(size, size))
    return connected_components(edges, directed=False)[1][: len(rows)]


def _held_out(group_N: np.ndarray, share: float, stage: str) -> np.ndarray:
    """Which rows are held out: those of some groups, at random."""
    names, number_N = np.unique(group_N, return_inverse=True)
    count = 0 if stage == "diffusion" or not share else max(1, round(share * len(names)))
    if count and len(names) < FEWEST:
        print(f"{len(names)} groups of rows are too few to hold any out: nothing is measured below {FEWEST}")
        count = 0
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
    own, positions = SMALL[stage] | values, shape.max_position_embeddings
    own |= {key: min(own[key], positions) for key in own if key.endswith("length") and key not in values}
    count: float = len(rows)
    if stage == "diffusion":  # so many blocks, about
        count = max(1, sum(len(row["text"]) for row in rows) // (4 * own["length"]))
    if stage == "triplet":
        own = {"negatives": min(len(row["negatives"]) for row in rows)} | own
    if stage == "contextual":
        own = {"dimensions": (shape.hidden_size,)} | own
        if "chunk_length" not in values:
            own["chunk_length"] = max(1, min(own["chunk_length"], positions // own["chunks"] - 1))
    own["batch"] = values.get("batch", min(own["batch"], count))
    own = {"steps": math.ceil(EPOCHS * count / own["batch"])} | own
    own = {"warmup": own["steps"] // 10, "decay": own["steps"] // 5} | own
    try:
        return SECTIONS[stage](**own)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{stage}.{first['loc'][-1]}: {first['msg']}, got {first['input']!r}") from None


def _shape(shape: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> BackboneConfig:
    """The Transformer's, in a preset's words; and the token that plays [MASK]."""
    heads, vocabulary = shape.num_attention_heads, tokenizer.get_vocab()
    masks = [token for token in (tokenizer.mask_token, *MASKS, tokenizer.unk_token) if token in vocabulary]
    return BackboneConfig(
        hidden_size=shape.hidden_size,
        layers=shape.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(shape, "num_key_value_heads", None) or heads,
        head_size=getattr(shape, "head_dim", None) or shape.hidden_size // heads,
        mlp_size=shape.intermediate_size,
        max_length=shape.max_position_embeddings,
        mask_token=masks[0] if masks else str(tokenizer.pad_token),
    )


# --- the corpus, and the question whether it helped


def _corpus(
    place: Path, stage: str, rows: list[dict[str, Any]], group_N: np.ndarray, held_N: np.ndarray
) -> Corpus:
    """The rows as a corpus, in a folder that their hash names: those to train on, and in its split "test" all
    of them, as what held-out queries are asked of."""
    made_of = fingerprint(stage, rows, group_N.tolist(), held_N.tolist())
    path, kinds = place / f"data-{made_of}", {KIND[stage], "pairs" if stage == "triplet" else KIND[stage]}
    same = {
        "dataset": "rows",
        "task": stage,
        "group": "english",
        "language": "mul",
        "package": "",
        "kind": "text",
    }
    if not path.exists():
        told = [
            same | row | {"key": str(group), "document_id": str(i), "split": split}
            for i, (row, group, held) in enumerate(zip(rows, group_N, held_N))
            for split in ("test", *(() if held else ("train",)))
        ]
        place = {"files": ("texts/rows/train.arrow",), "columns": {"text": "text"}}
        source = vars(Source("rows", "files", "text", "mul", "", **place))
        with new_directory(path) as folder:
            sizes: dict[str, Any] = {kind: {} for kind in SCHEMAS}
            for kind in kinds:
                sizes[kind]["rows"] = write_tables(folder / kind / "rows", told, SCHEMAS[kind])
            folders = {kind: {name: f"{kind}/{name}" for name in own} for kind, own in sizes.items()}
            card = {"hash": made_of, "sizes": sizes, "folders": folders}
            write_json(folder / "card.json", card | {"text_sources": [source] * (stage == "diffusion")})
    return Corpus(path)


def _task(corpus: Corpus, rows: list[dict[str, Any]], held_N: np.ndarray, limits: EvaluationConfig) -> Task:
    """Asks the held-out queries of all texts."""
    [task] = build_tasks(corpus, "test", limits)
    held = [row for row, out in zip(rows, held_N) if out]
    own = {query for row in held for query in row.get("queries", [row.get("query")])}
    asked = [i for i, query in enumerate(task.queries) if query in own][:ASKED]
    return replace(task, queries=[task.queries[i] for i in asked], relevant=[task.relevant[i] for i in asked])
