"""The multilingual part of the embedded corpus."""

from collections import Counter

import pytest

from unmask.data import cldr


@pytest.fixture(scope="module")
def rows() -> dict[str, list[dict]]:
    return cldr.harvest(0, ("en", "de", "fr", "ja", "ar"))


def test_deterministic_for_a_seed(rows):
    assert cldr.harvest(0, ("en", "de", "fr", "ja", "ar")) == rows
    assert cldr.harvest(1, ("en", "de", "fr", "ja", "ar")) != rows


def test_an_entity_lives_in_one_split(rows):
    for kind, column in (("pairs", "key"), ("documents", "document_id")):
        split_of = {}
        for row in rows[kind]:
            entity = row[column] if kind == "pairs" else row[column].rsplit("/", 1)[0]
            assert split_of.setdefault(entity, row["split"]) == row["split"]
        assert set(split_of.values()) == {"train", "dev", "test"}
    shares = Counter(row["split"] for row in rows["pairs"] if row["dataset"] == "cldr-multi")
    assert 0.7 < shares["train"] / shares.total() < 0.9


def test_pretraining_text_never_names_what_is_held_out(rows):
    held = {
        row["key"] for row in rows["pairs"] if row["split"] != "train" and row["key"].startswith("territory:")
    }
    lines = {line for row in rows["texts"] for line in row["text"].splitlines()}
    german = cldr.names(cldr.Locale.parse("de"))["territory"]
    assert held
    for key in held:
        assert f"de: {german[key.partition(':')[2]]}" not in lines
    assert all(row["split"] == "train" for row in rows["texts"])


def test_cross_lingual_pairs_have_two_languages_and_multilingual_ones_one(rows):
    for row in rows["pairs"]:
        assert row["query"] != row["document"]
        assert (row["group"], len(row["language"].split("-"))) in {("cross-lingual", 2), ("multilingual", 1)}
    evaluated = [
        row["key"] for row in rows["pairs"] if row["split"] == "test" and row["dataset"] == "cldr-cross"
    ]
    assert len(evaluated) == len(set(evaluated))  # one right answer each


def test_a_date_in_words_is_the_same_date_in_brief():
    draw = cldr.random.Random(0)
    key, write = cldr._draw("date", [], draw)
    year, month, day = key.removeprefix("date:").split("-")
    locale = cldr.Locale.parse("de")
    assert year in write(locale, True) and str(int(day)) in write(locale, True)
    assert write(locale, False) == f"{day}.{month}.{year[2:]}"


def test_only_the_heading_of_a_statistics_document_names_its_entity(rows):
    english = cldr.names(cldr.Locale.parse("en"))
    for row in rows["documents"]:
        _, kind, code, language = row["document_id"].split("/")
        heading, *sections = row["chunks"]
        name = english[kind][code] if language == "en" else None
        assert len(row["queries"]) == len(sections) >= 4
        assert row["golds"] == list(range(1, len(sections) + 1))
        if name:
            assert name in heading and all(name in query for query in row["queries"])
            assert not any(name.lower() in section.lower() for section in sections)
    assert {row["language"] for row in rows["documents"] if row["split"] == "test"} == {"en"}
