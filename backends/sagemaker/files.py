"""A job's files in S3: the code, named by its content, the container order, the output, the checkpoints."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cloudtrain.backends.sagemaker import api
from cloudtrain.backends.sagemaker.api import AwsAccess
from cloudtrain.entrypoints import job_files
from cloudtrain.launcher.backend import Bundle
from cloudtrain.launcher.errors import ConfigError, UsageError

__all__ = ["claim", "fetch", "fetch_all", "has_checkpoint", "owner", "put_bundle", "put_order", "read_order", "retract"]

_ABSENT = ("404", "NoSuchKey", "NotFound")


def put_bundle(access: AwsAccess, bundle: Bundle, uri: str, *, default_of: str | None) -> None:
    """Upload the archive unless S3 has a copy: the archive's name is its hash. Raises ConfigError, CredentialError.

    `default_of`: the account of a default bucket. The upload may have to create the bucket, and must check that the
    account owns the bucket, because anybody can guess its name.
    """
    bucket, key = _parts(uri)
    client = api.client(access, "s3")
    owner = {"ExpectedBucketOwner": default_of} if default_of else {}
    with api.answers(f"look into the bucket {bucket}"):
        try:
            found = client.head_object(Bucket=bucket, Key=key, **owner)
            if found["ContentLength"] == bundle.path.stat().st_size:
                return
        except Exception as error:
            _explain(client, access, bucket, error, may_make=default_of is not None)
            _require_same_region(client, access, bucket)
    with api.answers(f"upload the code to {uri}"), bundle.path.open("rb") as file:
        client.put_object(Bucket=bucket, Key=key, Body=file, **owner)


def claim(access: AwsAccess, uri: str, owner: str) -> None:
    """Claim the job's folder for this owner. Raises UsageError if another owner has the name.

    The first owner keeps the folder for all attempts; else two machines' jobs of one name would share checkpoints.
    """
    bucket, key = _parts(uri)
    client = api.client(access, "s3")
    with api.answers(f"write {uri}"):
        try:
            client.put_object(Bucket=bucket, Key=key, Body=owner.encode(), IfNoneMatch="*")
        except Exception as error:
            if api.code_of(error) not in ("PreconditionFailed", "412", "ConditionalRequestConflict"):
                raise
            if client.get_object(Bucket=bucket, Key=key)["Body"].read() != owner.encode():
                message = f"another machine, or another user, has a job of this name: {uri.rpartition('/')[0]}"
                raise UsageError(message, hint="choose another --name") from error


def owner(access: AwsAccess, uri: str) -> str | None:
    """Return the folder's owner, or None if no owner has claimed the folder."""
    bucket, key = _parts(uri)
    with api.answers(f"read {uri}"):
        try:
            found: bytes = api.client(access, "s3").get_object(Bucket=bucket, Key=key)["Body"].read()
        except Exception as error:
            if api.code_of(error) not in _ABSENT:
                raise
            return None
    return found.decode()


def put_order(access: AwsAccess, uri: str, order: dict[str, Any]) -> None:
    """Write the container order."""
    bucket, key = _parts(uri)
    with api.answers(f"write {uri}"):
        api.client(access, "s3").put_object(Bucket=bucket, Key=key, Body=json.dumps(order, sort_keys=True).encode())


def read_order(access: AwsAccess, uri: str) -> dict[str, Any]:
    """Return the container order, or {} if the order was retracted."""
    found: dict[str, Any] = json.loads(owner(access, uri) or "{}")
    return found


def retract(access: AwsAccess, uri: str) -> None:
    """Remove the container order: a start still under way fails when it downloads the order."""
    bucket, key = _parts(uri)
    with api.answers(f"remove {uri}"):
        api.client(access, "s3").delete_object(Bucket=bucket, Key=key)


def has_checkpoint(access: AwsAccess, uri: str) -> bool:
    """Return whether the folder has a complete checkpoint, by the rule of entrypoints/job_files.py."""
    with api.answers(f"list {uri}"):
        return any(job_files.is_whole(name.partition("/")[0]) for name in _names(access, uri))


def fetch_all(access: AwsAccess, uri: str, folder: Path) -> list[Path]:
    """Copy the objects below the URI to the folder; return the files. Raises ConfigError if one cannot be written."""
    with api.answers(f"list {uri}"):
        names = [name for name in _names(access, uri) if all(part not in ("", ".", "..") for part in name.split("/"))]
    try:
        return [folder / name for name in names if fetch(access, f"{uri.rstrip('/')}/{name}", folder / name)]
    except OSError as error:
        raise ConfigError(f"cannot write there: {error.strerror}", where=str(folder)) from error


def _names(access: AwsAccess, uri: str) -> Iterator[str]:
    """Yield the names of the objects below the URI, over all pages."""
    bucket, prefix = _parts(uri.rstrip("/") + "/")
    pages = api.client(access, "s3").get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    yield from (item["Key"].removeprefix(prefix) for page in pages for item in page.get("Contents", ()))


def fetch(access: AwsAccess, uri: str, path: Path) -> bool:
    """Copy the object to the path; return False if S3 has no such object (403 for a role that may not list)."""
    bucket, key = _parts(uri)
    path.parent.mkdir(parents=True, exist_ok=True)
    with api.answers(f"download {uri}"):
        try:
            api.client(access, "s3").download_file(bucket, key, str(path))
        except Exception as error:
            if api.code_of(error) not in (*_ABSENT, "403"):
                raise
            return False
    return True


def _explain(client: Any, access: AwsAccess, bucket: str, error: Exception, *, may_make: bool) -> None:
    """Raise the cause of a failed HEAD, whose answer has no text, unless only the object is missing.

    A missing default bucket is created, as AWS's own tools do.
    """
    code = api.code_of(error)
    if code in ("301", "PermanentRedirect", "AuthorizationHeaderMalformed"):
        message, hint = f"the bucket {bucket} is in another region than {access.region}", "fix sagemaker.bucket"
        raise ConfigError(message, where="sagemaker.bucket", hint=hint) from error
    if not code.isdigit() and code not in _ABSENT:
        raise error
    try:
        client.list_objects_v2(Bucket=bucket, MaxKeys=1)
        return
    except Exception as exc:
        if api.code_of(exc) in ("AccessDenied", "403"):  # a role may allow writing and forbid listing
            return
        if api.code_of(exc) not in (*_ABSENT, "NoSuchBucket"):
            raise
        if not may_make:
            hint = f"aws s3 mb s3://{bucket} --region {access.region}, or fix sagemaker.bucket"
            raise ConfigError(f"there is no bucket {bucket}", where="sagemaker.bucket", hint=hint) from error
    place = {} if access.region == "us-east-1" else {"LocationConstraint": access.region}
    client.create_bucket(Bucket=bucket, **({"CreateBucketConfiguration": place} if place else {}))


def _require_same_region(client: Any, access: AwsAccess, bucket: str) -> None:
    """Raise ConfigError for a bucket that SageMaker would refuse; boto3 itself works with any region."""
    region = None
    with contextlib.suppress(Exception):  # without the permission, SageMaker reports the fault later
        region = client.head_bucket(Bucket=bucket).get("BucketRegion")
    if region not in (None, access.region):
        message = f"the bucket {bucket} is in {region}, the job in {access.region}"
        raise ConfigError(message, where="sagemaker.bucket", hint="name one in the job's region")


def _parts(uri: str) -> tuple[str, str]:
    split = urlsplit(uri)
    return split.netloc, uri[len(f"s3://{split.netloc}/") :]
