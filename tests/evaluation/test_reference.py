from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

import tiny
from unmask.config import load_preset
from unmask.evaluation import tasks
from unmask.evaluation.tasks import REFERENCE, Task, evaluate_reference, load_reference, missing_reference
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
    monkeypatch.setattr(tasks, "load_reference", lambda config: embedder)
    scores = evaluate_reference([TASK], CONFIG)
    q_ND, d_MD = (embedder.encode(texts, "float32").astype(float) for texts in (TASK.queries, TASK.chunks))
    q_ND, d_MD = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (q_ND, d_MD))
    rank_N = [1 + (row > row[min(own)]).sum() for row, own in zip(q_ND @ d_MD.T, TASK.relevant)]
    np.testing.assert_allclose(scores[REFERENCE]["files"], 1 / np.log2(1 + np.array(rank_N)))
    monkeypatch.setattr(Embedder, "encode", lambda *_, **__: pytest.fail("encoded again"))
    np.testing.assert_array_equal(
        evaluate_reference([TASK], CONFIG)[REFERENCE]["files"], scores[REFERENCE]["files"]
    )


def test_without_the_extra_tables_say_not_run(monkeypatch):
    monkeypatch.setattr(tasks, "PACKAGE", "no_such_package")
    assert load_reference(CONFIG) is None and evaluate_reference([TASK], CONFIG) == {}
    table = markdown_table([{"model": "BM25", "files": 0.5}, *missing_reference("model")])
    assert table.splitlines()[-1] == f"| {REFERENCE} | not run |"


@pytest.mark.skipif(not find_spec(tasks.PACKAGE), reason="no extra: install unmask[reference]")
def test_it_is_the_model_that_sentence_transformers_loads():
    from sentence_transformers import SentenceTransformer

    found = load_reference(CONFIG)
    texts = [*TEXTS, "a very long text of many words " * 60]  # 256 tokens are read
    theirs = SentenceTransformer(found.model.config._name_or_path, device="cpu")
    np.testing.assert_allclose(found.encode(texts, "float32"), theirs.encode(texts), atol=1e-5)
    assert evaluate_reference([TASK], CONFIG)[REFERENCE]["files"].tolist() == [1, 1]
    assert missing_reference("model") == []
