"""Who may use the page, and what a browser may do with it: everything that every request and every answer goes through.

A page on loopback is reachable by every user of the machine, and by every site that its user's browser shows. So the
host must be ours (a name that a site has rebound to this address is not), a secret is asked for, and what changes
something must come from our own page. The secret in the address is good for one exchange; a cookie, which no script
can read and no other site's request carries, takes its place.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["CSRF_FIELD", "CSRF_HEADER", "MOST_HEAD_BYTES", "Guard", "Keys"]

CSRF_FIELD, CSRF_HEADER = "csrf", "x-cloudtrain-csrf"
TOKEN_BYTES = 32  # 256 bits
MOST_BODY_BYTES = 16_384
MOST_QUERY_BYTES = 4_096
MOST_HEAD_BYTES = 32_768  # all headers together
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "cache-control": "no-store",
}
# A visit that another page began (the file that opens the browser, a link in a chat) does not carry a strict cookie.
# This page, which is ours, goes to the same address again: that visit does.
_AGAIN = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="0">'
    "<title>cloudtrain</title></head><body></body></html>"
)
_NO_KEY = (
    "This page asks for a key: open the address that `cloudtrain ui` has printed last. Each is good for one browser."
)


@dataclass
class Keys:
    """The secrets of one run: what the next address carries, what the browsers' cookies hold, what forms carry."""

    session: str = field(default_factory=lambda: secrets.token_urlsafe(TOKEN_BYTES), repr=False)
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(TOKEN_BYTES), repr=False)
    token: str = field(default_factory=lambda: secrets.token_urlsafe(TOKEN_BYTES), repr=False)

    def exchange(self, token: str) -> bool:
        """Return whether that is the address's token; the next address has another."""
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            return False
        self.token = secrets.token_urlsafe(TOKEN_BYTES)
        return True


class Guard:
    """The outermost layer of the page. `used` is called after a token was exchanged."""

    def __init__(self, app: ASGIApp, *, keys: Keys, port: int, used: Callable[[], None] = lambda: None) -> None:
        self.app = app
        self.keys = keys
        self.hosts = frozenset({f"127.0.0.1:{port}", f"localhost:{port}"})
        self.cookie = f"cloudtrain-ui-{port}"  # browsers keep one jar for all ports of a host
        self.used = used

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or have the app answer; a request that is no HTTP is refused."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError("only HTTP is served here")

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = self._refusal(scope)
        if answer is not None:
            await answer(scope, receive, send_guarded)
            return
        bounded = _Bounded(receive)
        await self.app(scope, bounded, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        """Return the answer to what does not get through, None for what does."""
        headers = Headers(scope=scope)
        if headers.get("host", "") not in self.hosts:
            return PlainTextResponse("This host is not served here: take the address and the port as printed.", 421)
        if len(scope.get("query_string", b"")) > MOST_QUERY_BYTES:
            return PlainTextResponse("The address is too long.", 414)
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MOST_HEAD_BYTES:
            return PlainTextResponse("What the browser says of itself is too long.", 431)
        if scope["method"] not in ("GET", "HEAD", "POST"):
            return PlainTextResponse("Only GET and POST are answered here.", 405, {"allow": "GET, HEAD, POST"})
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        token = next((value for name, value in query if name == "token"), None)
        if scope["method"] == "GET" and token is not None:
            return self._exchanged(scope, headers, token, query)
        if not self.is_known(headers):
            is_visit = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
            if scope["method"] == "GET" and is_visit and headers.get("sec-fetch-site") in ("cross-site", "same-site"):
                return Response(_AGAIN, 200, media_type="text/html")
            return PlainTextResponse(_NO_KEY, 403)
        return self._foreign(scope, headers)

    def _exchanged(self, scope: Scope, headers: Headers, token: str, query: list[tuple[str, str]]) -> Response:
        """Return the way to the same page without the token, with the cookie where the token was right."""
        rest = urlencode([(name, value) for name, value in query if name != "token"])
        place = scope["path"] if scope["path"].startswith("/") and not scope["path"].startswith("//") else "/"
        is_right = self.keys.exchange(token)
        if not is_right and not self.is_known(headers):
            return PlainTextResponse(_NO_KEY, 403)
        answer = RedirectResponse(place + (f"?{rest}" if rest else ""), 303)
        if is_right:
            answer.set_cookie(self.cookie, self.keys.session, httponly=True, samesite="strict", path="/")
            self.used()
        return answer

    def is_known(self, headers: Headers) -> bool:
        """Return whether our cookie is among the cookies of the request; cookies of other programs have any form."""
        pairs = (pair.partition("=") for text in headers.getlist("cookie") for pair in text.split(";"))
        values = [value.strip() for name, _, value in pairs if name.strip() == self.cookie]
        return any(hmac.compare_digest(value.encode(), self.keys.session.encode()) for value in values)

    def _foreign(self, scope: Scope, headers: Headers) -> Response | None:
        """Return the refusal of what another site's page has asked for."""
        site = headers.get("sec-fetch-site")
        if scope["method"] != "POST":
            # A visit is harmless, whoever began it; what a page loads must be our page's.
            is_ours = site in (None, "same-origin", "none") or headers.get("sec-fetch-mode") == "navigate"
            return None if is_ours else PlainTextResponse("This is for our own page.", 403)
        origins = {f"http://{host}" for host in self.hosts}
        if headers.get("origin") not in origins or headers.get("origin") != f"http://{headers.get('host')}":
            return PlainTextResponse("Only our own page may ask for that.", 403)
        if site not in (None, "same-origin"):
            return PlainTextResponse("Only our own page may ask for that.", 403)
        if (length := headers.get("content-length")) is None or not length.isdecimal():
            return PlainTextResponse("The length of the form is missing.", 411)
        if int(length) > MOST_BODY_BYTES:
            return PlainTextResponse("The form is too large.", 413)
        return None


class _Bounded:
    """What a request's body is read from, up to the most that a form may have."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._bytes = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        self._bytes += len(message.get("body", b""))
        if self._bytes > MOST_BODY_BYTES:
            raise RuntimeError("the form is larger than it said")
        return message
