"""A bucket as the mirror of checkpoints, against a real server on loopback, with failures of the server."""

import random
from pathlib import Path

import pytest

from cloudtrain.entrypoints.stores.store import open_store
from doubles.aws.handle import Aws

MIB = 1 << 20
PLACE = "s3://cloudtrain-tests"


def test_large_file_goes_in_parts(brisk: None, s3_store: Aws, tmp_path: Path) -> None:
    """A file larger than a part is uploaded in parts."""
    (tmp_path / "file").write_bytes(random.Random(0).randbytes(11 * MIB + 7))
    open_store(f"{PLACE}/x").put(tmp_path / "file", "shard")
    about = s3_store.client("s3").head_object(Bucket="cloudtrain-tests", Key="x/shard")
    assert (about["ETag"][-3:], about["ContentLength"]) == ('-3"', 11 * MIB + 7)


def test_unclear_404_does_not_mean_missing(brisk: None, s3_store: Aws, tmp_path: Path) -> None:
    """A 404 to a HEAD may mean the bucket: unless S3 gives the code, no object is reported as missing."""
    s3_store.fault("HeadObject", "error", status=404)
    s3_store.fault("*", "drop")
    with pytest.raises(OSError, match="does not answer"):
        open_store(f"{PLACE}/x").get("latest.json", tmp_path / "latest")


@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "ExpiredToken", "SignatureDoesNotMatch"])
def test_bad_credentials_are_reported(code: str, s3_store: Aws, tmp_path: Path) -> None:
    """Rejected credentials differ from missing rights, even for a HEAD's bare 403."""
    s3_store.fault("*", "error", status=403, code=code, message="by the test")
    store = open_store(f"{PLACE}/x")
    for call in (lambda: store.put(b"data", "name"), lambda: store.get("name", tmp_path / "got")):
        with pytest.raises(PermissionError, match=rf"S3 rejects these AWS credentials for .*\({code}: by the test"):
            call()


def test_missing_credentials_are_reported_and_may_come_later(s3_store: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without credentials the error gives advice; a role added to the machine later serves the next call."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    place = open_store(f"{PLACE}/x")
    with pytest.raises(PermissionError, match=r"there are no AWS credentials for s3://.*give the machine a role, or"):
        place.names("")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_store.environ["AWS_ACCESS_KEY_ID"])
    assert place.names("") == []


def test_missing_profile_is_reported(s3_store: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of boto3 about its own settings becomes an error of the store."""
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(OSError, match=r"nobody.* could not be found"):
        open_store(f"{PLACE}/x").names("")


def test_objects_carry_checksums(s3_store: Aws, tmp_path: Path) -> None:
    """S3 gets a CRC32 of each object, and compares the CRC32 before S3 keeps the object."""
    (tmp_path / "file").write_bytes(b"123456789")
    open_store(f"{PLACE}/x").put(tmp_path / "file", "name")
    about = s3_store.client("s3").head_object(Bucket="cloudtrain-tests", Key="x/name", ChecksumMode="ENABLED")
    assert about["ChecksumCRC32"] == "y/Q5Jg=="
