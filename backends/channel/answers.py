"""The forms of hosts' answers (answers.json): a host that lies gets an error, and no lie reaches our arithmetic.

A form is a type, the name of another form, an object of forms by field, a list with the form of its items, or a list of
several forms, one for each item. A field with `?` may be missing or null; `*` is the form of all fields.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from cloudtrain.entrypoints.records import is_number

_LARGEST = 1 << 63
_TYPES: dict[str, Callable[[Any], bool]] = {
    "any": lambda value: True,
    "text": lambda value: isinstance(value, str),
    "text or null": lambda value: value is None or isinstance(value, str),
    "flag": lambda value: isinstance(value, bool),
    "whole": lambda value: type(value) is int and abs(value) <= _LARGEST,
    "count": lambda value: type(value) is int and 0 <= value < _LARGEST,
    "time": is_number,
}


def form_of(verb: str) -> Any:
    """Return the form of the verb's answer; any object for a verb whose answer is not used, or is a record."""
    form = _table().get(verb, {"*": "any"})
    return _table()[form] if isinstance(form, str) else form


def fits(value: Any, form: Any) -> bool:
    """Return whether the JSON value has the form."""
    if isinstance(form, str):
        return _TYPES[form](value) if form in _TYPES else fits(value, _table()[form])
    if isinstance(form, list):
        forms = form if len(form) > 1 else form * len(value) if isinstance(value, list) else ()
        return isinstance(value, list) and len(value) == len(forms) and all(map(fits, value, forms))
    if not isinstance(value, dict) or "*" in form:
        return isinstance(value, dict) and all(fits(each, form["*"]) for each in value.values())
    present = {name: each for name, each in form.items() if name[-1] != "?" or value.get(name[:-1]) is not None}
    return all(fits(value.get(name.rstrip("?"), fits), each) for name, each in present.items())


@functools.cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(files("cloudtrain.backends").joinpath("channel/answers.json").read_text())
    return table
