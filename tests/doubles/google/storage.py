"""storage.googleapis.com, the JSON API, with its own store: no maintained emulator has all calls.

The emulator reads every object into memory, ignores ifGenerationMatch, and cannot continue an upload that broke off.
"""

import base64
import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from doubles.google import objects
from doubles.google.errors import GoogleError, error_answer, invalid
from doubles.google.names import PROJECT
from doubles.google.objects import Bucket, Check, Contents, Object, Objects
from doubles.google.uploads import Sessions, multipart
from doubles.kit.differences import Listing
from doubles.wire import Answer, BadJson, Request, json_answer

MAX_RESULTS = 1000
_OBJECT = r"/storage/v1/b/(?P<bucket>[^/]+)/o/(?P<name>[^/]+)"
_UPLOAD = r"/upload/storage/v1/b/(?P<bucket>[^/]+)/o"

OPERATIONS = [  # name, method, pattern of the path as received, still quoted
    ("storage.bucket", "GET", r"/storage/v1/b/(?P<bucket>[^/]+)"),
    ("storage.list", "GET", r"/storage/v1/b/(?P<bucket>[^/]+)/o"),
    ("storage.get", "GET", _OBJECT),  # "storage.download" with alt=media
    ("storage.delete", "DELETE", _OBJECT),
    ("storage.insert", "POST", _UPLOAD),
    ("storage.chunk", "PUT", _UPLOAD),  # of a resumable upload, and the query of its status
]
_LIST_KEYS = {"prefix", "pageToken", "fields"}


@dataclass(frozen=True)
class StorageSettings:
    """The settings of Cloud Storage that a test may change."""

    storage_page_size: int = MAX_RESULTS
    """Maximum objects of a list's page, even for larger maxResults."""
    list_lag_s: float = 0.0
    """How long the list has no fresh object, and still has a removed object."""
    denied: tuple[str, ...] = ()
    """Only storage.delete matters: a caller without this right may not replace objects either."""


@dataclass
class FileAnswer(Answer):
    """An answer that reads its body from a file during sending."""

    pieces: Contents | tuple[bytes, ...] = ()

    def cut(self) -> None:
        """Let the connection end in the middle of the body."""
        self.is_last = True
        if isinstance(self.pieces, Contents):
            self.pieces.size //= 2


class Storage:
    """The service; the folder is emptied at the start."""

    def __init__(self, folder: Path, settings: Callable[[], Any] = StorageSettings) -> None:
        self.objects = Objects(folder)
        self._sessions = Sessions(self.objects)
        self._settings = settings
        self._listing = Listing(lambda: settings().list_lag_s)

    def clear(self) -> None:
        """Forget all buckets except the tests' bucket, and empty the tests' bucket."""
        self._sessions.clear()
        self.objects.clear()

    def put(self, bucket: str, name: str, data: bytes) -> None:
        """Write an object."""
        spool = self.objects.spool()
        spool.append(data)
        self.objects.commit(bucket, name, spool, {}, lambda old: None)

    def read(self, bucket: str, name: str) -> bytes | None:
        """Return an object's content, or None."""
        with self.objects.lock:
            found = self.objects.find(bucket, name)
            return None if found is None else found.file.read_bytes()

    def names(self, bucket: str, prefix: str = "") -> list[str]:
        """Return the objects' names."""
        return sorted(name for name in self.objects.objects(bucket) if name.startswith(prefix))

    def remove(self, bucket: str, name: str) -> None:
        """Remove an object."""
        self.objects.remove(bucket, name, lambda old: None)

    def add_bucket(self, name: str, location: str = "US-CENTRAL1", project: str = PROJECT) -> None:
        """Make a bucket; a bucket of another project answers 403 to every request."""
        self.objects.add_bucket(Bucket(name, project, location.upper()))

    def break_next_chunk(self, kept_bytes: int) -> None:
        """Let the next request of a resumable upload keep only `kept_bytes`, in whole 256 KiB, and answer 503."""
        self._sessions.break_next(kept_bytes)

    def operation(self, request: Request) -> str | None:
        """Return the name of the requested operation, None for an unserved request."""
        found = _matched(request)
        return None if found is None else found[0]

    def respond(self, request: Request) -> Answer:
        """Answer one request; errors are answers too."""
        matched = _matched(request)
        if matched is None:
            return Answer(404, {"Content-Type": "text/html; charset=UTF-8"}, b"Not Found")
        operation, groups = matched
        try:
            answer: Answer = getattr(self, f"_{operation.partition('.')[2]}")(request, **groups)
        except BadJson as error:
            return error_answer(invalid(f"Parse Error: {error}"), "storage")
        except GoogleError as error:
            if operation == "storage.download" and error.status in (404, 412):  # media errors have no JSON
                return Answer(error.status, {"Content-Type": "text/html; charset=UTF-8"}, error.message.encode())
            return error_answer(error, "storage")
        return answer

    def _bucket(self, request: Request, bucket: str) -> Answer:
        return json_answer(objects.bucket_resource(self.objects.bucket(bucket)))

    def _list(self, request: Request, bucket: str) -> Answer:
        query = request.query
        unknown = set(query) - _LIST_KEYS
        if unknown:
            raise invalid(f"the stand-in's list knows no {min(unknown)}")
        prefix, after = query.get("prefix", ""), base64.urlsafe_b64decode(query.get("pageToken", "")).decode()
        size = min(MAX_RESULTS, self._settings().storage_page_size)
        with self.objects.lock:
            there = sorted(self.objects.objects(bucket).items())
            entries = ((name, one, one.created) for name, one in there if name.startswith(prefix))
            found = [one for name, one in self._listing.told(bucket, entries, prefix) if name > after]
            told: dict[str, Any] = {"kind": "storage#objects"}
            if len(found) > size:
                told["nextPageToken"] = base64.urlsafe_b64encode(found[size - 1].name.encode()).decode()
            told |= {"items": [objects.resource(one) for one in found[:size]]} if found else {}
        return json_answer(told)

    def _get(self, request: Request, bucket: str, name: str) -> Answer:
        with self.objects.lock:
            found = self._found(request, bucket, name)
            return json_answer(objects.resource(found), headers={"ETag": objects.etag_of(found)})

    def _found(self, request: Request, bucket: str, name: str) -> Object:
        """Return the object. Raises GoogleError."""
        found = self.objects.find(bucket, name)
        if found is None or request.query.get("generation") not in (None, str(found.generation)):
            raise objects.missing(bucket, name)
        _check(request)(found)
        return found

    def _download(self, request: Request, bucket: str, name: str) -> Answer:
        with self.objects.lock:
            found = self._found(request, bucket, name)
            headers, bounds = objects.media_headers(found), _bounds(request.headers.get("range", ""), found.size)
            if bounds is None:
                return FileAnswer(200, headers, length=found.size, pieces=Contents(found.file, 0, found.size))
            start, end = bounds
            if start >= end:
                kind = {"Content-Range": f"bytes */{found.size}", "Content-Type": "text/html; charset=UTF-8"}
                return Answer(416, kind, b"The requested range cannot be satisfied.")
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{found.size}"
            return FileAnswer(206, headers, length=end - start, pieces=Contents(found.file, start, end - start))

    def _delete(self, request: Request, bucket: str, name: str) -> Answer:
        with self.objects.lock:
            if request.query.get("generation") is not None:
                self._found(request, bucket, name)
            self.objects.remove(bucket, name, _check(request))
        return Answer(204)

    def _insert(self, request: Request, bucket: str) -> Answer:
        kind, query, body = request.query.get("uploadType"), request.query, request.body
        told: dict[str, Any] = {"contentType": request.headers.get("content-type", "application/octet-stream")}
        if kind == "multipart":
            metadata, content_type, body = multipart(told["contentType"], request.body)
            told = {"contentType": content_type, **metadata}
        elif kind == "resumable":
            content_type = request.headers.get("x-upload-content-type", "application/octet-stream")
            told = {"contentType": content_type, **(request.json() if request.body else {})}
        elif kind != "media":
            raise invalid(f"Invalid uploadType: {kind}")
        name = query.get("name") or told.get("name", "")
        told = objects.writable(told)
        check = self._replacing(request)
        if kind == "resumable":
            identity = self._sessions.start(bucket, name, told, check)
            return Answer(200, {"Location": _session_url(request, identity), "X-GUploader-UploadID": identity})
        spool = self.objects.spool()
        spool.append(body)
        return json_answer(
            objects.resource(self.objects.commit(bucket, name, spool, {**told, **_sums(request)}, check))
        )

    def _chunk(self, request: Request, bucket: str) -> Answer:
        identity = request.query.get("upload_id", "")
        sums = _sums(request)
        found = self._sessions.put(identity, request.headers.get("content-range"), request.body, sums)
        if isinstance(found, Object):
            return json_answer(objects.resource(found))
        return Answer(308, {"X-GUploader-UploadID": identity, **({"Range": f"bytes=0-{found - 1}"} if found else {})})

    def _replacing(self, request: Request) -> Check:
        """Return a check of the request's preconditions and of the right to replace an existing object."""
        conditions = _check(request)
        denied = () if request.is_from_container else self._settings().denied

        def check(old: Object | None) -> None:
            conditions(old)
            if old is not None and any(fnmatchcase("storage.delete", pattern) for pattern in denied):
                raise objects.missing_right("storage.objects.delete", "object")

        return check


def _matched(request: Request) -> tuple[str, dict[str, str]] | None:
    for name, method, pattern in OPERATIONS:
        found = re.fullmatch(pattern, request.raw_path)
        if found and request.method == method:
            is_media = name == "storage.get" and request.query.get("alt") == "media"
            groups = {key: unquote(value) for key, value in found.groupdict().items()}
            return ("storage.download" if is_media else name), groups
    return None


def _check(request: Request) -> Check:
    """Return the precondition of the request as a function. Raises GoogleError for an unknown precondition."""
    wanted = request.query.get("ifGenerationMatch")
    known = {"ifGenerationMatch"} if wanted is not None and wanted.isdigit() else set()
    told = {name for name in (*request.query, *request.headers) if re.match("if[A-Z]|x-goog-if-", name)}
    if told - known:
        raise invalid(f"Invalid value for {min(told - known)}")

    def check(old: Object | None) -> None:
        if wanted not in (None, "0" if old is None else str(old.generation)):
            message = "At least one of the pre-conditions you specified did not hold."
            raise GoogleError("FAILED_PRECONDITION", message, status=412)

    return check


def _bounds(text: str, size: int) -> tuple[int, int] | None:
    """Return the range's start and its exclusive end, None without a range. Raises GoogleError for a strange range."""
    found = re.fullmatch(r"bytes=(\d+)-(\d*)", text)
    if text and (found is None or (found[2] and int(found[2]) < int(found[1]))):
        raise invalid(f"the stand-in knows no range {text}")
    if found is None:
        return None
    return int(found[1]), min(size, int(found[2]) + 1 if found[2] else size)


def _sums(request: Request) -> dict[str, str]:
    """Return the checksums in the headers."""
    kinds = {"crc32c": "crc32c", "md5": "md5Hash"}
    pairs = [part.strip().partition("=") for part in request.headers.get("x-goog-hash", "").split(",")]
    told = {kinds[kind]: value for kind, _, value in pairs if kind in kinds}
    return told | ({"md5Hash": request.headers["content-md5"]} if "content-md5" in request.headers else {})


def _session_url(request: Request, identity: str) -> str:
    host = request.headers.get("host", "storage.googleapis.com")
    scheme = "http" if re.match(r"(127\.|localhost)", host) else "https"
    query = "&".join(f"{key}={quote(value)}" for key, value in request.query.items())
    return f"{scheme}://{host}{request.raw_path}?{query}&upload_id={identity}"
