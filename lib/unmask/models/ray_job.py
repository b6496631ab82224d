"""Embeddings of a corpus that one machine would take too long for: `Embedder` as a job of Ray Data.

Legend: B texts or documents, R rows of embeddings, D dimensions (bytes for "ubinary").
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from unmask.models.embedder import Embedder
from unmask.store import new_directory

if TYPE_CHECKING:
    from ray.data import Dataset

OUTPUT = "embedding"


def encode_dataset(
    model: str | Path,
    dataset: Dataset | str | Path,
    output: str | Path,
    *,
    text_column: str = "text",
    chunks_column: str | None = None,
    precision: str = "int8",
    dimensions: int | None = None,
    workers: int | None = None,
    batch_size: int = 4096,
    **options: Any,
) -> Path:
    """Embeds a corpus with all machines of a Ray cluster: the same vectors as `Embedder.encode`.

    The cluster is the one that `ray.init` was told of, or else this machine. `model`, the corpus and `output`
    must be where all its machines see them. The rows keep their columns and get one more, "embedding": a
    list of `dimensions` numbers, or for documents a list with such a list for each chunk. Workers write as
    they finish, so the rows come in another order: let a column identify them.

    Args:
        model: what `Embedder.from_pretrained` loads.
        dataset: a data set of Ray, or Parquet: a file or a folder.
        output: a folder of Parquet files; it appears when all of it is written.
        chunks_column: a column of lists, the chunks of documents; then these are embedded, with
            `Embedder.encode_documents`, and `text_column` is not read.
        workers: processes that hold a model. Default: one for each GPU of the cluster, or else one for each
            machine. Each takes a GPU where there is one, and an equal share of the cores.
        batch_size: rows that a worker embeds at a time.
        options: further ones of `encode` or `encode_documents`, `max_length` for instance.
    Raises: ImportError without Ray. What a worker raises (`Embedder.encode` says for what texts) reaches here
        with its traceback; a text's number is then that within its batch.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError("encode_dataset needs Ray Data: install unmask[ray]") from error
    if isinstance(dataset, (str, Path)):
        dataset = ray.data.read_parquet(str(dataset))
    if not ray.is_initialized():
        ray.init()
    cluster = ray.cluster_resources()
    gpus = int(cluster.get("GPU", 0))
    workers = workers or gpus or sum(node["Alive"] for node in ray.nodes())
    threads = max(1, int(cluster["CPU"]) // workers)
    embedded = dataset.map_batches(
        Worker,
        fn_constructor_args=(str(model), chunks_column or text_column, chunks_column is not None, threads),
        fn_kwargs={"precision": precision, "dimensions": dimensions, **options},
        batch_size=batch_size,
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
