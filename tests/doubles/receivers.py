"""Receivers of notifications: a real HTTP receiver and a real mail server on loopback, which fail as a test asks."""

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HANG = 0  # in place of a status: reads the request and does not answer
TRICKLE = 1  # sends a byte now and then, without end


@dataclass
class Hooks:
    """The requests that an HTTP receiver has had. `answers` are the next statuses; after these the status is 200."""

    url: str
    answers: list[int] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)  # of every answer
    got: list[dict[str, Any]] = field(default_factory=list)  # bodies of accepted requests
    asked: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)  # all requests: path, headers, body
    news: threading.Condition = field(default_factory=threading.Condition)
    is_over: threading.Event = field(default_factory=threading.Event)

    def wait(self, count: int, timeout_s: float = 20.0) -> list[dict[str, Any]]:
        """Return the accepted bodies, once at least `count` have arrived."""
        with self.news:
            assert self.news.wait_for(lambda: len(self.got) >= count, timeout_s), f"only {len(self.got)} came"
            return list(self.got)


@contextmanager
def hooks(answers: Sequence[int] = ()) -> Iterator[Hooks]:
    """Run an HTTP receiver."""
    store = Hooks("", list(answers))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with store.news:
                status = store.answers.pop(0) if store.answers else 200
                store.asked.append((self.path, dict(self.headers), body))
            if status in (HANG, TRICKLE):
                while not store.is_over.wait(0.2):
                    if status == TRICKLE:
                        self.wfile.write(b"H")
                return
            # Stored before the answer is sent, to allow for a lost answer.
            with store.news:
                if 200 <= status < 300:
                    store.got.append(body)
                store.news.notify_all()
            self.send_response(status)
            for name, value in store.headers.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            pass  # the client has gone

    with Server(("127.0.0.1", 0), Handler) as server:
        store.url = f"http://127.0.0.1:{server.server_port}/services/T0/secret-part"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield store
        finally:
            store.is_over.set()
            server.shutdown()
            thread.join()


@dataclass
class Letters:
    """The letters that a mail server has: (sender, recipients, raw text). `refusals` are the next answers."""

    port: int
    got: list[tuple[str, list[str], bytes]] = field(default_factory=list)
    logins: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    async def handle_DATA(self, server: object, session: object, envelope: Any) -> str:
        """Store a letter; called by aiosmtpd."""
        if self.refusals:
            return self.refusals.pop(0)
        self.got.append((envelope.mail_from, list(envelope.rcpt_tos), envelope.content))
        return "250 OK"


@contextmanager
def letters(password: str | None = None, tls: Any = None, *, at_once: bool = False) -> Iterator[Letters]:
    """Run a mail server; with a password only `me@here` may log in, over TLS if `tls` has a context.

    `at_once`: TLS from the first byte, else by STARTTLS.
    """
    from aiosmtpd.controller import Controller
    from aiosmtpd.smtp import AuthResult

    store = Letters(free_port())

    def check(server: object, session: object, envelope: object, mechanism: str, auth: Any) -> Any:
        store.logins.append(auth.login.decode())
        return AuthResult(success=(auth.login, auth.password) == (b"me@here", (password or "").encode()))

    settings: dict[str, Any] = {"authenticator": check, "auth_required": True} if password else {}
    if password and tls is None:
        settings["auth_require_tls"] = False
    if at_once:
        settings |= {"ssl_context": tls, "auth_require_tls": False}
    elif tls is not None:
        settings["tls_context"] = tls
    controller = Controller(store, hostname="127.0.0.1", port=store.port, **settings)
    controller.start()
    try:
        yield store
    finally:
        controller.stop()


def free_port() -> int:
    """Return a free port: aiosmtpd cannot choose a port by itself (1.4.6 dials port 0)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
