"""A log as a text file: the existing lines of an attempt, piece by piece."""

from __future__ import annotations

import gc
from collections.abc import Generator

from anyio import CancelScope, to_thread
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ..backend import LogLine
from ..errors import CapacityError, UnreachableError
from ..logs.stream import LogStream
from ..text import visible
from .feeds import LogQuery
from .site import Pool, Site

MOST_DOWNLOADS = 4  # at the same time; each holds a page of lines and some open files
PIECE_BYTES = 1 << 18  # of text that waits for the client


class Download(StreamingResponse):
    """The existing lines; for a running job, the lines up to this moment.

    Raises UsageError for an invalid pattern, and CapacityError during too many downloads.
    """

    def __init__(self, site: Site, wanted: LogQuery) -> None:
        wanted.view()
        self._site, self._text = site, _text(site.pool, wanted)
        name = f"{wanted.job}-attempt-{wanted.attempt}.log"
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        super().__init__(self._text, media_type="text/plain; charset=utf-8", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the lines; close the log's files also if the client leaves early."""
        if self._site.downloads >= MOST_DOWNLOADS:
            raise CapacityError(f"{MOST_DOWNLOADS} downloads are under way already", hint="cancel a download, or wait")
        self._site.downloads += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._site.downloads -= 1
            with CancelScope(shield=True):
                await to_thread.run_sync(self._close)

    def _close(self) -> None:
        self._text.close()
        if not self._site.downloads:
            gc.collect()  # an ended connection is a cycle of objects that holds all unsent lines


def _text(pool: Pool, wanted: LogQuery) -> Generator[bytes, None, None]:
    view = wanted.view()
    with pool.one() as registry:
        job = registry.find(wanted.job)
        attempt = registry.attempt(job, wanted.attempt)
        is_alone = attempt.plan.ranks == 1
        stream = LogStream(registry, job, attempt, view, now=True)
        try:
            while True:
                text = "".join(
                    _line(line, is_alone=is_alone)
                    for line in view.chosen(stream.read())
                    if not line.text.endswith("\r")
                ).encode("utf-8", "replace")
                for start in range(0, len(text), PIECE_BYTES):
                    yield text[start : start + PIECE_BYTES]
                if stream.is_over or not stream.came:
                    return
        except UnreachableError as error:
            yield f"[the log cannot be read on for now: {error.message}]\n".encode("utf-8", "replace")
        finally:
            stream.close()


def _line(line: LogLine, *, is_alone: bool) -> str:
    who = "" if is_alone else f"[r{line.rank}] " if line.rank is not None else f"[node{line.node}] "
    return f"{who}{visible.shown(line.text, colour=False)}\n"
