"""What makes two trainings the same one: values, data, starting weights and code.

The code is that which this process has imported: the library's, and what was defined outside of it, in a cell
of a notebook for instance.
"""

import dis
import hashlib
import inspect
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import numpy as np
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
    """What a stage computes with and the library does not hold, by name: methods of a class of one's own,
    functions in the place of the library's losses, and what these refer to, each as it was compiled, with the
    values that it finds around it."""
    kind, found, seen = type(stage), {}, set()
    own = {key: value for key, value in vars(stage).items() if not _cached(kind, key)}
    pending = [*kind.__mro__, *own.values(), *vars(losses).values()]
    if plain := _plain(own):
        found["attributes of the stage"] = repr(plain)
    while pending:
        value = pending.pop()
        for name in ("func",) * isinstance(value, cached_property) + ("fget", "__func__"):
            value = getattr(value, name, None) or value
        if id(value) in seen or not (parts := _parts(value)):
            continue
        seen.add(id(value))
        about, used = parts
        whole = value.func if isinstance(value, partial) else value
        name = f"{whole.__module__}.{getattr(whole, '__qualname__', type(whole).__qualname__)}"
        found[name] = found.get(name, "") + about
        pending += [one for one in used if not isinstance(one, type | FunctionType) or _mine(one)]
    return {name: fingerprint(about) for name, about in sorted(found.items()) if about}


def _parts(value: Any) -> tuple[str, list[Any]] | None:
    """What counts of a function with some arguments, of a function, of a class or of an object that is
    called, as text; and what it refers to."""
    if isinstance(value, partial):
        given = value.args, value.keywords
        return repr(_plain(given)), [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, FunctionType) and _foreign(value):
        around = _around(value)
        plain = _plain((around, value.__defaults__, value.__kwdefaults__))
        return f"{_compiled(value.__code__)} {plain}", [*around.values()]
    if isinstance(value, type) and _mine(value):
        inner = {key: one for key, one in vars(value).items() if not key.startswith("__")}
        return repr(_plain(inner) or ""), [*value.__bases__, *inner.values()]
    if callable(value) and hasattr(value, "__dict__") and _mine(type(value)) and not isinstance(value, Stage):
        return repr(_plain(vars(value))), [type(value), *vars(value).values()]
    return None


def _around(function: FunctionType) -> dict[str, Any]:
    """The variables from outside that a function reads; an attribute of the same name is none of them."""
    codes, names = [function.__code__], set()
    for code in codes:
        names |= {one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}
        codes += [one for one in code.co_consts if isinstance(one, CodeType)]
    around = {name: function.__globals__[name] for name in sorted(names & function.__globals__.keys())}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        with suppress(ValueError):  # not set yet
            around[name] = cell.cell_contents
    return around


def _compiled(code: CodeType) -> str:
    """What a function does, without comments, layout and line numbers."""
    inner = [_compiled(one) if isinstance(one, CodeType) else repr(one) for one in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {inner}"


def _plain(value: Any) -> Any:
    """Numbers, texts and collections of them, arrays by their hash; None for everything else."""
    if isinstance(value, str | bytes | int | float | complex):
        return value
    if isinstance(value, torch.Tensor | np.ndarray):
        array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
        return array.shape, hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    if isinstance(value, Mapping):
        return {str(key): plain for key, one in value.items() if (plain := _plain(one)) is not None}
    if isinstance(value, tuple | list | set | frozenset):
        return [
            _plain(one) for one in (sorted(value, key=repr) if isinstance(value, set | frozenset) else value)
        ]
    return None


def _cached(kind: type, name: str) -> bool:
    return isinstance(inspect.getattr_static(kind, name, None), cached_property)


def _foreign(value: Any) -> bool:
    return value is not object and value.__module__.partition(".")[0] != "unmask"


def _mine(value: Any) -> bool:
    """Whether a function or a class is neither the library's nor an installed package's."""
    module = str(value.__module__)
    if module == "__main__":  # whatever file this process began with
        return True
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return (
        _foreign(value)
        and module.partition(".")[0] not in sys.stdlib_module_names
        and "-packages" not in file
    )
