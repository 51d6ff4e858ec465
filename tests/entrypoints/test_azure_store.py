"""An Azure container as the mirror of checkpoints, with the real SDK against Azure's stand-in."""

from __future__ import annotations

import builtins
import contextlib
import datetime
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
from cloudtrain.entrypoints.stores import azure, azure_access
from cloudtrain.entrypoints.stores.store import Store, StoreError, open_store
from doubles.azure.handle import Azure
from doubles.azure.names import ACCOUNT, ACCOUNT_KEY, CONTAINER, MSI_SECRET

MIB = 1 << 20
HOST = f"{ACCOUNT}.blob.core.windows.net"
PLACE = f"https://{HOST}/{CONTAINER}"
CALLS = pytest.mark.parametrize("call", ["put", "get", "names", "delete"])


@pytest.fixture
def store(azure: Azure, monkeypatch: pytest.MonkeyPatch) -> Azure:
    """Return Azure's stand-in; the environment leads this process and its children to the stand-in."""
    for name in [name for name in os.environ if name.startswith(("AZURE_", "MSI_", "IDENTITY_"))]:
        monkeypatch.delenv(name)
    azure.apply(monkeypatch)
    return azure


@pytest.fixture
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set three attempts, a very short pause, and small blocks and ranges."""
    for name, value in {"ATTEMPTS": 3, "PAUSE_S": 0.01, "RANGE_BYTES": MIB}.items():
        monkeypatch.setattr(azure_access, name, value)
    monkeypatch.setattr(azure, "_BLOCK_BYTES", MIB)


@pytest.fixture
def hasty(brisk: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use `brisk`, and time out after 0.5 s, too little for a busy machine: only for servers that never answer."""
    for name in ("CONNECT_S", "READ_S"):
        monkeypatch.setattr(azure_access, name, 0.5)


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
    """Return a file of several blocks and a remainder."""
    path = tmp_path / "file"
    path.write_bytes(random.Random(0).randbytes(5 * MIB + 7))
    return path


@pytest.mark.parametrize("prefix", ["", "/", "/a", "/a/b/", "/100%2525 of a+b #1 é/ü&'("])
def test_object_round_trips(prefix: str, store: Azure, tmp_path: Path) -> None:
    """With any prefix, special characters included, put, names, get and remove work on the same bytes and names."""
    place = opened(PLACE + prefix)
    (tmp_path / "file").write_bytes(b"some bytes")
    for name in ("step-00000001/shard-0", "step-00000001/manifest.json", "latest.json"):
        place.put(tmp_path / "file", name)
    assert place.names("step-") == ["step-00000001/manifest.json", "step-00000001/shard-0"]
    place.get("step-00000001/shard-0", tmp_path / "new" / "folder" / "file")
    assert (tmp_path / "new/folder/file").read_bytes() == b"some bytes"
    place.delete("latest.json")
    place.delete("latest.json")
    assert place.names("l") == []
    with pytest.raises(FileNotFoundError, match=r"has no latest\.json"):
        place.get("latest.json", tmp_path / "latest")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "new"]


@pytest.mark.parametrize(
    "uri",
    [
        f"https://{HOST}/{CONTAINER}/a/b%20c",
        f"HTTPS://{HOST.upper()}/{CONTAINER}/a/b c/",
        f"abfss://{CONTAINER}@{ACCOUNT}.dfs.core.windows.net/a/b c",
        f"wasbs://{CONTAINER}@{HOST}/a/b c",
    ],
)
def test_all_address_forms_reach_the_same_place(uri: str, store: Azure, tmp_path: Path) -> None:
    """Every address form of Azure reaches the same place, with the job's own folder below."""
    (tmp_path / "file").touch()
    opened(str(published.of_job(uri, "digits-1"))).put(tmp_path / "file", "empty")
    assert store.blobs() == ["a/b c/digits-1/empty"]
    opened(f"{PLACE}/a/b c").get("digits-1/empty", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b""


def test_names_do_not_mix_jobs_in_a_container(store: Azure, tmp_path: Path) -> None:
    """`names` lists neither objects of a job whose name has the same beginning, nor folder markers of any kind."""
    from azure.storage.blob import ContainerClient

    (tmp_path / "file").touch()
    for job in ("digits", "digits-2", "digits/below"):
        opened(f"{PLACE}/{job}").put(tmp_path / "file", f"{job[-1]}-file")
    url = f"https://{HOST}"
    with ContainerClient(url, CONTAINER, {"account_name": ACCOUNT, "account_key": ACCOUNT_KEY}) as client:
        client.upload_blob("digits/folder", b"", metadata={"hdi_isfolder": "true"})
    assert opened(f"{PLACE}/digits").names("") == ["below/w-file", "s-file"]
    assert opened(f"{PLACE}/digits-2/").names("") == ["2-file"]


def test_names_go_over_all_pages(store: Azure) -> None:
    """Azure returns five thousand names per page, and `names` reads all pages."""
    names = [f"step-{number:08d}/shard" for number in range(5005)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: store.put_blob(f"many/{name}", b""), names))
    assert opened(f"{PLACE}/many").names("step-") == names
    assert opened(f"{PLACE}/many").names("step-00005") == names[5000:]
    assert len(store.journal("blob.list")) == 3


def test_large_file_goes_in_blocks(brisk: None, store: Azure, file: Path) -> None:
    """A large file is uploaded in blocks and read back whole in ranges; a second put replaces the blob."""
    place = opened()
    place.put(file, "shard")
    assert sorted(call["received"] for call in store.journal("blob.put_block")) == [7, *[MIB] * 5]
    place.get("shard", file.with_name("back"))
    assert file.with_name("back").read_bytes() == file.read_bytes()
    assert len(store.journal("blob.get")) == 6
    file.write_bytes(file.read_bytes()[: 2 * MIB])
    place.put(file, "shard")
    place.get("shard", file.with_name("back"))
    assert file.with_name("back").read_bytes() == file.read_bytes()


def test_file_of_any_size_fits(brisk: None, store: Azure, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A blob has a limited number of blocks, so the blocks grow for a large file."""
    monkeypatch.setattr(azure, "_MOST_BLOCKS", 3)
    opened().put(file, "shard")
    assert len(store.journal("blob.put_block")) == 3
    assert store.blob("x/shard") == file.read_bytes()


STUMBLES: list[tuple[str, dict[str, Any]]] = [
    ("drop", {}),
    ("lost", {}),
    ("throttle", {}),
    ("500", {}),
    ("error", {"status": 429, "code": "TooManyRequests"}),
    ("cut", {}),
]


@pytest.mark.parametrize(("kind", "details"), STUMBLES, ids=[kind for kind, _ in STUMBLES])
def test_failing_server_is_retried(
    kind: str, details: dict[str, Any], brisk: None, store: Azure, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one request in four closed, lost, cut or refused by the server, all files arrive whole."""
    monkeypatch.setattr(azure_access, "ATTEMPTS", 8)
    monkeypatch.setattr(azure, "_BODY_ATTEMPTS", 8)
    (file.parent / "small").write_bytes(b"some bytes")
    place = opened()
    store.fault("blob.*", kind, every=4, **details)
    place.put(file, "file")
    place.put(file.parent / "small", "small")
    assert place.names("") == ["file", "small"]
    for name in ("file", "small"):
        place.get(name, file.parent / "back" / name)
        assert (file.parent / "back" / name).read_bytes() == (file.parent / name).read_bytes()
    assert sorted(path.name for path in (file.parent / "back").iterdir()) == ["file", "small"]
    place.delete("small")
    assert place.names("") == ["file"]
    assert sum(call["outcome"] == kind for call in store.journal()) > 3


@pytest.mark.parametrize("operation", ["blob.put", "blob.put_block", "blob.put_blocklist", "blob.delete"])
def test_lost_answers_do_no_harm(operation: str, brisk: None, store: Azure, file: Path) -> None:
    """A request whose answer was lost is sent again with the same result."""
    (file.parent / "small").write_bytes(b"some bytes")
    store.fault(operation, "lost", count=2)
    place = opened()
    place.put(file, "file")
    place.put(file.parent / "small", "small")
    assert store.blob("x/file") == file.read_bytes()
    place.delete("small")
    assert place.names("") == ["file"]
    assert len(store.journal(operation)) >= 3


def test_failed_upload_leaves_nothing(brisk: None, store: Azure, file: Path) -> None:
    """A block that always fails raises an error, leaves no object, and stops before all blocks were tried."""
    store.fault("blob.put_block", "500")
    with pytest.raises(OSError, match=r"InternalError: The server encountered an internal error"):
        opened().put(file, "shard")
    assert opened().names("") == []
    assert len(store.journal("blob.put_block")) <= 4 * 3


def test_failed_download_leaves_nothing(brisk: None, store: Azure, file: Path) -> None:
    """If every body breaks off, the download raises an error and leaves neither the file nor a partial file."""
    place = opened()
    place.put(file, "shard")
    store.fault("blob.get", "cut")
    with pytest.raises(ConnectionError, match=r"does not answer; is the account's name right"):
        place.get("shard", file.parent / "back" / "file")
    assert list((file.parent / "back").iterdir()) == []


KILLED = """
import os, sys, threading, time
from pathlib import Path
from cloudtrain.entrypoints.stores import azure as azureblob, store
azureblob._BLOCK_BYTES = 1 << 20
store.open_store(sys.argv[1]).put(Path(sys.argv[2]), "shard")
"""


@pytest.mark.parametrize("operation", ["blob.put_block", "blob.put_blocklist"])
def test_killed_upload_is_not_seen(
    operation: str, brisk: None, store: Azure, file: Path, wait_until: Callable[..., Any]
) -> None:
    """A put killed in the middle leaves no visible object; the next put is whole despite uncommitted blocks."""
    store.fault(operation, "drop", after=2 if operation == "blob.put_block" else 0)
    process = subprocess.Popen([sys.executable, "-c", KILLED, f"{PLACE}/x", file])
    wait_until(lambda: any(call["outcome"] == "drop" for call in store.journal(operation)))
    process.kill()
    process.wait()
    store.clear_faults()
    place = opened()
    assert place.names("") == []
    with pytest.raises(FileNotFoundError, match="has no shard"):
        place.get("shard", file.with_name("back"))
    place.put(file, "shard")
    assert store.blob("x/shard") == file.read_bytes()


def test_bytes_corrupted_in_transit_are_found(
    brisk: None, store: Azure, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An MD5 travels with every upload and download; a wrong MD5 is an error, and the data is dropped."""
    place = opened()
    place.put(file, "file")
    (file.parent / "small").write_bytes(b"some bytes")
    monkeypatch.setattr("azure.storage.blob._shared.policies.calculate_content_md5", lambda data: b"0" * 16)
    for path in (file, file.parent / "small"):
        with pytest.raises(OSError, match="Md5Mismatch"):
            place.put(path, "other")
    with pytest.raises(OSError, match="MD5 mismatch"):
        place.get("file", file.with_name("back"))
    assert place.names("") == ["file"]


def test_object_replaced_during_a_get_is_not_mixed(
    brisk: None, store: Azure, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A get reads a single version, or raises an error."""
    place = opened()
    place.put(file, "shard")
    read = azure._read

    def replacing(*args: Any) -> bytes:
        store.put_blob("x/shard", bytes(6 * MIB))
        return read(*args)

    monkeypatch.setattr(azure, "_read", replacing)
    with pytest.raises(OSError, match="another process has written the same object meanwhile"):
        place.get("shard", file.with_name("back"))
    assert not file.with_name("back").exists()


@CALLS
def test_slow_server_is_given_up(call: str, hasty: None, store: Azure, file: Path) -> None:
    """A server that accepts the request but never answers costs the time of the attempts and raises an error."""
    opened().put(file, "name")
    store.clear_journal()
    store.fault("blob.*", "slow", delay_s=5.0)
    begin_s = time.monotonic()
    with pytest.raises(ConnectionError, match=rf"{PLACE}/x does not answer; .*Read timed out") as caught:
        calls(opened(), file)[call]()
    assert 1.4 < time.monotonic() - begin_s < 20
    assert len(store.journal()) >= 3
    assert "\n" not in str(caught.value)


@contextlib.contextmanager
def silent() -> Iterator[str]:
    """Yield the address of a server that accepts connections and reads no bytes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_silent_proxy_and_closed_port_are_given_up(hasty: None, store: Azure, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a key, so without a login: a proxy that never answers and a closed port both raise an error."""
    monkeypatch.setenv("AZURE_STORAGE_KEY", ACCOUNT_KEY)
    with silent() as address:
        for name in ("HTTPS_PROXY", "https_proxy"):
            monkeypatch.setenv(name, address)
        with pytest.raises(ConnectionError, match="does not answer"):
            opened().names("")
    with pytest.raises(ConnectionError, match="does not answer"):
        opened().names("")


def test_login_that_does_not_answer_is_given_up(hasty: None, store: Azure) -> None:
    """The wait for a token has time limits too, and does not start again for every attempt."""
    store.fault(["openid", "instance", "token"], "slow", delay_s=5.0)
    begin_s = time.monotonic()
    with pytest.raises(ConnectionError, match=r"the login for https://.* does not answer \(.*Read timed out"):
        opened().names("")
    assert time.monotonic() - begin_s < 30


def test_store_recovers_after_a_long_outage(brisk: None, store: Azure) -> None:
    """Failures use up no budget of retries: when the store answers again, failed requests are still retried."""
    place = opened()
    store.fault("blob.*", "500")
    for _ in range(5):
        with pytest.raises(OSError, match="InternalError"):
            place.names("")
    store.clear_faults()
    store.fault("blob.*", "drop", every=2)
    assert [place.names("") for _ in range(4)] == [[]] * 4


@CALLS
def test_missing_container_is_reported(call: str, store: Azure, file: Path) -> None:
    """One sentence with the container's name; a missing container is not reported as a missing object."""
    place = opened(f"https://{HOST}/no-such-container/x")
    with pytest.raises(OSError, match=rf"there is no container no-such-container in {HOST}; make it, or") as caught:
        calls(place, file)[call]()
    assert not isinstance(caught.value, FileNotFoundError)


@CALLS
def test_denied_access_names_the_missing_role(call: str, store: Azure, file: Path) -> None:
    """The message names the role for the job's identity; a denied get is not reported as a missing object."""
    store.settings(storage_role="none")
    wanted = r"no access to .*; the job's identity needs the role Storage Blob Data Contributor .*Mismatch"
    with pytest.raises(PermissionError, match=wanted):
        calls(opened(), file)[call]()


def test_reader_may_read(store: Azure, file: Path) -> None:
    """A role that may read is enough to resume; a write names the missing role."""
    store.put_blob("x/name", b"some bytes")
    store.settings(storage_role="reader")
    place = opened()
    place.get("name", file.with_name("back"))
    for call in ("put", "delete"):
        with pytest.raises(PermissionError, match="Storage Blob Data Contributor"):
            calls(place, file)[call]()


def test_foreign_404_does_not_mean_missing(brisk: None, store: Azure, tmp_path: Path) -> None:
    """A 404 from a proxy before Azure does not count as a missing object; only Azure's own error code does."""
    store.fault("blob.*", "error", status=404, code="Whatever", message="by the test")
    with pytest.raises(OSError, match="Whatever") as caught:
        opened().get("latest.json", tmp_path / "latest")
    assert not isinstance(caught.value, FileNotFoundError)


def test_missing_credentials_are_reported_and_may_come_later(store: Azure, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without credentials the error comes at once with advice; an identity added later serves the next call."""
    secret = os.environ["AZURE_CLIENT_SECRET"]
    monkeypatch.delenv("AZURE_CLIENT_SECRET")
    place = opened()
    begin_s = time.monotonic()
    with pytest.raises(PermissionError, match=r"there are no Azure credentials for https://.*give the machine a man"):
        place.names("")
    assert time.monotonic() - begin_s < 10
    monkeypatch.setenv("AZURE_CLIENT_SECRET", "another")
    with pytest.raises(PermissionError, match=r"gives the job's identity no token .*AADSTS7000215: Invalid client"):
        place.names("")
    monkeypatch.setenv("AZURE_CLIENT_SECRET", secret)
    assert place.names("") == []


def test_whole_credential_chain_is_asked(store: Azure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If a machine has no credentials, the message names the managed identity too, although later identities follow."""
    for name in ("AZURE_CLIENT_SECRET", "AZURE_TOKEN_CREDENTIALS"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("socket.socket.connect", lambda *args: (_ for _ in ()).throw(OSError("no network")))
    with pytest.raises(PermissionError, match=r"there are no Azure credentials .*\(ManagedIdentityCredential: "):
        opened().names("")


def test_identity_of_azure_ml_is_found(store: Azure, monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    """In a job's container MSI_ENDPOINT gives tokens of the job's identity, and a missing role is reported."""
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MSI_ENDPOINT", f"{store.url}/msi/token")
    monkeypatch.setenv("MSI_SECRET", MSI_SECRET)
    monkeypatch.setenv("DEFAULT_IDENTITY_CLIENT_ID", "of-the-cluster")
    opened().put(file, "name")
    assert opened().names("") == ["name"]
    assert {call["query"].get("clientid") for call in store.journal("msi.token")} == {"of-the-cluster"}
    store.settings(job_storage_role="reader")
    with pytest.raises(PermissionError, match="Storage Blob Data Contributor"):
        opened().put(file, "name")


def test_token_that_expires_is_renewed(store: Azure, file: Path) -> None:
    """A token is renewed shortly before its end; a token that Azure rejects is replaced for the next call."""
    store.settings(token_s=1.0)
    place = opened()
    place.put(file, "name")
    time.sleep(1.1)
    assert place.names("") == ["name"]
    store.settings(token_s=3600.0)
    assert place.names("") == ["name"]
    store.fault("blob.*", "expired")
    with pytest.raises(PermissionError, match=r"Azure rejects the job's identity for .*ExpiredAuth"):
        place.names("")
    assert place.names("") == ["name"]


def signature(permissions: str, lasts_s: float = 3600) -> str:
    """Return a SAS for the container."""
    from azure.storage.blob import generate_container_sas

    ends = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=lasts_s)
    made: str = generate_container_sas(ACCOUNT, CONTAINER, ACCOUNT_KEY, permission=permissions, expiry=ends)
    return made


def given(kind: str, permissions: str = "rwdl") -> dict[str, str]:
    """Return the environment variables that authorise a job."""
    connection = f"DefaultEndpointsProtocol=https;AccountName={ACCOUNT};AccountKey={ACCOUNT_KEY};"
    return {
        "connection": {"AZURE_STORAGE_CONNECTION_STRING": f"{connection}EndpointSuffix=core.windows.net"},
        "key": {"AZURE_STORAGE_KEY": ACCOUNT_KEY},
        "sas": {"AZURE_STORAGE_SAS_TOKEN": f"?{signature(permissions)}"},
        "connection with sas": {
            "AZURE_STORAGE_CONNECTION_STRING": f"BlobEndpoint=https://{HOST}/;SharedAccessSignature="
            + signature(permissions)
        },
    }[kind]


@pytest.mark.parametrize("kind", ["connection", "key", "sas", "connection with sas"])
def test_keys_and_signatures_open_the_container(
    kind: str, brisk: None, store: Azure, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and signatures come before the identity; an account that rejects keys raises an error with advice."""
    monkeypatch.delenv("AZURE_CLIENT_SECRET")
    for name, value in given(kind).items():
        monkeypatch.setenv(name, value)
    place = opened()
    place.put(file, "name")
    place.get("name", file.with_name("back"))
    assert place.names("") == ["name"]
    place.delete("name")
    assert store.journal("token") == []
    store.settings(storage_keys=False)
    with pytest.raises(PermissionError, match=rf"{HOST} rejects keys; give the job an identity .*not AZURE_STORAGE_"):
        place.names("")


def test_signature_is_in_no_message(hasty: None, store: Azure, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No error message contains the signature, and each message names its credentials."""
    told = []
    for token in (signature("rl"), signature("rwdl", -60), signature("rwdl").replace("sig=", "sig=x")):
        monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", token)
        with pytest.raises(PermissionError, match="AZURE_STORAGE_SAS_TOKEN") as caught:
            opened().put(file, "name")
        told.append(str(caught.value))
    store.fault("blob.*", "drop")
    with pytest.raises(ConnectionError, match="does not answer") as lost:
        opened().names("")
    with silent() as address:
        for name in ("HTTPS_PROXY", "https_proxy"):
            monkeypatch.setenv(name, address)
        with pytest.raises(ConnectionError, match="does not answer") as late:
            opened().names("")
    with pytest.raises(ConnectionError, match="does not answer") as closed:
        opened().names("")
    assert azure_access._plain(f"with url: /c?sv=1&{token} (Caused").endswith("sig=... (Caused")
    secrets = {part for part in token.split("&") if part.startswith("sig=")}
    for text in (*told, str(lost.value), str(late.value), str(closed.value)):
        assert not [secret for secret in secrets if secret in text]
        assert "\n" not in text


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("AZURE_STORAGE_KEY", "bm90IHRoZSBrZXk=", "Azure rejects AZURE_STORAGE_KEY for .*AuthenticationFailed"),
        ("AZURE_STORAGE_KEY", "no base64", "Azure rejects AZURE_STORAGE_KEY for "),
        ("AZURE_STORAGE_CONNECTION_STRING", "nonsense", "AZURE_STORAGE_CONNECTION_STRING is no connection string"),
        (
            "AZURE_STORAGE_CONNECTION_STRING",
            "AccountName=another;AccountKey=bm90IHRoZSBrZXk=",
            "AZURE_STORAGE_CONNECTION_STRING is of the account another, and https://",
        ),
    ],
)
def test_wrong_keys_are_reported(
    name: str, value: str, message: str, store: Azure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message contains the variable's name."""
    monkeypatch.setenv(name, value)
    begin_s = time.monotonic()
    with pytest.raises(PermissionError, match=message):
        opened().names("")
    assert time.monotonic() - begin_s < 10


WRONG = [
    ("https://example.com/container/x", "is no address of Azure's blob storage; write it as in https://ACCOUNT.blob"),
    ("https://a.dfs.core.windows.net/container/x", "is no address of Azure's blob storage"),
    ("https://a.blob.core.windows.net", "names no container"),
    ("https://a.blob.core.windows.net/", "names no container"),
    ("https://a.blob.core.windows.net/UPPER/x", "names no container"),
    ("https://a.blob.core.windows.net/two--dashes", "names no container"),
    ("abfss://a.dfs.core.windows.net/x", "is no address of Azure's blob storage"),
    ("abfss://@a.dfs.core.windows.net/x", "names no container"),
    ("wasbs://c@a.file.core.windows.net/x", "is no address of Azure's blob storage"),
    ("https://a.blob.core.windows.net/container/x?sv=1&sig=hidden", "contains a `\\?`: remove the query; a SAS is"),
]


@pytest.mark.parametrize(("uri", "message"), WRONG)
def test_foreign_addresses_are_refused(uri: str, message: str) -> None:
    """An error comes at once, shows the right form, and contains no secret from the address."""
    with pytest.raises(StoreError, match=message) as caught:
        opened(uri)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("suffix", ["core.windows.net", "core.chinacloudapi.cn", "core.usgovcloudapi.net"])
def test_clouds_have_their_own_names(suffix: str) -> None:
    """Addresses of every Azure cloud work, and of accounts in a zone of the name service."""
    for uri in (f"https://a.blob.{suffix}/con/x", f"abfss://con@a.dfs.{suffix}/x", f"wasbs://con@a.blob.{suffix}/x"):
        place = azure._place(uri)
        assert (place.host, place.account, place.container, place.prefix) == (f"a.blob.{suffix}", "a", "con", "x")
    assert azure._place("https://a.z01.blob.storage.azure.net/con").account == "a"


@pytest.mark.parametrize("missing", ["azure.identity", "azure.storage.blob", "azure.storage", "azure"])
def test_missing_packages_are_reported_with_the_command(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence gives the install command; errors inside installed packages are not hidden."""
    importing = builtins.__import__

    def lacking(absent: str, name: str, *args: Any) -> Any:
        if name.startswith("azure"):
            raise ModuleNotFoundError(f"No module named {absent!r}", name=absent)
        return importing(name, *args)

    monkeypatch.setattr(builtins, "__import__", functools.partial(lacking, missing))
    with pytest.raises(StoreError, match=r"`pip install azure-storage-blob azure-identity` on the machines"):
        opened()
    monkeypatch.setattr(builtins, "__import__", functools.partial(lacking, "isodate"))
    with pytest.raises(ModuleNotFoundError, match="isodate"):
        opened()


LOUD = """
import os, sys
from pathlib import Path
from cloudtrain.entrypoints.stores import azure_access as azureaccess, store
azureaccess.ATTEMPTS, azureaccess.PAUSE_S = 2, 0.01
place = store.open_store(sys.argv[1])
for secret in (os.environ.pop("AZURE_CLIENT_SECRET"), "wrong", None):
    for call in (lambda: place.names(""), lambda: place.get("name", Path(sys.argv[2]))):
        try:
            print(call())
        except OSError as error:
            print(type(error).__name__)
    os.environ["AZURE_CLIENT_SECRET"] = "wrong" if secret != "wrong" else sys.argv[3]
"""


def test_sdk_does_not_write_to_the_job_s_log(store: Azure, tmp_path: Path) -> None:
    """For all kinds of failures, without any logging setup, our errors appear but no lines of the SDK."""
    store.put_blob("x/name", b"some bytes")
    store.fault("blob.*", "cut")
    argv = [
        sys.executable,
        "-W",
        "always",
        "-c",
        LOUD,
        f"{PLACE}/x",
        tmp_path / "got",
        os.environ["AZURE_CLIENT_SECRET"],
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["PermissionError"] * 4 + ["ConnectionError"] * 2
    assert done.stderr == ""


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
told.append(peak_mib())
place.get("large", folder / "back")
told.append(peak_mib())
assert os.path.getsize(folder / "back") == int(sys.argv[3]) << 20
print(json.dumps(told))
"""


def test_memory_does_not_grow_with_the_file(store: Azure, tmp_path: Path) -> None:
    """A put holds a few blocks in memory, a get a few ranges."""
    argv = [sys.executable, "-c", MEMORY, f"{PLACE}/x", tmp_path, "192"]
    small, put, got = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
    assert put - small < 80
    assert got - put < 40


def save(home: Path, uploads: Uploader, *steps: int) -> None:
    """Save and upload one small checkpoint a step."""
    saver = Saver(home, torch.device("cpu"), 9, uploads)
    for step in steps:
        saver.begin(Snapshot(step, {"model.w": torch.arange(10.0) + step}, {}, {}, {"step": step, "job": "j"}))
        saver.wait()
        uploads.finish()


def test_container_keeps_the_right_number_of_checkpoints(alone: None, store: Azure, tmp_path: Path) -> None:
    """Retention works in the container and spares other jobs; a new machine fetches the newest checkpoint, intact."""
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


def test_damage_in_the_container_is_found(alone: None, store: Azure, tmp_path: Path) -> None:
    """If a byte changed in the container, the fetched checkpoint fails its check."""
    place = opened(f"{PLACE}/a")
    save(tmp_path / "first", Uploader(place, 2), 10)
    (shard,) = (name for name in place.names("step-") if "/shard-" in name)
    data = store.blob(f"a/{shard}")
    assert data is not None
    store.put_blob(f"a/{shard}", data[:-1] + bytes([data[-1] ^ 1]))
    fetched = published.fetch(place, tmp_path)
    assert fetched is not None
    assert "differs from the manifest" in str(loader.check(fetched))


def test_store_that_fails_publishes_nothing(alone: None, brisk: None, store: Azure, tmp_path: Path) -> None:
    """After a denied write the error is in words and the earlier step stays published; the next is published."""
    place = opened(f"{PLACE}/a")
    uploads = Uploader(place, 2)
    save(tmp_path / "first", uploads, 10)
    store.settings(storage_role="reader")
    save(tmp_path / "first", uploads, 20)
    store.settings(storage_role="contributor")
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
@pytest.mark.parametrize("strategy", ["fsdp"])  # every strategy uses the same store code; ddp is tested with a bucket
def test_killed_run_resumes_from_a_container_bit_for_bit(
    strategy: str, store: Azure, trained: ModuleType, tmp_path: Path
) -> None:
    """A run killed in step 13 resumes from the container's step 10 with identical numbers and tensors.

    The run's own folder is gone, and a fifth of the calls fail.
    """
    # Before the kill, rank 0's checkpoint has reached the container, even if the upload is slow today.
    wait = """            from cloudtrain.entrypoints.stores import store
            for _ in range(600):
                if store.open_store(os.environ["MIRROR"]).names("latest.json"):
                    break
                time.sleep(0.1)
            os.kill("""
    text = trained.TASK.replace("            os.kill(", wait, 1)
    whole = trained.run(tmp_path / "whole", strategy=strategy)
    store.fault("blob.*", "drop", every=10)
    store.fault("blob.*", "throttle", every=9)
    uri = f"abfss://{CONTAINER}@{ACCOUNT}.dfs.core.windows.net/a/b"
    settings: dict[str, Any] = {"strategy": strategy, "checkpoint": {"mirror": uri, "every_steps": 10}}
    env = {"MIRROR": f"{uri}/test"}
    killed = trained.run(tmp_path / "run", do="kill:1:26", text=text, env=env, **settings)
    assert killed.code != 0
    shutil.rmtree(tmp_path / "run/checkpoints")
    again = trained.run(tmp_path / "run", text=text, env=env, **settings)
    assert again.code == 0, again.errors
    assert (again.only("restart")["step"], again.only("restart")["changed"]) == (10, [])
    assert trained.joined(killed, again) == whole.values("step", "loss")
    assert trained.parameters(again) == trained.parameters(whole)
    assert {call["outcome"] for call in store.journal()} >= {"drop", "throttle"}


@pytest.mark.slow
def test_container_that_fails_does_not_end_the_training(store: Azure, trained: ModuleType, tmp_path: Path) -> None:
    """A denied write is reported in a sentence and training continues; a missing container ends the start."""
    store.settings(storage_role="reader")
    done = trained.run(tmp_path / "run", checkpoint={"mirror": f"{PLACE}/a"})
    assert (done.code, done.outcome()["outcome"]) == (0, "done"), done.errors
    assert "the mirror has no copy of step 16: PermissionError: no access to https://" in done.output
    assert "azure" not in done.errors.lower()
    gone = trained.run(tmp_path / "gone", checkpoint={"mirror": f"https://{HOST}/no-such-container"})
    assert gone.code != 0
    assert "TaskError: there is no container no-such-container in " in gone.errors
    assert gone.values("step", "loss") == {}
