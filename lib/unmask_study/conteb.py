"""ConTEB: retrieval of chunks that need their document. Its tasks, variations of them, and late
interaction. Legend: N queries, M chunks, D dimensions, L tokens of a text.

Every query is ranked against every chunk of the whole corpus, by nDCG@10 with trec_eval's order of ties; the
benchmark's score is the unweighted mean over its tasks (`evaluate`, `family_means`).
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import groupby, islice
from pathlib import Path
from string import Template

import numpy as np
import torch
import yaml
from datasets import load_dataset
from torch.nn.functional import normalize

from unmask.data import hub
from unmask.data.corpus import Corpus, Rows
from unmask.data.registry import Source, halves
from unmask.data.rows import data_files, document_of
from unmask.evaluation.tasks import Task
from unmask.extras import extra
from unmask_study.mirror import conteb as source

with extra("study"):
    from sentence_transformers import util

SQUAD, XQUAD = "rajpurkar/squad", "google/xquad"
LENGTHS = {"query_length": 64, "document_length": 320, "chunk_length": 320}  # tokens of their texts
QUESTIONS = 2000  # of a task of articles, at most
_PROMPTS = Path(__file__).with_name("synthesis") / "prompts.yaml"
CONTEXT = Template(yaml.safe_load(_PROMPTS.read_text(encoding="utf8"))["context"])
TILE_ELEMENTS = 2**24  # token vectors and their similarities in memory at once: 64 MiB


def load(task: str) -> Task:
    """A task of `settings.CONTEB`, from the mirror that UNMASK_MIRROR names or else from the Hub.

    Raises: ValueError for an unknown task, and as `rows.data_files`.
    """
    files = ([file.path for file in data_files(half)] for half in halves(source(task)))
    return as_task(task, *(load_dataset("parquet", data_files=paths, split="train") for paths in files))


def as_task(name: str, documents: Rows, queries: Rows) -> Task:
    """The rows of ConTEB's two configurations as a task.

    "documents" has chunk_id and chunk, "queries" has query and chunk_id (or chunk_ids, a list); a chunk_id is
    "{document}_{index}". Documents come in the order of their ids, chunks in the order of their indices.

    Raises: ValueError for a query that no chunk answers, with its row.
    """
    chunks = {document_of(row["chunk_id"]): row for row in documents}
    number, relevant = {chunks[place]["chunk_id"]: i for i, place in enumerate(sorted(chunks))}, []
    for row_number, row in enumerate(queries):
        golds = row["chunk_ids"] if "chunk_ids" in row else [row["chunk_id"]]
        if not golds or not number.keys() >= set(golds):
            raise ValueError(f"task {name}, queries, row {row_number}: no chunks {golds} in the documents")
        relevant.append({number[gold] for gold in golds})
    by_document = groupby(sorted(chunks), key=lambda place: place[0])
    parts = [[chunks[place]["chunk"] for place in places] for _, places in by_document]
    return Task(name, "contextual", [row["query"] for row in queries], parts, relevant, list(number))


def squad(paragraphs: int = 0, characters: int = 100, ask_hub: bool = False) -> Task | None:
    """ConTEB's SQuAD task, built from the validation split of SQuAD 1.1.

    Paragraphs are documents. They are cut at spaces into pieces, the chunks. The piece where the answer
    begins is right. Of each paragraph the first question is asked [choice: which is not said].

    Args:
        paragraphs: take the first so many; 0: all 2,067.
        characters: of a piece at most, but for longer words.
        ask_hub: read the Hub where there is no mirror.
    Returns: the task; None where `validation` finds no `SQUAD`.
    Source: ConTEB (2505.24782), appendix A.4; the length is that of the authors' evaluation.
    """
    first: dict[str, dict] = {}
    for row in validation(SQUAD, "plain_text", ask_hub):
        first.setdefault(row["context"], row)
    chunks, queries = [], []
    for number, (text, row) in enumerate(islice(first.items(), paragraphs or None)):
        starts = [0]
        for word in re.finditer(r"\S+", text):
            if word.end() - starts[-1] > characters and word.start() > starts[-1]:
                starts.append(word.start())
        pieces = [text[slice(*ends)].strip() for ends in zip(starts, [*starts[1:], None])]
        chunks += [{"chunk_id": f"{number:04d}_{i}", "chunk": piece} for i, piece in enumerate(pieces)]
        right = int(np.searchsorted(starts, row["answers"]["answer_start"][0], side="right")) - 1
        queries.append({"query": row["question"], "chunk_id": f"{number:04d}_{right}"})
    return as_task("SQuAD", chunks, queries) if chunks else None


def articles(paragraphs: int = 0) -> Task | None:
    """Questions about Wikipedia, from the validation split of SQuAD 1.1 in the mirror; no task of ConTEB's.

    Articles are documents, their paragraphs chunks, and a question's own paragraph answers it. With the
    chunks embedded alone this is plain retrieval of paragraphs. XQuAD is a part of it.

    Args:
        paragraphs: take whole articles up to this many paragraphs, one article at least; 0: all 2,067.
            At most 2,000 of their questions (10,570 in all) are asked, chosen by hash.
    Returns: the task; None without a mirror, or where it does not hold `SQUAD`.
    """
    return _articles("Wikipedia", validation(SQUAD, "plain_text"), paragraphs)


def xquad(language: str) -> Task | None:
    """As `articles`, for XQuAD: 240 of its paragraphs and 1,190 questions, in English ("en") or translated.
    Its rows must name their article ("title"), which the Hub's own copy does not: without, None."""
    return _articles(f"XQuAD {language}", validation(XQUAD, f"xquad.{language}"))


def trained_on(corpus: Corpus) -> bool:
    """Whether a corpus trains on XQuAD, a part of SQuAD: then neither is asked."""
    kinds = ("pairs", "documents")
    return any("xquad" in name for kind in kinds for name in corpus.datasets(kind, "train"))


def validation(repo: str, config: str, ask_hub: bool = False) -> list[dict]:
    """The rows of a validation split in the mirror; none where it does not hold it, and without a mirror,
    unless the Hub may be asked."""
    folder = hub.local(repo)
    files = sorted(map(str, folder.glob(f"{config}/validation-*.parquet"))) if folder else []
    if ask_hub and not hub.root():
        place = {"repo": repo, "config": config, "split": "validation"}
        files = [file.path for file in data_files(Source(repo, "hub", "text", "eng", licence="", **place))]
    return load_dataset("parquet", data_files=files, split="train").to_list() if files else []


def _articles(name: str, rows: list[dict], paragraphs: int = 0) -> Task | None:
    if not rows or "title" not in rows[0]:
        return None
    articles: dict[str, dict[str, None]] = {}  # paragraphs by article, in the data's order
    for row in rows:
        articles.setdefault(row["title"], {})[row["context"]] = None
    total = np.cumsum([*map(len, articles.values())])
    count = max(1, np.searchsorted(total, paragraphs or len(rows), side="right"))
    ids: dict[tuple[str, str], str] = {}
    for document, (title, texts) in enumerate(islice(articles.items(), count)):
        ids |= {(title, text): f"{document:02d}_{chunk:03d}" for chunk, text in enumerate(texts)}
    rows = sorted(rows, key=lambda row: sha256(f"{row['title']} {row['question']}".encode()).digest())
    pairs = [(row["question"], ids.get((row["title"], row["context"]))) for row in rows]
    queries = [{"query": question, "chunk_id": chunk_id} for question, chunk_id in pairs if chunk_id]
    chunks = [{"chunk_id": chunk_id, "chunk": text} for (_, text), chunk_id in ids.items()]
    return as_task(name, chunks, queries[:QUESTIONS])


def headed(task: Task) -> Task:
    """The task with every chunk behind the first one of its document, its heading."""
    documents = [[first, *(f"{first} {chunk}" for chunk in chunks)] for first, *chunks in task.documents]
    return replace(task, documents=documents)


def situating(task: Task) -> list[list[dict[str, str]]]:
    """The request to a language model for the context of each of a task's chunks (Anthropic's contextual
    retrieval, in our own words). The document comes first, so that a server can keep what it has read of
    it."""
    pairs = [("\n\n".join(chunks), chunk) for chunks in task.documents for chunk in chunks]
    return [[{"role": "user", "content": CONTEXT.substitute(document=d, chunk=c)}] for d, c in pairs]


def situated(task: Task, contexts: Iterable[str]) -> Task:
    """The task with its context before each chunk; "" for none."""
    context = iter(contexts)
    documents = [[" ".join(filter(None, (next(context), chunk))) for chunk in row] for row in task.documents]
    return replace(task, documents=documents)


def token_scores(queries: Sequence[np.ndarray], documents: Sequence[np.ndarray]) -> np.ndarray:
    """Late interaction of every query with every document: every token keeps its vector, and for each token
    of the query the similarity of the most similar token of the document counts.

        s(q, d) = Σ_i max_j cos(q_i, d_j)

    sentence-transformers computes it tile by tile.

    Args:
        queries, documents: token vectors (L, D) of each text, of any scale, one token at least
            (`Embedder.encode_tokens`, `Embedder.encode_document_tokens`).
    Returns: (N, M), float32, between −L and L of the query.
    Source: ColBERT (2004.12832), section 3.3; with late chunking, ConTEB (2505.24782), section 4.1.
    """
    unit = ([normalize(torch.from_numpy(x_LD), dim=-1) for x_LD in side] for side in (queries, documents))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return util.maxsim(*unit, chunk_elements=TILE_ELEMENTS, device=device).cpu().numpy()
