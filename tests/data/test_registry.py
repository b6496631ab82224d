"""Registries: what ours hold, and what is refused."""

from __future__ import annotations

import fnmatch
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from unmask.config import GROUPS, ConfigError
from unmask.data.registry import (
    CONTEB,
    Source,
    conteb,
    load_registry,
    own_files,
    registry_names,
    short_code,
    split_of,
)
from unmask.store import artifacts_root
from unmask.study import paper

SCHEMAS = yaml.safe_load(Path(__file__).with_name("documented_schemas.yaml").read_text(encoding="utf8"))

REPOSITORIES = {
    "FineWeb-Edu": "HuggingFaceFW/fineweb-edu",
    "FineWeb2-HQ": "epfml/FineWeb2-HQ",
    "FineWeb2": "HuggingFaceFW/fineweb-2",
}

PAIRS = {
    "kind": "hub",
    "role": "pairs",
    "group": "english",
    "repo": "some/set",
    "language": "eng",
    "licence": "MIT",
    "columns": {"query": "question", "document": "answer"},
}
TEXT = {"kind": "hub", "role": "text", "repo": "some/set", "licence": "MIT", "columns": {"text": "text"}}


def write(folder: Path, sources: dict[str, Any], **rest: Any) -> str:
    path = folder / "some.yaml"
    path.write_text(yaml.safe_dump({"sources": sources, **rest}, sort_keys=False), encoding="utf8")
    return str(path)


# ---- our registries


@pytest.mark.parametrize("name", registry_names())
def test_a_registry_trains_every_stage(name: str) -> None:
    sources = load_registry(name)
    assert {source.role for source in sources} >= {"text", "pairs", "documents"}
    assert all(source.licence for source in sources)
    assert any(source.hold_out for source in sources if source.role == "pairs")
    assert any(source.hold_out for source in sources if source.role == "documents")


def test_the_text_of_the_paper_is_table_10() -> None:
    table = {(REPOSITORIES[row["Source"]], row["language"]): row["Prevalence"] for row in paper.table(10)}
    ours = {
        (source.repo, source.language): source.share
        for source in load_registry("paper")
        if source.role == "text"
    }
    assert ours == pytest.approx(table, abs=0.05)  # English takes what rounding left
    assert sum(ours.values()) == pytest.approx(100, abs=1e-9)
    assert {key: share for key, share in ours.items() if key[1] != "eng_Latn"} == {
        key: share for key, share in table.items() if key[1] != "eng_Latn"
    }


def test_the_pairs_of_the_paper_are_of_four_groups_and_60_languages() -> None:
    pairs = [s for s in load_registry("paper") if s.role == "pairs" and not s.optional]
    languages = {group: {s.language for s in pairs if s.group == group} for group in GROUPS}
    assert len(languages["multilingual"]) == 60
    assert languages["english"] == {"eng"} and languages["code"] == {"code"}
    assert all(language.endswith("-eng") for language in languages["cross-lingual"])
    rows = Counter({group: sum(s.rows or 0 for s in pairs if s.group == group) for group in GROUPS})
    assert rows["english"] == pytest.approx(112.3e6, rel=0.001) and rows["code"] == pytest.approx(
        1.4e6, rel=0.02
    )


def test_synthetic_data_join_once_they_exist() -> None:
    optional = [source for source in load_registry("paper") if source.optional]
    assert {source.role for source in optional} == {"pairs", "documents"}
    for source in optional:
        assert source.kind == "files" and str(artifacts_root()) in source.files[0]


def test_own_data_are_as_their_registry_says() -> None:
    sources = {source.role: source for source in load_registry("own")}
    pairs, documents = (
        [json.loads(line) for line in own_files(sources[role])[0].read_text(encoding="utf8").splitlines()]
        for role in ("pairs", "documents")
    )
    assert len(pairs) == sources["pairs"].rows and len(documents) == sources["documents"].rows
    assert all(row["query"].strip() and row["document"].strip() for row in pairs)
    for row in documents:
        assert 3 <= len(row["chunks"]) <= 10 and len(set(row["chunks"])) == len(row["chunks"])
        assert len(row["queries"]) == len(row["golds"]) and max(row["golds"]) < len(row["chunks"])
    for role, rows in (("pairs", pairs), ("documents", documents)):
        splits = Counter(split_of(sources[role], row["topic"]) for row in rows)
        assert min(splits["train"], splits["dev"], splits["test"]) > 0
    assert sum(own_files(sources[role])[0].stat().st_size for role in ("pairs", "documents")) < 200_000


# ---- columns, as documented


def type_of(columns: Any, path: str) -> Any:
    """What is documented at a path such as "answers.text.0"; None where there is nothing."""
    value = columns
    for step in path.split("."):
        if isinstance(value, list):
            value = value[0] if step.isdigit() else [value[0].get(step)]
        else:
            value = value.get(step)
    return value


def config_of(source: Source, column: str) -> str:
    """The configuration that a column is in."""
    of_queries = source.queries_config and column in ("query", "query_chunk_id")
    return source.queries_config if of_queries else source.config


def documented(source: Source) -> list[tuple[str, Any, str]]:
    """(our name, its type as documented, their path) of each column of a Hub source."""
    found = []
    for name, paths in source.columns.items():
        records = [
            record
            for record in SCHEMAS.get(source.repo, ())
            if any(fnmatch.fnmatchcase(config_of(source, name), pattern) for pattern in record["configs"])
        ]
        assert len(records) == 1, f"{source.name}: {len(records)} records of {name} in {source.repo}"
        found += [(name, type_of(records[0]["columns"], path.strip()), path) for path in paths.split(",")]
    return found


@pytest.mark.parametrize("name", registry_names())
def test_columns_are_those_that_the_sets_document(name: str) -> None:
    for source in load_registry(name):
        if source.kind == "hub":
            assert source.documented, source.name
            for column, kind, path in documented(source):
                wanted = (["string"], "string") if column == "negatives" else ("string",)
                assert kind in wanted, f"{source.name}: {path!r} is {kind}, for {column}"


@pytest.mark.hub
@pytest.mark.slow
@pytest.mark.parametrize("repo", sorted(SCHEMAS))
def test_columns_are_those_of_the_hub(repo: str) -> None:
    from datasets import load_dataset

    source = next(source for source in load_registry("paper") if source.repo == repo)
    for name, paths in source.columns.items():
        config = config_of(source, name) or None
        rows = load_dataset(repo, config, revision=source.revision, split=source.split, streaming=True)
        roots = {path.strip().split(".")[0] for path in paths.split(",")}
        assert roots <= set(next(iter(rows))), name


# ---- reading a registry


def test_an_entry(tmp_path: Path) -> None:
    (source,) = load_registry(write(tmp_path, {"some": PAIRS}))
    assert source == Source(name="some", task="some", **PAIRS)
    assert (source.revision, source.split, source.bad_rows) == ("main", "train", "drop")


def test_languages_make_an_entry_each_and_defaults_hold(tmp_path: Path) -> None:
    entry = TEXT | {"config": "{language}", "revision": "{short}"}
    entry |= {"languages": {"deu_Latn": 40, "cmn_Hani": 60.0}}
    path = write(tmp_path, {"web": entry | {"hold_out": 0.2}}, defaults={"hold_out": 0.1, "split": "test"})
    german, chinese = load_registry(path)
    assert (german.name, german.language, german.config) == ("web/deu_Latn", "deu_Latn", "deu_Latn")
    assert (german.revision, chinese.revision) == ("de", "zh")
    assert (chinese.task, chinese.share) == ("web/cmn_Hani", 60.0)
    assert (chinese.hold_out, chinese.split) == (0.2, "test")


def test_language_pairs(tmp_path: Path) -> None:
    entry = PAIRS | {"language": "{language}-eng", "languages": ["deu", "gsw"], "task": "all of them"}
    entry |= {"columns": {"query": "text.{short}", "document": "text.en"}}
    german, swiss = load_registry(write(tmp_path, {"bitext": entry}))
    assert (german.name, german.language) == ("bitext/deu", "deu-eng")
    assert (german.columns["query"], swiss.columns["query"]) == ("text.de", "text.gsw")
    assert german.task == swiss.task == "all of them"


def test_files_start_at_the_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b.jsonl", "a.jsonl"):
        (tmp_path / name).touch()
    monkeypatch.setenv("UNMASK_ARTIFACTS", str(tmp_path / "out"))
    entry = PAIRS | {"kind": "files", "files": "*.jsonl"}
    later = entry | {"files": ["${UNMASK_ARTIFACTS}/x.jsonl"], "optional": True, "bad_rows": "drop"}
    here, absent = load_registry(write(tmp_path, {"here": entry, "absent": later}))
    assert here.files == (str(tmp_path / "*.jsonl"),) and here.bad_rows == "stop"
    assert own_files(here) == [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    assert absent.files == (str(tmp_path / "out" / "x.jsonl"),) and own_files(absent) == []
    assert absent.bad_rows == "drop"


JOINED = {"chunk_id": "i", "chunk": "c", "query": "q", "query_chunk_id": "i"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kolumns": {}}, "unknown key 'kolumns'; did you mean 'columns'"),
        ({"kind": "hab"}, "kind: Input should be 'hub', 'mirror', 'files' or "),
        ({"group": ""}, "pairs need a group (english"),
        ({"columns": {"querry": "q", "document": "d"}}, "pairs need query, document"),
        ({"role": "documents", "columns": JOINED}, "and queries_config with chunk_id"),
        ({"repo": "some"}, "repo: String should match"),
        ({"kind": "files", "files": ["no.jsonl"]}, "no.jsonl; `optional: true`"),
        ({"language": "english"}, "language: Value error, write an ISO 639-3 code"),
        ({"languages": ["deu", "DEU"]}, "language: Value error, write an ISO 639-3 code"),
        ({"language": False}, "language: Input should be a valid string, got False"),
        ({"hold_out": 0.6}, "hold_out: Input should be less than or equal to 0.5, got 0.6"),
        ({"share": 10}, "share is for text"),
        ({"rows": "many"}, "rows: Input should be a valid integer, got 'many'"),
    ],
)
def test_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    entry = PAIRS | change
    if "languages" in change:
        del entry["language"]
    path = write(tmp_path, {"fine": PAIRS, "wrong": entry})
    with pytest.raises(ConfigError) as error:
        load_registry(path)
    assert str(error.value).startswith(f"{path}: wrong") and message in str(error.value)


@pytest.mark.parametrize(("first", "second"), [({"share": 50.0}, {"share": 49.0}), ({"share": 100.0}, {})])
def test_shares_are_of_all_text(first: dict, second: dict, tmp_path: Path) -> None:
    text = TEXT | {"language": "eng"}
    with pytest.raises(ConfigError, match=r"sum to (99|100)\.00 percent"):
        load_registry(write(tmp_path, {"a": text | first, "b": text | second}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sources: [", "is not valid YAML"),
        ("", "has the key `sources`"),
        ("about: nothing", "has the key `sources`"),
        ("sources: []", "valid dictionary"),
        ("sources: {some: {kind: hub}}", "some: role: "),
    ],
)
def test_files_that_are_no_registry(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "some.yaml"
    path.write_text(text, encoding="utf8")
    with pytest.raises(ConfigError, match=message):
        load_registry(str(path))


def test_unknown_registries() -> None:
    with pytest.raises(ConfigError, match="unknown registry 'papr'; did you mean 'paper'"):
        load_registry("papr")
    with pytest.raises(ConfigError, match=r"there is no .*/nowhere\.yaml"):
        load_registry("nowhere.yaml")


def test_a_split_is_a_function_of_key_and_hold_out() -> None:
    one, other = (Source(name, "hub", "text", "eng", "", hold_out=0.1) for name in ("one", "other"))
    keys = [f"key {k}" for k in range(3000)]
    splits = [split_of(one, key) for key in keys]
    assert splits == [split_of(other, key) for key in keys]
    counts = Counter(splits)
    assert counts["test"] / 3000 == pytest.approx(0.1, abs=0.02)
    assert counts["dev"] / 3000 == pytest.approx(0.1 / 3, abs=0.01)
    # The same on every machine and in every version: changing it would leak what was held out.
    held = {split: [k for k in range(60) if splits[k] == split] for split in ("test", "dev")}
    assert held == {"test": [1, 42, 52, 54, 56], "dev": [8, 39]}


def test_contebs_data_sets_are_sources() -> None:
    source = conteb("football")
    assert (source.repo, source.split) == ("illuin-conteb/football", "train") and len(CONTEB) == 8
    assert (source.config, source.queries_config) == ("documents", "queries")


def test_short_codes() -> None:
    codes = {
        "deu": "de",
        "cmn_Hani": "zh",
        "arb": "ar",
        "fas_Arab": "fa",
        "swh": "sw",
        "gsw": "gsw",
        "eng": "en",
    }
    assert {code: short_code(code) for code in codes} == codes
