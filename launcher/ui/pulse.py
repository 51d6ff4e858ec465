"""When something has changed: one look for all pages at the registry's file, cheap enough to be taken often."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from cloudtrain.launcher.errors import CloudtrainError
from cloudtrain.launcher.registry import Registry

__all__ = ["Pulse"]

EVERY_S = 0.25


class Pulse:
    """Counts the changes that any process has made to the registry, and says how many pages are open.

    SQLite keeps a number that moves with every commit of another connection; reading it costs some microseconds.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._registry = Registry(folder)
        self._seen = self._version()
        self._waiters: set[asyncio.Future[None]] = set()
        self.count = 0
        self.pages = 0
        self.is_closing = False

    async def run(self) -> None:
        """Look again and again, while anybody waits for it; to be cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            with contextlib.suppress(CloudtrainError):  # a registry that is busy is looked at again
                if self._waiters and (now := self._version()) != self._seen:
                    self._seen = now
                    self.beat()

    def beat(self) -> None:
        """Wake all that wait; to be called in the loop's thread."""
        self.count += 1
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def changed(self, timeout_s: float) -> bool:
        """Return whether something has changed within the time."""
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
        """End all that waits: the server is being ended."""
        self.is_closing = True
        self.beat()

    def release(self) -> None:
        """Close the file."""
        self._registry.close()

    def _version(self) -> int:
        version: int = self._registry.database.execute("PRAGMA data_version")[0][0]
        return version
