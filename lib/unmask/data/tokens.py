"""Text to tokens: a byte-level BPE tokenizer of our own, fast batched encoding, packing into blocks."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from unmask.store import artifacts_root, write_atomic

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

# Qwen2's pre-tokenisation: contractions, words with one leading sign, digits one by one, signs, line breaks,
# spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END_OF_TEXT = "<|endoftext|>"  # padding; between packed texts, and between the chunks of a document
MASK = "<|fim_pad|>"
SPECIAL_TOKENS = (END_OF_TEXT, "<|im_start|>", "<|im_end|>", MASK)  # ids 0 to 3
Item = TypeVar("Item")
BATCH_CHARACTERS = 250_000  # encoded at a time; an encoding takes some thirty times its text's memory


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, path: str | os.PathLike
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with Qwen2's normaliser (NFC) and pre-tokenisation, and save it.

    Encodings get no tokens added; `<|endoftext|>` pads. The same texts in the same order give the same
    tokenizer.

    Args:
        texts: training text; twenty megabytes take about twenty seconds.
        vocab_size: number of tokens, the special ones and the 256 bytes included.
        path: folder to save to, from which `AutoTokenizer.from_pretrained` loads it.
    Raises: ValueError if the vocabulary cannot hold bytes and special tokens, or if the texts are too few for
        it.
    Source: Qwen2's tokenizer, which the paper's backbone uses; the vocabulary is ours.
    """
    from transformers import PreTrainedTokenizerFast  # slow to import; not needed to tokenize

    smallest = 256 + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise ValueError(
            f"data.vocab_size is {vocab_size}, below {smallest} (256 bytes and the special tokens)."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() < vocab_size:
        raise ValueError(
            f"The texts yield {tokenizer.get_vocab_size()} tokens, not data.vocab_size = {vocab_size}; "
            "lower data.vocab_size or give more text (data.max_packages, data.max_text_mb)."
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        mask_token=MASK,
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(path)
    return fast


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: list[str], max_length: int) -> list[np.ndarray]:
    """Token ids of each text, without special tokens, cut to `max_length`.

    Returns: one int32 array of 1 to max_length ids per text.
    Raises: ValueError naming the first text that has no token at all.
    """
    arrays = list(encode(tokenizer.backend_tokenizer, texts, np.int32, max_length))
    for index, array in enumerate(arrays):
        if not len(array):
            raise ValueError(
                f"Text {index} of {len(texts)} has no tokens: {texts[index]!r}. Remove or fill it."
            )
    return arrays


def special_tokens_around(tokenizer: PreTrainedTokenizerBase) -> tuple[np.ndarray, np.ndarray]:
    """The ids that the tokenizer's post-processor puts before and after a text, [CLS] and [SEP] for instance.

    Raises: ValueError if it does anything else to a text.
    """
    backend = tokenizer.backend_tokenizer
    plain, whole = (backend.encode("a", add_special_tokens=add).ids for add in (False, True))
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            around = whole[:start], whole[start + len(plain) :]
            return tuple(np.array(ids, np.int32) for ids in around)
    raise ValueError("the tokenizer's post-processor changes the tokens of a text: it cannot be used here")


def end_token(tokenizer: PreTrainedTokenizerBase) -> str:
    """The token between texts and between the chunks of a document: `<|endoftext|>`, or where the vocabulary
    lacks it the tokenizer's own end of a text.

    Raises: ValueError if there is neither.
    """
    token = END_OF_TEXT if END_OF_TEXT in tokenizer.get_vocab() else tokenizer.eos_token
    if token is None:
        raise ValueError(f"the tokenizer has neither {END_OF_TEXT} nor an eos token: give it an eos token")
    return token


def ending(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The same tokenizer with a post-processor that appends its `end_token` to a text.

    Source: the tokenizer of Qwen3-Embedding, which pools at that token.
    """
    from transformers import PreTrainedTokenizerFast

    backend, end = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()), end_token(tokenizer)
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {end}",
        pair=f"$A $B {end}",
        special_tokens=[(end, backend.token_to_id(end))],
    )
    # The class of a tokenizer may know better than its file what to add; the general one does not.
    return PreTrainedTokenizerFast(tokenizer_object=backend, **tokenizer.special_tokens_map)


def pack(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], length: int) -> np.ndarray:
    """Concatenate texts with `<|endoftext|>` after each and cut them into blocks; the remainder is dropped.

    Blocks are not isolated from one another where two texts meet, as in the paper's packing to 4,096 tokens.

    Args:
        length: tokens per block.
    Returns: int32, (blocks, length).
    Raises: ValueError if the texts do not fill a single block.
    """
    end = np.array([tokenizer.convert_tokens_to_ids(end_token(tokenizer))], dtype=np.int32)
    arrays = encode(tokenizer.backend_tokenizer, texts, np.int32)
    parts = [part for array in arrays if len(array) for part in (array, end)]
    tokens = np.concatenate(parts) if parts else end[:0]
    blocks = len(tokens) // length
    if blocks == 0:
        raise ValueError(
            f"The texts hold {len(tokens)} tokens, not one block of {length}; give more or longer texts."
        )
    return tokens[: blocks * length].reshape(blocks, length)


@dataclass(frozen=True)
class TokenSequence:
    """Tokens of one forward pass. For a document, `chunk_L` says which chunk each token belongs to (-1: a
    separator, or context only)."""

    tokens_L: np.ndarray
    chunk_L: np.ndarray | None = None
    rows: int = 1  # vectors that the sequence yields: its number of chunks

    def __len__(self) -> int:
        return len(self.tokens_L)


def join_chunks(
    chunks: Sequence[np.ndarray],
    separator_id: int,
    around: tuple[Sequence[int], Sequence[int]] = ((), ()),
) -> TokenSequence:
    """One sequence for a document of chunks, with a separator token between them (pplx-embed, section 2.4).

    Separators are read by the model and belong to no chunk.

    Args:
        around: special tokens before and after the document; they belong to its first and to its last chunk,
            so that a document of one chunk is a text.
    """
    before, after = around
    chunks = list(chunks)
    chunks[0] = np.concatenate([before, chunks[0]])
    chunks[-1] = np.concatenate([chunks[-1], after])
    tokens, owner = [], []
    for index, chunk in enumerate(chunks):
        if index:
            tokens.append([separator_id])
            owner.append([-1])
        tokens.append(chunk)
        owner.append(np.full(len(chunk), index))
    return TokenSequence(
        np.concatenate(tokens).astype(np.int32), np.concatenate(owner).astype(np.int32), len(chunks)
    )


@dataclass(frozen=True)
class StoredTokenizer:
    """A tokenizer in a file of its own, for processes that need no more of it than this."""

    path: Path
    hash: str
    dtype: str  # of its ids: uint16 where they fit
    end: int  # `end_token`

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> StoredTokenizer:
        """Kept under artifacts/data by its content; special tokens, truncation and padding are left out."""
        plain = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        plain.post_processor = None
        plain.no_truncation()
        plain.no_padding()
        content = plain.to_str()
        key = hashlib.sha256(content.encode()).hexdigest()
        path = artifacts_root() / "data" / "prepared" / f"tokenizer-{key[:16]}.json"
        if not path.is_file():
            write_atomic(path, content)
        fits = max(plain.get_vocab(with_added_tokens=True).values()) < 2**16
        return cls(path, key, "uint16" if fits else "uint32", plain.token_to_id(end_token(tokenizer)))

    def load(self) -> Tokenizer:
        """The tokenizer, read once per process."""
        return _load(self.path)


@cache
def _load(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path))


def encode(
    tokenizer: Tokenizer,
    texts: Iterable[str],
    dtype: type[np.integer],
    max_length: int | None = None,
    around: tuple[str, str] = ("", ""),
) -> Iterator[np.ndarray]:
    """Token ids of each text without special tokens, whole or cut to `max_length`, in bounded memory.

    A text is tokenised to its end also where it is cut: where a token ends may depend on what follows.
    The library's own tokenizer is several times faster than through the wrapper of transformers.

    Args:
        around: what stands before and after each text and is tokenised with it, since tokens may reach
            across; what is too long loses the end of the text, never what stands after it.
    """
    before, after = around
    (end,) = _encoded(tokenizer, [after], dtype)
    for batch in batches(texts, len, BATCH_CHARACTERS):
        for ids in _encoded(tokenizer, [before + text + after for text in batch], dtype):
            yield ids if max_length is None else cut(ids, max_length, end)


def cut(ids: np.ndarray, max_length: int, end: np.ndarray) -> np.ndarray:
    """The ids, or where they are too many, the first of them and then `end`: `max_length` in all."""
    if len(ids) <= max_length:
        return ids
    return np.concatenate([ids[: max_length - len(end)], end])  # a copy: the rest need not stay in memory


def batches(items: Iterable[Item], size: Callable[[Item], int], limit: int) -> Iterator[list[Item]]:
    """The items in order, in lists that end with the item by which their sizes add up to `limit` or more."""
    batch, total = [], 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= limit:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def _encoded(tokenizer: Tokenizer, texts: list[str], dtype: type[np.integer]) -> Iterator[np.ndarray]:
    tokenizer.no_truncation()  # both may be set in its file, and by whoever used it before
    tokenizer.no_padding()
    for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
        yield np.array(encoding.ids, dtype=dtype)
