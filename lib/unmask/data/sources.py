"""Corpora: `open_corpus` reads the registry that a preset names once, then keeps what it has read."""

import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import cache, partial
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from joblib import Parallel, cpu_count, delayed
from tqdm.auto import tqdm

from unmask import store
from unmask.children import bound, die_with
from unmask.config import DataConfig
from unmask.data import corpus, registry, spelling
from unmask.data import rows as source_rows
from unmask.data.batches import shuffled
from unmask.data.corpus import SCHEMAS, Corpus, Rows, read_table, write_table
from unmask.data.registry import SPLITS, Source, load_registry

KIND = {"text": "texts", "pairs": "pairs", "triplets": "triplets", "documents": "documents"}
SAMPLE_BYTES = 16_000_000  # of a text source, whose rest only the preparation of tokens reads
SETTINGS = ("seed", "dev_packages", "test_packages", "max_packages", "max_text_mb")  # of a registry's script
# What decides the rows of a source, beside its files.
_MODULES = corpus, registry, source_rows, spelling
_CODE = store.code_fingerprint(__file__, *(module.__file__ for module in _MODULES))


def open_corpus(config: DataConfig) -> Corpus:
    """The corpus that the preset's `data` section asks for, read on first use, then kept.

    Args:
        config: `source` names a registry (`registry.load_registry`); `families` are those that count; the
            other keys are the settings of the registry's script.
    Returns: the corpus; its hash is the same wherever the same packages and files are.
    Raises: ValueError for an unknown registry, settings that a script refuses, bad rows or an empty corpus;
        the message says where and what to do.
    """
    path, sources = _registry(config)
    if not (path / "card.json").is_file():
        made = [make(script, config) for script in sorted({source.script for source in sources} - {""})]
        bar = tqdm(sources, "reading sources", leave=False, delay=2, unit="source", file=sys.stdout)
        jobs = min(cpu_count(), len(sources) // 8 + 1)  # a process takes longer to start than a few save
        tables = Parallel(jobs, initializer=die_with, initargs=(os.getpid(),))(map(delayed(_table), bar))
        store.write_json(path / "card.json", _card(path, sources, tables, made))
    return Corpus(path)


def corpus_key(config: DataConfig) -> str:
    """Names what decides the corpus: the registry and its files (by name, size and date), and what its script
    reads. Reads none of them, so it is cheap enough to ask before every run."""
    return _registry(config)[0].name


def texts_of_files(config: DataConfig, rows: int = 200) -> dict[str, list[str]]:
    """What the user's own pairs and documents hold, some of it: name of the source → queries and texts."""
    texts = {}
    for source in _sources(config):
        if source.kind == "files" and not source.script and source.role != "text":
            some = islice(read_table(_table(source), "train"), rows)
            texts[source.name] = list(chain.from_iterable(map(spelling.row_texts, some)))
    return texts


# --- files that a registry's script makes


def make(script: str, config: DataConfig) -> Path:
    """The folder of the files that a script makes, made now if they are not there.

    Args:
        script: is called with no argument and prints what decides its files; then with the folder to fill,
            also with a card.json ("settings", "origins", "dropped"), and SETTINGS as JSON. What it prints
            before it ends with another status than 0 is the error.
    """
    settings = json.dumps({key: getattr(config, key) for key in SETTINGS})
    return _filled(_place(script, config), lambda folder: _run(script, str(folder), settings))


def _place(script: str, config: DataConfig) -> Path:
    """Where the files of a script are, by everything that decides their content, or those of another machine,
    whose packages may be others.

    Raises: ValueError if there are none, or the preset asks for others.
    """
    settings = {key: getattr(config, key) for key in SETTINGS}
    if elsewhere := os.environ.get("UNMASK_CORPUS"):
        made_with = store.read_json(Path(elsewhere, "card.json")).get("settings")
        if store.fingerprint(made_with) != store.fingerprint(settings):
            raise ValueError(f"UNMASK_CORPUS={elsewhere} is no corpus of {settings}: name another, or none")
        return Path(elsewhere)
    code = store.code_fingerprint(*store.visible(Path(script).parent))
    key = store.fingerprint(settings, _inputs(script), code)
    return store.artifacts_root() / "data" / "made" / f"{Path(script).parent.name}-{key}"


@cache
def _inputs(script: str) -> str:
    """What a script says of its inputs: asked once, so that a process reads one state of them."""
    return _run(script)


def _run(script: str, *arguments: str) -> str:
    command = bound([sys.executable, script, *arguments])
    # Its progress is seen, with that of others.
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=1, text=True)
    if done.returncode:
        raise ValueError(done.stdout.strip() or f"{script} ended with status {done.returncode}, see above")
    return done.stdout


# --- a corpus and its sources, each in its folder


def _sources(config: DataConfig) -> Iterator[Source]:
    """The sources of a registry, of the families that are wanted, without those whose files are not there
    (yet).

    Raises: ValueError if the user's own rows are of another family.
    """
    for source in load_registry(config.source):
        family = "contextual" if source.role == "documents" else source.group
        if config.families and family not in ("", *config.families):
            if source.kind == "files" and source.group and not source.script:
                remedy = "--set data.families=[] reads all"
                raise ValueError(f"data.families leaves out {source.name}: {remedy}")
        elif source.script:
            folder = _place(source.script, config)
            files = tuple(str(folder / file) for file in source.files)
            yield replace(source, files=files, known_as=folder.name)
        elif source.kind != "files" or not source.optional or registry.existing_files(source):
            yield source


def _registry(config: DataConfig) -> tuple[Path, list[Source]]:
    """Where a registry's corpus is kept, and its sources."""
    sources = list(_sources(config))
    for role in {"text", "pairs"} - {source.role for source in sources}:
        remedy = "`include: {environment: [text]}` gives the installed packages'"
        raise ValueError(f"{config.source} has no source of {role}, which every run needs; {remedy}")
    about = [(_folder(s).name, s.name, s.role, s.language, s.licence, s.share) for s in sources]
    key = store.fingerprint(about, _CODE)
    return store.artifacts_root() / "data" / f"{Path(config.source).stem}-{key}", sources


def _folder(source: Source) -> Path:
    """Where the table of a source is kept, by everything that decides its content."""
    name = re.sub(r"[^\w.-]+", "-", source.name)
    key = store.fingerprint(source_rows.content_hash(source), _CODE)
    return store.artifacts_root() / "data" / "sources" / f"{name}-{key}"


def _table(source: Source) -> Path:
    """The folder of a source's table, read now if it is not there."""
    return _filled(_folder(source), partial(collect, source))


def _filled(folder: Path, fill: Callable[[Path], Any]) -> Path:
    """A folder that appears when it is whole. Of several processes one fills it, the others wait."""
    if not folder.exists():  # else its place may allow no lock
        store.preparing(f"corpus {folder.name}")
        with store.locked(folder.with_name(f"{folder.name}.lock")):
            if not folder.exists():
                with store.new_directory(folder) as unfinished:
                    fill(unfinished)
    return folder


def _card(path: Path, sources: list[Source], tables: list[Path], made: list[Path]) -> dict[str, Any]:
    """Describes a corpus that refers to its sources' own tables: only changed sources are read again."""
    cards = [store.read_json(folder / "card.json") for folder in (*tables, *made)]
    places, text = {kind: {} for kind in SCHEMAS}, []
    for source, table in zip(sources, tables):
        places[KIND[source.role]][source.name] = place = os.path.relpath(table, path)
        if source.role == "text":
            text.append(asdict(source) | {"known_as": table.name})
        if source.role == "text" and source.script:  # all of it is in the table
            text[-1] |= {"script": "", "files": [f"{place}/train.arrow"], "columns": {"text": "text"}}
    origins = [{"name": s.name, "licence": s.licence, "split": "all"} for s in sources if not s.script]
    return {
        "hash": store.fingerprint([(s.name, s.share, card["hash"]) for s, card in zip(sources, cards)]),
        "tables": places,
        "text_sources": text,
        "origins": [*origins, *chain.from_iterable(card.get("origins", ()) for card in cards)],
        "dropped": {name: reasons for card in cards for name, reasons in card["dropped"].items()},
    }


# --- rows on their way from the files of a source to its table


def collect(source: Source, folder: Path) -> None:
    """Reads a source into a table, in a new folder.

    Documents in the flat and joined layouts are gathered in memory, all else is streamed. Of a text source,
    unless a script made it, only a sample is kept: SAMPLE_BYTES of training text, and the held-out text met
    on the way.

    Args:
        source: of any kind, with the paths of its files.
    Raises: ValueError for bad rows (`rows.read`), or if no row is left.
    """
    dropped: Counter[str] = Counter()
    rows = _drawn(source, dropped)
    if source.queries_config:
        rows = _joined(rows, dropped)
    if source.queries_config or "title" in source.columns:
        rows = _gathered(rows, dropped)
    bar = tqdm(rows, f"reading {source.name}", source.rows, delay=2, leave=False, file=sys.stdout)
    if not write_table(folder, KIND[source.role], (_labelled(source, row) for row in bar)):
        reasons = ", ".join(f"{reason}: {count:,}" for reason, count in dropped.most_common())
        raise ValueError(f"Source {source.name} has no usable row ({reasons or 'its files hold none'})")
    # Text may be a sample, so the names and sizes of the files count too.
    content = [(Path(file.path).name, file.size) for file in source_rows.data_files(source)]
    content += [store.sha256(folder / f"{split}.arrow") for split in SPLITS]
    card = {"hash": store.fingerprint(content), "dropped": {source.name: dict(dropped.most_common())}}
    store.write_json(folder / "card.json", card)


def _drawn(source: Source, dropped: Counter[str]) -> Rows:
    """The good rows of a source up to what its table holds: SAMPLE_BYTES of training text, `max_rows` of all
    else for training. Where `max_rows` is set, pieces come in a random order: what comes first in a file may
    be alike."""
    sampled = source.role == "text" and not source.script
    left = SAMPLE_BYTES if sampled else source.max_rows or math.inf
    pieces = [(half, unit) for half in registry.halves(source) for unit in source_rows.units(half)]
    pieces = shuffled(pieces) if source.max_rows else pieces
    for row in chain.from_iterable(source_rows.read(half, unit, dropped) for half, unit in pieces):
        if row["split"] == "train":
            if left <= 0:
                return
            left -= len(row["text"].encode()) if sampled else 1
        yield row


def _joined(rows: Rows, dropped: Counter[str]) -> Rows:
    """Chunks, placed by the document and position that their ids name, and queries with the chunk that they
    name: rows as in the flat layout, of which some have no query."""
    chunks: dict[str, dict[str, Any]] = {}
    queries = []
    for row in rows:
        if "query" in row:
            queries.append(row)
        else:
            title, position = source_rows.document_of(row["chunk_id"])
            chunks.setdefault(row["chunk_id"], row | {"title": title, "position": position})
    yield from sorted(chunks.values(), key=itemgetter("position"))
    for row in queries:
        if chunk := chunks.get(row["query_chunk_id"]):
            yield chunk | {"query": row["query"]}
        else:
            dropped["query of a missing chunk"] += 1


def _gathered(rows: Rows, dropped: Counter[str]) -> Rows:
    """Rows of one title are a document: chunks in order of appearance, equal ones once. Split and key are
    those of its first row. Documents that no query asks for are left out and counted."""
    documents: dict[str, dict[str, Any]] = {}
    for row in rows:
        new = row | {"id": row["title"], "chunks": {}, "queries": [], "golds": []}
        document = documents.setdefault(spelling.canonical(row["title"]), new)
        place = document["chunks"].setdefault(row["chunk"], len(document["chunks"]))
        if "query" in row:
            document["queries"].append(row["query"])
            document["golds"].append(place)
    for document in documents.values():
        if document["queries"]:
            yield document | {"chunks": list(document["chunks"])}
        else:
            dropped["document without a query"] += 1


def _labelled(source: Source, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with all columns of its table, and some more. One that comes with its split comes with its other
    labels, too."""
    key = store.fingerprint(row.get("key", row.get("chunks")))
    labels = {"dataset": source.name, "task": source.task or source.name, "group": source.group, "key": key}
    labels |= {"language": source.language, "package": source.repo or source.name, "kind": "text"}
    labels |= {"document_id": f"{source.name}/{row.get('id') or key}"}
    return {**labels, **row} if "split" in source.columns else {**row, **labels}
