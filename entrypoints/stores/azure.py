"""A container of Azure blob storage as a store, by the addresses that Azure itself shows.

`https://ACCOUNT.blob.core.windows.net/CONTAINER/PREFIX`, `abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX`, or
`wasbs://CONTAINER@ACCOUNT.blob.core.windows.net/PREFIX`, of any of Azure's clouds. Only this module imports
azure-storage-blob and azure-identity, and only if a config names such an address. The job's identity is given by
AZURE_STORAGE_CONNECTION_STRING, _KEY or _SAS_TOKEN, else found by azure-identity: a service principal, a managed
identity (also Azure ML's), or the login of `az`. Every write carries an MD5, and Azure compares the MD5 before it keeps
the bytes; an MD5 comes with each range that is read, and is compared on this machine. Blob storage compares the blob's
ETag with If-Match, and its absence with If-None-Match, before a write ("Specifying conditional headers").
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ..format import one_line
from . import STORES
from .retries import drawn_s
from .store import ABSENT, Store, StoreError, in_threads, whole_file

# A server that accepts connections and never answers is given up after ATTEMPTS * READ_S plus the pauses (357 s
# measured for a list, 375 s for a put of blocks). The pauses double from PAUSE_S to LONGEST_PAUSE_S, drawn from the
# upper half: a server that refuses connections, answers with errors or asks to slow down has 70 s on average to
# recover. A login that never answers is given up after 125 s, by azure-identity's own four attempts.
ATTEMPTS = 10
CONNECT_S, READ_S = 10.0, 30.0
PAUSE_S, LONGEST_PAUSE_S = 0.5, 20.0
RANGE_BYTES = 4 << 20  # read at a time: Get Blob gives no MD5 for a longer range

_NO_CONTAINER = "there is no container {container} in {host}; make it, or name another one"
_DENIED = (
    "no access to {uri}; {who} needs the role Storage Blob Data Contributor on the container (new roles take minutes), "
    "or to read, write, delete and list there"
)
_WALLED = (
    "no access to {uri}; the account's network rules block this machine, or {who} lacks the right to read, write, "
    "delete and list there"
)
_REFUSED = "Azure rejects {who} for {uri}; is it complete, of this account, and not expired?"
_NO_KEYS = "{host} rejects keys; give the job an identity with the role Storage Blob Data Contributor, not {who}"
_CHANGED = "{uri}: another process has written the same object meanwhile"
_NO_TOKEN = "Azure gives {who} no token for {uri}; is it complete, and not expired?"
_NOBODY = (
    "there are no Azure credentials for {uri}; give the machine a managed identity, or the job AZURE_TENANT_ID, "
    "AZURE_CLIENT_ID and AZURE_CLIENT_SECRET, or AZURE_STORAGE_KEY (`secrets` in the config)"
)
# Azure's error code -> the sentence for the user.
_SAID = {
    **dict.fromkeys(("ContainerNotFound", "ContainerBeingDeleted", "ContainerDisabled"), _NO_CONTAINER),
    **dict.fromkeys(("AuthorizationPermissionMismatch", "InsufficientAccountPermissions"), _DENIED),
    "AuthorizationFailure": _WALLED,
    **dict.fromkeys(("AuthenticationFailed", "InvalidAuthenticationInfo", "NoAuthenticationInformation"), _REFUSED),
    "KeyBasedAuthenticationNotPermitted": _NO_KEYS,
    **dict.fromkeys(("ConditionNotMet", "InvalidBlockList"), _CHANGED),
}
# The texts of requests and urllib3 if a server does not answer; the chain of identities passes on only the text.
_UNREACHED = re.compile(r"ConnectionPool\(|Connection aborted|Connection broken|Unable to connect")
_BY_STATUS = {401: _REFUSED, 403: _DENIED}  # for a code that is not in _SAID
_BODY_ATTEMPTS = 3  # to read a range's bytes, after Azure has begun to send the bytes
# Memory holds a block or a range for each thread, so memory does not grow with the file: measured with 64, 192 and 512
# MiB, 34 MiB more for a put, and 35 MiB more for a get after the put.
_BLOCK_BYTES = 8 << 20
_MOST_BLOCKS = 50_000  # of a blob (documentation of Put Block List)
_THREADS = 4  # of one rank, and a machine may have eight ranks

_FORMS = f"{STORES['https'].form}/PREFIX"
_HOST = r"[a-z0-9-]+(?:\.[a-z0-9-]+)*\.(?:{kind})(?:\.[a-z0-9-]+)+"
_CONTAINER = r"[a-z0-9](?:[a-z0-9]|-(?=[a-z0-9])){2,62}"
_HTTPS = re.compile(rf"(?i:https)://((?i:{_HOST.format(kind='blob')}))(?:/([^/]*))?(?:/(.*))?")
_HADOOP = re.compile(rf"(?i:abfss|wasbs)://([^@/]*)@((?i:{_HOST.format(kind='blob|dfs')}))(?:/(.*))?")


@dataclass(frozen=True)
class BlobLocation:
    """A container, and the common prefix of the blobs' names."""

    host: str
    container: str
    prefix: str

    @property
    def account(self) -> str:
        """Return the account's name."""
        return self.host.partition(".")[0]

    @property
    def uri(self) -> str:
        """Return the address, as shown in messages."""
        return f"https://{self.host}/{self.container}/{self.prefix}".rstrip("/")


def open_at(uri: str, attempts: int | None = None) -> AzureStore:
    """Return the store; sends no request. Raises StoreError: see store.open_store."""
    place = _place(uri)
    try:
        import azure.identity
        import azure.storage.blob  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name not in ("azure", "azure.identity", "azure.storage", "azure.storage.blob"):  # present but broken
            raise
        raise StoreError(
            f"{uri!r} needs Azure's packages, which are not installed here; `pip install "
            "azure-storage-blob azure-identity` on the machines of the job, or add them to the image"
        ) from error
    for name in ("azure", "msal"):  # this module reports failures and retries in a sentence of its own
        if logging.getLogger(name).level == logging.NOTSET:  # otherwise the user's code wants the messages
            logging.getLogger(name).setLevel(logging.CRITICAL)
    return AzureStore(place, lambda: connect(place, attempts))


class AzureStore(Store):
    """The blobs of a container below `prefix/`; names in this class omit the prefix. See store.Store.

    `connect` returns Azure's client of the container, and the identity it uses. The version is the blob's ETag.
    """

    def __init__(self, place: BlobLocation, connect: Callable[[], tuple[Any, str]]) -> None:
        self._place, self._connect = place, connect
        self._above = f"{place.prefix}/" if place.prefix else ""
        self._client: Any = None
        self._who = ""

    def put(self, source: Path | bytes, name: str) -> None:
        """Upload the file or the bytes; a large file in blocks, none visible until all have arrived."""
        with self._asking() as client:
            _upload(source, client.get_blob_client(self._above + name))

    def get(self, name: str, path: Path) -> None:
        """Download the blob to a temporary file beside the path, then rename."""
        with whole_file(path) as partial, self._asking(name) as client:
            _download(client.get_blob_client(self._above + name), partial)

    def read(self, name: str) -> tuple[bytes | None, str]:
        """Return the blob's content and its ETag."""
        with contextlib.suppress(FileNotFoundError), self._asking(name) as client:
            found = _read(lambda: client.get_blob_client(self._above + name).download_blob(validate_content="md5"))
            return found.readall(), str(found.properties.etag)
        return None, ABSENT

    def head(self, name: str, size: int) -> bytes:
        """Return the first bytes of the blob."""
        with self._asking(name) as client:
            blob = client.get_blob_client(self._above + name)
            return bytes(_read(lambda: blob.download_blob(0, size, validate_content="md5").readall()))

    def put_if(self, data: bytes, name: str, version: str) -> bool:
        """Replace the blob with that ETag."""
        from azure.core import MatchConditions
        from azure.core.exceptions import HttpResponseError

        condition: dict[str, Any] = {"overwrite": False}
        if version:
            condition = {"overwrite": True, "etag": version, "match_condition": MatchConditions.IfNotModified}
        with self._asking() as client:
            try:
                client.get_blob_client(self._above + name).upload_blob(data, validate_content="md5", **condition)
            except HttpResponseError as error:
                if error.status_code not in (409, 412) or "Container" in str(getattr(error, "error_code", "")):
                    raise
                return False
            return True

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the bytes of each blob whose name begins with `prefix`, over all pages."""
        with self._asking() as client:
            blobs = list(client.list_blobs(name_starts_with=self._above + prefix, include=["metadata"]))
        # An account with a hierarchical namespace lists folders too. A slash at the end marks a folder of other tools.
        files = [blob for blob in blobs if (blob.metadata or {}).get("hdi_isfolder") != "true"]
        return {blob.name.removeprefix(self._above): blob.size for blob in files if not blob.name.endswith("/")}

    def delete(self, name: str) -> None:
        """Delete the blob, if present, with its snapshots from backups: Azure removes no blob without its snapshots."""
        with contextlib.suppress(FileNotFoundError), self._asking(name) as client:
            client.delete_blob(self._above + name, delete_snapshots="include")

    @contextlib.contextmanager
    def _asking(self, name: str = "") -> Iterator[Any]:
        """Yield the client, and turn every error into an OSError with a sentence. `name`: the requested blob."""
        try:
            if self._client is None:
                self._client, self._who = self._connect()
            yield self._client
        except Exception as error:  # any kind: some errors are no AzureError (is_broken_off)
            failure = self._failure(error, name)
            if not isinstance(failure, FileNotFoundError) and self._client is not None:
                self._client.close()  # the next request asks for credentials again
                self._client = None
            if failure is error:
                raise
            raise failure from error

    def _failure(self, error: Exception, name: str) -> Exception:
        return failure_of(error, self._place, self._who, name)


def connect(place: BlobLocation, attempts: int | None = None) -> tuple[Any, str]:
    """Return a client of the container, and the identity it uses. `attempts` overrides the retry count."""
    from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential
    from azure.storage.blob import ContainerClient

    name = "AZURE_STORAGE_CONNECTION_STRING"
    if text := os.environ.get(name):
        try:
            made = ContainerClient.from_connection_string(text, place.container, **_settings(attempts))
        except ValueError as error:
            raise PermissionError(f"{name} is no connection string of a storage account ({error})") from error
        if made.account_name not in (None, place.account):
            raise PermissionError(f"{name} is of the account {made.account_name}, and {place.uri} of another one")
        return made, name
    credential: Any = None
    if key := os.environ.get(name := "AZURE_STORAGE_KEY"):
        credential = AzureNamedKeyCredential(place.account, key)
    elif signature := os.environ.get(name := "AZURE_STORAGE_SAS_TOKEN"):
        credential = AzureSasCredential(signature.lstrip("?"))
    else:
        credential, name = _Identity(place), "the job's identity"
    return client(place, credential, attempts), name


def client(place: BlobLocation, credential: Any, attempts: int | None = None) -> Any:
    """Return a client of the container with the credential. `attempts` overrides the retry count."""
    from azure.storage.blob import ContainerClient

    return ContainerClient(f"https://{place.host}", place.container, credential=credential, **_settings(attempts))


def failure_of(error: Exception, place: BlobLocation, who: str, name: str) -> OSError:
    """Return the error to raise: a sentence with the cure. `name`: the requested blob, empty for other requests."""
    from azure.core import exceptions as known

    if isinstance(error, OSError) and not is_broken_off(error):
        return error  # a disk error, or an error with its own sentence
    if isinstance(error, known.HttpResponseError) and error.response is not None:
        return _refusal(error, place, who, name)
    if isinstance(error, known.ClientAuthenticationError):  # an invalid key
        return PermissionError(f"{_REFUSED.format(uri=place.uri, who=who)} ({one_line(error)})")
    silent = (known.HttpResponseError, known.ServiceRequestError, known.ServiceResponseError, known.IncompleteReadError)
    if isinstance(error, silent) or is_broken_off(error):
        hint = "is the account's name right, and does this machine reach it?"
        return ConnectionError(f"{place.uri} does not answer; {hint} ({one_line(error)})")
    return StoreError(f"{place.uri}: {type(error).__name__}: {one_line(error)}")


def is_broken_off(error: Exception) -> bool:
    """Return whether the error comes from requests or urllib3; the SDK passes such errors on while reading a body."""
    return type(error).__module__.partition(".")[0] in ("requests", "urllib3")


def _place(uri: str) -> BlobLocation:
    address, mark, _ = uri.partition("?")
    if mark:
        raise StoreError(
            f"{address!r} contains a `?`: remove the query; a SAS is a secret, which the job gets "
            "as AZURE_STORAGE_SAS_TOKEN (`secrets` in the config)"
        )
    # Not by urlsplit: a `#` would end the prefix.
    if match := _HTTPS.fullmatch(uri):
        host, container, prefix = match[1].lower(), match[2] or "", unquote(match[3] or "")
    elif match := _HADOOP.fullmatch(uri):
        host, container, prefix = match[2].lower().replace(".dfs.", ".blob.", 1), match[1], match[3] or ""
    else:
        raise StoreError(f"{uri!r} is no address of Azure's blob storage; write it as in {_FORMS}")
    if not re.fullmatch(_CONTAINER, container):
        raise StoreError(f"{uri!r} names no container; write it as in {_FORMS}")
    return BlobLocation(host, container, prefix.strip("/"))


def _upload(source: Path | bytes, blob: Any) -> None:
    from azure.storage.blob import BlobBlock

    if isinstance(source, bytes) or source.stat().st_size <= _BLOCK_BYTES:
        data = source if isinstance(source, bytes) else source.read_bytes()
        blob.upload_blob(data, overwrite=True, validate_content="md5")
        return
    size = source.stat().st_size
    length = max(_BLOCK_BYTES, -(-size // _MOST_BLOCKS))
    # The ids are unique to this call, so that a list never mixes the blocks of two writers. All ids have one length:
    # Azure keeps the blocks of a killed process for a week, and refuses ids of another length beside them (the reason
    # not to use upload_blob, whose ids' length differs between releases).
    put = uuid.uuid4().hex
    ids = [f"{put}{index:05}" for index in range(-(-size // length))]

    def stage(index: int) -> None:
        with source.open("rb") as file:
            file.seek(index * length)
            blob.stage_block(ids[index], file.read(length), validate_content="md5")

    in_threads(stage, range(len(ids)), _THREADS)
    blob.commit_block_list([BlobBlock(one) for one in ids], validate_content="md5")


def _download(blob: Any, path: Path) -> None:
    from azure.core import MatchConditions

    length = RANGE_BYTES
    first = _read(lambda: blob.download_blob(validate_content="md5"))  # the first range, and the size of the whole blob
    path.write_bytes(first.read(length))
    # All ranges must come from the same version of the blob.
    settings = {
        "validate_content": "md5",
        "etag": first.properties.etag,
        "match_condition": MatchConditions.IfNotModified,
    }

    def fetch(index: int) -> None:
        begin = (index + 1) * length
        found = _read(lambda: blob.download_blob(begin, min(length, first.size - begin), **settings))
        with path.open("r+b") as file:
            file.seek(begin)
            file.write(found.readall())

    in_threads(fetch, range(-(-first.size // length) - 1), _THREADS)


def _read(ask: Callable[[], Any]) -> Any:
    """Return the result of `ask`; ask again if the bytes break off or have a wrong MD5."""
    from azure.core.exceptions import AzureError, ServiceRequestError, ServiceResponseError

    for _ in range(_BODY_ATTEMPTS - 1):
        try:
            return ask()
        except Exception as error:
            # If Azure refuses or does not answer, the retry policy has already tried again.
            is_final = getattr(error, "status_code", None) or isinstance(
                error, (ServiceRequestError, ServiceResponseError)
            )
            if is_final or not (isinstance(error, AzureError) or is_broken_off(error)):
                raise
    return ask()


def _settings(attempts: int | None) -> dict[str, Any]:
    from azure.storage.blob import ExponentialRetry

    # The default is three attempts for each kind of failure.
    kinds = ("retry_total", "retry_connect", "retry_read", "retry_status")
    each: Any = dict.fromkeys(kinds, (attempts or ATTEMPTS) - 1)
    policy: Any = ExponentialRetry(**each)
    # The default pause has no upper limit.
    policy.get_backoff_time = lambda settings: drawn_s(settings["count"], PAUSE_S, LONGEST_PAUSE_S)
    return {
        "connection_timeout": CONNECT_S,
        "read_timeout": READ_S,
        "retry_policy": policy,
        "raw_response_hook": _refuse_haste,
        "max_chunk_get_size": RANGE_BYTES,
    }


def _refuse_haste(response: Any) -> None:
    """Raise an error for status 429: the retry policy of the SDK would take the status for a success."""
    from azure.core.exceptions import HttpResponseError

    if response.http_response.status_code == 429:
        raise HttpResponseError("Too many requests", response=response.http_response)


class _Identity:
    """Tokens of the job's own identity. Raises no AzureError: the SDK retries each for over a minute."""

    def __init__(self, place: BlobLocation) -> None:
        from azure.identity import DefaultAzureCredential

        variable = os.environ.get
        self._place, self._lock = place, threading.Lock()
        self._chain = DefaultAzureCredential(
            # Azure ML's name for a cluster's user-assigned identity.
            managed_identity_client_id=variable("AZURE_CLIENT_ID") or variable("DEFAULT_IDENTITY_CLIENT_ID"),
            exclude_shared_token_cache_credential=True,
            exclude_visual_studio_code_credential=True,
            exclude_powershell_credential=True,
            exclude_developer_cli_credential=True,
            connection_timeout=CONNECT_S,
            read_timeout=READ_S,
        )

    def get_token(self, *scopes: str, **options: Any) -> Any:
        """Return a token. Raises PermissionError, or ConnectionError if the login does not answer."""
        from azure.core.exceptions import AzureError, ServiceRequestError, ServiceResponseError

        try:
            with self._lock:
                return self._chain.get_token(*scopes, **options)
        except AzureError as error:
            # The chain reports each identity that it tried, a line each, and stops at the first identity that exists.
            tried = [line.strip() for line in str(error).splitlines() if line.startswith("\t")] or [str(error)]
            silent = (ServiceRequestError, ServiceResponseError)
            if isinstance(error, silent) or _UNREACHED.search(tried[-1]):
                raise ConnectionError(
                    f"the login for {self._place.uri} does not answer ({one_line(tried[-1])})"
                ) from error
            words = {"uri": self._place.uri, "who": "the job's identity"}
            if len(tried) == len(self._chain.credentials) and "unavailable" in tried[-1]:
                reason = next((line for line in tried if line.startswith("ManagedIdentity")), tried[-1])
                raise PermissionError(f"{_NOBODY.format(**words)} ({one_line(reason)})") from error
            raise PermissionError(f"{_NO_TOKEN.format(**words)} ({one_line(tried[-1])})") from error


def _refusal(error: Any, place: BlobLocation, who: str, name: str) -> OSError:
    code = getattr(error, "error_code", None) or error.response.headers.get("x-ms-error-code") or ""
    code = str(getattr(code, "value", code))
    if name and code == "BlobNotFound":
        return FileNotFoundError(f"{place.uri} has no {name}")
    detail = (getattr(error, "additional_info", None) or {}).get("authenticationerrordetail") or ""
    text = one_line(f"{code or error.status_code}: {str(error.message).partition(chr(10))[0]} {detail}")
    said = _SAID.get(code) or _BY_STATUS.get(error.status_code)
    if said is None:
        return StoreError(
            f"{place.uri}: {text}", is_passing=error.status_code in (408, 429) or error.status_code >= 500
        )
    kind = PermissionError if said in (_DENIED, _WALLED, _REFUSED, _NO_KEYS) else StoreError
    return kind(f"{said.format(uri=place.uri, host=place.host, container=place.container, who=who)} ({text})")
