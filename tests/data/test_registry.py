"""Registries: what ours hold, and what is refused."""

import json
from collections import Counter

import pytest
import yaml

from unmask.config import GROUPS, ConfigError
from unmask.data.registry import FOLDER, Source, existing_files, halves, load_registry, split_of
from unmask_study.report import paper_table
from unmask_study.settings import CONTEB

NAMES = ("HuggingFaceFW/fineweb-edu", "epfml/FineWeb2-HQ", "HuggingFaceFW/fineweb-2")
REPOSITORIES = dict(zip(("FineWeb-Edu", "FineWeb2-HQ", "FineWeb2"), NAMES, strict=True))

PAPER = load_registry("paper")
HUB_SOURCES = [one for one in PAPER + load_registry("open") if one.kind == "hub"]
HUB = {"kind": "hub", "repo": "some/set", "licence": "MIT"}
PAIRS = HUB | {"role": "pairs", "group": "english", "language": "eng"}
PAIRS |= {"columns": {"query": "q", "document": "d"}}
TEXT = HUB | {"role": "text", "columns": {"text": "text"}}


def write(folder, sources, **rest):
    path = folder / "some.yaml"
    path.write_text(yaml.safe_dump({"sources": sources, **rest}, sort_keys=False), encoding="utf8")
    return str(path)


# ---- our registries


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.yaml")))
def test_a_registry_trains_every_stage(name):
    sources = load_registry(name)
    assert {source.role for source in sources} >= {"text", "pairs", "documents"}
    assert all(source.licence for source in sources)
    assert all(source.documented for source in sources if source.kind == "hub")  # tests/rehearsal.py reads it
    for role in ("pairs", "documents"):
        assert any(one.hold_out or "split" in one.columns for one in sources if one.role == role)
    assert not {source.task for source in sources} & CONTEB.keys()  # notebook 09a asks both


def test_the_text_of_the_paper_is_table_10():
    rows = paper_table(10).items()
    table = {(REPOSITORIES[row["Source"]], language): row["Prevalence"] for language, row in rows}
    ours = {(one.repo, one.language): one.share for one in PAPER if one.role == "text"}
    assert ours.keys() == table.keys() and sum(ours.values()) == pytest.approx(100, abs=1e-9)
    for key, share in ours.items():  # English takes what rounding left
        assert share == pytest.approx(table[key], abs=0.05 if key[1] == "eng_Latn" else 0)


def test_the_pairs_of_the_paper_are_of_four_groups_and_60_languages():
    pairs = [one for one in PAPER if one.role == "pairs" and not one.optional]
    languages = {group: {one.language for one in pairs if one.group == group} for group in GROUPS}
    assert len(languages["multilingual"]) == 60
    assert languages["english"] == {"eng"} and languages["code"] == {"code"}
    assert all(language.endswith("-eng") for language in languages["cross-lingual"])
    assert sum(one.rows for one in pairs if one.group == "english") == pytest.approx(112.3e6, rel=0.001)


@pytest.mark.parametrize("role", ["pairs", "documents"])
def test_own_data_are_as_their_registry_says(role):
    (source,) = (one for one in load_registry("own") if one.role == role)
    rows = [json.loads(line) for line in existing_files(source)[0].read_text(encoding="utf8").splitlines()]
    assert len(rows) == source.rows and set(source.columns.values()) <= set(rows[0])
    assert {split_of(source, row["topic"]) for row in rows} == {"train", "dev", "test"}
    for row in rows if role == "documents" else ():
        assert len(row["queries"]) == len(row["golds"]) and max(row["golds"]) < len(row["chunks"])


@pytest.mark.hub
@pytest.mark.slow
@pytest.mark.parametrize("repo", sorted({one.repo for one in HUB_SOURCES}))
def test_columns_are_those_of_the_hub(repo):
    from datasets import load_dataset

    for half in halves(next(one for one in HUB_SOURCES if one.repo == repo)):
        where = {"split": half.split, "revision": half.revision, "streaming": True}
        row = next(iter(load_dataset(half.repo, half.config or None, **where)))
        paths = ",".join(half.columns.values()).split(",")
        assert {path.strip().split(".")[0] for path in paths} <= set(row)


# ---- reading a registry


def test_languages_make_an_entry_each_and_defaults_hold(tmp_path):
    text = TEXT | {"config": "{language}", "languages": {"deu_Latn": 40, "cmn_Hani": 60.0}, "hold_out": 0.2}
    pairs = PAIRS | {"language": "{language}-eng", "languages": ["gsw", "arb"], "task": "all of them"}
    pairs |= {"columns": {"query": "text.{short}", "document": "text.en"}}
    path = write(tmp_path, {"web": text, "bitext": pairs}, defaults={"hold_out": 0.1, "split": "test"})
    german, chinese, swiss, arabic = load_registry(path)
    assert (german.name, german.language, german.config) == ("web/deu_Latn", "deu_Latn", "deu_Latn")
    assert (chinese.task, chinese.share, chinese.hold_out) == ("web/cmn_Hani", 60.0, 0.2)
    assert (swiss.name, swiss.language, swiss.task) == ("bitext/gsw", "gsw-eng", "all of them")
    assert (swiss.columns["query"], arabic.columns["query"]) == ("text.gsw", "text.ar")
    assert (arabic.hold_out, arabic.split, arabic.revision) == (0.1, "test", "main")


@pytest.mark.parametrize("folder", ["own", "own [v2]"])
def test_files_start_at_the_registry(tmp_path, monkeypatch, folder):
    folder = tmp_path / folder
    (folder / "out").mkdir(parents=True)
    monkeypatch.setenv("UNMASK_ARTIFACTS", str(folder))
    a, b, named, later = (folder / name for name in ("a.jsonl", "b.jsonl", "c[1].txt", "out/x.jsonl"))
    for path in (b, a, named):
        path.touch()
    entry = PAIRS | {"kind": "files", "files": "*.jsonl"}
    sources = {"here": entry, "named": entry | {"files": named.name}, "absent": entry | {"bad_rows": "drop"}}
    sources["absent"] |= {"files": ["${UNMASK_ARTIFACTS}/out/x.jsonl"], "optional": True}
    here, *others, absent = load_registry(write(folder, sources))
    assert [*map(existing_files, (here, *others, absent))] == [[a, b], [named], []]
    later.touch()
    assert existing_files(absent) == [later] and here.bad_rows == "stop"


JOINED = {"chunk_id": "i", "chunk": "c", "query": "q", "query_chunk_id": "i"}


REFUSED = [
    ({"kolumns": {}}, "unknown key 'kolumns'; did you mean 'columns'"),
    ({"kind": "hab"}, "kind must be 'hub', 'mirror' or 'files'"),
    ({"group": ""}, "pairs need a group (english"),
    ({"columns": {"querry": "q", "document": "d"}}, "pairs need query document"),
    ({"role": "documents", "columns": JOINED}, "queries_config goes with"),
    ({"role": "documents", "columns": JOINED, "queries_config": "q", "max_rows": 9}, "max_rows would part"),
    ({"repo": "some"}, "repo must match"),
    ({"repo": ""}, "repo: kind hub needs the name of a data set"),
    ({"kind": "files", "files": ["no.jsonl"]}, "no.jsonl; `optional: true`"),
    ({"language": "english"}, "language must match pattern"),
    ({"language": False}, "language must be a valid string, got False"),
    ({"languages": [False]}, "must be str, not bool"),
    ({"languages": "eng"}, "languages are a list, or language: share, not 'eng'"),
    ({"kind": "files", "files": None}, "not iterable"),
    ({"hold_out": 0.6}, "hold_out must be less than or equal to 0.5, got 0.6"),
    ({"share": 10}, "share is for text"),
    ({"rows": "many"}, "rows must be a valid integer, got 'many'"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_refused(change, message, tmp_path):
    path = write(tmp_path, {"fine": PAIRS, "wrong": PAIRS | change})
    with pytest.raises(ConfigError) as error:
        load_registry(path)
    assert str(error.value).startswith(f"{path}: wrong") and message in str(error.value)


def shared(*shares):
    """A registry of texts with these shares."""
    texts = [TEXT | {"language": "eng"} | ({"share": share} if share else {}) for share in shares]
    return yaml.safe_dump({"sources": dict(zip("ab", texts))})


BROKEN = {"sources: [": "while parsing", "about: nothing": "missing sources"}
BROKEN |= {"sources: {some: {kind: hub}}": "some: missing role"}
BROKEN |= {"sources:\n  mine: {}\n  mine: {}\n": r"some\.yaml: 'mine' stands twice"}
BROKEN |= {shared(50.0, 49.0): r"sum to 99\.00 percent", shared(100.0, 0): r"sum to 100\.00 percent"}


@pytest.mark.parametrize(("text", "message"), BROKEN.items())
def test_files_that_are_no_registry(text, message, tmp_path):
    path = tmp_path / "some.yaml"
    path.write_text(text, encoding="utf8")
    with pytest.raises(ConfigError, match=message):
        load_registry(str(path))
    with pytest.raises(ConfigError, match=r"there is no registry .*/papr\.yaml; did you mean 'paper'"):
        load_registry("papr")


def test_a_split_is_a_function_of_key_and_hold_out():
    sources = [Source(name, "hub", "text", "eng", "", hold_out=0.1) for name in ("one", "other")]
    splits, others = ([split_of(source, f"key {k}") for k in range(3000)] for source in sources)
    assert splits == others
    counts = Counter(splits)
    assert counts["test"] / 3000 == pytest.approx(0.1, abs=0.02)
    assert counts["dev"] / 3000 == pytest.approx(0.1 / 3, abs=0.01)
    # The same on every machine and in every version: changing it would leak what was held out.
    held = {split: [k for k in range(60) if splits[k] == split] for split in ("test", "dev")}
    assert held == {"test": [1, 42, 52, 54, 56], "dev": [8, 39]}
