"""Merges of checkpoints with mergekit, its output checked (pplx-embed, section 2; Qwen3-Embedding, section
3.2)."""

import logging
import shutil
from collections.abc import Sequence
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from unmask.data.tokens import PlainTokenizer, special_tokens_around
from unmask.extras import extra
from unmask.models import backbone
from unmask.models.arguments import as_list
from unmask.models.checkpoint import Settings, settings_of
from unmask.models.checkpoint import write as write_embedder
from unmask.store import new_directory

with extra("study"):
    from mergekit.config import MergeConfiguration
    from mergekit.merge import MergeOptions, run_merge

# Of a configuration: what may differ between parents. Dropout may, too.
FREE = {"_name_or_path", "architectures", "transformers_version", "dtype", "use_cache", "initializer_range"}


def slerp(base: str | Path, other: str | Path, t: float, path: str | Path) -> Path:
    """Spherical interpolation of two checkpoints of one shape, tensor by tensor; t = 0 is `base`, t = 1 is
    `other`.

        slerp(a, b; t) = sin((1 − t)·θ)/sin θ · a + sin(t·θ)/sin θ · b,   θ the angle between a and b

    mergekit falls back to linear interpolation where |cos θ| > 0.9995.

    The result reads as its parents do. Where their lengths differ it takes the longer one, and says so.

    Raises: ValueError for a directory that is no checkpoint, a t outside of [0, 1], parents that differ in
        something that changes vectors, by its name, an architecture that
        mergekit cannot merge, and if what it wrote is not a whole checkpoint (it returns normally even when
        it wrote no weights).
    """
    if not (isinstance(t, Real) and 0 <= t <= 1):
        raise ValueError(f"t must lie in [0, 1], from one parent to the other; got {t!r}")
    return _merge("slerp", {"t": t}, [base, other], path, t=t)


def slerp_all(checkpoints: Sequence[str | Path], path: str | Path) -> Path:
    """The middle of several checkpoints of one shape, on the sphere, tensor by tensor, in whatever order.

        m(a_1, …, a_n) = r · Σ_i u_i / ‖Σ_i u_i‖,   u_i = a_i/‖a_i‖,   r the mean of the ‖a_i‖

    This is what mergekit's multislerp comes to with equal weights. Of two checkpoints of one norm it is
    `slerp` with t = 1/2. Qwen3-Embedding (section 3.2) merges "multiple model checkpoints" by slerp and does
    not say how; slerp by slerp, with t = 1/2, 1/3, …, the result would depend on their order.

    Raises: ValueError as in `slerp`.
    """
    return _merge("multislerp", {"weight": 1.0}, checkpoints, path, merged=len(checkpoints))


def _merge(
    method: str, values: dict[str, float], given: Sequence[str | Path], path: str | Path, **facts: Any
) -> Path:
    """Merges inside of the temporary directory that then becomes `path` (what a kill left, the next call
    clears), checks the result, and writes it with the first parent's tokenizer and the parents' settings."""
    parents, path = _checked(given, Path(path)), Path(path)
    tokenizers = [*map(backbone.load_tokenizer, parents)]
    settings = [*map(settings_of, parents, tokenizers)]
    _check_same_meaning(parents, [*map(_meaning, parents, tokenizers, settings)])
    facts |= {"stage": "merge", "plain": all(one.plain for one in settings)}
    facts = settings[0].facts | _longest(settings) | facts
    with new_directory(path) as folder:
        work = folder / "work"
        stock = [_stock(parent, work / f"parent-{number}") for number, parent in enumerate(parents)]
        recipe = {"merge_method": method, "parameters": values, "dtype": "float32"}
        recipe |= {"models": [{"model": str(model)} for model in stock]}
        _run(recipe | ({"base_model": str(stock[0])} if method == "slerp" else {}), work / "merged", parents)
        merged = backbone.load(work / "merged")  # refuses what is not whole
        if bad := [name for name, x in merged.named_parameters() if not x.isfinite().all()]:
            raise ValueError(f"the merge of {parents[0]} has NaN or infinity in {bad[0]}")
        write_embedder(folder, merged, tokenizers[0], Settings.of(facts), path.name)
        del merged  # its weights may be mapped from what goes now
        shutil.rmtree(work)
    return path


def _checked(parents: Sequence[str | Path], path: Path) -> list[Path]:
    """The parents' directories.

    Raises: ValueError for none, one that is given twice, or that is no checkpoint's directory, or the path.
    """
    if other := [one for one in as_list(parents, "[folder, folder]") if not isinstance(one, str | PathLike)]:
        raise ValueError(f"a parent is a directory, got one {type(other[0]).__name__}: save_pretrained it")
    folders = [Path(backbone.require_checkpoint(one)).resolve() for one in parents]
    if not folders or len({*folders}) < len(folders) or path.resolve() in folders:
        names = ", ".join(map(str, folders)) or "none"
        raise ValueError(f"{names} → {path}: name at least one parent, none twice, and another folder")
    return folders


def _run(recipe: dict[str, Any], path: Path, parents: list[Path]) -> None:
    """Runs mergekit, which otherwise sets the root logger up, so that every library speaks up."""
    # No model card: writing one asks the Hub about the parents.
    options = MergeOptions(write_model_card=False, copy_tokenizer=False, quiet=True)
    silent, disabled = logging.NullHandler(), logging.root.manager.disable
    logging.root.addHandler(silent)
    logging.disable(max(disabled, logging.WARNING))  # transformers' on an option that mergekit uses
    try:
        run_merge(MergeConfiguration.model_validate(recipe), str(path), options)
    except (OSError, SafetensorError):  # a disk's
        raise
    except Exception as error:  # of whatever kind: mergekit meets what it does not know anywhere
        kind = ", ".join(backbone.load_config(parents[0]).architectures)
        what = f"mergekit cannot merge {', '.join(map(str, parents))} ({kind}): {error}"
        remedy = "decoders such as Qwen3, Llama, Mistral and OLMo 2 can be merged, BERT cannot"
        raise ValueError(f"{what}. Take other parents: {remedy}") from error
    finally:
        logging.disable(disabled)
        logging.root.removeHandler(silent)


def _stock(parent: Path, folder: Path) -> Path:
    """A parent as mergekit reads one: where its files name another class than that of their weights (the
    released pplx-embed and Qwen3-Embedding), a copy that does not."""
    model = backbone.load(parent, dtype="auto")
    if PreTrainedConfig.get_config_dict(parent)[0].get("architectures") == [type(model).__name__]:
        return parent
    model.save_pretrained(folder)
    return folder


def _longest(settings: Sequence[Settings]) -> dict[str, int | None]:
    """The longer ones of lengths that differ; None, all positions of the model, is the longest."""
    longest = {}
    for key in ("max_length", "window"):
        lengths = [getattr(one, key) for one in settings]
        longest[key] = None if None in lengths else max(lengths)
        if len({*lengths}) > 1:
            print(f"{key} is {', '.join(map(str, lengths))}: the merge has the longest, {longest[key]}")
    return longest


def _check_same_meaning(parents: list[Path], meanings: list[dict[str, Any]]) -> None:
    """Refuses parents that differ in what gives weights and vectors their meaning."""
    first, *others = meanings
    for parent, other in zip(parents[1:], others, strict=True):
        if differ := sorted(key for key in first | other if first.get(key) != other.get(key)):
            what = f"{parents[0]} and {parent} have another {', '.join(differ)}"
            raise ValueError(f"{what}: their weights mean different things, take parents of one kind")


def _meaning(parent: Path, tokenizer: PreTrainedTokenizerBase, settings: Settings) -> dict[str, Any]:
    """The tokenizer, the configuration, and how an embedder reads and pools."""
    config = backbone.load_config(parent)
    backbone.check_vocabulary(config, tokenizer)
    every = config.to_dict().items()
    values = {key: value for key, value in every if key not in FREE and "dropout" not in key}
    values |= {"pooling": settings.pooling, "normalize": settings.normalize}
    values["prompts"] = {name: text for name, text in settings.prompts.items() if text}
    around = special_tokens_around(tokenizer) if settings.special_tokens else ()
    values["special_tokens"] = settings.special_tokens, [ids.tolist() for ids in around]
    return values | {"tokenizer": PlainTokenizer(tokenizer).hash}
