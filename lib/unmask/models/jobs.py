"""Embeddings of many texts as a job: of a file on this machine (`unmask encode`), or of a corpus on all
machines of a Ray cluster.

Legend: N texts, B texts or documents, R rows of embeddings, D dimensions (bytes for "ubinary").
"""

import glob
import io
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from unmask.models.embedder import Embedder
from unmask.store import alone, fingerprint, visible

BATCH = 4096  # texts that are embedded at a time, and that an interruption costs at most; for each GPU 2**16


def encode_file(
    model: str | Path, texts: Path, output: Path, column: str, precision: str, dimensions: int | None
) -> None:
    """Embeds the texts of a file, in bounded memory. What was interrupted goes on where it stood.

    Args:
        model: what `Embedder.from_pretrained` loads.
        texts: a file in one of `rows.FORMATS`; in .txt each line is a text.
        output: an .npy file, (N, D), as `Embedder.encode` returns it; it appears when all of it is written.
        column: the texts in their file; "text" for .txt.
        precision, dimensions: as for `Embedder.encode`.
    Raises: ValueError for a row without a text, naming file and row, before anything is computed; for an
        output that is no .npy file; and as `Embedder.encode`. RuntimeError if another process writes it.
    """
    if output.suffix != ".npy" or not output.parent.is_dir() or output.is_dir():
        raise ValueError(f"{output}: the embeddings go into an .npy file in a folder that exists")
    with alone(output):
        embedder = Embedder.from_pretrained(model)
        count = sum(1 for _ in tqdm(_texts(texts, column), unit="text", desc="reading"))
        none = embedder.encode([], precision, dimensions)
        header, row_bytes = _header(none, count), none.shape[1] * none.itemsize
        files = [texts, *sorted(visible(Path(embedder.model.name_or_path)))]
        facts = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
        job = fingerprint(column, precision, dimensions, facts)
        partial = output.with_name(f".{output.name}.{job}.partial")
        for other in {*output.parent.glob(f".{glob.escape(output.name)}.*.partial")} - {partial}:
            other.unlink()
        with partial.open("ab") as file:
            done = max(0, file.tell() - len(header)) // row_bytes
            file.truncate(len(header) + done * row_bytes if done else 0)
            file.write(b"" if done else header)
            left = islice(_texts(texts, column), done, None)
            size = BATCH if embedder.devices[0].type == "cpu" else 16 * BATCH * len(embedder.devices)
            for start in tqdm(range(done, count, size), unit="batch", desc="embedding"):
                with _naming_row(texts, start):
                    file.write(embedder.encode([*islice(left, size)], precision, dimensions))
                file.flush()
        os.replace(partial, output)
        print(f"{count:,} embeddings: {output}")


def _header(rows_ND: np.ndarray, count: int) -> bytes:
    """What an .npy file of `count` such rows begins with."""
    facts = np.lib.format.header_data_from_array_1_0(rows_ND) | {"shape": (count, rows_ND.shape[1])}
    np.lib.format.write_array_header_1_0(stream := io.BytesIO(), facts)
    return stream.getvalue()


@contextmanager
def _naming_row(texts: Path, start: int) -> Iterator[None]:
    """Has an error name the row of the file instead of that of a batch."""
    try:
        yield
    except ValueError as error:
        place = re.match(r"Text (\d+) of \d+", str(error))
        row = f"row {start + 1 + int(place[1])}{str(error)[place.end() :]}" if place else error
        raise ValueError(f"{texts}, {row}") from None


def _texts(path: Path, column: str) -> Iterator[str]:
    """The texts of a file, read as those of a source are."""
    # With datasets, which a `Worker` has no use for.
    from unmask.data import rows  # noqa: PLC0415
    from unmask.data.registry import Source  # noqa: PLC0415

    if not path.is_file():
        raise ValueError(f"{path} is no file")
    columns = {"text": "text" if rows.suffix_of(path.name) == ".txt" else column}
    place = {"files": (glob.escape(str(path)),), "columns": columns, "bad_rows": "stop"}
    source = Source("", "files", "text", "mul", "", **place)
    for unit in rows.units(source):
        yield from (row["text"] for row in rows.read(source, unit, Counter()))


class Worker:
    """One process of a Ray job, with a model of its own: the same vectors as `Embedder.encode`.

        rows = ray.data.read_parquet(folder).map_batches(
            Worker, fn_constructor_args=(model, "text"), fn_kwargs={"dimensions": 256},
            batch_size=4096, batch_format="pyarrow", num_gpus=1, concurrency=8,
        )
        rows.write_parquet(output)

    A row keeps its columns and gets one more, "embedding": a list of `dimensions` numbers, or for documents a
    list with such a list for each chunk. Workers finish in any order: let a column identify the rows. Without
    GPUs, `num_cpus` says how many threads each takes. The extra `ray` has to be installed.

    Args:
        model: what `Embedder.from_pretrained` loads, where all machines see it.
        column: of texts; or of lists, the chunks of documents, which `Embedder.encode_documents` embeds.
    """

    def __init__(self, model: str, column: str = "text"):
        self.embedder, self.column = Embedder.from_pretrained(model), column

    def __call__(self, table: pa.Table, **options: Any) -> pa.Table:
        """Embeds a batch; options as for `encode` or `encode_documents`."""
        items_B = table[self.column].to_pylist()
        if not pa.types.is_nested(table[self.column].type):
            return table.append_column("embedding", _lists(self.embedder.encode(items_B, **options)))
        none = self.embedder.encode([], options.get("precision", "int8"), options.get("dimensions"))
        parts = self.embedder.encode_documents(items_B, **options)
        starts = np.cumsum([0, *map(len, parts)], dtype=np.int32)
        nested = pa.ListArray.from_arrays(starts, _lists(np.concatenate([none, *parts])))
        return table.append_column("embedding", nested)


def _lists(rows_RD: np.ndarray) -> pa.FixedSizeListArray:
    return pa.FixedSizeListArray.from_arrays(pa.array(rows_RD.ravel()), rows_RD.shape[1])
