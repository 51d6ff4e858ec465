"""Cloud Logging: list entries in pages, write; with the quotas and the delays of the service."""

import base64
import bisect
import hashlib
import heapq
import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from doubles.google.errors import GoogleError, invalid
from doubles.google.logentries import Entry, LogSettings, Maker
from doubles.google.logfilter import Filter, parse
from doubles.google.names import NUMBER, PROJECT
from doubles.kit.differences import ANSWER
from doubles.kit.routing import Route
from doubles.wire import Answer, Request, json_answer

PAGE_ENTRIES, MAX_PAGE_ENTRIES = 50, 1000
MINUTE_S = 60.0
_LIST_KEYS = {"resourceNames", "filter", "orderBy", "pageSize", "pageToken"}

JSON = dict[str, Any]
Key = tuple[int, str, int]


class _Job:
    """A job's entries by time."""

    def __init__(self) -> None:
        self.keys: list[Key] = []
        self.entries: list[Entry] = []

    def add(self, entry: Entry) -> None:
        """Insert the entry at its place in the order."""
        at = len(self.keys)
        if self.keys and entry.key < self.keys[-1]:
            at = bisect.bisect(self.keys, entry.key)
        self.keys.insert(at, entry.key)
        self.entries.insert(at, entry)

    def after(self, first: Key) -> Iterator[Entry]:
        """Yield the entries after `first`."""
        return (self.entries[place] for place in range(bisect.bisect_right(self.keys, first), len(self.keys)))


class LogStore:
    """The project's entries."""

    def __init__(
        self, settings: Callable[[], LogSettings] = LogSettings, clock: Callable[[], float] = time.time
    ) -> None:
        self._settings, self._clock = settings, clock
        self._lock = threading.RLock()
        self.clear()

    def clear(self) -> None:
        """Forget all entries."""
        with self._lock:
            self._maker = Maker(self._settings, self._clock)
            self._jobs: dict[str, _Job] = {}
            self._reads: deque[float] = deque()
            self._pages = 0

    def write(self, job: str, task: str, line: str | bytes, **details: Any) -> None:
        """Store a line of a replica, or a message of the platform itself if the task is "service"."""
        self.write_lines(job, task, [line], **details)

    def write_lines(
        self,
        job: str,
        task: str,
        lines: Iterable[str | bytes],
        *,
        stream: str = "stdout",
        at_s: float | None = None,
        severity: str | None = None,
    ) -> None:
        """Store lines that arrive at once."""
        with self._lock:
            for line in lines:
                self._add(self._maker.line(job, task, line, stream, at_s, severity))

    def entries(self, job: str | None = None) -> list[JSON]:
        """Return all entries of a job, or of all jobs, including entries that are not yet visible."""
        with self._lock:
            return [entry.data for entry in self._all() if job in (None, entry.job)]

    def list_entries(self, body: JSON) -> JSON:
        """Answer entries.list. Raises GoogleError."""
        with self._lock:
            self._count_read()
            check_request(body)
            size = body.get("pageSize", 0) or PAGE_ENTRIES
            if not isinstance(size, int) or not 0 < size <= MAX_PAGE_ENTRIES:
                raise invalid(f"page_size must be between 1 and {MAX_PAGE_ENTRIES}, it is {size}")
            order = body.get("orderBy", "")
            if order not in ("", "timestamp asc"):
                raise invalid(f"Unsupported order_by: '{order}'")
            return self._page(body, size)

    def _all(self) -> Iterator[Entry]:
        return heapq.merge(*(one.entries for one in self._jobs.values()), key=lambda entry: entry.key)

    def _add(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._jobs.setdefault(entry.job, _Job()).add(entry)

    def _count_read(self) -> None:
        """Raise GoogleError if the minute's reads are used up; a refused read does not count."""
        now, limit = self._clock(), self._settings().log_reads_a_minute
        while self._reads and self._reads[0] <= now - MINUTE_S:
            self._reads.popleft()
        if len(self._reads) >= limit:
            raise _over_quota()
        self._reads.append(now)

    def _page(self, body: JSON, size: int) -> JSON:
        settings = self._settings()
        digest, chosen = _digest(body), parse(body.get("filter", ""))
        after = _read_token(body["pageToken"], digest) if body.get("pageToken") else None
        self._pages += 1
        if settings.log_empty_every and self._pages % settings.log_empty_every == 0:
            return {"nextPageToken": _token(after, digest)}
        found = self._found(chosen, after)
        page = list(itertools.islice(found, min(size, settings.log_page_cap or size)))
        told: JSON = {"entries": [entry.data for entry in page]} if page else {}
        if len(page) == min(size, settings.log_page_cap or size):  # more entries may exist; the next page may be empty
            told["nextPageToken"] = _token(page[-1].key, digest)
        return told

    def _found(self, chosen: Filter, after: Key | None) -> Iterator[Entry]:
        """Yield in order the visible entries that pass the filter."""
        now = self._clock()
        first = max((chosen.since_ns, "", 0), after or (0, "", 0))
        names = self._jobs.keys() if chosen.jobs is None else chosen.jobs & self._jobs.keys()
        merged = heapq.merge(*(self._jobs[name].after(first) for name in names), key=lambda entry: entry.key)
        return (entry for entry in merged if entry.visible_at <= now and chosen.test(entry.data))


def check_request(body: JSON) -> None:
    """Raise GoogleError for an unknown field of the request, and for another project."""
    unknown, resources = set(body) - _LIST_KEYS, body.get("resourceNames", [])
    if unknown:
        message = f'Invalid JSON payload received. Unknown name "{min(unknown)}": Cannot find field.'
        raise invalid(message)
    if not resources:
        raise invalid("resource_names is required")
    for name in resources:
        if name not in (f"projects/{PROJECT}", f"projects/{NUMBER}"):
            message = "Permission denied for all log views"
            raise GoogleError("PERMISSION_DENIED" if name.startswith("projects/") else "INVALID_ARGUMENT", message)


def _over_quota() -> GoogleError:
    limit = "Read requests per minute"
    message = (
        f"Quota exceeded for quota metric 'Read requests' and limit '{limit}' of service 'logging.googleapis.com' "
        f"for consumer 'project_number:{NUMBER}'."
    )
    metadata = {"consumer": f"projects/{NUMBER}", "service": "logging.googleapis.com"}
    metadata |= {"quota_metric": "logging.googleapis.com/read_requests", "quota_limit": "ReadRequestsPerMinPerProject"}
    kind = "type.googleapis.com/google.rpc.ErrorInfo"
    detail = {"@type": kind, "reason": "RATE_LIMIT_EXCEEDED", "domain": "googleapis.com", "metadata": metadata}
    return GoogleError("RESOURCE_EXHAUSTED", message, [detail])


def _digest(body: JSON) -> str:
    asked = {name: value for name, value in body.items() if name not in ("pageToken", "pageSize") and value}
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def _token(after: Key | None, digest: str) -> str:
    return base64.urlsafe_b64encode(json.dumps([digest, after]).encode()).decode()


def _read_token(token: str, digest: str) -> Key | None:
    try:
        asked, after = json.loads(base64.urlsafe_b64decode(token))
    except (ValueError, TypeError):
        raise invalid("page_token is invalid") from None
    if asked != digest:
        raise invalid("page_token doesn't match arguments from the request")
    return None if after is None else (after[0], after[1], after[2])


def _list(world: Any, request: Request) -> Answer:
    told = world.logs.list_entries(request.json())
    return json_answer(world.changes.applied(("logging.list",), ANSWER, told))


ROUTES = [Route("POST", "/v2/entries:list", "logging.list", _list)]
