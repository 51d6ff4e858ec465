"""Threads that bring home the logs of jobs that have ended, so that no look at another job waits for one."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.launcher.jobs import watch as watching
from cloudtrain.launcher.store.registry import Registry

if TYPE_CHECKING:
    from cloudtrain.launcher.jobs.watch import Seen

__all__ = ["LogKeeper"]


class LogKeeper:
    """Takes what looks have seen; one thread a backend keeps one log after the other. `close` it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: dict[str, deque[Seen]] = {}  # by backend; there is a thread as long as there is an entry
        self._changed = threading.Condition()
        self._is_left = False

    def take(self, seen: Seen) -> None:
        """Keep the log of the attempt that has ended, if one has."""
        if seen.ended is None:
            return
        backend = seen.job.backend
        with self._changed:
            if backend in self._waiting:
                self._waiting[backend].append(seen)
                return
            self._waiting[backend] = deque([seen])
        threading.Thread(target=self._run, args=(backend,), name=f"logs of {backend}", daemon=True).start()

    def close(self, wait_s: float | None = None) -> None:
        """Wait until all that was taken is done, for at most so long; what has not begun by then is left."""
        end_s = None if wait_s is None else time.monotonic() + wait_s
        with self._changed:
            while self._waiting and (end_s is None or time.monotonic() < end_s):
                self._changed.wait(None if end_s is None else max(0.0, end_s - time.monotonic()))
            self._is_left = True

    def _run(self, backend: str) -> None:
        while True:
            with self._changed:
                if self._is_left or not self._waiting[backend]:
                    del self._waiting[backend]
                    self._changed.notify_all()
                    return
                seen = self._waiting[backend].popleft()
            with suppress(Exception):  # what cannot be kept now is read by the next one who asks for it
                registry = Registry(self._folder)
                try:
                    watching.keep(registry, seen)
                finally:
                    registry.close()
