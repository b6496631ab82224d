"""The embedded corpus on three made-up packages: what is read, what is kept apart, what is refused."""

import json
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
    documents_of,
    harvest_file,
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


def texts_of(corpus: Corpus, split: str) -> dict[str, set[int]]:
    pairs, documents = corpus.pairs(split), corpus.documents(split)
    return {
        "queries": {digest(text) for text in pairs["query"]},
        "documents": {digest(text) for text in pairs["document"]},
        "asked": {digest(query) for row in documents for query in row["queries"]},
    }


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
    for read in (corpus.pairs, corpus.documents, corpus.texts):
        for split, package in (("train", "alpha"), ("dev", "beta"), ("test", "gamma")):
            assert set(read(split)["package"]) <= {package, "cldr"}
    keys = {split: set(corpus.pairs(split)["key"]) for split in SPLITS}
    ids = {split: {i.rsplit("/", 1)[0] for i in corpus.documents(split)["document_id"]} for split in keys}
    for a, b in (("train", "dev"), ("train", "test"), ("dev", "test")):
        assert not keys[a] & keys[b]
        assert not ids[a] & ids[b]


def test_no_text_is_in_two_splits(corpus):
    held = {split: texts_of(corpus, split) for split in SPLITS}
    for a, b in (("train", "dev"), ("train", "test"), ("dev", "test")):
        for kind in held[a]:
            assert not held[a][kind] & held[b][kind]
    # Every package copies the same function: only the test split, served first, keeps it.
    assert any(SHARED in query for query in corpus.pairs("test")["query"])
    for split in ("train", "dev"):
        assert not any(
            SHARED in text for text in [*corpus.texts(split)["text"], *corpus.pairs(split)["query"]]
        )


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


def test_card(corpus):
    card = corpus.card
    assert json.dumps(card)
    assert [(p["name"], p["licence"], p["split"]) for p in card["origins"]] == [
        ("alpha 1.0", "MIT", "train"),
        ("beta 1.0", "MIT", "dev"),
        ("gamma 1.0", "MIT", "test"),
    ]
    assert card["languages"] == ["de", "en", "fr"]
    assert card["sizes"]["pairs"]["docs"]["train"]["rows"] == len(corpus.pairs("train", "docs")) >= 1
    texts = card["sizes"]["texts"]["environment"]["test"]
    assert texts["characters"] == sum(len(row["text"]) for row in corpus.texts("test")) > 0
    sizes = card["sizes"]["documents"]["modules"]["test"]
    assert sizes["chunks"] == sum(len(row["chunks"]) for row in corpus.documents("test", "modules"))


def test_interrupted_build_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(environment, "_card", interrupt)
    with pytest.raises(KeyboardInterrupt):
        packages = make_packages(tmp_path / "site")
        environment.build(make_config(), packages, tmp_path / "data" / "built", LANGUAGES)
    assert list((tmp_path / "data").iterdir()) == []


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


def test_undocumented_packages_are_refused(tmp_path):
    packages = make_packages(tmp_path / "site")
    (packages[2].root / "gamma" / "tools.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match="no texts for 'test' after reading 3 packages; raise"):
        environment.build(make_config(), packages, tmp_path / "built", LANGUAGES)
    assert not (tmp_path / "built").exists()


def test_slice_takes_rich_and_quick_packages_first(tmp_path):
    sizes = {"huge": 9_000_000, "rich": 1_500_000, "poor": 1_000, "held": 5_000}
    packages = [Package(name, "1", "MIT", tmp_path, (), size) for name, size in sizes.items()]
    config = make_config(dev_packages=("poor",), test_packages=("held",), max_packages=3)
    assert environment.assign_splits(config, packages) == {"held": "test", "poor": "dev", "rich": "train"}


def test_larger_classes_become_several_documents(tmp_path):
    methods = "".join(
        f'    def step_{i}(self):\n        """Do step number {i} of Robot."""\n' for i in range(20)
    )
    (tmp_path / "m.py").write_text(f'class Robot:\n    """A robot with many steps."""\n{methods}')
    documents = documents_of(harvest_file("p", tmp_path, "m.py").owners, seed=0)
    assert [len(row["chunks"]) for row in documents] == [8, 8, 7]
    assert len({chunk for row in documents for chunk in row["chunks"]}) == 21


def test_generated_and_huge_files_are_skipped(tmp_path):
    (tmp_path / "generated.py").write_text("# This file was automatically generated from x.py\n")
    (tmp_path / "huge.py").write_text("x = 1\n" * 200_000)
    assert harvest_file("p", tmp_path, "generated.py").skipped == "generated"
    assert harvest_file("p", tmp_path, "huge.py").skipped == "too large"


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
