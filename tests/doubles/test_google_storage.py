"""Cloud Storage of Google's stand-in: preconditions, ranges, broken uploads, lists."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import requests

from doubles.google.loopback import served
from doubles.google.names import BUCKET
from doubles.google.storage import Storage, StorageSettings
from doubles.google.uploads import CHUNK_BYTES

OBJECTS = f"/storage/v1/b/{BUCKET}/o"
UPLOADS = f"/upload{OBJECTS}"


@dataclass
class Served:
    """A service at an address."""

    storage: Storage
    url: str = ""
    settings: StorageSettings = field(default_factory=StorageSettings)

    def call(self, method: str, path: str, data: bytes | str | None = None, **more: Any) -> requests.Response:
        """Return the answer to a request by hand."""
        return requests.request(method, self.url + path, data=data, timeout=30, **more)

    def put(self, name: str, data: bytes | str, **query: str) -> requests.Response:
        """Upload an object by hand, in one request."""
        return self.call("POST", UPLOADS, data, params={"uploadType": "media", "name": name, **query})


@pytest.fixture
def gcs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """Return the service."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    found = Served(Storage(tmp_path / "state", lambda: found.settings))
    with served(found.storage.respond) as url:
        found.url = url
        yield found


def test_failed_precondition_has_googles_error(gcs: Served) -> None:
    """A failed precondition is 412 with conditionNotMet; a precondition that the stand-in lacks is 400."""
    generation = gcs.put("a", "1").json()["generation"]
    refused = gcs.put("a", "2", ifGenerationMatch="0")
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["errors"][0]["reason"]) == (412, 412, "conditionNotMet")
    assert gcs.call("GET", f"{OBJECTS}/a?ifGenerationMatch=1").status_code == 412
    assert gcs.call("GET", f"{OBJECTS}/a?ifGenerationNotMatch={generation}").status_code == 400
    header = {"x-goog-if-generation-match": generation}
    assert gcs.call("POST", f"{UPLOADS}?uploadType=media&name=a", "3", headers=header).status_code == 400
    assert gcs.put("b", "1", ifGenerationMatch=generation).status_code == 412
    assert gcs.storage.names(BUCKET) == ["a"]


@pytest.mark.parametrize(
    ("asked", "status", "body", "told"),
    [
        ("bytes=2-3", 206, b"23", "bytes 2-3/10"),
        ("bytes=8-", 206, b"89", "bytes 8-9/10"),
        ("bytes=8-100", 206, b"89", "bytes 8-9/10"),
        ("bytes=-3", 400, None, None),
        ("bytes=3-2", 400, None, None),
        ("bytes=10-", 416, None, "bytes */10"),
    ],
)
def test_ranges_are_answered(gcs: Served, asked: str, status: int, body: bytes | None, told: str | None) -> None:
    """A range is answered with 206 and Content-Range, or 416 past the end; the checksums are the whole object's."""
    gcs.put("a", "0123456789")
    found = gcs.call("GET", f"{OBJECTS}/a?alt=media", headers={"Range": asked})
    assert (found.status_code, found.headers.get("content-range")) == (status, told)
    assert body is None or found.content == body
    md5 = base64.b64encode(hashlib.md5(b"0123456789").digest()).decode()
    assert status >= 400 or found.headers["x-goog-hash"].endswith(f"md5={md5}")


def begin(gcs: Served, name: str = "a", **query: str) -> str:
    """Return the address of a new upload, without the host."""
    started = gcs.call("POST", UPLOADS, "{}", params={"uploadType": "resumable", "name": name, **query})
    assert started.status_code == 200
    return started.headers["location"].removeprefix(gcs.url)


def send(gcs: Served, place: str, data: bytes, content_range: str) -> requests.Response:
    """Send bytes of an upload."""
    return gcs.call("PUT", place, data, headers={"Content-Range": content_range})


def test_upload_refuses_wrong_ranges(gcs: Served) -> None:
    """A gap, an odd chunk size before the last chunk, and an unknown session are errors."""
    place = begin(gcs)
    assert send(gcs, place, bytes(1000), "bytes 0-999/*").status_code == 400
    assert send(gcs, place, bytes(CHUNK_BYTES), f"bytes {CHUNK_BYTES}-{2 * CHUNK_BYTES - 1}/*").status_code == 400
    assert send(gcs, place, b"12", "bytes 0-4/5").status_code == 400
    assert send(gcs, f"{place}0", b"12", "bytes 0-1/2").status_code == 404
    assert gcs.storage.names(BUCKET) == []


def test_precondition_of_an_upload_is_checked_at_its_end(gcs: Served) -> None:
    """The first complete object wins, not the first upload to begin."""
    place = begin(gcs, ifGenerationMatch="0")
    gcs.put("a", "other")
    assert send(gcs, place, b"12", "bytes 0-1/2").status_code == 412
    assert gcs.storage.read(BUCKET, "a") == b"other"
    refused = gcs.call("POST", f"{UPLOADS}?uploadType=resumable&name=a&ifGenerationMatch=0", "{}")
    assert refused.status_code == 412


def test_wrong_checksum_is_refused(gcs: Served) -> None:
    """The checksum of a body and of a whole upload is verified."""
    header = {"x-goog-hash": "crc32c=AAAAAA=="}
    refused = gcs.call("POST", f"{UPLOADS}?uploadType=media&name=a", b"12", headers=header)
    assert (refused.status_code, "crc32c" in refused.json()["error"]["message"]) == (400, True)
    place = begin(gcs)
    assert gcs.call("PUT", place, b"12", headers={**header, "Content-Range": "bytes 0-1/2"}).status_code == 400
    assert gcs.storage.names(BUCKET) == []


def test_missing_object_and_bucket_are_not_found(gcs: Served) -> None:
    """The error is JSON, except for a download, whose error is text."""
    for method in ("GET", "DELETE"):
        found = gcs.call(method, f"{OBJECTS}/none")
        assert (found.status_code, found.json()["error"]["errors"][0]["reason"]) == (404, "notFound")
    media = gcs.call("GET", f"{OBJECTS}/none?alt=media")
    assert (media.status_code, media.text) == (404, f"No such object: {BUCKET}/none")
    assert "bucket does not exist" in gcs.call("GET", "/storage/v1/b/none").json()["error"]["message"]
    assert gcs.call("POST", "/upload/storage/v1/b/none/o?uploadType=media&name=a", "1").status_code == 404
    assert gcs.call("GET", "/storage/v2/b").status_code == 404


def test_replacing_needs_the_right_to_delete(gcs: Served) -> None:
    """Replacing needs the right to delete, as with the role that only creates objects."""
    gcs.settings = replace(gcs.settings, denied=("storage.delete",))
    assert gcs.put("a", "1").status_code == 200
    refused = gcs.put("a", "2")
    assert (refused.status_code, "storage.objects.delete" in refused.json()["error"]["message"]) == (403, True)


def test_invalid_name_or_field_is_refused(gcs: Served) -> None:
    """Invalid names, unknown fields and unknown parameters of a list are errors."""
    for name in ("", "..", "a\nb", "x" * 1025):
        assert gcs.put(name, "1").status_code == 400
    assert gcs.call("GET", f"{OBJECTS}?delimiter=/").status_code == 400
    bad = gcs.call("POST", f"{UPLOADS}?uploadType=resumable&name=a", '{"contentTyp": "x"}')
    assert (bad.status_code, "contentTyp" in bad.json()["error"]["message"]) == (400, True)
