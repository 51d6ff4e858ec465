"""A job's files in S3: the code, named by its content, the container order, the output, the checkpoints."""

from __future__ import annotations

import contextlib
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from cloudtrain.entrypoints import foreign
from cloudtrain.entrypoints.stores.s3 import S3Store
from cloudtrain.entrypoints.stores.store import in_bucket
from cloudtrain.launcher.backend import Bundle, Check
from cloudtrain.launcher.errors import CloudtrainError, ConfigError
from cloudtrain.launcher.text import addresses
from cloudtrain.launcher.text.terminal import say_each

from ..job_folder import JobFolder
from . import api
from .api import AwsAccess, AwsClients
from .records import SageMakerRef

_T = TypeVar("_T")
_ABSENT = ("404", "NoSuchKey", "NotFound")


def of(access: AwsAccess) -> JobFolder:
    """Return the files of jobs by their URIs."""
    return JobFolder(lambda uri: _S3JobStore(*in_bucket(uri), lambda: api.client(access, "s3")), api.answers)


def used(clients: AwsClients, handle: SageMakerRef, uri: str, doing: str, use: Callable[[JobFolder], _T]) -> _T:
    """Return the result of `use` for the files of the handle's account. Raises AWS's errors as cloudtrain's."""
    with api.answers(doing):
        return use(of(AwsAccess.of(handle, clients)))


def unpacked(clients: AwsClients, handle: SageMakerRef, folder: Path) -> list[Path]:
    """Unpack the job's output archives, which SageMaker makes of the output folder, below the folder; return the files.

    Raises CloudtrainError if no archive exists yet, ConfigError if the folder cannot be written.
    """
    store, uri, job = of(AwsAccess.of(handle, clients)), handle.output_uri, handle.name
    unpacked: list[Path] = []
    left_out: list[str] = []
    with tempfile.TemporaryDirectory(prefix="cloudtrain-") as scratch:
        for name in ("model.tar.gz", "output.tar.gz"):
            archive = Path(scratch) / name
            if not store.get(f"{uri.rstrip('/')}/{job}/output/{name}", archive):
                continue
            try:
                unpacked += foreign.extract(archive, folder, left_out)
            except (foreign.BundleError, tarfile.TarError, EOFError) as error:
                raise CloudtrainError(f"{name} of {job} cannot be unpacked: {error}") from error
            except OSError as error:
                raise ConfigError(f"cannot write there: {error.strerror}", where=str(folder)) from error
    say_each(f"left out: {words}" for words in left_out)
    if not unpacked:
        hint = "the output is uploaded at the job's end, if the job has written any"
        raise CloudtrainError(f"there is no output of {job}", where=uri, hint=hint)
    return unpacked


class _S3JobStore(S3Store):
    """A store of the launcher: the errors are AWS's own, for the sentences of api.answers."""

    def _failure(self, error: Exception, name: str) -> Exception:
        if name and api.code_of(error) in (*_ABSENT, "403"):  # the answer to a HEAD of a role that may not list
            return FileNotFoundError(name)
        return error


def put_bundle(access: AwsAccess, bundle: Bundle, uri: str, *, default_of: str | None) -> None:
    """Upload the archive unless S3 has a copy: the archive's name is its hash. Raises ConfigError, CredentialError.

    `default_of`: the account of a default bucket. The upload may have to create the bucket, and must check that the
    account owns the bucket, because anybody can guess its name.
    """
    bucket, key = in_bucket(uri)
    client = api.client(access, "s3")
    owner = {"ExpectedBucketOwner": default_of} if default_of else {}
    with api.answers(f"look into the bucket {bucket}"):
        try:
            found = client.head_object(Bucket=bucket, Key=key, **owner)
            if found["ContentLength"] == bundle.path.stat().st_size:
                return
        except Exception as error:
            _explain(client, access, bucket, error, default_of)
            _require_same_region(client, access, bucket)
    with api.answers(f"upload the code to {uri}"), bundle.path.open("rb") as file:
        client.put_object(Bucket=bucket, Key=key, Body=file, **owner)


def inputs_of(body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and address of the job's own channels that name objects by their beginning."""
    for channel in body["InputDataConfig"]:
        source = channel.get("DataSource", {}).get("S3DataSource", {})
        if channel["ChannelName"] not in ("code", "job") and source.get("S3DataType") == "S3Prefix":
            yield channel["ChannelName"], source["S3Uri"]


def look(access: AwsAccess, name: str, uri: str) -> Check:
    """Return whether the input's address has its file or folder, and which names beside begin as the address does."""
    what = f"input {name}"
    if addresses.ACCESS_POINT.match(uri):
        return Check(what, "warn", f"{uri}, an access point, which only the job can list", "nothing, if it works")
    bucket, key = in_bucket(uri)
    stem, above, last = key.rstrip("/"), *uri.rstrip("/").rpartition("/")[::2]
    try:
        client = api.client(access, "s3")
        first = client.list_objects_v2(Bucket=bucket, Prefix=key, MaxKeys=1).get("Contents", ())
        page = client.list_objects_v2(Bucket=bucket, Prefix=stem, Delimiter="/", MaxKeys=20)
    except Exception as error:
        if api.code_of(error) in ("", "NoSuchBucket"):
            raise
        return Check(what, "warn", f"{uri}, which your credentials may not list", "nothing, if it works")
    there = [each["Key"] for each in page.get("Contents", ())]
    there += [each["Prefix"] for each in page.get("CommonPrefixes", ())]
    beside = ", ".join(each[stem.rfind("/") + 1 :] for each in there if each.rstrip("/") != stem)
    hint, is_folder = f"names that begin so: {beside or 'none'}", uri.endswith("/")
    if first and (is_folder or key in there):
        said = f"{uri}; SageMaker also copies what begins so: {beside}"
        return Check(what, "ok", uri) if is_folder or not beside else Check(what, "warn", said, "rename these")
    if is_folder and stem in there:
        hint = f"`{last}` is a file without an ending: name the folder, `{above}/`, and open the file in it"
    elif f"{key}/" in there:
        hint = f"this is a folder: write `{uri}/`"
    return Check(what, "fail", f"there is no {'folder' if is_folder else 'file'} {uri}", hint)


def _explain(client: Any, access: AwsAccess, bucket: str, error: Exception, default_of: str | None) -> None:
    """Raise the cause of a failed HEAD, whose answer has no text, unless only the object is missing.

    A missing default bucket is created, as AWS's own tools do, if the role and the credentials are of one account.
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
        if default_of is None:
            hint = f"aws s3 mb s3://{bucket} --region {access.region}, or fix sagemaker.bucket"
            raise ConfigError(f"there is no bucket {bucket}", where="sagemaker.bucket", hint=hint) from error
    own = api.client(access, "sts").get_caller_identity()["Account"]
    if own != default_of:
        message = f"the role is of the account {default_of}, and your credentials are of the account {own}"
        hint = f"name a role of {own}: cloudtrain doctor sagemaker lists them"
        raise ConfigError(message, where="sagemaker.role", hint=hint) from error
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
