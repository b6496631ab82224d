"""Presets: every hyper-parameter of a run, typed, checked and in one place (`papermill_runs/presets/*.yaml`).

A preset is a YAML file of sections, one per stage. It may extend another one (`extends: cpu`) and then holds
only what differs. Nothing is optional at a distance: a key that no dataclass below knows is refused with the
nearest name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from unmask.store import nearest, repository


class ConfigError(ValueError):
    """A preset, a key or a value that cannot be used; the message says which and what would do."""


@dataclass(frozen=True)
class DataConfig:
    """The corpus: where text, pairs and documents come from."""

    source: str  # "environment", a registry in papermill_runs/sources, or the path of one (*.yaml)
    seed: int
    vocab_size: int  # of the tokenizer trained on the training part; ignored with a ready checkpoint
    dev_packages: tuple[str, ...]  # held out, for choices
    test_packages: tuple[str, ...]  # held out, for reported figures
    max_packages: int  # 0: every installed package
    max_text_mb: int  # cap of the pretraining text
    families: tuple[str, ...] = ()  # of pairs and tasks that are read; empty: all that there are


@dataclass(frozen=True)
class BackboneConfig:
    """The Transformer: a ready checkpoint, or the shape of one built from scratch."""

    checkpoint: str  # "smollm2-135m", Hub name, directory or GGUF file; empty: built in the shape below
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    mlp_size: int
    max_length: int  # longest sequence that positions are meant for
    embedding_std: float  # of the token embeddings at the start
    mask_token: str  # existing, rarely used token that plays [MASK]


@dataclass(frozen=True)
class TrainConfig:
    """What every training stage has: optimiser, schedule, precision, checkpoints."""

    steps: int
    lr: float
    schedule: str  # after a linear warm-up: "wsd" (constant, then cosine decay); "cosine", "linear" (to zero)
    warmup: int  # steps
    decay: int  # last steps, for "wsd"
    beta1: float
    beta2: float
    weight_decay: float
    clip: float  # l2 norm of the gradient
    token_budget: int  # tokens of one micro-batch of one process, padding included
    precision: str  # "bf16" (autocast, where the processor has it) or "fp32"
    gradient_checkpointing: bool  # keep one activation per layer and recompute the others
    compile: bool  # torch.compile of every layer
    checkpoint_every: int  # steps
    keep_checkpoints: int  # the newest so many
    explode: float  # stop once the loss is this many times what it was at the start; 0: never
    log_every: int  # steps
    seed: int


@dataclass(frozen=True)
class ParallelConfig:
    """The processes of one training. They divide the work, not the batch: results do not depend on them."""

    num_processes: int  # over all machines
    num_machines: int
    strategy: str  # "ddp": every process holds the model; "fsdp2": they share its parameters
    launcher: str = ""  # what starts them, if they are on several machines: "srun torchrun --nnodes=8 …"


@dataclass(frozen=True)
class PretrainConfig(TrainConfig):
    """Next-token and masked-diffusion pretraining."""

    batch: int  # sequences
    length: int  # tokens of a packed block


@dataclass(frozen=True)
class DiffusionConfig(PretrainConfig):
    """Masked-diffusion continued pretraining."""

    t_min: float  # t is uniform in (t_min, t_max)
    cut_fraction: float  # share of the sequences that are cut to a random length
    t_max: float = field(default=1.0, kw_only=True)  # t_min = t_max: a fixed share of masks (LLM2Vec)
    log_uniform: bool = field(default=False, kw_only=True)  # low t: drawn more often, not weighed more

    @property
    def masked_share(self) -> float:
        """The mean of t: the share of the tokens that are masked."""
        if self.log_uniform and self.t_min < self.t_max:
            return (self.t_max - self.t_min) / math.log(self.t_max / self.t_min)
        return (self.t_min + self.t_max) / 2


@dataclass(frozen=True)
class ContrastiveConfig(TrainConfig):
    """What every contrastive stage has: a batch whose rows are each other's negatives."""

    batch: int
    cluster_size: int  # rows of a cluster of look-alikes, from which batches are filled; 0: batches at random
    filter_margin: float  # what a surrogate finds this much better than the positive is no negative; -1: off
    keep_tokens: int = field(default=0, kw_only=True)  # of a step, embedded once, with all activations kept

    @property
    def looks_around(self) -> bool:
        """Whether batches depend on a surrogate embedder."""
        return self.cluster_size > 0 or self.filter_margin >= 0


@dataclass(frozen=True)
class PairConfig(ContrastiveConfig):
    """Contrastive training on (query, document) pairs."""

    query_length: int
    document_length: int
    temperature: float
    margin: float  # negatives this much better than the positive are left out
    pooling: str  # "mean" or "last"
    quantize: bool  # INT8 from the first step; false, for the comparison: the unquantised mean
    curriculum: tuple[float, float, float]  # shares of the steps: English; + cross-lingual; everything


@dataclass(frozen=True)
class ContextualConfig(ContrastiveConfig):
    """Contextual training on documents of chunks; a row of a batch is a document."""

    queries_per_document: int  # at most, drawn anew each time
    query_length: int
    chunk_length: int
    chunks: int  # per document, at most
    single: int  # pairs of each data set that join as documents of one chunk, against forgetting
    objective: str  # "pplx": local and global loss; "insent": chunks only, with alpha as λ
    temperature: float
    margin: float
    alpha: float  # weight of the in-sequence term in the local loss
    beta_start: float  # weight of the global loss, first step
    beta_end: float  # last step
    dimensions: tuple[int, ...]  # Matryoshka prefixes; those that fit are used


@dataclass(frozen=True)
class TripletConfig(ContrastiveConfig):
    """Contrastive training with mined hard negatives."""

    accumulation: int  # a batch of `batch` is split into this many independent losses
    query_length: int
    document_length: int
    temperature: float
    negatives: int  # per query
    margin: float  # candidates this much better than the positive are left out
    rank_window: int  # negatives are drawn from this many best candidates
    search: str  # "exact", or "faiss": approximate, for millions of documents
    groups: tuple[str, ...]  # of the pairs that negatives are mined for
    max_pairs: int  # training pairs that negatives are mined for


@dataclass(frozen=True)
class ClustersConfig:
    """How rows that look alike are found, for every stage with a `cluster_size` or a `filter_margin`."""

    surrogate: str  # "lsa": word statistics of the training data; or an embedder: directory or Hub name
    packing: str  # order in which clusters fill batches: "tour" (each next to its nearest) or "random"
    iterations: int  # of k-means
    attempts: int  # of k-means, of which the best counts


@dataclass(frozen=True)
class SynthesisConfig:
    """Queries written by a language model behind an OpenAI-compatible endpoint."""

    endpoint: str  # for instance http://localhost:8000/v1; empty: nothing is synthesised
    model: str  # as the endpoint calls it
    api_key_env: str  # name of the environment variable that holds the key; the key itself is stored nowhere
    passages: int  # that get a query each
    documents: int  # that get queries for their chunks
    queries_per_document: int
    personas: int  # most relevant ones, of which the model picks the character
    concurrency: int  # requests under way at a time
    timeout: float  # seconds of one request
    retries: int  # of one request, with growing pauses
    temperature: float
    max_tokens: int  # of one answer
    min_similarity: float  # cosine of query and passage below which a pair is dropped
    languages: tuple[str, ...]  # of the queries, drawn in turn
    price_in: float  # per million tokens of prompts; 0: the estimate names no price
    price_out: float  # per million tokens of answers
    seed: int


@dataclass(frozen=True)
class MergeConfig:
    """SLERP of two checkpoints and the choice among the candidates."""

    t: tuple[float, ...]  # 0 is the contextual parent, 1 the triplet parent


@dataclass(frozen=True)
class EvaluationConfig:
    """Retrieval tasks built from the held-out part of the corpus."""

    query_length: int
    document_length: int
    chunk_length: int
    max_queries: int  # per task
    max_documents: int  # per task
    precision: str  # "bf16" or "fp32"
    bootstrap: int  # resamples of a confidence interval
    denoising: float = 0.5  # nats at t = 1 minus nats at the fewest masks that notebook 01 asks for
    dev_queries: int = 0  # per task of the development split; 0: as many as of the test split
    dev_documents: int = 0  # likewise
    squad_paragraphs: int = 0  # of SQuAD, where a mirror holds it; 0: all


@dataclass(frozen=True)
class QuantizationConfig:
    """The study of precisions and dimensions. Its short trainings are the pair stage's but for the steps."""

    dimensions: tuple[int, ...]
    candidates: tuple[int, ...]  # documents that the binary first step hands on to INT8
    speed_documents: int  # corpus size of the search-speed measurement
    steps: int  # of each short training
    widths: tuple[int, int]  # hidden size of a small model from scratch, and of one made wider
    depths: tuple[int, int]  # its layers, and those of one made deeper

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(width, depth) of the small model, the deeper and the wider one."""
        (narrow, wide), (flat, deep) = self.widths, self.depths
        return (narrow, flat), (narrow, deep), (wide, flat)


@dataclass(frozen=True)
class RetrievalConfig:
    """Plain retrieval: public benchmarks, and benchmarks built as the paper builds its own."""

    benchmarks: tuple[str, ...]  # `unmask.evaluation.mteb_model.BENCHMARKS`, names of mteb, "ToolRet"
    log_queries: int  # asked in the query-to-query and in the query-to-document benchmark, at most
    query_sizes: tuple[int, ...]  # corpora of the query-to-query benchmark, ascending
    document_sizes: tuple[int, ...]  # corpora of the query-to-document benchmark, ascending
    pool_depth: int  # documents that each system puts into the pool of a query
    passages: int  # that a generator reads for a question


@dataclass(frozen=True)
class ContebConfig:
    """The studies of context: ConTEB, InSeNT, late interaction. Trainings are the contextual stage's but for
    what is named here."""

    tasks: tuple[str, ...]  # of ConTEB's, see `unmask.evaluation.conteb.TASKS`; read from a mirror or the Hub
    chunk_length: int  # tokens of a chunk of these tasks at most
    chunk_words: tuple[int, ...]  # sizes to which our own tasks' chunks are cut and joined
    corpus_documents: tuple[int, ...]  # sizes of the corpus among which a query looks for its document
    late_documents: int  # documents of a task whose token vectors are compared, at most
    lambdas: tuple[float, ...]  # InSeNT's weight of the in-sequence term, one training each
    lam: float  # the same, for one training of the contextual stage's length
    temperature: float  # InSeNT's
    steps: int  # of each training of the sweep


@dataclass(frozen=True)
class CdeConfig(PairConfig):
    """CDE: batches of look-alikes, and an encoder that reads other documents of the corpus beside a text."""

    context: int  # context documents, shared by a batch; a training may set it to 0: a plain encoder
    sequence_dropout: float  # probability that a context document is replaced by the learned null vector
    batch_sizes: tuple[int, ...]  # of the study of batches
    cluster_sizes: tuple[int, ...]  # of the study of batches, beside random ones; ascending
    context_sizes: tuple[int, ...]  # context documents at inference, `context` at most; ascending

    @property
    def trainings(self) -> dict[str, dict[str, float]]:
        """The study's trainings, by name: what each changes here. One that repeats another is left out."""
        filtered, found = max(self.filter_margin, 0.0), {}

        def add(name: str, batch: int, cluster_size: int, filter_margin: float, context: int) -> None:
            changes = {"batch": batch, "cluster_size": cluster_size}
            changes |= {"filter_margin": filter_margin, "context": context}
            if changes not in found.values():
                found[name] = changes

        for batch, size in itertools.product(self.batch_sizes, (0, *self.cluster_sizes)):
            for margin in (-1.0, filtered):
                ending = "-filtered" if margin == filtered else ""
                add(f"b{batch}-c{size or 'random'}{ending}", batch, size, margin, 0)
        for name, context in {"plain": 0, "context": self.context}.items():
            add(f"{name}-random", self.batch, 0, self.filter_margin, context)
            add(name, self.batch, self.cluster_size, self.filter_margin, context)
        return found


@dataclass(frozen=True)
class Qwen3Config(PairConfig):
    """Qwen3-Embedding: a causal embedder with instructions. `steps` are the second phase's."""

    negatives: int  # mined ones per query, in the second phase
    dimensions: tuple[int, ...]  # Matryoshka prefixes; those that fit are used
    scratch: bool  # start from a backbone that was not pretrained, instead of the causal one
    weak_steps: int  # of the first phase, on all pairs and without mined negatives
    weak_lr: float  # of the first phase
    checkpoints: int  # of the second phase that are merged, evenly spaced, the last one among them


@dataclass(frozen=True)
class RerankerConfig(TrainConfig):
    """Qwen3-Reranker: a language model that answers yes or no."""

    batch: int  # queries, each with its document and its negatives
    negatives: int  # mined ones per query
    query_length: int  # without the prompt around query and document
    document_length: int
    candidates: int  # of the embedder that are reranked
    max_queries: int  # per task, reranked in the evaluation


@dataclass(frozen=True)
class AblationConfig:
    """The 2 × 2 ablation: backbone × pooling. Everything else is the pair stage's."""

    steps: int
    groups: tuple[str, ...]  # of the pairs to train on
    ema: float  # smoothing of the loss curve
    batch: int = 0  # pairs of a step; 0: the pair stage's
    seeds: int = 1  # so many times all arms are trained, from the same backbones
    controls: bool = True  # also pretrain the two controls, each for as long as the diffusion stage


@dataclass(frozen=True)
class Preset:
    """All parameters of a run."""

    name: str
    about: str  # one line: machine, time, purpose
    parallel: ParallelConfig
    data: DataConfig
    backbone: BackboneConfig
    ar: PretrainConfig
    diffusion: DiffusionConfig
    pair: PairConfig
    synthesis: SynthesisConfig
    contextual: ContextualConfig
    triplet: TripletConfig
    clusters: ClustersConfig
    merge: MergeConfig
    evaluation: EvaluationConfig
    quantization: QuantizationConfig
    retrieval: RetrievalConfig
    conteb: ContebConfig
    cde: CdeConfig
    qwen3: Qwen3Config
    reranker: RerankerConfig
    ablation: AblationConfig


GROUPS = ("english", "cross-lingual", "multilingual", "code")  # of pairs: the steps of the curriculum
FAMILIES = ("english", "code", "cross-lingual", "multilingual", "contextual")  # of tasks, as reported
TRAINED = ("ar", "diffusion", "pair", "contextual", "triplet", "cde", "qwen3", "reranker")  # by `launch`
SECTIONS = tuple(f.name for f in dataclasses.fields(Preset) if f.name not in ("name", "about"))


def preset_names() -> list[str]:
    """Names of the presets at hand."""
    return sorted(path.stem for path in _directory().glob("*.yaml"))


def load_preset(name: str, overrides: dict[str, Any] | None = None) -> Preset:
    """Reads a preset, applies `overrides` ({"pair.steps": 50}) and checks every key and type.

    Raises:
        ConfigError: unknown preset, unknown or missing key, or a value of the wrong type.
    """
    values = _read(name)
    for key, value in (overrides or {}).items():
        section, _, field = key.partition(".")
        if section not in SECTIONS or not field:
            raise ConfigError(f"unknown key {key!r}: write section.key{nearest(section, SECTIONS)}")
        values.setdefault(section, {})[field] = value
    preset = _build(Preset, values | {"name": name}, where=f"preset {name}")
    _check(preset)
    return preset


def seeded(seed: int) -> dict[str, int]:
    """Overrides that give every training this seed. The corpus and what is synthesised keep theirs."""
    return {f"{section}.seed": seed for section in TRAINED}


def preset_from(values: dict[str, Any]) -> Preset:
    """A preset from the plain values of `resolved`."""
    return _build(Preset, values, where=f"preset {values.get('name')}")


def resolved(config: Any) -> Any:
    """A dataclass as plain JSON values (tuples become lists)."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def _directory() -> Path:
    return repository() / "papermill_runs" / "presets"


def _read(name: str) -> dict[str, Any]:
    path = _directory() / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(f"unknown preset {name!r}{nearest(name, preset_names())}")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf8")) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path.name} is not valid YAML: {error}") from error
    if "extends" not in values:
        return values
    merged = _read(values.pop("extends"))
    for key, value in values.items():
        merged[key] = (
            merged[key] | value if isinstance(value, dict) and isinstance(merged.get(key), dict) else value
        )
    return merged


def _build(kind: type, values: Any, where: str) -> Any:
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: expected key: value lines, got {values!r}")
    hints = typing.get_type_hints(kind)
    for key in values:
        if key not in hints:
            raise ConfigError(f"{where}: unknown key {key!r}{nearest(key, list(hints))}")
    optional = {one.name for one in dataclasses.fields(kind) if one.default is not dataclasses.MISSING}
    if missing := [key for key in hints if key not in values and key not in optional]:
        raise ConfigError(f"{where}: missing {', '.join(missing)}")
    return kind(**{key: _convert(hints[key], value, f"{where}: {key}") for key, value in values.items()})


def _convert(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, where)
    if isinstance(hint, types.GenericAlias):  # tuple[int, ...] or tuple[float, float, float]
        item, count = hint.__args__[0], None if Ellipsis in hint.__args__ else len(hint.__args__)
        if not isinstance(value, list | tuple) or (count is not None and len(value) != count):
            raise ConfigError(
                f"{where} must be a list{f' of {count} values' if count else ''}, got {value!r}"
            )
        return tuple(_convert(item, one, where) for one in value)
    if hint is float and isinstance(value, str):  # YAML 1.1 reads 1e-4 as a string
        with contextlib.suppress(ValueError):
            value = float(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{where} must be {hint.__name__}, got {value!r}")
    return value


def _check(preset: Preset) -> None:
    for name in TRAINED:
        stage = getattr(preset, name)
        where = f"preset {preset.name}: {name}"
        for key in ("steps", "batch", "token_budget", "checkpoint_every", "keep_checkpoints", "log_every"):
            if getattr(stage, key) < 1:
                raise ConfigError(f"{where}.{key} must be at least 1, got {getattr(stage, key)}")
        if stage.schedule not in ("wsd", "cosine", "linear"):
            raise ConfigError(f"{where}.schedule must be 'wsd', 'cosine' or 'linear', got {stage.schedule!r}")
        if stage.precision not in ("bf16", "fp32"):
            raise ConfigError(f"{where}.precision must be 'bf16' or 'fp32', got {stage.precision!r}")
        if stage.warmup + (stage.decay if stage.schedule == "wsd" else 0) > stage.steps:
            raise ConfigError(
                f"{where}: warmup + decay exceed steps ({stage.warmup} + {stage.decay} > {stage.steps})"
            )
        if isinstance(stage, ContrastiveConfig):
            _check_contrastive(stage, where)
    parallel, where = preset.parallel, f"preset {preset.name}: parallel"
    for key in ("num_processes", "num_machines"):
        if getattr(parallel, key) < 1:
            raise ConfigError(f"{where}.{key} must be at least 1, got {getattr(parallel, key)}")
    if parallel.num_processes % parallel.num_machines:
        raise ConfigError(
            f"{where}: {parallel.num_processes} processes cannot be shared evenly by "
            f"{parallel.num_machines} machines: change one of them (--gpus, parallel.num_machines)"
        )
    if parallel.strategy not in ("ddp", "fsdp2"):
        raise ConfigError(f"{where}.strategy must be 'ddp' or 'fsdp2', got {parallel.strategy!r}")
    clusters, where = preset.clusters, f"preset {preset.name}: clusters"
    if clusters.packing not in ("tour", "random"):
        raise ConfigError(f"{where}.packing must be 'tour' or 'random', got {clusters.packing!r}")
    for key in ("iterations", "attempts"):
        if getattr(clusters, key) < 1:
            raise ConfigError(f"{where}.{key} must be at least 1, got {getattr(clusters, key)}")
    _check_neighbours(preset)
    if preset.contextual.objective not in ("pplx", "insent"):
        raise ConfigError(
            f"preset {preset.name}: contextual.objective must be 'pplx' or 'insent', "
            f"got {preset.contextual.objective!r}"
        )
    conteb, where = preset.conteb, f"preset {preset.name}: conteb"
    for key in ("chunk_length", "late_documents", "steps"):
        if getattr(conteb, key) < 1:
            raise ConfigError(f"{where}.{key} must be at least 1, got {getattr(conteb, key)}")
    for key in ("chunk_words", "corpus_documents"):
        sizes = getattr(conteb, key)
        if len(sizes) < 2 or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
            raise ConfigError(f"{where}.{key} must be two or more, positive, ascending, got {list(sizes)}")
    if not conteb.lambdas or not all(0 <= lam <= 1 for lam in conteb.lambdas):
        raise ConfigError(f"{where}.lambdas must lie in 0..1, one at least, got {list(conteb.lambdas)}")
    if not 0 <= conteb.lam <= 1:
        raise ConfigError(f"{where}.lam must lie in 0..1, got {conteb.lam}")
    if preset.triplet.search not in ("exact", "faiss"):
        raise ConfigError(
            f"preset {preset.name}: triplet.search must be 'exact' or 'faiss', got {preset.triplet.search!r}"
        )
    quantization, where = preset.quantization, f"preset {preset.name}: quantization"
    for key in ("dimensions", "candidates", "widths", "depths"):
        values = getattr(quantization, key)
        if not values or list(values) != sorted(values) or values[0] < 1:
            raise ConfigError(f"{where}.{key} must be positive and ascending, got {list(values)}")
    if quantization.candidates[0] < 10:
        raise ConfigError(f"{where}.candidates must be at least 10, from which nDCG@10 takes its results")
    if quantization.steps < 1:
        raise ConfigError(f"{where}.steps must be at least 1, got {quantization.steps}")
    for key in ("dimensions", "widths"):
        if any(value % 8 for value in getattr(quantization, key)):
            raise ConfigError(
                f"{where}.{key} must be multiples of 8, got {list(getattr(quantization, key))}: "
                "binary packs eight dimensions into a byte"
            )
    retrieval, where = preset.retrieval, f"preset {preset.name}: retrieval"
    for key in ("query_sizes", "document_sizes"):
        sizes = getattr(retrieval, key)
        if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
            raise ConfigError(f"{where}.{key} must be positive and ascending, got {list(sizes)}")
    for key in ("log_queries", "pool_depth", "passages"):
        if getattr(retrieval, key) < 1:
            raise ConfigError(f"{where}.{key} must be at least 1, got {getattr(retrieval, key)}")
    for key, names, known in (
        ("triplet.groups", preset.triplet.groups, GROUPS),
        ("ablation.groups", preset.ablation.groups, GROUPS),
        ("data.families", preset.data.families, FAMILIES),
    ):
        for name in names:
            if name not in known:
                what = "family" if known is FAMILIES else "group"
                raise ConfigError(
                    f"preset {preset.name}: {key}: unknown {what} {name!r}{nearest(name, known)}"
                )
    if not 0 < preset.diffusion.t_min <= preset.diffusion.t_max <= 1:
        raise ConfigError(
            f"preset {preset.name}: diffusion needs 0 < t_min <= t_max <= 1, got {preset.diffusion.t_min} "
            f"and {preset.diffusion.t_max}"
        )
    if preset.ablation.seeds < 1:
        raise ConfigError(
            f"preset {preset.name}: ablation.seeds must be at least 1, got {preset.ablation.seeds}"
        )


def _check_contrastive(stage: ContrastiveConfig, where: str) -> None:
    if stage.batch < 2:
        raise ConfigError(
            f"{where}.batch must be at least 2, got {stage.batch}: a contrastive loss needs negatives"
        )
    if stage.cluster_size < 0 or stage.cluster_size == 1:
        raise ConfigError(
            f"{where}.cluster_size must be at least 2, or 0 for random batches, got {stage.cluster_size}"
        )
    if stage.filter_margin < 0 and stage.filter_margin != -1:
        raise ConfigError(
            f"{where}.filter_margin must be at least 0, or -1 for no filter, got {stage.filter_margin}"
        )
    if isinstance(stage, PairConfig) and stage.pooling not in ("mean", "last"):
        raise ConfigError(f"{where}.pooling must be 'mean' or 'last', got {stage.pooling!r}")


def _check_neighbours(preset: Preset) -> None:
    cde, where = preset.cde, f"preset {preset.name}: cde"
    if cde.context < 1:
        raise ConfigError(f"{where}.context must be at least 1, got {cde.context}")
    if cde.pooling != "mean":
        raise ConfigError(f"{where}.pooling must be 'mean', over the text alone, got {cde.pooling!r}")
    if not 0 <= cde.sequence_dropout < 1:
        raise ConfigError(f"{where}.sequence_dropout must lie in 0..1, got {cde.sequence_dropout}")
    for key, least, most in (
        ("batch_sizes", 2, None), ("cluster_sizes", 2, None), ("context_sizes", 0, cde.context)
    ):  # fmt: skip
        sizes = getattr(cde, key)
        if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < least:
            raise ConfigError(f"{where}.{key} must be at least {least} and ascending, got {list(sizes)}")
        if most is not None and sizes[-1] > most:
            raise ConfigError(f"{where}.{key} must not exceed cde.context ({most}), got {list(sizes)}")
    qwen3, where = preset.qwen3, f"preset {preset.name}: qwen3"
    for key in ("negatives", "weak_steps", "checkpoints"):
        if getattr(qwen3, key) < 1:
            raise ConfigError(f"{where}.{key} must be at least 1, got {getattr(qwen3, key)}")
    if qwen3.checkpoints > qwen3.steps:
        raise ConfigError(f"{where}.checkpoints exceed its steps ({qwen3.checkpoints} > {qwen3.steps})")
    for key in ("negatives", "query_length", "document_length", "candidates", "max_queries"):
        if getattr(preset.reranker, key) < 1:
            raise ConfigError(
                f"preset {preset.name}: reranker.{key} must be at least 1, "
                f"got {getattr(preset.reranker, key)}"
            )
