"""What makes two trainings the same one: values, data, starting weights, and code outside of the library. The
library's own is recorded with them."""

import hashlib
import inspect
import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unmask import losses
from unmask.config import COMPUTED, resolved
from unmask.store import fingerprint, read_json, source_fingerprint, visible
from unmask.training.checkpoint import checkpoints
from unmask.training.job import JOB, OPTIONS
from unmask.training.stages import Stage

LIBRARY = Path(__file__).parents[1]
CODE = [LIBRARY / name for name in ("losses", "data", "models", "training")]  # what a checkpoint depends on
IMPORTED = {path: path.read_bytes() for folder in CODE for path in visible(folder, "*.py")}
# Keys that change no training: how it is computed, and what a reranker's evaluation reads.
APART = COMPUTED | {"candidates", "max_queries"}
LOSSES = dict(vars(losses))


def identity(stage: Stage, model: nn.Module) -> dict[str, Any]:
    """Everything that the result of a training depends on, by name.

    Raises: RuntimeError if a file of the library has changed since this process imported it.
    """
    job, values = stage.job, resolved(stage.config)
    made_of = {f"{job.section}.{key}": values[key] for key in values.keys() - APART}
    made_of |= {key: getattr(job, key) for key in OPTIONS if key not in ("mined", "surrogate", "settings")}
    if job.settings:
        made_of |= {"settings": replace(job.settings, about={}).facts}
    made_of |= {"stage": job.stage, "mask_token": job.backbone.mask_token, **stage.inputs()}
    made_of |= {"data": stage.corpus.hash, "tokenizer": stage.stored.hash}
    made_of |= {"weights": weights_hash(model), "library": library_hash(), "code": outside_code(stage)}
    return json.loads(json.dumps(made_of))  # as it will be read again


def home_of(folder: Path, made_of: dict[str, Any]) -> Path:
    """The folder of a training: its fingerprint's. Where that is new, but one is there that another library
    has made of the same, it is that one; in `unmask run` only with --accept-code."""
    home = folder / fingerprint(made_of)
    if home.is_dir() or os.environ.get("UNMASK_CODE", "accept") != "accept":
        return home
    for file in sorted(folder.glob(f"*/{JOB}"), key=lambda file: file.stat().st_mtime, reverse=True):
        earlier, other = read_json(file).get("made_of", {}), file.parent
        same = earlier | {"library": made_of["library"]} == made_of
        if same and ((other / "model").is_dir() or checkpoints(other)):
            print(f"{other}: made by another library ({earlier['library']}); delete it to train anew")
            return other
    return home


def weights_hash(model: nn.Module) -> str:
    """Hash of all weights and of what a model's parts do with them: a training's starting point."""
    digest = hashlib.sha256()
    for part in model.modules():
        if config := getattr(part, "config", None):
            facts = [getattr(config, key, None) for key in ("is_causal", "mask_token_id")]
            digest.update(f"{type(part).__name__} {facts}".encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def library_hash() -> str:
    """Hash of the library's code as this process imported it; comments, docstrings and layout do not count.

    Raises: RuntimeError if a file has changed since.
    """
    for path, source in IMPORTED.items():
        if not path.is_file() or path.read_bytes() != source:
            where = path.relative_to(LIBRARY.parent)
            raise RuntimeError(f"{where} has changed since this process imported it: restart the kernel")
    return source_fingerprint(IMPORTED)


def outside_code(stage: Stage) -> dict[str, str]:
    """The source of what a stage computes with and the library does not hold, by name: its classes, and what
    stands in the place of its methods or of a loss. What these call is not followed."""
    kind = type(stage)
    members = {
        f"{one.__qualname__}.{name}": value
        for one in kind.__mro__
        if one.__module__.partition(".")[0] not in ("unmask", "builtins")
        for name, value in vars(one).items()
        if name[:2] != "__" or inspect.isfunction(value)
    }
    replaced = {name for name in vars(stage) if inspect.isfunction(getattr(kind, name, None))}
    members |= {name: vars(stage)[name] for name in replaced}
    members |= {name: value for name, value in vars(losses).items() if value is not LOSSES.get(name)}
    return {name: source(value) for name, value in sorted(members.items())}


def source(value: Any) -> str:
    """The source of a function or a method; other values as they are printed.

    Raises: ValueError for a function whose source Python does not find.
    """
    if isinstance(value, partial):
        return f"{source(value.func)}{value.args}{value.keywords}"
    for wrapped in ("func", "fget", "__func__"):  # by a cached property, a property, a static method
        value = getattr(value, wrapped, value)
    try:
        return inspect.getsource(value) if inspect.isfunction(value) else repr(value)
    except OSError:
        raise ValueError(f"{value.__qualname__} has no source: define it in a cell or in a file") from None
