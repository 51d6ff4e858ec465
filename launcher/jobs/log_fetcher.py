"""Threads that fetch the logs of ended jobs, so that no poll of a job waits for a log."""

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
    """Fetches the logs of ended attempts in order of arrival, a thread for each backend. Call `close` at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: dict[str, deque[Seen]] = {}  # by backend; a backend with an entry has a thread
        self._changed = threading.Condition()
        self._is_left = False

    def take(self, seen: Seen) -> None:
        """Fetch the log of the attempt that has ended, if any."""
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
        """Wait at most `wait_s` seconds for all fetches; a fetch that has not begun by then is dropped."""
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
            with suppress(Exception):  # a log that cannot be fetched now is read by the next reader
                registry = Registry(self._folder)
                try:
                    watching.keep(registry, seen)
                finally:
                    registry.close()
