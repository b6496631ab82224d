"""Presets: every hyper-parameter of a training, typed and checked (`papermill_runs/presets/*.yaml`).

A preset is a YAML file with a section for each stage. It holds what differs from the preset that it extends
(`extends: smollm2`) and from the defaults below: the papers' values, and those that hardly any preset
changes. What depends on model and machine (sizes, steps, rates) has no default. Section `training` is for all
stages: each takes the keys that it has, unless its own section of the same file sets them. Section `study`
holds those of a program that builds on the library, whose `kind` of preset has them.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import AfterValidator, BeforeValidator, Field

from unmask.schema import ConfigError, Section, Strict, checked
from unmask.store import nearest, repository


def _no_bool(value: Any) -> Any:
    """YAML's `yes`, and `True` where a number is asked for, are not 1."""
    if isinstance(value, bool):
        raise ValueError(f"must be a number, got {value}")
    return value


Group = Literal["english", "cross-lingual", "multilingual", "code"]
Family = Literal["english", "code", "cross-lingual", "multilingual", "contextual"]
GROUPS = get_args(Group)  # of pairs: the steps of the curriculum
FAMILIES = get_args(Family)  # of tasks, as reported
Schedule = Literal["wsd", "cosine", "linear"]
Precision = Literal["bf16", "fp32"]
Whole = Annotated[int, Field(strict=True, ge=0)]
Count = Annotated[int, Field(strict=True, ge=1)]
Several = Annotated[int, Field(strict=True, ge=2)]
Number = Annotated[float, BeforeValidator(_no_bool)]
Share = Annotated[Number, Field(ge=0, le=1)]
Positive = Annotated[Number, Field(gt=0)]
Momentum = Annotated[Number, Field(ge=0, lt=1)]
Ascending = AfterValidator(lambda sizes: tuple(sorted(sizes)))
Sizes = Annotated[tuple[Count, ...], Field(min_length=1), Ascending]


def _absolute(place: str) -> str:
    """A relative path in a preset is one in the checkout, not in the folder that notebooks run in."""
    return str(repository() / place) if "/" in place and (repository() / place).exists() else place


Place = Annotated[str, AfterValidator(_absolute)]  # a path or a name


class DataConfig(Section):
    """The corpus: where text, pairs and documents come from."""

    source: Place = "environment"  # a registry in papermill_runs/sources, or the path of one (*.yaml)
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
    keep_layers: Annotated[tuple[Whole, ...], Field(min_length=1)] | None = None  # None: all of them
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
    """How a training is computed. It may change midway: results stay the same but for rounding."""

    token_budget: Whole = 0  # tokens of a process's micro-batch, padding included; 0: see `memory`
    gradient_checkpointing: bool = False  # keep one activation per layer and recompute the others
    compile: bool = False  # torch.compile of every layer; a minute or two on a GPU, before it pays
    checkpoint_seconds: Whole = 120  # between two: all that a kill costs; more where one takes over 4 s

    def memory(self, device: str) -> dict[str, int]:
        """Returns the keys that bound memory. By default a micro-batch fits a core's cache, or keeps a GPU
        busy; and of `keep_tokens`, where a stage has them, it is one micro-batch, or four on a GPU."""
        budget = self.token_budget or (2_048 if device == "cpu" else 65_536)
        several = 0 if device == "cpu" else 4 * budget
        keep = {"keep_tokens": self.keep_tokens or several} if hasattr(self, "keep_tokens") else {}
        return {"token_budget": budget, **keep}

    def halved(self, device: str) -> dict[str, int]:
        """Returns `memory` with its largest number halved; nothing where micro-batches would be too small."""
        memory = self.memory(device)
        half = max(memory.values()) // 2
        smaller = {key: min(tokens, half) for key, tokens in memory.items()}
        return smaller if smaller["token_budget"] >= max(256, getattr(self, "length", 0)) else {}


class TrainConfig(ComputeConfig):
    """What every training stage has: optimiser, schedule, precision."""

    steps: Count
    batch: Count  # sequences, pairs, documents or queries of a step
    lr: Positive
    schedule: Schedule = "cosine"  # after a linear warm-up; see `loop.lr_factor`
    warmup: Whole  # steps
    decay: Whole = 0  # last steps, for "wsd"
    beta1: Momentum = 0.9
    beta2: Momentum = 0.98
    weight_decay: Share = 0.01
    clip: Positive = 1.0  # l2 norm of the gradient
    precision: Precision = "bf16"  # autocast, where the processor has it
    seed: Whole = 0


class ParallelConfig(Section):
    """The processes of one training, which divide a batch's work: results are the same but for rounding."""

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

    schedule: Schedule = "wsd"
    length: Several  # tokens of a packed block
    freeze_embeddings: bool = False  # they stay as they are, and so does an output matrix tied to them


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


class ContrastiveConfig(TrainConfig):
    """What every contrastive stage has: a batch whose rows are each other's negatives."""

    query_length: Count
    temperature: Positive = 0.02
    margin: Annotated[float, Field(ge=0)] = 0.1  # negatives this much better than the positive are left out
    keep_tokens: Whole = 0  # of a step, embedded once, with all activations kept; 0: see `memory`


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
    shares: tuple[Share, Share, Share, Share] | tuple[()] = ()

    def __post_init__(self):
        if not any(self.curriculum):
            raise ValueError("curriculum gives no step to any of its three parts")
        first, second = (sum(self.curriculum[:n]) / sum(self.curriculum) - 1e-9 for n in (1, 2))
        english, crossing, *_ = self.shares or (1, 0)
        if first > english or second > english + crossing:
            what = f"curriculum {[*self.curriculum]} reads more of its first languages than shares"
            raise ValueError(f"{what} {[*self.shares]} give them: make its last part longer")

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

    surrogate: Place = ""  # an embedder, directory or Hub name; the CDE study without one: the pair model
    iterations: Count = 100  # of k-means; CDE's
    attempts: Count = 3  # of k-means, of which the best counts; CDE's


class CdeConfig(PairConfig):
    """CDE: batches of look-alikes, and an encoder that reads other documents beside a text."""

    pooling: Literal["mean"] = "mean"
    context: Whole  # context documents, shared by a batch; a training may set it to 0: a plain encoder
    sequence_dropout: Share = 0.005  # of context documents, for the null vector
    max_pairs: Whole = 0  # training pairs that are read, and so embedded and clustered; 0: all


class Qwen3EmbeddingConfig(PairConfig):
    """Qwen3-Embedding: a causal embedder with instructions."""

    pooling: Literal["mean", "last"] = "last"
    quantize: bool = False  # Qwen3-Embedding has no quantiser
    negatives: Whole = 3  # mined ones per query, in the second phase
    dimensions: Sizes  # Matryoshka prefixes; those that fit are used


class RerankerConfig(TrainConfig):
    """Qwen3-Reranker: a language model that answers yes or no."""

    negatives: Count = 3  # mined ones per query; as triplet
    query_length: Count  # without the prompt around query and document
    document_length: Count
    candidates: Count = 100  # of the embedder that are reranked; Qwen3-Embedding's
    max_queries: Count  # per task, reranked in the evaluation


class EvaluationConfig(Section):
    """How retrieval tasks are built and read."""

    query_length: Count
    document_length: Count
    chunk_length: Count
    max_queries: Count  # per task
    max_documents: Count  # per task
    precision: Precision = "bf16"  # where the processor has it


class Preset(Section):
    """All parameters of the trainings of a run."""

    name: str
    about: str  # one line: machine, time, purpose
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    data: DataConfig
    backbone: BackboneConfig
    ar: PretrainConfig
    diffusion: DiffusionConfig
    pair: PairConfig
    contextual: ContextualConfig
    triplet: TripletConfig
    clusters: ClustersConfig = Field(default_factory=ClustersConfig)
    cde: CdeConfig
    qwen3: Qwen3EmbeddingConfig
    reranker: RerankerConfig


Layer = dict[str, Any]  # sections of a preset, as read
TRAINED = {one.name: one.type for one in dataclasses.fields(Preset) if issubclass(one.type, TrainConfig)}
COMPUTED = {"keep_tokens", *ComputeConfig.__dataclass_fields__}  # do not change what a training learns
PRESETS = repository() / "papermill_runs" / "presets"


def preset_names() -> list[str]:
    """Returns the names of the presets at hand."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def load_preset(name: str, overrides: Mapping[str, Any] | None = None, kind: type[Preset] = Preset) -> Any:
    """Reads a preset, applies `overrides` ({"pair.steps": 50}) and checks every key and value.

    Args:
        kind: `Preset`, or a subclass with the sections that lie under `study`.
    Raises:
        ConfigError: unknown preset, unknown or missing key, or a value of the wrong type or range.
    """
    changes = {}
    for path, value in (overrides or {}).items():
        section, _, key = path.partition(".")
        if not key:
            raise ConfigError(f"unknown key {path!r}: write section.key")
        changes.setdefault(section, {})[key] = value
    values = _merged(_read(name, kind), changes)
    preset = checked(kind, values | {"name": name}, f"preset {name}: ")
    for stage in TRAINED:
        _check_stage(preset, stage)
    return preset


def stage_config(preset: Any, stage: str, changes: Mapping[str, Any]) -> Any:
    """Returns the section of a stage with other values for some keys, and without the keys of a study.

    Raises: ConfigError, as `load_preset`.
    """
    config = getattr(preset, stage)
    values = {key: getattr(config, key) for key in TRAINED[stage].__dataclass_fields__}
    return checked(TRAINED[stage], values | changes, f"{stage}.")


def resolved(config: Any) -> Any:
    """Returns a preset or a section of one as plain JSON values (tuples become lists)."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def _read(name: str, kind: type[Preset]) -> Layer:
    """Reads the sections of a preset and of those that it extends."""
    path = PRESETS / f"{name}.yaml"
    if not PRESETS.is_dir():
        raise ConfigError("presets and notebooks lie in the repository: clone it, and `make install` there")
    if not path.is_file():
        raise ConfigError(f"unknown preset {name!r}{nearest(name, preset_names())}")
    with path.open(encoding="utf8") as file:  # YAML's own errors name it
        values = yaml.load(file, Strict) or {}
    texts = {"extends", "about"}
    if not isinstance(values, dict) or any(not isinstance(values[key], dict) for key in {*values} - texts):
        raise ConfigError(f"{path}: write sections of keys and values, as in cpu.yaml")
    base = _read(values.pop("extends"), kind) if "extends" in values else {}
    study = values.pop("study", {})
    merged = _merged(base, values)
    return merged if kind is Preset else _merged(merged, study)


def _merged(base: Layer, changes: Layer) -> Layer:
    """Returns `base` with the values of `changes`, those of `training` in each stage that has the key."""
    shared = changes.pop("training", {})
    known = {key for kind in TRAINED.values() for key in kind.__dataclass_fields__}
    for key in shared.keys() - known:
        raise ConfigError(f"training.{key}: unknown key {key!r}{nearest(key, sorted(known))}")
    merged = dict(base)
    for stage, kind in TRAINED.items():
        common = {key: value for key, value in shared.items() if key in kind.__dataclass_fields__}
        merged[stage] = merged.get(stage, {}) | common
    for name, value in changes.items():
        merged[name] = merged.get(name, {}) | value if isinstance(value, dict) else value
    return merged


def _check_stage(preset: Preset, stage: str) -> None:
    """As `check_schedule`, which a study's shorter trainings need not pass, and as `check_lengths`."""
    config, where = getattr(preset, stage), f"preset {preset.name}: {stage}"
    check_schedule(config, where)
    check_lengths(config, preset.backbone.max_length, where)


def check_schedule(config: TrainConfig, where: str) -> None:
    """Refuses a schedule that is longer than the training."""
    scheduled = config.warmup + (config.decay if config.schedule == "wsd" else 0)
    if scheduled > config.steps:
        raise ConfigError(f"{where}: warmup + decay exceed steps ({scheduled} > {config.steps})")


def check_lengths(config: TrainConfig, positions: int, where: str) -> None:
    """Refuses texts that are longer than a model's positions: they would be read otherwise than they were
    trained. 0 positions: any number."""
    for key in ("length", "query_length", "chunk_length", "document_length"):
        if 0 < positions < (length := getattr(config, key, 0)):
            what = f"{where}.{key} is {length}, the model has {positions} positions"
            raise ConfigError(f"{what} (backbone.max_length): lower it, or chunks and chunk_length")
