"""The clouds' stand-ins for jobs, and a metadata server."""

import functools
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from doubles.aws.handle import Aws
from doubles.google.handle import Google
from doubles.google.loopback import served
from doubles.google.names import SERVICE_ACCOUNT
from doubles.wire import Answer, Request

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


@pytest.fixture
def s3_store(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> Aws:
    """Return AWS's stand-in with the bucket cloudtrain-tests; the environment leads this process and its children."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    aws.apply(monkeypatch)
    aws.bucket()
    return aws


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

    def respond(request: Request) -> Answer:
        status, body = made.answer(request.path) if request.headers.get("metadata-flavor") == "Google" else (403, b"")
        return Answer(status, body=body)

    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    for name in ("HTTP_PROXY", "http_proxy", "NO_PROXY", "no_proxy"):  # a metadata server needs no proxy
        monkeypatch.setenv(name, "http://127.0.0.1:9" if "HTTP" in name.upper() else "")
    with served(respond) as url:
        monkeypatch.setenv("GCE_METADATA_HOST", url.removeprefix("http://"))
        yield made


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
