"""`fit`: an embedder from one's own rows, in five lines.

It is the notebooks' training (`unmask.training`) on the rows that are given, with values that suit small
data, and with an answer to the question whether it helped.
"""

import math
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from operator import index
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import AfterValidator, ValidationError
from scipy.cluster.hierarchy import DisjointSet
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from unmask.config import (
    BackboneConfig,
    ClustersConfig,
    ConfigError,
    EvaluationConfig,
    ParallelConfig,
    Section,
    check_keys,
    explained,
)
from unmask.data.batches import permuted
from unmask.data.corpus import Corpus, write_tables
from unmask.data.registry import Source
from unmask.data.spelling import canonical, distinct
from unmask.data.tokens import end_token
from unmask.evaluation.tasks import Task, answers, copies, evaluate, evaluate_bm25
from unmask.models import backbone
from unmask.models.checkpoint import folder_of
from unmask.models.embedder import LONE_SURROGATE, Embedder, as_list
from unmask.store import alone, fingerprint, nearest, new_directory, write_json
from unmask.training import STAGES, TrainingStopped, Watch, train
from unmask.training.job import SECTIONS


def _filled(value: str | list[str]) -> str | list[str]:
    if not (value.strip() if isinstance(value, str) else value):
        raise ValueError("must not be empty")
    if isinstance(value, str) and LONE_SURROGATE.search(value):
        raise ValueError("has a lone surrogate, half a character: repair or remove it")
    return value


Text = Annotated[str, AfterValidator(_filled)]
Texts = Annotated[list[Text], AfterValidator(_filled)]


class PairRow(Section):
    query: Text
    document: Text


class TripletRow(PairRow):
    negatives: Texts


class DocumentRow(Section):
    chunks: Texts
    queries: Texts
    golds: list[int]

    def __post_init__(self):
        last = len(self.chunks) - 1
        if len(self.golds) != len(self.queries) or not all(0 <= gold <= last for gold in self.golds):
            each = f"the number of a chunk, 0 to {last}, for each query"
            raise ValueError(f"golds must be {each}, got {self.golds}")


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
ASKED, AMONG = 1_000, 10_000  # held-out queries, and texts that they are asked of, at most


@dataclass(frozen=True)
class Helped:
    """nDCG@10 of held-out queries before the training, after it, and of BM25. They are asked of the held-out
    and of the training texts together, negatives included, in INT8."""

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
    bidirectional: bool | None = None,
    **values: Any,
) -> Embedder:
    """Trains an embedder on rows of one's own, and says whether it helped.

    A tenth of the groups is held out: rows that share a query or a text are one group, and never each other's
    negatives. nDCG@10 of their queries is printed, of the model as it is given and after the training, beside
    BM25's, and kept as `helped` of the result. With several GPUs all of them train.

    Args:
        model: an `Embedder`, a directory, a name on the Hub, or "smollm2-135m". It is trained as it reads:
            with its special tokens, lengths, normalisation and mask, and keeps its prompts. An embedder whose
            weights are rounded, as on a GPU, starts from those of its directory.
        data: rows, as tuples, as dicts, as a `datasets.Dataset` or as a data frame. Their columns, by stage:
            "pair": query, document; "triplet": query, document, negatives (a list);
            "contextual": chunks (a list), queries (a list), golds (for each query the number of its chunk);
            "diffusion": text.
        stage: one of these.
        folder: where the training is kept. The same call finds it there, or goes on with it after an
            interruption. Default: nothing is kept but the result.
        hold_out: share of the groups to hold out; 0: none. It needs 20 groups, and one with no more rows than
            this share.
        bidirectional: whether a causal model is made to read both sides, before anything is measured.
            Default: a plain language model is, an embedder is not.
        values: any value of the stage's section (`unmask.config`), for instance steps, batch, lr; for
            "diffusion" also `mask_token`, the token of the vocabulary that plays [MASK]. By default
            three epochs of batches of 128 rows, or of all rows if there are fewer, and for pairs the model's
            pooling, else the mean. Where `cluster_size` or `filter_margin` ask for look-alikes, the model
            finds them.
    Returns: the embedder, in float32, with `helped` (None if nothing was held out) and `checkpoint`.
    Raises: ConfigError for an unknown stage or key, ValueError for rows that cannot be used, before a model
        is loaded; ValueError for a model that the stage cannot train; TrainingStopped, if it was interrupted.

    Example:
        >>> pairs = [(f"how is {i} written?", f"{i} is written with {len(str(i))} digits") for i in range(40)]
        >>> embedder = fit(model, pairs, steps=4)  # doctest: +ELLIPSIS
        pair: 36 rows in 36 groups, ...
        >>> embedder.encode(["how is 7 written?"]).dtype
        dtype('int8')
    """
    rows = _rows(data, stage)
    mask_token = values.pop("mask_token", "") if stage == "diffusion" else ""
    check_keys(SECTIONS[stage], values, stage)
    if bidirectional is False and STAGES[stage].bidirectional:
        raise ConfigError(f"bidirectional=False: stage {stage!r} reads both sides, leave it out")
    if not 0 <= hold_out < 1:
        raise ValueError(f"hold_out must be a share below 1, got {hold_out!r}")
    group_N = _groups(rows)
    held_N = _held_out(group_N, hold_out, stage)
    with ExitStack() as stack:
        place = Path(folder or stack.enter_context(tempfile.TemporaryDirectory())).absolute()
        place.mkdir(parents=True, exist_ok=True)
        stack.enter_context(alone(place))
        given = isinstance(model, Embedder)
        rounded = given and model.mixed_precision and (whole := Path(model.model.name_or_path)).is_dir()
        if rounded:
            asked = {"device": model.devices, **vars(model.settings)}
            model = Embedder.from_pretrained(whole, mixed_precision=False, **asked)
        start = str(model.save_pretrained(place / "start") if given else folder_of(model))
        own = model if given else Embedder.from_pretrained(start, mixed_precision=False)
        settings, causal = own.settings, not backbone.sees_both_sides(own.model)
        turned = causal and (settings.plain if bidirectional is None else bidirectional)
        if turned and given:  # the one that is given stays as it is
            own = Embedder.from_pretrained(start, mixed_precision=False, device=model.devices)
        if turned:
            backbone.make_bidirectional(own.model, own.tokenizer, "")
        if own.pooling != "mean" and stage != "pair":
            raise ValueError(f"stage {stage!r} trains the mean of tokens, this model pools {own.pooling!r}")
        tokenizer, width = backbone.load_tokenizer(start), own.model.config.get_text_config().hidden_size
        most = own.window if stage == "contextual" else own.positions
        shape = SimpleNamespace(hidden_size=width, max_position_embeddings=most)
        ready = _backbone(start, tokenizer, mask_token, stage)
        kept, groups = [row for row, held in zip(rows, held_N) if not held], len(set(group_N[~held_N]))
        config = _config(stage, kept, groups, shape, own.pooling, values)
        config = _cut(own, config, kept if "chunk_length" in values else [])
        print(
            f"{stage}: {len(kept):,} rows in {groups:,} groups, {config.steps:,} steps of "
            f"{config.batch if stage == 'diffusion' else min(config.batch, groups):,}; "
            f"{held_N.sum():,} rows are held out"
        )
        lengths = ("query_length", "document_length", "chunk_length")
        own_lengths = {key: getattr(config, key, 1) for key in lengths}
        limits = EvaluationConfig(**own_lengths, max_queries=ASKED, max_documents=AMONG)
        task = _task(rows, held_N) if held_N.any() else None

        def ndcg(embedder: Embedder) -> float:
            return float(evaluate(embedder, [task], limits, late_chunking=True)[task.name].mean())

        before = ndcg(own) if task else 0.0
        bm25 = _bm25(task) if task else 0.0
        if own is not model or rounded:
            own.close()
        recipe = SimpleNamespace(
            backbone=ready,
            clusters=ClustersConfig(surrogate=start),
            parallel=ParallelConfig(num_processes=max(1, torch.cuda.device_count())),
            **{stage: config},
        )
        corpus = _corpus(place, stage, kept, group_N[~held_N])
        training = STAGES[stage](recipe, corpus, tokenizer, bidirectional=turned, settings=settings)
        network = training.model(start)
        try:
            checkpoint = train(training, network, place / stage, watch=Watch(title=stage))
        except TrainingStopped:
            if folder:
                raise
            raise TrainingStopped("told to stop; only with a folder is what it did kept: folder=…") from None
        embedder = Embedder.from_pretrained(checkpoint, mixed_precision=False)  # else it could not be saved
        embedder.checkpoint, embedder.helped = checkpoint if folder else None, None
        if task:
            embedder.helped = Helped(before, ndcg(embedder), bm25, len(task.queries), len(task.chunks))
            print(embedder.helped)
    return embedder


# --- rows


def _rows(data: Iterable[Any], stage: str) -> list[dict[str, Any]]:
    """The rows as dicts of the stage's columns, each checked."""
    if stage not in ROWS:
        raise ConfigError(f"unknown stage {stage!r}{nearest(stage, ROWS)}")
    kind, wanted, rows = ROWS[stage], [*ROWS[stage].__dataclass_fields__], []
    if hasattr(data, "itertuples"):  # a data frame, which iterates over its columns' names
        data = data.to_dict("records")
    for number, row in enumerate(as_list(data, "[row, row]")):
        try:
            if not isinstance(row, Mapping):
                row = dict(zip(wanted, [row] if isinstance(row, str) else row, strict=True))
            rows.append(vars(kind(**{name: row[name] for name in wanted if name in row})))
        except ValidationError as error:
            raise ValueError(f"row {number}: {explained(error, kind).lstrip()}") from None
        except (TypeError, ValueError):
            told = f"({', '.join(wanted)})"
            raise ValueError(f"row {number} is {str(row)[:80]}: give {told}, or a dict of these") from None
    if not rows:
        raise ValueError("no rows: there is nothing to train on")
    return rows


def _groups(rows: list[dict[str, Any]]) -> np.ndarray:
    """The group of each row: rows that share a query or a text, directly or through others. Of a document
    with chunks it is the whole: what it shares with others is what its context is for."""
    groups, first = DisjointSet(range(len(rows))), {}
    for number, row in enumerate(rows):
        text = row.get("document") or row.get("text") or " ".join(row["chunks"])
        queries = [row["query"]] if "query" in row else row.get("queries", [])
        for mark in (f"text {canonical(text)}", *(f"query {canonical(query)}" for query in queries)):
            groups.merge(number, first.setdefault(mark, number))
    return np.array([groups[number] for number in range(len(rows))])


def _held_out(group_N: np.ndarray, share: float, stage: str) -> np.ndarray:
    """Which rows are held out: those of some groups, at random, but of none with more rows than the share.

    Raises: ValueError if too little is left to train on.
    """
    _, number_N, rows_G = np.unique(group_N, return_inverse=True, return_counts=True)
    groups, asked, least = len(rows_G), share and stage != "diffusion", 1 if stage == "diffusion" else 2
    drawn, most = permuted(np.arange(groups), groups, 0), max(1, int(share * len(group_N)))
    small = drawn[rows_G[drawn] <= most]
    held = small[: max(1, round(share * groups))] if asked and groups >= FEWEST else small[:0]
    if (left := groups - len(held)) < least:
        raise ValueError(
            f"{len(group_N)} rows leave {left} groups to train on, which needs {least}: rows that share a "
            "query or a text are one group"
        )
    if asked and not len(held):
        needs = f"hold_out={share} needs {FEWEST} groups of rows, one of at most {most}"
        print(f"nothing is held out or measured: {needs}; there are {groups}, {len(small)} of them so small")
    return np.isin(number_N, held)


# --- values


def _config(
    stage: str,
    rows: list[dict[str, Any]],
    groups: int,
    shape: PretrainedConfig,
    pooling: str,
    values: Mapping[str, Any],
) -> Any:
    """The stage's section: what is given, and what suits small data."""
    known = SECTIONS[stage].__dataclass_fields__
    others = {"steps": 10**6, "warmup": 0, "decay": 0, "dimensions": (shape.hidden_size,)}  # computed below
    given = _checked(stage, {key: one for key, one in others.items() if key in known} | SMALL[stage] | values)
    values = {key: getattr(given, key) for key in values}
    own = SMALL[stage] | ({"pooling": pooling} if stage == "pair" else {}) | values
    positions = getattr(shape, "max_position_embeddings", None) or own.get("document_length", 512)
    own |= {key: min(own[key], positions) for key in own if key.endswith("length") and key not in values}
    count: float = len(rows)
    if stage == "diffusion":  # so many blocks, about
        count = max(1, sum(len(row["text"]) for row in rows) // (4 * own["length"]))
        groups = count
    if stage == "triplet":
        own = {"negatives": min(len(row["negatives"]) for row in rows)} | own
    if stage == "contextual":
        own = {"dimensions": (shape.hidden_size,)} | own
        if "chunk_length" not in values:
            room = positions - 2  # for special tokens around a document
            own["chunk_length"] = max(1, min(own["chunk_length"], room // own["chunks"] - 1))
    # No two rows of a group are in one batch.
    own["batch"] = values.get("batch", min(own["batch"], count, groups))
    own = {"steps": math.ceil(EPOCHS * count / min(own["batch"], count, groups))} | own
    return _checked(stage, {"warmup": own["steps"] // 10, "decay": own["steps"] // 5} | own)


def _checked(stage: str, values: Mapping[str, Any]) -> Any:
    """The stage's section with these values.

    Raises: ConfigError that names the key which cannot be used.
    """
    numbers = {key: index(one) for key, one in values.items() if isinstance(one, np.integer)}
    try:
        return SECTIONS[stage](**values | numbers)
    except ValidationError as error:
        raise ConfigError(f"{stage}.{explained(error, SECTIONS[stage])}") from None


def _cut(embedder: Embedder, config: Any, documents: list[dict[str, Any]]) -> Any:
    """The stage's section with texts, and these documents, as long as the embedder reads them."""
    most = dict.fromkeys(("query_length", "document_length"), embedder.max_length)
    most["length"] = embedder.positions
    if documents:  # with a separator between two chunks
        chunks = min(config.chunks, max(len(row["chunks"]) for row in documents))
        most["chunk_length"] = max(1, (embedder.window - sum(map(len, embedder.around)) + 1) // chunks - 1)
    cut = {key: limit for key, limit in most.items() if limit < vars(config).get(key, 0)}
    for key, limit in cut.items():
        print(f"{key}: {limit} instead of {getattr(config, key)}, as many tokens as the model reads")
    return replace(config, **cut)


def _backbone(start: str, tokenizer: PreTrainedTokenizerBase, mask_token: str, stage: str) -> BackboneConfig:
    """A ready checkpoint, whose shape is in its own files; and for diffusion the token that plays [MASK].

    Raises: ConfigError that names the key, where none can.
    """
    if stage == "diffusion":
        texts_end = {tokenizer.eos_token, end_token(tokenizer)}
        spare = (tokenizer.mask_token, *MASKS, tokenizer.unk_token, tokenizer.pad_token)
        known = (token for token in spare if token in tokenizer.get_vocab() and token not in texts_end)
        if not (mask_token := mask_token or next(known, "")):
            raise ConfigError("diffusion.mask_token: name a rare token of the vocabulary that plays [MASK]")
        try:
            backbone.mask_id(tokenizer, mask_token)
        except ValueError as error:
            raise ConfigError(f"diffusion.{error}") from None
    unread = ("hidden_size", "layers", "heads", "kv_heads", "head_size", "mlp_size", "max_length")
    return BackboneConfig(checkpoint=start, mask_token=mask_token, **dict.fromkeys(unread, 1))


# --- the corpus, and the question whether it helped


def _corpus(place: Path, stage: str, rows: list[dict[str, Any]], group_N: np.ndarray) -> Corpus:
    """The rows to train on as a corpus, in a folder that their hash names."""
    made_of = fingerprint(stage, rows, group_N.tolist())
    path = place / f"data-{made_of}"
    same = {"dataset": "rows", "task": stage, "group": "english", "language": "mul", "split": "train"}
    same |= {"package": "", "kind": "text"}
    if not path.exists():
        own = ({"key": str(group), "document_id": str(i)} for i, group in enumerate(group_N))
        file = {"files": ("texts/rows/train.arrow",), "columns": {"text": "text"}}
        source = vars(Source("rows", "files", "text", "mul", "", **file))
        with new_directory(path) as folder:
            told = [same | row | facts for row, facts in zip(rows, own)]
            card = write_tables(folder, [(KIND[stage], "rows", told)]) | {"hash": made_of}
            write_json(folder / "card.json", card | {"text_sources": [source] * (stage == "diffusion")})
    return Corpus(path)


def _bm25(task: Task) -> float:
    try:
        return float(evaluate_bm25([task])[task.name].mean())
    except ValueError:  # no text holds a word
        return 0.0


def _task(rows: list[dict[str, Any]], held_N: np.ndarray) -> Task:
    """Held-out queries, `ASKED` at most, and `AMONG` texts at most, those of the held-out rows first. What
    answers a query is what stands in a row with it."""
    order_N = permuted(np.arange(len(rows)), len(rows), 0)
    order_N = order_N[np.argsort(~held_N[order_N], kind="stable")]
    texts = np.cumsum([len(rows[i].get("chunks") or ["", *rows[i].get("negatives", [])]) for i in order_N])
    order_N = order_N[: max(1, np.searchsorted(texts, AMONG, side="right"))]
    own, held = [rows[i] for i in order_N], held_N[order_N].sum()
    if "chunks" in own[0]:
        family, documents = "contextual", [row["chunks"] for row in own]
        firsts = np.cumsum([0, *map(len, documents)])
        golds = (
            [copies(row["chunks"], gold, int(at)) for gold in row["golds"]] for at, row in zip(firsts, own)
        )
    else:
        family, given = "english", [row["document"] for row in own]
        texts, number_N = distinct(given + [text for row in own for text in row.get("negatives", [])])
        documents, golds = (
            [[text] for text in texts],
            ([{number}] for number in number_N[: len(own)].tolist()),
        )
    asked = [row.get("queries", [row.get("query")]) for row in own]
    told = list(zip(chain(*asked), chain(*golds)))
    relevant, own_told = answers(told), told[: sum(map(len, asked[:held]))]  # held-out ones come first
    queries = [*relevant][: min(ASKED, len(answers(own_told)))]
    return Task("rows", family, queries, documents, [relevant[query] for query in queries])
