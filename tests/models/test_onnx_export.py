import sys

import numpy as np
import pytest
from transformers import AutoTokenizer

import tiny
from unmask import Embedder
from unmask.models.onnx_export import export_onnx

onnxruntime = pytest.importorskip("onnxruntime", reason="no ONNX: pip install 'unmask[onnx]'")
pytest.importorskip("onnxscript", reason="no ONNX: pip install 'unmask[onnx]'")

WORDS = " ".join(tiny.TEXTS[:5]).split()
LONG = " ".join(WORDS)
BATCHES = [["a"], ["Read a table."], [LONG], ["Read a table.", LONG, "a"], [LONG, "def close(self)", "b c"]]


@pytest.fixture(scope="module")
def embedder():
    return Embedder(tiny.model(), tiny.tokenizer(), device="cpu")


@pytest.fixture(scope="module")
def path(embedder, tmp_path_factory):
    return export_onnx(embedder, tmp_path_factory.mktemp("exported") / "model")


def run(path, texts: list[str]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The outputs by name, and the attention mask."""
    session = onnxruntime.InferenceSession(path / "model.onnx", providers=["CPUExecutionProvider"])
    inputs = AutoTokenizer.from_pretrained(path)(
        texts, padding=True, padding_side="right", return_tensors="np"
    )
    names = [output.name for output in session.get_outputs()]
    fed = {name: inputs[name].astype(np.int64) for name in ("input_ids", "attention_mask")}
    return dict(zip(names, session.run(None, fed))), fed["attention_mask"]


def check(outputs, mask_BL, embedder, texts):
    pooled = outputs["sentence_embedding"]
    np.testing.assert_allclose(pooled, embedder.encode(texts, "float32"), atol=1e-4)
    assert (outputs["int8"].dtype, outputs["binary"].dtype) == (np.int8, np.uint8)
    difference = abs(outputs["int8"].astype(int) - embedder.encode(texts, "int8"))
    assert difference.max() <= 1
    assert (difference > 0).mean() <= 0.01
    assert (outputs["binary"] != embedder.encode(texts, "ubinary")).mean() <= 0.01
    assert outputs["token_embeddings"].shape == (*mask_BL.shape, 32)
    np.testing.assert_array_equal(outputs["binary"], np.packbits(pooled >= 0, axis=1))


@pytest.mark.parametrize("texts", BATCHES)
def test_onnxruntime_returns_what_the_embedder_returns(path, embedder, texts):
    outputs, mask_BL = run(path, texts)
    assert list(outputs) == ["token_embeddings", "sentence_embedding", "int8", "binary"]
    check(outputs, mask_BL, embedder, texts)
    hidden_BLD, mask_BL1 = outputs["token_embeddings"].astype(float), mask_BL[..., None]
    mean_BD = (hidden_BLD * mask_BL1).sum(axis=1) / mask_BL1.sum(axis=1)
    np.testing.assert_allclose(outputs["sentence_embedding"], mean_BD, atol=1e-5)


@pytest.mark.parametrize("more", [[], [LONG]])
def test_the_last_token_reaches_the_first_position(path, more):
    one, two = (run(path, [f"Read {end}", *more])[0]["token_embeddings"][0, 0] for end in "12")
    assert abs(one - two).max() > 1e-4


def test_the_directory_holds_graph_weights_and_tokenizer(path):
    assert {file.name for file in path.iterdir()} == {
        "model.onnx", "model.onnx.data", "tokenizer.json", "tokenizer_config.json"
    }  # fmt: skip
    assert [p.name for p in path.parent.iterdir()] == ["model"]


@pytest.mark.slow
def test_last_token_pooling_unit_length_and_the_causal_mask_are_exported(tmp_path):
    options = {"pooling": "last", "normalize": True, "device": "cpu"}
    embedder = Embedder(tiny.model(bidirectional=False), tiny.tokenizer(), **options)
    path = export_onnx(embedder, tmp_path / "m")
    for texts in BATCHES:
        check(*run(path, texts), embedder, texts)
    one, two = (run(path, [f"Read {end}"])[0]["token_embeddings"][0] for end in "12")
    np.testing.assert_array_equal(one[0], two[0])
    assert abs(one[-1] - two[-1]).max() > 1e-4


def test_what_cannot_be_exported_is_refused_before_anything_is_written(embedder, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(embedder.model.config, "hidden_size", 36)
        with pytest.raises(ValueError, match="the model has 36: no multiple of 8"):
            export_onnx(embedder, tmp_path / "m")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"needs onnxscript: pip install 'unmask\[onnx\]'"):
        export_onnx(embedder, tmp_path / "m")
    assert not list(tmp_path.iterdir())
