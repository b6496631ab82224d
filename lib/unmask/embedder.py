"""`Embedder`: texts and documents in, embeddings out. Legend: B texts, D dimensions, C chunks of a
document."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from unmask import backbone
from unmask.attention import fast_attention, unpadded
from unmask.data.tokens import END_OF_TEXT, tokenize
from unmask.encoding import TokenSequence, encode_rows, join_chunks, micro_batches, row_offsets, rows_of
from unmask.quantize import binary, int8, pack_binary

PRECISIONS = ("float32", "int8", "binary", "ubinary")


class Embedder:
    """A checkpoint, ready to embed.

    >>> embedder = Embedder.from_pretrained("artifacts/cpu/05_merge/model")          # doctest: +SKIP
    >>> embedder.encode(["How do I open a file?"]).dtype                              # doctest: +SKIP
    dtype('int8')

    No instruction and no prefix is added to queries or documents (pplx-embed, section 2.3).

    Args:
        pooling: "mean", or "last" for the ablation.
        max_length: tokens of one text at most; what is longer is cut. Default: the model's positions.
        mixed_precision: bf16 autocast; faster, and a few codes in a thousand differ by one.
        token_budget: tokens of one forward pass, padding included; bounds memory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        pooling: str = "mean",
        max_length: int | None = None,
        mixed_precision: bool = False,
        token_budget: int = 16_384,
        device: str | torch.device | None = None,
    ):
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.model = model.to(self.device).eval()
        self.tokenizer = tokenizer
        self.pooling = pooling
        self.window = int(model.config.max_position_embeddings)
        self.max_length = min(max_length or self.window, self.window)
        self.mixed_precision = mixed_precision
        self.token_budget = token_budget

    @classmethod
    def from_pretrained(cls, path: str | Path, **options) -> Embedder:
        """Loads a checkpoint directory or a Hub name; options as for the constructor.

        Raises: ValueError if the directory holds no checkpoint.
        """
        pooling = backbone.facts(path).get("pooling", "mean")
        return cls(backbone.load(path), backbone.load_tokenizer(path), **{"pooling": pooling, **options})

    def save_pretrained(self, path: str | Path) -> Path:
        """Writes weights, configuration and tokenizer; `from_pretrained` and AutoModel read them."""
        return backbone.save(self.model, self.tokenizer, Path(path), pooling=self.pooling)

    def encode(
        self, texts: Sequence[str], precision: str = "int8", dimensions: int | None = None, *,
        max_length: int | None = None, progress: bool = False,
    ) -> np.ndarray:  # fmt: skip
        """Embeds texts, in their order.

        Args:
            precision: "int8" (codes −127…127), "float32" (the unquantised mean), "binary" (−1 or 1 as int8),
                "ubinary" (8 dimensions per byte, most significant bit first).
            dimensions: keep only the first so many (Matryoshka).
        Returns: array of shape (texts, dimensions), for "ubinary" (texts, dimensions / 8).
        Raises: ValueError for a text without tokens, an unknown precision, or more dimensions than there are.
        """
        self._check(texts, precision, dimensions)
        if not len(texts):
            return quantized(np.zeros((0, self.model.config.hidden_size), np.float32), precision, dimensions)
        tokens = tokenize(self.tokenizer, list(texts), min(max_length or self.max_length, self.window))
        return quantized(self._rows([TokenSequence(t) for t in tokens], progress), precision, dimensions)

    def encode_documents(
        self, documents: Sequence[Sequence[str]], precision: str = "int8", dimensions: int | None = None, *,
        chunk_length: int | None = None, progress: bool = False,
    ) -> list[np.ndarray]:  # fmt: skip
        """Embeds the chunks of documents in the light of their document: late chunking (pplx-embed, section
        2.4).

        Args:
            documents: a list of chunks for each document.
            chunk_length: tokens of one chunk at most.
        Returns: for each document an array of shape (chunks, dimensions).
        Raises: ValueError as for `encode`, for a document without chunks, and for one longer than the
            model's window.
        """
        self._check(documents, precision, dimensions)
        for index, chunks in enumerate(documents):
            if isinstance(chunks, str) or not len(chunks):
                raise ValueError(f"document {index} must be a non-empty list of chunks, got {chunks!r}")
        separator_id = self.tokenizer.convert_tokens_to_ids(END_OF_TEXT)
        flat = [chunk for chunks in documents for chunk in chunks]
        tokens = iter(tokenize(self.tokenizer, flat, chunk_length or self.max_length) if flat else ())
        sequences = [join_chunks([next(tokens) for _ in chunks], separator_id) for chunks in documents]
        for index, sequence in enumerate(sequences):
            if len(sequence) > self.window:
                raise ValueError(
                    f"document {index} has {len(sequence)} tokens with its separators, the model reads "
                    f"{self.window}: split the document or set chunk_length"
                )
        if not sequences:
            return []
        rows = quantized(self._rows(sequences, progress), precision, dimensions)
        return np.split(rows, row_offsets(sequences)[1:-1])

    def _rows(self, sequences: list[TokenSequence], progress: bool) -> np.ndarray:
        offsets = row_offsets(sequences)
        rows_RD = np.empty((offsets[-1], self.model.config.hidden_size), np.float32)
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.mixed_precision)
        with (
            torch.inference_mode(),
            autocast,
            fast_attention(),
            tqdm(total=len(sequences), unit="text", disable=not progress) as bar,
        ):
            lengths = [len(s) for s in sequences]
            for group in micro_batches(lengths, self.token_budget, packed=unpadded(self.model)):
                part = encode_rows(
                    self.model, [sequences[i] for i in group], pooling=self.pooling, device=self.device
                )
                rows_RD[rows_of(offsets, group)] = part.cpu().numpy()
                bar.update(len(group))
        return rows_RD

    def _check(self, items: Sequence, precision: str, dimensions: int | None) -> None:
        if isinstance(items, str):
            raise ValueError("expected a list of texts, got one string: write encode([text])")
        if precision not in PRECISIONS:
            raise ValueError(f"unknown precision {precision!r}: choose one of {', '.join(PRECISIONS)}")
        size = self.model.config.hidden_size
        if dimensions is not None and not 1 <= dimensions <= size:
            raise ValueError(f"dimensions must be between 1 and {size}, got {dimensions}")
        if precision == "ubinary" and (dimensions or size) % 8:
            raise ValueError(
                f"ubinary packs 8 dimensions into a byte, got {dimensions or size}: choose a multiple of 8"
            )


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
