"""Clustering a million pairs, against faiss alone with all points in memory.

The pairs are a mixture of Gaussians. A million pairs have two gibibytes of points, of which ours takes a
sample of one: the clusters are not the same, but as tight.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import faiss
import numpy as np
from measure import Case, Row, child

from unmask.config import load_preset
from unmask.data.batches import Packing
from unmask.data.lookalikes import Neighbours, pack
from unmask.data.mining import unit
from unmask.data.tokenized import Ragged

PAIRS, WIDTH, CLUSTER = 1_000_000, 128, 1024
COMPONENTS, BLOCK = 2_000, 50_000
CONFIG = replace(load_preset("cpu").clusters, iterations=10, attempts=1)


@cache
def data(count: int = PAIRS) -> Neighbours:
    """A document and a query near it for each pair, drawn around the centre of its component."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(COMPONENTS, WIDTH)).astype(np.float32)
    vectors = np.empty((2 * count, WIDTH), np.float16)
    for start in range(0, count, BLOCK):
        size = min(BLOCK, count - start)
        d_ND = centres[rng.integers(COMPONENTS, size=size)] + rng.normal(size=(size, WIDTH)) / 2
        vectors[start : start + size] = unit(d_ND + rng.normal(size=d_ND.shape) / 2)
        vectors[count + start : count + start + size] = unit(d_ND)
    numbers, one_each = np.arange(2 * count), np.arange(1, count + 1)
    texts = Ragged(numbers[:count], one_each), Ragged(numbers[count:], one_each)
    return Neighbours(vectors, *texts)


def ours(own: Neighbours) -> Packing:
    return pack(own, CLUSTER, CONFIG, seed=0)


def theirs(own: Neighbours) -> np.ndarray:
    """Each pair's cluster."""
    count = len(own.queries)
    q_ND, d_ND = own.vectors_UD[:count], own.vectors_UD[count:]
    points = np.empty((2 * count, 2 * WIDTH), np.float32)
    points[:count, :WIDTH] = points[count:, WIDTH:] = q_ND
    points[:count, WIDTH:] = points[count:, :WIDTH] = d_ND
    kmeans = faiss.Kmeans(
        2 * WIDTH, -(-count // CLUSTER), niter=CONFIG.iterations, spherical=True, seed=0,
        min_points_per_centroid=1,
    )  # fmt: skip
    kmeans.train(points)
    return kmeans.assign(points[:count])[1]


def tightness(own: Neighbours, clusters: list[np.ndarray]) -> float:
    """Mean length of the mean of a cluster's documents: 1 if all are the same."""
    means = [own.points(rows)[1].astype(np.float32).mean(0) for rows in clusters]
    return float(np.average(np.linalg.norm(means, axis=1), weights=[len(rows) for rows in clusters]))


def case(count: int = PAIRS) -> Case:
    own = data(count)

    def check() -> None:
        packing, cluster_N = ours(own), theirs(own)
        found = [
            np.split(packing.rows_N, packing.ends_K[:-1]),
            [np.flatnonzero(cluster_N == cluster) for cluster in np.unique(cluster_N)],
        ]
        mine, direct = (tightness(own, rows) for rows in found)
        assert mine > 0.97 * direct, f"clusters of tightness {mine:.3f}, faiss's own {direct:.3f}"

    programs = {"unmask": {"": lambda: ours(own)}, "faiss": {"": lambda: theirs(own)}}
    setting = f"{count:,} pairs × {WIDTH}, {-(-count // CLUSTER)} clusters, {CONFIG.iterations} iterations"
    return Case(setting, "pairs/s", count, programs, check)


def rows() -> list[Row]:
    """Each program once: a run is long enough to be timed without a warm-up."""
    mine, direct = (child("peak", "clusters", program, "", "1") for program in ("unmask", "faiss"))
    setting = f"{PAIRS:,} pairs × {WIDTH}, {-(-PAIRS // CLUSTER)} clusters; peer: faiss, all in memory"
    rate, theirs = (PAIRS / found["seconds"] for found in (mine, direct))
    peak, more = (found["bytes"] / 2**20 for found in (mine, direct))
    return [
        Row("clusters: speed, faiss", rate, theirs, rate / theirs, "pairs/s", setting),
        Row("clusters: peak memory, faiss", peak, more, more / peak, "MiB above model and data", setting),
    ]


CASES = {"clusters": case}
