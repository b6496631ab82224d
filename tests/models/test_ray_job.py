"""The Ray Data job on a real cluster of two workers on this machine."""

from __future__ import annotations

import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiny
from unmask import Embedder
from unmask.models.ray_job import encode_dataset

TEXTS = [f"{text} {number}" for number, text in enumerate(tiny.TEXTS * 3)]
DOCUMENTS = [TEXTS[i : i + 1 + i % 3] for i in range(len(TEXTS))]


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray", reason="no Ray here: install unmask[ray]")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.mark.slow
def test_two_workers_give_what_encode_gives(cluster, tmp_path):
    embedder = Embedder(tiny.model(), tiny.tokenizer(), device="cpu")
    model = embedder.save_pretrained(tmp_path / "model")
    table = pa.table({"id": range(len(TEXTS)), "text": TEXTS, "chunks": DOCUMENTS})
    pq.write_table(table, tmp_path / "corpus.parquet", row_group_size=8)
    options = {"workers": 2, "batch_size": 7}

    path = encode_dataset(model, tmp_path / "corpus.parquet", tmp_path / "out", dimensions=16, **options)
    found = pq.read_table(path).sort_by("id")  # workers write as they finish
    assert found["id"].to_pylist() == list(range(len(TEXTS))) and found["text"].to_pylist() == TEXTS
    assert found.schema.field("embedding").type == pa.list_(pa.int8(), 16)
    rows = np.array(found["embedding"].to_pylist())
    assert (
        abs(rows - embedder.encode(TEXTS, dimensions=16)).max() <= 1
    )  # other batches: a code may differ by one

    dataset = cluster.data.from_arrow([table[:31], table[31:]])
    options |= {"chunks_column": "chunks", "precision": "float32", "chunk_length": 6}
    found = pq.read_table(encode_dataset(model, dataset, tmp_path / "out", **options)).sort_by("id")
    expected = embedder.encode_documents(DOCUMENTS, "float32", chunk_length=6)
    for one, two in zip(found["embedding"].to_pylist(), expected, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5)

    bad = cluster.data.from_items([{"text": "a"}, {"text": ""}])
    with pytest.raises(Exception, match="Text 1 of 2 has no tokens"):
        encode_dataset(model, bad, tmp_path / "none", workers=1)
    assert not (tmp_path / "none").exists()


def test_without_ray_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"install unmask\[ray\]"):
        encode_dataset("model", tmp_path, tmp_path / "out")
