"""The embedded corpus on three made-up packages: what is read, what is kept apart, what is refused."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from unmask.data import environment, sources
from unmask.data.corpus import SCHEMAS, SPLITS, Corpus
from unmask.data.environment import (
    Package,
    clean,
    digest,
    installed_packages,
    mask_name,
    split_summary,
    words_of,
)

LANGUAGES = ("en", "de", "fr")
SHARED = "Vendored helper that every package copies"
MODULE = '''"""Tools of {name} for {topic} and little else besides."""
import os

os.environ["UNMASK_IMPORTED"] = "{name}"


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


def make_packages(root: Path) -> list[Package]:
    packages = []
    for name, topic, cls in (
        ("alpha", "weather", "WeatherKeeper"),
        ("beta", "music", "MusicPlayer"),
        ("gamma", "harvest", "GrainStore"),
    ):
        folder = root / name
        folder.mkdir(parents=True)
        (folder / "tools.py").write_text(MODULE.format(name=name, topic=topic, cls=cls, shared=SHARED))
        (folder / "broken.py").write_text("def broken(:\n")
        files = (f"{name}/broken.py", f"{name}/tools.py")
        packages.append(
            Package(name, "1.0", "MIT", root, files, sum((root / f).stat().st_size for f in files))
        )
    return packages


def make_config(**changes) -> SimpleNamespace:
    values = {"source": "environment", "seed": 0, "vocab_size": 512, "max_packages": 0, "max_text_mb": 1}
    values["families"] = ()
    return SimpleNamespace(**values | {"dev_packages": ("beta",), "test_packages": ("gamma",)} | changes)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    root = tmp_path_factory.mktemp("corpus")
    return environment.build(make_config(), make_packages(root / "site"), root / "built", LANGUAGES)


def texts_of(corpus: Corpus, split: str) -> set[int]:
    pairs, documents = corpus.pairs(split), corpus.documents(split)
    asked = [query for row in documents for query in row["queries"]]
    return {digest(text) for text in [*pairs["query"], *pairs["document"], *asked]}


def test_columns(corpus):
    for split in SPLITS:
        assert corpus.texts(split).column_names == ["text", "package", "kind", "language"]
        assert corpus.pairs(split).column_names == SCHEMAS["pairs"].names
        for row in corpus.documents(split):
            assert len(row["queries"]) == len(row["golds"]) > 0
            assert all(0 < gold < len(row["chunks"]) for gold in row["golds"])
            assert 2 <= len(row["chunks"]) <= 10 and all(len(chunk.split()) <= 80 for chunk in row["chunks"])
        assert {"docs", "code", "cldr-cross", "cldr-multi"} == set(corpus.pairs(split)["dataset"])
        assert {"modules", "statistics"} == set(corpus.documents(split)["dataset"])
    with pytest.raises(ValueError, match="train, dev, test"):
        corpus.pairs("validation")


def test_pairs_say_what_they_should(corpus):
    rows = [row for row in corpus.pairs("train") if row["key"] == "alpha.tools.WeatherKeeper.fit"]
    docs, code = sorted(rows, key=lambda row: row["dataset"], reverse=True)
    assert docs["query"] == code["query"] == "Fit the WeatherKeeper to the given weather data."
    assert docs["document"].startswith("The data of alpha are read once") and docs["group"] == "english"
    assert code["document"].startswith("def fit(self, data):\n    checked") and '"""' not in code["document"]
    assert code["group"] == "code"


def test_packages_and_entities_are_held_out_whole(corpus):
    held = []
    for split, package in (("train", "alpha"), ("dev", "beta"), ("test", "gamma")):
        for read in (corpus.pairs, corpus.documents, corpus.texts):
            assert set(read(split)["package"]) <= {package, "cldr"}
        ids = {name.rsplit("/", 1)[0] for name in corpus.documents(split)["document_id"]}
        held.append(ids | set(corpus.pairs(split)["key"]))
    assert len(set.union(*held)) == sum(map(len, held))


def test_no_text_is_in_two_splits(corpus):
    train, dev, test = (texts_of(corpus, split) for split in SPLITS)
    assert not train & dev and not train & test and not dev & test
    # Every package copies the same function: only the test split, served first, keeps it.
    assert any(SHARED in query for query in corpus.pairs("test")["query"])
    for split in ("train", "dev"):
        texts = [*corpus.texts(split)["text"], *corpus.pairs(split)["query"]]
        assert not any(SHARED in text for text in texts)


def test_only_the_heading_names_the_owner(corpus):
    rows = [row for row in corpus.documents("train") if row["dataset"] == "modules"]
    assert rows
    for row in rows:
        heading, *chunks = row["chunks"]
        assert "WeatherKeeper" in heading
        assert not any(re.search("weather ?keeper", chunk, re.IGNORECASE) for chunk in chunks)
        assert all(re.search("weather ?keeper", query, re.IGNORECASE) for query in row["queries"])
        assert [chunk.partition(":")[0] for chunk in chunks] == ["fit(data)", "close()", "save(path, mode)"]


def test_nothing_is_executed(corpus):
    assert "UNMASK_IMPORTED" not in os.environ
    assert corpus.card["dropped"]["environment"]["files: unreadable"] == 3


def test_same_hash_again_and_under_another_hash_seed(corpus, tmp_path):
    again = environment.build(make_config(), make_packages(tmp_path / "site"), tmp_path / "again", LANGUAGES)
    assert again.hash == corpus.hash
    other = environment.build(
        make_config(seed=1), make_packages(tmp_path / "x"), tmp_path / "other", LANGUAGES
    )
    assert other.hash != corpus.hash
    program = (
        "import sys; from pathlib import Path; from test_environment import *\n"
        f"root, name = Path({str(tmp_path)!r}), 'third'\n"
        "print(environment.build(make_config(), make_packages(root / 'child'), root / name, LANGUAGES).hash)"
    )
    folders = [str(Path(__file__).parent), str(Path(environment.__file__).parents[2])]
    variables = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(folders)}
    result = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True)
    assert result.stdout.strip() == corpus.hash, result.stderr


def test_open_corpus_builds_once(tmp_path, monkeypatch):
    monkeypatch.setenv("UNMASK_ARTIFACTS", str(tmp_path / "artifacts"))
    packages = make_packages(tmp_path / "site")
    monkeypatch.setattr(sources.environment, "installed_packages", lambda: packages)
    monkeypatch.setattr(sources.environment, "installed_versions", lambda: {"alpha": "1.0"})
    first = sources.open_corpus(make_config())
    monkeypatch.setattr(environment, "build", None)  # the second time there is nothing to build
    assert sources.open_corpus(make_config(vocab_size=1024)).hash == first.hash


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "enviroment"}, "did you mean 'environment'"),
        ({"test_packages": ("gama",)}, "nearest installed one is 'gamma'"),
        ({"dev_packages": ("gamma",)}, "test_packages and data.dev_packages"),
        ({"dev_packages": ()}, "No package is left for 'dev'"),
        ({"max_packages": 2}, "No package is left for 'train': 3 are installed, data.max_packages is 2"),
    ],
)
def test_bad_configuration_is_refused(changes, message, tmp_path, monkeypatch):
    monkeypatch.setenv("UNMASK_ARTIFACTS", str(tmp_path / "artifacts"))
    packages = make_packages(tmp_path / "site")
    monkeypatch.setattr(sources.environment, "installed_packages", lambda: packages)
    with pytest.raises(ValueError, match=message):
        sources.open_corpus(make_config(**changes))
    data = tmp_path / "artifacts" / "data"
    assert not data.exists() or all(path.suffix == ".lock" for path in data.iterdir())


def test_clean_split_mask_words():
    text = clean(
        "Return the :class:`~a.Tree` of ``x``. More about it.\n\n    Parameters\n    ----------\n    x : int"
    )
    assert text == "Return the a.Tree of x. More about it.\n\nParameters\nx : int"
    assert split_summary(text) == ("Return the a.Tree of x.", "More about it.\n\nParameters\nx : int")
    assert split_summary("fit(X, y) fits a model to data") == ("", "")
    assert words_of("RandomForestClassifier") == "random forest classifier"
    assert words_of("HTTPServer_v2") == "http server v2"
    assert (
        mask_name("Random forest classifiers, RandomForestClassifier()", "RandomForestClassifier")
        == "it, it()"
    )


def test_installed_packages_are_sorted_and_leave_out_tests_and_vendored_copies():
    packages = installed_packages()
    names = [package.name.lower() for package in packages]
    assert names == sorted(names) and {"python", "numpy", "torch"} <= set(names)
    assert not {"pip", "unmask"} & set(names)
    files = [file for package in packages for file in package.files]
    assert not any("/tests/" in file or "/_vendor/" in file for file in files)
    assert all(package.licence for package in packages)
