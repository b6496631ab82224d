"""Registries: what ours hold, and what is refused."""

from __future__ import annotations

import fnmatch
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from unmask.config import ConfigError
from unmask.data.cldr import check_language, short_code
from unmask.data.registry import (
    CONTEB,
    GROUPS,
    Source,
    conteb,
    load_registry,
    own_files,
    registry_names,
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


def test_the_registries_at_hand() -> None:
    assert registry_names() == ["mirror", "own", "paper"]


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


@pytest.mark.mirror
def test_columns_are_those_of_the_mirror() -> None:
    from pyarrow import parquet

    root = Path(os.environ["UNMASK_MIRROR"])
    used: dict[str, set[str]] = {}
    cards: dict[str, dict[str, Any]] = {}
    for source in load_registry("mirror"):
        used.setdefault(source.repo, set()).add(source.config or "default")
        if source.repo not in cards:
            card = (root / source.repo / "README.md").read_text(encoding="utf8").split("---")[1]
            configs = yaml.safe_load(card)["configs"]
            cards[source.repo] = {config["config_name"]: config["data_files"][0] for config in configs}
        files = cards[source.repo][source.config or "default"]
        assert files["split"] == source.split
        columns = parquet.read_schema(root / source.repo / files["path"]).names
        assert set(source.columns.values()) <= set(columns), source.name
    for repo, configs in used.items():  # nothing is forgotten
        assert configs == {folder.name for folder in (root / repo).iterdir() if folder.is_dir()}


# ---- reading a registry


def test_an_entry(tmp_path: Path) -> None:
    (source,) = load_registry(write(tmp_path, {"some": PAIRS}))
    assert source == Source(name="some", task="some", **PAIRS)
    assert (source.revision, source.split, source.bad_rows, source.optional) == (
        "main",
        "train",
        "drop",
        False,
    )


def test_languages_make_an_entry_each(tmp_path: Path) -> None:
    entry = TEXT | {
        "config": "{language}",
        "revision": "{short}",
        "languages": {"deu_Latn": 40, "cmn_Hani": 60.0},
    }
    german, chinese = load_registry(write(tmp_path, {"web": entry}))
    assert (german.name, german.language, german.config, german.revision) == (
        "web/deu_Latn",
        "deu_Latn",
        "deu_Latn",
        "de",
    )
    assert (chinese.name, chinese.revision, chinese.share, chinese.task) == (
        "web/cmn_Hani",
        "zh",
        60.0,
        "web/cmn_Hani",
    )


def test_language_pairs(tmp_path: Path) -> None:
    entry = {key: value for key, value in PAIRS.items() if key != "language"} | {
        "group": "cross-lingual",
        "config": "{language}-eng",
        "language": "{language}-eng",
        "task": "all of them",
        "columns": {"query": "text.{short}", "document": "text.en"},
        "languages": ["deu", "gsw"],
    }
    german, swiss = load_registry(write(tmp_path, {"bitext": entry}))
    assert (german.name, german.config, german.language) == ("bitext/deu", "deu-eng", "deu-eng")
    assert (german.columns["query"], swiss.columns["query"]) == ("text.de", "text.gsw")
    assert german.task == swiss.task == "all of them"


def test_defaults_hold_unless_an_entry_differs(tmp_path: Path) -> None:
    entry = {key: value for key, value in PAIRS.items() if key != "kind"}
    path = write(
        tmp_path, {"a": entry, "b": entry | {"kind": "hub"}}, defaults={"kind": "mirror", "hold_out": 0.1}
    )
    assert [(source.kind, source.hold_out) for source in load_registry(path)] == [
        ("mirror", 0.1),
        ("hub", 0.1),
    ]


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


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"kolumns": {}}, "unknown key 'kolumns'; did you mean 'columns'"),
    "unknown kind": (
        {"kind": "hab"},
        "kind: Input should be 'hub', 'mirror', 'files' or ",
    ),
    "no group": ({"group": ""}, "pairs need a group, one of english"),
    "unknown column": (
        {"columns": {"querry": "q", "document": "d"}},
        "columns: unknown name 'querry'; did you mean 'query'",
    ),
    "missing column": ({"columns": {"query": "q"}}, "pairs need query, document; got query"),
    "joined without queries_config": (
        {
            "role": "documents",
            "columns": {"chunk_id": "i", "chunk": "c", "query": "q", "query_chunk_id": "i"},
        },
        "queries_config goes with the columns",
    ),
    "repository without organisation": ({"kind": "mirror", "repo": "some"}, "repo must be organisation/name"),
    "missing files": ({"kind": "files", "files": ["no.jsonl"]}, "no.jsonl: there is no such file"),
    "unknown language": ({"language": "dxu"}, "unknown language 'dxu'; near: "),
    "Norway": ({"language": False}, "language: Input should be a valid string, got False"),
    "hold_out": ({"hold_out": 0.6}, "hold_out: Input should be less than or equal to 0.5, got 0.6"),
    "share of pairs": ({"share": 10}, "share is for text"),
    "wrong type": ({"rows": "many"}, "rows: Input should be a valid integer, got 'many'"),
    "a number for text": ({"revision": 1.0}, "revision: Input should be a valid string, got 1.0"),
    "languages": ({"languages": "deu"}, "languages must be a list of codes"),
    "unknown among languages": ({"languages": ["deu", "qqq"]}, "unknown language 'qqq'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    change, message = REFUSED[case]
    path = write(tmp_path, {"fine": PAIRS, "wrong": PAIRS | change})
    with pytest.raises(ConfigError) as error:
        load_registry(path)
    assert str(error.value).startswith(f"{path}: wrong") and message in str(error.value)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ((50.0, 49.0), "sum to 99.00 percent, not to 100"),
        ((50.0, None), "sum to 50.00 percent, not to 100 and 1 of 2 have none"),
    ],
)
def test_shares_are_of_all_text(shares: tuple[float, float | None], message: str, tmp_path: Path) -> None:
    sources = {name: TEXT | {"language": "eng", "share": share} for name, share in zip("ab", shares)}
    sources = {name: {k: v for k, v in entry.items() if v is not None} for name, entry in sources.items()}
    with pytest.raises(ConfigError, match=message):
        load_registry(write(tmp_path, sources))


def test_a_task_is_of_one_group(tmp_path: Path) -> None:
    other = PAIRS | {"group": "code", "task": "some"}
    with pytest.raises(ConfigError, match="b: task 'some' has sources of english and of code"):
        load_registry(write(tmp_path, {"some": PAIRS | {"group": "english"}, "b": other}))


def test_names_are_unique(tmp_path: Path) -> None:
    path = tmp_path / "some.yaml"
    path.write_text("sources:\n  a: {}\n  a: {}\n", encoding="utf8")
    with pytest.raises(ConfigError, match="'a' twice"):
        load_registry(str(path))
    with pytest.raises(ConfigError, match="two sources are called 'a/deu'"):
        load_registry(write(tmp_path, {"a/deu": PAIRS, "a": PAIRS | {"languages": ["deu"]}}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sources: [", "is not valid YAML"),
        ("sources: []", "sources: Input should be a valid dictionary"),
        ("about: nothing", "sources: Field required"),
        ("sources: {}\nsourcs: {}", "unknown key 'sourcs'; did you mean 'sources'"),
        ("sources: {some: {kind: hub}}", "some: role: Field required"),
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


# ---- splits and languages


def test_a_split_is_a_function_of_key_and_hold_out() -> None:
    one, other = (Source(name=name, licence="", **_bare(0.1)) for name in ("one", "other"))
    keys = [f"key {k}" for k in range(3000)]
    splits = [split_of(one, key) for key in keys]
    assert splits == [split_of(other, key) for key in keys]
    counts = Counter(splits)
    assert counts["test"] / 3000 == pytest.approx(0.1, abs=0.02)
    assert counts["dev"] / 3000 == pytest.approx(0.1 / 3, abs=0.01)
    # The same on every machine and in every version: changing it would leak what was held out.
    held_out = {key: split for key, split in zip(keys[:60], splits) if split != "train"}
    assert [key for key, split in held_out.items() if split == "test"] == [
        f"key {k}" for k in (1, 42, 52, 54, 56)
    ]
    assert [key for key, split in held_out.items() if split == "dev"] == ["key 8", "key 39"]


def _bare(hold_out: float) -> dict[str, Any]:
    return {"kind": "hub", "role": "text", "language": "eng", "hold_out": hold_out}


@pytest.mark.parametrize(
    "code", ["", "deu_", "DEU", "deu_latn", "deu_Xxxx", "deu-", "qqq-eng", "english", "Python"]
)
def test_unknown_languages(code: str) -> None:
    with pytest.raises(ValueError, match=r"unknown (language|script)"):
        check_language(code)


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
