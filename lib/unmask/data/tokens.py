"""Text to tokens: a byte-level BPE tokenizer of our own, fast batched encoding, packing into blocks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

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
ENCODE_BATCH = 4_096


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
    arrays = [array[:max_length] for array in _encode(tokenizer, texts)]
    for index, array in enumerate(arrays):
        if not len(array):
            raise ValueError(
                f"Text {index} of {len(texts)} has no tokens: {texts[index]!r}. Remove or fill it."
            )
    return arrays


def pack(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], length: int) -> np.ndarray:
    """Concatenate texts with `<|endoftext|>` after each and cut them into blocks; the remainder is dropped.

    Blocks are not isolated from one another where two texts meet, as in the paper's packing to 4,096 tokens.

    Args:
        length: tokens per block.
    Returns: int32, (blocks, length).
    Raises: ValueError if the texts do not fill a single block.
    """
    end = np.array([tokenizer.convert_tokens_to_ids(END_OF_TEXT)], dtype=np.int32)
    parts = [part for array in _encode(tokenizer, texts) if len(array) for part in (array, end)]
    tokens = np.concatenate(parts) if parts else end[:0]
    blocks = len(tokens) // length
    if blocks == 0:
        raise ValueError(
            f"The texts hold {len(tokens)} tokens, not one block of {length}; give more or longer texts."
        )
    return tokens[: blocks * length].reshape(blocks, length)


def _encode(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> Iterator[np.ndarray]:
    """Encode in batches with the Rust tokenizer itself: several times faster than through the wrapper."""
    remaining = iter(texts)
    while batch := list(islice(remaining, ENCODE_BATCH)):
        for encoding in tokenizer.backend_tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            yield np.array(encoding.ids, dtype=np.int32)
