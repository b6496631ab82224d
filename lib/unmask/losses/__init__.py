"""The objectives of every training stage: pure functions of tensors, without model, data or files.

Shape suffixes: B sequences · L tokens · D dimensions · V vocabulary · N queries · M distinct documents ·
C chunks per document · K hard negatives per query.
"""

from unmask.losses.contextual import (
    batch_loss,
    contextual_loss,
    global_loss,
    insent_loss,
    local_loss,
    mean_maxsim,
    sequence_loss,
)
from unmask.losses.contrastive import pair_loss, qwen3_loss, triplet_loss
from unmask.losses.matryoshka import matryoshka
from unmask.losses.pretraining import answer_loss, diffusion_loss, next_token_loss
