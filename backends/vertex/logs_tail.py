"""A job's new lines as a stream from Cloud Logging, for speed; lists bring the omitted lines (logs_feed.py).

A stream begins at the present, lasts an hour at most, drops lines that come too fast, and may be refused: a project may
have ten streams. The stream is reopened while a reader is active, and no line depends on the stream.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from typing import Any

from cloudtrain.backends.vertex.api import GoogleError, VertexAccess
from cloudtrain.backends.vertex.logs_entries import LogEntry, of_proto
from cloudtrain.launcher.errors import CloudtrainError

__all__ = ["EntryTail"]

PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
IDLE_S = 30.0  # without a reader, after which the stream is not reopened
ACCEPTED_S = 2.0  # without a refusal: then the stream counts as open
MOST = 50_000  # entries kept for a reader that does not come; the lists have them too


class EntryTail:
    """A thread that reads the stream of one query, until `close` is called or the reader is gone."""

    def __init__(self, access: VertexAccess, query: str) -> None:
        self._access, self._query = access, query
        self._lock = threading.Lock()
        self._entries: list[LogEntry] = []
        self._is_lossy = False
        self._opened_s: float | None = None
        self.is_possible = True  # False if the libraries or the address do not allow a stream
        self._is_closed = threading.Event()
        self._read_s = time.monotonic()
        self._stream: Any = None
        atexit.register(self.close)
        self._thread = threading.Thread(target=self._run, name="tail", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether new entries arrive without a call."""
        return self._opened_s is not None and time.monotonic() - self._opened_s > ACCEPTED_S

    @property
    def is_closed(self) -> bool:
        """Whether the stream has ended permanently."""
        return self._is_closed.is_set()

    def take(self) -> tuple[list[LogEntry], bool]:
        """Return the entries since the last call, and whether the stream has omitted entries."""
        with self._lock:
            found, self._entries = self._entries, []
            is_lossy, self._is_lossy = self._is_lossy, False
        self._read_s = time.monotonic()
        return found, is_lossy

    def close(self) -> None:
        """End the stream."""
        self._is_closed.set()
        self._opened_s = None
        if self._stream is not None:
            with contextlib.suppress(Exception):  # the stream may have ended, or never begun
                self._stream.cancel()
        atexit.unregister(self.close)

    def _run(self) -> None:
        pause_s = PAUSE_S
        while not self._is_closed.is_set():
            if time.monotonic() - self._read_s > IDLE_S:
                self.close()
                return
            begin_s = time.monotonic()
            try:
                self._read()
            except GoogleError:
                pass  # refused, broken, or at its time limit
            except CloudtrainError:
                self.is_possible = False
                self.close()
                return
            except Exception:  # a library's error at its end must not reach the terminal
                if self._is_closed.is_set():
                    return
            self._opened_s = None
            with self._lock:
                self._is_lossy = True
            pause_s = PAUSE_S if time.monotonic() - begin_s > LONGEST_PAUSE_S else min(2 * pause_s, LONGEST_PAUSE_S)
            self._is_closed.wait(pause_s)

    def _read(self) -> None:
        from cloudtrain.backends.vertex import sdk

        sdk.tail(self._access, self._query, self._put, self._opened)

    def _opened(self, stream: Any) -> None:
        self._stream, self._opened_s = stream, time.monotonic()
        if self._is_closed.is_set():
            stream.cancel()

    def _put(self, batch: Any) -> None:
        if time.monotonic() - self._read_s > IDLE_S:
            self.close()
            return
        entries = [of_proto(raw) for raw in batch.entries if not raw.split.total_splits]
        with self._lock:
            # Parts of a long line are left to the lists.
            self._is_lossy |= len(entries) < len(batch.entries) or bool(batch.suppression_info)
            self._is_lossy |= len(self._entries) > MOST
            self._entries += entries if len(self._entries) <= MOST else []
