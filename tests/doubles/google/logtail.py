"""The stream of entries.tail: new entries, held back for a while to be sorted."""

from __future__ import annotations

import heapq
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from doubles.google.errors import GoogleError
from doubles.google.logentries import Entry, LogSettings
from doubles.google.logfilter import Filter, parse
from doubles.google.names import NUMBER, PROJECT

__all__ = ["Tails"]

BUFFER_S, MAX_BUFFER_S = 2.0, 60.0
RESPONSE_ENTRIES = 1000  # assumed
MINUTE_S = 60.0
LOOK_S = 0.1  # interval of checks whether the client is still connected

JSON = dict[str, Any]


@dataclass
class _Session:
    chosen: Filter
    buffer_s: float
    starts: float
    is_ended: bool = False
    waiting: list[tuple[float, tuple[int, str, int], Entry]] = field(default_factory=list)  # ordered by due time
    sent: deque[float] = field(default_factory=deque)
    suppressed: Counter[str] = field(default_factory=Counter)
    to_suppress: Counter[str] = field(default_factory=Counter)

    def offer(self, entry: Entry) -> None:
        """Store a matching entry until it is due."""
        if entry.visible_at > self.starts and self.chosen.test(entry.data):
            heapq.heappush(self.waiting, (entry.visible_at + self.buffer_s, entry.key, entry))

    def due(self, now: float, limit: int | None) -> list[Entry]:
        """Return the entries to send now, by timestamp."""
        found: list[Entry] = []
        while self.waiting and self.waiting[0][0] <= now and len(found) < RESPONSE_ENTRIES:
            entry = heapq.heappop(self.waiting)[2]
            reason = self._reason(now, limit)
            if reason is None:
                self.sent.append(now)
                found.append(entry)
            else:
                self.suppressed[reason] += 1
        return sorted(found, key=lambda entry: entry.key)

    def _reason(self, now: float, limit: int | None) -> str | None:
        """Return the reason for leaving an entry out, or None."""
        for reason in self.to_suppress:
            if self.to_suppress[reason] > 0:
                self.to_suppress[reason] -= 1
                return reason
        while self.sent and self.sent[0] <= now - MINUTE_S:
            self.sent.popleft()
        return "RATE_LIMIT" if limit is not None and len(self.sent) >= limit else None


class Tails:
    """All sessions; `changed` is the store's lock, and is notified of new entries."""

    def __init__(
        self,
        settings: Callable[[], LogSettings],
        clock: Callable[[], float],
        changed: threading.Condition,
        entries: Callable[[], Iterable[Entry]],
    ) -> None:
        self._settings, self._clock, self._changed, self._entries = settings, clock, changed, entries
        self._sessions: list[_Session] = []

    def offer(self, entry: Entry) -> None:
        """Pass an entry to the sessions."""
        for session in self._sessions:
            session.offer(entry)

    def suppress(self, count: int, reason: str) -> None:
        """Let every open session leave out the next `count` entries."""
        with self._changed:
            for session in self._sessions:
                session.to_suppress[reason] += count

    def count(self) -> int:
        """Return the number of open sessions."""
        with self._changed:
            return len(self._sessions)

    def end_all(self) -> None:
        """End all sessions."""
        with self._changed:
            for session in self._sessions:
                session.is_ended = True
            self._changed.notify_all()

    def tail(self, requests: Iterator[Any], is_active: Callable[[], bool]) -> Iterator[Any]:
        """Yield responses; further requests are not read. Raises GoogleError."""
        session = self._session(next(iter(requests), None))
        try:
            yield from self._responses(session, is_active)
        finally:
            with self._changed:
                self._sessions.remove(session)

    def _session(self, request: Any) -> _Session:
        from google.cloud.logging_v2.types import TailLogEntriesRequest

        if request is None:
            raise GoogleError("INVALID_ARGUMENT", "the first request is missing")
        told = TailLogEntriesRequest.pb(request)
        for name in told.resource_names or [""]:
            if name not in (f"projects/{PROJECT}", f"projects/{NUMBER}"):
                code = "PERMISSION_DENIED" if name.startswith("projects/") else "INVALID_ARGUMENT"
                raise GoogleError(code, f"resource_names: '{name}'")
        buffer_s = told.buffer_window.ToNanoseconds() / 1e9 if told.HasField("buffer_window") else BUFFER_S
        if not 0 <= buffer_s <= MAX_BUFFER_S:
            raise GoogleError("INVALID_ARGUMENT", "buffer_window must be between 0 and 60000 milliseconds")
        with self._changed:
            if len(self._sessions) >= self._settings().log_tail_sessions:
                message = f"Too many live tail sessions are open for project {PROJECT}."
                raise GoogleError("RESOURCE_EXHAUSTED", message)
            session = _Session(parse(told.filter), buffer_s, self._clock())
            for entry in self._entries():  # earlier entries may not be visible yet
                session.offer(entry)
            self._sessions.append(session)
            self._changed.notify_all()
            return session

    def _responses(self, session: _Session, is_active: Callable[[], bool]) -> Iterator[Any]:
        while is_active():
            with self._changed:
                settings, now = self._settings(), self._clock()
                if session.is_ended:
                    raise GoogleError("UNAVAILABLE", "The service is currently unavailable.")
                if now >= session.starts + settings.log_tail_s:
                    raise GoogleError("OUT_OF_RANGE", "The maximum duration of a live tail session has been reached.")
                found, suppressed = session.due(now, settings.log_tail_a_minute), session.suppressed
                session.suppressed = Counter()
                if not found and not suppressed:
                    next_s = session.waiting[0][0] - now if session.waiting else LOOK_S
                    self._changed.wait(max(0.0, min(LOOK_S, next_s)))
                    continue
            yield _response([entry.data for entry in found], suppressed)


def _response(entries: list[JSON], suppressed: Counter[str]) -> Any:
    from google.cloud.logging_v2.types import TailLogEntriesResponse
    from google.protobuf import json_format

    told = {"entries": entries}
    told["suppressionInfo"] = [{"reason": reason, "suppressedCount": count} for reason, count in suppressed.items()]
    return TailLogEntriesResponse.wrap(json_format.ParseDict(told, TailLogEntriesResponse.pb()()))
