"""The quiesce lock: work that holds a cross-process lock finishes before the process is suspended."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["QuiesceLock"]


class QuiesceLock:
    """A reader-writer gate. Workers enter with `passing`; before a suspension, `shut` closes and drains the gate."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # reentrant: a signal handler may shut the gate as its thread enters
        self._inside: dict[int, int] = {}  # by thread, the nesting depth
        self._shut = 0

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Run the block inside the gate. A nested block always enters, so that work in progress can finish."""
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
        """Close the gate for the block, after at most `wait_s` seconds for workers to leave; yield whether all left."""
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
