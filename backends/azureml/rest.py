"""Azure's own HTTP interfaces: tokens, patience, and what goes wrong in our words.

All but the sending of a job is done here, without its SDK, whose import alone takes a second of processor time. The
libraries are imported inside, on first use.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from cloudtrain.backends.azureml.workspace import Workspace
from cloudtrain.launcher.errors import CapacityError, CloudtrainError, ConfigError, CredentialError, UnreachableError

__all__ = [
    "ARM_VERSION",
    "AzureError",
    "answers",
    "arm",
    "call",
    "credential",
    "get_json",
    "hosts",
    "is_absent",
    "polls",
    "translated",
]

ARM_VERSION = "2024-10-01"
CONNECT_S, READ_S = 10.0, 60.0
TRIES, PAUSE_S, LONGEST_PAUSE_S = 4, 0.25, 10.0
MARGIN_S = 120  # a token that has less left is not used any more

# Cloud -> ARM, login, suffix of the data planes' hosts, of key vaults.
_HOSTS = {
    "AzureCloud": ("management.azure.com", "login.microsoftonline.com", "vault.azure.net"),
    "AzureUSGovernment": ("management.usgovcloudapi.net", "login.microsoftonline.us", "vault.usgovcloudapi.net"),
    "AzureChinaCloud": ("management.chinacloudapi.cn", "login.chinacloudapi.cn", "vault.azure.cn"),
}
_BUSY = (408, 429, 500, 502, 503, 504)
_NO_CAPACITY = ("quota", "insufficientcapacity", "notenoughcores", "allocationfailed", "skunotavailable")
# What the credentials' library says of a login that cannot be reached: it calls that a failed authentication.
_NO_WAY = re.compile(r"Unable to connect|establish a new connection|resolve|timed out|Connection aborted|RemoteDisconn")
_HINT_LOGIN = "az login, or export AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET"

_sessions: list[Any] = []
_credentials: dict[str, Any] = {}
_tokens: dict[tuple[str, str], Any] = {}


class AzureError(Exception):
    """What Azure has answered: the HTTP status, its own code and words; status 0 where it did not answer at all."""

    def __init__(self, status: int, code: str, words: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(words)
        self.status = status
        self.code = code
        self.words = words
        self.headers: Mapping[str, str] = headers or {}


def hosts(cloud: str) -> tuple[str, str, str]:
    """Return the hosts of Azure's control plane, of its login, and the suffix of key vaults."""
    return _HOSTS[cloud]


def credential(cloud: str) -> Any:
    """Return azure-identity's default credential, made once. Raises ConfigError without the library."""
    if cloud not in _credentials:
        try:
            from azure.identity import DefaultAzureCredential
        except ImportError as error:
            raise _not_installed(error) from error
        # It tells in warnings what it has tried; the error that it raises says the same.
        logging.getLogger("azure").setLevel(logging.CRITICAL)
        logging.getLogger("msal").setLevel(logging.CRITICAL)
        _credentials[cloud] = DefaultAzureCredential(authority=hosts(cloud)[1])
    return _credentials[cloud]


def call(
    method: str,
    url: str,
    *,
    cloud: str = "AzureCloud",
    audience: str | None = None,
    params: Mapping[str, str] | None = None,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
) -> Any:
    """Return the answer (requests.Response). `audience`: the service that the token is for, None for an open address.

    Waits a moment and asks again where Azure is busy or a connection breaks, and takes a new token where it refuses the
    old one. Raises AzureError.
    """
    session, errors = _session()
    is_renewed = False
    for number in range(1, TRIES + 1):
        sent = dict(headers or {})
        if audience is not None:
            sent["Authorization"] = f"Bearer {_token(cloud, audience)}"
        try:
            answer = session.request(
                method, url, params=params, json=body, headers=sent, timeout=(CONNECT_S, READ_S), allow_redirects=False
            )
        except errors.RequestException as error:
            failure = AzureError(0, "", _cause(error))
            pause_s = PAUSE_S * 2**number
        else:
            if answer.status_code < 400:
                return answer
            failure = _said(answer)
            if answer.status_code == 401 and audience is not None and not is_renewed:
                _tokens.pop((cloud, audience), None)
                is_renewed = True
                continue
            if answer.status_code not in _BUSY:
                raise failure
            pause_s = _asked_pause_s(answer, PAUSE_S * 2**number)
        if number == TRIES or pause_s > LONGEST_PAUSE_S:
            break
        time.sleep(pause_s)
    raise failure


def arm(workspace: Workspace, method: str, path: str, *, version: str = ARM_VERSION, body: Any = None) -> Any:
    """Return the control plane's answer for a path below the workspace, "" for itself. Raises AzureError."""
    host = hosts(workspace.cloud)[0]
    url = f"https://{host}{workspace.arm_id}{path}"
    params = {"api-version": version}
    return call(method, url, cloud=workspace.cloud, audience=f"https://{host}", params=params, body=body)


def get_json(workspace: Workspace, path: str, *, version: str = ARM_VERSION) -> dict[str, Any]:
    """Return what there is at a path below the workspace. Raises AzureError."""
    found: dict[str, Any] = arm(workspace, "GET", path, version=version).json()
    return found


def is_absent(error: Exception) -> bool:
    """Return whether Azure has said that there is no such thing."""
    return isinstance(error, AzureError) and error.status == 404


@contextlib.contextmanager
def answers(doing: str) -> Iterator[None]:
    """Raise what Azure says against `doing` as one of our errors, in one sentence with what to do."""
    try:
        yield
    except AzureError as error:
        raise translated(error, doing) from error


@contextlib.contextmanager
def polls(doing: str) -> Iterator[None]:
    """As `answers`, but whatever it is, it says nothing about the job: raises UnreachableError."""
    try:
        with answers(doing):
            yield
    except UnreachableError:
        raise
    except CloudtrainError as error:
        _tokens.clear()  # whoever signs in anew must be believed at once
        _credentials.clear()
        raise UnreachableError(error.message, where=error.where, hint=error.hint) from error


def translated(error: AzureError, doing: str) -> CloudtrainError:
    """Return our error for what Azure has said."""
    code, words = error.code, error.words
    text = f"{code} {words}".lower()
    if code == "credentials":
        return CredentialError(f"cannot {doing}: no Azure credentials: {words}", hint=_HINT_LOGIN)
    if error.status == 401:
        return CredentialError(f"cannot {doing}: Azure does not take these credentials: {words}", hint="az login")
    if any(word in text for word in _NO_CAPACITY) and error.status in (400, 403, 409, 429):
        hint = "ask for more under Quotas in the Azure ML studio, or take fewer or other instances"
        return CapacityError(f"cannot {doing}: {words}", hint=hint)
    if error.status == 403:
        hint = "the role `AzureML Data Scientist` on the workspace allows it; who gives roles is its owner"
        return CredentialError(f"cannot {doing}: not allowed: {words}", hint=hint)
    if error.status == 0 or error.status in _BUSY:
        return UnreachableError(f"cannot {doing}: Azure does not answer as it should: {words}")
    return ConfigError(f"cannot {doing}: {words}", where=code or str(error.status))


def _session() -> tuple[Any, Any]:
    try:
        import requests
    except ImportError as error:
        raise _not_installed(error) from error
    if not _sessions:
        made = requests.Session()
        made.mount("https://", requests.adapters.HTTPAdapter(pool_maxsize=32))
        _sessions.append(made)
    return _sessions[0], requests.exceptions


def _not_installed(error: ImportError) -> ConfigError:
    hint = "pip install 'cloudtrain[azureml]'"
    return ConfigError(f"the Azure libraries are not installed here: {error}", hint=hint)


def _token(cloud: str, audience: str) -> str:
    """Return a token for the service. Raises AzureError where there are no credentials."""
    held = _tokens.get((cloud, audience))
    if held is None or held.expires_on - time.time() < MARGIN_S:
        from azure.core.exceptions import ClientAuthenticationError, ServiceRequestError, ServiceResponseError

        try:
            held = credential(cloud).get_token(f"{audience}/.default")
        except (ServiceRequestError, ServiceResponseError) as error:
            raise AzureError(0, "", _one_line(str(error))) from error
        except ClientAuthenticationError as error:
            words = _credentials_words(str(error))
            if _NO_WAY.search(words):
                raise AzureError(0, "", words) from error
            raise AzureError(401, "credentials", words) from error
        except ValueError as error:  # a variable that holds something else
            raise AzureError(401, "credentials", _one_line(str(error))) from error
        _tokens[cloud, audience] = held
    return str(held.token)


def _credentials_words(text: str) -> str:
    """Return what the credentials' own sources say, without the ones that merely are not configured."""
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith(("\t", "Env", "Azure", "Managed"))]
    told = [line for line in lines if "unavailable" not in line.lower()]
    return _one_line(told[0] if told else "none of the usual sources has any")


def _said(answer: Any) -> AzureError:
    code, words = answer.headers.get("x-ms-error-code", ""), ""
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        told = json.loads(answer.text)
        told = told.get("error", told)
        code, words = str(told.get("code", code)), str(told.get("message", ""))
        for inner in told.get("details") or ():
            words = f"{words} {inner.get('message', '')}"
    words = _one_line(words or answer.reason or f"HTTP {answer.status_code}")
    return AzureError(answer.status_code, code, words, answer.headers)


def _asked_pause_s(answer: Any, default_s: float) -> float:
    """Return how long Azure asks to wait, in seconds, else the default."""
    with contextlib.suppress(ValueError):
        return float(answer.headers.get("Retry-After", default_s))
    return default_s


def _cause(error: Exception) -> str:
    inner: BaseException = error
    while inner.__cause__ or inner.__context__:
        inner = inner.__cause__ or inner.__context__ or inner
    return _one_line(str(inner) or type(inner).__name__)


def _one_line(text: str, most: int = 400) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most]}..."
