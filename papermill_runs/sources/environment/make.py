"""Writes the corpus that needs no download: the documentation and source of installed packages, of those that
environment.txt lists, and CLDR; split, deduplicated, capped.

    python make.py                   says as JSON what decides the content
    python make.py FOLDER SETTINGS   fills a folder: a Parquet file a data set, each row with its split, and
                                     card.json, and says how the packages depart from the list;
                                     SETTINGS are those of a preset's `data`, as JSON

Files are read with `ast` only: nothing is imported or run. One pass over a file yields text for pretraining
(docstrings, source), pairs (summary → rest of the docstring, summary → code) and *owners*, the classes and
modules whose documented members become documents with chunks.
"""

import ast
import gc
import hashlib
import json
import platform
import re
import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.metadata import Distribution, distributions
from inspect import cleandoc
from itertools import chain, pairwise
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, NamedTuple

MAX_FILE_BYTES = 1_000_000  # larger files are tables written as Python
PIECE_CHARACTERS = 4_000  # source is cut at top-level statements into pieces of about this size
DOCUMENT_CHARACTERS = 1_200  # of a pair's document: about 300 tokens
CHUNK_WORDS = 60
SAYS_SOMETHING = 4  # words: shorter docstrings are left out
MEMBERS_PER_DOCUMENT = 9  # and the heading: at most ten chunks
QUERIES_PER_DOCUMENT = 4
MIN_MEMBERS = {"class": 3, "module": 4}
SMALL_PACKAGE = 2_000_000  # bytes
PROSE_SHARE = 0.5  # of the pretraining text; source code and CLDR fill the rest
SPLITS = ("train", "dev", "test")

# Of the packages that are read: whatever else is installed changes no data.
LIST = Path(__file__).with_name("environment.txt")
# Where other packages are installed than those that are listed.
NOTE = "another corpus than the committed runs', because of {}; `make install` or UNMASK_CORPUS=DIR is theirs"
# Copies of other projects, which leak between packages; and tests and examples, which hold little prose.
LEFT_OUT = {"_vendor", "_vendored", "vendored", "vendor", "_distutils", "extern", "externals", "_externals"}
LEFT_OUT |= {"..", "tests", "test", "testing", "_tests", "examples", "benchmarks", "__pycache__"}
NOT_STDLIB = {"site-packages", "idlelib", "lib2to3", "ensurepip", "turtledemo", "pydoc_data", "encodings"}
GENERATED = re.compile(r"automatically generated|auto-?generated (by|from|file)|do not edit", re.IGNORECASE)

Rows = dict[str, list[dict[str, Any]]]  # of each data set, those of a split together
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Package(NamedTuple):
    """One listed distribution (or the standard library) and its Python files, relative to `root`."""

    name: str
    version: str
    licence: str
    root: Path
    files: tuple[str, ...]


class Owner(NamedTuple):
    """A class or module with its documented members: (name, signature, first paragraph)."""

    kind: str
    name: str
    module: str
    package: str
    summary: str
    members: list[tuple[str, str, str]]


@dataclass
class Harvest:
    """What one file yields. `digests` are of documented functions' code, to recognise copied files."""

    package: str
    module: str
    docstrings: list[tuple[str, str, int]] = field(default_factory=list)  # (qualified name, text, digest)
    code: list[str] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    pairs: list[dict[str, str]] = field(default_factory=list)
    owners: list[Owner] = field(default_factory=list)


def digest(text: str) -> int:
    """64-bit hash of a text's lower-cased words: blind to layout and punctuation."""
    words = " ".join(re.findall(r"\w+", text.lower()))
    return int.from_bytes(hashlib.blake2b((words or text).encode(), digest_size=8).digest())


# ---- what is listed, and what of it is installed


def listed() -> dict[str, str]:
    """Name → version of the packages that the corpus is made of, as the committed runs had them."""
    return dict(re.findall("^([^#].*)==(.*)$", LIST.read_text(encoding="utf8"), re.MULTILINE))


def installed_versions() -> dict[str, str]:
    """Name → version of what `installed_packages` reads, without looking at any file of theirs."""
    return {"python": platform.python_version()} | {name: one.version for name, one in _installed().items()}


def installed_packages() -> list[Package]:
    """What is listed of this interpreter's site-packages, and the standard library, sorted by name."""
    packages = []
    for name, one in _installed().items():
        root = Path(one.locate_file(""))
        packages.append(Package(name, one.version, _licence(one), root, _python_files(root, one.files or ())))
    root = Path(sysconfig.get_path("stdlib"))
    files = (PurePosixPath(path.relative_to(root).as_posix()) for path in root.rglob("*.py"))
    files = _python_files(root, (file for file in files if not NOT_STDLIB.intersection(file.parts)))
    packages.append(Package("python", platform.python_version(), "PSF-2.0", root, files))
    return sorted((one for one in packages if one.files), key=lambda package: package.name.lower())


def departures() -> str:
    """What of the list is missing here, and what has another version (another build of it is none)."""
    there = {name: version.partition("+")[0] for name, version in installed_versions().items()}
    wrong = {name: version for name, version in listed().items() if there.get(name) != version}
    first = sorted(wrong, key=there.__contains__)  # the missing ones
    return ", ".join(f"{name} {there.get(name, 'is missing')} (listed: {wrong[name]})" for name in first)


def _installed() -> dict[str, Distribution]:
    paths = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    every = ((name, one) for name in listed() for one in distributions(name=name, path=paths))
    # Not what an uninstallation has left.
    return {name: one for name, one in every if one.read_text("METADATA") or one.read_text("PKG-INFO")}


def _python_files(root: Path, files: Iterable[PurePosixPath]) -> tuple[str, ...]:
    files = (file for file in files if file.suffix == ".py" and not LEFT_OUT.intersection(file.parts))
    return tuple(sorted(str(one) for one in files if one.name[:5] != "test_" and (root / one).is_file()))


def _licence(distribution: Distribution) -> str:
    """The licence that the metadata states: expression, else classifiers, else the field's first line."""
    about = distribution.metadata
    named = ", ".join(one.split(" :: ")[-1] for one in about.get_all("Classifier", ()) if "License ::" in one)
    stated = (about.get("License") or "").strip().partition("\n")[0]
    return about.get("License-Expression") or named or stated or "not stated"


# ---- what a file yields


def harvest(packages: Sequence[Package]) -> list[Harvest | None]:
    """Parses every file once; the results keep the order of the files."""
    from tqdm import tqdm

    files = [(one.name, one.root, file) for one in packages for file in one.files]
    return [harvest_file(*file) for file in tqdm(files, "reading packages", unit="file")]


def harvest_file(package: str, root: Path, file: str) -> Harvest | None:
    """Reads one file; None for one that cannot be parsed, is too large or was generated."""
    parts = PurePosixPath(file).with_suffix("").parts
    harvested = Harvest(package, ".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    try:
        source = (root / file).read_text(encoding="utf-8")
        if len(source) > MAX_FILE_BYTES or GENERATED.search(source[:2_000]):
            return None
        with warnings.catch_warnings(action="ignore"):  # invalid escapes in other people's docstrings
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, OSError):
        return None
    lines = source.removesuffix("\n").split("\n")  # as ast counts; splitlines() breaks at form feeds, too
    _walk(harvested, tree, harvested.module, lines)
    harvested.code = list(_pieces(tree, lines))
    return harvested


def _walk(harvested: Harvest, node: ast.Module | ast.ClassDef | Function, name: str, lines: list[str]) -> str:
    """Collects the docstring of `node`, its pairs, and the same of the classes and functions in it.

    Returns: the docstring, without markup."""
    text = clean(ast.get_docstring(node, clean=False) or "")
    if len(text.split()) >= SAYS_SOMETHING:
        harvested.docstrings.append((name, text, digest(text)))
        _add_pairs(harvested, node, name, text, lines)
    if isinstance(node, Function):
        return text  # functions inside functions are details
    members = {}  # by name: overloads and property setters come once
    for child in node.body:
        if isinstance(child, ast.ClassDef | Function):
            documentation = _walk(harvested, child, f"{name}.{child.name}", lines)
            public = isinstance(child, Function) and not child.name.startswith("_")
            if public and len(documentation.split()) >= SAYS_SOMETHING:
                members[child.name] = (child.name, _signature(child), _first_paragraph(documentation))
    kind = "class" if isinstance(node, ast.ClassDef) else "module"
    if len(members) >= MIN_MEMBERS[kind]:
        whose = (kind, name.rsplit(".", 1)[-1], harvested.module, harvested.package)
        harvested.owners.append(Owner(*whose, _first_paragraph(text), [*members.values()]))
    return text


def _add_pairs(harvested: Harvest, node: ast.AST, name: str, text: str, lines: list[str]) -> None:
    query, body = split_summary(text)
    common = {"query": query, "key": name, "package": harvested.package}
    if query and len(body.split()) >= 12:
        harvested.pairs.append(common | {"document": body, "dataset": "docs", "language": "en"})
    code = _code_without_docstring(node, lines) if isinstance(node, Function) else ""
    if code:
        harvested.digests.append(digest(code))
    if query and code:
        harvested.pairs.append(common | {"document": code, "dataset": "code", "language": "python"})


def clean(docstring: str) -> str:
    """Dedents and strips the markup that carries no words: underlines of sections, roles, blank lines."""
    text = re.sub(r"^\s*[-=~^*\"'+]{3,}\s*$\n?", "", cleandoc(docstring), flags=re.MULTILINE)
    text = re.sub(r":\w+(?::\w+)*:`~?([^`<]+?)(?:\s*<[^`]*>)?`", r"\1", text)  # :class:`~a.B` → a.B
    text = re.sub(r"`{1,2}([^`\n]+)`{1,2}", r"\1", text)
    return re.sub(r"\n\s*\n+", "\n\n", text).strip()


def split_summary(text: str) -> tuple[str, str]:
    """Splits a docstring into first sentence and rest; ("", "") where it opens with no usable sentence."""
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
    every = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    names = [one.arg for one in every if one.arg not in ("self", "cls")]
    return f"{function.name}({', '.join(names[:8])})"


def _code_without_docstring(function: Function, lines: list[str]) -> str:
    """Source of a documented function from `def` on, without the docstring; "" if hardly any is left."""
    documentation = function.body[0]
    body = lines[documentation.end_lineno : function.end_lineno]
    if sum(bool(line.strip()) for line in body) < 2:
        return ""
    lines = lines[function.lineno - 1 : documentation.lineno - 1] + body
    indent = len(lines[0]) - len(lines[0].lstrip())
    lines = [line[indent:].rstrip() if not line[:indent].strip() else line for line in lines]
    return _cut("\n".join(filter(None, lines)), DOCUMENT_CHARACTERS)


def _pieces(tree: ast.Module, lines: list[str]) -> Iterator[str]:
    """The file's source in pieces that end at the end of a top-level statement."""
    ends = [0, *(statement.end_lineno for statement in tree.body), len(lines)]
    statements = ("".join(f"{line}\n" for line in lines[start:end]) for start, end in pairwise(ends))
    return filter(None, map(str.strip, _packed(statements, "")))


def _packed(texts: Iterable[str], between: str) -> Iterator[str]:
    """The texts in order, joined to pieces that end with the text by which they are large enough."""
    piece, size = [], 0
    for text in texts:
        piece.append(text)
        size += len(text)
        if size >= PIECE_CHARACTERS:
            yield between.join(piece)
            piece, size = [], 0
    if piece:
        yield between.join(piece)


# ---- what a split makes of it


def words_of(identifier: str) -> str:
    """Spells an identifier in words: `RandomForestClassifier` → `random forest classifier`."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", identifier)
    return " ".join(re.split(r"[\W_]+", spaced)).strip().lower()


def mask_name(text: str, name: str) -> str:
    """Replaces every occurrence of an owner's name, as an identifier or spelt in words, by "it"."""
    spelt = r"[ _-]?".join(map(re.escape, words_of(name).split()))
    either = rf"(?<![A-Za-z0-9])(?:{re.escape(name)}|{spelt})(?:s|es)?(?![A-Za-z0-9])"
    return re.sub(either, "it", text, flags=re.IGNORECASE)


def documents_of(owners: Sequence[Owner], seed: int) -> Iterator[dict]:
    """Turns the classes and modules of one split into documents whose chunks need their document.

    Chunk 0 is the heading, the only one that names the owner; every further chunk is a member's signature
    and first paragraph with the owner's name masked. A query names the owner and a member's topic, vague on
    purpose: the member's name where several owners have such a member, else the first three words of its
    summary. Topics that many owners share come first: many chunks answer the topic, one is the owner's.

    Args:
        owners: those of one split; a class name that several of them share is qualified with its module.
        seed: of the choice of query templates.
    Yields: rows with document_id, key, dataset, package, language, chunks, queries, golds.
    """
    classes = Counter(owner.name.lower() for owner in owners if owner.kind == "class")
    named = Counter(name for owner in owners for name, _, _ in owner.members)
    topics = [[_topic(name, paragraph, named) for name, _, paragraph in owner.members] for owner in owners]
    frequency = Counter(topic for of_owner in topics for topic in set(of_owner))
    for owner, of_owner in zip(owners, topics, strict=True):
        label = owner.name
        if owner.kind == "module" or classes[label.lower()] > 1:
            path = owner.module.split(".") + [owner.name] * (owner.kind == "class")
            label = ".".join(path[-2:])
        heading = _cut(f"{owner.kind} {label} ({words_of(label)}): {owner.summary}", 400).rstrip(": ")
        # Equal parts, so that no document is left with a single member.
        parts = -(-len(owner.members) // MEMBERS_PER_DOCUMENT)
        for part in range(parts):
            # A topic that two members of one owner share has no single answer.
            of_part = enumerate(of_owner[part::parts], 1)
            golds = {topic: gold for gold, topic in of_part if of_owner.count(topic) == 1}
            chosen = sorted(golds, key=lambda topic: (-frequency[topic], golds[topic]))[:QUERIES_PER_DOCUMENT]
            key = f"{owner.package}/{owner.module}/{owner.kind}/{owner.name}"
            document_id = f"{key}/{part}"
            about = {"document_id": document_id, "key": key, "dataset": "modules", "package": owner.package}
            chunks = [heading, *(_chunk(*member, owner.name) for member in owner.members[part::parts])]
            queries = [_query(label, topic, f"{seed}/{document_id}/{topic}") for topic in chosen]
            about |= {"chunks": chunks, "queries": queries, "golds": [golds[topic] for topic in chosen]}
            yield about | {"language": "en"}


def _chunk(name: str, signature: str, paragraph: str, owner: str) -> str:
    return " ".join(mask_name(f"{signature}: {paragraph}", owner).split()[:CHUNK_WORDS])


def _topic(name: str, paragraph: str, named: Counter[str]) -> str:
    return words_of(name) if named[name] > 1 else " ".join(paragraph.rstrip(".").lower().split()[:3])


def _query(label: str, topic: str, choice: str) -> str:
    spelt = words_of(label)
    templates = (f"{spelt}: {topic}", f"{topic} of {spelt}", f"{label} {topic}", f"{topic} in {spelt}")
    return templates[digest(choice) % len(templates)]


def texts_of(harvested: Harvest, seen: set[int]) -> list[dict[str, str]]:
    """Pretraining texts of one file without `seen` docstrings; no code if a function is `seen`."""
    new = (f"{name}\n{text}" for name, text, mark in harvested.docstrings if mark not in seen)
    texts = [{"text": text, "kind": "prose", "language": "en"} for text in _packed(new, "\n\n")]
    if not seen.intersection(harvested.digests):
        code = (text for text in harvested.code if len(text) >= 200)
        texts += [{"text": text, "kind": "code", "language": "python"} for text in code]
    return [text | {"package": harvested.package} for text in texts]


def _new_pairs(pairs: Iterable[dict], seen: set[int]) -> Iterator[dict]:
    """Pairs whose texts no earlier split holds, and which in their dataset mean one thing (one key) only.

    A query that fits several documents has no right answer, nor has a document that answers several queries.
    """
    key_of: dict[tuple[str, str, int], str] = {}
    for pair in pairs:
        marks = [(pair["dataset"], column, digest(pair[column])) for column in ("query", "document")]
        held_out = any(mark[2] in seen for mark in marks)
        ambiguous = any(key_of.get(mark, pair["key"]) != pair["key"] for mark in marks)
        if not held_out and not ambiguous and not all(mark in key_of for mark in marks):
            key_of.update(dict.fromkeys(marks, pair["key"]))
            yield pair


def _new_documents(documents: Iterable[dict], seen: set[int]) -> Iterator[dict]:
    """Documents whose sections and queries no earlier split holds, and no earlier document of their split."""
    used = set(seen)
    for document in documents:
        body = digest(" ".join(document["chunks"][1:]))
        # Figures of two countries may well be equal; a class copied into another package is a repetition.
        repeated = document["dataset"] == "modules" and body in used
        both = zip(document["queries"], document["golds"], strict=True)
        new = [(query, gold) for query, gold in both if not repeated and digest(query) not in used]
        if new:
            used |= {body, *(digest(query) for query, _ in new)}
            queries, golds = zip(*new, strict=True)
            yield document | {"queries": [*queries], "golds": [*golds]}


def _capped(texts: Iterable[dict], cap: int, seed: int) -> list[dict]:
    """Distinct texts, drawn by hash up to `cap` bytes: prose to its share, then CLDR, then source code."""

    def drawn(row: dict) -> bytes:
        return hashlib.sha256(f"{seed}{row['text']}".encode()).digest()

    distinct, order = {row["text"]: row for row in texts}, ("prose", "cldr", "code")
    chosen, size = [], Counter()
    for row in sorted(distinct.values(), key=lambda row: (order.index(row["kind"]), drawn(row))):
        length = len(row["text"].encode())
        room = cap * PROSE_SHARE - size["prose"] if row["kind"] == "prose" else cap - size.total()
        if length <= room:
            size[row["kind"]] += length
            chosen.append(row)
    return sorted(chosen, key=drawn)  # whoever reads the first part of them reads all kinds


# ---- the corpus


def build(settings: SimpleNamespace, packages: Sequence[Package], folder: Path) -> None:
    """Harvests packages and CLDR into files in a folder.

    Args:
        packages: what to read, see `installed_packages`.
        folder: is made if it is not there.
    Raises: ValueError if a held-out package is not among `packages`, or if a split would be empty.
    """
    from pyarrow import Table, parquet

    import cldr

    split_of = assign_splits(settings, packages)
    chosen = [package for package in packages if package.name in split_of]
    harvested = harvest(chosen)
    languages = cldr.SLICE_LANGUAGES if settings.max_packages else cldr.LANGUAGES
    folder.mkdir(parents=True, exist_ok=True)
    rows = _collect(settings, [*filter(None, harvested)], split_of, cldr.harvest(settings.seed, languages))
    for name, table in rows.items():
        parquet.write_table(Table.from_pylist(table), folder / f"{name}.parquet", compression="zstd")
    origins = [
        {"name": f"{p.name} {p.version}", "licence": p.licence, "split": split_of[p.name]} for p in chosen
    ]
    dropped = {"packages": {"files that are unreadable, generated or too large": harvested.count(None)}}
    card = {"settings": vars(settings), "departures": departures(), "origins": origins, "dropped": dropped}
    (folder / "card.json").write_text(json.dumps(card, indent=1, ensure_ascii=False), encoding="utf8")


def assign_splits(settings: SimpleNamespace, packages: Sequence[Package]) -> dict[str, str]:
    """Split of every package that is to be read: the held-out ones and up to `max_packages` others.

    A slice takes the largest packages under 2 MB first: rich in documentation and still quick to read.

    A package in both lists goes to "test".

    Raises: ValueError for a held-out package that is not installed, or an empty split.
    """
    names = {package.name.lower(): package.name for package in packages}
    splits: dict[str, str] = {}
    for split, wanted in (("test", settings.test_packages), ("dev", settings.dev_packages)):
        for name in map(str.lower, wanted):
            if name not in names:
                near = "; did you mean ".join(["", *map(repr, get_close_matches(name, names, n=1))])
                raise ValueError(f"data.{split}_packages: {name} is not installed{near}")
            splits.setdefault(names[name], split)
    left = [one for one in packages if one.name not in splits]
    sizes = {one.name: sum((one.root / file).stat().st_size for file in one.files) for one in left}
    others = sorted(sizes, key=lambda name: (sizes[name] > SMALL_PACKAGE, -sizes[name], name))
    slots = max(settings.max_packages - len(splits), 0) if settings.max_packages else None
    splits |= dict.fromkeys(others[:slots], "train")
    if lacking := set(SPLITS) - set(splits.values()):
        remedy = "raise data.max_packages (0: all), or name others in data.dev_packages, data.test_packages"
        raise ValueError(f"no package is left for {' and '.join(lacking)}: {remedy}")
    return splits


def _collect(
    settings: SimpleNamespace, files: Sequence[Harvest], split_of: dict[str, str], spoken: Sequence[list]
) -> Rows:
    """Rows of all splits. A split later in (test, dev, train) never repeats a query, docstring or function
    of an earlier one, or a class's chunks after the heading. It may repeat single sentences and
    docstrings in code."""
    rows: Rows = {}
    seen: set[int] = set()  # texts of the splits before
    for split in reversed(SPLITS):
        texts, pairs, documents = ([row for row in rows if row["split"] == split] for rows in spoken)
        of_split = [one for one in files if split_of[one.package] == split]
        texts += [row for one in of_split for row in texts_of(one, seen)]
        pairs = [pair for one in of_split for pair in one.pairs] + pairs
        owners = [owner for one in of_split for owner in one.owners]
        # Held-out text only measures the loss: a tenth will do.
        cap = settings.max_text_mb * 1_000_000 // (1 if split == "train" else 10)
        texts = [{"dataset": "environment"} | row for row in _capped(texts, cap, settings.seed)]
        pairs = list(_new_pairs(pairs, seen))
        documents = list(_new_documents(chain(documents_of(owners, settings.seed), documents), seen))
        new: Rows = {}
        for row in chain(texts, pairs, documents):
            new.setdefault(row["dataset"], []).append(row | {"split": split})
        rows = {name: new.get(name, []) + rows.get(name, []) for name in new | rows}
        for one in of_split:
            seen.update(one.digests, (mark for _, _, mark in one.docstrings))
        for row in pairs:
            seen.update(map(digest, (row["query"], row["document"])))
        for row in documents:
            seen.update(map(digest, (*row["queries"], " ".join(row["chunks"][1:]))))
    return rows


def main(folder: str = "", settings: str = "") -> None:
    gc.disable()  # syntax trees have no cycles, and to look for some takes as long as to parse
    if not folder:
        print(json.dumps(installed_versions()))
        return
    if wrong := departures():
        print("note:", NOTE.format(wrong[:600]), file=sys.stderr)
    try:
        build(SimpleNamespace(**json.loads(settings)), installed_packages(), Path(folder))
    except ValueError as error:
        print(error)
        sys.exit(2)


if __name__ == "__main__":
    main(*sys.argv[1:])
