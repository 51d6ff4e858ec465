"""Azure's HTTP interfaces: tokens, retries, and Azure's errors as cloudtrain's errors.

This module does all calls except a job's creation. It does without the SDK, whose import alone takes a second of
processor time. The libraries are imported on first use.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from cloudtrain.backends.azureml.records import Workspace
from cloudtrain.launcher.errors import (
    CapacityError,
    CloudtrainError,
    ConfigError,
    CredentialError,
    Fault,
    UnreachableError,
)
from cloudtrain.launcher.text.extras import install
from cloudtrain.launcher.text.remote import NO_NAME, cause, one_line

__all__ = [
    "AzureError",
    "answers",
    "arm",
    "call",
    "credential",
    "get_json",
    "hosts",
    "is_absent",
    "not_installed",
    "object_in",
    "polls",
    "token",
]

ARM_VERSION = "2024-10-01"
CONNECT_S, READ_S = 10.0, 60.0
TRIES, PAUSE_S, LONGEST_PAUSE_S = 4, 0.25, 10.0
MOST_PATIENT_S = 120.0  # the longest pause that a host may request
WORKSPACE_ROLE = "AzureML Data Scientist on the workspace"
MARGIN_S = 120  # a token with less time left is not used

# Cloud -> host of ARM, host of the login, suffix of key vaults' hosts.
_HOSTS = {
    "AzureCloud": ("management.azure.com", "login.microsoftonline.com", "vault.azure.net"),
    "AzureUSGovernment": ("management.usgovcloudapi.net", "login.microsoftonline.us", "vault.usgovcloudapi.net"),
    "AzureChinaCloud": ("management.chinacloudapi.cn", "login.chinacloudapi.cn", "vault.azure.cn"),
}
_BUSY = (408, 429, 500, 502, 503, 504)
_NO_CAPACITY = ("quota", "insufficientcapacity", "notenoughcores", "allocationfailed", "skunotavailable")
# The credentials library's messages for an unreachable login, which the library reports as a failed authentication.
_NO_WAY = re.compile(
    r"Unable to connect|refused|reset by peer|establish a new connection|resolve|timed out|Connection (aborted|broken)"
    r"|RemoteDisconn|IncompleteRead|HTTP Error: (5|429)|Unable to get authority configuration|TooManyRequests"
)
_NO_CERTIFICATES = re.compile(r"CA certificate bundle|certificate file")
# Azure's code for a missing part of the workspace's id -> the config's key, and the command that lists valid values.
_ABSENT = {
    "ResourceGroupNotFound": ("azureml.resource_group", "`az ml workspace list` shows yours with their groups"),
    "SubscriptionNotFound": ("azureml.subscription", "`az account list` shows yours"),
    "InvalidSubscriptionId": ("azureml.subscription", "`az account list` shows yours"),
}
_HINT_LOGIN = "az login, or export AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET"

_sessions: list[Any] = []
_credentials: dict[str, Any] = {}
_tokens: dict[tuple[str, str], Any] = {}
_not_before_s: dict[str, float] = {}  # host -> time of the next allowed call (time.monotonic), from the host's answer


class AzureError(Exception):
    """Azure's answer: the HTTP status, Azure's code and words; status 0 if Azure did not answer."""

    def __init__(self, status: int, code: str, words: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(words)
        self.status = status
        self.code = code
        self.words = words
        self.headers: Mapping[str, str] = headers or {}


def hosts(cloud: str) -> tuple[str, str, str]:
    """Return the hosts of Azure's control plane and login, and the suffix of key vaults."""
    return _HOSTS[cloud]


def credential(cloud: str) -> Any:
    """Return azure-identity's default credential, made once. Raises ConfigError without the library."""
    if cloud not in _credentials:
        try:
            from azure.identity import DefaultAzureCredential
        except ImportError as error:
            raise not_installed(error) from error
        # The library warns about each source that it tries; its error has the same text.
        logging.getLogger("azure").setLevel(logging.CRITICAL)
        logging.getLogger("msal").setLevel(logging.CRITICAL)
        # requests, which all of Azure's libraries use, would replace the token by a line of ~/.netrc.
        os.environ["NETRC"] = os.devnull
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
    """Return the answer (requests.Response). `audience`: the service for the token, None for an open address.

    Pauses and retries if Azure is busy or a connection breaks, and takes a new token if Azure refuses the old token.
    Raises AzureError.
    """
    session, errors = _session()
    host, is_renewed = urlsplit(url).netloc, False
    if _not_before_s.get(host, 0.0) > time.monotonic():
        raise AzureError(429, "", f"{host} has asked for a pause in requests")
    for number in range(1, TRIES + 1):
        sent = dict(headers or {})
        if audience is not None:
            sent["Authorization"] = f"Bearer {token(cloud, audience)}"
        try:
            answer = session.request(
                method, url, params=params, json=body, headers=sent, timeout=(CONNECT_S, READ_S), allow_redirects=False
            )
        except errors.RequestException as error:
            failure = AzureError(0, "", cause(error))
            pause_s = PAUSE_S * 2**number
        except OSError as error:  # requests raises OSError if the file of certificates is missing
            raise AzureError(495, "certificates", one_line(str(error))) from error
        else:
            if answer.status_code < 300:
                return answer
            failure = _said(answer)
            if answer.status_code == 401 and audience is not None and not is_renewed:
                _tokens.pop((cloud, audience), None)
                is_renewed = True
                continue
            if answer.status_code not in _BUSY:
                raise failure
            pause_s = _asked_pause_s(answer, PAUSE_S * 2**number)
        if pause_s > LONGEST_PAUSE_S:
            _not_before_s[host] = time.monotonic() + min(pause_s, MOST_PATIENT_S)
            break
        if number == TRIES:
            break
        time.sleep(pause_s)
    raise failure


def arm(
    workspace: Workspace, method: str, path: str, *, version: str = ARM_VERSION, body: Any = None, **query: str
) -> Any:
    """Return the control plane's answer for a path below the workspace, "" for the workspace. Raises AzureError."""
    host = hosts(workspace.cloud)[0]
    url = f"https://{host}{workspace.arm_id}{path}"
    params = {"api-version": version, **query}
    return call(method, url, cloud=workspace.cloud, audience=f"https://{host}", params=params, body=body)


def get_json(workspace: Workspace, path: str, *, version: str = ARM_VERSION, **query: str) -> dict[str, Any]:
    """Return the JSON object at a path below the workspace. Raises AzureError."""
    return object_in(arm(workspace, "GET", path, version=version, **query))


def object_in(answer: Any) -> dict[str, Any]:
    """Return the JSON object in the answer. Raises AzureError, also for a proxy's page."""
    try:
        found = answer.json()
    except ValueError as error:
        raise AzureError(0, "", f"{urlsplit(answer.url).netloc} did not answer with JSON") from error
    if not isinstance(found, dict):
        raise AzureError(0, "", f"{urlsplit(answer.url).netloc} did not answer with a JSON object")
    return found


def is_absent(error: Exception) -> bool:
    """Return whether Azure reports that the object is missing although its parents exist."""
    return isinstance(error, AzureError) and error.status == 404 and error.code not in _ABSENT


@contextlib.contextmanager
def answers(doing: str, needs: str = WORKSPACE_ROLE) -> Iterator[None]:
    """Raise an AzureError of `doing` as one of our errors, in one sentence with a hint.

    `needs`: the role that allows the call.
    """
    try:
        yield
    except AzureError as error:
        raise _translated(error, doing, needs) from error


@contextlib.contextmanager
def polls(doing: str) -> Iterator[None]:
    """As `answers`, but raise every error as UnreachableError, because a failed poll tells nothing about the job."""
    try:
        with answers(doing):
            yield
    except UnreachableError:
        raise
    except CloudtrainError as error:
        _tokens.clear()  # a new sign-in must count at once
        _credentials.clear()
        raise UnreachableError(error.message, where=error.where, hint=error.hint) from error


def _translated(error: AzureError, doing: str, needs: str = WORKSPACE_ROLE) -> CloudtrainError:
    """Return our error for Azure's error."""
    code, words = error.code, error.words
    text = f"{code} {words}".lower()
    if code == "credentials":
        return CredentialError(f"cannot {doing}: no valid Azure credentials: {words}", hint=_HINT_LOGIN)
    if code == "certificates":
        return ConfigError(f"cannot {doing}: {words}", hint="fix REQUESTS_CA_BUNDLE, or unset it")
    if error.status == 401:
        return CredentialError(f"cannot {doing}: Azure rejects these credentials: {words}", hint="az login")
    if any(word in text for word in _NO_CAPACITY) and error.status in (400, 403, 409, 429):
        hint = "ask for more under Quotas in the Azure ML studio, or take fewer or other instances"
        return CapacityError(f"cannot {doing}: {words}", hint=hint)
    if error.status == 403:
        hint = f"a role that allows it: {needs}; its owner grants roles"
        return CredentialError(f"cannot {doing}: not allowed: {words}", hint=hint)
    if error.status == 0 or error.status in _BUSY:
        does = "cannot be reached" if words == NO_NAME else "gave an unexpected answer"
        return UnreachableError(f"cannot {doing}: Azure {does}: {words}")
    if code in _ABSENT:
        key, hint = _ABSENT[code]
        return ConfigError([Fault(f"cannot {doing}: {words}", key=key, hint=hint)])
    return ConfigError(f"cannot {doing}: {words}", where=code or str(error.status))


def _session() -> tuple[Any, Any]:
    try:
        import requests
    except ImportError as error:
        raise not_installed(error) from error
    if not _sessions:
        made = requests.Session()
        made.mount("https://", requests.adapters.HTTPAdapter(pool_maxsize=32))
        _sessions.append(made)
    return _sessions[0], requests.exceptions


def not_installed(error: ImportError) -> ConfigError:
    """Return the error for a missing Azure library."""
    return ConfigError(f"the Azure libraries are not installed here: {error}", hint=install("azureml"))


def token(cloud: str, audience: str) -> str:
    """Return a token for the service. Raises AzureError if no credentials are found."""
    held = _tokens.get((cloud, audience))
    if held is None or held.expires_on - time.time() < MARGIN_S:
        try:
            from azure.core import exceptions as core
        except ImportError as error:
            raise not_installed(error) from error
        try:
            held = credential(cloud).get_token(f"{audience}/.default")
        except core.ClientAuthenticationError as error:
            words = _credentials_words(str(error))
            if _NO_CERTIFICATES.search(words):
                raise AzureError(495, "certificates", words) from error
            if _NO_WAY.search(words):
                raise AzureError(0, "", f"its login cannot be reached: {words}") from error
            raise AzureError(401, "credentials", words) from error
        except core.AzureError as error:
            raise AzureError(0, "", one_line(str(error))) from error
        except ValueError as error:  # a variable with an invalid value
            raise AzureError(401, "credentials", one_line(str(error))) from error
        _tokens[cloud, audience] = held
    return str(held.token)


def _credentials_words(text: str) -> str:
    """Return the messages of the credentials' sources, without sources that are only not configured."""
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith(("Env", "Azure", "Managed", "Work"))]
    reasons = [line for line in lines if "unavailable" not in line.lower()]
    return one_line(reasons[0] if reasons else "no usual source has credentials")


def _said(answer: Any) -> AzureError:
    code, words = answer.headers.get("x-ms-error-code", ""), ""
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        answered = json.loads(answer.text)
        answered = answered.get("error", answered)
        code, words = str(answered.get("code", code)), str(answered.get("message", ""))
        for inner in answered.get("details") or ():
            words = f"{words} {inner.get('message', '')}"
    words = one_line(words or answer.reason or f"HTTP {answer.status_code}")
    return AzureError(answer.status_code, code, words, answer.headers)


def _asked_pause_s(answer: Any, default_s: float) -> float:
    """Return the pause that Azure requests, in seconds, else the default."""
    with contextlib.suppress(ValueError):
        return max(0.0, float(answer.headers.get("Retry-After", default_s)))
    return default_s
