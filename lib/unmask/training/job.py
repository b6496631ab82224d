"""A training, written down: what processes of their own are given to do it."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from unmask.config import TRAINED, BackboneConfig, ClustersConfig, ParallelConfig, TrainConfig
from unmask.models.checkpoint import Settings
from unmask.schema import Section

JOB = "job.json"  # in a training's folder: the job, and everything that its result depends on
Location = Annotated[str, BeforeValidator(str)]  # a path or a name
# What a stage takes beside values of its section.
OPTIONS = ("only", "mined", "surrogate", "milestones", "bidirectional", "late_chunking", "settings")


class Job(Section):
    """One training, without the objects that it works with: another process makes the same stage of it."""

    stage: str  # its class, as "module:name"
    section: str  # of the preset
    config: TrainConfig  # the section's values
    backbone: BackboneConfig  # what is built where it starts from nothing; [MASK] in any case
    clusters: ClustersConfig = Field(default_factory=ClustersConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)

    only: tuple[str, ...] = ()  # groups or data sets of pairs to train on; none: all, by the curriculum
    mined: Location = ""  # file of mined triplets
    surrogate: Location = ""  # an embedder, directory or Hub name, instead of `clusters.surrogate`
    milestones: tuple[int, ...] = ()  # steps after which the model is saved as well, see `milestones`
    bidirectional: bool = False  # a causal start reads both sides from the first step on, without pretraining
    settings: Settings | None = None  # how the embedder that it starts from reads; None: as the recipe's
    late_chunking: bool = True  # false: contextual training on the same batches, each chunk read alone

    # Known when it begins.
    corpus: str = ""  # folder
    tokenizer: str = ""  # folder or Hub name
    start: str = ""  # checkpoint directory or Hub name; empty: the backbone is built
    folder: str = ""  # of its outputs

    @classmethod
    def of(cls, row: dict[str, Any]) -> "Job":
        """Reads plain values (`config.resolved`)."""
        return cls(**row | {"config": TRAINED[row["section"]](**row["config"])})
