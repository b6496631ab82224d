"""Whether a training on one's own rows helped: held-out queries, asked of their own and the other texts.

Shape suffixes: N rows · M texts.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unmask.config import EvaluationConfig
from unmask.data.batches import apart, permuted
from unmask.data.spelling import distinct, held_texts, row_texts, text_id, without_held
from unmask.data.tokens import ending
from unmask.evaluation.tasks import Task, answers, copies, documents_of, evaluate, evaluate_bm25, probe
from unmask.models.checkpoint import Settings
from unmask.models.embedder import Embedder
from unmask.training import Stage, Watch, probes, seconds_until
from unmask.training.launch import several
from unmask.training.watch import TENTHS

Row = Mapping[str, Any]
FEWEST = 20  # rows of different texts, of which a part can be held out
QUERIES, TEXTS = 1_000, 10_000  # held-out queries, and texts that they are asked of, at most
FEW_QUERIES, FEW_TEXTS = 100, 300  # while the training runs
PROGRESS_SHARE = 0.1  # of the training's time that measuring meanwhile may take, unless it is asked for


@dataclass(frozen=True)
class FitReport:
    """nDCG@10 of held-out queries before the training, after it, and of BM25. They are asked of the held-out
    and of the training texts together, negatives included, in INT8. While it trains, few of them are asked of
    few texts: `seconds_to_bm25` of training, and from there on it stays above BM25. None: it does not, or
    nobody looked."""

    before: float
    after: float
    bm25: float
    queries: int
    texts: int
    seconds_to_bm25: float | None = None

    def __str__(self) -> str:
        numbers = f"{self.before:.3f} before, {self.after:.3f} after, BM25 {self.bm25:.3f}"
        return f"nDCG@10 of {self.queries:,} held-out queries among {self.texts:,} texts: {numbers}"


class Division(NamedTuple):
    """The rows, which of them are held out, and what the others leave to train on."""

    rows: list[Row]
    held_N: np.ndarray
    training: list[Row]
    groups: int  # rows of these that can be in one batch


def divided(rows: list[Row], hold_out: float, stage: str) -> Division:
    """Holds some rows out, and takes what they share with others out of the training, counted."""
    if not (isinstance(hold_out, Real) and 0 <= hold_out < 1):
        raise ValueError(f"hold_out must be a share below 1, got {hold_out!r}")
    held_N = held_out(rows, hold_out if stage != "diffusion" else 0)
    held = {text_id(text) for i in np.flatnonzero(held_N) for text in held_texts(rows[i])}
    others, dropped = (row for row, out in zip(rows, held_N) if not out), Counter()
    training = [left for row in others if (left := without_held(row, held, dropped))]
    groups, least = different(training), 1 if stage == "diffusion" else 2
    if groups < least:
        left = f"{len(rows)} rows leave {groups} of different texts, and stage {stage!r} needs {least}"
        raise ValueError(f"{left}: give more rows, or a smaller hold_out")
    if counts := [f"{count:,} {what}" for what, count in dropped.items() if count]:
        print(f"{stage}: taken out: {', '.join(counts)}")
    return Division(rows, held_N, training, groups)


def different(rows: list[Row]) -> int:
    """Rows of which no two share what a batch tells apart: query and document, or a document of chunks."""
    texts = (row_texts(row)[: 1 if "chunks" in row else 2] for row in rows)
    return len(apart(([*map(text_id, few)] for few in texts), len(rows)))


def held_out(rows: list[Row], share: float) -> np.ndarray:
    """Which rows are held out: some at random, with those that share a text with them. A text that stands in
    more rows than the share is never held out: too few would be left to train on."""
    if not share:
        return np.zeros(len(rows), bool)
    groups, most = different(rows), max(1, int(share * len(rows)))
    ids_N = [{*map(text_id, row_texts(row))} for row in rows]
    count = Counter(chain(*ids_N))
    rare_N = np.array([max(count[text] for text in ids) <= most for ids in ids_N], bool)
    if groups < FEWEST or not rare_N.any():
        needs = f"{FEWEST} rows of different texts, and texts in at most {most} of them"
        there = f"there are {groups}, and {rare_N.sum()}"
        print(f"nothing is held out or measured: hold_out={share} needs {needs}; {there}")
        return np.zeros(len(rows), bool)
    order = [i for i in permuted(np.arange(len(rows)), len(rows), 0) if rare_N[i]]
    chosen = apart((ids_N[i] for i in order), max(1, round(share * groups)))
    held = set().union(*(ids_N[order[place]] for place in chosen))
    return rare_N & [not ids.isdisjoint(held) for ids in ids_N]


class Exam:
    """Held-out queries, which are asked of many texts before and after a training, and few of them of few
    texts meanwhile."""

    def __init__(self, division: Division, config: Any):
        lengths = ("query_length", "document_length", "chunk_length")
        limits = {key: getattr(config, key, 1) for key in lengths} | {"precision": config.precision}
        self.limits = EvaluationConfig(**limits, max_queries=QUERIES, max_documents=TEXTS)
        self.task = task_of(division.rows, division.held_N)
        self.few = task_of(division.rows, division.held_N, FEW_QUERIES, FEW_TEXTS)

    def ndcg(self, embedder: Embedder) -> float:
        """The mean over the queries, of chunks in the light of their document."""
        return float(evaluate(embedder, [self.task], self.limits, late_chunking=True)[self.task.name].mean())

    def watch(self, training: Stage, start: str, progress: bool | None) -> Watch | None:
        """Measures the model meanwhile, reading as its checkpoint will; None where that is not wanted, takes
        too long, or several processes train."""
        takes_long = progress is None and self.cost(training) > PROGRESS_SHARE
        if progress is False or several(training.job.parallel) or takes_long:
            return None
        tokenizer = ending(training.tokenizer) if training.ends else training.tokenizer
        settings = vars(Settings.of(training.facts(start)))
        measure = probe([self.few], tokenizer, self.limits, late_chunking=True, **settings)
        return Watch(title=training.job.section, probe=measure, bars={"BM25": bm25(self.few)})

    def cost(self, training: Stage) -> float:
        """The share of a training's time that measuring it takes: by the texts that both read, of which a
        training computes the backward pass, too, twice the work."""
        read = TENTHS * (len(self.few.queries) + len(self.few.documents))
        trained = training.config.steps * sum(len(part.sequences) for part in training.batch(0))
        return read / (3 * trained)

    def report(self, before: float, embedder: Embedder, checkpoint: Path, watch: Watch | None) -> FitReport:
        """Measures the result, and prints what came out."""
        rows = probes(checkpoint) if watch else []
        seconds = seconds_until(rows, watch.bars["BM25"]) if rows else None
        sizes = len(self.task.queries), len(self.task.chunks)
        report = FitReport(before, self.ndcg(embedder), bm25(self.task), *sizes, seconds)
        print(report)
        if rows:
            when = "not above BM25" if seconds is None else f"above BM25 after {seconds:.0f} s of training"
            print(f"{when} ({len(self.few.queries)} of these queries among {len(self.few.chunks)} texts)")
        return report


def bm25(task: Task) -> float:
    """BM25's nDCG@10; 0 where no text holds a word."""
    try:
        return float(evaluate_bm25([task])[task.name].mean())
    except ValueError:
        return 0.0


def task_of(rows: list[Row], held_N: np.ndarray, queries: int = QUERIES, texts: int = TEXTS) -> Task:
    """Held-out queries, and texts, so many at most, those of the held-out rows first. What answers a query is
    what stands in a row with it."""
    if contextual := "chunks" in rows[0]:
        rows = documents_of({**row, "held": held} for row, held in zip(rows, held_N))
        held_N = np.array([row["held"] for row in rows])
    order_N = permuted(np.arange(len(rows)), len(rows), 0)
    order_N = order_N[np.argsort(~held_N[order_N], kind="stable")]
    sizes = [len(rows[i].get("chunks") or ["", *rows[i].get("negatives", [])]) for i in order_N]
    order_N = order_N[: max(1, np.searchsorted(np.cumsum(sizes), texts, side="right"))]
    rows, held = [rows[i] for i in order_N], held_N[order_N].sum()
    if contextual:
        documents = [row["chunks"] for row in rows]
        firsts = np.cumsum([0, *map(len, documents)]).tolist()
        golds = [[copies(row["chunks"], gold, at) for gold in row["golds"]] for at, row in zip(firsts, rows)]
    else:
        negatives = [text for row in rows for text in row.get("negatives", [])]
        different, number_M = distinct([row["document"] for row in rows] + negatives)
        documents, golds = [[text] for text in different], [[{number}] for number in number_M.tolist()]
    asks = [[*zip(row.get("queries", [row.get("query")]), gold)] for row, gold in zip(rows, golds)]
    relevant, held_queries = answers([*chain(*asks)]), answers([*chain(*asks[:held])])
    chosen = [*relevant][: min(queries, len(held_queries))]  # held-out ones come first
    family, answered = "contextual" if contextual else "english", [relevant[query] for query in chosen]
    return Task("rows", family, chosen, documents, answered, ignore_identical=True)
