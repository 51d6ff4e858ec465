"""Objects shared by all pages of a running server: registries, change detection, pollers, feeds, templates.

The templates' filters format figures as in all commands, and escape all values."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from anyio import CapacityLimiter, to_thread
from markupsafe import Markup

from cloudtrain.entrypoints.format import amount, cell, span

from ..errors import CloudtrainError
from ..jobs.poller import Seen
from ..jobs.watch import Watcher
from ..planning.render import environment
from ..store.registry import Registry
from ..text.terminal import when
from .feeds import Feeds
from .guard import Keys

T = TypeVar("T")
EVERY_S = 0.25
SEEN_S = 20.0  # after the last request of a page
MOST_THREADS = 12  # each opens a registry: SQLite keeps a closed file's descriptor for the next connection
_TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}


class Site:
    """A run of the server. `running` surrounds its lifetime."""

    def __init__(self, keys: Keys, *, is_read_only: bool, folder: Path | None = None) -> None:
        self.keys = keys
        self.is_read_only = is_read_only
        self.downloads = 0  # in progress
        self.folder = folder
        self.changes = 0  # of the registry, by any process
        self.is_closing = False
        self._registry = Registry(folder)
        self.assets = assets()
        self.pages = Pages(self.assets, csrf=keys.csrf, is_read_only=is_read_only)
        self.feeds = Feeds(self._lines_came, folder)
        self.faults: dict[str, str] = {}  # of the last poll, by job; the registry's own error has the key ""
        tell = partial(self.faults.__setitem__, "")
        self.watcher = Watcher(folder, (), self._polled, tell, is_seen=self._is_seen, is_quiet=is_read_only)
        self._asked_s = -SEEN_S
        self._threads = CapacityLimiter(MOST_THREADS)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news: set[asyncio.Event] = set()

    async def read(self, work: Callable[[Registry], T]) -> T:
        """Run blocking work with a registry in a thread, so that the event loop never blocks; return its result."""

        def run() -> T:
            with contextlib.closing(Registry(self.folder)) as registry:  # takes 0.4 ms
                return work(registry)

        return await to_thread.run_sync(run, abandon_on_cancel=True, limiter=self._threads)

    def asked(self) -> None:
        """Note a page request: from now on backends are polled at their own pace."""
        was_seen = self._is_seen()
        self._asked_s = time.monotonic()
        if not was_seen:
            self.watcher.wake()

    @contextmanager
    def listening(self) -> Iterator[asyncio.Event]:
        """Return an event that is set at changes of the registry and at new lines, while a page is open."""
        news = asyncio.Event()
        self._news.add(news)
        self.asked()
        try:
            yield news
        finally:
            self._news.discard(news)

    @asynccontextmanager
    async def running(self, _: object = None) -> AsyncIterator[None]:
        """Run all background tasks."""
        self._loop = asyncio.get_running_loop()
        detecting = asyncio.create_task(self._detect_changes())
        self.watcher.start()
        try:
            yield
        finally:
            self.close()
            detecting.cancel()
            await asyncio.gather(detecting, return_exceptions=True)
            self.watcher.close(0.0)
            self._registry.close()

    def close(self) -> None:
        """Stop waiting pages."""
        self.is_closing = True
        self.feeds.close()
        self._wake()

    def _is_seen(self) -> bool:
        return bool(self._news) or time.monotonic() - self._asked_s < SEEN_S

    def _polled(self, seen: Seen) -> None:
        self.faults[seen.job.id] = str(seen.fault or "")

    def _lines_came(self) -> None:
        """Wake the pages; called in a feed's thread."""
        if self._loop is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # the loop has just ended
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        for news in self._news:
            news.set()

    async def _detect_changes(self) -> None:
        """Wake the open pages at each change of the registry: at a commit of another connection SQLite counts on."""
        seen: object = None
        while not self.is_closing:
            await asyncio.sleep(EVERY_S)
            with contextlib.suppress(CloudtrainError):  # a busy registry is checked again
                if self._news and (version := self._registry.database.execute("PRAGMA data_version")[0][0]) != seen:
                    seen = version
                    self.changes += 1
                    self._wake()


def assets() -> dict[str, tuple[bytes, str]]:
    """Return the static files: name to content and media type. No further file is served."""
    found = {}
    for folder, names in (("ui", ("ui.css", "ui.js", "icon.svg")), ("report", ("charts.css", "charts.js"))):
        for name in names:
            content = (files("cloudtrain.templates") / folder / name).read_bytes()
            found[name] = content, _TYPES[name.rpartition(".")[2]]
    return found


class Pages:
    """The templates of the page."""

    def __init__(self, static: Mapping[str, tuple[bytes, str]], **shared: Any) -> None:
        self._templates = environment("ui", autoescape=True)
        digests = {name: hashlib.sha256(content).hexdigest()[:12] for name, (content, _) in static.items()}
        self._templates.globals.update(shared, asset=lambda name: f"/static/{name}?v={digests[name]}")
        self._templates.filters.update(
            ago=when,
            span=span,
            money=lambda usd: "?" if usd is None else amount(round(usd * 1e6)),  # the page shows the unit once
            micro=cell,
            spent=lambda usd: cell(None if usd is None else round(usd * 1e6)),
            clock=_clock,
            day=lambda time_s: "-" if time_s is None else time.strftime("%d %b %Y", time.localtime(time_s)),
            number=_number,
            link=_link,
            part=partial(quote, safe=""),
        )

    def render(self, name: str, **values: Any) -> str:
        """Return the page or a part."""
        return self._templates.get_template(name).render(**values)


def _clock(time_s: float | None) -> Markup:
    """Return a time by this machine's clock, to the second."""
    if time_s is None:
        return Markup("-")
    text = time.strftime("%d %b %Y %H:%M:%S", time.localtime(time_s))
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_s))
    return Markup('<time datetime="{}">{}</time>').format(stamp, text)


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}".replace(",", "\u202f") if isinstance(value, int) and abs(value) >= 10_000 else str(value)


def _link(url: Any) -> str:
    """Return the address if a browser may open it, else ""; this excludes `javascript:` addresses."""
    text = str(url or "")
    try:
        parts = urlsplit(text)
    except ValueError:
        return ""
    return text if parts.scheme in ("http", "https") and parts.netloc else ""
