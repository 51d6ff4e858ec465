"""A Google bucket as the mirror of checkpoints, with the standard library against Google's stand-in."""

import os
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cloudtrain.entrypoints.stores import gcs, google_access, google_http
from cloudtrain.entrypoints.stores.store import ABSENT, Store, open_store
from doubles.google.handle import Google
from doubles.google.names import BUCKET, SERVICE_ACCOUNT

pytestmark = pytest.mark.usefixtures("brisk")
MIB = 1 << 20
PLACE = f"gs://{BUCKET}"


@pytest.fixture
def store(google_store: Google) -> Google:
    """Return Google's stand-in; the environment leads this process and its children to the stand-in."""
    return google_store


def opened(uri: str = f"{PLACE}/x") -> Store:
    """Return the store as the trainer opens it."""
    return open_store(uri)


def test_large_file_goes_in_chunks(store: Google, file: Path) -> None:
    """A file larger than a chunk goes in chunks."""
    opened().put(file, "shard")
    assert [call["received"] for call in store.journal("storage.chunk")] == [*[MIB] * 5, 7]


def test_partly_received_chunk_is_continued(store: Google, file: Path) -> None:
    """The client asks the service for the received length, and sends only the rest."""
    store.break_next_chunk(300_000)
    opened().put(file, "file")
    assert store.object("x/file") == file.read_bytes()
    sent = [call["received"] for call in store.journal("storage.chunk")]
    assert sent == [MIB, 0, *[MIB] * 4, MIB + 7 - 256 * 1024]


def test_broken_download_continues_at_its_offset(store: Google, file: Path) -> None:
    """Every attempt receives half of the remaining bytes, and no byte twice."""
    opened().put(file, "file")
    store.fault("storage.download", "cut", count=3)
    opened().get("file", file.with_name("back"))
    assert file.with_name("back").read_bytes() == file.read_bytes()
    assert len(store.journal("storage.download")) == 4


def test_bytes_that_change_once_are_sent_again(store: Google, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both an upload and a download are retried after a wrong MD5."""
    right, wrong = gcs._base64, ["AAAAAAAAAAAAAAAAAAAAAA=="]
    monkeypatch.setattr(gcs, "_base64", lambda digest: wrong.pop() if wrong else right(digest))
    opened().put(file, "file")
    wrong.append("AAAAAAAAAAAAAAAAAAAAAA==")
    opened().get("file", file.with_name("back"))
    assert file.with_name("back").read_bytes() == file.read_bytes()
    assert store.object("x/file") == file.read_bytes()


def test_object_replaced_during_a_get_is_not_mixed(store: Google, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A get reads a single version, or raises an error."""
    place = opened()
    place.put(file, "shard")
    store.fault("storage.download", "cut", count=1)
    clock = SimpleNamespace(sleep=lambda seconds: store.put_object("x/shard", bytes(6 * MIB)))
    monkeypatch.setattr(google_http, "time", clock)  # of this module alone: threads of earlier tests sleep, too
    with pytest.raises(OSError, match="another process has written the same object meanwhile"):
        place.get("shard", file.with_name("back"))
    assert not file.with_name("back").exists()


@pytest.mark.parametrize("size", [10, 3 * MIB])
def test_file_changed_during_a_put_is_not_stored(
    size: int, store: Google, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object keeps its old version; two versions are never mixed."""
    path = tmp_path / "last.pt"
    path.write_bytes(bytes(size))
    os.utime(path, (1, 1))
    place = opened()
    place.put(path, "last.pt")
    check, count = gcs._check, []

    def checked(file: Any, before: os.stat_result) -> None:
        count.append(1)
        if len(count) == 2:  # after the last read
            path.write_bytes(b"x" * size)
        check(file, before)

    monkeypatch.setattr(gcs, "_check", checked)
    with pytest.raises(gcs.Changed, match=r"last\.pt was written to while it was read"):
        place.put(path, "last.pt")
    assert (len(count), store.object("x/last.pt")) == (2, bytes(size))


def test_file_changed_since_the_scan_is_not_put(store: Google, file: Path) -> None:
    """The file may be incomplete."""
    seen = file.stat()
    file.write_bytes(b"")
    with pytest.raises(gcs.Changed):
        gcs.open_at(PLACE).put(file, "file", seen=seen)
    assert store.objects() == []


def test_rate_limit_is_reported(store: Google) -> None:
    """If Google keeps asking to slow down, the message says so."""
    store.fault("storage.*", "429")
    with pytest.raises(OSError, match=r"storage.googleapis.com repeatedly asks to slow down for gs://.*HTTP 429"):
        opened().names("")


def test_missing_credentials_are_reported_and_may_come_later(
    store: Google, metadata: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without credentials the error gives advice; a service account added later serves the next call."""
    told, token = LookupError(404), metadata.token

    def none() -> str:
        raise told

    metadata.token = none
    place = opened()
    with pytest.raises(PermissionError, match=r"there are no Google credentials here: give the machine a service acc"):
        place.names("")
    told.args = (503,)
    with pytest.raises(ConnectionError, match=r"the metadata server gives no token .*503"):
        place.names("")
    metadata.token = token
    assert place.names("") == []
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    with pytest.raises(PermissionError, match=r"there are no Google credentials here.*no metadata server.*refused"):
        opened().names("")


def test_token_of_the_machine_is_fetched_once(store: Google, metadata: Any, file: Path) -> None:
    """One token serves all calls and bypasses every proxy; a denied call names the service account."""
    place = opened()
    place.put(file, "name")
    place.get("name", file.with_name("got"))
    place.delete("name")
    assert metadata.asked == ["token", "email"]
    store.settings(denied=["storage.*"])
    with pytest.raises(PermissionError, match=f"the job's service account {SERVICE_ACCOUNT} needs the role"):
        place.names("")


@pytest.mark.parametrize("source", ["file", "machine"])
def test_token_that_expires_is_renewed(source: str, store: Google, request: pytest.FixtureRequest, file: Path) -> None:
    """A token that Google rejects is replaced within the call; a rejected new token is reported."""
    if source == "machine":
        request.getfixturevalue("metadata")
    place = opened()
    place.put(file, "name")
    store.expire_tokens()
    assert place.names("") == ["name"]
    store.expire_tokens()
    place.put(file, "name")
    store.fault("storage.*", "401")
    with pytest.raises(PermissionError, match=r"Google rejects the token of .*trainer@.* for gs://.*HTTP 401"):
        place.names("")


def test_token_is_renewed_before_its_end(store: Google, metadata: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Renewal comes five minutes before the end, or halfway; without a new token, the old token serves to its end."""
    now_s = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    identity, token = google_access.of_environment(), metadata.token

    def none() -> str:
        raise LookupError(503)

    first = identity.token()
    metadata.token = none
    now_s[0] += 3299.0
    assert identity.token() == first
    assert metadata.asked == ["token", "email"]
    now_s[0] += 300.0
    assert identity.token() == first
    assert metadata.asked == ["token", "email", "token", "token"]
    now_s[0] += 2.0
    with pytest.raises(ConnectionError, match="gives no token"):
        identity.token()
    metadata.token = token
    assert identity.token() != first


def test_login_of_a_user_serves_and_may_end(store: Google, monkeypatch: pytest.MonkeyPatch) -> None:
    """A login by `gcloud auth application-default login` works; if it was revoked, the message gives the command."""
    home = Path(store.user_file).parent / "gcloud"
    home.mkdir(exist_ok=True)
    shutil.copy(store.user_file, home / "application_default_credentials.json")
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(home))
    assert opened().names("") == []
    store.settings(refresh_revoked=True)
    with pytest.raises(PermissionError, match=r"log in again with `gcloud auth application-default login` .*revoked"):
        opened().names("")


@pytest.mark.parametrize("content", [None, "no JSON", "{}", '{"type": "service_account"}'])
def test_broken_credentials_file_is_reported(
    content: str | None, store: Google, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message contains the file's name."""
    path = tmp_path / "key.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    with pytest.raises(PermissionError, match=r"Google gives no token for .*key\.json: is it complete"):
        opened().names("")


def test_machine_without_google_s_packages_works(store: Google, metadata: Any, tmp_path: Path) -> None:
    """In an image of PyTorch, only the standard library is imported."""
    (tmp_path / "file").write_bytes(b"some bytes")
    text = (
        "import sys; from pathlib import Path; from cloudtrain.entrypoints.stores import store\n"
        "sys.modules.update(dict.fromkeys(('google.auth', 'requests', 'urllib3')))\n"
        "store.open_store(sys.argv[1]).put(Path(sys.argv[2]), 'name')"
    )
    argv = [sys.executable, "-W", "error", "-c", text, f"{PLACE}/x", tmp_path / "file"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert store.object("x/name") == b"some bytes"


def test_untrusted_certificate_is_reported(store: Google, metadata: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the missing package; either variable for the list of authorities works."""
    monkeypatch.delenv("SSL_CERT_FILE")
    assert opened().names("") == []
    monkeypatch.delenv("REQUESTS_CA_BUNDLE")
    begin_s = time.monotonic()
    with pytest.raises(OSError, match=r"storage\.googleapis\.com is not trusted: add the package ca-certificates"):
        opened().names("")
    assert time.monotonic() - begin_s < 5


@pytest.mark.parametrize("name", ["CLOUDTRAIN_STORAGE_ENDPOINT", "STORAGE_EMULATOR_HOST"])
def test_custom_endpoint_is_used(name: str, store: Google, file: Path, monkeypatch: Any) -> None:
    """A private endpoint or an emulator gets all calls, the session calls included."""
    for proxy in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(proxy, "http://127.0.0.1:9")
    monkeypatch.setenv(name, store.endpoints["storage"].removeprefix("http://" if "EMULATOR" in name else ""))
    token = store.client.token()
    monkeypatch.setattr(
        google_access._CredentialsFile, "fetch", lambda self: (token, 3600.0)
    )  # the login is behind the proxy
    opened().put(file, "name")
    assert opened().names("") == ["name"]
    assert store.object("x/name") == file.read_bytes()


def test_first_writer_wins(store: Google) -> None:
    """An existing object stays, also after a lost answer to the writer's own request."""
    place = open_store(PLACE)
    store.fault("storage.insert", "lost", count=1)
    assert not place.put_if(b"mine", "claim", ABSENT)
    assert not place.put_if(b"theirs", "claim", ABSENT)
    assert store.object("claim") == b"mine"


def test_answer_that_stops_leaves_no_connection_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer without a length ends with its connection, also if the rest never comes."""
    monkeypatch.setattr(google_http, "READ_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        service = google_http.Service(f"http://127.0.0.1:{server.getsockname()[1]}", None)

        def answer() -> socket.socket:
            peer = server.accept()[0]
            peer.sendall(b"HTTP/1.1 200 OK\r\n\r\nhalf")
            return peer

        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(answer)
            with pytest.raises(google_http.Lost), service.once("GET", "/") as reply:
                reply.read()
            with waiting.result() as peer:
                peer.settimeout(20)
                while peer.recv(1000):
                    pass
