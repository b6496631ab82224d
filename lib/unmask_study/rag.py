"""Answers of a language model that reads what a retriever ranks first, as BERGEN measures them (pplx-embed,
section 3.1, table 4 and appendix E)."""

import re
import string
from collections.abc import Iterable, Sequence

from unmask.data.batches import parts
from unmask.data.spelling import distinct
from unmask_study import conteb

WORDS = 100  # of a passage; those of KILT's Wikipedia
# BERGEN's prompts, word for word (config/prompt/basic.yaml, 2407.01102).
SYSTEM = "You are a helpful assistant. Your task is to extract relevant information from provided documents "
SYSTEM += "and to answer to questions as briefly as possible."
WITHOUT = "You are a helpful assistant. Answer the questions as briefly as possible."


def squad(paragraphs: int = 0) -> tuple[list[str], list[list[str]], list[str]] | None:
    """The questions of `conteb.articles`, the right answers to each, and its paragraphs as passages; None
    where no mirror holds SQuAD."""
    if not (task := conteb.articles(paragraphs)):
        return None
    rows = conteb.validation(conteb.SQUAD, "plain_text")
    answers = {(row["context"], row["question"]): row["answers"]["text"] for row in rows}
    labels = [answers[task.chunks[min(golds)], query] for query, golds in zip(task.queries, task.relevant)]
    return task.queries, labels, passages(task.chunks)


def passages(texts: Iterable[str]) -> list[str]:
    """Texts cut into passages of `WORDS` words that do not overlap, each passage once."""
    words = [text.split() for text in texts]
    return distinct([" ".join(one[part]) for one in words for part in parts(len(one), WORDS)])[0]


def messages(question: str, texts: Sequence[str]) -> list[dict[str, str]]:
    """What the reader is asked: with retrieved passages, the best one first, each cut to `WORDS` words; or
    without any."""
    cut = (" ".join(text.split()[:WORDS]) for text in texts)
    background = "".join(f"Document {number}: {text}\n" for number, text in enumerate(cut, 1))
    content = f"Background:\n{background}\n\nQuestion: {question}" if texts else f"Question: {question}"
    system = {"role": "system", "content": SYSTEM if texts else WITHOUT}
    return [system, {"role": "user", "content": content}]


def normalised(text: str) -> str:
    """Text as BERGEN compares it: in lower case, without punctuation and without a, an, the."""
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def match(answer: str, labels: Sequence[str]) -> bool:
    """BERGEN's metric: whether an answer contains one of the right ones, both normalised.

    Example:
        >>> match("It is in the Île-de-France.", ["Paris", "île de france", "Île-de-France"])
        True
    """
    return any(normalised(label) in normalised(answer) for label in labels)
