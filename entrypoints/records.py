"""The JSON form of frozen dataclasses: of the messages between launcher and nodes, and of stored records.

`load` reads by the fields' types: a list becomes a tuple, text a path, and an object the record that the type names.
Unknown keys are ignored. A missing key stands for the default, and so does null if the type lacks None.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_R = TypeVar("_R", bound="Record")
_NONE = type(None)
MOST = 1e15  # of a number in a checked record: as a time, the year 31 million


class RecordError(ValueError):
    """A value that is not the JSON form of a record; the text names the record and the fault."""


class Record:
    """The base of all messages and stored records.

    Class arguments: `optional`: fields that `dump` omits at their defaults. `names`: JSON names that differ from the
    field's name. `checks`: `load` refuses a value of another type than the field's.
    """

    _optional: ClassVar[frozenset[str]] = frozenset()
    _names: ClassVar[Mapping[str, str]] = {}
    _checks: ClassVar[bool] = False

    def __init_subclass__(
        cls, *, optional: str = "", names: Mapping[str, str] | None = None, checks: bool | None = None
    ) -> None:
        """Raise TypeError if `optional` or `names` has a name that is no field."""
        cls._optional, cls._names = frozenset(optional.split()), names or {}
        cls._checks = cls._checks if checks is None else checks
        known = {name for base in cls.__mro__ for name in getattr(base, "__annotations__", {})}
        if unknown := {*cls._optional, *cls._names} - known:
            raise TypeError(f"{cls.__name__} has no field {', '.join(sorted(unknown))}")

    @classmethod
    def fault(cls, why: str) -> ValueError:
        """Return the error of `load`: another kind of error for some bases."""
        return RecordError(f"{cls.__name__} {why}")

    @classmethod
    def load(cls: type[_R], data: Any) -> _R:
        """Return the record from its JSON form. Raises the error of `fault`."""
        if not isinstance(data, Mapping):
            raise cls.fault(f"expects an object, not {type(data).__name__}: {data!r}"[:100])
        values = {}
        for field in fields(cls):  # type: ignore[arg-type]  # all subclasses are dataclasses
            key, kind = cls._names.get(field.name, field.name), _types(cls)[field.name]  # type: ignore[arg-type]
            value = data.get(key)
            if value is not None:
                values[field.name] = _loaded(cls, key, kind, value)
            elif key in data and (kind is Any or _NONE in get_args(kind)):
                values[field.name] = None
            elif field.default is MISSING and field.default_factory is MISSING:
                raise cls.fault(f"lacks `{key}`")
        return cls(**values)

    def dump(self) -> dict[str, Any]:
        """Return the JSON form."""
        values = {}
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.name not in self._optional or value != field.default:
                values[self._names.get(field.name, field.name)] = _plain(value)
        return values


_types = cache(get_type_hints)


def _loaded(record: type[Record], key: str, kind: Any, value: Any) -> Any:
    """Return the JSON value as the type `kind`; `key` is the place in the record."""
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, types.UnionType):
        return _loaded(record, key, _option(parts, value), value)
    if isinstance(origin, type) and issubclass(origin, Record):
        return origin.load(value)
    if origin in (tuple, list) and isinstance(value, list | tuple):
        is_fixed = origin is tuple and parts[-1] is not ...
        if is_fixed and len(parts) != len(value):
            raise record.fault(f"has {len(value)} values in `{key}`")
        pairs = zip(parts if is_fixed else parts[:1] * len(value), value, strict=True)
        return origin(_loaded(record, key, part, each) for part, each in pairs)
    if origin in (dict, Mapping) and isinstance(value, Mapping):
        return {name: _loaded(record, f"{key}.{name}", parts[1], each) for name, each in value.items()}
    if kind is Path and isinstance(value, str):
        return Path(value)
    if record._checks and kind is not Any:
        fits = value in parts if origin is Literal else is_number(value) if kind is float else isinstance(value, origin)
        if not fits:
            raise record.fault(f"has {value!r} as `{key}`"[:100])
    return value


def is_number(value: Any) -> bool:
    """Return whether the value is a number that can be a time: a clock has no later date."""
    return isinstance(value, int | float) and abs(value) < MOST


def _option(options: tuple[Any, ...], value: Any) -> Any:
    """Return the type of a union that the value has: of several records, the first whose needed keys are there."""
    options = tuple(option for option in options if option is not _NONE)
    if len(options) == 1:
        return options[0]
    records = [option for option in options if isinstance(option, type) and issubclass(option, Record)]
    return next((option for option in records if _needed(option) <= set(value)), Any)  # type: ignore[arg-type]


@cache
def _needed(record: type[Record]) -> frozenset[str]:
    needed = (field for field in fields(record) if field.default is MISSING and field.default_factory is MISSING)  # type: ignore[arg-type]
    return frozenset(record._names.get(field.name, field.name) for field in needed)


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.dump()
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return str(value) if isinstance(value, Path) else value
