"""`unmask encode`: a file of texts becomes a file of embeddings."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiny
from unmask import Embedder, cli
from unmask.models import file_job

TEXTS = [f"{text} {number}" for number, text in enumerate(tiny.TEXTS)]


@pytest.fixture(scope="module")
def embedder():
    return Embedder(tiny.model(), tiny.tokenizer(), device="cpu")


@pytest.fixture(scope="module")
def model(embedder, tmp_path_factory):
    return embedder.save_pretrained(tmp_path_factory.mktemp("encode") / "model")


@pytest.fixture(params=["texts.jsonl", "texts.parquet", "texts.txt"])
def texts(request, tmp_path):
    path = tmp_path / request.param
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"body": text, "id": 1}) + "\n" for text in TEXTS))
    elif path.suffix == ".parquet":
        pq.write_table(pa.table({"body": TEXTS, "id": range(len(TEXTS))}), path)
    else:
        path.write_text("\n".join(TEXTS))
    return path


def test_every_format_gives_what_encode_gives(embedder, model, texts, tmp_path):
    command = ["encode", str(model), str(texts), str(tmp_path / "out.npy"), "--column", "body"]
    assert cli.main(command) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), embedder.encode(TEXTS))
    assert cli.main([*command, "--precision", "ubinary", "--dimensions", "16"]) == 0
    found = np.load(tmp_path / "out.npy")
    np.testing.assert_array_equal(found, embedder.encode(TEXTS, "ubinary", 16))
    assert {path.name for path in tmp_path.iterdir()} == {texts.name, "out.npy"}


@pytest.mark.parametrize(
    ("rows", "output", "message"),
    [
        (['{"text": "a"}', '{"text": ""}'], "out.npy", "texts.jsonl, row 2: text is no text, or empty"),
        (['{"text": "a"}', '{"text": 7}'], "out.npy", "texts.jsonl, row 2: text is no text, or empty: 7"),
        (['{"body": "a"}'], "out.npy", "there is no 'text'; known: body"),
        (['{"text": "a"}'], "out.bin", "an .npy file in a folder that exists"),
        (['{"text": "a"}'], "none/out.npy", "an .npy file in a folder that exists"),
    ],
)
def test_what_cannot_work_is_said_at_once(rows, output, message, model, tmp_path, capsys):
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(rows))
    assert cli.main(["encode", str(model), str(path), str(tmp_path / output)]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["texts.jsonl"]


def test_an_empty_line_of_text_is_refused(model, tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("a\n\nb")
    with pytest.raises(ValueError, match=r"texts.txt, line 2 is empty"):
        file_job.encode_file(model, path, tmp_path / "out.npy")


def test_an_interrupted_job_goes_on_where_it_stood(embedder, model, tmp_path, monkeypatch):
    path, output = tmp_path / "texts.txt", tmp_path / "out.npy"
    path.write_text("\n".join(TEXTS))
    monkeypatch.setattr(file_job, "CHARACTERS", 100)
    seen, real = [], Embedder.encode

    def counted(self, texts, *arguments, **options):
        if len(seen) >= 7:
            raise KeyboardInterrupt
        seen.extend(texts)
        return real(self, texts, *arguments, **options)

    monkeypatch.setattr(Embedder, "encode", counted)
    with pytest.raises(KeyboardInterrupt):
        file_job.encode_file(model, path, output)
    assert not output.exists() and 7 <= len(seen) < len(TEXTS)
    done, seen[:] = list(seen), []
    monkeypatch.setattr(
        Embedder, "encode", lambda self, texts, *a: seen.extend(texts) or real(self, texts, *a)
    )
    file_job.encode_file(model, path, output)
    assert done + seen == TEXTS
    np.testing.assert_array_equal(np.load(output), embedder.encode(TEXTS))
    assert {path.name for path in tmp_path.iterdir()} == {"texts.txt", "out.npy"}


def test_another_job_does_not_go_on_with_it(embedder, model, tmp_path, monkeypatch):
    path, output = tmp_path / "texts.txt", tmp_path / "out.npy"
    path.write_text("\n".join(TEXTS))
    monkeypatch.setattr(file_job, "CHARACTERS", 100)
    with monkeypatch.context() as patch:
        patch.setattr(file_job, "write_atomic", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            file_job.encode_file(model, path, output)
    file_job.encode_file(model, path, output, precision="float32")
    np.testing.assert_array_equal(np.load(output), embedder.encode(TEXTS, "float32"))
    assert {path.name for path in tmp_path.iterdir()} == {"texts.txt", "out.npy"}
