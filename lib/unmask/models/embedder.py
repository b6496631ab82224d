"""`Embedder`: texts and documents in, embeddings out.

Legend: B texts, D dimensions, L tokens, C chunks of a document, R rows (a text's, a chunk's, or a token's).
"""

import contextlib
import copy
import dataclasses
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import chain, cycle, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from unmask.data import tokens
from unmask.data.tokens import TokenSequence, Truncation, batches, end_token, special_tokens_around
from unmask.models import backbone, checkpoint
from unmask.models.arguments import Name, as_list, check_counts, check_texts
from unmask.models.attention import fast_attention, unpadded
from unmask.models.checkpoint import Settings
from unmask.models.encoding import (
    POOLS,
    context_windows,
    encode_rows,
    every_token,
    micro_batches,
    only_chunks,
    owners,
)
from unmask.models.quantize import binary, check_precision, int8, numbers, pack_binary

WINDOW, OVERLAP = checkpoint.UNLIMITED, 35  # tokens, and chunks that two share: pplx-embed, appendix D
SORTED = 32  # micro-batches' worth of tokens that are held and sorted by length at a time

# What a query of Qwen3-Embedding is asked for (section 2), by group of pairs; short, as queries are.
INSTRUCTIONS = {"english": "Find the passage", "code": "Find the code", "multilingual": "Find the text"}
INSTRUCTIONS |= {"cross-lingual": "Find the translation", "contextual": "Find the section"}


def prompt(instruction: str) -> str:
    """What stands before a query; there is no space after its colon."""
    return f"Instruct: {instruction}\nQuery:"


def instructed(instruction: str, query: str) -> str:
    """A query as Qwen3-Embedding reads it, without an instruction as it is; documents are read as they are.

    >>> instructed("Find the passage", "Who is it?")
    'Instruct: Find the passage\\nQuery:Who is it?'
    """
    return prompt(instruction) + query if instruction else query


class Unit(NamedTuple):
    """A text, or a window of a document; `numbers` says which texts or chunks of a call its rows are."""

    sequence: TokenSequence
    numbers: np.ndarray


class Reading(NamedTuple):
    """What a call reads: its pieces, how they are pooled, and what errors call them."""

    units: Iterable[Unit]
    pooling: str
    name: Name  # with the text itself, whose number may be of a list that the user has not


class Embedder:
    """A checkpoint, ready to embed.

    >>> embedder = Embedder.from_pretrained("artifacts/merged/model")               # doctest: +SKIP
    >>> embedder.encode(["How do I open a file?"]).dtype                              # doctest: +SKIP
    dtype('int8')

    No instruction and no prefix is added to queries or documents (pplx-embed, section 1).

    Args:
        model: without an output matrix; it moves to the device, in place.
        pooling: "mean", or "last" for the ablation.
        max_length: tokens of one text at most; what is longer is cut, to the model's positions in any case.
            Default: these, or 10,000 where it has no limit.
        window: tokens of a document that are read at once, see `encode_documents`. Default: 10,000, or the
            positions, whatever `max_length` is.
        mixed_precision: bf16 autocast; faster, and about one INT8 code in ten differs, by one. The matrices
            of `model` become bfloat16, in place, so it can no longer be saved. Default: on a GPU that has it.
        token_budget: tokens of one forward pass, padding included. Default: 1,024 on a CPU, else 32,768.
        device: a device, or several, which share the work, each with a copy of the model. Default: all CUDA
            devices of the machine, or else the CPU.
        special_tokens: the tokenizer's own ([CLS] and [SEP], for instance) are put around each text or
            document. They count for `max_length`, and the pooling averages them too.
        normalize: vectors get unit length, before dimensions or codes are taken from them.
        prompts: of sentence-transformers, by name; saved, and put before no text: that is for you to do.
        about: where the embedder is from, saved with it.
    Raises: ValueError for an unknown pooling, a `max_length` in which no token of a text has room, a
        tokenizer with tokens that the model has no rows for, and bf16 where the device would emulate it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        pooling: str = "mean",
        max_length: int | None = None,
        window: int | None = None,
        mixed_precision: bool | None = None,
        token_budget: int | None = None,
        device: str | int | torch.device | Sequence[str | torch.device] | None = None,
        special_tokens: bool = False,
        normalize: bool = False,
        prompts: Mapping[str, str] | None = None,
        about: Mapping[str, Any] | None = None,
    ):
        if getattr(model, "base_model", model) is not model:  # CDE's second stage has none
            raise ValueError(
                f"{type(model).__name__} ends in words: give its .base_model, or from_pretrained a path"
            )
        backbone.check_vocabulary(model.config, tokenizer)
        check_counts(window=window, token_budget=token_budget)
        if pooling not in POOLS:
            raise ValueError(f"pooling must be 'mean' or 'last', got {pooling!r}")
        self.devices = _devices(device)
        self.model, self.mixed_precision = _placed(model, self.devices[0], mixed_precision)
        self.tokenizer, self.pooling, self.special_tokens = tokenizer, pooling, special_tokens
        self.normalize, self.prompts, self.about = normalize, dict(prompts or {}), dict(about or {})
        tokenizer.backend_tokenizer.no_padding()  # may be set in its file; an embedder pads by itself
        self.around = special_tokens_around(tokenizer) if special_tokens else (np.array([], np.int32),) * 2
        self.positions = backbone.positions(model) or WINDOW
        self.window = min(window or WINDOW, self.positions)
        self.max_length = self._limit(self.positions if max_length is None else max_length)
        self.token_budget = token_budget or (32_768 if self.devices[0].type == "cuda" else 1_024)

    @classmethod
    def from_pretrained(cls, path: str | Path, **options) -> "Embedder":
        """Loads a checkpoint by directory or Hub name (`checkpoint.load`); options as for the constructor."""
        model, tokenizer, settings = checkpoint.load(path)
        return cls(model, tokenizer, **vars(settings) | options)

    def save_pretrained(self, path: str | Path) -> Path:
        """Writes a directory that `from_pretrained`, AutoModel and sentence-transformers load."""
        return checkpoint.save(path, self.model, self.tokenizer, self.settings)

    @property
    def settings(self) -> Settings:
        """What is kept beside the weights; its lengths are those in force."""
        return Settings(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Settings)})

    def close(self) -> None:
        """Frees the model's memory; the embedder cannot be used afterwards."""
        for name in ("model", "encoder", "_replicas"):  # the second: of a ContextEmbedder
            vars(self).pop(name, None)
        gc.collect()
        torch.cuda.empty_cache()

    def encode(
        self,
        texts: Iterable[str],
        precision: str = "int8",
        dimensions: int | None = None,
        *,
        max_length: int | None = None,
    ) -> np.ndarray:
        """Embeds texts, in their order.

        A control token that a text spells out (`<|endoftext|>`) is read as that token, as
        sentence-transformers does.

        Args:
            precision: "int8" (codes −127…127), "float32" (the unquantised mean), "binary" (−1 or 1 as int8),
                "ubinary" (8 dimensions per byte, most significant bit first). Where a few dimensions are far
                larger than others, as in language models, cosines of means rank worse than INT8's tanh.
            dimensions: keep only the first so many (Matryoshka).
            max_length: instead of the embedder's own, up to the model's positions.
        Returns: array of shape (texts, dimensions), for "ubinary" (texts, dimensions / 8); no texts, no rows.
        Raises: TypeError for a text that is no string; ValueError for one that is empty or has no tokens, a
            lone surrogate (half a character), NaN or infinity in a vector, an unknown precision, and more
            dimensions than there are.
        """
        return self._vectors(self._texts(texts, max_length), precision, dimensions)

    def encode_documents(
        self,
        documents: Iterable[Sequence[str]],
        precision: str = "int8",
        dimensions: int | None = None,
        *,
        chunk_length: int | None = None,
    ) -> list[np.ndarray]:
        """Embeds chunks in the context of their document: late chunking (pplx-embed, section 2.4).

        A document beyond `window` is read in overlapping windows of whole chunks, and each chunk has the
        vector of the window where it has most context (`encoding.context_windows`).

        Args:
            documents: a list of chunks for each document.
            chunk_length: tokens of one chunk at most; what is longer is cut. Default: nothing is cut.
        Returns: for each document an array of shape (chunks, dimensions).
        Raises: as `encode`; ValueError for a document without chunks, and for a chunk longer than the window.
        """
        reading, offsets = self._documents(documents, chunk_length)
        rows = self._vectors(reading, precision, dimensions)
        return [rows[start:stop] for start, stop in pairwise(offsets)]

    def encode_tokens(self, texts: Iterable[str], *, max_length: int | None = None) -> list[np.ndarray]:
        """The vector of each token of each text, after the model's final norm, for late interaction: for each
        text a float32 array of shape (tokens, dimensions), special tokens included."""
        return self._token_vectors(self._texts(texts, max_length))

    def encode_document_tokens(
        self, documents: Iterable[Sequence[str]], *, chunk_length: int | None = None
    ) -> list[list[np.ndarray]]:
        """The vector of each token of each chunk in the light of its document: for each document a list with
        a float32 array (tokens, dimensions) for each chunk."""
        reading, offsets = self._documents(documents, chunk_length)
        chunks = self._token_vectors(reading)
        return [chunks[start:stop] for start, stop in pairwise(offsets)]

    def _limit(self, max_length: int) -> int:
        check_counts(max_length=max_length)
        special = sum(map(len, self.around))
        if max_length <= special:
            least = f"max_length must be at least {special + 1}, got {max_length}"
            raise ValueError(f"{least}: a text has {special} special tokens")
        return min(max_length, self.positions)

    def _texts(self, texts: Iterable[str], max_length: int | None) -> Reading:
        texts = as_list(texts, "encode([text])")
        name = f"Text {{}} of {len(texts)}".format
        check_texts(texts, name)
        before, after = self.around
        limit = self.max_length if max_length is None else self._limit(max_length)
        texts_ids = self._tokens(texts, limit - len(before) - len(after), name)
        whole = (TokenSequence(np.concatenate([before, ids, after])) for ids in texts_ids)
        units = (Unit(text, np.array([number])) for number, text in enumerate(whole))
        return Reading(units, self.pooling, lambda number: f"{name(number)} ({texts[number][:60]!r})")

    def _documents(
        self, documents: Iterable[Sequence[str]], chunk_length: int | None
    ) -> tuple[Reading, np.ndarray]:
        """Also where the chunks of each document start among all of them."""
        right = "encode_documents([[chunk]])"
        documents = [as_list(chunks, right) for chunks in as_list(documents, right)]
        check_counts(chunk_length=chunk_length)
        if [] in documents:
            raise ValueError(f"document {documents.index([])} has no chunks: leave it out")
        places = [(chunk, index) for index, chunks in enumerate(documents) for chunk in range(len(chunks))]

        def name(number: int) -> str:
            return "Chunk {} of document {}".format(*places[number])

        check_texts(chain.from_iterable(documents), name)
        units = self._windows(documents, chunk_length, name)
        texts = [*chain.from_iterable(documents)]
        reading = Reading(units, self.pooling, lambda number: f"{name(number)} ({texts[number][:60]!r})")
        return reading, np.cumsum([0, *map(len, documents)])

    def _windows(self, documents: list[list[str]], chunk_length: int | None, name: Name) -> Iterator[Unit]:
        room = self.window - sum(map(len, self.around))
        chunk_ids = self._tokens(chain.from_iterable(documents), chunk_length, name)
        separator_id = self.tokenizer.convert_tokens_to_ids(end_token(self.tokenizer))
        first = 0
        for chunks in documents:
            ids = list(islice(chunk_ids, len(chunks)))
            lengths = list(map(len, ids))
            if (longest := max(lengths)) > room:
                what = f"{name(first + np.argmax(lengths))} has {longest} tokens, the window holds {room}"
                raise ValueError(f"{what}: split the chunk, or set chunk_length to have it cut")
            for start, stop, chosen in context_windows(lengths, room, OVERLAP):
                sequence = tokens.join_chunks(ids[start:stop], separator_id, self.around)
                yield Unit(only_chunks(sequence, chosen - start), first + chosen)
            first += len(chunks)

    def _tokens(self, texts: Iterable[str], limit: int | None, name: Name) -> Iterator[np.ndarray]:
        if len(self.tokenizer) > self.model.config.get_text_config().vocab_size:  # it was given more
            backbone.check_vocabulary(self.model.config, self.tokenizer)
        tokenizer = self.tokenizer.backend_tokenizer
        for number, ids in enumerate(tokens.encode(tokenizer, texts, np.int32, Truncation(limit))):
            if not len(ids):
                raise ValueError(f"{name(number)} has no tokens: remove or fill it")
            yield ids

    def _vectors(self, reading: Reading, precision: str, dimensions: int | None) -> np.ndarray:
        def coded(rows_RD: np.ndarray) -> np.ndarray:
            if self.normalize:
                rows_RD = rows_RD / np.linalg.norm(rows_RD, axis=1, keepdims=True).clip(1e-12)
            return quantized(rows_RD, precision, dimensions)

        return self.rows(reading, coded)[1]

    def _token_vectors(self, reading: Reading) -> list[np.ndarray]:
        rows = ((unit, owners(unit.sequence)) for unit in reading.units)
        units = (Unit(every_token(one.sequence), one.numbers[row_L[row_L >= 0]]) for one, row_L in rows)
        numbers_R, rows_RD = self.rows(reading._replace(units=units, pooling="mean"))
        return np.split(rows_RD, np.flatnonzero(np.diff(numbers_R, prepend=-1)))[1:]

    def rows(
        self, reading: Reading, coded: Callable[[np.ndarray], np.ndarray] = np.asarray, **inputs: Tensor
    ) -> tuple[np.ndarray, np.ndarray]:
        """Embeds what is read; returns each row's text or chunk number, sorted, and the coded rows.

        Args:
            coded: turns pooled vectors (R, D) into what is kept.
            inputs: what else the model takes.
        Raises: ValueError where the model returns NaN or infinity.
        """
        numbers = [np.array([], int)]
        rows = [coded(np.empty((0, self.model.config.hidden_size), np.float32))]
        for group, pooled in self._pooled(reading, inputs):
            rows_RD, numbers_R = pooled.cpu().numpy(), np.concatenate([unit.numbers for unit in group])
            if len(bad_R := numbers_R[~np.isfinite(rows_RD).all(axis=1)]):
                raise ValueError(f"{reading.name(bad_R.min())}: the model returns NaN or infinity for it")
            numbers.append(numbers_R)
            rows.append(coded(rows_RD))
        numbers_R = np.concatenate(numbers)
        order_R = np.argsort(numbers_R, kind="stable")
        return numbers_R[order_R], np.concatenate(rows)[order_R]

    def _pooled(self, reading: Reading, inputs: Mapping[str, Tensor]) -> Iterator[tuple[list[Unit], Tensor]]:
        """The pieces in micro-batches, with their pooled vectors. While the devices compute some, the next
        are tokenised and sorted by length."""
        with self.autocast():
            packed = unpadded(self.model, inference=True)

        def forward(group: list[Unit], model: PreTrainedModel, device: torch.device) -> Tensor:
            options = {key: tensor.to(device) for key, tensor in inputs.items()} | {"packed": packed}
            sequences = [unit.sequence for unit in group]
            with torch.inference_mode(), self.autocast(), torch.accelerator.device_index(device.index):
                return encode_rows(model, sequences, pooling=reading.pooling, **options)

        with self.autocast(), fast_attention(False), ThreadPoolExecutor(len(self.devices)) as threads:
            compute, under_way = map if self.devices == [torch.device("cpu")] else threads.map, ()
            pools = batches(reading.units, lambda unit: len(unit.sequence), SORTED * self.token_budget)
            for pool in chain(pools, [[]]):
                lengths = [len(unit.sequence) for unit in pool]
                indices = micro_batches(lengths, self.token_budget, packed=packed)
                groups = [[pool[i] for i in group] for group in indices]
                following = zip(groups, compute(forward, groups, cycle(self._replicas), cycle(self.devices)))
                yield from under_way
                under_way = following

    def autocast(self) -> AbstractContextManager:
        """The precision of a forward pass."""
        return torch.autocast(self.devices[0].type, torch.bfloat16, enabled=self.mixed_precision)

    @cached_property
    def _replicas(self) -> list[PreTrainedModel]:
        return [self.model, *(copy.deepcopy(self.model).to(device) for device in self.devices[1:])]


def quantized(rows_BD: np.ndarray, precision: str, dimensions: int | None = None) -> np.ndarray:
    """Pooled float vectors in a precision of BITS, cut to the first `dimensions`.

    Raises: ValueError for an unknown precision, for more dimensions than there are, for "ubinary" of a number
        of dimensions that is no multiple of 8, and for codes of NaN.
    """
    check_precision(precision)
    check_counts(dimensions=dimensions)
    if (dimensions or 1) > rows_BD.shape[1]:
        raise ValueError(f"there are {rows_BD.shape[1]} dimensions, not {dimensions}")
    mean_BD = torch.from_numpy(np.ascontiguousarray(rows_BD[:, :dimensions]))
    if precision == "int8":
        return int8(numbers(mean_BD)).to(torch.int8).numpy()
    if precision == "binary":
        return binary(mean_BD).to(torch.int8).numpy()
    return pack_binary(mean_BD) if precision == "ubinary" else mean_BD.numpy()


def _devices(device: Any) -> list[torch.device]:
    several = [device] if isinstance(device, (str, int, torch.device)) else device
    every = several or [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]
    with contextlib.suppress(RuntimeError):  # no name of a device
        found = [torch.device(one) for one in every]
        if all(one.type != "cuda" or (one.index or 0) < torch.cuda.device_count() for one in found):
            return found
    raise ValueError(f'device {device!r} is not on this machine: leave it out, or take "cpu"')


def _placed(
    model: PreTrainedModel, device: torch.device, mixed_precision: bool | None
) -> tuple[PreTrainedModel, bool]:
    """The model on its device, and whether it computes in bf16.

    Raises: ValueError where the device would emulate it.
    """
    has_bf16 = backbone.has_bf16(device.type)
    if not has_bf16 and (mixed_precision or any(x.dtype == torch.bfloat16 for x in model.parameters())):
        remedy = "leave mixed_precision out, and give the model in float32 (model.float())"
        raise ValueError(f"{device} has no bf16 and emulates it, 200 times slower: {remedy}")
    if mixed_precision is None:
        mixed_precision = device.type == "cuda" and has_bf16
    if mixed_precision:
        backbone.halve(model)
    return model.to(device).eval(), mixed_precision
