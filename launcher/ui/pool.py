"""Open registries, one for each of the requests that are answered at once: SQLite's connections serve one at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cloudtrain.launcher.registry import Registry

__all__ = ["Pool"]

KEPT = 4  # more are opened when they are needed, and closed after


class Pool:
    """Registries of one home; `close` closes those that nobody uses."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._free: list[Registry] = []
        self._lock = threading.Lock()
        self._is_closed = False

    @contextmanager
    def one(self) -> Iterator[Registry]:
        """Have a registry that nobody else has meanwhile. Raises ConfigError where it cannot be opened."""
        with self._lock:
            registry = self._free.pop() if self._free else None
        registry = registry or Registry(self._folder)
        try:
            yield registry
        finally:
            with self._lock:
                is_kept = not self._is_closed and len(self._free) < KEPT
                if is_kept:
                    self._free.append(registry)
            if not is_kept:
                registry.close()

    def close(self) -> None:
        """Close what is free; what is in use closes when it is given back."""
        with self._lock:
            self._is_closed = True
            free, self._free = self._free, []
        for registry in free:
            registry.close()
