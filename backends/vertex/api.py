"""Google's HTTP interfaces: credentials, addresses, and the meaning of Google's errors.

All calls are here except a job's creation. The module does without the SDK, whose import alone takes most of a second
of processor time, and imports google-auth and requests on first use.
"""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from cloudtrain.entrypoints.format import one_line
from cloudtrain.launcher.errors import CapacityError, ConfigError, UnreachableError
from cloudtrain.launcher.text.extras import install

from .. import edge
from ..edge import RemoteFault, cause
from ..http import BUSY, HttpClient, Platform, RemoteError, error_in, object_in
from .records import VertexRef, VertexSending

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
# For a refused send, and for a job that failed by a lack of machines.
NO_MACHINES = (
    "take fewer or other machines, another region, or try again; where a quota is named, IAM & Admin > Quotas of the "
    "project shows and raises it (spot and flex start count on the `preemptible` ones)"
)
HINT_LOGIN = "gcloud auth application-default login, or export GOOGLE_APPLICATION_CREDENTIALS"

GoogleError = RemoteError
_GOOGLE = Platform("Google", HINT_LOGIN, HINT_LOGIN, "the project's owner")

_CANCELLED = 499  # gRPC's CANCELLED: the server may or may not have done the call
_DISABLED = re.compile(r"has not been used|is disabled|SERVICE_DISABLED|not enabled")
_QUOTA = re.compile(r"quota|resource.?exhausted|stockout|not enough|insufficient|not available", re.IGNORECASE)
_RATE = re.compile(r"per minute|per second|rate limit|requests? (per|limit)|ReadRequests", re.IGNORECASE)


@dataclass(frozen=True)
class VertexAccess:
    """A project, its region, and addresses of services that replace the usual addresses: (service, url)."""

    project: str
    location: str
    endpoints: tuple[tuple[str, str], ...] = ()
    google: Google = field(default_factory=lambda: Google(), compare=False, repr=False)

    @classmethod
    def of(cls, data: VertexRef | VertexSending, google: Google) -> VertexAccess:
        """Return the access for a job's handle or sending plan, over the process's connections."""
        return cls(data.project, data.location, tuple(sorted(data.endpoints.items())), google)

    @property
    def parent(self) -> str:
        """The parent resource of the jobs in Vertex AI."""
        return f"projects/{self.project}/locations/{self.location}"

    def url(self, service: str) -> str:
        """Return the service's address, without a trailing slash."""
        usual = f"{self.location}-aiplatform" if service == "aiplatform" else service
        return dict(self.endpoints).get(service, f"https://{usual}.googleapis.com").rstrip("/")


class Google(HttpClient):
    """The process's connections to Google, and its logins by project."""

    def __init__(self) -> None:
        super().__init__(_said, not_installed)
        self._logins: dict[str, GoogleLogin] = {}

    def login(self, project: str) -> GoogleLogin:
        """Return the login for calls in the project's name."""
        return self._logins.setdefault(project, GoogleLogin(project))


class GoogleLogin:
    """The application's default credentials, which calls use in a project's name."""

    def __init__(self, project: str) -> None:
        self._project = project
        self._found: Any = None
        self._transport: Any = None

    def credentials(self) -> Any:
        """Return the credentials, found once. Raises ConfigError without the library, GoogleError."""
        found = self._found  # another thread may drop the credentials meanwhile
        if found is None:
            with edge.importing(not_installed):
                import google.auth
                from google.auth import exceptions
                from google.oauth2.credentials import Credentials
            # requests would replace the token by a line of ~/.netrc.
            os.environ["NETRC"] = os.devnull
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # about a login without a quota project, which is set below
                    found, _ = google.auth.default(scopes=[SCOPE])
            except exceptions.TransportError as error:
                raise GoogleError(0, "", one_line(error)) from error
            except (exceptions.GoogleAuthError, ValueError, OSError) as error:
                raise GoogleError(401, "credentials", _first_sentence(str(error))) from error
            if isinstance(found, Credentials) and not found.quota_project_id:
                found = found.with_quota_project(self._project)
            self._found = found
        return found

    def sign(self, method: str, url: str, headers: dict[str, str]) -> None:
        """Add the token, a new token if necessary. Raises ConfigError without the library, GoogleError."""
        found = self.credentials()
        with self._refreshing() as transport:
            found.before_request(transport, method, url, headers)

    def renew(self) -> None:
        """Drop the credentials; the next call reads them again."""
        self._found = None

    def account(self) -> str:
        """Return the credentials' account, after Google has given a token. Raises ConfigError, GoogleError."""
        found = self.credentials()
        with self._refreshing() as transport:
            found.refresh(transport)
        return getattr(found, "service_account_email", None) or "your own login"

    @contextlib.contextmanager
    def _refreshing(self) -> Iterator[Any]:
        """Yield the transport for tokens; raise google-auth's errors as GoogleError."""
        with edge.importing(not_installed):
            from google.auth import exceptions
            from google.auth.transport.requests import Request
        self._transport = self._transport or Request()
        try:
            yield self._transport
        except exceptions.RefreshError as error:
            self.renew()
            raise no_token(error) from error
        except exceptions.GoogleAuthError as error:
            raise GoogleError(0, "", cause(error)) from error


def call(access: VertexAccess, method: str, url: str, **options: Any) -> Any:
    """Return the answer to a call in the project's name; options as `HttpClient.call`. Raises GoogleError."""
    return access.google.call(method, url, signer=access.google.login(access.project), **options)


def get_json(access: VertexAccess, service: str, path: str, params: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the JSON object at a service's path. Raises GoogleError, also if a proxy answers with a page."""
    return object_in(call(access, "GET", f"{access.url(service)}{path}", params=params))


def answers(doing: str, needs: str = "Vertex AI User (roles/aiplatform.user)") -> AbstractContextManager[None]:
    """Raise a GoogleError of `doing` as one of our errors. `needs`: the role that allows the call."""
    return edge.answers(doing, partial(_fault, needs=needs))


def polls(doing: str, needs: str = "") -> AbstractContextManager[None]:
    """As `answers`, but raise every error as UnreachableError, because a failed poll tells nothing about the job."""
    return edge.polls(doing, partial(_fault, needs=needs))


def _fault(error: Exception, needs: str) -> RemoteFault | None:
    if not isinstance(error, GoogleError):
        return None
    status, code, words = error.status, error.code, error.words
    if status == 429 and _QUOTA.search(words) and not _RATE.search(words):
        return RemoteFault(CapacityError, words, NO_MACHINES)
    if code == "page":
        return RemoteFault(UnreachableError, words, "is a proxy between this machine and Google?")
    if status == 403 and _DISABLED.search(words):
        api = re.search(r"[a-z]+\.googleapis\.com", words)
        return RemoteFault(ConfigError, words, f"gcloud services enable {api[0] if api else 'the API'}")
    if status == _CANCELLED:
        return RemoteFault(UnreachableError, f"Google gave an unexpected answer: {words}")
    return _GOOGLE.fault(error, needs)


def not_installed(error: ImportError) -> ConfigError:
    """Return the error for a missing Google library."""
    return ConfigError(f"the Google Cloud libraries are not installed here: {error}", hint=install("vertex"))


def no_token(error: Exception) -> GoogleError:
    """Return the error for google-auth's RefreshError: an expired login, or an unreachable server."""
    if getattr(error, "retryable", False):
        return GoogleError(0, "", _first_sentence(str(error)))
    return GoogleError(401, "credentials", _first_sentence(str(error)))


def _said(answer: Any) -> GoogleError:
    status, error = answer.status_code, error_in(answer)
    if status not in BUSY and (status < 400 or answer.text.lstrip().startswith("<")):
        host = urlsplit(answer.url).netloc
        return GoogleError(0, "page", f"{host} answers with a page of HTML, or leads elsewhere (HTTP {status})")
    words = str(error.get("message", "")) or answer.reason or f"HTTP {status}"
    return GoogleError(status, str(error.get("status", "")), one_line(words))


def _first_sentence(text: str) -> str:
    """Return the message of a credentials library, without its advice and its printed tuples."""
    plain = re.sub(r"^\('|', .*$|\.? (To set up|For more|Please).*$", "", " ".join(text.split()))
    return one_line(plain, 200)
