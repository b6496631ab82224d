"""Exact search against faiss, and search as the corpus grows.

Shape suffixes: N queries · M documents · D dimensions · B bytes of packed bits · K ranks.
"""

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import faiss
import numpy as np
import torch
from measure import MEMORY_UNIT, Case, Row, Step, peak, seconds

from unmask.data.batches import parts
from unmask.evaluation.search import index
from unmask.store import artifacts_root

DOCUMENTS, WIDTH, QUERIES, K = 200_000, 1024, 64, 10
LIMIT = 512.0  # MiB that the search of a million documents may take beside them
BLOCK = 65_536

Search = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]


def codes(documents: int) -> tuple[np.ndarray, np.ndarray]:
    """Queries and documents of one length, whose inner products, which faiss compares, sort like cosines."""
    rng = np.random.default_rng(0)
    base_D = np.clip(np.rint(40 * rng.standard_normal(WIDTH)), -127, 127).astype(np.int8)
    d_MD = np.empty((documents, WIDTH), np.int8)
    for block in (d_MD[part] for part in parts(documents, BLOCK)):
        bits = np.unpackbits(rng.integers(0, 256, (len(block), WIDTH // 8), np.uint8), axis=1)
        np.multiply(bits.view(np.int8) * 2 - 1, base_D, out=block)
    noise = rng.integers(-90, 90, (QUERIES, WIDTH))
    return np.clip(d_MD[:QUERIES] + noise, -127, 127).astype(np.int8), d_MD


def integer_peer(d_MD: np.ndarray) -> Search:
    kind = faiss.ScalarQuantizer.QT_8bit_direct_signed
    peer = faiss.IndexScalarQuantizer(d_MD.shape[1], kind, faiss.METRIC_INNER_PRODUCT)
    for part in parts(len(d_MD), BLOCK):
        peer.add(d_MD[part].astype(np.float32))
    return lambda q_ND, k: peer.search(q_ND.astype(np.float32), k)


def bits(documents: int) -> tuple[np.ndarray, np.ndarray]:
    """Packed queries and documents; a query is a document with an eighth of its bits turned round."""
    rng = np.random.default_rng(0)
    d_MB = rng.integers(0, 256, (documents, WIDTH // 8), np.uint8)
    flips = np.bitwise_and.reduce(rng.integers(0, 256, (3, QUERIES, WIDTH // 8), np.uint8))
    return d_MB[:QUERIES] ^ flips, d_MB


def binary_peer(d_MB: np.ndarray) -> Search:
    peer = faiss.IndexBinaryFlat(8 * d_MB.shape[1])
    peer.add(d_MB)
    return peer.search


KINDS = {"integer": ("faiss SQ8", codes, integer_peer)}
KINDS |= {"binary": ("faiss IndexBinaryFlat", bits, binary_peer)}


def case(kind: str, batch: int, number: int = DOCUMENTS) -> Case:
    name, made, peer_of = KINDS[kind]
    queries, documents = made(number)
    ours, peer = index(documents), peer_of(documents)
    count = len(queries) if batch > 1 else len(queries) // 4

    def all_queries(search: Search) -> None:
        for start in range(0, count, batch):
            search(queries[start : start + batch], K)

    def check() -> None:
        """The same ids. Among equal scores at the last rank, faiss chooses otherwise."""
        mine, theirs = ours(queries, K + 1), peer(queries, K + 1)
        for score_K, ids_K, other_K in zip(*mine, theirs[1], strict=True):
            sure = score_K > score_K[-1]
            assert set(ids_K[sure]) <= set(other_K), "different documents"

    asked = f"batches of {batch}" if batch > 1 else "one query at a time"
    setting = f"{len(documents):,} × {WIDTH} random {documents.dtype} codes, top {K}, {asked}"
    setting += f", {torch.get_num_threads()} threads"
    programs = {"unmask": {"": lambda: all_queries(ours)}, name: {"": lambda: all_queries(peer)}}
    return Case(setting, "queries/s", count, programs, check)


CASES = {f"{kind}-search": partial(case, kind, QUERIES) for kind in KINDS}
CASES |= {f"{kind}-search-one": partial(case, kind, 1) for kind in KINDS}


def scaling(sizes: tuple[int, ...] = (10_000, 30_000, 100_000, 300_000, 1_000_000)) -> list[Row]:
    """Searches of growing corpora, beside the speed at which the documents can be read at all, and the memory
    of the largest."""
    rng, rows = np.random.default_rng(0), []
    artifacts_root().mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=artifacts_root(), prefix="search-") as folder:
        stored = np.lib.format.open_memmap(Path(folder, "d.npy"), "w+", np.int8, (max(sizes), WIDTH))
        for part in parts(len(stored), BLOCK):
            stored[part] = rng.integers(-127, 128, stored[part].shape, np.int8)
        q_ND = np.array(stored[:QUERIES])
        for size in sizes:
            rows += rates(index(stored[:size]), q_ND, stored[:size])
        memory = peak(lambda: index(stored)(q_ND, K), 1)["bytes"] / 2**20
    title = f"exact INT8 search, {max(sizes):,} documents: peak memory"
    against = f"mapped into memory, {WIDTH} codes; peer: the limit"
    return [*rows, Row(title, memory, LIMIT, LIMIT / memory, MEMORY_UNIT, against)]


def rates(search: Search, q_ND: np.ndarray, d_MD: np.ndarray) -> list[Row]:
    """Queries per second, one at a time and in a batch, and how often all documents can be read."""
    words = torch.from_numpy(d_MD.ravel()).view(torch.int64)
    search(q_ND, K)

    def rate(work: int, step: Step, times: int) -> float:
        return work / statistics.median(seconds(step) for _ in range(times))

    one, batch = rate(1, lambda: search(q_ND[:1], K), 9), rate(QUERIES, lambda: search(q_ND, K), 3)
    reading = rate(1, words.sum, 9)
    name = f"exact INT8 search, {len(d_MD):,} documents"
    setting = f"{len(d_MD):,} × {WIDTH} random codes, top {K}, {torch.get_num_threads()} threads; peer: "
    alone = (one, reading, one / reading, "queries/s", f"{setting}reading the documents as often")
    together = (batch, one, batch / one, "queries/s", f"{setting}one query at a time")
    return [Row(f"{name}: one query", *alone), Row(f"{name}: batches of {QUERIES}", *together)]
