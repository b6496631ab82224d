"""A language model over the wire: real HTTP, faults of every kind, kills."""

import json
import multiprocessing
import os
import signal
from collections import Counter

import openai
import pytest
from pydantic import BaseModel

from chat_servers import chat_server, config, lines
from unmask_study.settings import ReaderConfig
from unmask_study.synthesis import EndpointError, replies
from unmask_study.synthesis.client import ask
from waiting import wait_for

REQUESTS = [[{"role": "user", "content": f"question {number}"}] for number in range(60)]


class Answer(BaseModel, extra="forbid"):
    answer: int


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(openai._base_client, "INITIAL_RETRY_DELAY", 0.01)


def echo(prompt):
    return f"echo of {prompt}"


ECHOES = [echo(request["content"]) for (request,) in REQUESTS]


def test_every_request_is_sent_once_and_some_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "from the shell\n")
    journal, twice = tmp_path / "deep" / "journal", [*REQUESTS, *REQUESTS]
    with chat_server(write=echo, delay=0.01) as server:
        settings = config(server, api_key_env="OPENAI_API_KEY")
        texts = replies(settings, journal, twice)
    assert texts == 2 * ECHOES
    assert Counter(server.prompts.values()) == {1: 60} and 1 < server.most <= 4
    assert server.keys == {"Bearer from the shell"}
    assert replies(settings, journal, twice) == texts  # of a server that is gone
    for key, reply in lines(journal):
        assert len(key) == 16 and reply["text"] in texts and reply["completion_tokens"] == 7
    assert replies(settings, journal, []) == []


def test_a_reply_in_a_form(tmp_path):
    with chat_server(write=lambda prompt: json.dumps({"answer": int(prompt.split()[1])})) as server:
        found = ask(config(server), tmp_path / "journal", REQUESTS[:9], Answer)
    assert found == [Answer(answer=number) for number in range(9)]
    for form in (body["response_format"] for body in server.bodies):
        assert (form["type"], form["json_schema"]["schema"]) == ("json_schema", Answer.model_json_schema())


LOST = [("500", "InternalServerError", 3), ("200", "no chat completion", 1), ("400", "BadRequestError", 1)]


@pytest.mark.parametrize(("status", "reason", "tries"), LOST)
def test_a_request_without_reply_is_counted_and_sent_again_next_time(tmp_path, capsys, status, reason, tries):
    lost = {f"question {number}" for number in range(7)}
    with chat_server(lambda prompt, _: status if prompt in lost else None, write=echo) as server:
        settings = config(server)
        assert replies(settings, tmp_path / "journal", REQUESTS) == [""] * 7 + ECHOES[7:]
        assert Counter(server.prompts.values()) == Counter({1: 53}) + Counter({tries: 7})
        printed = f"synthesis: no usable reply to 7 of 60 requests ({reason}: 7)\n"
        assert capsys.readouterr().out == printed
        server.fault, server.prompts = (lambda *_: None), Counter()
        assert all(replies(settings, tmp_path / "journal", REQUESTS))
    assert server.prompts.keys() == lost
    assert capsys.readouterr().out == ""


BAD = ["", " \n", '{"answer": 1', '{"answer": "one"}', '{"answer": 1, "why": 2}', "one"]


@pytest.mark.parametrize("form", [None, Answer])
def test_a_bad_reply_is_counted_and_stays(tmp_path, capsys, form):
    written = [*BAD, *4 * ['{"answer": 1}']]
    bad, good = (len(BAD), 4 * [Answer(answer=1)]) if form else (2, written[2:])
    with chat_server(write=lambda prompt: written[int(prompt.split()[1])]) as server:
        settings = config(server)
        found = ask(settings, tmp_path / "journal", REQUESTS[:10], form)
    # Nothing is sent again: the server is gone.
    assert found == ask(settings, tmp_path / "journal", REQUESTS[:10], form) == [None] * bad + good
    printed = f"synthesis: no usable reply to {bad} of 10 requests (bad reply: {bad})\n"
    assert capsys.readouterr().out == 2 * printed


def test_a_wrong_address_is_named(tmp_path):
    url = "http://127.0.0.1:9/v1"  # where nobody listens
    expected = rf"{url} \(model 'test'\): cannot be reached \(ConnectError\).*synthesis.endpoint ends"
    with pytest.raises(EndpointError, match=expected):
        replies(config(url, retries=1), tmp_path / "journal", REQUESTS)


REFUSALS = [
    ("401", r"AuthenticationError.*UNMASK_TEST_KEY holds the key"),
    ("404", r"NotFoundError.*serves this model.*synthesis\.endpoint ends"),
    ("405", "APIStatusError"),
    ("422", r"UnprocessableEntityError.*takes a JSON schema"),
    ("400", r"no request has a reply \(BadRequestError\)"),
    ("500", r"no request has a reply \(InternalServerError\)"),
]


@pytest.mark.parametrize(("status", "message"), REFUSALS)
def test_an_endpoint_that_refuses_ends_the_run(tmp_path, monkeypatch, status, message):
    """The server's words, which echo the key, are in no error."""
    monkeypatch.setenv("UNMASK_TEST_KEY", "secret-42")
    with chat_server(lambda *_: status) as server, pytest.raises(EndpointError, match=message) as error:
        replies(config(server), tmp_path / "journal", REQUESTS)
    assert server.keys == {"Bearer secret-42"} and "secret" not in str(error.value)
    assert (tmp_path / "journal").read_bytes() == b""
    if "no request" not in message:
        assert server.prompts.total() < len(REQUESTS)


@pytest.mark.parametrize(("status", "reason"), [("0", "cannot be reached"), ("401", "AuthenticationError")])
def test_a_server_that_goes_ends_the_run_and_the_next_goes_on(tmp_path, status, reason):
    with chat_server(lambda prompt, _: status if prompt == "question 30" else None, write=echo) as server:
        with pytest.raises(EndpointError, match=f"{reason}.*the same call goes on from there"):
            replies(config(server), tmp_path / "journal", REQUESTS)
        wait_for(lambda: not server.current)
        assert 0 < server.answered == len(lines(tmp_path / "journal")) < 60
        server.fault = lambda *_: None
        assert all(replies(config(server), tmp_path / "journal", REQUESTS))
        wait_for(lambda: not server.current)
        assert server.answered == 60


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_run_goes_on_and_sends_nothing_twice(tmp_path, how):
    """An interrupt waits for what is under way, and loses nothing."""
    journal = tmp_path / "journal"
    with chat_server(write=echo, delay=0.05) as server:
        given = config(server), journal, REQUESTS
        child = multiprocessing.get_context("fork").Process(target=replies, args=given)
        child.start()
        wait_for(lambda: server.answered >= 10)
        os.kill(child.pid, how)
        child.join()
        wait_for(lambda: not server.current)
        known = len(lines(journal))
        assert 10 - 4 <= known < 60
        if how == signal.SIGINT:
            assert child.exitcode == 1 and known == server.answered == server.prompts.total()
        with journal.open("a") as file:
            file.write('\n["cut by a ki')
        before, server.delay = server.prompts.total(), 0.0
        assert replies(config(server), journal, REQUESTS) == ECHOES
    assert server.prompts.total() - before == 60 - known
    whole = [line for line in journal.read_text().splitlines() if line.endswith("}]")]
    assert len({json.loads(line)[0] for line in whole}) == len(whole) == 60


UNNAMED = [
    (config(""), "synthesis.endpoint is ''"),
    (config("http://127.0.0.1:9/v1", model=""), "synthesis.model ''"),
    (config("localhost:8000/v1"), "for instance --set synthesis.endpoint=http"),
    (ReaderConfig(), r"reader.endpoint is ''.*--set reader.endpoint=http"),
]


@pytest.mark.parametrize(("settings", "message"), UNNAMED)
def test_an_endpoint_that_is_not_named_is_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        replies(settings, tmp_path / "journal", REQUESTS)
    assert [*tmp_path.iterdir()] == []
