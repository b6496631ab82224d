"""Checkpoints of embedders: our own, and those of sentence-transformers, transformers and the released
pplx-embed. Nothing here runs code from a checkpoint: every model is a stock class of transformers.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers import PreTrainedTokenizerBase as Tokenizer

from unmask.data.hub import MODEL_FILES, unreachable
from unmask.data.tokens import end_token
from unmask.models import backbone
from unmask.store import new_directory, read_json, write_json

CARD = Path(__file__).with_name("card.md").read_text(encoding="utf8")
CHAINS = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])  # of sentence-transformers
# What its files may say of them; whatever is not named has to be off, since it could change a vector.
HONOURED = {"max_seq_length", "prompts", "embedding_dimension", "word_embedding_dimension"}
HONOURED |= {"__version__", "requirements", "unpad_inputs"}  # which change none
OFF = [None, False, "", [], {}]
PLAIN = (None, "base", "ar", "diffusion")  # stages that leave a language model
UNLIMITED = 10_000  # tokens of a text, where a model has no limit
KNOWN = {
    "model_type": ["SentenceTransformer"],
    "transformer_task": ["feature-extraction"],
    "modality_config": [{"method": "forward", "method_output_name": "last_hidden_state"}],  # of texts
    "module_input_name": ["sentence_embedding"],
    "module_output_name": ["token_embeddings", "sentence_embedding"],  # of Transformer and of Normalize
    "pooling_mode": ["mean", "lasttoken", ["mean"], ["lasttoken"]],
    "include_prompt": [True],
    "similarity_fn_name": ["cosine", None],
    "truncation_side": ["right"],  # of the tokenizer
}


@dataclass(frozen=True)
class Settings:
    """What makes an embedder of a model and a tokenizer, kept in unmask.json beside them. `Embedder` says
    what each means; None is its default.

    The mask is part of the model's configuration, special tokens and separator of the tokenizer's files. With
    them this is all that changes a vector. It is read once, by `load`, and goes with the embedder.
    """

    pooling: str = "mean"
    max_length: int | None = None
    window: int | None = None
    special_tokens: bool = False
    normalize: bool = False
    prompts: dict[str, str] = field(default_factory=dict)  # of sentence-transformers: name → text
    about: dict[str, Any] = field(default_factory=dict, compare=False)  # where it is from; changes no vector

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "Settings":
        """Those among the facts of a checkpoint, `about` it the rest but for the fingerprint."""
        known = {one.name: facts[one.name] for one in fields(cls) if one.name in facts}
        about = {key: value for key, value in facts.items() if key not in known and key != "fingerprint"}
        return cls(**known, about=about)

    @property
    def facts(self) -> dict[str, Any]:
        """As unmask.json has them."""
        values = dict(vars(self))
        return values.pop("about") | values

    @property
    def plain(self) -> bool:
        """Whether nothing has made an embedder of the model yet: of a language model, that is."""
        plain = self.about.get("plain", self.about.get("stage") in PLAIN)  # the first: of a merge
        return plain and self.pooling == "mean"


def load(path: str | Path) -> tuple[PreTrainedModel, Tokenizer, Settings]:
    """Loads the checkpoint of an embedder, in float32, by directory or Hub name.

    It may be one of ours (a training stage's, or what `save` wrote), a sentence-transformers directory
    (Transformer and mean or last-token Pooling, perhaps Normalize), one of the four released pplx-embed
    checkpoints, or a plain transformers one, which is taken as the start of our training would take it: mean
    pooling, no special tokens. A prompt is part of no embedder: put it in front of the texts.

    Raises:
        ValueError: there is no checkpoint, its architecture is unknown to transformers, it has a
            sentence-transformers module or setting that `Embedder` has not, or its weights do not fit.
    """
    folder = folder_of(path)
    tokenizer = backbone.load_tokenizer(folder)
    return backbone.load(folder), tokenizer, settings_of(folder, tokenizer)


def settings_of(folder: Path, tokenizer: Tokenizer) -> Settings:
    """How the embedder in a directory reads: all of it but model and tokenizer.

    Raises: ValueError as `load`.
    """
    if facts := backbone.facts(folder):
        return Settings.of({"stage": "embedder"} | facts)
    if backbone.is_released(folder):
        return Settings(about={"stage": "pplx-embed"})
    if (folder / "modules.json").is_file():
        return _settings_of_sentence_transformers(folder, tokenizer)
    return Settings()


def folder_of(path: str | Path, revision: str = "main") -> Path:
    """The checkpoint's directory; a Hub name is downloaded in this revision, or found in the mirror or the
    Hub's cache."""
    source = backbone.require_checkpoint(path)
    if Path(source).is_dir():
        return Path(source)
    try:
        snapshot = snapshot_download(source, revision=revision, allow_patterns=MODEL_FILES)
    except OSError as error:
        why = unreachable() or " ".join(str(error).split())
        gone = f"{source} is no directory here, and neither the Hub's cache nor the Hub gives it ({why})"
        mirror = "fill a mirror on a host with internet (`unmask mirror pull`) and set UNMASK_MIRROR"
        raise ValueError(f"{gone}: check the name, or {mirror}") from None
    return Path(backbone.require_checkpoint(Path(snapshot)))


def _settings_of_sentence_transformers(folder: Path, tokenizer: Tokenizer) -> Settings:
    modules = read_json(folder / "modules.json")
    kinds = [module["type"] for module in modules]
    names = [kind.rpartition(".")[2] for kind in kinds if kind.startswith("sentence_transformers.")]
    if len(names) != len(kinds) or names not in CHAINS:
        only = "only Transformer and Pooling, and Normalize after them"
        raise ValueError(f"{folder}: the modules {', '.join(kinds)} are not supported: {only}")
    values = _stored(folder, modules) | {"truncation_side": tokenizer.truncation_side}
    for key in sorted(values.keys() - HONOURED):
        if values[key] not in (known := KNOWN.get(key, OFF)):
            only = f"only {known[0]!r}; what else it does is yours to do, to texts or vectors"
            raise ValueError(f"{folder}: {key} {values[key]!r} is not supported: {only}")
    return Settings(
        pooling="last" if "lasttoken" in values["pooling_mode"] else "mean",
        max_length=values.get("max_seq_length") or tokenizer.model_max_length,
        special_tokens=True,
        normalize=names[-1] == "Normalize",
        prompts=values.get("prompts") or {},
        about={"stage": "sentence-transformers"},
    )


def _stored(folder: Path, modules: list[dict[str, Any]]) -> dict[str, Any]:
    """What the files of a sentence-transformers model say, in today's words."""
    files = sorted(folder.glob("sentence_*_config.json"))[:1]  # older ones name another family than "bert"
    files += [folder / "config_sentence_transformers.json"]
    files += [folder / module["path"] / "config.json" for module in modules[1:]]
    values = {key: value for file in files for key, value in read_json(file).items()}
    older = [key for key in values if key.startswith("pooling_mode_")]
    modes = [key.removeprefix("pooling_mode_").removesuffix("_tokens") for key in older if values.pop(key)]
    values.setdefault("pooling_mode", modes)
    if not values.get("prompts", {}).get(values.get("default_prompt_name")):
        values.pop("default_prompt_name", None)
    if "modality_config" in values:
        values["modality_config"] = values["modality_config"].get("text", "without text")
    return values


def save(
    path: str | Path, model: PreTrainedModel, tokenizer: Tokenizer, settings: Settings, **more: Any
) -> Path:
    """Writes an embedder into a folder as `write` does, under a temporary name, then renames it; an older one
    stays until then.

    Raises: ValueError as `write`, and for an architecture that transformers does not know.
    """
    with new_directory(path := Path(path)) as folder:
        write(folder, model, tokenizer, settings, path.name, **more)
        backbone.load_config(folder)  # refuses what could not be read again
    return path


def write(
    folder: Path, model: PreTrainedModel, tokenizer: Tokenizer, settings: Settings, name: str, **more: Any
) -> None:
    """Writes an embedder so that `SentenceTransformer(path)` returns its float vectors, without remote code.

    Beside the weights (safetensors), configuration and tokenizer, which AutoModel and AutoTokenizer load, lie
    sentence-transformers' files, in the spelling that all its versions read; unmask.json, from which `load`
    gets everything back; and a model card. sentence-transformers takes special
    tokens from the tokenizer, so for an embedder without them a tokenizer is saved that adds none.

    Args:
        name: of the model, in its card.
        more: `weights` as for `backbone.write`, and other facts.
    Raises: ValueError for a tokenizer that has nothing to pad with, see `end_token`, and as `backbone.write`.
    """
    facts = {"stage": "embedder"} | settings.facts
    settings = replace(settings, max_length=settings.max_length or backbone.positions(model) or UNLIMITED)
    backbone.write(model, portable(tokenizer, settings), folder, **facts, **more)
    for file, content in _sentence_transformers_files(settings, model.config.hidden_size).items():
        write_json(folder / file, content)
    (folder / "README.md").write_text(CARD.format(name=name, facts=facts), encoding="utf8")


def portable(tokenizer: Tokenizer, settings: Settings) -> Tokenizer:
    """The tokenizer for use without us: it pads at the end and adds the special tokens of the embedder.

    The classes of some tokenizers add special tokens whatever their files say; the general class does not.
    """
    tokenizer = copy.deepcopy(tokenizer)
    if not settings.special_tokens and tokenizer.num_special_tokens_to_add():
        backend, special = tokenizer.backend_tokenizer, tokenizer.special_tokens_map
        backend.post_processor = None
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.padding_side, tokenizer.model_max_length = "right", settings.max_length
    if tokenizer.pad_token is None:
        tokenizer.pad_token = end_token(tokenizer)
    return tokenizer


def _sentence_transformers_files(settings: Settings, dimensions: int) -> dict[str, Any]:
    kinds = {"Transformer": "", "Pooling": "1_Pooling"}
    if settings.normalize:
        kinds["Normalize"] = "2_Normalize"
    return {
        "modules.json": [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (kind, path) in enumerate(kinds.items())
        ],
        "sentence_bert_config.json": {"max_seq_length": settings.max_length, "do_lower_case": False},
        "1_Pooling/config.json": {
            "word_embedding_dimension": dimensions,
            "pooling_mode_mean_tokens": settings.pooling == "mean",
            "pooling_mode_lasttoken": settings.pooling == "last",
        },
        "config_sentence_transformers.json": {
            "model_type": "SentenceTransformer",
            "similarity_fn_name": "cosine",
            "prompts": settings.prompts,
            "requirements": {
                "transformers": {"specifier": ">=5.2", "reason": "Earlier versions ignore is_causal = false."}
            },
        },
    }
