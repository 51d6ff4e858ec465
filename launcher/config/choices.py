"""Reads from a config file which backends the job may run on: the names under `backend`, and the backends' blocks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from cloudtrain.launcher.backend_table import DEFAULT
from cloudtrain.launcher.config import overrides as given_values
from cloudtrain.launcher.config import schema, yamlfile
from cloudtrain.launcher.config.yamlfile import YamlNode
from cloudtrain.launcher.errors import ConfigError, Fault

__all__ = ["asked", "configured", "tree"]


def asked(path: Path, text: str, overrides: Sequence[str], environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the names under `backend`, in the file's order, or `local`. Raises ConfigError for a faulty list."""
    root = tree(path, text, overrides, environ)
    node = yamlfile.find(root, ("backend",)) if root is not None else None
    if node is None or node.value is None:
        return (DEFAULT,)
    if not isinstance(node.value, tuple):
        return (str(node.value),)
    faults = [_odd(item) for item in node.value if not isinstance(item.value, str)]
    names = [str(item.value) for item in node.value]
    faults += [
        Fault(f"`{name}` is listed twice", "backend", item.place, "once is enough")
        for index, (name, item) in enumerate(zip(names, node.value, strict=True))
        if name in names[:index]
    ]
    if not names:
        faults.append(Fault("no backend is named", "backend", node.place, "as in `backend: [sagemaker, vertex]`"))
    if faults:
        raise ConfigError(faults)
    return tuple(names)


def configured(
    path: Path, text: str, overrides: Sequence[str], environ: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """Return the backends that this file configures: `local`, those with a block, and the names under `backend`."""
    root = tree(path, text, overrides, environ)
    members = root.value if root is not None and isinstance(root.value, dict) else {}
    blocks = [name for name in schema.blocks_of(members) if members[name].node.value is not None]
    return tuple(dict.fromkeys([DEFAULT, *blocks, *asked(path, text, overrides, environ)]))


def tree(path: Path, text: str, overrides: Sequence[str], environ: Mapping[str, str]) -> YamlNode | None:
    """Return the tree with the overrides applied; faults are ignored, because loading the config reports the faults."""
    root = yamlfile.parse(text, os.fspath(path), environ).root
    for assignment in overrides:
        if root is not None and isinstance(root.value, dict):
            root, _ = given_values.apply(root, "--set", assignment, environ)
    return root


def _odd(item: YamlNode) -> Fault:
    return Fault("expected a backend's name", "backend", item.place, "as in `backend: [sagemaker, vertex]`")
