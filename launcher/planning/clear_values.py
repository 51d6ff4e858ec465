"""Warns of secrets under `env` and in arguments: requests, dry runs and platforms show such values in clear."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import schemafaults, yamlfile
from ..config.yamlfile import KeyPath, YamlNode
from . import secret_files

if TYPE_CHECKING:
    from ..config.schema import JobConfig

_VARIABLES = re.compile(r"\$\{(\w+)")


def notes_of(config: JobConfig, file: Path) -> Iterator[str]:
    """Yield a warning with file and line for each secret value under `env`, `args` or `resume_args`."""
    root = _root(file) if config.env or config.args or config.resume_args else None
    for key, values in (("env", config.env), ("args", config.args), ("resume_args", config.resume_args)):
        # The config holds arguments as a list, the file perhaps as a mapping or text: find an argument by its text.
        is_env = key == "env"
        leaves = _leaves((key,), root)
        written = {(path[-1] if is_env else "", leaf.text): (path, leaf) for path, leaf in leaves}
        for step, value in values.items() if isinstance(values, dict) else enumerate(values or ()):
            place, node = written.get((step if is_env else "", str(value)), ((key, step), None))
            variables = [*(_VARIABLES.findall(node.shown) if node else ()), *([str(step)] if is_env and value else ())]
            variable = next(filter(secret_files.secret_name, variables), None)
            kind = secret_files.token_in(str(value))
            if variable is not None or kind is not None:
                name = step if is_env else variable or "NAME"
                where = f"{node.place}, {schemafaults.dotted(place)}" if node else schemafaults.dotted(place)
                what = f"holds {kind}, and is" if kind else "looks secret, and is"
                reads = "" if is_env else "; the script reads the variable"
                yield f"{where} {what} sent and stored in clear: write `secrets: [{name}]` and export {name}{reads}"


def _leaves(path: KeyPath, root: YamlNode | None) -> Iterator[tuple[KeyPath, YamlNode]]:
    """Yield the path and the node of each scalar of the file below `path`."""
    node = None if root is None else yamlfile.find(root, path)
    if node is None or not isinstance(node.value, dict | tuple):
        yield from [] if node is None else [(path, node)]
        return
    for step in node.value if isinstance(node.value, dict) else range(len(node.value)):
        yield from _leaves((*path, step), root)


def _root(file: Path) -> YamlNode | None:
    """Return the tree of the file; None if the file cannot be read."""
    try:
        return yamlfile.parse(file.read_text(encoding="utf-8-sig"), os.fspath(file), os.environ).root
    except (OSError, UnicodeDecodeError):
        return None
