"""Benchmarks from a search engine's own logs: query to query, and query to document.

The paper's PPLXQuery2Query and PPLXQuery2Doc (section 3.2) cannot be had; these are their construction, for
the logs that one has. Both end in queries, documents and the recall of a first-stage retriever as the corpus
grows.

Shape suffixes: N queries · M documents · D dimensions · K ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit

import numpy as np
import regex

from unmask.evaluation.metrics import ranking_metrics

RECALL_AT = (10, 20, 100, 1000)  # the paper's cut-offs (tables 6 to 8)
CONSENSUS = 3 / 70  # of an RRF score: what three systems that rank a document tenth give it
# Parameters that say where a click came from, not what it led to.
TRACKING = regex.compile(r"utm_\w+|fbclid|gclid|msclkid|mc_[ce]id|igshid|ref(_src)?", regex.IGNORECASE)
EMAIL = regex.compile(r"[\w.+-]+@[\w-]+(\.[\w-]+)+")
CARD = regex.compile(r"(?<!\d)\d(?:[ -]?\d){12,18}(?!\d)")
PHONE = regex.compile(
    r"(?<![\w.])(?:\+\d|\(\d|0)(?:[\s()\-/]{0,2}\d){7,14}(?!\d)|(?<![\w.])\d{3}[ .-]\d{3}[ .-]\d{4}(?!\d)"
)

T = TypeVar("T")
Ranking = Sequence[Sequence[int]] | np.ndarray  # for each query document numbers, best first


@dataclass(frozen=True)
class LogBenchmark:
    """Queries against a corpus that can be cut: `documents[:size]` is the corpus of that size.

    The `answers` documents that are relevant to some query come first, what merely distracts after them in a
    random, fixed order. So every corpus holds all the answers and lies within the next larger one.

    Attributes:
        relevant: for each query the numbers of the documents that answer it.
        dropped: how many rows or queries were left out, by reason.
    """

    queries: list[str]
    documents: list[str]
    relevant: list[set[int]]
    answers: int
    dropped: dict[str, int]

    def sizes(self, wanted: Iterable[int]) -> list[int]:
        """The wanted sizes of corpora, none of them without all answers or beyond all documents."""
        return sorted({min(max(size, self.answers), len(self.documents)) for size in wanted})


def query_to_query(
    rows: Iterable[Mapping[str, Any]],
    *,
    distractors: Iterable[str] = (),
    max_queries: int | None = None,
    seed: int = 0,
) -> LogBenchmark:
    """Queries that led to the same page find one another: the paper's PPLXQuery2Query.

    Personal queries are dropped (`personal`), the rest grouped by page (`page`). Of each group with two
    different queries or more, the earliest is asked and the others are its pseudo documents; queries of every
    other group distract. A text occurs once: one that is asked is no document [choice], and a document that
    led to several pages answers the queries of all of them.

    Rows are read once; memory grows with the different (query, page), not with the rows.

    Args:
        rows: "query", "url" and "time" (anything that can be ordered) of each click.
        distractors: other queries that join the corpus, for instance of older logs; none of them is asked.
        max_queries: ask so many groups at most, drawn at random.
    Raises: ValueError for a row that lacks a column or whose URL cannot be read, with its number; and where
        no two different queries led to one page.
    Source: section 3.2, PPLXQuery2Query, steps 1 to 5.

    Example:
        >>> clicks = [("jaguar speed", "a.org/jaguar", 1), ("how fast is a jaguar", "a.org/jaguar/", 2),
        ...           ("weather", "b.org", 3)]
        >>> built = query_to_query(dict(query=q, url=u, time=t) for q, u, t in clicks)
        >>> built.queries, built.documents, built.relevant
        (['jaguar speed'], ['how fast is a jaguar', 'weather'], [{0}])
    """
    dropped: Counter[str] = Counter()
    first_seen: dict[str, dict[str, Any]] = {}  # page → query → time of its first click
    for number, row in enumerate(rows):
        try:
            query, url, time = row["query"].strip(), page(row["url"]), row["time"]
        except (KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"row {number} of the log needs query, url and time: {error!r}") from None
        if reason := "empty" if not query else personal(query):
            dropped[reason] += 1
            continue
        times = first_seen.setdefault(url, {})
        times[query] = min(time, times.get(query, time))

    others = []
    for query in distractors:
        if reason := personal(query):
            dropped[reason] += 1
        else:
            others.append(query)

    groups = [sorted(times, key=times.__getitem__) for times in first_seen.values()]
    askable = [number for number, group in enumerate(groups) if len(group) > 1]
    rng = np.random.default_rng(seed)
    drawn = askable if max_queries is None else sorted(rng.permutation(askable)[:max_queries])
    asked = {groups[number][0]: set() for number in drawn}
    for group in groups:
        answers = {query for query in group if query not in asked}
        for query in set(group) & asked.keys():
            asked[query] |= answers
    kept = {query: answers for query, answers in asked.items() if answers}
    dropped["only asked queries led to its pages"] = len(asked) - len(kept)
    if not kept:
        raise ValueError(
            f"no two different queries led to one page ({len(groups)} pages, dropped: {dict(dropped)}): "
            "give the logs of more days"
        )
    return _benchmark(
        kept,
        (query for query in chain(*groups, others) if query not in asked),
        dropped,
        rng,
    )


def query_to_document(
    queries: Sequence[str],
    documents: Sequence[str],
    pool: Mapping[str, Ranking],
    *,
    judges: Mapping[str, Ranking] | None = None,
    depth: int = 100,
    threshold: float = CONSENSUS,
    seed: int = 0,
) -> LogBenchmark:
    """Documents on which several systems agree answer a query: the paper's PPLXQuery2Doc.

    The best `depth` documents of each system of the pool are candidates. A candidate is relevant if the
    reciprocal rank fusion of all systems, judges included, reaches `threshold`. The corpus is the candidates
    of all queries together. The system to be measured should be none of them: a benchmark favours those that
    made it.

    Args:
        queries, documents: texts; for the paper's mixture draw the queries with `stratified`.
        pool: system → document numbers for each query, best first; the paper has BM25 and three dense models.
        judges: systems whose opinion counts but whose documents do not join, as the paper's search engine.
        threshold: the paper gives none; three systems at rank ten [choice].
    Raises: ValueError if the rankings do not match the queries, or nothing reaches the threshold.
    Source: section 3.2, PPLXQuery2Doc, steps 2 to 4.
    """
    if not pool:
        raise ValueError("a pool needs at least one system")
    if len(set(queries)) != len(queries):
        raise ValueError("the queries repeat: give each once")
    systems = {**pool, **(judges or {})}
    for name, ranking in systems.items():
        if len(ranking) != len(queries):
            raise ValueError(f"system {name!r} ranks {len(ranking)} queries, there are {len(queries)}")
    fused = reciprocal_rank_fusion([[row[:depth] for row in ranking] for ranking in systems.values()])
    candidates = [
        dict.fromkeys(int(d) for ranking in pool.values() for d in ranking[query][:depth])
        for query in range(len(queries))
    ]
    answers = {
        query: {documents[d] for d in found if scores[d] >= threshold}
        for query, found, scores in zip(queries, candidates, fused, strict=True)
    }
    kept = {query: texts for query, texts in answers.items() if texts}
    if not kept:
        best = max(max(scores.values(), default=0) for scores in fused)
        raise ValueError(f"no document reaches the threshold {threshold:.4f}, the best has {best:.4f}")
    return _benchmark(
        kept,
        (documents[d] for found in candidates for d in found),
        Counter({"no consensus": len(answers) - len(kept)}),
        np.random.default_rng(seed),
    )


def _benchmark(
    relevant: Mapping[str, Set[str]],
    documents: Iterable[str],
    dropped: Counter[str],
    rng: np.random.Generator,
) -> LogBenchmark:
    """Numbers the documents, the relevant ones first."""
    answers = set().union(*relevant.values())
    texts = dict.fromkeys(documents)
    first = [text for text in texts if text in answers]
    rest = [text for text in texts if text not in answers]
    ordered = first + [rest[number] for number in rng.permutation(len(rest))]
    number = {text: index for index, text in enumerate(first)}
    return LogBenchmark(
        list(relevant),
        ordered,
        [{number[text] for text in texts} for texts in relevant.values()],
        len(first),
        {reason: count for reason, count in dropped.items() if count},
    )


def reciprocal_rank_fusion(rankings: Sequence[Ranking], k: int = 60) -> list[dict[int, float]]:
    """Score of each document that some system ranks: Σ over systems of 1 / (k + rank), ranks from 1.

    Args:
        rankings: of each system, for the same queries.
    Returns: for each query document number → score.
    Source: Cormack, Clarke and Büttcher, SIGIR 2009, whose k is 60.

    Example:
        >>> scores = reciprocal_rank_fusion([[[7, 3]], [[3]]])[0]
        >>> scores == {7: 1 / 61, 3: 1 / 62 + 1 / 61}
        True
    """
    fused: list[dict[int, float]] = []
    for rows in zip(*rankings, strict=True):
        scores: dict[int, float] = {}
        for row in rows:
            for rank, document in enumerate(row, 1):
                scores[int(document)] = scores.get(int(document), 0.0) + 1 / (k + rank)
        fused.append(scores)
    return fused


def recall_at_sizes(
    search: Callable[[int, int], Ranking],
    relevant: Sequence[Set[int]],
    sizes: Sequence[int],
    ks: Sequence[int] = RECALL_AT,
    *,
    per_query: bool = False,
) -> dict[int, dict[str, Any]]:
    """Recall at each k in corpora of growing size: the columns of the paper's tables 6 to 8.

    Args:
        search: (size, k) → numbers (N, K) of the best k among the first `size` documents, best first.
        relevant: as in `LogBenchmark`.
        sizes: of the corpora; each holds every relevant document.
        per_query: one value per query instead of the mean.
    Returns: size → {"recall@10": …}.
    Raises: ValueError for a size that leaves a relevant document out.
    """
    needed = 1 + max(max(numbers) for numbers in relevant)
    if min(sizes) < needed:
        raise ValueError(f"a corpus of {min(sizes)} leaves relevant documents out: take {needed} or more")
    return {
        size: {
            name: value
            for name, value in ranking_metrics(
                np.asarray(search(size, min(max(ks), size))), relevant, ks, per_query=per_query
            ).items()
            if name.startswith("recall@")
        }
        for size in sizes
    }


def stratified(items: Sequence[T], stratum: Callable[[T], Hashable], size: int, seed: int = 0) -> list[T]:
    """`size` items, as evenly from all strata as these allow; small strata are taken whole.

    The paper draws its queries over intent, form, length and language (PPLXQuery2Doc, step 1): `stratum`
    gives the combination, for instance `lambda row: (row["intent"], length_class(row["query"]))`.

    Raises: ValueError if there are fewer items.

    Example:
        >>> sorted(stratified("aaaaaab", str, 4))
        ['a', 'a', 'a', 'b']
    """
    if size > len(items):
        raise ValueError(f"cannot draw {size} of {len(items)} items")
    strata: dict[Hashable, list[T]] = {}
    for number in np.random.default_rng(seed).permutation(len(items)):
        strata.setdefault(stratum(items[number]), []).append(items[number])
    drawn: list[T] = []
    depth = 0
    while len(drawn) < size:  # the next item of every stratum that has one
        drawn += [members[depth] for members in strata.values() if depth < len(members)]
        depth += 1
    return drawn[:size]


def length_class(query: str) -> str:
    """The paper's classes of length: "short" (1 to 2 words), "medium" (3 to 11), "long" (12 or more)."""
    words = len(query.split())
    return "short" if words <= 2 else "medium" if words <= 11 else "long"


def personal(query: str) -> str:
    """What makes a query personal: "email", "card" or "phone"; empty if nothing obvious does.

    It finds patterns, no names and no addresses: put a real detector before it where the law asks for one.

    Example:
        >>> personal("jane.doe@example.org"), personal("call +49 30 901820"), personal("iphone 15 vs 14")
        ('email', 'phone', '')
    """
    if EMAIL.search(query):
        return "email"
    if any(_luhn(found) for found in CARD.findall(query)):
        return "card"
    return "phone" if PHONE.search(query) else ""


def _luhn(text: str) -> bool:
    """The checksum that payment cards carry."""
    digits = [int(sign) for sign in reversed(text) if sign.isdigit()]
    return sum(digits[::2] + [sum(divmod(2 * digit, 10)) for digit in digits[1::2]]) % 10 == 0


def page(url: str) -> str:
    """One name for the addresses of one page: no scheme, "www.", trailing slash, fragment or tracking.

    Raises: ValueError for what cannot be read as a URL.

    Example:
        >>> page("https://www.Example.org/a/?utm_source=x&b=1#top") == page("http://example.org/a?b=1")
        True
    """
    text = url.strip()
    parts = urlsplit(text if "://" in text else f"//{text}")
    host = (parts.hostname or "").removeprefix("www.")
    port = f":{parts.port}" if parts.port not in (None, 80, 443) else ""
    query = [
        pair for pair in parse_qsl(parts.query, keep_blank_values=True) if not TRACKING.fullmatch(pair[0])
    ]
    if not host:
        raise ValueError(f"{url!r} is no URL")
    return f"{host}{port}{parts.path.rstrip('/')}" + (f"?{urlencode(sorted(query))}" if query else "")
