"""What must not be stopped half-way: work of threads that holds a lock which other processes wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["QuiesceLock"]


class QuiesceLock:
    """Threads pass through it with such work. Whoever is about to stand still shuts it, and waits for those inside."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # reentrant: a signal's handler may shut what its thread just passes
        self._inside: dict[int, int] = {}  # by thread, how deep
        self._shut = 0

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Do the block inside; one block within another passes freely, so that what has begun can end."""
        me = threading.get_ident()
        with self._changed:
            while self._shut and me not in self._inside:
                self._changed.wait()
            self._inside[me] = self._inside.get(me, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                self._inside[me] -= 1
                if not self._inside[me]:
                    del self._inside[me]
                    self._changed.notify_all()

    @contextmanager
    def shut(self, wait_s: float) -> Iterator[bool]:
        """Let no other thread in during the block, which begins once none is inside, or after that time; say which."""
        me, end_s = threading.get_ident(), time.monotonic() + wait_s
        with self._changed:
            self._shut += 1
        try:
            with self._changed:
                while (is_busy := bool(self._inside.keys() - {me})) and (left_s := end_s - time.monotonic()) > 0:
                    self._changed.wait(left_s)
            yield not is_busy
        finally:
            with self._changed:
                self._shut -= 1
                self._changed.notify_all()
