"""The multilingual part of the embedded corpus."""

import re
from collections import Counter

import pytest

import cldr

LANGUAGES = ("en", "de", "fr", "ja", "ar")
KINDS = ("texts", "pairs", "documents")


@pytest.fixture(scope="module")
def rows():
    return dict(zip(KINDS, cldr.harvest(0, LANGUAGES)))


def test_deterministic_for_a_seed(rows):
    assert [*cldr.harvest(0, LANGUAGES)] == [*rows.values()]
    both = (rows["documents"], cldr.harvest(1, LANGUAGES)[2])
    ours, others = ({row["key"] for row in documents if row["split"] == "test"} for documents in both)
    assert len(ours & others) < len(ours) / 3  # another seed asks for others


def test_an_entity_lives_in_one_split(rows):
    for kind in ("pairs", "documents"):
        splits = {(row["key"], row["split"]) for row in rows[kind]}
        assert len(splits) == len(dict(splits)) and {*dict(splits).values()} == {"train", "dev", "test"}
    shares = Counter(row["split"] for row in rows["pairs"] if row["dataset"] == "cldr-multi")
    assert 0.7 < shares["train"] / shares.total() < 0.9


def test_pretraining_text_never_names_what_is_held_out(rows):
    held = {row["key"] for row in rows["pairs"] if row["split"] != "train"}
    german = cldr.Locale.parse("de").territories
    names = [name for code, name in german.items() if f"territory:{code}" in held]
    lines = {line for row in rows["texts"] for line in row["text"].splitlines()}
    assert names and not any(f"de: {name}" in lines for name in names)
    assert all(row["split"] == "train" for row in rows["texts"])


def test_cross_lingual_pairs_have_two_languages_and_multilingual_ones_one(rows):
    for row in rows["pairs"]:
        assert row["query"] != row["document"]
        assert len(row["language"].split("-")) == {"cldr-cross": 2, "cldr-multi": 1}[row["dataset"]]
    cross = [row for row in rows["pairs"] if row["dataset"] == "cldr-cross" and row["split"] == "test"]
    assert len(cross) == len({row["key"] for row in cross})  # one right answer each


def test_only_the_heading_of_a_statistics_document_names_its_entity(rows):
    """And each query asks for the section of its topic."""
    locale, wording = cldr.Locale.parse("en"), {}
    for table in cldr._TABLES["sections"].values():
        for topic, sentences in table.items():
            wording.setdefault(topic, []).extend(re.sub(r"\{.*?\}", "\0", one) for one in sentences)
    english = {"territory": locale.territories, "language": locale.languages, "currency": locale.currencies}
    for row in rows["documents"]:
        _, kind, code, language = row["document_id"].split("/")
        assert row["key"] == f"cldr/{kind}/{code}"  # whatever the language
        heading, *sections = row["chunks"]
        assert row["golds"] == list(range(1, len(sections) + 1)) and len(row["queries"]) == len(sections) >= 4
        for query, section in zip(row["queries"], sections, strict=True):
            topic = max((topic for topic in wording if topic in query), key=len)
            patterns = [re.escape(one).replace("\0", ".+") for one in wording[topic]]
            assert any(re.fullmatch(one, section) for one in patterns)
        if language == "en":
            name = english[kind][code]
            assert name in heading and all(name in query for query in row["queries"])
            assert not any(name.lower() in section.lower() for section in sections)
    assert {row["language"] for row in rows["documents"] if row["split"] == "test"} == {"en"}
