"""An S3 for the tests: moto's real server on loopback, and in front of it whatever can go wrong on the way."""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest


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
