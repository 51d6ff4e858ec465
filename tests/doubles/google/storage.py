"""storage.googleapis.com, the JSON API, with its own store: no maintained emulator has all calls.

The emulator reads every object into memory, ignores ifGenerationMatch, and cannot continue an upload that broke off.
"""

import base64
import re
from collections.abc import Callable, Iterator
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
from doubles.wire import Answer, BadJson, Request, json_answer

MAX_RESULTS = 1000
_OBJECT = r"/storage/v1/b/(?P<bucket>[^/]+)/o/(?P<name>[^/]+)"
_UPLOAD = r"(?:/resumable)?/upload/storage/v1/b/(?P<bucket>[^/]+)/o"

OPERATIONS = [  # name, method, pattern of the path as received, still quoted
    ("storage.bucket", "GET", r"/storage/v1/b/(?P<bucket>[^/]+)"),
    ("storage.list", "GET", r"/storage/v1/b/(?P<bucket>[^/]+)/o"),
    ("storage.get", "GET", _OBJECT),  # "storage.download" with alt=media
    ("storage.download", "GET", f"/download{_OBJECT}"),
    ("storage.delete", "DELETE", _OBJECT),
    ("storage.insert", "POST", _UPLOAD),
    ("storage.chunk", "PUT", _UPLOAD),  # of a resumable upload, and the query of its status
    ("storage.cancel", "DELETE", _UPLOAD),
]
_LIST_KEYS = {"prefix", "delimiter", "pageToken", "maxResults", "startOffset", "endOffset", "includeTrailingDelimiter"}
_LIST_KEYS |= {"projection", "fields", "alt", "prettyPrint", "userProject", "key", "quotaUser", "versions"}
_CONDITIONS = {  # in the query, or as a header, for example x-goog-if-generation-match
    "ifGenerationMatch": ("generation", True),
    "ifGenerationNotMatch": ("generation", False),
    "ifMetagenerationMatch": ("metageneration", True),
    "ifMetagenerationNotMatch": ("metageneration", False),
}


@dataclass(frozen=True)
class StorageSettings:
    """The settings of Cloud Storage that a test may change."""

    storage_page_size: int = MAX_RESULTS
    """Maximum objects of a list's page, even for larger maxResults."""
    denied: tuple[str, ...] = ()
    job_denied: tuple[str, ...] = ()
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
        if not query.get("maxResults", "0").isdigit():
            raise invalid(f"Invalid value for maxResults: '{query['maxResults']}'")
        asked = int(query.get("maxResults", 0))
        size = min(asked or MAX_RESULTS, MAX_RESULTS, self._settings().storage_page_size)
        items: list[Object] = []
        prefixes: list[str] = []
        last = more = None
        with self.objects.lock:
            for name, found in self._listed(bucket, query):
                if len(items) + len(prefixes) == size:
                    more = base64.urlsafe_b64encode(str(last).encode()).decode()
                    break
                last = name
                if found is None:
                    prefixes.append(name)
                else:
                    items.append(found)
            told: dict[str, Any] = {"kind": "storage#objects"}
            told |= {"nextPageToken": more} if more else {}
            told |= {"prefixes": prefixes} if prefixes else {}
            told |= {"items": [objects.resource(found) for found in items]} if items else {}
        return json_answer(told)

    def _listed(self, bucket: str, query: dict[str, str]) -> Iterator[tuple[str, Object | None]]:
        """Yield names with their objects, and prefixes with None, in order after the page's token."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = base64.urlsafe_b64decode(query["pageToken"]).decode() if query.get("pageToken") else None
        is_both = query.get("includeTrailingDelimiter", "").lower() == "true"  # the folder, and an object with its name
        folder = None
        for name, found in sorted(self.objects.objects(bucket).items()):
            if not name.startswith(prefix) or name < query.get("startOffset", ""):
                continue
            if name >= query.get("endOffset", "") != "" or (folder is not None and name.startswith(folder)):
                continue
            head, mark, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
            folder = prefix + head + mark if mark else None
            if after is None or (folder or name) > after:
                yield (name, found) if folder is None else (folder, None)
            if is_both and folder == name and (after is None or name > after):
                yield name, found

    def _get(self, request: Request, bucket: str, name: str) -> Answer:
        with self.objects.lock:
            found = self._found(request, bucket, name)
            return (
                Answer(304)
                if found is None
                else json_answer(objects.resource(found), headers={"ETag": objects.etag_of(found)})
            )

    def _found(self, request: Request, bucket: str, name: str) -> Object | None:
        """Return the object, or None if the client's copy is current. Raises GoogleError."""
        found = self.objects.find(bucket, name)
        if found is None or request.query.get("generation") not in (None, str(found.generation)):
            raise objects.missing(bucket, name)
        try:
            _check(request)(found)
        except GoogleError:
            if any(_value(request, key) for key in ("ifGenerationNotMatch", "ifMetagenerationNotMatch")):
                return None
            raise
        return found

    def _download(self, request: Request, bucket: str, name: str) -> Answer:
        with self.objects.lock:
            found = self._found(request, bucket, name)
            if found is None:
                return Answer(304)
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
        told |= {"contentEncoding": query["contentEncoding"]} if "contentEncoding" in query else {}
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

    def _cancel(self, request: Request, bucket: str) -> Answer:
        self._sessions.cancel(request.query.get("upload_id", ""))
        return Answer(499)

    def _replacing(self, request: Request) -> Check:
        """Return a check of the request's preconditions and of the right to replace an existing object."""
        conditions, settings = _check(request), self._settings()
        denied = settings.job_denied if request.is_from_container else settings.denied

        def check(old: Object | None) -> None:
            conditions(old)
            if old is not None and any(fnmatchcase("storage.delete", pattern) for pattern in denied):
                raise objects.missing_right("storage.objects.delete", "object")

        return check


def _matched(request: Request) -> tuple[str, dict[str, str]] | None:
    for name, method, pattern in OPERATIONS:
        found = re.fullmatch(pattern, request.raw_path)
        if found and request.method in (method, "HEAD" if method == "GET" else method):
            is_media = name == "storage.get" and request.query.get("alt") == "media"
            groups = {key: unquote(value) for key, value in found.groupdict().items()}
            return ("storage.download" if is_media else name), groups
    return None


def _value(request: Request, key: str) -> str | None:
    header = re.sub("([A-Z])", lambda found: f"-{found[1].lower()}", key)
    return request.query.get(key) or request.headers.get(f"x-goog-{header}")


def _check(request: Request) -> Check:
    """Return the preconditions of the request as one function."""
    holds = [_holds(field, is_equal, _value(request, key)) for key, (field, is_equal) in _CONDITIONS.items()]

    def check(old: Object | None) -> None:
        for one in holds:
            one(old)

    return check


def _holds(field: str, is_equal: bool, wanted: str | None) -> Check:
    if wanted is not None and not wanted.isdigit():
        raise invalid(f"Invalid value for a {field}: '{wanted}'")

    def check(old: Object | None) -> None:
        real = "0" if old is None else str(getattr(old, field))
        if wanted is not None and (real == wanted) != is_equal:
            message = "At least one of the pre-conditions you specified did not hold."
            raise GoogleError("FAILED_PRECONDITION", message, status=412)

    return check


def _bounds(text: str, size: int) -> tuple[int, int] | None:
    """Return the range's start and its exclusive end; None without a range, and for a range to ignore."""
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", text.strip())
    if found is None or not (found[1] or found[2]):
        return None
    if not found[1]:
        return max(0, size - int(found[2])), size
    if found[2] and int(found[2]) < int(found[1]):
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
