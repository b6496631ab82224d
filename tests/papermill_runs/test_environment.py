"""The script that makes the corpus of the installed packages, on three made-up ones: what is read, what is
kept apart, what is refused."""

import json
import math
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

import make
from make import Package, clean, digest, split_summary, words_of
from unmask.data import sources
from unmask_study import cli
from unmask_study.settings import load_preset

SPLITS = make.SPLITS
PAIRS = ("docs", "code", "cldr-cross", "cldr-multi")
DOCUMENTS = ("modules", "statistics")
TOPICS = {"alpha": ("weather", "WeatherKeeper"), "beta": ("music", "Player"), "gamma": ("harvest", "Store")}
SHARED = "Vendored helper that every package copies"
MODULE = '''"""Tools of {name} for {topic} and little else besides."""
import os

os.environ["UNMASK_IMPORTED"] = "{name}"


\f
class {cls}:
    """{cls} keeps the {topic} of a {name} in order."""

    def fit(self, data):
        """Fit the {cls} to the given {topic} data.

        The data of {name} are read once from start to end, checked for {topic} and kept in memory afterwards.
        """
        checked = list(data)
        self.{topic} = checked
        return self

    def close(self):
        """Close the {cls} and free what {topic} it holds."""

    def save(self, path, *, mode="w"):
        """Save the {cls} as a file of {topic}."""


def vendored(values):
    """{shared}.

    This paragraph is the same in all packages, so only one split may hold it, whatever else happens to it.
    """
    total = sum(values)
    return total / len(values)
'''


def make_packages(root):
    packages = []
    for name, (topic, cls) in TOPICS.items():
        folder = root / name
        folder.mkdir(parents=True)
        (folder / "tools.py").write_text(MODULE.format(name=name, topic=topic, cls=cls, shared=SHARED))
        (folder / "broken.py").write_text("def broken(:\n")
        packages.append(Package(name, "1.0", "MIT", root, (f"{name}/broken.py", f"{name}/tools.py")))
    return packages


SETTINGS = {"seed": 0, "dev_packages": ["beta"], "test_packages": ["gamma"], "max_packages": 3}


def built(root, **changes):
    """The rows of each file, and the card."""
    settings = SimpleNamespace(**SETTINGS | {"max_text_mb": 1} | changes)
    make.build(settings, make_packages(root / "site"), root / "built")
    return stored(root), json.loads((root / "built" / "card.json").read_text(encoding="utf8"))


def stored(root):
    return {path.stem: pq.read_table(path).to_pylist() for path in (root / "built").glob("*.parquet")}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return built(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def rows(corpus):
    """Those of some files in one split."""
    return lambda split, *names: [row for name in names for row in corpus[0][name] if row["split"] == split]


def test_every_split_has_rows_of_every_kind(corpus, rows):
    """Nothing of the packages is executed, and what cannot be read is counted."""
    assert "UNMASK_IMPORTED" not in os.environ
    assert corpus[1]["dropped"] == {"packages": {"files that are unreadable, generated or too large": 3}}
    assert corpus[0].keys() == {"environment", *PAIRS, *DOCUMENTS}
    assert all(rows(split, name) for split in SPLITS for name in corpus[0])
    for row in (row for split in SPLITS for row in rows(split, *DOCUMENTS)):
        assert len(row["queries"]) == len(row["golds"]) > 0
        assert all(0 < gold < len(row["chunks"]) for gold in row["golds"])
        assert 2 <= len(row["chunks"]) <= 10 and all(len(chunk.split()) <= 80 for chunk in row["chunks"])


@pytest.mark.parametrize("count", [9, 20])  # of which a document holds nine
def test_a_query_asks_for_the_chunk_of_its_member(count):
    members = [(f"part{i}", f"part{i}(self)", f"Number{i} of all things.") for i in range(count)]
    owner = make.Owner("class", "Whole", "alpha.tools", "alpha", "All parts.", members)
    documents = [*make.documents_of([owner], 0)]
    assert len(documents) == math.ceil(count / 9)
    assert sum(len(row["chunks"]) - 1 for row in documents) == count
    for row in documents:
        for query, gold in zip(row["queries"], row["golds"], strict=True):
            topic = re.search(r"number\d+ of all", query)[0]
            assert topic in row["chunks"][gold].lower() and "whole" in query.lower()


def test_pairs_say_what_they_should(rows):
    key = "alpha.tools.WeatherKeeper.fit"
    docs, code = (row for row in rows("train", "docs", "code") if row["key"] == key)
    assert docs["query"] == code["query"] == "Fit the WeatherKeeper to the given weather data."
    assert docs["document"].startswith("The data of alpha are read once")
    assert code["document"].startswith("def fit(self, data):\n    checked") and '"""' not in code["document"]
    assert (docs["language"], code["language"]) == ("en", "python")


def test_packages_entities_and_texts_are_held_out_whole(rows):
    held, texts = [], []
    for split, package in zip(SPLITS, TOPICS, strict=True):
        text, pairs, documents = (rows(split, *names) for names in (["environment"], PAIRS, DOCUMENTS))
        assert {row["package"] for row in text + pairs + documents} <= {package, "cldr"}
        held.append({row["key"] for row in pairs + documents})
        queries = [query for row in documents for query in row["queries"]]
        queries += [row[column] for row in pairs for column in ("query", "document")]
        texts.append(set(map(digest, queries)))
        # Every package copies the same function: only the test split, served first, has it.
        assert any(SHARED in one for one in [*queries, *(row["text"] for row in text)]) == (split == "test")
    for parts in (held, texts):
        assert len(set.union(*parts)) == sum(map(len, parts))


def test_only_the_heading_names_the_owner(rows):
    documents = rows("train", "modules")
    assert documents
    for row in documents:
        heading, *chunks = row["chunks"]
        assert "WeatherKeeper" in heading
        assert not any(re.search("weather ?keeper", chunk, re.IGNORECASE) for chunk in chunks)
        assert all(re.search("weather ?keeper", query, re.IGNORECASE) for query in row["queries"])
        assert [chunk.partition(":")[0] for chunk in chunks] == ["fit(data)", "close()", "save(path, mode)"]


def test_same_rows_again_and_under_another_hash_seed(corpus, tmp_path):
    assert built(tmp_path / "other", seed=1)[0] != corpus[0]
    code = "import sys, pathlib, test_environment; test_environment.built(pathlib.Path(sys.argv[1]))"
    paths = {"PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code, tmp_path], env=os.environ | paths, check=True)
    assert stored(tmp_path) == corpus[0]


REFUSED = [
    ({"test_packages": ["gama"]}, "gama is not installed; did you mean 'gamma'"),
    ({"dev_packages": ["gamma"]}, "no package is left for dev"),
    ({"max_packages": 2}, "no package is left for train"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_settings_are_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        built(tmp_path, **changes)


def test_docstrings_without_markup_in_summary_and_rest():
    text = "Return the :class:`~a.Tree` of ``x``. More of it.\n\n    Parameters\n    ----------\n    x : int"
    assert clean(text) == "Return the a.Tree of x. More of it.\n\nParameters\nx : int"
    assert split_summary(clean(text)) == ("Return the a.Tree of x.", "More of it.\n\nParameters\nx : int")
    assert split_summary("fit(X, y) fits a model to data") == ("", "")
    assert words_of("HTTPServer_v2") == "http server v2"


def touch(*files):
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


@pytest.fixture
def site(tmp_path, monkeypatch):
    """What is installed here are three packages, listed with one more that is not."""
    site = tmp_path / "site"
    for package in make_packages(site):
        others = [f"{package.name}/{place}/tools.py" for place in ("tests", "_vendor")]
        touch(*(site / file for file in others))
        install(site, package.name, package.version, [*others, *package.files, "../bin/tool.py", "read.me"])
    touch(tmp_path / "stdlib/abc.py", tmp_path / "stdlib/idlelib/help.py")
    (tmp_path / "list.txt").write_text("# read\nalpha==1.0\nbeta==1.0\ndelta==1.0\ngamma==2.0\n")
    monkeypatch.setattr(make, "LIST", tmp_path / "list.txt")
    paths = SimpleNamespace(get_path=lambda name: str(tmp_path / "stdlib" if name == "stdlib" else site))
    monkeypatch.setattr(make, "sysconfig", paths)
    return site


def install(site, name, version, files):
    about = site / f"{name}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (about / "RECORD").write_text("".join(f"{file},,\n" for file in files))


def test_what_is_listed_is_read_without_tests_and_vendored_copies_and_nothing_else(site):
    install(site, "tool", "1.0", ["alpha/tools.py"])
    (site / "delta-1.0.dist-info").mkdir()  # left by an uninstallation
    packages = make.installed_packages()
    expected = {name: (f"{name}/broken.py", f"{name}/tools.py") for name in TOPICS} | {"python": ("abc.py",)}
    assert {one.name: one.files for one in packages} == expected
    assert make.installed_versions().keys() == expected.keys()
    assert (packages[0].version, packages[0].licence) == ("1.0", "not stated")


def test_missing_and_other_versions_are_named(site, tmp_path, monkeypatch, capsys):
    make.main()
    about = json.loads(capsys.readouterr().out)
    assert about["departures"] == "delta is missing (listed: 1.0), gamma 1.0 (listed: 2.0)"
    assert about["inputs"].keys() == {*TOPICS, "python"}
    data = load_preset("smoke").data
    monkeypatch.setattr(sources, "_describe", lambda script: about)
    cli._require(load_preset("smoke"))  # what a run begins with
    note = capsys.readouterr().out
    assert "because of delta is missing" in note and "`make install` gets what is listed" in note
    assert sources.departures(load_preset("mirror").data) == ""  # reads none
    monkeypatch.setenv("UNMASK_CORPUS", str(tmp_path))
    assert sources.departures(data) == ""
    install(site, "delta", "1.0+cpu", [])
    make.LIST.write_text(make.LIST.read_text().replace("2.0", "1.0"))
    assert make.departures() == ""
