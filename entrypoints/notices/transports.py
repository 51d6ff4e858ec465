"""A message to one receiver: a JSON object by HTTP POST (receivers.py), or a mail.

The mail server is in a URL: smtp://user:password@host:587 or smtps://host.
"""

from __future__ import annotations

import http.client
import json
import smtplib
import socket
import ssl
import threading
import urllib.error
import urllib.request
from contextlib import suppress
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import formatdate
from typing import Any
from urllib.parse import unquote, urlsplit

from .message import LIMIT_S, DeliveryError, Notice, masked

PORT, TLS_PORT = 587, 465
SUBJECT = 200
MOST_BYTES = 1 << 20  # of a mail server's replies
_FORM = "write smtp://USER:PASSWORD@HOST:587 (with STARTTLS) or smtps://USER:PASSWORD@HOST; in the parts %40 is an @"


def post(url: str, what: dict[str, Any], key: str, timeout_s: float) -> None:
    """Deliver the object; any 2xx counts as a receipt. Raises DeliveryError."""
    headers = {"Content-Type": "application/json; charset=utf-8", "User-Agent": "cloudtrain", "Idempotency-Key": key}
    try:
        if not url.lower().startswith(("http://", "https://")):
            raise ValueError
        request = urllib.request.Request(url, json.dumps(what).encode(), headers, method="POST")
        opener = urllib.request.OpenerDirector()  # follows no redirect: a POST would arrive as a GET without its body
        for handler in (urllib.request.ProxyHandler, urllib.request.HTTPDefaultErrorHandler, _Limited):
            opener.add_handler(handler())
        opener.add_handler(urllib.request.HTTPErrorProcessor())
        opener.open(request, timeout=timeout_s).close()  # a 2xx is a receipt, whatever body follows
    except urllib.error.HTTPError as error:
        with error:
            raise _refused(url, error.code, error.headers.get("Retry-After")) from None
    except urllib.error.URLError as error:
        raise _unreachable(url, error.reason) from None
    except http.client.InvalidURL:
        raise DeliveryError("the address is no http(s) address", "check it for spaces and line ends") from None
    except TimeoutError:  # urllib wraps all errors before the answer in URLError
        words = f"{masked(url)} has accepted the message and does not answer"
        raise DeliveryError(words, may_have_arrived=True) from None
    except (OSError, http.client.HTTPException) as error:
        raise _unreachable(url, error) from None
    except ValueError:
        raise DeliveryError("the address is no http(s) address", "it begins with https://") from None


def post_mail(smtp: str, notice: Notice, to: str, sender: str, timeout_s: float) -> None:
    """Deliver the mail. From: `sender`, else the server's user if the user is an address. Raises DeliveryError.

    A password is never sent in clear text, except to this machine itself.
    """
    where = masked(smtp)
    try:
        parts = urlsplit(smtp)
        scheme, host, port = parts.scheme, parts.hostname, parts.port
    except ValueError:
        raise DeliveryError("the mail server's address cannot be read", _FORM) from None
    if scheme not in ("smtp", "smtps") or not host:
        raise DeliveryError("the mail server's address cannot be read", _FORM)
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    mail = EmailMessage(policy=SMTP)
    mail["From"] = _header(sender or (user if "@" in user else f"cloudtrain@{socket.gethostname() or 'localhost'}"))
    mail["To"] = _header(to)
    mail["Subject"] = _header(notice.title)[:SUBJECT]
    mail["Date"] = formatdate()
    mail["Message-ID"] = f"<{notice.id}@cloudtrain>"  # the same at a retry, so mail programs show one mail
    mail["Auto-Submitted"] = "auto-generated"
    mail.set_content(notice.text + "\n", cte="8bit" if notice.text.isascii() else "base64")
    try:
        if scheme == "smtps":
            tls = ssl.create_default_context()
            server: smtplib.SMTP = _MailOverTls(host, port or TLS_PORT, timeout=timeout_s, context=tls)
        else:
            server = _Mail(host, port or PORT, timeout=timeout_s)
        with server:
            _talk(server, user, password, is_tls=scheme == "smtps", is_here=_is_here(host))
            try:
                server.send_message(mail)
            except smtplib.SMTPServerDisconnected:  # smtplib raises the same error if no answer came in time
                words = f"{where} may have accepted the message, and does not answer"
                raise DeliveryError(words, may_have_arrived=True) from None
    except smtplib.SMTPAuthenticationError as error:
        cure = "check user and password in its URL; many providers want a separate app password"
        raise DeliveryError(f"{where} refuses the login ({error.smtp_code})", cure) from None
    except (smtplib.SMTPRecipientsRefused, smtplib.SMTPSenderRefused, smtplib.SMTPNotSupportedError) as error:
        cure = "check `email` and `sender`: the server may send only from its own addresses"
        raise DeliveryError(f"{where} refuses an address of the mail ({type(error).__name__})", cure) from None
    except smtplib.SMTPResponseException as error:
        raise DeliveryError(f"{where} answers with SMTP {error.smtp_code}") from None
    except (OSError, smtplib.SMTPException, UnicodeError) as error:
        raise _unreachable(smtp, error) from None


def _refused(url: str, code: int, after: str | None) -> DeliveryError:
    where = masked(url)
    if code in (408, 429) or code >= 500:
        after_s = float(after) if after is not None and after.strip().isdecimal() else None
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


class _Limited(urllib.request.HTTPSHandler, urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Http, request)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Https, request)


class _Http(http.client.HTTPConnection):
    def connect(self) -> None:
        super().connect()
        _cut_later(self.sock)


class _Https(_Http, http.client.HTTPSConnection): ...


class _Mail(smtplib.SMTP):
    """Cuts the connection at the limit of a try, and after MOST_BYTES of replies."""

    def _get_socket(self, *args: Any) -> socket.socket:
        sock = super()._get_socket(*args)  # type: ignore[misc]
        _cut_later(sock)
        return sock  # type: ignore[no-any-return]

    def getreply(self) -> tuple[int, bytes]:
        if self.file is None:
            self.file = _Replies(self.sock.makefile("rb"))  # type: ignore[union-attr]
        return super().getreply()


class _MailOverTls(_Mail, smtplib.SMTP_SSL): ...


class _Replies:
    """The lines of a mail server, which end after MOST_BYTES."""

    def __init__(self, file: Any) -> None:
        self._file, self._left, self.close = file, MOST_BYTES, file.close

    def readline(self, most: int) -> bytes:
        line: bytes = self._file.readline(min(most, self._left))
        self._left -= len(line)
        return line


def _cut_later(sock: Any) -> None:
    """Cut the connection at the limit of a try: a receiver that answers slowly, but on and on, holds no thread."""

    def cut() -> None:
        threading.Event().wait(LIMIT_S)
        with suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)  # also of TLS, without TLS's own farewell

    threading.Thread(target=cut, name="notice's end", daemon=True).start()


def _talk(server: smtplib.SMTP, user: str, password: str, *, is_tls: bool, is_here: bool) -> None:
    server.ehlo()
    if not is_tls and server.has_extn("starttls"):
        server.starttls(context=ssl.create_default_context())
        _cut_later(server.sock)  # a new object
        server.ehlo()
        is_tls = True
    if user:
        if not is_tls and not is_here:
            raise DeliveryError("the mail server offers no encryption; passwords are never sent in clear text", _FORM)
        try:
            server.login(user, password)
        except smtplib.SMTPServerDisconnected:  # some servers close the connection after a wrong password
            raise smtplib.SMTPAuthenticationError(535, "") from None


def _is_here(host: str) -> bool:
    return host in ("localhost", "::1") or (host.startswith("127.") and host.replace(".", "").isdecimal())


def _header(text: str) -> str:
    """Return the text as one line: a line end in the text would begin a new header."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())
