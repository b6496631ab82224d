"""Presets of a run: the library's, and with each notebook's settings beside the trainings.

In a preset's file (`papermill_runs/presets/*.yaml`) these lie under `study`; those of `cde` and `qwen3` are
keys of the stage's section here.
"""

import itertools
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field

from unmask import config
from unmask.config import Ascending, Count, Group, Place, Positive, Section, Several, Share, Sizes, Whole

Inner = Annotated[float, Field(gt=0, lt=1)]
Names = tuple[str, ...]
Shape = tuple[Count, Count]  # width and depth
# Of a pool: BM25, n-grams of characters, latent semantic analysis, the pair stage's model, or an embedder.
System = Literal["bm25", "characters", "lsa", "pair"] | Annotated[Place, Field(pattern="/")]


class EndpointConfig(Section):
    """A language model behind an OpenAI-compatible endpoint."""

    section: ClassVar[str]  # of the preset, for what is said to a user
    endpoint: str = ""  # for instance http://localhost:8000/v1; empty: nothing is asked
    model: str = ""  # as the endpoint calls it
    api_key_env: str = "OPENAI_API_KEY"  # environment variable that holds the key, which is stored nowhere
    concurrency: Count = 16  # requests under way at a time
    timeout: Positive = 60.0  # seconds of one request
    retries: Whole = 5  # of one request, with growing pauses
    temperature: Share = 0.0
    max_tokens: Count = 128  # of one answer; BERGEN's, and Anthropic's contexts have 50 to 100


class SynthesisConfig(EndpointConfig):
    """Queries written by a language model (02a). Without one, the notebook shows what it would be sent."""

    section = "synthesis"
    temperature: Share = 0.7
    max_tokens: Count = 400
    passages: Whole = 100  # that get a query each
    documents: Whole = 20  # that get queries for their chunks
    queries_per_document: Count = 4
    personas: Count = 5  # most relevant ones, of which the model picks the character; the paper's top-5
    min_similarity: float = 0.7  # cosine below which a pair is dropped; Qwen3-Embedding's filter
    languages: Annotated[Names, Field(min_length=1)] = ("English",)  # of the queries, drawn
    seed: Whole = 0


class MergeConfig(Section):
    """SLERP of two checkpoints and the choice among the candidates (05)."""

    # 0 is the contextual parent, 1 the triplet parent.
    t: Annotated[tuple[Inner, ...], Field(min_length=1)] = (0.25, 0.5, 0.75)


class EvaluationConfig(config.EvaluationConfig):
    """Retrieval tasks built from the held-out part of the corpus (all notebooks)."""

    denoising: float = 0.5  # notebook 01's gate: least rise in nats from the fewest masks to t = 1
    dev_queries: Whole = 0  # per task of the development split; 0: as many as of the test split
    dev_documents: Whole = 0  # likewise
    squad_paragraphs: Whole = 0  # of SQuAD, where a mirror holds it; 0: all


class QuantizationConfig(Section):
    """Precisions and dimensions (06). Its short trainings are the pair stage's but for the steps."""

    dimensions: Sizes
    candidates: Sizes  # documents that the binary first step hands on to INT8
    steps: Count  # of each short training
    # A small model, a deeper and a wider one; none: the diffusion backbone is trained.
    shapes: tuple[Shape, Shape, Shape] | tuple[()]


class PartsConfig(Section):
    """The pair stage with each of its parts left out once (02b)."""

    train: bool = False
    steps: Count = 40  # of each of the four trainings
    batch: Literal[0] | Several = 0  # pairs of a step; 0: the pair stage's


Arm = Literal["diffusion, last", "bidirectional, mean", "AR continued, mean", "masked next token, mean"]


class AblationConfig(Section):
    """Backbone × pooling (07). Everything else is the pair stage's."""

    steps: Count
    # Beside *diffusion, mean*, *AR, mean* and *AR, last*; the last two are pretrained as long as diffusion.
    arms: tuple[Arm, ...] = get_args(Arm)
    groups: tuple[Group, ...] = ("english",)  # of the pairs to train on
    ema: Share = 0.02  # smoothing of the loss curve; the paper's, figure 2
    batch: Literal[0] | Several = 0  # pairs of a step; 0: the pair stage's
    # Of the pair stage's rate; each arm is trained with each, and the best on development data stays.
    rates: Annotated[tuple[Positive, ...], Field(min_length=1)] = (1.0,)
    rate_steps: Whole = 0  # of the trainings that choose among several rates; 0: as many as `steps`
    anneal: Share = 0.0  # also pretrain with a causal mask that fades over this share of the steps; 0: no
    benchmarks: Names = ()  # public ones, as `retrieval.benchmarks`, of the paper's four backbones
    squad: bool = False  # also ask SQuAD's questions, where a mirror holds it


# ConTEB's data sets on the Hub → the split that is evaluated: "test" where there is one, otherwise
# "validation", otherwise "train", as the authors say. In the order of the columns of the paper's table 3.
CONTEB = {"covid-qa": "train", "esg-reports": "test", "football": "train", "geography": "train"}
CONTEB |= {"insurance": "train", "mldr-conteb-eval": "test", "narrative-qa": "test"}
CONTEB |= {"squad-conteb-eval": "validation"}
ContebTraining = Literal["sweep", "insent", "flattened", "token vectors"]


class ContebConfig(Section):
    """Context: ConTEB (08), InSeNT and late interaction (08a). Trainings are the contextual stage's but for
    what is named here."""

    tasks: Names = ()  # of `CONTEB`; read from a mirror or the Hub
    benchmarks: Names = ()  # searches of short texts, as `retrieval.benchmarks`; also joined
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


class ContextsConfig(EndpointConfig):
    """A context before each chunk, which a language model writes from the whole document (08, 09a)."""

    section = "contexts"


class RetrievalConfig(Section):
    """Benchmarks built as the paper builds its own (09), and public ones (09a)."""

    benchmarks: Names = ()  # `unmask_study.mteb.BENCHMARKS`, names of mteb, "ToolRet"
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
    xquad: Names = ("en",)  # languages of XQuAD, where a mirror holds it


class ReaderConfig(EndpointConfig):
    """Answers of a language model that reads retrieved passages (09a)."""

    section = "reader"
    passages: Count = 5  # that it reads; the paper's
    questions: Count = 500  # of each data set, at most


class CdeConfig(config.CdeConfig):
    """CDE: batches and context (10)."""

    batch_sizes: Annotated[tuple[Several, ...], Field(min_length=1), Ascending]  # of the study of batches
    cluster_sizes: Sizes  # of the study of batches, beside random ones
    # Beside the two encoders on look-alikes: how hard batches are, both encoders on random batches, and one
    # family's tasks beside documents of another.
    studies: tuple[Literal["hardness", "random", "domains"], ...] = ("hardness", "random", "domains")
    # context documents at inference, of which no more than `context` are read
    context_sizes: Annotated[tuple[Whole, ...], Field(min_length=1), Ascending]
    benchmarks: Names = ()  # public ones of every type of task, as `retrieval.benchmarks`

    @property
    def trainings(self) -> dict[str, dict[str, float]]:
        """Returns what each training changes here, by its name; one that repeats another is left out."""
        names: dict[tuple[float, ...], str] = {}
        margins = {"": -1.0, "-filtered": max(self.filter_margin, 0.0)}
        batches = self.batch_sizes if "hardness" in self.studies else ()
        for batch, size, end in itertools.product(batches, (0, *self.cluster_sizes), margins):
            names.setdefault((batch, size, margins[end], 0), f"b{batch}-c{size or 'random'}{end}")
        for name, context in {"plain": 0, "context": self.context}.items():
            if "random" in self.studies:
                names.setdefault((self.batch, 0, self.filter_margin, context), f"{name}-random")
            names.setdefault((self.batch, self.cluster_size, self.filter_margin, context), name)
        keys = ("batch", "cluster_size", "filter_margin", "context")
        return {name: dict(zip(keys, values)) for values, name in names.items()}


Qwen3Training = Literal["no-weak", "one-size", "reranker"]


class Qwen3EmbeddingConfig(config.Qwen3EmbeddingConfig):
    """Qwen3-Embedding: two phases and a reranker (11). `steps` are the second phase's."""

    start: Literal["causal", "scratch", "pair"] = "causal"  # the parent, random weights, or notebook 02's
    # Beside the two phases: the second alone, that without prefixes, and the reranker.
    trainings: tuple[Qwen3Training, ...] = get_args(Qwen3Training)
    weak_steps: Count  # of the first phase, on all pairs and without mined negatives
    weak_lr: Positive  # of the first phase
    weak_only: Names = ()  # groups or data sets of the first phase: [synthetic-pairs]; empty: all
    benchmarks: Names = ()  # public ones of every type of task, as `retrieval.benchmarks`
    checkpoints: Count = 3  # of the second phase that are merged, evenly spaced, the last one among them


class Preset(config.Preset):
    """All parameters of a run."""

    synthesis: SynthesisConfig = Field(default_factory=SynthesisConfig)
    merge: MergeConfig = Field(default_factory=MergeConfig)
    evaluation: EvaluationConfig
    quantization: QuantizationConfig
    parts: PartsConfig = Field(default_factory=PartsConfig)
    ablation: AblationConfig
    conteb: ContebConfig
    contexts: ContextsConfig = Field(default_factory=ContextsConfig)
    retrieval: RetrievalConfig
    reader: ReaderConfig = Field(default_factory=ReaderConfig)
    cde: CdeConfig
    qwen3: Qwen3EmbeddingConfig


load_preset = partial(config.load_preset, kind=Preset)


def comparable(preset: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a resolved preset ("pair.lr" → value) that runs must share to be comparable: all
    but training seeds and compute settings."""
    apart = {f"{stage}.{key}" for stage in config.TRAINED for key in config.COMPUTED | {"seed"}}
    sections = {name: row for name, row in preset.items() if isinstance(row, dict)}
    values = {f"{name}.{key}": value for name, row in sections.items() for key, value in row.items()}
    return {path: value for path, value in values.items() if path not in apart}
