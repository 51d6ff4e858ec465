"""Reads keys from the tree of a config file for the rules across keys, and makes the faults of the rules.

A value of the wrong type counts as missing, because the validation of the schema reports the type.
"""

from __future__ import annotations

from ..errors import Fault, Place
from .schemafaults import dotted, quoted
from .yamlfile import KeyPath, YamlNode, find, key_place


def given(root: YamlNode, *path: str | int) -> YamlNode | None:
    """Return the node at the path; None if the key is missing or has no value."""
    node = find(root, path)
    return node if node is not None and (node.value is not None or node.broken) else None


def text_at(root: YamlNode, *path: str) -> str:
    """Return the text at the path; an empty text if the key is missing or has another type."""
    node = given(root, *path)
    return node.value if node and isinstance(node.value, str) else ""


def whole_at(root: YamlNode, *path: str) -> int:
    """Return the whole number at the path; 0 if the key is missing or has another type.

    A truth value is no number here, though Python's `bool` is an `int`.
    """
    node = given(root, *path)
    return node.value if node and isinstance(node.value, int) and not isinstance(node.value, bool) else 0


def between(root: YamlNode, message: str, hint: str, *paths: KeyPath) -> Fault:
    """Return a fault at the first path; the fault also points at the remaining paths."""
    places: list[Place] = [place for path in paths if (place := key_place(root, path))]
    return Fault(message, dotted(paths[0]), places[0], hint, tuple(places[1:]))


def both(names: list[str]) -> str:
    """Return the names as text: "`task` and `script`"."""
    return f"{quoted(names[:-1])} and `{names[-1]}`"
