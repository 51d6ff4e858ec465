"""What is done to a library once the script has imported it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

__all__ = ["After", "after_import"]

After = Callable[[ModuleType], None]


class _Finder(importlib.abc.MetaPathFinder):
    """Has the others find a module as ever, and adds the action behind its execution."""

    def __init__(self, actions: dict[str, After]) -> None:
        self._actions = actions

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        action = self._actions.pop(name, None)
        spec = importlib.util.find_spec(name) if action else None
        if action is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (execute(module), action(module))[0]  # type: ignore[method-assign]
        return spec


def after_import(actions: dict[str, After]) -> None:
    """Call each action with its module, by the module's full name; at once where that is imported already."""
    for name in actions.keys() & sys.modules.keys():
        actions.pop(name)(sys.modules[name])
    sys.meta_path.insert(0, _Finder(actions))
