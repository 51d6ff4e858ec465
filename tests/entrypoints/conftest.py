"""An S3 for the tests: moto's real server on loopback, and in front of it whatever can go wrong on the way.

And the environment in which a job finds Google's stand-in, by a credentials file or by the machine's own account.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from doubles.google.handle import SERVICE_ACCOUNT, Google


@dataclass
class Bucket:
    """A bucket of its own on the server. `fate` says of each request, by method and path, what becomes of it.

    None: it is served. `drop`: its connection is closed, unserved; `half`: in the middle of the answer's body;
    `hang`: no answer before `let_go`; a tuple: an answer of S3's, by status and code.
    """

    name: str
    address: str
    fate: Callable[[str, str], Any] = lambda method, path: None
    asked: list[tuple[str, str]] = field(default_factory=list)
    let_go: threading.Event = field(default_factory=threading.Event)

    def uri(self, prefix: str = "") -> str:
        """Return what `checkpoint.mirror` would be."""
        return f"s3://{self.name}/{prefix}".rstrip("/")


class _Front:
    """A WSGI application before moto's, which lets the fates have their way."""

    def __init__(self, served: Callable[..., Iterable[bytes]]) -> None:
        self._served = served
        self.buckets: dict[str, Bucket] = {}

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        bucket = self.buckets.get(path.split("/")[1])
        fate = None
        if bucket is not None:
            bucket.asked.append((method, path))
            fate = bucket.fate(method, path)
            if fate == "hang":
                bucket.let_go.wait(60)
        if fate in ("drop", "hang"):
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            return []
        if isinstance(fate, tuple):
            status, code = fate
            text = f"<Error><Code>{code}</Code><Message>by the test</Message></Error>" if method != "HEAD" else ""
            start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(text)))])
            return [text.encode()]
        answer = self._served(environ, start)
        return _half(answer, environ["werkzeug.socket"]) if fate == "half" else answer


def _half(answer: Iterable[bytes], connection: socket.socket) -> Iterator[bytes]:
    body = b"".join(answer)
    yield body[: len(body) // 2]
    connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="session")
def s3_front() -> Iterator[tuple[str, _Front]]:
    """Return the address of moto's server and what stands in front of it."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Silent(WSGIRequestHandler):
        def log(self, type: str, message: str, *args: Any) -> None:
            """Say nothing."""

    front = _Front(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, front, threaded=True, request_handler=Silent)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", front
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def bucket(s3_front: tuple[str, _Front], monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """Return a bucket of the test's own, to which the environment leads boto3, in processes started too."""
    import boto3

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    address, front = s3_front
    for name, value in {
        "AWS_ENDPOINT_URL_S3": address,
        "AWS_ACCESS_KEY_ID": "AKIATEST",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    name = f"test-{uuid.uuid4().hex[:12]}"
    boto3.session.Session().client("s3").create_bucket(Bucket=name)
    front.buckets[name] = made = Bucket(name, address)
    yield made
    made.let_go.set()
    del front.buckets[name]


@pytest.fixture
def google_store(google: Google, monkeypatch: pytest.MonkeyPatch) -> Google:
    """Return Google's stand-in, to which the environment leads this process, and all that it starts."""
    for name in [name for name in os.environ if name.startswith(("GOOGLE_", "GCE_", "CLOUDSDK_", "STORAGE_"))]:
        monkeypatch.delenv(name)
    google.apply(monkeypatch)
    return google


@dataclass
class Metadata:
    """A metadata server; `token` makes a token, and what it raises is a status."""

    token: Callable[[], str]
    asked: list[str] = field(default_factory=list)

    def answer(self, path: str) -> tuple[int, bytes]:
        """Return what there is under a path."""
        self.asked.append(path.rpartition("/")[2])
        if self.asked[-1] == "email":
            return 200, SERVICE_ACCOUNT.encode()
        try:
            told = {"access_token": self.token(), "expires_in": 3600, "token_type": "Bearer"}
        except LookupError as error:
            return int(error.args[0]), b"by the test"
        return 200, json.dumps(told).encode()


@pytest.fixture
def metadata(google_store: Google, monkeypatch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    """Return a machine's metadata server, which gives tokens that the stand-in takes; there is no credentials file."""
    made = Metadata(google_store.client.token)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = made.answer(self.path) if self.headers["Metadata-Flavor"] == "Google" else (403, b"")
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
    for name in ("HTTP_PROXY", "http_proxy", "NO_PROXY", "no_proxy"):  # of no concern to a metadata server
        monkeypatch.setenv(name, "http://127.0.0.1:9" if "HTTP" in name.upper() else "")
    yield made
    server.shutdown()
    thread.join()
    server.server_close()
