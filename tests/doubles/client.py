"""Calls to a stand-in without any SDK, through the stand-in's proxy."""

import functools
import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Reply:
    """An answer of any status; header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """Return the body read as JSON."""
        return json.loads(self.body)


def ask(
    proxy: str, ca: str, method: str, url: str, body: Any, headers: Mapping[str, str], timeout_s: float = 30.0
) -> Reply:
    """Return the answer; a `body` that is not bytes is sent as JSON. Raises OSError if no answer arrives."""
    told = dict(headers)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    if data is not None and not isinstance(body, bytes):
        told["Content-Type"] = "application/json"
    request = urllib.request.Request(url, data, told, method=method)
    try:
        with _opener(proxy, ca).open(request, timeout=timeout_s) as answer:
            return Reply(answer.status, _lower(answer.headers), answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return Reply(error.code, _lower(error.headers), error.read())
    except http.client.BadStatusLine as error:
        raise ConnectionResetError("the connection was closed without an answer") from error


@functools.lru_cache(maxsize=8)
def _opener(proxy: str, ca: str) -> urllib.request.OpenerDirector:
    handlers = urllib.request.ProxyHandler({"https": proxy})
    return urllib.request.build_opener(
        handlers, urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=ca))
    )


def _lower(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}
