"""Moto's real S3 server on loopback, behind a front that injects network faults; Google's stand-in for jobs."""

import functools
import json
import os
import random
import socket
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from doubles.google.handle import Google
from doubles.google.names import SERVICE_ACCOUNT

MIB = 1 << 20


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """Return the folder of another node."""
    (tmp_path / "there").mkdir()
    return tmp_path / "there"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Return this node's folder."""
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file of several parts and a remainder."""
    path = tmp_path / "file"
    path.write_bytes(random.Random(0).randbytes(5 * MIB + 7))
    return path


@pytest.fixture
def alone() -> Iterator[None]:
    """Be the only rank of a process group."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return the uninterrupted run of a strategy, made once; interrupted runs must equal the result. ddp's is cold."""
    from trainerruns import whole_run

    base = tmp_path_factory.mktemp("whole")
    return functools.cache(lambda strategy: whole_run(base / strategy, cold=strategy == "ddp", strategy=strategy))


@dataclass
class Bucket:
    """A bucket of the test's own on the server.

    `fate` gives the outcome of each request by method and path. None: an answer. `drop`: the front closes the
    connection unanswered; `half`: in the middle of the answer's body. `hang`: no answer before `let_go`. A tuple: an S3
    error.
    """

    name: str
    address: str
    fate: Callable[[str, str], Any] = lambda method, path: None
    asked: list[tuple[str, str]] = field(default_factory=list)
    let_go: threading.Event = field(default_factory=threading.Event)

    def uri(self, prefix: str = "") -> str:
        """Return the value of `checkpoint.mirror`."""
        return f"s3://{self.name}/{prefix}".rstrip("/")


class _Front:
    """A WSGI application in front of moto's, which applies the fates."""

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
    """Return the address of moto's server and the front."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Silent(WSGIRequestHandler):
        def log(self, type: str, message: str, *args: Any) -> None:
            """Discard the message."""

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
    """Return a bucket of the test's own; the environment leads boto3 to the bucket, also in child processes."""
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
    """Return Google's stand-in; the environment, with a credentials file, leads this process and its children there."""
    for name in [name for name in os.environ if name.startswith(("GOOGLE_", "GCE_", "CLOUDSDK_", "STORAGE_"))]:
        monkeypatch.delenv(name)
    google.apply(monkeypatch)
    return google


@dataclass
class Metadata:
    """A metadata server; `token` makes a token or raises LookupError with a status."""

    token: Callable[[], str]
    asked: list[str] = field(default_factory=list)

    def answer(self, path: str) -> tuple[int, bytes]:
        """Return the status and the body for a path."""
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
    """Return a metadata server for the machine's own account; its tokens are valid, and no credentials file exists."""
    made = Metadata(google_store.client.token)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = made.answer(self.path) if self.headers["Metadata-Flavor"] == "Google" else (403, b"")
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Discard the message."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
    for name in ("HTTP_PROXY", "http_proxy", "NO_PROXY", "no_proxy"):  # a metadata server needs no proxy
        monkeypatch.setenv(name, "http://127.0.0.1:9" if "HTTP" in name.upper() else "")
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set three attempts, a very short pause, and small parts (the smallest that S3 allows)."""
    from cloudtrain.entrypoints.stores import azure, gcs, google_access, google_http, s3

    values: list[tuple[Any, dict[str, Any]]] = [
        (s3, {"_ATTEMPTS": 3, "_PART_BYTES": 5 * MIB}),
        (azure, {"ATTEMPTS": 3, "PAUSE_S": 0.01, "RANGE_BYTES": MIB}),
        (azure, {"_BLOCK_BYTES": MIB}),
        (google_http, {"ATTEMPTS": 3, "PAUSE_S": 0.01}),
        (google_access, {"TRIES": 2, "PAUSE_S": 0.01}),
        (gcs, {"CHUNK_BYTES": MIB, "SINGLE_BYTES": MIB}),
    ]
    for module, settings in values:
        for name, value in settings.items():
            monkeypatch.setattr(module, name, value)


@pytest.fixture
def hasty(brisk: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use `brisk`, and time out after 0.5 s, too little for a busy machine: only for servers that never answer."""
    from cloudtrain.entrypoints.stores import azure, google_access, google_http, s3

    for name in ("CONNECT_S", "READ_S"):
        monkeypatch.setattr(s3, f"_{name}", 0.5)
        for module in (azure, google_http, google_access):
            monkeypatch.setattr(module, name, 0.5)
