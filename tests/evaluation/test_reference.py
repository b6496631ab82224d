import sys
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

import tiny
from unmask.config import load_preset
from unmask.evaluation import reference
from unmask.evaluation.reference import NAME, Reference
from unmask.evaluation.tasks import Task
from unmask.models.embedder import Embedder
from unmask.study.report import markdown_table

CONFIG = replace(load_preset("smoke").evaluation, precision="fp32")
TEXTS = ["Read a table from a file.", "東京は日本の首都です。", "Compute the mean of an array."]
TASK = Task("files", "english", TEXTS[:2], [[text] for text in reversed(TEXTS)], [{2}, {1}])
installed = pytest.mark.skipif(not find_spec(reference.PACKAGE), reason="no extra: install unmask[reference]")


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    monkeypatch.setenv("UNMASK_ARTIFACTS", str(tmp_path / "artifacts"))
    return tmp_path / "artifacts" / "data" / "reference"


def small(identity="tiny", **options):
    return Reference(Embedder(tiny.model(), tiny.tokenizer(), device="cpu", **options), identity)


class Unused:
    """In place of an embedder that must not be asked."""

    max_length, mixed_precision = 256, False

    def encode(self, *arguments, **options):
        raise AssertionError("encoded again")


def test_vectors_are_kept_by_what_decides_them(kept):
    first = small()
    vectors_ND = first.encode(TEXTS)
    np.testing.assert_array_equal(vectors_ND, first.embedder.encode(TEXTS, "float32"))
    np.testing.assert_array_equal(Reference(Unused(), "tiny").encode(TEXTS), vectors_ND)

    shorter, other = small(max_length=3).encode(TEXTS), small("other").encode(TEXTS)
    assert np.abs(shorter - vectors_ND).max() > 1e-3
    np.testing.assert_array_equal(other, vectors_ND)  # the same tiny model
    np.testing.assert_array_equal(first.encode(TEXTS[::-1]), vectors_ND[::-1])
    small(mixed_precision=True).encode(TEXTS)
    assert len(list(kept.iterdir())) == 5


def test_scores_are_those_of_cosine_similarity(monkeypatch):
    monkeypatch.setattr(reference, "load", lambda config: small())
    embedder, scores = small().embedder, reference.evaluate([TASK], CONFIG)
    q_ND, d_MD = (embedder.encode(texts, "float32").astype(float) for texts in (TASK.queries, TASK.chunks))
    q_ND, d_MD = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (q_ND, d_MD))
    rank_N = [1 + (row > row[min(own)]).sum() for row, own in zip(q_ND @ d_MD.T, TASK.relevant)]
    np.testing.assert_allclose(scores[NAME]["files"], 1 / np.log2(1 + np.array(rank_N)))
    assert list(scores) == [NAME]


def test_without_the_extra_tables_say_not_run(monkeypatch):
    monkeypatch.setattr(reference, "PACKAGE", "no_such_package")
    assert reference.load(CONFIG) is None
    assert reference.evaluate([TASK], CONFIG) == {}
    table = markdown_table([{"model": "BM25", "files": 0.5}, *reference.missing("model")])
    assert table.splitlines()[-1] == f"| {NAME} | not run |"


def test_other_weights_are_refused(tmp_path, monkeypatch):
    model = tmp_path / "no_such_package" / "model"
    model.mkdir(parents=True)
    (model.parent / "__init__.py").write_text("raise AssertionError('its code is not to be run')")
    (model / "model.safetensors").write_bytes(b"others")
    monkeypatch.setattr(reference, "PACKAGE", "no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    assert reference.missing("model") == []
    with pytest.raises(ValueError, match=r"other weights than all-MiniLM-L6-v2.*unmask\[reference\] anew"):
        reference.load(CONFIG)
    assert "no_such_package" not in sys.modules


@installed
def test_it_is_the_model_that_sentence_transformers_loads():
    from sentence_transformers import SentenceTransformer

    found = reference.load(CONFIG)
    texts = [*TEXTS, "a very long text of many words " * 60]
    theirs = SentenceTransformer(found.embedder.model.config._name_or_path, device="cpu")
    assert (found.embedder.max_length, found.embedder.mixed_precision) == (256, False)
    np.testing.assert_allclose(found.encode(texts), theirs.encode(texts), atol=1e-5)
    assert reference.evaluate([TASK], CONFIG)[NAME]["files"].tolist() == [1, 1]
    assert reference.missing("model") == []
