"""The contextual document encoder of CDE (section 4.2): a text's embedding depends on the corpus it is from.

A first backbone embeds J documents of the corpus, a second one reads these vectors in front of the tokens of
each text. The J vectors are a set: where there are fewer documents, a learned null vector stands in the rest.

Shape suffixes: J context slots · K context documents, at most J · B sequences · L tokens, slots included ·
D dimensions.
"""

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import BaseModelOutput

from unmask.models import backbone
from unmask.models.arguments import as_list
from unmask.models.checkpoint import Settings
from unmask.models.embedder import Embedder, Reading, Unit
from unmask.models.encoding import after_context
from unmask.store import new_directory, write_json

NULL = "null.safetensors"


class SecondStage(nn.Module):
    """A backbone that reads J context vectors in front of each sequence.

    Slots have no order: all of them have position 0, where rotary embeddings rotate by nothing, and the text
    counts its positions from 0 too, as it does without context. So the backbone stays a stock one. A
    text's tokens still meet each slot at their own position; CDE takes that away, too, inside its backbone
    (section 10.4).

    Args:
        model: a bidirectional backbone.
        slots: J.
    """

    def __init__(self, model: PreTrainedModel, slots: int):
        super().__init__()
        self.backbone, self.config, self.slots = model, model.config, slots
        # Every process starts from the same null vector.
        noise_D = torch.randn(model.config.hidden_size, generator=torch.Generator().manual_seed(0))
        self.null_D = nn.Parameter(noise_D * model.config.initializer_range)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, *, context_KD: Tensor, **inputs: Any
    ) -> BaseModelOutput:
        """What the backbone returns, slots included.

        Args:
            input_ids: (B, L), from `encoding.after_context`: the first J tokens of a sequence are not read.
            position_ids: where in its sequence each token is, if sequences lie one after the other.
            context_KD: vectors of the context documents; the null vector fills the slots that remain.
            inputs: what else the backbone takes.
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        tokens_BLD = self.backbone.get_input_embeddings()(input_ids)
        nulls_D = self.null_D.expand(self.slots - len(context_KD), -1)
        slots_JD = torch.cat([context_KD.to(nulls_D.dtype), nulls_D])
        slots_BLD = F.embedding(position_ids.clamp(max=self.slots - 1), slots_JD)
        both_BLD = torch.where((position_ids < self.slots)[..., None], slots_BLD, tokens_BLD)
        position_ids = (position_ids - self.slots).clamp(min=0)
        return self.backbone(inputs_embeds=both_BLD, position_ids=position_ids, **inputs)


class ContextualEncoder(nn.Module):
    """The two stages; they share no weights.

    Args:
        first: the backbone that embeds context documents; their vectors are mean-pooled.
        second: the backbone that embeds texts, pooled over the text alone.
        context: J, the number of context documents.
    Raises: ValueError if a backbone is causal.
    """

    def __init__(self, first: PreTrainedModel, second: PreTrainedModel, context: int):
        super().__init__()
        for model in (first, second):
            if getattr(model.config, "is_causal", True):
                right = "bidirectional backbones, for instance the checkpoint of the pair stage"
                raise ValueError(f"{model.name_or_path or 'the backbone'} is causal: take {right}")
        self.first, self.second, self.context = first, SecondStage(second, context), context


def save(
    encoder: ContextualEncoder,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    *,
    weights: Mapping[str, Tensor] | None = None,
    **facts: object,
) -> Path:
    """Writes a directory with two stock checkpoints, `first` and `second`, under a temporary name, then
    renames it.

    The null vector and unmask.json, with J as "context", lie beside them. Arguments as for `backbone.write`.
    """
    weights = weights or encoder.state_dict()
    models = {"first": (encoder.first, "first."), "second": (encoder.second.backbone, "second.backbone.")}
    with new_directory(path) as folder:
        for name, (model, prefix) in models.items():
            part = {key.removeprefix(prefix): x for key, x in weights.items() if key.startswith(prefix)}
            backbone.write(model, tokenizer, folder / name, weights=part)
        save_file({"null_D": weights["second.null_D"].contiguous()}, folder / NULL)
        write_json(folder / "unmask.json", {**facts, "context": encoder.context})
    return path


class ContextEmbedder(Embedder):
    """A contextual encoder, ready to embed: an `Embedder` that knows documents of the corpus. It pools by the
    mean over the text.

    >>> embedder = ContextEmbedder.from_pretrained("artifacts/context/model")  # doctest: +SKIP
    >>> embedder.with_context(some_documents).encode(["How do I open a file?"])            # doctest: +SKIP

    Queries and documents of one corpus are embedded in the same context. The context is embedded once, by
    `with_context`; from then on only the second stage runs. Without it the null vector is in all slots.

    Args:
        options: of `Embedder`.
    """

    def __init__(self, encoder: ContextualEncoder, tokenizer: PreTrainedTokenizerBase, **options: Any):
        super().__init__(encoder.second, tokenizer, **options)
        self.encoder, self._options = encoder, options
        self.context_KD = torch.empty(0, encoder.first.config.hidden_size)

    @classmethod
    def from_pretrained(cls, path: str | Path, **options: Any) -> "ContextEmbedder":
        """Loads a directory that the stage "cde" or `save_pretrained` wrote; options as for `Embedder`.

        Raises: ValueError if the directory holds something else.
        """
        path, known = Path(path), backbone.facts(path)
        if "context" not in known:
            plain = "a plain one is loaded by Embedder.from_pretrained"
            raise ValueError(f"{path} is no contextual encoder (stage cde): {plain}")
        first, second = (backbone.load(path / name) for name in ("first", "second"))
        encoder = ContextualEncoder(first, second, known["context"])
        encoder.second.null_D.data = load_file(path / NULL)["null_D"]
        stored = vars(Settings.of(known))
        return cls(encoder, backbone.load_tokenizer(path / "second"), **stored | options)

    def save_pretrained(self, path: str | Path) -> Path:
        """Writes a directory that `from_pretrained` loads, without the context."""
        return save(self.encoder, self.tokenizer, Path(path), **self.settings.facts)

    def with_context(self, texts: Iterable[str], *, max_length: int | None = None) -> "ContextEmbedder":
        """The same encoder, sharing its weights, in the context of these documents of the corpus.

        Args:
            texts: at most J; their order does not matter, and the null vector is in the slots that remain.
            max_length: tokens of one document at most; default: the embedder's own.
        Raises: ValueError for more than J documents; errors of `Embedder.encode`.
        """
        texts = as_list(texts, "with_context([text])")
        if len(texts) > self.encoder.context:
            raise ValueError(f"at most {self.encoder.context} context documents are read, got {len(texts)}")
        first = Embedder(self.encoder.first, self.tokenizer, **{**self._options, "normalize": False})
        informed = copy.copy(self)
        informed.context_KD = torch.from_numpy(first.encode(texts, "float32", max_length=max_length))
        return informed

    def rows(self, reading: Reading, *arguments: Any) -> tuple[np.ndarray, np.ndarray]:
        slots = self.encoder.context
        units = (Unit(after_context(unit.sequence, slots), unit.numbers) for unit in reading.units)
        in_context = reading._replace(units=units)
        return super().rows(in_context, *arguments, context_KD=self.context_KD)
