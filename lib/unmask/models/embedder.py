"""`Embedder`: texts and documents in, embeddings out.

Legend: B texts, D dimensions, L tokens, C chunks of a document, R rows (a text's, or a chunk's).
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from unmask.data.tokens import END_OF_TEXT, batches, join_chunks, special_tokens_around
from unmask.data.tokens import encode as token_ids
from unmask.models import backbone, interchange
from unmask.models.attention import fast_attention, unpadded
from unmask.models.encoding import (
    TokenSequence,
    context_windows,
    encode_rows,
    micro_batches,
    only_chunks,
    only_tokens,
)
from unmask.models.quantize import binary, int8, pack_binary

PRECISIONS = ("float32", "int8", "binary", "ubinary")
WINDOW, OVERLAP = 10_000, 35  # tokens of a window, chunks that two share: pplx-embed, appendix D
SORTED = 32  # micro-batches' worth of tokens that are held and sorted by length at a time
Devices = str | torch.device | Sequence[str | torch.device] | None
Name = Callable[[int], str]  # what an error calls a text, or a chunk, by its number
Item = TypeVar("Item")


@dataclass(frozen=True)
class Unit:
    """What is read in one piece: a text, or a window of a document. `numbers` says which of all the texts or
    chunks of a call its rows are."""

    sequence: TokenSequence
    numbers: np.ndarray


class Embedder:
    """A checkpoint, ready to embed.

    >>> embedder = Embedder.from_pretrained("artifacts/cpu/05_merge/model")          # doctest: +SKIP
    >>> embedder.encode(["How do I open a file?"]).dtype                              # doctest: +SKIP
    dtype('int8')

    No instruction and no prefix is added to queries or documents (pplx-embed, section 2.3).

    Texts are read as they come, some hundred thousand tokens at a time, so that only the texts and their
    embeddings have to fit into memory; texts of similar length share a forward pass, and on a GPU the next
    ones are tokenised meanwhile.

    Args:
        pooling: "mean", or "last" for the ablation.
        max_length: tokens of one text at most; what is longer is cut. Default: the model's positions.
        mixed_precision: bf16 autocast; faster, and a few codes in a thousand differ by one. Default: on a GPU
            that has it, not on a CPU.
        token_budget: tokens of one forward pass, padding included; bounds memory. Default: 1,024 on a CPU,
            where they stay in its cache, otherwise 32,768.
        device: a device, or a list of devices of one kind, which share the work, each with a copy of the
            model. Default: all CUDA devices of the machine, or else the CPU.
        special_tokens: the tokenizer's own special tokens ([CLS] and [SEP], for instance) are put around each
            text, or around each document. They count for `max_length`, and the pooling averages them too.
        separator: the token between the chunks of a document. Default: `<|endoftext|>` where the vocabulary
            has it, otherwise the tokenizer's sep or eos token.
        normalize: vectors get unit length, before dimensions or codes are taken from them.
    Raises: ValueError for a separator that is not in the vocabulary, and for a `max_length` in which no token
        of a text has room.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        pooling: str = "mean",
        max_length: int | None = None,
        mixed_precision: bool | None = None,
        token_budget: int | None = None,
        device: Devices = None,
        special_tokens: bool = False,
        separator: str | None = None,
        normalize: bool = False,
    ):
        self.devices = _devices(device)
        self.device = self.devices[0]
        self.model = model.to(self.device).eval()
        self.tokenizer = tokenizer
        self.pooling = pooling
        self.window = int(model.config.max_position_embeddings)
        self.special_tokens = special_tokens
        self.around = special_tokens_around(tokenizer) if special_tokens else (np.array([], np.int32),) * 2
        self.max_length = self._limit(self.window if max_length is None else max_length)
        on_gpu = self.device.type == "cuda"
        if mixed_precision is None:
            mixed_precision = on_gpu and backbone.computes_in_bf16("bf16")
        self.mixed_precision = mixed_precision
        self.token_budget = token_budget or (1_024 if self.device.type == "cpu" else 32_768)
        self.separator_id = _separator_id(tokenizer, separator)
        self.normalize = normalize

    @classmethod
    def from_pretrained(cls, path: str | Path, **options) -> Embedder:
        """Loads a checkpoint directory or a Hub name; options as for the constructor.

        It may be one of ours, one of sentence-transformers, or a released pplx-embed: see `interchange.load`.

        Raises: ValueError if the directory holds no checkpoint.
        """
        loaded = interchange.load(path)
        return cls(loaded.model, loaded.tokenizer, **{**loaded.options, **options})

    def save_pretrained(self, path: str | Path) -> Path:
        """Writes a directory that `from_pretrained`, AutoModel and sentence-transformers load."""
        return interchange.save(self, path)

    def encode(
        self, texts: Sequence[str], precision: str = "int8", dimensions: int | None = None, *,
        max_length: int | None = None, progress: bool = False,
    ) -> np.ndarray:  # fmt: skip
        """Embeds texts, in their order.

        A text of white space is a text like others where the tokenizer has tokens for it.

        Args:
            precision: "int8" (codes −127…127), "float32" (the unquantised mean), "binary" (−1 or 1 as int8),
                "ubinary" (8 dimensions per byte, most significant bit first).
            dimensions: keep only the first so many (Matryoshka).
            max_length: instead of the embedder's own.
        Returns: array of shape (texts, dimensions), for "ubinary" (texts, dimensions / 8); no texts, no rows.
        Raises: TypeError for a text that is no string. ValueError for one that is empty or has no tokens, for
            a lone surrogate (half a character), and where the model returns NaN or infinity. Both name the
            text. ValueError for an unknown precision and for more dimensions than there are.
        """
        name = _checked_texts(texts)
        units = self._texts(texts, max_length, name)
        return self._table(units, len(texts), precision, dimensions, name, progress)

    def encode_documents(
        self, documents: Sequence[Sequence[str]], precision: str = "int8", dimensions: int | None = None, *,
        chunk_length: int | None = None, window: int | None = None, overlap: int = OVERLAP,
        progress: bool = False,
    ) -> list[np.ndarray]:  # fmt: skip
        """Embeds the chunks of documents in the light of their document: late chunking (pplx-embed, section
        2.4).

        A document beyond the window is read in overlapping windows of whole chunks, and each chunk has the
        vector of the window where it has most context: `encoding.context_windows` says how. Every chunk has
        one vector, always.

        Args:
            documents: a list of chunks for each document.
            chunk_length: tokens of one chunk at most; what is longer is cut. Default: nothing is cut.
            window: tokens that are read together, separators included; 10,000, but never more than the
                model's positions.
            overlap: chunks that neighbouring windows share; fewer where a window holds fewer. The nearer to
                what a window holds, the more often each chunk is read.
        Returns: for each document an array of shape (chunks, dimensions).
        Raises: TypeError and ValueError as for `encode`, naming chunk and document; ValueError for a document
            without chunks, and for a chunk longer than the window.
        """
        name, offsets = _checked_documents(documents)
        units = self._windows(documents, chunk_length, window, overlap, name)
        rows = self._table(units, offsets[-1], precision, dimensions, name, progress)
        return [rows[start:stop] for start, stop in pairwise(offsets)]

    def encode_tokens(
        self, texts: Sequence[str], *, dimensions: int | None = None, max_length: int | None = None,
        progress: bool = False,
    ) -> list[np.ndarray]:  # fmt: skip
        """The vector of each token of each text, after the model's final norm, for late interaction.

        Returns: for each text a float32 array of shape (tokens, dimensions), special tokens included. Their
            mean is what mean pooling makes of the text.
        Raises: as `encode`.
        """
        name = _checked_texts(texts)
        return self._lists(self._texts(texts, max_length, name), len(texts), dimensions, name, progress)

    def encode_document_tokens(
        self, documents: Sequence[Sequence[str]], *, dimensions: int | None = None,
        chunk_length: int | None = None, window: int | None = None, overlap: int = OVERLAP,
        progress: bool = False,
    ) -> list[list[np.ndarray]]:  # fmt: skip
        """The vector of each token of each chunk in the light of its document, for late interaction.

        Arguments and errors are those of `encode_documents`.

        Returns: for each document a list with a float32 array (tokens, dimensions) for each chunk.
        """
        name, offsets = _checked_documents(documents)
        units = self._windows(documents, chunk_length, window, overlap, name)
        chunks = self._lists(units, offsets[-1], dimensions, name, progress)
        return [chunks[start:stop] for start, stop in pairwise(offsets)]

    def _limit(self, max_length: int) -> int:
        special = sum(map(len, self.around))
        if max_length <= special:
            raise ValueError(
                f"max_length must be at least {special + 1}, got {max_length}: "
                f"a text has {special} special tokens"
            )
        return min(max_length, self.window)

    def _texts(self, texts: Sequence[str], max_length: int | None, name: Name) -> Iterator[Unit]:
        limit = self.max_length if max_length is None else self._limit(max_length)
        before, after = self.around
        room = limit - len(before) - len(after)
        for number, ids in enumerate(token_ids(self.tokenizer.backend_tokenizer, texts, np.int32, room)):
            if not len(ids):
                raise ValueError(f"{name(number)} has no tokens: {texts[number]!r}. Remove or fill it.")
            tokens_L = np.concatenate([before, ids, after]) if self.special_tokens else ids
            yield Unit(TokenSequence(tokens_L), np.array([number]))

    def _windows(
        self, documents: Sequence[Sequence[str]], chunk_length: int | None, window: int | None, overlap: int,
        name: Name,
    ) -> Iterator[Unit]:  # fmt: skip
        for what, value, least in (
            ("chunk_length", chunk_length, 1), ("window", window, 1), ("overlap", overlap, 0)
        ):  # fmt: skip
            if value is not None and value < least:
                raise ValueError(f"{what} must be at least {least}, got {value}")
        room = min(WINDOW if window is None else window, self.window) - sum(map(len, self.around))
        every = (chunk for chunks in documents for chunk in chunks)
        tokens = token_ids(self.tokenizer.backend_tokenizer, every, np.int32, chunk_length)
        first = 0
        for chunks in documents:
            ids = list(islice(tokens, len(chunks)))
            for number, (chunk, text) in enumerate(zip(ids, chunks), first):
                if not len(chunk):
                    raise ValueError(f"{name(number)} has no tokens: {text!r}. Remove or fill it.")
                if len(chunk) > room:
                    raise ValueError(
                        f"{name(number)} has {len(chunk)} tokens, the window holds {room}: split the chunk, "
                        "or set chunk_length to have it cut"
                    )
            for start, stop, own in context_windows([len(chunk) for chunk in ids], room, overlap):
                sequence = join_chunks(ids[start:stop], self.separator_id, self.around)
                yield Unit(only_chunks(sequence, own - start), first + own)
            first += len(chunks)

    def _table(
        self, units: Iterator[Unit], total: int, precision: str, dimensions: int | None, name: Name,
        progress: bool,
    ) -> np.ndarray:  # fmt: skip
        size = self.model.config.hidden_size
        if precision not in PRECISIONS:
            raise ValueError(f"unknown precision {precision!r}: choose one of {', '.join(PRECISIONS)}")
        self._check_dimensions(dimensions)
        if precision == "ubinary" and (dimensions or size) % 8:
            raise ValueError(
                f"ubinary packs 8 dimensions into a byte, got {dimensions or size}: choose a multiple of 8"
            )
        none = quantized(np.zeros((0, size), np.float32), precision, dimensions)
        table = np.empty((total, none.shape[1]), none.dtype)

        def store(numbers_R: np.ndarray, rows_RD: np.ndarray) -> None:
            if self.normalize:
                rows_RD /= np.linalg.norm(rows_RD, axis=1, keepdims=True).clip(1e-12)
            table[numbers_R] = quantized(rows_RD, precision, dimensions)

        self._embed(units, total, self.pooling, name, progress, store)
        return table

    def _lists(
        self, units: Iterator[Unit], total: int, dimensions: int | None, name: Name, progress: bool
    ) -> list[np.ndarray]:
        self._check_dimensions(dimensions)
        found: list[np.ndarray] = [np.empty(0)] * total

        def store(numbers_R: np.ndarray, rows_RD: np.ndarray) -> None:
            cuts = np.flatnonzero(np.diff(numbers_R)) + 1
            parts = np.split(np.ascontiguousarray(rows_RD[:, :dimensions]), cuts)
            for number, part in zip(numbers_R[np.concatenate([[0], cuts])], parts, strict=True):
                found[number] = part

        self._embed(map(_with_token_rows, units), total, "mean", name, progress, store)
        return found

    def _check_dimensions(self, dimensions: int | None) -> None:
        size = self.model.config.hidden_size
        if dimensions is not None and not 1 <= dimensions <= size:
            raise ValueError(f"dimensions must be between 1 and {size}, got {dimensions}")

    def _embed(
        self, units: Iterator[Unit], total: int, pooling: str, name: Name, progress: bool,
        store: Callable[[np.ndarray, np.ndarray], None],
    ) -> None:  # fmt: skip
        """Encodes the units, and hands rows over with the numbers of what they belong to, in no order."""
        idle: SimpleQueue[PreTrainedModel] = SimpleQueue()
        for replica in self._replicas:
            idle.put(replica)

        def forward(group: list[Unit]) -> Tensor:
            replica = idle.get()
            try:
                with (
                    torch.inference_mode(),
                    self._autocast(),
                    torch.accelerator.device_index(replica.device.index),
                ):
                    sequences = [unit.sequence for unit in group]
                    return encode_rows(
                        replica, sequences, pooling=pooling, device=replica.device, packed=packed
                    )
            finally:
                idle.put(replica)

        def finish(group: list[Unit], rows: Tensor | Future[Tensor]) -> None:
            rows_RD = (rows.result() if isinstance(rows, Future) else rows).cpu().numpy()
            numbers_R = np.concatenate([unit.numbers for unit in group])
            finite_R = np.isfinite(rows_RD).all(axis=1)
            if not finite_R.all():
                raise ValueError(
                    f"{name(numbers_R[~finite_R].min())}: the model returns NaN or infinity for it"
                )
            store(numbers_R, rows_RD)
            bar.update(1 + np.count_nonzero(np.diff(numbers_R)))

        several = len(self._replicas) > 1
        with (
            fast_attention(),
            self._autocast(),
            ThreadPoolExecutor(len(self._replicas)) as threads,
            tqdm(total=int(total), unit="text", disable=not progress) as bar,
        ):
            packed = unpadded(self.model, inference=True)
            pools = batches(units, lambda unit: len(unit.sequence), SORTED * self.token_budget)
            under_way: deque[tuple[list[Unit], Tensor | Future[Tensor]]] = deque()
            for pool in pools if self.device.type == "cpu" else ahead(pools):
                lengths = [len(unit.sequence) for unit in pool]
                for indices in micro_batches(lengths, self.token_budget, packed=packed):
                    group = [pool[i] for i in indices]
                    under_way.append((group, threads.submit(forward, group) if several else forward(group)))
                    # What a GPU has computed is fetched when it has been given more to do.
                    if len(under_way) > 2 * len(self._replicas):
                        finish(*under_way.popleft())
            while under_way:
                finish(*under_way.popleft())

    def _autocast(self) -> AbstractContextManager:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.mixed_precision)

    @cached_property
    def _replicas(self) -> list[PreTrainedModel]:
        return [self.model, *(copy.deepcopy(self.model).to(device) for device in self.devices[1:])]


def ahead(items: Iterator[Item]) -> Iterator[Item]:
    """The items, each of them made by a thread while the one before is in use."""
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(next, items, None)
        while (item := following.result()) is not None:
            following = thread.submit(next, items, None)
            yield item


def quantized(rows_BD: np.ndarray, precision: str, dimensions: int | None = None) -> np.ndarray:
    """Pooled float vectors in one of the PRECISIONS, cut to the first `dimensions`."""
    mean_BD = torch.from_numpy(np.ascontiguousarray(rows_BD[:, :dimensions]))
    if precision == "int8":
        return int8(mean_BD).round().to(torch.int8).numpy()
    if precision == "binary":
        return binary(mean_BD).to(torch.int8).numpy()
    if precision == "ubinary":
        return np.asarray(pack_binary(mean_BD))
    return mean_BD.numpy()


def _with_token_rows(unit: Unit) -> Unit:
    chunk_L = unit.sequence.chunk_L
    if chunk_L is None:
        return Unit(only_tokens(unit.sequence), np.repeat(unit.numbers, len(unit.sequence)))
    return Unit(only_tokens(unit.sequence), unit.numbers[chunk_L[chunk_L >= 0]])


def _checked_texts(texts: Sequence[str]) -> Name:
    if isinstance(texts, str):
        raise ValueError("expected a list of texts, got one string: write encode([text])")
    count = len(texts)

    def name(number: int) -> str:
        return f"Text {number} of {count}"

    for number, text in enumerate(texts):
        _check_text(text, name, number)
    return name


def _checked_documents(documents: Sequence[Sequence[str]]) -> tuple[Name, np.ndarray]:
    """Also where the chunks of each document start among all of them, and their number at the end."""
    if isinstance(documents, str):
        raise ValueError("expected a list of documents, got one string: write encode_documents([[chunk, …]])")
    for index, chunks in enumerate(documents):
        if isinstance(chunks, (str, bytes)) or not hasattr(chunks, "__len__") or not len(chunks):
            raise ValueError(f"document {index} must be a non-empty list of chunks, got {chunks!r}")
    offsets = np.cumsum([0, *(len(chunks) for chunks in documents)])

    def name(number: int) -> str:
        document = int(np.searchsorted(offsets, number, side="right")) - 1
        return f"Chunk {number - offsets[document]} of document {document}"

    for number, chunk in enumerate(chunk for chunks in documents for chunk in chunks):
        _check_text(chunk, name, number)
    return name, offsets


def _check_text(text: str, name: Name, number: int) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{name(number)} is no string but of type {type(text).__name__}: {text!r}")
    if not text:
        raise ValueError(f"{name(number)} has no tokens: ''. Remove or fill it.")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            what = f"U+{ord(text[error.start]):04X} at character {error.start}"
            raise ValueError(
                f"{name(number)} has a lone surrogate ({what}), half a character: repair or remove it"
            ) from None


def _devices(device: Devices) -> list[torch.device]:
    if device is None:
        count = torch.cuda.device_count()
        return [torch.device("cuda", index) for index in range(count)] or [torch.device("cpu")]
    several = [device] if isinstance(device, (str, torch.device)) else device
    devices = [torch.device(one) for one in several]
    if len({one.type for one in devices}) != 1:
        raise ValueError(f"device must be a device, or a list of devices of one kind, got {device!r}")
    return devices


def _separator_id(tokenizer: PreTrainedTokenizerBase, separator: str | None) -> int:
    choice = [separator] if separator else [END_OF_TEXT, tokenizer.sep_token, tokenizer.eos_token]
    for token in filter(None, choice):
        if (found := tokenizer.backend_tokenizer.token_to_id(token)) is not None:
            return found
    raise ValueError(
        f"none of {', '.join(map(repr, choice))} is in the vocabulary to separate chunks: name a token by "
        "`separator`"
    )
