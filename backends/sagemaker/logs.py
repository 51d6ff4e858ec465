"""A job's lines from CloudWatch: no line is lost or repeated, and each host's lines keep their order.

Every host has one stream, and a further stream after each restart on new machines. A stream is read by its token: a
repeated token marks the end, an empty page does not. A line waits in the cursor only while a stream with earlier lines
is not read to the end; the launcher waits for lines that CloudWatch ingests late (`Pace.hold_back_s`). The cursor holds
all state; this module keeps none.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from cloudtrain.entrypoints.records import Record
from cloudtrain.launcher.backend import Chosen, Cursor, LogLine, LogPage, container_output
from cloudtrain.launcher.errors import UnreachableError

from . import api
from .api import AwsAccess

GROUP = "/aws/sagemaker/TrainingJobs"
HOLD_S = 2.0  # for which the launcher holds a line back: CloudWatch may ingest other hosts' earlier lines later
LIST_S = 10.0  # between two searches for further streams: a restart brings new streams
SUCCESSOR_S = 5.0  # from a container's end of log until its successor's stream would exist
SUPERSEDED_S = 60.0  # how long the stream of a replaced machine is still polled
EMPTY_PAGES = 50  # in a row and in one call; an empty page is not the end of a stream
PAGE_EVENTS, PAGE_BYTES = 10_000, 1 << 20  # CloudWatch's limits for one page
ROUND_EVENTS, FEWEST_EVENTS = 20_000, 500  # of all streams together, and the least for each stream: bounds the memory

_STREAM = re.compile(r".*/algo-(\d+)-(\d+)")


@dataclass
class _Stream(Record):
    """One stream's place in the cursor. `at_end`: the end was seen since the last line, or the last clean page."""

    node: int
    epoch: int
    token: str | None = None
    last_ms: int = 0
    stamp_ms: int = 0  # of the last event, and the number of events with that time: for an expired token
    same: int = 0
    skip: int = 0  # events already seen with an earlier token
    at_end: bool = False
    caught_up: bool = False  # its last page with lines was not full
    quiet_s: float | None = None  # since when no new line has come
    ended_s: float | None = None  # since when the container's end of log is known
    is_final: bool = False  # no container follows this container
    is_closed: bool = False


@dataclass
class _Tail(Record):
    """The cursor during a call. `held`: (time in ms, number, stream, text), sorted."""

    streams: dict[str, _Stream] = field(default_factory=dict)
    held: list[tuple[int, int, str, str]] = field(default_factory=list)
    number: int = 0
    listed_s: float = 0.0


def page(
    access: AwsAccess,
    job: str,
    nodes: int,
    cursor: Cursor | None,
    only: Chosen = None,
    clock: Callable[[], float] = time.time,
) -> LogPage:
    """Return the lines after the cursor, of all nodes or `only` of some, as far as their order is known.

    Credentials that have expired are read again. Raises
    UnreachableError if no stream could be read; if only some streams could not be read, the page is not clean.
    """
    tail = _Tail.load(cursor or {})
    wanted = frozenset(range(nodes)) if only is None else only & frozenset(range(nodes))
    for _ in range(EMPTY_PAGES):
        now_s = clock()
        failed = _read_round(access, job, tail, wanted, now_s)
        lines = list(_release(tail, failed))
        open_streams = [s for s in tail.streams.values() if not s.is_closed]
        if lines or failed or all(s.caught_up for s in open_streams):
            break
    # Not all streams at once: among many hosts, some stream is always between two ends, or unreadable for a moment.
    is_clean = not lines and not tail.held and now_s - tail.listed_s <= LIST_S and all(s.at_end for s in open_streams)
    newest = {s.node: s for s in sorted(tail.streams.values(), key=lambda s: s.epoch)}
    is_complete = is_clean and all(node in newest and _is_over(newest[node], now_s) for node in wanted)
    if is_complete and tail.listed_s < now_s:  # a restarted container's streams may not be listed yet
        is_complete = not _list(access, job, tail, wanted)
    if is_clean:
        for stream in open_streams:
            stream.at_end = False
    return LogPage(lines, tail.dump(), is_clean=is_clean, is_complete=is_complete)


def _read_round(access: AwsAccess, job: str, tail: _Tail, wanted: frozenset[int], now_s: float) -> set[str]:
    """Read one page of every stream that is due; return the names of unreadable streams, "" for the list of streams.

    Raises UnreachableError if every call failed.
    """
    failed: dict[str, UnreachableError] = {}
    calls = 0
    if not 0 <= now_s - tail.listed_s < LIST_S or {stream.node for stream in tail.streams.values()} != wanted:
        calls += 1
        try:
            _list(access, job, tail, wanted)
            tail.listed_s = now_s
        except UnreachableError as error:
            failed[""] = error
    waiting = {name for _, _, name, _ in tail.held}
    limit = min(PAGE_EVENTS, max(FEWEST_EVENTS, ROUND_EVENTS // max(1, len(tail.streams))))
    for name, stream in tail.streams.items():
        # A stream with held lines and more pages waits until its lines are released: so at most a page of each is held.
        if stream.is_closed or (name in waiting and not stream.caught_up):
            continue
        calls += 1
        try:
            _read(access, name, stream, tail, limit, now_s)
        except UnreachableError as error:
            failed[name] = error
    if failed and len(failed) == calls:
        raise next(iter(failed.values()))
    _close_superseded(tail, now_s)
    return set(failed)


def _is_over(stream: _Stream, now_s: float) -> bool:
    """Return whether the container has reported its end of log, and a successor would be known by now."""
    return stream.ended_s is not None and (stream.is_final or now_s - stream.ended_s >= SUCCESSOR_S)


def _list(access: AwsAccess, job: str, tail: _Tail, wanted: frozenset[int]) -> bool:
    """Add the job's new streams; return whether any is new. Raises UnreachableError."""
    before = len(tail.streams)
    token: dict[str, str] = {}
    while True:
        query = {"logGroupName": GROUP, "logStreamNamePrefix": f"{job}/", **token}
        answer = _call(access, "describe_log_streams", query, "list the log streams") or {}
        for found in answer.get("logStreams", ()):
            name = found["logStreamName"]
            match = _STREAM.fullmatch(name)
            node = int(match[1]) - 1 if match else 0
            if name not in tail.streams and node in wanted:
                tail.streams[name] = _Stream(node, int(match[2]) if match else 0)
        if "nextToken" not in answer:
            return len(tail.streams) > before
        token = {"nextToken": answer["nextToken"]}


def _read(access: AwsAccess, name: str, stream: _Stream, tail: _Tail, limit: int, now_s: float) -> None:
    query: dict[str, Any] = {"logGroupName": GROUP, "logStreamName": name, "startFromHead": True}
    if stream.token is not None:
        query["nextToken"] = stream.token
    elif stream.stamp_ms:
        query["startTime"] = stream.stamp_ms
    answer = _call(access, "get_log_events", {**query, "limit": limit}, "read the log")
    if answer is None:  # a token expires after a day; continue from the last event's time
        stream.token, stream.skip, stream.at_end, stream.caught_up = None, stream.same, False, False
        return
    found = answer.get("events", [])
    skipped = min(stream.skip, len(found))
    stream.skip -= skipped
    token = answer.get("nextForwardToken")
    is_end = token is None or token == stream.token
    stream.at_end = is_end or (stream.at_end and not found)
    if found or is_end:  # an empty page before the end tells nothing
        size = sum(len(event["message"]) for event in found)
        stream.caught_up = is_end or (len(found) < limit // 2 and size < PAGE_BYTES // 2)
    stream.token = token
    for event in found[skipped:]:
        text = str(event["message"])
        stream.same = stream.same + 1 if event["timestamp"] == stream.stamp_ms else 1
        stream.stamp_ms = int(event["timestamp"])
        own = container_output.parse(text, stamped=False).own
        if own is not None and own["e"] == "end":
            stream.ended_s, stream.is_final = now_s, bool(own.get("final", True))
            continue
        # A host's lines keep the stream's order, whatever its clock does.
        stream.last_ms = max(stream.last_ms, int(event["timestamp"]))
        tail.number += 1
        tail.held.append((stream.last_ms, tail.number, name, text))
    stream.quiet_s = None if found else stream.quiet_s or now_s


def _close_superseded(tail: _Tail, now_s: float) -> None:
    """Close the streams of replaced machines, once they have been at their end for SUPERSEDED_S, or have ended."""
    newest = {s.node: s.epoch for s in sorted(tail.streams.values(), key=lambda s: s.epoch)}
    for stream in tail.streams.values():
        is_quiet = stream.at_end and stream.quiet_s is not None and now_s - stream.quiet_s > SUPERSEDED_S
        if stream.epoch < newest[stream.node] and (is_quiet or (stream.at_end and stream.ended_s is not None)):
            stream.is_closed = True


def _release(tail: _Tail, failed: set[str]) -> Iterator[LogLine]:
    """Yield the held lines that no earlier line can precede, as far as is known, and drop them from the store.

    No line waits for an unreadable stream: the lines of that stream come late instead.
    """
    tail.held.sort()
    behind = {name: s for name, s in tail.streams.items() if s.token is not None and not (s.caught_up or s.is_closed)}
    limit_ms = min((s.last_ms for name, s in behind.items() if name not in failed), default=None)
    ready = len(tail.held) if limit_ms is None else sum(at_ms <= limit_ms for at_ms, *_ in tail.held)
    for at_ms, _, name, text in tail.held[:ready]:
        line = container_output.parse(text, stamped=False)
        yield LogLine(line.text, tail.streams[name].node, line.rank, at_ms / 1000)
    del tail.held[:ready]


def _call(access: AwsAccess, operation: str, query: dict[str, Any], doing: str) -> dict[str, Any] | None:
    """Return the answer, {} if the log does not exist yet, or None if the token has expired.

    Raises UnreachableError.
    """
    with api.polls(access, doing):
        try:
            try:
                answer: dict[str, Any] = getattr(api.client(access, "logs"), operation)(**query)
            except Exception as error:
                if api.code_of(error) not in api.EXPIRED:
                    raise
                access.clients.renew()
                answer = getattr(api.client(access, "logs"), operation)(**query)
        except Exception as error:
            if api.code_of(error) == "InvalidParameterException" and "nextToken" in query:
                return None
            if api.code_of(error) != "ResourceNotFoundException":
                raise
            return {}
        return answer
