"""Applies `--set a.b=value`: values from the command line replace values in the tree of the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..errors import Fault, Place
from . import fields, yamlfile
from .schemafaults import dotted
from .yamlfile import KeyPath, MappingEntry, YamlNode


@dataclass(frozen=True)
class Given(Place):
    """The place of a value from the command line: the option itself, with line and column 0."""

    def __str__(self) -> str:
        return self.file


def apply(root: YamlNode, option: str, assignment: str, environ: Mapping[str, str]) -> tuple[YamlNode, list[Fault]]:
    """Return the tree with the value of `a.b=value`, and the faults. The value is YAML; missing mappings are added.

    `option` is the option on the command line: `--set`, or `--backend` for an assignment to the key `backend`.
    """
    key, equals, text = assignment.partition("=")
    key = key.strip()
    secret = key.startswith("secrets") or yamlfile.SECRET_NAME.search(key) is not None
    shown = f"{key}=..." if secret and equals else assignment
    place = Given(f"{option} {text if option != '--set' else shown}", 0, 0, "")
    if not equals or not all(key.split(".")):
        hint = "as in `--set resources.instances=2`"
        return root, [Fault(f"`{place}` is not an assignment", hint=hint)]
    parsed = yamlfile.parse(text, place.file, environ, place)
    faults = [replace(fault, key=key) for fault in parsed.faults]
    if parsed.root is None and faults:
        return root, faults
    value = parsed.root or YamlNode(None, place, plain=True)
    steps: KeyPath = tuple(int(step) if step.isascii() and step.isdigit() else step for step in key.split("."))
    try:
        return _grafted(root, (), steps, value, place), faults
    except IndexError as exc:
        message = f"no item `{exc}`: a list counts from 0, and only its next item can be added"
        return root, [*faults, Fault(message, key, place)]


def _grafted(node: YamlNode | None, above: KeyPath, steps: KeyPath, value: YamlNode, place: Place) -> YamlNode:
    """Return `node` with `value` at the end of `steps`. Raises IndexError with the path if an item cannot be added."""
    if not steps:
        return value
    step, *rest = steps
    field = fields.field_at(above)
    into_list = isinstance(step, int) and (
        isinstance(node.value, tuple)
        if node is not None and isinstance(node.value, tuple | dict)
        else bool(above) and field is not None and fields.is_list(field)
    )
    if into_list and isinstance(step, int):
        items = list(node.value) if node is not None and isinstance(node.value, tuple) else []
        if step > len(items):
            raise IndexError(dotted((*above, step)))
        items[step : step + 1] = [
            _grafted(items[step] if step < len(items) else None, (*above, step), tuple(rest), value, place)
        ]
        return YamlNode(tuple(items), node.place if node is not None else place)
    members = dict(node.value) if node is not None and isinstance(node.value, dict) else {}
    name = str(step)
    old = members.get(name)
    inner = _grafted(old.node if old else None, (*above, step), tuple(rest), value, place)
    members[name] = MappingEntry(place if not rest or old is None else old.place, inner)
    return YamlNode(members, node.place if node is not None and isinstance(node.value, dict) else place)
