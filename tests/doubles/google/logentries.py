"""Log entries in Cloud Logging's form, made from the replicas' lines."""

import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from doubles.google.names import PROJECT

SERVICE = "service"  # the task of the platform's own messages
SEVERITIES = ("DEFAULT", "DEBUG", "INFO", "NOTICE", "WARNING", "ERROR", "CRITICAL", "ALERT", "EMERGENCY")
JSON = dict[str, Any]


@dataclass(frozen=True)
class LogSettings:
    """The settings of Cloud Logging that a test may change; times in seconds."""

    log_ingest_s: float = 0.0
    """From a line to its appearance."""
    log_late_share: float = 0.0
    """The share of entries that take log_late_s longer."""
    log_late_s: tuple[float, float] = (6.0, 20.0)
    log_duplicate_share: float = 0.0
    """The share of entries that are listed twice, with the same insertId and timestamp."""
    log_resent_share: float = 0.0
    """The share of lines that arrive twice: the second entry has a different insertId."""
    log_entry_bytes: int = 256 * 1024
    """Longer entries are split. 256 KiB: docs logging/quotas."""
    log_page_cap: int | None = None
    """Maximum entries of a page, even for a larger pageSize."""
    log_empty_every: int = 0
    """Every n-th list call finds no entries "so far" and answers only a token; 0: no such call."""
    log_reads_a_minute: int = 60
    """List calls a project; docs logging/quotas. The next call is answered 429, without Retry-After."""


@dataclass(slots=True)
class Entry:
    """An entry, its position in the order, and the time from which it is visible."""

    key: tuple[int, str, int]  # timestamp in ns, insertId, number of arrival: the order of lists
    visible_at: float
    job: str
    data: JSON  # in REST's form


def rfc3339_ns(stamp_ns: int) -> str:
    """Return the time without trailing zeros of the fraction."""
    seconds, fraction = divmod(stamp_ns, 1_000_000_000)
    return f"{_whole(seconds)}.{fraction:09d}".rstrip("0").rstrip(".") + "Z"


@lru_cache(maxsize=1024)
def _whole(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


class Maker:
    """Makes entries; every stand-in draws the same sequence of faults."""

    def __init__(self, settings: Callable[[], LogSettings], clock: Callable[[], float]) -> None:
        self._settings, self._clock = settings, clock
        self._random = random.Random(0)
        self._numbers = itertools.count(1)
        self._last_ns = 0

    def line(
        self, job: str, task: str, line: str | bytes, stream: str, at_s: float | None, severity: str | None
    ) -> Iterator[Entry]:
        """Yield the entries of a line: more than one if the line is long or arrives twice."""
        settings = self._settings()
        text = (line.decode(errors="replace") if isinstance(line, bytes) else line).rstrip("\r\n")
        data = _data(job, task, text, stream, severity)
        stamp_ns = self.stamp() if at_s is None else round(at_s * 1e9)
        for part in self._parts(data, settings.log_entry_bytes):
            yield from self.entries(job, part, stamp_ns)

    def entries(self, job: str, data: JSON, stamp_ns: int, insert_id: str | None = None) -> Iterator[Entry]:
        """Yield the entry, with the duplicates that the faults cause."""
        settings = self._settings()
        first = self._entry(job, data, stamp_ns, insert_id)
        yield first
        if self._random.random() < settings.log_duplicate_share:
            yield Entry((*first.key[:2], next(self._numbers)), first.visible_at, job, first.data)
        if self._random.random() < settings.log_resent_share:
            yield self._entry(job, data, stamp_ns, None)

    def stamp(self) -> int:
        """Return the time in ns, later than any earlier stamp: lines have an order."""
        self._last_ns = max(round(self._clock() * 1e9), self._last_ns + 1)
        return self._last_ns

    def _entry(self, job: str, data: JSON, stamp_ns: int, insert_id: str | None) -> Entry:
        settings, number = self._settings(), next(self._numbers)
        delay_s = settings.log_ingest_s
        if self._random.random() < settings.log_late_share:
            delay_s += self._random.uniform(*settings.log_late_s)
        visible_at = self._clock() + delay_s
        name = insert_id or f"1k7xq{number:09x}"
        known = {"insertId": name, "timestamp": rfc3339_ns(stamp_ns)}
        whole = {**known, **data, "receiveTimestamp": rfc3339_ns(round(visible_at * 1e9))}
        return Entry((stamp_ns, name, number), visible_at, job, whole)

    def _parts(self, data: JSON, limit: int) -> list[JSON]:
        """Return the data, or its parts: the longest text is split, between characters."""
        payload: JSON | None = data.get("jsonPayload")
        holder = data if payload is None else payload
        texts = (
            [name for name, value in holder.items() if isinstance(value, str)]
            if payload is not None
            else ["textPayload"]
        )
        longest = max(texts, key=lambda name: len(holder[name]), default=None)
        if longest is None or len(holder[longest]) * 4 <= limit or len(holder[longest].encode()) <= limit:
            return [data]
        uid, pieces = f"{self._random.getrandbits(64):016x}", _pieces(holder[longest].encode(), limit)
        parts = []
        for index, piece in enumerate(pieces):
            split = {"uid": uid, **({"index": index} if index else {}), "totalSplits": len(pieces)}  # JSON omits zeros
            changed = {**holder, longest: piece}
            parts.append({**(changed if payload is None else {**data, "jsonPayload": changed}), "split": split})
        return parts


def _pieces(raw: bytes, limit: int) -> list[str]:
    pieces, start = [], 0
    while start < len(raw):
        end = min(start + max(limit, 4), len(raw))
        while end < len(raw) and raw[end] & 0xC0 == 0x80:
            end -= 1
        pieces.append(raw[start:end].decode())
        start = end
    return pieces


def _data(job: str, task: str, text: str, stream: str, severity: str | None) -> JSON:
    """Return all fields of an entry except its times and its insertId."""
    resource = {"type": "ml_job", "labels": {"job_id": job, "project_id": PROJECT, "task_name": task}}
    if task == SERVICE:
        name = f"projects/{PROJECT}/logs/ml.googleapis.com%2F{job}"
        labels = {"ml.googleapis.com/endpoint": ""}
        told: JSON = {"textPayload": text}
        level = severity or ("ERROR" if stream == "stderr" else "INFO")
    else:
        name = f"projects/{PROJECT}/logs/{task}"
        labels = {"ml.googleapis.com/job_id/log_area": "root", "ml.googleapis.com/trial_id": ""}
        payload = _object(text)
        level = severity or ("ERROR" if stream == "stderr" else "INFO")
        if payload is None:
            payload = {"levelname": level, "message": text}
        elif severity is None and str(payload.get("severity")).upper() in SEVERITIES:
            level = str(payload.pop("severity")).upper()
        told = {"jsonPayload": payload}
    shown = {} if level == "DEFAULT" else {"severity": level}
    return {"resource": resource, **shown, "labels": labels, "logName": name, **told}


def _object(text: str) -> JSON | None:
    """Return the JSON object in the line, or None."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        found = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _refuse(word: str) -> None:
    raise ValueError(word)  # NaN, Infinity: not JSON
