"""A job's lines from Cloud Logging: no line is lost or repeated, and each node's lines keep their order.

A reader begins with the existing lines, page by page (its backlog), and then joins the process's feed, which all
readers in the process share, since each call counts. A list begins a little before the newest line, requests missing
lines by their numbers, and every SWEEP_S searches far back for lines without numbers. The feed gives entries to readers
in order of arrival; each reader keeps its own memory (logs_order.py), which removes copies and restores the order.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import time
from collections import deque
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from cloudtrain.launcher.backend import Chosen, Cursor, LogPage
from cloudtrain.launcher.text.terminal import say

from ..http import object_in
from . import api
from .api import Google, GoogleError, VertexAccess
from .logs_order import Gap, LogEntry, Order, joined, of_json, task_of

PACE_S = 0.5  # between two polls; most polls make no call
HOLD_BACK_S = 2.0  # Cloud Logging ingests nodes' entries at different times; the default window of its own tail
PASSED_S = 10.0  # a one-time reader counts as up to date for this long; a cursor of another process does not count
PAGE = 1000  # the most entries that one list call returns
FRESH_S = 5.0  # a node is current if its newest line is at most this old, by the newest line of the job
OVERLAP_S = 1.0  # a list begins this long before the newest lines of all current nodes
SWEEP_S, WIDE_S = 30.0, 90.0  # how often, and how far back, a list searches for late lines without numbers
LIST_S, LONGEST_S = 2.5, 5.0  # between two lists, and between two lists in a long silence
SLACKEN = 0.1  # this share of the silence is added to the pause
PAGES = 5  # list pages in one poll
KEPT = 20_000  # entries kept for readers that join later
MOST_GAPS = 50  # gaps in one list's query: 9,000 of the 20,000 characters that a filter may have
LAG_S = 120.0  # how far one replica's lines may be behind the newest line
UNNUMBERED = "NOT jsonPayload.ct.n:*"
MINUTE_S = 60.0
FOLLOWING, PASSING = 30, 50  # calls a minute: for a follower, and for a command that reads the present lines and exits
BUSY_S, LONGEST_BUSY_S = 5.0, 60.0  # the pause after the first refusal, and the longest pause after repeated refusals

_numbers = itertools.count(1)


class _LogQuestion(NamedTuple):
    """The job of a reader, its `wanted` nodes (`narrowed`: None for all nodes), and the folder of the shared quota."""

    access: VertexAccess
    job: str
    wanted: frozenset[int]
    narrowed: Chosen
    home: Path

    @property
    def key(self) -> tuple[str, Chosen]:
        """The job with its nodes."""
        return self.job, self.narrowed


class LogReader(Google):
    """The process's connections to Google, with the feeds that all readers of the process share.

    Holds also the quotas, the time of each reader's last complete list, and the jobs whose end the process has seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.over: set[str] = set()
        self._feeds: dict[str, list[EntryFeed]] = {}
        self._quotas: dict[tuple[Path, str], LogQuota] = {}
        self._listed_s: dict[tuple[str, Chosen], float] = {}

    def page(
        self,
        access: VertexAccess,
        job: str,
        nodes: int,
        cursor: Cursor | None,
        only: Chosen,
        home: Path,
        *,
        is_passing: bool,
        is_over: bool = False,
    ) -> LogPage:
        """Return the lines after the cursor, of all nodes or `only` of some.

        `is_passing`: the reader will not stay. `is_over`: the job is known to have ended. Raises UnreachableError if
        Cloud Logging does not answer.
        """
        everybody = frozenset(range(nodes))
        wanted = everybody if only is None else only & everybody
        asked = _LogQuestion(access, job, wanted, None if wanted == everybody else wanted, home)
        at = dict(cursor or {"order": None, "backlog": {"since_s": None, "token": ""}})
        order = Order(at["order"], is_over=is_over)
        try:
            if at.get("backlog") is not None:
                return self._backlog(asked, at, order, is_passing=is_passing)
            is_own = at["listed_s"] == self._listed_s.get(asked.key)
            if is_passing and is_own and 0 <= time.time() - at["listed_s"] < PASSED_S:  # all lines were just read
                return LogPage([], at, is_clean=True, is_complete=order.is_complete(wanted))
            return self._live(asked, at, order)
        except GoogleError as error:
            if error.status == 400 and (at.get("backlog") or {}).get("token"):  # a page token expires
                again = {**at, "backlog": {"since_s": order.high_s - WIDE_S, "token": ""}}
                return LogPage([], again, is_clean=False, is_complete=False)
            with api.polls("read the log", "Logs Viewer (roles/logging.viewer)"):
                raise

    def _backlog(self, asked: _LogQuestion, at: dict[str, Any], order: Order, *, is_passing: bool) -> LogPage:
        """Read the next pages of the existing lines."""
        place = dict(at["backlog"])
        query = query_of(*asked.key)
        if place["since_s"] is not None:
            query += f" AND {since(place['since_s'])}"
        quota = self._quota(asked)
        lines, is_done, parts = [], False, dict(place.get("parts", {}))
        for _ in range(PAGES):
            page = quota.page(PASSING if is_passing else FOLLOWING, asked.access, query, place["token"], parts)
            if page is None:
                break
            entries, place["token"] = page
            lines += order.take(entries, time.time())
            if not place["token"]:
                is_done = True
                break
        if is_done and is_passing:  # a passing reader does not wait for missing earlier lines
            lines += order.take([], time.time() + 1e9)
        lines.sort(key=lambda line: line.time_s)
        self._listed_s[asked.key] = listed_s = time.time()
        after = {"order": order.dump(), "backlog": None if is_done else {**place, "parts": parts}, "listed_s": listed_s}
        is_clean = is_done and not lines and not order.is_holding
        return LogPage(lines, after, is_clean=is_clean, is_complete=is_clean and order.is_complete(asked.wanted))

    def _live(self, asked: _LogQuestion, at: dict[str, Any], order: Order) -> LogPage:
        feed = self._feed(asked, order.high_s)
        try:
            feed.look(order.gaps(asked.wanted))
        except GoogleError:
            if not order.is_complete(asked.wanted):  # complete, by the containers' own count
                raise
        number, index = at.get("feed", ("", 0))
        is_behind = not feed.has_since(index) if number == feed.number else feed.begins_s > order.high_s
        if is_behind:  # the reader was away for too long
            return LogPage([], {**at, "backlog": {"since_s": order.high_s - WIDE_S, "token": ""}}, is_clean=False)
        entries, index = feed.after(index if number == feed.number else 0)
        lines = order.take((entry for entry in entries if entry.node in asked.wanted), time.time())
        if order.lost and asked.narrowed is None:
            say(f"{order.lost} lines never came from Cloud Logging")
        lines.sort(key=lambda line: line.time_s)
        rounds = at.get("rounds") if number == feed.number else None
        is_clean = not lines and not order.is_holding and rounds is not None and feed.rounds > rounds
        listed_s = at["listed_s"]
        if rounds is not None:
            self._listed_s[asked.key] = listed_s = time.time()
        after = {"order": order.dump(), "feed": (feed.number, index), "rounds": rounds, "listed_s": listed_s}
        if lines or is_clean or rounds is None:
            after["rounds"] = feed.rounds
        is_complete = not lines and order.is_complete(asked.wanted)
        return LogPage(lines, after, is_clean=is_clean or is_complete, is_complete=is_complete)

    def _feed(self, asked: _LogQuestion, high_s: float) -> EntryFeed:
        """Return a feed with all lines of the nodes since that time; forget feeds that this feed makes superfluous."""
        there, since_s = self._feeds.setdefault(asked.job, []), max(high_s - WIDE_S, 0.0)
        found = [feed for feed in there if _has_nodes(feed, asked.narrowed) and feed.since_s <= since_s]
        chosen = next((feed for feed in found if feed.nodes is None), found[0] if found else None)
        if chosen is None:
            chosen = EntryFeed(asked.access, *asked.key, since_s, self._quota(asked))
            there.append(chosen)
        there[:] = [feed for feed in there if feed is chosen or not _has_nodes(chosen, feed.nodes)]
        return chosen

    def _quota(self, asked: _LogQuestion) -> LogQuota:
        key = (asked.home, asked.access.project)
        return self._quotas.setdefault(key, LogQuota(*key))


def _has_nodes(feed: EntryFeed, nodes: Chosen) -> bool:
    return feed.nodes is None or (nodes is not None and feed.nodes >= nodes)


class LogQuota:
    """The share of a project's calls: a project may send 60 list calls a minute, and cloudtrain uses only a part.

    All processes of a home folder share one count, in a small file under a lock: more followers mean fewer calls for
    each. A refusal pauses only this process.
    """

    def __init__(self, home: Path, project: str) -> None:
        self._path = home / f"vertex-log-calls-{re.sub(r'[^a-z0-9-]', '_', project)}.json"
        self._not_before_s = self._pause_s = 0.0

    def page(
        self, most: int, access: VertexAccess, query: str, token: str, parts: dict[str, dict[str, str]]
    ) -> tuple[list[LogEntry], str] | None:
        """Return a page as `lists` does; None if no call is due, or if Cloud Logging refuses the call.

        After a refusal this process pauses, twice as long after each further refusal. Raises GoogleError.
        """
        if not self.may_ask(most):
            return None
        try:
            found = lists(access, query, token, parts)
        except GoogleError as error:
            if error.status != 429:
                raise
            self._pause_s = min(2 * self._pause_s, LONGEST_BUSY_S) or BUSY_S
            self._not_before_s = time.monotonic() + self._pause_s
            return None
        self._not_before_s = self._pause_s = 0.0
        return found

    def may_ask(self, most: int = FOLLOWING) -> bool:
        """Count one more call and return True; return False after `most` calls in a minute, or during a pause.

        After half of a follower's share, calls are spaced evenly: several followers take turns.
        """
        if time.monotonic() < self._not_before_s:
            return False
        try:
            with os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "a+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.seek(0)
                now_s = time.time()
                made = [when for when in _read(file.read()) if 0 <= now_s - when < MINUTE_S]
                is_soon = len(made) >= FOLLOWING / 2 and now_s - made[-1] < MINUTE_S / FOLLOWING
                if len(made) >= most or (most == FOLLOWING and is_soon):
                    return False
                file.seek(0)
                file.truncate()
                json.dump([*made, now_s], file)
        except OSError:  # a full disk: reading the log matters more than the count
            pass
        return True


def _read(text: str) -> list[float]:
    try:
        return [float(when) for when in json.loads(text or "[]")]
    except (ValueError, TypeError):
        return []


class EntryFeed:
    """The feed of one job, or of some of its nodes."""

    def __init__(self, access: VertexAccess, job: str, nodes: Chosen, since_s: float, quota: LogQuota) -> None:
        self.number = f"{time.time_ns():x}-{next(_numbers)}"
        self.nodes = nodes
        self.since_s = since_s  # the feed has all entries from this time on
        self.rounds = 0  # lists that were read to their end
        self._access, self._job, self._quota = access, job, quota
        self._entries: deque[LogEntry] = deque(maxlen=KEPT)
        self._count = 0  # entries received since the start
        self._high_s = since_s
        self._keys: dict[str, float] = {}
        self._parts: dict[str, dict[str, str]] = {}
        self._page: tuple[str, str] | None = None  # query and page token of a list that is not finished
        self._listed_s = self._swept_s = -1e9
        self._newest: dict[int, float] = {}  # node -> stamp of its newest line
        self._gap_turn = 0
        self._news_s = time.monotonic()

    def after(self, index: int) -> tuple[list[LogEntry], int]:
        """Return the entries after the index, and the next index."""
        missed = self._count - len(self._entries)
        return list(itertools.islice(self._entries, max(0, index - missed), None)), self._count

    @property
    def begins_s(self) -> float:
        """The time from which the feed still holds all entries, by Cloud Logging's clock."""
        has_all = self._count == len(self._entries)
        return self.since_s if has_all else max(entry.stamp_s for entry in itertools.islice(self._entries, PAGE))

    def has_since(self, index: int) -> bool:
        """Return whether the feed still holds all entries after the index."""
        return index >= self._count - len(self._entries)

    def look(self, gaps: list[Gap]) -> None:
        """Take in new entries if a list is due. `gaps` are the reader's missing lines.

        Raises GoogleError if Cloud Logging does not answer.
        """
        now_s = time.monotonic()
        pause_s = min(LONGEST_S, LIST_S + (now_s - self._news_s) * SLACKEN)
        if self._page is None and now_s - self._listed_s < pause_s:
            return
        query = self._page[0] if self._page else self._next_query(gaps, now_s)
        token = self._page[1] if self._page else ""
        self._list(query, token)

    def _list(self, query: str, token: str) -> None:
        for _ in range(PAGES):
            self._page = None  # after an error, the next list begins anew
            page = self._quota.page(FOLLOWING, self._access, query, token, self._parts)
            if page is None:
                self._page = (query, token)
                return
            entries, token = page
            self._add(entries)
            if not token:
                break
        self._page = (query, token) if token else None
        self._listed_s = time.monotonic()
        if not token:
            self.rounds += 1

    def _next_query(self, gaps: list[Gap], now_s: float) -> str:
        current = {node: at_s for node, at_s in self._newest.items() if at_s >= self._high_s - FRESH_S}
        # A numbered line before its node's newest line is a gap; lines without numbers need the longer overlap.
        fresh = [since(min(current.values(), default=self._high_s) - OVERLAP_S)]
        fresh.append(f"({since(self._high_s - FRESH_S)} AND {UNNUMBERED})")
        if current:  # the remaining nodes may be silent, or late in Cloud Logging
            fresh.append(f"({since(self._high_s - LAG_S)} AND NOT {of_nodes(current)})")
        turn = self._gap_turn % max(1, len(gaps))
        self._gap_turn += MOST_GAPS
        fresh += [_missing(gap) for gap in [*gaps[turn:], *gaps[:turn]][:MOST_GAPS]]
        if now_s - self._swept_s >= SWEEP_S:
            self._swept_s = now_s
            fresh.append(f"({since(self._high_s - WIDE_S)} AND {UNNUMBERED})")
        return f"{query_of(self._job, self.nodes)} AND ({' OR '.join(fresh)})"

    def _add(self, entries: list[LogEntry]) -> None:
        for entry in entries:
            if entry.key not in self._keys:
                self._keys[entry.key] = entry.stamp_s
                self._entries.append(entry)
                self._news_s = time.monotonic()
                self._count += 1
                self._high_s = max(self._high_s, entry.stamp_s)
                self._newest[entry.node] = max(self._newest.get(entry.node, 0.0), entry.stamp_s)
        if len(self._keys) > 2 * KEPT:
            self._keys = {key: at for key, at in self._keys.items() if at > self._high_s - 2 * WIDE_S}


def query_of(job: str, nodes: Chosen) -> str:
    """Return the filter for a job's entries, of all replicas or of some nodes."""
    text = f'resource.type="ml_job" AND resource.labels.job_id="{job}"'
    return text if nodes is None else f"{text} AND {of_nodes(nodes)}"


def of_nodes(nodes: Iterable[int]) -> str:
    """Return the filter for entries of the nodes."""
    names = " OR ".join(f'"{task_of(node)}"' for node in sorted(nodes))
    return f"resource.labels.task_name=({names})"


def since(when_s: float) -> str:
    """Return the filter for entries at or after the time."""
    return f'timestamp>="{_rfc3339(when_s)}"'


def _missing(gap: Gap) -> str:
    """Return the filter for the gap's lines, and for the lines near the gap that the platform has kept as text."""
    numbers = f"(jsonPayload.ct.n>={gap.first} AND jsonPayload.ct.n<={gap.last}) OR {UNNUMBERED}"
    return f'({since(gap.before_s - 1)} AND timestamp<="{_rfc3339(gap.after_s + 1)}" AND ({numbers}))'


def lists(access: VertexAccess, query: str, token: str, parts: dict[str, dict[str, str]]) -> tuple[list[LogEntry], str]:
    """Return one page of the query's entries, and the next page's token, "" at the end. Raises GoogleError."""
    asked: dict[str, Any] = {
        "resourceNames": [f"projects/{access.project}"],
        "filter": query,
        "orderBy": "timestamp asc",
        "pageSize": PAGE,
    }
    if token:
        asked["pageToken"] = token
    found = object_in(api.call(access, "POST", f"{access.url('logging')}/v2/entries:list", body=asked, tries=1))
    return [of_json(raw) for raw in joined(found.get("entries", ()), parts)], str(found.get("nextPageToken", ""))


def _rfc3339(when_s: float) -> str:
    when = datetime.fromtimestamp(max(0.0, when_s), timezone.utc)
    return f"{when:%Y-%m-%dT%H:%M:%S}.{when.microsecond:06d}Z"
