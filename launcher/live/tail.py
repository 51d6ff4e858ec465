"""The end of a job's log, read by a separate thread: a slow backend delays neither the picture nor the keys."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

from cloudtrain.launcher.backend import LogLine
from cloudtrain.launcher.errors import UnreachableError
from cloudtrain.launcher.live.model import TailShot
from cloudtrain.launcher.logs.stream import LogStream
from cloudtrain.launcher.store.registry import Registry
from cloudtrain.launcher.text.remote import in_words

__all__ = ["MOST", "LogTail"]

MOST = 2000  # lines that the user can scroll back
_LEAST_PAUSE_S = 0.2  # minimum seconds between two reads
_MANY = 500  # a page with so many lines: read on immediately
_STATE_S = 1.0  # seconds between two reads of the registry, where the polling thread stores the job's state
_BACK_OFF_S = 5.0
_READING = threading.BoundedSemaphore(8)  # an abandoned reader waits while its backend hangs; so many readers at most


class LogTail:
    """Starts to read at once; call `close` at the end. `ranks`: only lines of these ranks."""

    def __init__(self, folder: Path, job_id: str, ranks: frozenset[int] | None = None) -> None:
        self.job_id = job_id
        self._folder, self._ranks = folder, ranks
        self._lines: deque[LogLine] = deque(maxlen=MOST)
        self._running: dict[tuple[int, int | None], LogLine] = {}  # current states of progress bars
        self._shot = TailShot()
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"log of {job_id}", daemon=True)
        self._thread.start()

    def shot(self) -> TailShot:
        """Return the current lines."""
        with self._lock:
            return replace(self._shot, lines=(*self._lines, *self._running.values()))

    def close(self, wait_s: float = 0.0) -> None:
        """Ask the thread to end, and wait at most `wait_s`."""
        self._is_closing.set()
        self._thread.join(wait_s)

    def _run(self) -> None:
        while not self._is_closing.is_set():
            if not _READING.acquire(timeout=_STATE_S):
                self._tell(fault="earlier logs still wait for their backends")
                continue
            try:
                self._follow()
            except Exception as error:
                self._tell(fault=in_words(error))
            else:
                return
            finally:
                _READING.release()
            self._is_closing.wait(_BACK_OFF_S)

    def _follow(self) -> None:
        """Read the attempts in sequence, until the view is closed."""
        registry = Registry(self._folder)
        try:
            while not self._is_closing.is_set():
                job = registry.find(self.job_id)
                with self._lock:
                    self._lines.clear()
                    self._running.clear()
                self._tell(is_prefixed=job.attempt.plan.ranks > 1, is_read=False, is_over=False)
                stream = LogStream(registry, job, job.attempt, ranks=self._ranks)
                try:
                    self._take(stream.tail(MOST // 4))
                    self._tell(is_read=True)
                    self._read(registry, stream, job.attempt.number)
                finally:
                    stream.close()
        finally:
            registry.close()

    def _read(self, registry: Registry, stream: LogStream, number: int) -> None:
        """Read until the next attempt exists."""
        looked_s = 0.0
        while not self._is_closing.is_set():
            if time.monotonic() - looked_s >= _STATE_S:
                looked_s = time.monotonic()
                attempt = registry.find(self.job_id).attempt
                if attempt.number != number:
                    return
                stream.update(attempt)
            try:
                lines = stream.read()
            except UnreachableError as error:
                self._tell(fault=error.message)
                self._is_closing.wait(_BACK_OFF_S)
                continue
            self._take(lines)
            self._tell(fault="", is_over=stream.is_over)
            if len(lines) < _MANY:
                self._is_closing.wait(_STATE_S if stream.is_over else max(_LEAST_PAUSE_S, stream.pace.lines_s))

    def _take(self, lines: list[LogLine]) -> None:
        with self._lock:
            for line in lines:
                source = (line.node, line.rank)
                self._running.pop(source, None)
                if line.text.endswith("\r"):
                    self._running[source] = line
                else:
                    self._lines.append(line)

    def _tell(self, **changes: object) -> None:
        with self._lock:
            self._shot = replace(self._shot, **changes)  # type: ignore[arg-type]
