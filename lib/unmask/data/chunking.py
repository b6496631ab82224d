"""Long text to documents of chunks, cut where a reader would: after a paragraph, a sentence, a word."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The end of a line or of a sentence; CJK sentences are not followed by a space.
_ENDS = re.compile(
    r"(?<=\n)(?!\n)|(?<=[.!?…؟।])(?=\s)|(?<=[.!?…؟।][\"'”’»)\]])(?=\s)|(?<=[。！？])(?![」』”）])"
)
_SPACE = re.compile(r"\s+")


def chunks(
    text: str, tokenizer: PreTrainedTokenizerBase, length: int = 256, count: int = 16
) -> list[list[str]]:
    """Cuts a text into documents of at most `count` chunks of at most `length` tokens each.

    Chunks are filled up to the last paragraph that fits, else to the last sentence; a sentence that is too
    long by itself is cut between words, or inside one where there is no other way. A text of more than
    `count` chunks becomes several documents of nearly equal size. Nothing but white space between chunks is
    left out, and no single character is split.

    Returns: documents, each a list of chunks; none for a text of white space.
    Raises: ValueError if length or count is below 1.
    """
    if length < 1 or count < 1:
        raise ValueError(f"length and count must be at least 1, got {length} and {count}")
    sentences = _fitting(_ENDS.split(text), tokenizer, length)
    sizes = _sizes(sentences, tokenizer)
    cut, start = [], 0
    while start < len(sentences):
        stop, total = start, 0
        while stop < len(sentences) and (stop == start or total + sizes[stop] <= length):
            total += sizes[stop]
            stop += 1
        if stop < len(sentences):
            stop = _after_paragraph(sentences, sizes, start, stop)
        # Tokens merge differently in context; rarely, what was counted in parts is longer as a whole.
        cut += _fitting(["".join(sentences[start:stop]).strip()], tokenizer, length)
        start = stop
    filled = [chunk for chunk in (part.strip() for part in cut) if chunk]
    documents = -(-len(filled) // count)
    bounds = [len(filled) * index // documents for index in range(documents + 1)] if documents else [0]
    return [filled[start:stop] for start, stop in pairwise(bounds)]


def _after_paragraph(sentences: list[str], sizes: list[int], start: int, stop: int) -> int:
    """The last end of a paragraph that leaves the chunk at least half full, else `stop`."""
    half, filled, best = sum(sizes[start:stop]) / 2, 0, stop
    for index in range(start, stop):
        filled += sizes[index]
        if filled >= half and sentences[index].endswith("\n\n"):
            best = index + 1
    return best


def _fitting(texts: list[str], tokenizer: PreTrainedTokenizerBase, length: int) -> list[str]:
    """The texts; those of more than `length` tokens are halved at the space nearest to the middle until they
    fit."""
    parts = []
    for text, size in zip(texts, _sizes(texts, tokenizer), strict=True):
        if size <= length or len(text) <= 1:
            parts.append(text)
            continue
        middle = len(text) // 2
        spaces = (match.end() for match in _SPACE.finditer(text) if match.end() < len(text))
        at = min(spaces, key=lambda end: abs(end - middle), default=middle)
        parts += _fitting([text[:at], text[at:]], tokenizer, length)
    return parts


def _sizes(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    # The Rust tokenizer itself: several times faster than through the wrapper.
    encodings = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [len(encoding) for encoding in encodings]
