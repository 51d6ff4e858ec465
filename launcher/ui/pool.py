"""Open registries for requests answered at the same time: an SQLite connection serves one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cloudtrain.launcher.store.registry import Registry

__all__ = ["Pool"]

KEPT = 4  # more are opened on demand and closed after use


class Pool:
    """Registries of an installation; `close` closes the unused registries."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._free: list[Registry] = []
        self._lock = threading.Lock()
        self._is_closed = False

    @contextmanager
    def one(self) -> Iterator[Registry]:
        """Lend a registry for exclusive use. Raises ConfigError if the registry cannot be opened."""
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
        """Close free registries; a registry in use is closed on return."""
        with self._lock:
            self._is_closed = True
            free, self._free = self._free, []
        for registry in free:
            registry.close()
