"""The contract of all stores: folder, S3, Azure blob storage, Cloud Storage, with faults of servers and networks."""

from __future__ import annotations

import builtins
import functools
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from trainerruns import TASK, joined, parameters, run, whole_run

from cloudtrain.entrypoints.checkpoints import folder as folders
from cloudtrain.entrypoints.checkpoints import loader, mirror
from cloudtrain.entrypoints.checkpoints.mirror import Uploader
from cloudtrain.entrypoints.checkpoints.saver import Saver, Snapshot
from cloudtrain.entrypoints.stores import azure, claims, gcs, google_http, s3
from cloudtrain.entrypoints.stores.store import ABSENT, Store, StoreError, open_store
from doubles.aws.handle import Aws
from doubles.azure.names import ACCOUNT, ACCOUNT_KEY, CONTAINER
from doubles.google.names import BUCKET, SERVICE_ACCOUNT
from doubles.waiting import until

MIB = 1 << 20
HOST = f"{ACCOUNT}.blob.core.windows.net"

SEVERAL_PARTS = random.Random(0).randbytes(11 * MIB + 7)  # with a remainder


@dataclass(frozen=True)
class Server:
    """A store's server. `fault(kind, on, every=, after=, count=)` makes calls fail until `heal`.

    Kinds: drop, lost, cut, 500, 429, 503, hang, denied. The calls `on`: any, part, commit, put, get, delete.
    `missing` and `denied` are the texts of errors; `asked` counts the calls, `struck` the calls with a fault.
    """

    place: str
    fault: Callable[..., None]
    heal: Callable[[], None]
    asked: Callable[..., int]
    struck: Callable[[], int]
    plant: Callable[[str, bytes], object]
    content: Callable[[str], bytes | None]
    marks: Callable[[str], object]
    missing: str
    no_place: str
    denied: str
    leftovers: Callable[[], int] = lambda: 0


def of_double(double: Any, operations: dict[str, str], kinds: dict[str, Any], **texts: Any) -> Server:
    """Return the server of a stand-in: `operations` and `kinds` are the stand-in's words for calls and faults."""

    def fault(kind: str, on: str = "any", **details: Any) -> None:
        if kind == "denied":
            texts["deny"](double, on, **details)
            return
        word, more = kinds.get(kind, (kind, {}))
        double.fault(operations[on], word, **more, **details)

    def heal() -> None:
        double.clear_faults()
        texts["allow"](double)

    def found(on: str = "any") -> list[dict[str, Any]]:
        return [call for call in double.journal() if fnmatch(str(call["operation"]), operations[on])]

    fields = {key: value for key, value in texts.items() if key not in ("deny", "allow")}
    struck = lambda: sum(call["outcome"].lower() != "ok" for call in found())  # noqa: E731
    return Server(fault=fault, heal=heal, asked=lambda on="any": len(found(on)), struck=struck, **fields)


def s3_server(double: Aws) -> Server:
    """Return AWS's stand-in as a server."""
    client, bucket = double.client("s3"), "cloudtrain-tests"
    writes = {"any": "*", "put": ("PutObject", "UploadPart"), "delete": "DeleteObject"}
    denied = {"status": 403, "code": "AccessDenied", "message": "by the test"}

    def content(key: str) -> bytes | None:
        if key not in [item["Key"] for item in client.list_objects_v2(Bucket=bucket).get("Contents", ())]:
            return None
        data: bytes = client.get_object(Bucket=bucket, Key=key)["Body"].read()
        return data

    return of_double(
        double,
        {"any": "*", "part": "UploadPart", "put": "PutObject", "get": "GetObject"},
        {"503": ("throttle", {})},
        deny=lambda double, on, **more: double.fault(writes[on], "error", **denied, **more),
        allow=lambda double: None,
        place=f"s3://{bucket}",
        plant=lambda key, data: client.put_object(Bucket=bucket, Key=key, Body=data),
        content=content,
        marks=lambda key: client.put_object(Bucket=bucket, Key=f"{key}/"),
        missing="there is no bucket no-such-bucket; make it, or name another one",
        no_place="s3://no-such-bucket",
        denied=r"no access to .*; the credentials need s3:ListBucket .*AccessDenied",
        leftovers=lambda: len(client.list_multipart_uploads(Bucket=bucket).get("Uploads", ())),
    )


def azure_server(double: Any) -> Server:
    """Return Azure's stand-in as a server."""
    parts = {"part": "blob.put_block", "commit": "blob.put_blocklist", "put": "blob.put", "list": "blob.list"}

    def mark(key: str) -> None:
        from azure.storage.blob import ContainerClient

        login = {"account_name": ACCOUNT, "account_key": ACCOUNT_KEY}
        with ContainerClient(f"https://{HOST}", CONTAINER, login) as client:
            client.upload_blob(key, b"", metadata={"hdi_isfolder": "true"})

    return of_double(
        double,
        {"any": "blob.*", **parts, "get": "blob.get", "delete": "blob.delete"},
        {
            "hang": ("slow", {"delay_s": 5.0}),
            "404": ("error", {"status": 404, "code": "Whatever", "message": "by the test"}),
            "429": ("error", {"status": 429, "code": "TooManyRequests"}),
        },
        deny=lambda double, on, **more: double.settings(storage_role="none" if on == "any" else "reader"),
        allow=lambda double: double.settings(storage_role="contributor"),
        place=f"https://{HOST}/{CONTAINER}",
        plant=double.put_blob,
        content=double.blob,
        marks=mark,
        missing=rf"there is no container no-such-container in {HOST}; make it, or",
        no_place=f"https://{HOST}/no-such-container",
        denied=r"no access to .*; the job's identity needs the role Storage Blob Data Contributor .*Mismatch",
    )


def google_server(double: Any) -> Server:
    """Return Google's stand-in as a server."""
    parts = {"part": "storage.chunk", "put": "storage.insert", "get": "storage.download", "list": "storage.list"}
    writes = ["storage.insert", "storage.delete"]
    return of_double(
        double,
        {"any": "storage.*", **parts, "delete": "storage.delete"},
        {"404": ("404", {"message": "by the test"})},
        deny=lambda double, on, **more: double.settings(denied=["storage.*"] if on == "any" else writes),
        allow=lambda double: double.settings(denied=[]),
        place=f"gs://{BUCKET}",
        plant=double.put_object,
        content=double.object,
        marks=lambda key: double.put_object(f"{key}/", b""),
        missing="there is no bucket no-such-bucket; make it, or name another one",
        no_place="gs://no-such-bucket",
        denied=rf"no access to gs://{BUCKET}.*; {SERVICE_ACCOUNT} needs the role Storage Object User .*HTTP 403",
    )


def started(kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Return the server of a kind; the environment leads this process and its children to the server."""
    if kind == "s3":
        return s3_server(request.getfixturevalue("s3_store"))
    if kind == "gcs":
        return google_server(request.getfixturevalue("google_store"))
    for name in [name for name in os.environ if name.startswith(("AZURE_", "MSI_", "IDENTITY_"))]:
        monkeypatch.delenv(name)
    double = request.getfixturevalue("azure")
    double.apply(monkeypatch)
    return azure_server(double)


@pytest.fixture(params=["s3", "azure", "gcs"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Return the server of each cloud in turn."""
    return started(request.param, request, monkeypatch)


@pytest.fixture(params=["folder", "s3", "azure", "gcs"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Return the address of each store in turn, the folder's too."""
    return str(tmp_path / "kept") if request.param == "folder" else started(request.param, request, monkeypatch).place


@pytest.fixture
def patient(brisk: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use `brisk` with eight attempts."""
    for module, name in ((s3, "_ATTEMPTS"), (azure, "ATTEMPTS"), (google_http, "ATTEMPTS")):
        monkeypatch.setattr(module, name, 8)
    monkeypatch.setattr(azure, "_BODY_ATTEMPTS", 8)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file of several parts and a remainder."""
    path = tmp_path / "file"
    path.write_bytes(SEVERAL_PARTS)
    return path


CALLS = pytest.mark.parametrize("call", ["put", "get", "read", "head", "put_if", "names", "delete"])


def calls(store: Store, path: Path) -> dict[str, Callable[[], object]]:
    """Return every call of a store."""
    return {
        "put": lambda: store.put(path, "name"),
        "get": lambda: store.get("name", path.with_name("got")),
        "read": lambda: store.read("name"),
        "head": lambda: store.head("name", 4),
        "put_if": lambda: store.put_if(b"data", "name", ABSENT),
        "names": lambda: store.names("n"),
        "delete": lambda: store.delete("name"),
    }


@pytest.mark.parametrize("prefix", ["", "/", "/a", "/a/b/", "/100%2525 of a+b #1{query} é/ü&'("])
def test_object_round_trips(prefix: str, place: str, tmp_path: Path) -> None:
    """With any prefix, special characters included, all calls work on the same bytes and names."""
    store = open_store(place + prefix.replace("{query}", "" if place.startswith("https") else "?x="))
    (tmp_path / "file").write_bytes(b"some bytes")
    for name in ("step-00000001/shard-0", "step-00000001/manifest.json"):
        store.put(tmp_path / "file", name)
    store.put(b"more bytes", "latest.json")
    assert store.names("step-") == ["step-00000001/manifest.json", "step-00000001/shard-0"]
    assert store.sizes("") == {"latest.json": 10, "step-00000001/manifest.json": 10, "step-00000001/shard-0": 10}
    store.get("step-00000001/shard-0", tmp_path / "new" / "folder" / "file")
    assert (tmp_path / "new/folder/file").read_bytes() == b"some bytes"
    assert store.read("latest.json")[0] == b"more bytes"
    assert [store.head("latest.json", size) for size in (4, 100)] == [b"more", b"more bytes"]
    store.delete("latest.json")
    store.delete("latest.json")
    assert (store.names("l"), store.read("latest.json")) == ([], (None, ABSENT))
    for fetch in (lambda: store.get("latest.json", tmp_path / "latest"), lambda: store.head("latest.json", 4)):
        with pytest.raises(FileNotFoundError, match=r"latest\.json"):
            fetch()
    assert {path.name for path in tmp_path.iterdir()} - {"kept"} == {"file", "new"}


def test_names_of_a_folder_begin_with_the_prefix(tmp_path: Path) -> None:
    """The names below a prefix are those of all names that begin with the prefix, with and without a slash."""
    for name in ("step-1/m", "step-1/deep/n", "step-2", "other/step-3", ".hidden/x", "other/left.tmp"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    store = open_store(str(tmp_path))
    assert store.names("") == [".hidden/x", "other/step-3", "step-1/deep/n", "step-1/m", "step-2"]
    for prefix in ("step-", "step-1/", "step-1/deep/", "step-2", "other/s", ".", "none/", "step-2/"):
        assert store.names(prefix) == [name for name in store.names("") if name.startswith(prefix)]
    assert open_store(str(tmp_path / "absent")).names("a") == []


@pytest.mark.parametrize("size", [0, 1, MIB, MIB + 1, 2 * MIB, 11 * MIB + 7])
def test_files_of_any_size_round_trip(size: int, brisk: None, place: str, tmp_path: Path) -> None:
    """Empty files, files at the edges of a part, and large files arrive whole; a second put replaces the object."""
    store = open_store(f"{place}/x")
    for data in (random.Random(size).randbytes(size), random.Random(1).randbytes(size // 2 + 1)):
        (tmp_path / "file").write_bytes(data)
        store.put(tmp_path / "file", "name")
        store.get("name", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == data


CORRUPTED = [
    ("azure", "azure.storage.blob._shared.policies.calculate_content_md5", b"0" * 16, "Md5Mismatch|MD5 mismatch"),
    ("gcs", "cloudtrain.entrypoints.stores.gcs._base64", "A" * 22 + "==", r"x/(other|file) arrived damaged 3 times"),
]


@pytest.mark.parametrize(("server", "where", "wrong", "words"), CORRUPTED, indirect=["server"])
def test_bytes_corrupted_in_transit_are_found(
    where: str, wrong: object, words: str, brisk: None, server: Server, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An MD5 travels with every upload and download; a wrong MD5 is an error, and the data is dropped."""
    store = open_store(f"{server.place}/x")
    store.put(file, "file")
    (file.parent / "small").write_bytes(b"some bytes")
    monkeypatch.setattr(where, lambda data: wrong)
    for path in (file, file.parent / "small"):
        with pytest.raises(OSError, match=words):
            store.put(path, "other")
    with pytest.raises(OSError, match=words):
        store.get("file", file.with_name("back"))
    assert store.names("") == ["file"]
    assert not file.with_name("back").exists()


def test_object_is_written_only_over_the_version_read(place: str, tmp_path: Path) -> None:
    """Of two writers with the same version the second is refused, and so is a writer that expects no object."""
    (tmp_path / "kept").mkdir()
    store = open_store(place)
    assert store.read("name.json") == (None, ABSENT)
    assert store.put_if(b'{"a": 1}', "name.json", ABSENT)
    assert not store.put_if(b'{"b": 1}', "name.json", ABSENT)
    data, version = store.read("name.json")
    assert data == b'{"a": 1}'
    assert store.put_if(b'{"a": 2}', "name.json", version)
    assert not store.put_if(b'{"a": 3}', "name.json", version)
    assert open_store(place).read("name.json")[0] == b'{"a": 2}'
    store.delete("name.json")
    assert not store.put_if(b'{"a": 3}', "name.json", store.read("name.json")[1] or version)
    assert store.names("") == []


def test_claim_rises_whoever_writes(place: str, tmp_path: Path) -> None:
    """Of a late container and the launcher one comes first, and each knows; a lower attempt never takes the claim."""
    (tmp_path / "kept").mkdir()
    with ThreadPoolExecutor(6) as pool:
        told = [
            pool.submit(claims.take, open_store(place), claims.NAME, number // 2 + 1, starts=number % 2 == 0)
            for number in range(6)  # the container and the launcher of the attempts 1 to 3
        ]
    first, *_ = [each.result() for each in told[0:1]]
    last = claims.take(open_store(place), claims.NAME, 0)
    assert (last.newest, last.started) == (3, 3)
    assert first.started >= 1 if first.newest == 1 else first.newest > 1
    assert claims.take(open_store(place), claims.NAME, 4) == (4, 3)
    assert claims.take(open_store(place), claims.NAME, 3, starts=True) == (4, 3)
    open_store(place).put(b"[1]", claims.NAME)  # damaged
    assert claims.take(open_store(place), claims.NAME, 2, starts=True) == (2, 2)


def test_claim_of_a_store_without_conditional_writes(s3_store: Aws, brisk: None) -> None:
    """A refusal of the condition is an error with the store's words; a store that always says no ends the tries."""
    store = open_store("s3://kept/x")
    s3_store.client("s3").create_bucket(Bucket="kept")
    s3_store.fault("PutObject", "error", code="NotImplemented", message="If-None-Match is not there", status=501)
    with pytest.raises(StoreError, match=r"NotImplemented.*If-None-Match is not there"):
        claims.take(store, claims.NAME, 1)
    s3_store.clear_faults()
    s3_store.fault("PutObject", "error", code="PreconditionFailed", status=412)
    with pytest.raises(StoreError, match="refuses conditional writes"):
        claims.take(store, claims.NAME, 1)


def test_names_do_not_mix_jobs(server: Server) -> None:
    """`names` lists neither objects of a job whose name has the same beginning, nor folder markers of any kind."""
    for job in ("digits", "digits-2", "digits/below"):
        open_store(f"{server.place}/{job}").put(b"", f"{job[-1]}-file")
    server.marks("digits/folder")
    assert open_store(f"{server.place}/digits").names("") == ["below/w-file", "s-file"]
    assert open_store(f"{server.place}/digits-2/").names("") == ["2-file"]


@pytest.mark.parametrize("kind", ["s3", "azure", "gcs"])
def test_names_go_over_all_pages(kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server returns ten names per page (in production a thousand or five thousand), and `names` reads all pages."""
    server = started(kind, request, monkeypatch)
    double, setting = {"s3": ("aws", "s3"), "azure": ("azure", "blob"), "gcs": ("google", "storage")}[kind]
    request.getfixturevalue(double).settings(**{f"{setting}_page_size": 10})
    names = [f"step-{number:08d}/shard" for number in range(15)]
    for name in names:
        server.plant(f"many/{name}", b"")
    store, before = open_store(f"{server.place}/many"), server.asked("any")
    assert store.names("step-") == names
    assert store.names("step-0000001") == names[10:]
    assert server.asked("any") - before == 3


STUMBLES = {
    "s3": ("drop", "cut", "500"),
    "azure": ("drop", "lost", "cut", "throttle", "500", "429"),
    "gcs": ("drop", "lost", "cut", "429", "500", "503"),
}


@pytest.mark.parametrize(
    ("server", "kind"), [(each, kind) for each, kinds in STUMBLES.items() for kind in kinds], indirect=["server"]
)
def test_failing_server_is_retried(kind: str, patient: None, server: Server, file: Path) -> None:
    """With one request in four closed, lost or refused by the server, or one in three cut, all files arrive whole."""
    (file.parent / "small").write_bytes(b"some bytes")
    store = open_store(f"{server.place}/x")
    server.fault(kind, every=3 if kind == "cut" else 4)
    store.put(file, "file")
    store.put(file.parent / "small", "small")
    assert store.names("") == ["file", "small"]
    for name in ("file", "small"):
        store.get(name, file.parent / "back" / name)
        assert (file.parent / "back" / name).read_bytes() == (file.parent / name).read_bytes()
    assert sorted(path.name for path in (file.parent / "back").iterdir()) == ["file", "small"]
    assert store.read("small")[0] == b"some bytes"
    store.delete("small")
    assert store.names("") == ["file"]
    assert server.struck() > 2


LOST = [("azure", each) for each in ("put", "part", "commit", "delete")]
LOST += [("gcs", each) for each in ("put", "part", "delete")]


@pytest.mark.parametrize(("server", "on"), LOST, indirect=["server"])
def test_lost_answers_do_no_harm(on: str, brisk: None, server: Server, file: Path) -> None:
    """A request whose answer was lost is sent again with the same result."""
    server.fault("lost", on, count=2)
    store = open_store(f"{server.place}/x")
    store.put(file, "file")
    store.put(b"some bytes", "small")
    assert server.content("x/file") == file.read_bytes()
    store.delete("small")
    assert store.names("") == ["file"]
    assert server.asked(on) >= 3


def test_failed_upload_leaves_nothing(brisk: None, server: Server, file: Path) -> None:
    """A part that always fails raises an error, and leaves neither an object nor parts that would cost money."""
    server.fault("500", "part")
    with pytest.raises(OSError, match=r"InternalError|HTTP 500: Internal error encountered"):
        open_store(f"{server.place}/x").put(file, "shard")
    assert server.asked("part") <= 4 * 3
    server.heal()
    assert (open_store(f"{server.place}/x").names(""), server.leftovers()) == ([], 0)


def test_failed_download_leaves_nothing(brisk: None, server: Server, tmp_path: Path) -> None:
    """If every body breaks off, the download raises an error and leaves neither the file nor a temporary file."""
    store = open_store(f"{server.place}/x")
    store.put(b"x", "shard")  # half of one byte is no byte
    server.fault("cut", "get")
    with pytest.raises(OSError, match=re.escape(server.place)):
        store.get("shard", tmp_path / "back" / "file")
    assert list((tmp_path / "back").iterdir()) == []


KILLED = """
import sys
from pathlib import Path
from cloudtrain.entrypoints.stores import azure, gcs, s3, store
azure._BLOCK_BYTES = gcs.CHUNK_BYTES = gcs.SINGLE_BYTES = 1 << 20
s3._PART_BYTES = 5 << 20
store.open_store(sys.argv[1]).put(Path(sys.argv[2]), "shard")
"""


@pytest.mark.parametrize(
    ("server", "on"), [("s3", "part"), ("azure", "part"), ("azure", "commit"), ("gcs", "part")], indirect=["server"]
)
def test_killed_upload_is_not_seen(on: str, brisk: None, server: Server, file: Path) -> None:
    """A put killed in the middle leaves no visible object; the next put is whole despite the parts."""
    server.fault("drop", on, after=2 if on == "part" else 0)
    process = subprocess.Popen([sys.executable, "-c", KILLED, f"{server.place}/x", file])
    until(lambda: server.asked(on) > (2 if on == "part" else 0))
    process.kill()
    process.wait()
    server.heal()
    store = open_store(f"{server.place}/x")
    assert store.names("") == []
    with pytest.raises(FileNotFoundError, match="has no shard"):
        store.get("shard", file.with_name("back"))
    store.put(file, "shard")
    assert server.content("x/shard") == file.read_bytes()


@CALLS
def test_hung_server_is_given_up(call: str, hasty: None, server: Server, file: Path) -> None:
    """A server that accepts the request but never answers costs the time of the attempts and raises an error."""
    server.plant("x/name", b"some bytes")
    server.fault("hang")
    begin_s, before = time.monotonic(), server.asked()
    with pytest.raises(ConnectionError, match=r"does not answer.*(timed out|Read timeout on endpoint)") as caught:
        calls(open_store(f"{server.place}/x"), file)[call]()
    assert 1.4 < time.monotonic() - begin_s < 20
    assert server.asked() - before >= 3
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("server", "variable"), [("s3", "AWS_ENDPOINT_URL_S3"), ("gcs", "CLOUDTRAIN_STORAGE_ENDPOINT")], indirect=["server"]
)
def test_server_that_does_not_read_is_given_up(
    variable: str, hasty: None, server: Server, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that accepts a connection but reads no bytes cannot hold up an upload, even while the client sends."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv(variable, f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(s3, "_PART_BYTES", 64 * MIB)
        monkeypatch.setattr(gcs, "SINGLE_BYTES", 64 * MIB)
        with pytest.raises(ConnectionError, match="does not answer"):
            open_store(f"{server.place}/x").put(file, "shard")


@pytest.mark.parametrize("server", ["azure", "gcs"], indirect=True)
def test_silent_proxy_and_closed_port_are_given_up(
    hasty: None, server: Server, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a login over the network, a proxy that never answers and a closed port both raise an error."""
    if server.place.startswith("gs:"):
        request.getfixturevalue("metadata")
    else:
        monkeypatch.setenv("AZURE_STORAGE_KEY", ACCOUNT_KEY)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for name in ("HTTPS_PROXY", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ConnectionError, match="does not answer"):
            open_store(f"{server.place}/x").names("")
        connection, _ = silent.accept()
        with connection, connection.makefile("rb") as asked:
            connection.settimeout(10)
            assert asked.read().startswith(b"CONNECT ")  # up to the end: nothing of it stays open here
    with pytest.raises(ConnectionError, match="does not answer"):
        open_store(f"{server.place}/x").names("")


def test_login_that_does_not_answer_is_given_up(
    hasty: None, azure: Any, google_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait for a token has time limits too, and does not start again for every attempt."""
    azure.fault(["openid", "instance", "token"], "slow", delay_s=5.0)
    google_store.fault("token", "hang")
    begin_s = time.monotonic()
    with pytest.raises(ConnectionError, match=r"Google's login does not answer \(.*Read timed out"):
        open_store(f"gs://{BUCKET}/x").names("")
    azure.apply(monkeypatch)
    with pytest.raises(ConnectionError, match=r"the login for https://.* does not answer \(.*Read timed out"):
        open_store(f"https://{HOST}/{CONTAINER}/x").names("")
    assert time.monotonic() - begin_s < 60


@pytest.mark.parametrize("server", ["azure", "gcs"], indirect=True)
def test_foreign_404_does_not_mean_missing(brisk: None, server: Server, tmp_path: Path) -> None:
    """A 404 from a proxy before the store does not count as a missing object; only the store's own answer does."""
    server.fault("404")
    with pytest.raises(OSError, match="by the test") as caught:
        open_store(f"{server.place}/x").get("latest.json", tmp_path / "latest")
    assert not isinstance(caught.value, FileNotFoundError)


def test_store_recovers_after_a_long_outage(brisk: None, server: Server) -> None:
    """Failures use up no budget of retries: when the store answers again, failed requests are still retried."""
    store = open_store(f"{server.place}/x")
    server.fault("500")
    for _ in range(20 if server.place.startswith("s3") else 5):  # botocore has a quota of retries
        with pytest.raises(OSError, match=r"InternalError|HTTP 500"):
            store.names("")
    server.heal()
    server.fault("drop", every=3)
    assert [store.names("") for _ in range(6)] == [[]] * 6


@CALLS
def test_missing_place_and_denied_access_are_reported(call: str, server: Server, file: Path) -> None:
    """One sentence names the bucket or container, or the rights for the identity; neither is a missing object."""
    with pytest.raises(OSError, match=server.missing) as caught:
        calls(open_store(f"{server.no_place}/x"), file)[call]()
    assert not isinstance(caught.value, FileNotFoundError)
    server.fault("denied")
    with pytest.raises(PermissionError, match=server.denied):
        calls(open_store(f"{server.place}/x"), file)[call]()


def test_reader_may_read(server: Server, file: Path) -> None:
    """A role that may read is enough to resume; a write names the missing rights."""
    server.plant("x/name", b"some bytes")
    server.fault("denied", "put")
    server.fault("denied", "delete")
    store = open_store(f"{server.place}/x")
    store.get("name", file.with_name("back"))
    assert store.read("name")[0] == b"some bytes"
    for call in ("put", "put_if", "delete"):
        with pytest.raises(PermissionError, match="no access to"):
            calls(store, file)[call]()


AZURE_FORM = "is no address of Azure's blob storage"
WRONG = [
    *((f"{scheme}://{rest}", "s3") for scheme, rest in (("s3", ""), ("s3", "/prefix"), ("s3", "a b/x"), ("S3", "@/x"))),
    *((f"gs:{rest}", "gs") for rest in ("//", "///prefix", "bucket/x", "//a b/x", "//Upper/x")),
    *(("s3:bucket/x", "s3"), ("GS://@/x", "gs")),
    ("https://example.com/container/x", f"{AZURE_FORM}; write it as in https://ACCOUNT.blob"),
    ("https://a.dfs.core.windows.net/container/x", AZURE_FORM),
    *((f"https://a.blob.core.windows.net{path}", "names no container") for path in ("", "/", "/UPPER/x", "/two--dash")),
    ("abfss://a.dfs.core.windows.net/x", AZURE_FORM),
    ("abfss://@a.dfs.core.windows.net/x", "names no container"),
    ("wasbs://c@a.file.core.windows.net/x", AZURE_FORM),
    ("https://a.blob.core.windows.net/container/x?sv=1&sig=hidden", "contains a `\\?`: remove the query; a SAS is"),
]


@pytest.mark.parametrize(("uri", "message"), WRONG)
def test_wrong_addresses_are_refused(uri: str, message: str) -> None:
    """An error comes at once, shows the right form, and contains no secret from the address."""
    bucket = f"names no bucket; write it as in {message}://BUCKET/PREFIX"
    with pytest.raises(StoreError, match=bucket if message in ("s3", "gs") else message) as caught:
        open_store(uri)
    assert "hidden" not in str(caught.value)


PACKAGES = [
    (f"gs://{BUCKET}/x", "google.auth", "google google.auth requests", "google-auth requests` on the machines of"),
    (
        f"https://{HOST}/{CONTAINER}/x",
        "azure",
        "azure.identity azure.storage.blob azure.storage azure",
        "azure-storage-blob azure-identity` on the machines",
    ),
    ("s3://bucket/x", "boto3", "boto3", "boto3` on the machines of the job, or add it to the image"),
]


@pytest.mark.parametrize(("uri", "imported", "missing", "command"), PACKAGES)
def test_missing_packages_are_reported_with_the_command(
    uri: str, imported: str, missing: str, command: str, google_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence gives the install command; errors inside installed packages are not hidden."""
    importing = builtins.__import__

    def lacking(absent: str, name: str, *args: Any) -> Any:
        if name.startswith(imported):
            raise ModuleNotFoundError(f"No module named {absent!r}", name=absent)
        return importing(name, *args)

    for absent in missing.split():
        monkeypatch.setattr(builtins, "__import__", functools.partial(lacking, absent))
        with pytest.raises(StoreError, match=rf"`pip install {command}"):
            open_store(uri)
    monkeypatch.setattr(builtins, "__import__", functools.partial(lacking, "isodate"))
    with pytest.raises(ModuleNotFoundError, match="isodate"):
        open_store(uri)


MEMORY = """
import json, os, resource, sys
from pathlib import Path
from cloudtrain.entrypoints.stores.store import open_store
def peak_mib(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
place, folder = open_store(sys.argv[1]), Path(sys.argv[2])
(folder / "small").write_bytes(b"some bytes")
place.put(folder / "small", "small")
place.get("small", folder / "back")
told = [peak_mib()]
with (folder / "large").open("wb") as file:
    for number in range(int(sys.argv[3])):
        file.write(os.urandom(1 << 20))
place.put(folder / "large", "large")
told.append(peak_mib())
place.get("large", folder / "back")
told.append(peak_mib())
assert os.path.getsize(folder / "back") == int(sys.argv[3]) << 20
print(json.dumps(told))
"""


@pytest.mark.parametrize(
    ("server", "size_mib", "most_put", "most_get"),
    [pytest.param("azure", 192, 80, 40, marks=pytest.mark.soak), ("gcs", 96, 16, 16)],
    indirect=["server"],
)
def test_memory_does_not_grow_with_the_file(
    server: Server, size_mib: int, most_put: int, most_get: int, tmp_path: Path
) -> None:
    """A put and a get hold a few parts in memory."""
    argv = [sys.executable, "-c", MEMORY, f"{server.place}/x", tmp_path, str(size_mib)]
    small, put, got = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
    assert put - small < most_put
    assert got - put < most_get


def save(home: Path, uploads: Uploader, *steps: int) -> None:
    """Save and upload one small checkpoint a step."""
    saver = Saver(home, torch.device("cpu"), 9, uploads)
    for step in steps:
        saver.begin(Snapshot(step, {"model.w": torch.arange(10.0) + step}, {}, {}, {"step": step, "job": "j"}))
        saver.wait()
        uploads.finish()


def test_store_keeps_the_right_number_of_checkpoints(alone: None, place: str, tmp_path: Path) -> None:
    """Retention works in the store and spares other jobs; a new machine fetches the newest checkpoint, intact."""
    store = mirror.open_mirror(place, "a")
    assert store is not None
    assert mirror.fetch(store, tmp_path) is None
    save(tmp_path / "other", Uploader(open_store(f"{place}/ab"), 3), 1)
    uploads = Uploader(store, 2)
    save(tmp_path / "first", uploads, 10, 20, 30, 40)
    assert [(sent.step, sent.fault) for sent in uploads.news()] == [(step, None) for step in (10, 20, 30, 40)]
    assert {name.partition("/")[0] for name in store.names("")} == {"latest.json", "step-00000030", "step-00000040"}
    assert mirror.latest(open_store(f"{place}/ab")) == 1
    assert mirror.latest(open_store(f"{place}/none")) is None
    fetched = mirror.fetch(store, tmp_path)
    assert fetched == tmp_path / "step-00000040"
    assert loader.check(fetched) is None
    assert folders.open_found(fetched).step == 40


def test_damage_in_the_store_is_found(alone: None, server: Server, tmp_path: Path) -> None:
    """If a byte changed in the store, the fetched checkpoint fails its check."""
    store = open_store(f"{server.place}/a")
    save(tmp_path / "first", Uploader(store, 2), 10)
    (shard,) = (name for name in store.names("step-") if "/shard-" in name)
    data = server.content(f"a/{shard}")
    server.plant(f"a/{shard}", data[:-1] + bytes([data[-1] ^ 1]))
    fetched = mirror.fetch(store, tmp_path)
    assert fetched is not None
    assert "differs from the manifest" in str(loader.check(fetched))


def test_store_that_fails_publishes_nothing(alone: None, brisk: None, server: Server, tmp_path: Path) -> None:
    """After a denied write the error is in words and the earlier step stays published; the next is published."""
    store = open_store(f"{server.place}/a")
    uploads = Uploader(store, 2)
    save(tmp_path / "first", uploads, 10)
    server.fault("denied", "put", after=server.asked("put") - 2)  # on S3 from the manifest on
    save(tmp_path / "first", uploads, 20)
    server.heal()
    assert mirror.latest(store) == 10
    save(tmp_path / "first", uploads, 30)
    news = [(sent.step, sent.fault is None) for sent in uploads.news()]
    assert news == [(10, True), (20, False), (20, False), (30, True)]
    assert mirror.latest(store) == 30


RESUMED = [
    ("s3", "{place}/a/b", "503"),
    pytest.param(
        "azure", f"abfss://{CONTAINER}@{ACCOUNT}.dfs.core.windows.net/a/b", "throttle", marks=pytest.mark.soak
    ),
    pytest.param("gcs", "{place}/a/b", "503", marks=pytest.mark.soak),
]


@pytest.mark.slow
@pytest.mark.parametrize(("server", "uri", "busy"), RESUMED, indirect=["server"])
def test_killed_run_resumes_from_a_store_bit_for_bit(
    server: Server, uri: str, busy: str, whole: Any, tmp_path: Path
) -> None:
    """A run killed in step 13 resumes from the store's step 10 with identical numbers and tensors.

    The run's own folder is gone, and a fifth of the calls fail. Every strategy uses the same store code.
    """
    # Before the kill, rank 0's checkpoint has reached the store, even if the upload is slow today.
    wait = """            from cloudtrain.entrypoints.stores.store import open_store
            for _ in range(600):
                if open_store(os.environ["MIRROR"]).names("latest.json"):
                    break
                time.sleep(0.1)
            os.kill("""
    text = TASK.replace("            os.kill(", wait, 1)
    server.fault("drop", every=10)
    server.fault(busy, every=9)
    uri = uri.format(place=server.place)
    settings: dict[str, Any] = {"strategy": "fsdp", "checkpoint": {"mirror": uri, "every_steps": 10}}
    settings |= {"text": text, "env": {"MIRROR": f"{uri}/test"}}
    killed = run(tmp_path, do="kill:1:26", **settings)
    assert killed.code != 0
    shutil.rmtree(tmp_path / "checkpoints")
    again = whole_run(tmp_path, **settings)
    assert (again.only("restart")["step"], again.only("restart")["changed"]) == (10, [])
    assert joined(killed, again) == whole("fsdp").values("step", "loss")
    assert parameters(again) == parameters(whole("fsdp"))
    assert server.struck() > 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "server", [pytest.param(name, marks=pytest.mark.soak) for name in ("s3", "azure", "gcs")], indirect=True
)
def test_store_that_fails_does_not_end_the_training(server: Server, whole: Any, tmp_path: Path) -> None:
    """A denied write is reported in a sentence, and the run equals a run without a mirror.

    A missing place ends the start, before any training: it might have had a checkpoint.
    """
    server.fault("denied", "put")
    done = run(tmp_path / "run", strategy="fsdp", checkpoint={"mirror": f"{server.place}/a"})
    assert (done.code, done.outcome()["outcome"]) == (0, "done"), done.errors
    assert "the mirror has no copy of step 16: PermissionError: no access to " in done.output
    assert "azure" not in done.errors.lower()
    assert done.values("step", "loss") == whole("fsdp").values("step", "loss")
    gone = run(tmp_path / "gone", checkpoint={"mirror": server.no_place})
    assert gone.code != 0
    assert re.search(f"TaskError: {server.missing}", gone.errors)
    assert gone.values("step", "loss") == {}
