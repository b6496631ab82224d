"""ConTEB: retrieval of chunks that need their document. Its tasks, tasks from own documents, variations of
tasks. Legend: N queries, M chunks.

Every query is ranked against every chunk of the whole corpus, by nDCG@10 with trec_eval's order of ties; the
benchmark's score is the unweighted mean over its tasks (`tasks.evaluate`, `tasks.family_means`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pyarrow import parquet
from torch import Tensor

from unmask.data import mirror
from unmask.data.files import DataFile, data_files, is_data, resolved, verify
from unmask.data.reading import BadRow, cut, place, raw_rows, shortened
from unmask.data.registry import Source
from unmask.evaluation.tasks import Task, ndcg
from unmask.store import nearest
from unmask.synthesis import chunking

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Repositories of the organisation below → the split that is evaluated: "test" where there is one, otherwise
# "validation", otherwise "train", as the authors say.
ORGANISATION = "illuin-conteb"
TASKS = {
    "covid-qa": "train",
    "esg-reports": "test",
    "football": "train",
    "geography": "train",
    "insurance": "train",
    "mldr-conteb-eval": "test",
    "narrative-qa": "test",
    "squad-conteb-eval": "validation",
}
SQUAD = "rajpurkar/squad"
COLUMNS = {"documents": (("chunk_id",), ("chunk",)), "queries": (("query",), ("chunk_id", "chunk_ids"))}
PIECE_BYTES = 64 << 20  # of a file that is read at a time
NEUTRAL = ("it", "its")  # what a document's theme is replaced by, and its genitive
Rows = Iterable[tuple[str, int, Mapping[str, Any] | BadRow]]  # file, number of the row in it, row


def load(task: str | Path, split: str | None = None) -> Task:
    """A task in ConTEB's layout.

    Configuration "documents" has chunk_id and chunk, "queries" has query and chunk_id (or chunk_ids, a list);
    a chunk_id is "{document}_{index}", with one underscore. Documents come in the order of their ids, chunks
    in the order of their indices.

    Args:
        task: one of TASKS, read from the mirror that UNMASK_MIRROR names or else from the Hub; or a folder
            that is laid out like a repository of the Hub.
        split: of the data; default: the one that ConTEB evaluates, of a folder "test".
    Raises: ValueError for an unknown task, data that are not there, and the first bad row; it says where and
        what to do.
    """
    folder = None if task in TASKS else Path(task)
    if folder and not folder.is_dir():
        raise ValueError(f"{task} is neither a folder nor a task of ConTEB{nearest(str(task), TASKS)}")
    found = source(folder.resolve().name, split or "test") if folder else source(str(task), split)
    return _task(found.name, _rows(found, folder, "documents"), _rows(found, folder, "queries"))


def squad(paragraphs: int = 0, questions: int = 2000) -> Task | None:
    """ConTEB's SQuAD task, built from the validation split of SQuAD 1.1 in the mirror.

    Articles are documents, their paragraphs chunks, and a question's own paragraph answers it. With the
    chunks embedded alone this is plain retrieval of paragraphs. Nothing is ever trained on it.

    Args:
        paragraphs: take whole articles while they fit into so many; 0: all, 2,067.
        questions: asked at most, drawn by their hash; of all there are 10,570.
    Returns: the task; None without a mirror, or where it does not hold `SQUAD`.
    """
    folder = mirror.local(SQUAD)
    files = sorted(folder.glob("plain_text/validation-*.parquet")) if folder else []
    if not files:
        return None
    rows = parquet.read_table(files, columns=["title", "context", "question"]).to_pylist()
    articles: dict[str, dict[str, int]] = {}  # paragraphs by article, in the data's order
    for row in rows:
        known = articles.setdefault(row["title"], {})
        known.setdefault(row["context"], len(known))
    if paragraphs:
        total = np.cumsum([len(known) for known in articles.values()])
        fit = max(1, int(np.searchsorted(total, paragraphs, side="right")))
        articles = dict(islice(articles.items(), fit))
    number = {title: i for i, title in enumerate(articles)}
    asked = [row for row in rows if row["title"] in articles]
    asked.sort(key=lambda row: sha256(f"{row['title']} {row['question']}".encode()).digest())
    documents = [
        {"chunk_id": f"{number[title]:02d}_{index:03d}", "chunk": text}
        for title, known in articles.items()
        for text, index in known.items()
    ]
    queries = [
        {
            "query": row["question"],
            "chunk_id": f"{number[row['title']]:02d}_{articles[row['title']][row['context']]:03d}",
        }
        for row in asked[:questions]
    ]
    return as_task("SQuAD", documents, queries)


def source(name: str, split: str | None = None) -> Source:
    """Where the data of a task are, as `unmask.data` reads them."""
    return Source(
        name=name, kind="hub", role="documents", language="eng", licence="", repo=f"{ORGANISATION}/{name}",
        config="documents", queries_config="queries", split=split or TASKS[name],
    )  # fmt: skip


def as_task(name: str, documents: Iterable[Mapping[str, Any]], queries: Iterable[Mapping[str, Any]]) -> Task:
    """The rows of ConTEB's two configurations as a task, see `load`.

    Raises: ValueError that names the first bad row.
    """
    tables = {"documents": documents, "queries": queries}
    return _task(name, *(((table, i, row) for i, row in enumerate(rows)) for table, rows in tables.items()))


def build(
    rows: Iterable[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, *, length: int = 256
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of ConTEB's two configurations from own documents: chunk, pair, sabotage (ConTEB, section 3.2).

    Each text is cut into chunks, at paragraphs and sentences; a question is paired with the chunks that its
    answer lies in; and the theme, which every question names, is replaced by a pronoun in all chunks but the
    first, so that the others can be found only in the light of their document.

    Args:
        rows: documents, each with "text"; "questions", a list of {"query", "answer"} with "start", where the
            answer, a passage of the text, begins (needed if it occurs more than once); and optionally
            "theme", its name or a list of its names, and "neutral", what to say instead (default: NEUTRAL).
        length: tokens of a chunk at most. ConTEB's 1,000 characters are about 256 tokens.
    Returns: rows {"chunk_id", "chunk"} and rows {"query", "chunk_ids"}; `as_task` makes a task of them.
    Raises: ValueError that names document and question: an answer that is not in the text, or in several
        places; a theme that the first chunk, or a question, does not name; a document without text or
        questions.
    """
    documents, queries = [], []
    for number, row in enumerate(rows):
        text, questions = row.get("text") or "", row.get("questions")
        if not questions or not text.strip():
            lacks = "questions" if text.strip() else "text"
            raise ValueError(f"document {number} has no {lacks}: leave it out")
        (chunks,) = chunking.chunks(text, tokenizer, length, len(text))
        ends = _ends(text, chunks)
        for question_number, question in enumerate(questions):
            where = f"question {question_number} of document {number}"
            start, stop = _span(text, question, where)
            # From the chunk that the answer's first character is in, to that of its last.
            first, last = np.searchsorted(ends, [start, stop - 1], side="right")
            ids = [f"{number}_{index}" for index in range(first, last + 1)]
            queries.append({"query": question["query"], "chunk_ids": ids})
        if row.get("theme"):
            chunks = _sabotaged(chunks, row, number)
        documents += [{"chunk_id": f"{number}_{index}", "chunk": chunk} for index, chunk in enumerate(chunks)]
    return documents, queries


def resized(task: Task, words: int) -> Task:
    """The same documents in chunks of at most `words` words, for the robustness to chunking.

    A chunk that is longer is cut into equal parts, all of which are relevant where it was; neighbours that
    fit together are joined.

    Raises: ValueError if words is below 1.
    """
    if words < 1:
        raise ValueError(f"chunks need at least one word, got {words}")
    documents, places, total = [], [], 0  # places: the new chunks of each old one
    for chunks in task.documents:
        new: list[list[str]] = []
        for chunk in chunks:
            held = chunk.split()
            if new and len(new[-1]) + len(held) <= words:
                new[-1] += held
                places.append({total + len(new) - 1})
                continue
            parts = [part.tolist() for part in np.array_split(np.array(held, object), -(-len(held) // words))]
            places.append(set(range(total + len(new), total + len(new) + len(parts))))
            new += parts
        documents.append([" ".join(part) for part in new])
        total += len(new)
    relevant = [set().union(*(places[chunk] for chunk in chunks)) for chunks in task.relevant]
    return replace(task, documents=documents, relevant=relevant, chunk_ids=None)


def at_corpus_size(
    task: Task, scores_NM: Tensor | np.ndarray, documents: int, *, seed: int = 0
) -> np.ndarray:
    """nDCG@10 of each query in a corpus of so many documents: its own, and others drawn for it.

    A larger corpus holds the documents of a smaller one, so that the effect of size is paired.

    Args:
        scores_NM: the score of every chunk of the task for every query.
        seed: of the draw.
    Raises: ValueError if the task has fewer documents.
    """
    if not 1 <= documents <= len(task.documents):
        raise ValueError(f"task {task.name} has {len(task.documents)} documents, not {documents}")
    document_M = np.repeat(np.arange(len(task.documents)), [len(chunks) for chunks in task.documents])
    scores_NM = np.array(scores_NM, np.float32)
    generator = np.random.default_rng(seed)
    for scores_M, relevant in zip(scores_NM, task.relevant, strict=True):
        own = np.unique(document_M[list(relevant)])
        others = np.setdiff1d(generator.permutation(len(task.documents)), own, assume_unique=True)
        scores_M[np.isin(document_M, others[max(0, documents - len(own)) :])] = -np.inf
    return ndcg(task, scores_NM)


def first_documents(task: Task, documents: int) -> Task:
    """A task's first documents with the queries that they answer, for what is too dear for all of them."""
    chunks = sum(map(len, task.documents[:documents]))
    kept = [i for i, relevant in enumerate(task.relevant) if max(relevant) < chunks]
    return replace(
        task,
        queries=[task.queries[i] for i in kept],
        documents=task.documents[:documents],
        relevant=[task.relevant[i] for i in kept],
        chunk_ids=task.chunk_ids and task.chunk_ids[:chunks],
    )


def _rows(source: Source, folder: Path | None, table: str) -> Rows:
    """The rows of a configuration with their places."""
    if folder:
        readme = folder / "README.md"
        found = resolved(source, table, str(folder), readme if readme.is_file() else None)
        files = [DataFile(path, os.path.getsize(path)) for path in found]
    else:
        files = data_files(source, queries=table == "queries")
    for file in files:
        if file.sha256:
            verify(file.path, file.sha256)

        columns, pieces = cut(file.path, PIECE_BYTES)
        for names in COLUMNS[table]:
            if columns and not set(names) & set(columns):
                raise ValueError(
                    f"{file.path} has no column {' or '.join(names)}{nearest(names[0], columns)}"
                )
        for start, stop in pieces:
            for number, row in raw_rows(file.path, start, stop, sum(COLUMNS[table], ())):
                yield file.path, number, row


def _task(name: str, documents: Rows, queries: Rows) -> Task:
    """Joins the two configurations."""
    chunks: dict[str, str] = {}
    for file, number, row in documents:
        with _naming(file, number):
            chunk_id = _text(row, "chunk_id")
            _position(chunk_id)
            if chunk_id in chunks:
                raise BadRow("duplicate id", f"there is a chunk {chunk_id!r} already; an id names one")
            chunks[chunk_id] = _text(row, "chunk")
    ids = sorted(chunks, key=_position)
    number_of = {chunk_id: i for i, chunk_id in enumerate(ids)}
    texts, relevant = [], []
    for file, number, row in queries:
        with _naming(file, number):
            texts.append(_text(row, "query"))
            asked = row["chunk_ids"] if "chunk_ids" in row else [_text(row, "chunk_id")]
            if not isinstance(asked, list) or not asked:
                raise BadRow("no chunk_ids", f"chunk_ids is {asked!r}, not a list of some chunk_id")
            if missing := [chunk_id for chunk_id in asked if chunk_id not in number_of]:
                raise BadRow("query of a missing chunk", f"there is no chunk {missing[0]!r}")
            relevant.append({number_of[chunk_id] for chunk_id in asked})
    if not texts:
        raise ValueError(f"task {name} has no queries")
    parts = [[chunks[i] for i in group] for _, group in groupby(ids, key=lambda i: _position(i)[0])]
    return Task(name, "contextual", texts, parts, relevant, ids)


def _position(chunk_id: str) -> tuple[str, int]:
    """Document and index that a chunk's id names."""
    document, _, index = chunk_id.partition("_")
    if not document or not index.isdecimal():
        detail = f"chunk_id {chunk_id!r} is not DOCUMENT_INDEX, with one underscore"
        raise BadRow("chunk_id of another form", detail)
    return document, int(index)


def _text(row: Mapping[str, Any] | BadRow, column: str) -> str:
    if isinstance(row, BadRow):
        raise row
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        raise BadRow(f"no {column}", f"{column} is {shortened(repr(value))}, not a text with something in it")
    return value


@contextmanager
def _naming(file: str, number: int) -> Iterator[None]:
    """The error of a bad row says where it is."""
    try:
        yield
    except BadRow as bad:
        where = place(file, number)[0] if is_data(file) else f"row {number}"
        raise ValueError(f"{file}, {where}: {bad}; correct it or take it out") from None


def _span(text: str, question: Mapping[str, Any], where: str) -> tuple[int, int]:
    """Where in a text the answer to a question begins and ends."""
    answer, start = question.get("answer") or "", question.get("start")
    if not answer.strip():
        raise ValueError(f"{where}: the answer is empty: give a passage of the text")
    if start is None:
        start = text.find(answer)
        if start >= 0 and text.find(answer, start + 1) >= 0:
            raise ValueError(
                f"{where}: the answer {shortened(answer)!r} is in the text more than once: say under `start` "
                "at which character it begins"
            )
    if start < 0 or not text.startswith(answer, start):
        raise ValueError(
            f"{where}: the answer {shortened(answer)!r} is not in the text"
            + (f" at character {question['start']}" if question.get("start") is not None else "")
            + ": it must be a passage of it, letter by letter"
        )
    lead = len(answer) - len(answer.lstrip())
    return start + lead, start + len(answer.rstrip())


def _ends(text: str, chunks: Sequence[str]) -> list[int]:
    """Where in a text each of its chunks ends; between them is white space only."""
    ends, position = [], 0
    for chunk in chunks:
        position = text.index(chunk, position) + len(chunk)
        ends.append(position)
    return ends


def _sabotaged(chunks: Sequence[str], row: Mapping[str, Any], number: int) -> list[str]:
    """The theme replaced in all chunks but the first."""
    names = [row["theme"]] if isinstance(row["theme"], str) else list(row["theme"])
    pronoun, genitive = row.get("neutral", NEUTRAL)
    # The longest name first, so that a name within another one leaves nothing behind.
    names = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    theme = re.compile(rf"(?<!\w)(?:{names})(?!\w)(?P<of>['’]s(?!\w))?", re.IGNORECASE)
    if not theme.search(chunks[0]):
        raise ValueError(
            f"document {number}: the first chunk does not name the theme {row['theme']!r}: begin the text "
            "with a heading that does"
        )
    for question_number, question in enumerate(row["questions"]):
        if not theme.search(question["query"]):
            raise ValueError(
                f"question {question_number} of document {number} does not name the theme {row['theme']!r}, "
                "without which no chunk answers it: name it, or leave the theme out"
            )

    def neutral(match: re.Match) -> str:
        word = genitive if match["of"] else pronoun
        return word.capitalize() if _begins(match) else word

    return [chunks[0], *(theme.sub(neutral, chunk) for chunk in chunks[1:])]


def _begins(match: re.Match) -> bool:
    """Whether a sentence begins here."""
    before = match.string[: match.start()].rstrip(" \"'(“‘«")
    return not before or before[-1] in ".!?\n"
