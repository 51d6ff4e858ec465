"""An S3 object with conditional writes, where a team keeps its ledger (launcher/money/conditional.py).

S3 compares an object's ETag with If-Match, and its absence with If-None-Match, before a write (PutObject; Amazon S3
User Guide, "Conditional requests"). Of two writes at once, one gets 409 or 412.
"""

from __future__ import annotations

import os
from typing import Any

from cloudtrain.backends.sagemaker import api
from cloudtrain.launcher.errors import ConfigError

__all__ = ["S3Cell", "open_cell"]

_ABSENT = ("NoSuchKey", "404")
_OTHERS = ("PreconditionFailed", "412", "ConditionalRequestConflict", "409", *_ABSENT)  # absent: removed meanwhile


def open_cell(uri: str) -> S3Cell:
    """Return the object at `s3://BUCKET/NAME`, opened with boto3's own credentials, region and addresses."""
    return S3Cell(uri)


class S3Cell:
    """The object, with the ETag as version. See cells.Cell."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._bucket, _, self._key = uri.removeprefix("s3://").partition("/")

    def read(self) -> tuple[bytes | None, str]:
        """Return the content and its version."""
        client = _client()
        with api.answers(f"read the ledger {self.uri}"):
            try:
                found = client.get_object(Bucket=self._bucket, Key=self._key)
                return found["Body"].read(), str(found["ETag"])
            except Exception as error:
                self._require_bucket(error)
                if api.code_of(error) not in _ABSENT:
                    raise
                return None, ""

    def write(self, data: bytes, version: str) -> bool:
        """Replace that version of the object by the data; return False if the version has changed."""
        client = _client()
        condition = {"IfMatch": version} if version else {"IfNoneMatch": "*"}
        with api.answers(f"write the ledger {self.uri}"):
            try:
                client.put_object(
                    Bucket=self._bucket, Key=self._key, Body=data, ContentType="application/json", **condition
                )
            except Exception as error:
                self._require_bucket(error)
                if api.code_of(error) not in _OTHERS:
                    raise
                return False
            return True

    def _require_bucket(self, error: Exception) -> None:
        if api.code_of(error) == "NoSuchBucket":
            hint = "make it, or name another place"
            raise ConfigError(f"there is no bucket {self._bucket} for the ledger", where=self.uri, hint=hint) from error


def _client() -> Any:
    """Return S3's client; the bucket may be in any region: boto3 follows S3's redirect."""
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    return api.client(api.AwsAccess(region, None), "s3")
