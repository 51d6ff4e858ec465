"""Check an operation's parameters against the vendor's own model (botocore's data), with AWS's error messages.

botocore itself checks types and required members only; `check` adds lengths, ranges, patterns, enumerations and unknown
members.
"""

from __future__ import annotations

import functools
import re
import sys
import unicodedata
from collections.abc import Iterator
from typing import Any

from doubles.aws.wire import AwsError

__all__ = ["check", "enumeration"]

_TYPES: dict[str, tuple[type, ...]] = {
    "structure": (dict,),
    "map": (dict,),
    "list": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "long": (int,),
    "double": (int, float),
    "float": (int, float),
    "timestamp": (int, float, str),
}


def check(service: str, operation: str, params: Any) -> None:
    """Raise AwsError with all faults of the parameters."""
    model = _model(service)
    if operation not in model["operations"]:
        raise AwsError("UnknownOperationException", f"{service} has no {operation}")
    shape = model["operations"][operation].get("input")
    if shape is None:
        return
    wrong_type = next(_wrong_types(model, shape["shape"], params), None)
    if wrong_type is not None:
        raise AwsError("SerializationException", wrong_type)
    found = list(_violations(model, shape["shape"], params, ""))
    if found:
        plural = "" if len(found) == 1 else "s"
        code = "InvalidParameterException" if service == "logs" else "ValidationException"
        raise AwsError(code, f"{len(found)} validation error{plural} detected: {'; '.join(found)}")


def enumeration(service: str, shape: str) -> list[str]:
    """Return the words of an enumeration."""
    return _model(service)["shapes"][shape]["enum"]


@functools.lru_cache(maxsize=8)
def _model(service: str) -> dict[str, Any]:
    from botocore.loaders import Loader

    return Loader().load_service_model(service, "service-2")


def _wrong_types(model: dict[str, Any], name: str, value: Any) -> Iterator[str]:
    shape = model["shapes"][name]
    kind = shape["type"]
    allowed = _TYPES.get(kind, (object,))
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind != "boolean"):
        was = {bool: "TRUE_VALUE", int: "NUMBER_VALUE", float: "NUMBER_VALUE", str: "STRING_VALUE"}
        yield f"{was.get(type(value), 'Unexpected value')} can not be converted to {kind.capitalize()}"
        return
    for _, inner, item in _items(shape, value, ""):
        yield from _wrong_types(model, inner, item)


def _items(shape: dict[str, Any], value: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    """Yield (path, shape's name, value) of each inner value."""
    if shape["type"] == "structure":
        for key, item in value.items():
            if key in shape["members"] and item is not None:
                yield f"{path}.{_lower(key)}".lstrip("."), shape["members"][key]["shape"], item
    elif shape["type"] == "list":
        for number, item in enumerate(value, start=1):
            yield f"{path}.{number}.member", shape["member"]["shape"], item
    elif shape["type"] == "map":
        for key, item in value.items():
            yield f"{path}.{key}.key", shape["key"]["shape"], key
            yield f"{path}.{key}.value", shape["value"]["shape"], item


def _violations(model: dict[str, Any], name: str, value: Any, path: str) -> Iterator[str]:
    shape = model["shapes"][name]
    if shape["type"] == "structure":
        for key in shape.get("required", ()):
            if value.get(key) is None:
                at = f"{path}.{_lower(key)}".lstrip(".")
                yield f"Value null at '{at}' failed to satisfy constraint: Member must not be null"
        for key in value:
            if key not in shape["members"]:  # AWS itself would ignore the member
                yield f"Unknown member '{key}' at '{path or name}'"
    for problem in _problems(shape, value):
        yield f"Value '{value}' at '{path}' failed to satisfy constraint: Member must {problem}"
    for at, inner, item in _items(shape, value, path):
        yield from _violations(model, inner, item, at)


def _problems(shape: dict[str, Any], value: Any) -> Iterator[str]:
    if shape["type"] in ("string", "list", "map"):
        size = len(value)
        if size < shape.get("min", 0):
            yield f"have length greater than or equal to {shape['min']}"
        if size > shape.get("max", sys.maxsize):
            yield f"have length less than or equal to {shape['max']}"
    elif shape["type"] in ("integer", "long", "float", "double"):
        if value < shape.get("min", value):
            yield f"have value greater than or equal to {shape['min']}"
        if value > shape.get("max", value):
            yield f"have value less than or equal to {shape['max']}"
    if "enum" in shape and value not in shape["enum"]:
        yield f"satisfy enum value set: [{', '.join(shape['enum'])}]"
    if "pattern" in shape and not _pattern(shape["pattern"]).fullmatch(value):
        yield f"satisfy regular expression pattern: {shape['pattern']}"


def _lower(key: str) -> str:
    return key[:1].lower() + key[1:]


@functools.lru_cache(maxsize=256)
def _pattern(text: str) -> re.Pattern[str]:
    """Return Java's pattern as Python's; the models use a class such as \\p{L} only inside brackets."""
    text = text.replace(r"\p{Alnum}", "a-zA-Z0-9").replace(r"\p{Alpha}", "a-zA-Z").replace(r"\p{Digit}", "0-9")
    return re.compile(re.sub(r"\\p\{([LZN])\}", lambda found: _category(found[1]), text))


@functools.lru_cache(maxsize=8)
def _category(letter: str) -> str:
    """Return all characters of a Unicode category, as ranges of a character class."""
    ranges: list[list[int]] = []
    for code in range(sys.maxunicode + 1):
        if unicodedata.category(chr(code)).startswith(letter):
            if ranges and ranges[-1][1] == code - 1:
                ranges[-1][1] = code
            else:
                ranges.append([code, code])
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges)
