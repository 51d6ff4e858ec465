"""A Google bucket as the mirror of checkpoints, with the standard library against Google's stand-in."""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib.util
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cloudtrain.entrypoints.checkpoints import folder as folders
from cloudtrain.entrypoints.checkpoints import loader, published
from cloudtrain.entrypoints.checkpoints.saver import Saver, Snapshot
from cloudtrain.entrypoints.checkpoints.uploader import Uploader
from cloudtrain.entrypoints.stores import gcs, google_access, google_http
from cloudtrain.entrypoints.stores.store import ABSENT, Store, StoreError, open_store
from doubles.google.handle import BUCKET, SERVICE_ACCOUNT, Google

MIB = 1 << 20
PLACE = f"gs://{BUCKET}"
CALLS = pytest.mark.parametrize("call", ["put", "get", "names", "delete"])


@pytest.fixture
def store(google_store: Google) -> Google:
    """Return Google's stand-in; the environment leads this process and its children to the stand-in."""
    return google_store


@pytest.fixture
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set three attempts, a very short pause, and small chunks."""
    for name, value in {"ATTEMPTS": 3, "PAUSE_S": 0.01}.items():
        monkeypatch.setattr(google_http, name, value)
    for name, value in {"TRIES": 2, "PAUSE_S": 0.01}.items():
        monkeypatch.setattr(google_access, name, value)
    monkeypatch.setattr(gcs, "CHUNK_BYTES", MIB)
    monkeypatch.setattr(gcs, "SINGLE_BYTES", MIB)


@pytest.fixture
def hasty(brisk: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use `brisk`, and time out after 0.5 s, too little for a busy machine: only for servers that never answer."""
    for module in (google_http, google_access):
        for name in ("CONNECT_S", "READ_S"):
            monkeypatch.setattr(module, name, 0.5)


@pytest.fixture
def alone() -> Iterator[None]:
    """Be the only rank of a process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def opened(uri: str = f"{PLACE}/x") -> Store:
    """Return the store as the trainer opens it."""
    return open_store(uri)


def calls(place: Store, path: Path) -> dict[str, Callable[[], object]]:
    """Return every call of a store."""
    return {
        "put": lambda: place.put(path, "name"),
        "get": lambda: place.get("name", path.with_name("got")),
        "names": lambda: place.names("n"),
        "delete": lambda: place.delete("name"),
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file of several chunks and a remainder."""
    path = tmp_path / "file"
    path.write_bytes(random.Random(0).randbytes(5 * MIB + 7))
    return path


@pytest.mark.parametrize("prefix", ["", "/", "/a", "/a/b/", "/100%2525 of a+b #1? é/ü&'("])
def test_object_round_trips(prefix: str, store: Google, tmp_path: Path) -> None:
    """With any prefix, special characters included, put, names, get and remove work on the same bytes and names."""
    place = opened(PLACE + prefix)
    (tmp_path / "file").write_bytes(b"some bytes")
    for name in ("step-00000001/shard-0", "step-00000001/manifest.json", "latest.json"):
        place.put(tmp_path / "file", name)
    assert place.names("step-") == ["step-00000001/manifest.json", "step-00000001/shard-0"]
    assert store.objects()[0].startswith(prefix.strip("/"))
    place.get("step-00000001/shard-0", tmp_path / "new" / "folder" / "file")
    assert (tmp_path / "new/folder/file").read_bytes() == b"some bytes"
    place.delete("latest.json")
    place.delete("latest.json")
    assert place.names("l") == []
    with pytest.raises(FileNotFoundError, match=r"has no .*latest\.json"):
        place.get("latest.json", tmp_path / "latest")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "new"]


@pytest.mark.parametrize("size", [0, 1, MIB, MIB + 1, 2 * MIB])
def test_files_of_any_size_round_trip(size: int, brisk: None, store: Google, tmp_path: Path) -> None:
    """Empty files, and files at the edges of a chunk, arrive whole."""
    (tmp_path / "file").write_bytes(random.Random(size).randbytes(size))
    opened().put(tmp_path / "file", "name")
    opened().get("name", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == (tmp_path / "file").read_bytes()
    assert len(store.journal("storage.chunk")) == (0 if size <= MIB else 2)


def test_names_do_not_mix_jobs_in_a_bucket(store: Google, tmp_path: Path) -> None:
    """`names` lists neither objects of a job whose name has the same beginning, nor folders of the console."""
    (tmp_path / "file").touch()
    for job in ("digits", "digits-2", "digits/below"):
        opened(f"{PLACE}/{job}").put(tmp_path / "file", f"{job[-1]}-file")
    store.put_object("digits/folder/", b"")
    assert opened(f"{PLACE}/digits").names("") == ["below/w-file", "s-file"]
    assert opened(f"GS://{BUCKET}/digits-2/").names("") == ["2-file"]


def test_names_go_over_all_pages(store: Google) -> None:
    """Google returns a thousand names per page, or fewer, and `names` reads all pages."""
    store.settings(storage_page_size=10)
    names = [f"step-{number:08d}/shard" for number in range(25)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: store.put_object(f"many/{name}", b""), names))
    assert opened(f"{PLACE}/many").names("step-") == names
    assert opened(f"{PLACE}/many").names("step-0000002") == names[20:]
    assert len(store.journal("storage.list")) == 4


def test_large_file_goes_in_chunks(brisk: None, store: Google, file: Path) -> None:
    """A file larger than a chunk arrives whole, over a single connection; a second put replaces the object."""
    place = opened()
    place.put(file, "shard")
    assert [call["received"] for call in store.journal("storage.chunk")] == [*[MIB] * 5, 7]
    place.get("shard", file.with_name("back"))
    assert file.with_name("back").read_bytes() == file.read_bytes()
    file.write_bytes(file.read_bytes()[: 2 * MIB])
    place.put(file, "shard")
    place.get("shard", file.with_name("back"))
    assert file.with_name("back").read_bytes() == file.read_bytes()


STUMBLES = ["drop", "lost", "cut", "429", "500", "503"]


@pytest.mark.parametrize("kind", STUMBLES)
def test_failing_server_is_retried(
    kind: str, brisk: None, store: Google, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one request in four closed, lost, cut or refused by the server, all files arrive whole."""
    monkeypatch.setattr(google_http, "ATTEMPTS", 8)
    (file.parent / "small").write_bytes(b"some bytes")
    place = opened()
    store.fault("storage.*", kind, every=4)
    place.put(file, "file")
    place.put(file.parent / "small", "small")
    assert place.names("") == ["file", "small"]
    for name in ("file", "small"):
        place.get(name, file.parent / "back" / name)
        assert (file.parent / "back" / name).read_bytes() == (file.parent / name).read_bytes()
    assert sorted(path.name for path in (file.parent / "back").iterdir()) == ["file", "small"]
    place.delete("small")
    assert place.names("") == ["file"]
    assert sum(call["outcome"] not in ("ok", "OK") for call in store.journal()) > 2


@pytest.mark.parametrize("operation", ["storage.insert", "storage.chunk", "storage.delete"])
def test_lost_answers_do_no_harm(operation: str, brisk: None, store: Google, file: Path) -> None:
    """A request whose answer was lost is sent again with the same result."""
    (file.parent / "small").write_bytes(b"some bytes")
    store.fault(operation, "lost", count=2)
    place = opened()
    place.put(file, "file")
    place.put(file.parent / "small", "small")
    assert store.object("x/file") == file.read_bytes()
    place.delete("small")
    assert place.names("") == ["file"]
    assert len(store.journal(operation)) >= 3


def test_partly_received_chunk_is_continued(brisk: None, store: Google, file: Path) -> None:
    """The client asks the service for the received length, and sends only the rest."""
    store.break_next_chunk(300_000)
    opened().put(file, "file")
    assert store.object("x/file") == file.read_bytes()
    sent = [call["received"] for call in store.journal("storage.chunk")]
    assert sent == [MIB, 0, *[MIB] * 4, MIB + 7 - 256 * 1024]


def test_broken_download_continues_at_its_offset(brisk: None, store: Google, file: Path) -> None:
    """Every attempt receives half of the remaining bytes, and no byte twice."""
    opened().put(file, "file")
    store.fault("storage.download", "cut", count=3)
    opened().get("file", file.with_name("back"))
    assert file.with_name("back").read_bytes() == file.read_bytes()
    assert len(store.journal("storage.download")) == 4


def test_failed_upload_leaves_nothing(brisk: None, store: Google, file: Path) -> None:
    """A chunk that always fails raises an error and leaves no object."""
    store.fault("storage.chunk", "500")
    with pytest.raises(OSError, match="HTTP 500: Internal error encountered"):
        opened().put(file, "shard")
    assert opened().names("") == []
    assert len(store.journal("storage.chunk")) == 3


def test_failed_download_leaves_nothing(brisk: None, store: Google, file: Path) -> None:
    """If every body breaks off, the download raises an error and leaves neither the file nor a partial file."""
    place = opened()
    (file.parent / "small").write_bytes(b"x")  # half of one byte is no byte
    place.put(file.parent / "small", "shard")
    store.fault("storage.download", "cut")
    with pytest.raises(ConnectionError, match=rf"gs://{BUCKET} does not answer; does this machine reach"):
        place.get("shard", file.parent / "back" / "file")
    assert list((file.parent / "back").iterdir()) == []


KILLED = """
import sys
from pathlib import Path
from cloudtrain.entrypoints.stores import gcs as googlestorage
from cloudtrain.entrypoints.stores import store
googlestorage.CHUNK_BYTES = googlestorage.SINGLE_BYTES = 1 << 20
store.open_store(sys.argv[1]).put(Path(sys.argv[2]), "shard")
"""


def test_killed_upload_is_not_seen(brisk: None, store: Google, file: Path, wait_until: Callable[..., Any]) -> None:
    """A put killed in the middle leaves no visible object; the next put is whole."""
    store.fault("storage.chunk", "hang", after=2)
    process = subprocess.Popen([sys.executable, "-c", KILLED, f"{PLACE}/x", file])
    wait_until(lambda: len(store.journal("storage.chunk")) >= 3)
    process.kill()
    process.wait()
    store.clear_faults()
    place = opened()
    assert place.names("") == []
    with pytest.raises(FileNotFoundError, match="has no shard"):
        place.get("shard", file.with_name("back"))
    place.put(file, "shard")
    assert store.object("x/shard") == file.read_bytes()


def test_bytes_corrupted_in_transit_are_found(
    brisk: None, store: Google, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An MD5 travels with every upload and download; a wrong MD5 is an error, and the data is dropped."""
    place = opened()
    place.put(file, "file")
    (file.parent / "small").write_bytes(b"some bytes")
    monkeypatch.setattr(gcs, "_base64", lambda digest: "AAAAAAAAAAAAAAAAAAAAAA==")
    for path in (file, file.parent / "small"):
        with pytest.raises(OSError, match=r"x/other arrived damaged 3 times"):
            place.put(path, "other")
    with pytest.raises(OSError, match=r"x/file arrived damaged 3 times"):
        place.get("file", file.with_name("back"))
    assert place.names("") == ["file"]
    assert not file.with_name("back").exists()


def test_bytes_that_change_once_are_sent_again(
    brisk: None, store: Google, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both an upload and a download are retried after a wrong MD5."""
    right, wrong = gcs._base64, ["AAAAAAAAAAAAAAAAAAAAAA=="]
    monkeypatch.setattr(gcs, "_base64", lambda digest: wrong.pop() if wrong else right(digest))
    opened().put(file, "file")
    wrong.append("AAAAAAAAAAAAAAAAAAAAAA==")
    opened().get("file", file.with_name("back"))
    assert file.with_name("back").read_bytes() == file.read_bytes()
    assert store.object("x/file") == file.read_bytes()


def test_object_replaced_during_a_get_is_not_mixed(
    brisk: None, store: Google, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A get reads a single version, or raises an error."""
    place = opened()
    place.put(file, "shard")
    store.fault("storage.download", "cut", count=1)
    monkeypatch.setattr("time.sleep", lambda seconds: store.put_object("x/shard", bytes(6 * MIB)))
    with pytest.raises(OSError, match="another process has written the same object meanwhile"):
        place.get("shard", file.with_name("back"))
    assert not file.with_name("back").exists()


@pytest.mark.parametrize("size", [10, 3 * MIB])
def test_file_changed_during_a_put_is_not_stored(
    size: int, brisk: None, store: Google, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_file_changed_since_the_scan_is_not_put(brisk: None, store: Google, file: Path) -> None:
    """The file may be incomplete."""
    seen = file.stat()
    file.write_bytes(b"")
    with pytest.raises(gcs.Changed):
        gcs.open_at(PLACE).put(file, "file", seen=seen)
    assert store.objects() == []


@CALLS
def test_slow_server_is_given_up(call: str, hasty: None, store: Google, file: Path) -> None:
    """A server that accepts the request but never answers costs the time of the attempts and raises an error."""
    opened().put(file, "name")
    store.clear_journal()
    store.fault("storage.*", "hang")
    begin_s = time.monotonic()
    with pytest.raises(ConnectionError, match=rf"gs://{BUCKET} does not answer; .*timed out") as caught:
        calls(opened(), file)[call]()
    assert 1.4 < time.monotonic() - begin_s < 20
    assert len(store.journal()) >= 3
    assert "\n" not in str(caught.value)


def test_server_that_does_not_read_is_given_up(
    hasty: None, file: Path, monkeypatch: pytest.MonkeyPatch, store: Google
) -> None:
    """A server that accepts a connection but reads no bytes cannot hold up an upload, even while the client sends."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("CLOUDTRAIN_STORAGE_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(gcs, "SINGLE_BYTES", 64 * MIB)
        with pytest.raises(ConnectionError, match="does not answer"):
            opened().put(file, "shard")


@contextlib.contextmanager
def silent() -> Iterator[str]:
    """Yield the address of a server that accepts connections and reads no bytes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_silent_proxy_and_closed_port_are_given_up(
    hasty: None, store: Google, metadata: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy that accepts connections but never answers, and a closed port, both raise an error."""
    with silent() as address:
        for name in ("HTTPS_PROXY", "https_proxy"):
            monkeypatch.setenv(name, address)
        with pytest.raises(ConnectionError, match="does not answer"):
            opened().names("")
    with pytest.raises(ConnectionError, match="does not answer"):
        opened().names("")


def test_login_that_does_not_answer_is_given_up(hasty: None, store: Google) -> None:
    """The wait for a token has time limits too."""
    store.fault("token", "hang")
    begin_s = time.monotonic()
    with pytest.raises(ConnectionError, match=r"Google's login does not answer \(.*Read timed out"):
        opened().names("")
    assert time.monotonic() - begin_s < 60


def test_store_recovers_after_a_long_outage(brisk: None, store: Google) -> None:
    """Failures use up no budget of retries: when the store answers again, failed requests are still retried."""
    place = opened()
    store.fault("storage.*", "500")
    for _ in range(5):
        with pytest.raises(OSError, match="HTTP 500"):
            place.names("")
    store.clear_faults()
    store.fault("storage.*", "drop", every=2)
    assert [place.names("") for _ in range(4)] == [[]] * 4


@CALLS
def test_missing_bucket_is_reported(call: str, store: Google, file: Path) -> None:
    """One sentence with the bucket's name; a missing bucket is not reported as a missing object."""
    with pytest.raises(OSError, match="there is no bucket no-such-bucket; make it, or name another one") as caught:
        calls(opened("gs://no-such-bucket/x"), file)[call]()
    assert not isinstance(caught.value, FileNotFoundError)


@CALLS
def test_denied_access_names_the_missing_role(call: str, store: Google, file: Path) -> None:
    """The message names the role for the job's account; a denied get is not reported as a missing object."""
    store.settings(denied=["storage.*"])
    wanted = rf"no access to gs://{BUCKET}.*; {SERVICE_ACCOUNT} needs the role Storage Object User .*HTTP 403"
    with pytest.raises(PermissionError, match=wanted):
        calls(opened(), file)[call]()


def test_reader_may_read(store: Google, file: Path) -> None:
    """A role that may read is enough to resume; a write names the missing role."""
    store.put_object("x/name", b"some bytes")
    store.settings(denied=["storage.insert", "storage.delete"])
    place = opened()
    place.get("name", file.with_name("back"))
    for call in ("put", "delete"):
        with pytest.raises(PermissionError, match=r"roles/storage\.objectUser"):
            calls(place, file)[call]()


def test_foreign_404_does_not_mean_missing(brisk: None, store: Google, tmp_path: Path) -> None:
    """A 404 from a proxy before Google does not count as a missing object; only Google's own answer does."""
    store.fault("storage.*", "404", message="by the test")
    with pytest.raises(OSError, match="by the test") as caught:
        opened().get("latest.json", tmp_path / "latest")
    assert not isinstance(caught.value, FileNotFoundError)


def test_rate_limit_is_reported(brisk: None, store: Google) -> None:
    """If Google keeps asking to slow down, the message says so."""
    store.fault("storage.*", "429")
    with pytest.raises(OSError, match=r"storage.googleapis.com repeatedly asks to slow down for gs://.*HTTP 429"):
        opened().names("")


def test_missing_credentials_are_reported_and_may_come_later(
    brisk: None, store: Google, metadata: Any, monkeypatch: pytest.MonkeyPatch
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
    for call in calls(place, file).values():
        call()
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


def test_token_is_renewed_before_its_end(
    brisk: None, store: Google, metadata: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize("missing", ["google", "google.auth", "requests"])
def test_missing_packages_are_reported_with_the_command(
    missing: str, store: Google, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence gives the install command; errors inside installed packages are not hidden."""
    importing = builtins.__import__

    def lacking(absent: str, name: str, *args: Any) -> Any:
        if name.startswith("google.auth"):
            raise ModuleNotFoundError(f"No module named {absent!r}", name=absent)
        return importing(name, *args)

    monkeypatch.setattr(builtins, "__import__", functools.partial(lacking, missing))
    with pytest.raises(StoreError, match=r"`pip install google-auth requests` on the machines of the job"):
        opened()
    monkeypatch.setattr(builtins, "__import__", functools.partial(lacking, "cachetools"))
    with pytest.raises(ModuleNotFoundError, match="cachetools"):
        opened()


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
def test_custom_endpoint_is_used(name: str, brisk: None, store: Google, file: Path, monkeypatch: Any) -> None:
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


@pytest.mark.parametrize("uri", ["gs://", "gs:///prefix", "gs:bucket/x", "gs://a b/x", "GS://@/x", "gs://Upper/x"])
def test_uri_without_a_bucket_is_refused(uri: str) -> None:
    """An error comes at once and shows the right form."""
    with pytest.raises(StoreError, match="names no bucket; write it as in gs://BUCKET/PREFIX"):
        opened(uri)


def test_first_writer_wins(brisk: None, store: Google) -> None:
    """An existing object stays, also after a lost answer to the writer's own request."""
    place = open_store(PLACE)
    store.fault("storage.insert", "lost", count=1)
    assert not place.put_if(b"mine", "claim", ABSENT)
    assert not place.put_if(b"theirs", "claim", ABSENT)
    assert store.object("claim") == b"mine"


MEMORY = """
import json, os, resource, sys
from pathlib import Path
from cloudtrain.entrypoints.stores import store
def peak_mib(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
place, folder = store.open_store(sys.argv[1]), Path(sys.argv[2])
(folder / "small").write_bytes(b"some bytes")
place.put(folder / "small", "small")
place.get("small", folder / "back")
told = [peak_mib()]
with (folder / "large").open("wb") as file:
    for number in range(int(sys.argv[3])):
        file.write(os.urandom(1 << 20))
place.put(folder / "large", "large")
place.get("large", folder / "back")
told.append(peak_mib())
assert os.path.getsize(folder / "back") == int(sys.argv[3]) << 20
print(json.dumps(told))
"""


def test_memory_does_not_grow_with_the_file(store: Google, tmp_path: Path) -> None:
    """A put and a get hold a few pieces in memory."""
    argv = [sys.executable, "-c", MEMORY, f"{PLACE}/x", tmp_path, "96"]
    small, large = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
    assert large - small < 16


def save(home: Path, uploads: Uploader, *steps: int) -> None:
    """Save and upload one small checkpoint a step."""
    saver = Saver(home, torch.device("cpu"), 9, uploads)
    for step in steps:
        saver.begin(Snapshot(step, {"model.w": torch.arange(10.0) + step}, {}, {}, {"step": step, "job": "j"}))
        saver.wait()
        uploads.finish()


def test_bucket_keeps_the_right_number_of_checkpoints(alone: None, store: Google, tmp_path: Path) -> None:
    """Retention works in the bucket and spares other jobs; a new machine fetches the newest checkpoint, intact."""
    place = opened(f"{PLACE}/a")
    save(tmp_path / "other", Uploader(opened(f"{PLACE}/ab"), 3), 1)
    uploads = Uploader(place, 2)
    save(tmp_path / "first", uploads, 10, 20, 30, 40)
    assert [(sent.step, sent.fault) for sent in uploads.news()] == [(step, None) for step in (10, 20, 30, 40)]
    assert {name.partition("/")[0] for name in place.names("")} == {"latest.json", "step-00000030", "step-00000040"}
    assert published.latest(opened(f"{PLACE}/ab"), tmp_path) == 1
    assert published.latest(opened(f"{PLACE}/none"), tmp_path) is None
    fetched = published.fetch(place, tmp_path)
    assert fetched == tmp_path / "step-00000040"
    assert loader.check(fetched) is None
    assert folders.open_found(fetched).step == 40


def test_store_that_fails_publishes_nothing(alone: None, brisk: None, store: Google, tmp_path: Path) -> None:
    """After a denied write the error is in words and the earlier step stays published; the next is published."""
    place = opened(f"{PLACE}/a")
    uploads = Uploader(place, 2)
    save(tmp_path / "first", uploads, 10)
    store.settings(denied=["storage.insert"])
    save(tmp_path / "first", uploads, 20)
    store.settings(denied=[])
    assert published.latest(place, tmp_path) == 10
    save(tmp_path / "first", uploads, 30)
    assert [(sent.step, sent.fault is None) for sent in uploads.news()] == [
        (10, True),
        (20, False),
        (20, False),
        (30, True),
    ]
    assert published.latest(place, tmp_path) == 30


@pytest.fixture(scope="module")
def trained() -> ModuleType:
    """Return test_train.py: its task and its runs of the real trainer."""
    spec = importlib.util.spec_from_file_location("trained", Path(__file__).with_name("test_train.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for its dataclasses
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_killed_run_resumes_from_a_bucket_bit_for_bit(store: Google, trained: ModuleType, tmp_path: Path) -> None:
    """A run killed in step 13 resumes from the bucket's step 10 with identical numbers and tensors.

    The run's own folder is gone, and a fifth of the calls fail.
    """
    # Before the kill, rank 0's checkpoint has reached the bucket, even if the upload is slow today.
    wait = """            from cloudtrain.entrypoints.stores import store
            for _ in range(600):
                if store.open_store(os.environ["MIRROR"]).names("latest.json"):
                    break
                time.sleep(0.1)
            os.kill("""
    text = trained.TASK.replace("            os.kill(", wait, 1)
    whole = trained.run(tmp_path / "whole", strategy="fsdp")
    store.fault("storage.*", "drop", every=10)
    store.fault("storage.*", "503", every=9)
    settings: dict[str, Any] = {"strategy": "fsdp", "checkpoint": {"mirror": f"{PLACE}/a/b", "every_steps": 10}}
    env = {"MIRROR": f"{PLACE}/a/b/test"}
    killed = trained.run(tmp_path / "run", do="kill:1:26", text=text, env=env, **settings)
    assert killed.code != 0
    shutil.rmtree(tmp_path / "run/checkpoints")
    again = trained.run(tmp_path / "run", text=text, env=env, **settings)
    assert again.code == 0, again.errors
    assert (again.only("restart")["step"], again.only("restart")["changed"]) == (10, [])
    assert trained.joined(killed, again) == whole.values("step", "loss")
    assert trained.parameters(again) == trained.parameters(whole)
    assert {"drop"} < {call["outcome"] for call in store.journal()}


@pytest.mark.slow
def test_bucket_that_fails_does_not_end_the_training(store: Google, trained: ModuleType, tmp_path: Path) -> None:
    """A denied write is reported in a sentence and training continues; a missing bucket ends the start."""
    store.settings(denied=["storage.insert"])
    done = trained.run(tmp_path / "run", checkpoint={"mirror": f"{PLACE}/a"})
    assert (done.code, done.outcome()["outcome"]) == (0, "done"), done.errors
    assert "the mirror has no copy of step 16: PermissionError: no access to gs://" in done.output
    gone = trained.run(tmp_path / "gone", checkpoint={"mirror": "gs://no-such-bucket"})
    assert gone.code != 0
    assert "TaskError: there is no bucket no-such-bucket; " in gone.errors
    assert gone.values("step", "loss") == {}
