"""`fit`: an embedder from one's own rows, in five lines.

It is the notebooks' training (`unmask.training`) on the rows that are given, with values that suit small
data, and with an answer to the question whether it helped.
"""

import copy
import math
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from operator import index
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import torch
from pydantic import AfterValidator, Field, ValidationError
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from unmask.config import TRAINED, BackboneConfig, ClustersConfig, EvaluationConfig, ParallelConfig
from unmask.data.batches import apart, permuted
from unmask.data.corpus import Corpus, write_table
from unmask.data.registry import Source
from unmask.data.spelling import distinct, held_texts, row_texts, text_id, without_held
from unmask.data.tokens import Truncation, encode, end_token, ending
from unmask.evaluation.tasks import Task, answers, copies, evaluate, evaluate_bm25, probe
from unmask.models import backbone
from unmask.models.checkpoint import Settings, folder_of
from unmask.models.embedder import Embedder, as_list
from unmask.schema import ConfigError, Section, checked, explained
from unmask.store import alone, fingerprint, nearest, new_directory, write_json
from unmask.training import STAGES, TrainingStopped, Watch, probes, seconds_until, train
from unmask.training.launch import several
from unmask.training.stages import Stage
from unmask.training.watch import TENTHS


def _filled(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty")
    return text


Text = Annotated[str, Field(min_length=1), AfterValidator(_filled)]
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
    "contextual": {"batch": 32, "lr": 1e-4, "query_length": 64, "chunk_length": 256, "chunks": 16},
    "diffusion": {"batch": 16, "lr": 4e-4, "length": 256, "log_uniform": True, "t_min": 0.05},
}
MASKS = "<|fim_pad|>", "<empty_output>"  # rare tokens of Qwen3's and of SmolLM2's vocabulary
PREFIXES = (128, 256, 512, 1024, 2048, 2560)  # the paper's; those that fit are trained beside the whole
EPOCHS = 3
FEWEST = 20  # rows of different texts, of which a part can be held out
ASKED, AMONG = 1_000, 10_000  # held-out queries, and texts that they are asked of, at most
FEW_ASKED, FEW_AMONG = 100, 300  # while the training runs
PROGRESS_SHARE = 0.1  # of the training's time that measuring meanwhile may take, unless it is asked for


@dataclass(frozen=True)
class Helped:
    """nDCG@10 of held-out queries before the training, after it, and of BM25. They are asked of the held-out
    and of the training texts together, negatives included, in INT8. While it trains, few of them are asked of
    few texts: `seconds_to_bm25` of training, and from there on it stays above BM25. None: it does not, or
    nobody looked."""

    before: float
    after: float
    bm25: float
    queries: int
    texts: int
    seconds_to_bm25: float | None = None

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
    keep_layers: Sequence[int] | None = None,
    progress: bool | None = None,
    **values: Any,
) -> Embedder:
    """Trains an embedder on rows of one's own, and says whether it helped.

    A tenth of the rows is held out, and seen nowhere in training: rows of one text are held out together, and
    what else shares a text with them is taken out, and counted. A chunk with the text of a held-out one may
    stay, as in another document it is another chunk. nDCG@10 of the held-out queries is printed, of the model
    as it is given and after the training, beside BM25's, and kept as `helped` of the result. With several
    GPUs all of them train.

    Args:
        model: an `Embedder`, a directory, a name on the Hub, or "smollm2-135m". It is trained as it reads:
            with its special tokens, lengths, normalisation and mask, and keeps its prompts. An embedder whose
            weights are rounded, as on a GPU, starts from those of its directory.
        data: rows, as tuples, as dicts, as a `datasets.Dataset` or as a table or data frame with Arrow's
            interface (pandas, polars, pyarrow). Their columns, by stage:
            "pair": query, document; "triplet": query, document, negatives (a list);
            "contextual": chunks (a list), queries (a list), golds (for each query the number of its chunk);
            "diffusion": text.
        stage: one of these.
        folder: where the training is kept. The same call finds it there, or goes on with it after an
            interruption. Default: nothing is kept but the result.
        hold_out: share of the rows to hold out; 0: none. It needs 20 rows of different texts, and some of
            which no text stands in more than this share of the rows.
        bidirectional: whether a causal model is made to read both sides, before anything is measured.
            Default: a plain language model is, an embedder is not.
        keep_layers: cuts the model short, before anything is measured: of its layers these stay, counted from
            0, in this order. Default: all.
        progress: whether a hundred of the held-out queries are asked of three hundred texts every tenth of
            the steps, to say after how many seconds of training they find more than BM25. It takes one
            process. Default: unless that would take more than a tenth of the training's time.
        values: any value of the stage's section (`unmask.config`), for instance steps, batch, lr; for
            "diffusion" also `mask_token`, the token of the vocabulary that plays [MASK]. By default
            three epochs of batches of 128 rows, or of all rows if there are fewer, and for pairs the model's
            pooling, else the mean. Where `cluster_size` or `filter_margin` ask for look-alikes, the model
            finds them.
    Returns: the embedder, in float32, with `helped` (None if nothing was held out) and `checkpoint`.
    Raises: ConfigError for an unknown stage, key or value, ValueError for rows that cannot be used, before a
        model is loaded; ValueError for a model that the stage cannot train, and for layers that it has not;
        TrainingStopped, if it was interrupted.

    Example:
        >>> pairs = [(f"how is {i} written?", f"{i} is written with {len(str(i))} digits") for i in range(40)]
        >>> embedder = fit(model, pairs, steps=4)  # doctest: +ELLIPSIS
        pair: 36 rows, 4 steps of 36; 4 rows are held out...
        >>> embedder.encode(["how is 7 written?"]).dtype
        dtype('int8')
    """
    rows = _rows(data, stage)
    mask_token = values.pop("mask_token", "") if stage == "diffusion" else ""
    values = _given(stage, values)
    if not isinstance(bidirectional, bool | None):
        raise ConfigError(f"bidirectional must be True, False or None, got {bidirectional!r}")
    if bidirectional is False and STAGES[stage].bidirectional:
        raise ConfigError(f"bidirectional=False: stage {stage!r} reads both sides, leave it out")
    if not 0 <= hold_out < 1:
        raise ValueError(f"hold_out must be a share below 1, got {hold_out!r}")
    held_N = _held_out(rows, hold_out, stage)
    held = {text_id(text) for i in np.flatnonzero(held_N) for text in held_texts(rows[i])}
    every, dropped = (row for row, out in zip(rows, held_N) if not out), Counter()
    kept = [left for row in every if (left := without_held(row, held, dropped))]
    groups = _different(kept)
    if groups < (least := 1 if stage == "diffusion" else 2):
        left = f"{len(rows)} rows leave {groups} of different texts to train on"
        raise ValueError(f"{left}, which needs {least}: give more rows, or hold out fewer")
    with ExitStack() as stack:
        place = Path(folder or stack.enter_context(tempfile.TemporaryDirectory())).absolute()
        place.mkdir(parents=True, exist_ok=True)
        stack.enter_context(alone(place))
        given = isinstance(model, Embedder)
        rounded = given and model.mixed_precision and (whole := Path(model.model.name_or_path)).is_dir()
        if rounded:
            asked = {"device": model.devices, **vars(model.settings)}
            model = Embedder.from_pretrained(whole, mixed_precision=False, **asked)
        source = model if given else folder_of(model)
        own = model if given else Embedder.from_pretrained(source, mixed_precision=False)
        settings, causal = own.settings, not backbone.sees_both_sides(own.model)
        if bidirectional is False and not causal:
            raise ConfigError("bidirectional=False: this model reads both sides already, leave it out")
        turned = causal and (settings.plain if bidirectional is None else bidirectional)
        if given and (turned or keep_layers is not None):  # the one that is given stays as it is
            options = {"mixed_precision": False, "device": own.devices, **vars(settings)}
            own = Embedder(copy.deepcopy(own.model), own.tokenizer, **options)
        if keep_layers is not None:
            backbone.keep_layers(own.model, keep_layers)
        if keep_layers is not None and stage == "diffusion" and not given:  # with its output matrix
            start = str(backbone.cut_short(source, keep_layers, place / "cut"))
        elif given or keep_layers is not None:
            start = str(own.save_pretrained(place / "start"))
        else:
            start = str(source)
        if turned:
            backbone.make_bidirectional(own.model, own.tokenizer, "")
        if own.pooling != "mean" and stage != "pair":
            raise ValueError(f"stage {stage!r} trains the mean of tokens, this model pools {own.pooling!r}")
        tokenizer, width = backbone.load_tokenizer(start), own.model.config.get_text_config().hidden_size
        most = own.window if stage == "contextual" else own.positions
        shape = SimpleNamespace(hidden_size=width, max_position_embeddings=most)
        ready = _backbone(start, tokenizer, mask_token, stage)
        longest = _longest(rows, tokenizer)
        config = _config(stage, kept, groups, shape, own.pooling, values, longest)
        config = _cut(own, config, kept if "chunk_length" in values else [])
        print(
            f"{stage}: {len(kept):,} rows, {config.steps:,} steps of "
            f"{config.batch if stage == 'diffusion' else min(config.batch, groups):,}; "
            f"{held_N.sum():,} rows are held out"
            + "".join(f"; taken out: {count:,} {what}" for what, count in dropped.items() if count)
        )
        lengths = ("query_length", "document_length", "chunk_length")
        own_lengths = {key: getattr(config, key, 1) for key in lengths}
        own_lengths |= {"precision": config.precision, "max_queries": ASKED, "max_documents": AMONG}
        limits = EvaluationConfig(**own_lengths)
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
        corpus = _corpus(place, stage, kept)
        training = STAGES[stage](recipe, corpus, tokenizer, bidirectional=turned, settings=settings)
        network = training.model(start)
        meanwhile = task and progress is not False and not several(recipe.parallel)
        few = _task(rows, held_N, FEW_ASKED, FEW_AMONG) if meanwhile else None
        if few and progress is None and _cost(few, training, limits) > PROGRESS_SHARE:
            few = None
        watch = _watch(few, training, start, limits) if few else Watch(title=stage)
        try:
            checkpoint = train(training, network, place / stage, watch=watch)
        except TrainingStopped:
            if folder:
                raise
            raise TrainingStopped("told to stop; only with a folder is what it did kept: folder=…") from None
        embedder = Embedder.from_pretrained(checkpoint, mixed_precision=False)  # else it could not be saved
        embedder.checkpoint, embedder.helped = checkpoint if folder else None, None
        if task:
            measured = probes(checkpoint) if few else []
            seconds = seconds_until(measured, watch.bars["BM25"]) if measured else None
            sizes = len(task.queries), len(task.chunks)
            embedder.helped = Helped(before, ndcg(embedder), bm25, *sizes, seconds)
            print(embedder.helped)
            if measured:
                after = "" if seconds is None else f" after {seconds:.0f} s of training"
                when = f"above BM25{after}" if after else "not above BM25"
                print(f"{when} ({len(few.queries)} of these queries among {len(few.chunks)} texts)")
    return embedder


# --- rows


def _rows(data: Iterable[Any], stage: str) -> list[dict[str, Any]]:
    """The rows as dicts of the stage's columns, each checked."""
    if stage not in ROWS:
        raise ConfigError(f"unknown stage {stage!r}{nearest(stage, ROWS)}")
    kind, wanted, rows = ROWS[stage], [*ROWS[stage].__dataclass_fields__], []
    if hasattr(data, "itertuples"):  # of pandas, whose columns may hold values of several types
        data = data.to_dict("records")
    elif hasattr(data, "__arrow_c_stream__"):
        data = pa.chunked_array(data).to_pylist()
    for number, row in enumerate(as_list(data, "[row, row]")):
        try:
            if not isinstance(row, Mapping):
                row = dict(zip(wanted, [row] if isinstance(row, str) else row, strict=True))
            rows.append(vars(kind(**{name: row[name] for name in wanted if name in row})))
        except ValidationError as error:
            raise ValueError(f"row {number}: {explained(error, kind).lstrip()}") from None
        except (TypeError, ValueError):
            columns = f"({', '.join(wanted)})"
            raise ValueError(f"row {number} is {str(row)[:80]}: give {columns}, or a dict of these") from None
    return rows


def _different(rows: list[dict[str, Any]]) -> int:
    """Rows of which no two share what a batch tells apart: query and document, or a document of chunks."""
    texts = (row_texts(row)[: 1 if "chunks" in row else 2] for row in rows)
    return len(apart(([*map(text_id, own)] for own in texts), len(rows)))


def _held_out(rows: list[dict[str, Any]], share: float, stage: str) -> np.ndarray:
    """Which rows are held out: some at random, each with those that share a text with it. A text that stands
    in more rows than the share is never held out: too few would be left to train on."""
    held_N, groups = np.zeros(len(rows), bool), _different(rows)
    if not share or stage == "diffusion":
        return held_N
    ids_N, rows_of = [{*map(text_id, row_texts(row))} for row in rows], defaultdict(list)
    for number, ids in enumerate(ids_N):
        for text in ids:
            rows_of[text].append(number)
    common_N = np.array([max(len(rows_of[text]) for text in ids) for ids in ids_N])
    most, left = max(1, int(share * len(rows))), max(1, round(share * groups)) if groups >= FEWEST else 0
    order_N = permuted(np.arange(len(rows)), len(rows), 0)
    for number in order_N[common_N[order_N] <= most]:
        near = [*{other for text in ids_N[number] for other in rows_of[text]}]
        if left and not held_N[number] and common_N[near].max() <= most:
            held_N[near] = True
            left -= 1
    if not held_N.any():
        needs = (
            f"hold_out={share} needs {FEWEST} rows of different texts, and texts in at most {most} of them"
        )
        print(f"nothing is held out or measured: {needs}; there are {groups}, and {(common_N <= most).sum()}")
    return held_N


def _longest(rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of each row's longest chunk, 0 without chunks.

    Raises: ValueError that names row and column of a text without tokens.
    """
    places, texts, longest = [], [], [0] * len(rows)
    for number, row in enumerate(rows):
        for column, value in row.items():
            own = [] if column == "golds" else [value] if isinstance(value, str) else value
            places += [(number, column)] * len(own)
            texts += own
    tokens = encode(tokenizer.backend_tokenizer, texts, np.int32)
    for (number, column), text, ids in zip(places, texts, tokens):
        if not len(ids):
            raise ValueError(f"row {number}, column {column}: {text!r} has no tokens: remove or fill it")
        longest[number] = max(longest[number], len(ids) * (column == "chunks"))
    return longest


# --- values


def _given(stage: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are given, checked before a model is loaded."""
    known = TRAINED[stage].__dataclass_fields__
    later = {"steps": 10**6, "warmup": 0, "decay": 0, "dimensions": (1,)}  # which `_config` computes
    later = {key: value for key, value in later.items() if key in known}
    config = _checked(stage, later | SMALL[stage] | values)
    return {key: getattr(config, key) for key in values}


def _config(
    stage: str,
    rows: list[dict[str, Any]],
    groups: int,
    shape: PretrainedConfig,
    pooling: str,
    values: Mapping[str, Any],
    longest: Sequence[int] = (0,),
) -> Any:
    """The stage's section: what is given, and what suits small data.

    Args:
        groups: rows that can be in one batch.
        values: of `_given`.
        longest: tokens of each document's longest chunk.
    """
    section = SMALL[stage] | ({"pooling": pooling} if stage == "pair" else {}) | values
    positions = getattr(shape, "max_position_embeddings", None) or section.get("document_length", 512)
    lengths = [key for key in section if key.endswith("length") and key not in values]
    section |= {key: min(section[key], positions) for key in lengths}
    count: float = len(rows)
    if stage == "diffusion":  # so many blocks, about
        count = max(1, sum(len(row["text"]) for row in rows) // (4 * section["length"]))
        groups = count
    if stage == "triplet":
        section = {"negatives": max(len(row["negatives"]) for row in rows)} | section
    if stage == "contextual":
        section = {"dimensions": PREFIXES} | section
        room, there = positions - 2, max(len(row["chunks"]) for row in rows)  # 2: special tokens around it
        # Rather parts of a document than parts of chunks, but for the quarter of the documents with the
        # longest ones: a few of these would take the context from all others.
        usual = min(int(np.quantile(longest, 0.75, method="lower")), section["chunk_length"])
        if "chunks" not in values:
            section["chunks"] = max(1, min(section["chunks"], there, room // (usual + 1)))
        if "chunk_length" not in values:
            most = room // min(section["chunks"], there) - 1
            section["chunk_length"] = max(1, min(max(longest), section["chunk_length"], most))
    # No two rows of a text are in one batch.
    section["batch"] = values.get("batch", min(section["batch"], count, groups))
    section = {"steps": math.ceil(EPOCHS * count / min(section["batch"], count, groups))} | section
    return _checked(stage, {"warmup": section["steps"] // 10, "decay": section["steps"] // 5} | section)


def _checked(stage: str, values: Mapping[str, Any]) -> Any:
    """The stage's section with these values.

    Raises: ConfigError that names the key which cannot be used.
    """
    numbers = {key: index(one) for key, one in values.items() if isinstance(one, np.integer)}
    return checked(TRAINED[stage], values | numbers, f"{stage}.")


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

    Raises: ConfigError that names the key, where none can; ValueError for a tokenizer without an end token,
        and as `backbone.mask_id`.
    """
    texts_end = {tokenizer.eos_token, end_token(tokenizer)}
    if stage == "diffusion":
        spare = (tokenizer.mask_token, *MASKS, tokenizer.unk_token, tokenizer.pad_token)
        known = (token for token in spare if token in tokenizer.get_vocab() and token not in texts_end)
        if not (mask_token := mask_token or next(known, "")):
            raise ConfigError("diffusion.mask_token: name a rare token of the vocabulary that plays [MASK]")
        backbone.mask_id(tokenizer, mask_token)
    unread = ("hidden_size", "layers", "heads", "kv_heads", "head_size", "mlp_size", "max_length")
    return BackboneConfig(checkpoint=start, mask_token=mask_token, **dict.fromkeys(unread, 1))


# --- the corpus, and the question whether it helped


def _corpus(place: Path, stage: str, rows: list[dict[str, Any]]) -> Corpus:
    """The rows to train on as a corpus, in a folder that their hash names."""
    made_of = fingerprint(stage, rows)
    path = place / f"data-{made_of}"
    same = {"dataset": "rows", "task": stage, "group": "english", "language": "mul", "split": "train"}
    same |= {"package": "", "kind": "text"}
    if not path.exists():
        own = (
            {"key": row.get("document") or " ".join(row.get("chunks", ())), "document_id": str(i)}
            for i, row in enumerate(rows)
        )
        file = {"files": ("rows/train.arrow",), "columns": {"text": "text"}, "known_as": path.name}
        source = vars(Source("rows", "files", "text", "mul", "", **file))
        with new_directory(path) as folder:
            write_table(folder / "rows", KIND[stage], (same | row | facts for row, facts in zip(rows, own)))
            card = {"hash": made_of, "tables": {KIND[stage]: {"rows": "rows"}}}
            write_json(folder / "card.json", card | {"text_sources": [source] * (stage == "diffusion")})
    return Corpus(path)


def _bm25(task: Task) -> float:
    try:
        return float(evaluate_bm25([task])[task.name].mean())
    except ValueError:  # no text holds a word
        return 0.0


def _cost(few: Task, training: Stage, limits: EvaluationConfig) -> float:
    """The share of a training's time that it takes to measure it every tenth of the steps: by the tokens that
    both read, of which a training computes the backward pass, too, twice the work."""
    read, backend = 0, training.tokenizer.backend_tokenizer
    length = limits.chunk_length if few.contextual else limits.document_length
    for texts, most in ((few.queries, limits.query_length), (few.chunks, length)):
        read += sum(map(len, encode(backend, texts, np.int32, Truncation(most))))
    trained = sum(len(one) for part in training.batch(0) for one in part.sequences)
    return TENTHS * read / (3 * trained * training.config.steps)


def _watch(few: Task, training: Stage, start: str, limits: EvaluationConfig) -> Watch:
    """Measures the model meanwhile, reading as its checkpoint will."""
    tokenizer = ending(training.tokenizer) if training.ends else training.tokenizer
    settings = vars(Settings.of(training.facts(start)))
    measure = probe([few], tokenizer, limits, late_chunking=True, **settings)
    return Watch(title=training.job.section, probe=measure, bars={"BM25": _bm25(few)})


def _task(
    rows: list[dict[str, Any]], held_N: np.ndarray, most_asked: int = ASKED, among: int = AMONG
) -> Task:
    """Held-out queries, and texts, so many at most, those of the held-out rows first. What answers a query is
    what stands in a row with it."""
    order_N = permuted(np.arange(len(rows)), len(rows), 0)
    order_N = order_N[np.argsort(~held_N[order_N], kind="stable")]
    texts = np.cumsum([len(rows[i].get("chunks") or ["", *rows[i].get("negatives", [])]) for i in order_N])
    order_N = order_N[: max(1, np.searchsorted(texts, among, side="right"))]
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
    queries = [*relevant][: min(most_asked, len(answers(own_told)))]
    answered = [relevant[query] for query in queries]
    return Task("rows", family, queries, documents, answered, ignore_identical=True)
