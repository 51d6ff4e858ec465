"""A bucket as the mirror of checkpoints, against a real server on loopback, with failures of the server."""

from __future__ import annotations

import builtins
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import pytest

from cloudtrain.entrypoints.stores.store import Store, StoreError, open_store

DENIED, BROKEN = ("403 Forbidden", "AccessDenied"), ("500 Internal Server Error", "InternalError")
MIB = 1 << 20


def opened(uri: str) -> Store:
    """Return the store as the trainer opens it."""
    return open_store(uri)


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


def calls(place: Store, path: Path) -> dict[str, Callable[[], object]]:
    """Return every call of a store."""
    return {
        "put": lambda: place.put(path, "name"),
        "get": lambda: place.get("name", path.with_name("got")),
        "names": lambda: place.names("n"),
        "delete": lambda: place.delete("name"),
    }


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


def test_objects_carry_checksums(bucket: Any, tmp_path: Path) -> None:
    """S3 gets a CRC32 of each object, and compares the CRC32 before S3 keeps the object."""
    (tmp_path / "file").write_bytes(b"123456789")
    opened(bucket.uri("x")).put(tmp_path / "file", "name")
    about = boto3.client("s3").head_object(Bucket=bucket.name, Key="x/name", ChecksumMode="ENABLED")
    assert about["ChecksumCRC32"] == "y/Q5Jg=="
