"""Uploads to Cloud Storage: in one request (media, multipart), or a session of several requests (resumable)."""

import json
import re
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from doubles.google.errors import GoogleError, invalid
from doubles.google.objects import Check, Object, Objects, Spool

CHUNK_BYTES = 256 * 1024  # size unit of all chunks except the last; docs resumable uploads
_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")


@dataclass
class Session:
    """An upload that is running, or has ended in `made`."""

    bucket: str
    name: str
    told: dict[str, Any]
    check: Check
    spool: Spool
    made: Object | None = None


class Sessions:
    """All resumable uploads."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._lock = threading.RLock()
        self.clear()

    def clear(self) -> None:
        """Forget all uploads."""
        with self._lock:
            self._sessions: dict[str, Session] = {}
            self._break_after: int | None = None

    def break_next(self, kept_bytes: int) -> None:
        """Let the next request with data keep only `kept_bytes`, in whole 256 KiB, and be answered with 503."""
        self._break_after = kept_bytes

    def start(self, bucket: str, name: str, told: Mapping[str, Any], check: Check) -> str:
        """Return a new session's id. Raises GoogleError if the preconditions do not hold at the start."""
        check(self._objects.find(bucket, name))
        identity = f"AB{uuid.uuid4().hex}"
        with self._lock:
            self._sessions[identity] = Session(bucket, name, dict(told), check, self._objects.spool())
        return identity

    def put(self, identity: str, content_range: str | None, data: bytes, checksums: Mapping[str, str]) -> Object | int:
        """Return the object if it is complete, else the number of bytes kept. Raises GoogleError.

        Bytes that are already kept are skipped: a client may send a chunk again.
        """
        with self._lock:
            session = self._session(identity)
            if session.made is not None:
                return session.made
            start, total = _place(content_range, len(data))
            if start is not None:
                self._keep(session, start, total, data)
            if total is None or session.spool.size < total:
                return session.spool.size
            session.told |= checksums
            try:
                session.made = self._objects.commit(
                    session.bucket, session.name, session.spool, session.told, session.check
                )
            except GoogleError:
                del self._sessions[identity]
                raise
            return session.made

    def _session(self, identity: str) -> Session:
        found = self._sessions.get(identity)
        if found is None:
            raise GoogleError("NOT_FOUND", "Not Found")
        return found

    def _keep(self, session: Session, start: int, total: int | None, data: bytes) -> None:
        kept = session.spool.size
        if start > kept:  # assumed to be 400; Google documents only a failure
            raise invalid(f"Invalid request. Bytes {kept}-{start - 1} are missing.")
        if (total is None or start + len(data) < total) and len(data) % CHUNK_BYTES:
            message = f"Invalid request. There were {len(data)} byte(s) in the request body, which is not a multiple of"
            raise invalid(f"{message} {CHUNK_BYTES}.")
        if total is not None and start + len(data) > total:
            raise invalid("Invalid request. The body is longer than the range says.")
        new = memoryview(data)[kept - start :]
        broken_after, self._break_after = self._break_after, None
        if broken_after is None:
            session.spool.append(new)
            return
        session.spool.append(new[: broken_after // CHUNK_BYTES * CHUNK_BYTES])
        raise GoogleError("UNAVAILABLE", "Backend Error")


def multipart(kind: str, body: bytes) -> tuple[dict[str, Any], str, bytes]:
    """Return the metadata, the type and the content of a multipart/related body. Raises GoogleError."""
    found = re.search(r'boundary="?([^";]+)"?', kind)
    mark = b"--" + found[1].encode() if found else b"-"
    first, second, rest = body.find(mark), body.find(mark, len(mark)), body.rfind(b"\r\n" + mark + b"--")
    if first != 0 or second < 0 or rest < second:
        raise invalid("Malformed multipart body.")
    told, _ = _part(body[len(mark) : second].removesuffix(b"\r\n"))
    content, headers = _part(body[second + len(mark) : rest])
    try:
        metadata = json.loads(told or b"{}")
    except ValueError:
        raise invalid("Metadata part is no JSON.") from None
    of = re.search(rb"(?im)^content-type:\s*([^\r\n]+)", headers)
    return metadata, of[1].decode() if of else "application/octet-stream", content


def _part(raw: bytes) -> tuple[bytes, bytes]:
    """Return a part's content and its headers."""
    headers, mark, content = raw.partition(b"\r\n\r\n")
    if not mark:
        raise invalid("Malformed multipart body.")
    return content, headers


def _place(content_range: str | None, size: int) -> tuple[int | None, int | None]:
    """Return the position of the body's bytes (None: no bytes) and the total size (None: not known yet)."""
    if content_range is None:
        return 0, size
    found = _RANGE.fullmatch(content_range.strip())
    if found is None or (found[1] is not None and int(found[2]) - int(found[1]) + 1 != size):
        raise invalid(f"Failed to parse Content-Range header: {content_range}")
    total = None if found[3] == "*" else int(found[3])
    return (None if found[1] is None else int(found[1])), total
