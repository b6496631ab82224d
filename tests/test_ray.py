"""What the machines of a Ray cluster make is what one process makes."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiny
from unmask import Embedder
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


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """An embedder, and where it was saved."""
    embedder = Embedder(tiny.model(), tiny.tokenizer(), device="cpu")
    return embedder, str(embedder.save_pretrained(tmp_path_factory.mktemp("ray") / "model"))


TABLE = pa.table({"id": range(len(TEXTS)), "text": TEXTS, "chunks": DOCUMENTS})


@pytest.mark.slow
def test_two_workers_of_ray_give_what_encode_gives(cluster, saved, tmp_path):
    embedder, model = saved
    dataset = cluster.data.from_arrow([TABLE.slice(0, 31), TABLE.slice(31)])
    how = {"batch_size": 7, "batch_format": "pyarrow", "concurrency": 2, "num_cpus": 0.5}
    arguments = {"fn_constructor_args": (model,), "fn_kwargs": {"dimensions": 16}}
    dataset.map_batches(jobs.Worker, **arguments, **how).write_parquet(str(tmp_path / "out"))
    found = pq.read_table(tmp_path / "out").sort_by("id")
    assert found["id"].to_pylist() == list(range(len(TEXTS))) and found["text"].to_pylist() == TEXTS
    assert found.schema.field("embedding").type == pa.list_(pa.int8(), 16)
    rows = np.array(found["embedding"].to_pylist())  # of other batches: a code may differ by one
    assert abs(rows - embedder.encode(TEXTS, dimensions=16)).max() <= 1


def test_a_worker_embeds_the_chunks_of_documents_in_their_context(saved):
    embedder, model = saved
    found = jobs.Worker(model, "chunks")(TABLE, precision="float32", chunk_length=6)
    expected = embedder.encode_documents(DOCUMENTS, "float32", chunk_length=6)
    for one, two in zip(found["embedding"].to_pylist(), expected, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5)
