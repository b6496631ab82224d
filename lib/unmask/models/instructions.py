"""What a query is asked for, in front of the query: the instructions of Qwen3-Embedding (section 2)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unmask.evaluation.tasks import Task

# By group of pairs, and "contextual" for documents. Of our own wording, and short: a query of a few words is
# not to drown in what stands before all queries.
INSTRUCTIONS = {
    "english": "Find the passage",
    "code": "Find the code",
    "cross-lingual": "Find the translation",
    "multilingual": "Find the text",
    "contextual": "Find the section",
}


def prompt(instruction: str) -> str:
    """What stands before a query; there is no space after its colon."""
    return f"Instruct: {instruction}\nQuery:"


def instructed(instruction: str, query: str) -> str:
    """A query as Qwen3-Embedding reads it, without an instruction as it is; documents are read as they are.

    >>> instructed("Find the passage", "Who is it?")
    'Instruct: Find the passage\\nQuery:Who is it?'
    """
    return prompt(instruction) + query if instruction else query


def instructed_task(task: Task) -> Task:
    """The task with the instruction of its family before every query."""
    return replace(task, queries=[instructed(INSTRUCTIONS[task.family], query) for query in task.queries])
