"""Embedders as ONNX files. Shape suffixes: B texts · L tokens · D dimensions."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unmask.extras import extra
from unmask.models.checkpoint import portable
from unmask.models.embedder import Embedder
from unmask.models.encoding import POOLS
from unmask.models.quantize import int8
from unmask.store import new_directory, write_json


def export_onnx(embedder: Embedder, path: str | Path) -> Path:
    """Writes model.onnx, its weights in model.onnx.data, the tokenizer and unmask.json, with lengths and
    prompts, into a directory.

    Inputs, int64, of any number and length of texts: `input_ids` (B, L) and `attention_mask` (B, L), padded
    at the end. Outputs:

    - `token_embeddings` (B, L, D) float32: after the final norm, for late chunking and late interaction;
    - `sentence_embedding` (B, D) float32: pooled, of unit length if the embedder's are;
    - `int8` (B, D) int8: the codes ⌊127 · tanh(mean) + 1/2⌋, as from `Embedder.encode`.

    Binary embeddings are the signs of `sentence_embedding`. The extra `onnx` has to be installed.

    Raises: ValueError for a model that is not in float32, which onnxruntime would refuse.

    Source: pplx-embed, section 2.2.
    """
    with extra("onnx"):
        import onnxscript  # noqa: F401, PLC0415 (torch's export needs it)
    if wrong := {str(x.dtype) for x in embedder.model.parameters()} - {"torch.float32"}:
        raise ValueError(f"the model has weights in {min(wrong)}: load it with mixed_precision=False")
    path, names = Path(path), ("input_ids", "attention_mask")
    any_size = dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC)
    with new_directory(path) as folder:
        portable(embedder.tokenizer, embedder.settings).save_pretrained(folder)
        write_json(folder / "unmask.json", embedder.settings.facts)
        with torch.inference_mode():
            torch.onnx.export(
                _Outputs(embedder).eval(),
                tuple(torch.ones(2, 2, 8, dtype=torch.int64, device=embedder.model.device)),
                folder / "model.onnx",
                verbose=False,
                external_data=True,  # a file of ONNX's own format holds 2 GB at most
                input_names=names,
                output_names=["token_embeddings", "sentence_embedding", "int8"],
                dynamic_shapes=dict.fromkeys(names, any_size),
            )
    return path


class _Outputs(nn.Module):
    def __init__(self, embedder: Embedder):
        super().__init__()
        self.model, self.settings = embedder.model, embedder.settings

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        read = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        hidden_BLD = read.last_hidden_state
        pooled_BD = POOLS[self.settings.pooling](hidden_BLD, attention_mask)
        if self.settings.normalize:
            pooled_BD = F.normalize(pooled_BD, dim=-1)
        return hidden_BLD, pooled_BD, int8(pooled_BD).to(torch.int8)
