"""ConTEB: retrieval of chunks that need their document. Its tasks, variations of them, and late
interaction. Legend: N queries, M chunks, D dimensions, L tokens of a text.

Every query is ranked against every chunk of the whole corpus, by nDCG@10 with trec_eval's order of ties; the
benchmark's score is the unweighted mean over its tasks (`tasks.evaluate`, `tasks.family_means`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from datasets import load_dataset
from sentence_transformers import util
from torch import Tensor
from torch.nn.functional import normalize

from unmask.config import EvaluationConfig
from unmask.data import hub
from unmask.data.reading import BadRow, document_of
from unmask.data.registry import CONTEB as TASKS
from unmask.data.registry import conteb as source
from unmask.evaluation.tasks import Task, located, ndcg
from unmask.models.embedder import Embedder
from unmask.store import nearest

if TYPE_CHECKING:
    pass

Rows = Iterable[Mapping[str, Any]]

SQUAD = "rajpurkar/squad"
TILE_ELEMENTS = 2**24  # token vectors and their similarities in memory at once: 64 MiB


def load(task: str | Path, split: str | None = None) -> Task:
    """A task in ConTEB's layout.

    Configuration "documents" has chunk_id and chunk, "queries" has query and chunk_id (or chunk_ids, a list);
    a chunk_id is "{document}_{index}". Documents come in the order of their ids, chunks in the order of their
    indices.

    Args:
        task: one of TASKS, read from the mirror that UNMASK_MIRROR names or else from the Hub; or a folder
            that is laid out like a repository of the Hub.
        split: of the data; default: the one that ConTEB evaluates, of a folder "test".
    Raises: ValueError for an unknown task, a split or column that is not there, and the first bad row, with
        its number; OSError if the data can be had from neither mirror nor Hub.
    """
    folder = None if task in TASKS else Path(task)
    if folder and not folder.is_dir():
        raise ValueError(f"{task} is neither a folder nor a task of ConTEB{nearest(str(task), TASKS)}")
    place = str(folder or located(source(str(task)).repo))
    split, tables = split or TASKS.get(str(task), "test"), {}
    for name in ("documents", "queries"):
        described = folder is None or (folder / "README.md").is_file()
        where = (place, name) if described else (f"{place}/{name}",)
        tables[name] = load_dataset(*where, split=split)
    return as_task(folder.resolve().name if folder else str(task), **tables)


def squad(paragraphs: int = 0, questions: int = 2000) -> Task | None:
    """ConTEB's SQuAD task, built from the validation split of SQuAD 1.1 in the mirror.

    Articles are documents, their paragraphs chunks, and a question's own paragraph answers it. With the
    chunks embedded alone this is plain retrieval of paragraphs. Nothing is ever trained on it.

    Args:
        paragraphs: take whole articles while they fit into so many; 0: all, 2,067.
        questions: asked at most, drawn by their hash; of all there are 10,570.
    Returns: the task; None without a mirror, or where it does not hold `SQUAD`.
    """
    folder = hub.local(SQUAD)
    files = sorted(map(str, folder.glob("plain_text/validation-*.parquet"))) if folder else []
    if not files:
        return None
    rows = load_dataset("parquet", data_files=files, split="train").to_list()
    articles: dict[str, dict[str, None]] = {}  # paragraphs by article, in the data's order
    for row in rows:
        articles.setdefault(row["title"], {})[row["context"]] = None
    if paragraphs:
        total = np.cumsum([len(known) for known in articles.values()])
        fit = max(1, int(np.searchsorted(total, paragraphs, side="right")))
        articles = dict(islice(articles.items(), fit))
    documents = [list(known) for known in articles.values()]
    ids = [f"{d:02d}_{c:03d}" for d, chunks in enumerate(documents) for c in range(len(chunks))]
    chunks = [(title, text) for title, known in articles.items() for text in known]
    number = {chunk: i for i, chunk in enumerate(chunks)}
    asked = [row for row in rows if row["title"] in articles]
    asked.sort(key=lambda row: sha256(f"{row['title']} {row['question']}".encode()).digest())
    asked = asked[:questions]
    relevant = [{number[row["title"], row["context"]]} for row in asked]
    return Task("SQuAD", "contextual", [row["question"] for row in asked], documents, relevant, ids)


def as_task(name: str, documents: Rows, queries: Rows) -> Task:
    """The rows of ConTEB's two configurations as a task, see `load`.

    Raises: ValueError that names the first bad row.
    """
    chunks: dict[tuple[str, int], str] = {}  # by document and index
    names: dict[tuple[str, int], str] = {}
    for number, row in enumerate(documents):
        where = f"task {name}, documents, row {number}"
        place = _place(_text(row, "chunk_id", where), where)
        if place in chunks:
            raise ValueError(f"{where}: there is a chunk {row['chunk_id']!r} already; an id names one")
        chunks[place], names[place] = _text(row, "chunk", where), row["chunk_id"]
    places = sorted(chunks)
    number_of = {place: i for i, place in enumerate(places)}
    texts, relevant = [], []
    for number, row in enumerate(queries):
        where = f"task {name}, queries, row {number}"
        texts.append(_text(row, "query", where))
        asked = row["chunk_ids"] if "chunk_ids" in row else [_text(row, "chunk_id", where)]
        if missing := [i for i in asked or [None] if not i or _place(i, where) not in chunks]:
            raise ValueError(f"{where}: there is no chunk {missing[0]!r}, which is to answer it")
        relevant.append({number_of[_place(chunk_id, where)] for chunk_id in asked})
    if not texts:
        raise ValueError(f"task {name} has no queries")
    parts = [[chunks[place] for place in group] for _, group in groupby(places, key=lambda place: place[0])]
    return Task(name, "contextual", texts, parts, relevant, [names[place] for place in places])


def _place(chunk_id: str, where: str) -> tuple[str, int]:
    try:
        return document_of(chunk_id)
    except (BadRow, ValueError) as bad:
        raise ValueError(f"{where}: {bad}; correct it or take it out") from None


def _text(row: Mapping[str, Any], column: str, where: str) -> str:
    if column not in row:
        raise ValueError(f"{where}: there is no column {column}, only {', '.join(row)}")
    value = row[column]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: {column} is {value!r:.80}, not a text; correct it or take it out")
    return value


def resized(task: Task, words: int) -> Task:
    """The same documents in chunks of at most `words` words (1 or more), for the robustness to chunking.

    A chunk that is longer is cut into equal parts, all of which are relevant where it was; neighbours that
    fit together are joined.
    """
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


def maxsim(queries: Sequence[np.ndarray], documents: Sequence[np.ndarray]) -> np.ndarray:
    """Late interaction of every query with every document: every token keeps its vector, and for each token
    of the query the similarity of the most similar token of the document counts.

        s(q, d) = Σ_i max_j cos(q_i, d_j)

    sentence-transformers computes it tile by tile; texts are sorted by length first, which halves its time.

    Args:
        queries, documents: token vectors (L, D) of each text, of any scale, one token at least
            (`Embedder.encode_tokens`, `Embedder.encode_document_tokens`).
    Returns: (N, M), float32, between −L and L of the query.
    Source: ColBERT (2004.12832), section 3.3; with late chunking, ConTEB (2505.24782), section 4.1.
    """
    order_N, order_M = (np.argsort([len(text) for text in side]) for side in (queries, documents))
    scores_NM = np.empty((len(queries), len(documents)), np.float32)
    scores_NM[np.ix_(order_N, order_M)] = util.maxsim(
        [normalize(torch.from_numpy(queries[i]), dim=-1) for i in order_N],
        [normalize(torch.from_numpy(documents[i]), dim=-1) for i in order_M],
        chunk_elements=TILE_ELEMENTS,
        device="cuda" if torch.cuda.is_available() else "cpu",
    ).numpy()
    return scores_NM


def late_interaction(
    embedder: Embedder, task: Task, config: EvaluationConfig, *, late_chunking: bool
) -> np.ndarray:
    """nDCG@10 of each query of a task by `maxsim`; chunks in the light of their document, or each alone."""
    queries = embedder.encode_tokens(task.queries, max_length=config.query_length)
    if late_chunking:
        documents = embedder.encode_document_tokens(task.documents, chunk_length=config.chunk_length)
        chunks = [tokens_LD for document in documents for tokens_LD in document]
    else:
        chunks = embedder.encode_tokens(task.chunks, max_length=config.chunk_length)
    return ndcg(task, maxsim(queries, chunks))
