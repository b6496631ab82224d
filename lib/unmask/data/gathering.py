"""Documents whose rows are not documents: rows of one title, or chunks and queries of two configurations.

All rows of the source are held in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from unmask.data.formats import place
from unmask.data.lines import BadRow
from unmask.data.reading import Unit, document_of, numbered, refuse
from unmask.data.registry import Source

Documents = Iterator[dict[str, Any]]  # id, split, chunks, queries, golds


def gather_flat(source: Source, units: Sequence[Unit], dropped: Counter[str]) -> Documents:
    """Rows of one title are a document: chunks in order of appearance, equal ones once. The split is that of
    its first row.

    Raises: ValueError as `reading.read`.
    """
    documents: dict[str, dict[str, Any]] = {}
    ids: dict[str, tuple[Unit, int]] = {}
    for unit in units:
        for number, row in numbered(source, unit, dropped):
            if "id" in row and (first := ids.setdefault(row["id"], (unit, number))) != (unit, number):
                refuse_duplicate(source, row["id"], unit, number, first, dropped)
                continue
            new = {"id": row["title"], "split": row["split"], "chunks": {}, "queries": [], "golds": []}
            document = documents.setdefault(row["title"], new)
            document["golds"].append(document["chunks"].setdefault(row["chunk"], len(document["chunks"])))
            document["queries"].append(row["query"])
    for document in documents.values():
        yield document | {"chunks": list(document["chunks"])}


def gather_joined(source: Source, units: Sequence[Unit], dropped: Counter[str]) -> Documents:
    """Chunks by the document and position that their ids name, equal ones once; queries by the chunk that
    they name. Documents that no query asks for are left out and counted.

    Raises: ValueError as `reading.read`, and for two chunks of one id or a query of a missing chunk.
    """
    chunks: dict[str, dict[int, str]] = {}
    splits: dict[str, str] = {}
    asked: dict[str, list[tuple[str, int]]] = {}
    for unit in units:
        for number, row in numbered(source, unit, dropped):
            name, position = document_of(row["query_chunk_id" if unit.queries else "chunk_id"])
            there = position in chunks.get(name, ())
            if unit.queries and there:
                asked.setdefault(name, []).append((row["query"], position))
            elif unit.queries:
                bad = BadRow("query of a missing chunk", f"there is no chunk {row['query_chunk_id']!r}")
                refuse(source, unit.file, number, bad, dropped)
            elif there:
                bad = BadRow("duplicate id", f"there is a chunk {row['chunk_id']!r} already")
                refuse(source, unit.file, number, bad, dropped)
            else:
                chunks.setdefault(name, {})[position] = row["chunk"]
                splits.setdefault(name, row["split"])
    for name, parts in chunks.items():
        if name not in asked:
            dropped["document without a query"] += 1
            continue
        distinct: dict[str, int] = {}
        index = {at: distinct.setdefault(text, len(distinct)) for at, text in sorted(parts.items())}
        yield {
            "id": name,
            "split": splits[name],
            "chunks": list(distinct),
            "queries": [query for query, _ in asked[name]],
            "golds": [index[position] for _, position in asked[name]],
        }


def refuse_duplicate(
    source: Source, name: str, unit: Unit, number: int, first: tuple[Unit, int], dropped: Counter[str]
) -> None:
    """Refuses or counts row `number` of `unit`, whose id the row `first` has too.

    Raises: ValueError that names both rows.
    """
    # To find a line is to read what is before it, which is too much for every row that is only counted.
    where = f"{first[0].file}, {place(first[0].file, first[1])[0]}" if source.bad_rows == "stop" else ""
    bad = BadRow("duplicate id", f"the row at {where} has the id {name!r} too; an id names one row")
    refuse(source, unit.file, number, bad, dropped)
