"""Lazy proxies for the functions of a backend's module: the implementation is imported on the first call."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["of"]


def of(module: str, name: str) -> Callable[..., Any]:
    """Return a proxy for the module's function `name`; the first call imports the module."""
    return _Lazy(module, name)


class _Lazy:
    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    def __call__(self, *args: Any, **more: Any) -> Any:
        return self._found()(*args, **more)

    def __repr__(self) -> str:
        return f"<{self._name} of {self._module}>"

    @property
    def __signature__(self) -> inspect.Signature:  # a test compares the signature with the protocol
        return inspect.signature(self._found())

    def _found(self) -> Callable[..., Any]:
        # Not cached: after a test replaces the function, later calls must reach the replacement.
        found: Callable[..., Any] = getattr(importlib.import_module(self._module), self._name)
        return found
