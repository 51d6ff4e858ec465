"""Functions that import the module they are in when they are called: what a backend's module is made of."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["of"]


def of(module: str, name: str) -> Callable[..., Any]:
    """Return the module's function of that name; nothing is imported before its first call."""
    return _Lazy(module, name)


class _Lazy:
    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    def __call__(self, *args: Any, **more: Any) -> Any:
        return self._found()(*args, **more)

    def __repr__(self) -> str:
        return f"<{self._name} of {self._module}>"

    @property
    def __signature__(self) -> inspect.Signature:  # so that a test can hold it against the protocol
        return inspect.signature(self._found())

    def _found(self) -> Callable[..., Any]:
        # Not kept: a test that puts another function there must reach who is asked later.
        found: Callable[..., Any] = getattr(importlib.import_module(self._module), self._name)
        return found
