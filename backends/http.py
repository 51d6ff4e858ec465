"""HTTP calls to a platform: one session, retries with a doubling pause, tokens, and errors with the server's words.

The library `requests` is imported on the first call.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from cloudtrain.entrypoints.format import one_line
from cloudtrain.launcher.errors import ConfigError, CredentialError, UnreachableError

from .edge import NO_NAME, RemoteFault, cause, importing

CONNECT_S, READ_S = 10.0, 60.0
TRIES, PAUSE_S, LONGEST_PAUSE_S = 4, 0.25, 10.0
MOST_PATIENT_S = 120.0  # the longest pause that a host may request
CONNECTIONS = 32  # to one host, kept open for the next calls
BUSY = (408, 429, 500, 502, 503, 504)


class RemoteError(Exception):
    """A platform's answer: the HTTP status, the platform's code and words; status 0 if the platform did not answer."""

    def __init__(self, status: int, code: str, words: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(words)
        self.status = status
        self.code = code
        self.words = words
        self.headers: Mapping[str, str] = headers or {}


class Signer(Protocol):
    """The credentials for calls."""

    def sign(self, method: str, url: str, headers: dict[str, str]) -> None:
        """Add a token. Raises RemoteError; an error with status 0 and no code may pass with a retry."""

    def renew(self) -> None:
        """Drop a refused token, so that the next call reads the credentials again: a new sign-in counts at once."""


class HttpClient:
    """The connections to a platform's hosts.

    `read` returns the error for an answer with a status from 300 on; `missing` the error for a missing library.
    """

    def __init__(self, read: Callable[[Any], RemoteError], missing: Callable[[ImportError], ConfigError]) -> None:
        self._read, self._missing = read, missing
        self._session: Any = None
        self._not_before_s: dict[str, float] = {}  # host -> time of the next call that the host allows (monotonic)

    def call(
        self,
        method: str,
        url: str,
        *,
        signer: Signer | None = None,
        params: Mapping[str, str] | None = None,
        body: Any = None,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        stream: bool = False,
        tries: int = TRIES,
        also: tuple[int, ...] = (),
    ) -> Any:
        """Return the answer (requests.Response); `signer` is None for an open address.

        Pauses and retries if the host is busy or a connection breaks; the host may request a longer pause. Renews the
        credentials if the host refuses the token. Statuses in `also` are no errors. Raises RemoteError.
        """
        host, number, is_renewed = urlsplit(url).netloc, 1, False
        if self._not_before_s.get(host, 0.0) > time.monotonic():
            raise RemoteError(429, "", f"{host} has asked for a pause in requests")
        sent = {"params": params, "json": body, "data": data, "stream": stream}
        while True:
            pause_s = PAUSE_S * 2**number
            try:
                answer = self._once(method, url, signer, dict(headers or {}), sent)
            except RemoteError as error:
                if error.status or error.code:
                    raise
                failure = error
            else:
                if answer.status_code < 300 or answer.status_code in also:
                    return answer
                failure = self._read(answer)
                if answer.status_code in (401, 403) and signer is not None:
                    signer.renew()
                if answer.status_code == 401 and signer is not None and not is_renewed:
                    is_renewed = True
                    continue
                if answer.status_code not in BUSY:
                    raise failure
                with contextlib.suppress(ValueError):
                    pause_s = max(0.0, float(answer.headers.get("Retry-After", pause_s)))
            if pause_s > LONGEST_PAUSE_S:
                self._not_before_s[host] = time.monotonic() + min(pause_s, MOST_PATIENT_S)
                raise failure
            if number == tries:
                raise failure
            time.sleep(pause_s)
            number += 1

    def _once(self, method: str, url: str, signer: Signer | None, headers: dict[str, str], sent: dict[str, Any]) -> Any:
        """Return the answer to one request. Raises RemoteError."""
        with importing(self._missing):
            import requests
        if self._session is None:
            session = requests.Session()
            session.mount("https://", requests.adapters.HTTPAdapter(pool_maxsize=CONNECTIONS))
            self._session = session
        if sent["data"] is not None:
            headers.setdefault("Content-Type", "application/octet-stream")
        try:
            if signer is not None:
                signer.sign(method, url, headers)
            return self._session.request(
                method, url, headers=headers, timeout=(CONNECT_S, READ_S), allow_redirects=False, **sent
            )
        except requests.exceptions.RequestException as error:
            raise RemoteError(0, "", cause(error)) from error
        except OSError as error:  # requests raises OSError if the file of certificates is missing
            raise RemoteError(495, "certificates", one_line(error)) from error


def object_in(answer: Any) -> dict[str, Any]:
    """Return the JSON object in the answer. Raises RemoteError, also for a proxy's page."""
    try:
        found = answer.json()
    except ValueError as error:
        raise RemoteError(0, "", f"{urlsplit(answer.url).netloc} did not answer with JSON") from error
    if not isinstance(found, dict):
        raise RemoteError(0, "", f"{urlsplit(answer.url).netloc} did not answer with a JSON object")
    return found


def error_in(answer: Any) -> dict[str, Any]:
    """Return the object `error` of a refusal, {} if the answer has none."""
    with contextlib.suppress(ValueError, AttributeError):
        found = json.loads(answer.text)
        found = found.get("error", found)
        return found if isinstance(found, dict) else {}
    return {}


@dataclass(frozen=True)
class Platform:
    """The words for a platform's errors."""

    name: str
    login: str
    """The cure for missing credentials."""
    again: str
    """The cure for refused credentials."""
    granter: str
    """Who grants the roles that a call needs."""

    def fault(self, error: RemoteError, needs: str) -> RemoteFault:
        """Return the meaning of the error. `needs`: the role that allows the call."""
        status, code, words = error.status, error.code, error.words
        if code == "credentials":
            return RemoteFault(CredentialError, f"no valid {self.name} credentials: {words}", self.login)
        if code == "certificates":
            return RemoteFault(ConfigError, words, "fix REQUESTS_CA_BUNDLE, or unset it")
        if status == 401:
            return RemoteFault(CredentialError, f"{self.name} rejects these credentials: {words}", self.again)
        if status == 403:
            hint = f"a role that allows it: {needs}; {self.granter} grants roles"
            return RemoteFault(CredentialError, f"not allowed: {words}", hint)
        if status in (0, *BUSY):
            does = "cannot be reached" if words == NO_NAME else "gave an unexpected answer"
            return RemoteFault(UnreachableError, f"{self.name} {does}: {words}")
        return RemoteFault(ConfigError, words, where=code or str(status))
