"""An `Embedder` as a directory that sentence-transformers, transformers and `Embedder` itself load."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from unmask.models import backbone
from unmask.models.interchange.card import model_card
from unmask.models.interchange.loading import POOLING
from unmask.store import new_directory

if TYPE_CHECKING:
    from unmask.models.embedder import Embedder

CAUSAL_BEFORE = {
    "specifier": ">=5.2",
    "reason": "Earlier versions ignore is_causal = false and compute other embeddings.",
}


def save(embedder: Embedder, path: str | Path) -> Path:
    """Writes an embedder so that `SentenceTransformer(path)` returns its float vectors, without remote code.

    Beside the weights (safetensors), configuration and tokenizer, which AutoModel and AutoTokenizer load, lie
    sentence-transformers' files, in the spelling that all its versions read; unmask.json, from which
    `Embedder.from_pretrained` gets everything back; and a model card. sentence-transformers takes special
    tokens from the tokenizer, so for an embedder without them a tokenizer is saved that adds none.

    A directory is written under a temporary name and renamed; an older one stays until then.
    """
    path = Path(path)
    options = {
        "pooling": embedder.pooling,
        "max_length": embedder.max_length,
        "special_tokens": embedder.special_tokens,
        "separator": embedder.tokenizer.convert_ids_to_tokens(embedder.separator_id),
        "normalize": embedder.normalize,
    }
    facts = _origin(embedder) | options
    with new_directory(path) as folder:
        backbone.write(embedder.model, portable_tokenizer(embedder), folder, **facts)
        for name, content in _sentence_transformers_files(embedder, facts.get("prompts", {})).items():
            file = folder / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf8")
        (folder / "README.md").write_text(model_card(embedder, facts, path.name), encoding="utf8")
    return path


def _origin(embedder: Embedder) -> dict[str, Any]:
    """Facts of the checkpoint that the model was loaded from, but for its identity as a training's result."""
    source = embedder.model.name_or_path
    facts = backbone.facts(source) if source else {}
    return {key: value for key, value in facts.items() if key != "fingerprint"}


def portable_tokenizer(embedder: Embedder) -> PreTrainedTokenizerBase:
    """The tokenizer for use without us: it pads at the end and adds the special tokens of the embedder.

    The classes of some tokenizers add special tokens whatever their files say; the general class does not.
    """
    tokenizer = copy.deepcopy(embedder.tokenizer)
    if not embedder.special_tokens and tokenizer.num_special_tokens_to_add():
        tokenizer.backend_tokenizer.post_processor = None
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend_tokenizer, **tokenizer.special_tokens_map
        )
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _sentence_transformers_files(embedder: Embedder, prompts: dict[str, str]) -> dict[str, Any]:
    pooling = next(name for name, ours in POOLING.items() if ours == embedder.pooling)
    kinds = ["Transformer", "Pooling", *(["Normalize"] if embedder.normalize else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    return {
        "modules.json": [
            {"idx": i, "name": str(i), "path": paths[i], "type": f"sentence_transformers.models.{kind}"}
            for i, kind in enumerate(kinds)
        ],
        "sentence_bert_config.json": {"max_seq_length": embedder.max_length, "do_lower_case": False},
        "1_Pooling/config.json": {
            "word_embedding_dimension": embedder.model.config.hidden_size,
            "pooling_mode_mean_tokens": pooling == "mean",
            "pooling_mode_lasttoken": pooling == "lasttoken",
        },
        "config_sentence_transformers.json": {
            "model_type": "SentenceTransformer",
            "similarity_fn_name": "cosine",
            "prompts": prompts,
            "requirements": {"transformers": CAUSAL_BEFORE},
        },
    }
