"""A bucket as a store: `s3://BUCKET/PREFIX`, on Amazon S3 or a store with its protocol.

Only this module imports boto3, and only if a config names such a uri. Credentials come from boto3's own chain
(variables, profile, the machine's role), which renews a role's credentials; AWS_ENDPOINT_URL_S3 selects another store.
boto3 sends a CRC32 with every object and every part, and S3 compares the CRC32 before it keeps the bytes. boto3 also
compares objects that are read whole. For an object in parts only the manifest (loader.check) is compared, at a resume.
S3 compares an object's ETag with If-Match, and its absence with If-None-Match, before a write (Amazon S3 User Guide,
"Conditional requests"). Of two writes at once, one gets 409 or 412.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .store import ABSENT, Store, StoreError, in_bucket

# A server that accepts connections and never answers is given up after just over _ATTEMPTS * _READ_S (385 s measured).
# The pauses are drawn between 0 and 0.05 s, doubling to 20 s (botocore 1.44, `standard`): a server that refuses
# connections or answers with errors has 33 s on average to recover; after a request to slow down, 75 s: pauses begin at
# 1 s.
_ATTEMPTS = 12
_CONNECT_S, _READ_S = 10.0, 30.0
_BODY_ATTEMPTS = 3  # to read an object's bytes, after S3 has begun to send the bytes
# Parts are read from the file while they are sent, so memory does not grow with the file: measured with 512 MiB, 40 MiB
# more for a put and 58 MiB for a get (boto3's queue of pieces to write).
_PART_BYTES = 16 << 20
_THREADS = 4  # of one rank, and a machine may have eight ranks

_NO_BUCKET = "there is no bucket {bucket}; make it, or name another one"
_DENIED = (
    "no access to {uri}; the credentials need s3:ListBucket on the bucket, and s3:GetObject, s3:PutObject, "
    "s3:DeleteObject and s3:AbortMultipartUpload below it"
)
_REFUSED = "S3 rejects these AWS credentials for {uri}; are they complete, of this account, and not expired?"
_CLOCK = "S3 refuses {uri}, because this machine's clock is wrong"
_NOBODY = (
    "there are no AWS credentials for {uri}; give the machine a role, or the job AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY (`secrets` in the config)"
)
# Error code -> the sentence for the user. A number is the answer to a HEAD, which has no body with a code.
_SAID = {
    "NoSuchBucket": _NO_BUCKET,
    **dict.fromkeys(("AccessDenied", "AllAccessDisabled", "403"), _DENIED),
    **dict.fromkeys(("InvalidAccessKeyId", "SignatureDoesNotMatch", "AuthFailure"), _REFUSED),
    **dict.fromkeys(("ExpiredToken", "InvalidToken", "TokenRefreshRequired", "InvalidClientTokenId"), _REFUSED),
    "RequestTimeTooSkewed": _CLOCK,
}
_ABSENT = ("404", "NoSuchKey", "NotFound")
# Refusals of a conditional write; absent: the object was deleted meanwhile.
_OTHERS = ("PreconditionFailed", "412", "ConditionalRequestConflict", "409", *_ABSENT)
_BUSY = ("SlowDown", "Throttling", "RequestLimitExceeded", "RequestTimeout", "InternalError", "InternalFailure")


def open_at(uri: str, attempts: int | None = None) -> S3Store:
    """Return the store for `s3://BUCKET/PREFIX`; sends no request. Raises StoreError: see store.open_store."""
    try:
        import boto3  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "boto3":  # boto3 is installed, and broken
            raise
        raise StoreError(
            f"{uri!r} needs boto3, which is not installed here; `pip install boto3` "
            "on the machines of the job, or add it to the image"
        ) from error
    bucket, prefix = in_bucket(uri)
    return S3Store(bucket, prefix, lambda: _connect(attempts or _ATTEMPTS))


class S3Store(Store):
    """The objects of a bucket below `prefix/`; names in this class omit the prefix. See store.Store.

    `connect` returns boto3's client. The version is the object's ETag.
    """

    def __init__(self, bucket: str, prefix: str, connect: Callable[[], Any]) -> None:
        self._bucket, prefix = bucket, prefix.strip("/")
        self._above = f"{prefix}/" if prefix else ""
        self._uri = f"s3://{bucket}/{prefix}".rstrip("/")
        self._connect = connect
        self._client: Any = None

    def put(self, source: Path | bytes, name: str) -> None:
        """Upload the file or the bytes; a large file in parts, not visible until the last part has arrived."""
        with self._asking() as client:
            if isinstance(source, Path):
                client.upload_file(str(source), self._bucket, self._above + name, Config=_transfer())
            else:
                client.put_object(Bucket=self._bucket, Key=self._above + name, Body=source)

    def get(self, name: str, path: Path) -> None:
        """Download the object to a partial file beside the path, then rename."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._asking(name) as client:
            client.download_file(self._bucket, self._above + name, str(path), Config=_transfer())

    def read(self, name: str) -> tuple[bytes | None, str]:
        """Return the object's content and its ETag."""
        with contextlib.suppress(FileNotFoundError), self._asking(name) as client:
            found = client.get_object(Bucket=self._bucket, Key=self._above + name)
            return found["Body"].read(), str(found["ETag"])
        return None, ABSENT

    def head(self, name: str, size: int) -> bytes:
        """Return the first bytes of the object."""
        with self._asking(name) as client:
            found = client.get_object(Bucket=self._bucket, Key=self._above + name, Range=f"bytes=0-{size - 1}")
            return bytes(found["Body"].read())

    def put_if(self, data: bytes, name: str, version: str) -> bool:
        """Replace the object with that ETag."""
        from botocore.exceptions import ClientError

        condition = {"IfMatch": version} if version else {"IfNoneMatch": "*"}
        if name.endswith(".json"):
            condition["ContentType"] = "application/json"
        with self._asking() as client:
            try:
                client.put_object(Bucket=self._bucket, Key=self._above + name, Body=data, **condition)
            except ClientError as error:
                if _code(error) not in _OTHERS:
                    raise
                return False
            return True

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the bytes of each object whose name begins with `prefix`, over all pages."""
        with self._asking() as client:
            asked = client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._above + prefix)
            sizes = {item["Key"]: int(item["Size"]) for page in asked for item in page.get("Contents", ())}
        # A key with a slash at the end is a folder made in the console.
        return {key.removeprefix(self._above): size for key, size in sizes.items() if not key.endswith("/")}

    def delete(self, name: str) -> None:
        """Delete the object; no error if the object is absent."""
        with self._asking() as client:
            client.delete_object(Bucket=self._bucket, Key=self._above + name)

    @contextlib.contextmanager
    def _asking(self, name: str = "") -> Iterator[Any]:
        """Yield the client, and turn every error into an OSError with a sentence. `name`: the requested object."""
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError

        try:
            if self._client is None:
                self._client = self._connect()
            yield self._client
        except (Boto3Error, BotoCoreError, ClientError, ResponseParserError) as error:
            failure = self._failure(_origin(error), name)
            if not isinstance(failure, FileNotFoundError):
                # Failures use up a client's retry quota; a client made without credentials never gets any.
                self._client = None
            if failure is error:
                raise
            raise failure from error

    def _failure(self, error: Exception, name: str) -> Exception:
        from botocore import exceptions as known

        error = self._with_reason(error)
        if isinstance(error, known.ClientError):
            return self._refusal(error, name)
        if isinstance(error, (known.NoCredentialsError, known.PartialCredentialsError, known.CredentialRetrievalError)):
            return PermissionError(f"{self._explained(_NOBODY)} ({error})")
        if isinstance(error, (known.ConnectionError, known.HTTPClientError)):
            return ConnectionError(f"{self._uri} does not answer ({error})")
        if isinstance(error, (known.ProfileNotFound, known.SSOError, known.TokenRetrievalError)):
            return PermissionError(f"{self._uri}: {error}")
        return StoreError(f"{self._uri}: {error}")

    def _refusal(self, error: Any, name: str) -> OSError:
        code, text = _code(error), error.response["Error"].get("Message", "")
        if name and code in _ABSENT:
            return FileNotFoundError(f"{self._uri} has no {name}")
        said = f"{self._explained(_SAID[code])} ({code}: {text})" if code in _SAID else f"{self._uri}: {error}"
        if _SAID.get(code) in (_DENIED, _REFUSED):
            return PermissionError(said)
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return StoreError(said, is_passing=code in _BUSY or status >= 500)

    def _with_reason(self, error: Exception) -> Exception:
        """Return a more precise error in place of an error to a HEAD: the error of a list at the same place.

        A 404 may concern the object or the bucket, a 403 the credentials or their rights.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        if isinstance(error, ClientError) and _code(error).isdigit():
            try:
                self._client.list_objects_v2(Bucket=self._bucket, Prefix=self._above, MaxKeys=1)
            except (BotoCoreError, ClientError) as raised:
                error = raised
        return error

    def _explained(self, text: str) -> str:
        return text.format(bucket=self._bucket, uri=self._uri)


def _connect(attempts: int) -> Any:
    import boto3
    from botocore.config import Config

    config = Config(
        connect_timeout=_CONNECT_S,
        read_timeout=_READ_S,
        retries={"mode": "standard", "total_max_attempts": attempts},
        tcp_keepalive=True,
    )
    # boto3 knows AWS_DEFAULT_REGION, and follows S3's redirect to the bucket's region.
    return boto3.session.Session(region_name=os.environ.get("AWS_REGION")).client("s3", config=config)


def _transfer() -> Any:
    from boto3.s3.transfer import TransferConfig

    return TransferConfig(
        multipart_threshold=_PART_BYTES,
        multipart_chunksize=_PART_BYTES,
        max_concurrency=_THREADS,
        num_download_attempts=_BODY_ATTEMPTS,
        preferred_transfer_client="classic",  # the alternative, the default on large machines, lacks these time limits
    )


def _origin(error: Exception) -> Exception:
    """Return the original error inside boto3's own error."""
    from boto3.exceptions import Boto3Error

    inner = getattr(error, "last_exception", error.__context__ if isinstance(error, Boto3Error) else None)
    return _origin(inner) if isinstance(inner, Exception) else error


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
