"""Instructions: their form, and that a query is read the same in training, by `Embedder` and by
sentence-transformers."""

import doctest

import numpy as np
import pytest
from datasets import Dataset
from sentence_transformers import SentenceTransformer

import tiny
from unmask import Embedder
from unmask.config import FAMILIES, GROUPS
from unmask.data.tokenized import token_pairs
from unmask.data.tokens import END_OF_TEXT, StoredTokenizer, ending
from unmask.evaluation.tasks import Task
from unmask.models import backbone, instructions
from unmask.models.instructions import INSTRUCTIONS, instructed, instructed_task, prompt

# Letters, signs, digits and spaces follow the colon, which pre-tokenisation may join with some of them.
QUERIES = [
    "Read a table",
    "  ",
    " ",
    ":",
    "/ a",
    "7 mean",
    "\n",
    "東京",
    "<|endoftext|>",
    "x" * 40,
    "'s a",
    "a ",
]
DOCUMENTS = ["from a file ", "from a file again\n", *tiny.TEXTS[:5], *["Number " * n for n in range(5, 10)]]
INSTRUCTION = INSTRUCTIONS["contextual"]


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A causal checkpoint as the stage leaves it."""
    monkeypatch.setenv("UNMASK_ARTIFACTS", str(tmp_path))
    return backbone.save(
        tiny.model(bidirectional=False), ending(tiny.tokenizer()), tmp_path / "model",
        stage="qwen3", pooling="last", special_tokens=True,
        prompts={"query": prompt(INSTRUCTION), "document": ""},
    )  # fmt: skip


def test_the_docstrings_example_holds():
    result = doctest.testmod(instructions)
    assert result.attempted > 0 and result.failed == 0


def test_every_group_and_every_family_has_an_instruction():
    assert set(INSTRUCTIONS) == {*GROUPS, *FAMILIES}
    assert instructed("Do it", "now") == "Instruct: Do it\nQuery:now"


def test_an_instructed_task_differs_in_its_queries_only():
    task = Task("t", "code", ["one", "two"], [["a"], ["b"]], [{0}, {1}])
    changed = instructed_task(task)
    assert changed.queries == [f"Instruct: {INSTRUCTIONS['code']}\nQuery:{query}" for query in task.queries]
    assert (changed.documents, changed.relevant, changed.name) == (task.documents, task.relevant, task.name)


@pytest.fixture
def read(monkeypatch):
    """What embedders read from here on, text by text."""
    texts = []
    real = Embedder._texts

    def recorded(*arguments):
        for unit in real(*arguments):
            texts.append(unit.sequence.tokens_L.tolist())
            yield unit

    monkeypatch.setattr(Embedder, "_texts", recorded)
    return texts


@pytest.mark.parametrize("lengths", [(200, 200), (74, 9), (70, 8)])
def test_training_reads_what_the_embedder_reads(path, read, lengths):
    query_length, document_length = lengths
    rows = Dataset.from_dict({"query": QUERIES, "document": DOCUMENTS, "key": list(map(str, range(12)))})
    tokenizer = ending(tiny.tokenizer())
    trained = token_pairs(
        rows, StoredTokenizer.of(tokenizer), name="d", identity="",
        query_length=query_length, document_length=document_length,
        around_query=(prompt(INSTRUCTION), END_OF_TEXT), around_document=("", END_OF_TEXT),
    )  # fmt: skip
    embedder = Embedder.from_pretrained(path, device="cpu")
    embedder.encode([instructed(INSTRUCTION, query) for query in QUERIES], max_length=query_length)
    embedder.encode(DOCUMENTS, max_length=document_length)
    found = [ids.tolist() for ids in [*trained.queries, *trained.documents]]
    assert found == read
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    assert all(ids[-1] == end for ids in found)
    assert all(len(ids) <= query_length for ids in found[:12])
    assert bool(trained.counters.get("texts cut")) == (document_length < 200)
    # The tokenizer itself adds the end, and joins no more and no less.
    whole = tokenizer([instructed(INSTRUCTION, query) for query in QUERIES]).input_ids
    assert [len(ids) for ids in whole] == [len(ids) for ids in found[:12]] or document_length < 200


def test_a_length_without_room_beside_the_instruction_is_refused(path):
    rows = Dataset.from_dict({"query": ["q"], "document": ["d"], "key": ["k"]})
    around = {"around_query": (prompt(INSTRUCTION), END_OF_TEXT), "around_document": ("", END_OF_TEXT)}
    stored = StoredTokenizer.of(tiny.tokenizer())
    for lengths, message in (((12, 9), "query_length is 12 tokens.*'d'"), ((99, 1), "document_length is 1 ")):
        with pytest.raises(ValueError, match=message):
            token_pairs(
                rows,
                stored,
                name="d",
                identity="",
                query_length=lengths[0],
                document_length=lengths[1],
                **around,
            )


def test_an_empty_query_is_named_though_an_instruction_stands_before_it(path):
    rows = Dataset.from_dict({"query": ["q", ""], "document": ["d", "e"], "key": ["k", "l"]})
    with pytest.raises(ValueError, match="row 1: its query has no tokens"):
        token_pairs(
            rows, StoredTokenizer.of(tiny.tokenizer()), name="d", identity="", query_length=99,
            document_length=9, around_query=(prompt(INSTRUCTION), END_OF_TEXT), workers=1,
        )  # fmt: skip


def test_batched_equals_single_with_padding_on_the_right(path):
    embedder = Embedder.from_pretrained(path, device="cpu")
    texts = [instructed(INSTRUCTION, query) for query in QUERIES] + DOCUMENTS
    together = embedder.encode(texts, "float32")
    single = np.concatenate([embedder.encode([text], "float32") for text in texts])
    np.testing.assert_allclose(together, single, atol=1e-5)


def test_sentence_transformers_gives_the_same_vectors_and_knows_the_prompt(path, tmp_path):
    embedder = Embedder.from_pretrained(path, device="cpu")
    saved = embedder.save_pretrained(tmp_path / "saved")
    theirs = SentenceTransformer(str(saved), device="cpu")
    expected = embedder.encode([instructed(INSTRUCTION, query) for query in QUERIES], "float32")
    np.testing.assert_allclose(theirs.encode(QUERIES, prompt_name="query"), expected, atol=1e-5)
    np.testing.assert_allclose(theirs.encode_query(QUERIES), expected, atol=1e-5)
    for encode in (theirs.encode, theirs.encode_document):
        np.testing.assert_allclose(encode(DOCUMENTS), embedder.encode(DOCUMENTS, "float32"), atol=1e-5)
    again = Embedder.from_pretrained(saved, device="cpu")
    np.testing.assert_array_equal(again.encode(QUERIES), embedder.encode(QUERIES))
    assert prompt(INSTRUCTION) in (saved / "README.md").read_text()


def test_the_tokenizer_of_a_checkpoint_keeps_its_end_through_saving(path, tmp_path):
    again = backbone.load_tokenizer(path)
    end = again.convert_tokens_to_ids(END_OF_TEXT)
    assert again("Read a table").input_ids[-1] == end
    assert ending(again)("Read a table").input_ids.count(end) == 1
    assert tiny.tokenizer()("Read a table").input_ids[-1] != end
    assert StoredTokenizer.of(again).hash == StoredTokenizer.of(tiny.tokenizer()).hash
