"""Text to tokens: a byte-level BPE tokenizer of our own, fast batched encoding, packing into blocks, and the
sequences that a model reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2Tokenizer

from unmask.store import fingerprint

END_OF_TEXT = "<|endoftext|>"  # padding; between packed texts, and between the chunks of a document
MASK = "<|fim_pad|>"
SPECIAL_TOKENS = [END_OF_TEXT, "<|im_start|>", "<|im_end|>", MASK]  # ids 0 to 3
# Bytes of text in a token, below which a tokenizer hardly knows the language. SmolLM2's: English prose 4.6,
# docstrings 3.7, code 3.5 · Spanish 3.0, German 2.8, Russian 2.4, Vietnamese 1.7, Chinese 1.6, Korean 1.2.
KNOWN = 3.2
BATCH_CHARACTERS = 250_000  # encoded at a time; an encoding takes some thirty times its text's memory


class Truncation(NamedTuple):
    """How a text is read: whole or cut to so many tokens, between a prefix and a suffix."""

    length: int | None = None  # tokens at most, those of prefix and suffix included
    # Both are tokenised with the text, since tokens may span them: an instruction, or an end token. Texts
    # that are too long lose their own end, never the suffix.
    prefix: str = ""
    suffix: str = ""
    # Puts a space after the first character of each control token that a text spells out: in a prompt
    # `<|im_end|>` would end the turn, and what follows could answer in the model's place.
    escape_special_tokens: bool = False


WHOLE = Truncation()


def train_tokenizer(texts: Iterable[str], vocab_size: int, path: str | Path) -> PreTrainedTokenizerFast:
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
    tokenizer = Qwen2Tokenizer().backend_tokenizer  # without a vocabulary
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    options = {"special_tokens": SPECIAL_TOKENS, "initial_alphabet": alphabet, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, **options)
    tokenizer.train_from_iterator(texts, trainer)
    if (size := tokenizer.get_vocab_size()) != vocab_size:
        raise ValueError(
            f"The texts yield {size} tokens, not data.vocab_size = {vocab_size}: give more text "
            "(data.max_packages, data.max_text_mb) or another size, 260 (bytes and special tokens) or more"
        )
    roles = {"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT, "mask_token": MASK}
    roles |= {"extra_special_tokens": ["<|im_start|>", "<|im_end|>"], "clean_up_tokenization_spaces": False}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles)
    fast.save_pretrained(path)
    return fast


def special_tokens_around(tokenizer: PreTrainedTokenizerBase) -> tuple[np.ndarray, np.ndarray]:
    """The ids that the tokenizer's post-processor puts before and after a text, such as [CLS] and [SEP]."""
    encoding = tokenizer.backend_tokenizer.encode("a")
    ids, text = np.array(encoding.ids, np.int32), np.flatnonzero(np.equal(encoding.special_tokens_mask, 0))
    return ids[: text[0]], ids[text[-1] + 1 :]


def end_token(tokenizer: PreTrainedTokenizerBase) -> str:
    """The token between texts and between the chunks of a document: `<|endoftext|>`, or where the vocabulary
    lacks it the tokenizer's own end of a text, or separator (BERT's).

    Raises: ValueError if there is none.
    """
    known = tokenizer.backend_tokenizer.token_to_id(END_OF_TEXT) is not None
    token = END_OF_TEXT if known else tokenizer.eos_token or tokenizer.sep_token
    if token is None:
        raise ValueError(f"the tokenizer has neither {END_OF_TEXT} nor an eos token: give it an eos token")
    return token


def ending(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The same tokenizer with a post-processor that appends its `end_token` to a text.

    Source: the tokenizer of Qwen3-Embedding, which pools at that token.
    """
    backend, end = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()), end_token(tokenizer)
    special = [(end, backend.token_to_id(end))]
    backend.post_processor = processors.TemplateProcessing(f"$A {end}", f"$A $B {end}", special)
    # Some tokenizer classes override what their file says to add; the general one does not.
    return PreTrainedTokenizerFast(tokenizer_object=backend, **tokenizer.special_tokens_map)


def unknown_languages(tokenizer: PreTrainedTokenizerBase, texts: Mapping[str, Sequence[str]]) -> str:
    """Which texts a tokenizer has to spell out, in one line with the remedy; empty if it knows them all.

    Bytes a token tell that in every script; tokens a word do not: some scripts have no spaces, and code has
    as many tokens a word as German.

    Args:
        texts: some of each data set, by its name.
    """
    rates = {}
    for name, some in texts.items():
        encodings = tokenizer.backend_tokenizer.encode_batch([*some], add_special_tokens=False)
        rates[name] = sum(len(text.encode()) for text in some) / max(1, sum(map(len, encodings)))
    few = ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items() if 0 < rate < KNOWN)
    if not few:
        return ""
    return (
        f"bytes of text in a token: {few} (SmolLM2's English has 4.6, code 3.5), so the tokenizer hardly "
        "knows this language: take another backbone.checkpoint, a multilingual decoder for instance, or "
        "--preset scratch, which learns a vocabulary of its own"
    )


def pack(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], length: int) -> np.ndarray:
    """Concatenate texts with `<|endoftext|>` after each and cut them into blocks; the remainder is dropped.

    Blocks are not isolated from one another where two texts meet; of packing the paper says nothing.

    Args:
        length: tokens per block.
    Returns: int32, (blocks, length).
    """
    tokens = joined(PlainTokenizer(tokenizer), texts).astype(np.int32)
    return tokens[: len(tokens) // length * length].reshape(-1, length)


def joined(tokenizer: PlainTokenizer, texts: Iterable[str]) -> np.ndarray:
    """Token ids of texts, one after the other, with the end token after each."""
    last = np.array([tokenizer.end], tokenizer.dtype)
    parts = [part for ids in encode(tokenizer.backend, texts, tokenizer.dtype) for part in (ids, last)]
    return np.concatenate([last[:0], *parts])


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
    chunks: Sequence[np.ndarray], separator_id: int, around: tuple[Sequence[int], Sequence[int]] = ((), ())
) -> TokenSequence:
    """One sequence for a document of chunks, with a separator token between them.

    Separators, as the released models have them, are read by the model and belong to no chunk.

    Args:
        around: special tokens before and after the document; they belong to its first and to its last chunk,
            so that a document of one chunk is a text.
    """
    parts = [part for chunk in chunks for part in ([separator_id], chunk)] + [around[1]]
    owner = [number for chunk in range(len(chunks)) for number in (-1, chunk)] + [len(chunks) - 1]
    parts[0], owner[0] = around[0], 0
    chunk_L = np.repeat(np.array(owner, np.int32), [*map(len, parts)])
    return TokenSequence(np.concatenate(parts).astype(np.int32), chunk_L, len(chunks))


class PlainTokenizer:
    """A tokenizer's vocabulary and rules, without what it adds to a text, truncation and padding.

    Attributes:
        dtype: of ids: uint16 where they fit.
        end: the id of `end_token`.
        hash: the same for the same vocabulary and rules.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.backend.post_processor = None
        self.backend.no_truncation()
        self.backend.no_padding()
        self.end = self.backend.token_to_id(end_token(tokenizer))
        self.dtype = "uint16" if max(self.backend.get_vocab().values()) < 2**16 else "uint32"
        self.hash = fingerprint(self.backend.to_str(), self.end)


def encode(
    tokenizer: Tokenizer,
    texts: Iterable[str],
    dtype: Any,
    truncation: Truncation = WHOLE,
    counters: Any = None,
) -> Iterator[np.ndarray]:
    """Token ids of each text without special tokens, in bounded memory.

    A text is tokenised to its end even if it is cut: where a token ends may depend on what follows.
    `tokenizers` itself is several times faster than the wrapper of transformers around it.

    Args:
        counters: a Counter of texts and tokens that are cut.
    Raises: ValueError if the length leaves no room beside prefix and suffix.
    """
    length, prefix, suffix, escape = truncation
    tokenizer.no_truncation()  # both may be set in its file, and by whoever used it before
    tokenizer.no_padding()
    around, end = (tokenizer.encode(one, add_special_tokens=False).ids for one in (prefix + suffix, suffix))
    if length is not None and len(around) >= length:
        room = f"{length} tokens at most, of which prefix and suffix take {len(around)}"
        raise ValueError(f"{room}: raise the length")
    if escape:
        added = tokenizer.get_added_tokens_decoder().values()
        control = re.compile("|".join(re.escape(token.content) for token in added if token.special) or "(?!)")
        texts = (control.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text) for text in texts)
    for batch in batches(texts, len, BATCH_CHARACTERS):
        whole = [prefix + text + suffix for text in batch]
        for encoding in tokenizer.encode_batch_fast(whole, add_special_tokens=False):
            ids = encoding.ids
            if length is not None and len(ids) > length:
                if counters is not None:
                    counters.update({"texts cut": 1, "tokens cut": len(ids) - length})
                ids = ids[: length - len(end)] + end
            yield np.array(ids, dtype)


def batches(items: Iterable[Any], size: Callable[[Any], int], limit: int) -> Iterator[list[Any]]:
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
