"""The identity of a process for Google Cloud: a credentials file if given, else the machine's service account.

A file (GOOGLE_APPLICATION_CREDENTIALS, or the file of `gcloud auth application-default login`) is read by google-auth;
only this module imports google-auth, and only with a file. A replica of Vertex AI has no file: the module asks the
metadata server, with the standard library, because a user's image may contain nothing more.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
import warnings
from pathlib import Path
from typing import Any

from ..format import one_line
from .retries import tries

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
RENEW_S = 300.0  # before its end; the metadata server makes a new token no earlier
TRIES, PAUSE_S, CONNECT_S, READ_S = 4, 0.5, 10.0, 30.0

_METADATA = "http://{host}/computeMetadata/v1/instance/service-accounts/default/{item}"
_NOBODY = (
    "there are no Google credentials here: give the machine a service account, or set GOOGLE_APPLICATION_CREDENTIALS, "
    "or log in with `gcloud auth application-default login` ({reason})"
)
_NO_LIBRARY = (
    "{file} holds Google credentials, and google-auth, which reads them, is not installed here: `pip install "
    "google-auth requests` on the machines of the job, or add them to the image"
)
_CLOCK = "Google refuses the credentials in {file}, because this machine's clock is wrong ({reason})"
_REFUSED = "Google gives no token for {file}: is it complete, and of an account that still exists? ({reason})"
_LOGIN = "Google gives no token for {file}: log in again with `gcloud auth application-default login` ({reason})"


def of_environment() -> Identity:
    """Return the identity of this process; sends no request yet."""
    file = _file()
    return Identity(_Metadata() if file is None else _CredentialsFile(file))


def anonymous() -> bool:
    """Return whether requests need no identity: a storage emulator, and no credentials available."""
    return bool(os.environ.get("STORAGE_EMULATOR_HOST")) and not os.environ.get("GCE_METADATA_HOST") and not _file()


def missing_package() -> str | None:
    """Return the package to install if no installed package can read the present credentials."""
    file = _file()
    if file is None:
        return None
    try:
        import google.auth.transport.requests  # noqa: F401
    except ImportError as error:
        # google-auth reports a missing requests with its own error.
        cause = error if error.name else error.__cause__
        if getattr(cause, "name", None) not in ("google", "google.auth", "requests"):  # installed, but broken
            raise
        return _NO_LIBRARY.format(file=file)
    return None


def _file() -> Path | None:
    """Return the credentials file, in google-auth's order."""
    if named := os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
        return Path(named)
    folder = os.environ.get("CLOUDSDK_CONFIG")
    with contextlib.suppress(RuntimeError, OSError):  # a user without a home folder
        found = (Path(folder) if folder else Path.home() / ".config/gcloud") / "application_default_credentials.json"
        return found if found.exists() else None
    return None


class Identity:
    """The tokens of an account. Thread-safe."""

    def __init__(self, source: _Metadata | _CredentialsFile) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._token = ""
        self._renew_s = self._end_s = 0.0

    @property
    def who(self) -> str:
        """The tokens' owner, for an error's sentence."""
        return self._source.who

    def token(self) -> str:
        """Return a token valid for minutes. Raises PermissionError, or ConnectionError without an answer."""
        with self._lock:
            now_s = time.monotonic()
            if now_s >= self._renew_s:
                try:
                    token, lasts_s = self._source.fetch()
                except OSError:
                    if now_s >= self._end_s:
                        raise
                else:
                    self._token, self._end_s = token, now_s + lasts_s
                    self._renew_s = self._end_s - min(RENEW_S, lasts_s / 2)
            return self._token

    def forget(self, token: str) -> None:
        """Discard the token, because a service refused it."""
        with self._lock:
            if token == self._token:  # otherwise a different thread renewed it first
                self._renew_s = self._end_s = 0.0


class _Metadata:
    """The service account of the machine, a VM's or a Vertex AI replica's."""

    def __init__(self) -> None:
        self.who = "the job's service account"
        self._was_there = False

    def fetch(self) -> tuple[str, float]:
        """Return a token and its lifetime in seconds."""
        for _ in tries(TRIES, PAUSE_S):
            try:
                token = json.loads(_about_account("token"))
                found = str(token["access_token"]), float(token["expires_in"])
            except urllib.error.HTTPError as error:
                with error:
                    failure: Exception = error
                self._was_there = True
                if error.code in (403, 404):
                    raise PermissionError(_NOBODY.format(reason=one_line(error))) from error
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                failure = error
            else:
                if not self._was_there:
                    self._was_there = True
                    with contextlib.suppress(OSError, http.client.HTTPException):
                        self.who = f"the job's service account {_about_account('email').strip()}"
                return found
        if self._was_there:
            raise ConnectionError(f"the metadata server gives no token ({one_line(failure)})") from failure
        raise PermissionError(_NOBODY.format(reason=f"no metadata server: {one_line(failure)}")) from failure


class _CredentialsFile:
    """The account of a credentials file: a service account, a user, a workload of another cloud."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._credentials: Any = None
        self.who = f"the account in {path}"

    def fetch(self) -> tuple[str, float]:
        if words := missing_package():
            raise PermissionError(words)
        import google.auth
        from google.auth import exceptions
        from google.auth.transport.requests import Request

        try:
            if self._credentials is None:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the warning that a user's login has no quota project
                    self._credentials, _ = google.auth.default(scopes=[SCOPE])
                if email := getattr(self._credentials, "service_account_email", None):
                    self.who = str(email)
            self._credentials.refresh(functools.partial(Request(), timeout=READ_S))  # by default it waits two minutes
        except (exceptions.GoogleAuthError, OSError, ValueError) as error:
            self._credentials = None  # the file may change before the next call
            raise self._failure(error, is_lost=isinstance(error, exceptions.TransportError)) from error
        token, expiry = str(self._credentials.token), self._credentials.expiry  # UTC without a time zone
        if expiry is None:
            return token, 3600.0
        now = datetime.datetime.now(datetime.timezone.utc).replace(tzinfo=None)
        return token, max(1.0, (expiry.replace(tzinfo=None) - now).total_seconds())

    def _failure(self, error: Exception, *, is_lost: bool) -> OSError:
        reason = one_line(error)
        if is_lost or getattr(error, "retryable", False):
            return ConnectionError(f"Google's login does not answer ({reason})")
        if "short-lived token" in reason or "reasonable timeframe" in reason:
            return PermissionError(_CLOCK.format(file=self._path, reason=reason))
        is_login = self._path.name == "application_default_credentials.json"
        return PermissionError((_LOGIN if is_login else _REFUSED).format(file=self._path, reason=reason))


def _about_account(item: str) -> str:
    """Return the metadata server's answer about the machine's account; the request must bypass proxies."""
    host = os.environ.get("GCE_METADATA_HOST") or "metadata.google.internal"
    request = urllib.request.Request(_METADATA.format(host=host, item=item), headers={"Metadata-Flavor": "Google"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=CONNECT_S) as answer:
        return str(answer.read().decode())
