"""What makes two trainings the same one: values, data, starting weights and code.

The code is that which this process has imported: the library's, and what was defined outside of it, in a cell
of a notebook for instance.
"""

import hashlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn

from unmask import losses
from unmask.config import COMPUTED, resolved
from unmask.store import bare, fingerprint, source_fingerprint, visible
from unmask.training.job import TOLD
from unmask.training.stages import Stage

LIBRARY = Path(__file__).parents[1]
CODE = [LIBRARY / name for name in ("losses", "data", "models", "training")]  # what a checkpoint depends on
IMPORTED = {path: path.read_bytes() for folder in CODE for path in visible(folder, "*.py")}
# Keys that change no training: how it is computed, and what notebooks alone read.
APART = COMPUTED | {"batch_sizes", "cluster_sizes", "context_sizes", "weak_steps", "weak_lr", "scratch"}
APART |= {"checkpoints", "candidates", "max_queries"}


def identity(stage: Stage, model: nn.Module) -> dict[str, Any]:
    """Everything that the result of a training depends on, by name, so that a message can say what differs.

    Raises: RuntimeError if a file of the library has changed since this process imported it.
    """
    job, values = stage.job, resolved(stage.config)
    made_of = {f"{job.section}.{key}": values[key] for key in values.keys() - APART}
    made_of |= {key: getattr(job, key) for key in TOLD if key not in ("mined", "surrogate")}
    made_of |= {"stage": job.stage, "mask_token": job.backbone.mask_token, **stage.inputs()}
    made_of |= {"data": stage.corpus.hash, "tokenizer": fingerprint(stage.stored.content)}
    made_of |= {"weights": weights_hash(model), "code": library_code(), "own code": own_code(stage)}
    return json.loads(json.dumps(made_of))  # as it will be read again


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


def library_code() -> str:
    """Hash of the library's code as it was imported; comments, docstrings and layout do not count.

    Raises: RuntimeError if a file has changed since.
    """
    for path, source in IMPORTED.items():
        now = path.read_bytes() if path.is_file() else b""
        if now != source and bare(now) != bare(source):
            where = path.relative_to(LIBRARY.parent)
            raise RuntimeError(f"{where} has changed since this process imported it: restart the kernel")
    return source_fingerprint(IMPORTED)


def own_code(stage: Stage) -> dict[str, str]:
    """The source of what a stage computes with and the library does not hold, by name: methods of a class of
    one's own, functions in the place of the library's losses, and what these refer to."""
    found: dict[str, str] = {}
    pending = [*type(stage).__mro__, *vars(stage).values(), *vars(losses).values()]
    while pending:
        for function in _functions(pending.pop()):
            name = f"{function.__module__}.{function.__qualname__}"
            if name in found or not _foreign(function):
                continue
            used = inspect.getclosurevars(function)
            around = (used.globals | used.nonlocals).items()
            plain = {key: value for key, value in around if isinstance(value, str | int | float | tuple)}
            found[name] = f"{_source(function)}{plain or ''}"
            near = ("__main__", function.__module__)
            pending += [value for _, value in around if getattr(value, "__module__", None) in near]
    return dict(sorted(found.items()))


def _functions(value: Any) -> Iterator[FunctionType]:
    """The functions of a class, of a method or property, or of a function with some arguments."""
    if isinstance(value, type):
        for one in vars(value).values() if _foreign(value) else ():
            yield from _functions(one) if not isinstance(one, type) else ()
    for name in ("func", "fget", "__func__"):
        value = getattr(value, name, None) or value
    if isinstance(value, FunctionType):
        yield value


def _foreign(value: Any) -> bool:
    return value is not object and value.__module__.partition(".")[0] != "unmask"


def _source(function: FunctionType) -> str:
    try:
        return inspect.getsource(function)
    except OSError:  # typed at a prompt
        code = function.__code__
        plain = [value for value in code.co_consts if isinstance(value, str | int | float | tuple)]
        return f"{code.co_code.hex()} {code.co_names} {plain}"
