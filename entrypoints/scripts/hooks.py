"""Actions that run after the script imports a library."""

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
    """Finds a module as usual, and runs an action after the module's code."""

    def __init__(self, actions: dict[str, After]) -> None:
        self._actions = actions
        self._finding: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._actions or name in self._finding:
            return None
        self._finding.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._finding.discard(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            _run(self._actions.pop(name, None), module)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


def after_import(actions: dict[str, After]) -> None:
    """Call each action with its module, by the module's full name; at once if the module is already imported."""
    for name in actions.keys() & sys.modules.keys():
        _run(actions.pop(name), sys.modules[name])
    sys.meta_path.insert(0, _Finder(actions))


def _run(action: After | None, module: ModuleType) -> None:
    """Run the action; a fault, for example with a new version of the library, must not break the script's import."""
    try:
        if action is not None:
            action(module)
    except Exception as error:
        print(f"cloudtrain: warning: {module.__name__} is used without cloudtrain's callback: {error!r}", flush=True)
