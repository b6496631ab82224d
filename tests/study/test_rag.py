"""A reader over the wire: BERGEN's prompts and metric, and no question asked twice."""

import random
import string

from datasets import Dataset

from chat_servers import chat_server
from unmask_study.rag import WORDS, match, messages, normalised, passages, squad
from unmask_study.settings import ReaderConfig
from unmask_study.synthesis import replies

PLACES = ["Oslo", "Lima", "Cairo", "Hanoi"]
TEXTS = [f"The town of number {n} is {place}." for n, place in enumerate(PLACES)]
QUESTIONS = [f"Which town is number {n}?" for n in range(len(PLACES))]


def reader(url, **changes):
    return ReaderConfig(endpoint=url, model="test", retries=0, timeout=600.0, **changes)


def read(config, journal, questions, found):
    return replies(config, journal, [messages(*pair) for pair in zip(questions, found, strict=True)])


def naive(answer, labels):
    """The metric letter by letter and word by word."""

    def plain(text):
        letters = "".join(letter for letter in text.lower() if letter not in string.punctuation)
        return [word for word in letters.split() if word not in ("a", "an", "the")]

    return any(" ".join(plain(label)) in " ".join(plain(answer)) for label in labels)


def test_the_metric_is_that_of_a_naive_computation():
    rng, parts = random.Random(0), ["The", "a", "an", "Paris", "u.s.", "USA!", "theatre", "Île-de", "42", "-"]
    drawn = [" ".join(rng.choices(parts, k=rng.randint(1, 5))) for _ in range(3000)]
    pairs = list(zip(drawn[:1000], zip(drawn[1000:2000], drawn[2000:])))
    found = [match(answer, labels) for answer, labels in pairs]
    assert found == [naive(*pair) for pair in pairs] and 0.1 < sum(found) / 1000 < 0.9
    assert normalised(" The  U.S.\ttheatre, an ") == "us theatre"
    assert not match("", ["Paris"]) and not match("Par is", ["Paris"])


def test_the_prompts_are_bergens():
    system, user = (one["content"] for one in messages("Where?", ["one", "two\n" * (WORDS + 1)]))
    task = "to extract relevant information from provided documents and to answer to questions as briefly as"
    assert system == f"You are a helpful assistant. Your task is {task} possible."
    background = f"Background:\nDocument 1: one\nDocument 2:{' two' * WORDS}"
    assert user == f"{background}\n\n\nQuestion: Where?"
    system, user = (one["content"] for one in messages("Where?", []))
    assert system == "You are a helpful assistant. Answer the questions as briefly as possible."
    assert user == "Question: Where?"


def test_squad_in_passages_of_a_hundred_words(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("UNMASK_MIRROR", str(tmp_path))
    assert squad() is None
    words = [f"w{n}" for n in range(2 * WORDS + 7)]
    first = {"question": "Same?", "answers": {"text": ["w5", "w6"], "answer_start": [0, 3]}}
    other = first | {"answers": {"text": ["w9"], "answer_start": [0]}}  # asks the same of its first passage
    contexts = (" ".join(words), " ".join(words[:WORDS]))
    rows = [row | {"title": "T", "context": text} for row, text in zip((first, other), contexts)]
    path = tmp_path / "rajpurkar" / "squad" / "plain_text" / "validation-00000-of-00001.parquet"
    Dataset.from_list(rows).to_parquet(path)
    questions, labels, found = squad()
    assert questions == ["Same?"] * 2 and sorted(labels) == [["w5", "w6"], ["w9"]]
    assert found == [" ".join(words[:100]), " ".join(words[100:200]), " ".join(words[200:])]
    assert passages(["a  b", "", "a b"]) == ["a b"]


def write(prompt):
    """The last word of the first passage; without passages, "Lima"."""
    return "It is " + (prompt.split("\n")[1].split()[-1] if "Document 1" in prompt else "lima")


def test_each_question_is_read_with_its_passages_and_nothing_is_asked_twice(tmp_path):
    found = [[TEXTS[n], TEXTS[0]] if n < 3 else [TEXTS[1]] for n in range(4)]
    journal, lost = tmp_path / "reader.journal", lambda prompt, _: "500" if QUESTIONS[2] in prompt else None
    with chat_server(lost, write=write) as server:
        config = reader(server.url)
        assert read(config, journal, QUESTIONS, found) == ["It is Oslo.", "It is Lima.", "", "It is Lima."]
        server.fault, before = (lambda *_: None), server.answered
        answers = read(config, journal, QUESTIONS, found)
        assert server.answered == before + 1  # what had no answer
        alone = read(config, journal, QUESTIONS, [[]] * 4)
    assert [match(answer, [label]) for answer, label in zip(answers, PLACES)] == [True, True, True, False]
    assert [match(answer, [label]) for answer, label in zip(alone, PLACES)] == [False, True, False, False]
    assert read(config, journal, QUESTIONS, found) == answers  # of a server that is gone
    body = server.bodies[0]
    assert "response_format" not in body and body["temperature"] == 0 and body["max_tokens"] == 128
