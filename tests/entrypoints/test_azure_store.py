"""An Azure container as the mirror of checkpoints, with the real SDK against Azure's stand-in."""

import datetime
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints.checkpoints.mirror import open_mirror
from cloudtrain.entrypoints.format import one_line
from cloudtrain.entrypoints.stores import azure
from cloudtrain.entrypoints.stores.store import Store, open_store
from doubles.azure.handle import Azure
from doubles.azure.names import ACCOUNT, ACCOUNT_KEY, CONTAINER, MSI_SECRET

pytestmark = pytest.mark.usefixtures("brisk")
MIB = 1 << 20
HOST = f"{ACCOUNT}.blob.core.windows.net"
PLACE = f"https://{HOST}/{CONTAINER}"


@pytest.fixture
def store(azure: Azure, monkeypatch: pytest.MonkeyPatch) -> Azure:
    """Return Azure's stand-in; the environment leads this process and its children to the stand-in."""
    for name in [name for name in os.environ if name.startswith(("AZURE_", "MSI_", "IDENTITY_"))]:
        monkeypatch.delenv(name)
    azure.apply(monkeypatch)
    return azure


def opened(uri: str = f"{PLACE}/x") -> Store:
    """Return the store as the trainer opens it."""
    return open_store(uri)


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
    place = open_mirror(uri, "digits-1")
    assert place is not None
    place.put(tmp_path / "file", "empty")
    assert store.blobs() == ["a/b c/digits-1/empty"]
    opened(f"{PLACE}/a/b c").get("digits-1/empty", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b""


def test_large_file_goes_in_blocks(store: Azure, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large file is uploaded in blocks, and read in ranges; a blob has a limited number of blocks, which grow."""
    place = opened()
    place.put(file, "shard")
    assert sorted(call["received"] for call in store.journal("blob.put_block")) == [7, *[MIB] * 5]
    place.get("shard", file.with_name("back"))
    assert len(store.journal("blob.get")) == 6
    store.clear_journal()
    monkeypatch.setattr(azure, "_MOST_BLOCKS", 3)
    place.put(file, "shard")
    assert len(store.journal("blob.put_block")) == 3
    assert store.blob("x/shard") == file.read_bytes()


def test_object_replaced_during_a_get_is_not_mixed(store: Azure, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with monkeypatch.context() as patch:
        patch.setattr("socket.socket.connect", lambda *args: (_ for _ in ()).throw(OSError("no network")))
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
    kind: str, store: Azure, file: Path, monkeypatch: pytest.MonkeyPatch
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
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections, and reads no bytes
        for name in ("HTTPS_PROXY", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ConnectionError, match="does not answer") as late:
            opened().names("")
    with pytest.raises(ConnectionError, match="does not answer") as closed:
        opened().names("")
    assert one_line(f"with url: /c?sv=1&{token} (Caused").endswith("sig=... (Caused")
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


@pytest.mark.parametrize("suffix", ["core.windows.net", "core.chinacloudapi.cn", "core.usgovcloudapi.net"])
def test_clouds_have_their_own_names(suffix: str) -> None:
    """Addresses of every Azure cloud work, and of accounts in a zone of the name service."""
    for uri in (f"https://a.blob.{suffix}/con/x", f"abfss://con@a.dfs.{suffix}/x", f"wasbs://con@a.blob.{suffix}/x"):
        place = azure._place(uri)
        assert (place.host, place.account, place.container, place.prefix) == (f"a.blob.{suffix}", "a", "con", "x")
    assert azure._place("https://a.z01.blob.storage.azure.net/con").account == "a"


LOUD = """
import os, sys
from pathlib import Path
from cloudtrain.entrypoints.stores import azure as azureaccess, store
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
    words = [LOUD, f"{PLACE}/x", tmp_path / "got", os.environ["AZURE_CLIENT_SECRET"]]
    argv = [sys.executable, "-W", "always", "-c", *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["PermissionError"] * 4 + ["ConnectionError"] * 2
    assert done.stderr == ""
