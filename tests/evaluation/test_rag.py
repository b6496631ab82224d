"""BERGEN's match, and retrieve-then-generate against a server that answers from what it is shown."""

from __future__ import annotations

import doctest
import json
import re
import sys
from pathlib import Path

import pytest

from unmask.evaluation import rag
from unmask.evaluation.rag import answer_recall, generate, match, match_metric, normalised
from unmask.synthesis.ask import EndpointError

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "synthesis"))
from chat_servers import ChatServer, config

QUESTIONS = ["Which year?", "Which colour?", "Who?"]
PASSAGES = [
    ["It was 1889.", "No."],
    ["Nothing.", "The sky is Blue!"],
    ["Nobody knows.", "Nor here.", "A Curie."],
]
ANSWERS = [["1889"], ["blue", "azure"], ["Curie"]]


def test_the_docstrings_examples():
    assert doctest.testmod(rag).failed == 0


@pytest.mark.parametrize(
    ("text", "answers", "right"),
    [
        ("It is the Eiffel Tower.", ["eiffel tower"], True),
        ("the  Eiffel\nTower", ["The Eiffel Tower!"], True),
        ("U.S.A.", ["USA"], True),
        ("Paris", ["London", "paris"], True),
        ("In 1066.", ["10"], True),  # characters, as BERGEN
        ("Another", ["the"], False),  # nothing is left of the answer
        ("Par", ["Paris"], False),
        ("", ["Paris"], False),
        ("Paris", [], False),
    ],
)
def test_match(text, answers, right):
    assert match(text, answers) is right


def test_articles_are_words():
    assert normalised("Anthem of a theatre") == "anthem of theatre"


def test_answer_recall_counts_the_first_k():
    found = answer_recall(PASSAGES, ANSWERS, ks=(1, 2, 3))
    assert {k: v.tolist() for k, v in found.items()} == {
        "answer_recall@1": [1, 0, 0],
        "answer_recall@2": [1, 1, 0],
        "answer_recall@3": [1, 1, 1],
    }


def reader(prompt: str) -> str:
    """Reads everything it is shown out loud."""
    shown = re.findall(r"<document>\n(.*?)\n</document>", prompt, re.DOTALL)
    return json.dumps({"answer": " ".join(shown)})


def test_the_generator_reads_the_best_passages(tmp_path):
    with ChatServer(write=reader) as server:
        written = generate(QUESTIONS, PASSAGES, config(server), tmp_path / "journal", shown=2)
        assert written == ["It was 1889. No.", "Nothing. The sky is Blue!", "Nobody knows. Nor here."]
        assert match_metric(written, ANSWERS).tolist() == [1, 1, 0]
        assert all("<question>" in prompt for prompt in server.prompts)
        again = generate(QUESTIONS, PASSAGES, config(server), tmp_path / "journal", shown=2)
        assert again == written and server.answered == 3  # the journal answered


def test_a_reply_without_form_counts_as_it_is(tmp_path):
    with (
        ChatServer(write=lambda prompt: "Blue, I think", structured=False) as server,
        pytest.warns(UserWarning, match="no JSON schema"),
    ):
        written = generate(QUESTIONS, PASSAGES, config(server, concurrency=1), tmp_path / "journal")
    assert written == ["Blue, I think"] * 3


def test_a_failed_request_is_none_and_asked_again(tmp_path):
    def fault(prompt, before):
        return "500" if "Who?" in prompt else None

    with ChatServer(fault, write=reader) as server:
        written = generate(QUESTIONS, PASSAGES, config(server, retries=0), tmp_path / "journal")
    assert written[2] is None and match_metric(written, ANSWERS).tolist() == [1, 1, 0]
    with ChatServer(write=reader) as server:
        written = generate(QUESTIONS, PASSAGES, config(server), tmp_path / "journal")
        assert match_metric(written, ANSWERS).tolist() == [1, 1, 1] and server.answered == 1


def test_without_a_generator_it_says_what_to_set(tmp_path):
    with pytest.raises(ValueError, match=r"synthesis\.endpoint is empty"):
        generate(QUESTIONS, PASSAGES, config("", endpoint=""), tmp_path / "journal")
    with ChatServer(key="right") as server, pytest.raises(EndpointError, match="401"):
        generate(QUESTIONS, PASSAGES, config(server), tmp_path / "journal")


def test_questions_and_passages_must_match(tmp_path):
    with pytest.raises(ValueError, match="1 questions and passages for 3"):
        generate(["q"], PASSAGES, config("http://localhost:1"), tmp_path / "journal")
