"""A JSON object by HTTP POST, for any receiver of webhooks."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from contextlib import suppress
from typing import Any

from .message import DeliveryError, Notice, masked


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: a redirected POST would arrive as a GET without its body."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def body(notice: Notice) -> dict[str, Any]:
    """Return the notice's fields, with the whole notice as `text` for people."""
    return {**notice.fields, "text": notice.text}


def post(url: str, what: dict[str, Any], key: str, timeout_s: float) -> None:
    """Deliver the object; any 2xx counts as a receipt. Raises DeliveryError."""
    headers = {"Content-Type": "application/json; charset=utf-8", "User-Agent": "cloudtrain", "Idempotency-Key": key}
    try:
        if not url.lower().startswith(("http://", "https://")):
            raise ValueError
        request = urllib.request.Request(url, json.dumps(what).encode(), headers, method="POST")
        with (
            urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout_s) as answer,
            suppress(OSError, http.client.HTTPException),  # a 2xx is a receipt, even if the body fails
        ):
            answer.read(1000)
    except urllib.error.HTTPError as error:
        with error:
            raise _refused(url, error.code, error.headers.get("Retry-After")) from None
    except urllib.error.URLError as error:
        raise _unreachable(url, error.reason) from None
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, http.client.InvalidURL):
            raise DeliveryError("the address is no http(s) address", "check it for spaces and line ends") from None
        if isinstance(error, TimeoutError):  # urllib wraps all errors before the answer in URLError
            words = f"{masked(url)} has accepted the message and does not answer"
            raise DeliveryError(words, may_have_arrived=True) from None
        raise _unreachable(url, error) from None
    except ValueError:
        raise DeliveryError("the address is no http(s) address", "it begins with https://") from None


def _refused(url: str, code: int, after: str | None) -> DeliveryError:
    where = masked(url)
    if code in (408, 429) or code >= 500:
        after_s = float(after) if after is not None and after.strip().isdigit() else None
        return DeliveryError(f"{where} answers with HTTP {code}", after_s=after_s)
    if 300 <= code < 400:
        return DeliveryError(f"{where} redirects to another address (HTTP {code})", "use the target address")
    cure = "the receiver does not know this webhook: make a new webhook there, and use its address"
    return DeliveryError(f"{where} refuses it: HTTP {code}", cure)


def _unreachable(url: str, reason: object) -> DeliveryError:
    if isinstance(reason, TimeoutError):
        return DeliveryError(f"{masked(url)} does not answer")
    if isinstance(reason, ssl.SSLError):
        return DeliveryError(f"{masked(url)} shows no certificate that can be trusted: {reason.reason}")
    words = getattr(reason, "strerror", None) or type(reason).__name__
    return DeliveryError(f"{masked(url)} cannot be reached: {words}")
