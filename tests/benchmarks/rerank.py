"""`Reranker` against sentence-transformers' `CrossEncoder`: the same model, prompts, precision and threads.

The peer reads the whole prompt of every document, from a directory that `Reranker.save_pretrained` wrote, at
its best batch size; ours reads what comes before the documents of a query once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from tempfile import TemporaryDirectory

import numpy as np
import torch
from contrastive import PRESET, docstrings
from measure import Case
from transformers import PreTrainedTokenizerBase

from unmask.models import backbone
from unmask.models.reranker import Reranker

CANDIDATES = 100
ROOM = 160  # tokens of a prompt, in either program


def rerankers(tokenizer: PreTrainedTokenizerBase, room: int = ROOM) -> tuple[Reranker, object]:
    """Ours and sentence-transformers' of preset cpu's backbone, untrained."""
    from sentence_transformers import CrossEncoder

    model = backbone.build(PRESET.backbone, tokenizer, seed=0)
    ours = Reranker(model, tokenizer, max_length=room, mixed_precision=False, device="cpu")
    with TemporaryDirectory() as folder:
        return ours, CrossEncoder(str(ours.save_pretrained(folder)), device="cpu")


def theirs(peer: object, query: str, documents: Sequence[str], batch_size: int) -> np.ndarray:
    return peer.predict([(query, document) for document in documents], batch_size=batch_size)


def rerank_case(candidates: int = CANDIDATES) -> Case:
    """One query and its candidates."""
    tokenizer, table, order = docstrings()
    rows = table.select(order[:candidates])
    query, documents = rows["query"][0], list(rows["document"])
    ours, peer = rerankers(tokenizer)
    programs = {
        "unmask": {"": partial(ours.score, query, documents)},
        "sentence-transformers": {
            f"batch_size {size}": partial(theirs, peer, query, documents, size) for size in (4, 8, 16, 32)
        },
    }
    setting = (
        f"preset cpu's backbone, {candidates} docstrings for one query, prompts of up to {ROOM} tokens; "
        f"float32, {torch.get_num_threads()} threads"
    )

    def check() -> None:
        difference = abs(ours.score(query, documents) - theirs(peer, query, documents, 8)).max()
        assert difference <= 1e-5, f"scores differ by {difference:.1e}"

    return Case(setting, "documents/s", candidates, programs, check)


CASES: dict[str, Callable[[], Case]] = {"rerank": rerank_case}
