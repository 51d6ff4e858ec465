"""Azure's HTTP interfaces: credentials, tokens, and the meaning of Azure's errors.

This module does all calls except a job's creation. It does without the SDK, whose import alone takes a second of
processor time. The libraries are imported on first use.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cloudtrain.entrypoints.format import one_line
from cloudtrain.launcher.errors import CapacityError, ConfigError
from cloudtrain.launcher.text.extras import install

from .. import edge
from ..edge import RemoteFault
from ..http import HttpClient, Platform, RemoteError, error_in, object_in
from .records import Workspace

ARM_VERSION = "2024-10-01"
WORKSPACE_ROLE = "AzureML Data Scientist on the workspace"
MARGIN_S = 120  # a token with less time left is not used

# Cloud -> host of ARM, host of the login, suffix of key vaults' hosts.
HOSTS = {
    "AzureCloud": ("management.azure.com", "login.microsoftonline.com", "vault.azure.net"),
    "AzureUSGovernment": ("management.usgovcloudapi.net", "login.microsoftonline.us", "vault.usgovcloudapi.net"),
    "AzureChinaCloud": ("management.chinacloudapi.cn", "login.chinacloudapi.cn", "vault.azure.cn"),
}
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

AzureError = RemoteError
_AZURE = Platform("Azure", _HINT_LOGIN, "az login", "its owner")


class AbsentError(AzureError):
    """An object is missing although its parents exist."""


class Azure(HttpClient):
    """The process's connections to Azure, its credentials by cloud, and its tokens by cloud and service."""

    def __init__(self) -> None:
        super().__init__(_said, not_installed)
        self._credentials: dict[str, Any] = {}
        self._tokens: dict[tuple[str, str], Any] = {}

    def credential(self, cloud: str) -> Any:
        """Return azure-identity's default credential, made once. Raises ConfigError without the library."""
        found = self._credentials.get(cloud)  # another thread may drop the credentials meanwhile
        if found is None:
            with edge.importing(not_installed):
                from azure.identity import DefaultAzureCredential
            # The library warns about each source that it tries; its error has the same text.
            logging.getLogger("azure").setLevel(logging.CRITICAL)
            logging.getLogger("msal").setLevel(logging.CRITICAL)
            # requests, which all of Azure's libraries use, would replace the token by a line of ~/.netrc.
            os.environ["NETRC"] = os.devnull
            found = self._credentials[cloud] = DefaultAzureCredential(authority=HOSTS[cloud][1])
        return found

    def token(self, cloud: str, audience: str) -> str:
        """Return a token for the service. Raises AzureError if no credentials are found."""
        held = self._tokens.get((cloud, audience))
        if held is None or held.expires_on - time.time() < MARGIN_S:
            with edge.importing(not_installed):
                from azure.core import exceptions as core
            try:
                held = self.credential(cloud).get_token(f"{audience}/.default")
            except (core.AzureError, ValueError) as error:  # ValueError: a variable with an invalid value
                self.renew(cloud)
                raise _no_token(error, core.ClientAuthenticationError) from error
            self._tokens[cloud, audience] = held
        return str(held.token)

    def renew(self, cloud: str) -> None:
        """Drop the credentials and the tokens of the cloud; the next call reads the credentials again."""
        self._credentials.pop(cloud, None)
        self._tokens = {key: token for key, token in self._tokens.items() if key[0] != cloud}


@dataclass(frozen=True)
class _Bearer:
    """A service's tokens, for calls."""

    azure: Azure
    cloud: str
    audience: str

    def sign(self, method: str, url: str, headers: dict[str, str]) -> None:
        headers["Authorization"] = f"Bearer {self.azure.token(self.cloud, self.audience)}"

    def renew(self) -> None:
        self.azure.renew(self.cloud)


@dataclass(frozen=True)
class AzureAccess:
    """A workspace, and the process's connections to Azure."""

    workspace: Workspace
    azure: Azure = field(default_factory=Azure, compare=False, repr=False)

    @property
    def control_plane(self) -> str:
        """The address of Azure's control plane, which is also the audience of its tokens."""
        return f"https://{HOSTS[self.workspace.cloud][0]}"

    def call(self, method: str, url: str, audience: str = "", **options: Any) -> Any:
        """Return the answer with a token for the audience, else for the control plane; options as `HttpClient.call`.

        Raises AzureError.
        """
        signer = _Bearer(self.azure, self.workspace.cloud, audience or self.control_plane)
        return self.azure.call(method, url, signer=signer, **options)


def arm(
    access: AzureAccess, method: str, path: str, *, version: str = ARM_VERSION, body: Any = None, **query: str
) -> Any:
    """Return the control plane's answer for a path below the workspace, "" for the workspace. Raises AzureError."""
    url = f"{access.control_plane}{access.workspace.arm_id}{path}"
    return access.call(method, url, params={"api-version": version, **query}, body=body)


def get_json(access: AzureAccess, path: str, *, version: str = ARM_VERSION, **query: str) -> dict[str, Any]:
    """Return the JSON object at a path below the workspace. Raises AzureError."""
    return object_in(arm(access, "GET", path, version=version, **query))


def answers(doing: str, needs: str = WORKSPACE_ROLE) -> AbstractContextManager[None]:
    """Raise an AzureError of `doing` as one of our errors. `needs`: the role that allows the call."""
    return edge.answers(doing, partial(_fault, needs=needs))


def polls(doing: str) -> AbstractContextManager[None]:
    """As `answers`, but raise every error as UnreachableError, because a failed poll tells nothing about the job."""
    return edge.polls(doing, partial(_fault, needs=WORKSPACE_ROLE))


def _fault(error: Exception, needs: str) -> RemoteFault | None:
    if not isinstance(error, AzureError):
        return None
    code, words = error.code, error.words
    text = f"{code} {words}".lower()
    if any(word in text for word in _NO_CAPACITY) and error.status in (400, 403, 409, 429):
        hint = "ask for more under Quotas in the Azure ML studio, or take fewer or other instances"
        return RemoteFault(CapacityError, words, hint)
    if code in _ABSENT and error.status in (400, 404):
        key, hint = _ABSENT[code]
        return RemoteFault(ConfigError, words, hint, key=key)
    return _AZURE.fault(error, needs)


def not_installed(error: ImportError) -> ConfigError:
    """Return the error for a missing Azure library."""
    return ConfigError(f"the Azure libraries are not installed here: {error}", hint=install("azureml"))


def _no_token(error: Exception, refused: type[Exception]) -> AzureError:
    """Return the error for a missing token: the credentials are refused, or the login cannot be reached."""
    if isinstance(error, ValueError):
        return AzureError(401, "credentials", one_line(error))
    if not isinstance(error, refused):
        return AzureError(0, "login", one_line(error))
    # The messages of the credentials' sources, without sources that are only not configured.
    sources = [line.strip() for line in str(error).splitlines() if "unavailable" not in line.lower()]
    reasons = [line for line in sources if line.startswith(("Env", "Azure", "Managed", "Work"))]
    words = one_line(reasons[0] if reasons else "no usual source has credentials")
    if _NO_CERTIFICATES.search(words):
        return AzureError(495, "certificates", words)
    if _NO_WAY.search(words):
        return AzureError(0, "login", f"its login cannot be reached: {words}")
    return AzureError(401, "credentials", words)


def _said(answer: Any) -> AzureError:
    error = error_in(answer)
    code = str(error.get("code", answer.headers.get("x-ms-error-code", "")))
    words = str(error.get("message", ""))
    with contextlib.suppress(AttributeError, TypeError):
        for inner in error.get("details") or ():
            words = f"{words} {inner.get('message', '')}"
    words = one_line(words or answer.reason or f"HTTP {answer.status_code}")
    kind = AbsentError if answer.status_code == 404 and code not in _ABSENT else AzureError
    return kind(answer.status_code, code, words, answer.headers)
