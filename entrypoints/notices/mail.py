"""A message by mail, over the server in a URL: smtp://user:password@host:587 or smtps://host."""

from __future__ import annotations

import smtplib
import socket
import ssl
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import formatdate
from urllib.parse import unquote, urlsplit

from .message import DeliveryError, Notice, masked

PORT, TLS_PORT = 587, 465
SUBJECT = 200
_FORM = "write smtp://USER:PASSWORD@HOST:587 (with STARTTLS) or smtps://USER:PASSWORD@HOST; in the parts %40 is an @"


def message(notice: Notice, to: str, sender: str, smtp: str) -> EmailMessage:
    """Return the mail. From: `sender`, else the server's user if the user is an address."""
    mail = EmailMessage(policy=SMTP)
    user = _user_of(smtp)
    mail["From"] = _header(sender or (user if "@" in user else f"cloudtrain@{socket.gethostname() or 'localhost'}"))
    mail["To"] = _header(to)
    mail["Subject"] = _header(notice.title)[:SUBJECT]
    mail["Date"] = formatdate()
    mail["Message-ID"] = f"<{notice.id}@cloudtrain>"  # the same at a retry, so mail programs show one mail
    mail["Auto-Submitted"] = "auto-generated"
    mail.set_content(notice.text + "\n", cte="8bit" if notice.text.isascii() else "base64")
    return mail


def post(smtp: str, mail: EmailMessage, timeout_s: float) -> None:
    """Deliver the mail. A password is never sent in clear text, except to this machine itself. Raises DeliveryError."""
    where = masked(smtp)
    try:
        parts = urlsplit(smtp)
        scheme, host, port = parts.scheme, parts.hostname, parts.port
    except ValueError:
        raise DeliveryError("the mail server's address cannot be read", _FORM) from None
    if scheme not in ("smtp", "smtps") or not host:
        raise DeliveryError("the mail server's address cannot be read", _FORM)
    user, password = _user_of(smtp), unquote(parts.password or "")
    try:
        if scheme == "smtps":
            tls = ssl.create_default_context()
            server: smtplib.SMTP = smtplib.SMTP_SSL(host, port or TLS_PORT, timeout=timeout_s, context=tls)
        else:
            server = smtplib.SMTP(host, port or PORT, timeout=timeout_s)
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
    except ssl.SSLError as error:
        raise DeliveryError(f"{where} shows no certificate that can be trusted: {error.reason}") from None
    except TimeoutError:
        raise DeliveryError(f"{where} does not answer") from None
    except (OSError, smtplib.SMTPException, UnicodeError) as error:
        raise DeliveryError(
            f"{where} cannot be reached: {getattr(error, 'strerror', None) or type(error).__name__}"
        ) from None


def _talk(server: smtplib.SMTP, user: str, password: str, *, is_tls: bool, is_here: bool) -> None:
    server.ehlo()
    if not is_tls and server.has_extn("starttls"):
        server.starttls(context=ssl.create_default_context())
        server.ehlo()
        is_tls = True
    if user:
        if not is_tls and not is_here:
            raise DeliveryError("the mail server offers no encryption; passwords are never sent in clear text", _FORM)
        try:
            server.login(user, password)
        except smtplib.SMTPServerDisconnected:  # some servers close the connection after a wrong password
            raise smtplib.SMTPAuthenticationError(535, "") from None


def _user_of(smtp: str) -> str:
    try:
        return unquote(urlsplit(smtp).username or "")
    except ValueError:
        return ""


def _is_here(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _header(text: str) -> str:
    """Return the text as one line: a line end in the text would begin a new header."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())
