"""Integer dot products for exact INT8 search (`unmask.evaluation.similarity`), against float32."""

from __future__ import annotations

import torch
from measure import Case

from unmask.evaluation import similarity

DOCUMENTS, QUERIES, WIDTH = 100_000, 64, 256


def search_case() -> Case:
    generator = torch.Generator().manual_seed(0)
    documents = torch.randint(-127, 128, (DOCUMENTS, WIDTH), dtype=torch.int8, generator=generator)
    queries, floats = documents[:QUERIES].clone(), documents.float()

    def check() -> None:
        exact, rounded = similarity(queries, documents), similarity(queries.float(), floats)
        torch.testing.assert_close(exact, rounded, rtol=1e-5, atol=1e-5)

    programs = {
        "unmask": {"": lambda: similarity(queries, documents)},
        "float32 product": {"": lambda: similarity(queries.float(), floats)},
    }
    setting = f"{QUERIES} queries, {DOCUMENTS:,} × {WIDTH} codes, {torch.get_num_threads()} threads"
    return Case(setting, "queries/s", QUERIES, programs, check)


CASES = {"integer-search": search_case}
