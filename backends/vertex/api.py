"""Google's HTTP interfaces: credentials, retries, and Google's errors as cloudtrain's errors.

All calls are here except a job's creation, the upload of its code and the tail of its log. The module does without the
SDK, whose import alone takes most of a second of processor time, and imports google-auth and requests on first use.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from cloudtrain.launcher.errors import (
    CapacityError,
    CloudtrainError,
    ConfigError,
    CredentialError,
    UnreachableError,
)
from cloudtrain.launcher.text.extras import install
from cloudtrain.launcher.text.remote import NO_NAME, cause, one_line

if TYPE_CHECKING:
    from cloudtrain.backends.vertex.records import VertexRef, VertexSending

__all__ = [
    "VertexAccess",
    "GoogleError",
    "answers",
    "call",
    "credentials",
    "get_json",
    "no_quota",
    "no_token",
    "not_installed",
    "object_in",
    "object_url",
    "polls",
    "sign_in",
    "split_uri",
    "translated",
]

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
CONNECT_S, READ_S = 10.0, 60.0
TRIES, PAUSE_S, LONGEST_PAUSE_S = 4, 0.25, 10.0
# For a refused send, and for a job that failed by a lack of machines.
NO_MACHINES = (
    "take fewer or other machines, another region, or try again; where a quota is named, IAM & Admin > Quotas of the "
    "project shows and raises it (spot and flex start count on the `preemptible` ones)"
)
HINT_LOGIN = "gcloud auth application-default login, or export GOOGLE_APPLICATION_CREDENTIALS"

_BUSY = (408, 429, 500, 502, 503, 504)
_CANCELLED = 499  # gRPC's CANCELLED: the server may or may not have done the call
_DISABLED = re.compile(r"has not been used|is disabled|SERVICE_DISABLED|not enabled")
_QUOTA = re.compile(r"quota|resource.?exhausted|stockout|not enough|insufficient|not available", re.IGNORECASE)
_RATE = re.compile(r"per minute|per second|rate limit|requests? (per|limit)|ReadRequests", re.IGNORECASE)

_sessions: dict[str, Any] = {}  # by project
_credentials: dict[str, Any] = {}


@dataclass(frozen=True)
class VertexAccess:
    """A project, its region, and addresses of services that replace the usual addresses: (service, url)."""

    project: str
    location: str
    endpoints: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, data: VertexRef | VertexSending) -> VertexAccess:
        """Return the access for a job's handle or sending plan."""
        return cls(data.project, data.location, tuple(sorted(data.endpoints.items())))

    @property
    def parent(self) -> str:
        """The parent resource of the jobs in Vertex AI."""
        return f"projects/{self.project}/locations/{self.location}"

    def url(self, service: str) -> str:
        """Return the service's address, without a trailing slash."""
        usual = f"{self.location}-aiplatform" if service == "aiplatform" else service
        return dict(self.endpoints).get(service, f"https://{usual}.googleapis.com").rstrip("/")


class GoogleError(Exception):
    """Google's answer: the HTTP status, Google's code and words; status 0 if Google did not answer."""

    def __init__(self, status: int, code: str, words: str) -> None:
        super().__init__(words)
        self.status = status
        self.code = code
        self.words = words


def credentials(project: str) -> Any:
    """Return the application's default credentials, found once. Raises ConfigError without the library, GoogleError."""
    if project not in _credentials:
        try:
            import google.auth
            from google.auth import exceptions
            from google.oauth2.credentials import Credentials
        except ImportError as error:
            raise not_installed(error) from error
        # requests would replace the token by a line of ~/.netrc.
        os.environ["NETRC"] = os.devnull
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about a login without a quota project, which is set below
                found, _ = google.auth.default(scopes=[SCOPE])
        except exceptions.TransportError as error:
            raise GoogleError(0, "", one_line(str(error))) from error
        except (exceptions.GoogleAuthError, ValueError, OSError) as error:
            raise GoogleError(401, "credentials", _first_sentence(str(error))) from error
        if isinstance(found, Credentials) and not found.quota_project_id:
            found = found.with_quota_project(project)
        _credentials[project] = found
    return _credentials[project]


def call(
    access: VertexAccess,
    method: str,
    url: str,
    *,
    params: Mapping[str, str] | None = None,
    body: Any = None,
    data: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    stream: bool = False,
    tries: int = TRIES,
) -> Any:
    """Return the answer (requests.Response); retry if Google is busy or a connection breaks.

    Raises GoogleError.
    """
    session, errors, refused = _session(access.project)
    all_headers = {**({} if data is None else {"Content-Type": "application/octet-stream"}), **(headers or {})}
    for number in range(1, tries + 1):
        try:
            answer = session.request(
                method,
                url,
                params=params,
                json=body,
                data=data,
                headers=all_headers,
                stream=stream,
                timeout=(CONNECT_S, READ_S),
                allow_redirects=False,
            )
        except refused.RefreshError as error:
            failure = no_token(error)
            if failure.status:
                raise failure from error
        except (errors.RequestException, refused.GoogleAuthError) as error:
            failure = GoogleError(0, "", cause(error))
        except OSError as error:  # requests raises OSError if the file of certificates is missing
            raise GoogleError(495, "certificates", one_line(str(error))) from error
        else:
            if answer.status_code < 300:
                return answer
            failure = _said(answer)
            if answer.status_code not in _BUSY:
                raise failure
        if number < tries:
            time.sleep(min(PAUSE_S * 2**number, LONGEST_PAUSE_S))
    raise failure


def get_json(access: VertexAccess, service: str, path: str, params: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the JSON object at a service's path. Raises GoogleError, also if a proxy answers with a page."""
    return object_in(call(access, "GET", f"{access.url(service)}{path}", params=params))


def object_in(answer: Any) -> dict[str, Any]:
    """Return the JSON object in the answer. Raises GoogleError."""
    try:
        found = answer.json()
    except ValueError as error:
        raise GoogleError(0, "", f"{urlsplit(answer.url).netloc} did not answer with JSON") from error
    if not isinstance(found, dict):
        raise GoogleError(0, "", f"{urlsplit(answer.url).netloc} did not answer with a JSON object")
    return found


def split_uri(uri: str) -> tuple[str, str]:
    """Return bucket and name of `gs://BUCKET/NAME`."""
    bucket, _, name = uri.removeprefix("gs://").partition("/")
    return bucket, name


def object_url(access: VertexAccess, uri: str, *, upload: bool = False) -> str:
    """Return the address of an object, or the address for its upload."""
    bucket, name = split_uri(uri)
    base = access.url("storage")
    if upload:
        return f"{base}/upload/storage/v1/b/{quote(bucket, safe='')}/o"
    return f"{base}/storage/v1/b/{quote(bucket, safe='')}/o/{quote(name, safe='')}"


@contextlib.contextmanager
def answers(doing: str, needs: str = "Vertex AI User (roles/aiplatform.user)") -> Iterator[None]:
    """Raise a GoogleError of `doing` as one of our errors, in one sentence with a hint.

    `needs`: the role that allows the call.
    """
    try:
        yield
    except GoogleError as error:
        raise translated(error, doing, needs) from error


@contextlib.contextmanager
def polls(doing: str) -> Iterator[None]:
    """As `answers`, but raise every error as UnreachableError, because a failed poll tells nothing about the job."""
    try:
        with answers(doing):
            yield
    except UnreachableError:
        raise
    except CloudtrainError as error:
        _sessions.clear()  # a new sign-in must count at once
        _credentials.clear()
        raise UnreachableError(error.message, where=error.where, hint=error.hint) from error


def translated(error: GoogleError, doing: str, needs: str) -> CloudtrainError:
    """Return our error for Google's error."""
    status, code, words = error.status, error.code, error.words
    if code == "credentials":
        return CredentialError(f"cannot {doing}: no valid Google credentials: {words}", hint=HINT_LOGIN)
    if code == "certificates":
        return ConfigError(f"cannot {doing}: {words}", hint="fix REQUESTS_CA_BUNDLE, or unset it")
    if status == 401:
        return CredentialError(f"cannot {doing}: Google rejects these credentials: {words}", hint=HINT_LOGIN)
    if status == 429 and _QUOTA.search(words) and not _RATE.search(words):
        return no_quota(f"cannot {doing}: {words}")
    if code == "page":
        return UnreachableError(f"cannot {doing}: {words}", hint="is a proxy between this machine and Google?")
    if status == 403 and _DISABLED.search(words):
        api = re.search(r"[a-z]+\.googleapis\.com", words)
        return ConfigError(f"cannot {doing}: {words}", hint=f"gcloud services enable {api[0] if api else 'the API'}")
    if status == 403:
        hint = f"a role that allows it: {needs}; the project's owner grants roles"
        return CredentialError(f"cannot {doing}: not allowed: {words}", hint=hint)
    if status in (0, *_BUSY, _CANCELLED):
        does = "cannot be reached" if words == NO_NAME else "gave an unexpected answer"
        return UnreachableError(f"cannot {doing}: Google {does}: {words}")
    return ConfigError(f"cannot {doing}: {words}", where=code or str(status))


def no_quota(words: str) -> CapacityError:
    """Return the error for a lack of quota or machines."""
    return CapacityError(words, hint=NO_MACHINES)


def _session(project: str) -> tuple[Any, Any, Any]:
    found = credentials(project)
    try:
        import requests
        from google.auth import exceptions as refused
        from google.auth.transport.requests import AuthorizedSession
    except ImportError as error:
        raise not_installed(error) from error
    if project not in _sessions:
        _sessions[project] = AuthorizedSession(found)  # type: ignore[no-untyped-call]
    return _sessions[project], requests.exceptions, refused


def not_installed(error: ImportError) -> ConfigError:
    """Return the error for a missing Google library."""
    return ConfigError(f"the Google Cloud libraries are not installed here: {error}", hint=install("vertex"))


def no_token(error: Exception) -> GoogleError:
    """Return the error for google-auth's RefreshError: an expired login, or an unreachable server."""
    if getattr(error, "retryable", False):
        return GoogleError(0, "", _first_sentence(str(error)))
    return GoogleError(401, "credentials", _first_sentence(str(error)))


def sign_in(project: str) -> str:
    """Return the credentials' account, after Google has given a token. Raises ConfigError, GoogleError."""
    found = credentials(project)
    _, errors, refused = _session(project)
    from google.auth.transport.requests import Request

    try:
        found.refresh(Request())
    except refused.RefreshError as error:
        raise no_token(error) from error
    except (errors.RequestException, refused.GoogleAuthError) as error:
        raise GoogleError(0, "", cause(error)) from error
    return getattr(found, "service_account_email", None) or "your own login"


def _said(answer: Any) -> GoogleError:
    code, words, status = "", "", answer.status_code
    if status not in _BUSY and (status < 400 or answer.text.lstrip().startswith("<")):
        host = urlsplit(answer.url).netloc
        return GoogleError(0, "page", f"{host} answers with a page of HTML, or leads elsewhere (HTTP {status})")
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        error = json.loads(answer.text)
        error = error.get("error", error)
        code, words = str(error.get("status", "")), str(error.get("message", ""))
    return GoogleError(status, code, one_line(words or answer.reason or f"HTTP {status}"))


def _first_sentence(text: str) -> str:
    """Return the message of a credentials library, without its advice and its printed tuples."""
    plain = re.sub(r"^\('|', .*$|\.? (To set up|For more|Please).*$", "", " ".join(text.split()))
    return one_line(plain, 200)
