"""What is done to a library as soon as the script imports it: nothing is imported before, and nothing without need."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

__all__ = ["After", "after_import"]

After = Callable[[ModuleType], None]


def after_import(actions: dict[str, After]) -> None:
    """Call the action with the module, by its full name, once it is imported; at once where it is already."""
    for name in [name for name in actions if name in sys.modules]:
        actions.pop(name)(sys.modules[name])
    sys.meta_path.insert(0, _Finder(actions))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing by itself: it has the module found as ever, and adds the action to its loader."""

    def __init__(self, actions: dict[str, After]) -> None:
        self._actions = actions

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's own spec, with the action behind its execution; None of any other module."""
        action = self._actions.pop(name, None)
        spec = importlib.util.find_spec(name) if action is not None else None
        if action is None or spec is None or spec.loader is None:
            return None
        execute, after = spec.loader.exec_module, action

        def exec_module(module: ModuleType) -> None:
            execute(module)
            after(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
