"""A bucket as the mirror of checkpoints, against a real server on loopback, with failures of the server."""

import random
from pathlib import Path
from typing import Any

import boto3
import pytest

from cloudtrain.entrypoints.stores.store import open_store

MIB = 1 << 20


def test_large_file_goes_in_parts(brisk: None, bucket: Any, tmp_path: Path) -> None:
    """A file larger than a part is uploaded in parts."""
    (tmp_path / "file").write_bytes(random.Random(0).randbytes(11 * MIB + 7))
    open_store(bucket.uri("x")).put(tmp_path / "file", "shard")
    about = boto3.client("s3").head_object(Bucket=bucket.name, Key="x/shard")
    assert (about["ETag"][-3:], about["ContentLength"]) == ('-3"', 11 * MIB + 7)


def test_unclear_404_does_not_mean_missing(brisk: None, bucket: Any, tmp_path: Path) -> None:
    """A 404 to a HEAD may mean the bucket: unless S3 gives the code, no object is reported as missing."""
    bucket.fate = lambda method, path: ("404 Not Found", "") if method == "HEAD" else "drop"
    with pytest.raises(OSError, match="does not answer"):
        open_store(bucket.uri("x")).get("latest.json", tmp_path / "latest")


@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "ExpiredToken", "SignatureDoesNotMatch"])
def test_bad_credentials_are_reported(code: str, bucket: Any, tmp_path: Path) -> None:
    """Rejected credentials differ from missing rights, even for a HEAD's bare 403."""
    bucket.fate = lambda method, path: ("403 Forbidden", code)
    store = open_store(bucket.uri("x"))
    for call in (lambda: store.put(b"data", "name"), lambda: store.get("name", tmp_path / "got")):
        with pytest.raises(PermissionError, match=rf"S3 rejects these AWS credentials for .*\({code}: by the test"):
            call()


def test_missing_credentials_are_reported_and_may_come_later(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without credentials the error gives advice; a role added to the machine later serves the next call."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    place = open_store(bucket.uri("x"))
    with pytest.raises(PermissionError, match=r"there are no AWS credentials for s3://.*give the machine a role, or"):
        place.names("")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIATEST")
    assert place.names("") == []


def test_missing_profile_is_reported(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of boto3 about its own settings becomes an error of the store."""
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(OSError, match=r"nobody.* could not be found"):
        open_store(bucket.uri("x")).names("")


def test_objects_carry_checksums(bucket: Any, tmp_path: Path) -> None:
    """S3 gets a CRC32 of each object, and compares the CRC32 before S3 keeps the object."""
    (tmp_path / "file").write_bytes(b"123456789")
    open_store(bucket.uri("x")).put(tmp_path / "file", "name")
    about = boto3.client("s3").head_object(Bucket=bucket.name, Key="x/name", ChecksumMode="ENABLED")
    assert about["ChecksumCRC32"] == "y/Q5Jg=="
