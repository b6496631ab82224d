"""What the machines of a Ray cluster make is what one process makes."""

from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiny
from unmask import Embedder
from unmask.data.tokenized import build
from unmask.models import jobs

TEXTS = [f"{text} {number}" for number, text in enumerate(tiny.TEXTS * 3)]
DOCUMENTS = [TEXTS[i : i + 1 + i % 3] for i in range(len(TEXTS))]


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray", reason="no Ray here: install unmask[ray]")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # 15 by default: beside other tests they would starve
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.mark.slow
def test_two_workers_of_ray_give_what_encode_gives(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "BATCH", 7)
    embedder = Embedder(tiny.model(), tiny.tokenizer(), device="cpu")
    model = embedder.save_pretrained(tmp_path / "model")
    table = pa.table({"id": range(len(TEXTS)), "text": TEXTS, "chunks": DOCUMENTS})
    pq.write_table(table, tmp_path / "corpus.parquet", row_group_size=8)
    corpus, output = tmp_path / "corpus.parquet", tmp_path / "out"
    dataset = cluster.data.read_parquet(str(corpus))
    found = pq.read_table(jobs.encode_dataset(model, dataset, output, dimensions=16, workers=2)).sort_by("id")
    assert found["id"].to_pylist() == list(range(len(TEXTS))) and found["text"].to_pylist() == TEXTS
    assert found.schema.field("embedding").type == pa.list_(pa.int8(), 16)
    rows = np.array(found["embedding"].to_pylist())  # of other batches: a code may differ by one
    assert abs(rows - embedder.encode(TEXTS, dimensions=16)).max() <= 1

    options = {"chunks_column": "chunks", "precision": "float32", "chunk_length": 6, "workers": 2}
    with pytest.raises(ValueError, match="out is there already"):
        jobs.encode_dataset(model, dataset, output, **options)
    found = pq.read_table(jobs.encode_dataset(model, dataset, tmp_path / "two", **options)).sort_by("id")
    expected = embedder.encode_documents(DOCUMENTS, "float32", chunk_length=6)
    for one, two in zip(found["embedding"].to_pylist(), expected, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5)


@pytest.mark.slow
def test_a_cluster_prepares_data_as_one_machine_does(cluster, tmp_path, monkeypatch):
    units = range(1, 21)

    def counted(unit, bad=None):
        """Unit 3 → three numbers, and as many tokens."""
        if unit == bad:
            raise ValueError(f"unit {unit} is bad")
        return {"numbers": np.full(unit, unit, np.int32)}, {"tokens": unit}

    expected = build(tmp_path / "here", units, counted, "", workers=1)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert build(tmp_path / "x", units, counted, "", wanted=15).units == 5
    with pytest.raises(ValueError, match=r"^unit 12 is bad$"):
        build(tmp_path / "x", units, partial(counted, bad=12), "")
    found = build(tmp_path / "x", units, counted, "")
    assert (found.units, found.counters) == (expected.units, expected.counters)
    np.testing.assert_array_equal(found.array("numbers", "i4"), expected.array("numbers", "i4"))
