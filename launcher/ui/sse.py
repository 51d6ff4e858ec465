"""Server-sent events for an open page: changed parts and a job's lines, over a single connection per page.

Browsers open at most six connections to a host, over all tabs; so a page has one connection, and a hidden page none.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import StreamingResponse

from ..errors import CloudtrainError
from ..store.registry import Registry
from .feeds import KEPT_LINES, LogFeed, LogQuery
from .site import Site

LEAST_S = 0.5  # minimum seconds between two renderings of a page's parts
BEAT_S = 15.0  # for a comment that detects a broken connection
BATCH = 500  # lines per event
GAP_S = 0.05
MANY, MANY_GAP_S = 3, 0.25  # with more events at once a job prints faster than people read


class Shown(NamedTuple):
    """The content of a page: its parts by name. `is_live`: the parts change with time."""

    parts: dict[str, str]
    is_live: bool
    curves: Any = None


Show = Callable[[Registry], Shown]


def stream(site: Site, request: Request, show: Show, wanted: LogQuery | None) -> StreamingResponse:
    """Return the answer, a stream until the page is closed. `show` runs in a thread and may raise CloudtrainError.

    Events: `page` {parts}, `curves` (changed), `log` {lines} with their number as event id, `begin` (lines start over),
    `over`; `trouble` {text} for the page and `logtrouble` {text} for the lines, with an empty text once solved.
    """
    events = _events(site, request, show, wanted)
    return StreamingResponse(events, media_type="text/event-stream", headers={"x-accel-buffering": "no"})


async def _events(site: Site, request: Request, show: Show, wanted: LogQuery | None) -> AsyncIterator[str]:
    feed: LogFeed | None = None
    after = request.headers.get("last-event-id") or request.query_params.get("after", "")
    yield "retry: 1000\n\n"
    if wanted is not None:
        try:
            feed = site.feeds.enter(wanted)
        except CloudtrainError as error:
            yield _event("logtrouble", {"text": str(error)})
    try:
        with site.listening() as news:
            page, log = _Page(site, show), _Log(feed, after)
            spoke_s = time.monotonic()
            while not site.is_closing:
                news.clear()
                said = [*await page.news(), *log.news()]
                for each in said:
                    yield each
                if said:
                    spoke_s = time.monotonic()
                elif time.monotonic() - spoke_s > BEAT_S:
                    spoke_s = time.monotonic()
                    yield ": still here\n\n"
                if await request.is_disconnected():
                    return
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(news.wait(), max(0.01, min(page.wait_s(), BEAT_S)))
                await asyncio.sleep(GAP_S if len(said) < MANY else MANY_GAP_S)
    finally:
        if feed is not None:
            site.feeds.leave(feed)


class _Page:
    """The parts that the page has received, and the time of the next rendering."""

    def __init__(self, site: Site, show: Show) -> None:
        self._site, self._show = site, show
        self._had: dict[str, str] = {}
        self._curves: Any = None
        self._count = -1
        self._looked_s = -1e9
        self._took_s = 0.0
        self._is_live = True
        self._trouble = ""

    async def news(self) -> list[str]:
        if self.wait_s() > 0:
            return []
        self._count = self._site.changes
        began_s = time.monotonic()
        try:
            shown = await self._site.read(self._show)
        except CloudtrainError as error:
            self._looked_s = time.monotonic()
            previous, self._trouble = self._trouble, str(error)
            return [] if previous == self._trouble else [_event("trouble", {"text": self._trouble})]
        self._looked_s = time.monotonic()
        self._took_s = self._looked_s - began_s
        self._is_live, self._trouble = shown.is_live, ""
        parts = {name: html for name, html in shown.parts.items() if self._had.get(name) != html}
        self._had |= parts
        found = [_event("page", {"parts": parts})] if parts else []
        if shown.curves != self._curves:
            self._curves = shown.curves
            found.append(_event("curves", {}))
        return found

    def wait_s(self) -> float:
        """Return the seconds until the next rendering: soon after a change, else every few seconds for live pages."""
        since_s = time.monotonic() - self._looked_s
        least_s = max(LEAST_S, 10 * self._took_s)
        if self._count != self._site.changes:
            return least_s - since_s
        return max(least_s, 2.0 if self._is_live else 60.0) - since_s


class _Log:
    """The lines that the page has received, by the feed's name and the line number."""

    def __init__(self, feed: LogFeed | None, after: str) -> None:
        self._feed = feed
        name, _, number = after.partition(".")
        is_same = feed is not None and name == feed.name and number.isascii() and number.isdecimal() and number != ""
        self._number = int(number) if is_same else 0
        self._has_begun = is_same
        self._is_over = False
        self._trouble = ""

    def news(self) -> list[str]:
        feed = self._feed
        if feed is None:
            return []
        found = []
        if feed.trouble != self._trouble:
            self._trouble = feed.trouble
            found.append(_event("logtrouble", {"text": self._trouble}))
        if not feed.is_ready:
            return found
        if not self._has_begun:
            self._has_begun = True
            found.append(_event("begin", {"most": KEPT_LINES}))
        is_over = feed.is_over  # read before the lines, so that no line can follow
        lines, newest = feed.since(self._number)
        for start in range(0, len(lines), BATCH):
            number = newest - len(lines) + min(start + BATCH, len(lines))
            found.append(_event("log", {"lines": lines[start : start + BATCH]}, f"{feed.name}.{number}"))
        self._number = newest
        if is_over and not self._is_over:
            self._is_over = True
            found.append(_event("over", {}))
        return found


def _event(kind: str, data: dict[str, Any], number: str = "") -> str:
    head = f"id: {number}\n" if number else ""
    return f"{head}event: {kind}\ndata: {json.dumps(data)}\n\n"
