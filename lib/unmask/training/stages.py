"""The training stages: each is one class, which owns what it reads, the model it trains, its batches as pure
functions of (seed, step), and its loss.

To add one, write a class here, in `neighbours` or anywhere else, and give its values a section in
`config.Preset` and the presets.

Shape suffixes: N queries · R rows (texts) · D dimensions · B sequences · L tokens.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from unmask import losses
from unmask.config import GROUPS, ConfigError, DiffusionConfig, stage_config
from unmask.data import tokenize
from unmask.data.batches import BatchPlan, curriculum
from unmask.data.corpus import Corpus
from unmask.data.mining import Encoder, Neighbours, Surrogate, cached_array, neighbours, sample
from unmask.data.tokenize import Blocks, Table, TokenDocuments, TokenPairs, open_blocks
from unmask.data.tokens import PlainTokenizer, Truncation, end_token, join_chunks, special_tokens_around
from unmask.extras import extra
from unmask.losses.tensors import shipped
from unmask.models import backbone
from unmask.models.embedder import Embedder
from unmask.models.encoding import TokenSequence, owners
from unmask.models.quantize import int8
from unmask.store import artifacts_root, fingerprint, sha256, visible
from unmask.training.cache import cached_backward
from unmask.training.distributed import Processes
from unmask.training.job import TOLD, Job

WIDTH = 100  # characters of a text that `Stage.show` prints


class Stage:
    """One training objective, from its data to its gradient.

        stage = Pair(preset, corpus, tokenizer, lr=1e-3)
        stage.show(0)  # its first batch, as text
        model = stage.model(start)
        checkpoint = train(stage, model, folder)

    A subclass has `data`, what it reads, and
        batch(step): the global batch of a step, the same on every process, from seed and step alone;
        backward(module, batch, processes): adds this process's share of the batch's gradient to the
            parameters and returns metrics of the global batch, "loss" (a tensor) and "tokens" among them;
        shown(step): the lines of `show`.

    Args:
        preset: has the stage's section, `backbone`, `clusters` and `parallel`; or the job that it is to do.
        corpus: what it reads.
        tokenizer: of the model that it trains.
        section: of the preset; default: the stage's own.
        more: values of the section to replace, and what `Job` lists beside them ("only", "mined", …).
    Raises: ConfigError for an unknown key or a value that cannot be.
    """

    section = ""  # of the preset
    head = False  # whether the model keeps its output matrix, and so ends in its loss
    bidirectional = False  # whether a causal start is made to read both sides
    same_length = False  # whether all that it reads has one length
    ends = False  # whether each text gets an end token, so that the last token to pool is always the same
    save = staticmethod(backbone.save)  # how its checkpoint is written

    def __init__(
        self,
        preset: Any,
        corpus: Corpus,
        tokenizer: PreTrainedTokenizerBase,
        *,
        section: str = "",
        **more: Any,
    ):
        if isinstance(preset, Job):
            self.job = preset
        else:
            kind, section = type(self), section or self.section
            told = {key: more.pop(key) for key in more.keys() & TOLD}
            told |= {key: getattr(preset, key) for key in ("backbone", "clusters", "parallel")}
            told |= {"section": section, "config": stage_config(preset, section, more)}
            self.job = Job(stage=f"{kind.__module__}:{kind.__qualname__}", **told)
        self.config, self.corpus, self.tokenizer = self.job.config, corpus, tokenizer

    def begun(self, model: nn.Module, folder: Path) -> Job:
        """The whole job, as it is known when it begins."""
        return replace(
            self.job,
            corpus=str(self.corpus.path),
            families=self.corpus.families,
            tokenizer=self.tokenizer.name_or_path,
            start=getattr(model, "start", ""),
            folder=str(folder),
            fingerprint=folder.name,
        )

    def show(self, step: int = 0, rows: int = 3) -> None:
        """Prints the first rows of a step's batch as text."""
        for number, lines in zip(range(rows), self.shown(step)):
            print(*([""] if number else []), *lines, sep="\n")

    def text(self, tokens_L: np.ndarray) -> str:
        """Tokens as text, in one line."""
        text = " ".join(self.tokenizer.decode(tokens_L).split())
        return text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…"

    @cached_property
    def stored(self) -> PlainTokenizer:
        return PlainTokenizer(self.tokenizer)

    def prepare(self) -> list[dict[str, Any]]:
        """Makes what a training reads, and returns a row per data set with what was cut and left out."""
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

    def drawn(self, step: int) -> tuple[Any, dict[str, float]]:
        """The batch of a step, and what is logged of it beside the metrics."""
        return self.batch(step), {}

    def inputs(self) -> dict[str, str]:
        """The identities of files that the result depends on, beside the corpus."""
        return {"mined": content(Path(self.job.mined))} if self.job.mined else {}

    def model(self, start: str | Path = "") -> nn.Module:
        """The model to train, as it is before the first step: a checkpoint's, or a new one in the shape of
        the preset's `backbone`."""
        if start:
            model = backbone.load(start, head=self.head)
        else:
            model = backbone.build(self.job.backbone, self.tokenizer, seed=self.config.seed)
        backbone.check_vocabulary(model.config, self.tokenizer)
        self._check_lengths(backbone.positions(model))
        if self.bidirectional or self.job.bidirectional:
            backbone.make_bidirectional(model, self.tokenizer, self.job.backbone.mask_token)
        model.start = str(start)
        return model

    def _check_lengths(self, positions: int) -> None:
        """Refuses lengths beyond the model's positions, which would fail in the middle of a training."""
        for key in ("length", "query_length", "document_length", "chunk_length"):
            if 0 < positions < (length := vars(self.config).get(key, 0)):
                what = f"{self.job.section}.{key} is {length}, the model has {positions} positions"
                raise ConfigError(f"{what}: set it to so many at most")

    def restore(self, model: nn.Module, path: Path) -> None:
        """Gives the model the weights of a checkpoint that the stage has trained."""
        model.load_state_dict(backbone.load(path, head=self.head).state_dict())

    def module(self, model: nn.Module) -> nn.Module:
        """What is run forward: all parameters must be used inside of it, where FSDP2 gathers them. Several
        modules that are run each on its own are an nn.ModuleList."""
        return LanguageModel(model) if self.head else model

    def facts(self, start: str) -> dict[str, Any]:
        """How the checkpoint is to be used, and which ready backbone it descends from."""
        facts = replace(self.job.settings, about={}).facts if self.job.settings else {}
        facts |= {"stage": self.job.section, "pooling": getattr(self.config, "pooling", "mean")}
        if source := backbone.facts(start).get("source"):
            facts["source"] = source
        return facts | ({"special_tokens": True} if self.ends else {})

    @cached_property
    def around(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids of the special tokens before and after each text or document, where the start has some."""
        given = self.job.settings and self.job.settings.special_tokens and not self.ends
        return special_tokens_around(self.tokenizer) if given else (np.array([], np.int32),) * 2

    def read(self, tokens_L: np.ndarray) -> TokenSequence:
        """A text as the model reads it."""
        before, after = self.around
        return TokenSequence(
            np.concatenate([before, tokens_L, after]) if len(before) + len(after) else tokens_L
        )

    def reading(self, group: str) -> tuple[Truncation, Truncation]:
        """How a query and a document of this group are read: tokens at most, and what is put around them."""
        suffix, taken = end_token(self.tokenizer) if self.ends else "", sum(map(len, self.around))
        lengths = self.config.query_length, self.config.document_length
        query, document = (Truncation(max(1, length - taken), suffix=suffix) for length in lengths)
        return query, document

    def groups(self) -> dict[str, str]:
        """Data sets of pairs to train on → their groups.

        Raises: ValueError if there is none of those that are wanted.
        """
        names, wanted = self.corpus.datasets("pairs", "train"), {*(self.job.only or GROUPS)}
        found = {name: self.corpus.pairs("train", name)[0]["group"] for name in names}
        if not (chosen := {name: group for name, group in found.items() if wanted & {name, group}}):
            raise ValueError(f"no training pairs are of {sorted(wanted)}: the corpus has {found}")
        return chosen

    def pairs(self) -> dict[str, TokenPairs]:
        """The corpus's pairs, as the stage reads them; `config.max_pairs` of them, if that is set."""
        data, most, seed = {}, getattr(self.config, "max_pairs", 0), self.config.seed
        tables = {name: self.corpus.pairs("train", name) for name in self.groups()}
        draw = fingerprint(most, seed, [*map(len, tables.values())])  # one over all tables
        for name, rows in (sample(tables, most, seed) if most else tables).items():
            part = f"/{draw}" if len(rows) < len(tables[name]) else ""
            data[name] = self._tokenised(name, rows, self.corpus.identity("pairs", name) + part)
        return data

    def triplets(self) -> dict[str, TokenPairs]:
        """The corpus's triplets and mined ones, as the stage reads them: `config.negatives` for each query,
        or as many as it has."""
        corpus, sources, data = self.corpus, {}, {}
        for name in corpus.datasets("triplets", "train"):
            sources[name] = corpus.triplets("train", name), corpus.identity("triplets", name)
        if path := self.job.mined:
            rows = Dataset.from_parquet(path, cache_dir=str(artifacts_root() / "data" / "datasets"))
            names, file = np.asarray(rows["dataset"][:]), content(Path(path))
            for name in np.unique(names):
                sources[str(name)] = rows.select(np.flatnonzero(names == name)), file
        for name, (rows, file) in sources.items():
            data[name] = self._tokenised(name, rows, file, negatives=self.config.negatives)
        return data

    @cached_property
    def held_out(self) -> np.ndarray:
        return cached_array("held-out", [self.corpus.hash], self.corpus.held_out)

    def _tokenised(self, name: str, rows: Dataset, file: str, negatives: int = 0) -> TokenPairs:
        table = Table(rows, name, file, self.stored, self.held_out)
        return tokenize.token_pairs(table, *self.reading(rows[0]["group"]), negatives)


def content(path: Path) -> str:
    """Identity by content: on another machine the same training gives other weights, and other scores."""
    if not path.exists():  # a name on the Hub
        return str(path)
    files = sorted(visible(path)) if path.is_dir() else [path]
    return fingerprint([sha256(file) for file in files])


class LanguageModel(nn.Module):
    """A language model that ends in its loss: logits exist inside of the loss, at the paid positions only."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, tokens_BL: Tensor, mask: Tensor | None, loss: Callable[..., Tensor]) -> Tensor:
        hidden_BLD = self.model.base_model(tokens_BL, attention_mask=mask, use_cache=False)[0]
        return loss(hidden_BLD, self.model.get_output_embeddings().weight)


class Pretraining(Stage):
    """What next-token and diffusion pretraining share: packed blocks, a few of them at a time."""

    head = same_length = True

    @cached_property
    def data(self) -> Blocks | np.ndarray:
        return open_blocks(self.corpus.text_sources(), self.stored, self.config)

    def prepare(self) -> list[dict[str, Any]]:
        return self.data.report

    def keys(self) -> dict[str, np.ndarray]:
        return {"text": np.empty((len(self.data), 0))}  # no two blocks need to be told apart

    def blocks(self, step: int) -> np.ndarray:
        """The tokens (B, L) of a step."""
        return self.data[self.plan(step)[1]].astype(np.int64)

    def micro_batches(self, order_B: Tensor, processes: Processes) -> Sequence[Tensor]:
        """The rows of `order_B` in groups under the token budget."""
        rows = max(1, self.config.memory(processes.device.type)["token_budget"] // self.config.length)
        passes = math.ceil(len(order_B) / (rows * processes.count))  # of every process, equally many
        return order_B.tensor_split(passes * processes.count)


def accumulate(
    module: nn.Module, groups: Sequence[Any], forward: Callable[[Any], Tensor], processes: Processes
) -> Tensor:
    """Sums the gradients of a loss that is a sum over micro-batches, and returns the loss.

    Args:
        groups: rows of each micro-batch; equally many groups for each process, empty ones last.
        forward: the part of the loss that some rows pay.
    """
    own = processes.share(groups)
    total = torch.zeros((), device=processes.device)
    for number, group in enumerate(own, 1):
        processes.reducing(module, last=number == len(own))
        with processes.autocast():
            # A process without rows left repeats some for nothing.
            loss = forward(group) if len(group) else 0 * forward(groups[0][:1])
        loss.backward()
        total += loss.detach()
    return processes.sum(total)


class NextToken(Pretraining):
    """Autoregressive pretraining on packed blocks: the stand-in for a ready base model."""

    section = "ar"

    def shown(self, step: int) -> Iterator[list[str]]:
        return ([self.text(tokens_L)] for tokens_L in self.blocks(step))

    def batch(self, step: int) -> Tensor:
        return torch.from_numpy(self.blocks(step))

    def backward(self, module: nn.Module, tokens_BL: Tensor, processes: Processes) -> dict[str, Any]:
        def forward(rows: Tensor) -> Tensor:
            tokens = tokens_BL[rows]
            loss = partial(losses.next_token_loss, tokens_BL=tokens, normalizer=tokens_BL[:, 1:].numel())
            return module(processes.ship(tokens), None, loss)

        groups = self.micro_batches(torch.arange(len(tokens_BL)), processes)
        loss = accumulate(module, groups, forward, processes)
        return {"loss": loss, "tokens": tokens_BL.numel()}


class Noised(NamedTuple):
    """A batch of the forward process: clean tokens, what was masked, what its nats are divided by (t, if t is
    uniform); `valid_BL` False beyond a cut; `seen_LL` while the causal mask fades: which token sees which."""

    tokens_BL: Tensor
    masked_BL: Tensor
    divisor_B: Tensor
    valid_BL: Tensor
    seen_LL: Tensor | None = None


class Diffusion(Pretraining):
    """Masked-diffusion continued pretraining (pplx-embed, section 2.1)."""

    section = "diffusion"
    bidirectional = True

    def shown(self, step: int) -> Iterator[list[str]]:
        """A block with ▒ for each masked token, and the share that is masked."""
        batch = self.batch(step)
        for tokens_L, masked_L, valid_L in zip(batch.tokens_BL, batch.masked_BL, batch.valid_BL):
            tokens_L, masked_L = tokens_L[valid_L], masked_L[valid_L]
            borders = (masked_L.diff().nonzero().flatten() + 1).tolist()
            runs = zip(tokens_L.tensor_split(borders), masked_L.tensor_split(borders))
            told = ["▒" * len(run) if masked[0] else self.tokenizer.decode(run) for run, masked in runs]
            text = " ".join("".join(told).split())
            yield [f"{masked_L.double().mean():4.0%} masked  {text[: 3 * WIDTH]}"]

    @cached_property
    def mask_token_id(self) -> int:
        return self.tokenizer.convert_tokens_to_ids(self.job.backbone.mask_token)

    def batch(self, step: int) -> Noised:
        tokens_BL, rng = self.blocks(step), np.random.default_rng([self.config.seed, 2, step])
        noised, fading = noise(tokens_BL, self.config, rng), self.config.anneal * self.config.steps
        if step >= fading:
            return noised
        seen_LL = fading_mask(tokens_BL.shape[1], step / fading, rng)
        return noised._replace(seen_LL=torch.from_numpy(seen_LL))

    def backward(self, module: nn.Module, batch: Noised, processes: Processes) -> dict[str, Any]:
        predictable = int((batch.valid_BL.sum(1) - 1).sum())

        def forward(rows: Tensor) -> Tensor:
            tokens, masked, divisor, valid = (x[rows] for x in batch[:4])
            valid = None if valid.all() else valid
            drawn = {"tokens_BL": tokens, "masked_BL": masked, "t_B": divisor, "valid_BL": valid}
            loss = partial(losses.diffusion_loss, **drawn, normalizer=predictable)
            noised = processes.ship(tokens.masked_fill(masked, self.mask_token_id))
            if batch.seen_LL is not None:
                mask = batch.seen_LL & batch.valid_BL[rows, None, None]
                return module(noised, processes.ship(mask), loss)
            if valid is None:
                return module(noised, None, loss)
            with torch.compiler.set_stance("force_eager"):  # few texts are cut: no graph of their own
                return module(noised, processes.ship(valid), loss)

        # Cut sequences go last, so that all other micro-batches need no attention mask.
        order = batch.valid_BL.all(1).logical_not().argsort(stable=True)
        loss = accumulate(module, self.micro_batches(order, processes), forward, processes)
        return {"loss": loss, "tokens": int(batch.valid_BL.sum())}


def noise(tokens_BL: np.ndarray, config: DiffusionConfig, rng: np.random.Generator) -> Noised:
    """The forward process: t ~ U(t_min, t_max) per sequence, every token masked with probability t, a share
    `cut_fraction` of the sequences cut.

    The interval is divided into as many equal parts as there are sequences, and each gets its t from one of
    them, in a random order: for a sequence by itself any t is as likely as any other, while the mean over the
    batch hardly varies (the low-discrepancy sampler of Variational Diffusion Models, 2107.00630).

    With t_min = t_max the weight 1/t is a constant: masked next-token prediction with a fixed share of masks,
    as LLM2Vec has it. With `log_uniform` t is drawn with a density in proportion to 1/t instead, so the
    weight 1/t must not be paid again: importance sampling of the same expected loss, in which every masked
    token has the same weight, one over the mean of t, and no single token can fill a step."""
    b, length = tokens_BL.shape
    share_B = (rng.permutation(b) + rng.random(b)) / b
    if config.log_uniform:
        t_B = config.t_min * (config.t_max / config.t_min) ** share_B
        divisor_B = np.full(b, config.masked_share)
    else:
        t_B = divisor_B = config.t_min + (config.t_max - config.t_min) * share_B
    masked_BL = rng.random((b, length)) < t_B[:, None]
    cut_B = np.where(rng.random(b) < config.cut_fraction, rng.integers(2, length + 1, b), length)
    valid_BL = np.arange(length) < cut_B[:, None]
    drawn = tokens_BL, masked_BL & valid_BL, divisor_B.astype(np.float32), valid_BL
    return Noised(*map(torch.from_numpy, drawn))


def fading_mask(length: int, share: float, rng: np.random.Generator) -> np.ndarray:
    """A causal mask of which a share has faded: (L, L), True where a row's token sees a column's. Each later
    token is seen with probability `share` (DiffuLLaMA, 2410.17891; pplx-embed, section 2.1, tried it)."""
    return np.tri(length, dtype=bool) | (rng.random((length, length)) < share)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """N queries of one data set, and all texts that their loss looks at."""

    dataset: str
    sequences: list[TokenSequence]  # the queries come first
    count: int  # N
    key_R: np.ndarray | None = None  # of each text, by `text_id`
    hard_N: np.ndarray | None = None  # the number of each query's hard negatives
    negatives: Tensor | None = None  # (N, N), False: the document is no negative of the query
    weight: float = 1.0  # of its loss in the step's
    context: Sequence[TokenSequence] = ()  # CDE's: documents that all pairs see
    kept: np.ndarray | None = None  # which of these are seen; the null vector stands for the others


@dataclass(frozen=True, kw_only=True)
class ContextualBatch(Batch):
    """N queries about M distinct documents, every one of which is encoded once."""

    document_N: Tensor
    gold_N: Tensor
    chunk_tokens_MC: Tensor  # tokens of each chunk; 0 where a document has fewer chunks
    beta: float  # weight of the document-level term

    def split(self, rows_RD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Its encoded rows as (q_ND, chunks_MCD, documents_MD).

        A document's own vector is the mean over all its chunks' tokens, which is the token-weighted mean of
        its chunk means.
        """
        chunks_MCD = self.placed(rows_RD[self.count :])
        counts_MC = shipped(self.chunk_tokens_MC, rows_RD.device)
        weights_MC = counts_MC / counts_MC.sum(1, keepdim=True)
        documents_MD = (chunks_MCD * weights_MC[..., None]).sum(1)
        return rows_RD[: self.count], chunks_MCD, documents_MD

    @property
    def mask_MC(self) -> Tensor:
        """Which chunks there are, on the CPU."""
        return self.chunk_tokens_MC > 0

    def placed(self, found: Tensor) -> Tensor:
        """What was found of each chunk (X, …) by document and chunk (M, C, …); zeros where there is none."""
        return placed(found, self.mask_MC)

    def asked(self) -> dict[str, Tensor]:
        """What the losses are told beside vectors: which chunk of which document answers which query."""
        index = {"document_N": self.document_N, "gold_N": self.gold_N, "chunk_mask_MC": self.mask_MC}
        return index | {"query_N": numbered(self.sequences[: self.count])}


class Contrastive(Stage):
    """What the contrastive stages share: single-dataset batches, and a model that is run as it is. A batch is
    a list of parts, each with one loss: `loss(rows_RD, part, temperature=…, queries=…)` is the sum of some
    queries' terms in it, given its texts' vectors. Only `Triplet` has several.
    """

    def shown(self, step: int) -> Iterator[list[str]]:
        """Each query with its document, and with its hard negatives, if any."""
        for part in self.batch(step):
            texts = iter([self.text(text.tokens_L[owners(text) >= 0]) for text in part.sequences])
            pairs = [[*islice(texts, part.count)] for _ in range(2)]
            for query, document, hard in zip(*pairs, part.hard_N, strict=True):
                own = [f"query     {query}", f"document  {document}"]
                yield own + [f"negative  {negative}" for negative in islice(texts, hard)]

    def texts(self, name: str, rows: np.ndarray) -> Batch:
        """The pairs in some rows: queries, then documents, then the hard negatives of each query, if any."""
        pairs = self.data[name]
        texts = [pairs.queries[i] for i in rows] + [pairs.documents[i] for i in rows]
        keys, hard_N = [pairs.keys[rows, 1], pairs.keys[rows, 2]], np.zeros(len(rows), np.int64)
        if pairs.negatives:
            texts += [negative for i in rows for negative in pairs.negatives[i]]
            keys += [pairs.negative_keys[i] for i in rows]
            hard_N = np.array([len(pairs.negatives[i]) for i in rows])
        read, key_R = list(map(self.read, texts)), np.concatenate(keys)
        return Batch(dataset=name, sequences=read, count=len(rows), key_R=key_R, hard_N=hard_N)

    def drawn(self, step: int) -> tuple[list[Batch], dict[str, float]]:
        """With "guess", the loss of a model to which all texts are alike."""
        parts, guess = self.batch(step), 0.0
        for part in parts:
            alike_R1 = torch.ones(sum(text.rows for text in part.sequences), 1)
            few = min(part.count, 1024)  # queries of a large batch, which pay as the others do
            guess += float(self.part_of_loss(part, slice(few), alike_R1)) * part.count / few
        return parts, {"guess": guess}

    def served(self, rows_RD: Tensor) -> Tensor:
        """Pooled vectors as `encode` gives them: of unit length, where the embedder's are, then as codes."""
        if self.job.settings and self.job.settings.normalize:
            rows_RD = normalize(rows_RD, dim=-1)
        return int8(rows_RD) if getattr(self.config, "quantize", True) else rows_RD

    def part_of_loss(self, part: Batch, queries: slice, rows_RD: Tensor) -> Tensor:
        """What some of the queries pay of a part's loss."""
        return part.weight * self.loss(rows_RD, part, temperature=self.config.temperature, queries=queries)

    def backward(self, module: nn.Module, parts: list[Batch], processes: Processes) -> dict[str, Any]:
        config = self.config
        options = config.memory(processes.device.type)
        options |= {"pooling": getattr(config, "pooling", "mean"), "processes": processes}
        total = torch.zeros((), device=processes.device)
        for part in parts:
            loss = partial(self.part_of_loss, part, processes.slice(part.count))
            total += cached_backward(module, part.sequences, loss, last=part is parts[-1], **options)
        tokens = sum(len(sequence) for part in parts for sequence in part.sequences)
        pairs = sum(part.count for part in parts)
        return {"loss": processes.sum(total), "tokens": tokens, "pairs": pairs, "dataset": parts[0].dataset}


class Pair(Contrastive):
    """Contrastive pair training, with INT8 from the first step unless `config.quantize` is false
    (pplx-embed, section 2.3)."""

    section = "pair"

    @property
    def ends(self) -> bool:
        """An embedder that pools its last token has that of its own tokenizer, or none."""
        settings = self.job.settings
        return self.config.pooling == "last" and (settings is None or settings.plain)

    data = cached_property(Stage.pairs)

    def allowed(self) -> Callable[[int], set[str]] | None:
        """Data sets that may be drawn at a step; None: all, always, as what is named."""
        if self.job.only:
            return None
        return curriculum(self.groups(), self.config.curriculum, self.config.steps)

    @cached_property
    def surrogate(self) -> Surrogate:
        """The embedder that says which texts are alike: one of ours, or any of sentence-transformers'.

        Raises: ValueError where none is named.
        """
        name = self.job.surrogate or self.job.clusters.surrogate
        if not name:
            raise ValueError("cluster_size and filter_margin need an embedder: set clusters.surrogate")
        path = backbone.require_checkpoint(name)

        def load() -> Encoder:
            if backbone.facts(path) or backbone.is_released(path):
                return Embedder.from_pretrained(path)
            # A second to import, for few trainings.
            with extra("study"):
                from sentence_transformers import SentenceTransformer  # noqa: PLC0415

            return SentenceTransformer(path)

        return Surrogate(content(Path(path)), load, self.job.clusters)

    @cached_property
    def neighbours(self) -> dict[str, Neighbours]:
        """The look-alikes in each data set, found by the process that comes first."""
        stored, surrogate, config = self.stored, self.surrogate, self.config
        return {name: neighbours(name, rows, stored, surrogate, config) for name, rows in self.data.items()}

    def prepare(self) -> list[dict[str, Any]]:
        if self.config.looks_around:
            _ = self.neighbours  # found now, where the progress shows
        return super().prepare()

    def inputs(self) -> dict[str, str]:
        if not self.config.looks_around:
            return super().inputs()
        clusters = fingerprint(replace(self.job.clusters, surrogate=""))
        return super().inputs() | {"surrogate": self.surrogate.hash, "clusters": clusters}

    def shares(self) -> dict[str, float]:
        """Each data set's share of the steps: by size, of its group's; none where the preset has none."""
        groups, keys, share = self.groups(), self.keys(), dict(zip(GROUPS, self.config.shares))
        rows = {group: sum(len(keys[x]) for x in groups if groups[x] == group) for group in share}
        return {x: share[group] * len(keys[x]) / rows[group] for x, group in groups.items() if share}

    def drawing(self) -> dict[str, Any]:
        near, allowed = self.neighbours.items() if self.config.cluster_size else (), self.allowed()
        drawn = {"allowed": allowed, "orders": {name: rows.order for name, rows in near}}
        return drawn | {"shares": self.shares() if allowed else {}}

    def batch(self, step: int) -> list[Batch]:
        name, rows = self.plan(step)
        batch, margin = self.texts(name, rows), self.config.filter_margin
        if margin < 0:
            return [batch]
        return [replace(batch, negatives=torch.from_numpy(self.neighbours[name].negative_mask(rows, margin)))]

    def loss(self, rows_RD: Tensor, batch: Batch, **shared: Any) -> Tensor:
        rows_RD = self.served(rows_RD)
        shared |= {"margin": self.config.margin, "negatives_NN": batch.negatives}
        q_ND, d_ND = rows_RD[: batch.count], rows_RD[batch.count :]
        return losses.pair_loss(q_ND, d_ND, query_query=self.config.query_query, **shared)


class Contextual(Contrastive):
    """Late chunking with INT8 and Matryoshka, and the dual objective of pplx-embed (section 2.4) or InSeNT's
    (`config.objective`).

    InSeNT weighs its terms with λ = `config.alpha` and has no document-level term. Its authors train without
    quantiser and without Matryoshka; both stay here, so that the objective is all that differs.
    """

    section = "contextual"

    def shown(self, step: int) -> Iterator[list[str]]:
        """Each document with a line for each chunk, and with the queries at the chunks that answer them."""
        [batch] = self.batch(step)
        name, rows = self.plan(step)
        for index, row in enumerate(rows):
            document, lines = self.data[name][row], []
            asked = (batch.document_N == index).nonzero().flatten().tolist()
            for number, chunk in enumerate(document.chunks):
                lines.append(f"{'document' if not number else '':9} │ {self.text(chunk)}")
                own = [i for i in asked if batch.gold_N[i] == number]
                lines += [f"{'':9} └ query: {self.text(batch.sequences[i].tokens_L)}" for i in own]
            yield lines

    @cached_property
    def data(self) -> dict[str, TokenDocuments]:
        corpus, data, taken = self.corpus, {}, sum(map(len, self.around))
        config = replace(self.config, query_length=max(1, self.config.query_length - taken))
        for name in corpus.datasets("documents", "train"):
            rows, file = corpus.documents("train", name), corpus.identity("documents", name)
            table = Table(rows, name, file, self.stored, self.held_out)
            data[name] = tokenize.token_documents(table, config)
        for name in corpus.datasets("pairs", "train") if config.single else ():
            rows, file = corpus.pairs("train", name), corpus.identity("pairs", name)
            table = Table(rows, name, file, self.stored, self.held_out)
            data[name] = tokenize.pairs_as_documents(table, config)
        return data

    def drawing(self) -> dict[str, Any]:
        """Data sets are drawn by their queries, as the paper's by their pairs, or by their documents."""
        if self.config.draw == "documents":
            return {}
        return {"sizes": {name: rows.query_count for name, rows in self.data.items()}}

    def batch(self, step: int) -> list[ContextualBatch]:
        """Up to `queries_per_document` queries of each document, and the documents, each to be read whole, or
        each of its chunks alone."""
        config, (name, rows) = self.config, self.plan(step)
        documents = [self.data[name][i] for i in rows]
        rng = np.random.default_rng([config.seed, 3, step])
        drawn = [
            (index, int(number))
            for index, document in enumerate(documents)
            for number in sorted(rng.permutation(len(document.queries))[: config.queries_per_document])
        ]
        texts = [self.read(documents[index].queries[number]) for index, number in drawn]
        lengths = [torch.tensor([float(len(chunk)) for chunk in document.chunks]) for document in documents]
        if self.job.late_chunking:
            texts += [join_chunks(document.chunks, self.stored.end, self.around) for document in documents]
            for tokens_C in lengths:  # the first chunk and the last own what stands around the document
                tokens_C[0] += len(self.around[0])
                tokens_C[-1] += len(self.around[1])
        else:
            texts += [self.read(chunk) for document in documents for chunk in document.chunks]
        batch = ContextualBatch(
            dataset=name,
            sequences=texts,
            count=len(drawn),
            document_N=torch.tensor([index for index, _ in drawn]),
            gold_N=torch.tensor([documents[index].golds[number] for index, number in drawn]),
            chunk_tokens_MC=nn.utils.rnn.pad_sequence(lengths, batch_first=True),
            beta=cosine_ramp(config.beta_start, config.beta_end, step, config.steps),
        )
        return [batch]

    def loss(self, rows_RD: Tensor, batch: ContextualBatch, **shared: Any) -> Tensor:
        config = self.config
        q_ND, chunks_MCD, documents_MD = batch.split(rows_RD)
        shared |= batch.asked()
        if config.objective == "insent":
            loss, vectors = partial(losses.insent_loss, lam=config.alpha), (q_ND, chunks_MCD)
        else:
            loss = partial(losses.contextual_loss, alpha=config.alpha, beta=batch.beta, margin=config.margin)
            vectors = (q_ND, chunks_MCD, documents_MD)
        return losses.matryoshka(partial(loss, **shared), [*map(self.served, vectors)], config.dimensions)


class Triplet(Contrastive):
    """Contrastive training with mined hard negatives (pplx-embed, section 2.5)."""

    section = "triplet"

    data = cached_property(Stage.triplets)

    def batch(self, step: int) -> list[Batch]:
        """The parts of a batch, each with a loss of its own."""
        name, rows = self.plan(step)
        parts = np.array_split(rows, min(self.config.accumulation, len(rows)))
        return [replace(self.texts(name, part), weight=len(part) / len(rows)) for part in parts]

    def loss(self, rows_RD: Tensor, batch: Batch, **shared: Any) -> Tensor:
        vectors, number_R = parted(self.served(rows_RD), batch)
        return losses.triplet_loss(*vectors, number_R=number_R, **shared)


def parted(rows_RD: Tensor, batch: Batch) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """The vectors of a batch's queries, of their documents and of their hard negatives, (q_ND, d_ND,
    hard_NKD); and the number of each text. Where a query has fewer than K hard negatives, their vectors are
    zeros and their numbers −1."""
    n, number_R = batch.count, numbered(batch.sequences, batch.key_R)
    mask_NK = torch.from_numpy(np.arange(batch.hard_N.max()) < batch.hard_N[:, None])
    hard_number_NK = placed(number_R[2 * n :] + 1, mask_NK) - 1
    vectors = rows_RD[:n], rows_RD[n : 2 * n], placed(rows_RD[2 * n :], mask_NK)
    return vectors, torch.cat([number_R[: 2 * n], hard_number_NK.flatten()])


def placed(rows_X: Tensor, mask_YZ: Tensor) -> Tensor:
    """Rows (X, …) where the mask is True, one after the other, and zeros elsewhere: (Y, Z, …)."""
    # The mask is on the CPU: one on the GPU would make this process wait in the backward pass.
    places_X = shipped(mask_YZ.flatten().nonzero().squeeze(1), rows_X.device)
    empty = rows_X.new_zeros(mask_YZ.numel(), *rows_X.shape[1:])
    return empty.index_copy(0, places_X, rows_X).unflatten(0, mask_YZ.shape)


def numbered(sequences: Sequence[TokenSequence], key_R: Iterable[Any] | None = None) -> Tensor:
    """A number for each text (R,): equal numbers for one text, by its key, and for equal tokens.

    Tokens are what the model reads: also of two texts that only begin alike and are cut, the vectors are
    equal.
    """
    seen: dict[Any, int] = {}
    numbers = []
    for number, (text, key) in enumerate(zip_longest(sequences, [] if key_R is None else key_R)):
        marks = [mark for mark in (key, text.tokens_L.tobytes()) if mark is not None]
        first = min(seen.get(mark, number) for mark in marks)
        numbers.append(first)
        seen |= dict.fromkeys(marks, first)
    return torch.tensor(numbers)


def cosine_ramp(start: float, end: float, step: int, steps: int) -> float:
    """Half a cosine from `start` at step 0 to `end` at the last step: β of pplx-embed, section 2.4."""
    share = step / max(1, steps - 1)
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * share))
