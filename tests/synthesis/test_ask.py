"""Queries by a language model, over the wire: real HTTP, faults of every kind, kills."""

import json
import multiprocessing
import os
import signal
import socket
from collections import Counter
from dataclasses import replace

import openai
import pytest

import tiny
from chat_servers import Words, chat_server, config, good, passage, passage_of
from unmask.synthesis import ask, prompts, synthesize_documents, synthesize_pairs
from unmask.synthesis.ask import EndpointError
from unmask.synthesis.prompts import estimate, plan_documents, plan_pairs, sample
from waiting import wait_for

PASSAGES = [passage(number) for number in range(24)]
DOCUMENTS = [[passage(100 * d + c) for c in range(6)] for d in range(5)]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(openai._base_client, "INITIAL_RETRY_DELAY", 0.01)


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf8").splitlines() if line]


def test_pairs_from_passages(tmp_path):
    with chat_server(delay=0.01) as server:
        result = synthesize_pairs(PASSAGES, Words(), config(server), tmp_path)
    assert result.outcomes == {"kept": len(PASSAGES)}
    rows = lines(result.path)
    assert rows == result.rows
    assert {row["document"] for row in rows} == set(PASSAGES)
    assert len({row["id"] for row in rows}) == len(rows)
    assert all(row["persona"] in prompts.personas() and row["similarity"] >= 0.1 for row in rows)
    told = {"id", "query", "document", "language", "persona", "type", "difficulty", "similarity"}
    assert all(row.keys() == told for row in rows)
    assert len(result.similarities) == len(rows)
    assert server.answered == result.traffic["answered"] == 2 * len(PASSAGES)
    assert result.traffic["answer tokens"] == 7 * 2 * len(PASSAGES)
    assert 1 < server.most <= 4  # at a time
    again = synthesize_pairs(PASSAGES, Words(), config(server), tmp_path)  # which is gone
    assert again.rows == rows and again.traffic == {}
    schemas = [body["response_format"]["json_schema"]["schema"] for body in server.bodies]
    forms = Counter(" ".join(sorted(schema["properties"])) for schema in schemas)
    assert forms == dict.fromkeys(["character difficulty type", "query"], len(PASSAGES))


def test_documents_show_the_neighbours_and_ask_for_one_chunk(tmp_path):
    with chat_server() as server:
        result = synthesize_documents(DOCUMENTS, Words(), config(server), tmp_path)
    assert result.outcomes == {"kept": 3 * len(DOCUMENTS)}
    rows = lines(result.path)
    assert sorted(row["chunks"] for row in rows) == sorted(DOCUMENTS)
    for row in rows:
        assert row.keys() == {"document_id", "chunks", "queries", "golds"}
        assert len(row["queries"]) == len(row["golds"]) == len(set(row["golds"])) == 3
        for query, gold in zip(row["queries"], row["golds"]):
            prompts = [p for p in server.prompts if passage_of(p) == row["chunks"][gold]]
            assert len(prompts) == 2
            assert query in {json.loads(good(p)).get("query") for p in prompts}
            for neighbour in row["chunks"][max(0, gold - 2) : gold + 3]:
                assert all(neighbour in prompt for prompt in prompts)
            assert all(chunk not in p for chunk in row["chunks"][gold + 3 :] for p in prompts)


LOST = [("500", "InternalServerError", 3), ("200", "an answer without choices", 1)]


@pytest.mark.parametrize(("status", "reason", "tries"), LOST)
def test_a_request_without_answer_is_counted_and_asked_again_next_time(tmp_path, status, reason, tries):
    lost = {text for text in PASSAGES if "otter" in text}
    faulty = lambda prompt, before: status if passage_of(prompt) in lost else None  # noqa: E731
    with chat_server(faulty) as server:
        settings = config(server)
        result = synthesize_pairs(PASSAGES, Words(), settings, tmp_path)
        left = len(PASSAGES) - len(lost)
        assert result.outcomes == {"kept": left, f"failed: {reason}": len(lost)}
        assert Counter(server.prompts.values()) == Counter({1: 2 * left}) + Counter({tries: len(lost)})
        server.fault, server.prompts = (lambda prompt, before: None), Counter()
        again = synthesize_pairs(PASSAGES, Words(), settings, tmp_path)
    assert again.outcomes == {"kept": len(PASSAGES)}
    assert {passage_of(prompt) for prompt in server.prompts} == lost
    assert again.traffic["answered"] == 2 * len(lost)


BAD = {
    "not by the schema": '{"question": "Why?"}',
    "no words": '{"query": " ?! "}',
    "too long": json.dumps({"query": "why " * 200}),
}


def test_answers_that_will_not_do_are_counted_by_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(prompts, "LENGTHS", (20,))
    reasons = [*BAD, "copy of the passage"]
    wrong = dict(zip(PASSAGES, reasons, strict=False))

    def write(prompt: str) -> str:
        reason = wrong.get(passage_of(prompt))
        if reason is None or '"character"' in prompt:
            return good(prompt)
        return BAD[reason] if reason in BAD else json.dumps({"query": passage_of(prompt).partition(".")[0]})

    with chat_server(write=write) as server:
        result = synthesize_pairs(PASSAGES, Words(), config(server), tmp_path)
        assert result.outcomes == {"kept": len(PASSAGES) - len(reasons)} | {
            f"invalid: {reason}": 1 for reason in reasons
        }
        server.write = lambda prompt: '{"character": 77, "type": "knowledge", "difficulty": "school"}'
        other = synthesize_pairs(PASSAGES, Words(), config(server), tmp_path / "other")
        assert other.outcomes == {"invalid: not by the schema": len(PASSAGES)}
        assert other.path.read_text() == ""
        server.write = good  # it was mended
        mended = synthesize_pairs(PASSAGES, Words(), config(server), tmp_path / "other")
    assert mended.outcomes == {"kept": len(PASSAGES)}


def test_an_empty_answer_is_asked_for_again(tmp_path):
    """Of earlier code, which kept them in the journal, too."""
    requests = [[{"role": "user", "content": f"question {number}"}] for number in range(3)]
    journal = tmp_path / "journal"
    with chat_server(write=lambda prompt: "" if prompt == "question 1" else "yes") as server:
        settings = config(server, retries=0)
        assert ask.replies(settings, journal, requests) == ["yes", "", "yes"]
        key, answer = json.loads(journal.read_bytes().splitlines()[-1])
        journal.write_text(json.dumps([key, answer | {"text": ""}]))
        server.write = lambda prompt: "mended"
        assert ask.replies(settings, journal, requests) == ["mended"] * 3


def test_duplicates_and_dissimilar_queries_are_left_out(tmp_path):
    told = {"lynx": "Why does the OTTER rest at dusk?", "heron": "completely unrelated stuff"}

    def write(prompt: str) -> str:
        query = next((query for animal, query in told.items() if animal in passage_of(prompt)), None)
        return json.dumps({"query": query}) if query and '"character"' not in prompt else good(prompt)

    with chat_server(write=write) as server:
        result = synthesize_pairs(PASSAGES, Words(), config(server), tmp_path)
    # Of four equal queries each, one is new.
    assert result.outcomes == {"kept": 17, "duplicate": 6, "dissimilar": 1}
    assert len(result.similarities) == 18 and (result.similarities < 0.1).sum() == 1


def test_an_endpoint_that_is_gone_or_refuses_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("UNMASK_TEST_KEY", "secret-42")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with pytest.raises(EndpointError, match="the same call goes on from there"):
        synthesize_pairs(PASSAGES[:4], Words(), config(url, retries=0), tmp_path)
    with chat_server() as server, pytest.raises(EndpointError, match=r"NotFound.*synthesis.endpoint ends"):
        synthesize_pairs(PASSAGES, Words(), config(server.url.removesuffix("/v1")), tmp_path)
    with chat_server(lambda *_: "400") as server, pytest.raises(EndpointError, match="no request: the first"):
        synthesize_pairs(PASSAGES, Words(), config(server), tmp_path)
    refusing = chat_server(lambda prompt, before: "401")  # which echoes the key
    with refusing as server, pytest.raises(EndpointError, match=r"Authentication.*_TEST_KEY") as error:
        synthesize_pairs(PASSAGES, Words(), config(server), tmp_path)
    assert server.keys == {"Bearer secret-42"} and "secret" not in str(error.value)
    assert all(b"secret" not in path.read_bytes() for path in tmp_path.iterdir())


def many_pairs(url, folder):
    return synthesize_pairs([passage(n) for n in range(60)], Words(), config(url, passages=60), folder)


def test_a_killed_run_goes_on_and_asks_for_nothing_twice(tmp_path):
    with chat_server(delay=0.05) as server:
        child = multiprocessing.get_context("fork").Process(target=many_pairs, args=(server.url, tmp_path))
        child.start()
        wait_for(lambda: server.answered >= 20)
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        wait_for(lambda: not server.current)
        journal = tmp_path / "pairs.journal"
        kept = len(lines(journal))
        assert 20 - 4 <= kept < 120
        with journal.open("a") as file:
            file.write('\n["cut by a ki')
        before, server.delay = server.prompts.total(), 0.0
        result = many_pairs(server.url, tmp_path)
        assert result.outcomes == {"kept": 60}
        assert result.traffic["answered"] == 120 - kept
        assert server.prompts.total() - before == 120 - kept
        whole = many_pairs(server.url, tmp_path / "whole")
    assert whole.path.read_bytes() == result.path.read_bytes()
    answers = [line for line in journal.read_text().splitlines() if line.endswith("}]")]
    assert len({json.loads(line)[0] for line in answers}) == len(answers) == 120


REFUSED = [
    ({"endpoint": ""}, "synthesis.endpoint is ''"),
    ({"model": ""}, "synthesis.model ''"),
    ({"endpoint": "localhost:8000/v1"}, "for instance --set synthesis.endpoint=http"),
    ({}, "no passage of 80 characters lacks a query"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_cannot_work_is_refused(tmp_path, changes, message):
    settings, documents = config("http://127.0.0.1:9/v1", **changes), [["short", "x" * 90]]
    with pytest.raises(ValueError, match=message):
        synthesize_documents(documents, Words(), settings, tmp_path, {"x" * 90})
    assert plan_pairs(["short"], Words(), settings) == []


def test_a_sample_does_not_depend_on_the_order_and_grows():
    assert sample(PASSAGES, 5, 0) == sample(PASSAGES[::-1] * 2, 5, 0) == sample(PASSAGES, 9, 0)[:5]
    assert sample(PASSAGES, 5, 0) != sample(PASSAGES, 5, 1)
    assert sorted(sample(PASSAGES, 99, 0)) == sorted(PASSAGES)


def test_plans_repeat_and_languages_take_turns():
    settings = config("", languages=("English", "German", "Japanese"))
    tasks = plan_pairs(PASSAGES, Words(), settings)
    assert tasks == plan_pairs(PASSAGES[::-1], Words(), settings)
    assert Counter(task.language for task in tasks) == {"English": 8, "German": 8, "Japanese": 8}
    doubled = [passage(901), passage(901), passage(902)]
    answered = [passage(800), passage(801), DOCUMENTS[0][1]]
    drawn, tasks = plan_documents(
        [*DOCUMENTS, ["one chunk only"], doubled, answered[:2]],
        Words(),
        replace(settings, documents=9, queries_per_document=9),
        answered,
    )
    assert sorted(drawn) == sorted([*DOCUMENTS, doubled])
    every = {chunk for chunks in drawn for chunk in chunks}
    assert {task.passage for task in tasks} == every - {passage(901), DOCUMENTS[0][1]}
    assert all(drawn[task.document][task.gold] == task.passage for task in tasks)


def test_the_estimate_is_what_is_then_sent(tmp_path):
    tokenizer = tiny.tokenizer()
    with chat_server() as server:
        settings = config(server)
        cost = estimate(plan_pairs(PASSAGES, Words(), settings), tokenizer, settings)
        synthesize_pairs(PASSAGES, Words(), settings, tmp_path)
    assert cost["requests"] == server.prompts.total()
    sent = [message["content"] for body in server.bodies for message in body["messages"]]
    tokens = sum(len(ids) for ids in tokenizer(sent)["input_ids"])
    assert cost["prompt_tokens"] == pytest.approx(tokens, rel=0.05)  # the choice is not known in advance
    assert cost["price"] == pytest.approx((cost["prompt_tokens"] + 2 * cost["answer_tokens"]) / 1e6)
