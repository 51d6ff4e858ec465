"""A job's lines for all pages that show them: read once and numbered; the newest lines stay in memory.

A page that was disconnected, for example by a closed lid, reports its last line and gets all later lines: none is lost,
and none is repeated. If the feed no longer exists, the page starts over with a new feed.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from ..backend import Chosen, LogLine
from ..errors import CapacityError, CloudtrainError, UsageError, in_words
from ..job import Attempt
from ..logs.reader import read_on
from ..logs.stream import LogStream
from ..logs.view import View
from ..store.registry import Registry
from ..text import visible

KEPT_LINES = 5_000
KEPT_CHARS = 4_000_000  # all lines of a feed together
MOST_FEEDS = 12
LINGER_S = 30.0  # how long a feed stays without a page: a reloaded page finds the feed
WAIT_S = 0.1
STATE_S = 1.0  # seconds between two reads of the attempt's state
MOST_PATTERN = 200


@dataclass(frozen=True)
class LogQuery:
    """A selection of lines: a job and attempt, optionally some ranks, a node, and a pattern."""

    job: str
    attempt: int
    ranks: Chosen = None
    node: int | None = None
    grep: str = ""

    def view(self) -> View:
        """Return the filter of the lines. Raises UsageError for an invalid regular expression."""
        if len(self.grep) > MOST_PATTERN:
            raise UsageError(f"the pattern is longer than {MOST_PATTERN} characters")
        try:
            return View(ranks=self.ranks, node=self.node, grep=re.compile(self.grep) if self.grep else None)
        except (re.error, RecursionError, OverflowError) as error:
            raise UsageError(f"`{self.grep}` is not a valid regular expression: {error}") from None


@dataclass
class LogFeed:
    """A reader of the selected lines; a thread fills the feed until no page has used it for LINGER_S."""

    wanted: LogQuery
    folder: Path | None
    tell: Callable[[], None]
    name: str = field(default_factory=lambda: secrets.token_hex(4))
    pages: int = 0
    is_ready: bool = False  # the existing lines have been read
    is_over: bool = False
    trouble: str = ""
    last: int = 0  # the newest line's number; the first line is 1
    left_s: float = field(default_factory=time.monotonic)
    closed: threading.Event = field(default_factory=threading.Event)
    _lines: deque[list[Any]] = field(default_factory=deque)
    _chars: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def since(self, number: int) -> tuple[list[list[Any]], int]:
        """Return the stored lines after the given number, and the newest line's number.

        A line is [rank or null, node, unix seconds, text], plus 1 for the state of a running progress bar: the next
        line of the rank replaces the state.
        """
        with self._lock:
            known = max(0, len(self._lines) - max(0, self.last - number))
            return list(islice(self._lines, known, None)), self.last

    def run(self) -> None:
        """Read until the end of the log, or until no page has used the feed for LINGER_S."""
        try:
            with closing(Registry(self.folder)) as registry:
                self._read(registry)
        except Exception as error:  # the next page with the same selection gets a new feed
            self.trouble = in_words(error)
            self.closed.set()
        finally:
            self.is_ready = True
            self.tell()

    def _read(self, registry: Registry) -> None:
        """Read the last existing lines, then new lines."""
        job = registry.find(self.wanted.job)
        attempt = registry.attempt(job, self.wanted.attempt)
        while attempt.ref is None and attempt.phase in ("intent", "queued") and not self._is_left():
            self.closed.wait(STATE_S)
            attempt = registry.attempt(job, self.wanted.attempt)
        if attempt.ref is None:
            self.is_over = True
            return
        with closing(LogStream(registry, job, attempt, self.wanted.view())) as stream:
            self._follow(registry, stream, attempt)

    def _follow(self, registry: Registry, stream: LogStream, attempt: Attempt) -> None:
        view, read_s = self.wanted.view(), 0.0

        def update() -> Attempt | None:
            nonlocal attempt, read_s
            if time.monotonic() - read_s >= STATE_S:
                read_s = time.monotonic()
                attempt = registry.attempt(registry.find(attempt.job_id), attempt.number)
            return None if self._is_left() else attempt

        def pause(wait_s: float) -> None:
            self.closed.wait(max(WAIT_S, wait_s))

        # An expired login and a busy registry pass, too.
        for news in read_on(stream, update, pause, tail=KEPT_LINES, wants=view.wants, survives=CloudtrainError):
            self._add(view.chosen(news.lines))
            if news.outage != self.trouble or not (self.is_ready or news.outage):
                self.trouble, self.is_ready = news.outage, self.is_ready or not news.outage
                self.tell()
            self.is_over = stream.is_over

    def _add(self, lines: list[LogLine]) -> None:
        if not lines:
            return
        with self._lock:
            for line in lines[-KEPT_LINES:]:
                self.last += 1
                entry: list[Any] = [line.rank, line.node, round(line.time_s, 3), visible.shown(line.text, colour=False)]
                self._chars += len(entry[3])
                self._lines.append([*entry, 1] if line.text.endswith("\r") else entry)
            while len(self._lines) > KEPT_LINES or (self._chars > KEPT_CHARS and len(self._lines) > 1):
                self._chars -= len(self._lines.popleft()[3])
        if self.is_ready:
            self.tell()

    def _is_left(self) -> bool:
        return self.closed.is_set() or (self.pages <= 0 and time.monotonic() - self.left_s > LINGER_S)


class Feeds:
    """All current feeds, at most one for each selection."""

    def __init__(self, tell: Callable[[], None], folder: Path | None = None) -> None:
        self._tell, self._folder = tell, folder
        self._feeds: dict[LogQuery, LogFeed] = {}
        self._lock = threading.Lock()

    def enter(self, wanted: LogQuery) -> LogFeed:
        """Return the feed, started if necessary; each `enter` needs a `leave`. Raises UsageError, CapacityError."""
        wanted.view()
        with self._lock:
            feed = self._feeds.get(wanted)
            if feed is None or feed.closed.is_set() or (feed._is_left() and not feed.is_over):
                feed = self._feeds[wanted] = self._new(wanted)
            feed.pages += 1
            return feed

    def leave(self, feed: LogFeed) -> None:
        """Release the feed when a page no longer shows its lines."""
        with self._lock:
            feed.pages -= 1
            feed.left_s = time.monotonic()

    def close(self) -> None:
        """Stop all feeds."""
        for feed in list(self._feeds.values()):
            feed.closed.set()

    def _new(self, wanted: LogQuery) -> LogFeed:
        """Start a feed; if necessary, drop the longest unused feeds."""
        self._feeds.pop(wanted, None)
        idle = sorted((each for each in self._feeds.values() if each.pages <= 0), key=lambda each: each.left_s)
        for each in idle[: max(0, len(self._feeds) + 1 - MOST_FEEDS)]:
            each.closed.set()
            del self._feeds[each.wanted]
        if len(self._feeds) >= MOST_FEEDS:
            raise CapacityError(f"{MOST_FEEDS} logs are open already", hint="close a page, or take a filter away")
        feed = LogFeed(wanted, self._folder, self._tell)
        threading.Thread(target=feed.run, name=f"log-{wanted.job}", daemon=True).start()
        return feed
