"""The end of a job's log, read by a separate thread: a slow backend delays neither the picture nor the keys."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from cloudtrain.launcher.backend import LogLine
from cloudtrain.launcher.job import Attempt
from cloudtrain.launcher.live.model import TailShot
from cloudtrain.launcher.logs.reader import read_on
from cloudtrain.launcher.logs.stream import LogStream
from cloudtrain.launcher.store.registry import Registry
from cloudtrain.launcher.text.remote import in_words

__all__ = ["MOST", "LogTail"]

MOST = 2000  # lines that the user can scroll back
_LEAST_PAUSE_S = 0.25  # minimum seconds between two reads: no picture comes more often
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
        with closing(Registry(self._folder)) as registry:
            while not self._is_closing.is_set():
                job = registry.find(self.job_id)
                with self._lock:
                    self._lines.clear()
                    self._running.clear()
                self._tell(is_prefixed=job.attempt.plan.ranks > 1, is_read=False, is_over=False)
                with closing(LogStream(registry, job, job.attempt, ranks=self._ranks)) as stream:
                    self._read(registry, stream, job.attempt)

    def _read(self, registry: Registry, stream: LogStream, attempt: Attempt) -> None:
        """Read until the next attempt exists."""
        number, looked_s = attempt.number, 0.0

        def update() -> Attempt | None:
            nonlocal attempt, looked_s
            if time.monotonic() - looked_s >= _STATE_S:
                looked_s = time.monotonic()
                attempt = registry.find(self.job_id).attempt
            return None if self._is_closing.is_set() or attempt.number != number else attempt

        def pause(wait_s: float) -> None:
            self._is_closing.wait(max(_LEAST_PAUSE_S, wait_s))

        for news in read_on(stream, update, pause, tail=MOST // 4, many=_MANY):
            self._take(news.lines)
            fault = news.fault.message if news.fault is not None else ""
            self._tell(fault=fault, is_read=self._shot.is_read or not fault, is_over=stream.is_over)
        while update() is not None:
            self._is_closing.wait(_STATE_S)

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
