"""Sources of one's own files with a few rows, in every format, for the tests of what reads them."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset

from unmask.data.registry import Source

PAIR_COLUMNS = {"query": "query", "document": "document"}


def own(*files, role="pairs", **values):
    """A source of these files."""
    columns = PAIR_COLUMNS if role == "pairs" else {"text": "text"}
    given = {"name": "mine", "language": "eng_Latn", "licence": "CC0-1.0", "bad_rows": "stop"}
    given |= {"columns": columns, "files": tuple(map(str, files))}
    return Source(kind="files", role=role, **given | values)


def write_as(path, rows):
    """Writes rows in the format that the suffix tells; tables in groups of seven rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    match path.suffix:
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
        case ".arrow":
            table = pa.Table.from_pylist(rows)
            with pa.ipc.new_stream(str(path), table.schema) as writer:
                writer.write_table(table, max_chunksize=7)
        case ".csv":
            Dataset.from_list(rows).to_csv(path)
        case suffix:
            data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
            path.write_bytes(gzip.compress(data, 1) if suffix == ".gz" else data)
    return path
