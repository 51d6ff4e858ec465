"""Change detection: a cheap, frequent check of the registry's file for all pages."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from cloudtrain.launcher.errors import CloudtrainError
from cloudtrain.launcher.store.registry import Registry

__all__ = ["ChangeDetector"]

EVERY_S = 0.25


class ChangeDetector:
    """Counts the registry's changes by any process, and the open pages.

    SQLite increments a number at every commit of a different connection; reading the number takes a few microseconds.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._registry = Registry(folder)
        self._seen = self._version()
        self._waiters: set[asyncio.Future[None]] = set()
        self.count = 0
        self.pages = 0
        self.is_closing = False

    async def run(self) -> None:
        """Check repeatedly while a page waits; the caller cancels the task."""
        while True:
            await asyncio.sleep(EVERY_S)
            with contextlib.suppress(CloudtrainError):  # a busy registry is checked again
                if self._waiters and (now := self._version()) != self._seen:
                    self._seen = now
                    self.wake_all()

    def wake_all(self) -> None:
        """Wake all waiters; call in the loop's thread."""
        self.count += 1
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def changed(self, timeout_s: float) -> bool:
        """Return whether a change has come within the time."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await asyncio.wait_for(waiter, timeout_s)
        except asyncio.TimeoutError:
            return False
        finally:
            self._waiters.discard(waiter)
        return True

    def close(self) -> None:
        """Wake all waiters for the server's end."""
        self.is_closing = True
        self.wake_all()

    def release(self) -> None:
        """Close the file."""
        self._registry.close()

    def _version(self) -> int:
        version: int = self._registry.database.execute("PRAGMA data_version")[0][0]
        return version
