"""Watches jobs in the background, for the live view and the page: polls, alerts, retries, logs of ended jobs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

from ..job import Job
from ..logs import stream
from ..notices.notifier import RECENT_S
from ..store.registry import Registry
from . import watch
from .poller import Lanes, Pacing, Poller, Seen, as_fault, refreshing

UNSEEN_S, UNSEEN_ROUND_S = 60.0, 5.0  # while nobody looks: between two polls of a job, and two readings of the registry
ROUND_S = 1.0
BACK_OFF_S = 5.0  # after a registry error


class Watcher:
    """Polls the named jobs, or, without names, the jobs of `watch.chosen`; call `close` at the end.

    In threads, `start` gets each job before its poll, and `show` each result. `step` gets a registry and, if changed,
    the chosen jobs, once a second. `tell` gets the registry's own error, and an empty text once solved. With `is_quiet`
    polls only update the registry. `is_seen` returns whether somebody looks at the result.
    """

    def __init__(
        self,
        folder: Path | None,
        names: Sequence[str],
        show: Callable[[Seen], None],
        tell: Callable[[str], None],
        *,
        start: Callable[[Job], None] = lambda job: None,
        step: Callable[[Registry, list[Job] | None], None] = lambda registry, jobs: None,
        every_s: float = 0.0,
        is_seen: Callable[[], bool] = lambda: True,
        is_quiet: bool = False,
    ) -> None:
        self._folder, self._names, self._show, self._tell, self._step = folder, names, show, tell, step
        self._is_seen, self._is_quiet = is_seen, is_quiet
        begin = refreshing if is_quiet else watch.notifying(watch.look)
        pacing = Pacing(every_s=lambda: every_s if is_seen() else UNSEEN_S)
        self.poller = Poller(folder, begin, self._take, pacing, start=start)
        self.logs = LogKeeper(folder)
        self._news = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Poll all jobs soon."""
        self.poller.hurry()
        self._news.set()

    def close(self, wait_s: float) -> None:
        """End the threads, waiting at most `wait_s` for deliveries; a thread that waits for a backend is abandoned."""
        self._is_closing = True
        self._news.set()
        end_s = time.monotonic() + wait_s
        if self._thread.is_alive():  # else never started
            self._thread.join(wait_s)
        self.poller.close(max(0.0, end_s - time.monotonic()))
        self.logs.close(max(0.0, end_s - time.monotonic()))

    def _run(self) -> None:
        while not self._is_closing:
            try:
                with closing(Registry(self._folder)) as registry:
                    self._choose(registry)
            except Exception as error:  # busy for long, or a full disk
                self._tell(as_fault(error).message)
                self._pause(BACK_OFF_S)

    def _choose(self, registry: Registry) -> None:
        selection = watch.Selection(registry, self._names)
        while not self._is_closing:
            jobs = selection.news(time.time())
            self._step(registry, jobs)
            if jobs is not None:
                self.poller.watch(jobs)
            self._tell("")
            self._pause(ROUND_S if self._is_seen() else UNSEEN_ROUND_S)

    def _pause(self, wait_s: float) -> None:
        self._news.wait(wait_s)
        self._news.clear()

    def _take(self, seen: Seen) -> None:
        self._show(seen)
        if not self._is_quiet:
            self.logs.take(seen)


class LogKeeper:
    """Fetches the logs of ended attempts in order of arrival, a thread for each backend. Call `close` at the end.

    So no poll of a job waits for a log.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._lanes = Lanes(self._fetch, "logs")

    def take(self, seen: Seen) -> None:
        """Fetch the log of the attempt that has ended, if any."""
        if seen.ended is not None:
            self._lanes.put(seen.job.backend, f"{seen.job.id} {seen.ended.number}", seen)

    def close(self, wait_s: float | None = None) -> None:
        """Wait at most `wait_s` seconds for all fetches; a fetch that has not begun by then is dropped."""
        self._lanes.drain(wait_s)
        self._lanes.close(0.0)

    def _fetch(self, ended: Iterator[Seen]) -> None:
        for seen in ended:
            with suppress(Exception), closing(Registry(self._folder)) as registry:  # the next reader can fetch the log
                attempt = seen.ended
                # The machines of an attempt that ended recently, or the platform, still have the log.
                if attempt is not None and (attempt.state.ended_s or 0.0) >= time.time() - RECENT_S:
                    stream.keep_whole(registry, seen.job, attempt)
