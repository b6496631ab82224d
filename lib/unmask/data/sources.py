"""Corpora by kind of source: `open_corpus` reads what a preset asks for once, then keeps it."""

import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from textwrap import shorten
from typing import Any

from joblib import Parallel, cpu_count, delayed
from tqdm.auto import tqdm

from unmask.children import dying_together
from unmask.config import DataConfig
from unmask.data import cldr, corpus, environment, registry, spelling
from unmask.data import rows as source_rows
from unmask.data.batches import shuffled
from unmask.data.corpus import SCHEMAS, SPLITS, Corpus, Rows, write_tables
from unmask.data.registry import Source, halves, load_registry, own_files
from unmask.data.rows import content_hash, data_files, document_of, read, units
from unmask.data.spelling import canonical, row_texts
from unmask.store import (
    artifacts_root,
    code_fingerprint,
    fingerprint,
    locked,
    new_directory,
    preparing,
    read_json,
    sha256,
    write_json,
)

_ENVIRONMENT = Source("environment", "environment", "text", "mul", "")
KIND = {"text": "texts", "pairs": "pairs", "triplets": "triplets", "documents": "documents"}
SAMPLE_BYTES = 16_000_000  # of a text source, whose rest only the preparation of tokens reads
# What decides the rows of a source, beside its files.
_CODE = [__file__, *(module.__file__ for module in (corpus, registry, source_rows, spelling))]


def open_corpus(config: DataConfig) -> Corpus:
    """The corpus that the preset's `data` section asks for, built on first use, then kept.

    Args:
        config: `source` is "environment" or a registry of sources (`registry.load_registry`); `families`
            counts for both; the other keys are the environment's.
    Returns: the corpus; its hash is the same wherever the same packages and files are.
    Raises: ValueError for an unknown source, an unknown held-out package, bad rows or an empty corpus; the
        message says where and what to do.
    """
    if config.source == "environment":
        return replace(_open(_ENVIRONMENT, config), families=config.families)
    path, sources = _registry(config)
    if not (path / "card.json").is_file():
        write_json(path / "card.json", _compose(path, sources, config))
    return Corpus(path, config.families)


def identity(config: DataConfig) -> str:
    """What decides the corpus: packages and their versions, or the registry and its files (by name, size and
    date). Reads none of them, so it is cheap enough to ask before every run.
    """
    return (_folder(_ENVIRONMENT, config) if config.source == "environment" else _registry(config)[0]).name


def departures(config: DataConfig) -> str:
    """How the installed packages differ from those that the corpus is to be read from, in one line with the
    remedy; empty if they do not, or if it is not read from them."""
    every = [_ENVIRONMENT] if config.source == "environment" else load_registry(config.source)
    own = any(one.kind == "environment" for one in every) and not os.environ.get("UNMASK_CORPUS")
    found = environment.departures() if own else ""
    few = shorten(found, 600, placeholder=" … (the rest: its card.json)")
    remedy = "`make install` gets what is listed, UNMASK_CORPUS=DIR reads the corpus of another machine"
    return f"another corpus than the committed runs', because of {few}; {remedy}" if found else ""


def own_texts(config: DataConfig, rows: int = 200) -> dict[str, list[str]]:
    """What one's own pairs and documents hold, some of it: name of the source → queries and texts."""
    if config.source == "environment":
        return {}
    files = [one for one in load_registry(config.source) if one.kind == "files" and own_files(one)]
    texts = {}
    for source in (one for one in files if one.role != "text"):
        table = getattr(_open(source, config), KIND[source.role])("train")
        some = table.select(range(0, len(table), -(-len(table) // rows) or 1))
        texts[source.name] = list(chain.from_iterable(map(row_texts, some)))
    return texts


def collect(source: Source, folder: Path) -> None:
    """Reads a source into a corpus of its own; the folder appears when it is whole.

    Documents in the flat and joined layouts are gathered in memory, all else is streamed. Of a text source
    only a sample is kept: SAMPLE_BYTES of training text, and the held-out text met on the way.

    Args:
        source: of kind hub, mirror or files.
        folder: to create, by one caller at a time.
    Raises: ValueError for bad rows (`rows.read`), or if no row is left.
    """
    dropped: Counter[str] = Counter()
    kind, rows = KIND[source.role], _kept(source, dropped)
    if source.queries_config:
        rows = _joined(rows, dropped)
    if source.queries_config or "title" in source.columns:
        rows = _gathered(rows, dropped)
    rows = tqdm(rows, f"reading {source.name}", source.rows, delay=2, leave=False)
    with new_directory(folder) as unfinished:
        card = write_tables(unfinished, [(kind, source.name, (_stored(source, row) for row in rows))])
        if not any(size["rows"] for size in card["sizes"][kind][source.name].values()):
            reasons = ", ".join(f"{reason}: {count:,}" for reason, count in dropped.most_common())
            raise ValueError(f"Source {source.name} has no usable row ({reasons or 'its files hold none'})")
        # Text may be a sample, so the names and sizes of the files count too.
        listed = [(Path(file.path).name, file.size) for file in data_files(source)]
        table = unfinished / card["folders"][kind][source.name]
        card["hash"] = fingerprint(listed, [sha256(table / f"{split}.arrow") for split in SPLITS])
        card["dropped"] = {source.name: dict(dropped.most_common())}
        write_json(unfinished / "card.json", card)


# --- a corpus and its sources, each in its folder


def _open(source: Source, config: DataConfig) -> Corpus:
    """The tables of a source. Several processes may want them at once: the first reads, the others wait."""
    path = _folder(source, config)
    if path.exists():  # whole; its place may allow no lock
        return Corpus(path)
    preparing(f"corpus {path.name}")
    with locked(path.with_name(f"{path.name}.lock")):
        if not path.exists() and source.kind == "environment":
            languages = cldr.SLICE_LANGUAGES if config.max_packages else cldr.LANGUAGES
            environment.build(config, environment.installed_packages(), path, languages)
        elif not path.exists():
            collect(source, path)
    return Corpus(path)


def _folder(source: Source, config: DataConfig) -> Path:
    """Where the tables of a source are kept, by everything that decides their content."""
    if source.kind == "environment":
        if elsewhere := os.environ.get("UNMASK_CORPUS"):
            return _made_elsewhere(Path(elsewhere), config)
        what = environment.parameters(config), environment.installed_versions()
        key = fingerprint(*what, code_fingerprint(*environment.CODE))
        return artifacts_root() / "data" / f"environment-{key}"
    name = re.sub(r"[^\w.-]+", "-", source.name)
    key = fingerprint(content_hash(source), code_fingerprint(*_CODE))
    return artifacts_root() / "data" / "sources" / f"{name}-{key}"


def _made_elsewhere(path: Path, config: DataConfig) -> Path:
    """The environment's corpus of another machine, whose packages may be others.

    Raises: ValueError if there is none, or the preset asks for another one.
    """
    made, asked = read_json(path / "card.json").get("parameters"), environment.parameters(config)
    # The name identifies the rows, also for data made from them.
    if not path.name.startswith("environment-") or fingerprint(made) != fingerprint(asked):
        raise ValueError(f"UNMASK_CORPUS={path} is no environment-… corpus of {asked}: name another, or none")
    return path


def _registry(config: DataConfig) -> tuple[Path, list[Source]]:
    """Where a registry's corpus is kept, and its sources without those whose files are not there (yet)."""
    every = load_registry(config.source)
    sources = [one for one in every if not one.optional or one.kind != "files" or own_files(one)]
    own = [one for one in sources if one.kind == "files" and one.group]
    if lost := [one.name for one in own if config.families and one.group not in config.families]:
        raise ValueError(f"data.families leaves out {', '.join(lost)}: --set data.families=[] reads all")
    told = [(_folder(s, config).name, s.name, s.role, s.language, s.licence, s.share) for s in sources]
    key = fingerprint(told, code_fingerprint(__file__))
    return artifacts_root() / "data" / f"{Path(config.source).stem}-{key}", sources


def _compose(path: Path, sources: Sequence[Source], config: DataConfig) -> dict[str, Any]:
    """The card of a corpus that refers to its sources' own folders, so that only changed sources are read
    again. Of the installed packages it has only rows of its source's role."""
    sizes, folders = ({kind: {} for kind in SCHEMAS} for _ in range(2))
    text, named, dropped = [], [], {}
    jobs = min(cpu_count(), len(sources) // 8 + 1)  # for few, a process takes longer to start than it saves
    bar = tqdm(sources, "reading sources", leave=False, unit="source")
    opened = Parallel(jobs, **dying_together())(delayed(_open)(one, config) for one in bar)
    for source, held in zip(sources, opened):
        kind, relative, card = KIND[source.role], os.path.relpath(held.path, path), held.card
        if twice := card["sizes"][kind].keys() & {name for known in sizes.values() for name in known}:
            raise ValueError(f"{config.source}: two sources give a data set {', '.join(twice)}; rename yours")
        sizes[kind] |= card["sizes"][kind]
        folders[kind] |= {name: os.path.join(relative, one) for name, one in card["folders"][kind].items()}
        named.append((source.name, source.share, card["hash"]))
        dropped |= card["dropped"]
        if kind == "texts":
            its = card["text_sources"][0] if source.kind == "environment" else asdict(source)
            own = [os.path.join(relative, file) for file in its["files"]]
            told = {"name": source.name, "share": source.share, "files": own, "known_as": held.path.name}
            text.append(its | told)
    if not text or not sizes["pairs"]:
        lacking = f"{config.source} has no source of {'pairs' if text else 'text'}, which every run needs"
        raise ValueError(f"{lacking}; `kind: environment` gives the installed packages'")
    return {
        "hash": fingerprint(named),
        "sizes": sizes,
        "folders": folders,
        "text_sources": text,
        "languages": sorted({source.language for source in sources}),
        "origins": [{"name": one.name, "licence": one.licence, "split": "all"} for one in sources],
        "dropped": dropped,
    }


# --- rows on their way from the files of a source to its tables


def _kept(source: Source, dropped: Counter[str]) -> Rows:
    """The good rows of a source up to what its table holds: SAMPLE_BYTES of training text, `max_rows` of all
    else for training. Where `max_rows` is set, pieces come in a random order: what comes first in a file may
    be alike."""
    left = SAMPLE_BYTES if source.role == "text" else source.max_rows or math.inf
    pieces = [(half, unit) for half in halves(source) for unit in units(half)]
    pieces = shuffled(pieces) if source.max_rows else pieces
    for row in chain.from_iterable(read(half, unit, dropped) for half, unit in pieces):
        if row["split"] == "train":
            if left <= 0:
                return
            left -= len(row["text"].encode()) if source.role == "text" else 1
        yield row


def _joined(rows: Rows, dropped: Counter[str]) -> Rows:
    """Chunks, placed by the document and position that their ids name, and queries with the chunk that they
    name: rows as in the flat layout, of which some have no query."""
    chunks: dict[str, dict[str, Any]] = {}
    asked = []
    for row in rows:
        if "query" in row:
            asked.append(row)
        else:
            title, position = document_of(row["chunk_id"])
            chunks.setdefault(row["chunk_id"], row | {"title": title, "position": position})
    yield from sorted(chunks.values(), key=lambda row: row["position"])
    for row in asked:
        if row["query_chunk_id"] in chunks:
            yield chunks[row["query_chunk_id"]] | {"query": row["query"]}
        else:
            dropped["query of a missing chunk"] += 1


def _gathered(rows: Rows, dropped: Counter[str]) -> Rows:
    """Rows of one title are a document: chunks in order of appearance, equal ones once. The split is that of
    its first row. Documents that no query asks for are left out and counted."""
    documents: dict[str, dict[str, Any]] = {}
    for row in rows:
        new = {"id": row["title"], "split": row["split"], "chunks": {}, "queries": [], "golds": []}
        new |= {"key": row["key"]} if "key" in row else {}
        document = documents.setdefault(canonical(row["title"]), new)
        place = document["chunks"].setdefault(row["chunk"], len(document["chunks"]))
        if "query" in row:
            document["queries"].append(row["query"])
            document["golds"].append(place)
    for document in documents.values():
        if document["queries"]:
            yield document | {"chunks": list(document["chunks"])}
        else:
            dropped["document without a query"] += 1


def _stored(source: Source, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with all columns of its table, and some more."""
    told = {"dataset": source.name, "task": source.task or source.name, "group": source.group, "kind": "text"}
    told |= {"language": source.language, "package": source.repo or source.name}
    thing = row.get("key", row.get("chunks"))
    if thing is not None:
        told["key"] = fingerprint(thing)
    if "chunks" in row:
        told["document_id"] = f"{source.name}/{row.get('id') or told['key']}"
    return {**row, **told}
