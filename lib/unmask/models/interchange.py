"""Embedders to and from other libraries: sentence-transformers, transformers, the released pplx-embed
checkpoints. Nothing here runs code from a checkpoint: every model is a stock class of transformers.
"""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from transformers import (
    CONFIG_MAPPING,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3Model,
)

from unmask.data.hub import MODEL_FILES, unreachable
from unmask.data.tokens import END_OF_TEXT
from unmask.models import backbone
from unmask.models.pretrained import require_checkpoint
from unmask.models.quantize import bytes_per_embedding, documents_per_megabyte
from unmask.store import new_directory, read_json

if TYPE_CHECKING:
    from unmask.models.embedder import Embedder

OPTIONS = ("pooling", "max_length", "special_tokens", "separator", "normalize")  # kept in unmask.json
RELEASED = "bidirectional_pplx_qwen3"  # model type of the four released pplx-embed checkpoints
POOLING = {  # sentence-transformers' names, new and old, and ours
    "mean": "mean",
    "pooling_mode_mean_tokens": "mean",
    "lasttoken": "last",
    "pooling_mode_lasttoken": "last",
}
CARD = """---
library_name: sentence-transformers
pipeline_tag: feature-extraction
tags: [sentence-transformers, feature-extraction, sentence-similarity, unmask]
---

# {name}

A text embedding model: {architecture} with {attention} attention, {parameters:.1f} million parameters,
{pooling} pooling, {size:,} dimensions, at most {length:,} tokens per text. Compare embeddings by cosine.
{prompts}
```python
from sentence_transformers import SentenceTransformer

vectors = SentenceTransformer("{name}").encode(["How do I open a file?"])  # float32, no remote code

from unmask import Embedder

embedder = Embedder.from_pretrained("{name}")
codes = embedder.encode(["How do I open a file?"])  # INT8
chunks = embedder.encode_documents([["first chunk of a document", "second chunk"]])
```

`unmask.models.quantizers.Int8Quantizer`, appended to the sentence-transformers model, makes the codes there.

{precisions}

## Origin

{origin}
"""


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
    facts, options = backbone.facts(folder), {}
    if facts:
        options = {key: facts[key] for key in OPTIONS if key in facts}
    elif (folder / "modules.json").is_file():
        options = _sentence_transformers_options(folder, tokenizer)
    return Loaded(backbone.load(folder), tokenizer, options)


def _local(path: str | Path) -> Path:
    """The checkpoint's directory; a Hub name is downloaded, or found in the mirror or the Hub's cache."""
    source = require_checkpoint(path)
    if not Path(source).is_dir():
        source = require_checkpoint(Path(_downloaded(source)))
    return Path(source)


def _downloaded(name: str) -> str:
    try:
        return snapshot_download(name, **MODEL_FILES)
    except OSError as error:
        why = unreachable() or " ".join(str(error).split())
        raise ValueError(
            f"{name} is no directory here, and neither the Hub's cache nor the Hub gives it ({why}): "
            "check the name, or fill a mirror on a host with internet (`unmask mirror pull`) and set "
            "UNMASK_MIRROR here"
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
    modules = read_json(folder / "modules.json")
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
    pooling = read_json(file)
    older = [key for key, on in pooling.items() if key.startswith("pooling_mode_") and on]
    mode = pooling.get("pooling_mode", older[0] if len(older) == 1 else older)
    if mode not in list(POOLING):
        raise ValueError(f"{folder}: pooling {mode!r} is not supported: only mean and lasttoken")
    settings = read_json(folder / "sentence_bert_config.json")
    if settings.get("do_lower_case") or "message" in settings.get("modality_config", {}):
        raise ValueError(
            f"{folder}: texts put into lower case or into a chat template are not supported "
            "(sentence_bert_config.json)"
        )
    prompts = read_json(folder / "config_sentence_transformers.json")
    if name := prompts.get("default_prompt_name"):
        warnings.warn(
            f"{folder}: sentence-transformers adds the prompt {prompts.get('prompts', {}).get(name)!r} to "
            "every text, Embedder does not: put it in front of the texts",
            stacklevel=4,
        )
    return {
        "pooling": POOLING[mode],
        "max_length": settings.get("max_seq_length") or tokenizer.model_max_length,
        "special_tokens": True,
        "normalize": names[-1] == "Normalize",
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
    source = embedder.model.name_or_path
    origin = {k: v for k, v in (backbone.facts(source) if source else {}).items() if k != "fingerprint"}
    facts = origin | {
        "pooling": embedder.pooling,
        "max_length": embedder.max_length,
        "special_tokens": embedder.special_tokens,
        "separator": embedder.tokenizer.convert_ids_to_tokens(embedder.separator_id),
        "normalize": embedder.normalize,
    }
    with new_directory(path) as folder:
        backbone.write(embedder.model, portable_tokenizer(embedder), folder, **facts)
        write_json(folder, _sentence_transformers_files(embedder, facts.get("prompts", {})))
        (folder / "README.md").write_text(model_card(embedder, facts, path.name), encoding="utf8")
    return path


def write_json(folder: Path, files: dict[str, Any]) -> None:
    """Writes JSON files, by their paths in the folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf8")


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
    kinds = {"Transformer": "", "Pooling": "1_Pooling"} | (
        {"Normalize": "2_Normalize"} if embedder.normalize else {}
    )
    return {
        "modules.json": [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (kind, path) in enumerate(kinds.items())
        ],
        "sentence_bert_config.json": {"max_seq_length": embedder.max_length, "do_lower_case": False},
        "1_Pooling/config.json": {
            "word_embedding_dimension": embedder.model.config.hidden_size,
            "pooling_mode_mean_tokens": embedder.pooling == "mean",
            "pooling_mode_lasttoken": embedder.pooling == "last",
        },
        "config_sentence_transformers.json": {
            "model_type": "SentenceTransformer",
            "similarity_fn_name": "cosine",
            "prompts": prompts,
            "requirements": {
                "transformers": {"specifier": ">=5.2", "reason": "Earlier versions ignore is_causal = false."}
            },
        },
    }


def model_card(embedder: Embedder, facts: dict[str, Any], name: str) -> str:
    """Text of README.md, with the metadata that the Hub reads at its top.

    Args:
        facts: of unmask.json: the stage that made the checkpoint, and its settings.
        name: of the model, as it is to be loaded.
    """
    model, size = embedder.model, embedder.model.config.hidden_size
    precisions = ["float32", "int8", *(["binary"] if size % 8 == 0 else [])]
    rows = [
        f"- {p}: {bytes_per_embedding(size, p):,} bytes an embedding, "
        f"{documents_per_megabyte(size, p):,} documents per MB"
        for p in precisions
    ]
    prompts = [
        f'\nPut this before every {n}, adapted to your task (`prompt_name="{n}"`):\n\n```\n{text}\n```\n'
        for n, text in facts.get("prompts", {}).items()
        if text
    ]
    origin = [f"- {key}: {value}" for key, value in facts.items() if key not in (*OPTIONS, "prompts")]
    # Where the configuration is silent, the attention layers decide.
    causal = getattr(model.config, "is_causal", any(getattr(m, "is_causal", False) for m in model.modules()))
    return CARD.format(
        name=name,
        architecture=type(model).__name__,
        parameters=model.num_parameters() / 1e6,
        attention="causal" if causal else "bidirectional",
        pooling={"mean": "mean", "last": "last-token"}[embedder.pooling],
        size=size,
        length=embedder.max_length,
        prompts="".join(prompts),
        precisions="\n".join(rows),
        origin="\n".join(origin) or "Not recorded.",
    )
