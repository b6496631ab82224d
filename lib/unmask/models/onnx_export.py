"""An `Embedder` as an ONNX graph, from token ids to all its outputs.

Legend: B texts, L tokens, D dimensions.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from unmask.models.interchange import portable_tokenizer
from unmask.store import new_directory

if TYPE_CHECKING:
    from unmask.models.embedder import Embedder

OUTPUTS = ("token_embeddings", "sentence_embedding", "int8", "binary")
LARGEST_BIT_FIRST = (128, 64, 32, 16, 8, 4, 2, 1)  # as np.packbits


def export_onnx(embedder: Embedder, path: str | Path) -> Path:
    """Writes model.onnx, its weights in model.onnx.data, and the tokenizer into a directory.

    Inputs, int64, of any number and length of texts: `input_ids` (B, L) and `attention_mask` (B, L), padded
    at the end. Outputs:

    - `token_embeddings` (B, L, D) float32: after the final norm, for late chunking and late interaction;
    - `sentence_embedding` (B, D) float32: pooled, of unit length if the embedder's are;
    - `int8` (B, D) int8: the codes ⌊127 · tanh(mean) + 1/2⌋;
    - `binary` (B, D / 8) uint8: the signs, eight to a byte, the first dimension in the most significant bit.

    `int8` and `binary` are as from `Embedder.encode` in the precisions "int8" and "ubinary".

    Raises:
        ImportError: the extra `onnx` is not installed.
        ValueError: the dimensions are no multiple of 8.

    Source: pplx-embed, section 2.2.
    """
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(f"ONNX export needs {error.name}: pip install 'unmask[onnx]'") from None
    size = embedder.model.config.hidden_size
    if size % 8:
        raise ValueError(f"binary packs 8 dimensions into a byte, and the model has {size}: no multiple of 8")
    path = Path(path)
    tokens_BL, mask_BL = torch.ones(2, 2, 8, dtype=torch.int64, device=embedder.model.device)
    any_size = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    with new_directory(path) as folder:
        portable_tokenizer(embedder).save_pretrained(folder)
        with torch.inference_mode():
            torch.onnx.export(
                _Outputs(embedder).eval(),
                (tokens_BL, mask_BL),
                folder / "model.onnx",
                dynamo=True,
                verbose=False,
                external_data=True,  # a file of ONNX's own format holds 2 GB at most
                input_names=["input_ids", "attention_mask"],
                output_names=list(OUTPUTS),
                dynamic_shapes={"input_ids": any_size, "attention_mask": any_size},
            )
    return path


class _Outputs(nn.Module):
    def __init__(self, embedder: Embedder):
        super().__init__()
        self.model = embedder.model
        self.pooling = embedder.pooling
        self.normalize = embedder.normalize

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        hidden_BLD = self.model(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False
        ).last_hidden_state
        count_B1 = attention_mask.sum(dim=1, keepdim=True)
        if self.pooling == "last":
            index_B11 = (count_B1 - 1)[..., None].expand(-1, 1, hidden_BLD.shape[-1])
            pooled_BD = hidden_BLD.gather(1, index_B11)[:, 0]
        else:
            pooled_BD = (hidden_BLD * attention_mask[..., None]).sum(dim=1) / count_B1
        if self.normalize:
            pooled_BD = normalize(pooled_BD, dim=-1)
        codes_BD = torch.floor(127 * torch.tanh(pooled_BD) + 0.5).to(torch.int8)
        bits_BD8 = (pooled_BD >= 0).to(torch.int32).unflatten(-1, (-1, 8))
        weight_8 = torch.tensor(LARGEST_BIT_FIRST, dtype=torch.int32, device=pooled_BD.device)
        return hidden_BLD, pooled_BD, codes_BD, (bits_BD8 * weight_8).sum(dim=-1).to(torch.uint8)
