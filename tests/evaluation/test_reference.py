from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

import tiny
from unmask.config import load_preset
from unmask.evaluation import reference
from unmask.evaluation.reference import NAME
from unmask.evaluation.tasks import Task
from unmask.models.embedder import Embedder
from unmask.study.report import markdown_table

CONFIG = replace(load_preset("smoke").evaluation, precision="fp32")
TEXTS = ["Read a table from a file.", "東京は日本の首都です。", "Compute the mean of an array."]
TASK = Task("files", "english", TEXTS[:2], [[text] for text in reversed(TEXTS)], [{2}, {1}])


@pytest.fixture(autouse=True)
def artifacts(tmp_path, monkeypatch):
    monkeypatch.setenv("UNMASK_ARTIFACTS", str(tmp_path / "artifacts"))


def test_scores_are_those_of_cosine_similarity_and_computed_once(monkeypatch):
    embedder = Embedder(tiny.model(), tiny.tokenizer(), device="cpu")
    monkeypatch.setattr(reference, "load", lambda config: embedder)
    scores = reference.evaluate([TASK], CONFIG)
    q_ND, d_MD = (embedder.encode(texts, "float32").astype(float) for texts in (TASK.queries, TASK.chunks))
    q_ND, d_MD = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (q_ND, d_MD))
    rank_N = [1 + (row > row[min(own)]).sum() for row, own in zip(q_ND @ d_MD.T, TASK.relevant)]
    np.testing.assert_allclose(scores[NAME]["files"], 1 / np.log2(1 + np.array(rank_N)))
    monkeypatch.setattr(Embedder, "encode", lambda *_, **__: pytest.fail("encoded again"))
    np.testing.assert_array_equal(reference.evaluate([TASK], CONFIG)[NAME]["files"], scores[NAME]["files"])


def test_without_the_extra_tables_say_not_run(monkeypatch):
    monkeypatch.setattr(reference, "PACKAGE", "no_such_package")
    assert reference.load(CONFIG) is None and reference.evaluate([TASK], CONFIG) == {}
    table = markdown_table([{"model": "BM25", "files": 0.5}, *reference.missing("model")])
    assert table.splitlines()[-1] == f"| {NAME} | not run |"


@pytest.mark.skipif(not find_spec(reference.PACKAGE), reason="no extra: install unmask[reference]")
def test_it_is_the_model_that_sentence_transformers_loads():
    from sentence_transformers import SentenceTransformer

    found = reference.load(CONFIG)
    texts = [*TEXTS, "a very long text of many words " * 60]
    theirs = SentenceTransformer(found.model.config._name_or_path, device="cpu")
    assert (found.max_length, found.mixed_precision) == (256, False)
    np.testing.assert_allclose(found.encode(texts, "float32"), theirs.encode(texts), atol=1e-5)
    assert reference.evaluate([TASK], CONFIG)[NAME]["files"].tolist() == [1, 1]
    assert reference.missing("model") == []
