"""Training: one loop for all stages."""

from unmask.training.contrastive import Contextual, Pair, Triplet
from unmask.training.launch import TrainingStopped
from unmask.training.loop import data_report, milestones, train
from unmask.training.neighbours import Cde, LateInteraction, Qwen3, Reranking
from unmask.training.pretraining import Diffusion, NextToken
from unmask.training.stages import Stage
from unmask.training.watch import Watch, history, probes, seconds_until

STAGES: dict[str, type[Stage]] = {
    kind.section: kind for kind in (NextToken, Diffusion, Pair, Contextual, Triplet, Cde, Qwen3, Reranking)
}
