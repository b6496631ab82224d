"""Corpora by kind of source: `open_corpus` reads what a preset asks for once, then keeps it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock
from tqdm.auto import tqdm

from unmask.data import (
    cldr,
    corpus,
    environment,
    files,
    installed,
    reading,
    registry,
    tables,
)
from unmask.data.corpus import SCHEMAS, Corpus
from unmask.data.registry import Source, load_registry, own_files
from unmask.store import artifacts_root, write_atomic

if TYPE_CHECKING:
    from unmask.config import DataConfig

ENVIRONMENT = "environment"
_CODE = tuple(module.__file__ for module in (corpus, files, reading, registry, tables))


def open_corpus(config: DataConfig) -> Corpus:
    """The corpus that the preset's `data` section asks for, built on first use, then kept.

    Args:
        config: `source` is "environment" or a registry of sources (`registry.load_registry`); the other keys
            are the environment's.
    Returns: the corpus; its hash is the same wherever the same packages and files are.
    Raises: ValueError for an unknown source, an unknown held-out package, bad rows or an empty corpus; the
        message says where and what to do.
    """
    corpus = _open_environment(config) if config.source == ENVIRONMENT else _open_registry(config)
    return replace(corpus, families=config.families)


def identity(config: DataConfig) -> str:
    """What decides the corpus: packages and their versions, or the registry and its files (by name, size and
    date). Reads none of them, so it is cheap enough to ask before every run.
    """
    if config.source == ENVIRONMENT:
        return _environment(config).name
    present, absent = _present(load_registry(config.source))
    return _identity(_folders(present, config), absent)


def _open_environment(config: DataConfig) -> Corpus:
    path = _environment(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may want the corpus at once: the first builds it, the others wait and read it.
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            languages = cldr.SLICE_LANGUAGES if config.max_packages else cldr.LANGUAGES
            installed.build(config, environment.installed_packages(), path, languages)
    return Corpus(path)


def _environment(config: DataConfig) -> Path:
    key = _key([installed.parameters(config), environment.installed_versions()], installed.CODE)
    return artifacts_root() / "data" / f"{ENVIRONMENT}-{key}"


def _open_registry(config: DataConfig) -> Corpus:
    """A corpus that refers to its sources' own folders, so that a changed source is read anew alone."""
    present, absent = _present(load_registry(config.source))
    folders = _folders(present, config)
    path = artifacts_root() / "data" / f"{Path(config.source).stem}-{_identity(folders, absent)}"
    if (path / "card.json").is_file():
        return Corpus(path)
    (artifacts_root() / "data" / "sources").mkdir(parents=True, exist_ok=True)
    cards: dict[str, dict[str, Any]] = {}
    for source in tqdm(present, desc="reading sources", unit="source", leave=False):
        cards[source.name] = _collected(source, config, folders[source.name])
    card = _compose(present, folders, cards, path, config)
    write_atomic(path / "card.json", json.dumps(card | {"absent": absent}, indent=1, ensure_ascii=False))
    return Corpus(path)


def _present(sources: Sequence[Source]) -> tuple[list[Source], list[str]]:
    """The sources to read, and the names of optional ones whose files are not there (yet)."""
    present, absent = [], []
    for source in sources:
        if source.optional and not own_files(source):
            absent.append(source.name)
        else:
            present.append(source)
    return present, absent


def _folders(sources: Sequence[Source], config: DataConfig) -> dict[str, Path]:
    return {source.name: _folder(source, config) for source in sources}


def _identity(folders: dict[str, Path], absent: Sequence[str]) -> str:
    return _key([[folder.name for folder in folders.values()], absent], [__file__])


def _folder(source: Source, config: DataConfig) -> Path:
    """Where the tables of a source are kept, by everything that decides their content."""
    if source.kind == ENVIRONMENT:
        return _environment(config)
    name = re.sub(r"[^\w.-]+", "-", source.name)
    key = _key([tables.identity(source)], _CODE)
    return artifacts_root() / "data" / "sources" / f"{name}-{key}"


def _collected(source: Source, config: DataConfig, folder: Path) -> dict[str, Any]:
    if source.kind == ENVIRONMENT:
        return _open_environment(config).card
    with FileLock(folder.with_suffix(".lock")):
        if (folder / "card.json").is_file():
            return json.loads((folder / "card.json").read_text(encoding="utf8"))
        return tables.collect(source, folder)


def _compose(
    sources: Sequence[Source],
    folders: dict[str, Path],
    cards: dict[str, dict[str, Any]],
    path: Path,
    config: DataConfig,
) -> dict[str, Any]:
    sizes: dict[str, Any] = {kind: {} for kind in SCHEMAS}
    paths: dict[str, Any] = {kind: {} for kind in SCHEMAS}
    text, origins, dropped = [], [], {}
    for source in sources:
        kind, card, folder = tables.KIND[source.role], cards[source.name], folders[source.name]
        relative = os.path.relpath(folder, path)
        if source.kind == ENVIRONMENT:
            sizes[kind] |= card["sizes"][kind]
            paths[kind] |= {name: f"{relative}/{part}" for name, part in card["folders"][kind].items()}
            if kind == "texts":
                files = {"files": [f"{relative}/{file}" for file in card["text_sources"][0]["files"]]}
                text.append(card["text_sources"][0] | files | {"name": source.name, "share": source.share})
        else:
            sizes[kind][source.name], paths[kind][source.name] = card["sizes"], relative
            if kind == "texts":
                text.append(asdict(source))
        origins.append({"name": source.name, "licence": source.licence, "split": "all"})
        dropped[source.name] = card["dropped"] if source.kind != ENVIRONMENT else {}
    if not text or not (sizes["pairs"] or sizes["triplets"]):
        raise ValueError(
            f"{config.source} has no source of {'text' if not text else 'pairs'}, which every run needs; "
            "`kind: environment` gives the installed packages'"
        )
    return {
        "hash": _key([cards[source.name]["hash"] for source in sources] + text, []),
        "sizes": sizes,
        "folders": paths,
        "text_sources": text,
        "languages": sorted({source.language for source in sources}),
        "origins": origins,
        "dropped": dropped,
    }


def _key(parts: Sequence[Any], code: Sequence[str]) -> str:
    digest = sha256(json.dumps(parts, sort_keys=True, default=str).encode())
    for file in code:
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()[:16]
