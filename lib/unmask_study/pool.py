"""Right documents by the vote of several systems, where nobody marked any (pplx-embed, section 3.2).

Shape suffixes: N queries · M documents · D dimensions · K ranks.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from itertools import chain, zip_longest
from typing import Any

import numpy as np

from unmask.evaluation.search import top_k
from unmask.extras import extra
from unmask.models.backbone import is_released, quiet
from unmask.models.checkpoint import folder_of
from unmask.models.embedder import Embedder

with extra("study"):
    from sentence_transformers import SentenceTransformer

Ranking = Sequence[Sequence[int]]  # of a system: for each query the numbers of documents, best first
# Before a query, where a model's card says it and its files do not.
WEB = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "
PROMPTS = {"intfloat/multilingual-e5-large-instruct": WEB}


def nearest(
    name: str, queries: list[str], documents: list[str], k: int, length: int, revision: str = "main"
) -> np.ndarray:
    """Numbers (N, K) of the documents nearest to each query, best first, by an embedder of
    sentence-transformers with its own prompts, or by a released pplx-embed, which has none.

    Args:
        name: directory or Hub name.
        length: tokens of a text that are read at most.
        revision: on the Hub.
    """
    path = folder_of(name, revision)
    if is_released(path):
        embedder = Embedder.from_pretrained(path, max_length=length)
        return top_k(embedder.encode(queries), embedder.encode(documents), k)[1]
    with quiet():
        model = SentenceTransformer(str(path), model_kwargs={"use_safetensors": True})
    model.max_seq_length = min(model.max_seq_length or length, length)
    q_ND = model.encode_query(queries, prompt=PROMPTS.get(name))
    return top_k(q_ND, model.encode_document(documents), k)[1]


def agreed(pool: Sequence[Ranking], beside: Sequence[Ranking] = (), least: float = 3 / 70) -> list[set[int]]:
    """The documents of each query that enough systems rank high, by reciprocal rank fusion.

    Candidates are what the systems of the pool found. Right are those with

        Σ 1 / (60 + rank) ≥ least

    over all systems that found it, those `beside` the pool included.

    Args:
        pool, beside: the systems.
        least: by default as if three systems ranked it tenth; the paper gives none.

    Example:
        >>> agreed([[[7, 5]], [[5, 9]]], beside=[[[5, 8]]], least=0.04)
        [{5}]
    """
    right = []
    for number in range(len(pool[0])):
        votes = Counter()
        for system in (*pool, *beside):
            for rank, document in enumerate(system[number], 1):
                votes[int(document)] += 1 / (60 + rank)
        candidates = {int(document) for system in pool for document in system[number]}
        right.append({document for document in candidates if votes[document] >= least})
    return right


def stratified(items: Sequence[Any], stratum: Callable[[Any], Hashable], count: int) -> list[Any]:
    """So many of the items at most, drawn as evenly from all strata as these allow.

    Args:
        stratum: of an item.
    """
    strata: dict[Hashable, list[Any]] = {}
    for number in np.random.default_rng(0).permutation(len(items)):
        strata.setdefault(stratum(items[number]), []).append(items[number])
    rounds = chain.from_iterable(zip_longest(*strata.values()))
    return [item for item in rounds if item is not None][:count]
