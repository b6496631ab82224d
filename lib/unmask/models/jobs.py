"""Embeddings of many texts as a job: of a file on this machine (`unmask encode`), or of a corpus on all
machines of a Ray cluster.

Legend: N texts, B texts or documents, R rows of embeddings, D dimensions (bytes for "ubinary").
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch
from tqdm import tqdm

from unmask.models.embedder import Embedder
from unmask.store import fingerprint, new_directory, read_json, write_atomic

OUTPUT = "embedding"
BATCH = 4096  # texts that are embedded at a time, and that an interruption costs at most
READERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


def encode_file(
    model: str | Path, texts: Path, output: Path, *,
    column: str = "text", precision: str = "int8", dimensions: int | None = None,
) -> Path:  # fmt: skip
    """Embeds the texts of a file, in bounded memory. What was interrupted goes on where it stood.

    Args:
        model: what `Embedder.from_pretrained` loads.
        texts: a .jsonl, .json, .csv or .parquet file, or .txt with a text in each line.
        output: an .npy file, (N, D), as `Embedder.encode` returns it; it appears when all of it is written.
        column: the texts in their file; "text" for .txt.
        precision, dimensions: as for `Embedder.encode`.
    Raises: ValueError for a row without a text, naming file and row, before anything is computed; for an
        output that is no .npy file; and as `Embedder.encode`.
    """
    if output.suffix != ".npy" or not output.parent.is_dir():
        raise ValueError(f"{output}: the embeddings go into an .npy file in a folder that exists")
    cache = output.with_name(f".{output.name}.cache")  # the same each time: a killed one is cleared away
    shutil.rmtree(cache, ignore_errors=True)
    try:
        rows = _texts(texts, column, str(cache))
        embedder = Embedder.from_pretrained(model)
        none = embedder.encode([], precision, dimensions)
        partial, state = (output.with_name(f".{output.name}.{kind}") for kind in ("partial", "json"))
        facts = [os.stat(file).st_mtime_ns for file in (model, texts) if os.path.exists(file)]
        job = fingerprint(str(model), str(texts), column, precision, dimensions, facts)
        known = read_json(state)
        done = known["rows"] if known.get("job") == job and partial.is_file() else 0
        shape = (len(rows), none.shape[1])
        rows_ND = np.lib.format.open_memmap(partial, "r+" if done else "w+", none.dtype, shape)
        for start in tqdm(range(done, len(rows), BATCH), unit="batch", desc="embedding"):
            batch = slice(start, start + BATCH)
            rows_ND[batch] = embedder.encode(rows[batch], precision, dimensions)
            rows_ND.flush()
            write_atomic(state, json.dumps({"job": job, "rows": batch.stop}))
        os.replace(partial, output)
        state.unlink(missing_ok=True)
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    return output


def _texts(path: Path, column: str, cache: str) -> datasets.Column:
    if path.suffix not in READERS or not path.is_file():
        raise ValueError(f"{path} is no file with one of the endings {', '.join(READERS)}")
    try:
        kind, file = READERS[path.suffix], str(path)
        # In CSV, "NA" and "007" are texts like others.
        more = {"keep_default_na": False, "converters": {column: str}} if kind == "csv" else {}
        table = datasets.load_dataset(kind, data_files=file, split="train", cache_dir=cache, **more)
    except (datasets.exceptions.DatasetGenerationError, pa.ArrowInvalid) as error:
        raise ValueError(f"{path} cannot be read: {error.__cause__ or error}") from None
    column = "text" if path.suffix == ".txt" else column
    if column not in table.column_names:
        raise ValueError(f"{path} has no column {column!r}: it has {', '.join(table.column_names)}")
    for number, text in enumerate(tqdm(table[column], unit="text", desc="reading"), 1):
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{path}, row {number}: {column} is no text but {text!r}: fill or remove it")
    return table[column]


def encode_dataset(
    model: str | Path, dataset: Any, output: str | Path, *,
    text_column: str = "text", chunks_column: str | None = None, workers: int | None = None, **options: Any,
) -> Path:  # fmt: skip
    """Embeds a corpus with all machines of a Ray cluster: the same vectors as `Embedder.encode`.

    The cluster is the one that `ray.init` was told of, or else this machine; the extra `ray` has to be
    installed. `model`, the corpus and `output` must be where all its machines see them. The rows keep their
    columns and get one more, "embedding": a list of `dimensions` numbers, or for documents a list with such
    a list for each chunk. Workers write as they finish, so the rows come in another order: let a column
    identify them.

    Args:
        model: what `Embedder.from_pretrained` loads.
        dataset: a `ray.data.Dataset`, for instance of `ray.data.read_parquet(folder)`.
        output: a new folder of Parquet files; it appears when all of it is written.
        chunks_column: a column of lists, the chunks of documents; then these are embedded, with
            `Embedder.encode_documents`, and `text_column` is not read.
        workers: processes that hold a model. Default: one for each GPU of the cluster, or else one for each
            machine. Each takes a GPU where there is one, and an equal share of the cores.
        options: of `encode` or `encode_documents`: `precision`, `dimensions`, `max_length` for instance.
    Raises: ValueError for an output that exists. What a worker raises (`Embedder.encode` says for what texts)
        reaches here with its traceback; a text's number is then that within its batch.
    """
    import ray

    if os.path.exists(output):
        raise ValueError(f"{output} is there already: name a new folder")
    cluster = ray.cluster_resources()
    gpus = int(cluster.get("GPU", 0))
    workers = workers or gpus or sum(node["Alive"] for node in ray.nodes())
    threads = max(1, int(cluster["CPU"]) // workers)
    embedded = dataset.map_batches(
        Worker,
        fn_constructor_args=(str(model), chunks_column or text_column, chunks_column is not None, threads),
        fn_kwargs=options,
        batch_size=BATCH,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=workers),
        num_cpus=0.5,  # of Ray's counting: reading and writing must find a core
        num_gpus=1 if gpus else 0,
    )
    with new_directory(Path(output)) as folder:
        embedded.write_parquet(str(folder.absolute()))
    return Path(output)


class Worker:
    """One process of the job: an embedder, and the column that it reads."""

    def __init__(self, model: str, column: str, documents: bool, threads: int):
        torch.set_num_threads(threads)
        self.embedder, self.column, self.documents = Embedder.from_pretrained(model), column, documents

    def __call__(self, table: pa.Table, **options: Any) -> pa.Table:
        items_B = table[self.column].to_pylist()
        if not self.documents:
            return table.append_column(OUTPUT, lists(self.embedder.encode(items_B, **options)))
        parts = self.embedder.encode_documents(items_B, **options)
        starts = np.cumsum([0, *map(len, parts)], dtype=np.int32)
        return table.append_column(OUTPUT, pa.ListArray.from_arrays(starts, lists(np.concatenate(parts))))


def lists(rows_RD: np.ndarray) -> pa.FixedSizeListArray:
    return pa.FixedSizeListArray.from_arrays(pa.array(rows_RD.ravel()), rows_RD.shape[1])
