"""Corpora by kind of source: `open_corpus` reads what a preset asks for once, then keeps it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from filelock import FileLock
from tqdm.auto import tqdm

from unmask.config import DataConfig
from unmask.data import (
    cldr,
    corpus,
    environment,
    files,
    reading,
    registry,
    tables,
)
from unmask.data.corpus import SCHEMAS, Corpus
from unmask.data.registry import Source, load_registry, own_files
from unmask.store import artifacts_root, code_fingerprint, fingerprint, write_atomic

ENVIRONMENT = "environment"
_READERS = (corpus, files, reading, registry, tables)
_CODE = [module.__file__ for module in _READERS]  # what decides the rows of a source, beside its files


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
    return (_environment(config) if config.source == ENVIRONMENT else _corpus(config)[0]).name


def _open_environment(config: DataConfig) -> Corpus:
    path = _environment(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may want the corpus at once: the first builds it, the others wait and read it.
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            languages = cldr.SLICE_LANGUAGES if config.max_packages else cldr.LANGUAGES
            environment.build(config, environment.installed_packages(), path, languages)
    return Corpus(path)


def _environment(config: DataConfig) -> Path:
    code = code_fingerprint(*environment.CODE)
    key = fingerprint(environment.parameters(config), environment.installed_versions(), code)
    return artifacts_root() / "data" / f"{ENVIRONMENT}-{key}"


def _open_registry(config: DataConfig) -> Corpus:
    """A corpus that refers to its sources' own folders, so that a changed source is read anew alone."""
    path, folders, absent = _corpus(config)
    if not (path / "card.json").is_file():
        cards = {}
        for name, (source, folder) in tqdm(folders.items(), "reading sources", leave=False, unit="source"):
            cards[name] = _collected(source, config, folder)
        card = _compose(folders, cards, path, config) | {"absent": absent}
        write_atomic(path / "card.json", json.dumps(card, indent=1, ensure_ascii=False))
    return Corpus(path)


def _corpus(config: DataConfig) -> tuple[Path, dict[str, tuple[Source, Path]], list[str]]:
    """Where a registry's corpus is kept, and each of its sources, by name; the names of optional ones whose
    files are not there (yet)."""
    sources = load_registry(config.source)
    absent = [source.name for source in sources if source.optional and not own_files(source)]
    folders = {one.name: (one, _folder(one, config)) for one in sources if one.name not in absent}
    key = fingerprint([folder.name for _, folder in folders.values()], absent, code_fingerprint(__file__))
    return artifacts_root() / "data" / f"{Path(config.source).stem}-{key}", folders, absent


def _folder(source: Source, config: DataConfig) -> Path:
    """Where the tables of a source are kept, by everything that decides their content."""
    if source.kind == ENVIRONMENT:
        return _environment(config)
    name = re.sub(r"[^\w.-]+", "-", source.name)
    key = fingerprint(tables.identity(source), code_fingerprint(*_CODE))
    return artifacts_root() / "data" / "sources" / f"{name}-{key}"


def _collected(source: Source, config: DataConfig, folder: Path) -> dict[str, Any]:
    if source.kind == ENVIRONMENT:
        return _open_environment(config).card
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if (folder / "card.json").is_file():
            return json.loads((folder / "card.json").read_text(encoding="utf8"))
        return tables.collect(source, folder)


def _compose(
    folders: Mapping[str, tuple[Source, Path]],
    cards: Mapping[str, dict[str, Any]],
    path: Path,
    config: DataConfig,
) -> dict[str, Any]:
    sizes: dict[str, Any] = {kind: {} for kind in SCHEMAS}
    paths: dict[str, Any] = {kind: {} for kind in SCHEMAS}
    text = []
    for name, (source, folder) in folders.items():
        kind, card, relative = tables.KIND[source.role], cards[name], os.path.relpath(folder, path)
        if source.kind == ENVIRONMENT:
            sizes[kind] |= card["sizes"][kind]
            paths[kind] |= {part: f"{relative}/{one}" for part, one in card["folders"][kind].items()}
            its = card["text_sources"][0]
            own = its | {"files": [f"{relative}/{file}" for file in its["files"]]}
            own |= {"name": name, "share": source.share}
        else:
            sizes[kind][name], paths[kind][name], own = card["sizes"], relative, asdict(source)
        text += [own] if kind == "texts" else []
    if not text or not (sizes["pairs"] or sizes["triplets"]):
        raise ValueError(
            f"{config.source} has no source of {'text' if not text else 'pairs'}, which every run needs; "
            "`kind: environment` gives the installed packages'"
        )
    sources = [source for source, _ in folders.values()]
    return {
        "hash": fingerprint(*(cards[source.name]["hash"] for source in sources), *text),
        "sizes": sizes,
        "folders": paths,
        "text_sources": text,
        "languages": sorted({source.language for source in sources}),
        "origins": [{"name": one.name, "licence": one.licence, "split": "all"} for one in sources],
        "dropped": {
            one.name: cards[one.name]["dropped"] if one.kind != ENVIRONMENT else {} for one in sources
        },
    }
