"""What makes two trainings the same one: values, data, starting weights and code.

The code is that which this process has imported: the library's, and what was defined outside of it, in a cell
of a notebook for instance.
"""

import dis
import hashlib
import json
import sys
from collections.abc import Mapping
from functools import cached_property, partial
from inspect import getclosurevars
from pathlib import Path
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
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
# Keys that change no training: how it is computed, and what a reranker's evaluation reads.
APART = COMPUTED | {"candidates", "max_queries"}


def identity(stage: Stage, model: nn.Module) -> dict[str, Any]:
    """Everything that the result of a training depends on, by name, so that a message can say what differs.

    Raises: RuntimeError if a file of the library has changed since this process imported it.
    """
    job, values = stage.job, resolved(stage.config)
    made_of = {f"{job.section}.{key}": values[key] for key in values.keys() - APART}
    made_of |= {key: getattr(job, key) for key in TOLD if key not in ("mined", "surrogate", "settings")}
    made_of |= {"special tokens": True} if any(map(len, stage.around)) else {}
    made_of |= {"normalize": True} if job.settings and job.settings.normalize else {}
    made_of |= {"stage": job.stage, "mask_token": job.backbone.mask_token, **stage.inputs()}
    made_of |= {"data": stage.corpus.hash, "tokenizer": stage.stored.hash}
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
    """What a stage computes with and the library does not hold, by name: classes and functions of one's own,
    those in the place of the library's losses too. Each counts as it was compiled, without comments and
    layout, with the values that it finds around it."""
    found: dict[str, str] = {}
    seen: set[int] = set()

    def told(value: Any) -> Any:
        """A value as JSON holds it, and of code the name, under which it is found; None for what has neither
        content nor a name."""
        if isinstance(value, torch.Tensor):
            value = value.numpy(force=True)
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, SimpleNamespace):
            value = vars(value)
        if isinstance(value, np.ndarray):
            return [value.shape, hashlib.sha256(np.ascontiguousarray(value)).hexdigest()]
        if isinstance(value, Mapping):
            pairs = ((str(key), told(one)) for key, one in value.items())
            return {key: one for key, one in pairs if one is not None}
        if isinstance(value, tuple | list):
            return [told(one) for one in value]
        if isinstance(value, partial):
            return told([value.func, value.args, value.keywords])
        if isinstance(value, set | frozenset):
            return sorted(map(repr, value))
        if isinstance(value, str | bytes | int | float | complex):
            return repr(value)
        for wrapped in ("func", "fget", "__func__"):  # by a cached property, a property, a static method
            value = getattr(value, wrapped, None) or value
        code = value if isinstance(value, type | FunctionType) else type(value)
        if not _own(code) or id(value) in seen or isinstance(value, Stage):
            return getattr(value, "__qualname__", None)
        seen.add(id(value))
        if isinstance(value, FunctionType):
            content = [_compiled(value), value.__defaults__, value.__kwdefaults__]
        elif isinstance(value, type):
            inner = vars(value).items()
            methods = {key: one for key, one in inner if key[:2] != "__" or isinstance(one, FunctionType)}
            content = [value.__bases__, methods]
        else:
            return told([code, getattr(value, "__dict__", None)])
        name = f"{code.__module__}.{code.__qualname__}"
        found[name] = fingerprint(found.get(name), told(content))
        return name

    told(type(stage))
    made = {key for key in vars(stage) if isinstance(getattr(type(stage), key, None), cached_property)}
    values = {key: one for key, one in vars(stage).items() if key not in made}
    values |= {key: one for key, one in vars(losses).items() if key[:2] != "__" and not _of_library(one)}
    return found | ({"values": fingerprint(own)} if (own := told(values)) else {})


def _compiled(function: FunctionType) -> list[Any]:
    """What a function does, without comments, layout and line numbers, and the variables from outside that
    it reads; an attribute of the same name is none of them."""
    codes, parts, names = [function.__code__], [], set()
    for code in codes:  # which grows
        names |= {one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}
        inner = [one for one in code.co_consts if isinstance(one, CodeType)]
        # A set stays one, since the order of its text changes from process to process.
        own = (one for one in code.co_consts if one not in inner)
        constants = [one if isinstance(one, frozenset) else repr(one) for one in own]
        parts += [code.co_code, code.co_names, code.co_varnames, constants]
        codes += inner
    attributes = {name for code in codes for name in code.co_names}
    around = {name: _read_of(function.__globals__.get(name), attributes) for name in sorted(names)}
    return [parts, around, getclosurevars(function).nonlocals]


def _read_of(value: Any, names: set[str]) -> Any:
    """Of a module of one's own what code reads that has these names; other values as they are."""
    if not (isinstance(value, ModuleType) and _own_module(value.__name__)):
        return value
    inner = {name: one for name, one in vars(value).items() if name in names}
    return {name: _read_of(one, names - {name}) for name, one in sorted(inner.items())}


def _own(code: type | FunctionType) -> bool:
    """Whether a function or a class is neither the library's nor an installed package's."""
    return _own_module(str(code.__module__))


def _own_module(name: str) -> bool:
    top, file = name.partition(".")[0], getattr(sys.modules.get(name), "__file__", None) or ""
    installed = top == "unmask" or top in sys.stdlib_module_names or "-packages" in file
    return top == "__main__" or not installed  # __main__: whatever file this process began with


def _of_library(value: Any) -> bool:
    return str(getattr(value, "__module__", "unmask")).partition(".")[0] == "unmask"
