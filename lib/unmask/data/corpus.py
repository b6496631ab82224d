"""A corpus on disk: memory-mapped tables of text, pairs, triplets and documents, by data set and split."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, concatenate_datasets
from datasets.arrow_writer import ArrowWriter

from unmask.data.registry import CODE, SPLITS, Source
from unmask.data.spelling import held_texts, text_id
from unmask.store import read_json

Rows = Iterable[Mapping[str, Any]]  # of a table

_text = pa.string()
_pair = dict.fromkeys(("query", "document", "key", "dataset", "task", "group", "language", "package"), _text)
_document = dict.fromkeys(("document_id", "key", "dataset", "task", "package", "language"), _text)
_document |= {"chunks": pa.list_(_text), "queries": pa.list_(_text), "golds": pa.list_(pa.int32())}
SCHEMAS = {
    "texts": pa.schema(dict.fromkeys(("text", "package", "kind", "language"), _text)),
    "pairs": pa.schema(_pair),
    "triplets": pa.schema(_pair | {"negatives": pa.list_(_text)}),
    "documents": pa.schema(_document),
}


@dataclass(frozen=True)
class Corpus:
    """Tables of four kinds in three splits ("train", "dev", "test"), and a card that describes them.

    texts: text, package, kind ("prose", "code", "cldr" or "text"), language; "package" is where a
        text is from.
    pairs: query, document, key, dataset, task, group, language, package; rows of one key, query or document
        are the same thing, never negatives. A batch holds one data set, a held-out task may join several.
    triplets: as pairs, with negatives.
    documents: document_id, key, dataset, task, package, language, chunks, queries, golds (index of each
        query's gold chunk); those of one key are parts, copies or translations of one, and never negatives.
    """

    path: Path

    @cached_property
    def card(self) -> dict[str, Any]:
        """The tables' folders, origins with version and licence, and what was dropped and why."""
        return read_json(self.path / "card.json")

    @property
    def hash(self) -> str:
        """SHA-256 of all rows."""
        return self.card["hash"]

    @property
    def languages(self) -> list[str]:
        """The languages of the training rows, code in programming languages apart."""
        tables = (read("train") for read in (self.texts, self.pairs, self.triplets, self.documents))
        codes = chain.from_iterable(table.unique("language") for table in tables)
        return sorted({*"-".join(codes).split("-")} - {"", "mul", *CODE.split("|")})

    def rows_hash(self, kind: str, dataset: str) -> str:
        """Names the rows of one data set, whatever else a corpus holds: another name for other rows."""
        return os.path.normpath(f"{self.path.name}/{self.card['tables'][kind][dataset]}")

    def text_sources(self) -> list[Source]:
        """What pretraining reads: text, too much of it perhaps for a table."""
        return [
            Source(**values | {"files": [str(self.path / file) for file in values["files"]]})
            for values in self.card["text_sources"]
        ]

    def datasets(self, kind: str, split: str) -> list[str]:
        """Names of the data sets that have rows of a kind in a split."""
        return sorted(name for name in self.card["tables"].get(kind, ()) if self._table(kind, split, name))

    def texts(self, split: str, dataset: str | None = None) -> Dataset:
        """Text for pretraining; of a large source a sample (`sources.SAMPLE_BYTES`)."""
        return self._read("texts", split, dataset)

    def pairs(self, split: str, dataset: str | None = None) -> Dataset:
        """Queries with the document that answers each, of one data set or of all."""
        return self._read("pairs", split, dataset)

    def triplets(self, split: str, dataset: str | None = None) -> Dataset:
        """Pairs that came with hard negatives, of one data set or of all."""
        return self._read("triplets", split, dataset)

    def documents(self, split: str, dataset: str | None = None) -> Dataset:
        """Documents in chunks, with the queries that one of the chunks answers, of one data set or of all."""
        return self._read("documents", split, dataset)

    def held_out(self) -> np.ndarray:
        """The texts that no training sees, by `text_id`: those of dev and test, whatever their data set."""
        tables = (read(split) for read in (self.pairs, self.triplets, self.documents) for split in SPLITS[1:])
        texts = chain.from_iterable(map(held_texts, chain.from_iterable(tables)))
        return np.unique(np.fromiter(map(text_id, texts), np.uint64))

    def _read(self, kind: str, split: str, dataset: str | None = None) -> Dataset:
        names = [dataset] if dataset else self.datasets(kind, split)
        tables = [self._table(kind, split, name) for name in names]
        return concatenate_datasets(tables) if tables else Dataset(SCHEMAS[kind].empty_table())

    def _table(self, kind: str, split: str, dataset: str) -> Dataset:
        return read_table(self.path / self.card["tables"][kind][dataset], split)


def write_table(folder: Path, kind: str, rows: Rows) -> int:
    """Writes the table of a data set, each row into the Arrow file of its "split".

    Returns: the number of rows.
    """
    folder.mkdir(parents=True)
    schema, files = SCHEMAS[kind], {split: folder / f"{split}.arrow" for split in SPLITS}
    writers = {split: ArrowWriter(path=str(file), schema=schema) for split, file in files.items()}
    for row in rows:
        writers[row["split"]].write({column: row[column] for column in schema.names})
    return sum(writer.finalize()[0] for writer in writers.values())


@cache  # some presets ask for a hundred files again and again
def read_table(folder: Path, split: str) -> Dataset:
    """A split of a table, mapped into memory."""
    return Dataset.from_file(str(folder / f"{split}.arrow"))
