"""Cloud Logging's entries as log lines: the node, the number in the container's own count, the text.

entrypoints/container/log_relay.py prints each line as a JSON object. Cloud Logging turns the object into the entry's
payload: `message`, `severity`, and under `ct` the container's mark, the line's number in the container, and the line's
time. If the platform keeps the object as text, this module parses the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from cloudtrain.launcher.backend import container_lines
from cloudtrain.launcher.text.times import seconds

_TASK = re.compile(r"workerpool(\d+)-(\d+)")


@dataclass(frozen=True)
class LogEntry:
    """One line. `life` and `number` are the container's mark and line count; `life` is None if a line has no number.

    `stamp_s` is Cloud Logging's time, used in queries; `time_s` is the time at which the container's log relay saw the
    line. `own` is the event by which a container reports its end. `key` identifies the entry.
    """

    key: str
    node: int
    stamp_s: float
    time_s: float
    text: str
    rank: int | None = None
    life: str | None = None
    number: int = 0
    own: dict[str, Any] | None = None


def node_of(task: str) -> int:
    """Return the node's index for a replica's name: pool 0 is node 0, pool 1 the later nodes, any other name node 0."""
    found = _TASK.match(task)
    return int(found[2]) + 1 if found and found[1] == "1" else 0


def task_of(node: int) -> str:
    """Return the replica's name for a node's index."""
    return f"workerpool1-{node - 1}" if node else "workerpool0-0"


def of_json(raw: dict[str, Any]) -> LogEntry:
    """Return the line of an entry in REST form."""
    stamp = str(raw.get("timestamp") or raw.get("receiveTimestamp") or "")
    payload = raw.get("jsonPayload")
    task = str(((raw.get("resource") or {}).get("labels") or {}).get("task_name", ""))
    key = f"{_plain_time(stamp)} {raw.get('insertId', '')}"
    return _entry(key, task, seconds(stamp) or 0.0, payload, raw.get("textPayload"))


def joined(raw: Iterable[dict[str, Any]], parts: dict[str, dict[str, str]]) -> Iterator[dict[str, Any]]:
    """Yield the entries, with split entries of Cloud Logging joined; `parts` keeps incomplete entries between calls."""
    for each in raw:
        split = each.get("split")
        if not split or int(split.get("totalSplits", 1)) < 2:
            yield each
            continue
        there = parts.setdefault(str(split.get("uid")), {})
        there[str(split.get("index", 0))] = str((each.get("jsonPayload") or {}).get("message", each.get("textPayload")))
        if len(there) == int(split["totalSplits"]):
            del parts[str(split.get("uid"))]
            text = "".join(there[index] for index in sorted(there, key=int))
            whole = {key: value for key, value in each.items() if key not in ("split", "textPayload")}
            # Every part repeats the fields beside the message.
            payload = {**(each.get("jsonPayload") or {}), "message": text}
            yield {**whole, "insertId": split.get("uid"), "jsonPayload": payload}


def _entry(key: str, task: str, stamp_s: float, payload: dict[str, Any] | None, text: str | None) -> LogEntry:
    message = text if payload is None else payload.get("message")
    if payload is not None and not isinstance(message, str):  # structured output of the user's program
        message = json.dumps(payload, ensure_ascii=False, sort_keys=True)
    message, mark = (message or "").rstrip("\n"), (payload or {}).get("ct")
    if mark is None and message.startswith("{") and '"ct"' in message:
        message, mark = _unparsed(message)
    line = container_lines.parse(message, stamped=False)
    if not isinstance(mark, dict) or "n" not in mark:
        return LogEntry(key, node_of(task), stamp_s, stamp_s, line.text, line.rank, own=line.own)
    time_s = float(mark.get("t", stamp_s * 1000)) / 1000
    return LogEntry(key, node_of(task), stamp_s, time_s, line.text, line.rank, str(mark.get("l")), int(mark["n"]))


def _plain_time(stamp: str) -> str:
    """Return the time without trailing zeros: the keys in stored cursors have this form."""
    whole, point, fraction = stamp.removesuffix("Z").partition(".")
    return f"{whole}{point}{fraction}".rstrip("0") if point else whole


def _unparsed(message: str) -> tuple[str, Any]:
    """Return the message and mark of a cloudtrain line that the platform has kept as plain text."""
    try:
        found = json.loads(message)
        return str(found["message"]), found["ct"]
    except (ValueError, KeyError, TypeError):
        return message, None
