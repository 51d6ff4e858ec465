"""A bucket as the mirror of checkpoints, against a real server on loopback, with failures of the server."""

from __future__ import annotations

import builtins
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
import torch.distributed as dist

from cloudtrain.entrypoints.checkpoints import folder as folders
from cloudtrain.entrypoints.checkpoints import loader, published
from cloudtrain.entrypoints.checkpoints.saver import Saver, Snapshot
from cloudtrain.entrypoints.checkpoints.uploader import Uploader
from cloudtrain.entrypoints.stores import s3
from cloudtrain.entrypoints.stores.store import Store, StoreError, open_store

DENIED, BROKEN = ("403 Forbidden", "AccessDenied"), ("500 Internal Server Error", "InternalError")
MIB = 1 << 20


@pytest.fixture
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set three attempts, and make parts as small as S3 allows."""
    for name, value in {"_ATTEMPTS": 3, "_PART_BYTES": 5 * MIB}.items():
        monkeypatch.setattr(s3, name, value)


@pytest.fixture
def hasty(brisk: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use `brisk`, and time out after 0.5 s, too little for a busy machine: only for servers that never answer."""
    for name in ("_CONNECT_S", "_READ_S"):
        monkeypatch.setattr(s3, name, 0.5)


@pytest.fixture
def alone() -> Iterator[None]:
    """Be the only rank of a process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def opened(uri: str) -> Store:
    """Return the store as the trainer opens it."""
    return open_store(uri)


def every(count: int, fate: Any, method: str = "") -> Callable[[str, str], Any]:
    """Return a fate for every count-th request, beginning with the first."""
    seen = iter(range(1_000_000))
    return lambda asked, path: fate if asked.startswith(method) and next(seen) % count == 0 else None


@pytest.mark.parametrize("prefix", ["", "a", "a/b/", "/a", "100%25 of a+b #1 ?x=é/ü&"])
def test_object_round_trips(prefix: str, bucket: Any, tmp_path: Path) -> None:
    """With any prefix, special characters included, put, names, get and remove work on the same bytes and names."""
    place = opened(bucket.uri() + f"/{prefix}")
    (tmp_path / "file").write_bytes(b"some bytes")
    for name in ("step-00000001/shard-0", "step-00000001/manifest.json", "latest.json"):
        place.put(tmp_path / "file", name)
    assert place.names("step-") == ["step-00000001/manifest.json", "step-00000001/shard-0"]
    place.get("step-00000001/shard-0", tmp_path / "new" / "folder" / "file")
    assert (tmp_path / "new/folder/file").read_bytes() == b"some bytes"
    place.delete("latest.json")
    place.delete("latest.json")
    assert place.names("l") == []
    with pytest.raises(FileNotFoundError, match=r"has no latest\.json"):
        place.get("latest.json", tmp_path / "latest")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "new"]


def test_names_do_not_mix_jobs_in_a_bucket(bucket: Any, tmp_path: Path) -> None:
    """`names` lists neither objects of a job whose name has the same beginning, nor a folder made by hand."""
    (tmp_path / "file").touch()
    for job in ("digits", "digits-2", "digits/below"):
        opened(bucket.uri(job)).put(tmp_path / "file", f"{job[-1]}-file")
    boto3.client("s3").put_object(Bucket=bucket.name, Key="digits/empty/")
    assert opened(bucket.uri("digits")).names("") == ["below/w-file", "s-file"]
    assert opened(bucket.uri("digits-2/")).names("") == ["2-file"]


def test_names_go_over_all_pages(bucket: Any, tmp_path: Path) -> None:
    """S3 returns a thousand names per page, and `names` reads all pages."""
    place = opened(bucket.uri("many"))
    names = [f"step-{number:08d}/shard" for number in range(1005)]
    client = boto3.client("s3")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: client.put_object(Bucket=bucket.name, Key=f"many/{name}"), names))
    assert place.names("step-") == names
    assert place.names("step-00001") == names[1000:]
    assert sum(method == "GET" for method, _ in bucket.asked) == 3


def test_large_file_goes_in_parts(brisk: None, bucket: Any, tmp_path: Path) -> None:
    """A file larger than a part is uploaded and read back in parts, whole."""
    data = random.Random(0).randbytes(11 * MIB + 7)
    (tmp_path / "file").write_bytes(data)
    place = opened(bucket.uri("x"))
    place.put(tmp_path / "file", "shard")
    about = boto3.client("s3").head_object(Bucket=bucket.name, Key="x/shard")
    assert (about["ETag"][-3:], about["ContentLength"]) == ('-3"', len(data))
    place.get("shard", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data


@pytest.mark.parametrize("fate", ["drop", "half", BROKEN], ids=str)
def test_failing_server_is_retried(fate: Any, brisk: None, bucket: Any, tmp_path: Path) -> None:
    """With one request in four closed, cut or refused by the server, all files arrive whole."""
    data = random.Random(1).randbytes(11 * MIB)
    (tmp_path / "large").write_bytes(data)
    (tmp_path / "small").write_bytes(data[:1000])
    place = opened(bucket.uri("x"))
    bucket.fate = every(4, fate, "GET" if fate == "half" else "")
    place.put(tmp_path / "large", "large")
    place.put(tmp_path / "small", "small")
    assert place.names("") == ["large", "small"]
    for name in ("large", "small"):
        place.get(name, tmp_path / "back" / name)
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == ["large", "small"]
    place.delete("small")
    assert place.names("") == ["large"]


def test_failed_upload_leaves_nothing(brisk: None, bucket: Any, tmp_path: Path) -> None:
    """A part that always fails raises an error, and leaves neither an object nor parts that would cost money."""
    (tmp_path / "file").write_bytes(bytes(11 * MIB))
    place = opened(bucket.uri("x"))
    bucket.fate = lambda method, path: BROKEN if method == "PUT" else None
    with pytest.raises(OSError, match="InternalError"):
        place.put(tmp_path / "file", "shard")
    assert place.names("") == []
    assert "Uploads" not in boto3.client("s3").list_multipart_uploads(Bucket=bucket.name)


def test_failed_download_leaves_nothing(brisk: None, bucket: Any, tmp_path: Path) -> None:
    """If every body breaks off, the download raises an error and leaves neither the file nor a partial file."""
    place = opened(bucket.uri("x"))
    (tmp_path / "file").write_bytes(bytes(10_000))
    place.put(tmp_path / "file", "shard")
    bucket.fate = lambda method, path: "half" if method == "GET" else None
    with pytest.raises(OSError, match="s3://"):
        place.get("shard", tmp_path / "back" / "file")
    assert list((tmp_path / "back").iterdir()) == []


def calls(place: Store, path: Path) -> dict[str, Callable[[], object]]:
    """Return every call of a store."""
    return {
        "put": lambda: place.put(path, "name"),
        "get": lambda: place.get("name", path.with_name("got")),
        "names": lambda: place.names("n"),
        "delete": lambda: place.delete("name"),
    }


@pytest.mark.parametrize("call", ["put", "get", "names", "delete"])
def test_hung_server_is_given_up(call: str, hasty: None, bucket: Any, tmp_path: Path) -> None:
    """A server that accepts the request but never answers costs the time of the attempts and raises an error."""
    (tmp_path / "file").write_bytes(b"x" * 100)
    bucket.fate = lambda method, path: "hang"
    begin_s = time.monotonic()
    with pytest.raises(OSError, match=rf"{bucket.uri('x')} does not answer \(Read timeout on endpoint"):
        calls(opened(bucket.uri("x")), tmp_path / "file")[call]()
    assert 1.4 < time.monotonic() - begin_s < 20
    assert len(bucket.asked) >= 3


def test_server_that_does_not_read_is_given_up(
    hasty: None, bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that accepts a connection but reads no bytes cannot hold up an upload, even while the client sends."""
    (tmp_path / "file").write_bytes(bytes(11 * MIB))
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(s3, "_PART_BYTES", 64 * MIB)
        with pytest.raises(OSError, match="does not answer"):
            opened(bucket.uri("x")).put(tmp_path / "file", "shard")


def test_store_recovers_after_a_long_outage(hasty: None, bucket: Any, tmp_path: Path) -> None:
    """Failures use up botocore's quota of retries: the store starts with a new quota, and still retries."""
    place = opened(bucket.uri("x"))
    bucket.fate = lambda method, path: BROKEN
    for _ in range(20):
        with pytest.raises(OSError, match="InternalError"):
            place.names("")
    bucket.fate = every(3, "drop")
    assert [place.names("") for _ in range(6)] == [[]] * 6


@pytest.mark.parametrize("call", ["put", "get", "names", "delete"])
def test_missing_bucket_is_reported(call: str, bucket: Any, tmp_path: Path) -> None:
    """One sentence with the bucket's name; a missing bucket is not reported as a missing object."""
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="there is no bucket no-such-bucket; make it, or name another one") as caught:
        calls(opened("s3://no-such-bucket/x"), tmp_path / "file")[call]()
    assert not isinstance(caught.value, FileNotFoundError)


@pytest.mark.parametrize("call", ["put", "get", "names", "delete"])
def test_denied_access_names_the_missing_rights(call: str, bucket: Any, tmp_path: Path) -> None:
    """The message names the rights for the credentials; a denied get is not reported as a missing object."""
    (tmp_path / "file").touch()
    bucket.fate = lambda method, path: DENIED
    with pytest.raises(PermissionError, match=r"no access to .*; the credentials need s3:ListBucket .*AccessDenied"):
        calls(opened(bucket.uri("x")), tmp_path / "file")[call]()


def test_unclear_404_does_not_mean_missing(brisk: None, bucket: Any, tmp_path: Path) -> None:
    """A 404 to a HEAD may mean the bucket: unless S3 gives the code, no object is reported as missing."""
    bucket.fate = lambda method, path: ("404 Not Found", "") if method == "HEAD" else "drop"
    with pytest.raises(OSError, match="does not answer"):
        opened(bucket.uri("x")).get("latest.json", tmp_path / "latest")


@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "ExpiredToken", "SignatureDoesNotMatch"])
@pytest.mark.parametrize("call", ["put", "get"])
def test_bad_credentials_are_reported(call: str, code: str, bucket: Any, tmp_path: Path) -> None:
    """Rejected credentials differ from missing rights, even for a HEAD's bare 403."""
    (tmp_path / "file").touch()
    bucket.fate = lambda method, path: ("403 Forbidden", code)
    with pytest.raises(PermissionError, match=rf"S3 rejects these AWS credentials for .*\({code}: by the test"):
        calls(opened(bucket.uri("x")), tmp_path / "file")[call]()


def test_missing_credentials_are_reported_and_may_come_later(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without credentials the error gives advice; a role added to the machine later serves the next call."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    place = opened(bucket.uri("x"))
    with pytest.raises(PermissionError, match=r"there are no AWS credentials for s3://.*give the machine a role, or"):
        place.names("")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIATEST")
    assert place.names("") == []


def test_missing_profile_is_reported(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of boto3 about its own settings becomes an error of the store."""
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(OSError, match=r"nobody.* could not be found"):
        opened(bucket.uri("x")).names("")


@pytest.mark.parametrize("uri", ["s3://", "s3:///prefix", "s3:bucket/x", "s3://a b/x", "S3://@/x"])
def test_uri_without_a_bucket_is_refused(uri: str) -> None:
    """An error comes at once and shows the right form."""
    with pytest.raises(StoreError, match="names no bucket; write it as in s3://BUCKET/PREFIX"):
        opened(uri)


def test_missing_boto3_is_reported_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names both ways to install boto3; a broken boto3 is not hidden."""
    monkeypatch.setitem(sys.modules, "boto3", None)  # import raises ModuleNotFoundError
    with pytest.raises(StoreError, match=r"`pip install boto3` on the machines of the job, or add it to the image"):
        opened("s3://bucket/x")
    importing = builtins.__import__

    def broken(name: str, *args: Any) -> Any:
        if name == "boto3":
            raise ModuleNotFoundError("No module named 'jmespath'", name="jmespath")
        return importing(name, *args)

    monkeypatch.setattr(builtins, "__import__", broken)
    with pytest.raises(ModuleNotFoundError, match="jmespath"):
        opened("s3://bucket/x")


def save(home: Path, uploads: Uploader, *steps: int) -> None:
    """Save and upload one small checkpoint a step."""
    saver = Saver(home, torch.device("cpu"), 9, uploads)
    for step in steps:
        saver.begin(Snapshot(step, {"model.w": torch.arange(10.0) + step}, {}, {}, {"step": step, "job": "j"}))
        saver.wait()
        uploads.finish()


def test_bucket_keeps_the_right_number_of_checkpoints(alone: None, bucket: Any, tmp_path: Path) -> None:
    """Retention works in the bucket and spares other jobs; a new machine fetches the newest checkpoint, intact."""
    place = opened(bucket.uri("a"))
    save(tmp_path / "other", Uploader(opened(bucket.uri("ab")), 3), 1)
    uploads = Uploader(place, 2)
    save(tmp_path / "first", uploads, 10, 20, 30, 40)
    assert [(sent.step, sent.fault) for sent in uploads.news()] == [(step, None) for step in (10, 20, 30, 40)]
    assert {name.partition("/")[0] for name in place.names("")} == {"latest.json", "step-00000030", "step-00000040"}
    assert published.latest(opened(bucket.uri("ab")), tmp_path) == 1
    fetched = published.fetch(place, tmp_path)
    assert fetched == tmp_path / "step-00000040"
    assert loader.check(fetched) is None
    assert folders.open_found(fetched).step == 40


def test_damage_in_the_bucket_is_found(alone: None, bucket: Any, tmp_path: Path) -> None:
    """If a byte changed in the bucket, the fetched checkpoint fails its check."""
    place = opened(bucket.uri("a"))
    save(tmp_path / "first", Uploader(place, 2), 10)
    (shard,) = (name for name in place.names("step-") if "/shard-" in name)
    client = boto3.client("s3")
    data = client.get_object(Bucket=bucket.name, Key=f"a/{shard}")["Body"].read()
    client.put_object(Bucket=bucket.name, Key=f"a/{shard}", Body=data[:-1] + bytes([data[-1] ^ 1]))
    fetched = published.fetch(place, tmp_path)
    assert fetched is not None
    assert "differs from the manifest" in str(loader.check(fetched))


def test_store_that_fails_publishes_nothing(alone: None, brisk: None, bucket: Any, tmp_path: Path) -> None:
    """After a denied write the error is in words and the earlier step stays published; the next is published."""
    place = opened(bucket.uri("a"))
    uploads = Uploader(place, 2)
    save(tmp_path / "first", uploads, 10)
    bucket.fate = lambda method, path: DENIED if method == "PUT" and path.endswith("manifest.json") else None
    save(tmp_path / "first", uploads, 20)
    bucket.fate = lambda method, path: None
    assert published.latest(place, tmp_path) == 10
    save(tmp_path / "first", uploads, 30)
    assert [(sent.step, sent.fault is None) for sent in uploads.news()] == [
        (10, True),
        (20, False),
        (20, False),
        (30, True),
    ]
    assert published.latest(place, tmp_path) == 30


def test_objects_carry_checksums(bucket: Any, tmp_path: Path) -> None:
    """S3 gets a CRC32 of each object, and compares the CRC32 before S3 keeps the object."""
    (tmp_path / "file").write_bytes(b"123456789")
    opened(bucket.uri("x")).put(tmp_path / "file", "name")
    about = boto3.client("s3").head_object(Bucket=bucket.name, Key="x/name", ChecksumMode="ENABLED")
    assert about["ChecksumCRC32"] == "y/Q5Jg=="
