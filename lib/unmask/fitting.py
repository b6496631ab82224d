"""`fit`: an embedder from one's own rows, in five lines.

It is the notebooks' training (`unmask.training`) on the rows that are given, with values that suit small
data, and with an answer to the question whether it helped.

Shape suffix: N rows.
"""

import copy
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from operator import index
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from pydantic import AfterValidator, Field, ValidationError, create_model
from transformers import PreTrainedTokenizerBase

from unmask.config import TRAINED, BackboneConfig, ClustersConfig, ParallelConfig, check_schedule
from unmask.data.corpus import Corpus, write_table
from unmask.data.registry import Source
from unmask.data.spelling import is_blank
from unmask.data.tokens import encode, end_token
from unmask.evaluation.exam import Division, Exam, Row, divided
from unmask.models import backbone
from unmask.models.arguments import as_list
from unmask.models.checkpoint import folder_of
from unmask.models.embedder import Embedder
from unmask.schema import ConfigError, checked, explained
from unmask.store import alone, fingerprint, nearest, new_directory, write_json
from unmask.training import STAGES, Stage, TrainingStopped, Watch, train


def _filled(text: str) -> str:
    if is_blank(text):
        raise ValueError("must not be empty")
    return text


# With a length pydantic looks at the characters, and refuses half of one.
Text = Annotated[str, Field(min_length=1), AfterValidator(_filled)]
Texts = Annotated[list[Text], Field(min_length=1)]
PAIR = {"query": Text, "document": Text}
COLUMNS = {
    "pair": PAIR,
    "triplet": PAIR | {"negatives": Texts},
    "contextual": {"chunks": Texts, "queries": Texts, "golds": list[int]},
    "diffusion": {"text": Text},
}
TABLES = {"pair": "pairs", "triplet": "triplets", "contextual": "documents", "diffusion": "texts"}
SMALL: dict[str, dict[str, Any]] = {  # values for small data
    "pair": {"batch": 128, "lr": 2e-4, "query_length": 64, "document_length": 256, "curriculum": (1, 0, 0)},
    "triplet": {"batch": 128, "lr": 5e-5, "query_length": 64, "document_length": 256, "accumulation": 1}
    | {"groups": ("english",), "max_pairs": 1},  # of mining, which is done
    # The paper's prefixes; those that fit are trained beside the whole.
    "contextual": {"batch": 32, "lr": 1e-4, "query_length": 64, "chunk_length": 256, "chunks": 16}
    | {"dimensions": (128, 256, 512, 1024, 2048, 2560)},
    "diffusion": {"batch": 16, "lr": 4e-4, "length": 256, "log_uniform": True, "t_min": 0.05},
}
MASKS = "<|fim_pad|>", "<empty_output>"  # rare tokens of Qwen3's and of SmolLM2's vocabulary
EPOCHS = 3


def fit(
    model: Embedder | str | Path,
    data: Iterable[Any],
    *,
    stage: str | type[Stage] = "pair",
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
        stage: one of these, or a class that derives from one of theirs (`unmask.training`) and has a loss of
            its own.
        folder: where the training is kept. The same call finds it there, or goes on with it after an
            interruption. Default: nothing is kept but the result, and the rows' tokens in the cache
            (UNMASK_ARTIFACTS names another).
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
            three epochs of batches of 128 rows (contextual 32, diffusion 16), or of all rows if there are
            fewer, and for pairs the model's pooling, else the mean. Where `cluster_size` or `filter_margin`
            ask for look-alikes, the model finds them.
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
    if folder is not None and (not str(folder) or Path(folder).is_file()):
        raise ValueError(f"folder is {str(folder)!r}: name one, or leave it out and nothing is kept")
    for name, said in {"bidirectional": bidirectional, "progress": progress}.items():
        if not isinstance(said, bool | None):
            raise ConfigError(f"{name} must be True or False, or be left out, got {said!r}")
    own = isinstance(stage, type) and issubclass(stage, Stage)
    kind, stage = (stage, stage.section) if own else (STAGES.get(stage), stage)
    rows = _rows(data, stage)
    mask_token = values.pop("mask_token", "") if stage == "diffusion" else ""
    checked = _checked(stage, {"steps": 10**6, "warmup": 0} | SMALL[stage] | values)
    values = {key: getattr(checked, key) for key in values}
    division = divided(rows, hold_out, stage)
    with ExitStack() as stack:
        place = Path(folder or stack.enter_context(tempfile.TemporaryDirectory())).absolute()
        place.mkdir(parents=True, exist_ok=True)
        stack.enter_context(alone(place))
        start = _start(model, kind, place, bidirectional, keep_layers)
        training = _training(kind, start, division, values, mask_token, place)
        return _trained(training, start, division, place / stage, bool(folder), progress)


def _trained(
    training: Stage, start: "Start", division: Division, place: Path, stays: bool, progress: bool | None
) -> Embedder:
    """Trains, and measures before, meanwhile and afterwards."""
    exam = Exam(division, training.config) if division.held_N.any() else None
    before = exam.ndcg(start.embedder) if exam else 0.0
    start.embedder.close()
    network = training.model(start.path)
    watch = exam.watch(training, start.path, progress) if exam else None
    try:
        checkpoint = train(training, network, place, watch=watch or Watch(title=training.job.section))
    except TrainingStopped:
        if stays:
            raise
        raise TrainingStopped("told to stop; only with a folder is what it did kept: folder=…") from None
    embedder = Embedder.from_pretrained(checkpoint, mixed_precision=False)  # else it could not be saved
    embedder.checkpoint = checkpoint if stays else None
    embedder.helped = exam.report(before, embedder, checkpoint, watch) if exam else None
    return embedder


# --- rows


def _rows(data: Iterable[Any], stage: str) -> list[Row]:
    """The rows as dicts of the stage's columns, each checked."""
    if stage not in COLUMNS:
        raise ConfigError(f"unknown stage {stage!r}{nearest(stage, COLUMNS)}")
    columns, model, rows = [*COLUMNS[stage]], create_model(stage, **COLUMNS[stage]), []
    if hasattr(data, "__arrow_c_stream__"):
        try:
            data = pa.chunked_array(data).to_pylist()
        except pa.ArrowException as error:
            raise ValueError(f"{error}: mend it, or keep the columns {', '.join(columns)} alone") from None
    for number, row in enumerate(as_list(data, "[row, row]")):
        try:
            if not isinstance(row, Mapping):
                row = dict(zip(columns, [row] if isinstance(row, str) else as_list(row, ""), strict=True))
            rows.append(vars(model(**{name: row[name] for name in columns if name in row})))
        except ValidationError as error:
            has = "" if {*columns} <= {*row} else f"; the row has {', '.join(map(str, row))}"[:200]
            raise ValueError(f"row {number}: {explained(error, model).lstrip()}{has}") from None
        except (TypeError, ValueError):
            each = f"({', '.join(columns)})"
            raise ValueError(f"row {number} is {str(row)[:80]}: give {each}, or a dict of these") from None
        if stage == "contextual":
            _check_golds(number, **rows[-1])
    return rows


def _check_golds(number: int, chunks: list[str], queries: list[str], golds: list[int]) -> None:
    if len(golds) != len(queries) or not {*golds} <= {*range(len(chunks))}:
        each = f"the number of a chunk, 0 to {len(chunks) - 1}, for each query"
        raise ValueError(f"row {number}: golds must be {each}, got {golds}")


# --- the model


class Start(NamedTuple):
    """What a training starts from."""

    embedder: Embedder  # as it is measured before
    path: str
    turned: bool  # whether it is made to read both sides


def _start(
    model: Embedder | str | Path, kind: type[Stage], place: Path, bidirectional: bool | None, layers: Any
) -> Start:
    """The model as it is trained and measured; a given embedder stays as it is."""
    given, stage = isinstance(model, Embedder), kind.section
    source = "" if given else folder_of(model)
    embedder = _copied(model) if given else Embedder.from_pretrained(source, mixed_precision=False)
    settings, causal = embedder.settings, not backbone.sees_both_sides(embedder.model)
    if bidirectional is False and (kind.bidirectional or not causal):
        what = "this model" if not causal else f"stage {stage!r}"
        raise ConfigError(f"bidirectional=False: {what} reads both sides, leave it out")
    if settings.pooling != "mean" and stage != "pair":
        raise ValueError(
            f"stage {stage!r} trains the mean of tokens, this model pools {settings.pooling!r}: take 'pair'"
        )
    if layers is not None:
        backbone.keep_layers(embedder.model, layers)
    if layers is not None and kind.head and not given:
        source = backbone.cut_short(source, layers, place / "cut")
    elif given or layers is not None:
        source = embedder.save_pretrained(place / "start")
    turned = causal and (settings.plain if bidirectional is None else bidirectional)
    if turned:
        backbone.make_bidirectional(embedder.model, embedder.tokenizer, "")
    return Start(embedder, str(source), turned)


def _copied(embedder: Embedder) -> Embedder:
    """The same in float32: one whose weights are rounded is read from its directory."""
    options = {"mixed_precision": False, "device": embedder.devices, **vars(embedder.settings)}
    if embedder.mixed_precision and (folder := Path(embedder.model.name_or_path)).is_dir():
        return Embedder.from_pretrained(folder, **options)
    return Embedder(copy.deepcopy(embedder.model), embedder.tokenizer, **options)


def _training(
    kind: type[Stage], start: Start, division: Division, values: Row, mask_token: str, place: Path
) -> Stage:
    """The stage, on a corpus of the rows to train on; prints what it is going to do."""
    stage, tokenizer = kind.section, backbone.load_tokenizer(start.path)
    ready = _backbone(start.path, tokenizer, mask_token, stage)
    longest = _longest(division.rows, tokenizer)
    config = _config(stage, division, start.embedder, values, longest)
    batch = config.batch if stage == "diffusion" else min(config.batch, division.groups)
    done = f"{stage}: {len(division.training):,} rows, {config.steps:,} steps of {batch:,}"
    print(f"{done}; {division.held_N.sum():,} rows are held out")
    processes = ParallelConfig(num_processes=max(1, torch.cuda.device_count()))
    clusters = ClustersConfig(surrogate=start.path)
    recipe = SimpleNamespace(backbone=ready, clusters=clusters, parallel=processes, **{stage: config})
    corpus = _corpus(place, stage, division.training)
    reading = {"bidirectional": start.turned, "settings": start.embedder.settings}
    return kind(recipe, corpus, tokenizer, **reading)


# --- values


def _checked(stage: str, values: Mapping[str, Any]) -> Any:
    """The stage's section with these values.

    Raises: ConfigError that names the key which cannot be used.
    """
    numbers = {key: index(one) for key, one in values.items() if isinstance(one, np.integer)}
    return checked(TRAINED[stage], values | numbers, f"{stage}.")


def _longest(rows: list[Row], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of each row's longest chunk, 0 without chunks.

    Raises: ValueError that names row and column of a text without tokens.
    """
    longest = [0] * len(rows)
    cells = ((number, name, row[name]) for number, row in enumerate(rows) for name in row.keys() - {"golds"})
    texts = [(*place, text) for *place, x in cells for text in ([x] if isinstance(x, str) else x)]
    tokens = encode(tokenizer.backend_tokenizer, (text for *_, text in texts), np.int32)
    for (number, column, text), ids in zip(texts, tokens):
        if not len(ids):
            raise ValueError(f"row {number}, column {column}: {text!r} has no tokens: remove or fill it")
        longest[number] = max(longest[number], len(ids) * (column == "chunks"))
    return longest


def _config(
    stage: str, division: Division, embedder: Embedder, values: Row, longest: Sequence[int] = (0,)
) -> Any:
    """The stage's section: what is given, and what suits small data.

    Args:
        embedder: says how much it reads, and how it pools.
        values: of the section.
        longest: tokens of each document's longest chunk.
    """
    rows, count, groups = division.training, len(division.training), division.groups
    suits = {"pair": {"pooling": embedder.pooling}, "contextual": {"chunk_length": min(256, max(longest))}}
    section = _lengths(SMALL[stage] | suits.get(stage, {}) | values, values, embedder, rows, longest)
    if stage == "diffusion":  # so many blocks, about
        count = groups = max(1, sum(len(row["text"]) for row in rows) // (4 * section["length"]))
    if stage == "triplet":
        section = {"negatives": max(len(row["negatives"]) for row in rows)} | section
    batch = values.get("batch", min(section["batch"], count, groups))  # no two rows of a text in one
    section = {"steps": math.ceil(EPOCHS * count / min(batch, count, groups))} | section | {"batch": batch}
    shares = {"warmup": section["steps"] // 10, "decay": section["steps"] // 5}
    check_schedule(config := _checked(stage, shares | section), stage)
    return config


def _lengths(
    section: Row, values: Row, embedder: Embedder, rows: list[Row], longest: Sequence[int]
) -> dict[str, Any]:
    """The section with texts and documents as long as the embedder reads them; says what is cut.

    Rather parts of a document are read than parts of chunks, but for the quarter of the documents with the
    longest ones: a few of these would take the context from all others.
    """
    limits = dict.fromkeys(("query_length", "document_length"), embedder.max_length)
    limits["length"] = embedder.positions
    if "chunks" in section:
        most, room = max(len(row["chunks"]) for row in rows), embedder.window - sum(map(len, embedder.around))
        usual = min(int(np.quantile(longest, 0.75, method="lower")), section["chunk_length"])
        # A separator stands between two chunks.
        chunks = max(1, min(section["chunks"], most, (room + 1) // (usual + 1)))
        section = section | {"chunks": min(values.get("chunks", chunks), most)}
        limits["chunk_length"] = max(1, (room + 1) // section["chunks"] - 1)
    cut = {key: limit for key, limit in limits.items() if limit < section.get(key, 0)}
    for key, limit in cut.items():
        print(f"{key}: {limit} instead of {section[key]}, as many tokens as the model reads")
    return section | cut


def _backbone(start: str, tokenizer: PreTrainedTokenizerBase, mask_token: str, stage: str) -> BackboneConfig:
    """A ready checkpoint, whose shape is in its own files; and for diffusion the token that plays [MASK].

    Raises: ConfigError that names the key, where none can; ValueError for a tokenizer without an end token,
        and as `backbone.mask_id`.
    """
    ends = {tokenizer.eos_token, end_token(tokenizer)}
    if stage == "diffusion":
        spare = (tokenizer.mask_token, *MASKS, tokenizer.unk_token, tokenizer.pad_token)
        rare = (token for token in spare if token in tokenizer.get_vocab() and token not in ends)
        if not (mask_token := mask_token or next(rare, "")):
            raise ConfigError(
                "mask_token: the tokenizer has none to spare, name a rare token that plays [MASK]"
            )
        backbone.mask_id(tokenizer, mask_token)
    unread = ("hidden_size", "layers", "heads", "kv_heads", "head_size", "mlp_size", "max_length")
    return BackboneConfig(checkpoint=start, mask_token=mask_token, **dict.fromkeys(unread, 1))


def _corpus(place: Path, stage: str, rows: list[Row]) -> Corpus:
    """The rows to train on as a corpus, in a folder that their hash names."""
    made_of = fingerprint(stage, rows)
    path = place / f"data-{made_of}"
    same = {"dataset": "rows", "task": stage, "group": "english", "language": "mul", "split": "train"}
    same |= {"package": "", "kind": "text"}
    if not path.exists():
        keys = (row.get("document") or " ".join(row.get("chunks", ())) for row in rows)
        facts = [{"key": key, "document_id": str(number)} for number, key in enumerate(keys)]
        file = {"files": ("rows/train.arrow",), "columns": {"text": "text"}, "known_as": path.name}
        source = vars(Source("rows", "files", "text", "mul", "", **file))
        with new_directory(path) as folder:
            write_table(folder / "rows", TABLES[stage], (same | row | fact for row, fact in zip(rows, facts)))
            card = {"hash": made_of, "tables": {TABLES[stage]: {"rows": "rows"}}}
            write_json(folder / "card.json", card | {"text_sources": [source] * (stage == "diffusion")})
    return Corpus(path)
