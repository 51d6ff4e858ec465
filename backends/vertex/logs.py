"""A job's lines from Cloud Logging: no line is lost or repeated, and each node's lines keep their order.

A reader begins with the existing lines, page by page (its backlog), and then joins the process's feed.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

from cloudtrain.launcher.backend import LogPage
from cloudtrain.launcher.errors import UnreachableError
from cloudtrain.launcher.text.terminal import say

from .api import Google, GoogleError, VertexAccess, translated
from .logs_feed import FOLLOWING, PAGES, PASSING, WIDE_S, EntryFeed, LogQuota, lists, query_of, since
from .logs_order import Order

PACE_S = 0.5  # between two polls; most polls make no call
HOLD_BACK_S = 2.0  # Cloud Logging ingests nodes' entries at different times; the default window of its own tail
PASSED_S = 10.0  # a one-time reader counts as up to date for this long; a cursor of another process does not count


class _LogQuestion(NamedTuple):
    """The job of a reader, its `wanted` nodes (`narrowed`: None for all nodes), and the folder of the shared quota."""

    access: VertexAccess
    job: str
    wanted: frozenset[int]
    narrowed: frozenset[int] | None
    home: Path

    @property
    def key(self) -> tuple[str, frozenset[int] | None]:
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
        self._listed_s: dict[tuple[str, frozenset[int] | None], float] = {}

    def page(
        self,
        access: VertexAccess,
        job: str,
        nodes: int,
        cursor: dict[str, Any] | None,
        only: frozenset[int] | None,
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
            said = translated(error, "read the log", "Logs Viewer (roles/logging.viewer)")
            raise UnreachableError(said.message, hint=said.hint) from error

    def _backlog(self, asked: _LogQuestion, at: dict[str, Any], order: Order, *, is_passing: bool) -> LogPage:
        """Read the next pages of the existing lines."""
        place = dict(at["backlog"])
        query = query_of(*asked.key)
        if place["since_s"] is not None:
            query += f" AND {since(place['since_s'])}"
        quota = self._quota(asked)
        lines, is_done, parts = [], False, dict(place.get("parts", {}))
        for _ in range(PAGES):
            if not quota.may_ask(PASSING if is_passing else FOLLOWING):
                break
            try:
                entries, place["token"] = lists(asked.access, query, place["token"], parts)
            except GoogleError as error:
                if error.status != 429:
                    raise
                quota.refused()
                break
            quota.answered()
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


def _has_nodes(feed: EntryFeed, nodes: frozenset[int] | None) -> bool:
    return feed.nodes is None or (nodes is not None and feed.nodes >= nodes)
