"""A job's files in S3: the code by its content, the job's own order, what has come of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cloudtrain.backends.sagemaker import aws
from cloudtrain.backends.sagemaker.aws import Access
from cloudtrain.entrypoints import places
from cloudtrain.launcher.bundle import Bundle
from cloudtrain.launcher.errors import ConfigError, UsageError

__all__ = ["claim", "fetch", "has_checkpoint", "names", "put_bundle", "put_order", "retract"]

_ABSENT = ("404", "NoSuchKey", "NotFound")


def put_bundle(access: Access, bundle: Bundle, uri: str, *, may_make_bucket: bool) -> None:
    """Upload the archive unless it is there: its name is its content's. Raises ConfigError, CredentialError."""
    bucket, key = _parts(uri)
    client = aws.client(access, "s3")
    with aws.answers(f"look into the bucket {bucket}"):
        try:
            found = client.head_object(Bucket=bucket, Key=key)
            if found["ContentLength"] == bundle.path.stat().st_size:
                return
        except Exception as error:
            code = aws.code_of(error)
            if code in ("301", "PermanentRedirect", "AuthorizationHeaderMalformed"):
                message, hint = f"the bucket {bucket} is in another region than {access.region}", "set sagemaker.bucket"
                raise ConfigError(message, where="sagemaker.bucket", hint=hint) from error
            if code not in (*_ABSENT, "403"):  # without leave to list, S3 says 403 for what is not there
                raise
            _require_bucket(client, access, bucket, may_make=may_make_bucket)
    with aws.answers(f"upload the code to {uri}"), bundle.path.open("rb") as file:
        client.put_object(Bucket=bucket, Key=key, Body=file)


def claim(access: Access, uri: str, owner: str) -> None:
    """Make the job's folder this owner's. Raises UsageError where another's job has the name.

    The first to write has it, for all attempts: two machines' jobs of one name would share their checkpoints.
    """
    bucket, key = _parts(uri)
    client = aws.client(access, "s3")
    with aws.answers(f"write {uri}"):
        try:
            client.put_object(Bucket=bucket, Key=key, Body=owner.encode(), IfNoneMatch="*")
        except Exception as error:
            if aws.code_of(error) not in ("PreconditionFailed", "412", "ConditionalRequestConflict"):
                raise
            if client.get_object(Bucket=bucket, Key=key)["Body"].read() != owner.encode():
                message = f"another machine, or another user, has a job of this name: {uri.rpartition('/')[0]}"
                raise UsageError(message, hint="choose another --name") from error


def put_order(access: Access, uri: str, order: dict[str, Any]) -> None:
    """Write what the containers are to do."""
    bucket, key = _parts(uri)
    with aws.answers(f"write {uri}"):
        aws.client(access, "s3").put_object(Bucket=bucket, Key=key, Body=json.dumps(order, sort_keys=True).encode())


def retract(access: Access, uri: str) -> None:
    """Remove the job's order: a request to start it that is still under way fails at its download."""
    bucket, key = _parts(uri)
    with aws.answers(f"remove {uri}"):
        aws.client(access, "s3").delete_object(Bucket=bucket, Key=key)


def names(access: Access, uri: str, most: int | None = None) -> list[str]:
    """Return the objects' names below the uri, `most` of them at most."""
    bucket, prefix = _parts(uri.rstrip("/") + "/")
    found: list[str] = []
    with aws.answers(f"list {uri}"):
        pages = aws.client(access, "s3").get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        for page in pages:
            found += [item["Key"].removeprefix(prefix) for item in page.get("Contents", ())]
            if most is not None and len(found) >= most:
                break
    return found


def has_checkpoint(access: Access, uri: str) -> bool:
    """Return whether there is something to go on from, as the node itself would say (entrypoints/places.py)."""
    return any(places.is_whole(name.partition("/")[0]) for name in names(access, uri))


def fetch(access: Access, uri: str, path: Path) -> bool:
    """Copy the object here; return False where there is none."""
    bucket, key = _parts(uri)
    path.parent.mkdir(parents=True, exist_ok=True)
    with aws.answers(f"download {uri}"):
        try:
            aws.client(access, "s3").download_file(bucket, key, str(path))
        except Exception as error:
            if aws.code_of(error) not in _ABSENT:
                raise
            return False
    return True


def _require_bucket(client: Any, access: Access, bucket: str, *, may_make: bool) -> None:
    """Make the bucket where it is the default one and not there yet, as AWS's own tools do; raise for another."""
    try:
        client.head_bucket(Bucket=bucket)
        return
    except Exception as error:
        if aws.code_of(error) not in (*_ABSENT, "NoSuchBucket"):
            raise
        if not may_make:
            hint = f"aws s3 mb s3://{bucket} --region {access.region}, or mend sagemaker.bucket"
            raise ConfigError(f"there is no bucket {bucket}", where="sagemaker.bucket", hint=hint) from error
    place = {} if access.region == "us-east-1" else {"LocationConstraint": access.region}
    client.create_bucket(Bucket=bucket, **({"CreateBucketConfiguration": place} if place else {}))


def _parts(uri: str) -> tuple[str, str]:
    split = urlsplit(uri)
    return split.netloc, uri[len(f"s3://{split.netloc}/") :]
