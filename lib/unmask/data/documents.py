"""Documents of chunks, laid out in batches for training."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from unmask.data.tokenized import TokenDocument
from unmask.data.tokens import TokenSequence, join_chunks


class ContextualBatch(NamedTuple):
    """N queries and M distinct documents; every distinct document is encoded once."""

    sequences: list[TokenSequence]  # the N queries, then the M documents
    document_N: Tensor
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
    document_N = torch.tensor([index for index, _ in drawn])
    counts_MC = torch.nn.utils.rnn.pad_sequence(lengths, batch_first=True)
    return ContextualBatch(queries + joined, document_N, torch.tensor(golds), counts_MC)


def split_rows(rows_RD: Tensor, batch: ContextualBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of an encoded batch as (q_ND, chunks_MCD, documents_MD, chunk_mask_MC); the mask is on the CPU.

    A document's own vector is the mean over all its chunks' tokens, which is the token-weighted mean of its
    chunk means.
    """
    counts_MC = batch.chunk_tokens_MC.to(rows_RD.device, non_blocking=True)
    mask_MC = counts_MC > 0
    n = len(batch.document_N)
    empty_MCD = rows_RD.new_zeros(*mask_MC.shape, rows_RD.shape[1])
    chunks_MCD = empty_MCD.masked_scatter(mask_MC[..., None], rows_RD[n:])
    weights_MC = counts_MC / counts_MC.sum(1, keepdim=True)
    documents_MD = (chunks_MCD * weights_MC[..., None]).sum(1)
    return rows_RD[:n], chunks_MCD, documents_MD, batch.chunk_tokens_MC > 0
