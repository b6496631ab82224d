"""Corpora: `open_corpus` reads the registry that a preset names once, then keeps what it has read."""

import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from itertools import chain
from pathlib import Path
from textwrap import shorten
from typing import Any

from joblib import Parallel, cpu_count, delayed
from tqdm.auto import tqdm

from unmask.children import bound, dying_together
from unmask.config import DataConfig
from unmask.data import corpus, reading, registry, spelling
from unmask.data.batches import shuffled
from unmask.data.corpus import SCHEMAS, SPLITS, Corpus, Rows, write_tables
from unmask.data.reading import document_of, read, units
from unmask.data.registry import CODE, Source, halves, load_registry, own_files
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
    visible,
    write_json,
)

KIND = {"text": "texts", "pairs": "pairs", "triplets": "triplets", "documents": "documents"}
SAMPLE_BYTES = 16_000_000  # of a text source, whose rest only the preparation of tokens reads
SETTINGS = ("seed", "dev_packages", "test_packages", "max_packages", "max_text_mb")  # of a registry's script
# What decides the rows of a source, beside its files.
_CODE = [__file__, *(module.__file__ for module in (corpus, reading, registry, spelling))]


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
        made = [make(script, config) for script in _scripts(sources)]
        write_json(path / "card.json", _compose(path, sources, made, config))
    return Corpus(path, config.families)


def identity(config: DataConfig) -> str:
    """What decides the corpus: the registry and its files (by name, size and date), and what its script reads.
    Reads none of them, so it is cheap enough to ask before every run.
    """
    return _registry(config)[0].name


def departures(config: DataConfig) -> str:
    """How what the registry's script reads differs from what it is to read, in one line with the remedy; empty
    if it does not, or if nothing is read."""
    scripts = [] if os.environ.get("UNMASK_CORPUS") else _scripts(load_registry(config.source))
    if not (lines := [line for script in scripts if (line := _describe(script)["departures"])]):
        return ""
    few = shorten("; ".join(lines), 600, placeholder=" … (the rest: its card.json)")
    remedy = "`make install` gets what is listed, UNMASK_CORPUS=DIR reads the corpus of another machine"
    return f"another corpus than the committed runs', because of {few}; {remedy}"


def own_texts(config: DataConfig, rows: int = 200) -> dict[str, list[str]]:
    """What one's own pairs and documents hold, some of it: name of the source → queries and texts."""
    texts = {}
    for source in _sources(config):
        if source.kind == "files" and not source.script and source.role != "text":
            table = getattr(_open(source), KIND[source.role])("train")
            some = table.select(range(0, len(table), -(-len(table) // rows) or 1))
            texts[source.name] = list(chain.from_iterable(map(row_texts, some)))
    return texts


def collect(source: Source, folder: Path) -> None:
    """Reads a source into a corpus of its own; the folder appears when it is whole.

    Documents in the flat and joined layouts are gathered in memory, all else is streamed. Of a text source,
    unless a script made it, only a sample is kept: SAMPLE_BYTES of training text, and the held-out text met on
    the way.

    Args:
        source: of any kind, with the paths of its files.
        folder: to create, by one caller at a time.
    Raises: ValueError for bad rows (`reading.read`), or if no row is left.
    """
    dropped: Counter[str] = Counter()
    languages: set[str] = set()
    kind, rows = KIND[source.role], _drawn(source, dropped)
    if source.queries_config:
        rows = _joined(rows, dropped)
    if source.queries_config or "title" in source.columns:
        rows = _gathered(rows, dropped)
    rows = tqdm(rows, f"reading {source.name}", source.rows, delay=2, leave=False)
    with new_directory(folder) as unfinished:
        labelled = (_labelled(source, row, languages) for row in rows)
        card = write_tables(unfinished, [(kind, source.name, labelled)])
        if not any(size["rows"] for size in card["sizes"][kind][source.name].values()):
            reasons = ", ".join(f"{reason}: {count:,}" for reason, count in dropped.most_common())
            raise ValueError(f"Source {source.name} has no usable row ({reasons or 'its files hold none'})")
        # Text may be a sample, so the names and sizes of the files count too.
        listed = [(Path(file.path).name, file.size) for file in reading.data_files(source)]
        table = unfinished / card["folders"][kind][source.name]
        card["hash"] = fingerprint(listed, [sha256(table / f"{split}.arrow") for split in SPLITS])
        card["dropped"] = {source.name: dict(dropped.most_common())}
        write_json(unfinished / "card.json", card | {"languages": sorted(languages)})


# --- files that a registry's script makes


def make(script: str, config: DataConfig) -> Path:
    """The folder of the files that a script makes, made now if they are not there. It appears when it is whole;
    of several processes one makes it, the others wait.

    Args:
        script: is called with no argument and prints as JSON "inputs", which decide what it makes, and
            "departures" of them in one line, if there are any; then with the folder to fill, also with a
            card.json ("settings", "origins", "dropped"), and SETTINGS as JSON. What it prints before it ends
            with another status than 0 is the error.
    """
    folder = _place(script, config)
    if not folder.exists():
        preparing(f"corpus {folder.name}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f"{folder.name}.lock")):
            if not folder.exists():
                with new_directory(folder) as unfinished:
                    unfinished.mkdir()
                    _run(script, str(unfinished), json.dumps(_settings(config)))
    return folder


def _place(script: str, config: DataConfig) -> Path:
    """Where the files of a script are, by everything that decides their content, or those of another machine,
    whose packages may be others.

    Raises: ValueError if there are none, or the preset asks for others.
    """
    settings = _settings(config)
    if elsewhere := os.environ.get("UNMASK_CORPUS"):
        if read_json(Path(elsewhere, "card.json")).get("settings") != settings:
            raise ValueError(f"UNMASK_CORPUS={elsewhere} is no corpus of {settings}: name another, or none")
        return Path(elsewhere)
    folder = Path(script).parent
    key = fingerprint(settings, _describe(script)["inputs"], code_fingerprint(*visible(folder)))
    return artifacts_root() / "data" / "made" / f"{folder.name}-{key}"


def _settings(config: DataConfig) -> dict[str, Any]:
    return json.loads(json.dumps({key: getattr(config, key) for key in SETTINGS}))  # tuples are lists there


@cache
def _describe(script: str) -> dict[str, Any]:
    """What a script says of its inputs: asked once, so that a process reads one state of them."""
    return json.loads(_run(script))


def _run(script: str, *arguments: str) -> str:
    command = bound([sys.executable, script, *arguments])
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)  # its progress is seen
    if done.returncode:
        raise ValueError(done.stdout.strip() or f"{script} ended with status {done.returncode}, see above")
    return done.stdout


# --- a corpus and its sources, each in its folder


def _scripts(sources: Iterable[Source]) -> list[str]:
    return sorted({source.script for source in sources} - {""})


def _sources(config: DataConfig) -> Iterator[Source]:
    """The sources of a registry without those whose files are not there (yet)."""
    for source in load_registry(config.source):
        if source.script:
            folder = _place(source.script, config)
            files = tuple(str(folder / file) for file in source.files)
            yield replace(source, files=files, known_as=folder.name)
        elif source.kind != "files" or not source.optional or own_files(source):
            yield source


def _registry(config: DataConfig) -> tuple[Path, list[Source]]:
    """Where a registry's corpus is kept, and its sources."""
    sources = list(_sources(config))
    mine = [one for one in sources if one.kind == "files" and one.group and not one.script]
    if lost := [one.name for one in mine if config.families and one.group not in config.families]:
        raise ValueError(f"data.families leaves out {', '.join(lost)}: --set data.families=[] reads all")
    about = [(_folder(s).name, s.name, s.role, s.language, s.licence, s.share) for s in sources]
    key = fingerprint(about, code_fingerprint(__file__))
    return artifacts_root() / "data" / f"{Path(config.source).stem}-{key}", sources


def _folder(source: Source) -> Path:
    """Where the tables of a source are kept, by everything that decides their content."""
    name = re.sub(r"[^\w.-]+", "-", source.name)
    key = fingerprint(reading.identity(source), code_fingerprint(*_CODE))
    return artifacts_root() / "data" / "sources" / f"{name}-{key}"


def _open(source: Source) -> Corpus:
    """The tables of a source. Several processes may want them at once: the first reads, the others wait."""
    path = _folder(source)
    if not path.exists():  # else it is whole, and its place may allow no lock
        preparing(f"corpus {path.name}")
        with locked(path.with_name(f"{path.name}.lock")):
            if not path.exists():
                collect(source, path)
    return Corpus(path)


def _compose(path: Path, sources: Sequence[Source], made: Sequence[Path], config: DataConfig) -> dict[str, Any]:
    """The card of a corpus that refers to its sources' own folders, so that only changed sources are read
    again."""
    sizes, folders = ({kind: {} for kind in SCHEMAS} for _ in range(2))
    jobs = min(cpu_count(), len(sources) // 8 + 1)  # for few, a process takes longer to start than it saves
    bar = tqdm(sources, "reading sources", leave=False, unit="source")
    tables = Parallel(jobs, **dying_together())(map(delayed(_open), bar))
    text, cards = [], [table.card for table in tables]
    for source, table, card in zip(sources, tables, cards):
        kind, relative = KIND[source.role], os.path.relpath(table.path, path)
        sizes[kind] |= card["sizes"][kind]
        folders[kind][source.name] = place = os.path.join(relative, card["folders"][kind][source.name])
        if kind == "texts":
            # A script's text is whole in its table; of other text there may be more in its files.
            whole = {"files": [os.path.join(place, "train.arrow")], "columns": {"text": "text"}}
            text.append(asdict(source) | (whole if source.script else {}) | {"known_as": table.path.name})
    if not text or not sizes["pairs"]:
        lacking = f"{config.source} has no source of {'pairs' if text else 'text'}, which every run needs"
        raise ValueError(f"{lacking}; `include: {{environment: [text]}}` gives the installed packages'")
    cards += [read_json(folder / "card.json") for folder in made]
    origins = [{"name": s.name, "licence": s.licence, "split": "all"} for s in sources if not s.script]
    return {
        "hash": fingerprint([(source.name, source.share, card["hash"]) for source, card in zip(sources, cards)]),
        "sizes": sizes,
        "folders": folders,
        "text_sources": text,
        "languages": sorted({one for card in cards for one in card.get("languages", ())}),
        "origins": origins + [one for card in cards for one in card.get("origins", ())],
        "dropped": {name: reasons for card in cards for name, reasons in card["dropped"].items()},
    }


# --- rows on their way from the files of a source to its tables


def _drawn(source: Source, dropped: Counter[str]) -> Rows:
    """The good rows of a source up to what its table holds: SAMPLE_BYTES of training text, `max_rows` of all
    else for training. Where `max_rows` is set, pieces come in a random order: what comes first in a file may
    be alike."""
    sampled = source.role == "text" and not source.script
    left = SAMPLE_BYTES if sampled else source.max_rows or math.inf
    pieces = [(half, unit) for half in halves(source) for unit in units(half)]
    pieces = shuffled(pieces) if source.max_rows else pieces
    for row in chain.from_iterable(read(half, unit, dropped) for half, unit in pieces):
        if row["split"] == "train":
            if left <= 0:
                return
            left -= len(row["text"].encode()) if sampled else 1
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


def _labelled(source: Source, row: Mapping[str, Any], languages: set[str]) -> dict[str, Any]:
    """A row with all columns of its table, and some more; its languages are added to those met before. One that
    comes with its split comes with its other labels, too."""
    key = fingerprint(row.get("key", row.get("chunks")))
    labels = {"dataset": source.name, "task": source.task or source.name, "group": source.group, "key": key}
    labels |= {"language": source.language, "package": source.repo or source.name, "kind": "text"}
    labels |= {"document_id": f"{source.name}/{row.get('id') or key}"}
    row = {**labels, **row} if "split" in source.columns else {**row, **labels}
    languages.update({*row["language"].split("-")} - {"mul", *CODE.split("|")})
    return row
