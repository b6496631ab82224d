"""What a training stage is: a class that owns what it reads, the model it trains, its batches as pure
functions of (seed, step), and its loss.

To add one, write a class in `pretraining`, `contrastive`, `neighbours` or anywhere else. It takes the values
of the stage that it subclasses, or of a section of its own in `config.Preset` and the presets.

Shape suffixes: L tokens.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from unmask.config import GROUPS, TrainConfig, check_lengths, stage_config
from unmask.data import corpus, spelling
from unmask.data.batches import BatchPlan
from unmask.data.corpus import Corpus
from unmask.data.mining import cached_array, sample
from unmask.data.tokenize import Table, TokenPairs, token_pairs
from unmask.data.tokens import PlainTokenizer, Truncation, end_token, special_tokens_around
from unmask.models import backbone
from unmask.models.encoding import TokenSequence
from unmask.store import artifacts_root, code_fingerprint, content_hash, fingerprint
from unmask.training.job import OPTIONS, Job

CODE = code_fingerprint(corpus.__file__, spelling.__file__)  # that decides what is held out
WIDTH = 100  # characters of a text that `Stage.show` prints


class Stage:
    """One training objective, from its data to its gradient.

        stage = Pair(preset, corpus, tokenizer, lr=1e-3)
        stage.show(0)  # its first batch, as text
        model = stage.model(start)
        checkpoint = train(stage, model, folder)

    A subclass has `data`, what it reads, by name, and
        batch(step): the global batch of a step, the same on every process, from seed and step alone;
        backward(module, batch, processes): adds this process's share of the batch's gradient to the
            parameters and returns metrics of the global batch, "loss" (a tensor) and "tokens" among them;
        shown(step): the lines of `show`.

    Args:
        preset: has the stage's section, `backbone`, `clusters` and `parallel`.
        corpus: what it reads.
        tokenizer: of the model that it trains.
        section: of the preset; default: the stage's own.
        more: values of the section to replace, and `job.OPTIONS` ("only", "mined", …).
    Raises: ConfigError for an unknown key or a value that cannot be.
    """

    section = ""  # of the preset
    head = False  # whether the model keeps its output matrix, and so ends in its loss
    bidirectional = False  # whether a causal start is made to read both sides

    def __init__(self, preset: Any, corpus: Corpus, tokenizer: Tokenizer, *, section: str = "", **more: Any):
        kind, section = type(self), section or self.section
        values = {key: getattr(preset, key) for key in ("backbone", "clusters", "parallel")}
        values |= {key: more.pop(key) for key in more.keys() & set(OPTIONS)}
        self.config: TrainConfig = stage_config(preset, section, more)
        name = f"{kind.__module__}:{kind.__qualname__}"
        self.job = Job(stage=name, section=section, config=self.config, **values)
        self.corpus, self.tokenizer = corpus, tokenizer

    def begin(self, start: str, folder: Path) -> None:
        """Completes the job with what is known when it begins."""
        names = {"corpus": str(self.corpus.path), "tokenizer": self.tokenizer.name_or_path, "start": start}
        self.job = replace(self.job, folder=str(folder), **names)

    # --- what it reads

    @cached_property
    def stored(self) -> PlainTokenizer:
        return PlainTokenizer(self.tokenizer)

    def prepare(self) -> list[dict[str, Any]]:
        """Makes what a training reads, and returns a row per data set with what was cut and left out."""
        if self.data:  # a corpus may hold no triplets
            self.batch(0)
        return [{"data set": name, **rows.counters} for name, rows in self.data.items()]

    def keys(self) -> dict[str, np.ndarray]:
        """What tells the rows of each data set apart, as `BatchPlan` takes it."""
        return {name: rows.keys for name, rows in self.data.items()}

    def drawing(self) -> dict[str, Any]:
        """What else decides which rows a step takes, as `BatchPlan` takes it."""
        return {}

    @cached_property
    def plan(self) -> BatchPlan:
        return BatchPlan(self.keys(), self.config, **self.drawing())

    def inputs(self) -> dict[str, str]:
        """Hashes of files that the result depends on, beside the corpus."""
        return {"mined": content_hash(Path(self.job.mined))} if self.job.mined else {}

    def show(self, step: int = 0, rows: int = 3) -> None:
        """Prints the first rows of a step's batch as text."""
        for number, lines in zip(range(rows), self.shown(step)):
            print(*([""] if number else []), *lines, sep="\n")

    def text(self, tokens_L: np.ndarray) -> str:
        """Tokens as text, in one line."""
        text = " ".join(self.tokenizer.decode(tokens_L).split())
        return text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…"

    # --- the model that it trains

    def model(self, start: str | Path = "") -> nn.Module:
        """The model to train, as it is before the first step: a checkpoint's, or a new one in the shape of
        the preset's `backbone`.

        Raises: ConfigError for lengths beyond its positions.
        """
        if start:
            model = backbone.load(start, head=self.head)
        else:
            model = backbone.build(self.job.backbone, self.tokenizer, seed=self.config.seed)
        backbone.check_vocabulary(model.config, self.tokenizer)
        check_lengths(self.config, backbone.positions(model), self.job.section)
        if self.bidirectional or self.job.bidirectional:
            backbone.make_bidirectional(model, self.tokenizer, self.job.backbone.mask_token)
        model.start = str(start)
        return model

    def module(self, model: nn.Module) -> nn.Module:
        """What is run forward: all parameters must be used inside of it, where FSDP2 gathers them. Several
        modules that are run each on its own are an nn.ModuleList."""
        return LanguageModel(model) if self.head else model

    def facts(self, start: str) -> dict[str, Any]:
        """How the checkpoint is to be used, and which ready backbone it descends from."""
        facts = replace(self.job.settings, about={}).facts if self.job.settings else {}
        facts |= {"stage": self.job.section, "pooling": getattr(self.config, "pooling", "mean")}
        source = backbone.facts(start).get("source")
        return facts | ({"source": source} if source else {})

    def save(self, model: nn.Module, path: Path, **options: Any) -> None:
        """Writes the checkpoint; options as for `backbone.write`."""
        backbone.save(model, self.tokenizer, path, **self.facts(self.job.start), **options)

    def restore(self, model: nn.Module, path: Path) -> None:
        """Gives the model the weights of a checkpoint that the stage has trained."""
        model.load_state_dict(backbone.load(path, head=self.head).state_dict())


class LanguageModel(nn.Module):
    """A language model that ends in its loss: logits exist inside of the loss, at the paid positions only."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, tokens_BL: Tensor, mask: Tensor | None, loss: Callable[..., Tensor]) -> Tensor:
        hidden_BLD = self.model.base_model(tokens_BL, attention_mask=mask, use_cache=False)[0]
        return loss(hidden_BLD, self.model.get_output_embeddings().weight)


class TextStage(Stage):
    """A stage that reads rows of texts: queries, their documents, and hard negatives."""

    ends = False  # whether each text gets an end token, so that the last token to pool is always the same

    @cached_property
    def around(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids of the special tokens before and after each text or document, where the start has some."""
        given = self.job.settings and self.job.settings.special_tokens and not self.ends
        return special_tokens_around(self.tokenizer) if given else (np.array([], np.int32),) * 2

    def read(self, tokens_L: np.ndarray) -> TokenSequence:
        """A text as the model reads it."""
        before, after = self.around
        special = len(before) + len(after)
        return TokenSequence(np.concatenate([before, tokens_L, after]) if special else tokens_L)

    def reading(self, group: str) -> tuple[Truncation, Truncation]:
        """How a query and a document of this group are read: tokens at most, and what is put around them."""
        suffix, special = end_token(self.tokenizer) if self.ends else "", sum(map(len, self.around))
        lengths = self.config.query_length, self.config.document_length
        query, document = (Truncation(max(1, length - special), suffix=suffix) for length in lengths)
        return query, document

    def groups(self) -> dict[str, str]:
        """Data sets of pairs to train on → their groups.

        Raises: ValueError if there is none of those that are wanted.
        """
        names, wanted = self.corpus.datasets("pairs", "train"), {*(self.job.only or GROUPS)}
        groups = {name: self.corpus.pairs("train", name)[0]["group"] for name in names}
        if not (chosen := {name: group for name, group in groups.items() if wanted & {name, group}}):
            raise ValueError(f"no training pairs are of {sorted(wanted)}: the corpus has {groups}")
        return chosen

    @cached_property
    def data(self) -> dict[str, TokenPairs]:
        """The pairs, or where the section asks for hard negatives, the triplets: `negatives` for each query,
        or as many as it has."""
        negatives = getattr(self.config, "negatives", 0)
        tables = self.triplets() if negatives else self.pairs()
        limits = {name: self.reading(table.rows[0]["group"]) for name, table in tables.items()}
        return {name: token_pairs(table, *limits[name], negatives) for name, table in tables.items()}

    def table(self, name: str, rows: Dataset, file: str) -> Table:
        held_out = cached_array("held-out", [self.corpus.hash, CODE], self.corpus.held_out)
        return Table(rows, name, file, self.stored, held_out)

    def tables(self, kind: str) -> dict[str, Table]:
        """The corpus's training rows of a kind ("pairs", "triplets", "documents"), by data set."""
        read, names = getattr(self.corpus, kind), self.corpus.datasets(kind, "train")
        return {
            name: self.table(name, read("train", name), self.corpus.rows_hash(kind, name)) for name in names
        }

    def pairs(self) -> dict[str, Table]:
        """The corpus's pairs, of the groups that are wanted; `config.max_pairs` of them, if that is set."""
        groups, most, seed = self.groups(), getattr(self.config, "max_pairs", 0), self.config.seed
        tables = {name: table for name, table in self.tables("pairs").items() if name in groups}
        rows = {name: table.rows for name, table in tables.items()}
        draw = fingerprint(most, seed, [*map(len, rows.values())])  # one over all tables
        for name, few in (sample(rows, most, seed) if most else {}).items():
            if len(few) < len(rows[name]):
                tables[name] = self.table(name, few, f"{tables[name].rows_hash}/{draw}")
        return tables

    def triplets(self) -> dict[str, Table]:
        """The corpus's triplets, and those that were mined."""
        tables = self.tables("triplets")
        if path := self.job.mined:
            rows = Dataset.from_parquet(path, cache_dir=str(artifacts_root() / "data" / "datasets"))
            names, file = np.asarray(rows["dataset"][:]), content_hash(Path(path))
            for name in map(str, np.unique(names)):
                tables[name] = self.table(name, rows.select(np.flatnonzero(names == name)), file)
        return tables
