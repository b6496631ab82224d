"""A file of texts becomes a file of embeddings (`unmask encode`)."""

import gzip
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiny
from closeness import assert_close
from tiny_sources import write_as
from unmask import Embedder
from unmask.models import jobs
from unmask_study.__main__ import main
from waiting import wait_for

TEXTS = [f"{text} {number}" for number, text in enumerate(tiny.TEXTS * 3)]


@pytest.fixture(scope="module")
def embedder():
    return Embedder(tiny.model(), tiny.tokenizer(), device="cpu")


@pytest.fixture(scope="module")
def model(embedder, tmp_path_factory):
    return embedder.save_pretrained(tmp_path_factory.mktemp("encode") / "model")


@pytest.mark.parametrize("name", ["texts.jsonl", "texts.parquet", "texts.csv", "texts[1].txt", "*.txt.gz"])
def test_every_format_gives_what_encode_gives(embedder, model, name, tmp_path):
    path = tmp_path / name
    if ".txt" in name:
        with (gzip.open if path.suffix == ".gz" else open)(path, "wt") as file:
            file.write("\n".join(TEXTS))
    else:
        write_as(path, [{"id": number, "body": text} for number, text in enumerate(TEXTS)])
    command = ["encode", str(model), str(path), str(tmp_path / "out.npy"), "--column", "body"]
    assert main([*command, "--precision", "ubinary", "--dimensions", "16"]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), embedder.encode(TEXTS, "ubinary", 16))
    assert {path.name for path in tmp_path.iterdir()} == {name, "out.npy"}


def test_what_the_model_cannot_read_is_named_with_its_place(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jobs, "BATCH", 4)
    monkeypatch.setattr(jobs, "_texts", lambda path, column: iter([*TEXTS[:9], ""]))
    (tmp_path / "texts.txt").touch()
    assert main(["encode", str(model), str(tmp_path / "texts.txt"), str(tmp_path / "out.npy")]) == 2
    assert "texts.txt, row 10 has no tokens" in capsys.readouterr().err


REFUSED = [
    ("texts.jsonl", ['{"text": "a"}', '{"text": ""}'], "out.npy", "row 2: text is no text, or empty: ''; "),
    ("texts.jsonl", ['{"body": "a"}'], "out.npy", "row 1: there is no 'text'; known: body"),
    ("texts.parquet", ["no Parquet"], "out.npy", "texts.parquet cannot be read"),
    ("texts.txt", ["a", "", "b"], "out.npy", "texts.txt, row 2: text is no text, or empty"),
    ("texts.jsonl", ['{"text": "a"}'], "none/out.npy", "an .npy file in a folder that exists"),
    ("texts.doc", ["a"], "out.npy", "in no known format; there are .parquet"),
]


@pytest.mark.parametrize(("name", "rows", "output", "message"), REFUSED)
def test_what_cannot_work_is_said_at_once(name, rows, output, message, model, tmp_path, capsys):
    path = tmp_path / name
    path.write_text("\n".join(rows))
    assert main(["encode", str(model), str(path), str(tmp_path / output)]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("precision", ["int8", "float32", "weights", "between"])
def test_an_interrupted_job_goes_on_and_another_does_not(embedder, model, tmp_path, monkeypatch, precision):
    path, output = tmp_path / "texts.txt", tmp_path / "out.npy"
    path.write_text("\n".join(TEXTS))
    monkeypatch.setattr(jobs, "BATCH", 7)
    seen, ends, real = [], [14], Embedder.encode

    def counted(self, texts, *arguments):
        if texts and len(seen) in ends:
            raise KeyboardInterrupt
        seen.extend(texts)
        return real(self, texts, *arguments)

    monkeypatch.setattr(Embedder, "encode", counted)
    with pytest.raises(KeyboardInterrupt):
        jobs.encode_file(model, path, output, "text", "int8", None)
    assert not output.exists() and seen == TEXTS[:14]
    seen.clear()
    ends.clear()
    if precision == "weights":  # written anew, in place
        (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    if precision == "between":  # another job takes the place of what was done, and does nothing
        ends.append(0)
        with pytest.raises(KeyboardInterrupt):
            jobs.encode_file(model, path, output, "text", "float32", None)
        ends.clear()
    wanted = "float32" if precision == "float32" else "int8"
    jobs.encode_file(model, path, output, "text", wanted, None)
    assert seen == (TEXTS[14:] if precision == "int8" else TEXTS)
    expected = real(embedder, TEXTS, wanted)
    assert_close(np.load(output), expected, 1e-3)  # of other batches: a code may differ by one
    assert {path.name for path in tmp_path.iterdir()} == {"texts.txt", "out.npy"}


# --- the machines of a Ray cluster


DOCUMENTS = [TEXTS[i : i + 1 + i % 3] for i in range(len(TEXTS))]
TABLE = pa.table({"id": range(len(TEXTS)), "text": TEXTS, "chunks": DOCUMENTS})


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray", reason="no Ray here: install unmask[ray]")

    def started():
        with suppress(Exception):  # Ray gives its processes half a minute, beside other work too little
            ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        return ray.is_initialized()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # 15 by default: beside other tests they would starve
        wait_for(started)
    yield ray
    ray.shutdown()


@pytest.mark.slow
def test_two_workers_of_ray_give_what_encode_gives(cluster, embedder, model, tmp_path):
    dataset = cluster.data.from_arrow([TABLE.slice(0, 31), TABLE.slice(31)])
    how = {"batch_size": 7, "batch_format": "pyarrow", "concurrency": 2, "num_cpus": 0.5}
    arguments = {"fn_constructor_args": (str(model),), "fn_kwargs": {"dimensions": 16}}
    dataset.map_batches(jobs.Worker, **arguments, **how).write_parquet(str(tmp_path / "out"))
    found = pq.read_table(tmp_path / "out").sort_by("id")
    assert found["id"].to_pylist() == list(range(len(TEXTS))) and found["text"].to_pylist() == TEXTS
    assert found.schema.field("embedding").type == pa.list_(pa.int8(), 16)
    rows = np.array(found["embedding"].to_pylist())  # of other batches: a code may differ by one
    assert abs(rows - embedder.encode(TEXTS, dimensions=16)).max() <= 1


def test_a_worker_embeds_the_chunks_of_documents_in_their_context(embedder, model):
    found = jobs.Worker(model, "chunks")(TABLE, precision="float32", chunk_length=6)
    expected = embedder.encode_documents(DOCUMENTS, "float32", chunk_length=6)
    for one, two in zip(found["embedding"].to_pylist(), expected, strict=True):
        assert_close(one, two)
    none = jobs.Worker(model, "chunks")(TABLE[:0], dimensions=16)["embedding"]
    assert none.to_pylist() == [] and none.type == pa.list_(pa.list_(pa.int8(), 16))
