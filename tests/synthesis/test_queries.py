"""Queries by a language model, over the wire."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from chat_servers import Words, chat_server, config, good, lines, passage, passage_of
from unmask_study.synthesis import queries, synthesize_documents, synthesize_pairs
from unmask_study.synthesis.queries import draw_documents, draw_passages, sample

PASSAGES = [passage(number) for number in range(24)]
DOCUMENTS = [[passage(100 * d + c) for c in range(6)] for d in range(5)]


def pairs(settings, folder):
    return synthesize_pairs(draw_passages(PASSAGES, Words(), settings), Words(), settings, folder)


def test_pairs_from_passages(tmp_path):
    with chat_server() as server:
        result = pairs(config(server), tmp_path)
    assert result.outcomes == {"accepted": len(PASSAGES)}
    rows = lines(result.path)
    assert rows == result.rows
    assert {row["document"] for row in rows} == set(PASSAGES)
    assert len({row["id"] for row in rows}) == len(rows)
    columns = {"id", "query", "document", "language", "persona", "type", "difficulty", "similarity"}
    for row in rows:
        assert row.keys() == columns and row["persona"] in queries.PERSONAS and row["similarity"] >= 0.1
    assert server.answered == 2 * len(PASSAGES)
    assert pairs(config(server), tmp_path).rows == rows  # the server is gone
    schemas = [body["response_format"]["json_schema"]["schema"] for body in server.bodies]
    forms = Counter(" ".join(sorted(schema["properties"])) for schema in schemas)
    assert forms == dict.fromkeys(["character difficulty type", "query"], len(PASSAGES))


def test_documents_show_the_neighbours_and_ask_for_one_chunk(tmp_path):
    with chat_server() as server:
        settings = config(server)
        tasks = draw_documents(DOCUMENTS, Words(), settings, ())
        result = synthesize_documents(tasks, Words(), settings, tmp_path)
    assert result.outcomes == {"accepted": 3 * len(DOCUMENTS)}
    rows = lines(result.path)
    assert sorted(row["chunks"] for row in rows) == sorted(DOCUMENTS)
    for row in rows:
        assert row.keys() == {"document_id", "chunks", "queries", "golds"}
        assert len(row["queries"]) == len(row["golds"]) == len(set(row["golds"])) == 3
        for query, gold in zip(row["queries"], row["golds"]):
            prompts = [p for p in server.prompts if passage_of(p) == row["chunks"][gold]]
            assert len(prompts) == 2 and query in {json.loads(good(p)).get("query") for p in prompts}
            near = row["chunks"][max(0, gold - 2) : gold + 3]
            assert all(chunk in prompt for chunk in near for prompt in prompts)
            assert all(chunk not in p for chunk in row["chunks"][gold + 3 :] for p in prompts)


FLAWS = {
    "unusable": '{"question": "Why?"}',
    "invalid: no words": '{"query": " ?! "}',
    "invalid: too long": json.dumps({"query": "why " * 200}),
}


def test_queries_that_will_not_do_are_counted_by_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(queries, "LENGTHS", (20,))
    reasons = [*FLAWS, "invalid: copy of the passage"]
    wrong = dict(zip(PASSAGES, reasons, strict=False))

    def write(prompt: str) -> str:
        reason = wrong.get(passage_of(prompt))
        if reason is None or '"character"' in prompt:
            return good(prompt)
        return FLAWS.get(reason) or json.dumps({"query": passage_of(prompt).partition(".")[0]})

    with chat_server(write=write) as server:
        result = pairs(config(server), tmp_path)
        assert result.outcomes == {"accepted": len(PASSAGES) - len(reasons)} | dict.fromkeys(reasons, 1)
        server.write = lambda prompt: '{"character": 77, "type": "knowledge", "difficulty": "school"}'
        result = pairs(config(server), tmp_path / "other")
    assert result.outcomes == {"unusable": len(PASSAGES)}
    assert result.path.read_text() == "" and result.rows == []


def test_a_request_without_reply_costs_its_query_only(tmp_path):
    lost = {text for text in PASSAGES if "otter" in text}
    with chat_server(lambda prompt, _: "400" if passage_of(prompt) in lost else None) as server:
        result = pairs(config(server), tmp_path)
        assert result.outcomes == {"accepted": len(PASSAGES) - len(lost), "unusable": len(lost)}
        server.fault = lambda *_: None
        assert pairs(config(server), tmp_path).outcomes == {"accepted": len(PASSAGES)}


def test_duplicates_and_dissimilar_queries_are_left_out(tmp_path):
    by_animal = {"lynx": "Why does the OTTER rest at dusk?", "heron": "completely unrelated stuff"}

    def write(prompt: str) -> str:
        query = next((query for animal, query in by_animal.items() if animal in passage_of(prompt)), None)
        return json.dumps({"query": query}) if query and '"character"' not in prompt else good(prompt)

    with chat_server(write=write) as server:
        result = pairs(config(server), tmp_path)
    # Of four equal queries each, one is new.
    assert result.outcomes == {"accepted": 17, "duplicate": 6, "dissimilar": 1}
    assert len(result.similarities) == 18  # of those that were compared
    assert sum(cosine >= 0.1 for cosine in result.similarities) == 17


@pytest.mark.parametrize("synthesize", [synthesize_pairs, synthesize_documents])
def test_without_a_passage_there_is_nothing_to_ask_about(tmp_path, synthesize):
    settings = config("http://127.0.0.1:9/v1")
    assert draw_passages(["short"], Words(), settings) == []
    assert draw_documents([["short", "x" * 90]], Words(), settings, {"x" * 90}) == []
    with pytest.raises(ValueError, match="no passage of 80 characters lacks a query"):
        synthesize([], Words(), settings, tmp_path)


def test_a_sample_does_not_depend_on_the_order_and_grows():
    assert sample(PASSAGES, 5, 0) == sample(PASSAGES[::-1] * 2, 5, 0) == sample(PASSAGES, 9, 0)[:5]
    assert sample(PASSAGES, 5, 0) != sample(PASSAGES, 5, 1)
    assert sorted(sample(PASSAGES, 99, 0)) == sorted(PASSAGES)


def test_plans_repeat_and_languages_are_drawn():
    settings = config("", languages=("English", "German", "Japanese"))
    tasks = draw_passages(PASSAGES, Words(), settings)
    assert tasks == draw_passages(PASSAGES[::-1], Words(), settings)
    assert {*Counter(task.language for task in tasks)} == {"English", "German", "Japanese"}
    doubled = [passage(901), passage(901), passage(902)]
    answered = [passage(800), passage(801), DOCUMENTS[0][1]]
    documents = [*DOCUMENTS, ["one chunk only"], doubled, answered[:2]]
    settings = replace(settings, documents=9, queries_per_document=9)
    tasks = draw_documents(documents, Words(), settings, answered)
    assert {task.chunks for task in tasks} == {*map(tuple, [*DOCUMENTS, doubled])}
    every = {chunk for chunks in [*DOCUMENTS, doubled] for chunk in chunks}
    assert {task.passage for task in tasks} == every - {passage(901), DOCUMENTS[0][1]}
