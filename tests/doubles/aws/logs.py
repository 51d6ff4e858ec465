"""CloudWatch Logs: groups, streams, events; pages by token, and a lag between an event's arrival and its appearance."""

import bisect
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from doubles.aws.wire import AwsError

PAGE_BYTES, PAGE_EVENTS, EVENT_BYTES = 1_048_576, 10_000, 26  # an event counts its bytes and 26; API reference
STREAMS_A_PAGE = 50
_TOKEN = re.compile(r"f/(\d{48})(\d{8})/s")

Params = dict[str, Any]


@dataclass
class Stream:
    """One stream's events, as parallel lists in the order of their arrival."""

    name: str
    created_ms: int
    messages: list[str] = field(default_factory=list)
    stamps_ms: list[int] = field(default_factory=list)
    arrived_ms: list[int] = field(default_factory=list)
    visible_at: list[float] = field(default_factory=list)

    def visible(self) -> int:
        """Return the number of events that are visible now."""
        return bisect.bisect_right(self.visible_at, time.time())


@dataclass
class Group:
    """A log group."""

    name: str
    created_ms: int
    streams: dict[str, Stream] = field(default_factory=dict)


class Logs:
    """The log groups of one region."""

    def __init__(self, lag_s: Callable[[], float]) -> None:
        self._lag_s = lag_s
        self._lock = threading.RLock()
        self._groups: dict[str, Group] = {}

    def execute(self, operation: str, params: Params, is_empty_page: bool = False) -> Params:
        """Return the answer of the operation. Raises AwsError."""
        actions: dict[str, Callable[[Params], Params]] = {
            "DescribeLogStreams": self._describe_streams,
            "GetLogEvents": lambda params: self._get(params, is_empty_page),
        }
        if operation not in actions:
            raise AwsError("UnknownOperationException", f"the stand-in has no {operation}")
        with self._lock:
            return actions[operation](params)

    def append(self, group: str, stream: str, messages: Iterable[str], stamp_ms: int | None = None) -> None:
        """Append lines that arrive now; a missing group or stream is created."""
        now_ms, lines = int(time.time() * 1000), list(messages)
        with self._lock:
            found = self._groups.setdefault(group, Group(group, now_ms))
            to = found.streams.setdefault(stream, Stream(stream, now_ms))
            # Never visible before an earlier event, even after a change of the lag: a token counts events.
            visible_at = max(time.time() + self._lag_s(), to.visible_at[-1] if to.visible_at else 0.0)
            to.messages.extend(lines)
            to.stamps_ms.extend([now_ms if stamp_ms is None else stamp_ms] * len(lines))
            to.arrived_ms.extend([now_ms] * len(lines))
            to.visible_at.extend([visible_at] * len(lines))

    def _group(self, params: Params) -> Group:
        if params["logGroupName"] not in self._groups:
            raise AwsError("ResourceNotFoundException", "The specified log group does not exist.")
        return self._groups[params["logGroupName"]]

    def _stream(self, params: Params) -> Stream:
        streams = self._group(params).streams
        if params["logStreamName"] not in streams:
            raise AwsError("ResourceNotFoundException", "The specified log stream does not exist.")
        return streams[params["logStreamName"]]

    def _describe_streams(self, params: Params) -> Params:
        _check_served(params, {"logGroupName", "logStreamNamePrefix", "nextToken"})
        group, prefix = self._group(params), params.get("logStreamNamePrefix", "")
        streams = sorted(group.streams.values(), key=lambda stream: stream.name)
        streams = [stream for stream in streams if stream.name.startswith(prefix)]
        return _paged("logStreams", [_described(stream, group.name) for stream in streams], params)

    def _get(self, params: Params, is_empty_page: bool) -> Params:
        _check_served(params, {"logGroupName", "logStreamName", "startFromHead", "nextToken", "startTime", "limit"})
        if params.get("startFromHead") is not True:
            raise AwsError("InvalidParameterException", "The stand-in reads from the head alone.")
        stream = self._stream(params)
        visible, limit = stream.visible(), params.get("limit", PAGE_EVENTS)
        start, turn = _read_token(params["nextToken"]) if "nextToken" in params else (0, 0)
        if is_empty_page:
            return {"events": [], **_tokens(start, turn + 1)}
        events: list[Params] = []
        end, size = start, 0
        while len(events) < limit and end < visible:
            size += len(stream.messages[end].encode()) + EVENT_BYTES
            if size > PAGE_BYTES and events:
                break
            if stream.stamps_ms[end] >= params.get("startTime", 0):
                events.append(_event(stream, end))
            end += 1
        # At the end the same token comes back.
        return {"events": events, **_tokens(end, turn if start == end else 0)}


def _check_served(params: Params, served: set[str]) -> None:
    """Raise AwsError for a parameter that the stand-in would ignore."""
    if unserved := set(params) - served:
        raise AwsError("InvalidParameterException", f"The stand-in has no {min(unserved)}.")


def _read_token(token: str) -> tuple[int, int]:
    found = _TOKEN.fullmatch(token)
    if found is None:
        raise AwsError("InvalidParameterException", "The specified nextToken is invalid.")
    return int(found[1]), int(found[2])


def _tokens(end: int, turn: int) -> Params:
    """Return the token; `turn` distinguishes tokens of one position, for pages that are empty and not the last."""
    return {"nextForwardToken": f"f/{end:048d}{turn:08d}/s"}


def _event(stream: Stream, index: int) -> Params:
    return {
        "timestamp": stream.stamps_ms[index],
        "message": stream.messages[index],
        "ingestionTime": stream.arrived_ms[index],
    }


def _described(stream: Stream, group: str) -> Params:
    arn = f"arn:aws:logs:us-east-1:123456789012:log-group:{group}:log-stream:{stream.name}"
    told: Params = {"logStreamName": stream.name, "creationTime": stream.created_ms, "arn": arn, "storedBytes": 0}
    if visible := stream.visible():
        told["firstEventTimestamp"], told["lastEventTimestamp"] = stream.stamps_ms[0], stream.stamps_ms[visible - 1]
        told["lastIngestionTime"] = stream.arrived_ms[visible - 1]
    return told


def _paged(key: str, found: list[Params], params: Params) -> Params:
    start = int(params.get("nextToken", 0))
    end = start + params.get("limit", STREAMS_A_PAGE)
    return {key: found[start:end], **({"nextToken": str(end)} if end < len(found) else {})}
