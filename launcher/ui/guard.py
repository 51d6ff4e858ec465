"""Access control: checks on every request and headers on every answer.

Every user of the machine can reach a page on loopback, and so can every site in the user's browser. So the Host header
must be ours (a name rebound to this address is refused), a secret is required, and a request that changes state must
come from our own page. The token in the address is valid for a single exchange for a cookie, which scripts cannot read
and requests of foreign sites do not carry.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CSRF_FIELD, CSRF_HEADER = "csrf", "x-cloudtrain-csrf"
TOKEN_BYTES = 32  # 256 bits
MOST_BODY_BYTES = 16_384
MOST_QUERY_BYTES = 4_096
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
# A visit started by a foreign page (the file that opens the browser, a link in a chat) does not carry a strict cookie.
# This page of ours loads the same address again, and the second visit does.
_AGAIN = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="0">'
    "<title>cloudtrain</title></head><body></body></html>"
)
_NO_KEY = (
    "This page asks for a key: open the address that `cloudtrain ui` has printed last. Each is good for one browser."
)


@dataclass
class Keys:
    """The secrets of a run: token of the next address, session of the browsers' cookies, CSRF token of the forms."""

    session: str = field(default_factory=lambda: secrets.token_urlsafe(TOKEN_BYTES), repr=False)
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(TOKEN_BYTES), repr=False)
    token: str = field(default_factory=lambda: secrets.token_urlsafe(TOKEN_BYTES), repr=False)

    def exchange(self, token: str) -> bool:
        """Return whether the token is right; a right token is replaced, since each token is valid once."""
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
        self.cookie = f"cloudtrain-ui-{port}"  # cookies of a host are shared by all its ports
        self.used = used

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or let the app answer; a protocol except HTTP is refused."""
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

        size = 0

        async def receive_bounded() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MOST_BODY_BYTES:
                raise RuntimeError("the form is larger than it said")
            return message

        answer = self._refusal(scope) or self.app
        await answer(scope, receive_bounded, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        """Return the answer to a refused request, None for an accepted request."""
        headers = Headers(scope=scope)
        if headers.get("host", "") not in self.hosts:
            return PlainTextResponse("This host is not served here: take the address and the port as printed.", 421)
        if len(scope.get("query_string", b"")) > MOST_QUERY_BYTES:
            return PlainTextResponse("The address is too long.", 414)
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
        """Return a redirect to the same page without the token, and with the cookie if the token was right."""
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
        """Return whether the request carries our cookie; cookies of different programs may have any form."""
        pairs = (pair.partition("=") for text in headers.getlist("cookie") for pair in text.split(";"))
        values = [value.strip() for name, _, value in pairs if name.strip() == self.cookie]
        return any(hmac.compare_digest(value.encode(), self.keys.session.encode()) for value in values)

    def _foreign(self, scope: Scope, headers: Headers) -> Response | None:
        """Return the refusal of a request from a foreign site's page."""
        site = headers.get("sec-fetch-site")
        if scope["method"] != "POST":
            # A visit is harmless from any site; resources may be loaded only by our page.
            is_ours = site in (None, "same-origin", "none") or headers.get("sec-fetch-mode") == "navigate"
            return None if is_ours else PlainTextResponse("This is for our own page.", 403)
        # The host is one of ours: `_refusal` has checked it.
        if headers.get("origin") != f"http://{headers.get('host')}" or site not in (None, "same-origin"):
            return PlainTextResponse("Only our own page may ask for that.", 403)
        if (length := headers.get("content-length")) is None or not length.isdecimal():
            return PlainTextResponse("The length of the form is missing.", 411)
        if int(length) > MOST_BODY_BYTES:
            return PlainTextResponse("The form is too large.", 413)
        return None
