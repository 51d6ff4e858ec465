"""Limits for connections: a time limit for each request head, and reserved capacity for the holder of the cookie.

Every local user can connect. A connection is a stranger's until one of its requests carries the cookie.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from cloudtrain.launcher.ui.guard import Guard

__all__ = ["MOST_CONNECTIONS", "limited"]

HEAD_S = 5.0  # for a complete request head, from the connection or the previous answer
MOST_CONNECTIONS = 200
MOST_STRANGERS = 100  # the other half is reserved for the holder of the cookie


def limited(guard: Guard) -> type[H11Protocol]:
    """Return a server's protocol class; a new stranger beyond the limit replaces the oldest stranger."""
    strangers: dict[H11Protocol, None] = {}  # oldest first

    class Connection(H11Protocol):
        """A connection with a time limit."""

        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(strangers) >= MOST_STRANGERS:
                oldest = next(iter(strangers))
                del strangers[oldest]
                oldest.transport.abort()
            strangers[self] = None
            self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            strangers.pop(self, None)
            self._stop_timer()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            before = self.scope
            super().data_received(data)
            if self.scope is not before:
                self._stop_timer()
                if guard.is_known(Headers(raw=self.headers)):
                    strangers.pop(self, None)

        def on_response_complete(self) -> None:
            self._expect_head()
            super().on_response_complete()

        def _expect_head(self) -> None:
            self._stop_timer()
            self._timer = self.loop.call_later(HEAD_S, self._end_if_idle)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()

        def _end_if_idle(self) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()

    return Connection
