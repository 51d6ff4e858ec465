"""What a vendor's request may hold, as a table, and a walk that holds a request against it.

The tables are the backends' rules.json, written by tools/*_table.py from the vendors' own packages. Each has `shapes`,
rules by name, and the name of the `root`. A rule is a mapping, or one word for it: a shape's name, or a type alone.

    type                           object choice either map list string integer int64 number boolean any
    members, required, read_only   of an object: rules by name; names; names
    by, cases                      of a choice: the field that says of which kind it is; rules by its word
    of, key                        rules of a list's items, or of a map's values and names; of `either`: a list of rules
    min, max                       of a number, or of the length of anything else
    pattern, said                  of a text as a whole; what it is then, in words
    enum, fold                     words; `lower` or `snake`: how a word is written before it is looked up
    nullable                       null does too
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from typing import Any

__all__ = ["Found", "Table", "meant", "read", "violations"]

Found = tuple[str, str, bool]  # where in the request, what is wrong, is it only a warning?
Rule = str | dict[str, Any]

# How each type is said, and what JSON makes of it; int64 is JSON's text in protobuf, and a number does too.
_TYPES: dict[str, tuple[str, Any]] = {
    "object": ("a mapping", Mapping),
    "choice": ("a mapping", Mapping),
    "map": ("a mapping", Mapping),
    "list": ("a list", list),
    "string": ("a string", str),
    "boolean": ("true or false", bool),
    "integer": ("an integer", int),
    "int64": ("an integer", (int, str)),
    "number": ("a number", (int, float)),
    "any": ("anything", object),
}
_NUMBERS = ("integer", "int64", "number")
_SHOWN = 80  # characters of a wrong value


@dataclass(frozen=True)
class Table:
    """Rules with their words: `thing` is what a request is called, `vendor` whose it is.

    `growing` names the enumerations that the vendor adds to: an unknown word of theirs may be newer than the table.
    """

    root: str
    shapes: Mapping[str, dict[str, Any]]
    thing: str
    vendor: str
    growing: tuple[str, ...] = ()


@functools.lru_cache(maxsize=8)
def read(backend: str, thing: str, vendor: str, *growing: str) -> Table:
    """Return the table that lies with the backend of this name."""
    told = json.loads(files("cloudtrain.backends").joinpath(backend).joinpath("rules.json").read_text())
    return Table(told["root"], told["shapes"], thing, vendor, growing)


def violations(table: Table, value: Any, shape: str = "") -> Iterator[Found]:
    """Yield each breach of the table by a request, or by a value that is to have another shape than the root's."""
    yield from _value(table, shape or table.root, value, "")


def meant(word: Any, known: Iterable[Any]) -> str:
    """Return `; did you mean ...?` where something known is like the word, in another spelling or by a slip; or ""."""
    names = [str(each) for each in known]
    same = [name for name in names if _letters(name) == _letters(str(word))]
    close = same or get_close_matches(str(word), names, 1)
    return f"; did you mean `{close[0]}`?" if close else ""


def _value(table: Table, rule: Rule, value: Any, path: str) -> Iterator[Found]:
    name, rule = rule if isinstance(rule, str) else "", _spelt_out(table, rule)
    kind = rule["type"]
    if value is None and rule.get("nullable"):
        return
    if kind == "either":
        yield from _either(table, rule["of"], value, path)
        return
    if not _is_of(kind, value) or (isinstance(value, bool) and kind in _NUMBERS):
        yield path, f"expected {_TYPES[kind][0]}, found {_shown(value)}", False
        return
    yield from ((path, message, False) for message in _limits(rule, value))
    if kind == "object":
        yield from _members(table, rule, value, path)
    elif kind == "choice":
        yield from _case(table, rule, value, path)
    elif kind == "list":
        for index, item in enumerate(value):
            yield from _value(table, rule["of"], item, f"{path}[{index}]")
    elif kind == "map":
        for key, item in value.items():
            yield from _value(table, rule.get("key", "string"), key, f"{path}.{key}")
            yield from _value(table, rule["of"], item, f"{path}.{key}")
    elif "enum" in rule and _folded(value, rule.get("fold")) not in rule["enum"]:
        if name in table.growing:
            yield path, f"`{value}` is not in our table of {len(rule['enum'])}; {table.vendor} may know it", True
        else:
            yield path, f"`{value}` is not one of {', '.join(rule['enum'])}{meant(value, rule['enum'])}", False


def _members(table: Table, rule: dict[str, Any], value: Mapping[Any, Any], path: str) -> Iterator[Found]:
    prefix = f"{path}." if path else ""
    for name in rule["required"]:
        if name not in value:
            yield f"{prefix}{name}", "is required", False
    for name, item in value.items():
        if name in rule["members"]:
            yield from _value(table, rule["members"][name], item, f"{prefix}{name}")
        elif name in rule.get("read_only", ()):
            yield f"{prefix}{name}", f"is set by {table.vendor}; a request must not contain it", False
        else:
            yield f"{prefix}{name}", f"is not a field of {table.thing}{meant(name, rule['members'])}", False


def _either(table: Table, rules: list[Rule], value: Any, path: str) -> Iterator[Found]:
    """Yield the least that is wrong, by one of the rules; `type` says which is meant, where the value has one."""
    spelt_out = [_spelt_out(table, rule) for rule in rules]
    fitting = [rule for rule in spelt_out if _is_of(rule["type"], value)]
    if not fitting:
        said = " or ".join(dict.fromkeys(_TYPES[rule["type"]][0] for rule in spelt_out))
        yield path, f"expected {said}, found {_shown(value)}", False
        return
    tried = []
    for rule in fitting:
        found = list(_value(table, rule, value, path))
        tried.append((any(each[0] == f"{path}.type" for each in found), len(found), found))
    is_other_type, _, best = min(tried, key=lambda each: each[:2])
    kinds = [_spelt_out(table, rule.get("members", {}).get("type", "any")) for rule in fitting]
    words = [word for kind in kinds for word in kind.get("enum", ())]
    if is_other_type and words:
        said = f"`{value['type']}` is not one of" if "type" in value else "is required: one of"
        yield f"{path}.type", f"{said} {', '.join(words)}", False
    else:
        yield from best


def _case(table: Table, rule: dict[str, Any], value: Mapping[Any, Any], path: str) -> Iterator[Found]:
    """Yield what is wrong with a value of several kinds, by the kind that it says it is."""
    word = value.get(rule["by"])
    if word is None:
        yield f"{path}.{rule['by']}", "is required", False
    elif not isinstance(word, str) or word not in rule["cases"]:
        yield f"{path}.{rule['by']}", f"`{word}` is not one of {', '.join(rule['cases'])}", False
    else:
        yield from _value(table, rule["cases"][word], value, path)


def _limits(rule: dict[str, Any], value: Any) -> Iterator[str]:
    if "min" in rule or "max" in rule:
        is_number = isinstance(value, (int, float))
        unit = "" if is_number else " characters" if isinstance(value, str) else " entries"
        size = value if is_number else len(value)
        if size < rule.get("min", size):
            yield f"{size}{unit} is less than {rule['min']}"
        if size > rule.get("max", size):
            yield f"{size}{unit} is more than {rule['max']}"
    if "pattern" in rule and isinstance(value, str) and not re.fullmatch(rule["pattern"], value):
        yield f"`{value}` {'is not a valid ' + rule['said'] if 'said' in rule else 'does not match ' + rule['pattern']}"


def _spelt_out(table: Table, rule: Rule) -> dict[str, Any]:
    return table.shapes.get(rule) or {"type": rule} if isinstance(rule, str) else rule


def _is_of(kind: str, value: Any) -> bool:
    return isinstance(value, _TYPES[kind][1])


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _folded(word: str, fold: str | None) -> str:
    if fold == "snake":
        word = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", word)
    return word.lower() if fold else word


def _letters(word: str) -> str:
    return "".join(each for each in word.lower() if each.isalnum())
