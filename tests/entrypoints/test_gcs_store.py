"""A bucket of Google's as the checkpoints' second place, with the standard library against Google's stand-in."""

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
from cloudtrain.entrypoints.errors import TaskError
from cloudtrain.entrypoints.stores import google_access, google_http, google_storage, mirror
from doubles.google.handle import BUCKET, SERVICE_ACCOUNT, Google

MIB = 1 << 20
PLACE = f"gs://{BUCKET}"
CALLS = pytest.mark.parametrize("call", ["put", "get", "names", "remove"])


@pytest.fixture
def store(google_store: Google) -> Google:
    """Return Google's stand-in, to which the environment leads this process, and all that it starts."""
    return google_store


@pytest.fixture
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try three times, with hardly a pause, and make small chunks."""
    for name, value in {"ATTEMPTS": 3, "PAUSE_S": 0.01}.items():
        monkeypatch.setattr(google_http, name, value)
    for name, value in {"TRIES": 2, "PAUSE_S": 0.01}.items():
        monkeypatch.setattr(google_access, name, value)
    monkeypatch.setattr(google_storage, "CHUNK_BYTES", MIB)
    monkeypatch.setattr(google_storage, "SINGLE_BYTES", MIB)


@pytest.fixture
def hasty(brisk: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be brisk, and wait half a second each time: where no answer comes. A busy machine may need longer for one."""
    for module in (google_http, google_access):
        for name in ("CONNECT_S", "READ_S"):
            monkeypatch.setattr(module, name, 0.5)


@pytest.fixture
def alone() -> Iterator[None]:
    """Be the only rank of a process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def opened(uri: str = f"{PLACE}/x") -> mirror.Mirror:
    """Return the store as the trainer opens it."""
    place = mirror.open_mirror(uri)
    assert place is not None
    return place


def calls(place: mirror.Mirror, path: Path) -> dict[str, Callable[[], object]]:
    """Return every call of a store."""
    return {
        "put": lambda: place.put(path, "name"),
        "get": lambda: place.get("name", path.with_name("got")),
        "names": lambda: place.names("n"),
        "remove": lambda: place.remove("name"),
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file of some chunks and a bit."""
    path = tmp_path / "file"
    path.write_bytes(random.Random(0).randbytes(5 * MIB + 7))
    return path


@pytest.mark.parametrize("prefix", ["", "/", "/a", "/a/b/", "/100%2525 of a+b #1? é/ü&'("])
def test_object_comes_back_as_it_went(prefix: str, store: Google, tmp_path: Path) -> None:
    """Any prefix, with any sign in it: the same bytes under the same names, and gone when removed."""
    place = opened(PLACE + prefix)
    (tmp_path / "file").write_bytes(b"some bytes")
    for name in ("step-00000001/shard-0", "step-00000001/manifest.json", "latest.json"):
        place.put(tmp_path / "file", name)
    assert place.names("step-") == ["step-00000001/manifest.json", "step-00000001/shard-0"]
    assert store.objects()[0].startswith(prefix.strip("/"))
    place.get("step-00000001/shard-0", tmp_path / "new" / "folder" / "file")
    assert (tmp_path / "new/folder/file").read_bytes() == b"some bytes"
    place.remove("latest.json")
    place.remove("latest.json")
    assert place.names("l") == []
    with pytest.raises(FileNotFoundError, match=r"has no .*latest\.json"):
        place.get("latest.json", tmp_path / "latest")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "new"]


@pytest.mark.parametrize("size", [0, 1, MIB, MIB + 1, 2 * MIB])
def test_files_of_any_size_go(size: int, brisk: None, store: Google, tmp_path: Path) -> None:
    """Empty ones, and those at the edges of a chunk."""
    (tmp_path / "file").write_bytes(random.Random(size).randbytes(size))
    opened().put(tmp_path / "file", "name")
    opened().get("name", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == (tmp_path / "file").read_bytes()
    assert len(store.journal("storage.chunk")) == (0 if size <= MIB else 2)


def test_jobs_share_a_bucket(store: Google, tmp_path: Path) -> None:
    """The names of one place are not those of another whose name begins so, nor folders that the console makes."""
    (tmp_path / "file").touch()
    for job in ("digits", "digits-2", "digits/below"):
        opened(f"{PLACE}/{job}").put(tmp_path / "file", f"{job[-1]}-file")
    store.put_object("digits/folder/", b"")
    assert opened(f"{PLACE}/digits").names("") == ["below/w-file", "s-file"]
    assert opened(f"GS://{BUCKET}/digits-2/").names("") == ["2-file"]


def test_names_go_over_all_pages(store: Google) -> None:
    """Google gives a thousand at a time, or fewer."""
    store.settings(storage_page_size=10)
    names = [f"step-{number:08d}/shard" for number in range(25)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: store.put_object(f"many/{name}", b""), names))
    assert opened(f"{PLACE}/many").names("step-") == names
    assert opened(f"{PLACE}/many").names("step-0000002") == names[20:]
    assert len(store.journal("storage.list")) == 4


def test_large_file_goes_in_chunks(brisk: None, store: Google, file: Path) -> None:
    """A file of more than a chunk arrives whole, over one connection; a second put replaces it."""
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
def test_stumbling_server_is_asked_again(
    kind: str, brisk: None, store: Google, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closed connections, lost and halved answers, errors of the server's, one request in four: all arrives, whole."""
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
    place.remove("small")
    assert place.names("") == ["file"]
    assert sum(call["outcome"] not in ("ok", "OK") for call in store.journal()) > 2


@pytest.mark.parametrize("operation", ["storage.insert", "storage.chunk", "storage.delete"])
def test_answers_that_get_lost_do_no_harm(operation: str, brisk: None, store: Google, file: Path) -> None:
    """What was done and not heard of is done again, to the same end."""
    (file.parent / "small").write_bytes(b"some bytes")
    store.fault(operation, "lost", count=2)
    place = opened()
    place.put(file, "file")
    place.put(file.parent / "small", "small")
    assert store.object("x/file") == file.read_bytes()
    place.remove("small")
    assert place.names("") == ["file"]
    assert len(store.journal(operation)) >= 3


def test_chunk_that_came_in_part_is_gone_on_with(brisk: None, store: Google, file: Path) -> None:
    """The service is asked how much it has, and is sent the rest alone."""
    store.break_next_chunk(300_000)
    opened().put(file, "file")
    assert store.object("x/file") == file.read_bytes()
    sent = [call["received"] for call in store.journal("storage.chunk")]
    assert sent == [MIB, 0, *[MIB] * 4, MIB + 7 - 256 * 1024]


def test_download_that_breaks_goes_on_where_it_was(brisk: None, store: Google, file: Path) -> None:
    """Half of what is left comes every time, and nothing twice."""
    opened().put(file, "file")
    store.fault("storage.download", "cut", count=3)
    opened().get("file", file.with_name("back"))
    assert file.with_name("back").read_bytes() == file.read_bytes()
    assert len(store.journal("storage.download")) == 4


def test_failed_upload_leaves_nothing(brisk: None, store: Google, file: Path) -> None:
    """A chunk that never arrives: an error, and no object."""
    store.fault("storage.chunk", "500")
    with pytest.raises(OSError, match="HTTP 500: Internal error encountered"):
        opened().put(file, "shard")
    assert opened().names("") == []
    assert len(store.journal("storage.chunk")) == 3


def test_failed_download_leaves_nothing(brisk: None, store: Google, file: Path) -> None:
    """Bodies that always break off: an error, and neither the file nor a part of it."""
    place = opened()
    (file.parent / "small").write_bytes(b"x")  # halved, nothing comes at all
    place.put(file.parent / "small", "shard")
    store.fault("storage.download", "cut")
    with pytest.raises(ConnectionError, match=rf"gs://{BUCKET} does not answer; does this machine reach"):
        place.get("shard", file.parent / "back" / "file")
    assert list((file.parent / "back").iterdir()) == []


KILLED = """
import sys
from pathlib import Path
from cloudtrain.entrypoints.stores import google_storage as googlestorage
from cloudtrain.entrypoints.stores import mirror
googlestorage.CHUNK_BYTES = googlestorage.SINGLE_BYTES = 1 << 20
mirror.open_mirror(sys.argv[1]).put(Path(sys.argv[2]), "shard")
"""


def test_killed_upload_is_not_seen(brisk: None, store: Google, file: Path, wait_until: Callable[..., Any]) -> None:
    """Nothing is there of a put that died in the middle; the next one is whole."""
    store.fault("storage.chunk", "hang", after=2)
    process = subprocess.Popen([sys.executable, "-c", KILLED, f"{PLACE}/x", file])
    wait_until(lambda: len(store.journal("storage.chunk")) >= 3)
    process.kill()
    process.wait()
    store.clear_faults()
    place = opened()
    assert place.names("") == []
    with pytest.raises(FileNotFoundError, match="has no x/shard"):
        place.get("shard", file.with_name("back"))
    place.put(file, "shard")
    assert store.object("x/shard") == file.read_bytes()


def test_bytes_that_change_on_the_way_are_found(
    brisk: None, store: Google, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An MD5 goes with what is sent and comes with what is read: where it is another's, neither is kept."""
    place = opened()
    place.put(file, "file")
    (file.parent / "small").write_bytes(b"some bytes")
    monkeypatch.setattr(google_storage, "_base64", lambda digest: "AAAAAAAAAAAAAAAAAAAAAA==")
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
    """There and back."""
    right, wrong = google_storage._base64, ["AAAAAAAAAAAAAAAAAAAAAA=="]
    monkeypatch.setattr(google_storage, "_base64", lambda digest: wrong.pop() if wrong else right(digest))
    opened().put(file, "file")
    wrong.append("AAAAAAAAAAAAAAAAAAAAAA==")
    opened().get("file", file.with_name("back"))
    assert file.with_name("back").read_bytes() == file.read_bytes()
    assert store.object("x/file") == file.read_bytes()


def test_object_that_is_replaced_meanwhile_is_not_mixed(
    brisk: None, store: Google, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A get reads one version or none."""
    place = opened()
    place.put(file, "shard")
    store.fault("storage.download", "cut", count=1)
    monkeypatch.setattr("time.sleep", lambda seconds: store.put_object("x/shard", bytes(6 * MIB)))
    with pytest.raises(OSError, match="another process has written the same object meanwhile"):
        place.get("shard", file.with_name("back"))
    assert not file.with_name("back").exists()


@pytest.mark.parametrize("size", [10, 3 * MIB])
def test_file_that_is_written_to_meanwhile_is_not_kept(
    size: int, brisk: None, store: Google, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object stays what it was; never is there a mixture of two versions."""
    path = tmp_path / "last.pt"
    path.write_bytes(bytes(size))
    os.utime(path, (1, 1))
    place = opened()
    place.put(path, "last.pt")
    check, count = google_storage._check, []

    def checked(file: Any, before: os.stat_result) -> None:
        count.append(1)
        if len(count) == 2:  # after the last bytes were read
            path.write_bytes(b"x" * size)
        check(file, before)

    monkeypatch.setattr(google_storage, "_check", checked)
    with pytest.raises(google_storage.Changed, match=r"last\.pt was written to while it was read"):
        place.put(path, "last.pt")
    assert (len(count), store.object("x/last.pt")) == (2, bytes(size))


def test_file_that_was_written_to_since_it_was_seen_is_not_put(brisk: None, store: Google, file: Path) -> None:
    """It may be half of what it is to be."""
    seen = file.stat()
    file.write_bytes(b"")
    with pytest.raises(google_storage.Changed):
        google_storage.Bucket(BUCKET).put(file, "file", seen=seen)
    assert store.objects() == []


@CALLS
def test_slow_server_is_given_up(call: str, hasty: None, store: Google, file: Path) -> None:
    """A server that takes the request and never answers costs the attempts' time, and is an error."""
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
    """A server that accepts and reads nothing holds up no upload, though nothing is waited for but to send."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("CLOUDTRAIN_STORAGE_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(google_storage, "SINGLE_BYTES", 64 * MIB)
        with pytest.raises(ConnectionError, match="does not answer"):
            opened().put(file, "shard")


@contextlib.contextmanager
def silent() -> Iterator[str]:
    """Give the address of a server that accepts and reads nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_silent_proxy_and_closed_door_are_given_up(
    hasty: None, store: Google, metadata: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes connections and says nothing, and what takes none."""
    with silent() as address:
        for name in ("HTTPS_PROXY", "https_proxy"):
            monkeypatch.setenv(name, address)
        with pytest.raises(ConnectionError, match="does not answer"):
            opened().names("")
    with pytest.raises(ConnectionError, match="does not answer"):
        opened().names("")


def test_login_that_does_not_answer_is_given_up(hasty: None, store: Google) -> None:
    """The wait for a token has its limits too."""
    store.fault("token", "hang")
    begin_s = time.monotonic()
    with pytest.raises(ConnectionError, match=r"Google's login does not answer \(.*Read timed out"):
        opened().names("")
    assert time.monotonic() - begin_s < 60


def test_store_that_was_long_away_is_as_good_as_before(brisk: None, store: Google) -> None:
    """Failures use nothing up: once it answers, it is still asked again."""
    place = opened()
    store.fault("storage.*", "500")
    for _ in range(5):
        with pytest.raises(OSError, match="HTTP 500"):
            place.names("")
    store.clear_faults()
    store.fault("storage.*", "drop", every=2)
    assert [place.names("") for _ in range(4)] == [[]] * 4


@CALLS
def test_missing_bucket_is_said(call: str, store: Google, file: Path) -> None:
    """One sentence with the bucket's name: that it is not there is not that the object is not."""
    with pytest.raises(OSError, match="there is no bucket no-such-bucket; make it, or name another one") as caught:
        calls(opened("gs://no-such-bucket/x"), file)[call]()
    assert not isinstance(caught.value, FileNotFoundError)


@CALLS
def test_denied_access_is_said(call: str, store: Google, file: Path) -> None:
    """The role that the job's account must have; and a get that is denied does not mean that nothing is there."""
    store.settings(denied=["storage.*"])
    wanted = rf"no access to gs://{BUCKET}.*; {SERVICE_ACCOUNT} needs the role Storage Object User .*HTTP 403"
    with pytest.raises(PermissionError, match=wanted):
        calls(opened(), file)[call]()


def test_reader_may_read(store: Google, file: Path) -> None:
    """A role that reads is enough to resume from; writing says what is missing."""
    store.put_object("x/name", b"some bytes")
    store.settings(denied=["storage.insert", "storage.delete"])
    place = opened()
    place.get("name", file.with_name("back"))
    for call in ("put", "remove"):
        with pytest.raises(PermissionError, match=r"roles/storage\.objectUser"):
            calls(place, file)[call]()


def test_bucket_that_falls_silent_is_not_empty(brisk: None, store: Google, tmp_path: Path) -> None:
    """A 404 of something between here and Google: unless Google says what is missing, nothing is said to be."""
    store.fault("storage.*", "404", message="by the test")
    with pytest.raises(OSError, match="by the test") as caught:
        opened().get("latest.json", tmp_path / "latest")
    assert not isinstance(caught.value, FileNotFoundError)


def test_haste_is_said(brisk: None, store: Google) -> None:
    """Where Google asks to slow down, and keeps on."""
    store.fault("storage.*", "429")
    with pytest.raises(OSError, match=r"storage.googleapis.com repeatedly asks to slow down for gs://.*HTTP 429"):
        opened().names("")


def test_missing_credentials_are_said_and_may_come(
    brisk: None, store: Google, metadata: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any, what to give the job; an account that the machine gets later serves the next call."""
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


def test_token_of_the_machine_is_asked_for_once(store: Google, metadata: Any, file: Path) -> None:
    """Not for every call, and past every proxy; what it may not is said with its name."""
    place = opened()
    for call in calls(place, file).values():
        call()
    assert metadata.asked == ["token", "email"]
    store.settings(denied=["storage.*"])
    with pytest.raises(PermissionError, match=f"the job's service account {SERVICE_ACCOUNT} needs the role"):
        place.names("")


@pytest.mark.parametrize("source", ["file", "machine"])
def test_token_that_expires_is_renewed(source: str, store: Google, request: pytest.FixtureRequest, file: Path) -> None:
    """One that Google has ceased to take is replaced within the call; where a new one is refused too, that is said."""
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
    """Five minutes before, or halfway; where no new one comes, the old one serves to its end."""
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
    """As `gcloud auth application-default login` leaves it; one that was revoked says the command."""
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
def test_credentials_file_that_is_none_is_said(
    content: str | None, store: Google, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name."""
    path = tmp_path / "key.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    with pytest.raises(PermissionError, match=r"Google gives no token for .*key\.json: is it complete"):
        opened().names("")


@pytest.mark.parametrize("missing", ["google", "google.auth", "requests"])
def test_without_the_packages_is_said_what_to_install(
    missing: str, store: Google, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence with the command; packages that are there and broken are not hidden."""
    importing = builtins.__import__

    def lacking(absent: str, name: str, *args: Any) -> Any:
        if name.startswith("google.auth"):
            raise ModuleNotFoundError(f"No module named {absent!r}", name=absent)
        return importing(name, *args)

    monkeypatch.setattr(builtins, "__import__", functools.partial(lacking, missing))
    with pytest.raises(TaskError, match=r"`pip install google-auth requests` on the machines of the job"):
        opened()
    monkeypatch.setattr(builtins, "__import__", functools.partial(lacking, "cachetools"))
    with pytest.raises(ModuleNotFoundError, match="cachetools"):
        opened()


def test_machine_without_google_s_packages_needs_none(store: Google, metadata: Any, tmp_path: Path) -> None:
    """As in an image of PyTorch's: the standard library is all that is imported."""
    (tmp_path / "file").write_bytes(b"some bytes")
    text = (
        "import sys; from pathlib import Path; from cloudtrain.entrypoints.stores import mirror\n"
        "sys.modules.update(dict.fromkeys(('google.auth', 'requests', 'urllib3')))\n"
        "mirror.open_mirror(sys.argv[1]).put(Path(sys.argv[2]), 'name')"
    )
    argv = [sys.executable, "-W", "error", "-c", text, f"{PLACE}/x", tmp_path / "file"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert store.object("x/name") == b"some bytes"


def test_certificate_that_is_not_trusted_is_said(store: Google, metadata: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, with what an image lacks; either variable that names the list of whom to trust will do."""
    monkeypatch.delenv("SSL_CERT_FILE")
    assert opened().names("") == []
    monkeypatch.delenv("REQUESTS_CA_BUNDLE")
    begin_s = time.monotonic()
    with pytest.raises(OSError, match=r"storage\.googleapis\.com is not trusted: add the package ca-certificates"):
        opened().names("")
    assert time.monotonic() - begin_s < 5


@pytest.mark.parametrize("name", ["CLOUDTRAIN_STORAGE_ENDPOINT", "STORAGE_EMULATOR_HOST"])
def test_another_endpoint_is_asked(name: str, brisk: None, store: Google, file: Path, monkeypatch: Any) -> None:
    """A private one, or an emulator, for all calls, those of a session too."""
    for proxy in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(proxy, "http://127.0.0.1:9")
    monkeypatch.setenv(name, store.endpoints["storage"].removeprefix("http://" if "EMULATOR" in name else ""))
    token = store.client.token()
    monkeypatch.setattr(
        google_access._CredentialsFile, "fetch", lambda self: (token, 3600.0)
    )  # its login is behind the proxy
    opened().put(file, "name")
    assert opened().names("") == ["name"]
    assert store.object("x/name") == file.read_bytes()


@pytest.mark.parametrize("uri", ["gs://", "gs:///prefix", "gs:bucket/x", "gs://a b/x", "GS://@/x", "gs://Upper/x"])
def test_uri_without_a_bucket_is_refused(uri: str) -> None:
    """At once, with the form that it should have."""
    with pytest.raises(TaskError, match="names no bucket; write it as in gs://BUCKET/PREFIX"):
        opened(uri)


def test_first_writer_wins_where_it_should(brisk: None, store: Google, file: Path) -> None:
    """An object that must be new: another's stays; and it is no fault that one's own answer got lost."""
    bucket = google_storage.Bucket(BUCKET)
    (file.parent / "mine").write_bytes(b"mine")
    (file.parent / "theirs").write_bytes(b"theirs")
    store.fault("storage.insert", "lost", count=1)
    bucket.put(file.parent / "mine", "claim", if_absent=True)
    for path in (file.parent / "theirs", file):
        with pytest.raises(FileExistsError, match=rf"gs://{BUCKET}/claim exists already"):
            bucket.put(path, "claim", if_absent=True)
    assert store.object("claim") == b"mine"


MEMORY = """
import json, os, resource, sys
from pathlib import Path
from cloudtrain.entrypoints.stores import mirror
def peak_mib(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
place, folder = mirror.open_mirror(sys.argv[1]), Path(sys.argv[2])
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
    """A put and a get hold a few pieces."""
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


def test_bucket_keeps_as_many_as_it_should(alone: None, store: Google, tmp_path: Path) -> None:
    """Retention holds there, and spares other jobs; the newest is fetched by a new machine, intact."""
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
    """Denied in the middle: the fault in words, the step of before still published; then the next one is."""
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
def test_killed_run_resumes_from_a_bucket_to_the_bit(store: Google, trained: ModuleType, tmp_path: Path) -> None:
    """Killed in step 13 and its folder gone: from the bucket's step 10 on, every number and tensor is the same.

    One call in five fails on the way.
    """
    # Before the kill: rank 0's checkpoint has reached the bucket, however slow that is today.
    wait = """            from cloudtrain.entrypoints.stores import mirror
            for _ in range(600):
                if mirror.open_mirror(os.environ["MIRROR"]).names("latest.json"):
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
    """Nothing can be written there: said in a sentence, nothing else; one that is not there ends the start."""
    store.settings(denied=["storage.insert"])
    done = trained.run(tmp_path / "run", checkpoint={"mirror": f"{PLACE}/a"})
    assert (done.code, done.outcome()["outcome"]) == (0, "done"), done.errors
    assert "the mirror has no copy of step 16: PermissionError: no access to gs://" in done.output
    gone = trained.run(tmp_path / "gone", checkpoint={"mirror": "gs://no-such-bucket"})
    assert gone.code != 0
    assert "TaskError: there is no bucket no-such-bucket; " in gone.errors
    assert gone.values("step", "loss") == {}
