"""Blobs of Azure's stand-in: the unmodified client, authorization, conditions, ranges, pages."""

from __future__ import annotations

import time
import urllib.parse
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest

from doubles.azure.handle import Azure
from doubles.azure.names import ACCOUNT, ACCOUNT_KEY, CONTAINER, REGION, workspace_id

if TYPE_CHECKING:
    from azure.storage.blob import ContainerClient

URL = f"https://{ACCOUNT}.blob.core.windows.net"
# The clients keep connections open, and do not close them at the end of their life.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def container(azure: Azure, monkeypatch: pytest.MonkeyPatch) -> Iterator[ContainerClient]:
    """Return azure-storage-blob's client of workspaceblobstore's container, by the account's key."""
    azure.apply(monkeypatch)
    with client(ACCOUNT_KEY) as found:
        yield found


def client(credential: Any) -> ContainerClient:
    """Return a client without retries."""
    from azure.storage.blob import ContainerClient

    return ContainerClient(URL, CONTAINER, credential=credential, retry_total=0, max_single_put_size=1000)


def signed(azure: Azure, name: str, **changes: str) -> str:
    """Return a URL with a signature of the real client, changed afterwards."""
    from azure.storage.blob import generate_blob_sas

    soon = datetime.now(timezone.utc) + timedelta(minutes=5)
    query = generate_blob_sas(ACCOUNT, CONTAINER, name, account_key=ACCOUNT_KEY, permission="r", expiry=soon)
    told = {**dict(urllib.parse.parse_qsl(query)), **changes}
    return f"{URL}/{CONTAINER}/{name}?{urllib.parse.urlencode(told)}"


def get(azure: Azure, url: str, **headers: str) -> Any:
    """GET without any authorization but the address's."""
    return azure.call(
        "GET", url, audience=None, headers={key.replace("_", "-"): value for key, value in headers.items()}
    )


def test_client_with_the_key_writes_reads_lists_and_removes(container: ContainerClient) -> None:
    """SharedKey is verified for names with quoted characters, too."""
    container.upload_blob("a b/ü+%.bin", b"0123456789", metadata={"k": "v"})
    blob = container.get_blob_client("a b/ü+%.bin")
    assert blob.get_blob_properties().metadata == {"k": "v"}
    assert blob.download_blob(2, 3).readall() == b"234"
    assert [item.name for item in container.list_blobs()] == ["a b/ü+%.bin"]
    blob.delete_blob()
    assert not blob.exists()


def test_wrong_key_is_refused(azure: Azure, container: ContainerClient) -> None:
    """A wrong key is refused with Azure's code and status."""
    from azure.core.exceptions import ClientAuthenticationError

    with client("d3Jvbmcga2V5") as other, pytest.raises(ClientAuthenticationError) as caught:
        other.upload_blob("a", b"1")
    assert (caught.value.status_code, caught.value.error_code) == (403, "AuthenticationFailed")


def test_big_blob_is_sent_in_blocks_and_read_in_ranges(azure: Azure, container: ContainerClient) -> None:
    """The client uploads in blocks and downloads in ranges by its own choice."""
    data = bytes(range(256)) * 20
    container.upload_blob("big", data, max_concurrency=2)
    assert azure.journal("blob.put_blocklist")
    assert container.download_blob("big").readall() == data == azure.blob("big")


def test_only_a_token_of_the_storage_audience_reads(azure: Azure) -> None:
    """A token of the storage audience reads; the challenge for a wrong token names the audience."""
    azure.put_blob("a", b"1")
    url, version = f"{URL}/{CONTAINER}/a", {"x-ms-version": "2023-11-03"}
    assert azure.call("GET", url, audience="https://storage.azure.com", headers=version).body == b"1"
    refused = azure.call("GET", url, audience="https://management.azure.com", headers=version)
    assert refused.status == 401
    assert "resource_id=https://storage.azure.com" in refused.headers["www-authenticate"]


def test_user_without_a_role_is_refused(azure: Azure) -> None:
    """A reader may read but not write; a user without a role may not read either."""
    url, storage = f"{URL}/{CONTAINER}/a", "https://storage.azure.com"
    put = {"x-ms-blob-type": "BlockBlob"}
    azure.put_blob("a", b"1")
    azure.settings(storage_role="reader")
    assert azure.call("GET", url, audience=storage).status == 200
    assert azure.call("PUT", url, b"2", audience=storage, headers=put).status == 403
    azure.settings(storage_role="none")
    refused = azure.call("GET", url, audience=storage)
    assert (refused.status, refused.headers["x-ms-error-code"]) == (403, "AuthorizationPermissionMismatch")


def test_signature_is_verified(azure: Azure) -> None:
    """The real client's signature is valid; a changed signature is refused."""
    azure.put_blob("a", b"1")
    azure.put_blob("b", b"2")
    assert get(azure, signed(azure, "a")).body == b"1"
    for url in (
        signed(azure, "a", sp="rw"),
        signed(azure, "a", se="2099-01-01T00:00:00Z"),
        signed(azure, "a").replace("/a?", "/b?"),
    ):
        refused = get(azure, url)
        assert (refused.status, refused.headers["x-ms-error-code"]) == (403, "AuthenticationFailed")
        assert b"<Code>AuthenticationFailed</Code>" in refused.body


def test_signature_is_limited_to_its_permissions_and_time(azure: Azure) -> None:
    """A signature for reading does not allow writing, and expires after its time."""
    azure.put_blob("a", b"1")
    put = {"x-ms-blob-type": "BlockBlob"}
    refused = azure.call("PUT", signed(azure, "a"), b"2", audience=None, headers=put)
    assert (refused.status, refused.headers["x-ms-error-code"]) == (403, "AuthorizationPermissionMismatch")
    azure.settings(sas_s=0.2, execute=False)
    azure.submit("job", "true")
    azure.write_log("job", "user_logs/std_log.txt", "line\n")
    url = details(azure, "job")["logFiles"]["user_logs/std_log.txt"]
    assert get(azure, url).body == b"line\n"
    time.sleep(0.3)
    assert get(azure, url).status == 403


def test_account_without_keys_refuses_signatures(azure: Azure) -> None:
    """An account for identities only refuses signatures by key."""
    azure.put_blob("a", b"1")
    azure.settings(storage_keys=False)
    refused = get(azure, signed(azure, "a"))
    assert (refused.status, refused.headers["x-ms-error-code"]) == (403, "KeyBasedAuthenticationNotPermitted")


def test_ranges_follow_azures_rules(azure: Azure) -> None:
    """Ranges are answered with 206 and Content-Range, or 416 past the end; suffix ranges are refused."""
    azure.put_blob("a", b"0123456789")
    url = signed(azure, "a")
    part = get(azure, url, Range="bytes=2-3")
    assert (part.status, part.body, part.headers["content-range"]) == (206, b"23", "bytes 2-3/10")
    assert get(azure, url, x_ms_range="bytes=8-").body == b"89"
    assert get(azure, url, Range="bytes=8-100").headers["content-range"] == "bytes 8-9/10"
    past = get(azure, url, Range="bytes=10-")
    assert (past.status, past.headers["x-ms-error-code"]) == (416, "InvalidRange")
    assert past.headers["content-range"] == "bytes */10"
    assert get(azure, url, Range="bytes=-2").status == 400


def test_conditional_writes_are_checked(container: ContainerClient) -> None:
    """If-None-Match: * protects an existing blob, If-Match a changed blob."""
    from azure.core import MatchConditions
    from azure.core.exceptions import ResourceExistsError, ResourceModifiedError

    first = container.upload_blob("a", b"1").get_blob_properties().etag
    with pytest.raises(ResourceExistsError) as caught:
        container.upload_blob("a", b"2", overwrite=False)
    assert caught.value.error_code == "BlobAlreadyExists"
    container.upload_blob("a", b"2", overwrite=True)
    blob = container.get_blob_client("a")
    with pytest.raises(ResourceModifiedError) as late:
        blob.upload_blob(b"3", overwrite=True, etag=first, match_condition=MatchConditions.IfNotModified)
    assert late.value.error_code == "ConditionNotMet"
    assert blob.download_blob().readall() == b"2"


def test_list_has_pages_and_folders(container: ContainerClient) -> None:
    """Lists have a prefix, a delimiter, and a marker."""
    for name in ("a/1", "a/2", "b/c/3", "b/4", "d"):
        container.upload_blob(name, b"x")
    assert [item.name for item in container.walk_blobs(delimiter="/")] == ["a/", "b/", "d"]
    assert [item.name for item in container.list_blobs(name_starts_with="b/")] == ["b/4", "b/c/3"]
    pages = [[item.name for item in page] for page in container.list_blobs(results_per_page=2).by_page()]
    assert pages == [["a/1", "a/2"], ["b/4", "b/c/3"], ["d"]]


def test_missing_blob_is_not_found(container: ContainerClient) -> None:
    """A missing blob raises BlobNotFound."""
    from azure.core.exceptions import ResourceNotFoundError

    with pytest.raises(ResourceNotFoundError) as caught:
        container.download_blob("none")
    assert caught.value.error_code == "BlobNotFound"


def test_unknown_host_is_recorded(azure: Azure) -> None:
    """The proxy answers 502 and the journal has the host."""
    with pytest.raises(OSError, match="502"):
        azure.call("GET", "https://elsewhere.blob.core.windows.net/c/b", audience=None)
    assert azure.unserved() == ["elsewhere.blob.core.windows.net"]


def details(azure: Azure, job: str) -> dict[str, Any]:
    """Return run history's description of a job."""
    url = f"https://{REGION}.api.azureml.ms/history/v1.0{workspace_id()}/runs/{job}/details"
    return azure.call("GET", url).json
