"""Presets: every hyper-parameter of a run, typed, checked and in one place (`papermill_runs/presets/*.yaml`).

A preset is a YAML file of sections, one per stage. It holds what differs from the preset that it extends
(`extends: smollm2`) and from the defaults below: the papers' values, and those that hardly any preset
changes.
What depends on model and machine (sizes, steps, rates) has no default.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, dataclass_transform, get_args

import yaml
from pydantic import AfterValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from unmask.store import Strict, nearest, repository


class ConfigError(ValueError):
    """A preset, a key or a value that cannot be used; the message says which and what would do."""


Group = Literal["english", "cross-lingual", "multilingual", "code"]
Family = Literal["english", "code", "cross-lingual", "multilingual", "contextual"]
GROUPS = get_args(Group)  # of pairs: the steps of the curriculum
FAMILIES = get_args(Family)  # of tasks, as reported
TRAINED = ("ar", "diffusion", "pair", "contextual", "triplet", "cde", "qwen3", "reranker")  # by `train`

Whole = Annotated[int, Field(strict=True, ge=0)]
Count = Annotated[int, Field(strict=True, ge=1)]
Several = Annotated[int, Field(strict=True, ge=2)]
Share = Annotated[float, Field(ge=0, le=1)]
Inner = Annotated[float, Field(gt=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]


def _whole(text: str) -> str:
    """A relative path in a preset is one in the checkout, not in the folder that notebooks run in."""
    return str(repository() / text) if "/" in text and (repository() / text).exists() else text


Place = Annotated[str, AfterValidator(_whole)]  # or a name
# Of a pool: BM25, n-grams of characters, latent semantic analysis, the pair stage's model, or an embedder.
System = Literal["bm25", "characters", "lsa", "pair"] | Annotated[Place, Field(pattern="/")]
Ascending = AfterValidator(lambda sizes: tuple(sorted(sizes)))
Sizes = Annotated[tuple[Count, ...], Field(min_length=1), Ascending]


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Section:
    """Makes each section below a frozen dataclass whose values pydantic checks."""

    def __init_subclass__(cls):
        strict = ConfigDict(extra="forbid", allow_inf_nan=False, defer_build=True)  # until it is used
        dataclass(frozen=True, kw_only=True, config=strict)(cls)


class DataConfig(Section):
    """The corpus: where text, pairs and documents come from."""

    source: Place = "environment"  # or a registry in papermill_runs/sources, or the path of one (*.yaml)
    seed: Whole = 0
    vocab_size: Count  # of the tokenizer trained on the training part; ignored with a ready checkpoint
    dev_packages: tuple[str, ...] = ()  # held out, for choices
    test_packages: tuple[str, ...] = ()  # held out, for reported figures
    max_packages: Whole = 0  # 0: all that are listed
    max_text_mb: Count  # cap of the pretraining text
    families: tuple[Family, ...] = ()  # of pairs and tasks that are read; empty: all that there are


class BackboneConfig(Section):
    """The Transformer: a ready checkpoint, or the shape of one built from scratch."""

    checkpoint: Place = ""  # "smollm2-135m", Hub name or directory; empty: built in the shape below
    keep_layers: Annotated[tuple[Whole, ...], Field(min_length=1)] | None = (
        None  # of the checkpoint; None: all
    )
    hidden_size: Count
    layers: Count
    heads: Count
    kv_heads: Count
    head_size: Count
    mlp_size: Count
    max_length: Count  # longest sequence that positions are meant for
    embedding_std: Positive = 0.02  # of the token embeddings at the start; Qwen3's initializer_range
    mask_token: str = "<|fim_pad|>"  # existing, rarely used token that plays [MASK]

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} kv_heads evenly: change one")
        if self.keep_layers and not self.checkpoint:
            raise ValueError("keep_layers cuts a checkpoint short: name one, or set layers")


class ComputeConfig(Section):
    """How a training is computed. It may change midway: results stay the same, rounding aside."""

    token_budget: Whole = 0  # tokens of a process's micro-batch, padding included; 0: see `budget`
    gradient_checkpointing: bool = False  # keep one activation per layer and recompute the others
    compile: bool = False  # torch.compile of every layer; a minute or two on a GPU, before it pays
    checkpoint_seconds: Whole = 120  # between two: all that a kill costs; more where one takes over 4 s
    keep_checkpoints: Count = 1  # the newest so many

    def budget(self, device: str) -> int:
        """`token_budget`, or what suits the kind of device: a core's cache, or plenty of work for a GPU."""
        return self.token_budget or (2_048 if device == "cpu" else 65_536)

    def halved(self, device: str) -> dict[str, int]:
        """The keys that put half as many tokens into memory at a time; none where it would be too few."""
        half = self.budget(device) // 2
        return {"token_budget": half} if half >= FEWEST else {}


FEWEST = 256  # tokens of a micro-batch that is worth a try

# `ComputeConfig`'s keys and `keep_tokens` do not change what a training learns.
COMPUTED = {"keep_tokens", *(field.name for field in dataclasses.fields(ComputeConfig))}


class TrainConfig(ComputeConfig):
    """What every training stage has: optimiser, schedule, precision."""

    steps: Count
    batch: Count  # sequences, pairs, documents or queries of a step
    lr: Positive
    schedule: Literal["wsd", "cosine", "linear"] = "cosine"  # after a linear warm-up; see `loop.lr_factor`
    warmup: Whole  # steps
    decay: Whole = 0  # last steps, for "wsd"
    beta1: Share = 0.9
    beta2: Share = 0.98
    weight_decay: Share = 0.01
    clip: Positive = 1.0  # l2 norm of the gradient
    precision: Literal["bf16", "fp32"] = "bf16"  # autocast, where the processor has it
    seed: Whole = 0


class ParallelConfig(Section):
    """The processes of one training. They divide the work, not the batch: results do not depend on them, but
    for rounding."""

    num_processes: Count = 1  # over all machines
    num_machines: Count = 1
    strategy: Literal["ddp", "fsdp2"] = "ddp"  # every process holds the model, or they share its parameters
    launcher: str = ""  # what starts them, if they are on several machines: "srun torchrun --nnodes=8 …"

    def __post_init__(self):
        if self.num_processes % self.num_machines:
            shared = f"{self.num_processes} processes cannot be shared evenly by {self.num_machines} machines"
            raise ValueError(f"{shared}: change one of them (--gpus, parallel.num_machines)")

    @property
    def per_machine(self) -> int:
        return self.num_processes // self.num_machines


class PretrainConfig(TrainConfig):
    """Next-token and masked-diffusion pretraining."""

    schedule: Literal["wsd", "cosine", "linear"] = "wsd"
    length: Several  # tokens of a packed block
    freeze_embeddings: bool = False  # they stay as they are, and so does an output matrix tied to them

    def halved(self, device: str) -> dict[str, int]:
        fewer = super().halved(device)
        return fewer if fewer.get("token_budget", 0) >= self.length else {}  # a block at least


class DiffusionConfig(PretrainConfig):
    """Masked-diffusion continued pretraining."""

    t_min: Positive = 0.001  # t is uniform in (t_min, t_max)
    t_max: Share = 1.0  # t_min = t_max: a fixed share of masks (LLM2Vec)
    log_uniform: bool = False  # low t: drawn more often, not weighed more
    cut_fraction: Share = 0.01  # share of the sequences that are cut to a random length
    anneal: Share = 0.0  # share of the steps in which the causal mask fades away; 0: it is off from the start

    def __post_init__(self):
        if self.t_min > self.t_max:
            raise ValueError(f"t_min {self.t_min} lies above t_max {self.t_max}: no token can be masked")

    @property
    def masked_share(self) -> float:
        """The mean of t: the share of the tokens that are masked."""
        if self.log_uniform and self.t_min < self.t_max:
            return (self.t_max - self.t_min) / math.log(self.t_max / self.t_min)
        return (self.t_min + self.t_max) / 2


class ContrastiveConfig(TrainConfig):
    """What every contrastive stage has: a batch whose rows are each other's negatives."""

    query_length: Count
    temperature: Positive = 0.02
    margin: Annotated[float, Field(ge=0)] = 0.1  # negatives this much better than the positive are left out
    keep_tokens: Whole = 0  # of a step, embedded once, with all activations kept; 0: see `kept`

    def kept(self, device: str) -> int:
        """`keep_tokens`, or what suits the kind of device: one micro-batch, or several on a GPU."""
        return self.keep_tokens or (0 if device == "cpu" else 4 * self.budget(device))

    def halved(self, device: str) -> dict[str, int]:
        most = max(self.kept(device), self.budget(device)) // 2
        budget = min(most, self.budget(device))
        return {"token_budget": budget, "keep_tokens": most} if budget >= FEWEST else {}


class PairConfig(ContrastiveConfig):
    """Contrastive training on (query, document) pairs."""

    batch: Several  # pairs of a step: a pair alone has no negatives
    document_length: Count
    pooling: Literal["mean", "last"] = "mean"
    quantize: bool = True  # INT8 from the first step; false, for the comparison: the unquantised mean
    query_query: bool = True  # whether queries are each other's negatives (Qwen3's loss always has that)
    cluster_size: Whole = 0  # rows of a cluster of look-alikes, from which batches are filled; 0: at random
    filter_margin: float = -1.0  # what a surrogate finds this much better is no negative; below 0: off
    curriculum: tuple[Share, Share, Share]  # shares of the steps: English; + cross-lingual; everything
    # What all of the steps read of each of GROUPS, in their order; empty: data sets are drawn by size.
    shares: tuple[()] | tuple[Share, Share, Share, Share] = ()

    def __post_init__(self):
        if not any(self.curriculum):
            raise ValueError("curriculum gives no step to any of its three parts")
        first, second = (sum(self.curriculum[:n]) / sum(self.curriculum) - 1e-9 for n in (1, 2))
        english, crossing, *_ = self.shares or (1, 0)
        if first > english or second > english + crossing:
            told = f"curriculum {[*self.curriculum]} reads more of its first languages than shares"
            raise ValueError(f"{told} {[*self.shares]} give them: make its last part longer")

    @property
    def looks_around(self) -> bool:
        """Whether batches depend on a surrogate embedder."""
        return self.cluster_size > 0 or self.filter_margin >= 0


class ContextualConfig(ContrastiveConfig):
    """Contextual training on documents of chunks; a row of a batch is a document."""

    weight_decay: Share = 0.1
    queries_per_document: Count = 4  # at most, drawn anew each time
    chunk_length: Count
    chunks: Count  # per document, at most
    draw: Literal["queries", "documents"] = "queries"  # what counts as the size of a data set; the paper's
    single: Whole = 0  # pairs of each data set as documents of one chunk, against forgetting
    objective: Literal["pplx", "insent"] = "pplx"  # local and global loss, or chunks only, with alpha as λ
    alpha: Share = 0.2  # weight of the in-sequence term in the local loss
    beta_start: Share = 0.2  # weight of the global loss, first step
    beta_end: Share = 0.5  # last step
    dimensions: Sizes  # Matryoshka prefixes; those that fit are used

    @property
    def document_length(self) -> int:
        """Tokens of a document at most, with a separator between chunks."""
        return self.chunks * (self.chunk_length + 1) - 1


class TripletConfig(ContrastiveConfig):
    """Contrastive training with mined hard negatives."""

    margin: float = 0.0  # negatives are at most this much better than the positive; the loss has no margin
    accumulation: Count  # a batch of `batch` is split into this many independent losses
    document_length: Count
    temperature: Positive = 0.03
    negatives: Count = 3  # per query
    rank_window: Count = 50  # negatives are drawn from this many best: hard, and wide enough to vary
    groups: tuple[Group, ...]  # of the pairs that negatives are mined for; what is left out is forgotten
    max_pairs: Count  # training pairs that negatives are mined for


class ClustersConfig(Section):
    """How rows that look alike are found, for every stage with a `cluster_size` or a `filter_margin`."""

    surrogate: Place = ""  # an embedder: directory or Hub name; notebook 10 without one: the pair checkpoint
    iterations: Count = 100  # of k-means; CDE's
    attempts: Count = 3  # of k-means, of which the best counts; CDE's


class EndpointConfig(Section):
    """A language model behind an OpenAI-compatible endpoint."""

    section: ClassVar[str]  # of the preset, for what is said to a user
    endpoint: str = ""  # for instance http://localhost:8000/v1; empty: nothing is asked
    model: str = ""  # as the endpoint calls it
    api_key_env: str = "OPENAI_API_KEY"  # environment variable that holds the key, which is stored nowhere
    concurrency: Count = 16  # requests under way at a time
    timeout: Positive = 60.0  # seconds of one request
    retries: Whole = 5  # of one request, with growing pauses
    temperature: Share = 0.7
    max_tokens: Count = 400  # of one answer


class SynthesisConfig(EndpointConfig):
    """Queries written by a language model. Without one, notebook 02a shows what it would be sent."""

    section = "synthesis"
    passages: Whole = 100  # that get a query each
    documents: Whole = 20  # that get queries for their chunks
    queries_per_document: Count = 4
    personas: Count = 5  # most relevant ones, of which the model picks the character; the paper's top-5
    min_similarity: float = 0.7  # cosine below which a pair is dropped; Qwen3-Embedding's filter
    languages: Annotated[tuple[str, ...], Field(min_length=1)] = ("English",)  # of the queries, drawn
    seed: Whole = 0


class ReaderConfig(EndpointConfig):
    """Answers of a language model that reads retrieved passages (notebook 09)."""

    section = "reader"
    temperature: Share = 0.0  # BERGEN's
    max_tokens: Count = 128  # BERGEN's
    passages: Count = 5  # that it reads; the paper's
    questions: Count = 500  # of each data set, at most


class ContextsConfig(EndpointConfig):
    """A context before each chunk, which a language model writes from the whole document (notebook 08)."""

    section = "contexts"
    temperature: Share = 0.0
    max_tokens: Count = 128  # Anthropic's contexts have 50 to 100 tokens


class MergeConfig(Section):
    """SLERP of two checkpoints and the choice among the candidates."""

    # 0 is the contextual parent, 1 the triplet parent.
    t: Annotated[tuple[Inner, ...], Field(min_length=1)] = (0.25, 0.5, 0.75)


class EvaluationConfig(Section):
    """Retrieval tasks built from the held-out part of the corpus."""

    query_length: Count
    document_length: Count
    chunk_length: Count
    max_queries: Count  # per task
    max_documents: Count  # per task
    precision: Literal["bf16", "fp32"] = "bf16"  # where the processor has it
    denoising: float = 0.5  # notebook 01's gate: least rise in nats from the fewest masks to t = 1
    dev_queries: Whole = 0  # per task of the development split; 0: as many as of the test split
    dev_documents: Whole = 0  # likewise
    squad_paragraphs: Whole = 0  # of SQuAD, where a mirror holds it; 0: all


class QuantizationConfig(Section):
    """The study of precisions and dimensions. Its short trainings are the pair stage's but for the steps."""

    dimensions: Sizes
    candidates: Sizes  # documents that the binary first step hands on to INT8
    steps: Count  # of each short training
    # (width, depth) of a small model, a deeper and a wider one; none: the diffusion backbone is trained
    shapes: tuple[tuple[Count, Count], ...]

    def __post_init__(self):
        if len(self.shapes) not in (0, 3):
            raise ValueError(f"shapes must be three or none, not {len(self.shapes)}")


class RetrievalConfig(Section):
    """Plain retrieval: public benchmarks, and benchmarks built as the paper builds its own."""

    benchmarks: tuple[str, ...] = ()  # `unmask_study.mteb.BENCHMARKS`, names of mteb, "ToolRet"
    log_queries: Count  # asked in the query-to-query and in the query-to-document benchmark, at most
    query_sizes: Sizes  # corpora of the query-to-query benchmark
    document_sizes: Sizes  # corpora of the query-to-document benchmark
    # A search log of one's own instead of held-out queries: JSON lines in the order of time, each with a
    # query and, where known, its language ("en"), intent and form, and the url that it led to.
    log: Place = ""
    pool: Annotated[tuple[System, ...], Field(min_length=1)] = ("bm25", "characters", "lsa", "pair")
    # Of an embedder of the pool: its revision on the Hub, where that is not main.
    pool_revisions: dict[str, str] = Field(default_factory=dict)
    pool_depth: Count  # documents that each system puts into the pool of a query
    xquad: tuple[str, ...] = ("en",)  # languages of XQuAD, where a mirror holds it


ContebTraining = Literal["sweep", "insent", "flattened", "token vectors"]


class ContebConfig(Section):
    """The studies of context: ConTEB, InSeNT, late interaction. Trainings are the contextual stage's but for
    what is named here."""

    tasks: tuple[str, ...] = ()  # of `unmask.data.registry.CONTEB`; read from a mirror or the Hub
    benchmarks: tuple[str, ...] = ()  # searches of short texts, as `retrieval.benchmarks`; also joined
    joined: Several = 8  # texts that look alike, as one document
    chunk_length: Count = 320  # tokens of a chunk of these tasks at most; room for 1,000 characters
    chunk_words: Sizes  # to which our own tasks' chunks are cut and joined
    piece_characters: Sizes = (100,)  # to which SQuAD's paragraphs are cut; several: as a figure
    corpus_documents: Sizes  # among which a query looks for its document
    late_documents: Count = 100  # at most, compared by late interaction: vectors fifteen times as large
    # InSeNT's weight of the in-sequence term, one training each.
    lambdas: Annotated[tuple[Share, ...], Field(min_length=1)] = (0.0, 0.3, 1.0)
    lam: Share = 0.3  # for one training of full length; between the ends, which ConTEB finds worst
    temperature: Positive = 0.05  # InSeNT's; the pair stage's is much sharper
    lr: Annotated[float, Field(ge=0)] = 0.0  # of trainings with InSeNT's objective; 0: the contextual stage's
    steps: Count  # of each training of the sweep
    queries_per_document: Count = 4  # of the sweep
    # What is trained: the sweep of objectives; and each for as many steps as the contextual stage.
    trainings: tuple[ContebTraining, ...] = get_args(ContebTraining)


class CdeConfig(PairConfig):
    """CDE: batches of look-alikes, and an encoder that reads other documents of the corpus beside a text,
    over whose own tokens it pools."""

    pooling: Literal["mean"] = "mean"
    context: Whole  # context documents, shared by a batch; a training may set it to 0: a plain encoder
    sequence_dropout: Share = 0.005  # of context documents, for the null vector
    max_pairs: Whole = 0  # training pairs that are read, and so embedded and clustered; 0: all
    batch_sizes: Annotated[tuple[Several, ...], Field(min_length=1), Ascending]  # of the study of batches
    cluster_sizes: Sizes  # of the study of batches, beside random ones
    # Beside the two encoders on look-alikes: how hard batches are, both encoders on random batches, and one
    # family's tasks beside documents of another.
    studies: tuple[Literal["hardness", "random", "domains"], ...] = ("hardness", "random", "domains")
    # context documents at inference, `context` at most
    context_sizes: Annotated[tuple[Whole, ...], Field(min_length=1), Ascending]
    benchmarks: tuple[str, ...] = ()  # public ones of every type of task, as `retrieval.benchmarks`

    def __post_init__(self):
        super().__post_init__()
        if 0 < self.context < max(self.context_sizes):
            raise ValueError(f"context_sizes go up to {max(self.context_sizes)}, context is {self.context}")

    @property
    def trainings(self) -> dict[str, dict[str, float]]:
        """The study's trainings, by name: what each changes here. One that repeats another is left out."""
        margins, found = {"": -1.0, "-filtered": max(self.filter_margin, 0.0)}, {}
        batches = self.batch_sizes if "hardness" in self.studies else ()
        for batch, size, end in itertools.product(batches, (0, *self.cluster_sizes), margins):
            found[f"b{batch}-c{size or 'random'}{end}"] = (batch, size, margins[end], 0)
        for name, context in {"plain": 0, "context": self.context}.items():
            if "random" in self.studies:
                found[f"{name}-random"] = (self.batch, 0, self.filter_margin, context)
            found[name] = (self.batch, self.cluster_size, self.filter_margin, context)
        first = {changes: name for name, changes in reversed(found.items())}
        keys = ("batch", "cluster_size", "filter_margin", "context")
        return {name: dict(zip(keys, row)) for name, row in found.items() if first[row] == name}


class Qwen3EmbeddingConfig(PairConfig):
    """Qwen3-Embedding: a causal embedder with instructions. `steps` are the second phase's."""

    pooling: Literal["mean", "last"] = "last"
    quantize: bool = False  # Qwen3-Embedding has no quantiser
    negatives: Whole = 3  # mined ones per query, in the second phase
    dimensions: Sizes  # Matryoshka prefixes; those that fit are used
    start: Literal["causal", "scratch", "pair"] = (
        "causal"  # the parent, random weights, or notebook 02's model
    )
    # Beside the two phases: the second alone, that without prefixes, and the reranker.
    trainings: tuple[Literal["no-weak", "one-size", "reranker"], ...] = ("no-weak", "one-size", "reranker")
    weak_steps: Count  # of the first phase, on all pairs and without mined negatives
    weak_lr: Positive  # of the first phase
    weak_only: tuple[str, ...] = ()  # groups or data sets of the first phase: [synthetic-pairs]; empty: all
    benchmarks: tuple[str, ...] = ()  # public ones of every type of task, as `retrieval.benchmarks`
    checkpoints: Count = 3  # of the second phase that are merged, evenly spaced, the last one among them


class RerankerConfig(TrainConfig):
    """Qwen3-Reranker: a language model that answers yes or no."""

    negatives: Count = 3  # mined ones per query; as triplet
    query_length: Count  # without the prompt around query and document
    document_length: Count
    candidates: Count = 100  # of the embedder that are reranked; Qwen3-Embedding's
    max_queries: Count  # per task, reranked in the evaluation


Arm = Literal["diffusion, last", "bidirectional, mean", "AR continued, mean", "masked next token, mean"]


class AblationConfig(Section):
    """The 2 × 2 ablation: backbone × pooling. Everything else is the pair stage's."""

    steps: Count
    # Beside *diffusion, mean*, *AR, mean* and *AR, last*; the last two are pretrained as long as diffusion.
    arms: tuple[Arm, ...] = get_args(Arm)
    groups: tuple[Group, ...] = ("english",)  # of the pairs to train on
    ema: Share = 0.02  # smoothing of the loss curve; the paper's, figure 2
    batch: Literal[0] | Several = 0  # pairs of a step; 0: the pair stage's
    # Of the pair stage's rate; each arm is trained with each, and the best on development data is kept.
    rates: Annotated[tuple[Positive, ...], Field(min_length=1)] = (1.0,)
    rate_steps: Whole = 0  # of the trainings that choose among several rates; 0: as many as `steps`
    anneal: Share = 0.0  # also pretrain with a causal mask that fades over this share of the steps; 0: no
    parts: bool = False  # also leave out each part of the pair loss and its curriculum
    benchmarks: tuple[str, ...] = ()  # public ones, as `retrieval.benchmarks`, of the paper's four backbones
    squad: bool = False  # also ask SQuAD's questions, where a mirror holds it


class Preset(Section):
    """All parameters of a run."""

    name: str
    about: str  # one line: machine, time, purpose
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    data: DataConfig
    backbone: BackboneConfig
    ar: PretrainConfig
    diffusion: DiffusionConfig
    pair: PairConfig
    synthesis: SynthesisConfig = Field(default_factory=SynthesisConfig)
    contextual: ContextualConfig
    triplet: TripletConfig
    clusters: ClustersConfig = Field(default_factory=ClustersConfig)
    merge: MergeConfig = Field(default_factory=MergeConfig)
    evaluation: EvaluationConfig
    quantization: QuantizationConfig
    retrieval: RetrievalConfig
    reader: ReaderConfig = Field(default_factory=ReaderConfig)
    contexts: ContextsConfig = Field(default_factory=ContextsConfig)
    conteb: ContebConfig
    cde: CdeConfig
    qwen3: Qwen3EmbeddingConfig
    reranker: RerankerConfig
    ablation: AblationConfig


SECTIONS = tuple(f.name for f in dataclasses.fields(Preset) if f.name not in ("name", "about"))
PRESETS = repository() / "papermill_runs" / "presets"


def preset_names() -> list[str]:
    """Names of the presets at hand."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def load_preset(name: str, overrides: dict[str, Any] | None = None) -> Preset:
    """Reads a preset, applies `overrides` ({"pair.steps": 50}) and checks every key and value.

    Raises:
        ConfigError: unknown preset, unknown or missing key, or a value of the wrong type or range.
    """
    values = _read(name)
    for key, value in (overrides or {}).items():
        section, _, field = key.partition(".")
        if section not in SECTIONS or not field:
            known = "" if section in SECTIONS else nearest(section, SECTIONS)
            raise ConfigError(f"unknown key {key!r}: write section.key{known}")
        values[section] = (values.get(section) or {}) | {field: value}
    preset = preset_from(values | {"name": name})
    for stage in TRAINED:
        config = getattr(preset, stage)
        decay = config.decay if config.schedule == "wsd" else 0
        if config.warmup + decay > config.steps:  # a study's shorter trainings may
            how = f"{config.warmup} + {decay} > {config.steps}"
            raise ConfigError(f"preset {name}: {stage}: warmup + decay exceed steps ({how})")
        lengths = [getattr(config, key, 0) for key in ("length", "query_length", "document_length")]
        length = sum(lengths) if stage == "reranker" else max(lengths)
        if length > preset.backbone.max_length:  # it would be read otherwise than it was trained
            raise ConfigError(f"preset {name}: {stage}: {length} tokens of a text exceed backbone.max_length")
    return preset


def seeded(seed: int) -> dict[str, int]:
    """Overrides that give every training this seed. The corpus and what is synthesised keep theirs."""
    return {f"{section}.seed": seed for section in TRAINED}


def preset_from(values: dict[str, Any]) -> Preset:
    """A preset from plain values, for instance those of `resolved`.

    Raises: ConfigError, as `load_preset`.
    """
    try:
        return Preset(**values)
    except ValidationError as error:
        raise ConfigError(f"preset {values.get('name')}: {explained(error, Preset)}") from None


def changed(config: Any, values: Mapping[str, Any], section: str) -> Any:
    """A section with other values for some of its keys.

    Raises: ConfigError, as `load_preset`.
    """
    try:
        return dataclasses.replace(config, **values)
    except ValidationError as error:
        raise ConfigError(f"{section}.{explained(error, type(config))}") from None


def resolved(config: Any) -> Any:
    """A preset or a section of one as plain JSON values (tuples become lists)."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def comparable(preset: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a resolved preset ("pair.lr" → value) that runs must share to be comparable: all but
    training seeds and compute settings."""
    sections = {name: row for name, row in preset.items() if isinstance(row, dict)}
    values = {(name, key): value for name, row in sections.items() for key, value in row.items()}
    own = {(name, key) for name in TRAINED for key in COMPUTED | {"seed"}}
    return {".".join(key): value for key, value in values.items() if key not in own}


def _read(name: str) -> dict[str, Any]:
    path = PRESETS / f"{name}.yaml"
    if not PRESETS.is_dir():
        raise ConfigError("presets and notebooks lie in the repository: clone it, and `make install` there")
    if not path.is_file():
        raise ConfigError(f"unknown preset {name!r}{nearest(name, preset_names())}")
    with path.open(encoding="utf8") as file:  # YAML's own errors name it
        values = yaml.load(file, Strict) or {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: write sections of keys and values, as in cpu.yaml")
    merged = _read(values.pop("extends")) if "extends" in values else {}
    for key, value in values.items():
        merged[key] = (merged.get(key) or {}) | value if isinstance(value, dict) else value
    return merged


def explained(error: ValidationError, kind: type) -> str:
    """The first of pydantic's errors; an unknown key before a missing one, which it may be meant for."""
    unknown = "unexpected_keyword_argument"
    first = min(error.errors(), key=lambda one: one["type"] != unknown)
    where = ".".join(map(str, first["loc"]))
    if first["type"] == unknown:
        *sections, key = first["loc"]
        for section in sections:
            kind = kind.__dataclass_fields__[section].type
        return f"{where}: unknown key {key!r}{nearest(key, kind.__dataclass_fields__)}"
    if first["type"] == "missing":
        return f"missing {where}"
    message = first["msg"].removeprefix("Value error, ").replace("Input should", "must")
    return f"{where} {message}" + ("" if first["type"] == "value_error" else f", got {first['input']!r}")
