"""Checks what users write: sections of typed keys, errors in plain words, YAML without duplicate keys."""

import re
from collections.abc import Mapping
from typing import Any, TypeVar, dataclass_transform

import yaml
from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from unmask.store import nearest


class ConfigError(ValueError):
    """A preset, a key or a value that cannot be used; the message says which and what would do."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Section:
    """Makes each subclass a frozen dataclass whose values pydantic checks."""

    def __init_subclass__(cls):
        strict = ConfigDict(extra="forbid", allow_inf_nan=False, defer_build=True)  # until it is used
        dataclass(frozen=True, kw_only=True, config=strict)(cls)


T = TypeVar("T", bound=Section)


def checked(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """Makes a section, or a preset, of plain values.

    Raises: ConfigError that names the wrong key, after `where`.
    """
    try:
        return kind(**values)
    except ValidationError as error:
        raise ConfigError(f"{where}{explained(error, kind)}") from None


def explained(error: ValidationError, kind: type) -> str:
    """Words the first of pydantic's errors: an unknown key before a missing one, for which it may stand."""
    unknown = "unexpected_keyword_argument"
    first = min(error.errors(), key=lambda one: one["type"] != unknown)
    where = ".".join(str(part) for part in first["loc"] if "[" not in str(part))  # no type of a union
    if first["type"] == unknown:
        *path, key = first["loc"]
        for section in path:
            kind = kind.__dataclass_fields__[section].type
        return f"{where}: unknown key {key!r}{nearest(key, kind.__dataclass_fields__)}"
    if first["type"] == "missing":
        return f"missing {where}"
    message = first["msg"].removeprefix("Value error, ").replace(" after validation", "")
    message = re.sub(r"^(Input|List|String|Tuple) should", "must", message)
    return f"{where} {message}" + ("" if first["type"] == "value_error" else f", got {first['input']!r}")


class Strict(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
    """YAML without duplicate keys, of which the first would be lost; read by C code where there is some."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        if twice := [name for name in names if names.count(name) > 1]:
            raise yaml.MarkedYAMLError(f"{twice[0]!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)
