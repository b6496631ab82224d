"""The training stages: each is one class, which owns what it reads, the model it trains, its batches as pure
functions of (seed, step), and its loss.

A stage is found by its name in `STAGES`. To add one, write a class here or in `neighbours`, and a section of
that name in the presets.

Shape suffixes: N queries · R rows (texts) · D dimensions · B sequences · L tokens.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel

from unmask import losses
from unmask.config import GROUPS, ContextualConfig, ContrastiveConfig, TrainConfig, preset_from
from unmask.data import tokenized
from unmask.data.batches import BatchPlan, curriculum
from unmask.data.documents import ContextualBatch, contextual_batch, split_rows
from unmask.data.lookalikes import LSA, Neighbours, Surrogate, neighbours
from unmask.data.mining import Encoder
from unmask.data.sources import open_corpus
from unmask.data.tokenized import Blocks, TokenDocuments, TokenPairs, open_blocks
from unmask.data.tokens import StoredTokenizer, end_token
from unmask.models import backbone
from unmask.models.embedder import Embedder
from unmask.models.encoding import TokenSequence
from unmask.models.pretrained import require_checkpoint
from unmask.models.quantize import int8
from unmask.store import fingerprint
from unmask.training.cache import cached_backward
from unmask.training.distributed import Processes

STAGES: dict[str, type[Stage]] = {}  # by the name of their section in a preset


class Job:
    """A training that was asked for, and what its stage makes it from; each part is made when first used.

    Args:
        asked: "values" (the preset), "stage", "folder", "fingerprint"; and as the stage needs, "start"
            (checkpoint directory), "tokenizer" (for a model from scratch), "changes" (values of the stage's
            section to replace), "groups" (of pair data sets to use), "negatives" (file of mined triplets),
            "surrogate" (directory or Hub name of an embedder, instead of `clusters.surrogate`),
            "milestones" (numbers of steps after which the model is kept as well, see `launch.milestones`),
            "bidirectional" (a causal start reads both sides from the first step on, without pretraining).
    """

    def __init__(self, asked: Mapping[str, Any]):
        self.asked, self.get = asked, asked.get
        self.preset = preset_from(asked["values"])
        self.config = replace(getattr(self.preset, asked["stage"]), **asked.get("changes", {}))
        self.stage = STAGES[asked["stage"]].chosen(self.config)

    @cached_property
    def corpus(self):
        return open_corpus(self.preset.data)

    @cached_property
    def tokenizer(self):
        return backbone.load_tokenizer(self.get("start") or self.asked["tokenizer"])

    @cached_property
    def stored(self) -> StoredTokenizer:
        return StoredTokenizer.of(self.tokenizer)

    @cached_property
    def data(self) -> Any:
        """What the stage reads, prepared by the process that comes first."""
        return self.stage.read(self)

    @cached_property
    def neighbours(self) -> dict[str, Neighbours]:
        """The look-alikes in each data set, found by the process that comes first."""
        return {
            name: neighbours(
                rows, name=name, stored=self.stored, surrogate=surrogate(self), config=self.preset.clusters,
                cluster_size=self.config.cluster_size, seed=self.config.seed,
            )
            for name, rows in self.data.items()
        }  # fmt: skip


class Stage:
    """One training objective, from its data to its gradient.

    The class methods make it from a job, among them `read(job)`, the tokenised training data. The others
    train it: `batch(step)`, the global batch of a step, the same on every process, and
    `backward(module, batch, step, processes)`, which adds this process's share of the batch's gradient to the
    parameters and returns metrics of the global batch, "loss" (a tensor) and "tokens" among them. `batch` and
    `samples` depend on nothing but the seed and the step.
    """

    head = False  # whether the model keeps its output matrix
    bidirectional = False  # whether a causal start is made to read both sides
    save = staticmethod(backbone.save)  # how its checkpoint is written

    def __init_subclass__(cls, *, name: str = "", **rest: Any):
        super().__init_subclass__(**rest)
        if name:
            STAGES[name] = cls

    @classmethod
    def chosen(cls, config: TrainConfig) -> type[Stage]:
        """The class that trains under these settings."""
        return cls

    @classmethod
    def ends(cls, config: TrainConfig) -> bool:
        """Whether an end is put after each text: a last token to pool at that means the same for all."""
        return False

    @classmethod
    def prepare(cls, job: Job) -> list[dict[str, Any]]:
        """Makes what a training reads, and returns a row per data set with what was cut and left out."""
        return [{"data set": name, **rows.counters} for name, rows in job.data.items()]

    @classmethod
    def reading(cls, job: Job, group: str) -> dict[str, Any]:
        """What the model reads around the texts of a pair of this group, and how many tokens at most."""
        lengths = {"query_length": job.config.query_length, "document_length": job.config.document_length}
        if not cls.ends(job.config):
            return lengths
        around = ("", job.stored.load().id_to_token(job.stored.end))
        return lengths | {"around_query": around, "around_document": around}

    @classmethod
    def inputs(cls, job: Job) -> dict[str, str]:
        """The identities of what the result depends on, beside configuration, corpus, start and code."""
        return {"negatives": identity(Path(job.get("negatives")))} if job.get("negatives") else {}

    @classmethod
    def model(cls, job: Job) -> nn.Module:
        """The model to train, as it is before the first step."""
        if job.get("start"):
            model = backbone.load(job.get("start"), head=cls.head)
        else:
            model = backbone.build(job.preset.backbone, job.tokenizer, seed=job.config.seed)
        if cls.bidirectional or job.get("bidirectional"):
            backbone.make_bidirectional(model, job.tokenizer, job.preset.backbone.mask_token)
        return model

    @classmethod
    def of(cls, job: Job, model: nn.Module) -> Stage:
        """The stage of a job."""
        return cls(job.data, job.config)

    @classmethod
    def facts(cls, job: Job) -> dict[str, Any]:
        """How the checkpoint is to be used, and which ready backbone it descends from."""
        facts = {"stage": job.asked["stage"], "pooling": getattr(job.config, "pooling", "mean")}
        if source := backbone.facts(job.get("start") or "").get("source"):
            facts["source"] = source
        return facts | ({"special_tokens": True} if cls.ends(job.config) else {})

    _plan: BatchPlan

    def samples(self, step: int) -> dict[str, Any]:
        """Which data set and rows a step reads, for the report of a failure."""
        return self._plan.samples(step)

    def module(self, model: nn.Module) -> nn.Module:
        """What is run forward: all parameters must be used inside of it, where FSDP2 gathers them. Several
        modules that are run each on its own are an nn.ModuleList."""
        return model


def identity(path: Path) -> str:
    """Identity of an input: a checkpoint of ours by its fingerprint, anything else by its content."""
    if not path.exists():  # a name on the Hub
        return str(path)
    if known := backbone.facts(path).get("fingerprint"):
        return known
    files = sorted(filter(Path.is_file, path.glob("*"))) if path.is_dir() else [path]
    return fingerprint([_sha256(file) for file in files])


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def surrogate(job: Job) -> Surrogate:
    """The embedder that says which texts are alike: one of ours, or any of sentence-transformers'."""
    name = job.get("surrogate") or job.preset.clusters.surrogate
    if name == LSA:
        return Surrogate(LSA)
    path = require_checkpoint(name)

    def load() -> Encoder:
        if backbone.facts(path):
            return Embedder.from_pretrained(path)
        from sentence_transformers import SentenceTransformer  # seconds to import, for few trainings

        return SentenceTransformer(path)

    return Surrogate(identity(Path(path)) if Path(path).is_dir() else path, load)


def groups(job: Job) -> dict[str, str]:
    """Data sets of pairs that the job trains on → their groups."""
    corpus, wanted = job.corpus, job.get("groups") or GROUPS
    found = {name: corpus.pairs("train", name)[0]["group"] for name in corpus.datasets("pairs", "train")}
    return {name: group for name, group in found.items() if group in wanted}


def pairs(job: Job) -> dict[str, TokenPairs]:
    """The corpus's pairs, as the job's stage reads them."""
    corpus = job.corpus
    return {
        name: _tokenised(job, name, corpus.pairs("train", name), corpus.identity("pairs", name))
        for name in groups(job)
    }


def triplets(job: Job) -> dict[str, TokenPairs]:
    """The corpus's triplets and mined ones, as the job's stage reads them."""
    corpus, count = job.corpus, job.config.negatives
    sources = {
        name: (corpus.triplets("train", name), corpus.identity("triplets", name))
        for name in corpus.datasets("triplets", "train")
    }
    if job.get("negatives"):
        path = Path(job.get("negatives"))
        mined = Dataset.from_parquet(str(path), cache_dir=str(Path(job.asked["folder"]) / "cache"))
        sources |= {name: (rows, identity(path)) for name, rows in by_dataset(mined).items()}
    return {name: _tokenised(job, name, *source, negatives=count) for name, source in sources.items()}


def _tokenised(job: Job, name: str, rows: Dataset, file: str, negatives: int = 0) -> TokenPairs:
    reading = job.stage.reading(job, rows[0]["group"])
    return tokenized.token_pairs(rows, job.stored, name=name, identity=file, negatives=negatives, **reading)


def by_dataset(rows: Dataset) -> dict[str, Dataset]:
    """Splits a table by its `dataset` column, in alphabetical order."""
    names = np.asarray(rows["dataset"])
    return {str(name): rows.select(np.flatnonzero(names == name)) for name in np.unique(names)}


class LanguageModel(nn.Module):
    """A language model that ends in its loss: logits exist inside of the loss, at the paid positions only."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, tokens_BL: Tensor, valid_BL: Tensor | None, loss: Callable[..., Tensor]) -> Tensor:
        mask_BL = None if valid_BL is None else valid_BL.long()
        hidden_BLD = self.model.base_model(tokens_BL, attention_mask=mask_BL, use_cache=False)[0]
        return loss(hidden_BLD, self.model.get_output_embeddings().weight)


class Pretraining(Stage):
    """What next-token and diffusion pretraining share: packed blocks, a few of them at a time."""

    head = True

    @classmethod
    def read(cls, job: Job) -> Blocks:
        config = job.config
        return open_blocks(
            job.corpus.text_sources(), job.tokenizer,
            length=config.length, wanted=config.steps * config.batch, seed=config.seed,
        )  # fmt: skip

    @classmethod
    def prepare(cls, job: Job) -> list[dict[str, Any]]:
        return job.data.report

    def __init__(self, blocks_NL: np.ndarray | Blocks, config: TrainConfig):
        self._blocks, self._config = blocks_NL, config
        self._plan = BatchPlan(
            {"text": len(blocks_NL)}, batch=config.batch, steps=config.steps, seed=config.seed
        )

    def module(self, model: PreTrainedModel) -> nn.Module:
        return LanguageModel(model)

    def _backward(
        self, module: nn.Module, order_B: Tensor, forward: Callable[[Tensor], Tensor], processes: Processes
    ) -> Tensor:
        """Sums the gradients of `forward(rows)` over micro-batches of the rows in `order_B`."""
        rows = max(1, self._config.token_budget // self._blocks.shape[1])
        # Every process runs as many passes as the others.
        passes = math.ceil(math.ceil(len(order_B) / rows) / processes.count)
        return accumulate(module, order_B.tensor_split(passes * processes.count), forward, processes)


def accumulate(
    module: nn.Module, groups: Sequence[Any], forward: Callable[[Any], Tensor], processes: Processes
) -> Tensor:
    """Sums the gradients of a loss that is a sum over micro-batches, and returns the loss.

    Args:
        groups: rows of each micro-batch, as many for each process, the longest groups first.
        forward: the part of the loss that some rows pay.
    """
    own = processes.share(groups)
    total = torch.zeros((), device=processes.device)
    for number, group in enumerate(own, 1):
        with processes.accumulating(module, last=number == len(own)):
            with processes.autocast():
                # A process without rows left repeats some for nothing.
                loss = forward(group) if len(group) else 0 * forward(groups[0][:1])
            processes.backward(loss)
        total += loss.detach()
    return processes.sum(total)


class NextToken(Pretraining, name="ar"):
    """Autoregressive pretraining on packed blocks: the stand-in for a ready base model."""

    def batch(self, step: int) -> Tensor:
        return torch.from_numpy(self._blocks[self._plan(step)[1]].astype(np.int64))

    def backward(self, module: nn.Module, tokens_BL: Tensor, step: int, processes: Processes) -> dict:
        def forward(rows: Tensor) -> Tensor:
            tokens = tokens_BL[rows].to(processes.device)
            loss = partial(losses.next_token_loss, tokens_BL=tokens, normalizer=tokens_BL[:, 1:].numel())
            return module(tokens, None, loss)

        loss = self._backward(module, torch.arange(len(tokens_BL)), forward, processes)
        return {"loss": loss, "tokens": tokens_BL.numel()}


@dataclass(frozen=True)
class Noised:
    """A batch of the forward process: clean tokens, what was masked, what its nats are divided by (t, if t is
    uniform); `valid_BL` False beyond a cut."""

    tokens_BL: Tensor
    masked_BL: Tensor
    divisor_B: Tensor
    valid_BL: Tensor


class Diffusion(Pretraining, name="diffusion"):
    """Masked-diffusion continued pretraining (pplx-embed, section 2.1)."""

    bidirectional = True

    @classmethod
    def of(cls, job: Job, model: PreTrainedModel) -> Diffusion:
        return cls(job.data, job.config, model.config.mask_token_id)

    def __init__(self, blocks_NL: np.ndarray | Blocks, config: TrainConfig, mask_token_id: int):
        super().__init__(blocks_NL, config)
        self._mask_token_id = mask_token_id

    def batch(self, step: int) -> Noised:
        rng = np.random.default_rng([self._config.seed, 2, step])
        return noise(self._blocks[self._plan(step)[1]], self._config, rng)

    def backward(self, module: nn.Module, batch: Noised, step: int, processes: Processes) -> dict:
        predictable = int((batch.valid_BL.sum(1) - 1).sum())

        def forward(rows: Tensor) -> Tensor:
            whole = bool(batch.valid_BL[rows].all())
            tokens, masked, divisor, valid = (
                x[rows].to(processes.device, non_blocking=True)
                for x in (batch.tokens_BL, batch.masked_BL, batch.divisor_B, batch.valid_BL)
            )
            valid = None if whole else valid
            loss = partial(
                losses.diffusion_loss, tokens_BL=tokens, masked_BL=masked, t_B=divisor, valid_BL=valid,
                normalizer=predictable,
            )  # fmt: skip
            return module(tokens.masked_fill(masked, self._mask_token_id), valid, loss)

        # Cut sequences go last, so that all other micro-batches need no attention mask.
        order = batch.valid_BL.all(1).logical_not().argsort(stable=True)
        loss = self._backward(module, order, forward, processes)
        return {"loss": loss, "tokens": int(batch.valid_BL.sum())}


def noise(tokens_BL: np.ndarray, config: TrainConfig, rng: np.random.Generator) -> Noised:
    """The forward process: t ~ U(t_min, t_max) per sequence, every token masked with probability t, 1 % of
    sequences cut.

    With t_min = t_max the weight 1/t is a constant: masked next-token prediction with a fixed share of masks,
    as LLM2Vec has it. With `log_uniform` t is drawn with a density in proportion to 1/t instead, so the
    weight 1/t must not be paid again: importance sampling of the same expected loss, in which every masked
    token has the same weight, one over the mean of t, and no single token can fill a step."""
    b, length = tokens_BL.shape
    if config.log_uniform:
        t_B = np.exp(rng.uniform(np.log(config.t_min), np.log(config.t_max), b))
        divisor_B = np.full(b, config.masked_share)
    else:
        t_B = divisor_B = rng.uniform(config.t_min, config.t_max, b)
    masked_BL = rng.random((b, length)) < t_B[:, None]
    cut_B = np.where(rng.random(b) < config.cut_fraction, rng.integers(2, length + 1, b), length)
    valid_BL = np.arange(length) < cut_B[:, None]
    return Noised(
        torch.from_numpy(tokens_BL.astype(np.int64)),
        torch.from_numpy(masked_BL & valid_BL),
        torch.from_numpy(divisor_B.astype(np.float32)),
        torch.from_numpy(valid_BL),
    )


Near = Mapping[str, Neighbours] | None  # data set → its look-alikes
Allowed = Callable[[int], set[str]] | None  # as for `BatchPlan`


@dataclass(frozen=True)
class Batch:
    """N queries of one data set, and all texts that their loss looks at."""

    dataset: str
    sequences: list[TokenSequence]  # the queries come first
    count: int  # N
    negatives: Tensor | None  # (N, documents), False: the document is no negative of the query
    weight: float = field(default=1.0, kw_only=True)  # of its loss in the step's


class Contrastive(Stage):
    """What the contrastive stages share: single-dataset batches, of look-alikes if the config says so, and a
    model that is run as it is. `loss(rows_RD, batch, step, processes)` is this process's part of the loss of
    a batch, given the vectors of its texts.

    Args:
        data: data sets of rows.
        allowed: data sets that may be drawn at a step. Default: all, always.
        neighbours: of each data set, for a `cluster_size` or a `filter_margin`; their clusters are of this
            size.
    """

    def __init__(
        self, data: Mapping[str, Any], config: ContrastiveConfig,
        allowed: Allowed = None, neighbours: Near = None,
    ):  # fmt: skip
        self._data, self._config, self._neighbours = data, config, neighbours or {}
        keys = {name: self._keys(rows) for name, rows in data.items()}
        packings = {name: own.packing for name, own in self._neighbours.items() if own.packing}
        self._plan = BatchPlan(
            keys, batch=config.batch, steps=config.steps, seed=config.seed, allowed=allowed, packings=packings
        )

    @classmethod
    def prepare(cls, job: Job) -> list[dict[str, Any]]:
        cls._near(job)
        return super().prepare(job)

    @classmethod
    def inputs(cls, job: Job) -> dict[str, str]:
        if not job.config.looks_around:
            return super().inputs(job)
        clusters = fingerprint(replace(job.preset.clusters, surrogate=""))
        return super().inputs(job) | {"surrogate": surrogate(job).identity, "clusters": clusters}

    @classmethod
    def of(cls, job: Job, model: nn.Module) -> Stage:
        return cls(job.data, job.config, neighbours=cls._near(job))

    @classmethod
    def _near(cls, job: Job) -> dict[str, Neighbours]:
        return job.neighbours if job.config.looks_around else {}

    @staticmethod
    def _keys(rows: TokenPairs) -> Sequence | np.ndarray | int:
        """The keys of a data set, as `BatchPlan` takes them."""
        return rows.keys

    def backward(self, module: nn.Module, batch: Any, step: int, processes: Processes) -> dict[str, Any]:
        loss = self._cached(module, batch, step, processes)
        tokens = sum(map(len, batch.sequences))
        return {"loss": loss, "tokens": tokens, "dataset": batch.dataset, "pairs": batch.count}

    def _cached(self, module: nn.Module, batch: Any, step: int, processes: Processes, **more) -> Tensor:
        """Adds the gradient of a batch's loss and returns that loss."""
        config = self._config

        def loss_of_rows(rows_RD: Tensor) -> Tensor:
            return batch.weight * self.loss(rows_RD, batch, step, processes)

        return cached_backward(
            module, batch.sequences, loss_of_rows,
            token_budget=config.token_budget, keep_tokens=config.keep_tokens,
            pooling=getattr(config, "pooling", "mean"), processes=processes, **more,
        )  # fmt: skip

    def _negatives(self, name: str, rows: np.ndarray, *which: np.ndarray) -> Tensor | None:
        """What the surrogate lets be negatives in a batch of these rows, see `Neighbours.negatives`; None
        without a `filter_margin`."""
        if self._config.filter_margin < 0:
            return None
        return torch.from_numpy(self._neighbours[name].negatives(rows, self._config.filter_margin, *which))


class Pair(Contrastive, name="pair"):
    """Contrastive pair training, with INT8 from the first step unless `config.quantize` is false
    (pplx-embed, section 2.3)."""

    @classmethod
    def ends(cls, config: TrainConfig) -> bool:
        return config.pooling == "last"

    @classmethod
    def read(cls, job: Job) -> dict[str, TokenPairs]:
        return pairs(job)

    @classmethod
    def allowed(cls, job: Job) -> Allowed:
        """Groups that are named are trained on from the first step to the last."""
        config = job.config
        return None if job.get("groups") else curriculum(groups(job), config.curriculum, config.steps)

    @classmethod
    def of(cls, job: Job, model: nn.Module) -> Stage:
        return cls(job.data, job.config, cls.allowed(job), cls._near(job))

    def batch(self, step: int) -> Batch:
        name, rows = self._plan(step)
        pairs = self._data[name]
        texts = [pairs.queries[i] for i in rows] + [pairs.documents[i] for i in rows]
        return Batch(name, list(map(TokenSequence, texts)), len(rows), self._negatives(name, rows))

    def loss(self, rows_RD: Tensor, batch: Batch, step: int, processes: Processes) -> Tensor:
        config, n = self._config, batch.count
        rows_RD = int8(rows_RD) if config.quantize else rows_RD
        return losses.pair_loss(
            rows_RD[:n], rows_RD[n:], temperature=config.temperature, margin=config.margin,
            negatives_NN=batch.negatives, queries=processes.slice(n),
        )  # fmt: skip


@dataclass(frozen=True)
class DocumentBatch(Batch):
    """Queries, then the documents that they ask about."""

    layout: ContextualBatch


class Contextual(Contrastive, name="contextual"):
    """Late chunking with INT8 and Matryoshka, and the dual objective of pplx-embed (section 2.4) or InSeNT's
    (`config.objective`).

    InSeNT weighs its terms with λ = `config.alpha` and has no document-level term. Its authors train without
    quantiser and without Matryoshka; both stay here, so that the objective is all that differs.
    """

    def __init__(
        self, data: Mapping[str, Any], config: ContextualConfig, separator_id: int, neighbours: Near = None
    ):
        super().__init__(data, config, neighbours=neighbours)
        self._separator_id = separator_id

    @classmethod
    def read(cls, job: Job) -> dict[str, TokenDocuments]:
        corpus, config, data = job.corpus, job.config, {}
        for name in corpus.datasets("documents", "train"):
            data[name] = tokenized.token_documents(
                corpus.documents("train", name), job.stored,
                name=name, identity=corpus.identity("documents", name),
                query_length=config.query_length, chunk_length=config.chunk_length, chunks=config.chunks,
            )  # fmt: skip
        for name in corpus.datasets("pairs", "train") if config.single else ():
            data[name] = tokenized.single_chunks(
                corpus.pairs("train", name), job.stored,
                name=name, identity=corpus.identity("pairs", name), count=config.single, seed=config.seed,
                query_length=config.query_length, document_length=config.chunk_length,
            )  # fmt: skip
        return data

    @classmethod
    def of(cls, job: Job, model: nn.Module) -> Contextual:
        separator_id = job.tokenizer.convert_tokens_to_ids(end_token(job.tokenizer))
        return cls(job.data, job.config, separator_id, cls._near(job))

    @staticmethod
    def _keys(rows: TokenDocuments) -> int:
        return len(rows)

    def batch(self, step: int) -> DocumentBatch:
        name, rows = self._plan(step)
        layout = contextual_batch(
            [self._data[name][i] for i in rows], separator_id=self._separator_id,
            queries_per_document=self._config.queries_per_document,
            rng=np.random.default_rng([self._config.seed, 3, step]),
        )  # fmt: skip
        negatives = self._negatives(name, rows, layout.document_N.numpy(), layout.query_N.numpy())
        return DocumentBatch(name, layout.sequences, len(layout.document_N), negatives, layout)

    def loss(self, rows_RD: Tensor, batch: DocumentBatch, step: int, processes: Processes) -> Tensor:
        config, layout = self._config, batch.layout
        q_ND, chunks_MCD, documents_MD, mask_MC = split_rows(rows_RD, layout)
        shared = {
            "document_N": layout.document_N.to(rows_RD.device), "gold_N": layout.gold_N.to(rows_RD.device),
            "temperature": config.temperature, "chunk_mask_MC": mask_MC, "negatives_NM": batch.negatives,
            "queries": processes.slice(batch.count),
        }  # fmt: skip
        if config.objective == "insent":
            loss, vectors = partial(losses.insent_loss, lam=config.alpha), (q_ND, chunks_MCD)
        else:
            weights = {"alpha": config.alpha, "beta": self.beta(step)}
            loss = partial(losses.contextual_loss, margin=config.margin, **weights)
            vectors = (q_ND, chunks_MCD, documents_MD)
        return losses.matryoshka(partial(loss, **shared), [int8(x) for x in vectors], config.dimensions)

    def beta(self, step: int) -> float:
        """The weight of the document-level term at a step."""
        config = self._config
        return cosine_ramp(config.beta_start, config.beta_end, step, config.steps)

    def backward(self, module: nn.Module, batch: Any, step: int, processes: Processes) -> dict[str, Any]:
        row = super().backward(module, batch, step, processes)
        return row if self._config.objective == "insent" else row | {"beta": self.beta(step)}


class Triplet(Contrastive, name="triplet"):
    """Contrastive training with mined hard negatives (pplx-embed, section 2.5)."""

    @classmethod
    def read(cls, job: Job) -> dict[str, TokenPairs]:
        return triplets(job)

    def batch(self, step: int) -> list[Batch]:
        """The parts of a batch, each with a loss of its own."""
        name, rows = self._plan(step)
        pairs, parts = self._data[name], []
        for part in np.array_split(rows, min(self._config.accumulation, len(rows))):
            texts = [pairs.queries[i] for i in part] + [pairs.documents[i] for i in part]
            texts += [negative for i in part for negative in pairs.negatives[i]]
            sequences, weight = list(map(TokenSequence, texts)), len(part) / len(rows)
            parts.append(Batch(name, sequences, len(part), self._negatives(name, part), weight=weight))
        return parts

    def loss(self, rows_RD: Tensor, batch: Batch, step: int, processes: Processes) -> Tensor:
        n, codes_RD = batch.count, int8(rows_RD)
        hard_NKD = codes_RD[2 * n :].unflatten(0, (n, self._config.negatives))
        return losses.triplet_loss(
            codes_RD[:n], codes_RD[n : 2 * n], hard_NKD, temperature=self._config.temperature,
            negatives_NN=batch.negatives, queries=processes.slice(n),
        )  # fmt: skip

    def backward(self, module: nn.Module, parts: list[Batch], step: int, processes: Processes) -> dict:
        total = torch.zeros((), device=processes.device)
        for part in parts:
            total += self._cached(module, part, step, processes, last=part is parts[-1])
        tokens = sum(len(sequence) for part in parts for sequence in part.sequences)
        pairs = sum(part.count for part in parts)
        return {"loss": total, "tokens": tokens, "dataset": parts[0].dataset, "pairs": pairs}


def cosine_ramp(start: float, end: float, step: int, steps: int) -> float:
    """Half a cosine from `start` at step 0 to `end` at the last step: β of pplx-embed, section 2.4."""
    share = step / max(1, steps - 1)
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * share))
