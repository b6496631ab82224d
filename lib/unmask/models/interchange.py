"""Embedders to and from other libraries: sentence-transformers, transformers, the released pplx-embed
checkpoints. Nothing here runs code from a checkpoint: every model is a stock class of transformers.
"""

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto import CONFIG_MAPPING, AutoTokenizer
from transformers.models.qwen3 import Qwen3Config, Qwen3Model

from unmask.data.hub import MODEL_FILES, unreachable
from unmask.models import backbone
from unmask.models.encoding import POOLS
from unmask.models.quantize import int8
from unmask.store import new_directory, read_json, write_json

if TYPE_CHECKING:
    from unmask.models.embedder import Embedder

OPTIONS = ("pooling", "max_length", "window", "special_tokens", "normalize")  # kept in unmask.json
RELEASED = "bidirectional_pplx_qwen3"  # model type of the four released pplx-embed checkpoints
Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase, dict[str, Any]]
CARD = Path(__file__).with_name("card.md").read_text(encoding="utf8")
CHAINS = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])  # of sentence-transformers


def load(path: str | Path) -> Loaded:
    """Loads the checkpoint of an embedder, in float32, by directory or Hub name: its model, its tokenizer and
    keyword arguments of `Embedder`.

    It may be one of ours (a training stage's, or what `save` wrote), a sentence-transformers directory
    (Transformer and mean or last-token Pooling, perhaps Normalize), one of the four released pplx-embed
    checkpoints, or a plain transformers one, which is taken as the start of our training would take it: mean
    pooling, no special tokens. A prompt is part of no embedder: put it in front of the texts.

    Raises:
        ValueError: there is no checkpoint, its architecture is unknown to transformers, it has a
            sentence-transformers module or setting that `Embedder` has not, or its weights do not fit.
    """
    folder = folder_of(path)
    config, _ = PreTrainedConfig.get_config_dict(folder)
    kind = config.get("model_type")
    if kind == RELEASED:
        return _released(folder, config)
    if kind not in CONFIG_MAPPING:
        unknown = f"{path}: the architecture {kind!r} is unknown to the installed transformers, and code that"
        raise ValueError(f"{unknown} comes with it is not run: update transformers, or convert it")
    tokenizer = backbone.load_tokenizer(folder)
    facts = backbone.facts(folder)
    options = {key: facts[key] for key in OPTIONS if key in facts}
    if not facts and (folder / "modules.json").is_file():
        options = _sentence_transformers_options(folder, tokenizer)
    return backbone.load(folder), tokenizer, options


def folder_of(path: str | Path) -> Path:
    """The checkpoint's directory; a Hub name is downloaded, or found in the mirror or the Hub's cache."""
    source = backbone.require_checkpoint(path)
    if Path(source).is_dir():
        return Path(source)
    try:
        found = snapshot_download(source, allow_patterns=MODEL_FILES)
    except OSError as error:
        why = unreachable() or " ".join(str(error).split())
        gone = f"{source} is no directory here, and neither the Hub's cache nor the Hub gives it ({why})"
        mirror = "fill a mirror on a host with internet (`unmask mirror pull`) and set UNMASK_MIRROR"
        raise ValueError(f"{gone}: check the name, or {mirror}") from None
    return Path(backbone.require_checkpoint(Path(found)))


def _released(folder: Path, config: dict[str, Any]) -> Loaded:
    """A released pplx-embed checkpoint as a stock Qwen3: its own class differs in nothing but the mask."""
    theirs = ("model_type", "architectures", "auto_map")
    stock = {key: value for key, value in config.items() if key not in theirs and value is not None}
    stock |= {"architectures": ["Qwen3Model"], "is_causal": False, "use_bidirectional_attention": True}
    model = backbone.read(Qwen3Model, folder, config=Qwen3Config.from_dict(stock))
    # Told the config, the tokenizer does not ask for their class.
    return model, AutoTokenizer.from_pretrained(folder, config=model.config), {"pooling": "mean"}


def _sentence_transformers_options(folder: Path, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    modules = read_json(folder / "modules.json")
    kinds = [module["type"] for module in modules]
    names = [kind.rpartition(".")[2] for kind in kinds if kind.startswith("sentence_transformers.")]
    found = sorted(folder.glob("sentence_*_config.json"))  # older ones name another family than "bert"
    settings = read_json(found[0]) if found else {}
    settings |= read_json(folder / "config_sentence_transformers.json")
    odd = [key for key in ("do_lower_case", "processing_kwargs", "truncate_dim") if settings.get(key)]
    if len(names) != len(kinds) or names not in CHAINS or odd:
        raise ValueError(
            f"{folder}: the sentence-transformers modules {', '.join(kinds)} are not supported: only "
            f"Transformer and Pooling, and Normalize after them, without {odd[0] if odd else 'do_lower_case'}"
        )
    pooling = read_json(folder / modules[1]["path"] / "config.json")
    older = [key.split("_", 2)[2] for key, on in pooling.items() if key.startswith("pooling_mode_") and on]
    modes = pooling.get("pooling_mode", older)
    if modes not in ("mean", ["mean"], ["mean_tokens"], "lasttoken", ["lasttoken"]):
        raise ValueError(f"{folder}: pooling {modes} is not supported: only mean and lasttoken")
    if not pooling.get("include_prompt", True):
        raise ValueError(f"{folder}: pooling that leaves the prompt out (include_prompt) is not supported")
    return {
        "pooling": "last" if "lasttoken" in modes else "mean",
        "max_length": settings.get("max_seq_length") or tokenizer.model_max_length,
        "special_tokens": True,
        "normalize": names[-1] == "Normalize",
    }


def save(embedder: "Embedder", path: str | Path) -> Path:
    """Writes an embedder so that `SentenceTransformer(path)` returns its float vectors, without remote code.

    Beside the weights (safetensors), configuration and tokenizer, which AutoModel and AutoTokenizer load, lie
    sentence-transformers' files, in the spelling that all its versions read; unmask.json, from which
    `Embedder.from_pretrained` gets everything back; and a model card. sentence-transformers takes special
    tokens from the tokenizer, so for an embedder without them a tokenizer is saved that adds none.

    A directory is written under a temporary name and renamed; an older one stays until then.
    """
    path = Path(path)
    source = embedder.model.name_or_path  # empty for a model that was not loaded
    prompts = read_json(Path(source) / "config_sentence_transformers.json").get("prompts") if source else None
    facts = backbone.inherited(source) | ({"prompts": prompts} if prompts else {})
    facts |= {key: getattr(embedder, key) for key in OPTIONS}
    with new_directory(path) as folder:
        backbone.write(embedder.model, portable_tokenizer(embedder), folder, **facts)
        for name, content in _sentence_transformers_files(embedder, facts.get("prompts", {})).items():
            write_json(folder / name, content)
        (folder / "README.md").write_text(CARD.format(name=path.name, facts=facts), encoding="utf8")
    return path


def portable_tokenizer(embedder: "Embedder") -> PreTrainedTokenizerBase:
    """The tokenizer for use without us: it pads at the end and adds the special tokens of the embedder.

    The classes of some tokenizers add special tokens whatever their files say; the general class does not.
    """
    tokenizer = copy.deepcopy(embedder.tokenizer)
    if not embedder.special_tokens and tokenizer.num_special_tokens_to_add():
        backend, special = tokenizer.backend_tokenizer, tokenizer.special_tokens_map
        backend.post_processor = None
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.padding_side, tokenizer.model_max_length = "right", embedder.max_length
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _sentence_transformers_files(embedder: "Embedder", prompts: dict[str, str]) -> dict[str, Any]:
    kinds = {"Transformer": "", "Pooling": "1_Pooling"}
    if embedder.normalize:
        kinds["Normalize"] = "2_Normalize"
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


def export_onnx(embedder: "Embedder", path: str | Path) -> Path:
    """Writes model.onnx, its weights in model.onnx.data, and the tokenizer into a directory.

    Inputs, int64, of any number and length of texts: `input_ids` (B, L) and `attention_mask` (B, L), padded
    at the end. Outputs:

    - `token_embeddings` (B, L, D) float32: after the final norm, for late chunking and late interaction;
    - `sentence_embedding` (B, D) float32: pooled, of unit length if the embedder's are;
    - `int8` (B, D) int8: the codes ⌊127 · tanh(mean) + 1/2⌋, as from `Embedder.encode`.

    Binary embeddings are the signs of `sentence_embedding`. The extra `onnx` has to be installed.

    On a GPU, load the embedder with `mixed_precision=False` first.

    Source: pplx-embed, section 2.2.
    """
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
                verbose=False,
                external_data=True,  # a file of ONNX's own format holds 2 GB at most
                input_names=["input_ids", "attention_mask"],
                output_names=["token_embeddings", "sentence_embedding", "int8"],
                dynamic_shapes={"input_ids": any_size, "attention_mask": any_size},
            )
    return path


class _Outputs(nn.Module):
    def __init__(self, embedder: "Embedder"):
        super().__init__()
        self.model, self.pooling, self.normalize = embedder.model, embedder.pooling, embedder.normalize

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        read = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        hidden_BLD = read.last_hidden_state
        pooled_BD = POOLS[self.pooling](hidden_BLD, attention_mask)
        if self.normalize:
            pooled_BD = F.normalize(pooled_BD, dim=-1)
        return hidden_BLD, pooled_BD, int8(pooled_BD).to(torch.int8)
