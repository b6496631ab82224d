"""The tokenizer, encoding and packing."""

import numpy as np
import pytest
from transformers import AutoTokenizer

import tiny
from unmask.data import tokens
from unmask.data.tokens import MASK, SPECIAL_TOKENS, Truncation, encode

TEXTS = [
    "Returns the sum of two numbers, it's 1,234.5 or so.\n\n    def add(a, b):\n        return a + b",
    "Die Straße nach Zürich führt über Köln; 12 Kilometer.",
    "東京は日本の首都です。人口は約1400万人。",
    "مرحبا بالعالم، 2023",
    "नमस्ते दुनिया",
    "emoji 🙂 and\ttabs\r\nand   spaces ",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    tokens.train_tokenizer(TEXTS * 3, 320, path)
    return AutoTokenizer.from_pretrained(path)


def test_texts_survive_and_special_tokens_are_single(tokenizer):
    for text, ids in zip(TEXTS, tiny.tokenize(tokenizer, TEXTS, 1_000)):
        assert ids.dtype == np.int32
        assert tokenizer.decode(ids) == text
        assert tokenizer(text)["input_ids"] == ids.tolist()  # and nothing is added to an encoding
    assert tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS) == [0, 1, 2, 3]
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 0
    assert tokenizer.mask_token == MASK
    assert len(tokenizer) == 320
    assert tokenizer(f"a{SPECIAL_TOKENS[0]}b")["input_ids"][1] == 0


def test_pack(tokenizer):
    ids = tiny.tokenize(tokenizer, TEXTS, 1_000)
    stream = np.concatenate([part for array in ids for part in (array, [0])])
    blocks = tokens.pack(tokenizer, TEXTS, 16)
    assert blocks.dtype == np.int32 and blocks.shape == (len(stream) // 16, 16)
    assert (blocks.ravel() == stream[: blocks.size]).all()


UNUSABLE = {100: "yield 260 tokens", 50_000: "not data.vocab_size = 50000"}


@pytest.mark.parametrize(("size", "message"), UNUSABLE.items())
def test_unusable_vocabulary_sizes(size, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        tokens.train_tokenizer(TEXTS, size, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_prefix_and_suffix_are_tokenised_with_the_text_and_never_cut(tokenizer):
    backend, after = tokenizer.backend_tokenizer, "?\n<|im_end|>"
    whole, end = ([*map(int, ids)] for ids in encode(backend, ["ask: Köln" + after, after], np.int32))
    for length in (None, len(whole), len(whole) - 1, 9):
        (ids,) = encode(backend, ["Köln"], np.int32, Truncation(length, "ask: ", after))
        expected = whole if length in (None, len(whole)) else whole[: length - len(end)] + end
        assert ids.tolist() == expected
    with pytest.raises(
        ValueError, match=r"8 tokens at most, of which prefix and suffix take 8: raise the length"
    ):
        next(encode(backend, ["Köln"], np.int32, Truncation(8, "ask: ", after)))
