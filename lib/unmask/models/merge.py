"""Merges of checkpoints with mergekit, its output checked (pplx-embed, section 2; Qwen3-Embedding, section
3.2)."""

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto import AutoConfig

from unmask.data.tokens import StoredTokenizer
from unmask.extras import extra
from unmask.models import backbone
from unmask.models.checkpoint import Settings
from unmask.store import new_directory

with extra("study"):
    from mergekit.config import MergeConfiguration
    from mergekit.merge import MergeOptions, run_merge

# Of a configuration: what may differ between parents. Dropout may, too.
FREE = {"_name_or_path", "architectures", "transformers_version", "dtype", "use_cache", "initializer_range"}
NEARLY_ONE = 0.9995  # |cos θ| above which mergekit interpolates linearly


def slerp(base: str | Path, other: str | Path, t: float, path: str | Path) -> Path:
    """Spherical interpolation of two checkpoints of one shape, tensor by tensor; t = 0 is `base`, t = 1 is
    `other`.

        slerp(a, b; t) = sin((1 − t)·θ)/sin θ · a + sin(t·θ)/sin θ · b,   θ the angle between a and b

    mergekit falls back to linear interpolation where |cos θ| > 0.9995; two opposite parents have many ways
    between them, and are refused.

    Raises: ValueError for a directory that is no checkpoint, a t outside of [0, 1], parents of which another
        tokenizer, configuration or pooling makes use, parents that point opposite ways, and if what mergekit
        wrote is not a whole checkpoint (it returns normally even when it wrote no weights).
    """
    if not 0 <= t <= 1:
        raise ValueError(f"t must lie in [0, 1], from one parent to the other; got {t}")
    recipe = {"merge_method": "slerp", "base_model": str(Path(base).resolve()), "parameters": {"t": t}}
    return _merge(recipe, [base, other], path, t=t)


def slerp_all(checkpoints: Sequence[str | Path], path: str | Path) -> Path:
    """The middle of several checkpoints of one shape, on the sphere, tensor by tensor, in whatever order.

        m(a_1, …, a_n) = r · Σ_i u_i / ‖Σ_i u_i‖,   u_i = a_i/‖a_i‖,   r the mean of the ‖a_i‖

    This is what mergekit's multislerp comes to with equal weights. Of two checkpoints of one norm it is
    `slerp` with t = 1/2. Qwen3-Embedding (section 3.2) merges "multiple model checkpoints" by slerp and does
    not say how; slerp by slerp, with t = 1/2, 1/3, …, the result would depend on their order.

    Raises: ValueError as in `slerp`.
    """
    recipe = {"merge_method": "multislerp", "parameters": {"weight": 1.0}}
    return _merge(recipe, checkpoints, path, merged=len(checkpoints))


def _merge(recipe: dict[str, Any], parents: Sequence[str | Path], path: str | Path, **facts: Any) -> Path:
    """Merges inside of the temporary directory that then becomes `path` (what a kill left, the next call
    clears), checks the result, and writes it with the first parent's tokenizer and facts."""
    path, parents = Path(path), [*map(Path, parents)]
    models = [{"model": backbone.require_checkpoint(parent.resolve())} for parent in parents]
    first, *others = map(_meaning, parents)
    for parent, other in zip(parents[1:], others, strict=True):
        if differ := sorted(key for key in first | other if first.get(key) != other.get(key)):
            what = f"{parents[0]} and {parent} have another {', '.join(differ)}"
            raise ValueError(f"{what}: their weights mean different things, take parents of one kind")
    if len(parents) == 2:
        # A pair of tensors at a time, of models that may not fit into memory.
        weights = (backbone.load(parent, dtype="auto").named_parameters() for parent in parents)
        for (name, a), (_, b) in zip(*weights, strict=True):
            if torch.cosine_similarity(a.flatten().float(), b.flatten().float(), dim=0) < -NEARLY_ONE:
                both = f"{name} of {parents[0]} and of {parents[1]}"
                raise ValueError(f"{both} point opposite ways, and nothing says which way leads between them")
    configuration = MergeConfiguration.model_validate(recipe | {"models": models, "dtype": "float32"})
    # No model card: writing one asks the Hub about the parents.
    options = MergeOptions(write_model_card=False, copy_tokenizer=False, quiet=True)
    silent = logging.NullHandler()  # or mergekit sets the root logger up, and every library speaks up
    with new_directory(path) as folder:
        logging.root.addHandler(silent)
        logging.disable(logging.WARNING)  # transformers' on an option that mergekit uses
        try:
            run_merge(configuration, str(folder / "merged"), options)
        finally:
            logging.disable(logging.NOTSET)
            logging.root.removeHandler(silent)
        merged = backbone.load(folder / "merged")  # refuses what is not whole
        if bad := [name for name, x in merged.named_parameters() if not x.isfinite().all()]:
            raise ValueError(f"the merge of {parents[0]} has NaN or infinity in {bad[0]}")
        facts = backbone.inherited(parents[0]) | {"stage": "merge"} | facts
        backbone.write(merged, backbone.load_tokenizer(parents[0]), folder, **facts)
        del merged  # its weights may be mapped from what goes now
        shutil.rmtree(folder / "merged")
    return path


def _meaning(parent: Path) -> dict[str, Any]:
    """What gives weights their meaning: tokenizer, configuration, and how an embedder reads and pools."""
    settings = Settings.of(backbone.facts(parent))
    reads = {name: getattr(settings, name) for name in ("pooling", "special_tokens", "normalize")}
    config = AutoConfig.from_pretrained(parent).to_dict()
    config = {key: value for key, value in config.items() if key not in FREE and "dropout" not in key}
    return config | reads | {"tokenizer": StoredTokenizer.of(backbone.load_tokenizer(parent))}
