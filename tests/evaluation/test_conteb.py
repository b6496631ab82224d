"""ConTEB: its layout on the Hub, tasks from own documents, variations of a task."""

import json
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import pytrec_eval

import tiny
from unmask.config import ConfigError, load_preset
from unmask.evaluation.conteb import (
    TASKS,
    as_task,
    at_corpus_size,
    build,
    first_documents,
    load,
    resized,
    squad,
)
from unmask.evaluation.tasks import Task, ndcg

CHUNKS = [("b_1", "second of b"), ("b_0", "first of b"), ("a_10", "last of a"), ("a_2", "middle of a")]
DOCUMENTS = [{"chunk_id": name, "chunk": text} for name, text in CHUNKS]
QUERIES = [{"query": "what ends a?", "chunk_id": "a_10"}, {"query": "what is b?", "chunk_id": "b_0"}]


def repository(
    folder: Path, documents=DOCUMENTS, queries=QUERIES, *, split="train", readme=True, suffix="parquet"
) -> Path:
    """A data set in the layout that `push_to_hub` gives it."""
    for config, rows in (("documents", documents), ("queries", queries)):
        (folder / config).mkdir(parents=True)
        path = folder / config / f"{split}-00000-of-00001.{suffix}"
        if suffix == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if readme:
        paths = [f"- config_name: {config}\n  data_files:\n  - split: {split}\n    path: {config}/{split}-*\n"
                 for config in ("documents", "queries")]  # fmt: skip
        (folder / "README.md").write_text("---\nconfigs:\n" + "".join(paths) + "---\n")
    return folder


def test_a_repository_of_the_mirror_is_a_task(tmp_path, monkeypatch):
    monkeypatch.setenv("UNMASK_MIRROR", str(tmp_path))
    extra = [row | {"og_chunk": "…"} for row in DOCUMENTS]  # as football has it
    repository(tmp_path / "illuin-conteb" / "insurance", extra)
    task = load("insurance")
    # Documents by name, chunks by number rather than by letters, each with its own id.
    assert task.documents == [["middle of a", "last of a"], ["first of b", "second of b"]]
    assert task.chunk_ids == ["a_2", "a_10", "b_0", "b_1"]
    assert (task.queries, task.relevant) == (["what ends a?", "what is b?"], [{1}, {2}])
    assert task.contextual and task.name == "insurance"


def squad_rows():
    return [
        {"title": title, "context": f"{title} paragraph {p}", "question": f"{title} question {p} {q}"}
        for title, paragraphs in (("Z", 2), ("A", 3), ("M", 1))
        for p in range(paragraphs)
        for q in range(2)
    ]


def test_squad_is_read_from_the_mirror_and_nowhere_else(tmp_path, monkeypatch):
    monkeypatch.delenv("UNMASK_MIRROR", raising=False)
    assert squad() is None
    monkeypatch.setenv("UNMASK_MIRROR", str(tmp_path))
    assert squad() is None
    folder = tmp_path / "rajpurkar" / "squad" / "plain_text"
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(squad_rows()), folder / "validation-00000-of-00001.parquet")
    task = squad()
    assert task.documents[0] == ["Z paragraph 0", "Z paragraph 1"]  # in the data's order
    assert [len(document) for document in task.documents] == [2, 3, 1]
    assert task.contextual and len(task.queries) == 12
    for query, relevant in zip(task.queries, task.relevant, strict=True):
        title, _, paragraph, _ = query.split()
        assert {task.chunks[i] for i in relevant} == {f"{title} paragraph {paragraph}"}
    fewer = squad(paragraphs=5, questions=3)
    assert (
        fewer.documents == task.documents[:2]
        and fewer.queries == [query for query in task.queries if not query.startswith("M")][:3]
    )


@pytest.mark.mirror
def test_the_mirrors_squad_is_all_of_its_validation_split():
    task = squad(questions=20_000)
    assert (len(task.documents), len(task.chunks), len(task.queries)) == (48, 2067, 10570)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize("readme", [False, True])
def test_a_folder_is_read_with_and_without_readme_and_may_have_several_answers(tmp_path, readme, suffix):
    queries = [{"query": "what is where?", "chunk_ids": ["a_2", "b_1"]}]
    folder = repository(tmp_path / "own", queries=queries, split="test", readme=readme, suffix=suffix)
    assert load(folder).relevant == [{0, 3}]


def test_the_tasks_of_the_benchmark_are_eight():
    assert len(TASKS) == 8 and set(TASKS.values()) == {"train", "validation", "test"}


def test_what_is_not_there_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("UNMASK_MIRROR", str(tmp_path))
    with pytest.raises(ValueError, match=r"geografy is neither .* of ConTEB; did you mean 'geography'"):
        load("geografy")
    with pytest.raises(ValueError, match="documents has no split 'dev'; known: test"):
        load(repository(tmp_path / "own", split="test"), "dev")
    with pytest.raises(ValueError, match=r"illuin-conteb/geography is not in the mirror .* mirror pull"):
        load("geography")


@pytest.mark.parametrize(
    ("documents", "queries", "message"),
    [
        ([{"chunk_id": "a_b_0", "chunk": "x"}], QUERIES, r"'a_b_0' is not .* with one underscore"),
        ([{"chunk_id": "a0", "chunk": "x"}], QUERIES, r"documents/.*, row 0: chunk_id 'a0' is not"),
        ([*DOCUMENTS, DOCUMENTS[1]], QUERIES, r"documents/.*, row 4: there is a chunk 'b_0' already"),
        ([*DOCUMENTS, {"chunk_id": "c_0", "chunk": " "}], QUERIES, r"row 4: chunk is ' ', not a text"),
        (DOCUMENTS, [*QUERIES, {"query": "?", "chunk_id": "c_7"}], r"row 2: there is no chunk 'c_7'"),
        (DOCUMENTS, [{"query": None, "chunk_id": "b_0"}], r"queries/.*, row 0: query is None"),
        (DOCUMENTS, [{"query": "?", "chunk_ids": []}], r"row 0: chunk_ids is \[\], not a list of some"),
        (DOCUMENTS, [{"question": "?", "chunk_id": "b_0"}], r"has no column query; known: question"),
        ([{"chunk_id": "a_0", "text": "x"}], QUERIES, r"has no column chunk; did you mean 'chunk_id'\?"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named(tmp_path, documents, queries, message):
    folder = repository(tmp_path / "bad", documents, queries, split="test")
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_ties_go_by_the_ids_of_the_chunks():
    """As the authors' evaluation has them: equal scores in the descending order of their ids, as strings."""
    documents = [{"chunk_id": f"{d}_{i}", "chunk": f"{d} {i}"} for d in ("x", "k") for i in range(12)]
    queries = [{"query": f"q {row['chunk_id']}", "chunk_id": row["chunk_id"]} for row in documents]
    task = as_task("ties", documents, queries)
    scores = np.random.default_rng(0).integers(0, 3, (24, 24)).astype(np.float32)
    run = {str(q): dict(zip(task.chunk_ids, row.tolist(), strict=True)) for q, row in enumerate(scores)}
    gold = {str(q): {row["chunk_id"]: 1} for q, row in enumerate(queries)}
    judged = pytrec_eval.RelevanceEvaluator(gold, {"ndcg_cut_10"}).evaluate(run)
    expected = [judged[str(q)]["ndcg_cut_10"] for q in range(24)]
    np.testing.assert_allclose(ndcg(task, scores), expected, atol=1e-9)
    assert not np.allclose(ndcg(Task(*list(vars(task).values())[:-1]), scores), expected)


# --- own documents

TEXT = (
    "Ada Lovelace, a life.\n\nAda Lovelace was born in London. Her mother taught her.\n\n"
    "Later, Ada's notes described a machine. “Ada Lovelace's program” computed numbers.\n\n"
    "She died young. Adas are many, and Ada was one."
)
ROW = {
    "text": TEXT,
    "theme": ["Ada", "Ada Lovelace"],
    "neutral": ("she", "her"),
    "questions": [
        {"query": "Where was Ada Lovelace born?", "answer": "London"},
        {"query": "Who taught ada?", "answer": "Her mother taught her.\n\nLater, Ada's notes"},
        {"query": "How did Ada end?", "answer": "Ada", "start": TEXT.rindex("Ada")},
    ],
}


@pytest.mark.parametrize("length", [8, 20, 1000])
def test_answers_lie_in_the_chunks_they_are_paired_with(length):
    documents, queries = build([ROW | {"theme": None}] * 2, tiny.tokenizer(), length=length)
    text = {row["chunk_id"]: row["chunk"] for row in documents}
    plain = "".join(TEXT.split())
    for number, rows in groupby(documents, key=lambda row: row["chunk_id"].partition("_")[0]):
        rows = list(rows)
        assert [row["chunk_id"] for row in rows] == [f"{number}_{i}" for i in range(len(rows))]
        assert "".join("".join(row["chunk"].split()) for row in rows) == plain
    for question, row in zip(ROW["questions"] * 2, queries, strict=True):
        parts = ["".join(text[chunk_id].split()) for chunk_id in row["chunk_ids"]]
        answer = "".join(question["answer"].split())
        assert answer in "".join(parts)
        if len(parts) > 1:  # and no chunk too many
            assert answer not in "".join(parts[1:]) and answer not in "".join(parts[:-1])
    (last,) = queries[2]["chunk_ids"]  # the answer occurs before, too, and `start` says which one is meant
    assert not any("Ada" in chunk for i, chunk in text.items() if i[0] == "0" and int(i[2:]) > int(last[2:]))


def test_the_theme_is_named_in_the_first_chunk_only():
    documents, queries = build([ROW], tiny.tokenizer(), length=20)
    first, *rest = (row["chunk"] for row in documents)
    assert len(rest) > 2 and "Ada Lovelace" in first
    assert " ".join(" ".join(rest).split()) == (
        "She was born in London. Her mother taught her. Later, her notes described a machine. "
        "“Her program” computed numbers. She died young. Adas are many, and she was one."
    )
    assert [row["query"] for row in queries] == [question["query"] for question in ROW["questions"]]
    rome = {"text": "This is a history of Rome.\n\nMuch later, Rome fell.", "theme": "Rome"}
    rome["questions"] = [{"query": "When fell Rome?", "answer": "later"}]
    documents, _ = build([rome], tiny.tokenizer(), length=20)
    assert [row["chunk"] for row in documents] == [
        "This is a history of Rome.",
        "Much later, it fell.",
    ]


def test_built_rows_are_what_the_loader_reads(tmp_path):
    documents, queries = build([ROW, ROW], tiny.tokenizer(), length=20)
    task = load(repository(tmp_path / "own", documents, queries, split="test"))
    assert task == as_task("own", documents, queries)
    assert len(task.documents) == 2 and len(task.queries) == 6
    half = len(task.documents[0])
    assert task.relevant[3:] == [{chunk + half for chunk in relevant} for relevant in task.relevant[:3]]


def question(**changes):
    return {**ROW, "questions": [ROW["questions"][0], ROW["questions"][0] | changes]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            question(answer="Paris"),
            "question 1 of document 1: the answer 'Paris' is not in the text: it must",
        ),
        (question(answer="Ada"), "question 1 of document 1: the answer 'Ada' is in the text more than once"),
        (question(answer="London", start=3), "the answer 'London' is not in the text at character 3"),
        (question(answer="London", start=-6), "the answer 'London' is not in the text at character -6"),
        (question(answer=" "), "question 1 of document 1: the answer is empty"),
        (question(query="Where?"), "question 1 of document 1 does not name the theme"),
        (ROW | {"theme": "Byron"}, "document 1: the first chunk does not name the theme 'Byron'"),
        (ROW | {"questions": []}, "document 1 has no questions"),
        (ROW | {"text": " \n"}, "document 1 has no text"),
        ({"questions": ROW["questions"]}, "document 1 has no text"),
    ],
)
def test_documents_that_make_no_task_are_named(row, message):
    with pytest.raises(ValueError, match=message):
        build([ROW, row], tiny.tokenizer(), length=20)


# --- variations

TASK = Task(
    "t", "contextual", ["q0", "q1", "q2"],
    [["heading", "one two three four five", "six seven"], ["title", "a b"]], [{1}, {2}, {3, 4}],
)  # fmt: skip


@pytest.mark.parametrize(
    ("words", "documents", "relevant"),
    [
        (
            2,
            [["heading", "one two", "three four", "five", "six seven"], ["title", "a b"]],
            [{1, 2, 3}, {4}, {5, 6}],
        ),
        (3, [["heading", "one two three", "four five", "six seven"], ["title a b"]], [{1, 2}, {3}, {4}]),
        (7, [["heading one two three four five", "six seven"], ["title a b"]], [{0}, {1}, {2}]),
        (8, [["heading one two three four five six seven"], ["title a b"]], [{0}, {0}, {1}]),
    ],
)
def test_chunks_are_cut_and_joined_and_the_answers_follow(words, documents, relevant):
    new = resized(TASK, words)
    assert (new.documents, new.relevant, new.queries) == (documents, relevant, TASK.queries)
    with pytest.raises(ValueError, match="at least one word"):
        resized(TASK, 0)


def random_task(rng, documents=9):
    parts = [[f"{d} {c}" for c in range(rng.integers(1, 5))] for d in range(documents)]
    count = sum(map(len, parts))
    relevant = [set(rng.choice(count, size=1 + q % 2, replace=False).tolist()) for q in range(40)]
    return Task("r", "contextual", [f"q{q}" for q in range(40)], parts, relevant), rng.normal(
        size=(40, count)
    )


def test_a_larger_corpus_is_harder_and_the_whole_one_is_the_task():
    task, scores = random_task(np.random.default_rng(0))
    sizes = [at_corpus_size(task, scores, n) for n in range(2, 10)]
    for smaller, larger in pairwise(sizes):
        assert (smaller >= larger - 1e-12).all()
    np.testing.assert_allclose(sizes[-1], ndcg(task, scores))
    assert sizes[0].mean() > sizes[-1].mean() + 0.1
    np.testing.assert_array_equal(sizes[2], at_corpus_size(task, scores, 4))
    assert not np.array_equal(sizes[2], at_corpus_size(task, scores, 4, seed=1))
    with pytest.raises(ValueError, match="has 9 documents, not 10"):
        at_corpus_size(task, scores, 10)


def test_a_corpus_of_one_document_is_a_ranking_of_its_own_chunks():
    task, scores = random_task(np.random.default_rng(1))
    first = np.cumsum([0, *map(len, task.documents)])
    alone = at_corpus_size(task, scores, 1)
    for q, relevant in enumerate(task.relevant):
        owners = {int(np.searchsorted(first, chunk, side="right")) - 1 for chunk in relevant}
        columns = [c for d in sorted(owners) for c in range(first[d], first[d + 1])]
        single = Task(
            "s", "contextual", ["q"], [["x"] * len(columns)], [{columns.index(c) for c in relevant}]
        )
        assert alone[q] == pytest.approx(ndcg(single, scores[q : q + 1, columns])[0])


def test_the_first_documents_keep_their_queries():
    assert first_documents(TASK, 1) == Task("t", "contextual", ["q0", "q1"], TASK.documents[:1], [{1}, {2}])
    assert first_documents(TASK, 5) == TASK


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("contextual.objective", "insnet", "contextual.objective must be 'pplx' or 'insent', got 'insnet'"),
        ("conteb.chunk_words", [8, 4], "conteb.chunk_words must be two or more, positive, ascending"),
        ("conteb.corpus_documents", [5], "conteb.corpus_documents must be two or more"),
        ("conteb.lambdas", [0.5, 1.5], "conteb.lambdas must lie in 0..1"),
        ("conteb.steps", 0, "conteb.steps must be at least 1"),
    ],
)
def test_a_preset_that_cannot_be_studied_is_refused(key, value, message):
    with pytest.raises(ConfigError, match=message):
        load_preset("smoke", {key: value})
