"""Cloud Storage of Google's stand-in: the unmodified client, preconditions, ranges, broken uploads, lists."""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import requests

from doubles.google.loopback import served
from doubles.google.names import BUCKET, PROJECT
from doubles.google.objects import Contents
from doubles.google.storage import FileAnswer, Storage, StorageSettings
from doubles.google.uploads import CHUNK_BYTES
from doubles.wire import Answer, Request

if TYPE_CHECKING:
    from google.cloud.storage import Bucket

OBJECTS = f"/storage/v1/b/{BUCKET}/o"
UPLOADS = f"/upload{OBJECTS}"
# The client keeps connections open, and does not close them at the end of its life.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


@dataclass
class Served:
    """A service at an address, and its calls."""

    storage: Storage
    url: str = ""
    settings: StorageSettings = field(default_factory=StorageSettings)
    calls: list[tuple[str | None, int]] = field(default_factory=list)

    def call(self, method: str, path: str, data: bytes | str | None = None, **more: Any) -> requests.Response:
        """Return the answer to a request by hand."""
        return requests.request(method, self.url + path, data=data, timeout=30, **more)

    def put(self, name: str, data: bytes | str, **query: str) -> requests.Response:
        """Upload an object by hand, in one request."""
        return self.call("POST", UPLOADS, data, params={"uploadType": "media", "name": name, **query})

    def respond(self, request: Request) -> Answer:
        """Answer a request and record the call."""
        answer = self.storage.respond(request)
        self.calls.append((self.storage.operation(request), answer.status))
        return answer


@pytest.fixture
def gcs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """Return the service."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    found = Served(Storage(tmp_path / "state", lambda: found.settings))
    with served(found.respond) as url:
        found.url = url
        yield found


@pytest.fixture
def bucket(gcs: Served) -> Iterator[Bucket]:
    """Return google-cloud-storage's bucket."""
    from google.auth.credentials import AnonymousCredentials
    from google.cloud.storage import Client

    options = {"api_endpoint": gcs.url}
    client = Client(project=PROJECT, credentials=AnonymousCredentials(), client_options=options)
    yield client.bucket(BUCKET)
    client.close()


def test_client_writes_reads_lists_and_removes(gcs: Served, bucket: Bucket, tmp_path: Path) -> None:
    """Names may need quoting; checksums are verified for upload and download."""
    (tmp_path / "file").write_bytes(b"0123456789")
    blob = bucket.blob("a b/ü+%.bin")
    blob.metadata = {"k": "v"}
    blob.upload_from_filename(str(tmp_path / "file"), checksum="crc32c")
    bucket.blob(blob.name).download_to_filename(str(tmp_path / "copy"), checksum="md5")
    assert (tmp_path / "copy").read_bytes() == b"0123456789"
    found = bucket.get_blob(blob.name)
    assert (found.metadata, found.size, found.metageneration) == ({"k": "v"}, 10, 1)
    assert found.md5_hash == base64.b64encode(hashlib.md5(b"0123456789").digest()).decode()
    assert bucket.blob(blob.name).download_as_bytes(start=2, end=3) == b"23"
    assert [one.name for one in bucket.list_blobs()] == [blob.name] == gcs.storage.names(BUCKET)
    found.delete()
    assert not found.exists()


def test_client_detects_a_corrupt_body(gcs: Served, bucket: Bucket) -> None:
    """The client compares the body with the header's checksums."""
    from google.cloud.storage.exceptions import DataCorruption

    gcs.storage.put(BUCKET, "a", b"0123456789")
    stored = gcs.storage.objects.find(BUCKET, "a")
    stored.file.write_bytes(b"012345678X")
    with pytest.raises(DataCorruption):
        bucket.blob("a").download_as_bytes(checksum="crc32c")


def test_writer_with_failed_precondition_is_refused(bucket: Bucket) -> None:
    """A writer with a precondition on absence or on an old generation is refused."""
    from google.api_core.exceptions import PreconditionFailed

    first = bucket.blob("a")
    first.upload_from_string(b"1", if_generation_match=0)
    with pytest.raises(PreconditionFailed):
        bucket.blob("a").upload_from_string(b"2", if_generation_match=0)
    bucket.blob("a").upload_from_string(b"3", if_generation_match=first.generation)
    for change in (
        lambda: bucket.blob("a").upload_from_string(b"4", if_generation_match=first.generation),
        lambda: bucket.blob("a").delete(if_generation_match=first.generation),
        lambda: bucket.blob("a").download_as_bytes(if_generation_match=first.generation),
    ):
        with pytest.raises(PreconditionFailed):
            change()
    assert bucket.blob("a").download_as_bytes() == b"3"


def test_one_of_many_writers_wins(gcs: Served) -> None:
    """Exactly one writer succeeds, in any order of arrival."""
    statuses: list[int] = []
    start = threading.Barrier(12)

    def write(number: int) -> None:
        start.wait()
        statuses.append(gcs.put("a", str(number), ifGenerationMatch="0").status_code)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [200] + [412] * 11


def test_failed_precondition_has_googles_error(gcs: Served) -> None:
    """A failed precondition is 412 with conditionNotMet; a GET of the client's current copy is 304."""
    generation = gcs.put("a", "1").json()["generation"]
    refused = gcs.put("a", "2", ifGenerationMatch="0")
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["errors"][0]["reason"]) == (412, 412, "conditionNotMet")
    assert gcs.call("GET", f"{OBJECTS}/a?ifGenerationNotMatch={generation}").status_code == 304
    assert gcs.call("GET", f"{OBJECTS}/a?ifMetagenerationMatch=2").status_code == 412
    assert gcs.call("GET", f"{OBJECTS}/a?ifMetagenerationNotMatch=2").status_code == 200
    header = {"x-goog-if-generation-match": "0"}
    assert gcs.call("POST", f"{UPLOADS}?uploadType=media&name=a", "3", headers=header).status_code == 412
    assert gcs.put("b", "1", ifGenerationMatch=generation).status_code == 412
    assert gcs.storage.names(BUCKET) == ["a"]


@pytest.mark.parametrize(
    ("asked", "status", "body", "told"),
    [
        ("bytes=2-3", 206, b"23", "bytes 2-3/10"),
        ("bytes=8-", 206, b"89", "bytes 8-9/10"),
        ("bytes=8-100", 206, b"89", "bytes 8-9/10"),
        ("bytes=-3", 206, b"789", "bytes 7-9/10"),
        ("bytes=3-2", 200, b"0123456789", None),
        ("lines=1-2", 200, b"0123456789", None),
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
    assert status == 416 or found.headers["x-goog-hash"].endswith(f"md5={md5}")


def test_old_generation_is_gone(gcs: Served) -> None:
    """A bucket without versions keeps only the newest generation."""
    generation = gcs.put("a", "1").json()["generation"]
    gcs.put("a", "2")
    assert gcs.call("GET", f"{OBJECTS}/a?generation={generation}").status_code == 404
    assert gcs.call("DELETE", f"{OBJECTS}/a?generation={generation}").status_code == 404
    assert gcs.storage.read(BUCKET, "a") == b"2"


def test_big_file_is_sent_in_chunks(gcs: Served, bucket: Bucket, tmp_path: Path) -> None:
    """Above 8 MiB the client uses a resumable upload; preconditions hold for it, too."""
    from google.api_core.exceptions import PreconditionFailed

    data = bytes(range(256)) * 4096 * 9
    (tmp_path / "file").write_bytes(data)
    bucket.blob("a", chunk_size=1 << 21).upload_from_filename(str(tmp_path / "file"), if_generation_match=0)
    assert [status for name, status in gcs.calls if name == "storage.chunk"] == [308, 308, 308, 308, 200]
    bucket.blob("a").download_to_filename(str(tmp_path / "copy"))
    assert (tmp_path / "copy").read_bytes() == data
    with pytest.raises(PreconditionFailed):
        bucket.blob("a").upload_from_filename(str(tmp_path / "file"), if_generation_match=0)


def test_client_resumes_a_broken_upload(gcs: Served, bucket: Bucket, tmp_path: Path) -> None:
    """The client continues from the bytes kept: it repeats the chunk, and the service skips known bytes."""
    data = bytes(range(256)) * 4096 * 9
    (tmp_path / "file").write_bytes(data)
    gcs.storage.break_next_chunk(300_000)
    bucket.blob("a", chunk_size=1 << 20).upload_from_filename(str(tmp_path / "file"))
    assert [status for name, status in gcs.calls if name == "storage.chunk"][:2] == [503, 308]
    assert gcs.storage.read(BUCKET, "a") == data


def begin(gcs: Served, name: str = "a", **query: str) -> str:
    """Return the address of a new upload, without the host."""
    started = gcs.call("POST", UPLOADS, "{}", params={"uploadType": "resumable", "name": name, **query})
    assert started.status_code == 200
    return started.headers["location"].removeprefix(gcs.url)


def send(gcs: Served, place: str, data: bytes, content_range: str) -> requests.Response:
    """Send bytes of an upload."""
    return gcs.call("PUT", place, data, headers={"Content-Range": content_range})


def test_upload_reports_its_progress(gcs: Served) -> None:
    """Status queries answer 308 with a Range, absent at first; at the end the answer is the object."""
    place, data = begin(gcs), bytes(CHUNK_BYTES + 5)
    assert [send(gcs, place, b"", "bytes */*").headers.get("range")] == [None]
    gcs.storage.break_next_chunk(CHUNK_BYTES + 4)
    assert send(gcs, place, data, f"bytes 0-{CHUNK_BYTES + 4}/{CHUNK_BYTES + 5}").status_code == 503
    asked = send(gcs, place, b"", f"bytes */{CHUNK_BYTES + 5}")
    assert (asked.status_code, asked.headers["range"]) == (308, f"bytes=0-{CHUNK_BYTES - 1}")
    done = send(gcs, place, data[CHUNK_BYTES:], f"bytes {CHUNK_BYTES}-{CHUNK_BYTES + 4}/{CHUNK_BYTES + 5}")
    assert (done.status_code, done.json()["size"]) == (200, str(CHUNK_BYTES + 5))
    assert send(gcs, place, b"", "bytes */*").json()["generation"] == done.json()["generation"]


def test_upload_refuses_wrong_ranges(gcs: Served) -> None:
    """A gap, an odd chunk size before the last chunk, and an unknown session are errors."""
    place = begin(gcs)
    assert send(gcs, place, bytes(1000), "bytes 0-999/*").status_code == 400
    assert send(gcs, place, bytes(CHUNK_BYTES), f"bytes {CHUNK_BYTES}-{2 * CHUNK_BYTES - 1}/*").status_code == 400
    assert send(gcs, place, b"12", "bytes 0-4/5").status_code == 400
    assert gcs.call("DELETE", place).status_code == 499
    assert send(gcs, place, b"12", "bytes 0-1/2").status_code == 404
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


def test_list_has_pages_and_folders(gcs: Served, bucket: Bucket) -> None:
    """Lists have a prefix, a delimiter and a token; a page counts folders as objects."""
    for name in ("a/1", "a/2", "b/c/3", "b/4", "d", "e/", "e/5"):
        gcs.storage.put(BUCKET, name, b"x")
    found = bucket.list_blobs(delimiter="/", page_size=2)
    assert [one.name for one in found] == ["d"]
    assert found.prefixes == {"a/", "b/", "e/"}
    query, pages = {"delimiter": "/", "maxResults": "2"}, []
    while query.get("pageToken") != "":
        page = gcs.call("GET", OBJECTS, params=query).json()
        pages.append((page.get("prefixes", []), [one["name"] for one in page.get("items", [])]))
        query["pageToken"] = page.get("nextPageToken", "")
    assert pages == [(["a/", "b/"], []), (["e/"], ["d"])]
    assert [one.name for one in bucket.list_blobs(prefix="b/")] == ["b/4", "b/c/3"]
    assert [one.name for one in bucket.list_blobs(start_offset="b/c", end_offset="e/5")] == ["b/c/3", "d", "e/"]
    whole = bucket.list_blobs(delimiter="/", include_trailing_delimiter=True)
    assert [one.name for one in whole] == ["d", "e/"]
    gcs.calls.clear()
    gcs.settings = replace(gcs.settings, storage_page_size=3)
    assert len(list(bucket.list_blobs())) == 7
    assert gcs.calls == [("storage.list", 200)] * 3
    assert gcs.call("GET", f"{OBJECTS}?matchGlob=*.pt").status_code == 400


def test_missing_object_and_bucket_are_not_found(gcs: Served, bucket: Bucket) -> None:
    """The error is JSON, except for a download, whose error is text."""
    from google.api_core.exceptions import NotFound

    for method in ("GET", "DELETE"):
        found = gcs.call(method, f"{OBJECTS}/none")
        assert (found.status_code, found.json()["error"]["errors"][0]["reason"]) == (404, "notFound")
    media = gcs.call("GET", f"{OBJECTS}/none?alt=media")
    assert (media.status_code, media.text) == (404, f"No such object: {BUCKET}/none")
    with pytest.raises(NotFound, match="bucket does not exist"):
        bucket.client.get_bucket("none")
    assert gcs.call("POST", "/upload/storage/v1/b/none/o?uploadType=media&name=a", "1").status_code == 404
    assert gcs.call("GET", "/storage/v2/b").status_code == 404


def test_bucket_of_another_project_is_not_accessible(gcs: Served, bucket: Bucket) -> None:
    """A bucket has a location; a bucket of another project is not accessible."""
    from google.api_core.exceptions import Forbidden

    assert bucket.client.get_bucket(BUCKET).location == "US-CENTRAL1"
    gcs.storage.add_bucket("theirs", project="another")
    with pytest.raises(Forbidden):
        bucket.client.get_bucket("theirs")
    assert gcs.call("POST", "/upload/storage/v1/b/theirs/o?uploadType=media&name=a", "1").status_code == 403


def test_replacing_needs_the_right_to_delete(gcs: Served) -> None:
    """Replacing needs the right to delete, as with the role that only creates objects."""
    gcs.settings = replace(gcs.settings, denied=("storage.delete",))
    assert gcs.put("a", "1").status_code == 200
    refused = gcs.put("a", "2")
    assert (refused.status_code, "storage.objects.delete" in refused.json()["error"]["message"]) == (403, True)


def test_invalid_name_or_field_is_refused(gcs: Served) -> None:
    """Invalid names and unknown fields are errors."""
    for name in ("", "..", "a\nb", "x" * 1025):
        assert gcs.put(name, "1").status_code == 400
    bad = gcs.call("POST", f"{UPLOADS}?uploadType=resumable&name=a", '{"contentTyp": "x"}')
    assert (bad.status_code, "contentTyp" in bad.json()["error"]["message"]) == (400, True)


def test_body_is_read_during_sending(gcs: Served) -> None:
    """The body is read piece by piece from the old object; a cut body has half of the bytes."""
    gcs.storage.put(BUCKET, "a", bytes(5 << 20))
    request = Request("GET", f"{OBJECTS}/a?alt=media", "", f"{OBJECTS}/a", {"alt": "media"}, {}, b"")
    answer = gcs.storage.respond(request)
    gcs.storage.put(BUCKET, "a", b"new")
    assert isinstance(answer, FileAnswer)
    assert isinstance(answer.pieces, Contents)
    assert [len(piece) for piece in answer.pieces] == [1 << 20] * 5
    answer.cut()
    assert (answer.length, sum(len(piece) for piece in answer.pieces), answer.is_last) == (5 << 20, 5 << 19, True)


def test_removed_contents_leave_no_files(gcs: Served) -> None:
    """Replaced, removed, refused and cancelled contents leave no files."""
    gcs.put("a", "1")
    gcs.put("a", "2")
    gcs.put("a", "3", ifGenerationMatch="0")
    gcs.put("..", "4")
    gcs.call("DELETE", begin(gcs, "b"))
    stored = gcs.storage.objects.find(BUCKET, "a")
    assert list(stored.file.parent.iterdir()) == [stored.file]
    gcs.storage.clear()
    assert gcs.storage.names(BUCKET) == []
