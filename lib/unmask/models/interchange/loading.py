"""Checkpoints of ours and of others as stock models of transformers, with the options of their `Embedder`."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3Model,
)

from unmask.data.hub import MODEL, MODEL_FILES, Need, explained, unreachable
from unmask.data.tokens import END_OF_TEXT
from unmask.models import backbone
from unmask.models.pretrained import require_checkpoint

OPTIONS = ("pooling", "max_length", "special_tokens", "separator", "normalize")  # kept in unmask.json
RELEASED = "bidirectional_pplx_qwen3"  # model type of the four released pplx-embed checkpoints
POOLING = {"mean": "mean", "lasttoken": "last"}  # sentence-transformers' names, and ours


class Loaded(NamedTuple):
    """What an `Embedder` is made of; `options` are keyword arguments of its constructor."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    options: dict[str, Any]


def load(path: str | Path) -> Loaded:
    """Loads the checkpoint of an embedder, in float32, by directory or Hub name.

    It may be one of ours (a training stage's, or what `save` wrote), a sentence-transformers directory
    (Transformer and mean or last-token Pooling, perhaps Normalize), one of the four released pplx-embed
    checkpoints, or a plain transformers one, which is taken as the start of our training would take it: mean
    pooling, no special tokens. A prompt is part of no embedder: put it in front of the texts.

    Raises:
        ValueError: there is no checkpoint, its architecture is unknown to transformers, it has a
            sentence-transformers module or setting that `Embedder` has not, or its weights do not fit.
    """
    folder = _local(path)
    config = json.loads((folder / "config.json").read_text(encoding="utf8"))
    kind = config.get("model_type")
    if kind == RELEASED:
        return _released(folder, config)
    if kind not in CONFIG_MAPPING:
        raise ValueError(
            f"{path}: the architecture {kind!r} is unknown to the installed transformers, and code that "
            "comes with a checkpoint is not run: update transformers, or convert it to a stock class"
        )
    tokenizer = backbone.load_tokenizer(folder)
    tokenizer.backend_tokenizer.no_truncation()  # both may be set in its file; an `Embedder` cuts and pads
    tokenizer.backend_tokenizer.no_padding()
    facts = backbone.facts(folder)
    if facts:
        options = {key: facts[key] for key in OPTIONS if key in facts}
    elif (folder / "modules.json").is_file():
        options = _sentence_transformers_options(folder, tokenizer)
    else:
        options = {}
    return Loaded(backbone.load(folder), tokenizer, options)


def _local(path: str | Path) -> Path:
    """The checkpoint's directory; a Hub name is downloaded, or found in the mirror or the Hub's cache."""
    source = require_checkpoint(path)
    if not Path(source).is_dir():
        source = require_checkpoint(Path(_downloaded(source)))
    return Path(source)


def _downloaded(name: str) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        with explained(Need(name, "model", "main", MODEL)):
            patterns = [f"*{ending}" for ending in MODEL_FILES]
            return snapshot_download(name, allow_patterns=patterns, ignore_patterns="*/*.safetensors")
    except LocalEntryNotFoundError as error:
        why = unreachable() or str(error).partition("\n")[0]
        raise ValueError(
            f"{name} is no directory here, is not whole in the Hub's cache, and the Hub cannot be reached "
            f"({why}): check the name, or fill a mirror on a host with internet (`unmask mirror pull`) and "
            "set UNMASK_MIRROR here"
        ) from None


def _released(folder: Path, config: dict[str, Any]) -> Loaded:
    """A released pplx-embed checkpoint as a stock Qwen3: its own class differs in nothing but the mask."""
    theirs = ("model_type", "architectures", "auto_map")
    stock = {key: value for key, value in config.items() if key not in theirs and value is not None}
    stock |= {"architectures": ["Qwen3Model"], "is_causal": False, "use_bidirectional_attention": True}
    model, report = Qwen3Model.from_pretrained(
        folder, config=Qwen3Config.from_dict(stock), dtype=torch.float32, output_loading_info=True
    )
    if wrong := {kind: names for kind, names in report.items() if names}:
        raise ValueError(f"{folder}: the weights are not those of its configuration: {wrong}")
    tokenizer = AutoTokenizer.from_pretrained(folder, config=model.config)  # or it asks for their class
    return Loaded(model, tokenizer, {"pooling": "mean", "separator": END_OF_TEXT})


def _sentence_transformers_options(folder: Path, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    modules = json.loads((folder / "modules.json").read_text(encoding="utf8"))
    names = [module["type"].rpartition(".")[2] for module in modules]
    stock = all(module["type"].startswith("sentence_transformers.") for module in modules)
    if not stock or names not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ValueError(
            f"{folder}: the sentence-transformers modules {', '.join(names)} are not supported: "
            "only Transformer and Pooling, and Normalize after them"
        )
    file = folder / modules[1]["path"] / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder} is no checkpoint: {file.relative_to(folder)} missing")
    mode = Pooling.load_config(str(file.parent))["pooling_mode"]
    if mode not in list(POOLING):
        raise ValueError(f"{folder}: pooling {mode!r} is not supported: only {' and '.join(POOLING)}")
    settings = Transformer.load_config(str(folder))
    if settings.get("do_lower_case") or "message" in settings["modality_config"]:
        raise ValueError(
            f"{folder}: texts put into lower case or into a chat template are not supported "
            "(sentence_bert_config.json)"
        )
    _warn_of_default_prompt(folder)
    return {
        "pooling": POOLING[mode],
        "max_length": settings.get("max_seq_length") or tokenizer.model_max_length,
        "special_tokens": True,
        "normalize": names[-1] == "Normalize",
    }


def _warn_of_default_prompt(folder: Path) -> None:
    file = folder / "config_sentence_transformers.json"
    settings = json.loads(file.read_text(encoding="utf8")) if file.is_file() else {}
    if name := settings.get("default_prompt_name"):
        prompt = settings.get("prompts", {}).get(name)
        warnings.warn(
            f"{folder}: sentence-transformers adds the prompt {prompt!r} to every text, Embedder does not: "
            "put it in front of the texts",
            stacklevel=4,
        )
