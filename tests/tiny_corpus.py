"""A corpus of a few sentences, in place of the harvest of the installed packages, for tests that train in
real child processes."""

import json

import pyarrow as pa
import pyarrow.parquet as pq

from unmask.data import sources

PAIRS = [
    {
        "query": f"How is number {i} written?",
        "document": f"Number {i} is written with {len(str(i))} digits. " * (1 + i % 3),
        "key": str(i),
        "dataset": "docs",
        "group": "english",
        "language": "en",
        "package": "numbers",
    }
    for i in range(60)
]


def build(config, packages, path, languages):
    path.mkdir()
    for kind, schema in sources.SCHEMAS.items():
        for split in sources.SPLITS:
            rows = PAIRS if kind == "pairs" else []
            pq.write_table(pa.Table.from_pylist(rows, schema=schema), path / f"{kind}-{split}.parquet")
    (path / "card.json").write_text(json.dumps({"hash": "tiny"}))
