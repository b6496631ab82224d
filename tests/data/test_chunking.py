import pytest

import tiny
from unmask.data.chunking import chunks

SENTENCE = "Read a table from a file and return its rows. "
JAPANESE = "東京は日本の首都です。大きな都市です。" * 30


def size(text: str) -> int:
    return len(tiny.tokenizer()(text)["input_ids"])


def squeezed(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize(
    "text",
    [
        SENTENCE * 50,
        "\n\n".join(SENTENCE * n for n in range(1, 15)),
        JAPANESE,
        "x" * 900,
        "one very long sentence without an end " * 60,
        "Title\n\n" + SENTENCE * 3 + "\r\n\r\n- item\n- item\n\n\n" + "def close(self):\n    return 1\n" * 40,
        " \n\n ".join("ab?! c" for _ in range(99)),
    ],
)
@pytest.mark.parametrize(("length", "count"), [(16, 4), (64, 16), (64, 1)])
def test_nothing_is_lost_and_nothing_is_too_long(text, length, count):
    documents = chunks(text, tiny.tokenizer(), length, count)
    flat = [chunk for document in documents for chunk in document]
    assert squeezed("".join(flat)) == squeezed(text)
    assert all(chunk == chunk.strip() and 0 < size(chunk) <= length for chunk in flat)
    sizes = [len(document) for document in documents]
    assert 1 <= max(sizes) <= count and max(sizes) - min(sizes) <= 1
    assert len(documents) == -(-len(flat) // count)
    # Chunks are filled: there are at most four times as many as there must be.
    assert len(flat) <= 4 * -(-size(text) // length)


def test_chunks_end_where_sentences_end():
    for document in chunks(SENTENCE * 40, tiny.tokenizer(), 64):
        assert all(chunk.startswith("Read") and chunk.endswith("rows.") for chunk in document)
    for document in chunks(JAPANESE, tiny.tokenizer(), 64):
        assert all(chunk.endswith("。") for chunk in document)


def test_a_paragraph_is_kept_together_where_that_leaves_the_chunk_half_full():
    first, second = SENTENCE * 3, SENTENCE * 3
    length = size(SENTENCE * 5)
    text = f"{first.strip()}\n\n{second.strip()}\n\n{SENTENCE * 2}"
    assert chunks(text, tiny.tokenizer(), length)[0][0] == first.strip()


def test_short_text_is_one_chunk_and_white_space_is_none():
    assert chunks(" One. Two.\n", tiny.tokenizer()) == [["One. Two."]]
    assert chunks(" \n\t ", tiny.tokenizer()) == chunks("", tiny.tokenizer()) == []


def test_no_chunks_of_no_length():
    with pytest.raises(ValueError, match="at least 1"):
        chunks("text", tiny.tokenizer(), 0)
