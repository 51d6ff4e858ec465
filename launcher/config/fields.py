"""Reads the schema: the field of a key, the keys of a name, defaults and examples as YAML.

For messages, `--set`, `cloudtrain explain` and the JSON schema. The keys themselves are in `schema.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from .kinds import Kind, Section
from .schema import model

TYPO = 0.85  # from this ratio of difflib's, a misspelt top-level key wins over the same key in a section


def section(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a field with a mapping of keys or a list of mappings; else None."""
    parts = (part for part in _parts(field.annotation) if isinstance(part, type) and issubclass(part, Section))
    return next(parts, None)


def sections(whole: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield a model and all models below, depth first."""
    yield whole
    for field in whole.model_fields.values():
        if inner := section(field):
            yield from sections(inner)


def is_list(field: FieldInfo) -> bool:
    """Return whether the field holds a list."""
    return any(get_origin(part) is tuple for part in _parts(field.annotation))


def field_at(path: tuple[str | int, ...]) -> FieldInfo | None:
    """Return the field at `("resources", "spot")`; numbers, the indexes of list items, are skipped."""
    inner: type[BaseModel] | None = model(path[:1])
    field = None
    for name in path:
        if isinstance(name, int):
            continue
        field = inner.model_fields.get(name) if inner is not None else None
        if field is None:
            return None
        inner = section(field)
    return field


def written_default(field: FieldInfo) -> Any:
    """Return a default in the form of the file, as in `24h`; {} for a section, because the keys have the defaults."""
    value = field.get_default()
    if isinstance(value, BaseModel):
        return {}
    inner = (item for part in _parts(field.annotation) for item in getattr(part, "__metadata__", ()))
    metadata = [*field.metadata, *inner]
    write = next((item.write for item in metadata if isinstance(item, Kind) and item.write is not None), None)
    if isinstance(value, tuple):
        return [write(item) if write else item for item in value]
    return write(value) if write and value is not None else value


def as_yaml(value: Any) -> str:
    """Return a value as YAML on a single line: `{hidden: 128}`, `[50%, 80%]`."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {as_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(as_yaml(item) for item in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    # Quote digits: YAML would read the text as a number, and the example would be invalid.
    return f'"{value}"' if isinstance(value, str) and value.isdigit() else str(value)


def every_key(whole: type[BaseModel], above: str = "") -> Iterator[str]:
    """Yield the dotted path of every key below the model, sections included."""
    for key, field in whole.model_fields.items():
        yield above + key
        if inner := section(field):
            yield from every_key(inner, f"{above}{key}.")


def keys_named(name: str) -> list[str]:
    """Return the dotted path of every key with the name: `training.optimizer.lr` for `lr`."""
    return [key for key in every_key(model()) if key.rpartition(".")[2] == name]


def _every_part(annotation: Any) -> tuple[Any, ...]:
    return annotation, *(part for inner in get_args(annotation) for part in _parts(inner))


_parts: Callable[[Any], tuple[Any, ...]] = functools.cache(_every_part)
