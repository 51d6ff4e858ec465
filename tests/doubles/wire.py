"""HTTP/1.1 of the stand-ins: read a request from a connection, write an answer to the connection."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, BinaryIO
from urllib.parse import parse_qsl, unquote, urlsplit

MAX_HEADERS = 200


class HangUp(Exception):
    """Raised to close the connection without an answer."""


class BadJson(Exception):
    """Raised if the body of a request is not valid JSON."""


@dataclass
class Request:
    """One request; header names are in lower case."""

    method: str
    target: str
    host: str
    path: str  # decoded
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    is_from_container: bool = False

    @property
    def raw_path(self) -> str:
        """Return the path as received, still quoted."""
        return urlsplit(self.target).path if "://" in self.target else self.target.partition("?")[0]

    @property
    def shown(self) -> Any:
        """Return the body for the journal: read as JSON if possible, else as text; None without a body."""
        try:
            return json.loads(self.body) if self.body else None
        except ValueError:
            return self.body.decode(errors="replace")

    def json(self) -> Any:
        """Return the body read as JSON. Raises BadJson if the body is not valid JSON."""
        try:
            return json.loads(self.body or b"{}")
        except ValueError as error:
            raise BadJson(str(error)) from None


@dataclass
class Answer:
    """One answer; `write` adds Content-Length."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    length: int | None = None  # Content-Length in place of the body's: for HEAD, and for answers that are cut
    is_last: bool = False  # whether the connection ends after this answer

    def cut(self) -> None:
        """Let the connection end in the middle of the body."""
        self.length, self.is_last = len(self.body), True
        self.body = self.body[: len(self.body) // 2]


def json_answer(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    """Return an answer in JSON."""
    kind = {"Content-Type": "application/json; charset=utf-8"}
    return Answer(status, {**kind, **(headers or {})}, json.dumps(content).encode())


def read(stream: BinaryIO, reply: BinaryIO, is_from_container: bool) -> Request | None:
    """Return the next request, or None at the connection's end. Raises HangUp if the bytes are not HTTP."""
    first = stream.readline(65537)
    if not first.strip():
        return None
    words = first.decode("latin-1").split()
    if len(words) != 3:
        raise HangUp(repr(first))
    headers = _headers(stream)
    if headers.get("expect", "").lower() == "100-continue":
        reply.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        reply.flush()
    body = _body(stream, headers)
    target = words[1]
    parts = urlsplit(target if "://" in target else f"//-{target}")
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    host = headers.get("host", "").partition(":")[0].lower()
    return Request(words[0].upper(), target, host, unquote(parts.path), query, headers, body, is_from_container)


def write(reply: BinaryIO, request: Request, answer: Answer) -> None:
    """Send the answer."""
    phrase = HTTPStatus(answer.status).phrase if answer.status in HTTPStatus._value2member_map_ else "Unknown"
    length = len(answer.body) if answer.length is None else answer.length
    headers = {"Date": formatdate(usegmt=True), **answer.headers, "Content-Length": str(length)}
    lines = [f"HTTP/1.1 {answer.status} {phrase}", *(f"{name}: {value}" for name, value in headers.items())]
    reply.write("\r\n".join(lines).encode("latin-1", errors="replace") + b"\r\n\r\n")
    if request.method != "HEAD":
        for piece in getattr(answer, "pieces", (answer.body,)):
            reply.write(piece)
    reply.flush()


def _headers(stream: BinaryIO) -> dict[str, str]:
    headers: dict[str, str] = {}
    for _ in range(MAX_HEADERS):
        line = stream.readline(65537)
        if not line.strip():
            return headers
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    raise HangUp("too many headers")


def _body(stream: BinaryIO, headers: Mapping[str, str]) -> bytes:
    if "chunked" in headers.get("transfer-encoding", "").lower():
        parts = []
        while size := int(stream.readline().split(b";")[0] or b"0", 16):
            parts.append(_exactly(stream, size))
            stream.readline()
        while stream.readline().strip():
            pass
        return b"".join(parts)
    return _exactly(stream, int(headers.get("content-length") or 0))


def _exactly(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        raise HangUp("the client has gone in mid-request")
    return data
