"""The contrastive stages: pairs, documents of chunks, triplets.

Shape suffixes: N queries · R rows (texts) · D dimensions · M documents · C chunks of a document · K hard
negatives of a query · L tokens.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.utils.rnn import pad_sequence

from unmask import losses
from unmask.config import GROUPS
from unmask.data.batches import curriculum
from unmask.data.mining import Encoder, Neighbours, Surrogate, neighbours
from unmask.data.tokenize import TokenDocuments, pairs_as_documents, token_documents
from unmask.data.tokens import ending, join_chunks
from unmask.extras import extra
from unmask.losses.tensors import to_device
from unmask.models import backbone, checkpoint
from unmask.models.embedder import Embedder
from unmask.models.encoding import TokenSequence, owners
from unmask.models.quantize import int8
from unmask.store import content_hash, fingerprint
from unmask.training.cache import cached_backward
from unmask.training.distributed import Distributed
from unmask.training.stages import TextStage


@dataclass(frozen=True, kw_only=True)
class Batch:
    """N queries of one data set, and all texts that their loss looks at."""

    dataset: str
    sequences: list[TokenSequence]  # the queries come first
    count: int  # N
    key_R: np.ndarray | None = None  # of each text, by `text_id`
    hard_N: np.ndarray | None = None  # the number of each query's hard negatives
    negatives: Tensor | None = None  # (N, N), False: the document is no negative of the query
    weight: float = 1.0  # of its loss in the step's
    context: Sequence[TokenSequence] = ()  # CDE's: documents that all pairs see
    visible: np.ndarray | None = None  # which of these are seen; the null vector stands for the others


@dataclass(frozen=True, kw_only=True)
class ContextualBatch(Batch):
    """N queries about M distinct documents, every one of which is encoded once."""

    document_N: Tensor
    gold_N: Tensor
    chunk_tokens_MC: Tensor  # tokens of each chunk; 0 where a document has fewer chunks
    beta: float  # weight of the document-level term

    def split(self, rows_RD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Its encoded rows as (q_ND, chunks_MCD, documents_MD).

        A document's own vector is the mean over all its chunks' tokens, which is the token-weighted mean of
        its chunk means.
        """
        chunks_MCD = self.by_document(rows_RD[self.count :])
        counts_MC = to_device(self.chunk_tokens_MC, rows_RD.device)
        weights_MC = counts_MC / counts_MC.sum(1, keepdim=True)
        documents_MD = (chunks_MCD * weights_MC[..., None]).sum(1)
        return rows_RD[: self.count], chunks_MCD, documents_MD

    @property
    def mask_MC(self) -> Tensor:
        """Which chunks there are, on the CPU."""
        return self.chunk_tokens_MC > 0

    def by_document(self, chunks_X: Tensor) -> Tensor:
        """A value for each chunk (X, …) by document and chunk (M, C, …); zeros where there is no chunk."""
        return pad_sequence(chunks_X.split(self.mask_MC.sum(1).tolist()), batch_first=True)

    def labels(self) -> dict[str, Tensor]:
        """Which chunk of which document answers which query, as the losses take it."""
        index = {"document_N": self.document_N, "gold_N": self.gold_N, "chunk_mask_MC": self.mask_MC}
        return index | {"query_ids_N": text_ids(self.sequences[: self.count])}


class Contrastive(TextStage):
    """What the contrastive stages share: single-dataset batches, and a model that is run as it is. A batch is
    a list of parts, each with one loss: `loss(rows_RD, part, temperature=…, queries=…)` is the sum of some
    queries' terms in it, given its texts' vectors. Only `Triplet` has several.
    """

    def shown(self, step: int) -> Iterator[list[str]]:
        """Each query with its document, and with its hard negatives, if any."""
        for part in self.batch(step):
            texts = iter([self.text(text.tokens_L[owners(text) >= 0]) for text in part.sequences])
            queries, documents = ([*islice(texts, part.count)] for _ in range(2))
            for query, document, hard in zip(queries, documents, part.hard_N, strict=True):
                negatives = [f"negative  {negative}" for negative in islice(texts, hard)]
                yield [f"query     {query}", f"document  {document}", *negatives]

    def texts(self, name: str, rows: np.ndarray) -> Batch:
        """The pairs in some rows: queries, then documents, then the hard negatives of each query, if any."""
        pairs = self.data[name]
        texts = [pairs.queries[i] for i in rows] + [pairs.documents[i] for i in rows]
        keys, hard_N = [pairs.keys[rows, 1], pairs.keys[rows, 2]], np.zeros(len(rows), np.int64)
        if pairs.negatives:
            texts += [negative for i in rows for negative in pairs.negatives[i]]
            keys += [pairs.negative_keys[i] for i in rows]
            hard_N = np.array([len(pairs.negatives[i]) for i in rows])
        sequences, key_R = [*map(self.read, texts)], np.concatenate(keys)
        return Batch(dataset=name, sequences=sequences, count=len(rows), key_R=key_R, hard_N=hard_N)

    def served(self, rows_RD: Tensor) -> Tensor:
        """Pooled vectors as `encode` gives them: of unit length, where the embedder's are, then as codes."""
        if self.job.settings and self.job.settings.normalize:
            rows_RD = normalize(rows_RD, dim=-1)
        return int8(rows_RD) if getattr(self.config, "quantize", True) else rows_RD

    def part_of_loss(self, part: Batch, queries: slice, rows_RD: Tensor) -> Tensor:
        """What some of the queries pay of a part's loss."""
        return part.weight * self.loss(rows_RD, part, temperature=self.config.temperature, queries=queries)

    def backward(self, module: nn.Module, parts: list[Batch], processes: Distributed) -> dict[str, Any]:
        options = {"processes": processes, **self.config.memory(processes.device.type)}
        total = sum(self.part_backward(module, part, last=part is parts[-1], **options) for part in parts)
        tokens = sum(len(text) for part in parts for text in (*part.context, *part.sequences))
        pairs = sum(part.count for part in parts)
        return {"loss": processes.sum(total), "tokens": tokens, "pairs": pairs, "dataset": parts[0].dataset}

    def part_backward(self, module: nn.Module, part: Batch, processes: Distributed, **options: Any) -> Tensor:
        """Adds this process's share of a part's gradient, and returns its share of the loss."""
        loss = partial(self.part_of_loss, part, processes.slice(part.count))
        options |= {"pooling": getattr(self.config, "pooling", "mean"), "processes": processes}
        return cached_backward(module, part.sequences, loss, **options)

    def facts(self, start: str) -> dict[str, Any]:
        return super().facts(start) | ({"special_tokens": True} if self.ends else {})

    def save(self, model: nn.Module, path: Path, **options: Any) -> None:
        """Writes an embedder, in the layout of sentence-transformers; options as for `checkpoint.write`."""
        tokenizer = ending(self.tokenizer) if self.ends else self.tokenizer
        settings = checkpoint.Settings.of(self.facts(self.job.start))
        checkpoint.save(path, model, tokenizer, settings, **options)


class Pair(Contrastive):
    """Contrastive pair training, with INT8 from the first step unless `config.quantize` is false
    (pplx-embed, section 2.3)."""

    section = "pair"

    @property
    def ends(self) -> bool:
        """An embedder that pools its last token has that of its own tokenizer, or none."""
        settings = self.job.settings
        return self.config.pooling == "last" and (settings is None or settings.plain)

    @cached_property
    def surrogate(self) -> Surrogate:
        """The embedder that says which texts are alike: one of ours, or any of sentence-transformers'.

        Raises: ValueError where none is named.
        """
        name = self.job.surrogate or self.job.clusters.surrogate
        if not name:
            raise ValueError("cluster_size and filter_margin need an embedder: set clusters.surrogate")
        path = Path(backbone.require_checkpoint(name))
        return Surrogate(content_hash(path), partial(surrogate_encoder, path), self.job.clusters)

    @cached_property
    def neighbours(self) -> dict[str, Neighbours]:
        """The look-alikes in each data set, found by the process that comes first."""
        stored, config = self.stored, self.config
        surrogate = self.surrogate._replace(open=cache(self.surrogate.open))
        return {name: neighbours(name, rows, stored, surrogate, config) for name, rows in self.data.items()}

    def inputs(self) -> dict[str, str]:
        if not self.config.looks_around:
            return super().inputs()
        clusters = fingerprint(replace(self.job.clusters, surrogate=""))
        return super().inputs() | {"surrogate": self.surrogate.hash, "clusters": clusters}

    def drawing(self) -> dict[str, Any]:
        """Clusters where the section asks for them; the curriculum, unless data sets are named or the rows
        have mined negatives; and with it each data set's share of the steps: by size, of its group's."""
        near, config = self.neighbours.items() if self.config.cluster_size else (), self.config
        drawn = {"orders": {name: rows.order for name, rows in near}}
        if self.job.only or getattr(config, "negatives", 0):
            return drawn
        groups, share = self.groups(), dict(zip(GROUPS, config.shares))
        size = {name: len(keys) for name, keys in self.keys().items()}
        total = {group: sum(size[name] for name in groups if groups[name] == group) for group in share}
        if share:
            drawn["shares"] = {x: share[group] * size[x] / total[group] for x, group in groups.items()}
        return drawn | {"allowed": curriculum(groups, config.curriculum, config.steps)}

    def batch(self, step: int) -> list[Batch]:
        name, rows = self.plan(step)
        batch, margin = self.texts(name, rows), self.config.filter_margin
        if margin < 0:
            return [batch]
        return [replace(batch, negatives=torch.from_numpy(self.neighbours[name].negative_mask(rows, margin)))]

    def loss(self, rows_RD: Tensor, batch: Batch, **shared: Any) -> Tensor:
        rows_RD = self.served(rows_RD)
        shared |= {"margin": self.config.margin, "negative_mask_NN": batch.negatives}
        q_ND, d_ND = rows_RD[: batch.count], rows_RD[batch.count :]
        return losses.pair_loss(q_ND, d_ND, query_query=self.config.query_query, **shared)


def surrogate_encoder(path: Path) -> Encoder:
    if backbone.facts(path) or backbone.is_released(path):
        return Embedder.from_pretrained(path)
    with extra("study"):  # a second to import, for few trainings
        from sentence_transformers import SentenceTransformer  # noqa: PLC0415

    return SentenceTransformer(str(path))


class Contextual(Contrastive):
    """Late chunking with INT8 and Matryoshka, and the dual objective of pplx-embed (section 2.4) or InSeNT's
    (`config.objective`).

    InSeNT weighs its terms with λ = `config.alpha` and has no document-level term. Its authors train without
    quantiser and without Matryoshka; both stay here, so that the objective is all that differs.
    """

    section = "contextual"

    def shown(self, step: int) -> Iterator[list[str]]:
        """Each document's chunks and queries, and which chunk answers each."""
        [batch], (name, rows) = self.batch(step), self.plan(step)
        for index, row in enumerate(rows):
            chunks = [f"chunk {i:2}  {self.text(x)}" for i, x in enumerate(self.data[name][row].chunks)]
            places = (batch.document_N == index).nonzero().flatten().tolist()
            texts = [(batch.gold_N[i], self.text(batch.sequences[i].tokens_L)) for i in places]
            yield chunks + [f"query     {text} (chunk {gold})" for gold, text in texts]

    @cached_property
    def data(self) -> dict[str, TokenDocuments]:
        special, pairs = sum(map(len, self.around)), self.tables("pairs") if self.config.single else {}
        config = replace(self.config, query_length=max(1, self.config.query_length - special))
        data = {name: token_documents(table, config) for name, table in self.tables("documents").items()}
        return data | {name: pairs_as_documents(table, config) for name, table in pairs.items()}

    def drawing(self) -> dict[str, Any]:
        """Data sets are drawn by their queries, as the paper's by their pairs, or by their documents."""
        sizes = {name: rows.query_count for name, rows in self.data.items()}
        return {"sizes": sizes} if self.config.draw == "queries" else {}

    def batch(self, step: int) -> list[ContextualBatch]:
        """Up to `queries_per_document` queries of each document, and the documents, each to be read whole, or
        each of its chunks alone."""
        config, (name, rows) = self.config, self.plan(step)
        documents = [self.data[name][i] for i in rows]
        rng = np.random.default_rng([config.seed, 3, step])
        drawn = [
            (index, int(number))
            for index, document in enumerate(documents)
            for number in sorted(rng.permutation(len(document.queries))[: config.queries_per_document])
        ]
        texts = [self.read(documents[index].queries[number]) for index, number in drawn]
        lengths = [torch.tensor([float(len(chunk)) for chunk in document.chunks]) for document in documents]
        if self.job.late_chunking:
            texts += [join_chunks(document.chunks, self.stored.end, self.around) for document in documents]
            for tokens_C in lengths:  # what stands around the document belongs to its first and last chunk
                tokens_C[0] += len(self.around[0])
                tokens_C[-1] += len(self.around[1])
        else:
            texts += [self.read(chunk) for document in documents for chunk in document.chunks]
            for tokens_C in lengths:
                tokens_C += sum(map(len, self.around))
        document_N = torch.tensor([index for index, _ in drawn])
        gold_N = torch.tensor([documents[index].golds[number] for index, number in drawn])
        labels = {"document_N": document_N, "gold_N": gold_N, "chunk_tokens_MC": pad_sequence(lengths, True)}
        labels["beta"] = cosine_ramp(config.beta_start, config.beta_end, step, config.steps)
        return [ContextualBatch(dataset=name, sequences=texts, count=len(drawn), **labels)]

    def loss(self, rows_RD: Tensor, batch: ContextualBatch, **shared: Any) -> Tensor:
        config = self.config
        q_ND, chunks_MCD, documents_MD = batch.split(rows_RD)
        shared |= batch.labels()
        if config.objective == "insent":
            loss, vectors = partial(losses.insent_loss, lam=config.alpha), (q_ND, chunks_MCD)
        else:
            loss = partial(losses.contextual_loss, alpha=config.alpha, beta=batch.beta, margin=config.margin)
            vectors = (q_ND, chunks_MCD, documents_MD)
        return losses.matryoshka(partial(loss, **shared), [*map(self.served, vectors)], config.dimensions)


class Triplet(Contrastive):
    """Contrastive training with mined hard negatives (pplx-embed, section 2.5)."""

    section = "triplet"

    def batch(self, step: int) -> list[Batch]:
        """The parts of a batch, each with a loss of its own."""
        name, rows = self.plan(step)
        parts = np.array_split(rows, min(self.config.accumulation, len(rows)))
        return [replace(self.texts(name, part), weight=len(part) / len(rows)) for part in parts]

    def loss(self, rows_RD: Tensor, batch: Batch, **shared: Any) -> Tensor:
        vectors, id_R = with_negatives(self.served(rows_RD), batch)
        return losses.triplet_loss(*vectors, text_ids_R=id_R, **shared)


def with_negatives(rows_RD: Tensor, batch: Batch) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """The vectors of a batch's queries, of their documents and of their hard negatives, (q_ND, d_ND,
    hard_NKD); and each text's `text_ids`. Where a query has fewer than K hard negatives, their vectors are
    zeros and their ids −1."""
    n, hard_N = batch.count, batch.hard_N.tolist()
    id_N, id_M, id_X = text_ids(batch.sequences, batch.key_R).split([n, n, sum(hard_N)])
    q_ND, d_ND, hard_XD = rows_RD.split([n, n, sum(hard_N)])
    hard_NKD = pad_sequence(hard_XD.split(hard_N), batch_first=True)
    hard_NK = pad_sequence(id_X.split(hard_N), batch_first=True, padding_value=-1)
    return (q_ND, d_ND, hard_NKD), torch.cat([id_N, id_M, hard_NK.flatten()])


def text_ids(sequences: Sequence[TokenSequence], key_R: Iterable[Any] | None = None) -> Tensor:
    """A number for each text (R,): equal numbers for one text, by its key, and for equal tokens.

    Tokens are what the model reads: also of two texts that only begin alike and are cut, the vectors are
    equal.
    """
    tokens_R = [text.tokens_L.tobytes() for text in sequences]
    seen, numbers = {}, []
    for number, marks in enumerate(zip(tokens_R, tokens_R if key_R is None else key_R, strict=True)):
        numbers.append(min(seen.get(mark, number) for mark in marks))
        seen |= dict.fromkeys(marks, numbers[-1])
    return torch.tensor(numbers)


def cosine_ramp(start: float, end: float, step: int, steps: int) -> float:
    """Half a cosine from `start` at step 0 to `end` at the last step: β of pplx-embed, section 2.4."""
    share = step / max(1, steps - 1)
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * share))
