"""Documents of chunks: cut from long text where a reader would, and laid out in batches for training."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from unmask.data.tokenized import TokenDocument
from unmask.data.tokens import TokenSequence, join_chunks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The end of a line or of a sentence; CJK sentences are not followed by a space.
_ENDS = re.compile(
    r"(?<=\n)(?!\n)|(?<=[.!?…؟।])(?=\s)|(?<=[.!?…؟।][\"'”’»)\]])(?=\s)|(?<=[。！？])(?![」』”）])"
)


def chunks(
    text: str, tokenizer: PreTrainedTokenizerBase, length: int = 256, count: int = 16
) -> list[list[str]]:
    """Cuts a text into documents of at most `count` chunks of at most `length` tokens each.

    Chunks are filled up to the last paragraph that fits, else to the last sentence; a sentence that is too
    long by itself is cut between words, or inside one where there is no other way. A text of more than
    `count` chunks becomes several documents of nearly equal size. Nothing but white space between chunks is
    left out, and no single character is split.

    Returns: documents, each a list of chunks; none for a text of white space.
    """
    sentences = _fitting(_ENDS.split(text), tokenizer, length)
    sizes = _sizes(sentences, tokenizer)
    cut, start = [], 0
    while start < len(sentences):
        stop = _stop(sentences, sizes, start, length)
        # Tokens merge differently in context; rarely, what was counted in parts is longer as a whole.
        cut += _fitting(["".join(sentences[start:stop]).strip()], tokenizer, length)
        start = stop
    filled = [chunk.strip() for chunk in cut if chunk.strip()]
    documents = -(-len(filled) // count)
    bounds = [len(filled) * index // documents for index in range(documents + 1)] if filled else []
    return [filled[start:stop] for start, stop in pairwise(bounds)]


def _stop(sentences: list[str], sizes: list[int], start: int, length: int) -> int:
    """Where the chunk from `start` on ends: after the last paragraph that fits and leaves it at least half as
    full as it could be, else after the last sentence that fits."""
    filled = list(accumulate(sizes[start:]))
    stop = max(1, sum(total <= length for total in filled))
    if stop < len(filled):
        ends = [n for n in range(stop, 0, -1) if sentences[start + n - 1].endswith("\n\n")]
        stop = next((n for n in ends if filled[n - 1] >= filled[stop - 1] / 2), stop)
    return start + stop


def _fitting(texts: list[str], tokenizer: PreTrainedTokenizerBase, length: int) -> list[str]:
    """The texts; those of more than `length` tokens are halved at the space nearest to the middle until they
    fit."""
    parts = []
    for text, size in zip(texts, _sizes(texts, tokenizer), strict=True):
        if size <= length or len(text) <= 1:
            parts.append(text)
            continue
        middle = len(text) // 2
        spaces = (match.end() for match in re.finditer(r"\s+", text) if match.end() < len(text))
        at = min(spaces, key=lambda end: abs(end - middle), default=middle)
        parts += _fitting([text[:at], text[at:]], tokenizer, length)
    return parts


def _sizes(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    # The Rust tokenizer itself: several times faster than through the wrapper.
    encodings = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [len(encoding) for encoding in encodings]


@dataclass(frozen=True)
class ContextualBatch:
    """N queries and M distinct documents; every distinct document is encoded once."""

    sequences: list[TokenSequence]  # the N queries, then the M documents
    document_N: Tensor
    query_N: Tensor  # which of its document's queries each one is
    gold_N: Tensor
    chunk_tokens_MC: Tensor  # tokens of each chunk; 0 where a document has fewer chunks


def contextual_batch(
    documents: list[TokenDocument], *, separator_id: int, queries_per_document: int, rng: np.random.Generator
) -> ContextualBatch:
    """Draws up to `queries_per_document` queries of each document and lays the batch out for one encoding
    pass."""
    drawn = [
        (index, int(number))
        for index, document in enumerate(documents)
        for number in sorted(rng.permutation(len(document.queries))[:queries_per_document])
    ]
    queries = [TokenSequence(documents[index].queries[number]) for index, number in drawn]
    golds = [documents[index].golds[number] for index, number in drawn]
    lengths = [torch.tensor([float(len(chunk)) for chunk in document.chunks]) for document in documents]
    joined = [join_chunks(document.chunks, separator_id) for document in documents]
    document_N, query_N = torch.tensor(drawn).T
    counts_MC = torch.nn.utils.rnn.pad_sequence(lengths, batch_first=True)
    return ContextualBatch(queries + joined, document_N, query_N, torch.tensor(golds), counts_MC)


def split_rows(rows_RD: Tensor, batch: ContextualBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of an encoded batch as (q_ND, chunks_MCD, documents_MD, chunk_mask_MC).

    A document's own vector is the mean over all its chunks' tokens, which is the token-weighted mean of its
    chunk means.
    """
    counts_MC = batch.chunk_tokens_MC.to(rows_RD.device)
    mask_MC = counts_MC > 0
    n = len(batch.document_N)
    chunks_MCD = rows_RD.new_zeros(*mask_MC.shape, rows_RD.shape[1])
    chunks_MCD = chunks_MCD.masked_scatter(mask_MC[..., None], rows_RD[n:])
    weights_MC = counts_MC / counts_MC.sum(1, keepdim=True)
    documents_MD = (chunks_MCD * weights_MC[..., None]).sum(1)
    return rows_RD[:n], chunks_MCD, documents_MD, mask_MC
