"""Translates pydantic's validation errors into readable faults with places in the config file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..errors import Fault, Place
from ..job import name_of
from . import fields, foreign_keys, schema
from .yamlfile import KeyPath, YamlNode, find, key_place

_LONGEST_SHOWN = 60
_BOUNDS = {"ge": "at least {}", "gt": "more than {}", "le": "at most {}", "lt": "less than {}"}
_BOUNDS |= {"min_length": "at least {} items", "max_length": "at most {} items"}
_LONG_UNIT = r"([0-9]+) ?(s(?:ec(?:ond)?s?)?|m(?:in(?:ute)?s?)?|h(?:(?:ou)?rs?)?|d(?:ays?)?)"
_BOOLEANS = dict.fromkeys(("yes", "on", "y", "true"), "true") | dict.fromkeys(("no", "off", "n", "false"), "false")
_WANTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "`true` or `false`",
    "tuple_type": "a list",
    "dict_type": "a mapping of keys",
    "model_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys",
}
# A drive, `.\data`, or a name below a folder.
_OF_WINDOWS = re.compile(r"^[A-Za-z]:[\\/]|^\.{1,2}\\|[\w.*-]\\[\w.*]")
_DRIVE = re.compile(r"^([A-Za-z]):[\\/]")


def faults_of(exc: ValidationError, root: YamlNode) -> Iterator[Fault]:
    """Yield a fault for each validation error, except at values with an earlier fault (`Node.broken`)."""
    for error in exc.errors(include_url=False, include_input=False):
        path: KeyPath = tuple(error["loc"])
        node = find(root, path)
        if node is None or not node.broken:
            yield _fault(dict(error), path, node, root)


def dotted(path: KeyPath) -> str:
    """Return a path in the form `notify.0.slack`."""
    return ".".join(str(step) for step in path)


def quoted(names: Any) -> str:
    """Return the names in backquotes, with commas."""
    return ", ".join(f"`{name}`" for name in names)


def named(node: YamlNode) -> str:
    """Return a text value for a message, cut to 60 characters; a value from a secret variable as `${NAME}`."""
    text = node.shown or str(node.value)
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."


def slashed(text: str) -> str:
    """Return a hint for a path with the backslashes of Windows; an empty text for any other path."""
    if not _OF_WINDOWS.search(text):
        return ""
    drive = _DRIVE.sub(lambda match: f"/mnt/{match[1].lower()}/", text.replace("\\", "/"))
    return f"a path has slashes here: write `{drive}`" + ", the drive's folder under WSL" * bool(_DRIVE.match(text))


def found(node: YamlNode | None) -> str:
    """Return a description of the value in words, such as "the number 3"."""
    if node is None or node.value is None:
        return "nothing"
    if isinstance(node.value, dict):
        return "a mapping"
    if isinstance(node.value, tuple):
        return "a list" if node.value else "an empty list"
    shown = named(node).replace("\n", "\\n")
    if isinstance(node.value, bool):
        return f"`{shown.lower()}`"
    return f"the text `{shown}`" if isinstance(node.value, str) else f"the number {node.shown or node.text}"


def between(root: YamlNode, message: str, hint: str, *paths: KeyPath) -> Fault:
    """Return a fault at the first path; the fault also points at the remaining paths."""
    places: list[Place] = [place for path in paths if (place := key_place(root, path))]
    return Fault(message, dotted(paths[0]), places[0], hint, tuple(places[1:]))


def both(names: list[str]) -> str:
    """Return the names as text: "`task` and `script`"."""
    return f"{quoted(names[:-1])} and `{names[-1]}`"


def either(names: Sequence[str]) -> str:
    """Return the names as text: "`task` or `script`"."""
    return f"{quoted(names[:-1])} or `{names[-1]}`"


def _fault(error: dict[str, Any], path: KeyPath, node: YamlNode | None, root: YamlNode) -> Fault:
    kind = error["type"]
    if kind == "extra_forbidden":
        return Fault(f"unknown key `{path[-1]}`", dotted(path), key_place(root, path), _key_hint(str(path[-1]), path))
    if kind == "missing":
        return _missing_key(path, root)
    if path and path[-1] == "[key]":
        path = path[:-1]
        wanted = _wanted(error)
        name = str(path[-1])
        shown = repr(name if len(name) <= _LONGEST_SHOWN else name[: _LONGEST_SHOWN - 3] + "...")[1:-1]
        plain = re.sub("[-. ]", "_", name)
        is_near = path[0] in ("inputs", "outputs", "env") and plain.isidentifier() and plain.isascii()
        hint, key = (f"did you mean `{plain}`?", path) if is_near else ("", path[:-1])
        return Fault(f"expected {wanted}, found `{shown}`", dotted(key), key_place(root, path), hint)
    place = node.place if node is not None else key_place(root, path)
    if path[0] == "secrets":
        return _secret_fault(path, place)
    message = f"expected {_wanted(error)}, found {found(node)}"
    return Fault(message, dotted(path), place, _hint(kind, error.get("ctx", {}), node, path))


def _wanted(error: dict[str, Any]) -> str:
    ctx = error.get("ctx", {})
    if error["type"] == "value_error":
        return str(ctx["error"])
    if error["type"] == "literal_error":
        return f"one of {quoted(_choices(ctx))}"
    for bound, words in _BOUNDS.items():
        if bound in ctx:
            return words.format(ctx[bound])
    return _WANTED.get(error["type"], f"something else ({error['msg']})")


def _choices(ctx: dict[str, Any]) -> list[str]:
    return re.findall(r"'([^']*)'", ctx["expected"])


def _hint(kind: str, ctx: dict[str, Any], node: YamlNode | None, path: KeyPath) -> str:
    """Return how to fix a value; empty text if the fix is not obvious."""
    text = node.value if node is not None and isinstance(node.value, str) else ""
    if tuple(path) == ("requirements",):
        return "write the packages into a file, one a line, and name the file: `requirements: requirements.txt`"
    if kind == "literal_error":
        choices = _choices(ctx)
        longer = [choice for choice in choices if len(text) > 2 and choice.startswith(text.lower())]  # adam: adamw
        close = longer or get_close_matches(text.lower(), choices, 1)
        close = close or get_close_matches(text.replace("_", "-"), choices, 1)
        return f"did you mean `{close[0]}`?" if close else ""
    if kind == "bool_type" and text.lower() in _BOOLEANS:
        return f"write `{_BOOLEANS[text.lower()]}`, without quotes"
    if kind == "value_error" and node is not None and not node.shown:
        return _value_hint(str(ctx["error"]), node.text)
    if kind in {"int_type", "int_from_float", "float_type"} and node is not None and not node.shown:
        if re.fullmatch(r"[-+]?[0-9][0-9_,]*", text):
            return f"write {text.replace('_', '').replace(',', '')}, without quotes or separators"
        if isinstance(node.value, float) and node.value.is_integer():
            return f"write {int(node.value)}"
    if kind == "tuple_type" and node is not None and isinstance(node.value, str | int | float):
        sign = "%" if path[-1:] == ("alert_at",) and isinstance(node.value, int) else ""
        return f"write `[{named(node)}{sign}]`"
    if kind in {"tuple_type", "dict_type", "model_type", "too_short"}:
        return _shape_hint(node, path)
    if tuple(path) == ("sweep", "metric"):
        return "the metric with its direction is `training.monitor: {metric: accuracy, mode: max}`"
    return ""


def _value_hint(wanted: str, text: str) -> str:
    """Return the given text in the wanted form, as a hint; empty text if the meaning is not obvious."""
    if "with a unit" in wanted and re.fullmatch(r"[0-9]+", text):
        return f"write `{text}s`, `{text}m` or `{text}h`"
    if "with a unit" in wanted and (found := re.fullmatch(_LONG_UNIT, text.strip(), re.IGNORECASE)):
        return f"write `{found[1]}{found[2][0].lower()}`"
    if "below the working directory" in wanted and text.startswith(("/", "~")):
        return "let the script write into the working directory, or into the folder CLOUDTRAIN_CHECKPOINT_DIR"
    if "with its sign" in wanted and re.fullmatch(r"[1-9][0-9]{0,2}", text):
        return f"write `{text}%`"
    if "count per instance" in wanted:
        name, count, between = r"([A-Za-z][A-Za-z-]*[0-9][A-Za-z0-9-]*?)", r"([1-9][0-9]{0,3})", r"[ xX*/=,:]+"
        if found := re.fullmatch(name + between + count, text):
            return f"did you mean `{found[1]}:{found[2]}`?"
        if found := re.fullmatch(r"type=([A-Za-z0-9-]+),count=([1-9][0-9]{0,3})", text):  # of gcloud
            return f"did you mean `{found[1]}:{found[2]}`?"
        if found := re.fullmatch(count + between + name, text):
            return f"did you mean `{found[2]}:{found[1]}`?"
        if re.fullmatch(r"[A-Za-z][\w -]*(:[1-9][0-9]*)?", text):
            return f"did you mean `{text.replace(' ', '-')}`?"
        if "." in text:
            return "a machine's own name is for `resources.instance_type`"
    return ""


def _shape_hint(node: YamlNode | None, path: KeyPath) -> str:
    """Return a hint on the form of the list or mapping that this key expects."""
    field = fields.field_at(path)
    if field is None:
        return ""
    model = fields.section(field)
    text = named(node) if node is not None and not isinstance(node.value, tuple | dict) else ""
    if text and tuple(path) == ("inputs",):
        return f"write `inputs: {{train: {text}}}`"
    main = next((key for key in ("name", "limit") if model is not None and key in model.model_fields), "")
    if text and main:
        return f"write `{path[-1]}: {{{main}: {text}}}`"
    if model is not None and not fields.is_list(field):
        return f"keys here: {quoted(model.model_fields)}"
    name = next(step for step in reversed(path) if isinstance(step, str))
    return f"as in `{name}: {fields.as_yaml(field.examples[0])}`" if field.examples else ""


def _key_hint(name: str, path: KeyPath) -> str:
    above = fields.field_at(path[:-1])
    model = schema.model() if len(path) == 1 else fields.section(above) if above is not None else None
    siblings = list(model.model_fields) if model is not None else []
    plain = name.lower().replace("-", "_").strip()
    if plain in siblings:
        return f"did you mean `{plain}`?"
    if own := foreign_keys.sibling(str(path[0]), plain):
        return f"it is `{own}` here"
    if said := foreign_keys.advice(name, dotted(path[:-1])):
        return said
    if len(path) == 1 and (close := get_close_matches(plain, siblings, 1, fields.TYPO)):
        return f"did you mean `{close[0]}`?"
    elsewhere = fields.keys_named(plain)
    if elsewhere and len(elsewhere) <= 3:
        sections = [place.rpartition(".")[0] for place in elsewhere]
        if not all(sections):
            return f"`{plain}` stands at the top level"
        return f"`{plain}` belongs under {' or '.join(f'`{section}`' for section in sections)}"
    if close := get_close_matches(plain, siblings, 1, 0.7):
        return f"did you mean `{close[0]}`?"
    if len(path) > 1 and (close := get_close_matches(plain, schema.model().model_fields, 1, 0.8)):
        return f"did you mean `{close[0]}`, at the top level?"
    if close := get_close_matches(plain, siblings, 1):
        return f"did you mean `{close[0]}`?"
    if len(siblings) <= 12:
        return f"keys here: {quoted(siblings)}"
    return f"`cloudtrain explain{''.join(f' {dotted(path[:-1])}' if len(path) > 1 else '')}` lists the keys"


def _missing_key(path: KeyPath, root: YamlNode) -> Fault:
    field = fields.field_at(path)
    example = fields.as_yaml(field.examples[0]) if field is not None and field.examples else "..."
    example = name_of(Path(root.place.file).parent) if path == ("name",) else example
    hint = f"add `{path[-1]}: {example}`"
    if (place := key_place(root, path)) is not None:
        return Fault(f"`{path[-1]}` has no value", dotted(path), place, f"for example `{path[-1]}: {example}`")
    return Fault(f"missing key `{path[-1]}`", dotted(path), key_place(root, path[:-1]) or root.place, hint)


def _secret_fault(path: KeyPath, place: Place | None) -> Fault:
    """Return the fault of a value in `secrets`; the fault hides the value, which may be the secret."""
    if place is not None and place.excerpt:
        place = replace(place, excerpt=place.excerpt[: place.column - 1] + "...")
    message = "expected a list of names: a secret's value must not be in the file"
    hint = "write `secrets: [WANDB_API_KEY]`; the value comes from your environment"
    return Fault(message, dotted(path), place, hint)
