"""Azure blob storage: the job's credentials, the retries, and a sentence for each error of the SDK.

azure.py sends the requests; azure-storage-blob and azure-identity are imported in the functions that need them.
"""

from __future__ import annotations

import os
import re
import threading
from dataclasses import dataclass
from typing import Any

from ..format import one_line
from .retries import drawn_s
from .store import StoreError

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


def failure(error: Exception, place: BlobLocation, who: str, name: str) -> OSError:
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


def _settings(attempts: int | None) -> dict[str, Any]:
    return {
        "connection_timeout": CONNECT_S,
        "read_timeout": READ_S,
        "retry_policy": _retries(attempts or ATTEMPTS),
        "raw_response_hook": _refuse_haste,
        "max_chunk_get_size": RANGE_BYTES,
    }


def _retries(attempts: int) -> Any:
    from azure.storage.blob import ExponentialRetry

    # The default is three attempts for each kind of failure.
    each: Any = dict.fromkeys(("retry_total", "retry_connect", "retry_read", "retry_status"), attempts - 1)
    policy: Any = ExponentialRetry(**each)
    # The default pause has no upper limit.
    policy.get_backoff_time = lambda settings: drawn_s(settings["count"], PAUSE_S, LONGEST_PAUSE_S)
    return policy


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
