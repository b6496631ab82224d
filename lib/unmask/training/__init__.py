"""Training: one loop for all stages."""

from unmask.training.launch import TrainingStopped
from unmask.training.loop import data_report, milestones, train
from unmask.training.neighbours import Cde, LateInteraction, Qwen3, Reranking
from unmask.training.stages import Contextual, Diffusion, NextToken, Pair, Stage, Triplet
from unmask.training.watch import Watch, history, probes, seconds_until

OWN = (NextToken, Diffusion, Pair, Contextual, Triplet)
OF_NEIGHBOURS = (Cde, Qwen3, Reranking)
STAGES: dict[str, type[Stage]] = {kind.section: kind for kind in OWN + OF_NEIGHBOURS}
