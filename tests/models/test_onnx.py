"""Embedders as ONNX files."""

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import tiny
import tiny_families
from unmask import Embedder
from unmask.models.onnx import export_onnx

pytest.importorskip("onnxscript", reason="no ONNX: pip install 'unmask[onnx]'")
onnxruntime = pytest.importorskip("onnxruntime", reason="no ONNX: pip install 'unmask[onnx]'")

LONG = " ".join(tiny.TEXTS)[:300]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_that_a_reader_would_refuse_are_refused(tmp_path, dtype):
    embedder = Embedder(tiny.model(), tiny.tokenizer(), device="cpu")
    embedder.model.layers[0].mlp.to(dtype)  # as mixed precision does
    with pytest.raises(ValueError, match=f"weights in {dtype}: load it with mixed_precision=False"):
        export_onnx(embedder, tmp_path / "model")
    assert not list(tmp_path.iterdir())


EXPORTED = [("llama", {}), ("qwen3", {"pooling": "last", "normalize": True})]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "options"), EXPORTED)
def test_onnxruntime_returns_what_the_embedder_returns(tmp_path, family, options):
    model = tiny_families.model(family, bidirectional=not options)
    embedder = Embedder(model, tiny.tokenizer(), device="cpu", **options)
    path = export_onnx(embedder, tmp_path / "model")
    files = {"model.onnx", "model.onnx.data", "tokenizer.json", "tokenizer_config.json"}
    files |= {"unmask.json"}
    assert {file.name for file in path.iterdir()} == files
    session = onnxruntime.InferenceSession(path / "model.onnx", providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    tokenizer = AutoTokenizer.from_pretrained(path)
    for texts in (["a"], [LONG], ["Read a table.", LONG, "a"]):
        inputs = tokenizer(texts, padding=True, padding_side="right", return_tensors="np")
        fed = {name: inputs[name].astype(np.int64) for name in ("input_ids", "attention_mask")}
        found = dict(zip(names, session.run(None, fed)))
        np.testing.assert_allclose(found["sentence_embedding"], embedder.encode(texts, "float32"), atol=1e-4)
        assert found["int8"].dtype == np.int8
        assert abs(found["int8"].astype(int) - embedder.encode(texts)).max() <= 1
        for ours, theirs in zip(embedder.encode_tokens(texts), found["token_embeddings"], strict=True):
            np.testing.assert_allclose(theirs[: len(ours)], ours, atol=1e-4)
